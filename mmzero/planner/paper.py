"""The ZeRO paper's own figures."""

from dataclasses import dataclass

# Stage to (bytes on every rank, bytes split over the ranks, elements moved), per parameter.
_PAPER = {0: (16, 0, 2), 1: (4, 12, 2), 2: (2, 14, 2), 3: (0, 16, 3)}


@dataclass(frozen=True)
class PaperFormula:
    """Memory and traffic of one micro-batch and optimizer step.

    Args:
        bytes (float): Bytes on a rank.
        formula (str): Its text, with a parameters and N ranks.
        moved (float): Elements that a rank sends, and receives, by ring algorithms.
        moved_formula (str): Its text, to be multiplied by (N-1)/N.
    """

    bytes: float
    formula: str
    moved: float
    moved_formula: str


def paper_formula(stage: int, numel: int, ranks: int) -> PaperFormula:
    """What the paper states for 16-bit parameters and gradients with Adam.

    Memory: "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (arXiv:1910.02054), figure 1 and
    section 5, with K = 12; traffic: section 7.

    Args:
        stage (int): 0 to 3.
        numel (int): Parameters of the model.
        ranks (int): Ranks that share them.

    Returns:
        PaperFormula: The figures.
    """
    whole, split, moved = _PAPER[stage]
    terms = [f'{whole}a'] * bool(whole) + [f'{split}a/N'] * bool(split)
    total = numel * (whole + split / ranks)
    return PaperFormula(total, ' + '.join(terms), moved * numel * (ranks - 1) / ranks, f'{moved}a')
