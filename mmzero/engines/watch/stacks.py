"""What a rank's threads are doing, by their Python stacks."""

import sys
import threading
from collections.abc import Iterator
from types import FrameType

# Where a rank waits for others. The launcher's own wrappers are around everything.
_WAITING = (
    'torch.distributed.',
    'mmzero.engines.loops.',
    'mmzero.engines.meeting.',
    'mmzero.engines.place.',
    'mmzero.engines.fsdp2.following.',
    'mmzero.engines.fsdp2.together.',
)
_AROUND = ('torch.distributed.elastic.',)
_BETWEEN = ('torch.', 'threading', 'contextlib', 'mmzero.')
SHOWN_LINES = 12


def main_frames() -> list[FrameType]:
    """Frames of the main thread.

    Returns:
        list[FrameType]: The innermost first.
    """
    return list(_frames(sys._current_frames().get(threading.main_thread().ident or 0)))


def waits_for_others(frames: list[FrameType]) -> bool:
    """Whether a thread is inside a collective, or in what mmzero waits for other ranks with.

    Args:
        frames (list[FrameType]): The innermost first.

    Returns:
        bool: Whether it is; False where code of others runs within it.
    """
    for frame in frames:
        name = f'{frame.f_globals.get("__name__", "")}.'
        if name.startswith(_AROUND):
            return False
        if name.startswith(_WAITING):
            return True
        if not name.startswith(_BETWEEN):
            return False
    return False


def in_backward(frames: list[FrameType]) -> bool:
    """Whether a thread is inside autograd's engine, whose waiting for others shows no frames.

    Args:
        frames (list[FrameType]): The innermost first.

    Returns:
        bool: Whether it is.
    """
    return bool(frames) and frames[0].f_code.co_name == '_engine_run_backward'


def shown(frames: list[FrameType]) -> str:
    """The innermost part of a stack, without what torch and mmzero do in between.

    Args:
        frames (list[FrameType]): The innermost first.

    Returns:
        str: A line per frame, the innermost last.
    """
    kept = [frame for index, frame in enumerate(frames) if index == 0 or not _is_between(frame)]
    lines = [f'    {frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}' for frame in kept]
    return '\n'.join(reversed(lines[:SHOWN_LINES]))


def _is_between(frame: FrameType) -> bool:
    return f'{frame.f_globals.get("__name__", "")}.'.startswith((*_BETWEEN, 'runpy.'))


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
