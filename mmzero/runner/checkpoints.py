"""How ZeroRunner saves and loads: collectively, at every stage."""

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import mmengine
import torch
import torch.distributed as dist
from mmengine.fileio import LocalBackend, get_file_backend, join_path
from mmengine.model import BaseTTAModel
from mmengine.utils import get_git_hash
from torch import Tensor, nn

from mmzero.checkpoint import (
    BackgroundSave,
    SavedTensor,
    check_files,
    check_seen,
    check_shared,
    check_writable,
    clean_name,
    contents_of,
    each_reads,
    fitting_shards,
    fitting_state,
    gather_random_states,
    is_extra_state,
    is_sharded,
    load_extra_states,
    load_into_real,
    load_saved,
    placeholders,
    plain,
    random_state,
    read_alone,
    read_checkpoint,
    save_sharded,
    split,
    to_load,
    write_checkpoint,
)
from mmzero.checkpoint.convert import export_weights
from mmzero.config import CheckpointConfig
from mmzero.engines import SHARDS, from_rank0, is_meta, meet, on_rank0, together
from mmzero.hooks import PreemptionHook, ShardedEMA, ZeroCheckpointHook, note_last
from mmzero.runner.data_position import position_of
from mmzero.runner.resuming import ResumeMixin
from mmzero.runner.shards import optimizer_parts
from mmzero.version import __version__
from mmzero.wrappers import ZeroModelWrapper


class CheckpointMixin(ResumeMixin):
    """The checkpoint methods of ZeroRunner."""

    model: Any
    _read: tuple[str, dict] | None
    saves_shards: bool
    saving: CheckpointConfig
    _background: BackgroundSave | None
    _wrapper: ZeroModelWrapper | None
    _resume: bool
    _has_loaded: bool
    _load_from: str | None
    _train_loop: Any

    def save_checkpoint(
        self,
        out_dir: str,
        filename: str,
        file_client_args: dict | None = None,
        save_optimizer: bool = True,
        save_param_scheduler: bool = True,
        meta: dict | None = None,
        by_epoch: bool = True,
        backend_args: dict | None = None,
    ) -> None:
        """Save a checkpoint. Collective: call it on every rank.

        By ``checkpoint.format`` one full ``.pth`` in the OpenMMLab layout, for which tensors are gathered one at a time
        and kept on rank 0's CPU; or a folder into which every rank writes its shards.

        Args:
            out_dir (str): Folder.
            filename (str): Name of the file, or of the folder.
            file_client_args (dict, optional): As Runner's, deprecated there: use ``backend_args``.
            save_optimizer (bool): Save the optimizer's state. Defaults to True.
            save_param_scheduler (bool): Save the schedulers' states. Defaults to True.
            meta (dict, optional): Further meta data. Defaults to None.
            by_epoch (bool): Whether the number of the checkpoint counts epochs. Defaults to True.
            backend_args (dict, optional): As MMEngine's file backends. Defaults to None.

        Raises:
            CheckpointError: On every rank, if it could not be written.
        """
        checkpoint: dict[str, Any] = dict(meta=self._meta(meta or {}, by_epoch))
        if not isinstance(self.model, ZeroModelWrapper):
            raise RuntimeError('save_checkpoint: the model is not sharded yet; call train() first')
        engine = self.model.engine
        shards: dict[str, Tensor] = {}
        state = engine.state_to_save() if self.saves_shards else engine.model_state()
        # A compiled part of the model has a prefix of its own.
        checkpoint['state_dict'] = {clean_name(name): value for name, value in state.items()}
        checkpoint['message_hub'] = self.message_hub.state_dict()
        if save_optimizer and self.saves_shards:
            shards, checkpoint['optimizer'] = optimizer_parts(self.optim_wrapper)
        elif save_optimizer:
            checkpoint['optimizer'] = self.optim_wrapper.state_dict()
        if save_param_scheduler and self.param_schedulers is not None:
            checkpoint['param_schedulers'] = _states(self.param_schedulers)
        state = random_state()
        self.random_state_hook.continue_from(state)
        checkpoint['random_states'] = gather_random_states(state)
        numbers = checkpoint['meta']
        position = position_of(self.train_loop, numbers['iter'], numbers['epoch'], self.world_size)
        numbers['position'] = position
        for hook in self.hooks:
            if isinstance(hook, ShardedEMA) and self.saves_shards:
                hook.share()
            elif isinstance(hook, ShardedEMA):
                hook.gather()
        path = join_path(out_dir, filename, backend_args=backend_args or file_client_args)
        if self.saves_shards:
            self._write_shards(checkpoint, shards, path.removesuffix('.pth'))
        else:
            on_rank0(lambda: self._write(checkpoint, path, backend_args or file_client_args))

    def _write_shards(self, checkpoint: dict[str, Any], shards: dict[str, Tensor], path: str) -> None:
        self.call_hook('before_save_checkpoint', checkpoint=checkpoint)
        tensors, rest = split(checkpoint)
        if dist.get_rank():
            # Of what ranks hold whole, DCP would take any rank's: running statistics differ.
            tensors = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, SHARDS)}
        save = save_sharded if self._background is None else self._background.start
        save({**tensors, **shards}, rest, path)

    def check_folder(self) -> None:
        """Tell before anything is built of a folder where no checkpoint can be saved. Collective.

        Raises:
            CheckpointError: On every rank, if rank 0 cannot write there, or for sharded ones any rank.
        """
        folder = self._saving_folder()
        saves = any(isinstance(hook, (ZeroCheckpointHook, PreemptionHook)) for hook in self.hooks)
        if saves and isinstance(get_file_backend(folder), LocalBackend):
            (check_shared if self.saves_shards else check_writable)(folder)

    def _saving_folder(self) -> str:
        """Where the hook saves, if there is one."""
        hook = next((hook for hook in self.hooks if isinstance(hook, ZeroCheckpointHook)), None)
        return getattr(hook, 'out_dir', None) or self.work_dir

    def save_now(self, name: str, meta: dict) -> None:
        """Save a checkpoint beside those of the hook, which ``resume`` finds. Collective.

        Args:
            name (str): Its name, with the suffix '.pth'.
            meta (dict): ``epoch`` and ``iter`` from which a run goes on.
        """
        folder = self._saving_folder()
        self.save_checkpoint(folder, name, meta=meta, by_epoch=False)
        path = join_path(folder, name.removesuffix('.pth') if self.saves_shards else name)
        self.once_saved(lambda: note_last(self.work_dir, path))

    def finish_saving(self) -> None:
        """Wait for what is written beside training."""
        if self._background is not None:
            self._background.wait()

    def export(self, folder: str) -> None:
        """Write the weights of a sharded checkpoint as ``FOLDER.pth``, as ``checkpoint.export_dtype`` says. Collective.

        Args:
            folder (str): The checkpoint.
        """
        on_rank0(lambda: self.export_here(folder))

    def export_here(self, folder: str) -> None:
        """As :meth:`export`, on one rank, while the others go on.

        Args:
            folder (str): The checkpoint.
        """
        export_weights(folder, f'{folder}.pth', self.saving.export_dtype)
        self.logger.info(f'exported {folder}.pth')

    def once_saved(self, work: Callable[[], None]) -> None:
        """Do something once the checkpoint that was saved last is complete; left out where it cannot be written.

        Collective.

        Args:
            work (Callable[[], None]): What to do, on this thread.
        """
        if self._background is None:
            # What fails on rank 0 ends the run on all.
            together(work)
        else:
            self._background.once_saved(work)

    def _write(self, checkpoint: dict[str, Any], path: str, backend_args: dict | None) -> None:
        # As in Runner on the main process only, where the state is.
        self.call_hook('before_save_checkpoint', checkpoint=checkpoint)
        write_checkpoint(plain(checkpoint), path, backend_args)

    def _meta(self, meta: dict, by_epoch: bool) -> dict:
        epoch, done = (self.epoch + 1, self.iter) if by_epoch else (self.epoch, self.iter + 1)
        dataset = self.train_dataloader.dataset
        extra = dict(dataset_meta=dataset.metainfo) if hasattr(dataset, 'metainfo') else {}
        numbers = {'epoch': epoch, 'iter': done, **meta}
        return {
            **numbers,
            **extra,
            'cfg': self.cfg.pretty_text,
            'seed': self.seed,
            'experiment_name': self.experiment_name,
            'time': time.strftime('%Y%m%d_%H%M%S', time.localtime()),
            'mmengine_version': mmengine.__version__ + get_git_hash(),
            'mmzero_version': __version__,
            'world_size': self.world_size,
            'launch': self._launch,
        }

    def load_checkpoint(
        self,
        filename: str,
        map_location: Any = 'cpu',
        strict: bool = False,
        revise_keys: Sequence[tuple[str, str]] = (),
    ) -> dict[str, Any]:
        """Load weights on every rank from a file that rank 0 reads. Collective.

        Args:
            filename (str): As :func:`mmzero.checkpoint.read_checkpoint`.
            map_location: Unused; the file is read to the CPU and its weights go where the model is.
            strict (bool): Refuse missing and unexpected weights. Defaults to False.
            revise_keys (Sequence[tuple[str, str]]): Pairs of a pattern and its replacement in names, as Runner's.
                What wrappers put into names is stripped anyway. Defaults to none.

        Returns:
            dict: The checkpoint; on ranks other than 0 its large tensors are on meta.

        Raises:
            CheckpointError: On every rank, if the file cannot be read or none of its weights fits.
        """
        filename = os.path.expanduser(filename)
        if self._read is not None and self._read[0] == filename:
            (_, known), self._read = self._read, None
            return known
        meet(f'load {filename}')
        if self._read_by_shards(filename):
            return self._load_shards(filename, strict, revise_keys)
        model = bare_model(self.model)
        # On every rank: it reshards gathered units.
        wanted = model.state_dict()
        read = on_rank0(lambda: read_checkpoint(filename, wanted))
        box: list[Any] = [None if read is None else _to_send(read)]
        dist.broadcast_object_list(box, src=0)
        checkpoint: dict[str, Any] = box[0] if read is None else read
        self.call_hook('after_load_checkpoint', checkpoint=checkpoint)
        if self._wrapper is None:
            on_rank0(lambda: load_into_real(model, wanted, checkpoint, filename, strict, revise_keys))
        else:
            saved = checkpoint['state_dict']
            state = on_rank0(lambda: fitting_state(model, wanted, saved, filename, strict, revise_keys))
            self._wrapper.engine.load_model_state(state or {})
        load_extra_states(model, wanted, checkpoint['state_dict'], revise_keys)
        self._say_loaded(filename)
        return checkpoint

    def _read_by_shards(self, path: str, model: nn.Module | None = None) -> bool:
        """Say whether each rank reads its shards, by :func:`each_reads`; a model is one that is to be sharded."""
        if self._wrapper is None and model is None:
            return from_rank0(lambda: is_sharded(path))
        return each_reads(path, None if model is None else model.state_dict())

    def _load_shards(self, folder: str, strict: bool, revise_keys: Sequence[tuple[str, str]]) -> dict[str, Any]:
        """Load weights of which each rank reads what it holds."""
        if self._wrapper is None:
            raise RuntimeError(f'{folder} is a sharded checkpoint, which is loaded once the model is sharded')
        rest, known = from_rank0(lambda: contents_of(folder))
        check_seen(folder)
        check_files(folder)
        checkpoint = to_load(rest, known)
        self.call_hook('after_load_checkpoint', checkpoint=checkpoint)
        wanted = self._wrapper.engine.sharded_state()
        model = bare_model(self.model)
        fitting = fitting_shards(model, wanted, checkpoint['state_dict'], folder, strict, revise_keys)
        by_shards = {name: saved for name, saved in fitting.items() if isinstance(saved, SavedTensor)}
        apart = {name: by_shards.pop(name) for name in list(by_shards) if is_meta(wanted[name])}
        load_saved([(saved, wanted[name]) for name, saved in by_shards.items()])
        # What a hook has put there, and what no rank reads by itself.
        given = {name: value for name, value in fitting.items() if not isinstance(value, SavedTensor)}
        given |= (on_rank0(lambda: read_alone(apart)) if apart else None) or {}
        if given or apart:
            self._wrapper.engine.load_model_state(given)
        self._wrapper.engine.refresh()
        _load_extra_states(model, wanted, checkpoint['state_dict'], revise_keys)
        self._say_loaded(folder)
        return checkpoint

    def _say_loaded(self, source: str) -> None:
        for hook in self.hooks:
            if isinstance(hook, ShardedEMA):
                hook.after_weights()
        self.logger.info(f'loaded weights from {source}')

    def call_hook(self, fn_name: str, **kwargs: Any) -> None:
        """Call all hooks, after an evaluation with rank 0's metrics on every rank. Collective there.

        Whether to save the best checkpoint, to stop early or to lower the learning rate is decided on them.

        Args:
            fn_name (str): As Runner's.
            **kwargs: As Runner's.
        """
        if fn_name == 'before_train_iter' and self._background is not None:
            self._background.poll()
        if fn_name in ('after_val_epoch', 'after_test_epoch') and 'metrics' in kwargs:
            box = [kwargs['metrics']]
            dist.broadcast_object_list(box, src=0)
            kwargs['metrics'] = box[0]
        super().call_hook(fn_name, **kwargs)


def _states(schedulers: Any) -> Any:
    """Those of one optimizer, or of several by name."""
    if isinstance(schedulers, dict):
        return {name: _states(own) for name, own in schedulers.items()}
    return [scheduler.state_dict() for scheduler in schedulers]


def _to_send(read: dict[str, Any]) -> dict[str, Any]:
    """What ranks other than 0 get of a file: no large tensor, but for modules' extra state, which no rank shards."""
    sent = placeholders(read)
    extra = {name: value for name, value in read['state_dict'].items() if is_extra_state(name)}
    return dict(sent, state_dict={**sent['state_dict'], **extra})


def _load_extra_states(model: nn.Module, wanted: Any, saved: dict[str, Any], revise_keys: Any) -> None:
    extra = {name: value for name, value in saved.items() if is_extra_state(name)}
    pairs = [
        (value, torch.empty(value.shape, dtype=value.dtype))
        for value in extra.values()
        if isinstance(value, SavedTensor)
    ]
    load_saved(pairs)
    filled = {id(value): tensor for value, tensor in pairs}
    whole = {name: filled.get(id(value), value) for name, value in extra.items()}
    load_extra_states(model, wanted, whole, revise_keys)


def bare_model(model: nn.Module) -> nn.Module:
    """Take the model out of what is around it.

    Args:
        model (nn.Module): A model, a ZeroModelWrapper, or one that merges test-time augmentations of a model.

    Returns:
        nn.Module: The model that is sharded and whose weights a checkpoint holds.
    """
    return model.module if isinstance(model, (ZeroModelWrapper, BaseTTAModel)) else model
