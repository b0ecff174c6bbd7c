"""Which modules are recomputed: as a policy chooses them, and as a budget does."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn

from mmzero.config import CheckpointingConfig
from mmzero.errors import PlanError
from mmzero.patches import Applied, Budget
from mmzero.policies import WrapPlan, build_policy

DEFAULT_OF_BUDGET = dict(type='AutoPolicy', small=True)


def chosen_regions(model: nn.Module, config: CheckpointingConfig) -> tuple[str, ...]:
    """Let the policy of ``activation_checkpointing`` choose, and take each n-th of its choice.

    Args:
        model (nn.Module): The model; its parameters may be on the meta device.
        config (CheckpointingConfig): The config.

    Returns:
        tuple[str, ...]: Paths of modules, in the order of the model; none without a policy, which for a budget that
        names no modules is :data:`DEFAULT_OF_BUDGET`.

    Raises:
        PlanError: If the policy cannot be built, chooses nothing, or names what is not in the model.
    """
    if config.policy is None and (config.modules or not config.chooses):
        return ()
    try:
        policy = build_policy(config.policy or DEFAULT_OF_BUDGET)
        wanted = set(policy.choose(model).units)
    except ValueError as error:
        raise PlanError(f'activation_checkpointing.policy: {error}') from None
    if not wanted:
        raise PlanError(f'activation_checkpointing.policy: {policy} chooses no module of this {type(model).__name__}')
    return tuple(name for name, _ in model.named_modules() if name in wanted)[:: config.every]


def build_budget(
    config: CheckpointingConfig, patched: Applied, plan: WrapPlan, report: Callable[[str, bool], None]
) -> Budget | None:
    """Build what chooses among the patched modules in the first iterations.

    Args:
        config (CheckpointingConfig): The config.
        patched (Applied): What may be recomputed.
        plan (WrapPlan): The units.
        report (Callable): Takes a text for the log, and whether it is a warning.

    Returns:
        Budget, optional: The budget; None where the config asks for none.
    """
    if config.memory is None:
        return None
    units = [unit.name for unit in plan.units if unit.name]
    return Budget(patched.regions, config.memory, _gather, report, units)


def _gather(own: Any) -> list[Any]:
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found
