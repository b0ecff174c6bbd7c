"""Wrap policies: from a model to the plan of its units. Pure: nothing here shards or communicates."""

from mmzero.policies.auto import AutoPolicy
from mmzero.policies.build import build_policy
from mmzero.policies.combine import AllOf, AnyOf, Not
from mmzero.policies.compiled import choose_compiled
from mmzero.policies.depth import DepthPolicy
from mmzero.policies.eligible import ineligible
from mmzero.policies.figures import Gathering, PlanFigures, plan_figures, replicated
from mmzero.policies.module_class import ModuleClassPolicy
from mmzero.policies.module_name import ModuleNamePolicy
from mmzero.policies.overrides import apply_overrides, resolve_rules
from mmzero.policies.patterns import matches_or_holds
from mmzero.policies.plan import WrapPlan, make_plan, with_methods
from mmzero.policies.policy import Choice, WrapPolicy
from mmzero.policies.separate import of_child, separate_children, separate_plan, within
from mmzero.policies.size import SizePolicy
from mmzero.policies.table import plan_table
from mmzero.policies.tree import plan_tree
from mmzero.policies.unit import Unit, UnitRules, without

__all__ = [
    'AllOf',
    'AnyOf',
    'AutoPolicy',
    'Choice',
    'DepthPolicy',
    'Gathering',
    'ModuleClassPolicy',
    'ModuleNamePolicy',
    'Not',
    'PlanFigures',
    'SizePolicy',
    'Unit',
    'UnitRules',
    'WrapPlan',
    'WrapPolicy',
    'build_policy',
    'choose_compiled',
    'ineligible',
    'make_plan',
    'matches_or_holds',
    'of_child',
    'plan_figures',
    'plan_table',
    'plan_tree',
    'replicated',
    'apply_overrides',
    'resolve_rules',
    'separate_children',
    'separate_plan',
    'with_methods',
    'within',
    'without',
]
