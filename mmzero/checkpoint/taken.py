"""What a model takes of a state dict by its own hooks, found without loading it. On one rank, without communication.

[Note: hooks of models]
While it is loaded, a model may rename, resize, make or drop weights, in ``_load_from_state_dict`` of its classes or in
hooks that it has registered: position embeddings of another image size, relative position tables of another window.
Both change the state dict, by the shapes of the parameters that they look at. A sharded model shows shapes, but can
be filled by nobody else than its engine. So they run here while stand-ins on meta are in the place of parameters, and
what they have made of the state dict is what goes into the shards.
"""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mmzero.checkpoint.names import is_extra_state
from mmzero.engines import is_meta

# Those of FSDP2 and of mmzero cut or gather.
_ENGINES = ('torch.distributed.', 'mmzero.')


@dataclass
class Taken:
    """What a model takes.

    Args:
        values (dict[str, Any]): Tensors by the model's names.
        missing (list[str]): Names of the model that have none.
        left (list[str]): Names of the state dict that no module knows.
        faults (list[str]): What torch says of shapes that differ, with both shapes.
    """

    values: dict[str, Any] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def taken_by(model: nn.Module, state: Mapping[str, Any]) -> Taken:
    """Let a model's hooks work on a state dict, and see what it would load.

    Args:
        model (nn.Module): The model, sharded or not, with all units sharded; unchanged.
        state (Mapping[str, Any]): Whole tensors, under the model's names where one is meant; unchanged.

    Returns:
        Taken: What it takes. Where a module computes weights from those that it has loaded, these as well.
    """
    found = Taken()
    versions = getattr(state, '_metadata', {})

    def load(module: nn.Module, given: dict[str, Any], prefix: str) -> None:
        own = _targets(module)
        # A model may save under other names than those of its modules.
        called = {name: saved_as.get(id(target), prefix + name) for name, target in own.items()}
        for name in [name for name in module._buffers.keys() & own.keys() if is_meta(given.get(prefix + name))]:
            module._buffers[name] = torch.empty_like(own[name], device='meta')
        with _real(module) if _loads_by_itself(module) and _all_real(own, given, prefix) else _nothing():
            before = {name: buffer.clone() for name, buffer in own.items() if not isinstance(buffer, nn.Parameter)}
            module._load_from_state_dict(
                given, prefix, versions.get(prefix[:-1], {}), True, found.missing, found.left, found.faults
            )
            loaded = _loaded(module, given, prefix, before)
            found.values.update((called[name], value) for name, value in loaded)
        for name, child in module._modules.items():
            if child is not None:
                start = f'{prefix}{name}.'
                load(child, {key: value for key, value in given.items() if key.startswith(start)}, start)

    with _stand_ins(model), warnings.catch_warnings():
        # That nothing is copied into stand-ins is what is meant.
        warnings.filterwarnings('ignore', message='.*copying from a non-meta parameter')
        saved_as = {id(value): name for name, value in model.state_dict(keep_vars=True).items()}
        # What modules save by get_extra_state goes into the model itself, on every rank.
        load(model, {name: value for name, value in state.items() if not is_extra_state(name)}, '')
    # Of counters as MMEngine has it.
    kept = set(filter(is_extra_state, state))
    found.missing = [name for name in found.missing if name not in kept and not name.endswith('num_batches_tracked')]
    return found


def has_hooks(model: nn.Module) -> bool:
    """Say whether a model may make anything else of a state dict than its names and shapes tell.

    Args:
        model (nn.Module): The model.

    Returns:
        bool: Whether a class of it loads in its own way, or a hook is registered.
    """
    return any(
        _hooks_of(module) or (_loads_by_itself(module) and not type(module).__module__.startswith('torch.nn.'))
        for module in model.modules()
    )


def _targets(module: nn.Module) -> dict[str, Tensor]:
    persistent = {name: b for name, b in module._buffers.items() if name not in module._non_persistent_buffers_set}
    return {name: value for name, value in {**module._parameters, **persistent}.items() if value is not None}


def _loaded(
    module: nn.Module, given: Mapping[str, Any], prefix: str, before: Mapping[str, Tensor]
) -> Iterator[tuple[str, Any]]:
    for name, target in _targets(module).items():
        key = prefix + name
        value = given.get(key)
        if isinstance(value, Tensor) and value.shape == target.shape:
            # What a class has computed while it loaded is in the module.
            is_computed = _loads_by_itself(module) and not target.is_meta and not value.is_meta
            yield name, target.detach() if is_computed else value
        elif name in before and value is None and not (target.is_meta or torch.equal(before[name], target)):
            yield name, target.detach()


def _loads_by_itself(module: nn.Module) -> bool:
    return type(module)._load_from_state_dict is not nn.Module._load_from_state_dict


def _all_real(own: Mapping[str, Tensor], given: Mapping[str, Any], prefix: str) -> bool:
    return not any(is_meta(given.get(prefix + name)) for name in own)


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@contextmanager
def _real(module: nn.Module) -> Iterator[None]:
    """Give a module real parameters to load into, to the end of its own part."""
    stand_ins = module._parameters
    vars(module)['_parameters'] = {
        name: param if param is None else nn.Parameter(torch.empty_like(param, device='cpu'), param.requires_grad)
        for name, param in stand_ins.items()
    }
    try:
        yield
    finally:
        vars(module)['_parameters'] = stand_ins


@contextmanager
def _stand_ins(model: nn.Module) -> Iterator[None]:
    """Put stand-ins on meta in the place of parameters, and copies in that of buffers."""
    modules = list(model.modules())
    kept = [(module._parameters, module._buffers, module._load_state_dict_pre_hooks) for module in modules]
    try:
        for module in modules:
            # A compiled module hands on what is set as an attribute to the one inside.
            vars(module).update(
                _parameters={name: _on_meta(param) for name, param in module._parameters.items()},
                _buffers={
                    name: buffer if buffer is None else buffer.detach().cpu().clone()
                    for name, buffer in module._buffers.items()
                },
                _load_state_dict_pre_hooks=_hooks_of(module),
            )
        yield
    finally:
        for module, (parameters, buffers, hooks) in zip(modules, kept, strict=True):
            vars(module).update(_parameters=parameters, _buffers=buffers, _load_state_dict_pre_hooks=hooks)


def _on_meta(param: nn.Parameter | None) -> nn.Parameter | None:
    if param is None:
        return None
    # One that DeepSpeed has partitioned is empty itself.
    shape = getattr(param, 'ds_shape', param.shape)
    return nn.Parameter(torch.empty(shape, dtype=param.dtype, device='meta'), param.requires_grad)


def _hooks_of(module: nn.Module) -> Any:
    """The model's own hooks."""
    hooks = module._load_state_dict_pre_hooks
    own = {key: hook for key, hook in hooks.items() if not _module_of(hook).startswith(_ENGINES)}
    return type(hooks)(own)


def _module_of(hook: Any) -> str:
    inner = getattr(hook, 'hook', hook)
    return getattr(inner, '__module__', None) or type(inner).__module__
