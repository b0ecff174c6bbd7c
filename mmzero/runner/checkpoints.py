"""How ZeroRunner saves and loads: collectively, at every stage."""

import time
from typing import Any

import mmengine
import torch.distributed as dist
from mmengine.fileio import join_path
from mmengine.runner import Runner
from mmengine.runner.checkpoint import _load_checkpoint_to_model
from mmengine.utils import get_git_hash
from torch import nn

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
from mmzero.hooks import RandomStateHook
from mmzero.version import __version__
from mmzero.wrappers import ZeroModelWrapper


class CheckpointMixin(Runner):
    """The checkpoint methods of ZeroRunner."""

    _read: tuple[str, dict] | None
    _prepared: bool

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
        if isinstance(self.model, ZeroModelWrapper):
            checkpoint['state_dict'] = self.model.engine.model_state()
        else:
            raise RuntimeError('save_checkpoint: the model is not sharded yet; call train() first')
        checkpoint['message_hub'] = self.message_hub.state_dict()
        if save_optimizer:
            checkpoint['optimizer'] = self.optim_wrapper.state_dict()
        if save_param_scheduler and self.param_schedulers is not None:
            checkpoint['param_schedulers'] = [scheduler.state_dict() for scheduler in self.param_schedulers]
        state = random_state()
        self._random_state_hook().continue_from(state)
        checkpoint['random_states'] = gather_random_states(state)
        self.call_hook('before_save_checkpoint', checkpoint=checkpoint)
        path = join_path(out_dir, filename, backend_args=backend_args or file_client_args)
        on_rank0(lambda: write_checkpoint(plain(checkpoint), path, backend_args or file_client_args))

    def _meta(self, meta: dict, by_epoch: bool) -> dict:
        epoch, done = (self.epoch + 1, self.iter) if by_epoch else (self.epoch, self.iter + 1)
        dataset = self.train_dataloader.dataset
        extra = dict(dataset_meta=dataset.metainfo) if hasattr(dataset, 'metainfo') else {}
        return dict(
            dict(epoch=epoch, iter=done),
            **meta,
            **extra,
            cfg=self.cfg.pretty_text,
            seed=self.seed,
            experiment_name=self.experiment_name,
            time=time.strftime('%Y%m%d_%H%M%S', time.localtime()),
            mmengine_version=mmengine.__version__ + get_git_hash(),
            mmzero_version=__version__,
            world_size=self.world_size,
        )

    def load_checkpoint(  # type: ignore[override]
        self,
        filename: str,
        map_location: Any = 'cpu',
        strict: bool = False,
        revise_keys: tuple = (),
    ) -> dict[str, Any]:
        """Load weights on every rank from a file that rank 0 reads. Collective.

        Args:
            filename (str): As :func:`mmzero.checkpoint.read_checkpoint`.
            map_location: Unused; the file is read to the CPU and its weights go where the model is.
            strict (bool): Refuse missing and unexpected weights. Defaults to False.
            revise_keys (tuple): Pairs of a pattern and its replacement in names, as Runner's. What wrappers put
                into names is stripped anyway. Defaults to none.

        Returns:
            dict: The checkpoint; on ranks other than 0 its large tensors are on meta.

        Raises:
            CheckpointError: On every rank, if the file cannot be read or none of its weights fits.
        """
        if self._read is not None and self._read[0] == filename:
            (_, checkpoint), self._read = self._read, None
            return checkpoint
        checkpoint = on_rank0(lambda: read_checkpoint(filename))
        box = [placeholders(checkpoint) if checkpoint is not None else None]
        dist.broadcast_object_list(box, src=0)
        checkpoint = box[0] if checkpoint is None else checkpoint
        self.call_hook('after_load_checkpoint', checkpoint=checkpoint)
        on_rank0(lambda: self._fit(checkpoint, filename))
        if self._prepared and isinstance(self.model, ZeroModelWrapper):
            self.model.engine.load_model_state(checkpoint['state_dict'])
        else:
            on_rank0(lambda: _load_checkpoint_to_model(self.model, checkpoint, strict, revise_keys=list(revise_keys)))
        self.logger.info(f'loaded weights from {filename}')
        return checkpoint

    def _fit(self, checkpoint: dict, filename: str) -> None:
        model = self.model.module if isinstance(self.model, ZeroModelWrapper) else self.model
        matching_names(checkpoint['state_dict'], _own_names(model), filename)

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
        if states is not None and len(states) == self.world_size:
            self._random_state_hook().continue_from(states[self.rank])
        else:
            self.logger.warning(
                f'{filename} holds random states of {len(states or [])} rank(s) and this run has {self.world_size}: '
                'noise and dropout will not be those of the unbroken run'
            )


def _own_names(model: nn.Module) -> list[str]:
    return [name for name, _ in [*model.named_parameters(), *model.named_buffers()]]
