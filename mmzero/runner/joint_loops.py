"""MMEngine's loops where ranks have different numbers of batches, and where a run goes on."""

from typing import Any

import torch.distributed as dist
from mmengine.hooks import RuntimeInfoHook
from mmengine.runner import BaseLoop

from mmzero.hooks import RandomStateHook
from mmzero.runner.data_stream import count_batches, runs_by_iterations, start_later
from mmzero.runner.joint_loader import describe, join_loader, join_train_loop
from mmzero.wrappers import ZeroModelWrapper


class JointLoopsMixin:
    """What ZeroRunner does differently with loops: ranks may have different numbers of batches, and data go on."""

    _wrapper: ZeroModelWrapper | None
    _joint_train_loop: BaseLoop | None = None
    logger: Any
    hooks: Any
    seed: Any
    default_scope: Any
    _resume: bool
    _train_dataloader: Any
    _randomness_cfg: dict

    def build_train_loop(self, loop: Any) -> Any:
        """Build the training loop, in which ranks may have different numbers of batches. Collective.

        Args:
            loop (BaseLoop or dict): As Runner's.

        Returns:
            BaseLoop: The loop.

        Raises:
            DataError: If a rank of a loop by iterations has no batch.
        """
        if self._resume and runs_by_iterations(loop, self.default_scope.scope_name):
            self._start_data_later()
        loop = super().build_train_loop(loop)  # type: ignore[misc]
        count_batches(loop, self.random_state_hook.before_batch)
        # Runner asks for it again.
        if dist.get_world_size() > 1 and loop is not self._joint_train_loop:
            lengths = join_train_loop(loop, lambda: self._wrapper)
            self._joint_train_loop = loop
            if (line := describe(lengths)) is not None:
                self.logger.info(line)
        return loop

    def _start_data_later(self) -> None:
        """Workers would begin with the first batch as the loop is built, before it is known where the run goes on."""
        if isinstance(self._train_dataloader, dict):
            # As the loop would.
            diff_rank_seed = self._randomness_cfg.get('diff_rank_seed', False)
            self._train_dataloader = self.build_dataloader(  # type: ignore[attr-defined]
                self._train_dataloader, seed=self.seed, diff_rank_seed=diff_rank_seed
            )
        start_later(self._train_dataloader)

    @property
    def random_state_hook(self) -> RandomStateHook:
        """The hook that goes on from saved random states."""
        return next(hook for hook in self.hooks if isinstance(hook, RandomStateHook))

    def build_val_loop(self, loop: Any) -> Any:
        """Build the validation loop, in which ranks may have different numbers of batches.

        Args:
            loop (BaseLoop or dict): As Runner's.

        Returns:
            BaseLoop: The loop.
        """
        return self._joint(super().build_val_loop(loop), 'val')  # type: ignore[misc]

    def build_test_loop(self, loop: Any) -> Any:
        """Build the test loop, in which ranks may have different numbers of batches.

        Args:
            loop (BaseLoop or dict): As Runner's.

        Returns:
            BaseLoop: The loop.
        """
        return self._joint(super().build_test_loop(loop), 'test')  # type: ignore[misc]

    def _joint(self, loop: Any, kind: str) -> Any:
        if dist.get_world_size() > 1:
            join_loader(loop.dataloader, lambda: self._wrapper, kind)
        return loop

    def call_hook(self, fn_name: str, **kwargs: Any) -> None:
        """Call the hooks, without logging losses of a batch that does not count.

        Args:
            fn_name (str): As Runner's.
            **kwargs: As Runner's.
        """
        if fn_name != 'after_train_iter' or self._wrapper is None or not self._wrapper.stand_in.is_used:
            super().call_hook(fn_name, **kwargs)  # type: ignore[misc]
            return
        for hook in self.hooks:
            if hasattr(hook, fn_name):
                losses = dict(outputs=None) if isinstance(hook, RuntimeInfoHook) else {}
                getattr(hook, fn_name)(self, **{**kwargs, **losses})
