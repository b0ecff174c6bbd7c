"""Which units torch.compile compiles."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from torch import nn

from mmzero.config import CompileConfig
from mmzero.errors import ConfigError
from mmzero.policies.overrides import ROOT
from mmzero.policies.plan import WrapPlan
from mmzero.policies.unit import Unit

_PATH = 'model_wrapper_cfg.compile'


def choose_compiled(model: nn.Module, plan: WrapPlan, config: CompileConfig, looks_inside: bool = False) -> WrapPlan:
    """Say which units are compiled: those that hold no other unit, or as their rules say. Pure.

    A unit that holds others, such as the root, would be cut at each of them, where parameters are gathered.

    Args:
        model (nn.Module): The model; its parameters may be on the meta device.
        plan (WrapPlan): The plan with its rules.
        config (CompileConfig): The field ``compile``.
        looks_inside (bool): Whether tensors between the modules of a unit are looked at, which a compiled unit does not
            have. Defaults to False.

    Returns:
        WrapPlan: The plan with ``compiled`` of each unit, and a note.

    Raises:
        ConfigError: If no unit is left, or one that a rule names has no forward.
    """
    if not config.is_asked:
        return plan
    if config.disable or looks_inside:
        why = 'disable=True' if config.disable else 'detect_anomaly=True looks at what modules of a unit hand on'
        return replace(plan, notes=(*plan.notes, f'compile: {why}, so that all units run as they are'))
    holders = {unit.name for unit in plan.units if unit.is_root or _holds_another(unit, plan)}
    without_forward = {unit.name for unit in plan.units if _has_no_forward(model.get_submodule(unit.name))}
    wrong = [unit for unit in plan.units if unit.rules.compile and unit.name in without_forward]
    if wrong:
        names = ', '.join(f'{unit.name or ROOT} ({unit.class_name})' for unit in wrong)
        raise ConfigError(
            [f'model_wrapper_cfg.overrides: compile=True is for {names}, which has no forward to compile']
        )
    units = tuple(
        replace(unit, compiled=_is_compiled(unit, unit.name in holders | without_forward)) for unit in plan.units
    )
    compiled = [unit for unit in units if unit.compiled]
    if not compiled:
        raise ConfigError([f'{_PATH}: {_nothing(plan, config)}'])
    others = ', '.join(_counted(unit for unit in units if not unit.compiled))
    note = f'compiled by torch.compile ({config.backend_name}), each by itself: {", ".join(_counted(compiled))}'
    return replace(plan, units=units, notes=(*plan.notes, f'{note}; not compiled: {others or "none"}'))


def _is_compiled(unit: Unit, is_unfit: bool) -> bool:
    return not is_unfit if unit.rules.compile is None else unit.rules.compile


def _holds_another(unit: Unit, plan: WrapPlan) -> bool:
    return any(other.name.startswith(f'{unit.name}.') for other in plan.units)


def _has_no_forward(module: nn.Module) -> bool:
    """Lists of modules have none, and are entered by methods or not at all."""
    return type(module).forward is nn.Module.forward


def _counted(units: Iterable[Unit]) -> list[str]:
    counts = Counter(ROOT if unit.is_root and not unit.name else unit.class_name for unit in units)
    return [name if name == ROOT else f'{count} x {name}' for name, count in counts.items()]


def _nothing(plan: WrapPlan, config: CompileConfig) -> str:
    if len(plan.units) == 1:
        why = f'compiles units, and {plan.policy} chooses none; let wrap_policy name the blocks'
        return f"{why}, or compile the model as a whole, overrides=[dict(units='{ROOT}', compile=True)]"
    return (
        'would compile nothing, since overrides say compile=False for all units, or each has no forward; remove it, or '
        'name units by overrides=[dict(units=..., compile=True)]'
    )
