"""How ZeroRunner saves and loads: collectively, at every stage."""

import logging
import re
import time
from collections.abc import Sequence
from typing import Any

import mmengine
import torch.distributed as dist
from mmengine.fileio import join_path
from mmengine.logging import print_log
from mmengine.model import BaseTTAModel
from mmengine.runner import Runner
from mmengine.runner.checkpoint import _load_checkpoint_to_model
from mmengine.utils import get_git_hash
from torch import Tensor, nn

from mmzero.checkpoint import (
    gather_random_states,
    matching_names,
    placeholders,
    plain,
    random_state,
    read_checkpoint,
    write_checkpoint,
)
from mmzero.engines import on_rank0
from mmzero.errors import CheckpointError
from mmzero.hooks import RandomStateHook
from mmzero.version import __version__
from mmzero.wrappers import ZeroModelWrapper


class CheckpointMixin(Runner):
    """The checkpoint methods of ZeroRunner."""

    model: Any
    _read: tuple[str, dict] | None
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
        """Save one full ``.pth`` in the OpenMMLab layout. Collective: call it on every rank.

        Tensors are gathered one at a time and kept on rank 0's CPU.

        Args:
            out_dir (str): Folder.
            filename (str): Name of the file.
            file_client_args (dict, optional): As Runner's, deprecated there: use ``backend_args``.
            save_optimizer (bool): Save the optimizer's state. Defaults to True.
            save_param_scheduler (bool): Save the schedulers' states. Defaults to True.
            meta (dict, optional): Further meta data. Defaults to None.
            by_epoch (bool): Whether the number of the checkpoint counts epochs. Defaults to True.
            backend_args (dict, optional): As MMEngine's file backends. Defaults to None.

        Raises:
            CheckpointError: On every rank, if rank 0 could not write it.
        """
        checkpoint: dict[str, Any] = dict(meta=self._meta(meta or {}, by_epoch))
        if not isinstance(self.model, ZeroModelWrapper):
            raise RuntimeError('save_checkpoint: the model is not sharded yet; call train() first')
        checkpoint['state_dict'] = self.model.engine.model_state()
        checkpoint['message_hub'] = self.message_hub.state_dict()
        if save_optimizer:
            checkpoint['optimizer'] = self.optim_wrapper.state_dict()
        if save_param_scheduler and self.param_schedulers is not None:
            checkpoint['param_schedulers'] = [scheduler.state_dict() for scheduler in self.param_schedulers]
        state = random_state()
        self._random_state_hook().continue_from(state)
        checkpoint['random_states'] = gather_random_states(state)
        path = join_path(out_dir, filename, backend_args=backend_args or file_client_args)
        on_rank0(lambda: self._write(checkpoint, path, backend_args or file_client_args))

    def _write(self, checkpoint: dict[str, Any], path: str, backend_args: dict | None) -> None:
        # As in Runner on the main process only, where the state is.
        self.call_hook('before_save_checkpoint', checkpoint=checkpoint)
        write_checkpoint(plain(checkpoint), path, backend_args)

    def _meta(self, meta: dict, by_epoch: bool) -> dict:
        epoch, done = (self.epoch + 1, self.iter) if by_epoch else (self.epoch, self.iter + 1)
        dataset = self.train_dataloader.dataset
        extra = dict(dataset_meta=dataset.metainfo) if hasattr(dataset, 'metainfo') else {}
        return {
            'epoch': epoch,
            'iter': done,
            **meta,
            **extra,
            'cfg': self.cfg.pretty_text,
            'seed': self.seed,
            'experiment_name': self.experiment_name,
            'time': time.strftime('%Y%m%d_%H%M%S', time.localtime()),
            'mmengine_version': mmengine.__version__ + get_git_hash(),
            'mmzero_version': __version__,
            'world_size': self.world_size,
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
        if self._read is not None and self._read[0] == filename:
            (_, known), self._read = self._read, None
            return known
        read = on_rank0(lambda: read_checkpoint(filename))
        box: list[Any] = [None if read is None else placeholders(read)]
        dist.broadcast_object_list(box, src=0)
        checkpoint: dict[str, Any] = box[0] if read is None else read
        self.call_hook('after_load_checkpoint', checkpoint=checkpoint)
        model = bare_model(self.model)
        if self._wrapper is None:
            on_rank0(lambda: _load_into_real(model, checkpoint, filename, strict, revise_keys))
        else:
            state = on_rank0(lambda: _fitting_state(model, checkpoint['state_dict'], filename, strict, revise_keys))
            self._wrapper.engine.load_model_state(state or {})
        self.logger.info(f'loaded weights from {filename}')
        return checkpoint

    def _random_state_hook(self) -> RandomStateHook:
        return next(hook for hook in self.hooks if isinstance(hook, RandomStateHook))

    def resume(self, filename: str, *args: Any, **kwargs: Any) -> None:
        """Resume weights, optimizer, schedulers, counters and random states. Collective.

        Args:
            filename (str): The checkpoint.
            *args: As Runner's.
            **kwargs: As Runner's.
        """
        checkpoint = self.load_checkpoint(filename)
        self._read = (filename, checkpoint)
        states = checkpoint.get('random_states')
        super().resume(filename, *args, **kwargs)
        self._read = None
        if states is not None and len(states) == self.world_size:
            self._random_state_hook().continue_from(states[self.rank])
        else:
            self.logger.warning(
                f'{filename} holds random states of {len(states or [])} rank(s) and this run has {self.world_size}: '
                'noise and dropout will not be those of the unbroken run'
            )


def bare_model(model: nn.Module) -> nn.Module:
    """Take the model out of what is around it.

    Args:
        model (nn.Module): A model, a ZeroModelWrapper, or one that merges test-time augmentations of a model.

    Returns:
        nn.Module: The model that is sharded and whose weights a checkpoint holds.
    """
    return model.module if isinstance(model, (ZeroModelWrapper, BaseTTAModel)) else model


def _load_into_real(
    model: nn.Module, checkpoint: dict, filename: str, strict: bool, revise_keys: Sequence[tuple[str, str]]
) -> None:
    """Load into a model that is not sharded yet, by MMEngine's own function."""
    _fitting_names(model, _revised(checkpoint['state_dict'], revise_keys), filename)
    _load_checkpoint_to_model(model, checkpoint, strict, revise_keys=list(revise_keys))


def _fitting_state(
    model: nn.Module,
    saved: dict[str, Tensor],
    filename: str,
    strict: bool,
    revise_keys: Sequence[tuple[str, str]],
) -> dict[str, Tensor]:
    """Choose what of a checkpoint goes into the shards; rank 0's work, without communication."""
    state = _revised(saved, revise_keys)
    wanted = model.state_dict()
    fitting = _fitting_names(model, state, filename)
    missing, left = sorted(wanted.keys() - fitting), sorted(state.keys() - fitting)
    if strict and (missing or left):
        raise CheckpointError(f'{filename} does not fit the model: missing: {missing[:5]}; left over: {left[:5]}')
    if missing or left:
        print_log(
            f'{filename}: not loaded, since missing or of another shape: {missing}; left over: {left}',
            'current',
            logging.WARNING,
        )
    return {name: state[name] for name in fitting}


def _fitting_names(model: nn.Module, state: dict[str, Tensor], filename: str) -> set[str]:
    wanted = {name: tensor.shape for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    common = matching_names(state, wanted, filename)
    fitting = {name for name in common if state[name].shape == wanted[name]}
    if common and not fitting:
        name = min(common)
        raise CheckpointError(
            f'{filename}: no weight has the shape that the model wants; {name} is {tuple(state[name].shape)} there and '
            f'{tuple(wanted[name])} in the model. Is it a checkpoint of a model of another size?'
        )
    return fitting


def _revised(state: dict[str, Tensor], revise_keys: Sequence[tuple[str, str]]) -> dict[str, Tensor]:
    for pattern, replacement in revise_keys:
        state = {re.sub(pattern, replacement, name): value for name, value in state.items()}
    return state
