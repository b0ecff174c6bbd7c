"""The series of a GPU test, on a CPU and a tiny detector: it runs, and counts what is kept."""

import pytest
import torch

from mmzero.analysis.series import STOCK, detector, measure_series, series_table
from tests.models import TINY_DINO, detection_batch


@pytest.mark.slow
def test_series_of_tiny_dino(group: None) -> None:
    build = detector(dict(model=TINY_DINO), 64)
    found = measure_series(build, lambda: detection_batch(0, size=64), 8, torch.device('cpu'))
    kept = {name: one.kept for name, one in found.items()}
    assert list(kept)[0] == STOCK
    assert kept['+ bf16'] < kept['mmzero, fp32']
    assert kept[STOCK] == pytest.approx(kept['mmzero, fp32'], rel=0.01)
    assert kept['+ offloaded'] < kept['+ encoder recomputed'] < kept['+ backbone recomputed'] < kept['+ bf16']
    # One layer of its encoder takes more than half of what is kept, so that even all of them recomputed are too many.
    assert kept['Budget at half'] <= kept['+ bf16'] / 2
    assert len(series_table(found).splitlines()) == 2 + len(found)
