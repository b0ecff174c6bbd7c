"""Which modules a config's policy chooses for activation checkpointing."""

from torch import nn

from mmzero.config import CheckpointingConfig
from mmzero.errors import PlanError
from mmzero.policies import build_policy


def chosen_regions(model: nn.Module, config: CheckpointingConfig) -> tuple[str, ...]:
    """Let the policy of ``activation_checkpointing`` choose, and take each n-th of its choice.

    Args:
        model (nn.Module): The model; its parameters may be on the meta device.
        config (CheckpointingConfig): The config.

    Returns:
        tuple[str, ...]: Paths of modules, in the order of the model; none without a policy.

    Raises:
        PlanError: If the policy cannot be built, chooses nothing, or names what is not in the model.
    """
    if config.policy is None:
        return ()
    try:
        policy = build_policy(config.policy)
        wanted = set(policy.choose(model).units)
    except ValueError as error:
        raise PlanError(f'activation_checkpointing.policy: {error}') from None
    if not wanted:
        raise PlanError(f'activation_checkpointing.policy: {policy} chooses no module of this {type(model).__name__}')
    return tuple(name for name, _ in model.named_modules() if name in wanted)[:: config.every]
