"""What a run will cost before it starts: its plan, and what the ZeRO paper says of one step."""

from mmzero.planner.paper import PaperFormula, paper_formula
from mmzero.planner.report import PlanReport, compare_plans, plan_report

__all__ = ['PaperFormula', 'PlanReport', 'compare_plans', 'paper_formula', 'plan_report']
