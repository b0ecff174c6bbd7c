"""The results of a sweep: a file that a second start goes on with, and its tables."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from mmzero.analysis.sweep.comparison import BOUNDS, FLOOR, ROOM, bound
from mmzero.analysis.sweep.reduction import SIZES
from mmzero.analysis.sweep.training import OPTIMIZER, STEPS
from mmzero.analysis.sweep.verdict import PASSED, STATUSES, Verdict

RULES = f'{STEPS} steps, {OPTIMIZER}, sizes {SIZES}, bounds {BOUNDS}, room {ROOM}, floor {FLOOR}'
WATCHED = ('mmzero', 'torch', 'mmengine', 'mmcv', 'mmcv-lite', 'mmdet', 'mmsegmentation', 'mmpretrain')


def versions() -> dict[str, str]:
    """Say what decides on a result besides the config.

    Returns:
        dict[str, str]: Versions of the installed packages, and the rules of the sweep.
    """
    found = {}
    for name in WATCHED:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return dict(found, rules=RULES)


class Results:
    """Verdicts in a file of JSON lines; the last one of a config, stage and versions counts.

    Args:
        path (Path): The file; need not be there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.versions = versions()
        self._lines: dict[tuple[str, int], dict] = {}
        for line in path.read_text().splitlines() if path.is_file() else ():
            entry = json.loads(line)
            if entry.pop('versions') == self.versions:
                self._lines[entry['config'], entry['stage']] = entry

    def missing(self, config: str, stages: Sequence[int], retry: Iterable[str] = ()) -> list[int]:
        """Say which stages of a config are still to be trained.

        Args:
            config (str): Its name.
            stages (Sequence[int]): Those that are wanted.
            retry (Iterable[str]): Statuses that count as missing. Defaults to none.

        Returns:
            list[int]: The stages.
        """
        found = {stage: self._lines.get((config, stage)) for stage in stages}
        return [stage for stage, line in found.items() if line is None or line['status'] in retry]

    def add(self, verdict: Verdict) -> None:
        """Write a verdict, at once.

        Args:
            verdict (Verdict): The verdict.
        """
        entry = verdict.as_dict()
        self._lines[verdict.config, verdict.stage] = entry
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open('a') as file:
            file.write(json.dumps(dict(entry, versions=self.versions)) + '\n')

    def get(self, config: str, stage: int) -> Verdict:
        """Look up a verdict.

        Args:
            config (str): The config's name.
            stage (int): The ZeRO stage.

        Returns:
            Verdict: The last one that was written for these versions.

        Raises:
            KeyError: If there is none.
        """
        return Verdict(**self._lines[config, stage])


def summary(verdicts: Sequence[Verdict]) -> str:
    """Count statuses.

    Args:
        verdicts (Sequence[Verdict]): The verdicts.

    Returns:
        str: A line per stage.
    """
    lines = []
    for stage in sorted({verdict.stage for verdict in verdicts}):
        counts = Counter(verdict.status for verdict in verdicts if verdict.stage == stage)
        words = [f'{counts[status]} {status}' for status in STATUSES if counts[status]]
        lines.append(f'stage {stage}: {", ".join(words)}')
    return '\n'.join(lines)


def table(verdicts: Sequence[Verdict]) -> str:
    """Lay out verdicts as Markdown: those that were compared, then the others with their reasons.

    Args:
        verdicts (Sequence[Verdict]): The verdicts.

    Returns:
        str: Two tables; one without rows is left out.
    """
    compared = [verdict for verdict in verdicts if verdict.equal]
    heads = ('config', 'stage', 'status', 'M param.', 'units', 'px', 'equal', 'different', 'seconds')
    parts = [_markdown(heads, map(_row, compared))] if compared else []
    others = [verdict for verdict in verdicts if verdict.status != PASSED]
    rows = ((_short(item), str(item.stage), item.status, _cell(item.reason)) for item in others)
    parts += [_markdown(('config', 'stage', 'status', 'why'), rows)] if others else []
    return '\n\n'.join(parts)


def _row(item: Verdict) -> tuple[str, ...]:
    different = _worst(item, 'different') if item.different else _worst(item, 'own') + ', objects on both'
    return (
        _short(item),
        str(item.stage),
        item.status,
        f'{item.parameters / 1e6:.1f}',
        str(item.units),
        str(item.size),
        _worst(item, 'equal'),
        different if item.different or item.own else '',
        f'{item.seconds:.0f}',
    )


def _worst(item: Verdict, part: str) -> str:
    """The quantity that is nearest to its bound, or farthest beyond it, with that bound where rounding moved it."""
    apart, rounded = getattr(item, part), item.rounded.get(part, {})
    if not apart:
        return ''
    what = max(apart, key=lambda name: apart[name] / BOUNDS[name])
    moved = f' of {bound(what, rounded):.0e}' if bound(what, rounded) > BOUNDS[what] else ''
    return f'{what} {apart[what]:.0e}{moved}'


def _short(item: Verdict) -> str:
    return f'`{item.config.split("::")[-1].removesuffix(".py")}`'


def _cell(text: str) -> str:
    return text.replace('|', r'\|').replace('\n', ' ')


def _markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ['---'] * len(heads), *rows]
    return '\n'.join(f'| {" | ".join(line)} |' for line in lines)
