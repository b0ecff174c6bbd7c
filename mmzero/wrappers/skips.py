"""Optimizer steps that are skipped, since gradients are not finite."""

import torch.distributed as dist
from mmengine.logging import MessageHub, print_log

from mmzero.errors import NonFiniteError

_COUNT = 'train/skipped_steps'


class SkippedSteps:
    """Counts and tells them, and ends a run in which there are too many in a row.

    Args:
        allowed (int, optional): How many there may be in a row; None: any number.
        is_scaled (bool): Whether the loss is scaled, so that some are part of finding the scale.
        is_watched (bool): Whether the module in which it begins is told anyway.
    """

    def __init__(self, allowed: int | None, is_scaled: bool, is_watched: bool) -> None:
        self.allowed = allowed
        self.is_scaled = is_scaled
        self.is_watched = is_watched
        self.in_a_row = 0

    def done(self) -> None:
        """Take note of a step that was done."""
        self.in_a_row = 0

    def skipped(self, why: str, scale: float | None, hub: MessageHub, path: str) -> None:
        """Take note of a step that was skipped; the same on every rank.

        Args:
            why (str): Which gradients were not finite.
            scale (float, optional): The loss scale of the next step.
            hub (MessageHub): Takes the number so far, as ``train/skipped_steps``.
            path (str): Where the optimizer is in the config.

        Raises:
            NonFiniteError: If there are more in a row than allowed.
        """
        self.in_a_row += 1
        # A run that is resumed has its log, and counts on.
        before = hub.log_scalars.get(_COUNT)
        in_all = 1 if before is None else int(before.current()) + 1
        hub.update_scalar(_COUNT, in_all)
        next_scale = '' if scale is None else f'; the loss is scaled by {scale:g} from here on'
        if self.allowed is not None and self.in_a_row > self.allowed:
            raise NonFiniteError(self._told(why, next_scale, path))
        if dist.get_rank() == 0:
            limit = '' if self.allowed is None else f', {self.allowed} are allowed'
            counted = f'{self.in_a_row} in a row{limit}, {in_all} in all'
            of = '' if path == 'optim_wrapper' else f' of {path}'
            text = f'optimizer step{of} skipped ({counted}): {why}{next_scale}'
            print_log(text, logger='current', level=20 if self.is_scaled else 30)

    def _told(self, why: str, next_scale: str, path: str) -> str:
        of_float16 = f"{path}.loss_scale, or dtype='bfloat16', which needs none; " if self.is_scaled else ''
        more = '; model_wrapper_cfg.detect_anomaly=True names the module in which it begins'
        more = '' if self.is_watched else more
        return (
            f'{path}.max_skips: {self.in_a_row} optimizer step(s) in a row were skipped, {self.allowed} are '
            f'allowed. In the last, {why}{next_scale}. Weights and optimizer are those of the last step that was done. '
            f'Look at {of_float16}the learning rate and its warmup, {path}.clip_grad, and the data of ranks '
            f'whose loss is not finite{more}'
        )
