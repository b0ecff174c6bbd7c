"""Modules that a model keeps where torch does not see them: real on every rank, with rank 0's weights.

[Note: modules outside of the module tree]
Distillation keeps its teacher in a plain attribute, or in a list, so that it is in no state dict and has no optimizer.
Built on the meta device as the rest of the model, it would stay there on ranks other than 0. It is whole on every rank,
as under DDP, and no policy sees it.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mmzero.engines.materialize import materialize_model
from mmzero.errors import PlanError


def modules_outside_of(model: nn.Module) -> dict[str, nn.Module]:
    """Find the modules with weights that are attributes of a model, or lie in lists and dicts of it, unregistered.

    Args:
        model (nn.Module): The model.

    Returns:
        dict[str, nn.Module]: Modules by the path of the attribute.
    """
    known = set(model.modules())
    found: dict[nn.Module, str] = {}
    for name, module in model.named_modules():
        for path, value in _attributes(module, name):
            if value not in known and value not in found and _tensors(value):
                found[value] = path
    return {path: value for value, path in found.items()}


def _attributes(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    for attribute, value in vars(module).items():
        # What torch registers is in its own dicts.
        if attribute in ('_modules', '_parameters', '_buffers'):
            continue
        path = f'{name}.{attribute}'.lstrip('.')
        items: Any = value.items() if isinstance(value, Mapping) else enumerate(value) if _is_list(value) else ()
        yield from [(path, value)] if isinstance(value, nn.Module) else []
        yield from ((f'{path}[{key!r}]', item) for key, item in items if isinstance(item, nn.Module))


def _check_same_paths(paths: list[str]) -> None:
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, paths)
    for rank, theirs in enumerate(everyones):
        if theirs != everyones[0]:
            raise PlanError(
                f'rank {rank} keeps the modules {theirs} outside of the module tree, rank 0 {everyones[0]}; build the '
                'model from the same config'
            )


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def materialize_outside(model: nn.Module, device: torch.device) -> dict[str, int]:
    """Make such modules real on the device, with rank 0's values. Collective.

    Args:
        model (nn.Module): The model, before it is sharded.
        device (torch.device): The device.

    Returns:
        dict[str, int]: Bytes by path, that every rank now holds.

    Raises:
        PlanError: On every rank, if a rank built another one, or if one shares parameters with the model.
    """
    outside = modules_outside_of(model)
    _check_same_paths(list(outside))
    own = {id(param): name for name, param in model.named_parameters()}
    for path, module in outside.items():
        for name, param in module.named_parameters():
            if id(param) in own:
                raise PlanError(
                    f'{path} lies outside of the module tree and shares {name} with {own[id(param)]}, which is split; '
                    'register it as a submodule, or give it a copy'
                )
        materialize_model(module, device)
    return {
        path: sum(tensor.numel() * tensor.element_size() for tensor in _tensors(module))
        for path, module in outside.items()
    }
