"""What torch.compile tells of itself."""

import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any


def watch_compiles(start: Callable[[Any], None], end: Callable[[Any], None]) -> None:
    """Call something before and after each compilation, with ``callback_trigger`` and ``compile_id``.

    ``torch._dynamo.reset`` forgets it. Remove once torch has a public function for it.

    Args:
        start (Callable[[Any], None]): Called before; once, however often it is given.
        end (Callable[[Any], None]): Called after, also where the compilation failed.
    """
    from torch._dynamo.callback import callback_handler

    if start not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(start)
        callback_handler.register_end_callback(end)


def graph_breaks() -> tuple[list[tuple[list[traceback.FrameSummary], str]], list[str]]:
    """What has broken graphs in this process so far, and where.

    ``torch._dynamo.explain`` needs inputs. Remove once torch tells it in public.

    Returns:
        tuple: Stacks, the innermost frame last, and reasons; and the reasons of all, also of those without a stack, as
        where Dynamo left out a function.
    """
    from torch._dynamo.utils import counters, graph_break_reasons

    return [(list(each.user_stack), each.reason) for each in graph_break_reasons], [*counters['graph_break']]


def compiler_errors() -> tuple[type[Exception], ...]:
    """What torch.compile raises of itself. Remove once these have a public home.

    Returns:
        tuple[type[Exception], ...]: Classes.
    """
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    return TorchDynamoException, FailOnRecompileLimitHit


def is_of_compiled_backward(error: Exception) -> bool:
    """Whether an error says that a compiled backward cannot be differentiated, or cannot run twice.

    Both are plain RuntimeErrors of AOTAutograd. Remove once they have classes.

    Args:
        error (Exception): The error.

    Returns:
        bool: Whether it does.
    """
    text = str(error)
    return 'does not currently support double backward' in text or 'non-empty donated buffers' in text


def in_one_graph() -> AbstractContextManager:
    """Let what is compiled inside fail where a graph breaks.

    ``fullgraph=True`` would also put values that depend on data into the graph. Remove once it is public.

    Returns:
        AbstractContextManager: In which a compiled function is called.
    """
    import torch._dynamo

    return torch._dynamo.error_on_graph_break(True)
