"""MMEngine's CheckpointHook, which removes no checkpoint before the next one is there."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mmengine.hooks import CheckpointHook


class ZeroCheckpointHook(CheckpointHook):
    """Stands before CheckpointHook, or a class derived from it, among the bases of a hook.

    CheckpointHook makes room first: with ``max_keep_ckpts=1``, or for the best one, a process that dies while it saves
    leaves none. Here what is outdated goes once the new one is complete. Sharded checkpoints are folders, and their
    names end without ``.pth``.
    """

    file_backend: Any
    filename_tmpl: str

    def before_train(self, runner) -> None:  # type: ignore # noqa: D102
        if runner.saves_shards:
            self.filename_tmpl = self.filename_tmpl.removesuffix('.pth')
        super().before_train(runner)

    def _save_checkpoint_with_step(self, runner, step, meta) -> None:  # type: ignore
        with self._removing_afterwards():
            super()._save_checkpoint_with_step(runner, step, meta)

    def _save_best_checkpoint(self, runner, metrics) -> None:  # type: ignore
        with self._removing_afterwards():
            super()._save_best_checkpoint(runner, metrics)

    @contextmanager
    def _removing_afterwards(self) -> Iterator[None]:
        # An evaluation alone has none, and saves nothing.
        backend = getattr(self, 'file_backend', None)
        self.file_backend = deferred = _Deferred(backend)
        try:
            yield
        finally:
            self.file_backend = backend
        for remove, path in deferred.outdated:
            if path != self.last_ckpt:
                remove(path)


class _Deferred:
    """A file backend that notes what is to be removed."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.outdated: list[tuple[Any, str]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def remove(self, path: str) -> None:
        self.outdated.append((self._backend.remove, path))

    def rmtree(self, path: str) -> None:
        self.outdated.append((self._backend.rmtree, path))


def keeping_the_last(hook: CheckpointHook) -> ZeroCheckpointHook:
    """Let a CheckpointHook remove checkpoints after it has saved.

    Args:
        hook (CheckpointHook): One that was built; it is changed. Its class may be a project's.

    Returns:
        ZeroCheckpointHook: The same object.
    """
    if not isinstance(hook, ZeroCheckpointHook):
        hook.__class__ = type(type(hook).__name__, (ZeroCheckpointHook, type(hook)), {})
    return hook
