"""Models of Hugging Face's transformers: gradient checkpointing that they turned on, and layers that the user names."""

import functools
import inspect
from collections.abc import Sequence
from typing import Any

from mmengine.logging import print_log
from torch import nn

from mmzero.patches.patch import CheckpointPatch
from mmzero.patches.switch import OwnBlock, parts
from mmzero.registry import CHECKPOINT_PATCHES

# What layers and models call a cache of keys and values, to which each run would add.
CACHES = ('cache', 'cache_params', 'layer_past', 'past_key_value', 'past_key_values')


class WithoutCache(CheckpointPatch):
    """Drops the cache of keys and values, as transformers does where it recomputes itself."""

    def arguments(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """As the base says.

        Raises:
            ValueError: If the cache holds something, which the result depends on.
        """
        names = _names(type(module))  # type: ignore[arg-type]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        dropped = () if getattr(module, '_can_checkpoint_with_cache', False) else CACHES
        for name in dropped:
            if _holds_something(given.get(name), module):
                raise ValueError(
                    f'activation_checkpointing: {type(module).__name__} got {name} with keys and values in it, to '
                    'which a recompute would add its own; recompute other modules, or train without it'
                )
        off: dict[str, Any] = dict(dict.fromkeys(dropped), use_cache=False)
        args = (*(off.get(name, value) for name, value in zip(names, args, strict=False)), *args[len(names) :])
        if 'use_cache' in names and 'use_cache' not in given:
            kwargs = dict(kwargs, use_cache=False)
        return args, {name: off.get(name, value) for name, value in kwargs.items()}


@CHECKPOINT_PATCHES.register_module(name='GradientCheckpointingLayer')
class HuggingFaceLayer(WithoutCache, OwnBlock):
    """A layer that transformers recomputes after ``gradient_checkpointing_enable()``, re-entrantly if asked to."""

    def asks_for(self, module: nn.Module) -> Sequence[nn.Module]:
        """As the base says."""
        asked = super().asks_for(module)
        function = getattr(module, '_gradient_checkpointing_func', None) if asked else None
        options = sorted(set(getattr(function, 'keywords', ())) - {'use_reentrant'})
        if getattr(getattr(function, 'func', None), '__module__', '').startswith('transformers.'):
            options.append('offload')
        if options:
            _warn(tuple(options))
        return asked


CHECKPOINT_PATCHES.register_module(name='PreTrainedModel', module=WithoutCache)
# Two decoders call torch's checkpoint themselves, and so do parts of a third model; all re-entrantly.
# Calls torch's checkpoint itself, re-entrantly.
CHECKPOINT_PATCHES.register_module(
    name='ClvpConditioningEncoder', module=parts('mel_conv', 'group_norms.*', 'mel_attn_blocks.*')
)


@functools.cache
def _names(cls: type[nn.Module]) -> tuple[str, ...]:
    """Names of the positional arguments of a class's forward, behind self."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    taken = inspect.signature(inspect.unwrap(cls.forward)).parameters.values()
    return tuple(parameter.name for parameter in taken if parameter.kind in kinds)[1:]


def _holds_something(cache: Any, module: nn.Module) -> bool:
    if isinstance(cache, (tuple, list)):
        return bool(cache)
    if not hasattr(cache, 'get_seq_length'):
        return False
    # In a layer, what the layers before it have added does not count.
    index = next((part.layer_idx for part in module.modules() if isinstance(getattr(part, 'layer_idx', None), int)), 0)
    return bool(cache.get_seq_length(index))


@functools.cache
def _warn(options: tuple[str, ...]) -> None:
    print_log(
        f'gradient_checkpointing_enable: {", ".join(options)} of transformers is not used, since mmzero recomputes the '
        'layers; what activation_checkpointing of model_wrapper_cfg says holds for them (offload, save, every, ...)',
        logger='current',
        level=30,
    )
