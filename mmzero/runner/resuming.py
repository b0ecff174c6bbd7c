"""From which checkpoint a run goes on, and how.

[Note: a run that torchrun starts again]
``torchrun --max-restarts`` starts the same command again when a rank has failed. Without ``--resume`` that would begin
anew and replace what the run has saved; with ``--resume FILE`` it would go back to that file. So each checkpoint says
which start of torchrun it was saved under, and by which process: where the newest one in the work_dir is of this start
and of an earlier process, the run goes on from it. The number of restarts says less: nodes count for themselves, and
what lies in the work_dir may be of another run.
"""

import os
import uuid
from functools import cache
from typing import Any

import torch.distributed as dist
from mmengine.runner import Runner, find_latest_checkpoint

from mmzero._compat import launch_of_torchrun
from mmzero.checkpoint import is_sharded, load_rest, newest_complete, read_meta
from mmzero.engines import from_rank0
from mmzero.errors import CheckpointError
from mmzero.hooks import RandomStateHook
from mmzero.runner.data_position import go_on
from mmzero.wrappers.several import each


@cache
def _process() -> str:
    """Name this process; not as it is imported, which processes may do before they fork."""
    return uuid.uuid4().hex


class ResumeMixin(Runner):
    """What ZeroRunner goes on from."""

    random_state_hook: RandomStateHook
    _read: tuple[str, dict] | None
    _resume: bool
    _load_from: str | None
    _training: bool
    _launch: dict[str, Any] | None = None
    _has_looked = False

    def find_checkpoint(self) -> None:
        """Find out from which checkpoint this run goes on, once. Collective."""
        if self._has_looked:
            return
        self._has_looked = True
        if self._training and dist.is_torchelastic_launched():
            self._launch = _launch_of_all()
        # Rank 0's answer: another node may not see the file.
        own, source, skipped = from_rank0(self._look)
        if own:
            self._resume = True
            self.logger.warning(f'torchrun has started this run again: it goes on from {source}, which it has saved')
        elif self._resume and self._load_from is None:
            for text in skipped:
                self.logger.warning(f'not resumed from: {text}')
            self.logger.info(f'resuming from the latest checkpoint: {source}')
            self._resume = source is not None
        else:
            return
        self._load_from = source

    def _look(self) -> tuple[bool, str | None, list[str]]:
        """Whether this run has saved before torchrun started it again, and the latest checkpoint. On rank 0."""
        if self._launch is None and not self._resume:
            return False, None, []
        source, skipped = latest_checkpoint(self.work_dir)
        return _is_of_launch(source, self._launch), source, skipped

    def resume(self, filename: str, *args: Any, **kwargs: Any) -> None:
        """Resume weights, optimizer, schedulers, counters and random states. Collective.

        Args:
            filename (str): The checkpoint.
            *args: As Runner's.
            **kwargs: As Runner's.
        """
        filename = os.path.expanduser(filename)
        checkpoint = self.load_checkpoint(filename)
        missing = [name for name in ('meta', 'message_hub') if name not in checkpoint]
        if missing:
            raise CheckpointError(
                f'{filename} cannot be resumed: it holds no {", ".join(missing)}, so that it is one of weights alone; '
                'start from them by load_from without resume'
            )
        self._read = (filename, checkpoint)
        states = checkpoint.get('random_states')
        super().resume(filename, *args, **kwargs)
        self._read = None
        meta = checkpoint['meta']
        loop, saved_by = self.train_loop, meta.get('world_size')
        lost = go_on(loop, meta.get('position'), saved_by, self.rank, self.world_size)
        if lost is not None:
            self.logger.warning(lost)
        self._say_what_is_lost()
        if states is not None and len(states) == self.world_size:
            self.random_state_hook.continue_from(states[self.rank])
        else:
            self.logger.warning(
                f'{filename} holds random states of {len(states or [])} rank(s) and this run has {self.world_size}: '
                'noise and dropout will not be those of the unbroken run'
            )

    def _say_what_is_lost(self) -> None:
        for path, wrapper in each(self.optim_wrapper).items():
            counts = getattr(wrapper, '_accumulative_counts', 1)
            if not self.iter % counts:
                continue
            self.logger.warning(
                f'{path}.accumulative_counts: resumed after {self.iter % counts} of {counts} micro-batches of a '
                'step, whose gradients no checkpoint holds: this step has only the rest, as under MMEngine. Save at '
                f'multiples of {counts} iterations to avoid it.'
            )


def _launch_of_all() -> dict[str, Any] | None:
    """Name the start of torchrun, on each node, and rank 0's process. Collective."""
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, (launch_of_torchrun(), _process()))
    starts = sorted({start for start, _ in everyones if start is not None})
    return dict(starts=starts, process=everyones[0][1]) if starts else None


def _is_of_launch(source: str | None, launch: dict[str, Any] | None) -> bool:
    """Whether a checkpoint was saved under a start of torchrun, by an earlier process."""
    if source is None or launch is None:
        return False
    try:
        meta = load_rest(source).get('meta', {}) if is_sharded(source) else read_meta(source)
    except CheckpointError:
        # What is damaged is told as it is loaded.
        return False
    saved = meta.get('launch') or dict(starts=[], process=None)
    return not set(saved['starts']).isdisjoint(launch['starts']) and saved['process'] != launch['process']


def has_saved_before(work_dir: str | None) -> bool:
    """Say whether torchrun has started this run again, and it has saved before. On any rank, without communication.

    Args:
        work_dir (str, optional): Where it saves.

    Returns:
        bool: Whether it has; False where torchrun does not tell by which start this process is.
    """
    start = launch_of_torchrun()
    if start is None or work_dir is None or not os.path.isfile(os.path.join(work_dir, 'last_checkpoint')):
        return False
    return _is_of_launch(find_latest_checkpoint(work_dir), dict(starts=[start], process=_process()))


def latest_checkpoint(work_dir: str) -> tuple[str | None, list[str]]:
    """Find what a run goes on from. On one rank.

    Args:
        work_dir (str): Where it has saved.

    Returns:
        tuple[str or None, list[str]]: The file that was saved last, or the newest complete folder; and folders that
        were passed over, with the reason.
    """
    named = find_latest_checkpoint(work_dir)
    if named is not None and os.path.isfile(named):
        return named, []
    # A process may have died between a save and the note of it; the hook may save elsewhere.
    newest, skipped = newest_complete(os.path.dirname(named) if named else work_dir)
    if newest is None and named is not None and not os.path.exists(named):
        # The folder may have been moved since.
        newest, skipped = newest_complete(work_dir)
    return (named if newest is None else str(newest)), skipped
