"""The ZeRO paper's own example: 7.5 billion parameters on 64 GPUs (figure 1)."""

import pytest

from mmzero.planner import paper_formula


@pytest.mark.parametrize('stage, gigabytes, moved', [(0, 120, 2), (1, 31.4, 2), (2, 16.6, 2), (3, 1.9, 3)])
def test_figure_1(stage: int, gigabytes: float, moved: int) -> None:
    numel = 7_500_000_000
    found = paper_formula(stage, numel, 64)
    assert found.bytes / 1e9 == pytest.approx(gigabytes, abs=0.05)
    assert found.moved == moved * numel * 63 / 64
