"""What the DeepSpeed engine refuses; where bare DeepSpeed is the reason, it is shown."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from mmzero.config import CompileConfig, MeshConfig, OffloadConfig, OverrideConfig, PrecisionConfig, ZeroConfig
from mmzero.engines import Clip
from mmzero.engines.deepspeed.package import import_deepspeed
from mmzero.engines.deepspeed.refusals import check_autocast, check_clip, check_config, check_model, check_optimizer
from mmzero.errors import ConfigError, PlanError
from tests.distributed.ranks import run_ranks
from tests.models import ToyModel

STAGES = (1, 2, 3)


def deepspeed_with(fp16: bool = False) -> Any:
    """As much of the package as a check of fields without options looks at."""
    accelerator = SimpleNamespace(is_fp16_supported=lambda: fp16)
    config = SimpleNamespace(DeepSpeedConfig=lambda cfg: None)
    return SimpleNamespace(
        accelerator=SimpleNamespace(get_accelerator=lambda: accelerator), runtime=SimpleNamespace(config=config)
    )


def test_fields_come_together() -> None:
    config = ZeroConfig(
        engine='deepspeed',
        stage=2,
        mesh=MeshConfig(replicate=2),
        wrap_policy='x',
        overrides=(OverrideConfig(('x',), shard=False),),
        precision=PrecisionConfig(torch.float16, torch.bfloat16, torch.bfloat16, keep_fp32=('norm',)),
        compile=CompileConfig(is_asked=True),
        offload=OffloadConfig(params='cpu'),
        no_sync=True,
        find_unused_parameters=True,
    )
    with pytest.raises(ConfigError) as caught:
        check_config(config, deepspeed_with())
    assert [fault.split(': ')[0].removeprefix('model_wrapper_cfg.') for fault in caught.value.faults] == [
        'mesh',
        'wrap_policy',
        'overrides',
        'compile',
        'no_sync',
        'precision.output_dtype',
        'precision.keep_fp32',
        'find_unused_parameters',
        'offload.params',
        'precision.param_dtype',
    ]
    check_config(ZeroConfig(engine='deepspeed'), deepspeed_with())
    check_config(ZeroConfig(engine='deepspeed', precision=PrecisionConfig(torch.float16)), deepspeed_with(fp16=True))


@pytest.mark.parametrize('params', ['nvme', 'cpu'])
def test_what_reads_to_odd_places_is_refused(params: str) -> None:
    options = dict(zero_optimization=dict(offload_optimizer=dict(fast_init=True)))
    offload = OffloadConfig(params=params, optimizer='nvme', nvme_path='/x')
    # This package knows no key at all.
    with pytest.raises(ConfigError) as caught:
        check_config(ZeroConfig(engine='deepspeed', engine_options=options, offload=offload), deepspeed_with())
    wanted = 'zero_optimization.offload_optimizer.fast_init: DeepSpeed would read weights'
    assert any(wanted in fault for fault in caught.value.faults) == (params == 'nvme')


def test_scalars_are_named() -> None:
    with pytest.raises(PlanError, match=r'this ToyModel has 3: blocks.0.scale, .* give them the shape \(1,\)'):
        check_model(ToyModel())
    check_model(ToyModel(scalar=False))


def test_trained_parameters_of_two_dtypes_are_named() -> None:
    model = ToyModel(scalar=False)
    model.head.to(torch.bfloat16)
    with pytest.raises(PlanError, match=r'one dtype, .* torch.bfloat16: head.weight; store all in float32'):
        check_model(model)


@pytest.mark.parametrize(
    ('stage', 'stored', 'dtype', 'wanted'),
    [
        (3, None, torch.bfloat16, 'param_dtype: autocast to torch.bfloat16 over parameters gathered in float32'),
        (2, torch.bfloat16, None, 'parameters of torch.bfloat16 are computed under autocast to it, which is off'),
        (2, None, torch.float16, 'scales the loss for parameters of float16 only'),
    ],
)
def test_dtypes_that_do_not_fit(stage: int, stored: Any, dtype: Any, wanted: str) -> None:
    config = ZeroConfig(engine='deepspeed', stage=stage, precision=PrecisionConfig(stored))
    with pytest.raises(ConfigError, match=wanted):
        check_autocast(dtype, config)


def test_dtypes_that_fit() -> None:
    check_autocast(torch.bfloat16, ZeroConfig(stage=3, precision=PrecisionConfig(torch.bfloat16)))
    check_autocast(torch.bfloat16, ZeroConfig(stage=2))
    check_autocast(None, ZeroConfig(stage=3))


@pytest.mark.parametrize(
    ('optimizer', 'wanted'), [(torch.optim.Adagrad, 'a new Adagrad'), (torch.optim.Adafactor, 'one by one')]
)
def test_optimizers_that_flat_pieces_do_not_suit(optimizer: Any, wanted: str) -> None:
    with pytest.raises(ConfigError, match=wanted):
        check_optimizer(optimizer([nn.Parameter(torch.zeros(2, 2))], lr=0.1))
    check_optimizer(torch.optim.AdamW([nn.Parameter(torch.zeros(2))]))


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


def two_dtypes(stage: int) -> None:
    model = ToyModel(scalar=False)
    model.head.to(torch.bfloat16)
    try:
        bare(model, stage)
    except AssertionError as error:
        raise RuntimeError('not one dtype') from error
    # They were flattened together.
    if model.head.weight.dtype != torch.bfloat16:
        raise RuntimeError('not one dtype')


def frozen_groups(stage: int) -> None:
    model = ToyModel(scalar=False)
    bare(model, stage, [dict(params=[param]) for param in model.parameters()])


def infinity_norm(stage: int) -> None:
    _, zero, *_ = bare(ToyModel(scalar=False), stage)
    zero.scaled_global_norm(float('inf'))


def new_adagrad(stage: int) -> None:
    model = ToyModel(scalar=False)
    deepspeed = import_deepspeed('cpu')
    optimizer = torch.optim.Adagrad([p for p in model.parameters() if p.requires_grad], lr=0.1)
    zero = dict(stage=stage, reduce_bucket_size=100_000)
    config = dict(train_micro_batch_size_per_gpu=1, zero_optimization=zero, zero_allow_untested_optimizer=True)
    _, found, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    if found.optimizer is not optimizer and found.optimizer.param_groups[0] is not optimizer.param_groups[0]:
        raise RuntimeError('another Adagrad')


def offloaded_parameters(stage: int) -> None:
    model = ToyModel(scalar=False)
    deepspeed = import_deepspeed('cpu')
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    zero = dict(stage=stage, reduce_bucket_size=100_000, offload_param=dict(device='cpu'))
    config = dict(train_micro_batch_size_per_gpu=1, zero_optimization=zero, zero_allow_untested_optimizer=True)
    _, found, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    if not hasattr(next(model.parameters()), 'ds_tensor') and not found.cpu_offload:
        raise RuntimeError('not offloaded')


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
    'refused: trained parameters of two dtypes': (two_dtypes, STAGES, 'not one dtype'),
    'refused: other norms': (infinity_norm, (1, 2), 'only L2 norm supported'),
    'refused: find_unused_parameters': (unused_parameters, STAGES, 'decayed'),
    'refused: Adagrad': (new_adagrad, STAGES, 'another Adagrad'),
    'refused: offloaded parameters': (offloaded_parameters, (1, 2), 'not offloaded'),
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
