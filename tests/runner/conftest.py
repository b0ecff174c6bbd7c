"""A config of a small detector, for what is told before a run."""

from typing import Any

import pytest

from tests.runs import digits_config


@pytest.fixture
def config(digits: str, tmp_path: Any) -> Any:
    """The config; a test may change it."""
    return digits_config(digits, str(tmp_path))
