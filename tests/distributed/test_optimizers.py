"""Each optimizer steps shards as it steps whole tensors under DDP, or is refused with what it does otherwise."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.tensor import DTensor

from mmzero import ZeroModelWrapper, ZeroOptimWrapper
from mmzero.errors import CheckpointError, ConfigError
from tests import optimizers
from tests.distributed import parity
from tests.distributed.cases import Faults, differing, merged, refused
from tests.distributed.parity import BOUNDS
from tests.distributed.ranks import run_ranks
from tests.distributed.training import Record, compare, train
from tests.models import ToyModel, toy_batch

pytestmark = pytest.mark.distributed

BLOCKS = dict(type='ModuleClassPolicy', classes=['Block'])
HELD, SHARDS, ONE_BY_ONE = 'Held', 'Shards', 'OneByOne'
Build = Callable[[nn.Module], optim.Optimizer]


def of(cls: type, **options: Any) -> Build:
    """On all trained parameters, in two groups of which one does not decay where the optimizer does."""

    def build(net: nn.Module) -> optim.Optimizer:
        params = [param for param in net.parameters() if param.requires_grad]
        decays = [param for param in params if param.dim() > 1]
        rest = dict(params=[param for param in params if param.dim() <= 1])
        if options.get('weight_decay'):
            rest['weight_decay'] = 0.0
        return cls([dict(params=decays), rest], **copy.deepcopy(options))

    return build


def matrices(cls: type, **options: Any) -> Build:
    return lambda net: cls([p for p in net.parameters() if p.dim() == 2 and p.requires_grad], **options)


def tensor_lr(cls: type, **options: Any) -> Build:
    return lambda net: of(cls, lr=torch.tensor(1e-2), **options)(net)


TORCH: dict[str, tuple[Build, str]] = {
    'ASGD': (of(optim.ASGD, lr=0.05), HELD),
    'Adadelta': (of(optim.Adadelta, lr=0.5), HELD),
    'Adafactor': (of(optim.Adafactor, lr=1e-2), ONE_BY_ONE),
    'Adagrad': (of(optim.Adagrad, lr=1e-2), HELD),
    'Adam': (of(optim.Adam, lr=1e-2, amsgrad=True), HELD),
    'AdamW': (of(optim.AdamW, lr=1e-2, weight_decay=0.05), HELD),
    'Adamax': (of(optim.Adamax, lr=1e-2), HELD),
    'Muon': (matrices(optim.Muon, lr=1e-2), ONE_BY_ONE),
    'NAdam': (of(optim.NAdam, lr=1e-2), HELD),
    'RAdam': (of(optim.RAdam, lr=1e-2), HELD),
    'RMSprop': (of(optim.RMSprop, lr=1e-3, momentum=0.9, centered=True), HELD),
    'Rprop': (of(optim.Rprop, lr=1e-3), HELD),
    'SGD': (of(optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01), HELD),
}
KERNELS: dict[str, tuple[Build, str]] = {
    'AdamW, fused': (of(optim.AdamW, lr=1e-2, fused=True), HELD),
    'SGD, fused': (of(optim.SGD, lr=0.05, momentum=0.9, fused=True), HELD),
    'Adagrad, fused': (of(optim.Adagrad, lr=1e-2, fused=True), HELD),
    'AdamW, foreach': (of(optim.AdamW, lr=1e-2, foreach=True), HELD),
    'SGD, foreach': (of(optim.SGD, lr=0.05, momentum=0.9, foreach=True), HELD),
    'Rprop, foreach': (of(optim.Rprop, lr=1e-3, foreach=True), HELD),
    'Adafactor, foreach': (of(optim.Adafactor, lr=1e-2, foreach=True), ONE_BY_ONE),
    'AdamW, lr a tensor': (tensor_lr(optim.AdamW), HELD),
    'SGD, lr a tensor': (tensor_lr(optim.SGD, momentum=0.9), HELD),
}
OWN: dict[str, tuple[Build, str]] = {
    'each element by itself': (of(optimizers.Plain, lr=1e-3), HELD),
    'norms': (of(optimizers.LambLike, lr=1e-2), SHARDS),
    'projections': (of(optimizers.Projecting, lr=1e-3), SHARDS),
    'a number in the group': (of(optimizers.Counting, lr=0.1), SHARDS),
    'blocks of 256 elements': (of(optimizers.InBlocks, lr=1e-2), ONE_BY_ONE),
    'factors of matrices': (of(optimizers.Factored, lr=1e-2), SHARDS),
}
REFUSED: dict[str, tuple[Build, tuple[str, ...]]] = {
    'LBFGS': (lambda net: optim.LBFGS(net.parameters()), ('LBFGS: its step needs a closure',)),
    'a closure': (of(optimizers.NeedsClosure), ('NeedsClosure: its step needs a closure',)),
    'SparseAdam': (of(optim.SparseAdam), ('fails on a few whole tensors', 'dense gradients')),
    'a median of all': (
        of(optimizers.Median),
        ('Median', 'as plain tensors: moves', 'whole tensors, one by one: moves'),
    ),
}
ALL = {**TORCH, **KERNELS, **OWN}


# They round to 8 or 16 bit themselves, so that one rounding of a gradient moves weights by much more.
ROUNDING = ('Muon', 'blocks of 256 elements')
STAGES = (0, 1, 2, 3)
# One of the units stays whole on every rank.
WHOLE = dict(overrides=[dict(units='blocks.1', shard=False)])


def fields(stage: int, **changes: Any) -> dict:
    return dict(stage=stage, wrap_policy=BLOCKS, find_unused_parameters=True, **changes)


def run(build: Build, wrapper: dict, max_norm: float | None = 1.0, **changes: Any) -> Record:
    clip = None if max_norm is None else dict(max_norm=max_norm)
    return train(ToyModel, toy_batch, build, wrapper, dict(clip_grad=clip), **changes)


def distances(name: str, settings: Sequence[dict]) -> list[dict[str, float]]:
    """Distances from DDP in each setting. Without clipping, gradients of two ranks are equal to the bit."""
    build, _ = ALL[name]
    max_norm = None if name in ROUNDING else 1.0
    reference = run(build, {}, max_norm)
    return [compare(run(build, setting, max_norm), reference) for setting in settings]


def measured(plan: dict[str, list[dict]]) -> dict[str, list[dict[str, float]]]:
    return {name: distances(name, settings) for name, settings in plan.items()}


def own_distance() -> dict[str, dict[str, float]]:
    """How far DDP is from itself where gradients are rounded otherwise."""
    found = {}
    for name in ROUNDING:
        build, _ = ALL[name]
        found[name] = compare(run(build, {}, 1.0 + 3e-7), run(build, {}))
    return found


def wrapped(build: Build, stage: int = 3, **changes: Any) -> tuple[ZeroModelWrapper, ZeroOptimWrapper]:
    torch.manual_seed(0)
    model = ZeroModelWrapper(module=ToyModel(), **fields(stage, **changes))
    wrapper = ZeroOptimWrapper(build(model.module))
    wrapper.initialize_count_status(model, 0, 100)
    return model, wrapper


def views() -> list[str]:
    """What is chosen; trying it leaves no trace."""
    faults = []
    model, _ = wrapped(ALL['AdamW'][0])
    for name, (build, wanted) in ALL.items():
        calls: list[Any] = []

        def hooked(net: nn.Module, build: Build = build, calls: list = calls) -> optim.Optimizer:
            optimizer = build(net)
            optimizer.register_step_pre_hook(lambda *args: calls.append(args))
            torch.manual_seed(5)
            return optimizer

        wrapper = ZeroOptimWrapper(hooked(model.module))
        found, optimizer = type(wrapper.engine._step_optimizer.func.__self__).__name__, wrapper.optimizer
        faults += [] if found == wanted else [f'{name}: {found} instead of {wanted}']
        expected = torch.Generator().manual_seed(5).get_state()
        faults += [] if torch.equal(torch.get_rng_state(), expected) else [f'{name}: the random state moved']
        # Adagrad has state from the start.
        fresh = all(
            not torch.any(value.to_local() if hasattr(value, 'to_local') else value) for value in tensors(optimizer)
        )
        faults += [f'{name}: it has been stepped'] if calls or not fresh else []
        kinds = {id(param) for param in model.module.parameters()}
        groups = [id(param) for group in optimizer.param_groups for param in group['params']]
        faults += [] if kinds.issuperset(groups) else [f'{name}: the groups list others']
    return faults


def tensors(optimizer: optim.Optimizer) -> list[torch.Tensor]:
    values = [value for entries in optimizer.state.values() for value in entries.values() if torch.is_tensor(value)]
    return [value.to_local() if isinstance(value, DTensor) else value for value in values]


def refusals() -> list[str]:
    faults: list[str] = []
    model, _ = wrapped(ALL['AdamW'][0])
    for build, said in REFUSED.values():
        with refused(faults, ConfigError, 'optim_wrapper.optimizer', *said):
            ZeroOptimWrapper(build(model.module))
    return faults


def bare() -> list[str]:
    """Why it needs views at all: what torch does with these on FSDP2's parameters as they are."""
    faults = []
    for name, says in BARE.items():
        model, wrapper = wrapped(ALL[name][0])
        for index, param in enumerate(model.module.parameters()):
            param.grad = torch.full_like(param, 0.1 * index) if param.requires_grad else None
        try:
            wrapper.optimizer.step()
        except Exception as error:  # noqa: BLE001
            faults += [] if says in str(error) else [f'{name}: {error}']
        else:
            faults.append(f'{name}: works')
    return faults


BARE = {
    'SGD, fused': 'does not have a sharding strategy',
    'Adagrad, fused': 'does not have a sharding strategy',
    'Rprop': 'in-place operations that require placement',
    'Adafactor': 'in-place operations that require placement',
    'norms': '',
}


def views_and_refusals() -> Faults:
    return dict(views=views(), refusals=refusals(), bare=bare())


def test_views_and_refusals() -> None:
    found = merged(run_ranks(2, views_and_refusals))
    assert not any(found.values()), found


def check(world_size: int, plan: dict[str, list[dict]]) -> None:
    ranks = run_ranks(world_size, measured, plan)
    bounds: dict[str, dict[str, float]] = dict.fromkeys(plan, BOUNDS)
    if world_size > 2:
        for name, own in run_ranks(world_size, own_distance)[0].items():
            bounds[name] = {what: max(3 * value, BOUNDS[what]) for what, value in own.items()}
    faults = []
    for name, settings in plan.items():
        for index, setting in enumerate(settings):
            values = {what: max(rank[name][index][what] for rank in ranks) for what in BOUNDS}
            if name not in ROUNDING:
                key = f'stage {setting["stage"]}{", 2x2" if "mesh" in setting else ""}'
                parity.MEASURED.append((('toy', str(world_size), f'{key}, {name}', 'blocks'), values))
            bad = [f'{what} {value:.0e}' for what, value in values.items() if not value <= bounds[name][what]]
            faults += [f'{name}, {setting}: {bad}'] if bad else []
    assert not faults, faults


def test_a_covering_set() -> None:
    """Every optimizer by turns at a stage, or where whole weights are mixed in, as they are in all by 0-dim ones."""
    turns = [fields(3, **WHOLE), fields(1), fields(3), fields(2)]
    plan = {name: [turns[index % 4]] for index, name in enumerate(ALL)}
    for name in ('AdamW, foreach', 'AdamW, fused', *OWN, 'Muon', 'Adafactor'):
        plan[name] = [fields(3, **WHOLE)]
    plan['AdamW'].append(fields(0))
    check(2, plan)


@pytest.mark.slow
@pytest.mark.parametrize('world_size', [1, 2, 4])
def test_every_optimizer_at_every_stage(world_size: int) -> None:
    settings = [*(fields(stage) for stage in STAGES), fields(3, **WHOLE)]
    if world_size == 4:
        settings += [fields(stage, mesh=dict(replicate=2)) for stage in (1, 3)]
    check(world_size, dict.fromkeys(ALL, settings))


SAVED = ('AdamW', 'SGD', 'ASGD', 'Adafactor', 'Muon', 'AdamW, lr a tensor', 'AdamW, fused', *OWN)


def step(model: ZeroModelWrapper, wrapper: ZeroOptimWrapper, steps: Sequence[int]) -> None:
    for index in steps:
        torch.manual_seed(index)
        model.train_step(toy_batch(index), wrapper)


def same(a: Any, b: Any) -> bool:
    """Whether two nested values are equal to the bit, with their types."""
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, torch.Tensor):
        return type(a) is type(b) and not differing({'': a}, {'': b})
    return type(a) is type(b) and a == b


def layout(value: Any) -> Any:
    """Everything of a state but the numbers."""
    if isinstance(value, dict):
        return {key: layout(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [layout(item) for item in value]
    return (type(value), value.dtype, tuple(value.shape)) if isinstance(value, torch.Tensor) else type(value)


def save(folder: str) -> list[str]:
    """Train at stage 3 and save; the layout is that of stage 0, and of torch's own state."""
    faults = []
    for name in SAVED:
        model, wrapper = wrapped(ALL[name][0])
        step(model, wrapper, range(3))
        state = dict(model=model.engine.model_state(), optim=wrapper.state_dict())
        step(model, wrapper, range(3, 5))
        after = dict(model=model.engine.model_state(), optim=wrapper.state_dict())
        model, wrapper = wrapped(ALL[name][0], stage=0)
        step(model, wrapper, range(3))
        whole = wrapper.state_dict()
        if dist.get_rank() == 0:
            faults += [] if layout(state['optim']) == layout(whole) else [f'{name}: {layout(state)} {layout(whole)}']
            own = copy.deepcopy(wrapper.optimizer.state_dict())
            # The pair adds the names, MMEngine the settings.
            as_torch = {key: whole[key] for key in own}
            faults += [] if layout(own) == layout(as_torch) else [f'{name}: not as torch saves it']
            torch.save(dict(state=state, after=after), f'{folder}/{name}.pth')
    return faults


def load(folder: str, stage: int, goes_on: bool) -> list[str]:
    """Load, on any number of ranks; what is gathered again is equal to the bit, and training goes on as it was."""
    faults = []
    for name in SAVED:
        saved = torch.load(f'{folder}/{name}.pth', weights_only=True) if dist.get_rank() == 0 else None
        state = saved['state'] if saved else dict(model={}, optim={})
        model, wrapper = wrapped(ALL[name][0], stage)
        model.engine.load_model_state(state['model'])
        wrapper.load_state_dict(state['optim'])
        again = dict(model=model.engine.model_state(), optim=wrapper.state_dict())
        if saved and not same(again, saved['state']):
            faults.append(f'{name}: {again["optim"]} {state["optim"]}')
        step(model, wrapper, range(3, 5))
        after = dict(model=model.engine.model_state(), optim=wrapper.state_dict())
        if saved and goes_on and not same(after, saved['after']):
            faults.append(f'{name}: it goes on otherwise')
    return faults


@pytest.mark.parametrize(
    ('world_size', 'stage'),
    [(1, 3), (2, 3), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((4, 3), (2, 0)))],
)
def test_saved_and_loaded(saved: str, world_size: int, stage: int) -> None:
    found = run_ranks(world_size, load, saved, stage, (world_size, stage) == (2, 3))
    assert not any(found), found


@pytest.fixture(scope='module')
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp('optimizers'))
    found = run_ranks(2, save, folder)
    assert not any(found), found
    return folder


def other_groups() -> list[str]:
    """Groups of another run are refused on every rank, by names, by sizes, and by shapes where names are missing."""
    faults: list[str] = []
    model, wrapper = wrapped(of(optim.AdamW))
    step(model, wrapper, [0])
    state = wrapper.state_dict()

    def turned(net: nn.Module) -> optim.Optimizer:
        optimizer = of(optim.AdamW)(net)
        optimizer.param_groups[0]['params'].reverse()
        return optimizer

    for names, said in (
        (True, "has 'stem.weight' where this run's has 'unused.weight'"),
        (False, 'has shape (12, 12)'),
    ):
        _, other = wrapped(turned)
        with refused(faults, CheckpointError, 'of the checkpoint', said, 'load_from without resume'):
            other.load_state_dict({k: v for k, v in state.items() if names or k != 'param_names'})
    _, other = wrapped(lambda net: optim.AdamW(net.parameters()))
    with refused(faults, CheckpointError, 'an optimizer with 2 groups'):
        other.load_state_dict(state)
    return faults


def test_groups_of_another_run_are_refused() -> None:
    found = run_ranks(2, other_groups)
    assert not any(found), found
