"""The model wrapper."""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from mmengine.logging import print_log
from mmengine.model import BaseDataPreprocessor, BaseModel
from mmengine.optim import OptimWrapperDict
from mmengine.registry import MODEL_WRAPPERS
from mmengine.runner import Runner
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mmzero._compat import use_expandable_segments
from mmzero.checkpoint import clean_names, fitting_names
from mmzero.config import Faults, ZeroConfig, read_zero_config
from mmzero.engines import (
    accept_whole_tensors,
    build_engine,
    init_process_group,
    materialize_outside,
    modules_outside_of,
    plan_units,
    started,
)
from mmzero.engines.float32 import compute_in_float32
from mmzero.engines.watch import TRAIL, start_watch
from mmzero.errors import ConfigError
from mmzero.patches import apply_patches
from mmzero.planner import plan_report
from mmzero.policies import WrapPlan
from mmzero.wrappers.compilation import Compilation
from mmzero.wrappers.joining import evaluated, trained
from mmzero.wrappers.regions import build_budget, chosen_regions
from mmzero.wrappers.several import check_own_step, check_wrappers, each, has_own_step, standing_in
from mmzero.wrappers.stand_in import StandIn


@MODEL_WRAPPERS.register_module()
class ZeroModelWrapper(nn.Module):
    """A model sharded by ZeRO, with MMEngine's ``train_step``, ``val_step`` and ``test_step``.

    Building it patches activation checkpointing, plans the units, shards the model in place and gives every rank
    rank 0's parameters and buffers. Without a process group it makes one: from torchrun's environment, or of this
    process alone. ``model.module`` is the model itself, its names and class tree untouched.

    Args:
        module (nn.Module): The model, real on rank 0; on other ranks its parameters may be on the meta device.
        stage (int, optional): ZeRO stage, 0 to 3. Defaults to None: that of ``engine_options``, or 3.
        **fields: The other fields of :class:`mmzero.config.ZeroConfig`.

    Raises:
        ConfigError: If fields are wrong; it lists all of them.
        PlanError: If the policy, a module name or the ranks' models do not fit.
    """

    def __init__(self, module: nn.Module, stage: int | None = None, **fields: Any) -> None:
        super().__init__()
        _refuse_plain_runner(sys._getframe(1))
        init_process_group('pytorch' if dist.is_torchelastic_launched() else 'none')
        faults = Faults()
        fields |= {} if stage is None else dict(stage=stage)
        self.config = read_zero_config(fields, 'model_wrapper_cfg', faults)
        _check_mesh(self.config, faults)
        faults.raise_if_any()
        if any(isinstance(param, DTensor) for param in module.parameters()):
            raise ConfigError([f'model: this {type(module).__name__} is sharded already; build a new one'])
        if self.config.expandable_segments and torch.cuda.is_available():
            use_expandable_segments()
        checkpointing = self.config.activation_checkpointing
        self.patched = apply_patches(module, checkpointing, chosen_regions(module, checkpointing))
        self.engine = build_engine(self.config)
        try:
            self.plan: WrapPlan = plan_units(module, self.engine, dist.get_world_size())
        except Exception:
            # The user mends the policy and wraps the same model again.
            self.patched.undo()
            raise
        self._announce()
        self.budget = build_budget(checkpointing, self.patched, self.plan, _report)
        outside = materialize_outside(module, self.engine.device)
        for path, size in outside.items():
            _log(f'{path}: lies outside of the module tree; {size / 2**20:.2f} MiB are whole on every rank')
        self.compilation = Compilation(module, self.plan, self.config.compile, self.patched.regions, _report)
        self.engine.shard(module, self.plan)
        for part in (module, *modules_outside_of(module).values()):
            compute_in_float32(part, self.engine.device.type)
        start_watch(self.config.watch, self.engine.waits_in_backward)
        accept_whole_tensors(module)
        self.module: Any = module
        self._steps: Counter[str] = Counter()
        self.stand_in = StandIn(module)
        for part in (module, *modules_outside_of(module).values()):
            for child in part.modules():
                if isinstance(child, BaseDataPreprocessor):
                    # Tells it where to put batches; its buffers are there already.
                    child.to(self.engine.device)

    def _announce(self) -> None:
        report = plan_report(self.engine, self.plan, world_size=dist.get_world_size())
        _log(f'{report.text()}\nactivation checkpointing (non-re-entrant): {self.patched}')
        if self.patched.left:
            _log(
                f'{", ".join(self.patched.left)}: checkpointing of their own stays on (with_cp=True or its like), '
                'which may be re-entrant; no patch is registered for them. Name the blocks in activation_checkpointing '
                'and switch theirs off, or register a patch (projects/custom_checkpoint_patch)',
                level=30,
            )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward.

        Args:
            *args: As the model's.
            **kwargs: As the model's.

        Returns:
            Any: As the model's.
        """
        return self.engine.forward(*args, **kwargs)

    def join(self, loader: Iterable, kind: str = 'train') -> Iterator[Any]:
        """Iterate over this rank's batches where ranks may have different numbers of them. Collective.

        In val and test a rank that has no more batches takes part in the forwards of the others, without any results,
        until all have ended. In training it gets a copy of its first batch then, as long as another rank trains: a
        :meth:`train_step` with that has no gradient, changes no running statistics, and makes the ranks step together.
        Gradients stay averages over all ranks, as under torch's ``Join`` with ``divide_by_initial_world_size=True``.

        Args:
            loader (Iterable): This rank's batches; its length is not needed.
            kind (str): 'train' for train_step, 'val' for val_step, 'test' for test_step. Defaults to 'train'.

        Yields:
            Any: A batch.

        Raises:
            ConfigError: If the kind is another.
        """
        if kind not in ('train', 'val', 'test'):
            raise ConfigError([f"join: got kind={kind!r}; allowed: 'train', 'val', 'test'"])
        if dist.get_world_size() == 1:
            yield from loader
        elif kind == 'train':
            yield from trained(loader, self.stand_in, self.engine.device)
        elif self.engine.shards:
            yield from evaluated(loader, kind, self.engine)
        else:
            yield from loader

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        """Forward, backward, and an optimizer step where gradient accumulation is due.

        Args:
            data (dict or tuple or list): A batch of the data loader.
            optim_wrapper (ZeroOptimWrapper or OptimWrapperDict): Built on this model's parameters; where it is several,
                or the model's children are sharded by themselves, the model's own ``train_step`` runs.

        Returns:
            dict[str, Tensor]: Losses for logging, of this rank's batch.
        """
        several = isinstance(optim_wrapper, OptimWrapperDict)
        check_wrappers(optim_wrapper, self.engine)
        step = self._own_train_step if several or self.config.separate else self._train_step
        started('its next train_step')
        anomalies = self.engine.anomalies
        with self._doing('train_step'), nullcontext() if anomalies is None else anomalies.explaining():
            with self.compilation.running(self._is_looked_at()):
                log_vars = self._maybe_stood_in(step, data, optim_wrapper)
        self.compilation.after_step()
        if self.stand_in.is_used:
            return log_vars
        if any(wrapper.skips.in_a_row for wrapper in each(optim_wrapper).values()):
            # It may be this batch that gave nan.
            self.stand_in.replace()
        return log_vars

    def _maybe_stood_in(self, step: Callable, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        if not self.stand_in.is_used:
            return step(data, optim_wrapper)
        with self.engine.without_gradients(), self.stand_in.kept_statistics(), standing_in(optim_wrapper):
            return step(data, optim_wrapper)

    def _is_looked_at(self) -> bool:
        is_first = self.engine.shards and self._steps['train_step'] == 1
        return is_first or (self.budget is not None and not self.budget.is_done)

    def _own_train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        if self._steps['train_step'] == 1:
            check_own_step(self.module, self.budget is not None)
            for path, wrapper in each(optim_wrapper).items():
                wrapper.be_one_of_several(path)
            self.engine.let_model_step()
        with self.engine.watching('train'), self.engine.reduced_precision():
            log_vars = self.module.train_step(data, optim_wrapper)
        if self._steps['train_step'] == 1:
            self._tell_of_idle_regions()
        return log_vars

    def _train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        with self.engine.watching('train') as check:
            with optim_wrapper.optim_context(self), self._budgeted():
                data = self.module.data_preprocessor(data, True)
                losses = BaseModel._run_forward(self, data, mode='loss')
            parsed, log_vars = self.module.parse_losses(losses)
            check(parsed)
        optim_wrapper.update_params(parsed)
        if self.budget is not None:
            self.budget.after_step()
        if self._steps['train_step'] == 1:
            self._tell_of_idle_regions()
            if has_own_step(self.module):
                _report(
                    f"model: the train_step of {self.plan.root.class_name} is not called, as under MMEngine's "
                    'wrappers; model_wrapper_cfg.separate=True, or several optimizers, call it',
                    True,
                )
        return log_vars

    def _budgeted(self) -> AbstractContextManager:
        return nullcontext() if self.budget is None else self.budget.forward()

    def _tell_of_idle_regions(self) -> None:
        idle = self.patched.never_run()
        if idle:
            _report(
                f'activation_checkpointing: no forward of {", ".join(idle)} was called in the first iteration, so that '
                'nothing is saved there; name modules that are called themselves',
                True,
            )

    @contextmanager
    def _doing(self, step: str) -> Iterator[None]:
        """Note for the watch which step of its kind this is."""
        self._steps[step] += 1
        TRAIL.note(f'in {step} {self._steps[step]}')
        try:
            yield
        finally:
            TRAIL.note(f'after {step} {self._steps[step]}')

    def val_step(self, data: Any) -> list:
        """Predict on a batch.

        Args:
            data (dict or tuple or list): A batch of the data loader.

        Returns:
            list: As the model's ``val_step``.
        """
        with self._doing('val_step'), self.engine.watching('val'), self.engine.reduced_precision():
            return self.module.val_step(data)

    def test_step(self, data: Any) -> list:
        """Predict on a batch.

        Args:
            data (dict or tuple or list): A batch of the data loader.

        Returns:
            list: As the model's ``test_step``.
        """
        return self.around(self.module.test_step)(data)

    def around(self, test_step: Callable[[Any], list]) -> Callable[[Any], list]:
        """Give the ``test_step`` of a model that calls this one what this one's has.

        Args:
            test_step (Callable[[Any], list]): Such as that of a BaseTTAModel, which calls the model inside.

        Returns:
            Callable[[Any], list]: The same, checked in its first iteration, with units in their precision.
        """

        def run(data: Any) -> list:
            with self._doing('test_step'), self.engine.watching('test'), self.engine.reduced_precision():
                return test_step(data)

        return run

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """This rank's part of the model's state, under the model's own names."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load weights: this rank's part, as :meth:`state_dict` gives it, or whole tensors, the same on every rank.

        Args:
            state_dict (Mapping[str, Any]): Weights by name. What wrappers put into names is stripped.
            *args: As ``torch.nn.Module.load_state_dict``.
            **kwargs: As ``torch.nn.Module.load_state_dict``.

        Returns:
            NamedTuple: Missing and unexpected names.

        Raises:
            CheckpointError: If no weight fits, so that nothing would be loaded.
        """
        wanted = self.module.state_dict()
        state = clean_names(state_dict, wanted)
        fitting_names(state, wanted, 'load_state_dict')
        return self.module.load_state_dict(state, *args, **kwargs)


def _check_mesh(config: ZeroConfig, faults: Faults) -> None:
    try:
        config.mesh.sizes(dist.get_world_size())
    except ValueError as error:
        faults.add('model_wrapper_cfg.mesh', str(error))


def _report(text: str, is_warning: bool) -> None:
    _log(text, level=30 if is_warning else 20)


def _log(text: str, level: int = 20) -> None:
    if dist.get_rank() == 0:
        print_log(text, logger='current', level=level)


def _refuse_plain_runner(frame: FrameType | None) -> None:
    """Fail where MMEngine's own Runner wraps, which would load weights into shards and step before them.

    A wrapper is not told who builds it, so the callers are looked at.
    """
    while frame is not None:
        caller = frame.f_locals.get('self') if frame.f_code.co_name == 'wrap_model' else None
        if isinstance(caller, Runner):
            raise ConfigError(
                [
                    f'runner_type: {type(caller).__name__} cannot train a ZeroModelWrapper, since it loads weights '
                    "and moves the model in another order; add runner_type = 'mmzero.ZeroRunner' to the config"
                ]
            )
        frame = frame.f_back
