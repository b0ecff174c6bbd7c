"""What the DeepSpeed engine does not do: because DeepSpeed cannot, or not yet."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from mmzero.config import ZeroConfig, section, without_auto
from mmzero.config.engine_options import PATH as OPTIONS
from mmzero.engines.deepspeed.build_lock import check_build_locks
from mmzero.engines.deepspeed.keys import key_faults
from mmzero.engines.deepspeed.precision import HALF
from mmzero.engines.deepspeed.sections import combination_faults, section_faults
from mmzero.engines.fsdp2.trial import ELEMENTWISE
from mmzero.engines.options import Clip
from mmzero.errors import ConfigError, PlanError

_PATH = 'model_wrapper_cfg'
_INSTEAD = "or use engine='fsdp2'"


def check_config(config: ZeroConfig, deepspeed: Any) -> None:
    """Refuse fields of a config.

    Args:
        config (ZeroConfig): The checked config.
        deepspeed: The package.

    Raises:
        ConfigError: If fields ask for what is not supported; it lists all of them.
    """
    faults = [*_faults(config, deepspeed), *_option_faults(config, deepspeed)]
    if faults:
        raise ConfigError(faults)


def _faults(config: ZeroConfig, deepspeed: Any) -> Iterator[str]:
    yet = "is not supported yet under engine='deepspeed'; leave it out, " + _INSTEAD
    default = ZeroConfig()
    if config.mesh.replicate > 1:
        hint = "parameters, though not the optimizer's state, stay within a node by zero_hpz_partition_size"
        yield f'{_PATH}.mesh: replicate={config.mesh.replicate} {yet}. {hint} of {OPTIONS}.zero_optimization'
    if config.wrap_policy not in (None, default.wrap_policy):
        yield f'{_PATH}.wrap_policy: {yet}. DeepSpeed gathers module by module'
    if config.overrides:
        yield f'{_PATH}.overrides: {yet}. DeepSpeed has no units'
    if config.compile.is_asked:
        yield f'{_PATH}.compile: {yet}'
    if config.no_sync:
        yield f'{_PATH}.no_sync: {yet}. DeepSpeed reduces every micro-batch at stages 2 and 3'
    if config.precision.output_dtype is not None:
        yield f'{_PATH}.precision.output_dtype: {yet}'
    if config.precision.keep_fp32:
        yield f'{_PATH}.precision.keep_fp32: {yet}. DeepSpeed keeps all parameters in one dtype'
    if config.find_unused_parameters:
        yield (
            f'{_PATH}.find_unused_parameters: is an argument of DDP that DeepSpeed does not have: a parameter that '
            f'no rank uses gets a gradient of zeros there, and weight decay moves it; leave it out, {_INSTEAD}'
        )
    if config.offload.params is not None and config.stage != 3:
        yield f'{_PATH}.offload.params: DeepSpeed has it at stage 3 only, got stage={config.stage}; remove it'
    if (
        config.precision.param_dtype == torch.float16
        and not deepspeed.accelerator.get_accelerator().is_fp16_supported()
    ):
        why = f"DeepSpeed refuses float16 on this device; use 'bfloat16', {_INSTEAD}"
        yield f'{_PATH}.precision.param_dtype: {why}'


def check_disk(deepspeed: Any) -> None:
    """Refuse a disk where DeepSpeed's operator for it cannot be built, or waits for a build that was killed.

    Args:
        deepspeed: The package.

    Raises:
        ConfigError: If it cannot.
    """
    builder = deepspeed.accelerator.get_accelerator().create_op_builder('AsyncIOBuilder')
    if builder is None or not builder.is_compatible(verbose=False):
        why = "DeepSpeed cannot build its operator async_io, for which 'nvme' needs libaio (libaio-dev, libaio-devel)"
        raise ConfigError([f"{_PATH}.offload: {why}; install it and ninja, or use 'cpu'"])
    check_build_locks([builder.name])


def _option_faults(config: ZeroConfig, deepspeed: Any) -> Iterator[str]:
    options = without_auto(config.engine_options or {})
    for path, why in section_faults(options):
        yield f'{OPTIONS}.{path}: {why}'
    if config.stage < 3 and section(options, 'zero_optimization').get('round_robin_gradients') is True:
        why = (
            'DeepSpeed then loses track of where in its partitions a parameter lies, so that a checkpoint would hold '
            'other weights; remove it'
        )
        yield f'{OPTIONS}.zero_optimization.round_robin_gradients: {why}'
    is_on_disk = (config.offload.params == 'nvme', config.offload.optimizer == 'nvme')
    for path, why in combination_faults(section(options, 'zero_optimization'), config.stage, *is_on_disk):
        yield f'{OPTIONS}.zero_optimization.{path}: {why}'
    for path, why in key_faults(options, deepspeed):
        yield f'{OPTIONS}.{path}: {why}'
    if section(options, 'data_types').get('grad_accum_dtype') not in (None, 'fp32', 'bf16', 'fp16'):
        yield f"{OPTIONS}.data_types.grad_accum_dtype: allowed: 'fp32', 'bf16', 'fp16'"


def check_model(model: nn.Module) -> None:
    """Refuse 0-dim parameters, of which DeepSpeed's start dies, and dtypes that it would mix.

    Args:
        model (nn.Module): The model; its parameters may be on the meta device.

    Raises:
        PlanError: If there are any.
    """
    names = [name for name, param in model.named_parameters() if param.dim() == 0]
    if names:
        raise PlanError(
            f'DeepSpeed cannot train 0-dim parameters, and this {type(model).__name__} has {len(names)}: '
            f'{_shown(names)}; give them the shape (1,), {_INSTEAD}'
        )
    dtypes: dict[torch.dtype, list[str]] = {}
    for name, param in model.named_parameters():
        if param.requires_grad:
            dtypes.setdefault(param.dtype, []).append(name)
    if len(dtypes) > 1:
        told = '; '.join(f'{dtype}: {_shown(own)}' for dtype, own in dtypes.items())
        raise PlanError(
            f'DeepSpeed keeps trained parameters in one dtype, and this {type(model).__name__} has {told}; store all '
            f'in float32, {_INSTEAD}'
        )


def _shown(names: list[str]) -> str:
    return ', '.join(names[:5]) + (', ...' if len(names) > 5 else '')


def check_autocast(dtype: torch.dtype | None, config: ZeroConfig) -> None:
    """Refuse a dtype of the forward that does not fit that of the parameters.

    Args:
        dtype (torch.dtype, optional): The dtype of the forward's autocast; None is none.
        config (ZeroConfig): The checked config.

    Raises:
        ConfigError: If it does not.
    """
    stored = config.precision.param_dtype
    reduced = dtype in HALF
    if stored in HALF and dtype != stored:
        raise ConfigError(
            [
                f'{_PATH}.precision.param_dtype: parameters of {stored} are computed under autocast to it, which is '
                f'{"to " + str(dtype) if reduced else "off"}; set optim_wrapper.dtype to the same dtype'
            ]
        )
    if reduced and stored is None and config.stage == 3:
        raise ConfigError(
            [
                f'{_PATH}.precision.param_dtype: autocast to {dtype} over parameters gathered in float32 keeps a '
                '16-bit copy of every weight until backward, which undoes stage 3; set precision=dict(param_dtype=...) '
                "to the same dtype (ZeroRunner does it by itself), or to 'float32' if that is meant, or use stage 2"
            ]
        )
    if dtype == torch.float16 and stored not in HALF:
        raise ConfigError(
            [
                f'{_PATH}.precision.param_dtype: DeepSpeed scales the loss for parameters of float16 only; set '
                "precision=dict(param_dtype='float16') (ZeroRunner does it by itself), or use 'bfloat16'"
            ]
        )


def check_optimizer(optimizer: Optimizer) -> None:
    """Refuse optimizers for which a run of elements is not as good as a whole parameter.

    Args:
        optimizer (Optimizer): The optimizer.

    Raises:
        ConfigError: If it is not known to treat each element by itself, or DeepSpeed makes a new one of it.
    """
    cls = type(optimizer)
    path = 'optim_wrapper.optimizer'
    if cls is torch.optim.Adagrad:
        why = 'DeepSpeed makes a new Adagrad, without groups, so that their lr and weight_decay and schedulers are lost'
        raise ConfigError([f'{path}: {why}; use another, {_INSTEAD}'])
    if cls not in ELEMENTWISE and not cls.__module__.startswith('deepspeed.ops.'):
        why = f'DeepSpeed steps flat pieces of parameters, and {cls.__name__} is not known to treat elements one by one'
        names = ', '.join(sorted(known.__name__ for known in ELEMENTWISE if known is not torch.optim.Adagrad))
        raise ConfigError([f'{path}: {why}; use one of {names}, {_INSTEAD}'])


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
