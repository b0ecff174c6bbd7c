"""Wrap policies: from a model to the plan of its units. Pure: nothing here shards or communicates."""

from mmzero.policies.build import build_policy
from mmzero.policies.figures import Gathering, PlanFigures, plan_figures, replicated
from mmzero.policies.module_class import ModuleClassPolicy
from mmzero.policies.plan import Unit, WrapPlan, make_plan
from mmzero.policies.table import plan_table
from mmzero.policies.tree import plan_tree

__all__ = [
    'Gathering',
    'ModuleClassPolicy',
    'PlanFigures',
    'Unit',
    'WrapPlan',
    'build_policy',
    'make_plan',
    'plan_figures',
    'plan_table',
    'plan_tree',
    'replicated',
]
