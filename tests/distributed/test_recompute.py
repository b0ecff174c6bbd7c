"""Training with regions of any kind, under any plan, is the same training to the bit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mmzero import ZeroModelWrapper, ZeroOptimWrapper
from tests.distributed.cases import Faults, differing, merged, refused
from tests.distributed.parity import covering
from tests.distributed.ranks import run_ranks
from tests.distributed.regions import DTYPES, Regions, all_plans, on_rank
from tests.distributed.test_outside import Outsider, only_part, said, wrap
from tests.distributed.training import full
from tests.models import DINO_BLOCKS, detection_batch, tiny_dino, toy_batch

pytestmark = pytest.mark.distributed


def units(*classes: str) -> dict:
    return dict(type='ModuleClassPolicy', classes=list(classes))


def in_any_way() -> list[str]:
    """Every pair of stage, units, regions, what is kept, early stop and dtype is in one of the plans."""
    return [f'{plan}: {faults}' for plan, faults in on_rank(covering(all_plans())).items() if faults]


@pytest.mark.slow
@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('stage', range(4))
def test_all_plans(stage: int, dtype: str) -> None:
    plans = [plan for plan in all_plans() if (plan.stage, plan.dtype) == (stage, dtype)]
    for plan, faults in merged(run_ranks(2, on_rank, plans, timeout=900)).items():
        assert not faults, f'{plan}: {faults}'


def swin(with_cp: bool) -> nn.Module:
    """A backbone in which drop path draws numbers."""
    import mmdet.models  # noqa: F401
    from mmengine.registry import MODELS

    cfg: dict[str, Any] = dict(embed_dims=16, depths=(2,), num_heads=(2,), strides=(4,), out_indices=(0,))
    torch.manual_seed(0)
    model = MODELS.build(dict(cfg, type='mmdet.SwinTransformer', window_size=4, drop_path_rate=0.5, with_cp=with_cp))
    # Its own train() returns nothing.
    model.train()
    return model


def backward(model: nn.Module, module: nn.Module) -> dict[str, torch.Tensor]:
    torch.manual_seed(dist.get_rank())
    model(torch.randn(2, 3, 32, 32))[0].square().mean().backward()
    return {name: full(param.grad) for name, param in module.named_parameters() if param.grad is not None}


def under_ddp() -> list[str]:
    """Red: stock DDP stops at re-entrant checkpointing; if that goes away, the patch may too. Green under the pair."""
    faults: list[str] = []
    with refused(faults, RuntimeError, 'mark a variable ready only once'):
        backward(DistributedDataParallel(swin(True), find_unused_parameters=True), nn.Identity())
    plain = swin(False)
    wanted = backward(DistributedDataParallel(plain, find_unused_parameters=True), plain)
    model = ZeroModelWrapper(module=swin(True), stage=0, find_unused_parameters=True)
    return faults + differing(backward(model, model.module), wanted)


def uneven(
    build: Callable[[], nn.Module], batch: Callable[[int], dict], regions: list[str], **fields: Any
) -> dict[str, torch.Tensor]:
    """Weights and losses after training on three batches on rank 0, and on one on rank 1."""
    torch.manual_seed(0)
    # One second is the shortest: recomputing runs units again, and ranks without a batch do so too.
    model = ZeroModelWrapper(module=build(), activation_checkpointing=regions, watch=1, **fields)
    optim = ZeroOptimWrapper(torch.optim.SGD(model.module.parameters(), lr=0.01))
    optim.initialize_count_status(model, 0, 3)
    rank, model = dist.get_rank(), model.train()
    found = {}
    for index, data in enumerate(model.join([batch(10 * rank + number) for number in range(1 if rank else 3)])):
        torch.manual_seed(index)
        found[f'loss {index}'] = model.train_step(data, optim)['loss']
    model.eval()
    with torch.no_grad():
        model.val_step(batch(rank))
    return found | {name: full(value) for name, value in model.module.state_dict().items()}


def unequal_numbers_of_batches() -> list[str]:
    """Neither the look at the first iterations nor the watch takes a unit that runs again for a fault."""
    faults = []
    for stage in (0, 2, 3):
        fields = dict(stage=stage, wrap_policy=units('Block', 'Stage'), find_unused_parameters=True)
        plain = uneven(Regions, toy_batch, [], **fields)
        found = uneven(Regions, toy_batch, ['stages.0', 'stages.1.blocks.0', 'stages.1', 'stages.2'], **fields)
        faults += [f'stage {stage}: {fault}' for fault in differing(found, plain)]
    return faults


def sparse_batch(seed: int) -> dict:
    """One rank has no object in its first batch."""
    batch = detection_batch(seed)
    if seed == 10:
        for sample in batch['data_samples']:
            sample.gt_instances = sample.gt_instances[:0]
    return batch


def uneven_dino() -> Faults:
    regions = ['backbone.stages.0', 'backbone.stages.1', 'encoder.layers.0', 'encoder.layers.1', 'decoder.layers.0']
    found: Faults = {}
    for stage in (0, 3):
        fields = dict(stage=stage, wrap_policy=units(*DINO_BLOCKS), find_unused_parameters=True)
        build = lambda: tiny_dino(with_cp=False, drop_path_rate=0.2)  # noqa: E731
        plain, patched = (uneven(build, sparse_batch, chosen, **fields) for chosen in ([], regions))
        found[f'stage {stage}'] = differing(patched, plain)
    return found


@pytest.mark.slow
def test_a_detector_without_objects_on_one_rank() -> None:
    for case, faults in merged(run_ranks(2, uneven_dino)).items():
        assert not faults, f'{case}: {faults}'


def outside() -> list[str]:
    """What is used from outside of a unit that is a region is told as ever, and what works does."""
    regions = dict(wrap_policy=only_part, activation_checkpointing=['part', 'part.inner'])
    faults = []
    for way, text in (('module before', 'calls forward() of part.inner'), ('parameter', 'reads the parameter weight')):
        model, optim = wrap(Outsider(way), **regions)
        faults += said(lambda model=model, optim=optim: model.train_step(toy_batch(0), optim), text, 'Outsider.forward')
    model, optim = wrap(Outsider('own method'), **regions)
    for _ in range(2):
        model.train_step(toy_batch(0), optim)
    return faults


CASES = (in_any_way, under_ddp, unequal_numbers_of_batches, outside)


def run_cases() -> Faults:
    return {case.__name__: case() for case in CASES}


@pytest.fixture(scope='module')
def found() -> Faults:
    return merged(run_ranks(2, run_cases))


@pytest.mark.parametrize('case', [case.__name__ for case in CASES])
def test_recomputing(found: Faults, case: str) -> None:
    assert not found[case], '\n'.join(found[case])
