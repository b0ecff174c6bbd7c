"""Keys of a ds_config that DeepSpeed does not know, found by letting DeepSpeed itself read it.

[Note: keys that DeepSpeed reads]
DeepSpeed passes over unknown keys at the top and in half of its sections, and stops at the first in the others, which
are pydantic models. It has no list of the keys that it knows. So its reader is given dicts that note which keys it asks
for, one section at a time: what it never asks for does nothing, and what its models refuse is told with its path.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from mmzero.config import without_auto
from mmzero.errors import near_names

_MINIMAL = {'train_micro_batch_size_per_gpu': 1}

# Of an optimizer or a scheduler, whose class takes them.
ARGUMENTS = 'params'

HINTS = {
    'stage3_offload_param': "offload=dict(params='cpu') of model_wrapper_cfg, or zero_optimization.offload_param",
    'stage3_offload_optimizer': (
        "offload=dict(optimizer='cpu') of model_wrapper_cfg, or zero_optimization.offload_optimizer"
    ),
    'stage1_param': 'stage=1 of model_wrapper_cfg, or zero_optimization.stage',
    'stage2_param': 'stage=2 of model_wrapper_cfg, or zero_optimization.stage',
    'stage3_param': 'stage=3 of model_wrapper_cfg, or zero_optimization.stage',
    'gradient_checkpointing': 'activation_checkpointing of model_wrapper_cfg',
    'parallelism': 'mesh of model_wrapper_cfg',
    'loss_scaling': 'loss_scale of fp16; bfloat16 needs none',
    'offload': 'offload of model_wrapper_cfg, or zero_optimization.offload_param and offload_optimizer',
    'zero': 'zero_optimization',
    'zero_stage': 'zero_optimization.stage',
    'learning_rate': 'optim_wrapper.optimizer.lr',
    'lr': 'optim_wrapper.optimizer.lr',
    'batch_size': 'train_dataloader.batch_size, or train_micro_batch_size_per_gpu',
    'micro_batch_size': 'train_dataloader.batch_size, or train_micro_batch_size_per_gpu',
    'max_grad_norm': 'optim_wrapper.clip_grad, or gradient_clipping',
    'mixed_precision': 'optim_wrapper.dtype, or bf16.enabled',
    'dtype': 'optim_wrapper.dtype, or bf16.enabled',
    'thread_count': 'intra_op_parallelism',
}
"""Keys that circulate in notes and that DeepSpeed does not have in this form, with what is meant."""


class _Noting(dict):
    """A dict that notes which of its keys are asked for, and so do the dicts in it.

    Args:
        content (Mapping[str, Any]): What it holds.
        asked (set[str], optional): Takes the keys. Defaults to None: a new set.
    """

    def __init__(self, content: Mapping[str, Any], asked: set[str] | None = None) -> None:
        super().__init__({k: _Noting(v) if isinstance(v, Mapping) else v for k, v in content.items()})
        self.asked: set[str] = set() if asked is None else asked

    def __copy__(self) -> '_Noting':
        copied = _Noting({}, self.asked)
        dict.update(copied, self)
        return copied

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __iter__(self) -> Iterator[str]:
        # ``**section``, and loops that take any key: a model refuses those that it does not know.
        self.asked.update(super().keys())
        return super().__iter__()

    def keys(self) -> Any:
        return _Keys(self)


class _Keys:
    """The keys of a noting dict, where to look for one is to ask for it.

    Args:
        noting (_Noting): The dict.
    """

    def __init__(self, noting: _Noting) -> None:
        self.noting = noting

    def __contains__(self, key: object) -> bool:
        return key in self.noting

    def __iter__(self) -> Iterator[str]:
        return iter(self.noting)

    def __len__(self) -> int:
        return len(self.noting)


def key_faults(options: Mapping[str, Any], deepspeed: Any) -> Iterator[tuple[str, str]]:
    """Find what DeepSpeed does not know, or does not take.

    Args:
        options (Mapping[str, Any]): DeepSpeed's config.
        deepspeed: The package.

    Yields:
        tuple[str, str]: Path in the options, and what is wrong.
    """
    reader = deepspeed.runtime.config.DeepSpeedConfig
    known = _known(reader)
    for name, value in without_auto(options).items():
        if name not in known and name not in reader_removed(deepspeed):
            yield name, f'DeepSpeed has no such key{advice(name, known)}'
            continue
        noting = _Noting({**_MINIMAL, name: value})
        try:
            reader(noting)
        except Exception as error:
            # Whatever DeepSpeed raises: pydantic's errors, its own, and assertions.
            yield from _told(name, value, error, deepspeed)
            continue
        yield from _unread(name, dict.__getitem__(noting, name))


def reader_removed(deepspeed: Any) -> Mapping[str, str]:
    """Keys that earlier versions had, of which DeepSpeed says what became of them."""
    return getattr(deepspeed.runtime.config, '_REMOVED_TOP_LEVEL_CONFIG_KEYS', {})


def _known(reader: Any) -> set[str]:
    noting = _Noting(_MINIMAL)
    reader(noting)
    return noting.asked


def _unread(path: str, value: Any) -> Iterator[tuple[str, str]]:
    # A section whose keys nobody asked for is handed on whole.
    if not isinstance(value, _Noting) or not value.asked:
        return
    for name in dict.keys(value):
        if name == ARGUMENTS:
            continue
        if name not in value.asked:
            yield f'{path}.{name}', f'DeepSpeed has no such key{advice(name, value.asked)}'
        else:
            yield from _unread(f'{path}.{name}', dict.__getitem__(value, name))


def _told(name: str, value: Any, error: Exception, deepspeed: Any) -> Iterator[tuple[str, str]]:
    if not hasattr(error, 'errors'):
        text = str(error) or type(error).__name__
        yield name, f'DeepSpeed does not take it: {text}'
        return
    for fault in error.errors():
        where = '.'.join([name, *_place(value, tuple(map(str, fault['loc'])))])
        if fault['type'] == 'extra_forbidden':
            holder = _names_at(error.title, fault['loc'][:-1], deepspeed)  # type: ignore[attr-defined]
            yield where, f'DeepSpeed has no such key{advice(str(fault["loc"][-1]), holder)}'
        else:
            yield where, f'got {fault["input"]!r}; {fault["msg"]}'


def _place(value: Any, loc: tuple[str, ...]) -> tuple[str, ...]:
    """Where in a section something is that a model tells of, which knows the place in itself alone."""
    if _is_at(value, loc) or not isinstance(value, Mapping):
        return loc
    if loc[1:] and _is_at(value, loc[1:]):
        return loc[1:]
    names = [str(name) for name, below in value.items() if _is_at(below, loc)]
    return (names[0], *loc) if names else loc


def _is_at(value: Any, loc: tuple[str, ...]) -> bool:
    for step in loc:
        if not isinstance(value, Mapping) or step not in value:
            return False
        value = value[step]
    return True


def _names_at(title: str, place: tuple, deepspeed: Any) -> set[str]:
    """Names of the fields of a model, or of one that a field of it holds."""
    base = deepspeed.runtime.config_utils.DeepSpeedConfigModel
    models = {cls.__name__: cls for cls in _subclasses(base)}
    model: Any = models.get(title)
    for step in place:
        field = None if model is None else _fields(model).get(str(step))
        model = None if field is None else _model_in(field.annotation, base)
    return set() if model is None else set(_fields(model))


def _subclasses(cls: Any) -> Iterator[Any]:
    for own in cls.__subclasses__():
        yield own
        yield from _subclasses(own)


def _fields(model: Any) -> dict[str, Any]:
    return {field.alias or name: field for name, field in model.model_fields.items()}


def _model_in(annotation: Any, base: type) -> Any:
    choices = (annotation, *getattr(annotation, '__args__', ()))
    return next((cls for cls in choices if isinstance(cls, type) and issubclass(cls, base)), None)


def advice(name: str, known: set[str]) -> str:
    """What may be meant by a key.

    Args:
        name (str): The key.
        known (set[str]): Those that DeepSpeed has in its place.

    Returns:
        str: What to write instead.
    """
    return f'; what is meant is {HINTS[name]}' if name in HINTS else near_names(name, known)
