"""What the DeepSpeed engine does not do: because DeepSpeed cannot, or not yet."""

from collections.abc import Iterator

import torch
from torch import nn

from mmzero.config import ZeroConfig
from mmzero.engines.options import Clip
from mmzero.errors import ConfigError, PlanError

_PATH = 'model_wrapper_cfg'
_INSTEAD = "or use engine='fsdp2'"


def check_config(config: ZeroConfig) -> None:
    """Refuse fields of a config.

    Args:
        config (ZeroConfig): The checked config.

    Raises:
        ConfigError: If fields ask for what is not supported; it lists all of them.
    """
    faults = list(_faults(config))
    if faults:
        raise ConfigError(faults)


def _faults(config: ZeroConfig) -> Iterator[str]:
    yet = "is not supported yet under engine='deepspeed'; leave it out, " + _INSTEAD
    default = ZeroConfig()
    if config.mesh.replicate > 1:
        yield f'{_PATH}.mesh: replicate={config.mesh.replicate} {yet}'
    if config.wrap_policy not in (None, default.wrap_policy):
        yield f'{_PATH}.wrap_policy: {yet}. DeepSpeed gathers module by module'
    if config.overrides:
        yield f'{_PATH}.overrides: {yet}. DeepSpeed has no units'
    for name in ('param_dtype', 'reduce_dtype', 'output_dtype'):
        value = getattr(config.precision, name)
        if value not in (torch.float32, getattr(default.precision, name)):
            yield f'{_PATH}.precision.{name}: {value} {yet}'
    if config.precision.keep_fp32:
        yield f'{_PATH}.precision.keep_fp32: {yet}. Everything is float32 there'
    if config.broadcast_buffers:
        yield f'{_PATH}.broadcast_buffers: {yet}'
    if config.find_unused_parameters:
        yield (
            f'{_PATH}.find_unused_parameters: is an argument of DDP that DeepSpeed does not have: a parameter that '
            f'no rank uses gets a gradient of zeros there, and weight decay moves it; leave it out, {_INSTEAD}'
        )


def check_model(model: nn.Module) -> None:
    """Refuse 0-dim parameters, of which DeepSpeed's start dies.

    Args:
        model (nn.Module): The model; its parameters may be on the meta device.

    Raises:
        PlanError: If there are any.
    """
    names = [name for name, param in model.named_parameters() if param.dim() == 0]
    if names:
        shown = ', '.join(names[:5]) + (', ...' if len(names) > 5 else '')
        raise PlanError(
            f'DeepSpeed cannot train 0-dim parameters, and this {type(model).__name__} has {len(names)}: {shown}; '
            f'give them the shape (1,), {_INSTEAD}'
        )


def check_autocast(dtype: torch.dtype | None) -> None:
    """Refuse mixed precision.

    Args:
        dtype (torch.dtype, optional): The dtype of the forward.

    Raises:
        ConfigError: If it is not float32.
    """
    if dtype not in (None, torch.float32):
        raise ConfigError(
            [f"optim_wrapper.dtype: {dtype} is not supported yet under engine='deepspeed'; leave it out, {_INSTEAD}"]
        )


def check_clip(clip: Clip | None) -> None:
    """Refuse other clipping than by the 2-norm, which is all that DeepSpeed has.

    Args:
        clip (Clip, optional): How to clip.

    Raises:
        ConfigError: If DeepSpeed cannot; it lists all faults.
    """
    if clip is None:
        return
    path, faults = 'optim_wrapper.clip_grad', []
    if clip.by != 'norm':
        raise ConfigError([f"{path}.type: DeepSpeed clips by 'norm', not by {clip.by!r}; use 'norm', {_INSTEAD}"])
    options = dict(clip.options)
    max_norm, norm_type = options.pop('max_norm', 0), options.pop('norm_type', 2)
    options.pop('foreach', None)
    if not max_norm > 0:
        faults.append(f'{path}.max_norm: got {max_norm!r}; give a number above 0, which means no clipping to DeepSpeed')
    if float(norm_type) != 2:
        faults.append(f'{path}.norm_type: DeepSpeed has the 2-norm only, got {norm_type!r}; leave it out, {_INSTEAD}')
    faults += [f'{path}.{name}: DeepSpeed has no such option; leave it out, {_INSTEAD}' for name in options]
    if faults:
        raise ConfigError(faults)
