"""Wrap policies: from a model to the plan of its units. Pure: nothing here shards or communicates."""

from mmzero.policies.build import build_policy
from mmzero.policies.module_class import ModuleClassPolicy
from mmzero.policies.overrides import apply_overrides, resolve_rules
from mmzero.policies.plan import Unit, UnitRules, WrapPlan, make_plan, with_methods
from mmzero.policies.table import plan_table

__all__ = [
    'ModuleClassPolicy',
    'Unit',
    'UnitRules',
    'WrapPlan',
    'apply_overrides',
    'build_policy',
    'make_plan',
    'plan_table',
    'resolve_rules',
    'with_methods',
]
