"""Every part of a config that names a class is held against that class's constructor."""

from collections.abc import Callable, Mapping
from typing import Any

import mmengine.registry as registries
import torch.distributed as dist
from mmengine.evaluator import Evaluator
from mmengine.runner import LogProcessor, Runner, TestLoop, ValLoop
from mmengine.runner.loops import EpochBasedTrainLoop, IterBasedTrainLoop
from mmengine.utils.dl_utils import set_multi_processing
from torch.utils.data import DataLoader

from mmzero.runner import readers
from mmzero.runner.loader_check import LOADER_EXTRA, LOADER_FIELDS, LOADER_PROVIDED
from mmzero.runner.lookup import lookup, mentioned, typed
from mmzero.runner.nodes import PLAIN, Nodes
from mmzero.runner.optim_check import own_schedulers
from mmzero.runner.several import is_several
from mmzero.runner.signatures import check_fields
from mmzero.runner.toplevel import near_key
from mmzero.runner.translate import type_name

# What CheckpointHook itself gives to Runner.save_checkpoint.
SAVE_PROVIDED = ('self', 'out_dir', 'filename', 'meta')

# What Runner registers by itself, and what mmdet's configs add.
DEFAULT_HOOKS = ('runtime_info', 'timer', 'sampler_seed', 'logger', 'param_scheduler', 'checkpoint', 'visualization')

# Transforms whose inner dicts belong to another package.
FOREIGN_TRANSFORMS = ('Albu',)


def check_parts(cfg: Mapping, parts: 'Parts') -> None:
    """Find unknown, missing and ill-typed fields in all parts that are built from a ``type``.

    Args:
        cfg (Mapping): Arguments of the runner and keys of the config.
        parts (Parts): Takes the faults.
    """
    parts.model(cfg.get('model'), 'model')
    parts.model(cfg.get('data_preprocessor'), 'data_preprocessor')
    for split in ('train', 'val', 'test'):
        parts.loader(cfg.get(f'{split}_dataloader'), f'{split}_dataloader')
        parts.evaluator(cfg.get(f'{split}_evaluator'), f'{split}_evaluator')
        parts.loop(cfg.get(f'{split}_cfg'), split)
    parts.hooks(cfg)
    schedulers, several = cfg.get('param_scheduler'), is_several(cfg.get('optim_wrapper'))
    for where, own in own_schedulers(schedulers) if several else [('param_scheduler', schedulers)]:
        parts.each(own, where, parts.scheduler)
    parts.visualizer(cfg.get('visualizer'))
    parts.environment(cfg)
    parts.node(cfg.get('log_processor'), 'log_processor', registries.LOG_PROCESSORS, default=LogProcessor)


class Parts(Nodes):
    """Checks of the parts of one config."""

    def model(self, cfg: Any, path: str) -> None:
        """Check the modules of a model, as far as their class is named. What is missing, building it tells."""
        for where, node, around in typed(cfg, path):
            found = self._module(node)
            if found is not None:
                # A head may take fields out of the dict of its loss before that is built.
                silent = set().union(*(mentioned(owner) for owner in map(self._module, around) if owner))
                check_fields(found, node, where, self.faults, silent=silent, check_required=False, lenient=True)

    def _module(self, cfg: Mapping) -> Callable | None:
        given = cfg['type']
        if not isinstance(given, str):
            return given if callable(given) else None
        scope = cfg.get('_scope_') or self.scope
        found = (lookup(registry, given, scope)[0] for registry in (registries.MODELS, registries.TASK_UTILS))
        return next(filter(None, found), None)

    def loader(self, cfg: Any, path: str) -> None:
        """Check a data loader with its data set, transforms and samplers."""
        if not isinstance(cfg, Mapping):
            return
        for name in LOADER_PROVIDED:
            if name not in cfg:
                self.faults.add(f'{path}.{name}', 'is missing')
        batches = cfg.get('batch_sampler')
        if isinstance(cfg.get('dataset'), PLAIN):
            self.faults.add(f'{path}.dataset', f'got {cfg["dataset"]!r}; expected a dict')
        self.dataset(cfg.get('dataset'), f'{path}.dataset')
        self.node(cfg.get('sampler'), f'{path}.sampler', registries.DATA_SAMPLERS, provided=('dataset', 'seed'))
        self.node(batches, f'{path}.batch_sampler', registries.DATA_SAMPLERS, provided=('sampler', 'batch_size'))
        for name, given in (('collate_fn', ('data_batch', 'batch')), ('worker_init_fn', ('worker_id',))):
            if isinstance(cfg.get(name), Mapping):
                self.node(cfg[name], f'{path}.{name}', registries.FUNCTIONS, provided=given)
            elif isinstance(cfg.get(name), PLAIN):
                self.faults.add(f'{path}.{name}', f'got {cfg[name]!r}; expected a dict with type, or a function')
        # Those fields have rules of their own.
        plain = {key: cfg[key] for key in cfg if key not in LOADER_FIELDS and not isinstance(cfg[key], Mapping)}
        check_fields(DataLoader, plain, path, self.faults, provided=LOADER_PROVIDED, extra=LOADER_EXTRA)

    def dataset(self, cfg: Any, path: str) -> None:
        """Check a data set, those inside of it, and transforms."""
        if not isinstance(cfg, Mapping):
            return
        self.node(cfg, path, registries.DATASETS)
        self.dataset(cfg.get('dataset'), f'{path}.dataset')
        if isinstance(cfg.get('datasets'), (list, tuple)):
            self.each(cfg['datasets'], f'{path}.datasets', self.dataset)
        self.transforms(cfg.get('pipeline'), f'{path}.pipeline')

    def transforms(self, cfg: Any, path: str) -> None:
        """Check transforms, also those inside of others."""
        if not isinstance(cfg, (list, tuple)):
            return
        for index, item in enumerate(cfg):
            if isinstance(item, Mapping) and 'type' not in item:
                self.find(item, f'{path}[{index}]', registries.TRANSFORMS)
        for where, node, around in typed(cfg, path):
            if not any(type_name(outer['type']) in FOREIGN_TRANSFORMS for outer in around):
                self.node(node, where, registries.TRANSFORMS, lenient=True)

    def evaluator(self, cfg: Any, path: str) -> None:
        """Check an evaluator, a metric or a list of metrics."""
        if isinstance(cfg, Mapping) and 'metrics' in cfg:
            self.node(cfg, path, registries.EVALUATOR, default=Evaluator)
            cfg, path = cfg['metrics'], f'{path}.metrics'
        self.each(cfg, path, lambda item, where: self.node(item, where, registries.METRICS))

    def loop(self, cfg: Any, split: str) -> None:
        """Check ``train_cfg``, ``val_cfg`` or ``test_cfg``."""
        default: Any = {'val': ValLoop, 'test': TestLoop}.get(split)
        extra: tuple[str, ...] = ()
        if split == 'train' and isinstance(cfg, Mapping) and 'type' not in cfg:
            if not isinstance(cfg.get('by_epoch'), bool):
                self.faults.add('train_cfg.type', 'is missing; name a loop, or give by_epoch=True or by_epoch=False')
                return
            default, extra = (EpochBasedTrainLoop if cfg['by_epoch'] else IterBasedTrainLoop), ('by_epoch',)
        provided = ('runner', 'dataloader', 'evaluator')
        path = f'{split}_cfg'
        self.node(cfg, path, registries.LOOPS, default=default, provided=provided, extra=extra)

    def hooks(self, cfg: Mapping) -> None:
        """Check default and custom hooks."""
        named = cfg.get('default_hooks')
        for name, hook in named.items() if isinstance(named, Mapping) else ():
            if near := near_key(name, DEFAULT_HOOKS):
                self.faults.add(f'default_hooks.{name}', f'is not the name of a default hook; did you mean {near!r}?')
            self._hook(hook, f'default_hooks.{name}')
        if isinstance(cfg.get('custom_hooks'), (list, tuple)):
            self.each(cfg['custom_hooks'], 'custom_hooks', self._hook)

    def _hook(self, cfg: Any, path: str) -> None:
        # What CheckpointHook does not know, it gives to save_checkpoint, at the end of the first epoch.
        saves = isinstance(cfg, Mapping) and type_name(cfg.get('type')) == 'CheckpointHook'
        rest = Runner.save_checkpoint if saves else None
        self.node(cfg, path, registries.HOOKS, extra=('priority',), rest=rest, provided=SAVE_PROVIDED if saves else ())

    def scheduler(self, cfg: Any, path: str) -> None:
        """Check one parameter scheduler."""
        provided, extra = ('optimizer', 'param_name'), ('convert_to_iter_based', 'epoch_length')
        self.node(cfg, path, registries.PARAM_SCHEDULERS, provided=provided, extra=extra)

    def visualizer(self, cfg: Any) -> None:
        """Check the visualizer and its backends."""
        if not isinstance(cfg, Mapping):
            self.node(cfg, 'visualizer', registries.VISUALIZERS)
            return
        backends = cfg.get('vis_backends')
        # Its annotation says a dict, its constructor wants a list.
        rest = {key: value for key, value in cfg.items() if key != 'vis_backends'}
        provided, extra = ('name', 'save_dir'), ('name', 'vis_backends')
        self.node(rest, 'visualizer', registries.VISUALIZERS, provided=provided, extra=extra)
        self.each(backends, 'visualizer.vis_backends', self._backend)

    def _backend(self, cfg: Any, path: str) -> None:
        self.node(cfg, path, registries.VISBACKENDS, provided=('save_dir',))

    def environment(self, cfg: Mapping) -> None:
        """Check what is read by functions of the runner."""
        if isinstance(cfg.get('randomness'), Mapping):
            check_fields(Runner.set_randomness, cfg['randomness'], 'randomness', self.faults)
        env = cfg.get('env_cfg')
        if isinstance(env, Mapping):
            self._read(readers.env_cfg, env, 'env_cfg')
            if isinstance(env.get('mp_cfg'), Mapping):
                path = 'env_cfg.mp_cfg'
                check_fields(set_multi_processing, env['mp_cfg'], path, self.faults, provided=('distributed',))
            if isinstance(env.get('dist_cfg'), Mapping):
                self._read(readers.dist_cfg, env['dist_cfg'], 'env_cfg.dist_cfg', rest=dist.init_process_group)
        if isinstance(cfg.get('auto_scale_lr'), Mapping):
            self._read(readers.auto_scale_lr, cfg['auto_scale_lr'], 'auto_scale_lr')

    def _read(self, reader: Callable, cfg: Mapping, path: str, rest: Callable | None = None) -> None:
        check_fields(reader, cfg, path, self.faults, rest=rest, check_required=False)
