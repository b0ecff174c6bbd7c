"""The sweep itself: config after config, each written down as soon as it is judged."""

from collections.abc import Iterable, Sequence

from mmzero.analysis.sweep.judge import judge
from mmzero.analysis.sweep.ranks import Limits
from mmzero.analysis.sweep.reduction import SIZES
from mmzero.analysis.sweep.results import Results
from mmzero.analysis.sweep.trials import Trials
from mmzero.analysis.sweep.verdict import FAILS_PLAINLY, Verdict


def sweep(
    families: Sequence[Sequence[str]],
    stages: Sequence[int],
    results: Results,
    *,
    limits: Limits,
    sizes: Sequence[int] = SIZES,
    retry: Iterable[str] = (),
) -> list[Verdict]:
    """Judge a config of each family under stages: the first that trains plainly. What was judged before is not again.

    Args:
        families (Sequence[Sequence[str]]): Configs of each, in the order in which they are tried: paths, or names such
            as ``mmdet::dino/...py``.
        stages (Sequence[int]): ZeRO stages.
        results (Results): Where verdicts are found and written.
        limits (Limits): What a rank may use.
        sizes (Sequence[int]): Sides of the images to try, in pixels. Defaults to SIZES.
        retry (Iterable[str]): Statuses to judge again. Defaults to none.

    Returns:
        list[Verdict]: A verdict of each family and stage, new or old.
    """
    found: list[Verdict] = []
    for configs in families:
        for config in configs:
            _judge(config, results.missing(config, stages, retry), results, limits, sizes)
            if any(results.get(config, stage).status != FAILS_PLAINLY for stage in stages):
                break
        else:
            # None trains: the first one says why.
            config = configs[0]
        found += [results.get(config, stage) for stage in stages]
    return found


def _judge(config: str, stages: Sequence[int], results: Results, limits: Limits, sizes: Sequence[int]) -> None:
    trials = Trials(config, limits, sizes)
    try:
        for stage in stages:
            verdict = judge(trials, stage)
            results.add(verdict)
            print(_line(verdict), flush=True)
    finally:
        trials.close()


def _line(item: Verdict) -> str:
    parts = dict(equal=item.equal, different=item.different, own=item.own)
    apart = ', '.join(f'{part} {max(values.values()):.1e}' for part, values in parts.items() if values)
    why = f': {item.reason}' if item.reason else ''
    return f'{item.config} stage {item.stage}: {item.status}{why} [{apart}] {item.seconds:.0f} s'
