"""Which modules of a model the code of other modules calls, picks, or reaches into."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from mmzero.policies.plan import first_names
from mmzero.policies.source_reader import Use
from mmzero.policies.source_values import EACH, PART, PICKED
from mmzero.policies.sources import mentions_of, own_calls_of, uses_in, uses_of


@dataclass
class Reach:
    """What is done to one module by code outside of it.

    Args:
        skipped (str): Where the data, or a random draw, decides whether it runs; empty: nowhere.
        methods (dict[str, str]): Its methods other than forward that are called, and where.
        inside (dict[str, str]): Paths of modules and parameters strictly below it that are used, and where.
        in_forward (dict[str, str]): Those of them that are used in what forward may lead to.
    """

    skipped: str = ''
    methods: dict[str, str] = field(default_factory=dict)
    inside: dict[str, str] = field(default_factory=dict)
    in_forward: dict[str, str] = field(default_factory=dict)


def reaches(model: nn.Module) -> dict[str, Reach]:
    """Read the sources of a model's classes and resolve what they say on its tree of modules.

    Args:
        model (nn.Module): The model; its parameters may be on the meta device.

    Returns:
        dict[str, Reach]: By the path of a module. See [Note: reading a model's code] for what cannot be seen.
    """
    found: dict[str, Reach] = defaultdict(Reach)
    run = _methods_run(model)
    for name, module in model.named_modules():
        for use in uses_of(type(module)):  # type: ignore[arg-type]
            for target, rest in _resolve(module, use.path):
                _note(found, module, name, target, rest, use, use.method in run)
    return _by_first_names(model, found)


def _by_first_names(model: nn.Module, found: dict[str, Reach]) -> dict[str, Reach]:
    """What is done to a module under any of its names."""
    first = first_names(model)
    for path in first.keys() & found.keys():
        other, reach = found.pop(path), found.setdefault(first[path], Reach())
        reach.skipped = reach.skipped or other.skipped
        for name in ('methods', 'inside', 'in_forward'):
            setattr(reach, name, {**getattr(other, name), **getattr(reach, name)})
    return dict(found)


def _methods_run(model: nn.Module) -> set[str]:
    """Names of methods that forward may lead to, of whichever class."""
    mentions: dict[str, set[str]] = defaultdict(set)
    for cls in {type(module) for module in model.modules()}:
        for method, words in mentions_of(cls).items():  # type: ignore[arg-type]
            mentions[method] |= words
    run, todo = set(_ENTRIES), list(_ENTRIES)
    while todo:
        for word in mentions.get(todo.pop(), set()) & mentions.keys() - run:
            run.add(word)
            todo.append(word)
    return run


# Where torch, MMEngine and Python themselves begin.
_ENTRIES = ('forward', 'train_step', 'val_step', 'test_step', '__call__', '__getitem__', '__iter__', '__len__')


def _note(
    found: dict[str, Reach], owner: nn.Module, name: str, target: str, rest: tuple[str, ...], use: Use, runs: bool
) -> None:
    module = owner.get_submodule(target)
    below = f'{name}.{target}'.strip('.')
    if rest and rest[0] in module._parameters:
        if module._parameters[rest[0]] is not None and not set(rest[1:2]) & _HARMLESS:
            _note_inside(found, name, f'{below}.{rest[0]}', use, runs)
        return
    if rest:
        if use.is_called and len(rest) == 1 and target and _is_method(module, rest[0]):
            found[below].methods.setdefault(rest[0], use.place)
            _note_inside(found, name, below, use, runs)
        return
    if not target or next(module.parameters(), None) is None:
        return
    _note_inside(found, name, below, use, runs)
    if {PICKED, PART} & set(use.path) or use.may_skip and not _never_drawn(owner, use):
        found[below].skipped = found[below].skipped or use.place


def _note_inside(found: dict[str, Reach], name: str, below: str, use: Use, runs: bool) -> None:
    """For every module between the one whose code it is and what it uses."""
    parts = below.split('.')
    for end in range(name.count('.') + 2 if name else 1, len(parts)):
        reach = found['.'.join(parts[:end])]
        reach.inside.setdefault(below, use.place)
        if runs:
            reach.in_forward.setdefault(below, use.place)


def _resolve(module: nn.Module, path: tuple[str, ...]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The modules that a path leads to, and what is left of it."""
    if not path:
        yield '', ()
        return
    if path[0] == PART:
        yield from _resolve(module, path[1:])
        return
    children = module._modules
    if path[0] in (EACH, PICKED):
        names = list(children) if isinstance(module, _CONTAINERS) else []
    else:
        names = [_child(module, path[0])]
    steps = [name for name in names if children.get(name) is not None]
    if not steps:
        yield '', path
    for name in steps:
        for target, rest in _resolve(children[name], path[1:]):  # type: ignore[arg-type]
            yield f'{name}.{target}'.rstrip('.'), rest


def _child(module: nn.Module, name: str) -> str:
    if name.startswith('-') and name[1:].isdigit() and isinstance(module, _CONTAINERS):
        return str(len(module._modules) - int(name[1:]))
    return name


def _never_drawn(owner: nn.Module, use: Use) -> bool:
    return bool(use.rates) and not any(_value(owner, rate) for rate in use.rates)


def _value(owner: nn.Module, path: str) -> Any:
    value: Any = owner
    for name in path.split('.'):
        value = getattr(value, name, 1)
    return value


def _is_method(module: nn.Module, name: str) -> bool:
    return name != 'forward' and callable(getattr(type(module), name, None)) and not hasattr(nn.Module, name)


def entered_by(model: nn.Module, found: dict[str, Reach], names: Iterable[str]) -> dict[str, list[str]]:
    """Find methods other than forward by which units are entered and that compute with their parameters.

    A call that cannot be resolved (DetectoRS runs ``layer.rfp_forward`` for layers that it gets by their names) may be
    of any unit whose class has such a method.

    Args:
        model (nn.Module): The model.
        found (dict[str, Reach]): What its code reaches.
        names (Iterable[str]): Paths of the units.

    Returns:
        dict[str, list[str]]: Methods by unit, without such as only call the unit itself, ``self(...)``.
    """
    entered: dict[str, list[str]] = {}
    mentioned = _mentioned_in_runs(model)
    for name in names:
        module = model.get_submodule(name)
        known = [*found[name].methods] if name in found else []
        others = set().union(*(words for cls, words in mentioned.items() if not isinstance(module, cls)))
        known += sorted(word for word in others - set(known) if _is_own_method(module, word))
        methods = [method for method in known if _computes(module, method)]
        if methods:
            entered[name] = methods
    return entered


def _mentioned_in_runs(model: nn.Module) -> dict[type, set[str]]:
    """What each class mentions in methods that forward may lead to."""
    run = _methods_run(model)
    return {
        cls: set().union(*(words for method, words in mentions_of(cls).items() if method in run))  # type: ignore[arg-type]
        for cls in {type(module) for module in model.modules()}
    }


def _is_own_method(module: nn.Module, name: str) -> bool:
    """Whether it is a method that a class of its own defines, and that its own code does not call."""
    own = own_calls_of(type(module))  # type: ignore[arg-type]
    return name in own and _is_method(module, name) and not any(name in called for called in own.values())


def _computes(module: nn.Module, method: str) -> bool:
    for use in uses_in(type(module), method):  # type: ignore[arg-type]
        for target, rest in _resolve(module, use.path):
            below = module.get_submodule(target)
            if rest and below._parameters.get(rest[0]) is not None and not set(rest[1:2]) & _HARMLESS:
                return True
            if target and not rest and use.is_called and next(below.parameters(), None) is not None:
                return True
    return False


_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)

# What can be asked of a parameter, sharded or not.
_HARMLESS = {
    'device', 'dim', 'dtype', 'element_size', 'is_cuda', 'is_floating_point', 'is_meta', 'itemsize', 'layout', 'ndim',
    'ndimension', 'nelement', 'numel', 'requires_grad', 'requires_grad_', 'shape', 'size',
}  # fmt: skip
