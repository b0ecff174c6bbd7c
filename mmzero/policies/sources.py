"""What the code of a module's class does with the modules below it, read from its source without running it.

[Note: reading a model's code]
Whether a module may be a unit depends on the code around it: a unit has to be called on every rank, in every step,
through its own forward. That cannot be seen in the tree of modules, and running a detector takes data. So the sources
of the classes are read: every ``self.a.b``, through loops, indices and local names. What is dynamic (``getattr``, a
module handed over as an argument) is not seen, and nothing is concluded from it. An index or a condition is by the data
where a draw or the values of tensors decide it; arguments of a method are, unless all its calls on self say otherwise.
"""

import ast
import inspect
from collections import defaultdict
from collections.abc import Iterator
from functools import cache

from mmzero.policies.source_reader import Reading, Use, arguments, read_method


@cache
def uses_in(cls: type, method: str) -> tuple[Use, ...]:
    """Read what one method uses, by itself or through other methods that it calls on self.

    Args:
        cls (type): The class of a module.
        method (str): The method's name.

    Returns:
        tuple[Use, ...]: The uses. What ``self(...)`` leads to is not among them.
    """
    uses, calls = _read(cls)
    return tuple(use for name in sorted(_closure({method}, calls)) for use in uses.get(name, []))


@cache
def uses_of(cls: type) -> tuple[Use, ...]:
    """Read how the methods of a class use its submodules and parameters after construction.

    Args:
        cls (type): The class of a module.

    Returns:
        tuple[Use, ...]: The uses; empty where the source is not to be had, and for classes of torch.
    """
    uses, calls = _read(cls)
    return tuple(use for name in sorted(_after_construction(calls)) for use in uses[name])


@cache
def mentions_of(cls: type) -> dict[str, frozenset[str]]:
    """What the methods of a class may call, by name.

    Args:
        cls (type): The class of a module.

    Returns:
        dict[str, frozenset[str]]: By method, all attributes and words in it.
    """
    words: dict[str, frozenset[str]] = defaultdict(frozenset)
    methods = list(_methods(cls))
    for name, (tree, *_) in methods:
        nodes = list(ast.walk(tree))
        if any(isinstance(node, ast.Call) and _picks_attribute(node) for node in nodes):
            words[name] |= {method for method, _ in methods}
        words[name] |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        words[name] |= {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return words


@cache
def own_calls_of(cls: type) -> dict[str, set[str]]:
    """What the methods of a class call or read on self, by name.

    Args:
        cls (type): The class of a module.

    Returns:
        dict[str, set[str]]: By method, attributes of self.
    """
    return _read(cls)[1]


def _picks_attribute(call: ast.Call) -> bool:
    is_getattr = isinstance(call.func, ast.Name) and call.func.id == 'getattr'
    return is_getattr and len(call.args) > 1 and not isinstance(call.args[1], ast.Constant)


def _read(cls: type) -> tuple[dict[str, list[Use]], dict[str, set[str]]]:
    methods = list(_methods(cls))
    known: dict[str, frozenset[str]] = {}
    # What a method is given, another one may hand on.
    for _ in range(3):
        found = [
            (name, read_method(f'{cls.__name__}.{name}', *tree, known.get(name, frozenset()))) for name, tree in methods
        ]
        before, known = known, {name: _known_arguments(name, tree[0], found) for name, tree in methods}
        if known == before:
            break
    uses: dict[str, list[Use]] = defaultdict(list)
    calls: dict[str, set[str]] = defaultdict(set)
    for name, reading in found:
        uses[name] += reading.uses
        calls[name] |= reading.own_calls
    return uses, calls


def _known_arguments(name: str, tree: ast.FunctionDef, found: list[tuple[str, Reading]]) -> frozenset[str]:
    """Arguments that every call on self gives what is the same on every rank."""
    calls = [given for _, reading in found for given in reading.given.get(name, ())]
    if name == 'forward' or not calls or any('**' in given for given in calls):
        return frozenset()
    names = [(index, arg) for index, arg in enumerate(arguments(tree)[1:])]
    names += [(-1, item.arg) for item in tree.args.kwonlyargs]
    return frozenset(arg for index, arg in names if all(given.get(arg, given.get(index, True)) for given in calls))


_CONSTRUCTORS = {'__init__', 'init_weights', '_init_weights', 'reset_parameters', 'train', 'extra_repr', '__repr__'}

# They answer for a name, as a wrapper does for the model in it, and run nothing.
_LOOKUPS = {'__delattr__', '__dir__', '__getattr__', '__getattribute__', '__setattr__'}

# Classes of torch that use what is in them in other ways than by calling it.
_OF_TORCH = ('torch.nn.modules.activation', 'torch.nn.modules.adaptive')


def _methods(cls: type) -> Iterator[tuple[str, tuple[ast.FunctionDef, str, int]]]:
    """The methods of a class, and those of its bases that they extend through ``super()`` or the base's name."""
    hidden = set()
    for base in cls.__mro__:
        foreign = base.__module__.startswith(('torch.', 'mmengine.')) and base.__module__ not in _OF_TORCH
        if base is object or foreign:
            continue
        for name, value in vars(base).items():
            function = _function(value)
            tree = _parse(function) if name not in hidden and inspect.isfunction(function) else None
            if tree is None:
                continue
            if not _extends(tree[0], name):
                hidden.add(name)
            yield name, tree


def _function(value: object) -> object:
    """What a class holds under a name, as it takes self."""
    if isinstance(value, (staticmethod, classmethod)):
        return None
    if isinstance(value, property):
        value = value.fget
    return inspect.unwrap(getattr(value, 'func', value))  # type: ignore[arg-type]


def _extends(tree: ast.FunctionDef, name: str) -> bool:
    """Whether a method calls that of a base: ``super()``, or ``Base.method(self, ...)``."""
    own = arguments(tree)[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == 'super':
            return True
        if isinstance(node, ast.Attribute) and node.attr == name and isinstance(node.value, ast.Name):
            if node.value.id != own and node.value.id[:1].isupper():
                return True
    return False


@cache
def _parse(function: object) -> tuple[ast.FunctionDef, str, int] | None:
    try:
        lines, first = inspect.getsourcelines(function)  # type: ignore[arg-type]
        # As it is indented, since lines of a text in it may be indented less.
        tree = ast.parse(f'if True:\n{"".join(lines)}' if lines[0][:1].isspace() else ''.join(lines)).body[0]
    except (OSError, SyntaxError, TypeError, IndexError):
        return None
    if isinstance(tree, ast.If):
        tree, first = tree.body[0], first - 1
    if not isinstance(tree, ast.FunctionDef) or not arguments(tree):
        return None
    return tree, inspect.getsourcefile(function) or '', first  # type: ignore[arg-type]


def _after_construction(calls: dict[str, set[str]]) -> set[str]:
    """Methods that run when the module is used: not those that only constructors reach."""
    building = _closure({name for name in calls if name in _CONSTRUCTORS}, calls)
    return _closure(calls.keys() - building - _LOOKUPS, calls) - _CONSTRUCTORS - _LOOKUPS


def _closure(start: set[str], calls: dict[str, set[str]]) -> set[str]:
    found, todo = set(start), list(start)
    while todo:
        for name in calls.get(todo.pop(), set()) & calls.keys() - found:
            found.add(name)
            todo.append(name)
    return found
