"""MMEngine's EMAHook over shards: each rank averages what it holds."""

import copy
import logging
from typing import Any

import torch.distributed as dist
from mmengine.hooks import EMAHook
from mmengine.logging import print_log
from mmengine.registry import MODELS

from mmzero.checkpoint import SavedTensor, load_saved
from mmzero.engines import is_meta
from mmzero.hooks.before import put_before
from mmzero.wrappers import ZeroModelWrapper


class ShardedEMA(EMAHook):
    """Stands before EMAHook, or a class derived from it, among the bases of a hook.

    The averaged model is built on a mirror of this rank's part of the model, whatever its class. No step communicates.
    Weights of val and test are swapped in shard by shard. A checkpoint holds what EMAHook's does: averaged weights as
    ``state_dict``, the trained ones in ``ema_state_dict``.
    """

    _wrapper: ZeroModelWrapper | None = None
    _resumed: dict[str, Any] | None = None
    _gathered: dict[str, Any] | None = None
    _starts_anew = False

    def before_run(self, runner) -> None:  # type: ignore # noqa: D102
        self._wrapper = wrapper = runner.sharded
        # Units that a val left gathered would hide their shards.
        wrapper.engine.refresh()
        self.parts = wrapper.engine.local_parts()
        self.src_model = self.parts.module
        self.ema_model = MODELS.build(copy.deepcopy(self.ema_cfg), default_args=dict(model=self.src_model))
        if self._resumed is not None:
            self._fill(self._resumed)
            self._resumed = None

    def _fill(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint's averaged weights. Collective."""
        self._fill_weights(
            {name.removeprefix('module.'): value for name, value in state.items() if name.startswith('module.')}
        )
        steps = [int(state['steps'])]
        dist.broadcast_object_list(steps, src=0)
        self.ema_model.steps.fill_(steps[0])

    def _fill_weights(self, whole: dict[str, Any]) -> None:
        names = [sorted(whole)]
        dist.broadcast_object_list(names, src=0)
        targets = self.ema_model.module.state_dict()
        self._tell_of_others(targets.keys() - set(names[0]), set(names[0]) - targets.keys())
        saved = {name: value for name, value in whole.items() if isinstance(value, SavedTensor)}
        if saved:
            own = self.parts.sharded({name: target for name, target in targets.items() if name in saved})
            # What is frozen and on meta is the model's, which has been loaded.
            load_saved([(saved[name], target) for name, target in own.items() if not is_meta(target)])
        else:
            self.parts.scatter(targets, whole)

    def _tell_of_others(self, missing: set[str], left: set[str]) -> None:
        if not missing and not left:
            return
        text = f'ema_state_dict: missing: {sorted(missing)[:5]}; left over: {sorted(left)[:5]}'
        if self.strict_load:
            raise RuntimeError(text)
        print_log(text, 'current', logging.WARNING)

    def _swap_ema_parameters(self) -> None:
        super()._swap_ema_parameters()
        if self._wrapper is not None:
            # What is gathered has the values from before.
            self._wrapper.engine.refresh()

    def gather(self) -> None:
        """Gather the averaged weights for the checkpoint that rank 0 is about to write. Collective."""
        state = self.ema_model.state_dict()
        parts = {name.removeprefix('module.'): part for name, part in state.items() if name.startswith('module.')}
        whole = self.parts.gather(parts)
        self._gathered = {'steps': state['steps'].cpu(), **{f'module.{name}': value for name, value in whole.items()}}

    def share(self) -> None:
        """Have the averaged weights for a checkpoint into which every rank writes its own part. Collective."""
        shards = self.parts.to_save(self.ema_model.module.state_dict())
        steps = int(self.ema_model.steps)
        self._gathered = {'steps': steps, **{f'module.{name}': value for name, value in shards.items()}}

    def before_save_checkpoint(self, runner, checkpoint: dict) -> None:  # type: ignore # noqa: D102
        checkpoint['ema_state_dict'], self._gathered = self._gathered, None
        self._swap_ema_state_dict(checkpoint)

    def after_load_checkpoint(self, runner, checkpoint: dict) -> None:  # type: ignore # noqa: D102
        # What is not resumed starts as a copy of the weights that are loaded. A whole file is, before the model is
        # sharded and the mirror made; shards are afterwards.
        self._starts_anew = not runner._resume or 'ema_state_dict' not in checkpoint
        if not runner._resume:
            return
        if 'ema_state_dict' not in checkpoint:
            print_log(
                'There is no `ema_state_dict` in the checkpoint: the average starts from its weights',
                'current',
                logging.WARNING,
            )
            return
        self._swap_ema_state_dict(checkpoint)
        if self._wrapper is None:
            self._resumed = checkpoint['ema_state_dict']
        else:
            self._fill(checkpoint['ema_state_dict'])

    def after_weights(self) -> None:
        """Start as a copy of the weights that have just been loaded, unless averaged ones were. On each rank.

        Of the weights, not of the checkpoint: its names and shapes may be others than the model's.
        """
        if self._wrapper is None or not self._starts_anew:
            return
        loaded = self.src_model.state_dict()
        for name, target in self.ema_model.module.state_dict().items():
            target.copy_(loaded[name])


def over_shards(hook: EMAHook) -> ShardedEMA:
    """Let an EMAHook average shards.

    Args:
        hook (EMAHook): One that was built; it is changed. Its class may be a project's.

    Returns:
        ShardedEMA: The same object.
    """
    return put_before(hook, ShardedEMA)
