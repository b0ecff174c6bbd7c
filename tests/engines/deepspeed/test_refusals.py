"""What the DeepSpeed engine refuses; where bare DeepSpeed is the reason, it is shown."""

from typing import Any

import pytest
import torch
from torch import nn

from mmzero.config import MeshConfig, OverrideConfig, PrecisionConfig, ZeroConfig
from mmzero.engines import Clip
from mmzero.engines.deepspeed.package import import_deepspeed
from mmzero.engines.deepspeed.refusals import check_autocast, check_clip, check_config, check_model
from mmzero.errors import ConfigError, PlanError
from tests.distributed.ranks import run_ranks
from tests.models import ToyModel

STAGES = (1, 2, 3)


def test_fields_come_together() -> None:
    config = ZeroConfig(
        engine='deepspeed',
        mesh=MeshConfig(replicate=2),
        wrap_policy='x',
        overrides=(OverrideConfig(('x',), shard=False),),
        precision=PrecisionConfig(torch.bfloat16, torch.bfloat16, torch.bfloat16, keep_fp32=('norm',)),
        find_unused_parameters=True,
    )
    with pytest.raises(ConfigError) as caught:
        check_config(config)
    assert [fault.split(': ')[0].removeprefix('model_wrapper_cfg.') for fault in caught.value.faults] == [
        'mesh',
        'wrap_policy',
        'overrides',
        'precision.param_dtype',
        'precision.reduce_dtype',
        'precision.output_dtype',
        'precision.keep_fp32',
        'find_unused_parameters',
    ]
    assert all("use engine='fsdp2'" in fault for fault in caught.value.faults)
    check_config(ZeroConfig(engine='deepspeed'))


def test_scalars_are_named() -> None:
    with pytest.raises(PlanError, match=r'this ToyModel has 3: blocks.0.scale, .* give them the shape \(1,\)'):
        check_model(ToyModel())
    check_model(ToyModel(scalar=False))


def test_mixed_precision_is_refused() -> None:
    with pytest.raises(ConfigError, match=r'optim_wrapper.dtype: torch.bfloat16 is not supported yet'):
        check_autocast(torch.bfloat16)
    check_autocast(torch.float32)


@pytest.mark.parametrize(
    ('clip', 'wanted'),
    [
        (Clip('value', dict(clip_value=1.0)), "clip_grad.type: DeepSpeed clips by 'norm', not by 'value'"),
        (Clip('norm', dict(max_norm=0)), 'clip_grad.max_norm: got 0; give a number above 0'),
        (Clip('norm', dict(max_norm=1, norm_type='inf')), "clip_grad.norm_type: .* 2-norm only, got 'inf'"),
        (Clip('norm', dict(max_norm=1, error_if_nonfinite=True)), 'clip_grad.error_if_nonfinite: DeepSpeed has no'),
    ],
)
def test_clipping_that_deepspeed_lacks(clip: Clip, wanted: str) -> None:
    with pytest.raises(ConfigError, match=wanted):
        check_clip(clip)
    check_clip(Clip('norm', dict(max_norm=1, norm_type=2, foreach=True)))


def bare(model: nn.Module, stage: int, groups: Any = None) -> Any:
    """deepspeed.initialize, as its manual has it."""
    deepspeed = import_deepspeed('cpu')
    optimizer = torch.optim.AdamW(groups or [p for p in model.parameters() if p.requires_grad], weight_decay=0.5)
    zero = dict(stage=stage, reduce_bucket_size=100_000)
    config = dict(train_micro_batch_size_per_gpu=1, zero_optimization=zero, zero_allow_untested_optimizer=True)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)


def scalars(stage: int) -> None:
    bare(ToyModel(), stage)


def frozen_groups(stage: int) -> None:
    model = ToyModel(scalar=False)
    bare(model, stage, [dict(params=[param]) for param in model.parameters()])


def infinity_norm(stage: int) -> None:
    _, zero, *_ = bare(ToyModel(scalar=False), stage)
    zero.scaled_global_norm(float('inf'))


def unused_parameters(stage: int) -> None:
    model = ToyModel(scalar=False)
    # On one rank stage 3 keeps small parameters whole, so that they can be read.
    before = model.unused.weight.detach().clone()
    engine, *_ = bare(model, stage)
    engine.backward(engine(torch.ones(2, 12), torch.tensor([0, 1]), mode='loss')['loss'])
    engine.step()
    if torch.allclose(model.unused.weight, before * (1 - 1e-3 * 0.5), rtol=1e-6):
        raise RuntimeError('decayed')


# deepspeed keeps process groups for good, so that all this runs in a process of its own.
FAILURES: dict[str, tuple[Any, tuple[int, ...], str]] = {
    'refused: 0-dim parameters': (scalars, STAGES, 'cannot be 0 to view Float as Byte'),
    'refused: other norms': (infinity_norm, (1, 2), 'only L2 norm supported'),
    'refused: find_unused_parameters': (unused_parameters, STAGES, 'decayed'),
    'left out of bind: groups of frozen parameters': (frozen_groups, (1, 2), 'list index out of range'),
}


def failures() -> dict[tuple[str, int], str]:
    found = {}
    for name, (attempt, stages, _) in FAILURES.items():
        for stage in stages:
            try:
                attempt(stage)
            except Exception as error:
                found[name, stage] = str(error)
    return found


@pytest.mark.deepspeed
@pytest.mark.distributed
def test_what_is_refused_bare_deepspeed_cannot_do() -> None:
    (found,) = run_ranks(1, failures)
    for name, (_, stages, wanted) in FAILURES.items():
        for stage in stages:
            assert wanted in found.get((name, stage), 'no failure'), (name, stage, found)
