"""ZeroRunner."""

import copy
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from mmengine.config import Config
from mmengine.hooks import CheckpointHook, EMAHook, Hook
from mmengine.model import BaseTTAModel, convert_sync_batchnorm, revert_sync_batchnorm
from mmengine.model.efficient_conv_bn_eval import turn_on_efficient_conv_bn_eval
from mmengine.registry import MODEL_WRAPPERS, RUNNERS
from mmengine.runner import Runner
from mmengine.runner.utils import set_random_seed
from torch import nn

from mmzero._compat import build_with_meta_parameters
from mmzero.checkpoint import BackgroundSave, nothing_loaded, pretrained_loading
from mmzero.config import Faults, read_checkpoint_config
from mmzero.engines import failed, init_process_group, on_rank0, started
from mmzero.errors import ConfigError, DataError
from mmzero.hooks import (
    HostMemoryHook,
    RandomStateHook,
    average_statistics,
    is_sync_norm,
    keeping_the_last,
    over_shards,
    teach_over_shards,
)
from mmzero.runner.blame import blaming
from mmzero.runner.check import check_config, missing_data
from mmzero.runner.checkpoints import CheckpointMixin, bare_model
from mmzero.runner.joint_loops import JointLoopsMixin
from mmzero.runner.run_facts import batch_size_of
from mmzero.runner.several import build_several, check_built, is_several
from mmzero.runner.translate import (
    ALIASES,
    becomes_bfloat16,
    translate_optim_wrapper,
    with_engine_options,
    wrapper_fields,
)
from mmzero.runner.work_dir import make_work_dir, write_traceback
from mmzero.wrappers import ZeroModelWrapper

# Once these hooks have run, the config has brought a loop through.
_PROOFS = {'after_train_iter': 'train', 'after_val': 'val', 'after_test': 'test'}


@RUNNERS.register_module()
class ZeroRunner(CheckpointMixin, JointLoopsMixin, Runner):
    """MMEngine's Runner with the steps of a sharded run in the right order.

    Runner builds, moves and wraps the model first and loads weights last. Here, with the same arguments:

    1. check: every fault of the config in one error, before a process group exists
    2. env: the process group; without a launcher, a group of one
    3. build: real on rank 0's CPU; on other ranks parameters go to meta as they are registered
    4. weights: ``init_weights``, ``init_cfg``, ``load_from`` of plain files, on rank 0 only
    5. patch, 6. plan, 7. shard: ZeroModelWrapper's; then every rank reseeds, so that noise and dropout do not
       depend on who built
    8. optim: the optimizer on the sharded parameters, then schedulers, hooks, resume: as Runner does

    ``optim_wrapper`` may name MMEngine's OptimWrapper or AmpOptimWrapper; ZeroOptimWrapper takes their place.

    Args:
        model (nn.Module or dict): The model or its config.
        work_dir (str): Where logs and checkpoints go.
        **kwargs: As MMEngine's Runner.

    Raises:
        ConfigError: If the config has faults.
    """

    def __init__(self, model: nn.Module | dict, work_dir: str, **kwargs: Any) -> None:
        cfg = kwargs.get('cfg')
        kwargs['cfg'] = cfg = Config({}) if cfg is None else copy.deepcopy(cfg)
        # None is the default of all arguments that have one.
        kwargs = {name: value for name, value in kwargs.items() if value is not None or name == 'default_scope'}
        if isinstance(kwargs.get('load_from'), (str, os.PathLike)):
            kwargs['load_from'] = os.path.expanduser(os.fspath(kwargs['load_from']))
        faults = Faults()
        # Where the engine's own options say more than the config does.
        optim_wrapper = with_engine_options(
            kwargs.get('optim_wrapper'), kwargs.get('model_wrapper_cfg') or cfg.get('model_wrapper_cfg')
        )
        if optim_wrapper is not None:
            kwargs['optim_wrapper'] = optim_wrapper
        bfloat16 = becomes_bfloat16(optim_wrapper)
        translated = translate_optim_wrapper(optim_wrapper, faults)
        self._given = given = {name: value for name, value in kwargs.items() if value is not None}
        self._wrapper_fields = wrapper_fields({**cfg, **given}, translated)
        self._wrapper: ZeroModelWrapper | None = None
        # Building changes the config.
        self._model_cfg = copy.deepcopy(model) if isinstance(model, dict) else None
        self._training = False
        # The check tells its faults.
        self.saving = read_checkpoint_config(cfg.get('checkpoint'), Faults())
        self.saves_shards = self.saving.format == 'sharded'
        self._background = BackgroundSave() if self.saving.async_save else None
        self._is_merged = False
        self._proven: set[str] = set()
        self._read: tuple[str, dict] | None = None
        doubts = check_config({**cfg, **given, 'model': model, 'work_dir': work_dir}, translated, faults)
        make_work_dir(work_dir)
        kwargs['optim_wrapper'] = translated
        # Taken over by the wrapper; Runner would apply its own on top.
        self._efficient_conv_bn_eval = cfg.get('efficient_conv_bn_eval')
        for name in (*ALIASES, 'efficient_conv_bn_eval'):
            cfg.pop(name, None)
        with blaming({**cfg, **given, 'model': model}, lambda text: write_traceback(text, work_dir)):
            super().__init__(model=model, work_dir=work_dir, **kwargs)
        for doubt in doubts:
            self.logger.warning(doubt)
        if bfloat16:
            self.logger.info('AmpOptimWrapper becomes ZeroOptimWrapper in bfloat16, which needs no loss scaling')
        self.register_hook(HostMemoryHook())
        self.register_hook(RandomStateHook())

    @classmethod
    def from_cfg(cls, cfg: Any) -> Runner:
        """Build a runner from a config.

        Args:
            cfg (Config or dict): The config; not changed.

        Returns:
            ZeroRunner: The runner.

        Raises:
            ConfigError: If the config has faults.
        """
        faults = Faults()
        for name in ('model', 'work_dir'):
            if cfg.get(name) is None:
                faults.add(name, 'is missing')
        if not faults.lines:
            return super().from_cfg(cfg)
        check_config({**cfg}, translate_optim_wrapper(cfg.get('optim_wrapper'), faults), faults)
        raise ConfigError(faults.lines)

    def setup_env(self, env_cfg: dict) -> None:
        """Join the process group, then do what Runner does.

        Args:
            env_cfg (dict): As Runner's; ``dist_cfg.backend`` 'nccl' becomes 'gloo' without a GPU.
        """
        init_process_group(self._launcher, **env_cfg.get('dist_cfg', {}))
        super().setup_env(env_cfg)

    def build_model(self, model: nn.Module | dict) -> nn.Module:
        """Build the model, real on rank 0 alone.

        Args:
            model (nn.Module or dict): The model or its config.

        Returns:
            nn.Module: The model, on the CPU, not wrapped yet.
        """
        build = super().build_model
        if isinstance(model, nn.Module):
            return build(model)
        if dist.get_rank():
            with nothing_loaded():
                # Building changes the config, and may happen twice.
                built = build_with_meta_parameters(lambda: build(copy.deepcopy(model)))
        # Where rank 0 fails, on a file of a teacher that it alone reads, all do.
        real = on_rank0(lambda: _build_with_files(build, model))
        return built if real is None else real

    def wrap_model(self, model_wrapper_cfg: dict | None, model: nn.Module) -> nn.Module:
        """Leave the model as it is: it is wrapped once its weights are there.

        Args:
            model_wrapper_cfg (dict, optional): Read at step 1.
            model (nn.Module): The model.

        Returns:
            nn.Module: The model.
        """
        return model

    def train(self) -> nn.Module:
        """Launch training.

        Returns:
            nn.Module: The wrapped model after training.
        """
        self._training = True
        self._check_files('train', 'val')
        with self._blaming():
            self.check_folder()
            self.find_checkpoint()
            if self._train_loop is not None:
                self._train_loop = self.build_train_loop(self._train_loop)
            self.prepare()
            try:
                model = super().train()
            except SystemExit:
                # As of a hook that saves because its job is about to be ended.
                self.finish_saving()
                raise
            self.finish_saving()
            # For what a script saves from here on nobody would wait.
            self._background = None
            started('the end of training')
            return model

    def val(self) -> dict:
        """Launch validation.

        Returns:
            dict: Metrics.
        """
        self._check_files('val')
        with self._blaming():
            self.prepare()
            return super().val()

    def test(self) -> dict:
        """Launch testing.

        Returns:
            dict: Metrics.
        """
        self._check_files('test')
        with self._blaming():
            self.prepare()
            return super().test()

    @contextmanager
    def _blaming(self) -> Iterator[None]:
        try:
            with blaming({**self.cfg, **self._given, 'model': self._model_cfg}, self._keep_traceback, self._proven):
                yield
        except Exception as error:
            # Ranks that have no more batches wait for this one.
            failed(error)
            raise

    def register_hook(self, hook: Hook | dict, priority: int | str | None = None) -> None:
        """Register a hook; one that averages does it with a sharded model, one that saves removes afterwards.

        Args:
            hook (Hook or dict): As Runner's.
            priority (int or str, optional): As Runner's.
        """
        super().register_hook(hook, priority)
        for known in self._hooks:
            if isinstance(known, EMAHook):
                over_shards(known)
            elif isinstance(known, CheckpointHook):
                keeping_the_last(known)
            elif is_sync_norm(known):
                average_statistics(known)
            else:
                teach_over_shards(known)

    def call_hook(self, fn_name: str, **kwargs: Any) -> None:
        """Call the hooks, and remember which loops have worked.

        Args:
            fn_name (str): As Runner's.
            **kwargs: As Runner's.
        """
        super().call_hook(fn_name, **kwargs)
        if fn_name in _PROOFS:
            self._proven.add(_PROOFS[fn_name])
        if fn_name == 'before_test' and isinstance(self.model, BaseTTAModel) and self.model.module is self._wrapper:
            # PrepareTTAHook has put it around the wrapper.
            self.model.module = self.sharded.module
            self._merge_by(self.model)
            self._is_merged = True
        elif fn_name == 'after_test' and self._is_merged:
            self.model, self._is_merged = self.sharded, False

    def _keep_traceback(self, text: str) -> str | None:
        """Write a traceback to the log file alone."""
        files = [handler for handler in self.logger.handlers if isinstance(handler, logging.FileHandler)]
        for handler in files:
            handler.emit(logging.makeLogRecord(dict(msg=text, levelno=logging.ERROR, levelname='ERROR')))
        # Only rank 0 has a log file.
        return files[0].baseFilename if files else write_traceback(text, self.work_dir)

    def _check_files(self, *splits: str) -> None:
        faults = Faults()
        for path, advice in missing_data({**self.cfg, **self._given}, splits):
            faults.add(path, advice)
        faults.raise_if_any()

    def prepare(self) -> None:
        """Steps 4 to 7, once. Collective.

        Weights are initialised where training may come; a checkpoint of the whole model to evaluate needs none.
        """
        if self._wrapper is not None:
            return
        model = self._convert_layers(self.model)
        evaluates_only = self._train_loop is None or (self._load_from is not None and not self._training)
        if not evaluates_only and hasattr(model, 'init_weights'):
            on_rank0(lambda: _init_weights(model))
        self._load_before_sharding(model)
        inner = bare_model(model)
        self._wrapper = MODEL_WRAPPERS.build(dict(self._wrapper_fields, type='ZeroModelWrapper', module=inner))
        self._wrapper.engine.batch_size = batch_size_of({**self.cfg, **self._given})
        if not self._training:
            self._wrapper.engine.evaluate_only()
        # One that merges test-time augmentations calls the model inside, which is sharded in place.
        self.model = self._wrapper if inner is model else model
        if inner is not model:
            self._merge_by(model)
        set_random_seed(self._seed, deterministic=self._deterministic)

    def _merge_by(self, model: Any) -> None:
        """Let a model that merges test-time augmentations run the sharded one inside as the wrapper does."""
        model.test_step = self.sharded.around(model.test_step)

    @property
    def sharded(self) -> ZeroModelWrapper:
        """The sharded model, also where one that merges test-time augmentations is around it."""
        if self._wrapper is None:
            raise RuntimeError('the model is not sharded yet; train(), val() and test() shard it')
        return self._wrapper

    def build_optim_wrapper(self, optim_wrapper: Any) -> Any:
        """Build the optimizer wrapper, or several.

        Args:
            optim_wrapper (dict or OptimWrapper): As Runner's; several optimizers without a constructor are those of the
                model's children by name.

        Returns:
            OptimWrapper: The optimizer wrapper, or an OptimWrapperDict.
        """
        if not is_several(optim_wrapper):
            return super().build_optim_wrapper(optim_wrapper)
        if optim_wrapper.get('constructor') is None:
            built = build_several(self.model.module, optim_wrapper)
        else:
            built = super().build_optim_wrapper(optim_wrapper)
        check_built(built)
        return built

    def _convert_layers(self, model: nn.Module) -> nn.Module:
        if not self.distributed:
            model = revert_sync_batchnorm(model)
        elif self.cfg.get('sync_bn') is not None:
            model = convert_sync_batchnorm(model, self.cfg.sync_bn)
        if self._efficient_conv_bn_eval is not None:
            turn_on_efficient_conv_bn_eval(model, self._efficient_conv_bn_eval)
        return model

    def _load_before_sharding(self, model: nn.Module) -> None:
        self.find_checkpoint()
        source = self._load_from
        if source is not None and not self._has_loaded:
            if self._read_by_shards(source, bare_model(model)):
                # Each rank reads its shards, once there are any.
                return
            checkpoint = self.load_checkpoint(source)
            # Resuming goes on with what was read once; else the file's memory is free from here.
            self._read = (source, checkpoint) if self._resume else None
            self._has_loaded = not self._resume

    def _init_model_weights(self) -> None:
        """Nothing is left to do for Runner: the weights were there before sharding."""

    @classmethod
    def build_dataloader(cls, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """Build a data loader.

        Args:
            dataloader (DataLoader or dict): As Runner's.
            *args: As Runner's.
            **kwargs: As Runner's.

        Returns:
            DataLoader: The data loader.

        Raises:
            DataError: If a file of the data set is missing.
        """
        try:
            return Runner.build_dataloader(dataloader, *args, **kwargs)
        except FileNotFoundError as error:
            raise DataError(f'the data set cannot be read: {error}; put the files there, or set data_root') from error


def _build_with_files(build: Callable[[Any], nn.Module], model: Any) -> nn.Module:
    with pretrained_loading():
        return build(model)


def _init_weights(model: nn.Module) -> None:
    with pretrained_loading():
        model.init_weights()  # type: ignore[operator]
