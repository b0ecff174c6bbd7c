"""Blocks with ``with_cp=True``: fail under MMEngine's own FSDP, are right here at every granularity of units."""

import functools
import warnings

import pytest
import torch
from mmengine.model import MMFullyShardedDataParallel
from mmengine.optim import OptimWrapper

from tests.distributed.ranks import run_ranks
from tests.distributed.training import train
from tests.models import detection_batch, tiny_dino

pytestmark = pytest.mark.distributed

GRANULARITIES = {
    'blocks': ['SwinBlock'],
    'stages': ['SwinBlockSequence'],
    'backbone': ['SwinTransformer'],
    'all of them': ['SwinBlock', 'SwinBlockSequence', 'SwinTransformer'],
    'encoder layers alone': ['DeformableDetrTransformerEncoderLayer'],
    'root': None,
}


def under_mmengine(with_cp: bool) -> str:
    """Train DINO under MMFullyShardedDataParallel with a unit per stage of Swin; says how it failed."""
    from mmdet.models.backbones.swin import SwinBlockSequence
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    torch.manual_seed(0)
    model = MMFullyShardedDataParallel(
        module=tiny_dino(with_cp=with_cp),
        auto_wrap_policy=ModuleWrapPolicy({SwinBlockSequence}),
        device_id=torch.device('cpu'),
    )
    optim = OptimWrapper(torch.optim.AdamW(model.parameters(), lr=1e-3))
    try:
        model.train_step(detection_batch(0), optim)
    except RuntimeError as error:
        return str(error)
    return ''


def with_and_without() -> tuple[str, str]:
    return under_mmengine(False), under_mmengine(True)


def test_mmengine_fsdp_fails_on_with_cp() -> None:
    """Red: the failure that the patch is for. If it goes away, the patch may too."""
    (without0, failure0), (without1, failure1) = run_ranks(2, with_and_without)
    assert without0 == without1 == '', 'the failure is not with_cp alone'
    # Which weight the recompute meets first as a flat shard differs by rank.
    assert failure1
    assert 'mat2 must be a matrix, got 1-D tensor' in failure0


def gradients(stage: int, classes: list[str] | None, with_cp: bool) -> dict[str, torch.Tensor | None]:
    policy = None if classes is None else dict(type='ModuleClassPolicy', classes=classes)
    # Dropout and drop path draw numbers, which the recompute has to draw again.
    build = functools.partial(tiny_dino, with_cp=with_cp, drop_rate=0.1, drop_path_rate=0.2)
    sgd = functools.partial(torch.optim.SGD, lr=0.01)
    wrapper = dict(stage=stage, wrap_policy=policy)
    return train(build, detection_batch, lambda model: sgd(model.parameters()), wrapper, None, steps=1)['grads']


def differing(stages: tuple[int, ...], names: tuple[str, ...]) -> list[str]:
    """Runs on every rank: what differs between checkpointing and none."""
    faults = []
    for stage in stages:
        for name in names:
            with warnings.catch_warnings():
                warnings.filterwarnings('error', message='torch.utils.checkpoint')
                found = gradients(stage, GRANULARITIES[name], True)
            wanted = gradients(stage, GRANULARITIES[name], False)
            faults += [
                f'stage {stage}, {name}: {weight}'
                for weight, grad in wanted.items()
                if grad is None or not torch.equal(found[weight], grad)
            ]
    return faults


def test_gradients_equal_no_checkpointing() -> None:
    assert run_ranks(2, differing, (3,), ('blocks', 'stages', 'root')) == [[], []]


@pytest.mark.slow
def test_gradients_equal_no_checkpointing_at_every_granularity_and_stage() -> None:
    assert run_ranks(2, differing, (0, 1, 2, 3), tuple(GRANULARITIES)) == [[], []]
