"""How the tools run: errors on one screen, signals that end every rank."""

import atexit
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from typing import NoReturn

import torch.distributed as dist

from mmzero.engines import LAUNCHERS
from mmzero.engines.watch import leave_quietly, record_for_launcher, say_last, stop_watch, tell_others, watched
from mmzero.errors import Preempted, ZeroError

RANK_VARIABLES = tuple(names[0] for ways in LAUNCHERS.values() for names in ways)

PATIENCE_SECONDS = 10


def run_tool(main: Callable[[], None]) -> None:
    """Run a tool's main function.

    Errors that the user can mend are printed by one rank, without a traceback, and end the process with exit code
    2; other errors keep their traceback, with exit code 1. A process that fails leaves at once, without waiting for
    ranks that wait for it: its closed connections end them. SIGINT (Ctrl-C) and SIGTERM end each process where it
    is, even inside a collective; checkpoints are written under another name until they are complete. A process that
    succeeds runs what was registered with ``atexit`` and ends without Python's own finalization; see
    [Note: the end of a rank].

    Args:
        main (Callable[[], None]): What to run.
    """
    # MMEngine asks it for versions; nothing that a user could change.
    warnings.filterwarnings('ignore', message='pkg_resources is deprecated')
    if dist.is_torchelastic_launched() or _launched():
        # Python's own handler would run only once a collective returns.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        main()
    except ZeroError as error:
        _let_others_speak(error)
        record_for_launcher(error)
        print(f'error: {error}', file=sys.stderr)
        _leave(2)
    except KeyboardInterrupt:
        print('interrupted', file=sys.stderr)
        _leave(130)
    except Preempted as end:
        stop_watch()
        _leave(int(end.code or 0))
    except Exception as error:
        more = tell_others(error)
        if more is None:
            leave_quietly()
        say_last(error, more, traceback.print_exc)
        _leave(1)
    _end()


def _let_others_speak(error: ZeroError) -> None:
    """Ranks mostly fail alike, and the launcher ends all when one has gone: one of them speaks."""
    if not watched():
        if _rank() > 0:
            time.sleep(PATIENCE_SECONDS)
    elif tell_others(error) is None:
        leave_quietly()


def _launched() -> bool:
    return any(name in os.environ for name in RANK_VARIABLES)


def _rank() -> int:
    return next((int(os.environ[name]) for name in RANK_VARIABLES if name in os.environ), 0)


# [Note: the end of a rank]
# gloo's threads let go of a collective's tensors after they have told us that it is done, and need the interpreter for
# it. Where that falls into Python's finalization, the process aborts ("terminate called without an active exception",
# pytorch#179291), and a training that is complete ends with exit code 134. destroy_process_group does not join these
# threads, since torch itself still holds the group. So the exit handlers run, as they would have, and then the process
# ends as multiprocessing's do.
def _end() -> None:
    if not dist.is_initialized():
        return
    stop_watch()
    dist.destroy_process_group()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    _leave(0)


def _leave(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
