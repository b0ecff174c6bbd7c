"""The units that an engine will shard: what the policy chose, with the config's rules and the engine's own needs."""

from torch import nn

from mmzero.engines.base import Engine
from mmzero.engines.process_group import ranks_per_node
from mmzero.policies import WrapPlan, apply_overrides, build_policy, choose_compiled, resolve_rules


def plan_units(model: nn.Module, engine: Engine, world_size: int | None) -> WrapPlan:
    """Plan the units of a model; before a process group exists, or within one.

    Args:
        model (nn.Module): The model; its parameters may be on the meta device.
        engine (Engine): The engine that will shard it.
        world_size (int, optional): Number of ranks; None where it is not known, so that what depends on it is not
            checked.

    Returns:
        WrapPlan: The plan.

    Raises:
        PlanError: If the policy does not fit the model, or the engine cannot train the plan.
        ConfigError: If an override does not fit the plan, or there is nothing to compile.
        ValueError: If the policy cannot be built.
    """
    config = engine.config
    plan = apply_overrides(engine.choose_units(model, build_policy(config.wrap_policy)), config.overrides)
    if world_size is not None:
        plan = resolve_rules(plan, config.mesh.sizes(world_size)[1], ranks_per_node())
    # Before what is gathered by itself for its dtype cuts units into pieces.
    plan = choose_compiled(model, plan, config.compile, looks_inside=config.detect_anomaly)
    plan = engine.complete_plan(model, plan)
    engine.check_plan(model, plan)
    return plan
