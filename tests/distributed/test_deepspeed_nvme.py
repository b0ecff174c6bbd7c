"""ZeRO-Infinity: parameters and the optimizer on a disk train as in memory, and leave nothing behind."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mmzero import ZeroModelWrapper, ZeroOptimWrapper
from mmzero.engines.deepspeed.package import import_deepspeed
from mmzero.errors import CheckpointError, ConfigError
from tests.distributed.cases import Faults, differing, merged
from tests.distributed.ranks import run_ranks
from tests.distributed.test_deepspeed_sharded import goes_on as sharded_goes_on
from tests.distributed.test_deepspeed_state import goes_on, load, not_finite, pair, state_of, steps, tensors
from tests.distributed.test_evaluated_alone import SMALL, evaluated
from tests.distributed.test_sharded import SHARDED
from tests.distributed.test_used_now_and_then import faults_of as used_now_and_then
from tests.models import TinyViT, image_batch

pytestmark = [pytest.mark.deepspeed, pytest.mark.distributed, pytest.mark.slow]

PARTITIONED = dict(zero_optimization=dict(stage3_param_persistence_threshold=50))


# A rank's half of a flat tensor lies on the disk from 262,144 elements on; here some do, and smaller ones do not. Sizes
# are no multiples of 128, so that DeepSpeed's reads of gradients would not come where they should.
WIDE = 520
GROUPS = dict(zero_optimization=dict(stage3_param_persistence_threshold=50, sub_group_size=300_000))


def trained(
    offload: dict[str, Any], half: bool, options: dict[str, Any] = PARTITIONED, width: int = 32
) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    fields: dict[str, Any] = dict(precision=dict(param_dtype='bfloat16')) if half else {}
    model = ZeroModelWrapper(
        module=TinyViT(width, dropout=0.0),
        stage=3,
        engine='deepspeed',
        offload=offload,
        engine_options=options,
        **fields,
    )
    optimizer = torch.optim.AdamW(model.module.parameters(), lr=1e-3)
    settings = dict(clip_grad=dict(max_norm=0.5), accumulative_counts=2, dtype='bfloat16' if half else None)
    optim = ZeroOptimWrapper(optimizer, **settings)  # type: ignore[arg-type]
    optim.initialize_count_status(model, 0, 6)
    model.train()
    size, rank = dist.get_world_size(), dist.get_rank()
    losses = [float(model.train_step(image_batch(step * size + rank), optim)['loss'].detach()) for step in range(6)]
    return losses, model.engine.model_state()


def compared(folder: str, half: bool) -> Faults:
    found: Faults = {}
    for optimizer in (None, 'cpu'):
        wanted, weights = trained(dict(params='cpu', optimizer=optimizer), half)
        losses, own = trained(dict(params='nvme', optimizer=optimizer, nvme_path=folder), half)
        found[f'optimizer: {optimizer}'] = [] if losses == wanted else [f'losses {losses}, not {wanted}']
        found[f'optimizer: {optimizer}'] += [
            name for name, value in weights.items() if not torch.equal(value, own[name])
        ]
    return found


def on_disk(model: Any) -> list[bool]:
    """By groups, whether the optimizer's state lies on the disk."""
    zero = model.engine.zero
    return [zero._swappable_optimizer_subgroup(group) for group in range(len(zero.fp16_groups))]


def optimizer_compared(folder: str, half: bool) -> Faults:
    found: Faults = {}
    for params in (None, 'cpu', 'nvme'):
        wanted, weights = trained(dict(params=params and 'cpu', optimizer='cpu'), half, GROUPS, WIDE)
        losses, own = trained(dict(params=params, optimizer='nvme', nvme_path=folder), half, GROUPS, WIDE)
        found[f'params: {params}'] = [] if losses == wanted else [f'losses {losses}, not {wanted}']
        found[f'params: {params}'] += [name for name, value in weights.items() if not torch.equal(value, own[name])]
    # As manuals have it, with the sizes of a small model.
    zero = dict(
        GROUPS['zero_optimization'],
        offload_optimizer=dict(device='nvme', nvme_path=folder, pin_memory=True, buffer_count=4, fast_init=False),
        offload_param=dict(
            device='nvme', nvme_path=folder, pin_memory=True, buffer_count=16, buffer_size=2e6, max_in_cpu=1e5
        ),
    )
    aio = dict(block_size=262144, queue_depth=32, intra_op_parallelism=2, single_submit=False, overlap_events=True)
    losses, own = trained(
        dict(params='nvme', optimizer='nvme', nvme_path=folder), half, dict(zero_optimization=zero, aio=aio), WIDE
    )
    found['as a file has it'] = [] if losses == wanted else [f'losses {losses}, not {wanted}']
    return found


def pipelined(**options: bool) -> dict[str, Any]:
    return dict(zero_optimization=dict(GROUPS['zero_optimization'], offload_optimizer=options))


def optimizer_goes_on(folder: str, half: bool) -> Faults:
    """What is saved off the disk and loaded onto it is the same to the bit, and so is the run that goes on."""
    cases: dict[str, tuple[str | None, dict[str, Any]]] = {str(params): (params, GROUPS) for params in (None, 'nvme')}
    cases |= {
        'reads ahead': ('cpu', pipelined(pipeline_read=True)),
        'writes behind': ('cpu', pipelined(pipeline_write=True)),
        'both': ('cpu', pipelined(pipeline_read=True, pipeline_write=True)),
    }
    found: Faults = {}
    for name, (params, options) in cases.items():
        wrapper = dict(offload=dict(params=params, optimizer='nvme', nvme_path=folder), engine_options=options)
        found[name] = goes_on(3, half, wrapper, WIDE)
    model, optim = pair('deepspeed', 3, half, wrapper, WIDE)
    there = on_disk(model)
    # So that there is something to read ahead of.
    found['groups'] = [] if sum(there) >= 3 and not all(there) else [str(there)]
    return found


def loaded_again(folder: str, half: bool) -> Faults:
    """A run that has stepped takes the state of one that has not, and then its own."""
    wrapper = dict(offload=dict(params='cpu', optimizer='nvme', nvme_path=folder), engine_options=GROUPS)
    model, optim = pair('deepspeed', 3, half, wrapper, WIDE)
    found: Faults = {}
    states = [state_of(model, optim)]
    steps(model, optim, range(2))
    states.append(state_of(model, optim))
    wanted = steps(model, optim, range(2, 4))
    for name, state in zip(('none', 'its own'), states, strict=True):
        load(model, optim, state)
        mine = state_of(model, optim)
        found[name] = differing(tensors(mine), tensors(state)) if dist.get_rank() == 0 else []
    again = steps(model, optim, range(2, 4))
    found['goes on'] = [] if again == wanted else [f'losses {again}, not {wanted}']
    return found


def without_a_gradient(folder: str) -> Faults:
    offload = dict(optimizer='nvme', nvme_path=folder)
    return {str(half): used_now_and_then(3, offload, half) for half in (False, True)}


def shards_go_on(folder: str, half: bool) -> Faults:
    """A sharded checkpoint, written beside training, off the disk and onto it; with an average of the masters."""
    fields = dict(offload=dict(optimizer='nvme', nvme_path=f'{folder}/disk'), engine_options=GROUPS)
    checkpoint = dict(SHARDED, async_save=True)
    place = f'{folder}/{half}'
    return {'': sharded_goes_on(place, ('deepspeed', 3, half), fields, filters=9_000, checkpoint=checkpoint)}


def spoilt_on_a_disk(folder: str, half: bool) -> Faults:
    offload = dict(params='cpu', optimizer='nvme', nvme_path=folder)
    return {'': not_finite(3, half, dict(offload=offload, engine_options=GROUPS), WIDE)}


def buffers(folder: str) -> Faults:
    """An optimizer with more state than DeepSpeed has buffers for trains; with too few asked for it is told."""
    found: Faults = {'': []}
    states: list[dict[str, Any]] = []
    for given in (None, 5, 4):
        options = dict(zero_optimization=dict(offload_optimizer={} if given is None else dict(buffer_count=given)))
        model = ZeroModelWrapper(
            module=TinyViT(WIDE),
            stage=3,
            engine='deepspeed',
            offload=dict(optimizer='nvme', nvme_path=folder),
            engine_options=options,
        )
        optimizer = torch.optim.AdamW(model.module.parameters(), amsgrad=True)
        try:
            optim = ZeroOptimWrapper(optimizer)
            steps(model, optim, range(3))
            states.append(optim.state_dict())
            found[''] += [] if given != 4 and all(on_disk(model)) else [f'{given}: {on_disk(model)}']
        except ConfigError as error:
            wanted = 'offload_optimizer.buffer_count: the optimizer takes 5'
            found[''] += [] if given == 4 and wanted in str(error) else [f'{given}: {error}']
    return found | {'loaded': too_many_entries(folder, states[0])}


def too_many_entries(folder: str, state: dict[str, Any]) -> list[str]:
    """State of an optimizer that takes more buffers than this run has is told, on every rank."""
    offload = dict(optimizer='nvme', nvme_path=folder)
    model = ZeroModelWrapper(module=TinyViT(WIDE), stage=3, engine='deepspeed', offload=offload)
    optim = ZeroOptimWrapper(torch.optim.AdamW(model.module.parameters()))
    try:
        optim.load_state_dict(state)
    except CheckpointError as error:
        return [] if 'which take 5 buffers, and this run has 4' in str(error) else [str(error)]
    return ['loaded']


def can_be_built(_: None = None) -> bool:
    builder: Any = import_deepspeed('cpu').accelerator.get_accelerator().create_op_builder('AsyncIOBuilder')
    return bool(builder.is_compatible(verbose=False))


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    (built,) = run_ranks(1, can_be_built)
    if not built:
        pytest.skip('async_io needs libaio')
    path = tmp_path / 'disk'
    path.mkdir()
    return path


def test_evaluated_from_a_disk(tmp_path: Path, disk: Path) -> None:
    settings = {'from a disk': dict(SMALL, offload=dict(params='nvme', optimizer='cpu', nvme_path=str(disk)))}
    for case, faults in merged(run_ranks(2, evaluated, str(tmp_path), settings)).items():
        assert not faults, f'{case}: {faults}'
    assert not list(disk.iterdir())


@pytest.mark.parametrize('half', [False, True])
@pytest.mark.parametrize('what', [optimizer_compared, optimizer_goes_on, spoilt_on_a_disk, loaded_again])
def test_optimizer_on_a_disk(what: Callable, half: bool, disk: Path) -> None:
    for case, faults in merged(run_ranks(2, what, str(disk), half)).items():
        assert not faults, f'{case}: {faults}'
    assert not list(disk.iterdir())


@pytest.mark.parametrize('what', [buffers, without_a_gradient])
def test_optimizer_in_float32(what: Callable, disk: Path) -> None:
    for case, faults in merged(run_ranks(2, what, str(disk))).items():
        assert not faults, f'{case}: {faults}'
    assert not list(disk.iterdir())


@pytest.mark.parametrize('half', [False, True])
def test_shards_off_a_disk(half: bool, disk: Path) -> None:
    for case, faults in merged(run_ranks(2, shards_go_on, str(disk.parent), half)).items():
        assert not faults, f'{case}: {faults}'
    assert not list(disk.iterdir())


@pytest.mark.parametrize('half', [False, True])
def test_on_a_disk(half: bool, disk: Path) -> None:
    for case, faults in merged(run_ranks(2, compared, str(disk), half)).items():
        assert not faults, f'{case}: {faults}'
    assert not list(disk.iterdir())
