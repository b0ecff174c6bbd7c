"""What MMEngine reads from dicts key by key, written as the functions that would take them as arguments."""


def env_cfg(cudnn_benchmark: bool, mp_cfg: dict, dist_cfg: dict, resource_limit: int) -> None:
    """Take what ``Runner.setup_env`` reads."""


def dist_cfg(backend: str | None, timeout: float | None, port: int | None, init_backend: str) -> None:
    """Take what joins the process group."""


def auto_scale_lr(enable: bool, base_batch_size: int) -> None:
    """Take what ``Runner.scale_lr`` reads."""
