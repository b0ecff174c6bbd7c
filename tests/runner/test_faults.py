"""Each kind of fault of a config is named with its path, before a process group exists."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mmengine.config import Config
from mmengine.registry import RUNNERS

from mmzero.config import Faults
from mmzero.errors import ConfigError
from mmzero.runner.check import check_config
from mmzero.runner.toplevel import near_key, one_slip
from mmzero.runner.translate import translate_optim_wrapper
from tests.fuzz.bases import base_config, register

register()
MISSING = object()


def spoilt(tmp_path: Any, changes: dict[str, Any], setting: str = 'stage 3') -> dict:
    cfg = base_config('vectors', setting, '', str(tmp_path)).to_dict()
    for path, value in changes.items():
        node = cfg
        *owner, key = path.replace('[', '.').replace(']', '').split('.')
        for name in owner:
            node = node[int(name) if name.isdigit() else name]
        key = int(key) if key.isdigit() else key
        if value is MISSING:
            del node[key]
        else:
            node[key] = value
    return cfg


def faults_of(cfg: dict) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        RUNNERS.build(Config(cfg))
    assert not dist.is_initialized()
    return caught.value.faults


WRAPPER, OPTIM, OPTIMIZER = 'model_wrapper_cfg', 'optim_wrapper', 'optim_wrapper.optimizer'
PARAMWISE, TRAIN = 'optim_wrapper.paramwise_cfg', 'train_dataloader'

FAULTS = [
    # The wrapper.
    ({f'{WRAPPER}': 5}, 'model_wrapper_cfg: got 5; expected a dict'),
    ({f'{WRAPPER}': []}, 'model_wrapper_cfg: got []; expected a dict'),
    ({f'{WRAPPER}.stage': 4}, 'model_wrapper_cfg.stage: got 4; allowed: 0, 1, 2, 3'),
    (
        {f'{WRAPPER}.overrides': [dict(units='blocks.9', shard=False)]},
        f"{WRAPPER}.overrides[0].units: 'blocks.9' names",
    ),
    (
        {f'{WRAPPER}.overrides': [dict(units='blocks.*', reshard_after_forward=3)]},
        f'{WRAPPER}.overrides: reshard_after_forward=3 does not divide the 1 rank(s)',
    ),
    ({f'{WRAPPER}.wrap_policy.type': 3}, 'model_wrapper_cfg.wrap_policy: got '),
    ({f'{WRAPPER}.wrap_policy.clases': ['Block']}, 'model_wrapper_cfg.wrap_policy: '),
    (
        {f'{WRAPPER}.wrap_policy.classes': ['Blok']},
        "model_wrapper_cfg.wrap_policy: no module of ToyModel is of the class 'Blok'",
    ),
    (
        {f'{WRAPPER}.mesh': dict(shard=3)},
        'model_wrapper_cfg.mesh: replicate x shard = 1 x 3 = 3 does not fill 1 rank(s)',
    ),
    # Top-level keys.
    ({'optim_wraper': dict()}, "optim_wraper: is no key that a runner reads; did you mean 'optim_wrapper'?"),
    (
        {'model_wraper_cfg': dict()},
        "model_wraper_cfg: is no key that a runner reads; did you mean 'model_wrapper_cfg'?",
    ),
    ({'param_schedular': []}, "param_schedular: is no key that a runner reads; did you mean 'param_scheduler'?"),
    ({'custom_hooks': dict()}, 'custom_hooks: got {}; expected a list'),
    ({'default_hooks': []}, 'default_hooks: got []; expected a dict'),
    ({'env_cfg': True}, 'env_cfg: got True; expected a dict'),
    ({'resume': 'yes'}, "resume: got 'yes'; expected True or False"),
    ({'val_evaluator': MISSING}, 'val_evaluator: is missing, and val_dataloader, val_cfg needs it'),
    ({'optim_wrapper': MISSING}, 'optim_wrapper: is missing, and train_dataloader, train_cfg needs it'),
    ({'model': MISSING}, 'model: is missing'),
    ({'default_scope': 'mmdett'}, "default_scope: got 'mmdett', which is no installed package; did you mean 'mmdet'"),
    ({'log_level': 'LOUD'}, "log_level: got 'LOUD'; allowed: CRITICAL, "),
    ({'sync_bn': 'apex'}, "sync_bn: got 'apex'; allowed: 'torch', 'mmcv'"),
    ({'launcher': 'torchrun'}, "launcher: got 'torchrun'"),
    # The optimizer.
    ({OPTIM: []}, 'optim_wrapper: got []; expected a dict'),
    ({OPTIMIZER: 'SGD'}, "optim_wrapper.optimizer: got 'SGD'; expected a dict"),
    (
        {f'{OPTIMIZER}.type': 'AdmaW'},
        "optim_wrapper.optimizer.type: no class 'AdmaW' in the registry 'optimizer'; did you",
    ),
    ({f'{OPTIMIZER}.lr': 'abc'}, "optim_wrapper.optimizer.lr: got 'abc'; expected float or Tensor"),
    ({f'{OPTIMIZER}.lr': -0.1}, 'optim_wrapper.optimizer.lr: got -0.1; expected a number of 0 or more'),
    (
        {f'{OPTIMIZER}.momentun': 0.9},
        "optim_wrapper.optimizer.momentun: SGD has no such field; did you mean 'momentum'?",
    ),
    (
        {OPTIMIZER: dict(type='Adam', lr=0.1, betas=(0.9, 2.0), weight_decay=0.1)},
        'optim_wrapper.optimizer: Adam refuses its',
    ),
    (
        {OPTIMIZER: dict(type='Adam', lr=0.1, betas=0.9, weight_decay=0.1)},
        'optim_wrapper.optimizer.betas: got 0.9; expected a pair of numbers',
    ),
    (
        {OPTIMIZER: dict(type='Adam', lr=0.1, betas=(0.9,), weight_decay=0.1)},
        'optim_wrapper.optimizer: Adam refuses its arguments: tuple index out of range',
    ),
    (
        {OPTIMIZER: dict(type='Adam', lr=0.1, foreach=True, fused=True, weight_decay=0.1)},
        'optim_wrapper.optimizer: Adam refuses its arguments: `fused` and `foreach` cannot be `True` together.',
    ),
    ({f'{OPTIM}.accumulative_counts': 0}, 'optim_wrapper.accumulative_counts: got 0; expected an integer of 1 or more'),
    ({f'{OPTIM}.accumulative_counts': 2.5}, 'optim_wrapper.accumulative_counts: got 2.5; expected an integer'),
    ({f'{OPTIM}.clip_grad': dict()}, 'optim_wrapper.clip_grad.max_norm: is missing; clipping by norm needs it'),
    ({f'{OPTIM}.clip_grad.max_norm': -1.0}, 'optim_wrapper.clip_grad.max_norm: got -1.0; expected a number above 0'),
    (
        {f'{OPTIM}.clip_grad': dict(type='value', max_norm=1, clip_value=1)},
        "optim_wrapper.clip_grad.max_norm: belongs to type='norm', and this is 'value'",
    ),
    (
        {f'{OPTIM}.clip_grad': dict(max_norm=1, clip_value=1)},
        "optim_wrapper.clip_grad.clip_value: belongs to type='value', and this is 'norm'",
    ),
    ({f'{OPTIM}.clip_grad.type': 'sum'}, "optim_wrapper.clip_grad.type: got 'sum'; allowed: 'norm', 'value'"),
    (
        {f'{OPTIM}.loss_scale': 'dynamic'},
        "optim_wrapper.loss_scale: is a field of 'AmpOptimWrapper', and this is 'OptimWrapper'",
    ),
    ({f'{OPTIM}.dtype': 'bfloat'}, "optim_wrapper.dtype: got 'bfloat'; expected None or the name of a dtype"),
    ({f'{OPTIM}.constructor': 'Defalt'}, "optim_wrapper.constructor: no class 'Defalt' in the registry"),
    # Groups of parameters.
    (
        {f'{PARAMWISE}.norm_decay': 0.0},
        "optim_wrapper.paramwise_cfg.norm_decay: unknown field; did you mean 'norm_decay_mult'",
    ),
    (
        {f'{PARAMWISE}.bias_lr_mult': -1},
        'optim_wrapper.paramwise_cfg.bias_lr_mult: got -1; expected a number of 0 or more',
    ),
    (
        {f'{PARAMWISE}.bypass_duplicate': False},
        'optim_wrapper.paramwise_cfg.bypass_duplicate: the model ties head.weight and',
    ),
    (
        {f'{PARAMWISE}.custom_keys': dict(blcks=dict(lr_mult=1.0))},
        'optim_wrapper.paramwise_cfg.custom_keys.blcks: is in no name',
    ),
    (
        {f'{PARAMWISE}.custom_keys': dict(stem=dict(lr_mul=1.0))},
        "custom_keys.stem.lr_mul: unknown field; did you mean 'lr_mult'",
    ),
    ({f'{PARAMWISE}.custom_keys': dict(stem=0.1)}, 'custom_keys.stem: got 0.1; expected a dict'),
    ({f'{OPTIMIZER}.weight_decay': MISSING}, 'norm_decay_mult: needs optim_wrapper.optimizer.weight_decay'),
    (
        {OPTIM: dict(type='OptimWrapper', optimizer=dict(type='LBFGS', lr=0.1))},
        'optim_wrapper.optimizer.type: LBFGS: its step needs a closure',
    ),
    (
        {OPTIM: dict(type='OptimWrapper', optimizer=dict(type=torch.optim.Muon, lr=0.1))},
        'optim_wrapper.optimizer: Muon refuses parameters of 0 dimensions, such as blocks.0.scale: Muon only',
    ),
    # Schedulers.
    ({'param_scheduler[0].type': 'LinearRL'}, "param_scheduler[0].type: no class 'LinearRL'"),
    (
        {'param_scheduler[0].start_facter': 0.1},
        "param_scheduler[0].start_facter: LinearLR has no such field; did you mean 'start",
    ),
    (
        {'param_scheduler[0].start_factor': 2.0},
        'param_scheduler[0]: LinearLR refuses its arguments: Starting multiplicative',
    ),
    (
        {'param_scheduler[0].end': 0},
        'param_scheduler[0]: LinearLR refuses its arguments: end should be larger than begin',
    ),
    ({'param_scheduler[2].T_max': 'three'}, "param_scheduler[2].T_max: got 'three'; expected int"),
    # Loops, hooks, environment.
    ({'train_cfg.max_epochs': 0}, 'train_cfg.max_epochs: got 0; expected an integer of 1 or more'),
    (
        {'train_cfg.max_epoch': 1},
        "train_cfg.max_epoch: EpochBasedTrainLoop has no such field; did you mean 'max_epochs'",
    ),
    ({'train_cfg.val_interval': 0}, 'train_cfg.val_interval: got 0; expected an integer of 1 or more'),
    ({'train_cfg.by_epoch': MISSING}, 'train_cfg.type: is missing; name a loop, or give by_epoch=True'),
    (
        {'default_hooks.lgoger': dict(type='LoggerHook')},
        "default_hooks.lgoger: is not the name of a default hook; did you mean 'l",
    ),
    (
        {'default_hooks.logger.intervaal': 5},
        "default_hooks.logger.intervaal: LoggerHook has no such field; did you mean 'interval'",
    ),
    (
        {'default_hooks.checkpoint.max_kep': 5},
        'default_hooks.checkpoint.max_kep: CheckpointHook has no such field; did you mean',
    ),
    (
        {'default_hooks.checkpoint.interval': 0},
        'default_hooks.checkpoint.interval: got 0; expected an integer of 1 or more, or -1',
    ),
    (
        {'custom_hooks[0].tpe': 'A', 'custom_hooks[0].type': MISSING},
        'custom_hooks[0].type: is missing; name a class of the reg',
    ),
    ({'randomness.sed': 0}, "randomness.sed: set_randomness has no such field; did you mean 'seed'?"),
    ({'randomness.seed': -1}, 'randomness.seed: got -1; expected an integer of 0 to 2**32 - 1'),
    (
        {'env_cfg.mp_cfg.mp_start_method': 'frok'},
        "env_cfg.mp_cfg.mp_start_method: got 'frok'; allowed: 'fork', 'spawn'",
    ),
    ({'env_cfg.dist_cfg.backend': 'glo'}, "env_cfg.dist_cfg.backend: got 'glo'; allowed: 'nccl', 'gloo'"),
    ({'env_cfg.dist_cfg.timeoutt': 5}, 'env_cfg.dist_cfg.timeoutt: '),
    ({'visualizer.vis_backends[0].type': 'LocalBackend'}, "visualizer.vis_backends[0].type: no class 'LocalBackend'"),
    ({'log_processor.window_size': 'ten'}, "log_processor.window_size: got 'ten'; expected int"),
    (
        {'auto_scale_lr.base_batch': 4},
        "auto_scale_lr.base_batch: auto_scale_lr has no such field; did you mean 'base_batch_size'",
    ),
    # Data.
    (
        {f'{TRAIN}.persistent_workers': True},
        'train_dataloader: torch refuses its settings: persistent_workers option needs num_workers > 0',
    ),
    (
        {f'{TRAIN}.batch_sise': 4},
        "train_dataloader.batch_sise: DataLoader has no such field; did you mean 'batch_size'",
    ),
    ({f'{TRAIN}.batch_size': 0}, 'train_dataloader.batch_size: got 0; expected an int of 1 or more'),
    ({f'{TRAIN}.batch_size': '8'}, "train_dataloader.batch_size: got '8'; expected an int of 1 or more"),
    ({f'{TRAIN}.batch_size': {}}, 'train_dataloader.batch_size: got {}; expected an int of 1 or more'),
    ({f'{TRAIN}.batch_size': MISSING}, 'train_dataloader.batch_size: is missing'),
    ({f'{TRAIN}.num_workers': -1}, 'train_dataloader.num_workers: got -1; expected an int of 0 or more'),
    ({f'{TRAIN}.num_workers': 'a'}, "train_dataloader.num_workers: got 'a'; expected an int of 0 or more"),
    ({f'{TRAIN}.num_workers': 1.5}, 'train_dataloader.num_workers: got 1.5; expected an int of 0 or more'),
    ({f'{TRAIN}.num_workers': True}, 'train_dataloader.num_workers: got True; expected an int of 0 or more'),
    ({f'{TRAIN}.num_workers': None}, 'train_dataloader.num_workers: got None; expected an int of 0 or more'),
    ({f'{TRAIN}.prefetch_factor': 0}, 'train_dataloader.prefetch_factor: got 0; expected an int of 1 or more, or None'),
    ({f'{TRAIN}.timeout': -3}, 'train_dataloader.timeout: got -3; expected a number of 0 or more'),
    ({f'{TRAIN}.pin_memory': 'yes'}, "train_dataloader.pin_memory: got 'yes'; allowed: True, False"),
    ({f'{TRAIN}.persistent_workers': 1}, 'train_dataloader.persistent_workers: got 1; allowed: True, False'),
    ({f'{TRAIN}.drop_last': 'no'}, "train_dataloader.drop_last: got 'no'; allowed: True, False"),
    ({f'{TRAIN}.timeout': 5}, 'train_dataloader.timeout: needs num_workers of 1 or more'),
    ({f'{TRAIN}.sampler': MISSING}, 'train_dataloader.sampler: is missing'),
    (
        {f'{TRAIN}.sampler.shuffel': True},
        "train_dataloader.sampler.shuffel: DefaultSampler has no such field; did you mean 'shuffle'?",
    ),
    (
        {f'{TRAIN}.dataset.type': 'Vektors'},
        "train_dataloader.dataset.type: no class 'Vektors' in the registry 'dataset'; did you",
    ),
    ({f'{TRAIN}.dataset.size': 'six'}, "train_dataloader.dataset.size: got 'six'; expected int"),
    (
        {f'{TRAIN}.collate_fn.type': 'collate'},
        "train_dataloader.collate_fn.type: no class 'collate' in the registry 'function'",
    ),
    ({'val_evaluator[0].prefixx': 'a'}, "val_evaluator[0].prefixx: Count has no such field; did you mean 'prefix'?"),
    # The model.
    ({'model.widthh': 12}, "model.widthh: ToyModel has no such field; did you mean 'width'"),
    (
        {'model.type': 'ToyModle'},
        "model.type: no class 'ToyModle' in the registry 'model'; did you mean 'ToyModel'",
    ),
    ({'model.width': -3}, 'model: cannot be built: RuntimeError: Trying to create tensor with negative dimension -3'),
]


@pytest.mark.parametrize(
    ('changes', 'wanted'), FAULTS, ids=lambda value: ' '.join(value) if isinstance(value, dict) else ''
)
def test_fault(tmp_path: Any, changes: dict, wanted: str) -> None:
    cfg = spoilt(tmp_path, changes)
    before = copy.deepcopy(cfg)
    faults = faults_of(cfg)
    assert any(wanted in fault for fault in faults), faults
    assert len(faults) <= 2, faults
    assert cfg == before


def test_all_at_once(tmp_path: Any) -> None:
    changes = {
        f'{WRAPPER}.stage': 4,
        f'{WRAPPER}.offload': dict(optimizer='nvme'),
        f'{WRAPPER}.wrap_policy.classes': ['Blok'],
        f'{WRAPPER}.mesh': dict(replicate=3),
        f'{WRAPPER}.precision': dict(reduce_dtype='float31'),
        f'{OPTIMIZER}.momentun': 0.9,
        'train_cfg.max_epochs': 'many',
        'custom_hooks[0].type': 'EmptyHook',
        f'{TRAIN}.dataset.sise': 6,
    }
    faults = faults_of(spoilt(tmp_path, changes))
    paths = [fault.split(': ')[0] for fault in faults]
    assert len(faults) == 9, faults
    assert all(any(path.startswith(wanted.removesuffix('.classes')) for path in paths) for wanted in changes), paths


@pytest.mark.parametrize('optimizer', [dict(type='SGD', lr=0.1), dict(type='SGD', lr='high'), dict(type='SDG')])
def test_each_scheduler_is_tried_by_itself(tmp_path: Any, optimizer: dict) -> None:
    """Whatever is wrong with the optimizer and the schedulers before it."""
    good = dict(type='LinearMomentum', start_factor=0.5)
    wrong = [dict(type='LinearLR', start_factor=7.0), dict(type='CosineAnnealingLR', T_max=3, end=0)]
    cfg = spoilt(tmp_path, {OPTIMIZER: {**optimizer, 'momentum': 0.9, 'weight_decay': 0.1}})
    before = [] if 'lr' in optimizer and optimizer['lr'] == 0.1 else list(faults_of(cfg))
    cfg['param_scheduler'] = [wrong[0], good, wrong[1]]
    assert [fault.split(':')[0] for fault in faults_of(cfg) if fault not in before] == [
        'param_scheduler[0]',
        'param_scheduler[2]',
    ]


def test_a_stand_in_is_not_blamed_for_what_it_lacks(tmp_path: Any) -> None:
    scheduler = [dict(type='ConstantParamScheduler', param_name='rho', factor=0.5)]
    faults = faults_of(spoilt(tmp_path, {f'{OPTIMIZER}.lr': 'high', 'param_scheduler': scheduler}))
    assert not any(fault.startswith('param_scheduler') for fault in faults), faults


def test_a_loader_names_its_own_fields_beside_other_faults(tmp_path: Any) -> None:
    changes = {
        f'{TRAIN}.sampler.shuffel': True,
        f'{TRAIN}.dataset.sise': 6,
        f'{TRAIN}.batch_sise': 4,
        f'{TRAIN}.batch_size': -1,
        f'{TRAIN}.num_workers': 'a',
    }
    faults = faults_of(spoilt(tmp_path, changes))
    assert sorted(fault.split(': ')[0] for fault in faults) == sorted(changes)


def test_clashing_dtypes(tmp_path: Any) -> None:
    precision = {f'{WRAPPER}.precision': dict(param_dtype='float32')}
    (fault,) = faults_of(spoilt(tmp_path, {f'{OPTIM}.dtype': 'bfloat16', **precision}))
    assert fault.startswith(
        'model_wrapper_cfg.precision.param_dtype: autocast to torch.bfloat16 over units gathered in'
    )


def test_bfloat16_without_units(tmp_path: Any) -> None:
    (fault,) = faults_of(spoilt(tmp_path, {f'{WRAPPER}.wrap_policy': None}, 'bfloat16'))
    assert fault.startswith('model_wrapper_cfg.wrap_policy: without units nothing is gathered in torch.bfloat16')


def test_a_work_dir_that_cannot_be_made(tmp_path: Any) -> None:
    (tmp_path / 'file').write_text('')
    cfg = spoilt(tmp_path, {'work_dir': str(tmp_path / 'file/below')})
    assert faults_of(cfg) == (f'work_dir: {tmp_path}/file/below cannot be written; name a folder that can be made',)


def test_a_work_dir_that_permissions_allow_and_the_file_system_refuses(tmp_path: Any) -> None:
    cfg = spoilt(tmp_path, {'work_dir': f'{tmp_path}/{"long" * 100}'})
    (fault,) = faults_of(cfg)
    assert fault.startswith(f'work_dir: {tmp_path}/long')
    assert fault.endswith('cannot be written (File name too long); name a folder that can be made')


@pytest.mark.parametrize('setting', ['stage 0', 'stage 1', 'stage 2', 'stage 3', 'bfloat16', 'mesh'])
def test_a_good_config_has_no_fault(tmp_path: Any, setting: str) -> None:
    cfg = spoilt(tmp_path, {}, setting)
    faults = Faults()
    check_config(cfg, translate_optim_wrapper(cfg['optim_wrapper'], faults), faults)
    assert not faults.lines


def test_keys_of_no_parameter_are_said(tmp_path: Any) -> None:
    """Stock configs have keys for parameters that some models lack."""
    cfg = spoilt(
        tmp_path,
        {f'{PARAMWISE}.custom_keys': dict(absolute_pos_embed=dict(decay_mult=0.0), blockss_norm=dict(lr_mult=1.0))},
    )
    faults = Faults()
    doubts = check_config(cfg, translate_optim_wrapper(cfg['optim_wrapper'], faults), faults)
    assert len(doubts) == 2
    assert "custom_keys: no name of a parameter contains 'absolute_pos_embed'" in doubts[0]
    assert doubts[1].endswith(
        "has no effect on this model; did you mean 'blocks.2.norm' or 'blocks.1.norm' or 'blocks.0.norm'?"
    )


def test_resume_names_itself(tmp_path: Path) -> None:
    (fault,) = faults_of(spoilt(tmp_path, dict(load_from='nope.pth', resume=True)))
    assert fault == 'load_from: no checkpoint at nope.pth, from which --resume or resume=True should go on'


@pytest.mark.parametrize('word', ['modl', 'moddel', 'mdoel', 'model2', 'nodel'])
def test_slips(word: str) -> None:
    assert one_slip(word, 'model') and near_key(word, ('model',)) == 'model'


@pytest.mark.parametrize('word', ['model', 'modal3', 'my_model', 'ledom', ''])
def test_no_slips(word: str) -> None:
    assert not one_slip(word, 'model') and near_key(word, ('model', 'val_cfg')) is None
