"""What the code of a module's class does with the modules below it, read from its source without running it.

[Note: reading a model's code]
Whether a module may be a unit depends on the code around it: a unit has to be called on every rank, in every step,
through its own forward. That cannot be seen in the tree of modules, and running a detector takes data. So the sources
of the classes are read: every ``self.a.b``, through loops, indices and local names. What is dynamic (``getattr``, a
module handed over as an argument) is not seen, and nothing is concluded from it.
"""

import ast
import inspect
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from functools import cache

from mmzero.policies.source_reader import Use, read_method


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


def _read(cls: type) -> tuple[dict[str, list[Use]], dict[str, set[str]]]:
    uses: dict[str, list[Use]] = defaultdict(list)
    calls: dict[str, set[str]] = defaultdict(set)
    for name, tree in _methods(cls):
        found, called = read_method(f'{cls.__name__}.{name}', *tree)
        uses[name] += found
        calls[name] |= called
    return uses, calls


_CONSTRUCTORS = {'__init__', 'init_weights', '_init_weights', 'reset_parameters', 'train', 'extra_repr', '__repr__'}


def _methods(cls: type) -> Iterator[tuple[str, tuple[ast.FunctionDef, str, int]]]:
    """The methods of a class, and those of its bases that they extend through ``super()``."""
    hidden = set()
    for base in cls.__mro__:
        if base is object or base.__module__.startswith(('torch.', 'mmengine.')):
            continue
        for name, value in vars(base).items():
            function = inspect.unwrap(value.fget if isinstance(value, property) else value)  # type: ignore[arg-type]
            tree = _parse(function) if name not in hidden and inspect.isfunction(function) else None
            if tree is None:
                continue
            if not any(isinstance(node, ast.Name) and node.id == 'super' for node in ast.walk(tree[0])):
                hidden.add(name)
            yield name, tree


@cache
def _parse(function: object) -> tuple[ast.FunctionDef, str, int] | None:
    try:
        lines, first = inspect.getsourcelines(function)  # type: ignore[arg-type]
        tree = ast.parse(textwrap.dedent(''.join(lines))).body[0]
    except (OSError, SyntaxError, TypeError, IndexError):
        return None
    if not isinstance(tree, ast.FunctionDef) or not tree.args.args:
        return None
    return tree, inspect.getsourcefile(function) or '', first  # type: ignore[arg-type]


def _after_construction(calls: dict[str, set[str]]) -> set[str]:
    """Methods that run when the module is used: not those that only constructors reach."""
    building = _closure({name for name in calls if name in _CONSTRUCTORS}, calls)
    return _closure(calls.keys() - building, calls) - _CONSTRUCTORS


def _closure(start: set[str], calls: dict[str, set[str]]) -> set[str]:
    found, todo = set(start), list(start)
    while todo:
        for name in calls.get(todo.pop(), set()) & calls.keys() - found:
            found.add(name)
            todo.append(name)
    return found
