"""Regions that torch.compile compiles, as units of FSDP2 by hand and under the pair."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import fully_shard

from mmzero import ZeroModelWrapper, ZeroOptimWrapper
from mmzero.config import CheckpointingConfig
from mmzero.patches import checkpoint_module
from tests.distributed.cases import Faults, merged
from tests.distributed.ranks import run_ranks
from tests.distributed.training import full
from tests.models import TinyViT, image_batch

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def vit() -> TinyViT:
    torch.manual_seed(0)
    return TinyViT(dropout=0.0)


def off(found: nn.Module, wanted: nn.Module) -> list[str]:
    """Gradients that differ by more than the rounding of float32."""
    faults = []
    for (name, mine), theirs in zip(found.named_parameters(), wanted.parameters(), strict=True):
        distance = (full(mine.grad) - full(theirs.grad)).norm() / (full(theirs.grad).norm() + 1e-3)
        faults += [] if distance <= 1e-6 else [f'{name}: {distance:.1e}']
    breaks, graphs = dict(counters['graph_break']), counters['stats']['unique_graphs']
    # One for all layers, which are alike, with what is recomputed inside.
    return faults + ([] if not breaks and graphs == 1 else [f'{graphs} graphs; breaks: {breaks}'])


def by_hand(save: str, backend: str) -> list[str]:
    """Blocks are regions, compiled, and units."""
    models = vit(), vit()
    for model in models:
        for layer in model.layers:
            checkpoint_module(layer, CheckpointingConfig(save=save))
            if model is models[0]:
                layer.compile(backend=backend)
            fully_shard(layer)
        fully_shard(model)
        for step in range(2):
            model(**image_batch(10 * step + dist.get_rank()), mode='loss')['loss'].backward()
    return off(*models)


def under_the_pair(save: str, backend: str) -> list[str]:
    """Compiled before they are wrapped, so that names stay; two steps."""
    found = []
    for compiles in (True, False):
        net = vit()
        if compiles:
            for layer in net.layers:
                layer.compile(backend=backend)
        policy = dict(type='ModuleClassPolicy', classes=['Layer'])
        fields: Any = dict(wrap_policy=policy, activation_checkpointing=dict(policy=policy, save=save))
        model = ZeroModelWrapper(module=net, stage=3, **fields)
        optim = ZeroOptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1))
        optim.initialize_count_status(model, 0, 2)
        # Gradients of the last step stay.
        optim.zero_grad = lambda **_: None
        for step in range(2):
            model.train_step(image_batch(10 * step + dist.get_rank()), optim)
        found.append(model.module)
    return off(*found)


def run_cases(backend: str) -> Faults:
    faults: Faults = {}
    for case in (by_hand, under_the_pair):
        for save in ('inputs', 'matmuls'):
            torch._dynamo.reset()
            counters.clear()
            faults[f'{case.__name__} {save}'] = case(save, backend)
    return faults


@pytest.mark.parametrize('backend', ['aot_eager', 'inductor'])
def test_compiled_regions(backend: str) -> None:
    for case, faults in merged(run_ranks(2, run_cases, backend)).items():
        assert not faults, f'{case}: {faults}'
