"""What is trained of a config, in which order, and what follows from it."""

from mmzero.analysis.sweep.comparison import beyond, bound
from mmzero.analysis.sweep.training import Way
from mmzero.analysis.sweep.trials import PLAIN, Failure, Trials
from mmzero.analysis.sweep.verdict import FAILED, FAILS_PLAINLY, FAILS_UNDER_DDP, TOO_LARGE, Verdict

ROUNDINGS = tuple(range(1, 25))
"""Seeds tried one after the other, until rounding explains a distance: of a chaotic
model the farthest of a few draws is no bound for the next. Of NAS-FCOS one draw of
sixteen did."""


def judge(trials: Trials, stage: int) -> Verdict:
    """Train what a stage needs and was not trained yet, and compare.

    Args:
        trials (Trials): Of the config.
        stage (int): The ZeRO stage.

    Returns:
        Verdict: The verdict.
    """
    before = trials.seconds
    verdict = Verdict(trials.config, stage)
    _judge(trials, verdict)
    verdict.size = trials.size
    verdict.seconds = trials.seconds - before
    return verdict


def _judge(trials: Trials, verdict: Verdict) -> None:
    failure = trials.train_plainly()
    if failure is not None:
        return _fail(verdict, FAILS_PLAINLY, failure)
    verdict.parameters = trials.first(PLAIN)['numel']
    stage, ddp = verdict.stage, Way('ddp', 'empty')
    equal, empty = Way('zero', 'equal', stage), Way('zero', 'empty', stage)
    trials.train(ddp, equal, empty)
    failure, refused = trials.failure(equal), trials.failure(ddp)
    if failure is not None:
        return _fail(verdict, FAILED, failure)
    verdict.units = trials.first(equal)['units']
    faults = [_compare(trials, verdict, 'equal', equal, PLAIN)]
    if refused is None:
        faults.append(_compare(trials, verdict, 'different', empty, ddp))
        failure = trials.failure(empty)
    elif not refused.is_memory:
        # What can be said of it: ranks with other objects, each with some.
        ddp, own = Way('ddp', 'own'), Way('zero', 'own', stage)
        trials.train(ddp, own)
        if trials.failure(ddp) is None:
            faults.append(_compare(trials, verdict, 'own', own, ddp))
            failure = trials.failure(own)
    if failure is not None:
        return _fail(verdict, FAILED, failure)
    if any(faults):
        return verdict.fail(FAILED, '; '.join(filter(None, faults)))
    if refused is not None:
        _fail(verdict, FAILS_UNDER_DDP, refused)


def _fail(verdict: Verdict, status: str, failure: Failure) -> None:
    verdict.fail(TOO_LARGE if failure.is_memory else status, failure.reason, failure.trace)


def _compare(trials: Trials, verdict: Verdict, part: str, ours: Way, theirs: Way) -> str:
    """Enter the distances of a part; returns what is beyond its bound."""
    try:
        found = trials.distances(ours, theirs)
        getattr(verdict, part).update(found)
        noise: dict[str, float] = {}
        for seed in ROUNDINGS if beyond(found, noise) else ():
            apart = trials.distances(Way(theirs.wrapper, theirs.data, rounding=seed), theirs)
            noise = {what: max(value, noise.get(what, 0.0)) for what, value in apart.items()}
            verdict.rounded[part] = noise
            if not beyond(found, noise):
                break
    except ValueError as error:
        return f'{part}: {error}'
    faults = [f'{what} {found[what]:.1e} > {bound(what, noise):.1e}' for what in beyond(found, noise)]
    return f'{part}: {", ".join(faults)}' if faults else ''
