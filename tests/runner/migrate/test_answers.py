"""Every argument of what is migrated has an answer, and what the answers say."""

import copy
import inspect
from dataclasses import fields
from functools import partial
from typing import Any

import pytest
import torch
from mmengine._strategy import BaseStrategy, DDPStrategy, DeepSpeedStrategy, FSDPStrategy
from mmengine.logging import MMLogger
from mmengine.model.wrappers import MMFullyShardedDataParallel
from mmengine.runner import FlexibleRunner, Runner
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

from mmzero.errors import ConfigError
from mmzero.policies import build_policy
from mmzero.runner.migrate import check_migrated, migrate_config
from mmzero.runner.migrate.deepspeed import DEEPSPEED_STRATEGY_ANSWERS
from mmzero.runner.migrate.draft import BECOMES, DIFFERS, LOST, NEEDLESS
from mmzero.runner.migrate.ds_config import DS_ANSWERS
from mmzero.runner.migrate.fsdp import FSDP_ANSWERS, MIXED_PRECISION_ANSWERS, STRATEGIES
from mmzero.runner.migrate.strategies import (
    CHECKPOINTING_ANSWERS,
    ENV_ANSWERS,
    FSDP_STRATEGY_ANSWERS,
    LOG_ANSWERS,
)
from tests.models import TINY_DINO, Block
from tests.tools.migrations import SIZE_BASED


def arguments(*functions: Any) -> set[str]:
    params = [param for function in functions for param in inspect.signature(function).parameters.values()]
    named = [param.name for param in params if param.kind in (param.POSITIONAL_OR_KEYWORD, param.KEYWORD_ONLY)]
    return {*named} - {'self', 'module', 'model'}


@pytest.mark.parametrize(
    'wanted, answers',
    [
        (arguments(FSDPStrategy, DDPStrategy, BaseStrategy), FSDP_STRATEGY_ANSWERS),
        (arguments(MMFullyShardedDataParallel, FullyShardedDataParallel), FSDP_ANSWERS),
        ({field.name for field in fields(MixedPrecision)}, MIXED_PRECISION_ANSWERS),
        (set(ShardingStrategy.__members__), STRATEGIES),
        (arguments(checkpoint_wrapper.apply_activation_checkpointing), CHECKPOINTING_ANSWERS),
        (
            arguments(DeepSpeedStrategy, BaseStrategy),
            {**DEEPSPEED_STRATEGY_ANSWERS, **DS_ANSWERS, 'config': None},
        ),
        (arguments(BaseStrategy._setup_env), ENV_ANSWERS),
        (arguments(BaseStrategy.build_logger, MMLogger), LOG_ANSWERS),
        (arguments(FlexibleRunner) - arguments(Runner), {'strategy': None, 'compile': None}),
    ],
)
def test_every_argument_has_an_answer(wanted: set[str], answers: dict[str, Any]) -> None:
    assert wanted and wanted <= answers.keys(), wanted - answers.keys()
    assert [field.name for field in fields(CPUOffload)] == ['offload_params']


def fsdp(wrapper: dict | None = None, optim: dict | None = None, **fields: Any) -> dict[str, Any]:
    strategy = dict(type='FSDPStrategy', model_wrapper=wrapper or {}, **fields)
    return dict(strategy=strategy, runner_type='FlexibleRunner', optim_wrapper=optim or dict(type='OptimWrapper'))


def deepspeed(optim: dict | None = None, **fields: Any) -> dict[str, Any]:
    wrapper = dict(type='DeepSpeedOptimWrapper', **(optim or {}))
    strategy = dict(type='DeepSpeedStrategy', **fields)
    return dict(strategy=strategy, runner_type='FlexibleRunner', optim_wrapper=wrapper)


def kinds(cfg: dict[str, Any], **options: Any) -> dict[str, str]:
    return {note.path: note.kind for note in migrate_config(cfg, **options).notes}


def of(cfg: dict[str, Any], path: str, **options: Any) -> Any:
    node: Any = migrate_config(cfg, **options).cfg
    for name in path.split('.'):
        node = node[name]
    return node


@pytest.mark.parametrize(
    'name, stage',
    [('FULL_SHARD', 3), ('SHARD_GRAD_OP', 2), ('NO_SHARD', 0), (ShardingStrategy.SHARD_GRAD_OP, 2), (None, 3)],
)
def test_stages(name: Any, stage: int) -> None:
    assert of(fsdp(dict(sharding_strategy=name)), 'model_wrapper_cfg.stage') == stage


def test_hybrid_needs_the_ranks_of_a_node() -> None:
    cfg = fsdp(dict(sharding_strategy='_HYBRID_SHARD_ZERO2'))
    with pytest.raises(ConfigError, match='strategy.model_wrapper.sharding_strategy: .*say --ranks-per-node'):
        migrate_config(cfg)
    found = migrate_config(cfg, ranks_per_node=8).cfg['model_wrapper_cfg']
    assert (found['stage'], found['mesh']) == (2, dict(replicate=-1, shard=8))


def test_cpu_offload_takes_all_three() -> None:
    for value in (True, CPUOffload(offload_params=True)):
        assert of(fsdp(dict(cpu_offload=value)), 'model_wrapper_cfg.offload') == dict(params='cpu', optimizer='cpu')
    assert 'offload' not in migrate_config(fsdp(dict(cpu_offload=False))).cfg['model_wrapper_cfg']
    whole = fsdp(dict(sharding_strategy='NO_SHARD', cpu_offload=True))
    assert kinds(whole)['strategy.model_wrapper.cpu_offload'] == LOST


def test_mixed_precision_becomes_the_optimizers_dtype() -> None:
    policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float16, buffer_dtype=torch.bfloat16)
    made = migrate_config(fsdp(dict(mixed_precision=policy)))
    assert made.cfg['optim_wrapper']['dtype'] == 'bfloat16'
    assert made.cfg['model_wrapper_cfg']['precision'] == dict(reduce_dtype='float16')
    found = {note.path.rsplit('.', 1)[-1]: note.kind for note in made.notes if 'mixed' in note.path}
    assert found['buffer_dtype'] == LOST and found['cast_root_forward_inputs'] == DIFFERS
    # Without a reduce_dtype FSDP reduces in the param_dtype.
    alone = fsdp(dict(mixed_precision=dict(param_dtype='half')))
    assert of(alone, 'optim_wrapper.dtype') == 'float16'
    assert kinds(alone)['strategy.model_wrapper.mixed_precision.reduce_dtype'] == DIFFERS


def test_float32_parameters_under_amp_are_told() -> None:
    wrapper = dict(mixed_precision=dict(param_dtype='float32'))
    path = 'strategy.model_wrapper.mixed_precision.param_dtype'
    assert kinds(fsdp(wrapper, optim=dict(type='AmpOptimWrapper')))[path] == DIFFERS
    assert kinds(fsdp(wrapper))[path] == NEEDLESS


def test_what_fsdp_did_otherwise_is_told() -> None:
    optim = dict(type='AmpOptimWrapper', use_fsdp=True, accumulative_counts=4, clip_grad=dict(max_norm=1))
    found = kinds(fsdp(optim=optim))
    for name in ('accumulative_counts', 'clip_grad', 'dtype'):
        assert found[f'optim_wrapper.{name}'] == DIFFERS
    assert found['optim_wrapper.use_fsdp'] == NEEDLESS


@pytest.mark.parametrize(
    'policy, wanted',
    [
        ('size_based_auto_wrap_policy', 'size_based_auto_wrap_policy'),
        (size_based_auto_wrap_policy, SIZE_BASED),
        (dict(type=size_based_auto_wrap_policy, min_num_params=5), dict(type=SIZE_BASED, min_num_params=5)),
        (partial(size_based_auto_wrap_policy, min_num_params=5), dict(type=SIZE_BASED, min_num_params=5)),
        (
            partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
            dict(
                type='torch.distributed.fsdp.wrap.transformer_auto_wrap_policy',
                transformer_layer_cls=['tests.models.Block'],
            ),
        ),
    ],
)
def test_policies_are_named(policy: Any, wanted: Any) -> None:
    found = of(fsdp(dict(auto_wrap_policy=policy)), 'model_wrapper_cfg.wrap_policy')
    assert found == wanted
    build_policy(found)


@pytest.mark.parametrize(
    'policy', [lambda **fields: True, partial(size_based_auto_wrap_policy, None), dict(type='x', layers=object())]
)
def test_policies_that_no_file_can_hold_are_named(policy: Any) -> None:
    assert kinds(fsdp(dict(auto_wrap_policy=policy)))['strategy.model_wrapper.auto_wrap_policy'] == LOST


def test_what_has_no_counterpart_is_named() -> None:
    names = ('param_init_fn', 'process_group', 'device_mesh', 'ignored_states', 'ignored_parameters', 'misspelt')
    found = kinds(fsdp(dict.fromkeys(names, 'something')))
    assert all(found[f'strategy.model_wrapper.{name}'] == LOST for name in names)


def test_nothing_is_dropped_in_silence() -> None:
    """Every field that is given has its line."""
    cfg = fsdp(dict.fromkeys(FSDP_ANSWERS.keys() - {'sharding_strategy', 'cpu_offload', 'mixed_precision'}, 'x'))
    cfg['strategy'] |= dict(work_dir='w', experiment_name='e', sync_bn='torch', auto_scale_lr=dict(enable=False))
    found = kinds(cfg)
    assert {f'strategy.model_wrapper.{name}' for name in cfg['strategy']['model_wrapper']} <= found.keys()
    assert {f'strategy.{name}' for name in ('work_dir', 'experiment_name', 'sync_bn', 'auto_scale_lr')} <= found.keys()


@pytest.mark.parametrize(
    'given, wanted',
    [
        ('full', None),
        ('local', dict(format='sharded')),
        (None, dict(format='sharded')),
        (dict(state_dict_type='SHARDED_STATE_DICT'), dict(format='sharded')),
        (dict(state_dict_type='FULL_STATE_DICT', state_dict_config=dict(type='FullStateDictConfig')), None),
    ],
)
def test_state_dicts(given: Any, wanted: dict | None) -> None:
    assert migrate_config(fsdp(state_dict_cfg=given)).cfg.get('checkpoint') == wanted


@pytest.mark.parametrize('given', ['full', 'local'])
def test_state_dicts_are_told_as_they_were_written(given: str) -> None:
    told = {note.path: note.value for note in migrate_config(fsdp(state_dict_cfg=given)).notes}
    assert told['strategy.state_dict_cfg'] == given


def test_published_keys_need_a_file() -> None:
    hooks = dict(checkpoint=dict(type='CheckpointHook', published_keys=['state_dict']))
    assert of(dict(fsdp(), default_hooks=hooks), 'checkpoint') == dict(format='sharded', export='last')


def some_blocks(module: torch.nn.Module) -> bool:
    return type(module).__name__ == 'Linear' and module.in_features > 12


def no_block(module: torch.nn.Module) -> bool:
    return False


@pytest.mark.parametrize(
    'check_fn, reason',
    [
        (some_blocks, 'some modules of Linear and not for others'),
        (no_block, 'for no module of this model'),
        ('nowhere', "no function 'nowhere' is registered"),
        (dict(type=no_block, layers=[1]), 'takes no argument layers'),
        (dict(type=lambda module: module.nothing), 'it fails on the model'),
    ],
)
def test_a_check_fn_that_no_class_stands_for_is_named(check_fn: Any, reason: str) -> None:
    cfg = dict(fsdp(activation_checkpointing=dict(check_fn=check_fn)), model=dict(type='tests.models.ToyModel'))
    (note,) = [note for note in migrate_config(cfg).notes if note.path.endswith('check_fn')]
    assert note.kind == LOST and reason in note.why


def test_flexible_runners_own_fields() -> None:
    cfg = dict(fsdp(), compile=dict(target='train_step'), resume='work/epoch_1', sync_bn='torch')
    cfg |= dict(init_weights_for_test_or_val=False, model_wrapper_cfg=dict(type='MMDistributedDataParallel'))
    made = migrate_config(cfg)
    assert made.cfg['compile'] is True and 'init_weights_for_test_or_val' not in made.cfg
    assert (made.cfg['resume'], made.cfg['load_from']) == (True, 'work/epoch_1')
    found = kinds(cfg)
    assert found['compile'] == found['sync_bn'] == DIFFERS and found['model_wrapper_cfg'] == LOST


def test_deepspeeds_zero_goes_to_fields_or_is_named() -> None:
    group = dict(stage=3, mics_shard_size=8, zero_hpz_partition_size=4, zero_quantized_weights=True, overlap_comm=True)
    group |= dict(leaf_module=dict(classes=['Block']), stage_3='x')
    made = migrate_config(deepspeed(zero_optimization=group))
    assert made.cfg['model_wrapper_cfg']['mesh'] == dict(replicate=-1, shard=8)
    found = {note.path.rsplit('.', 1)[-1]: note.kind for note in made.notes}
    assert found['mics_shard_size'] == BECOMES and found['overlap_comm'] == NEEDLESS
    assert {
        found[name] for name in ('zero_hpz_partition_size', 'zero_quantized_weights', 'leaf_module', 'stage_3')
    } == {LOST}


def test_deepspeeds_steps_go_to_the_optimizer() -> None:
    scale = dict(enabled=True, loss_scale=128, hysteresis=2)
    made = migrate_config(deepspeed(gradient_clipping=0.5, gradient_accumulation_steps=8, fp16=scale))
    wrapper = made.cfg['optim_wrapper']
    assert wrapper['clip_grad'] == dict(max_norm=0.5) and wrapper['accumulative_counts'] == 8
    assert (wrapper['dtype'], wrapper['loss_scale'], wrapper['type']) == ('float16', 128.0, 'OptimWrapper')


def test_the_strategys_arguments_overwrite_its_config() -> None:
    config = dict(gradient_clipping=0.5, zero_optimization=dict(stage=1), bf16=dict(enabled=True))
    made = migrate_config(deepspeed(config=config, gradient_clipping=2.0))
    assert made.cfg['optim_wrapper']['clip_grad'] == dict(max_norm=2.0)
    assert 'strategy.config.bf16.enabled' in {note.path for note in made.notes}


@pytest.mark.parametrize(
    'fields, match',
    [
        (dict(config='nowhere.json'), r'strategy\.config: cannot read nowhere\.json'),
        (dict(fp16=dict(enabled=True), bf16=dict(enabled=True)), r'strategy\.bf16: is enabled beside fp16'),
        (dict(fp16=dict(enabled=True, loss_scale_window='x')), r'strategy\.fp16: .*loss_scale_window are numbers'),
        (dict(zero_optimization=dict(stage=4)), r'strategy\.zero_optimization\.stage: got 4'),
        (
            dict(zero_optimization=dict(stage=3, offload_param=dict(device='nvme'))),
            r"offload_param\.device: got 'nvme', .*--engine deepspeed",
        ),
    ],
)
def test_what_nothing_can_be_made_of_is_refused(fields: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        migrate_config(deepspeed(**fields))


def test_deepspeeds_optimizers() -> None:
    own = dict(optimizer=dict(type='FusedAdam', lr=1, adam_w_mode=False, bias_correction=False))
    made = migrate_config(deepspeed(own, zero_optimization=dict(stage=1)))
    assert made.cfg['optim_wrapper']['optimizer'] == dict(type='Adam', lr=1)
    assert {note.path: note.kind for note in made.notes}['optim_wrapper.optimizer.bias_correction'] == LOST
    other = deepspeed(dict(optimizer=dict(type='OnebitAdam', lr=1)))
    assert kinds(other)['optim_wrapper.optimizer.type'] == LOST
    other = deepspeed(dict(optimizer=dict(type='FusedLamb', lr=1)), zero_optimization=dict(stage=1))
    assert kinds(other)['optim_wrapper.optimizer.type'] == LOST
    assert of(other, 'optim_wrapper.optimizer.type', engine='deepspeed') == 'deepspeed.ops.lamb.FusedLamb'


def test_deepspeed_as_the_engine_gets_what_mmzero_has_no_field_for() -> None:
    offload = dict(device='nvme', nvme_path='/nvme', buffer_count=4)
    group = dict(stage=3, offload_param=offload, overlap_comm=True, sub_group_size=1024)
    cfg = deepspeed(
        zero_optimization=dict(group, offload_optimizer=dict(offload, pipeline_read=True)),
        aio=dict(block_size=1048576),
        bf16=dict(enabled=True, immediate_grad_update=True),
        gradient_clipping=1.0,
    )
    made = migrate_config(dict(cfg, find_unused_parameters=True), engine='deepspeed')
    assert made.cfg['model_wrapper_cfg'] == dict(
        type='ZeroModelWrapper',
        engine='deepspeed',
        stage=3,
        offload=dict(params='nvme', optimizer='nvme', nvme_path='/nvme'),
        engine_options=dict(
            zero_optimization=dict(
                offload_param=dict(buffer_count=4),
                offload_optimizer=dict(buffer_count=4, pipeline_read=True),
                overlap_comm=True,
                sub_group_size=1024,
            ),
            bf16=dict(immediate_grad_update=True),
            aio=dict(block_size=1048576),
        ),
    )
    assert made.cfg['optim_wrapper']['clip_grad'] == dict(max_norm=1.0)
    assert made.cfg['find_unused_parameters'] is False


def test_what_does_not_go_together_is_not_handed_on() -> None:
    disk = dict(device='nvme', nvme_path='/nvme')
    groups = [
        dict(stage=3, offload_param=disk, offload_optimizer=dict(disk, fast_init=True), zero_hpz_partition_size=8),
        dict(stage=2, zero_hpz_partition_size=8),
    ]
    for group, lost in zip(
        groups, ({'zero_hpz_partition_size', 'fast_init'}, {'zero_hpz_partition_size'}), strict=True
    ):
        made = migrate_config(deepspeed(zero_optimization=group), engine='deepspeed')
        assert 'engine_options' not in made.cfg['model_wrapper_cfg']
        assert {note.path.rsplit('.', 1)[-1] for note in made.notes if note.kind == LOST} == lost


def test_what_the_engine_refuses_is_not_handed_on() -> None:
    group = dict(stage=3, zero_hpz_partition_size=8, zero_quantized_weights=True)
    cfg = deepspeed(zero_optimization=group, bf16=dict(enabled=True, check_grad_overflow=False), autotuning={})
    made = migrate_config(cfg, engine='deepspeed')
    assert made.cfg['model_wrapper_cfg']['engine_options'] == dict(zero_optimization=dict(zero_hpz_partition_size=8))
    found = {note.path.rsplit('.', 1)[-1]: note for note in made.notes}
    names = ('zero_quantized_weights', 'check_grad_overflow')
    assert {found[name].kind for name in names} == {LOST}
    assert 'it needs CUDA' in found['zero_quantized_weights'].why


@pytest.mark.parametrize(
    'cfg, match',
    [
        (dict(strategy=dict(type='ColossalAIStrategy')), 'cannot be migrated: Gemini'),
        (dict(strategy=dict(type='DDPStrategy')), 'it shards nothing'),
        (dict(strategy=dict(type='FSDPStrat')), "did you mean 'FSDPStrategy'"),
        (dict(), 'nothing is sharded here'),
        (dict(model_wrapper_cfg=dict(type='MMDistributedDataParallel')), "type='MMDistributedDataParallel'"),
        (dict(model_wrapper_cfg=dict(type='ZeroModelWrapper')), 'nothing is left to migrate'),
    ],
)
def test_other_configs_are_refused(cfg: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        migrate_config(cfg)


def test_fsdp_cannot_become_deepspeed() -> None:
    with pytest.raises(ConfigError, match='--engine deepspeed: is for DeepSpeedStrategy'):
        migrate_config(fsdp(), engine='deepspeed')


def test_the_source_stays_as_it_is() -> None:
    cfg = deepspeed(zero_optimization=dict(stage=3, offload_param=dict(device='cpu')))
    before = repr(cfg)
    migrate_config(cfg)
    assert repr(cfg) == before


def test_parts_of_deepspeed_that_have_no_place_are_not_handed_on() -> None:
    options = dict(activation_checkpointing=dict(partition_activations=True), wall_clock_breakdown=True)
    group = dict(stage=2, offload_param=dict(device='cpu'))
    made = migrate_config(deepspeed(zero_optimization=group, **options), engine='deepspeed')
    assert made.cfg['model_wrapper_cfg']['engine_options'] == dict(wall_clock_breakdown=True)
    found = {note.path: note.kind for note in made.notes}
    assert found['strategy.activation_checkpointing'] == LOST
    # DeepSpeed refuses it below stage 3.
    assert found['strategy.zero_optimization.offload_param'] == LOST and 'offload' not in made.cfg['model_wrapper_cfg']


def test_nothing_sharded_is_ddp_under_every_engine() -> None:
    made = migrate_config(deepspeed(zero_optimization=dict(stage=0, overlap_comm=True)), engine='deepspeed')
    assert made.cfg['model_wrapper_cfg'] == dict(type='ZeroModelWrapper', stage=0, find_unused_parameters=True)


def test_mmdets_example_of_large_models() -> None:
    """Its policy and what it recomputes, both by layers, on a small DINO; checked as a run would be."""
    layers = [
        'mmdet.models.backbones.swin.SwinBlock',
        'mmdet.models.layers.transformer.deformable_detr_layers.DeformableDetrTransformerEncoderLayer',
    ]
    functions = 'tests.tools.migrations'
    policy = dict(type=f'{functions}.layer_auto_wrap_policy', layer_cls=layers)
    check_fn = dict(type=f'{functions}.checkpoint_check_fn', layer_cls=layers)
    model = copy.deepcopy(TINY_DINO)
    model['backbone']['with_cp'] = False
    cfg = fsdp(dict(auto_wrap_policy=policy), activation_checkpointing=dict(check_fn=check_fn))
    made = migrate_config(dict(default_scope='mmdet', model=model, **{**cfg, 'optim_wrapper': None}))
    chosen = made.cfg['model_wrapper_cfg']['activation_checkpointing']['policy']
    assert chosen['classes'] == ['DeformableDetrTransformerEncoderLayer', 'SwinBlock']
    assert check_migrated(made.cfg) == []


def test_auto_says_nothing_at_any_depth() -> None:
    scale = dict(enabled='auto', loss_scale_window='auto')
    made = migrate_config(deepspeed(fp16=scale, gradient_clipping='auto', zero_optimization=dict(stage=2)))
    assert 'dtype' not in made.cfg['optim_wrapper'] and 'clip_grad' not in made.cfg['optim_wrapper']
    found = {note.path: note.kind for note in made.notes}
    for name in ('fp16.enabled', 'fp16.loss_scale_window', 'gradient_clipping'):
        assert found[f'strategy.{name}'] == LOST
