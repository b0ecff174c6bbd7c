"""A GAN by its config: an optimizer per child, checked, built, scheduled, saved and resumed."""

import copy
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from mmengine.optim import OptimWrapper, OptimWrapperDict
from mmengine.optim import build_optim_wrapper as build_one
from mmengine.registry import OPTIM_WRAPPER_CONSTRUCTORS
from torch import nn

from mmzero import ZeroOptimWrapper
from mmzero.errors import ConfigError
from tests.distributed.gan import Gan, Network
from tests.models import ToyModel
from tests.vectors import vector_runner

pytestmark = pytest.mark.usefixtures('group')

OPTIM = dict(
    generator=dict(type='OptimWrapper', optimizer=dict(type='AdamW', lr=1e-3), clip_grad=dict(max_norm=0.1)),
    discriminator=dict(type='AmpOptimWrapper', optimizer=dict(type='SGD', lr=0.01, momentum=0.9)),
)
SCHEDULERS = dict(
    generator=[dict(type='LinearLR', start_factor=0.5, begin=0, end=4, by_epoch=False)],
    discriminator=dict(type='StepLR', step_size=2, gamma=0.5, end=9, by_epoch=False),
)
LAYERS = dict(type='ModuleClassPolicy', classes=['Layer'])


def gan_runner(folder: Path, stage: int = 3, model: nn.Module | None = None, **changes: Any) -> Any:
    torch.manual_seed(0)
    settings = dict(optim_wrapper=copy.deepcopy(OPTIM), param_scheduler=copy.deepcopy(SCHEDULERS))
    settings.update(changes)
    wrapper = dict(wrap_policy=LAYERS, **settings.pop('wrapper', {}))
    return vector_runner(folder, model or Gan(), stage, wrapper, **settings)


def state_of(runner: Any) -> dict:
    return dict(weights=runner.model.engine.model_state(), optim=runner.optim_wrapper.state_dict())


def same(found: Any, wanted: Any) -> bool:
    """To the bit, whatever it holds."""
    if isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(same(found[key], value) for key, value in wanted.items())
    if isinstance(wanted, (list, tuple)):
        return len(found) == len(wanted) and all(map(same, found, wanted))
    return torch.equal(found, wanted) if isinstance(wanted, torch.Tensor) else found == wanted


@pytest.mark.parametrize('stage', [0, 1, 2, 3])
def test_train_save_and_resume(tmp_path: Path, stage: int) -> None:
    """Weights, both optimizers and their schedulers go on to the bit; val and test in between and after."""
    whole = gan_runner(tmp_path / 'whole', stage, train_cfg=dict(by_epoch=True, max_epochs=2, val_interval=1))
    whole.train()
    assert whole.test() == dict(count=6)
    assert all(isinstance(one, ZeroOptimWrapper) for one in whole.optim_wrapper.values())
    first = gan_runner(tmp_path / 'parts', stage)
    first.train()
    assert first.optim_wrapper.get_lr().keys() == {'generator.lr', 'discriminator.lr'}
    saved = torch.load(tmp_path / 'parts/epoch_1.pth', weights_only=True)
    assert saved['optimizer'].keys() == saved['param_schedulers'].keys() == OPTIM.keys()
    second = gan_runner(
        tmp_path / 'parts', stage, resume=True, train_cfg=dict(by_epoch=True, max_epochs=2, val_interval=1)
    )
    second.train()
    assert second.iter == whole.iter == 6
    assert same(state_of(second), state_of(whole))
    assert second.optim_wrapper.get_lr() == whole.optim_wrapper.get_lr()


def test_resuming_within_a_step_of_one_says_what_is_lost(tmp_path: Path) -> None:
    gan_runner(tmp_path).train()
    options = dict(OPTIM, generator=dict(OPTIM['generator'], accumulative_counts=2))
    resumed = gan_runner(tmp_path, optim_wrapper=options, resume=True)
    with patch.object(resumed.logger, 'warning') as warning:
        resumed.train()
    told = [call.args[0] for call in warning.call_args_list if 'micro-batches of a step' in call.args[0]]
    assert len(told) == 1 and told[0].startswith('optim_wrapper.generator.accumulative_counts: resumed after 1 of 2')


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class ByChild:
    """As users write it: one wrapper by the config of each child."""

    def __init__(self, optim_wrapper_cfg: dict, paramwise_cfg: dict | None = None) -> None:
        self.cfg = optim_wrapper_cfg

    def __call__(self, model: nn.Module) -> OptimWrapperDict:
        model = model.module if hasattr(model, 'module') else model
        return OptimWrapperDict(**{name: build_one(getattr(model, name), one) for name, one in self.cfg.items()})


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class PastTheConfig(ByChild):
    """Builds MMEngine's own wrapper, whatever the config says."""

    def __call__(self, model: nn.Module) -> OptimWrapperDict:
        params = {name: getattr(model.module, name).parameters() for name in self.cfg}
        return OptimWrapperDict(**{name: OptimWrapper(torch.optim.SGD(own, lr=0.1)) for name, own in params.items()})


@pytest.mark.parametrize('stage', [0, 3])
def test_a_constructor_of_the_users(tmp_path: Path, stage: int) -> None:
    for name, optim in (('plain', {}), ('own', dict(constructor='ByChild'))):
        gan_runner(tmp_path / name, stage, optim_wrapper=dict(copy.deepcopy(OPTIM), **optim)).train()
    plain, own = (torch.load(tmp_path / name / 'epoch_1.pth', weights_only=True) for name in ('plain', 'own'))
    assert same(own['optimizer'], plain['optimizer']) and same(own['state_dict'], plain['state_dict'])


def test_a_constructor_that_builds_past_the_config(tmp_path: Path) -> None:
    runner = gan_runner(tmp_path, optim_wrapper=dict(copy.deepcopy(OPTIM), constructor='PastTheConfig'))
    with pytest.raises(ConfigError, match='optim_wrapper.generator: optim_wrapper.constructor built an OptimWrapper'):
        runner.train()


def test_dtypes_by_child(tmp_path: Path) -> None:
    runner = gan_runner(tmp_path)
    runner.prepare()
    seen = {}
    for name in OPTIM:
        layer = runner.model.module.get_submodule(f'{name}.layers.0.up')
        layer.register_forward_pre_hook(lambda layer, _, name=name: seen.update({name: layer.weight.dtype}))
    runner.train()
    assert seen == dict(generator=torch.float32, discriminator=torch.bfloat16)


def test_faults_come_together(tmp_path: Path) -> None:
    optim = copy.deepcopy(OPTIM)
    optim['generators'] = optim.pop('generator')
    optim['discriminator'].update(accumulative_counts=0, clip_grad=dict(max_norm=-1), paramwise_cfg=dict(colour=1))
    optim['perceptual'] = dict(optimizer=dict(type='SGDD', lr=0.1))
    optim['clip_grad'] = dict(max_norm=1.0)
    schedulers = dict(copy.deepcopy(SCHEDULERS), generator=dict(type='StepLRR', step_size=1))
    with pytest.raises(ConfigError) as caught:
        gan_runner(tmp_path, optim_wrapper=optim, param_scheduler=schedulers)
    for line in (
        "optim_wrapper.generators: is no child of Gan; did you mean 'generator'?",
        'optim_wrapper.discriminator.accumulative_counts: got 0',
        'optim_wrapper.discriminator.clip_grad.max_norm: got -1',
        'optim_wrapper.discriminator.paramwise_cfg.colour: unknown field',
        "optim_wrapper.perceptual.optimizer.type: no class 'SGDD'",
        'optim_wrapper.perceptual: perceptual has no trained parameters; leave its optimizer out',
        'optim_wrapper.clip_grad: unknown field; beside several optimizers, each has its own fields',
        'param_scheduler.generator: is no optimizer of optim_wrapper',
        "param_scheduler.generator.type: no class 'StepLRR'",
        'param_scheduler.generators: is missing',
    ):
        assert line in str(caught.value), line


@pytest.mark.parametrize(
    ('changes', 'match'),
    [
        (dict(model=ToyModel()), 'model: ToyModel has no train_step of its own'),
        (dict(optim_wrapper=dict(type='OptimWrapper')), 'optim_wrapper.optimizer: is missing'),
        (
            dict(wrapper=dict(activation_checkpointing=dict(type='Budget', memory='1GiB'))),
            "activation_checkpointing: type='Budget' looks at what one forward keeps",
        ),
        (dict(stage=0, wrapper=dict(static_graph=True)), 'static_graph: is an argument of DDP, and separate'),
        (dict(wrapper=dict(separate=dict(generators='bfloat16'))), "separate: 'generators' is no child"),
    ],
)
def test_refused(tmp_path: Path, changes: dict, match: str) -> None:
    optim = {name: dict(optimizer=dict(type='SGD', lr=0.1)) for name in OPTIM}
    with pytest.raises(ConfigError, match=match):
        gan_runner(tmp_path, **dict(dict(optim_wrapper=optim, param_scheduler=None), **changes))


def test_wrappers_that_were_built_before(tmp_path: Path) -> None:
    model = Gan()
    optim = {name: OptimWrapper(torch.optim.SGD(getattr(model, name).parameters(), lr=0.1)) for name in OPTIM}
    with pytest.raises(ConfigError, match='optim_wrapper.generator: was built before the model is sharded'):
        gan_runner(tmp_path, model=model, optim_wrapper=optim)


def test_a_child_without_an_optimizer_is_told(tmp_path: Path) -> None:
    class Third(Gan):
        def __init__(self) -> None:
            super().__init__()
            self.third = Network(12, 2)

    runner = gan_runner(tmp_path, model=Third(), log_level='WARNING')
    log = ''.join(path.read_text() for path in tmp_path.rglob('*.log'))
    assert 'optim_wrapper: third has trained parameters and no optimizer, and stays as it is' in log
    runner.train()
