"""AutoPolicy gathers as little as the classes that one would name by hand, in no more collectives."""

from pathlib import Path

import pytest

from tests.policies import hand_written

PAGE = Path(__file__).parents[2] / 'docs' / 'choosing_a_policy.md'


@pytest.mark.parametrize('name', hand_written.MODELS)
def test_peak_and_collectives(name: str) -> None:
    """Each unit takes as many collectives as another, so that their numbers are as those of units."""
    peaks, units, row = hand_written.row(name)
    assert peaks <= 1.05 and units <= 1.1
    assert row in PAGE.read_text(encoding='utf-8'), f'docs/choosing_a_policy.md has another row than\n{row}'
