"""Saving adapters alone, in PEFT's own files."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mmzero.engines import on_rank0
from mmzero.errors import CheckpointError
from mmzero.integrations.huggingface.adapters import import_peft
from mmzero.wrappers import ZeroModelWrapper

# What PeftModel.from_pretrained puts in front of the model's own names.
_PREFIX = 'base_model.model.'


def save_adapters(model: ZeroModelWrapper, folder: str) -> None:
    """Write the adapters of a sharded model, and nothing of its base. Collective: call it on every rank.

    ``PeftModel.from_pretrained(base, folder)`` reads them: ``adapter_config.json`` and ``adapter_model.safetensors``.
    Only what they need is gathered, one tensor at a time, on rank 0's CPU. The folder appears under its name once it is
    complete, in place of an older one.

    Args:
        model (ZeroModelWrapper): The model, of any stage, whose module or a part of it PEFT has adapted.
        folder (str): Where; each of several adapted modules gets a folder of its path in it.

    Raises:
        CheckpointError: On every rank, if there are no adapters, or rank 0 could not write.
    """
    found = adapted_modules(model.module)
    if not found:
        raise CheckpointError(f'{folder}: {type(model.module).__name__} has no adapters of PEFT to save')
    gathered = {path: _gathered(model, path, module) for path, module in found.items()}
    on_rank0(lambda: _write_all(found, gathered, folder))


def adapted_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Find the outermost modules that PEFT has adapted.

    Args:
        model (nn.Module): The model.

    Returns:
        dict[str, nn.Module]: Modules by path.
    """
    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        inside = any(not above or path.startswith(f'{above}.') for above in found)
        if not inside and isinstance(getattr(module, 'peft_config', None), dict):
            found[path] = module
    return found


def _gathered(model: ZeroModelWrapper, path: str, module: nn.Module) -> dict[str, Tensor]:
    """What the files of one adapted module need, by its own names, on rank 0."""
    prefix = f'{path}.' if path else ''
    state = model.engine.sharded_state()
    own = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
    only = {prefix + name for name in _needed(module, own)}
    return {name.removeprefix(prefix): value for name, value in model.engine.model_state(only).items()}


def _needed(module: Any, state: dict[str, Tensor]) -> set[str]:
    """Names of what PEFT would write, found by letting it choose among tensors without content."""
    peft = import_peft()
    empty = {name: torch.empty(value.shape, dtype=value.dtype, device='meta') for name, value in state.items()}
    names = {id(value): name for name, value in empty.items()}
    needed = {name for name in state if name.startswith('prompt_encoder.')}
    for adapter, config in module.peft_config.items():
        if not config.is_prompt_learning:
            chosen = peft.get_peft_model_state_dict(module, state_dict=empty, adapter_name=adapter)
            if any(id(value) not in names for value in chosen.values()):
                # Computed from several.
                return set(state)
            needed |= {names[id(value)] for value in chosen.values()}
    return needed


def _write_all(modules: dict[str, nn.Module], states: dict[str, dict[str, Tensor]], folder: str) -> None:
    part = f'{folder.rstrip("/")}.part'
    try:
        shutil.rmtree(part, ignore_errors=True)
        for path, module in modules.items():
            into = os.path.join(part, path) if len(modules) > 1 else part
            os.makedirs(into)
            with _holding(module, states[path]):
                _write(module, states[path], into)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(part, folder)
    except Exception as error:
        # Whatever PEFT, safetensors or the disk may raise.
        raise CheckpointError(f'could not save {folder}: {type(error).__name__}: {error}') from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _write(module: Any, state: dict[str, Tensor], folder: str) -> None:
    peft = import_peft()
    if isinstance(module, peft.PeftModel):
        module.save_pretrained(folder, state_dict=state)
        return
    from safetensors.torch import save_file

    for adapter, config in module.peft_config.items():
        into = folder if adapter == 'default' else os.path.join(folder, adapter)
        chosen = peft.get_peft_model_state_dict(module, state_dict=state, adapter_name=adapter)
        os.makedirs(into, exist_ok=True)
        tensors = {_PREFIX + name: value.clone().contiguous() for name, value in chosen.items()}
        save_file(tensors, os.path.join(into, 'adapter_model.safetensors'), metadata=dict(format='pt'))
        config.save_pretrained(into)


@contextmanager
def _holding(module: nn.Module, state: dict[str, Tensor]) -> Iterator[None]:
    """Let a module hold whole tensors in place of shards, since PEFT runs the encoders of prompts to save them.

    Args:
        module (nn.Module): The module.
        state (dict[str, Tensor]): Whole tensors by name.

    Yields:
        None: Inside.
    """
    before: list[tuple[dict[str, Any], str, Any]] = []
    for name, value in state.items():
        path, _, attribute = name.rpartition('.')
        params: Any = module.get_submodule(path)._parameters
        if params.get(attribute) is not None:
            before.append((params, attribute, params[attribute]))
            params[attribute] = nn.Parameter(value, requires_grad=False)
    try:
        yield
    finally:
        for params, attribute, param in before:
            params[attribute] = param
