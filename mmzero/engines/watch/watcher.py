"""The thread that watches whether ranks part ways.

[Note: the watch]
A rank that waits for one that will never come sits in a collective, where no Python code of its main thread runs and no
error can be raised. So a thread of each rank looks now and then where its main thread is (see
:mod:`mmzero.engines.watch.trail`). While that moves on, it leaves a sign of life at the process group's store, one
message per look. Once it has waited for others for the limit, the thread reads where they are, and where they have
parted ways it prints one error, the same on every rank, and ends the process. An error that a rank ends with is left at
the store as well, so that the others, which would wait for it, end, too.

torch's flight recorder records collectives by number and size; which unit they belong to is only known here.
"""

import atexit
import faulthandler
import itertools
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import cache
from types import FrameType, TracebackType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import Store
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from mmzero._compat import default_store
from mmzero.engines.watch.board import Board
from mmzero.engines.watch.compiling import COMPILING
from mmzero.engines.watch.reports import ENDED, Report, gone, parted
from mmzero.engines.watch.stacks import in_backward, main_frames, shown, waits_for_others
from mmzero.engines.watch.trail import TRAIL
from mmzero.errors import OfAnotherRank, RanksPartedError, ZeroError

LOOKS_PER_LIMIT = 10
LONGEST_PAUSE_SECONDS = 1.0
# The launcher ends all ranks as soon as one has gone: until then, what others have to say comes to the screen.
FAREWELL_SECONDS = 3.0
LONGEST_FAREWELL_SECONDS = 15.0
EXIT_CODE = 1

_CONNECTION = ('gloo', 'nccl', 'connection', 'peer')
# For the life of the process: keys are new also to the next watch.
_boards = itertools.count()
_FAULT = 'mmzero/watch/fault'
_READ = 'mmzero/watch/read'


class Watch:
    """Watches this rank for the others; one for a process group.

    Args:
        limit (float): For how long a rank has to wait for others until it is asked where they are, in seconds.
        waits_in_backward (bool): Whether all waiting for others in backward is autograd's own, as under DDP.
    """

    def __init__(self, limit: float, waits_in_backward: bool) -> None:
        self.limit = limit
        self.waits_in_backward = waits_in_backward
        self.group, self.rank, self.size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
        # The main thread may sit in the store's own connection.
        self.store: Store = default_store().clone()  # type: ignore[attr-defined]
        self.host, self.pid = socket.gethostname(), os.getpid()
        self._moves: Any = None
        self._since: float | None = None
        self._instruction: tuple[int, int] | None = None
        self.on_gpu = torch.cuda.is_available()
        self._stop = threading.Event()
        self._told = False
        self._looks = 0
        self._seen_looks: dict[int, tuple[int, int]] = {}
        self._leave_report(Report(self.rank, 0, [], TRAIL.doing, 0, '', self.host, self.pid))
        self.board = self._open_board()
        # Whose processes can be seen from here: containers of one host may have numbers of their own.
        self._beside = {report.rank for report in self._read(self.board.pages) if _alive(report.pid)}
        TRAIL.start_on(self.board)
        self._thread = threading.Thread(target=self._run, name='mmzero watch', daemon=True)
        self._thread.start()

    def _open_board(self) -> Board:
        """The ranks of this host see each other's places. Collective."""
        board, key = Board(self.rank), f'mmzero/watch/board/{next(_boards)}'
        self.store.set(f'{key}/{self.rank}', str(board.path))
        board.open([self.store.get(f'{key}/{rank}').decode() for rank in range(self.size)])
        self.store.add(f'{key}/open', 1)
        while self.store.add(f'{key}/open', 0) < self.size:
            time.sleep(0.005)
        board.remove_file()
        return board

    @property
    def pause(self) -> float:
        """Seconds between two looks."""
        return min(self.limit / LOOKS_PER_LIMIT, LONGEST_PAUSE_SECONDS)

    def stop(self) -> None:
        """End the thread; the process group may go then."""
        self._stop.set()
        self.board.own.note(f'{ENDED}, {TRAIL.doing}')
        if self._thread is not threading.current_thread():
            self._thread.join()

    def tell(self, error: BaseException) -> str | None:
        """Leave word that this rank ends with an error, so that the others do not wait for it.

        Args:
            error (BaseException): The error.

        Returns:
            str or None: What this rank has to say below its error, mostly nothing; None where another rank has
                failed before, and says why.
        """
        self.stop()
        self.board.own.note(TRAIL.doing)
        if self._told:
            return ''
        self._told = True
        all_say = isinstance(error, RanksPartedError)
        text = f'all {error}' if all_say else f'{self.rank} {type(error).__name__}: {error}'
        try:
            if isinstance(error, OfAnotherRank) and self._another_speaks():
                return None
            lost = '' if isinstance(error, ZeroError) else self._lost(str(error))
            found = self.store.compare_set(_FAULT, '', text).decode()
            if found == text and all_say:
                self._wait_for_readers()
        except RuntimeError:
            # Whoever keeps the store is gone.
            return ''
        return lost if found == text else None

    def _another_speaks(self) -> bool:
        """Wait for the word of the rank that has failed first; it may be about to leave it."""
        start = time.monotonic()
        while time.monotonic() - start < FAREWELL_SECONDS:
            if self.store.check([_FAULT]):
                return True
            time.sleep(0.05)
        return False

    def end_with_others(self) -> NoReturn:
        """End with the fault that another rank has left word of: say it where all do, else let that rank say it."""
        with suppress(RuntimeError):
            rank, _, fault = self.store.get(_FAULT).decode().partition(' ')
            if rank == 'all':
                self.store.add(_READ, 1)
                # Rank 0 mostly keeps the store, which the others still read.
                self._end(fault, wait_for_others=self.rank == 0)
            self._wait_for_end_of(int(rank))
        _leave()

    def _wait_for_end_of(self, rank: int) -> None:
        """The launcher takes the first rank to end for the cause."""
        time.sleep(FAREWELL_SECONDS)
        start = time.monotonic()
        while rank in self._beside and time.monotonic() - start < LONGEST_FAREWELL_SECONDS:
            if not _alive(Report.read(self.store.get(_key(rank))).pid):
                return
            time.sleep(0.1)

    def _lost(self, error: str) -> str:
        """Say which rank a broken connection was to, where it left no word."""
        start = time.monotonic()
        while any(word in error.lower() for word in _CONNECTION) and time.monotonic() - start < FAREWELL_SECONDS:
            if self.store.check([_FAULT]):
                break
            for report in self._reports():
                if report.gone:
                    return f'{gone(report)}. Rank {self.rank} was {TRAIL.doing}'
            time.sleep(0.1)
        return ''

    def _run(self) -> None:
        store_is_there = True
        while not self._stop.wait(self.pause) and dist.is_initialized():
            report = self._look()
            try:
                if store_is_there:
                    self._compare(report)
            except RuntimeError:
                # Who keeps it, mostly rank 0, has ended, and with it the run; what this rank does alone may go on.
                store_is_there = False
            if not store_is_there and report.waiting >= self.limit:
                self._end(f'rank {self.rank} waits at {report.at()}, and whoever keeps the store (rank 0) is gone')

    def _look(self) -> Report:
        moves, frames = TRAIL.moves(), main_frames()
        waits = (waits_for_others(frames) or self._waits_unseen(frames)) and not COMPILING.active
        now = time.monotonic()
        if not waits:
            self._since = None
        elif self._since is None or moves != self._moves:
            self._since = now
        self._moves = moves
        self._looks += 1
        waiting = 0.0 if self._since is None else now - self._since
        stack = shown(frames) if waiting >= self.limit else ''
        return Report(self.rank, moves[0], TRAIL.last(), TRAIL.doing, waiting, stack, self.host, self.pid, self._looks)

    def _waits_unseen(self, frames: list[FrameType]) -> bool:
        """Whether it waits where no stack shows for what: in autograd's engine, or for a GPU.

        Collectives of NCCL are launched and left; what waits is whatever asks the GPU for a value later. In a step
        nothing else stays at one instruction for so long.
        """
        now = (id(frames[0]), frames[0].f_lasti) if frames else None
        stays, self._instruction = now is not None and now == self._instruction, now
        in_step = TRAIL.doing.startswith('in ')
        return (self.waits_in_backward and in_backward(frames)) or (self.on_gpu and in_step and stays)

    def _compare(self, report: Report) -> None:
        if self.store.check([_FAULT]):
            self.end_with_others()
        self._leave_report(report)
        if report.waiting >= self.limit:
            fault = parted(self._reports(), self.limit)
            if fault is not None and TRAIL.moves() == self._moves:
                self._end_all(fault)

    def _leave_report(self, report: Report) -> None:
        # What others compare is needed only once somebody waits.
        if report.waiting < self.limit / 2:
            report = replace(report, last=report.last[-1:])
        self.store.set(_key(report.rank), report.text())

    def _reports(self) -> list[Report]:
        return [self._seen(report) for report in self._read(range(self.size))]

    def _read(self, ranks: Iterable[int]) -> list[Report]:
        return [Report.read(text) for text in self.store.multi_get([_key(rank) for rank in ranks])]

    def _seen(self, report: Report) -> Report:
        """A report with what this host knows of the rank: whether it is gone, and what it had no time to report."""
        if report.rank not in self._beside or _alive(report.pid):
            return report if self._is_fresh(report) else replace(report, waiting=0.0)
        place, doing = self.board.pages[report.rank].last()
        return replace(report, gone=True, last=[place] if place else report.last, doing=doing or report.doing)

    def _is_fresh(self, report: Report) -> bool:
        """Whether a rank has looked since this one last read its report, a look ago.

        A thread that gets no time, since another keeps the interpreter to itself, leaves its last report as it is.
        """
        mine, theirs = self._seen_looks.get(report.rank, (0, 0))
        self._seen_looks[report.rank] = self._looks, report.looks
        return report.rank == self.rank or (mine == self._looks - 1 and theirs != report.looks)

    def _end_all(self, fault: str) -> None:
        found = self.store.compare_set(_FAULT, '', f'all {fault}').decode()
        if found != f'all {fault}':
            self.end_with_others()
        self._end(fault, wait_for_others=True)

    def _end(self, fault: str, wait_for_others: bool = False) -> NoReturn:
        print(f'error: {fault}', file=sys.stderr, flush=True)
        record_for_launcher(RanksPartedError(fault))
        if wait_for_others:
            self._wait_for_readers()
        _leave()

    def _wait_for_readers(self) -> None:
        start = time.monotonic()
        while self.store.add(_READ, 0) < self.size - 1 and time.monotonic() - start < FAREWELL_SECONDS:
            time.sleep(0.05)
        if self.rank == 0:
            time.sleep(0.2)


def _key(rank: int) -> str:
    return f'mmzero/watch/report/{rank}'


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return not _zombie(pid)


def _zombie(pid: int) -> bool:
    """Whether a process has ended and waits to be asked for its exit code."""
    try:
        with open(f'/proc/{pid}/stat') as stat:
            return stat.read().rpartition(')')[2].split()[0] in 'ZX'
    except (OSError, IndexError):
        return False


def record_for_launcher(error: BaseException) -> None:
    """Let torchrun show an error in the summary that it ends with, instead of an exit code alone.

    Args:
        error (BaseException): The error that this process ends with.
    """
    if not dist.is_torchelastic_launched():
        return
    try:
        # What a user can mend says all in its message, not in what it came from.
        raise _alone(error) if isinstance(error, ZeroError) else error
    except BaseException as raised:  # noqa: BLE001
        # It writes down what is being handled.
        get_error_handler().record_exception(raised)


def _alone(error: BaseException) -> BaseException:
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def say_last(error: BaseException, more: str, show: Callable[[], Any]) -> None:
    """Show the error that this process ends with.

    Args:
        error (BaseException): The error.
        more (str): From :func:`tell_others`: which rank is gone. The error is but a broken connection then.
        show (Callable[[], Any]): Prints the error.
    """
    if not more:
        record_for_launcher(error)
        show()
        return
    record_for_launcher(RanksPartedError(more))
    print(f'error: {more}', file=sys.stderr)


def leave_quietly() -> NoReturn:
    """End this process, since another rank has failed and says itself why: nothing should stand below that."""
    if _watch is not None:
        _watch.end_with_others()
    _leave()


def _leave() -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_CODE)


_watch: Watch | None = None


def start_watch(limit: float | None, waits_in_backward: bool) -> None:
    """Watch this rank from now on, until the process group is destroyed or the process ends.

    Args:
        limit (float, optional): Seconds; None: start none.
        waits_in_backward (bool): As of :class:`Watch`.
    """
    global _watch
    if _watch is not None and _watch.group is not dist.group.WORLD:
        stop_watch()
    if limit is None or dist.get_world_size() == 1:
        return
    if _watch is not None:
        # Of another model, which is watched as well.
        limit, waits_in_backward = min(limit, _watch.limit), waits_in_backward and _watch.waits_in_backward
    stop_watch()
    if not faulthandler.is_enabled():
        # gloo aborts where it meets what it does not expect, and says nothing of where that was.
        faulthandler.enable()
    _watch = Watch(limit, waits_in_backward)
    _tell_of_uncaught()


def stop_watch() -> None:
    """End the watch, where there is one."""
    global _watch
    if _watch is not None:
        _watch.stop()
        TRAIL.start_on(None)
        _watch = None


def watched() -> bool:
    """Whether a watch has been started for the process group that is there.

    Returns:
        bool: Whether it has.
    """
    return _watch is not None


def tell_others(error: BaseException) -> str | None:
    """Leave word that this rank ends with an error, so that the others do not wait for it.

    Args:
        error (BaseException): The error.

    Returns:
        str or None: What is to be said below the error, mostly nothing; None where another rank has failed before, and
            says why.
    """
    return '' if _watch is None else _watch.tell(error)


@cache
def _tell_of_uncaught() -> None:
    """Let scripts that know nothing of the watch tell of the error that they end with."""
    before = sys.excepthook

    def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any:
        more = '' if isinstance(error, KeyboardInterrupt) else tell_others(error)
        if more is None:
            leave_quietly()
        say_last(error, more, lambda: before(kind, error, trace))

    sys.excepthook = tell


# A thread inside the store would abort Python's finalization.
atexit.register(stop_watch)
