"""``engine_options``: DeepSpeed's own config, a dict or a JSON file as people have them, and what of it mmzero owns.

[Note: what a ds_config says that mmzero says too]
Stage, offload and precision have fields in ``model_wrapper_cfg``; clipping, accumulation and the loss scale in
``optim_wrapper``. Where the config is silent, the file's value is taken; where both say something, it has to be the
same. 'auto', as the Hugging Face integration has it, says nothing.
"""

import copy
import importlib
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

from mmzero.config.reader import DTYPES, Faults, is_number

AUTO = 'auto'
SECTION = 'zero_optimization'
DTYPE_SECTIONS = {'bf16': 'bfloat16', 'bfloat16': 'bfloat16', 'fp16': 'float16'}
PATH = 'model_wrapper_cfg.engine_options'
_REDUCED = {'fp32': 'float32', 'bf16': 'bfloat16', 'fp16': 'float16'}


def engine_options(value: Any) -> dict[str, Any] | None:
    """A reader for ``engine_options``: a dict, or the path of a JSON file that holds one."""
    if value is None:
        return None
    if isinstance(value, (str, os.PathLike)):
        return _from_file(os.fspath(value))
    if isinstance(value, Mapping):
        return _plain(value)
    raise ValueError("expected a dict, or the path of a JSON file, such as 'ds_config.json'")


def _from_file(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding='utf-8') as file:
            text = file.read()
    except OSError as error:
        raise ValueError(f'no file can be read there ({error.strerror}); give the path of a JSON file') from None
    try:
        found = json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        found = _with_comments(text, error)
    if not isinstance(found, dict):
        raise ValueError(f'the file holds a {type(found).__name__}; expected an object')
    return found


def _with_comments(text: str, error: json.JSONDecodeError) -> Any:
    """As DeepSpeed reads its files: with comments, and commas that nothing follows."""
    told = f'no JSON: line {error.lineno}, column {error.colno}: {error.msg}'
    try:
        hjson = importlib.import_module('hjson')
    except ImportError:
        raise ValueError(told) from None
    try:
        return hjson.loads(text, object_pairs_hook=_unique)
    except hjson.HjsonDecodeError:
        raise ValueError(told) from None


def _unique(pairs: Any) -> dict[str, Any]:
    pairs = list(pairs.items()) if isinstance(pairs, Mapping) else pairs
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f'{", ".join(map(repr, twice))} is given twice; leave one')
    return dict(pairs)


def _plain(value: Any) -> Any:
    """Without the classes of MMEngine's configs, which DeepSpeed does not know."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else copy.deepcopy(value)


def without_auto(options: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what is 'auto', at any depth.

    Args:
        options (Mapping[str, Any]): DeepSpeed's config.

    Returns:
        dict[str, Any]: The rest.
    """
    return {
        name: without_auto(value) if isinstance(value, Mapping) else value
        for name, value in options.items()
        if value != AUTO
    }


def section(options: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """One section of a config.

    Args:
        options (Mapping[str, Any]): DeepSpeed's config.
        name (str): Of the section.

    Returns:
        Mapping[str, Any]: Empty where it is missing or no dict, which is a fault of its own.
    """
    found = options.get(name)
    return found if isinstance(found, Mapping) else {}


def wrapper_fields_of(options: Mapping[str, Any]) -> Iterator[tuple[str, str, str, Any]]:
    """Read what a config says of fields of ``model_wrapper_cfg``.

    Args:
        options (Mapping[str, Any]): DeepSpeed's config, without 'auto'.

    Yields:
        tuple[str, str, str, Any]: Path in the options; field and subfield of ``model_wrapper_cfg``, the latter ''
            where there is none; the value.
    """
    zero = section(options, SECTION)
    if type(zero.get('stage')) is int:
        yield f'{SECTION}.stage', 'stage', '', zero['stage']
    for name, own in (('offload_param', 'params'), ('offload_optimizer', 'optimizer')):
        part = section(zero, name)
        if 'device' in part:
            yield f'{SECTION}.{name}.device', 'offload', own, None if part['device'] == 'none' else part['device']
        if isinstance(part.get('nvme_path'), str) and part.get('device') == 'nvme':
            yield f'{SECTION}.{name}.nvme_path', 'offload', 'nvme_path', part['nvme_path']
    if zero.get('cpu_offload') is True:
        yield f'{SECTION}.cpu_offload', 'offload', 'optimizer', 'cpu'
    for name, dtype in DTYPE_SECTIONS.items():
        if section(options, name).get('enabled') is True:
            yield f'{name}.enabled', 'precision', 'param_dtype', dtype
    if options.get('communication_data_type') in _REDUCED:
        yield 'communication_data_type', 'precision', 'reduce_dtype', _REDUCED[options['communication_data_type']]


def optim_fields_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """Read what a config says of fields of ``optim_wrapper``.

    Args:
        options (Mapping[str, Any]): DeepSpeed's config.

    Returns:
        dict[str, Any]: Fields of ``optim_wrapper``.
    """
    options = without_auto(options)
    found: dict[str, Any] = {}
    clipping: Any = options.get('gradient_clipping')
    steps: Any = options.get('gradient_accumulation_steps')
    if is_number(clipping) and clipping > 0:
        found['clip_grad'] = dict(max_norm=clipping)
    if type(steps) is int and steps > 1:
        found['accumulative_counts'] = steps
    dtypes = [dtype for name, dtype in DTYPE_SECTIONS.items() if section(options, name).get('enabled') is True]
    if len(dtypes) == 1:
        found['dtype'] = dtypes[0]
    scale = section(options, 'fp16').get('loss_scale', 0)
    if found.get('dtype') == 'float16' and is_number(scale) and scale > 0:
        found['loss_scale'] = scale
    return found


def fill_from_options(cfg: Mapping[str, Any], path: str, faults: Faults) -> dict[str, Any]:
    """Take fields that the engine's own options have, where ``model_wrapper_cfg`` is silent.

    Args:
        cfg (Mapping[str, Any]): Fields of ``model_wrapper_cfg``; not changed.
        path (str): Its config path.
        faults (Faults): Takes what is given twice and differs.

    Returns:
        dict[str, Any]: The fields.
    """
    filled = dict(cfg)
    try:
        options = without_auto(engine_options(cfg.get('engine_options')) or {})
    except ValueError:
        return filled  # named with the other fields
    both = [name for name in DTYPE_SECTIONS if section(options, name).get('enabled') is True]
    if len(both) > 1:
        faults.add(f'{path}.engine_options', f'{" and ".join(both)} are enabled; enable one')
        return filled
    for place, name, sub, value in wrapper_fields_of(options):
        given = filled.get(name)
        if sub and not (given is None or isinstance(given, Mapping)):
            continue  # a fault of its own
        holder = filled if not sub else dict(given or {})
        key = sub or name
        if key in holder and holder[key] is not None and not _same(holder[key], value):
            where = f'{path}.{name}.{sub}' if sub else f'{path}.{name}'
            why = f'got {value!r}, and {where} is {holder[key]!r}; give one of them, or the same'
            faults.add(f'{path}.engine_options.{place}', why)
        elif value is not None:
            holder[key] = value
        if sub:
            filled[name] = holder
    return filled


def _same(given: Any, value: Any) -> bool:
    return given == value or str(given).removeprefix('torch.') == value and value in DTYPES
