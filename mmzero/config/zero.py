"""The config of one ZeroModelWrapper."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mmzero.config.checkpointing import CheckpointingConfig
from mmzero.config.compile import CompileConfig
from mmzero.config.engine_options import SECTION, engine_options, fill_from_options, without_auto
from mmzero.config.overrides import OverrideConfig, check_overrides
from mmzero.config.policy import wrap_policy
from mmzero.config.reader import (
    Faults,
    ListOf,
    flag,
    is_number,
    module_patterns,
    one_of,
    option,
    optional_dtype,
    optional_flag,
    read_fields,
    size,
)


@dataclass(frozen=True)
class MeshConfig:
    """How the ranks are arranged: ``replicate`` groups of ``shard`` ranks each (HSDP where both exceed 1).

    Args:
        replicate (int): Number of groups that hold a full copy each. Defaults to 1.
        shard (int): Ranks that share one copy; -1 is the rest of the world. Defaults to -1.
    """

    replicate: int = option(1, size)
    shard: int = option(-1, size)

    def sizes(self, world_size: int) -> tuple[int, int]:
        """Resolve -1 and check that the mesh fills the world.

        Args:
            world_size (int): Number of ranks.

        Returns:
            tuple[int, int]: Sizes of the replicate and the shard dimension.

        Raises:
            ValueError: If their product is not the world size.
        """
        replicate, shard = self.replicate, self.shard
        if replicate == -1 and shard == -1:
            raise ValueError('replicate and shard are both -1; give one of them')
        if replicate == -1:
            replicate = max(world_size // shard, 1)
        if shard == -1:
            shard = max(world_size // replicate, 1)
        if replicate * shard != world_size:
            raise ValueError(
                f'replicate x shard = {replicate} x {shard} = {replicate * shard} does not fill '
                f'{world_size} rank(s); give sizes whose product is {world_size}'
            )
        return replicate, shard


@dataclass(frozen=True)
class PrecisionConfig:
    """Data types of the sharded units (``torch.distributed.fsdp.MixedPrecisionPolicy``).

    Args:
        param_dtype (torch.dtype, optional): In which the policy's units are gathered and computed, under
            autocast; the root's remainder stays as it is. Defaults to None: ``optim_wrapper.dtype``.
        reduce_dtype (torch.dtype): In which gradients are reduced. Defaults to float32.
        output_dtype (torch.dtype, optional): To which a unit's floating outputs are cast. Defaults to None.
        keep_fp32 (tuple[str, ...]): Patterns on the names of modules that are gathered in float32 inside of units of
            ``param_dtype``, each as a unit of its own, which costs its own collectives. Defaults to none: autocast
            runs norms and losses in float32 over 16-bit weights.
    """

    param_dtype: torch.dtype | None = option(None, optional_dtype)
    reduce_dtype: torch.dtype | None = option(torch.float32, optional_dtype)
    output_dtype: torch.dtype | None = option(None, optional_dtype)
    keep_fp32: tuple[str, ...] = option((), module_patterns)


def offload_place(value: Any) -> str | None:
    """A reader for where something is offloaded to."""
    return one_of(None, 'cpu', 'nvme')(value)


def optional_path(value: Any) -> str | None:
    """A reader for a path or None."""
    if value is None or isinstance(value, str) and value:
        return value
    raise ValueError("expected None or a path, such as '/local_nvme'")


def optional_seconds(value: Any) -> float | None:
    """A reader for a time or None."""
    if value is None or is_number(value) and 1 <= value < float('inf'):
        return value
    raise ValueError('expected None or a number of seconds, 1 or more')


def children_apart(value: Any) -> bool | dict[str, torch.dtype | None]:
    """A reader for ``separate``: whether, or the children and the dtype of each one's units."""
    if isinstance(value, bool):
        return value
    if isinstance(value, Mapping) and value and all(isinstance(name, str) for name in value):
        return {name: optional_dtype(dtype) for name, dtype in value.items()}
    raise ValueError(
        "expected True, False, or a dict from a child's name to a dtype, such as dict(generator='bfloat16')"
    )


@dataclass(frozen=True)
class OffloadConfig:
    """What leaves the GPU between its uses.

    An optimizer steps where its parameters lie, so that FSDP2 keeps shards, their gradients and the optimizer's state
    together: either of the two fields moves all three. DeepSpeed steps masters of its own: the fields are two things.

    Args:
        params (str, optional): Where parameters go: 'cpu' or 'nvme'. Defaults to None: they stay.
        optimizer (str, optional): Where optimizer state goes: 'cpu' or 'nvme'. Defaults to None: it stays.
        nvme_path (str, optional): A folder on the NVMe disk, for 'nvme'. Defaults to None.
    """

    params: str | None = option(None, offload_place)
    optimizer: str | None = option(None, offload_place)
    nvme_path: str | None = option(None, optional_path)

    @property
    def to_host(self) -> bool:
        """Whether anything goes to host memory."""
        return 'cpu' in (self.params, self.optimizer)

    @property
    def to_disk(self) -> bool:
        """Whether anything goes to a disk."""
        return 'nvme' in (self.params, self.optimizer)


@dataclass(frozen=True)
class ZeroConfig:
    """Fields of ``model_wrapper_cfg``, without ``type`` and ``module``.

    Args:
        stage (int): ZeRO stage: 0 (DDP), 1, 2 or 3. Defaults to 3.
        engine (str): What does the sharding. Defaults to 'fsdp2'.
        mesh (MeshConfig): Arrangement of the ranks.
        wrap_policy: Name, dict, list or callable that says which modules are units
            (:func:`mmzero.policies.build_policy`). None: the whole model is one unit. Defaults to 'AutoPolicy'.
        overrides (tuple[OverrideConfig, ...]): Rules for single units; later entries win, field by field.
        precision (PrecisionConfig): Data types of the units.
        offload (OffloadConfig): What leaves the GPU between its uses.
        activation_checkpointing (CheckpointingConfig): What is recomputed in backward: a list of names of modules, as
            MMEngine's key of that name, or a dict. Blocks with ``with_cp=True`` are found by themselves.
        compile (CompileConfig): How torch.compile compiles units, each by itself: True, or a dict. Defaults to False.
        separate (bool or dict[str, torch.dtype or None]): Whether each child module with trained parameters is a model
            of its own, as under MMSeparateDistributedDataParallel, for a model whose ``train_step`` takes several
            optimizers. A dict gives the ``param_dtype`` of some children's units. Defaults to False.
        find_unused_parameters (bool): As MMDistributedDataParallel's argument. Defaults to False.
        broadcast_buffers (bool): As DDP's argument, at every stage: before a forward of training, once per optimizer
            step, every rank gets rank 0's buffers. Defaults to False, as MMEngine sets it.
        static_graph (bool, optional): DDP's own argument, stage 0 only. Defaults to None.
        no_sync (bool): Whether gradients of micro-batches before the last stay where they are, unsharded, so that
            each unit reduces once per optimizer step: 4 bytes per parameter more on every rank. Stage 3 only, since
            stages 0 and 1 do it by themselves, and stage 2 would be stage 1. Defaults to False.
        detect_anomaly (bool): Whether a step that is skipped for gradients that are not finite is told with the module
            in which nan or inf began; costs a pass over every output and gradient of a module. Defaults to False.
        expandable_segments (bool): Whether CUDA's allocator grows its segments, so that memory is not lost between
            blocks of many sizes, as images of many sizes and gathered units are. Nothing to do on a CPU. Defaults to
            False: as ``PYTORCH_ALLOC_CONF`` says.
        watch (float, optional): Seconds after which ranks that wait for each other at different places end, with an
            error that names the places; None: they wait for the process group's timeout. Defaults to 60.
        engine_options (dict or str): DeepSpeed's own config, or the path of a JSON file that holds it; for
            engine='deepspeed' ([Note: what a ds_config says that mmzero says too]). Defaults to None.
    """

    stage: int = option(3, one_of(0, 1, 2, 3))
    engine: str = option('fsdp2', one_of('fsdp2', 'deepspeed'))
    mesh: MeshConfig = option(MeshConfig(), MeshConfig)
    wrap_policy: Any = option('AutoPolicy', wrap_policy)
    overrides: tuple[OverrideConfig, ...] = option((), ListOf(OverrideConfig))
    precision: PrecisionConfig = option(PrecisionConfig(), PrecisionConfig)
    offload: OffloadConfig = option(OffloadConfig(), OffloadConfig)
    activation_checkpointing: CheckpointingConfig = option(CheckpointingConfig(), CheckpointingConfig)
    compile: CompileConfig = option(CompileConfig(), CompileConfig)
    separate: bool | dict[str, torch.dtype | None] = option(False, children_apart)
    find_unused_parameters: bool = option(False, flag)
    broadcast_buffers: bool = option(False, flag)
    static_graph: bool | None = option(None, optional_flag)
    no_sync: bool = option(False, flag)
    detect_anomaly: bool = option(False, flag)
    expandable_segments: bool = option(False, flag)
    watch: float | None = option(60.0, optional_seconds)
    engine_options: Mapping[str, Any] | None = option(None, engine_options)


def read_zero_config(cfg: dict, path: str, faults: Faults) -> ZeroConfig:
    """Read the fields of ``model_wrapper_cfg``.

    Args:
        cfg (dict): The fields; not changed.
        path (str): The config path of ``cfg``.
        faults (Faults): Takes what is wrong.

    Returns:
        ZeroConfig: The config, with defaults where a field has a fault.
    """
    cfg = fill_from_options(_as_of_fsdp(cfg, path, faults), path, faults)
    config = read_fields(ZeroConfig, cfg, path, faults)
    _refuse_offload(config, f'{path}.offload', faults)
    if config.engine_options and config.engine != 'deepspeed':
        faults.add(f'{path}.engine_options', "is DeepSpeed's config, and the engine is 'fsdp2'; add engine='deepspeed'")
    # A wrong stage is a fault of its own; the default in its place says nothing about DDP's arguments.
    if config.stage != cfg.get('stage', config.stage):
        return config
    check_overrides(config.overrides, config.stage, f'{path}.overrides', faults, config.compile.is_asked)
    if config.no_sync and config.stage != 3:
        advice = 'is what stage=1 does; use stage=1' if config.stage == 2 else 'is done by itself; remove it'
        faults.add(f'{path}.no_sync', f'at stage={config.stage} it {advice}')
    if config.stage == 0:
        _refuse_at_stage_0(config, path, faults)
    elif config.static_graph:
        faults.add(f'{path}.static_graph', f'is an argument of DDP and needs stage=0; got stage={config.stage}')
    return config


_OF_FSDP = dict(
    sharding_strategy='say stage=3 for FULL_SHARD, stage=2 for SHARD_GRAD_OP, stage=0 for NO_SHARD, and '
    'mesh=dict(replicate=...) for the hybrid ones',
    mixed_precision="say precision=dict(param_dtype=..., reduce_dtype=...) with optim_wrapper.dtype='bfloat16'",
    cpu_offload="say offload=dict(params='cpu', optimizer='cpu')",
    use_orig_params='parameters always keep their names and shapes; remove it',
    limit_all_gathers='FSDP2 does so by itself; remove it',
    sync_module_states='every rank gets the values of rank 0; remove it',
    backward_prefetch='FSDP2 prefetches by itself; remove it',
    forward_prefetch='FSDP2 prefetches by itself; remove it',
    ignored_modules='say overrides=[dict(units=..., shard=False)]',
    param_init_fn='ranks other than 0 build on meta and get the values of rank 0; remove it',
    device_id='ranks find their device; remove it',
    process_group='say mesh=dict(replicate=..., shard=...)',
)
"""Arguments of MMFullyShardedDataParallel, and what stands for them here."""


def _as_of_fsdp(cfg: dict, path: str, faults: Faults) -> dict:
    """Take MMFullyShardedDataParallel's name of ``wrap_policy``, and refuse its other arguments by name."""
    for name in _OF_FSDP.keys() & cfg.keys():
        faults.add(f'{path}.{name}', f'is an argument of MMFullyShardedDataParallel; {_OF_FSDP[name]}')
    cfg = {key: value for key, value in cfg.items() if key not in _OF_FSDP}
    if 'auto_wrap_policy' in cfg and 'wrap_policy' in cfg:
        faults.add(f'{path}.auto_wrap_policy', "is MMFullyShardedDataParallel's name of wrap_policy; give one of them")
    return {'wrap_policy' if key == 'auto_wrap_policy' else key: value for key, value in cfg.items()}


def _refuse_offload(config: ZeroConfig, path: str, faults: Faults) -> None:
    offload, stage = config.offload, config.stage
    places = {name: getattr(offload, name) for name in ('params', 'optimizer')}
    for name, place in places.items():
        if place == 'nvme' and config.engine != 'deepspeed':
            faults.add(f'{path}.{name}', "'nvme' needs engine='deepspeed'; add it, or use 'cpu'")
        elif place == 'nvme' and stage != 3:
            faults.add(f'{path}.{name}', f"'nvme' needs stage=3, got stage={stage}")
        elif place == 'nvme' and offload.nvme_path is None:
            faults.add(f'{path}.nvme_path', "is missing; 'nvme' needs a folder on the disk")
        elif place is not None and stage == 0:
            faults.add(f'{path}.{name}', f'got {place!r} at stage=0, which keeps all on the GPU; use stage 1, 2 or 3')
    if 'nvme' not in places.values() and offload.nvme_path is not None:
        faults.add(f'{path}.nvme_path', "is for params='nvme' or optimizer='nvme'; remove it")


def _refuse_at_stage_0(config: ZeroConfig, path: str, faults: Faults) -> None:
    """Nothing is sharded: what says how to shard would be ignored."""
    default = ZeroConfig()
    for name in ('reduce_dtype', 'output_dtype'):
        if getattr(config.precision, name) != getattr(default.precision, name):
            faults.add(f'{path}.precision.{name}', 'needs stage 1, 2 or 3; DDP reduces gradients as they are')
    if config.precision.keep_fp32:
        faults.add(f'{path}.precision.keep_fp32', 'needs stage 1, 2 or 3; under DDP all weights keep their dtype')
    if config.mesh.replicate > 1:
        faults.add(f'{path}.mesh', 'needs stage 1, 2 or 3; at stage 0 every rank holds all')
    if config.engine_options and without_auto(config.engine_options) != {SECTION: {'stage': 0}}:
        why = "is DeepSpeed's config, and stage=0 is DDP under every engine; remove it, or use stage 1, 2 or 3"
        faults.add(f'{path}.engine_options', why)
    if config.separate and config.static_graph:
        why = 'is an argument of DDP, and separate averages gradients without it; remove it'
        faults.add(f'{path}.static_graph', why)
