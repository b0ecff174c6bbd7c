"""``model_wrapper_cfg``: what it takes, what it refuses, and that it refuses everything at once."""

import copy

import pytest
import torch

from mmzero.config import CheckpointingConfig, Faults, MeshConfig, ZeroConfig, read_zero_config
from mmzero.errors import ConfigError

PATH = 'model_wrapper_cfg'


def read(**cfg):
    """Read fields, raising what is wrong."""
    faults = Faults()
    config = read_zero_config(cfg, PATH, faults)
    faults.raise_if_any()
    return config


def faults_of(**cfg):
    """Read fields and return the faults."""
    faults = Faults()
    read_zero_config(cfg, PATH, faults)
    return faults.lines


def test_defaults():
    config = read()
    assert config == ZeroConfig()
    assert (config.stage, config.engine, config.wrap_policy) == (3, 'fsdp2', 'AutoPolicy')
    assert config.mesh.sizes(4) == (1, 4)
    assert config.precision.reduce_dtype == torch.float32


def test_all_faults_in_one_error():
    with pytest.raises(ConfigError, match='5 faults in the config') as caught:
        read(
            stage=4,
            wrap_polic='x',
            mesh=dict(shard=0, shards=2),
            precision=dict(param_dtype='bfloat'),
        )
    paths = {fault.split(': ')[0] for fault in caught.value.faults}
    assert paths == {
        f'{PATH}.stage',
        f'{PATH}.wrap_polic',
        f'{PATH}.mesh.shard',
        f'{PATH}.mesh.shards',
        f'{PATH}.precision.param_dtype',
    }


@pytest.mark.parametrize(
    ('cfg', 'fault'),
    [
        (dict(stage=4), 'stage: got 4; allowed: 0, 1, 2, 3'),
        (dict(stage=True), 'stage: got True; allowed: 0, 1, 2, 3'),
        (dict(stage='3'), "stage: got '3'; allowed: 0, 1, 2, 3"),
        (dict(stage=1.0), 'stage: got 1.0; allowed: 0, 1, 2, 3'),
        (dict(engine='fsdp'), "engine: got 'fsdp'; allowed: 'fsdp2'"),
        (dict(engine='megatron'), "engine: got 'megatron'; allowed: 'fsdp2', 'deepspeed'"),
        (dict(wrap_polic=1), "wrap_polic: unknown field; did you mean 'wrap_policy'?"),
        (dict(qqq=1), 'qqq: unknown field; known are: activation_checkpointing, '),
        (dict(mesh=4), 'mesh: got 4; expected a dict'),
        (dict(mesh=None), 'mesh: got None; expected a dict'),
        (dict(mesh=dict(shard='4')), "mesh.shard: got '4'; allowed: a positive integer, or -1"),
        (dict(mesh=dict(shard=True)), 'mesh.shard: got True; allowed: a positive integer'),
        (dict(mesh=dict(replicate=0)), 'mesh.replicate: got 0; allowed: a positive integer'),
        (dict(mesh=dict(replicas=2)), "mesh.replicas: unknown field; did you mean 'replicate'?"),
        (dict(precision='bfloat16'), "precision: got 'bfloat16'; expected a dict"),
        (dict(precision=dict(param_dtype='bf16')), "param_dtype: got 'bf16'; expected None or"),
        (dict(precision=dict(keep_fp32=3)), 'precision.keep_fp32: got 3; expected a list of patterns'),
        (dict(precision=dict(keep_fp32=['a', ''])), "precision.keep_fp32: got ['a', '']; expected a list of patterns"),
        (dict(precision=dict(keep_fp32=['a']), stage=0), 'precision.keep_fp32: needs stage 1, 2 or 3; under DDP all'),
        (dict(precision=dict(param_dtype=16)), 'precision.param_dtype: got 16; expected None or'),
        (dict(precision=dict(reduce_dtype='bfloat')), "did you mean 'bfloat16' or"),
        (dict(precision=dict(param_dtype=torch.float64)), 'precision.param_dtype: got torch.float64; expected None or'),
        (
            dict(activation_checkpointing=[1]),
            'activation_checkpointing: got [1]; expected a list of',
        ),
        (
            dict(activation_checkpointing=dict(plicy='x')),
            "activation_checkpointing.plicy: unknown field; did you mean 'policy'",
        ),
        (dict(activation_checkpointing=dict(every=2)), 'activation_checkpointing.every: counts what a policy chooses'),
        (
            dict(activation_checkpointing=True),
            "expected a list of module names, such as ['backbone', 'encoder.layers.0'], or a dict",
        ),
        (dict(activation_checkpointing=dict(policy='AutoPolicy', every=0)), 'every: got 0; allowed: 1 for each'),
        (dict(activation_checkpointing=dict(save='all')), "save: got 'all', which recomputes nothing; it is for"),
        (
            dict(activation_checkpointing=dict(save='all', offload='cpu', early_stop=False)),
            "early_stop: is for what is recomputed, and with save='all' nothing is",
        ),
        (dict(activation_checkpointing=dict(save='some')), "save: got 'some'; allowed: 'inputs', 'matmuls', 'all'"),
        (dict(activation_checkpointing=dict(offload='nvme')), "offload: got 'nvme'; allowed: None, 'cpu'"),
        (
            dict(activation_checkpointing=dict(save='matmuls', offload='cpu')),
            "offload: got 'cpu' beside save='matmuls'",
        ),
        (dict(activation_checkpointing=dict(type='budget')), "type: got 'budget'; allowed: None, 'Budget'"),
        (dict(activation_checkpointing=dict(type='Budget')), 'memory: is missing; say what may be kept for backward'),
        (dict(activation_checkpointing=dict(memory='1GiB')), "memory: is for type='Budget'"),
        (
            dict(activation_checkpointing=dict(type='Budget', memory='9' * 400 + 'GiB')),
            '; expected bytes, or a number with one of',
        ),
        (
            dict(activation_checkpointing=dict(type='Budget', memory=1, save='matmuls')),
            "save: got 'matmuls'; a Budget recomputes modules whole",
        ),
        (dict(find_unused_parameters=1), 'find_unused_parameters: got 1; allowed: True, False'),
        (dict(static_graph='no'), "static_graph: got 'no'; allowed: None, True, False"),
        (dict(no_sync=1), 'no_sync: got 1; allowed: True, False'),
        (dict(detect_anomaly='yes'), "detect_anomaly: got 'yes'; allowed: True, False"),
    ],
)
def test_fault(cfg, fault):
    (line,) = faults_of(**cfg)
    assert line.startswith(f'{PATH}.{next(iter(cfg))}')
    assert fault in line


@pytest.mark.parametrize(
    ('offload', 'wanted'),
    [
        (dict(), []),
        (dict(params=None), []),
        (dict(params='cpu'), []),
        (dict(params='cpu', optimizer='cpu'), []),
        (dict(optimizer='gpu'), ["optimizer: got 'gpu'; allowed: None, 'cpu', 'nvme'"]),
        (dict(nvme_path='/disk'), ["nvme_path: is for params='nvme' or optimizer='nvme'; remove it"]),
        (dict(nvme_path=3), ["nvme_path: got 3; expected None or a path, such as '/local_nvme'"]),
        (dict(param='cpu'), ["param: unknown field; did you mean 'params'?"]),
        (
            dict(optimizer='nvme'),
            ["optimizer: 'nvme' needs engine='deepspeed'; add it, or use 'cpu'"],
        ),
    ],
)
def test_offload_is_read_and_refused(offload, wanted):
    assert faults_of(offload=offload) == [f'{PATH}.offload.{line}' for line in wanted]


@pytest.mark.parametrize('name', ['params', 'optimizer'])
def test_offload_moves_shards_and_state_together(name):
    assert read(offload={name: 'cpu'}).offload.to_host
    assert not read(offload={name: None}).offload.to_host
    assert faults_of(offload={name: 'cpu'}, stage=0) == [
        f"{PATH}.offload.{name}: got 'cpu' at stage=0, which keeps all on the GPU; use stage 1, 2 or 3"
    ]


@pytest.mark.parametrize(
    'cfg',
    [
        dict(stage=[3]),
        dict(stage=dict()),
        dict(engine=['fsdp2']),
        dict(engine={}),
        dict(precision=[]),
        dict(precision=dict(param_dtype=['bfloat16'])),
        dict(precision=dict(param_dtype={})),
        dict(mesh=[2, 2]),
        dict(mesh=dict(shard=2.0)),
        dict(wrap_policy=3),
        dict(wrap_policy=[3]),
        dict(wrap_policy=dict(type=3)),
        dict(wrap_policy=dict(classes=['Block'])),
        dict(activation_checkpointing=3),
        dict(activation_checkpointing=None),
        dict(find_unused_parameters=[]),
        dict(offload='cpu'),
        dict(overrides=3),
        dict(overrides=[[]]),
        dict(overrides=[{5: 1}]),
        dict(overrides=[dict(units={}, shard=False)]),
        {'stage': 3, 5: 1},
    ],
)
def test_no_kind_of_value_breaks_the_reader(cfg):
    faults = Faults()
    read_zero_config(cfg, PATH, faults)
    (line,) = faults.lines
    assert line.startswith(f'{PATH}.{list(cfg)[-1]}')


@pytest.mark.parametrize('stage', [1, 2, 3])
def test_static_graph_needs_stage_0(stage):
    fault = f'{PATH}.static_graph: is an argument of DDP and needs stage=0; got stage={stage}'
    assert faults_of(stage=stage, static_graph=True) == [fault]
    assert faults_of(stage=stage, static_graph=False) == []
    assert read(stage=0, static_graph=True).static_graph is True


@pytest.mark.parametrize('stage', [0, 1, 2, 3])
def test_broadcast_buffers_is_taken_at_every_stage(stage):
    assert read(stage=stage, broadcast_buffers=True).broadcast_buffers is True
    assert faults_of(stage=stage, separate=True, broadcast_buffers=True) == []


@pytest.mark.parametrize(
    'stage, why',
    [(0, 'it is done by itself; remove it'), (1, 'it is done by itself'), (2, 'it is what stage=1 does; use stage=1')],
)
def test_no_sync_is_for_stage_3(stage, why):
    (line,) = faults_of(stage=stage, no_sync=True)
    assert line.startswith(f'{PATH}.no_sync: at stage={stage} {why}')
    assert faults_of(stage=stage, no_sync=False) == []
    assert read(stage=3, no_sync=True).no_sync is True


def test_wrong_stage_is_the_only_fault_of_ddp_arguments():
    (line,) = faults_of(stage='0', broadcast_buffers=True)
    assert line.startswith(f'{PATH}.stage: ')


def test_find_unused_parameters_is_taken_at_every_stage():
    assert all(read(stage=s, find_unused_parameters=True).find_unused_parameters for s in range(4))


@pytest.mark.parametrize('given', ['bfloat16', 'torch.bfloat16', torch.bfloat16])
def test_dtypes_by_name_or_as_dtype(given):
    assert read(precision=dict(param_dtype=given)).precision.param_dtype is torch.bfloat16


@pytest.mark.parametrize('given', ['backbone', ['backbone'], ('backbone',)])
def test_module_names(given):
    assert read(activation_checkpointing=given).activation_checkpointing == CheckpointingConfig(modules=('backbone',))


@pytest.mark.parametrize(
    ('given', 'size'), [(3, 3), ('20GiB', 20 * 2**30), ('1.5 GB', 1_500_000_000), ('512MiB', 2**29), ('7B', 7)]
)
def test_memory_sizes(given, size):
    assert read(activation_checkpointing=dict(type='Budget', memory=given)).activation_checkpointing.memory == size


@pytest.mark.parametrize('given', ['**.norm*', ['**.norm*'], ('**.norm*',)])
def test_module_patterns(given):
    assert read(precision=dict(keep_fp32=given)).precision.keep_fp32 == ('**.norm*',)


def test_users_dict_is_not_changed():
    cfg = dict(
        stage=2,
        mesh=dict(replicate=2),
        precision=dict(param_dtype='bfloat16'),
        wrap_policy=dict(type='ModuleClassPolicy', classes=['Block']),
        activation_checkpointing=['blocks.0'],
    )
    before = copy.deepcopy(cfg)
    read_zero_config(cfg, PATH, Faults())
    assert cfg == before


@pytest.mark.parametrize(
    ('replicate', 'shard', 'world_size', 'sizes'),
    [
        (1, -1, 8, (1, 8)),
        (2, -1, 8, (2, 4)),
        (-1, 2, 8, (4, 2)),
        (-1, 8, 8, (1, 8)),
        (2, 4, 8, (2, 4)),
        (1, -1, 1, (1, 1)),
    ],
)
def test_mesh_sizes(replicate, shard, world_size, sizes):
    assert MeshConfig(replicate, shard).sizes(world_size) == sizes


@pytest.mark.parametrize(
    ('replicate', 'shard', 'world_size', 'message'),
    [
        (-1, -1, 4, 'both -1; give one of them'),
        (3, -1, 4, r'3 x 1 = 3 does not fill 4 rank\(s\); give sizes whose product is 4'),
        (-1, 3, 4, r'1 x 3 = 3 does not fill 4 rank'),
        (2, 4, 4, r'2 x 4 = 8 does not fill 4 rank'),
        (8, -1, 4, r'8 x 1 = 8 does not fill 4 rank'),
    ],
)
def test_mesh_that_does_not_fill_the_world(replicate, shard, world_size, message):
    with pytest.raises(ValueError, match=message):
        MeshConfig(replicate, shard).sizes(world_size)


@pytest.mark.parametrize('policy', ['', dict(type=''), [''], []])
def test_policies_without_a_name(policy):
    (fault,) = faults_of(wrap_policy=policy)
    assert fault.startswith(f"{PATH}.wrap_policy: got {policy!r}; expected a policy's name")


def test_config_for_mmengines_fsdp():
    """Its policy is taken under its name there; its other arguments are named with what stands for them."""
    policy = dict(type='size_based_auto_wrap_policy', min_num_params=10)
    assert read(auto_wrap_policy=policy).wrap_policy == policy
    faults = Faults()
    read_zero_config(dict(sharding_strategy='FULL_SHARD', cpu_offload=True, use_orig_params=True), PATH, faults)
    said = sorted(line.split('; ')[0] for line in faults.lines)
    names = ('cpu_offload', 'sharding_strategy', 'use_orig_params')
    assert said == [f'{PATH}.{name}: is an argument of MMFullyShardedDataParallel' for name in names]
    faults = Faults()
    read_zero_config(dict(auto_wrap_policy=policy, wrap_policy=policy), PATH, faults)
    assert len(faults.lines) == 1 and 'give one of them' in faults.lines[0]
