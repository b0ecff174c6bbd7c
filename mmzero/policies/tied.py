"""Tied parameters: what shares one tensor has to lie in one unit."""

from collections import defaultdict
from collections.abc import Sequence

from torch import nn

from mmzero.policies.plan import first_names


def without_tied(model: nn.Module, names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Leave out units that share a parameter with something outside of them.

    Args:
        model (nn.Module): The model.
        names (Sequence[str]): Paths of modules to become units.

    Returns:
        tuple[list[str], list[str]]: Those that share nothing, and a line for each parameter that kept others out.
    """
    paths: dict[int, list[str]] = defaultdict(list)
    # A module that is registered twice is one module.
    for name, module in model.named_modules():
        for key, param in module.named_parameters(recurse=False, remove_duplicate=False):
            paths[id(param)].append(f'{name}.{key}'.lstrip('.'))
    first = first_names(model)
    names = list(dict.fromkeys(first.get(name, name) for name in names))
    tied = [group for group in paths.values() if len(group) > 1]
    kept, lines = [], []
    for name in names:
        shared = next((group for group in tied if 0 < _below(name, group) < len(group)), None)
        if shared is None:
            kept.append(name)
        else:
            lines.append(f'{name} is no unit: {" and ".join(shared[:2])} are one tied parameter')
    return kept, lines


def _below(name: str, paths: list[str]) -> int:
    return sum(path.startswith(f'{name}.') for path in paths)
