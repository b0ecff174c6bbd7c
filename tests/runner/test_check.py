"""Step 1 lists every fault of a config at once, and touches no process group."""

import copy
from typing import Any

import pytest
import torch.distributed as dist
from mmengine.registry import RUNNERS
from mmengine.runner import Runner

import mmzero  # noqa: F401
from mmzero.errors import ConfigError
from mmzero.runner import build_runner
from mmzero.wrappers import ZeroModelWrapper


def faults_of(cfg: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        RUNNERS.build(cfg)
    assert not dist.is_initialized()
    return str(caught.value)


def test_all_faults_come_in_one_error(config: Any) -> None:
    config.merge_from_dict(
        {
            'model_wrapper_cfg.stage': 4,
            'model_wrapper_cfg.mehs': dict(shard=2),
            'model_wrapper_cfg.mesh': dict(shard=3),
            'model_wrapper_cfg.precision': dict(reduce_dtype='float31'),
            'model_wrapper_cfg.wrap_policy.classes': ['SwinBlok'],
            'optim_wrapper.clip_gard': dict(max_norm=1),
            'optim_wrapper.dtype': 'float61',
            'load_from': 'nowhere.pth',
            'resume': True,
            'train_dataloader.dataset.ann_file': 'annotations/lost.json',
            'activation_checkpointing': ['bakbone'],
            'launcher': 'slrum',
        }
    )
    text = faults_of(config)
    for part in (
        'model_wrapper_cfg.stage: got 4; allowed: 0, 1, 2, 3',
        "model_wrapper_cfg.mehs: unknown field; did you mean 'mesh'?",
        'model_wrapper_cfg.precision.reduce_dtype: got',
        "did you mean 'SwinBlock'",
        "optim_wrapper.clip_gard: unknown field; did you mean 'clip_grad'?",
        "optim_wrapper.dtype: got 'float61'; expected None or the name of a dtype; did you mean 'float16'",
        'load_from: no checkpoint at nowhere.pth',
        'train_dataloader.dataset.ann_file: no file at',
        "activation_checkpointing: DINO has no module 'bakbone'; did you mean 'backbone'",
        "launcher: got 'slrum'; did you mean 'slurm'?",
    ):
        assert part in text, text


@pytest.mark.parametrize(
    'changes, wanted',
    [
        (dict(model_wrapper_cfg=None), 'model_wrapper_cfg: is missing'),
        ({'model_wrapper_cfg.type': 'MMDistributedDataParallel'}, "needs 'ZeroModelWrapper'"),
        ({'model_wrapper_cfg.mesh': dict(replicate=2)}, 'does not fill 1 rank'),
        ({'optim_wrapper.type': 'ApexOptimWrapper'}, "'ApexOptimWrapper' is not supported"),
        ({'optim_wrapper.loss_scale': 512.0}, 'optim_wrapper.loss_scale: got 512.0; a fixed scale is for float16'),
        (
            {'optim_wrapper.dtype': 'float16', 'optim_wrapper.loss_scale': dict(init_scal=2.0)},
            "optim_wrapper.loss_scale: got {'init_scal': 2.0}; 'init_scal' is unknown; did you mean 'init_scale'?",
        ),
        ({'optim_wrapper.max_skips': 2.5}, 'optim_wrapper.max_skips: got 2.5; expected None or an integer of 0 or'),
        ({'optim_wrapper.grad_norms': True}, "optim_wrapper.grad_norms: got True; expected 'groups'"),
        ({'optim_wrapper.grad_norms': ['stemm']}, "optim_wrapper.grad_norms: names nothing that is trained: 'stemm'"),
        (dict(strategy=dict(type='FSDPStrategy')), 'strategy: belongs to FlexibleRunner'),
        (dict(compile=dict(target='train_step')), "compile.target: got 'train_step'; allowed: 'forward'"),
        (dict(compile=dict(backendd='eager')), "compile.backendd: unknown field; did you mean 'backend'?"),
        (
            {'compile': True, 'model_wrapper_cfg.wrap_policy': None},
            '  compile: compiles units, and none (one unit) chooses none; let wrap_policy name the blocks',
        ),
        (
            {'compile': True, 'model_wrapper_cfg.compile': dict(dynamic=True)},
            'compile: is not what model_wrapper_cfg.compile says, which it is another name of',
        ),
        (
            {'compile': False, 'model_wrapper_cfg.compile': True},
            'compile: is not what model_wrapper_cfg.compile says, which it is another name of',
        ),
        (
            {'compile': {}, 'model_wrapper_cfg.wrap_policy': None},
            '  compile: compiles units, and none (one unit) chooses none; let wrap_policy name the blocks',
        ),
        (
            dict(custom_hooks=[dict(type='EMAHook', ema_type='MovingAverage')]),
            'custom_hooks[0]: EMAHook refuses its arguments',
        ),
        (
            dict(custom_hooks=[dict(type='EMAHook', momentun=0.1)]),
            'custom_hooks[0]: EMAHook refuses its arguments',
        ),
        (
            {'model_wrapper_cfg.offload': dict(params='cpu'), 'model_wrapper_cfg.stage': 0},
            "model_wrapper_cfg.offload.params: got 'cpu' at stage=0",
        ),
        (dict(checkpoint=dict(format='shard')), "checkpoint.format: got 'shard'; allowed: 'full', 'sharded'"),
        (dict(checkpoint=dict(formats='full')), "checkpoint.formats: unknown field; did you mean 'format'?"),
        (dict(checkpoint=dict(async_save=True)), "checkpoint.async_save: needs format='sharded'"),
        (dict(checkpoint=dict(export='last')), "checkpoint.export: is for format='sharded'"),
        (dict(checkpoint=dict(format='sharded', export_dtype='float16')), 'checkpoint.export_dtype: is for export'),
        (dict(checkpoint=dict(format='sharded', export='best')), "checkpoint.export: got 'best', and default_hooks"),
        (
            {'checkpoint': dict(format='sharded'), 'default_hooks.checkpoint.published_keys': ['state_dict']},
            'default_hooks.checkpoint.published_keys: publishes a .pth',
        ),
        (
            {'checkpoint': dict(format='sharded'), 'default_hooks.checkpoint.out_dir': 's3://runs'},
            "default_hooks.checkpoint.out_dir: got 's3://runs'",
        ),
        (
            {'checkpoint': dict(format='sharded'), 'default_hooks.checkpoint.backend_args': dict(backend='local')},
            'default_hooks.checkpoint.backend_args: with checkpoint',
        ),
        ({'model_wrapper_cfg.static_graph': True}, 'needs stage=0'),
        (dict(default_scope=None), "model.type: no class 'DINO' in the registry 'model'; mmdet has it: set"),
        (dict(launcher='pytorch'), "launcher 'pytorch' sets RANK/WORLD_SIZE"),
        (
            {'model.train_cfg.assigner.type': 'HungarianAsigner'},
            "model.train_cfg.assigner.type: no class 'HungarianAsigner' in the registry 'task util'; did you mean",
        ),
        ({'model.backbone.embed_dims': '32'}, "model.backbone.embed_dims: got '32'; expected int"),
        ({'model.backbone.type': 'SwimTransformer'}, "model.backbone.type: no class 'SwimTransformer'"),
    ],
)
def test_what_is_refused(config: Any, changes: dict, wanted: str) -> None:
    if changes.get('model_wrapper_cfg', '') is None:
        config.pop('model_wrapper_cfg')
    else:
        config.merge_from_dict(changes)
    assert wanted in faults_of(config)


def test_the_users_config_is_not_changed(config: Any) -> None:
    config.merge_from_dict({'model_wrapper_cfg.stage': 4, 'activation_checkpointing': ['backbone']})
    before = copy.deepcopy(config.to_dict())
    faults_of(config)
    assert config.to_dict() == before


def test_batch_norm_in_units_of_16_bit(config: Any) -> None:
    backbone = dict(
        _delete_=True, type='ResNet', depth=18, out_indices=(0, 1), num_stages=2, strides=(1, 2), dilations=(1, 1)
    )
    changes = {'model.backbone': backbone, 'model.neck.in_channels': [64, 128], 'optim_wrapper.dtype': 'bfloat16'}
    config.merge_from_dict({**changes, 'model_wrapper_cfg.wrap_policy.classes': ['BasicBlock']})
    config.merge_from_dict({'model_wrapper_cfg.precision': dict(keep_fp32=['backbone.**.bn9'])})
    # They are no fault; one in the same check is there so that it ends.
    text = faults_of(config)
    assert "precision.keep_fp32: 'backbone.**.bn9' names no module with parameters that is gathered in 16 bit" in text
    assert text.startswith('1 fault in the config') and 'BatchNorm' not in text


def test_a_config_without_a_runner(config: Any) -> None:
    config.pop('runner_type')
    with pytest.raises(ConfigError, match='runner_type: is missing'):
        build_runner(config)
    config.runner_type = 'mmzero.ZeroRuner'
    with pytest.raises(ConfigError, match="no runner 'mmzero.ZeroRuner'; did you mean 'mmzero.ZeroRunner'"):
        build_runner(config)


@pytest.mark.parametrize('runner', ['Runner', 'mmengine.FlexibleRunner', Runner])
@pytest.mark.parametrize('wrapper', ['ZeroModelWrapper', 'mmzero.ZeroModelWrapper', ZeroModelWrapper])
def test_a_runner_that_cannot_shard(config: Any, runner: Any, wrapper: Any) -> None:
    config.runner_type = runner
    config.model_wrapper_cfg.type = wrapper
    with pytest.raises(ConfigError, match="runner_type: got .*Runner.* cannot train; use 'mmzero.ZeroRunner'"):
        build_runner(config)


def test_another_runner_builds_what_it_knows(config: Any) -> None:
    config.pop('model_wrapper_cfg')
    config.runner_type = 'Runner'
    assert type(build_runner(config)) is Runner


def test_sync_bn_on_a_cpu(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv('RANK', '0')
    monkeypatch.setenv('WORLD_SIZE', '1')
    config.merge_from_dict(dict(sync_bn='torch', launcher='pytorch'))
    assert 'sync_bn: SyncBatchNorm needs GPUs' in faults_of(config)


def test_torchrun_without_a_launcher(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv('TORCHELASTIC_RUN_ID', 'none')
    monkeypatch.setenv('WORLD_SIZE', '2')
    assert 'add --launcher pytorch' in faults_of(config)
