"""MMEngine's CheckpointHook, which removes no checkpoint before the next one is there."""

import os
from collections import deque
from pathlib import Path
from typing import Any

from mmengine.dist import master_only
from mmengine.hooks import CheckpointHook

from mmzero.hooks.before import put_before


class ZeroCheckpointHook(CheckpointHook):
    """Stands before CheckpointHook, or a class derived from it, among the bases of a hook.

    CheckpointHook makes room first: with ``max_keep_ckpts=1``, or for the best one, a process that dies while it saves
    leaves none. Here what is outdated goes once the new one is complete. Sharded checkpoints are folders, and their
    names end without ``.pth``.
    """

    file_backend: Any
    filename_tmpl: str
    keep_ckpt_ids: deque
    # What is there for certain: of what is written beside training, nobody knows yet.
    _last_saved: str | None = None
    _best_saved: list[str]
    _best_before: list[str]
    # What was to be removed once a save was complete that is not, or not yet.
    _overdue: list[str]
    _overdue_best: list[str]

    def before_train(self, runner) -> None:  # type: ignore # noqa: D102
        if runner.saves_shards:
            self.filename_tmpl = self.filename_tmpl.removesuffix('.pth')
        super().before_train(runner)
        self._last_saved, self._best_saved, self._overdue, self._overdue_best = None, self._best(), [], []

    def _save_checkpoint_with_step(self, runner, step, meta) -> None:  # type: ignore
        if isinstance(self.file_backend, _Deferred):
            # The last one is saved again after the best one; whether this one is there does not hang on that.
            self._once_best_is_saved(runner, self.file_backend)
        # As CheckpointHook's, in another order.
        outdated = self._keep(runner, step) if self.max_keep_ckpts > 0 else []
        name = self.filename_tmpl.format(step)
        self.last_ckpt = path = self.file_backend.join_path(self.out_dir, name)
        runner.message_hub.update_info('last_ckpt', path)
        runner.save_checkpoint(
            self.out_dir,
            name,
            self.file_client_args,
            save_optimizer=self.save_optimizer,
            save_param_scheduler=self.save_param_scheduler,
            meta=meta,
            by_epoch=self.by_epoch,
            backend_args=self.backend_args,
            **self.args,
        )
        runner.once_saved(lambda: self._settle(runner, path, outdated))

    def after_train(self, runner) -> None:  # type: ignore # noqa: D102
        runner.finish_saving()
        if not runner.saves_shards:
            super().after_train(runner)
            return
        last = [self._last_saved] if self._last_saved is not None else []
        best = self._there(self._best()) or self._there(self._best_saved)
        for path in dict(last=last, best=best, all=[*last, *best]).get(runner.saving.export, []):
            if runner.saving.export != 'all':
                runner.export(path)
            if self.published_keys is not None:
                self._publish_model(runner, f'{path}.pth')

    def _best(self) -> list[str]:
        single = getattr(self, 'best_ckpt_path', None)
        paths = [single] if single else getattr(self, 'best_ckpt_path_dict', {}).values()
        return [path for path in paths if path]

    def _keep(self, runner: Any, step: int) -> list[str]:
        """Note which checkpoints there will be; gives those that there will not."""
        kept = [known for known in self.keep_ckpt_ids if known != step] + [step]
        outdated, kept = kept[: -self.max_keep_ckpts], kept[-self.max_keep_ckpts :]
        self.keep_ckpt_ids = deque(kept, self.max_keep_ckpts)
        runner.message_hub.update_info('keep_ckpt_ids', kept)
        staying = self._paths(kept)
        self._overdue = [path for path in [*self._overdue, *self._paths(outdated)] if path not in staying]
        return self._overdue

    def _paths(self, steps: list[int]) -> list[str]:
        return [self.file_backend.join_path(self.out_dir, self.filename_tmpl.format(step)) for step in steps]

    def _settle(self, runner: Any, path: str, outdated: list[str]) -> None:
        self._last_saved = path
        self._overdue = [old for old in self._overdue if old not in outdated]
        self._note(runner, path, outdated)

    @master_only
    def _note(self, runner: Any, path: str, outdated: list[str]) -> None:
        note_last(runner.work_dir, path)
        self._export_all(runner, [path])
        backend = self.file_backend
        self._remove(runner, backend.backend if isinstance(backend, _Deferred) else backend, outdated)

    @staticmethod
    def _export_all(runner: Any, paths: list[str]) -> None:
        for path in paths if runner.saves_shards and runner.saving.export == 'all' else []:
            runner.export_here(path)

    @staticmethod
    def _remove(runner: Any, backend: Any, paths: list[str]) -> None:
        for path in paths:
            if os.path.islink(path):
                os.remove(path)
            elif backend.isfile(path):
                backend.remove(path)
            elif backend.isdir(path):
                backend.rmtree(path)
            if runner.saves_shards and backend.isfile(f'{path}.pth'):
                backend.remove(f'{path}.pth')

    def _save_best_checkpoint(self, runner, metrics) -> None:  # type: ignore
        # An evaluation alone has no backend, and saves nothing.
        backend = getattr(self, 'file_backend', None)
        self._best_before = self._best()
        self.file_backend = deferred = _Deferred(backend)
        try:
            super()._save_best_checkpoint(runner, metrics)
        finally:
            self.file_backend = backend
        self._once_best_is_saved(runner, deferred)

    def _once_best_is_saved(self, runner: Any, deferred: '_Deferred') -> None:
        better = [path for path in self._best() if path not in self._best_before]
        self._best_before = self._best()
        if better:
            outdated = self._overdue_best = [*self._overdue_best, *deferred.outdated]
            runner.once_saved(lambda: self._settle_best(runner, deferred.backend, better, outdated))

    @staticmethod
    def _there(paths: list[str]) -> list[str]:
        return [path for path in paths if os.path.exists(path)]

    def _settle_best(self, runner: Any, backend: Any, better: list[str], outdated: list[str]) -> None:
        # What was saved last is complete; those before it may not be.
        if runner.saves_shards and self._there(better) != better:
            return
        self._best_saved = [*(path for path in self._best_saved if path not in outdated), *better]
        self._overdue_best = [path for path in self._overdue_best if path not in outdated]
        self._clear_up(runner, backend, better, outdated)

    @master_only
    def _clear_up(self, runner: Any, backend: Any, better: list[str], outdated: list[str]) -> None:
        self._export_all(runner, better)
        self._remove(runner, backend, outdated)


@master_only
def note_last(work_dir: str, path: str) -> None:
    """Write down from which checkpoint a run goes on, on rank 0.

    Args:
        work_dir (str): Of the run.
        path (str): The checkpoint.
    """
    note = Path(work_dir) / 'last_checkpoint'
    part = note.with_name(f'{note.name}.part')
    part.write_text(path)
    os.replace(part, note)


class _Deferred:
    """A file backend that notes what is to be removed."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self.outdated: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)

    def remove(self, path: str) -> None:
        self.outdated.append(path)

    def rmtree(self, path: str) -> None:
        self.outdated.append(path)


def keeping_the_last(hook: CheckpointHook) -> ZeroCheckpointHook:
    """Let a CheckpointHook remove checkpoints after it has saved.

    Args:
        hook (CheckpointHook): One that was built; it is changed. Its class may be a project's.

    Returns:
        ZeroCheckpointHook: The same object.
    """
    return put_before(hook, ZeroCheckpointHook)
