"""What counts as named by an error, and what may be trained."""

import re
from collections.abc import Callable
from typing import Any

import mmengine.registry as registries
from mmengine.registry import DefaultScope
from mmengine.runner import Runner
from mmengine.runner.loops import EpochBasedTrainLoop
from mmengine.utils.dl_utils import set_multi_processing
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.utils.data import DataLoader

from mmzero.runner import readers
from mmzero.runner.lookup import lookup
from mmzero.runner.signatures import Signature, signature_of
from tests.fuzz.mutations import Mutation, dotted

# Keys without which a run is right, since the runner or its reader has a default.
HAVE_DEFAULTS = (
    'param_scheduler',
    'param_scheduler[2].convert_to_iter_based',
    'default_hooks',
    'custom_hooks',
    'visualizer',
    'log_processor',
    'auto_scale_lr',
    'auto_scale_lr.',
    'env_cfg',
    'randomness',
    'load_from',
    'resume',
    'launcher',
    'log_level',
    'default_scope',
    'experiment_name',
    'find_unused_parameters',
    'model_wrapper_cfg.',
    'optim_wrapper.type',
    'optim_wrapper.paramwise_cfg',
    'optim_wrapper.paramwise_cfg.',
    'optim_wrapper.clip_grad',
    'optim_wrapper.accumulative_counts',
    'optim_wrapper.dtype',
    'optim_wrapper.loss_scale',
    'optim_wrapper.max_skips',
    'optim_wrapper.grad_norms',
    'env_cfg.',
    'default_hooks.',
    'custom_hooks[0].',
    'train_cfg.',
    'val_cfg.type',
    'test_cfg.type',
    'visualizer.name',
    'log_processor.type',
)


READERS: dict[str, Callable] = {
    'env_cfg': readers.env_cfg,
    'env_cfg.mp_cfg': set_multi_processing,
    'env_cfg.dist_cfg': readers.dist_cfg,
    'randomness': Runner.set_randomness,
    'auto_scale_lr': readers.auto_scale_lr,
}


def is_named(text: str, mutation: Mutation, good: dict) -> bool:
    """Whether an error names a mutation: its path, its key, or a part of the config around it.

    Within the model an error may name another part of it, or what names its modules: where two parts disagree, nobody
    knows which one is wrong.
    """
    if mutation.path in text or _word(mutation.key, text) or _word(str(mutation.before), text):
        return True
    if any(re.search(rf'^  {re.escape(path)}: ', text, re.MULTILINE) for path in _around(mutation)):
        return True
    if mutation.owner[:1] != ('model',):
        return False
    return re.search(r'\bmodel\b[^ :]*:|wrap_policy: no module of', text) is not None


def _word(word: str, text: str) -> bool:
    return re.search(rf'(?<![A-Za-z]){re.escape(word)}(?![A-Za-z])', text) is not None


def _around(mutation: Mutation) -> list[str]:
    """Paths of what a mutation is part of: what its builder or a run finds wrong there may be said of the whole."""
    return [dotted(mutation.owner[:end]) for end in range(1, len(mutation.owner) + 1)]


def _at(cfg: Any, keys: tuple) -> Any:
    for key in keys:
        cfg = cfg[key]
    return cfg


def is_harmless(mutation: Mutation, good: dict) -> bool:
    """Whether a run with a mutation may train."""
    if mutation.kind in ('misspelt key', 'unknown key'):
        return False
    if mutation.kind == 'dropped key':
        return _has_default(mutation, good)
    if _equal(mutation.before, mutation.after):
        return True
    return mutation.kind == 'out of range' and _reaches_its_owner(mutation, good)


def _equal(before: Any, after: Any) -> bool:
    return type(before) in (int, float) and type(after) in (int, float) and before == after


def _has_default(mutation: Mutation, good: dict) -> bool:
    if any(mutation.path == name or name.endswith('.') and mutation.path.startswith(name) for name in HAVE_DEFAULTS):
        return True
    signature = _signature(mutation, good)
    return signature is not None and mutation.key in signature.params and mutation.key not in signature.required


def _reaches_its_owner(mutation: Mutation, good: dict) -> bool:
    """A constructor that has a parameter of the name was given the value, by the rules of Python.

    Dicts in a model that name no class are given to one as they are, too.
    """
    if mutation.owner[:1] == ('model',) or mutation.path in HAVE_DEFAULTS:
        return True
    signature = _signature(mutation, good)
    return signature is not None and mutation.key in signature.params


def _signature(mutation: Mutation, good: dict) -> Signature | None:
    node = _at(good, mutation.owner) if mutation.owner else None
    if not isinstance(node, dict):
        return None
    if dotted(mutation.owner) in READERS:
        return signature_of(READERS[dotted(mutation.owner)])
    if mutation.path.startswith('train_cfg.') and 'type' not in node:
        return signature_of(EpochBasedTrainLoop)
    if mutation.owner and str(mutation.owner[-1]).endswith('_dataloader'):
        return signature_of(DataLoader)
    if mutation.owner == ('optim_wrapper', 'clip_grad'):
        return signature_of(clip_grad_value_ if node.get('type') == 'value' else clip_grad_norm_)
    cls = _class(node, good)
    return None if cls is None else signature_of(cls)


def _class(node: dict, good: dict) -> Callable | None:
    if not isinstance(node.get('type'), str):
        return None
    names = ('MODELS', 'TASK_UTILS', 'DATASETS', 'TRANSFORMS', 'HOOKS', 'LOOPS', 'METRICS', 'OPTIMIZERS')
    names += ('PARAM_SCHEDULERS', 'DATA_SAMPLERS', 'VISUALIZERS', 'VISBACKENDS', 'LOG_PROCESSORS', 'FUNCTIONS')
    with DefaultScope.overwrite_default_scope(good['default_scope']):
        found = (lookup(getattr(registries, name), node['type'], good['default_scope'])[0] for name in names)
        return next(filter(None, found), None)
