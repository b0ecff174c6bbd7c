"""Running trainings in processes of their own, within limits of time and memory."""

import faulthandler
import multiprocessing
import os
import re
import resource
import signal
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mmengine.logging import MMLogger

from mmzero.analysis.sweep.families import read
from mmzero.analysis.sweep.models import Case
from mmzero.analysis.sweep.training import Way, train

PRELOADED = ['mmzero', 'mmzero.analysis.sweep.preload']

STANDARD_LIBRARY, TORCH = str(Path(os.__file__).parent), str(Path(torch.__file__).parent)

LONGEST, LOG_END = 200, 2000
"""Characters of a reason, and of the end of a rank's log that is kept where it failed."""

START_SECONDS = 180
"""Until all ranks are there; the first of all processes imports every package."""

GRACE_SECONDS = 10
"""How long the other ranks may take to tell what went wrong once one has failed."""


@dataclass(frozen=True)
class Limits:
    """What a rank may use.

    Args:
        seconds (float): For one training, with building the model. Defaults to 300.
        gib (float): Memory of its own. Defaults to 3.5.
    """

    seconds: float = 300
    gib: float = 3.5


@dataclass
class Outcome:
    """What became of some trainings.

    Args:
        done (dict[Way, list]): What every rank returned, by way.
        failed (Way, optional): The one that failed, with which the processes ended; None where all are done.
        reason (str): The last line of the traceback, or how it ended without one.
        trace (str): The whole traceback.
        seconds (dict[Way, float]): How long each took.
    """

    done: dict[Way, list[Any]] = field(default_factory=dict)
    failed: Way | None = None
    reason: str = ''
    trace: str = ''
    seconds: dict[Way, float] = field(default_factory=dict)


def run_ranks(config: str, size: int, ways: Sequence[Way], world_size: int, folder: Path, limits: Limits) -> Outcome:
    """Train a config in several ways, one after the other, in fresh processes.

    Records of weights go to files in the folder, under the ways' names; losses and norms come back.

    Args:
        config (str): A path, or a name such as ``mmdet::dino/...py``.
        size (int): Side of the images in pixels.
        ways (Sequence[Way]): How to train.
        world_size (int): Number of ranks; one rank has no process group.
        folder (Path): For files of this run alone.
        limits (Limits): What a rank may use.

    Returns:
        Outcome: Of the ways up to the first that failed.
    """
    context = multiprocessing.get_context('forkserver')
    context.set_forkserver_preload(PRELOADED)
    (folder / 'store').unlink(missing_ok=True)
    pipes, processes = [], []
    for rank in range(world_size):
        ours, theirs = context.Pipe(duplex=False)
        args = (rank, world_size, config, size, tuple(ways), folder, limits, theirs)
        processes.append(context.Process(target=_on_rank, args=args, daemon=True))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    try:
        return _collect(pipes, processes, ways, folder, limits)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _collect(pipes: list, processes: list, ways: Sequence[Way], folder: Path, limits: Limits) -> Outcome:
    outcome = Outcome()
    # Reading the config and meeting the other ranks is no part of a training.
    _, errors = _one_way(pipes, processes, time.monotonic() + START_SECONDS)
    for way in ways:
        begun = time.monotonic()
        values: dict[int, Any] = {}
        if not errors:
            values, errors = _one_way(pipes, processes, begun + limits.seconds)
        outcome.seconds[way] = time.monotonic() - begun
        if len(values) == len(pipes):
            outcome.done[way] = [values[rank] for rank in range(len(pipes))]
            continue
        outcome.failed = way
        if not errors:
            stuck = [rank for rank in range(len(pipes)) if rank not in values]
            places = [f'rank {rank} in {_place(folder / f"stack{rank}")}' for rank in stuck]
            errors = [f'hung, or slow: not done after {limits.seconds:.0f} s; {", ".join(places)}']
        logs = [(folder / f'log{rank}').read_text(errors='replace')[-LOG_END:] for rank in range(len(pipes))]
        outcome.trace = '\n'.join([*errors, *logs])
        outcome.reason = _error_line(errors[0])
        return outcome
    return outcome


def _one_way(pipes: list[Connection], processes: list, deadline: float) -> tuple[dict[int, Any], list[str]]:
    """Wait until every rank has told what came of a training; returns values by rank, and errors as they came."""
    values: dict[int, Any] = {}
    errors: list[str] = []
    waiting = dict(enumerate(pipes))
    while waiting and (left := deadline - time.monotonic()) > 0:
        ready = wait(list(waiting.values()), timeout=left)
        for rank in [rank for rank, pipe in waiting.items() if pipe in ready]:
            ok, value = _received(waiting.pop(rank), rank, processes[rank])
            if ok:
                values[rank] = value
                continue
            errors.append(value)
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    return values, errors


def _received(pipe: Connection, rank: int, process: Any) -> tuple[bool, Any]:
    try:
        return pipe.recv()
    except EOFError:
        process.join()
        return False, f'RuntimeError: rank {rank} ended with {_exit(process.exitcode)}'


def _exit(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f'exit code {code}'


def _error_line(text: str) -> str:
    """The error at the end of a traceback, in one line; with its place where it says nothing."""
    lines = [line for line in text.splitlines() if line.strip()]
    starts = [index for index, line in enumerate(lines) if re.match(r'[\w.]+(Error|Exception|Exit)\b', line)]
    error = re.sub(r'\s+', ' ', ' '.join(lines[starts[-1] :] if starts else lines[-1:]))
    error = re.sub(r'^(\w+\.)+(?=\w+:)', '', error)
    if ':' not in error:
        file, line = re.findall(r'File "([^"]+)", line (\d+)', text)[-1] if 'File "' in text else ('', '')
        error += f' in {"/".join(Path(file).parts[-3:])}:{line}'
    return error if len(error) <= LONGEST else f'{error[:LONGEST]}...'


def _place(stack: Path) -> str:
    """Where a rank was, by the dump of its stack: the innermost line that is not torch's or Python's own."""
    text = stack.read_text() if stack.exists() else ''
    main = text.split('\n\n')[-1]
    frames = re.findall(r'File "([^"]+)", line (\d+) in (\w+)', main)
    others = [frame for frame in frames if not _is_foreign(frame[0])]
    file, line, function = [*others, *frames, ('an unknown place', '0', '')][0]
    return f'{"/".join(Path(file).parts[-3:])}:{line} {function}'


def _is_foreign(file: str) -> bool:
    return file.startswith((TORCH, '<')) or (file.startswith(STANDARD_LIBRARY) and 'site-packages' not in file)


def _on_rank(
    rank: int,
    world_size: int,
    config: str,
    size: int,
    ways: tuple[Way, ...],
    folder: Path,
    limits: Limits,
    pipe: Connection,
) -> None:
    bytes_ = int(limits.gib * 2**30)
    resource.setrlimit(resource.RLIMIT_DATA, (bytes_, bytes_))
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_the_sweep, daemon=True).start()
    log = os.open(folder / f'log{rank}', os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        if world_size > 1:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
            dist.init_process_group(
                'gloo',
                init_method=f'file://{folder}/store',
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=2 * limits.seconds),
            )
        MMLogger.get_instance('sweep', log_level='WARNING')
        case = Case(read(config), size)
        pipe.send((True, None))
        for way in ways:
            with open(folder / f'stack{rank}', 'w') as stack:
                faulthandler.dump_traceback_later(0.9 * limits.seconds, file=stack)
                try:
                    pipe.send((True, _trained(case, way, rank, folder)))
                finally:
                    faulthandler.cancel_dump_traceback_later()
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    # Without waiting for the other ranks: closed connections end those that wait for this one.
    os._exit(0)


def _end_with_the_sweep() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _trained(case: Case, way: Way, rank: int, folder: Path) -> dict[str, Any]:
    record = train(case, way)
    if rank == 0 and record.after:
        torch.save(vars(record), folder / str(way))
    return dict(losses=record.losses, norms=record.norms, numel=record.numel, units=record.units)
