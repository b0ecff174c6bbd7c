"""Each thing that bites trains as under stock DDP, at every stage and on meshes, by the design's table."""

import pytest

from tests.distributed import parity
from tests.distributed.parity_features import FULL, HALF, Feature, beyond_bounds, ratios

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize('world_size', [2, pytest.param(4, marks=pytest.mark.slow)])
def test_in_float32(world_size: int) -> None:
    assert not beyond_bounds(world_size, FULL)


def check_half(world_size: int, features: list[Feature]) -> None:
    found = ratios(world_size, features)
    parity.MEASURED_HALF_FEATURES += found.items()
    wrong = [f'{row}: {values}' for row, values in found.items() if not max(values.values()) <= parity.HALF_BOUND]
    assert not wrong, '\n'.join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize('world_size', [2, 4])
@pytest.mark.parametrize('feature', HALF, ids=lambda feature: feature.name)
def test_in_16_bit(world_size: int, feature: Feature) -> None:
    check_half(world_size, [feature])


def test_there_are_cells_enough() -> None:
    cells = [len(feature.settings(world_size)) for feature in (*FULL, *HALF) for world_size in (2, 4)]
    assert sum(cells) >= 60
