"""Plans of configs, without ranks."""

import random
import socket
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from mmengine.config import Config
from mmengine.registry import MODELS
from torch import nn

import mmzero  # noqa: F401
from mmzero.config import ZeroConfig
from mmzero.engines import build_engine, plan_units
from mmzero.errors import ConfigError
from mmzero.runner import load_config, plan_configs, prepare_plan
from mmzero.runner.offline import no_network
from mmzero.runner.plan_config import read_policy
from tests.models import ToyModel

CONFIG = dict(model=dict(type='PlannedToy'))
BLOCKS = "dict(type='ModuleClassPolicy', classes=['Block'])"


class Downloading(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        urllib.request.urlopen('http://127.0.0.1:9/weights.pth')


@pytest.fixture(autouse=True)
def models():
    """Two models of this file's own."""
    MODELS.register_module(name='PlannedToy', module=ToyModel)
    MODELS.register_module(name='PlannedDownloading', module=Downloading)
    yield
    for name in ('PlannedToy', 'PlannedDownloading'):
        del MODELS.module_dict[name]


def plans(*policies: str, world_size: int = 4, stage: int | None = None, **cfg):
    config = Config(dict(CONFIG, **cfg))
    return plan_configs(config, 'toy.py', world_size=world_size, policies=policies, stage=stage)


def test_a_config_without_any_field_has_the_defaults() -> None:
    names, (report,), remarks = plans()
    default = plan_units(ToyModel(), build_engine(ZeroConfig()), 4)
    assert (names, report.stage, remarks) == (['toy.py'], ZeroConfig().stage, [])
    assert report.figures.plan == default
    assert report.figures.gathering.shard == 4


def test_nothing_is_left_behind() -> None:
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    planned = prepare_plan(Config(CONFIG), 'toy.py', world_size=2)
    assert all(param.is_meta for param in planned.model.parameters())
    assert not dist.is_initialized()
    assert torch.equal(states[0], torch.get_rng_state()) and (states[1] == np.random.get_state()[1]).all()
    assert states[2] == random.getstate()


def test_the_config_says_stage_mesh_policy_dtype_and_accumulation() -> None:
    wrapper = dict(type='ZeroModelWrapper', stage=2, mesh=dict(replicate=2), wrap_policy=read_policy(BLOCKS))
    optim = dict(type='AmpOptimWrapper', optimizer=dict(type='SGD', lr=0.1), accumulative_counts=4)
    _, (report,), _ = plans(model_wrapper_cfg=wrapper, optim_wrapper=optim)
    gathering = report.figures.gathering
    assert (report.stage, gathering.replicate, gathering.shard, report.micro_batches) == (2, 2, 2, 4)
    assert gathering.param_dtype == torch.bfloat16
    assert len(report.figures.units) == 4
    _, (report,), _ = plans(model_wrapper_cfg=dict(wrapper, mesh={}), stage=0)
    assert report.figures.gathering.replicate == 4


def test_policies_of_the_command_line_stand_in_for_the_configs(tmp_path: Path) -> None:
    other = tmp_path / 'other.py'
    other.write_text(f'model = dict(type="PlannedToy", depth=5)\nmodel_wrapper_cfg = dict(wrap_policy={BLOCKS})\n')
    wrapper = dict(wrap_policy=read_policy(BLOCKS))
    names, reports, _ = plans('None', BLOCKS, str(other), model_wrapper_cfg=wrapper)
    assert names == ['toy.py, --policy None', f'toy.py, --policy {BLOCKS}', str(other)]
    assert [len(report.figures.units) for report in reports] == [1, 4, 6]
    names, reports, _ = plans(str(other), model_wrapper_cfg=wrapper)
    assert [len(report.figures.units) for report in reports] == [4, 6]


@pytest.mark.parametrize(
    ('text', 'policy'),
    [
        ('AutoPolicy', 'AutoPolicy'),
        ('mmzero.AutoPolicy', 'mmzero.AutoPolicy'),
        ('None', None),
        ("dict(type='A', x=dict(y=[1, -2]))", dict(type='A', x=dict(y=[1, -2]))),
        ("{'type': 'A'}", dict(type='A')),
        ("['A', dict(type='B')]", ['A', dict(type='B')]),
    ],
)
def test_read_policy(text: str, policy) -> None:
    assert read_policy(text) == policy


@pytest.mark.parametrize('text', ['dict(type=open)', 'print(1)', 'dict(type=', 'dict([1])', 'dict(**{})', 'a b'])
def test_what_is_no_policy(text: str) -> None:
    with pytest.raises(ConfigError, match='--policy: cannot read .*; expected a policy'):
        read_policy(text)


@pytest.mark.parametrize(
    ('cfg', 'fault'),
    [
        (dict(model=None), 'model: is missing'),
        (dict(model=3), 'model: got 3; expected a dict'),
        (dict(model=dict(type='PlannedToi')), "model.type: no class 'PlannedToi' .* did you mean .*PlannedToy"),
        (dict(model=dict(type='PlannedToy', breadth=3)), 'model.*breadth'),
        (dict(default_scope='mmdett'), "default_scope: got 'mmdett'"),
        (dict(model_wrapper_cfg=dict(stage=7)), 'model_wrapper_cfg.stage: got 7'),
        (dict(model_wrapper_cfg=dict(mesh=dict(replicate=3))), 'model_wrapper_cfg.mesh: .* does not fill 4'),
        (
            dict(model_wrapper_cfg=dict(wrap_policy=dict(type='ModuleClassPolicy', classes=['Blok']))),
            "model_wrapper_cfg.wrap_policy: no module of ToyModel is of the class 'Blok'; did you mean 'Block'",
        ),
    ],
)
def test_faults(cfg: dict, fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        plans(**cfg)


def test_a_policy_of_the_command_line_is_named_as_such() -> None:
    with pytest.raises(ConfigError, match="--policy Nope: no wrap policy 'Nope'"):
        plans('Nope')


def test_units_that_the_engine_refuses() -> None:
    class ReachesIn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.inner.weight

    MODELS.register_module(name='PlannedReach', module=ReachesIn)
    wrapper = dict(wrap_policy=dict(type='ModuleNamePolicy', names=['inner']))
    try:
        with pytest.raises(ConfigError, match=r'model_wrapper_cfg.wrap_policy: inner \(Linear\) cannot be a unit'):
            plans(model=dict(type='PlannedReach'), model_wrapper_cfg=wrapper)
    finally:
        del MODELS.module_dict['PlannedReach']


def test_what_is_not_in_the_plan_is_said() -> None:
    optim = dict(type='AmpOptimWrapper', optimizer=dict(type='SGD', lr=0.1), dtype='float8')
    _, (report,), remarks = plans(model_wrapper_cfg=dict(type='MMFullyShardedDataParallel'), optim_wrapper=optim)
    assert report.stage == 3 and report.figures.gathering.param_dtype is None
    assert 'toy.py: model_wrapper_cfg is of MMFullyShardedDataParallel: planned with the defaults' in remarks[0]
    assert "toy.py: optim_wrapper.dtype: got 'float8'" in remarks[1]


def test_nothing_is_downloaded() -> None:
    with pytest.raises(ConfigError, match='model: cannot be built: .*needs the network .*nothing is downloaded here'):
        plans(model=dict(type='PlannedDownloading'))


def test_the_network_is_there_again_afterwards() -> None:
    before = socket.socket.connect, socket.getaddrinfo
    with no_network():
        with pytest.raises(ConnectionError, match='nothing is downloaded'):
            socket.getaddrinfo('localhost', 80)
        with socket.socket() as sock, pytest.raises(ConnectionError, match='nothing is downloaded'):
            sock.connect(('127.0.0.1', 9))
    assert (socket.socket.connect, socket.getaddrinfo) == before


def test_faults_come_together() -> None:
    with pytest.raises(ConfigError) as caught:
        plans(model_wrapper_cfg=dict(overrides_=[], wrap_policy='AutoPolcy'))
    assert [fault.split(':')[0] for fault in caught.value.faults] == [
        'model_wrapper_cfg.overrides_',
        'model_wrapper_cfg.wrap_policy',
    ]


def test_a_policy_that_crashes_says_where() -> None:
    def crashes(model: nn.Module) -> None:
        return model.nothing_of_this_name

    with pytest.raises(ConfigError, match=r'wrap_policy: AttributeError: .*nothing_of_this_name.*test_plan_config.py'):
        plans(model_wrapper_cfg=dict(wrap_policy=crashes))


def test_a_config_of_an_installed_package() -> None:
    cfg = load_config('mmdet::retinanet/retinanet_r50_fpn_1x_coco.py')
    assert cfg.model.type == 'RetinaNet'
    with pytest.raises(ConfigError, match='cannot be read'):
        load_config('mmdet::retinanet/retinanet_r500.py')


def test_what_is_recomputed_is_told_and_checked() -> None:
    _, _, remarks = plans(activation_checkpointing=['blocks.0', 'stem'])
    assert remarks == ['toy.py: recomputed in backward, which these figures do not depend on: 1 x Block, 1 x Linear']
    with pytest.raises(ConfigError) as caught:
        plans(model_wrapper_cfg=dict(activation_checkpointing=['block.0', 'stm']))
    for part in (
        'model_wrapper_cfg.activation_checkpointing: ToyModel ',
        "has no module 'block.0'; did you mean 'blocks.0'",
        "has no module 'stm'; did you mean 'stem'",
    ):
        assert part in str(caught.value)
