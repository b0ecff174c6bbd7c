"""Weights of a model without adapters, under the names of one with them.

[Note: names with adapters]
PEFT puts what it adapts behind other names: a layer becomes the ``base_layer`` of one that adds to it, a module that is
trained whole has an ``original_module`` and copies in ``modules_to_save``, and get_peft_model puts the model behind
``base_model.model``, or ``base_model`` alone for prompts. Files of the model as it was hold none of these.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar('T')

_LAYERS = ('base_layer', 'original_module', 'token_adapter')
_COPIES = 'modules_to_save'
_MODEL = 'base_model'


def names_without_adapters(name: str) -> Iterator[str]:
    """Say what a weight may have been called before adapters were put in.

    Args:
        name (str): Its name in the model with adapters.

    Yields:
        str: A name; none where no adapter touched it.
    """
    parts, kept = name.split('.'), []
    skip = 0
    for index, part in enumerate(parts):
        if skip:
            skip -= 1
        elif part == _COPIES and index + 2 < len(parts):
            # The name of an adapter follows.
            skip = 1
        elif part not in _LAYERS:
            kept.append(part)
    if _MODEL in kept:
        index = kept.index(_MODEL)
        yield '.'.join(kept[:index] + kept[index + 1 :])
        if kept[index + 1 : index + 2] == ['model']:
            yield '.'.join(kept[:index] + kept[index + 2 :])
    elif len(kept) < len(parts):
        yield '.'.join(kept)


def with_adapters_names(state: 'OrderedDict[str, T]', wanted: Iterable[str]) -> 'OrderedDict[str, T]':
    """Give weights of a model without adapters the names that one with adapters has for them.

    Args:
        state (OrderedDict[str, T]): A state dict; what has a name of the model keeps it.
        wanted (Iterable[str]): The names of the model that it is for.

    Returns:
        OrderedDict[str, T]: The state dict itself, or a copy with other names.
    """
    wanted = set(wanted)
    left = state.keys() - wanted
    found = {
        name: before
        for name in sorted(wanted - state.keys())
        for before in names_without_adapters(name)
        if before in left
    }
    if not found:
        return state
    used = set(found.values())
    renamed = OrderedDict((name, value) for name, value in state.items() if name not in used)
    renamed.update((name, state[before]) for name, before in found.items())
    return renamed
