"""Gradients that are not finite: nothing moves on any rank, it is told which and where, and too many end the run."""

import itertools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mmengine.logging import MessageHub, MMLogger
from mmengine.model import BaseModel
from torch import nn

from mmzero import ZeroModelWrapper, ZeroOptimWrapper
from mmzero.errors import ConfigError, NonFiniteError
from tests.distributed.cases import Faults, differing, merged, refused
from tests.distributed.ranks import run_ranks
from tests.distributed.test_float16 import spoil
from tests.distributed.training import full
from tests.models import TinyViT, ToyModel, image_batch, toy_batch

pytestmark = pytest.mark.distributed

UNITS = dict(ToyModel='Block', TinyViT='Layer', Steps='Step')
CLIPS: dict[str, dict | None] = {
    'norm': dict(max_norm=1.0),
    'inf': dict(max_norm=1.0, norm_type='inf'),
    'value': dict(type='value', clip_value=0.1),
    'none': None,
}
_numbers = itertools.count()


class Lines(logging.Handler):
    """What was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def pair(
    model: nn.Module, stage: int = 3, fields: dict | None = None, lr: float = 0.1, **optim: Any
) -> tuple[ZeroModelWrapper, ZeroOptimWrapper]:
    policy = dict(type='ModuleClassPolicy', classes=[UNITS.get(type(model).__name__, 'Layer')])
    fields = dict(dict(wrap_policy=policy, find_unused_parameters=True), **(fields or {}))
    wrapper = ZeroModelWrapper(module=model, stage=stage, **fields)
    wrapped = ZeroOptimWrapper(torch.optim.SGD(wrapper.parameters(), lr=lr, momentum=0.9, weight_decay=0.1), **optim)
    wrapped.message_hub = MessageHub(f'nonfinite {next(_numbers)}')
    wrapped.initialize_count_status(wrapper, 0, 100)
    return wrapper, wrapped


def weights(model: ZeroModelWrapper) -> dict[str, torch.Tensor]:
    return {key: full(param) for key, param in model.module.named_parameters()}


def logged(run: Callable[[], Any]) -> list[str]:
    handler, logger = Lines(), MMLogger.get_current_instance()
    logger.addHandler(handler)
    try:
        run()
    finally:
        logger.removeHandler(handler)
    return handler.lines


def skipped(stage: int) -> list[str]:
    """A gradient of one rank is not finite: in all of a unit, in one row of a shard, in a 0-dim parameter."""
    faults = []
    batch = toy_batch(dist.get_rank())
    names = {
        'blocks.1': 'the first in backward blocks.1.down.bias',
        'stem': '2 of 26 parameters have a gradient that is not finite, the first in backward stem.bias',
        'blocks.1.scale': 'the first in backward blocks.1.scale (inf)',
    }
    for (name, told), (clip, options) in itertools.product(names.items(), CLIPS.items()):
        torch.manual_seed(0)
        model, optim = pair(ToyModel(), stage, clip_grad=options)
        model.train_step(batch, optim)
        before, handle = weights(model), spoil(model.module, name)
        lines = logged(lambda: model.train_step(batch, optim))  # noqa: B023
        handle.remove()
        faults += [f'{name}, {clip}: {fault}' for fault in differing(weights(model), before)]
        found = [line for line in lines if 'optimizer step skipped (1 in a row, 20 are allowed, 1 in all)' in line]
        if dist.get_rank() == 0 and not (len(found) == 1 and told in found[0] and 'loss is finite' in found[0]):
            faults.append(f'{name}, {clip}: {lines}')
        scalars = optim.message_hub.log_scalars
        norms = scalars['train/grad_norm'].data[0] if 'train/grad_norm' in scalars else []
        if scalars['train/skipped_steps'].current() != 1 or not all(map(torch.isfinite, map(torch.tensor, norms))):
            faults.append(f'{name}, {clip}: {scalars}')
        model.train_step(batch, optim)
        if not differing(weights(model), before):
            faults.append(f'{name}, {clip}: the next step is skipped, too')
    return faults


def in_a_micro_batch() -> list[str]:
    """The second of four; the last, shorter group is a step of its own."""
    faults = []
    for stage in (0, 1, 2, 3):
        torch.manual_seed(0)
        model, optim = pair(ToyModel(), stage, accumulative_counts=4)
        optim.initialize_count_status(model, 0, 6)
        before = weights(model)
        for index in range(6):
            handle = spoil(model.module, 'stem') if index == 1 else None
            model.train_step(toy_batch(index), optim)
            if handle is not None:
                handle.remove()
            if index == 3:
                faults += [f'stage {stage}: {fault}' for fault in differing(weights(model), before)]
        faults += [] if differing(weights(model), before) else [f'stage {stage}: the last group is skipped']
    return faults


def too_many(stage: int, **optim: Any) -> list[str]:
    faults: list[str] = []
    precision = dict(precision=dict(param_dtype=optim['dtype'])) if stage and 'dtype' in optim else {}
    model, wrapped = pair(TinyViT(), stage, precision, max_skips=2, **optim)
    before = weights(model)
    spoil(model.module, 'patch')
    for _ in range(2):
        model.train_step(image_batch(dist.get_rank()), wrapped)
    wanted = (
        'optim_wrapper.max_skips: 3 optimizer step(s) in a row were skipped, 2 are allowed',
        'the first in backward patch.bias',
        'learning rate',
        'detect_anomaly=True',
        *(['loss_scale', 'bfloat16'] if 'dtype' in optim else []),
    )
    with refused(faults, NonFiniteError, *wanted):
        model.train_step(image_batch(dist.get_rank()), wrapped)
    return faults + differing(weights(model), before)


def not_in_a_row() -> list[str]:
    model, optim = pair(TinyViT(), max_skips=1)
    for _ in range(3):
        handle = spoil(model.module, 'patch')
        model.train_step(image_batch(dist.get_rank()), optim)
        handle.remove()
        model.train_step(image_batch(dist.get_rank()), optim)
    return [] if optim.message_hub.get_scalar('train/skipped_steps').current() == 3 else ['not counted']


def as_under_ddp(stage: int) -> list[str]:
    """With None nothing is looked at, and nan goes into the weights."""
    faults = []
    for clip in ('norm', 'none'):
        model, optim = pair(TinyViT(), stage, clip_grad=CLIPS[clip], max_skips=None)
        spoil(model.module, 'patch')
        model.train_step(image_batch(0), optim)
        if all(bool(value.isfinite().all()) for value in weights(model).values()):
            faults.append(f'{clip}: was skipped')
    return faults


def a_loss() -> list[str]:
    """The rank whose loss is nan is named."""
    model, optim = pair(TinyViT())
    batch = image_batch(0)
    if dist.get_rank() == 1:
        batch['inputs'][0] = float('nan')
    lines = logged(lambda: model.train_step(batch, optim))
    return [] if dist.get_rank() or 'the loss is nan on rank 1' in lines[-1] else lines


class Step(nn.Module):
    """A unit whose forward divides by zero, or whose root has no derivative at zero."""

    def __init__(self, way: str = '') -> None:
        super().__init__()
        self.inner = nn.Linear(12, 12)
        self.way = way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + torch.tanh(self.inner(x))
        zeros = x * 0
        if self.way == 'forward':
            return x / zeros
        return x + zeros.abs().sqrt() if self.way == 'backward' else x


class Steps(BaseModel):
    """Three of them, of which one goes wrong on rank 1."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.steps = nn.ModuleList(Step(way if i == 1 and dist.get_rank() == 1 else '') for i in range(3))
        self.head = nn.Linear(12, 7)

    def forward(self, inputs: torch.Tensor, labels: Any = None, mode: str = 'tensor') -> Any:
        for step in self.steps:
            inputs = step(inputs)
        return dict(loss=nn.functional.cross_entropy(self.head(inputs), labels))


def anomalies(stage: int) -> list[str]:
    """The module is named, with and without recomputation."""
    faults: list[str] = []
    told = {'forward': 'on rank 1 in the output of steps.1 (Step)', 'backward': 'on rank 1 in the gradient of the '}
    for way, recompute in itertools.product(told, ([], ['steps.1'])):
        fields = dict(detect_anomaly=True, activation_checkpointing=recompute)
        model, optim = pair(Steps(way), stage, fields, max_skips=1)
        model.train_step(toy_batch(0), optim)
        with refused(faults, NonFiniteError, told[way], 'steps.1'):
            model.train_step(toy_batch(0), optim)
    model, optim = pair(Steps(''), stage, dict(detect_anomaly=True), max_skips=0)
    model.train_step(toy_batch(0), optim)
    spoilt = toy_batch(0)
    spoilt['inputs'][0] = float('nan')
    with refused(faults, NonFiniteError, 'on rank 0 in the input of ', '(in the data, or in code before it)'):
        model.train_step(spoilt, optim)
    model, optim = pair(Steps(''), stage, dict(detect_anomaly=True), max_skips=0)
    model.train_step(toy_batch(0), optim)
    kept = len(model.engine.anomalies._flags)
    return faults + ([f'{kept} flags are kept'] if kept else [])


class Matching(TinyViT):
    """Its loss fails on nan, as a matcher does."""

    def forward(self, inputs: torch.Tensor, labels: Any = None, mode: str = 'tensor') -> Any:
        found = super().forward(inputs, labels, mode)
        if not bool(found['loss'].isfinite()):
            raise ValueError('matrix contains invalid numeric entries')
        return found


def errors_on_nan() -> list[str]:
    """An error that nan leads to says where that began."""
    faults: list[str] = []
    batch = image_batch(0)
    batch['inputs'][0] = float('nan')
    torch.manual_seed(0)
    fields = dict(detect_anomaly=True, wrap_policy=None)
    model, optim = pair(Matching(), 3, fields)
    with refused(faults, NonFiniteError, 'ValueError: matrix contains', 'nan or inf began in the input of'):
        model.train_step(batch, optim)
    return faults


def refusals() -> list[str]:
    faults: list[str] = []
    for optim, text in (
        (dict(max_skips=-1), 'optim_wrapper.max_skips: got -1; expected None or an integer of 0 or more'),
        (dict(grad_norms=['patsh']), "optim_wrapper.grad_norms: names nothing that is trained: 'patsh'; did you mean"),
        (dict(grad_norms=3), "optim_wrapper.grad_norms: got 3; expected 'groups'"),
    ):
        with refused(faults, ConfigError, text):
            pair(TinyViT(), **optim)  # type: ignore[arg-type]
    with refused(faults, ConfigError, 'optim_wrapper.max_skips: got None', 'detect_anomaly'):
        pair(TinyViT(), 3, dict(detect_anomaly=True), max_skips=None)
    return faults


def run_cases(stages: tuple[int, ...]) -> Faults:
    float16 = dict(dtype='float16', loss_scale=dict(init_scale=2.0**10), clip_grad=dict(max_norm=1.0))
    return {
        **{f'skipped, stage {stage}': skipped(stage) for stage in stages},
        'in a micro-batch': in_a_micro_batch(),
        **{f'too many, stage {stage}': too_many(stage) for stage in (0, 3)},
        'too many in float16': too_many(3, **float16),
        'not in a row': not_in_a_row(),
        **{f'as under DDP, stage {stage}': as_under_ddp(stage) for stage in (0, 3)},
        'a loss': a_loss(),
        **{f'anomalies, stage {stage}': anomalies(stage) for stage in (0, 3)},
        'errors on nan': errors_on_nan(),
        'refusals': refusals(),
    }


@pytest.mark.parametrize('ranks, stages', [(2, (0, 3)), pytest.param(4, (0, 1, 2, 3), marks=pytest.mark.slow)])
def test_gradients_that_are_not_finite(ranks: int, stages: tuple[int, ...]) -> None:
    for case, faults in merged(run_ranks(ranks, run_cases, stages)).items():
        assert not faults, f'{case}: {faults}'
