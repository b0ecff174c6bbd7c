"""The sweep itself: config after config, each written down as soon as it is judged."""

from collections.abc import Iterable, Sequence

from mmzero.analysis.sweep.judge import judge
from mmzero.analysis.sweep.ranks import Limits
from mmzero.analysis.sweep.reduction import SIZES
from mmzero.analysis.sweep.results import Results
from mmzero.analysis.sweep.trials import Trials
from mmzero.analysis.sweep.verdict import Verdict


def sweep(
    configs: Sequence[str],
    stages: Sequence[int],
    results: Results,
    *,
    limits: Limits,
    sizes: Sequence[int] = SIZES,
    retry: Iterable[str] = (),
) -> list[Verdict]:
    """Judge configs under stages, but for those that were judged before.

    Args:
        configs (Sequence[str]): Paths, or names such as ``mmdet::dino/...py``.
        stages (Sequence[int]): ZeRO stages.
        results (Results): Where verdicts are found and written.
        limits (Limits): What a rank may use.
        sizes (Sequence[int]): Sides of the images to try, in pixels. Defaults to SIZES.
        retry (Iterable[str]): Statuses to judge again. Defaults to none.

    Returns:
        list[Verdict]: The new ones.
    """
    found: list[Verdict] = []
    for config in configs:
        missing = results.missing(config, stages, retry)
        if not missing:
            continue
        trials = Trials(config, limits, sizes)
        try:
            for stage in missing:
                found.append(judge(trials, stage))
                results.add(found[-1])
                print(_line(found[-1]), flush=True)
        finally:
            trials.close()
    return found


def _line(item: Verdict) -> str:
    apart = ', '.join(
        f'{part} {max(values.values()):.1e}'
        for part, values in (('equal', item.equal), ('different', item.different), ('own', item.own))
        if values
    )
    why = f': {item.reason}' if item.reason else ''
    return f'{item.config} stage {item.stage}: {item.status}{why} [{apart}] {item.seconds:.0f} s'
