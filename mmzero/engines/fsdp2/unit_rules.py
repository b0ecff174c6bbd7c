"""From the rules of a unit to the arguments of ``fully_shard``."""

from collections.abc import Callable
from itertools import compress

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard

from mmzero._compat import shared_post_forward_meshes
from mmzero.config import ZeroConfig
from mmzero.engines.fsdp2.stages import rules_of
from mmzero.engines.fsdp2.unit_bytes import UnitLayout
from mmzero.engines.materialize import Slots, allocate_parameters, broadcast, fill_shards
from mmzero.policies import Unit, WrapPlan


def param_dtype_of(unit: Unit, config: ZeroConfig) -> torch.dtype | None:
    """The dtype in which a unit is gathered.

    Args:
        unit (Unit): The unit.
        config (ZeroConfig): The config.

    Returns:
        torch.dtype or None: The dtype; None: as stored.
    """
    # The root's remainder stays as it is: models write its weights into fp32 buffers (DINO's embeddings).
    return unit.rules.param_dtype or (None if unit.is_root else config.precision.param_dtype)


def reduced_dtype(unit: Unit, config: ZeroConfig) -> torch.dtype | None:
    """The 16-bit dtype in which a unit is gathered.

    Args:
        unit (Unit): The unit.
        config (ZeroConfig): The config.

    Returns:
        torch.dtype or None: The dtype; None: as stored, or float32.
    """
    dtype = param_dtype_of(unit, config)
    return None if dtype == torch.float32 else dtype


def reshards_after_forward(unit: Unit, config: ZeroConfig) -> bool | int:
    """What becomes of a unit's gathered parameters after forward.

    Args:
        unit (Unit): The unit, with rules that name numbers of ranks.
        config (ZeroConfig): The config.

    Returns:
        bool or int: As ``fully_shard`` takes it.
    """
    rule = unit.rules.reshard_after_forward
    if isinstance(rule, str):
        raise RuntimeError(f'the rules of the unit {unit.name!r} were not resolved: reshard_after_forward={rule!r}')
    return rules_of(config).reshard_after_forward if rule is None else rule


def unit_layouts(plan: WrapPlan, config: ZeroConfig, world_size: int) -> list[tuple[Unit, UnitLayout]]:
    """How the units of a plan will be gathered and reduced; needs no process group.

    Args:
        plan (WrapPlan): The plan, with rules that name numbers of ranks.
        config (ZeroConfig): The config.
        world_size (int): Number of ranks.

    Returns:
        list[tuple[Unit, UnitLayout]]: The units with their layouts, in the plan's order.
    """
    shard_size = config.mesh.sizes(world_size)[1]
    dtypes = {unit.name: param_dtype_of(unit, config) for unit in plan.units}
    reduce_dtype = config.precision.reduce_dtype
    return [
        (
            unit,
            UnitLayout(
                shard_size=unit.ranks(shard_size),
                itemsize=dtype.itemsize if (dtype := dtypes[unit.name]) else None,
                reduce_itemsize=reduce_dtype.itemsize if reduce_dtype else None,
                reshard_after_forward=reshards_after_forward(unit, config),
                is_replicated=unit.ranks(shard_size) < world_size,
                is_on_host=config.offload.to_host,
            ),
        )
        for unit in plan.units
    ]


class UnitSharding:
    """Shards unit after unit.

    Args:
        config (ZeroConfig): The checked config.
        device (torch.device): Where this rank computes.
    """

    def __init__(self, config: ZeroConfig, device: torch.device) -> None:
        self.config = config
        self.device = device
        self.mesh = _mesh(device, *config.mesh.sizes(dist.get_world_size()))
        self._whole_mesh: DeviceMesh | None = None

    def shard(self, module: nn.Module, unit: Unit, ignored: set[nn.Parameter]) -> None:
        """Shard a unit whose inner units are sharded already.

        Args:
            module (nn.Module): The unit's module, real on the device.
            unit (Unit): The unit.
            ignored (set[nn.Parameter]): Parameters that stay whole.
        """
        with shared_post_forward_meshes():
            fully_shard(
                module,
                mesh=self.mesh if unit.rules.shard else self._mesh_of_replicas(),
                reshard_after_forward=reshards_after_forward(unit, self.config),
                shard_placement_fn=_placement(unit.rules.shard_dim, unit.ranks(self.mesh.size(-1))),
                mp_policy=self._precision(unit),
                offload_policy=self._offloading(),
                ignored_params=ignored,
            )

    def _mesh_of_replicas(self) -> DeviceMesh:
        """All ranks, each with a shard that is the whole: FSDP2 then averages gradients by all-reduce."""
        if self._whole_mesh is None:
            self._whole_mesh = _mesh(self.device, dist.get_world_size(), 1)
        return self._whole_mesh

    def _precision(self, unit: Unit) -> MixedPrecisionPolicy:
        precision, casts = self.config.precision, unit.rules.cast_forward_inputs
        return MixedPrecisionPolicy(
            param_dtype=param_dtype_of(unit, self.config),
            reduce_dtype=precision.reduce_dtype,
            output_dtype=None if unit.is_root else precision.output_dtype,
            # Autocast casts what an operator wants, so that boxes, reference points and residual streams keep
            # their precision.
            cast_forward_inputs=False if casts is None else casts,
        )

    def _offloading(self) -> OffloadPolicy:
        if not self.config.offload.to_host:
            return OffloadPolicy()
        # Pinning is for copies to a GPU, and fails without one.
        return CPUOffloadPolicy(pin_memory=self.device.type != 'cpu')


def shard_unit(
    sharding: UnitSharding,
    module: nn.Module,
    unit: Unit,
    params: list[nn.Parameter],
    slots: Slots,
    whole: list[nn.Parameter],
) -> list[nn.Parameter]:
    """Shard a unit that is real on rank 0 alone, and send each rank its shards. Collective.

    Memory: on a CPU a rank other than 0 holds no more than its shards, and one parameter while that is sent; on a GPU
    the unit is allocated whole, for a moment.

    Args:
        sharding (UnitSharding): What shards it.
        module (nn.Module): The unit's module.
        unit (Unit): The unit, whose inner units are sharded already.
        params (list[nn.Parameter]): Its parameters; emptied, so that rank 0 lets go of what it has sent.
        slots (Slots): Where they are registered.
        whole (list[nn.Parameter]): Parameters of other units that stay whole.

    Returns:
        list[nn.Parameter]: Those of this unit that do.
    """
    places = [slots[id(param)][0] for param in params]
    made = allocate_parameters(params, slots, sharding.device)
    params.clear()
    kept = list(compress(made, unit.is_whole))
    for param in kept:
        broadcast(param)
    # FSDP2 cuts what ranks other than 0 have not filled yet: there only the places count.
    sharding.shard(module, unit, {*whole, *kept})
    split = [not is_whole for is_whole in unit.is_whole]
    full = [param.detach() for param in compress(made, split)]
    made.clear()
    fill_shards(list(compress(places, split)), full)
    return kept


def _mesh(device: torch.device, replicate: int, shard: int) -> DeviceMesh:
    if replicate == 1:
        return init_device_mesh(device.type, (shard,), mesh_dim_names=('shard',))
    return init_device_mesh(device.type, (replicate, shard), mesh_dim_names=('replicate', 'shard'))


def _placement(dim: int | None, ranks: int) -> Callable[[nn.Parameter], Shard | None] | None:
    """As ``Unit.shard_dims`` says it."""
    if not dim:
        return None

    def place(param: nn.Parameter) -> Shard | None:
        return Shard(dim) if param.dim() > dim and param.shape[dim] % ranks == 0 else None

    return place
