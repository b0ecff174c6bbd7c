"""Weights, optimizer states and averages go into DeepSpeed's partitions and out of them, and are those of FSDP2."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mmengine.optim import LinearLR

from mmzero import ZeroModelWrapper, ZeroOptimWrapper
from mmzero.engines.state import group_names
from mmzero.errors import NonFiniteError
from tests.distributed.cases import Faults, differing, merged
from tests.distributed.ranks import run_ranks
from tests.models import TinyViT, image_batch

pytestmark = [pytest.mark.deepspeed, pytest.mark.distributed]

BF16 = dict(precision=dict(param_dtype='bfloat16'))
# Stage 3 keeps small parameters whole; here it partitions all but the smallest.
PARTITIONED = dict(engine_options=dict(zero_optimization=dict(stage3_param_persistence_threshold=50)))


class Frozen(TinyViT):
    """Its first layers are frozen, so that some groups have nothing to train."""

    def __init__(self, width: int = 32) -> None:
        super().__init__(width, dropout=0.0)
        self.patch.requires_grad_(False)
        self.layers[0].requires_grad_(False)
        self.layers[1].norm1.requires_grad_(False)


def groups_of(model: torch.nn.Module) -> list[dict]:
    """A group per parameter of the frozen and the first trained layers, one for the rest."""
    early = [(name, param) for name, param in model.named_parameters() if name.startswith(('patch', 'layers.1'))]
    ids = {id(param) for _, param in early}
    rest = [param for param in model.parameters() if id(param) not in ids]
    return [dict(params=[p], lr=1e-3 * (1 + i % 2)) for i, (_, p) in enumerate(early)] + [dict(params=rest)]


def pair(
    engine: str, stage: int, half: bool = False, wrapper: dict | None = None, width: int = 32, **optim: Any
) -> tuple[Any, ZeroOptimWrapper]:
    torch.manual_seed(0)
    fields: dict[str, Any] = dict(stage=stage, engine=engine, **(BF16 if half else {}))
    fields |= (
        PARTITIONED if engine == 'deepspeed' else dict(wrap_policy=dict(type='ModuleClassPolicy', classes=['Layer']))
    )
    fields |= wrapper or {}
    model = ZeroModelWrapper(module=Frozen(width), **fields)
    optimizer = torch.optim.AdamW(groups_of(model.module), lr=2e-3, weight_decay=0.05)
    settings = dict(clip_grad=dict(max_norm=0.5), dtype='bfloat16' if half else None)
    optim_wrapper = ZeroOptimWrapper(optimizer, **settings, **optim)
    optim_wrapper.initialize_count_status(model, 0, 100)
    model.train()
    return model, optim_wrapper


def steps(model: Any, optim: ZeroOptimWrapper, numbers: range) -> list[float]:
    size, rank = dist.get_world_size(), dist.get_rank()
    return [float(model.train_step(image_batch(n * size + rank), optim)['loss'].detach()) for n in numbers]


def state_of(model: Any, optim: ZeroOptimWrapper) -> tuple[dict, dict]:
    return model.engine.model_state(), optim.state_dict()


def load(model: Any, optim: ZeroOptimWrapper, state: tuple[dict, dict]) -> None:
    model.engine.load_model_state(state[0])
    optim.load_state_dict(copy.deepcopy(state[1]))


def tensors(state: tuple[dict, dict]) -> dict[str, torch.Tensor]:
    weights, optim = state
    found = {f'weight {name}': value for name, value in weights.items()}
    for index, entries in optim['state'].items() if optim else ():
        found |= {f'{index} {name}': torch.as_tensor(float(v)) if name == 'step' else v for name, v in entries.items()}
    return found


def goes_on(stage: int, half: bool, wrapper: dict | None = None, width: int = 32) -> list[str]:
    """A run that is saved and loaded into a new one goes on to the bit; what is loaded is what was saved."""
    whole, optim = pair('deepspeed', stage, half, wrapper, width)
    steps(whole, optim, range(2))
    saved = state_of(whole, optim)
    wanted = steps(whole, optim, range(2, 5))
    again, own = pair('deepspeed', stage, half, wrapper, width)
    load(again, own, saved)
    faults = differing(tensors(state_of(again, own)), tensors(saved)) if dist.get_rank() == 0 else []
    faults += [] if dist.get_rank() == 0 else [f'rank 1 has {x}' for x in state_of(again, own) if x]
    found = steps(again, own, range(2, 5))
    faults += [] if found == wanted else [f'losses {found}, not {wanted}']
    end, own_end = state_of(whole, optim), state_of(again, own)
    return faults + (differing(tensors(own_end), tensors(end)) if dist.get_rank() == 0 else [])


def by_name(state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state as torch's FSDP1 saves it whole."""
    if not state:
        return state
    names = [name for own in state['param_names'] for name in own]
    groups = [dict(group, params=[names[index] for index in group['params']]) for group in state['param_groups']]
    return dict(state={names[index]: entries for index, entries in state['state'].items()}, param_groups=groups)


def between_engines(stage: int) -> list[str]:
    """A run of FSDP2 goes on under DeepSpeed and back, as without the break; groups and names are the same."""
    whole, optim = pair('fsdp2', stage)
    names = group_names(optim.optimizer, whole.engine.named_params())
    steps(whole, optim, range(2))
    saved = state_of(whole, optim)
    wanted = steps(whole, optim, range(2, 6))
    other, own = pair('deepspeed', stage)
    load(other, own, saved)
    middle = state_of(other, own)
    faults = differing(tensors(middle), tensors(saved)) if dist.get_rank() == 0 else []
    if dist.get_rank() == 0:
        faults += [] if middle[1]['param_names'] == names == saved[1]['param_names'] else ['names of groups']
        plain = [[{k: v for k, v in g.items() if k != 'params'} for g in s[1]['param_groups']] for s in (middle, saved)]
        faults += [] if plain[0] == plain[1] else ['groups']
    named, mine = pair('deepspeed', stage)
    load(named, mine, (saved[0], by_name(saved[1])))
    taken = state_of(named, mine)
    faults += differing(tensors(taken), tensors(saved)) if dist.get_rank() == 0 else []
    found = steps(other, own, range(2, 4))
    back, last = pair('fsdp2', stage)
    load(back, last, state_of(other, own))
    found += steps(back, last, range(4, 6))
    off = max(abs(a - b) / b for a, b in zip(found, wanted, strict=True))
    return faults + ([] if off <= 1e-6 else [f'losses {off:.0e} off'])


def loaded_weights_stay(stage: int, half: bool) -> list[str]:
    """Weights loaded before and after the start are there after a step with lr 0 (hazard 39), float32 to the bit."""
    torch.manual_seed(0)
    fields = dict(stage=stage, engine='deepspeed', **(BF16 if half else {}), **PARTITIONED)
    model = ZeroModelWrapper(module=Frozen(), **fields)
    given = {name: value + 0.123 for name, value in model.engine.model_state().items()}
    faults = []
    model.engine.load_model_state(given)
    optimizer = torch.optim.AdamW(groups_of(model.module), lr=0.0, weight_decay=0.0)
    for group in optimizer.param_groups:
        group['lr'] = 0.0
    optim = ZeroOptimWrapper(optimizer, dtype='bfloat16' if half else None)
    for when, shift in (('before', 0.0), ('after', 0.456)):
        given = {name: value + shift for name, value in given.items()}
        if shift:
            model.engine.load_model_state(given)
        steps(model, optim, range(1))
        found = model.engine.model_state()
        faults += [f'{when} the start: {fault}' for fault in differing(found, given)]
    return faults


def states(stage: int) -> Faults:
    found: Faults = {}
    for half in (False, True):
        found[f'goes on, {half}'] = goes_on(stage, half)
        found[f'loaded weights, {half}'] = loaded_weights_stay(stage, half)
    return found | {'between engines': between_engines(stage)}


@pytest.mark.parametrize('stage', [2, 3, pytest.param(1, marks=pytest.mark.slow)])
def test_states(stage: int) -> None:
    for case, faults in merged(run_ranks(2, states, stage)).items():
        assert not faults, f'{case}: {faults}'


def zero(**fields: Any) -> dict[str, Any]:
    return dict(engine_options=dict(zero_optimization=dict(stage3_param_persistence_threshold=50, **fields)))


# Each cuts or keeps the float32 values in another way.
OTHERS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    'small sub-groups': (zero(sub_group_size=500), (3,)),
    'aligned parameters': (zero(parameter_alignment=True), (1, 2)),
    'optimizer offloaded': (dict(offload=dict(optimizer='cpu')), (1, 2, 3)),
    'parameters offloaded': (dict(offload=dict(params='cpu')), (3,)),
    'all offloaded': (dict(offload=dict(params='cpu', optimizer='cpu')), (3,)),
    'not contiguous': (zero(contiguous_gradients=False, reduce_scatter=False), (1, 2)),
    'overlapping': (zero(overlap_comm=True), (2, 3)),
}


def other_settings() -> Faults:
    return {
        f'{name}, {stage}, {half}': goes_on(stage, half, wrapper)
        for name, (wrapper, stages) in OTHERS.items()
        for stage in stages
        for half in (False, True)
    }


@pytest.mark.slow
def test_states_under_other_settings() -> None:
    for case, faults in merged(run_ranks(2, other_settings)).items():
        assert not faults, f'{case}: {faults}'


def scheduled() -> list[str]:
    """Schedulers alone own lr: of all groups, also those that DeepSpeed has dropped; DeepSpeed steps by it."""
    model, optim = pair('deepspeed', 2)
    groups = optim.optimizer.param_groups
    faults = [] if len(groups) == len(groups_of(Frozen())) else ['groups are missing']
    schedule = LinearLR(optim, start_factor=0.5, by_epoch=False, end=2)
    halves = [group['lr'] for group in groups]
    before = model.engine.model_state()
    for group in groups:
        group['lr'] = 0.0
    steps(model, optim, range(1))
    faults += differing(model.engine.model_state(), before)
    for group, half in zip(groups, halves, strict=True):
        group['lr'] = half
    schedule.step()
    schedule.step()
    whole = [group['lr'] for group in groups]
    faults += [] if whole == pytest.approx([2 * lr for lr in halves]) and len(set(halves)) == 2 else [f'{whole}']
    steps(model, optim, range(1))
    after = model.engine.model_state()
    moved = [name for name, value in before.items() if not torch.equal(value, after[name])]
    return faults + ([] if bool(moved) == (dist.get_rank() == 0) else ['nothing moved'])


def test_schedulers_alone_own_lr() -> None:
    assert run_ranks(2, scheduled) == [[], []]


def not_finite(stage: int, half: bool, wrapper: dict | None = None, width: int = 32) -> list[str]:
    """What one rank spoils moves nothing, the place is named, and more in a row than allowed end the run on both."""
    model, optim = pair('deepspeed', stage, half, dict(wrapper or {}, detect_anomaly=True), width, max_skips=1)
    steps(model, optim, range(1))
    before = state_of(model, optim)
    spoilt = image_batch(dist.get_rank())
    if dist.get_rank() == 1:
        spoilt['inputs'] = spoilt['inputs'] * float('inf')
    model.train_step(spoilt, optim)
    after = state_of(model, optim)
    faults = differing(tensors(after), tensors(before)) if dist.get_rank() == 0 else []
    faults += [] if optim.skips.in_a_row == 1 else [f'{optim.skips.in_a_row} are skipped']
    steps(model, optim, range(1, 2))
    faults += [] if optim.skips.in_a_row == 0 else ['a good step is skipped']
    try:
        for _ in range(2):
            model.train_step(spoilt, optim)
        return [*faults, 'goes on']
    except NonFiniteError as error:
        wanted = ('2 optimizer step(s) in a row', 'began on rank 1 in the input of layers.0')
        return faults + [f'{word!r} is not in {error}' for word in wanted if word not in str(error)]


def spoilt_steps() -> Faults:
    cases = [(stage, half) for stage in (1, 2, 3) for half in (False, True)]
    return {f'{stage}, {half}': not_finite(stage, half) for stage, half in cases}


def test_gradients_that_are_not_finite() -> None:
    for case, faults in merged(run_ranks(2, spoilt_steps)).items():
        assert not faults, f'{case}: {faults}'
