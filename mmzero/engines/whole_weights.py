"""Loading whole tensors into shards by ``load_state_dict``, by torch's own and by MMEngine's."""

from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mmzero.engines.on_host import cut


def accept_whole_tensors(model: nn.Module) -> None:
    """Let ``load_state_dict`` of every module of a sharded model take whole tensors, each rank its own copy.

    Bare torch raises "mixed torch.Tensor and DTensor" there, of which MMEngine makes a warning, and loads nothing.
    A rank cuts its shard out of the tensor it is given: no communication, as when a model is loaded under DDP.

    Args:
        model (nn.Module): The model. Parameters that are no shards are loaded as ever.
    """
    for module in model.modules():
        shards = {name: param for name, param in module._parameters.items() if isinstance(param, DTensor)}
        if shards:
            module.register_load_state_dict_pre_hook(_Cut(shards))


class _Cut:
    """Replaces whole tensors in a state dict by this rank's shards of them.

    Args:
        params (dict[str, DTensor]): The module's sharded parameters, which it may not hold right now: a gathered unit
            has whole ones in their place.
    """

    def __init__(self, params: dict[str, Any]) -> None:
        self.layouts = {name: (p.shape, p.device, p.dtype, p.device_mesh, p.placements) for name, p in params.items()}

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        for name, (shape, device, dtype, mesh, placements) in self.layouts.items():
            value = state_dict.get(prefix + name)
            # Of another shape: torch says so.
            if isinstance(value, Tensor) and not isinstance(value, DTensor) and value.shape == shape:
                state_dict[prefix + name] = cut(value.detach().to(dtype), mesh, placements, device)
