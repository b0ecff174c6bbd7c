"""World size and rank from every launcher, and the group of one."""

import pytest
import torch
import torch.distributed as dist

from mmzero._compat import group_timeout
from mmzero.engines import LAUNCHERS, init_process_group, process_group, world_size_of
from mmzero.engines.build import this_device
from mmzero.engines.process_group import ranks_per_node
from mmzero.errors import ConfigError

OPEN_MPI = ('OMPI_COMM_WORLD_RANK', 'OMPI_COMM_WORLD_SIZE', 'OMPI_COMM_WORLD_LOCAL_RANK')
SETS = [
    ('pytorch', ('RANK', 'WORLD_SIZE', 'LOCAL_RANK')),
    ('slurm', ('SLURM_PROCID', 'SLURM_NTASKS', 'SLURM_LOCALID')),
    ('mpi', OPEN_MPI),
    ('mpi', ('PMI_RANK', 'PMI_SIZE', 'MPI_LOCALRANKID')),
]


@pytest.fixture(autouse=True)
def env(monkeypatch):
    """An environment without any launcher; gives a function that sets variables."""
    names = {name for sets in LAUNCHERS.values() for names in sets for name in names}
    per_node = ('LOCAL_WORLD_SIZE', 'OMPI_COMM_WORLD_LOCAL_SIZE', 'MPI_LOCALNRANKS', 'SLURM_STEP_TASKS_PER_NODE')
    for name in (*names, *per_node, 'MASTER_ADDR', 'MASTER_PORT'):
        monkeypatch.delenv(name, raising=False)

    def set_all(**values):
        for name, value in values.items():
            monkeypatch.setenv(name, str(value))

    return set_all


@pytest.mark.parametrize(
    ('values', 'ranks'),
    [
        (dict(), None),
        (dict(LOCAL_WORLD_SIZE=4), 4),
        (dict(OMPI_COMM_WORLD_LOCAL_SIZE=4), 4),
        (dict(MPI_LOCALNRANKS=4), 4),
        (dict(SLURM_STEP_TASKS_PER_NODE='8'), 8),
        (dict(SLURM_STEP_TASKS_PER_NODE='8(x4)'), 8),
        (dict(SLURM_STEP_TASKS_PER_NODE='8(x3),4'), None),
    ],
)
def test_ranks_per_node(env, values, ranks):
    env(**values)
    assert ranks_per_node() == ranks


def test_one_process_is_a_node(group):
    init_process_group('none')
    assert ranks_per_node() == 1


@pytest.fixture
def joined(monkeypatch):
    """What would be passed to torch's init_process_group, on a machine without a GPU."""
    calls = []
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    monkeypatch.setattr(
        process_group.dist,
        'init_process_group',
        lambda *args, **kwargs: calls.append((args, kwargs)),
    )
    return calls


def test_none_is_alone(env):
    env(RANK=3, WORLD_SIZE=4, LOCAL_RANK=3)
    assert process_group._ranks('none')[:2] == (0, world_size_of('none')) == (0, 1)


@pytest.mark.parametrize(('launcher', 'names'), SETS)
def test_launcher(env, launcher, names):
    env(**dict(zip(names, (5, 8, 1), strict=True)))
    assert process_group._ranks(launcher)[:2] == (5, world_size_of(launcher)) == (5, 8)


@pytest.mark.parametrize(
    ('launcher', 'names', 'starter'),
    [
        ('pytorch', 'RANK/WORLD_SIZE/LOCAL_RANK', 'torchrun'),
        ('slurm', 'SLURM_PROCID/SLURM_NTASKS/SLURM_LOCALID', 'srun'),
        ('mpi', f'{"/".join(OPEN_MPI)} or PMI_RANK/PMI_SIZE/MPI_LOCALRANKID', 'mpirun'),
    ],
)
@pytest.mark.parametrize('function', [world_size_of, init_process_group])
def test_missing_variables_are_named_with_the_starter(function, launcher, names, starter):
    message = f"launcher '{launcher}' sets {names}, which .* through {starter}, or leave --launcher out"
    with pytest.raises(ValueError, match=message):
        function(launcher)


def test_half_of_the_variables_is_not_enough(env):
    env(RANK=0)
    with pytest.raises(ValueError, match='through torchrun'):
        world_size_of('pytorch')


def test_unknown_launcher_is_named():
    with pytest.raises(ValueError, match="launcher 'torchrun' is unknown; did you mean 'pytorch'"):
        world_size_of('torchrun')


@pytest.mark.skipif(torch.cuda.is_available(), reason='the backend of a machine without a GPU')
@pytest.mark.parametrize('backend', [None, 'gloo', 'nccl'])
def test_group_of_one(group, env, backend):
    init_process_group('none', backend)
    assert (dist.get_backend(), dist.get_rank(), dist.get_world_size()) == ('gloo', 0, 1)
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total == 1
    # A group that is there decides, whatever the environment says.
    env(RANK=3, WORLD_SIZE=4)
    assert process_group._ranks('pytorch')[:2] == (0, world_size_of('pytorch')) == (0, 1)


def test_existing_group_is_kept(group):
    init_process_group('none')
    before = dist.group.WORLD
    init_process_group('pytorch')
    assert dist.group.WORLD is before


@pytest.mark.parametrize(('launcher', 'names'), SETS)
def test_joins_with_torchs_variables_set(env, joined, monkeypatch, launcher, names):
    env(RANK='', WORLD_SIZE='', LOCAL_RANK='', MASTER_PORT='')  # restored afterwards
    for name in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'MASTER_PORT'):
        monkeypatch.delenv(name)
    env(**dict(zip(names, (5, 8, 1), strict=True)), MASTER_ADDR='host')
    init_process_group(launcher, 'nccl', timeout=90, port=1234, init_backend='torch')
    ((args, kwargs),) = joined
    assert args == ('gloo',)
    assert list(kwargs) == ['timeout']
    assert kwargs['timeout'].total_seconds() == 90
    variables = ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'MASTER_ADDR', 'MASTER_PORT')
    assert [process_group.os.environ[name] for name in variables] == ['5', '8', '1', 'host', '1234']


def test_slurm_asks_for_the_first_host(env, joined, monkeypatch):
    env(SLURM_PROCID=0, SLURM_NTASKS=2, SLURM_LOCALID=0, SLURM_NODELIST='n[1-2]')
    env(RANK='', WORLD_SIZE='', LOCAL_RANK='', MASTER_PORT='9', MASTER_ADDR='x')
    monkeypatch.delenv('MASTER_ADDR')
    monkeypatch.setattr(process_group, '_first_slurm_host', lambda: 'n1')
    init_process_group('slurm')
    assert process_group.os.environ['MASTER_ADDR'] == 'n1'
    assert process_group.os.environ['MASTER_PORT'] == '9'


def test_slurm_without_scontrol(env, joined, monkeypatch):
    env(SLURM_PROCID=0, SLURM_NTASKS=2, SLURM_LOCALID=0, SLURM_NODELIST='n[1-2]', PATH='/nowhere')
    env(RANK='', WORLD_SIZE='', LOCAL_RANK='', MASTER_PORT='9', MASTER_ADDR='x')
    monkeypatch.delenv('MASTER_ADDR')
    with pytest.raises(ConfigError, match=r"scontrol does not name .*SLURM_NODELIST='n\[1-2\]'.*set MASTER_ADDR"):
        init_process_group('slurm')
    assert not joined


def test_address_is_asked_for(env, joined):
    env(OMPI_COMM_WORLD_RANK=0, OMPI_COMM_WORLD_SIZE=2, RANK='', WORLD_SIZE='', LOCAL_RANK='')
    env(MASTER_PORT='9')
    with pytest.raises(ValueError, match="launcher 'mpi': set MASTER_ADDR to the address"):
        init_process_group('mpi')
    assert not joined


def test_naming_the_device_does_not_start_cuda(monkeypatch):
    """The check of a config builds an engine before any rank has chosen its GPU."""

    def start():
        raise AssertionError('CUDA was started')

    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'current_device', start)
    monkeypatch.setenv('LOCAL_RANK', '3')
    assert this_device() == torch.device('cuda', 3)


def test_the_groups_own_timeout_is_found(group: None) -> None:
    init_process_group('none', timeout=77)
    assert group_timeout().total_seconds() == 77
