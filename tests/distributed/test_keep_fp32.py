"""What is gathered in float32 inside of units of 16 bit: named norms, and batch norm by itself."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mmengine.model import BaseModel
from torch import nn

from mmzero import ZeroModelWrapper, ZeroOptimWrapper
from tests.distributed.cases import Faults, differing, merged
from tests.distributed.parity import HALF_BOUND, sgd
from tests.distributed.ranks import run_ranks
from tests.distributed.training import distance, train
from tests.models import TinyViT, image_batch

pytestmark = pytest.mark.distributed

LAYERS = dict(type='ModuleClassPolicy', classes=['Layer'])
STAGES = dict(type='ModuleClassPolicy', classes=['Stage'])
NORMS = dict(param_dtype='bfloat16', keep_fp32=['**.norm*'])
NO_CAST = dict(units='layers.*', cast_forward_inputs=False)
HALF = dict(param_dtype='bfloat16')


class Stage(nn.Module):
    """A residual block with batch norm, as ResNet has them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x))))))


class Residual(BaseModel):
    """A classifier of such blocks, one of them with frozen norms."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 4, stride=4)
        self.stages = nn.Sequential(Stage(), Stage(), Stage())
        self.head = nn.Linear(8, 7)
        self.stages[1].bn1.requires_grad_(False)

    def train(self, mode: bool = True) -> 'Residual':
        super().train(mode)
        self.stages[1].bn1.eval()
        return self

    def forward(self, inputs: torch.Tensor, labels: Any = None, mode: str = 'tensor') -> Any:
        logits = self.head(self.stages(self.stem(inputs)).mean((2, 3)))
        if mode == 'predict':
            return list(logits)
        return dict(loss=nn.functional.cross_entropy(logits.float(), labels)) if mode == 'loss' else logits


def ratios(build: Callable[[], nn.Module], fields: dict, seeds: int = 5) -> dict[str, float]:
    """How much farther from DDP in float32 than DDP under autocast, in the mean over seeds."""
    optim = dict(clip_grad=dict(max_norm=1.0))
    sums: dict[str, Counter] = dict(mine=Counter(), theirs=Counter())
    for seed in range(seeds):
        exact = train(build, image_batch, sgd, {}, optim, 4, seed)
        half = dict(optim, dtype='bfloat16')
        sums['theirs'].update(distance(train(build, image_batch, sgd, {}, half, 4, seed), exact))
        sums['mine'].update(distance(train(build, image_batch, sgd, fields, half, 4, seed), exact))
    return {what: sums['mine'][what] / total for what, total in sums['theirs'].items()}


def as_close_as_ddp() -> Faults:
    cells = {
        'batch norm': (Residual, dict(wrap_policy=STAGES, precision=HALF)),
        'batch norm, stage 2': (Residual, dict(stage=2, wrap_policy=STAGES, precision=HALF)),
        # Norms take any input then, so that what is added up from layer to layer need not be rounded.
        'norms': (TinyViT, dict(wrap_policy=LAYERS, precision=NORMS, overrides=[NO_CAST])),
    }
    found = {name: ratios(*cell) for name, cell in cells.items()}
    return {
        name: [f'{what} {value:.2f}' for what, value in values.items() if not value <= HALF_BOUND]
        for name, values in found.items()
    }


def checkpointed() -> Faults:
    """Blocks whose forward is computed again, as far as it is needed, on several steps: to the bit."""
    found: Faults = {}
    cells: dict[str, tuple] = {
        'norms': (TinyViT, LAYERS, NORMS, 'layers'),
        'batch norm': (Residual, STAGES, HALF, 'stages'),
    }
    for name, (build, policy, precision, blocks) in cells.items():
        for stage in (1, 3):
            optim = dict(accumulative_counts=2, dtype='bfloat16')
            fields = dict(stage=stage, wrap_policy=policy, precision=precision)
            usual = train(build, image_batch, sgd, fields, optim, 6)
            # Statistics are taken twice where a batch norm is run twice.
            again = train(
                build,
                image_batch,
                sgd,
                dict(fields, activation_checkpointing=[f'{blocks}.{i}' for i in range(3)]),
                optim,
                6,
            )
            same = usual['losses'] == again['losses']
            found[f'checkpointed {name} {stage}'] = differing(again['after'], usual['after']) + (
                [] if same else ['losses']
            )
    return found


def seen() -> list[str]:
    """The dtypes in which modules compute, in training and in val."""
    model = ZeroModelWrapper(module=TinyViT(), wrap_policy=LAYERS, precision=NORMS)
    optim = ZeroOptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1), dtype='bfloat16')
    optim.initialize_count_status(model, 0, 10)
    dtypes: list[tuple] = []
    layer = model.module.layers[1]
    for module in (layer.norm1, layer.ffn[0]):
        module.register_forward_hook(
            lambda m, args, out: dtypes.append((type(m).__name__, m.weight.dtype, args[0].dtype))
        )
    for step in range(2):
        model.train_step(image_batch(step), optim)
        with torch.no_grad():
            predicted = model.val_step(image_batch(step))
    single, half = torch.float32, torch.bfloat16
    wanted = {('FSDPLayerNorm', single, single), ('Linear', half, single)}
    faults = [] if set(dtypes) == wanted and len(dtypes) == 8 else [str(dtypes)]
    masters = {param.dtype for param in model.parameters()}
    return faults + (
        [] if masters == {single} and predicted[0].dtype == single else [f'{masters} {predicted[0].dtype}']
    )


def run_cases() -> Faults:
    return {**as_close_as_ddp(), **checkpointed(), 'seen': seen()}


@pytest.mark.parametrize('ranks', [2])
def test_float32_inside_of_16_bit(ranks: int) -> None:
    for case, faults in merged(run_ranks(ranks, run_cases)).items():
        assert not faults, f'{case}: {faults}'
