"""What a step does not use has no gradient of an earlier step, under DeepSpeed's stages, offloaded or not."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from mmzero import ZeroModelWrapper, ZeroOptimWrapper
from tests.distributed.cases import Faults, merged
from tests.distributed.ranks import run_ranks
from tests.models import TinyViT, image_batch

pytestmark = [pytest.mark.deepspeed, pytest.mark.distributed]

# A rank's half of the large layer is more than a megabyte, from which on it would lie on a disk.
SIDE = 1000
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    **{f'stage {stage}': (stage, {}) for stage in (1, 2, 3)},
    **{f'stage {stage}, on the host': (stage, dict(optimizer='cpu')) for stage in (1, 2, 3)},
    'all on the host': (3, dict(params='cpu', optimizer='cpu')),
}


class NowAndThen(TinyViT):
    """With a large layer that batches use as they say."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.large = torch.nn.Linear(SIDE, SIDE)
        self.is_used = iter(())

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor | None = None, mode: str = 'tensor') -> Any:
        found = super().forward(inputs, labels, mode)
        if isinstance(found, dict) and next(self.is_used):
            found['large_loss'] = self.large(inputs.new_ones(1, SIDE)).square().mean()
        return found


def weights_by_steps(
    stage: int, offload: dict[str, Any], half: bool, used: list[bool], per_step: int
) -> list[torch.Tensor]:
    """The large layer's, after each step of the same data."""
    torch.manual_seed(0)
    options = dict(zero_optimization=dict(stage3_param_persistence_threshold=50)) if stage == 3 else None
    fields: dict[str, Any] = dict(stage=stage, engine='deepspeed', offload=offload, engine_options=options)
    if half:
        fields['precision'] = dict(param_dtype='bfloat16')
    model = ZeroModelWrapper(module=NowAndThen(), **fields)
    model.module.is_used = iter(used)
    optimizer = torch.optim.SGD(model.module.parameters(), lr=0.1)
    optim = ZeroOptimWrapper(optimizer, accumulative_counts=per_step, dtype='bfloat16' if half else None)
    optim.initialize_count_status(model, 0, len(used))
    model.train()
    found = [model.engine.model_state().get('large.weight')]
    for number in range(len(used)):
        model.train_step(image_batch(0), optim)
        if number % per_step == per_step - 1:
            found.append(model.engine.model_state().get('large.weight'))
    return found  # type: ignore[return-value]


def faults_of(stage: int, offload: dict[str, Any], half: bool) -> list[str]:
    """SGD without momentum moves nothing by a gradient of zeros."""
    found = weights_by_steps(stage, offload, half, [True, False, True], 1)
    # Of the second step, only the second micro-batch uses it: half a gradient.
    parts = weights_by_steps(stage, offload, half, [True, True, False, True], 2)
    if dist.get_rank():
        return []
    moved = [not torch.equal(before, after) for before, after in zip(found, found[1:], strict=False)]
    faults = [] if moved == [True, False, True] else [f'moved {moved}']
    gradient = (found[2] - found[3]) / 0.1
    # Both have stepped once; what follows is half a step.
    same = torch.allclose(parts[1], found[1], atol=1e-7)
    step = (parts[1] - parts[2]) / 0.1
    is_half = (step - gradient / 2).norm() <= (2e-2 if half else 1e-3) * gradient.norm()
    return faults + ([] if same and is_half else ['not half a step'])


def all_faults() -> Faults:
    return {f'{name}, {half}': faults_of(*case, half) for name, case in CASES.items() for half in (False, True)}


def test_used_now_and_then() -> None:
    for case, faults in merged(run_ranks(2, all_faults)).items():
        assert not faults, f'{case}: {faults}'
