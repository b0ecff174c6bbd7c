"""Whole weights out of a model that DeepSpeed has partitioned, and into it.

[Note: masters]
Under 16 bit the model's own parameters are rounded copies; what the optimizer steps, and what counts, are DeepSpeed's
float32 ones. DeepSpeed makes them of the rounded copies, and at its first step overwrites what is loaded into these. So
here masters get the values from before the rounding, a checkpoint holds masters, and what is loaded goes into both.
A frozen parameter has no master. Rank 0's host keeps its float32 value, which a checkpoint holds for as long as the
model's copy is that value rounded.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mmzero.engines.deepspeed.fragments import Fragments
from mmzero.engines.deepspeed.precision import HALF
from mmzero.engines.flat_shard import FlatShard, is_meta
from mmzero.engines.materialize import broadcast
from mmzero.engines.state import gather, gather_tensors, scatter_tensors


class Weights:
    """Reads and writes the weights of a model.

    Args:
        model (nn.Module): The model, whole on every rank until DeepSpeed partitions it.
        device (torch.device): Where this rank computes.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model = model
        self.device = device
        self.deepspeed: Any = None
        self.fragments: Fragments | None = None
        self._exact: dict[nn.Parameter, Tensor] = {}
        self._frozen: dict[nn.Parameter, Tensor] = {}
        self._rounded = False

    def keep_float32(self) -> None:
        """Be told that DeepSpeed is about to round parameters: as much memory as they take until it has."""
        self._rounded = True
        self._exact = {param: param.data for param in self.model.parameters() if param.requires_grad}
        if dist.get_rank() == 0:
            frozen = (param for param in self.model.parameters() if not param.requires_grad)
            self._frozen = {param: param.detach().cpu().clone() for param in frozen}

    def partitioned(self, deepspeed: Any, fragments: Fragments | None) -> None:
        """Be told that DeepSpeed has partitioned the model.

        Args:
            deepspeed: The package.
            fragments (Fragments, optional): What of trained parameters this rank holds; None where none are trained.
        """
        self.deepspeed, self.fragments = deepspeed, fragments
        for param in list(self._exact):
            if fragments is not None and param in fragments.of:
                self._write_master(param, self._exact[param])
            del self._exact[param]

    def _write_master(self, param: nn.Parameter, whole: Tensor) -> None:
        fragments: Fragments = self.fragments  # type: ignore[assignment]
        fragments.own(param).copy_(fragments.cut(param, whole))

    def whole(self, tensors: list[Any], modifier_rank: int | None = None) -> AbstractContextManager:
        """Have tensors whole on every rank, where they are parameters of stage 3.

        Args:
            tensors (list): Tensors.
            modifier_rank (int, optional): The rank whose changes hold afterwards. Defaults to None: none are made.

        Returns:
            AbstractContextManager: Inside, they are whole.
        """
        partitioned = [tensor for tensor in tensors if hasattr(tensor, 'ds_id')]
        if not partitioned:
            return nullcontext()
        return self.deepspeed.zero.GatheredParameters(partitioned, modifier_rank=modifier_rank)

    def gather(self, tensors: dict[str, Any], parts: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Gather named tensors of the model, trained parameters from their masters. Collective.

        Args:
            tensors (dict): The same names, in the same order, on every rank.
            parts (Mapping[str, Tensor], optional): This rank's fragments of trained parameters, such as averages.
                Defaults to None: those of the masters.

        Returns:
            dict[str, Tensor]: Full CPU tensors on rank 0; empty on other ranks.
        """
        return gather_tensors(tensors, lambda name, tensor: self._gather(tensor, (parts or {}).get(name)))

    def _gather(self, tensor: Tensor, part: Tensor | None) -> Tensor | None:
        param: Any = tensor
        if self.fragments is not None and tensor in self.fragments.of:
            return self.fragments.gather(param, self.fragments.own(param) if part is None else part)
        with self.whole([tensor]):
            full = gather(tensor)
        exact = self._frozen.get(param)
        is_that = exact is not None and full is not None and torch.equal(exact.to(full.dtype), full)
        return exact.clone() if is_that and exact is not None else full

    def shard(self, tensor: Any) -> Tensor:
        """Show what this rank holds of one of the model's tensors, of a trained parameter its master.

        Args:
            tensor: The tensor, which may be partitioned; what is none, such as a module's extra state, is given back.

        Returns:
            Tensor: The shard; the tensor itself where it is whole; on meta where it is neither: a frozen
            parameter whose value before the rounding rank 0 has, or that lies on a disk.
        """
        if not isinstance(tensor, Tensor):
            return tensor
        param: Any = tensor
        if self.fragments is not None and param in self.fragments.of:
            return self.fragments.shard(param, self.fragments.own(param))
        part = getattr(tensor, 'ds_tensor', None)
        is_apart = self._rounded and self.fragments is not None and isinstance(tensor, nn.Parameter)
        if is_apart or part is not None and part.final_location == 'nvme':
            dtype = torch.float32 if is_apart else tensor.dtype
            return torch.empty(getattr(tensor, 'ds_shape', tensor.shape), dtype=dtype, device='meta')
        if part is None:
            return tensor.detach()
        start = min(part.numel() * dist.get_rank(param.ds_process_group), param.ds_numel)
        numel = min(part.numel(), param.ds_numel - start)
        return FlatShard(part.detach().narrow(0, 0, numel), start, param.ds_shape)

    def scatter(
        self, targets: dict[str, Any], full: dict[str, Tensor], parts: Mapping[str, Tensor] | None = None
    ) -> None:
        """Fill those of the model's named tensors that rank 0 has. Collective.

        Args:
            targets (dict): The same names, in the same order, on every rank; changed in place.
            full (dict[str, Tensor]): Full tensors on rank 0; ignored on other ranks.
            parts (Mapping[str, Tensor], optional): This rank's fragments, such as averages, which are filled instead;
                frozen parameters are left alone. Defaults to None: the model is filled.
        """

        def one(name: str, target: Tensor, source: Tensor | None) -> None:
            whole = self._broadcast(target, source)
            if parts is None:
                self._fill(target, whole)
            elif self.fragments is not None and target in self.fragments.of:
                parts[name].detach().copy_(self.fragments.cut(target, whole))  # type: ignore[arg-type]
            elif not isinstance(target, nn.Parameter):
                parts[name].detach().copy_(whole)

        scatter_tensors(targets, full, one)

    def _is_trained(self, tensor: Tensor) -> bool:
        return self.fragments is not None and tensor in self.fragments.of

    def _broadcast(self, target: Any, source: Tensor | None) -> Tensor:
        is_rounded = self._is_trained(target) or isinstance(target, nn.Parameter) and target.dtype in HALF
        shape = getattr(target, 'ds_shape', target.shape)
        whole = torch.empty(shape, dtype=torch.float32 if is_rounded else target.dtype, device=self.device)
        if dist.get_rank() == 0 and source is not None:
            whole.copy_(source)
        broadcast(whole)
        return whole

    @torch.no_grad()
    def _fill(self, target: Any, whole: Tensor) -> None:
        with self.whole([target], modifier_rank=0):
            target.data.copy_(whole)
        if self._is_trained(target):
            self._write_master(target, whole)
        elif dist.get_rank() == 0 and target in self._frozen:
            self._frozen[target] = whole.cpu().clone()


def with_whole(state: Mapping[str, Tensor], gather: Callable[[set[str]], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Put what rank 0 alone has in the place of tensors on meta. Collective.

    Args:
        state (Mapping[str, Tensor]): As :meth:`Weights.shard` shows it, by name.
        gather (Callable[[set[str]], dict[str, Tensor]]): Gathers tensors of some names on rank 0. Collective.

    Returns:
        dict[str, Tensor]: The rest and, on rank 0, these whole.
    """
    apart = {name for name, value in state.items() if is_meta(value)}
    if not apart:
        return dict(state)
    return {name: value for name, value in state.items() if name not in apart} | gather(apart)
