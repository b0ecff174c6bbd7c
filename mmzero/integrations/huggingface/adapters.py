"""Adapters of PEFT in a model that a config describes.

[Note: adapters and initial weights]
Adapters are put in while the model is built, so that plans, policies and optimizers see them; weights come after, by
``init_weights``, ``init_cfg`` or ``load_from``, under the names that the model has without adapters (see [Note: names
with adapters]). Initialisers of MMEngine and transformers know layers by their class and would reach into the adapters,
whose second factor starts at zero: what PEFT has put there is put back after them.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from mmengine.registry import MODELS
from torch import nn

from mmzero.errors import near_names

FROM_BASE = ('corda', 'eva', 'loftq', 'lora_ga', 'mica', 'olora', 'pissa')
"""Ways to start LoRA that read the base's weights, and change some of them."""


def adapter_config(fields: Any, path: str = 'peft') -> Any:
    """Read the configuration of an adapter.

    Args:
        fields (dict): Fields of a configuration class of PEFT, and its name as ``type`` or, as in PEFT's own
            files, ``peft_type``: ``dict(type='LoraConfig', r=8)`` or ``dict(peft_type='LORA', r=8)``.
        path (str): The config path, for errors. Defaults to 'peft'.

    Returns:
        peft.PeftConfig: The configuration.

    Raises:
        ImportError: If peft is not installed.
        ValueError: If PEFT knows no such class or field or refuses one, or it starts from weights that come later.
    """
    peft = import_peft()
    if not isinstance(fields, Mapping) or not {'type', 'peft_type'} & fields.keys():
        raise ValueError(
            f"{path}: got {fields!r}; expected a dict with type, such as dict(type='LoraConfig', r=8, "
            "target_modules=['q_proj', 'v_proj'])"
        )
    if {'type', 'peft_type'} <= fields.keys():
        raise ValueError(
            f'{path}: type={fields["type"]!r} and peft_type={fields["peft_type"]!r} both name it; keep one'
        )
    rest = {name: _plain(value) for name, value in fields.items() if name not in ('type', 'peft_type')}
    cls = _config_class(fields, path, peft)
    known = {field.name for field in dataclasses.fields(cls) if field.init}
    for name in rest.keys() - known:
        raise ValueError(f'{path}.{name}: {cls.__name__} has no such field{near_names(name, known)}')
    start = rest.get('init_lora_weights')
    if isinstance(start, str) and start.startswith(FROM_BASE):
        raise ValueError(
            f"{path}.init_lora_weights: got {start!r}, which reads the base's weights while the model is built, before "
            "they are there; allowed: True, False, 'gaussian', 'orthogonal'. A loop by hand may use it: load, then "
            'get_peft_model, then ZeroModelWrapper'
        )
    try:
        return cls(**rest)
    except (TypeError, ValueError) as error:
        raise ValueError(f'{path}: {cls.__name__} refuses its fields: {error}') from error


def check_names(module: nn.Module, config: Any, path: str = 'peft') -> None:
    """Refuse names of modules that are not there, each by itself; PEFT passes over those beside others that are.

    Args:
        module (nn.Module): What will be adapted.
        config (peft.PeftConfig): The configuration.
        path (str): Its config path, for errors. Defaults to 'peft'.

    Raises:
        ValueError: If a list names a module that is not there.
    """
    names = [f'.{name}' for name, _ in module.named_modules() if name]
    for field in ('target_modules', 'modules_to_save'):
        wanted = getattr(config, field, None)
        # A string is a pattern, of which PEFT says by itself where it matches nothing.
        for name in sorted(wanted) if isinstance(wanted, (list, tuple, set)) else ():
            if not any(known.endswith(f'.{name}') for known in names):
                near = near_names(name, {known.rpartition('.')[2] for known in names})
                raise ValueError(f'{path}.{field}: no module of {type(module).__name__} is called {name!r}{near}')


def import_peft() -> Any:
    """Import PEFT.

    Returns:
        ModuleType: The package.

    Raises:
        ImportError: If it is not installed, with what to do.
    """
    try:
        import peft
    except ImportError as error:
        raise ImportError(
            "adapters need peft, which mmzero's extra brings along: pip install 'mmzero[peft]'"
        ) from error
    return peft


def _config_class(fields: Mapping, path: str, peft: Any) -> Any:
    by_type = {str(getattr(kind, 'value', kind)): cls for kind, cls in peft.PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    if 'peft_type' in fields:
        name, known, key = str(fields['peft_type']), by_type, 'peft_type'
    else:
        name, known, key = str(fields['type']), {cls.__name__: cls for cls in by_type.values()}, 'type'
    if name not in known:
        raise ValueError(f'{path}.{key}: no {name!r} in peft {peft.__version__}{near_names(name, known)}')
    return known[name]


def _plain(value: Any) -> Any:
    """Without MMEngine's kinds of dict and list, which no file of PEFT could hold."""
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


@MODELS.register_module()
def with_adapters(model: dict, peft: dict, module: str = '', **built: Any) -> nn.Module:
    """Build a model and put adapters into it, or into one module of it, which trains nothing else then.

    The class tree and names of the model stay; an adapted layer gets one more level (``qkv.base_layer``). For models of
    transformers use ``peft`` of HuggingFaceCausalLM.

    Args:
        model (dict): The model's config.
        peft (dict): As :func:`adapter_config` takes it; prompts and shadows are no layers and are refused by PEFT.
        module (str): Path of the module that is adapted and otherwise frozen, such as 'backbone'. Defaults to '': all.
        **built: Further fields of the model, such as a top-level ``data_preprocessor``.

    Returns:
        nn.Module: The model.

    Raises:
        ImportError: If peft is not installed.
        ValueError: If the fields are wrong, there is no such module, or nothing in it is adapted.
    """
    config = adapter_config(peft)
    made = MODELS.build({**built, **model})
    modules = dict(made.named_modules())
    if module not in modules:
        raise ValueError(f'module: {type(made).__name__} has no {module!r}{near_names(module, modules)}')
    put_in(modules[module], config)
    keep_adapters_in_init(made)
    return made


def put_in(module: nn.Module, config: Any) -> None:
    """Put adapters into a module, in place, as PEFT does, those of 16-bit layers in float32.

    Args:
        module (nn.Module): The module; it trains nothing else from here on.
        config (peft.PeftConfig): The configuration.

    Raises:
        ValueError: If nothing is adapted, or it names a module that is not there.
    """
    peft = import_peft()
    check_names(module, config)
    from peft.tuners.tuners_utils import cast_adapter_dtype

    peft.inject_adapter_in_model(config, module)
    cast_adapter_dtype(module, 'default')
    # Where save_adapters and PEFT's own functions look.
    vars(module)['peft_config'] = {'default': config}


def keep_adapters_in_init(model: nn.Module) -> None:
    """Let ``init_weights`` of a model leave its adapters as PEFT made them.

    Args:
        model (nn.Module): The model; its ``init_weights`` is replaced on the instance.
    """
    init: Any = getattr(model, 'init_weights', None)
    if init is None:
        return

    def init_weights(*args: Any, **kwargs: Any) -> None:
        with adapters_kept(model):
            init(*args, **kwargs)

    vars(model)['init_weights'] = init_weights


@contextmanager
def adapters_kept(model: nn.Module) -> Iterator[None]:
    """Put what adapters hold back after what is done inside.

    Args:
        model (nn.Module): The model.

    Yields:
        None: Weights may be initialised.
    """
    held = {param: param.detach().clone() for name, param in model.named_parameters() if is_of_adapter(model, name)}
    yield
    with torch.no_grad():
        for param, value in held.items():
            param.copy_(value)


def is_of_adapter(model: nn.Module, name: str) -> bool:
    """Whether a parameter belongs to an adapter, and not to a layer that was there before.

    Args:
        model (nn.Module): The model.
        name (str): The parameter's name.

    Returns:
        bool: Whether it does.
    """
    from peft.tuners.tuners_utils import BasePromptEncoder, BaseTunerLayer

    parts = name.split('.')
    kinds = (BaseTunerLayer, BasePromptEncoder)
    above = [index for index in range(len(parts)) if isinstance(model.get_submodule('.'.join(parts[:index])), kinds)]
    return bool(above) and 'base_layer' not in parts[above[0] :]
