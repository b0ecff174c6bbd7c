"""mmdet's MeanTeacherHook over shards: each rank averages what it holds of the student into the teacher."""

from typing import Any

from mmengine.hooks import Hook
from torch import nn

from mmzero.engines import LocalParts, together
from mmzero.errors import PlanError
from mmzero.hooks.before import put_before
from mmzero.wrappers import ZeroModelWrapper

NAME = 'MeanTeacherHook'
"""The class in mmdet and its relatives, which is not imported for this."""


class ShardedMeanTeacher(Hook):
    """Stands before MeanTeacherHook, or a class derived from it, among the bases of a hook.

    Student and teacher are of one class and shape, so that a rank holds the same rows of both: what the hook computes
    is computed on a mirror of these, and no step communicates. Gathered units of the teacher are given up after it.
    """

    _wrapper: ZeroModelWrapper | None = None
    _parts: LocalParts | None = None

    def before_train(self, runner: Any) -> None:  # noqa: D102
        self._wrapper = runner.sharded
        # Units that a val left gathered would hide their shards.
        runner.sharded.engine.refresh()
        self._parts = parts = runner.sharded.engine.local_parts()
        together(lambda: _check_same_parts(parts.module))
        super().before_train(runner)

    def momentum_update(self, model: nn.Module, momentum: float) -> None:  # noqa: D102
        if self._parts is None or self._wrapper is None:
            raise RuntimeError('momentum_update is called before training')
        super().momentum_update(self._parts.module, momentum)
        # What is gathered, a teacher's unit at stages 1 and 2, has the values from before.
        self._wrapper.engine.refresh()


def _check_same_parts(mirror: nn.Module) -> None:
    """Refuse a teacher of which a rank holds other rows than of its student.

    Raises:
        PlanError: If there is one.
    """
    student, teacher = (getattr(mirror, name, None) for name in ('student', 'teacher'))
    if student is None or teacher is None:
        return  # the hook itself says so
    for (name, own), (_, other) in zip(student.named_parameters(), teacher.named_parameters(), strict=True):
        if own.shape != other.shape or own.dtype != other.dtype:
            raise PlanError(
                f'{NAME}: student.{name} and teacher.{name} are kept differently ({tuple(own.shape)}, {own.dtype} and '
                f'{tuple(other.shape)}, {other.dtype} on this rank); give both the same dtypes and overrides'
            )


def teach_over_shards(hook: Hook) -> Hook:
    """Let a MeanTeacherHook average shards; other hooks stay as they are.

    Args:
        hook (Hook): One that was built; it may be changed. Its class may be a project's.

    Returns:
        Hook: The same object.
    """
    is_one = any(cls.__name__ == NAME for cls in type(hook).__mro__)
    return put_before(hook, ShardedMeanTeacher) if is_one else hook
