"""What a run will cost before it starts; so far, what the ZeRO paper says of one step."""

from mmzero.planner.paper import PaperFormula, paper_formula

__all__ = ['PaperFormula', 'paper_formula']
