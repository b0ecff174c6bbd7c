"""Starting ranks, and watching what they hold."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mmzero.analysis.start.memory import PeakOf
from mmzero.analysis.start.rank import SOURCES, WAYS, WRITE
from mmzero.errors import ZeroError
from mmzero.runner import load_config

FILES = dict(init_cfg='weights.pth', pth='weights.pth', safetensors='weights.safetensors', sharded='weights')
"""What :func:`mmzero.analysis.start.rank.write_files` makes, by source."""


@dataclass(frozen=True)
class Start:
    """What a start took.

    Args:
        peak_bytes (int): The most private memory of all ranks together, beyond that of processes that only import.
        model_bytes (int): Of the model's parameters.
        samples (int): How often the ranks were looked at.
    """

    peak_bytes: int
    model_bytes: int
    samples: int

    @property
    def models(self) -> float:
        """The peak in models."""
        return self.peak_bytes / self.model_bytes


def measure_starts(
    config: str, nproc: int, folder: Path, sources: Iterable[str] = SOURCES, ways: Sequence[str] = WAYS
) -> dict[str, dict[str, Start]]:
    """Start a model on the ranks of one node from every source, by mmzero and by MMEngine.

    Args:
        config (str): Path or name of a config.
        nproc (int): Ranks.
        folder (Path): Takes logs and the files of weights; made where it is missing.
        sources (Iterable[str]): Where weights come from. Defaults to all; MMEngine reads those that it knows.
        ways (Sequence[str]): What starts. Defaults to both.

    Returns:
        dict[str, dict[str, Start]]: By source and way.

    Raises:
        ConfigError: If there is no such config.
        ZeroError: If a process fails; its last line and its log are named.
    """
    load_config(config)
    folder.mkdir(parents=True, exist_ok=True)
    sources = list(sources)
    if set(sources) & FILES.keys() and not (folder / FILES['sharded']).exists():
        _ended(_process([WRITE, config, str(folder), 'random'], {}, folder / 'write.log'), folder / 'write.log')
    found: dict[str, dict[str, Start]] = {source: {} for source in sources}
    for source in sources:
        for way in ways:
            if way == 'mmzero' or source not in ('safetensors', 'sharded'):
                found[source][way] = _measure(way, config, nproc, folder, source)
    return found


def starts_table(found: dict[str, dict[str, Start]]) -> str:
    """Lay out what was measured, for docs.

    Args:
        found (dict[str, dict[str, Start]]): As :func:`measure_starts` gives it.

    Returns:
        str: A Markdown table, in models.
    """
    ways = list(dict.fromkeys(way for starts in found.values() for way in starts))
    rows = [f'| weights | {" | ".join(ways)} |', '|---' * (len(ways) + 1) + '|']
    for source, starts in found.items():
        cells = [f'{starts[way].models:.2f}' if way in starts else '' for way in ways]
        rows.append(f'| {source} | {" | ".join(cells)} |')
    return '\n'.join(rows)


def _measure(way: str, config: str, nproc: int, folder: Path, source: str) -> Start:
    job = [way, config, str(folder / 'work'), source]
    if source in FILES:
        job.append(str(folder / FILES[source]))
    port = _free_port()
    logs = [folder / f'{way}_{source}_{rank}.log' for rank in range(nproc)]
    ranks = [_process(job, _environment(rank, nproc, port), log) for rank, log in enumerate(logs)]
    try:
        for rank, log in zip(ranks, logs, strict=True):
            _said(rank, 'ready', log)
        with PeakOf([rank.pid for rank in ranks]) as peak:
            for rank in ranks:
                _go_on(rank)
            model_bytes = [int(_said(rank, 'done', log)) for rank, log in zip(ranks, logs, strict=True)]
        return Start(peak.bytes, model_bytes[0], peak.samples)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def _process(job: Sequence[str], environment: dict[str, str], log: Path) -> subprocess.Popen:
    with open(log, 'w') as file:
        return subprocess.Popen(
            [sys.executable, '-m', 'mmzero.analysis.start.rank', *job],
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
        )


def _environment(rank: int, nproc: int, port: int) -> dict[str, str]:
    where = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=nproc, LOCAL_WORLD_SIZE=nproc, MASTER_PORT=port)
    return {name: str(value) for name, value in where.items()} | dict(MASTER_ADDR='127.0.0.1', OMP_NUM_THREADS='1')


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(('127.0.0.1', 0))
        return found.getsockname()[1]


def _said(process: subprocess.Popen, word: str, log: Path) -> str:
    """Wait for a word, and return what is behind it; models and loggers may print, too."""
    for line in process.stdout or ():
        first, _, rest = line.strip().partition(' ')
        if first == word:
            return rest
    process.wait()
    raise _failure('a process of the measurement has failed', log)


def _go_on(process: subprocess.Popen) -> None:
    if process.stdin is not None:
        process.stdin.write('\n')
        process.stdin.flush()


def _ended(process: subprocess.Popen, log: Path) -> None:
    process.communicate()
    if process.returncode:
        raise _failure('the weights could not be written', log)


def _failure(what: str, log: Path) -> ZeroError:
    said = log.read_text().split('\n')
    last = next((line.strip() for line in reversed(said) if line.strip()), 'it said nothing')
    return ZeroError(f'{what}: {last}; its log is {log}')
