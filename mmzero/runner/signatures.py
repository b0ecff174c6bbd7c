"""Holding the fields of a config dict against the constructor that will get them."""

import ast
import inspect
import textwrap
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from mmzero.config import Faults
from mmzero.errors import near_names
from mmzero.runner.kinds import accepts, describe

_KEYWORDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_EMPTY = inspect.Parameter.empty


@dataclass(frozen=True)
class Signature:
    """What a class or function can be called with.

    Args:
        params (Mapping[str, inspect.Parameter]): Parameters by name, with those of parents that ``**kwargs`` reach.
        required (frozenset[str]): Names without a default, of the constructor itself.
        is_open (bool): Whether further names may be taken, which nobody can tell from the signature.
    """

    params: Mapping[str, inspect.Parameter]
    required: frozenset[str]
    is_open: bool


def signature_of(target: Callable) -> Signature:
    """Read a signature; ``**kwargs`` are followed through the parents.

    Args:
        target (Callable): A class or a function.

    Returns:
        Signature: The signature; an open one where it cannot be told.
    """
    try:
        return _signature_of(target)
    except TypeError:  # not hashable
        return Signature({}, frozenset(), True)


@cache
def _signature_of(target: Callable) -> Signature:
    params: dict[str, inspect.Parameter] = {}
    required: frozenset[str] | None = None
    is_open = False
    for function in _constructors(target):
        try:
            found = _resolved_parameters(function)
        except (TypeError, ValueError):  # builtins that have no signature
            return Signature(params, required or frozenset(), True)
        for param in found:
            if param.kind in _KEYWORDS:
                params.setdefault(param.name, param)
        if required is None:
            required = frozenset(p.name for p in found if p.kind in _KEYWORDS and p.default is _EMPTY)
        rest = next((param.name for param in found if param.kind is inspect.Parameter.VAR_KEYWORD), None)
        is_open = rest is not None
        if rest is None or not _passes_to_parent(function, rest):
            break
    return Signature(params, required or frozenset(), is_open)


def _constructors(target: Callable) -> list[Callable]:
    if not inspect.isclass(target):
        return [target]
    own = [vars(base)['__init__'] for base in target.__mro__[:-1] if '__init__' in vars(base)]
    return own or [target.__init__]


def _resolved_parameters(function: Callable) -> list[inspect.Parameter]:
    found = list(inspect.signature(function).parameters.values())
    if found and found[0].name == 'self':
        found = found[1:]
    names = getattr(inspect.unwrap(function), '__globals__', {})
    return [param.replace(annotation=_resolved(param.annotation, names)) for param in found]


def _resolved(annotation: Any, names: dict[str, Any]) -> Any:
    if annotation is _EMPTY:
        return _EMPTY
    try:
        # One at a time: a name that exists for type checkers only spoils no other annotation.
        return typing.get_type_hints(types.SimpleNamespace(__annotations__={'it': annotation}), names)['it']
    except Exception:
        # Whatever a string of a project evaluates to; annotations are no more than a help.
        return _EMPTY


def _passes_to_parent(function: Callable, rest: str) -> bool:
    """Whether all that a constructor does with its ``**rest`` is to hand it to the next class's constructor."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    except (OSError, TypeError, SyntaxError):
        return False
    uses = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == rest]
    return len(uses) == 1 and any(
        isinstance(node, ast.Call)
        and ast.unparse(node.func) == 'super().__init__'
        and any(word.arg is None and word.value is uses[0] for word in node.keywords)
        for node in ast.walk(tree)
    )


def check_fields(
    target: Callable,
    cfg: Mapping,
    path: str,
    faults: Faults,
    *,
    provided: Collection[str] = (),
    extra: Collection[str] = (),
    silent: Collection[str] = (),
    rest: Callable | None = None,
    check_required: bool = True,
    lenient: bool = False,
) -> None:
    """Hold a dict against what it will be passed to.

    Args:
        target (Callable): The class or function.
        cfg (Mapping): Its arguments, and ``type``.
        path (str): The config path of ``cfg``.
        faults (Faults): Takes unknown and missing names, and values of a wrong type.
        provided (Collection[str]): Arguments that come from elsewhere.
        extra (Collection[str]): Further names that whoever builds it takes out.
        silent (Collection[str]): Names that may be taken out as well, too many to be listed as known.
        rest (Callable, optional): What gets the fields that the target itself does not have. Defaults to None.
        check_required (bool): Whether missing names are faults. Defaults to True.
        lenient (bool): Whether annotations may be taken loosely, as models and transforms of projects do: None,
            lists, dicts and kinds of numbers pass for each other. Defaults to False.
    """
    signature = signature_of(target)
    if rest is not None:
        signature = Signature({**signature_of(rest).params, **signature.params}, signature.required, False)
    name = getattr(target, '__name__', repr(target))
    given = [key for key in cfg if key not in ('type', '_scope_')]
    for key in given:
        if key in signature.params:
            check_value(signature.params[key], cfg[key], f'{path}.{key}', faults, lenient)
        elif key not in extra and key not in silent and not signature.is_open:
            known = [*signature.params.keys() - set(provided), *extra]
            faults.add(f'{path}.{key}', f'{name} has no such field{near_names(str(key), known)}')
    if check_required:
        for key in sorted(signature.required - set(given) - set(provided)):
            faults.add(f'{path}.{key}', f'is missing, and {name} needs it')


def check_value(param: inspect.Parameter, value: Any, path: str, faults: Faults, lenient: bool = False) -> None:
    """Hold a value against the annotation of a parameter, or against the kind of its default.

    Args:
        param (inspect.Parameter): The parameter.
        value (Any): The value.
        path (str): The config path of the value.
        faults (Faults): Takes a value of another type.
        lenient (bool): As :func:`check_fields`'s. Defaults to False.
    """
    wanted = _wanted(param)
    if value is param.default or (value is None and param.default is None) or (lenient and _loose(wanted, value)):
        return
    if not accepts(wanted, value):
        faults.add(path, f'got {value!r}; expected {_described(param)}')


def _loose(wanted: Any, value: Any) -> bool:
    if isinstance(value, (str, bool)):
        return False
    if value is None:
        return True
    loose: tuple = (1, 0.5, []) if isinstance(value, (int, float)) else (1, 0.5, [], {})
    return any(accepts(wanted, item) for item in loose)


def _wanted(param: inspect.Parameter) -> Any:
    if param.annotation is not _EMPTY:
        return param.annotation
    return _BY_DEFAULT.get(type(param.default), Any)


def _described(param: inspect.Parameter) -> str:
    # A whole default asks for an int, although other numbers are let through.
    by_int = param.annotation is _EMPTY and type(param.default) is int
    return describe(int | Sequence | None if by_int else _wanted(param))


# Without an annotation: a number may stand for another kind of number, and many fields take None or a list as well.
_NUMBER = float | Sequence | None
_BY_DEFAULT: dict[type, Any] = {
    bool: bool,
    int: _NUMBER,
    float: _NUMBER,
    str: str | Sequence | Mapping | None,
    tuple: str | Sequence | Mapping | float | None,
    list: str | Sequence | Mapping | float | None,
    dict: str | Sequence | Mapping | None,
}
