"""Whether an optimizer steps shards as it steps whole tensors, found by trying it.

[Note: the trial of an optimizer]
torch's elementwise optimizers are known to. Any other is tried when it is bound, on a few stand-ins for parameters, of
the dimensions, dtype and shardings that its groups have: copies of it step them whole, and shown by each view
([Note: views of parameters]), with the same made-up gradients. The first view that moves them alike, within the bounds
in which shards are equal to DDP, is the one of the run; an optimizer that no view serves is refused. The stand-ins are
large and uneven enough for blocks of 256 elements, which 8-bit optimizers make of tensors from 4096 elements on, and
their gradients change in size, for optimizers that clip, and are orthogonal to the weights at first, for such as
project. What an optimizer does on rarer occasions a trial does not see.

It costs a dozen steps of 30 thousand elements, and one exchange of the ranks' findings per view that is tried; neither
grows with the model. Random states are as before, afterwards.
"""

import copy
import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from mmzero.engines.closure import NO_CLOSURE, needs_closure
from mmzero.engines.fsdp2.kinds import kind_of
from mmzero.engines.fsdp2.views import Held, OneByOne, Shards, View
from mmzero.engines.on_host import is_on_host, part_of
from mmzero.errors import ConfigError

ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in (
        'ASGD',
        'Adadelta',
        'Adagrad',
        'Adam',
        'AdamW',
        'Adamax',
        'NAdam',
        'RAdam',
        'RMSprop',
        'Rprop',
        'SGD',
    )
)
"""torch's own that treat each element by itself; subclasses may not."""

SHAPES: dict[int, tuple[tuple[int, ...], ...]] = {
    0: ((),),
    1: ((4099,), (5,)),
    2: ((96, 64), (33, 40)),
    3: ((24, 16, 16), (5, 7, 3)),
    4: ((64, 8, 3, 3), (7, 3, 3, 3)),
}
"""Of the stand-ins, by number of dimensions; of more, the last ones with dimensions of one."""

# How much larger the gradients of each step are than 1: optimizers that clip do so now and then.
GRADIENTS = (1.0, 0.01, 30.0, 0.3)
# Steps of the size of rounding errors would show nothing else.
SMALLEST_LR = 0.01
# The design's: the update of all stand-ins, and of each.
UPDATE, TENSOR = 1e-5, 1e-4

Found = tuple[list[Tensor], list[dict[str, float]]]


def choose_view(optimizer: Optimizer) -> View:
    """Find how an optimizer has to be shown its parameters. Collective where it has to be tried.

    Args:
        optimizer (Optimizer): On the model's parameters; not changed.

    Returns:
        View: The view in which it steps as without sharding, the cheapest first.

    Raises:
        ConfigError: On every rank, if there is none, with what each does instead.
    """
    if type(optimizer) in ELEMENTWISE:
        return Held()
    sharded = next((p for group in optimizer.param_groups for p in group['params'] if isinstance(p, DTensor)), None)
    if sharded is None:
        return Held()
    if needs_closure(type(optimizer)):
        raise ConfigError([f'optim_wrapper.optimizer.type: {type(optimizer).__name__}: {NO_CLOSURE}'])
    trial = Trial(optimizer)
    try:
        with torch.random.fork_rng([sharded.device] if sharded.device.type == 'cuda' else []):
            wanted = trial.run(None)
    except Exception as error:
        raise ConfigError([_fails_anyway(optimizer, error)]) from error
    said = []
    for view in _views_of(sharded):
        with torch.random.fork_rng([sharded.device] if sharded.device.type == 'cuda' else []):
            fault = trial.fault(view, wanted)
        if fault is None:
            return view
        said.append(f'{view.name}: {fault}')
    raise ConfigError([_refusal(optimizer, said)])


def _views_of(sharded: DTensor) -> list[View]:
    """The views that serve shards where they lie: DTensors in host memory cannot communicate."""
    if is_on_host(sharded):
        return [Held(), OneByOne()]
    return [Held(), Shards(sharded.device_mesh), OneByOne()]


class Trial:
    """Copies of an optimizer on stand-ins for its parameters.

    Args:
        optimizer (Optimizer): The optimizer; not changed.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        # Groups that differ in more than their size of step may be treated otherwise: LAMB's without weight decay.
        self.groups: dict[str, tuple[dict, dict[tuple, nn.Parameter]]] = {}
        params = [param for group in optimizer.param_groups for param in group['params']]
        dtypes = {param.dtype for param in params if param.requires_grad}
        for group in optimizer.param_groups:
            options = {key: group[key] for key in optimizer.defaults if key in group and key not in ('lr', 'params')}
            _, kinds = self.groups.setdefault(repr(sorted(options.items(), key=str)), (group, {}))
            for param in group['params']:
                # Hooks unfreeze what is frozen now; in other dtypes than those that train, it stays so.
                if param.dtype in dtypes or (not dtypes and param.is_floating_point()):
                    kinds.setdefault((param.dim(), param.dtype, kind_of(param)), param)

    def run(self, view: View | None) -> Found:
        """Step a copy of the optimizer.

        Args:
            view (View, optional): How it is shown parameters; None: whole.

        Returns:
            tuple[list[Tensor], list[dict[str, float]]]: The stand-ins afterwards, and the numbers in the groups.
        """
        generator = torch.Generator().manual_seed(0)
        torch.manual_seed(0)
        groups = [self._stand_ins(kinds.values(), view is None, generator) for _, kinds in self.groups.values()]
        copied = self._copy([[param for param, _ in group] for group in groups])
        starts = self._start()
        for size in GRADIENTS:
            for (param, like), start in zip((pair for group in groups for pair in group), starts, strict=True):
                grad = _gradient(start, size, generator)
                param.grad = part_of(grad, like) if isinstance(param, DTensor) else grad
            if view is None:
                copied.step()
            else:
                view.step(copied)
        numbers = [{key: float(v) for key, v in group.items() if _is_number(v)} for group in copied.param_groups]
        return [param.detach() for group in groups for param, _ in group], numbers

    def _stand_ins(
        self, params: Any, whole: bool, generator: torch.Generator
    ) -> list[tuple[nn.Parameter, nn.Parameter]]:
        made = []
        for like in params:
            for shape in SHAPES.get(like.dim()) or tuple((*shape, *[1] * (like.dim() - 4)) for shape in SHAPES[4]):
                value = (0.5 * torch.randn(shape, generator=generator)).to(like.device, like.dtype)
                if isinstance(like, DTensor) and not whole:
                    value = part_of(value, like)
                made.append((nn.Parameter(value), like))
        return made

    def _copy(self, params: Sequence[Sequence[nn.Parameter]]) -> Optimizer:
        """The same optimizer on other parameters, in a group for each of those that are told apart."""
        groups = []
        for (group, _), own in zip(self.groups.values(), params, strict=True):
            options = {key: copy.deepcopy(value) for key, value in group.items() if key != 'params'}
            if 'lr' in options and options['lr'] is not None:
                options['lr'] = _at_least(options['lr'])
            groups.append({**options, 'params': list(own)})
        groups = [group for group in groups if group['params']]
        if self.optimizer.state:
            # It makes its state when it is built.
            return _build_anew(self.optimizer, groups)
        return _copied(self.optimizer, groups)

    def fault(self, view: View, wanted: Found) -> str | None:
        """Say what a view does otherwise than whole tensors. Collective.

        Args:
            view (View): The view.
            wanted (tuple): What whole tensors gave.

        Returns:
            str, optional: The fault, the same on every rank; None: there is none.
        """
        try:
            own: str | list = self._distances(self.run(view), wanted)
        except Exception as error:
            own = f'{type(error).__name__}: {str(error).splitlines()[0] if str(error) else "no message"}'
        box: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(box, own)
        raised = [found for found in box if isinstance(found, str)]
        return raised[0] if raised else _judge(box)

    def _distances(self, found: Found, wanted: Found) -> list[tuple[str, float, float]]:
        """Compare what this rank holds: shape, squared distance and squared update, then what groups count."""
        compared: list[tuple[str, float, float]] = []
        for ours, theirs, before in zip(found[0], wanted[0], self._start(), strict=True):
            shape = f'a tensor of shape {tuple(ours.shape)}'
            if isinstance(ours, DTensor):
                theirs, before = (part_of(whole, ours).to_local() for whole in (theirs, before))
                ours = ours.to_local()
            off, move = (ours - theirs).double(), (theirs - before).double()
            compared.append((shape, float(off.square().sum()), float(move.square().sum())))
        for ours_, theirs_ in zip(found[1], wanted[1], strict=True):
            compared += [
                (f'{key!r} of its groups', (ours_.get(key, math.nan) - number) ** 2, number**2)
                for key, number in theirs_.items()
                if ours_.get(key) != number
            ]
        return compared

    def _start(self) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        groups = [self._stand_ins(kinds.values(), True, generator) for _, kinds in self.groups.values()]
        return [param.detach() for group in groups for param, _ in group]


def _gradient(weight: Tensor, size: float, generator: torch.Generator) -> Tensor:
    """Make up a gradient that is orthogonal to a weight, as that of a weight before a norm is.

    Some optimizers project then. Only the first one's is, since weights move.
    """
    grad = size * torch.randn(weight.shape, generator=generator).to(weight.device, torch.float64)
    start = weight.double()
    if weight.numel() > 1:
        grad -= start * (grad * start).sum() / start.square().sum().clamp(min=1e-12)
    return grad.to(weight.dtype)


def _judge(ranks: Sequence[Sequence[tuple[str, float, float]]]) -> str | None:
    """Say what is farthest off over all ranks, if anything is out of bounds."""
    sums = [(rows[0][0], sum(row[1] for row in rows), sum(row[2] for row in rows)) for rows in zip(*ranks, strict=True)]
    shares = [(_share(off, move), name) for name, off, move in sums]
    total = _share(sum(off for _, off, _ in sums), sum(move for _, _, move in sums))
    if total <= UPDATE and all(share <= TENSOR for share, _ in shares):
        return None
    # A NaN is the worst.
    share, name = max(shares, key=lambda pair: math.inf if math.isnan(pair[0]) else pair[0])
    return f'moves {name} otherwise, by {share:.0e} of its update'


def _share(off: float, move: float) -> float:
    return math.sqrt(off / move) if move else (math.inf if off else 0.0)


def _is_number(value: Any) -> bool:
    return (isinstance(value, (int, float)) and not isinstance(value, bool)) or (
        isinstance(value, Tensor) and value.numel() == 1
    )


def _at_least(lr: Any) -> Any:
    if isinstance(lr, Tensor):
        return lr.clamp(min=SMALLEST_LR)
    return max(lr, SMALLEST_LR) if isinstance(lr, (int, float)) else lr


def _copied(optimizer: Optimizer, groups: list[dict]) -> Optimizer:
    """Copy with all settings, hidden ones as well; without state and without the hooks of users."""
    other = type(optimizer).__new__(type(optimizer))
    # Parameters that it lists elsewhere, and optimizers inside of it, are the copy's as well.
    memo: dict[int, Any] = {id(optimizer): other, id(optimizer.state): defaultdict(dict)}
    memo[id(optimizer.param_groups)] = groups
    memo |= {id(param): groups[0]['params'][0] for group in optimizer.param_groups for param in group['params']}
    for name, value in vars(optimizer).items():
        if name.endswith('_hooks'):
            setattr(other, name, type(value)())
        elif name != 'step':
            setattr(other, name, copy.deepcopy(value, memo))
    _ready(other)
    return other


def _build_anew(optimizer: Optimizer, groups: list[dict]) -> Optimizer:
    known = inspect.signature(type(optimizer)).parameters
    cls: Callable[..., Optimizer] = type(optimizer)
    other = cls(groups, **{key: value for key, value in optimizer.defaults.items() if key in known})
    _ready(other)
    return other


def _ready(optimizer: Any) -> None:
    # Optimizers without a schedule have a mode of training.
    if callable(getattr(optimizer, 'train', None)):
        optimizer.train()


def _fails_anyway(optimizer: Optimizer, error: Exception) -> str:
    return (
        f'optim_wrapper.optimizer.type: {type(optimizer).__name__} cannot be tried on shards, since it fails on a few '
        f'whole tensors with gradients: {type(error).__name__}: {error}. Use another optimizer, or stage=0'
    )


def _refusal(optimizer: Optimizer, said: Sequence[str]) -> str:
    return (
        f'optim_wrapper.optimizer.type: {type(optimizer).__name__} does not step shards as it steps whole tensors, '
        'for which norms, statistics, blocks of quantisation or random numbers over several shards or parameters '
        f'may be the reason. Tried were {"; ".join(said)}. Use an optimizer that treats each element or each parameter '
        'by itself (those of torch.optim do), settings of this one that do (such as no norm over all gradients, since '
        'optim_wrapper.clip_grad clips), or stage=0'
    )
