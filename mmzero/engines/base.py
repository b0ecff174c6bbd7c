"""The protocol that every engine fulfils.

[Note: the engine protocol]
This is the order in which the pair calls an engine, and what each call promises.

Once:

 1. ``check_plan(model, plan)`` refuses what cannot be trained, ``forecast(plan)`` says what a step will cost. The model
    may be on meta; no process group is needed.
 2. ``shard(model, plan)`` gives every rank rank 0's parameters and buffers and enters each parameter in the table of
    :func:`engines_of`. The parameter objects stay for as long as the model; their storage, and with it what ``.data``
    and ``.grad`` show, is the engine's from here on.
 3. ``check_autocast(dtype)`` and ``check_clip(clip)`` refuse what a step could not honour, ``check_training(training)``
    what the engine's own options say otherwise.
 4. ``bind(optimizer, loss_scale)`` takes the optimizer that was built on those parameters, and returns it. DeepSpeed,
    which needs model and optimizer together, partitions here. The groups keep their order, and what schedulers write
    into them (lr, weight_decay, momentum) holds from the next step on. Which tensors their ``params`` list is the
    engine's business; groups without a trainable parameter may go.

Per micro-batch:

 5. ``micro_step(is_last)`` announces it.
 6. ``forward(...)`` runs the model.
 7. ``backward(loss)`` averages the gradients over ranks (by ``step`` at the latest) and adds them up over the
    micro-batches. It does not divide by their number, which MMEngine has done. In float16 it scales the loss.

Per optimizer step, after the last micro-batch:

 8. ``step(options)`` completes the gradients, scales them back, clips them, steps, and tells their norm before
    clipping. It is one call, since DeepSpeed clips within its step and knows the norm only afterwards. Where a gradient
    of any rank is not finite, every rank skips the step: in float16 always, otherwise if the options say so.
 9. ``optimizer.zero_grad()`` is MMEngine's own call on the bound optimizer; after it no gradient is left.

In val and test: ``evaluate_only`` first where no optimizer will be bound, then ``following_forwards`` around a loop of
which ranks may have different numbers of forwards; where an engine's forwards communicate, a rank that has no more
takes part in those of others.

Between steps, collective: ``model_state``, ``optimizer_state`` and their ``load_`` counterparts, and by shards
``sharded_state`` and ``state_to_save``, ``optimizer_shards`` and its counterpart. The next step starts from what was
loaded.
``scaler_state`` is the same on every rank and needs no collective.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from mmzero.config import LossScale, ZeroConfig
from mmzero.engines.anomalies import Anomalies
from mmzero.engines.forecast import Forecast
from mmzero.engines.local_parts import LocalParts
from mmzero.engines.loops import Loop
from mmzero.engines.meeting import meet
from mmzero.engines.named_state import with_numbers
from mmzero.engines.options import Clip, StepOptions, StepOutcome, Training
from mmzero.engines.shard_state import LoadShards, load_optimizer_shards, optimizer_shards
from mmzero.engines.state import (
    gather_optimizer,
    gather_tensors,
    group_names,
    scatter_optimizer,
    scatter_tensors,
)
from mmzero.errors import ConfigError, PlanError
from mmzero.policies import Gathering, WrapPlan, WrapPolicy

_ENGINES = WeakIdKeyDictionary()


def engines_of(params: Iterable[nn.Parameter]) -> list['Engine']:
    """Look up the engines that sharded some parameters.

    Args:
        params (Iterable[nn.Parameter]): An optimizer's parameters.

    Returns:
        list[Engine]: One, or several of children of one model that are sharded as models of their own.

    Raises:
        ConfigError: If no engine knows a parameter, because the optimizer was built before sharding or without
            a ZeroModelWrapper, or if they are of two models.
    """
    found = {id(engine): engine for engine in (_ENGINES.get(param) for param in params)}
    engines = [engine for engine in found.values() if engine is not None]
    if engines and len(engines) == len(found) and len({id(engine.model) for engine in engines}) == 1:
        return engines
    if len(engines) < len(found) or not engines:
        raise ConfigError(
            [
                'optim_wrapper.optimizer: holds parameters that no ZeroModelWrapper has sharded. Build the model '
                'wrapper first and the optimizer on its parameters; in a config, use '
                "runner_type='mmzero.ZeroRunner' with model_wrapper_cfg=dict(type='ZeroModelWrapper', ...)"
            ]
        )
    raise ConfigError(['optim_wrapper.optimizer: holds parameters of two models; give each its own'])


class Engine(ABC):
    """Sharding of one model, and the step of its optimizer.

    Args:
        config (ZeroConfig): The checked config.
        device (torch.device): Where this rank computes.
    """

    shards = True
    """Whether parameters become shards, so that no rank holds the model."""

    waits_in_backward = False
    """Whether ranks wait for each other inside of autograd's engine, where no stack shows it."""

    reduces_root = False
    """Whether what is in no unit gets ``precision.param_dtype`` too."""

    def __init__(self, config: ZeroConfig, device: torch.device) -> None:
        self.config = config
        self.device = device
        self.model: nn.Module | None = None
        self.optimizer: Optimizer | None = None
        self.anomalies: Anomalies | None = None
        self._named: dict[str, nn.Parameter] = {}
        # Samples of a rank and micro-batch, where whoever made the engine knows it.
        self.batch_size: int | None = None

    @property
    def parts(self) -> list['Engine']:
        """The engines whose parameters it speaks for: itself, or one per child of the model."""
        return [self]

    def choose_units(self, model: nn.Module, policy: WrapPolicy) -> WrapPlan:
        """Let a policy choose the units.

        Args:
            model (nn.Module): The model; its parameters may be on the meta device.
            policy (WrapPolicy): The policy.

        Returns:
            WrapPlan: The plan, before the config's rules for single units.
        """
        return policy(model)

    def complete_plan(self, model: nn.Module, plan: WrapPlan) -> WrapPlan:
        """Add to a plan what the engine needs to train it; before a process group exists.

        Args:
            model (nn.Module): The model; its parameters may be on the meta device.
            plan (WrapPlan): Its units.

        Returns:
            WrapPlan: The plan as it will be sharded.
        """
        return plan

    def check_plan(self, model: nn.Module, plan: WrapPlan) -> None:  # noqa: B027
        """Refuse units that the engine cannot train; before a process group exists.

        Args:
            model (nn.Module): The model; its parameters may be on the meta device.
            plan (WrapPlan): Its units.

        Raises:
            PlanError: If a unit cannot be trained as the config asks.
        """

    def gathering(self, world_size: int) -> Gathering:
        """Say among how many ranks units are sharded, and how they are gathered.

        Args:
            world_size (int): Number of ranks.

        Returns:
            Gathering: What turns a plan into bytes.

        Raises:
            ValueError: If the config's mesh does not fill the world.
        """
        return Gathering(*self.config.mesh.sizes(world_size))

    def forecast(self, plan: WrapPlan, *, world_size: int, micro_batches: int, state_itemsize: int) -> Forecast:
        """Say what memory and traffic one optimizer step takes. Needs neither a model nor a process group.

        Args:
            plan (WrapPlan): The units.
            world_size (int): Number of ranks.
            micro_batches (int): Forwards and backwards per optimizer step.
            state_itemsize (int): Bytes of optimizer state per trained parameter: 8 for Adam in fp32.

        Returns:
            Forecast: The forecast for one rank.

        Raises:
            PlanError: If the engine has none.
        """
        raise PlanError(f'{type(self).__name__} cannot forecast memory and traffic yet')

    @abstractmethod
    def shard(self, model: nn.Module, plan: WrapPlan) -> None:
        """Shard the model in place; afterwards every rank has rank 0's parameters and buffers.

        Args:
            model (nn.Module): Real on rank 0; on other ranks parameters may be on the meta device.
            plan (WrapPlan): Its units.
        """

    @abstractmethod
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward so that gradients are synchronised."""

    @abstractmethod
    def micro_step(self, is_last: bool) -> None:
        """Announce a forward and backward.

        Args:
            is_last (bool): Whether the optimizer steps after it.
        """

    def after_forward(self) -> None:  # noqa: B027
        """Be told that the forward of a micro-batch is over; the next one may belong to another."""

    def adopt(self, model: nn.Module, name: str = '') -> None:
        """Remember the sharded model and that its parameters, or those of a child, are this engine's."""
        self.model = model
        prefix = f'{name}.' if name else ''
        self._named = {f'{prefix}{own}': param for own, param in model.get_submodule(name).named_parameters()}
        for param in self._named.values():
            _ENGINES[param] = self
        if self.config.detect_anomaly and not name:
            self.anomalies = Anomalies(model)

    def named_params(self) -> dict[str, nn.Parameter]:
        """The parameters that it speaks for, by the model's names. While a unit is gathered, the model lists others."""
        return {name: param for part in self.parts for name, param in part._named.items()}

    def let_model_step(self) -> None:  # noqa: B027
        """Be told that the model's own ``train_step`` orders forwards, backwards and steps, several of each."""

    def evaluate_only(self) -> None:  # noqa: B027
        """Be told, once the model is sharded, that it will be evaluated and not trained. Collective."""

    def bind(self, optimizer: Optimizer, loss_scale: LossScale | None = None) -> Optimizer:
        """Take the optimizer that was built on the sharded parameters.

        Args:
            optimizer (Optimizer): The optimizer.
            loss_scale (LossScale, optional): How the loss is scaled. Defaults to None: it is not.

        Returns:
            Optimizer: The one whose groups schedulers write to from now on.
        """
        self.optimizer = optimizer
        return optimizer

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run backward.

        Args:
            loss (Tensor): The loss of this micro-batch, scaled for accumulation already.
            **kwargs: As ``torch.Tensor.backward``.
        """
        loss.backward(**kwargs)

    def check_autocast(self, dtype: torch.dtype | None) -> None:  # noqa: B027
        """Refuse an autocast dtype that would undo what the engine saves.

        Args:
            dtype (torch.dtype, optional): The dtype of the forward; None is no autocast.

        Raises:
            ConfigError: If it does.
        """

    def check_clip(self, clip: Clip | None) -> None:  # noqa: B027
        """Refuse a clipping that the engine cannot do.

        Args:
            clip (Clip, optional): What every step will be given; None is no clipping.

        Raises:
            ConfigError: If it cannot.
        """

    def check_training(self, training: Training) -> None:  # noqa: B027
        """Refuse a run that says other things than the engine's own options, and remember what it says.

        Args:
            training (Training): What the run says.

        Raises:
            ConfigError: If the options say otherwise; it lists all faults.
        """

    @abstractmethod
    def step(self, options: StepOptions | None = None, **kwargs: Any) -> StepOutcome:
        """Complete the gradients, clip them and step the optimizer. Collective.

        Args:
            options (StepOptions, optional): What else is done. Defaults to None: nothing.
            **kwargs: As ``torch.optim.Optimizer.step``.

        Returns:
            StepOutcome: What was done.
        """

    def reduced_precision(self) -> AbstractContextManager:
        """The context of a forward in val and test, for units of reduced precision."""
        return nullcontext()

    def watching(self, kind: str) -> AbstractContextManager[Callable[[Any], None]]:
        """The context of an iteration, in which a use of the model that the engine cannot serve is told by name.

        Args:
            kind (str): 'train', 'val' or 'test'.

        Returns:
            ContextManager: Gives a function that checks the loss.
        """
        return nullcontext(lambda loss: None)

    def following_forwards(self, loop: Loop, present: Sequence[bool]) -> AbstractContextManager[Callable[[], None]]:
        """The context of a loop of forwards in val or test, of which ranks may have different numbers. Collective.

        Args:
            loop (Loop): The loop; forwards are its steps.
            present (Sequence[bool]): Which ranks have a batch.

        Returns:
            ContextManager: Gives a function that takes part in one forward of other ranks.
        """
        return nullcontext(self._cannot_follow)

    def _cannot_follow(self) -> None:
        raise PlanError(
            f'{type(self).__name__} cannot take part in forwards of other ranks yet; give all ranks the same number of '
            "batches, such as by sampler=dict(type='DefaultSampler', round_up=True)"
        )

    def without_gradients(self) -> AbstractContextManager:
        """The context of a backward of zeros, by a rank that has no batch: it uses no parameter."""
        return nullcontext()

    def local_parts(self) -> LocalParts:
        """Mirror what this rank holds, for code that averages weights.

        Returns:
            LocalParts: The mirror; :meth:`refresh` tells the engine that it was written into.
        """
        if self.model is None:
            raise RuntimeError('the engine has sharded no model yet')
        return LocalParts(self.model)

    def refresh(self) -> None:  # noqa: B027
        """Be told that weights were written into the parameters' storage; the next forward computes with them."""

    def model_state(self, only: Collection[str] | None = None) -> dict[str, Tensor]:
        """Gather parameters and persistent buffers, one tensor at a time. Collective.

        Args:
            only (Collection[str], optional): Names of the model's state dict, the same on every rank. Defaults to
                None: all.

        Returns:
            dict[str, Tensor]: Clean names to full CPU tensors on rank 0; empty on other ranks.
        """
        state = self.sharded_state()
        return gather_tensors(state if only is None else {n: value for n, value in state.items() if n in only})

    def load_model_state(self, state: dict[str, Tensor]) -> None:
        """Fill parameters and persistent buffers from rank 0's full tensors. Collective.

        Args:
            state (dict[str, Tensor]): Full tensors by name on rank 0; ignored on other ranks.
        """
        scatter_tensors(self.sharded_state(), state)

    def sharded_state(self) -> dict[str, Tensor]:
        """What this rank holds of the model: what it reads of a checkpoint goes into the same memory.

        Returns:
            dict[str, Tensor]: By the names of the model's state dict, a shard (one of :data:`mmzero.engines.SHARDS`),
            or what each rank has whole; on meta what only :meth:`load_model_state` can fill.
        """
        if self.model is None:
            raise RuntimeError('the engine has sharded no model yet')
        return self.model.state_dict()

    def state_to_save(self) -> dict[str, Tensor]:
        """What this rank writes of the model, into a checkpoint in parts. Collective.

        Returns:
            dict[str, Tensor]: Shards and whole tensors by the names of the model's state dict; what rank 0 alone has
            only there.
        """
        return self.sharded_state()

    def optimizer_state(self) -> dict[str, Any]:
        """Gather the optimizer's state, one tensor at a time, in torch's own layout. Collective.

        Returns:
            dict: ``Optimizer.state_dict()`` of the unsharded optimizer on rank 0, with the names of the groups'
                parameters as ``param_names``, which torch and MMEngine pass over; empty on other ranks.
        """
        assert_bound(self)
        state = gather_optimizer(self.optimizer)  # type: ignore[arg-type]
        if state:
            state['param_names'] = group_names(self.optimizer, self.named_params())  # type: ignore[arg-type]
        return state

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        """Fill the optimizer's state from rank 0's full one. Collective.

        Args:
            state (dict): ``Optimizer.state_dict()`` of an unsharded optimizer on rank 0, with parameters by number or
                by name; ignored elsewhere.

        Raises:
            CheckpointError: On every rank, if the groups are not those of this run.
        """
        assert_bound(self)
        # Before ranks communicate about it.
        meet("load the optimizer's state")
        names = group_names(self.optimizer, self.named_params())  # type: ignore[arg-type]
        scatter_optimizer(self.optimizer, with_numbers(state, names), names)  # type: ignore[arg-type]

    def optimizer_shards(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Take the optimizer's state apart, for a checkpoint of which each rank writes its shards. Collective.

        Returns:
            tuple[dict[str, Tensor], dict]: As :func:`mmzero.engines.shard_state.optimizer_shards`.
        """
        assert_bound(self)
        return optimizer_shards(self.optimizer, self.named_params())  # type: ignore[arg-type]

    def load_optimizer_shards(self, rest: dict[str, Any], load: LoadShards) -> None:
        """Put the optimizer's state together again. Collective.

        Args:
            rest (dict): As :meth:`optimizer_shards` gave it, the same on every rank.
            load (LoadShards): Reads shards by name.

        Raises:
            CheckpointError: On every rank, if the groups are not those of this run.
        """
        assert_bound(self)
        load_optimizer_shards(self.optimizer, self.named_params(), rest, load)  # type: ignore[arg-type]

    def scaler_state(self) -> dict[str, Any]:
        """The state of the loss scale.

        Returns:
            dict: ``torch.amp.GradScaler.state_dict()``; empty where the loss is not scaled.
        """
        return {}

    def load_scaler_state(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Go on from a saved loss scale.

        Args:
            state (dict): As :meth:`scaler_state` gave it, the same on every rank; not used where the loss is not
                scaled, or has a fixed scale.
        """


def assert_bound(engine: Engine) -> None:
    """Raise where an optimizer is needed and none is bound.

    Raises:
        RuntimeError: If ``bind`` was not called.
    """
    if engine.optimizer is None:
        raise RuntimeError('no optimizer is bound to the engine; build a ZeroOptimWrapper on its parameters')
