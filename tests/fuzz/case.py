"""Running one spoilt config, and judging what came of it."""

import copy
import gc
import random
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from mmengine.config import Config
from mmengine.logging import MessageHub, MMLogger
from mmengine.registry import RUNNERS, DefaultScope
from mmengine.visualization import Visualizer

from mmzero import ZeroModelWrapper
from mmzero.errors import ZeroError
from tests.fuzz.bases import MODELS_OF_RUNS, SETTINGS, TWO_RANKS, base_config
from tests.fuzz.judge import is_harmless, is_named
from tests.fuzz.mutations import KINDS, Mutation, mutate

MAX_STEPS = 6


class Enough(BaseException):
    """Ends a run that would go on."""


@dataclass
class Verdict:
    """What came of a case.

    Args:
        seed (int): Its seed.
        kind (str): The kind of its mutation.
        base (str): Which config was spoilt.
        what (list[str]): What was changed.
        outcome (str): 'refused' or 'trained', or what is wrong.
        text (str): The error, or why training is right.
        ok (bool): Whether it is one of the two outcomes that are right.
    """

    seed: int
    kind: str
    base: str
    what: list[str]
    outcome: str
    text: str
    ok: bool

    def as_dict(self) -> dict[str, Any]:
        """For a line of JSON."""
        return asdict(self)


def run_case(seed: int, digits: str, ranks: int = 1) -> Verdict:
    """Spoil a config, build and train it for a few steps in this process, and judge.

    Args:
        seed (int): Chooses base, kind and place.
        digits (str): Path of the digits data set.
        ranks (int): Size of the process group; over 1, it exists. Defaults to 1.

    Returns:
        Verdict: The judgement.
    """
    kind = KINDS[seed % len(KINDS)]
    rng = random.Random(seed)
    setting = rng.choice(sorted(SETTINGS if ranks == 1 else TWO_RANKS))
    model = rng.choice(MODELS_OF_RUNS)
    with tempfile.TemporaryDirectory() as work_dir:
        good = base_config(model, setting, digits, work_dir).to_dict()
        spoilt = copy.deepcopy(good)
        mutations = mutate(spoilt, seed, kind)
        if ranks > 1 and any(mutation.path == 'launcher' for mutation in mutations):
            spoilt['launcher'] = 'pytorch'
        outcome, text = _train(spoilt, work_dir, ranks)
    ok, reason = judge(mutations, outcome, text, good)
    what = [str(mutation) for mutation in mutations]
    return Verdict(seed, kind, f'{model}, {setting}', what, outcome, reason or text, ok)


def judge(mutations: list[Mutation], outcome: str, text: str, good: dict) -> tuple[bool, str]:
    """Hold an outcome against the mutations."""
    if outcome == 'refused':
        unnamed = [mutation.path for mutation in mutations if not is_named(text, mutation, good)]
        # One that only the first step would show may hide behind one that the check finds.
        ok = len(unnamed) < len(mutations)
        return ok, '' if ok else f'does not name {", ".join(unnamed)}: {text}'
    if outcome == 'trained':
        wrong = [mutation.path for mutation in mutations if not is_harmless(mutation, good)]
        return not wrong, f'silently taken: {", ".join(wrong)}' if wrong else 'has its effect'
    return False, text


def _train(cfg: dict, work_dir: str, ranks: int) -> tuple[str, str]:
    steps = [0]
    with _fresh_process(ranks), _counting(steps), warnings.catch_warnings():
        warnings.simplefilter('ignore')
        try:
            config = Config(cfg)
            if config.get('runner_type') != 'mmzero.ZeroRunner':
                from mmzero.runner import build_runner

                build_runner(config).train()
            else:
                RUNNERS.build(config).train()
        except Enough:
            return 'trained', ''
        except ZeroError as error:
            return 'refused', str(error)
        except Exception as error:
            return f'traceback of {type(error).__name__}', traceback.format_exc()[-2500:]
    return ('trained', '') if steps[0] else ('trained nothing', 'no step was made')


@contextmanager
def _counting(steps: list[int]) -> Iterator[None]:
    original = ZeroModelWrapper.train_step

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        if steps[0] == MAX_STEPS:
            raise Enough
        steps[0] += 1
        return original(self, *args, **kwargs)

    ZeroModelWrapper.train_step = counted  # type: ignore[method-assign]
    try:
        yield
    finally:
        ZeroModelWrapper.train_step = original  # type: ignore[method-assign]


@contextmanager
def _fresh_process(ranks: int) -> Iterator[None]:
    """Give back what a run sets for the whole process."""
    try:
        yield
    finally:
        if ranks == 1 and dist.is_initialized():
            dist.destroy_process_group()
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.benchmark = torch.backends.cudnn.deterministic = False
        torch.set_grad_enabled(True)
        for manager in (MMLogger, MessageHub, Visualizer, DefaultScope, *Visualizer.__subclasses__()):
            manager._instance_dict.clear()
        gc.collect()
