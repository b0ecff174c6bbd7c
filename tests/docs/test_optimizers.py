"""The table of docs/optimizers.md is that of the tests."""

from pathlib import Path

from tests.distributed.test_optimizers import KERNELS, REFUSED, TORCH
from tests.distributed.test_zoo_optimizers import CASES

PAGE = Path(__file__).resolve().parents[2] / 'docs/optimizers.md'
SHOWN = {
    'Held': 'plain shards',
    'Shards': 'DTensors',
    'OneByOne': 'whole, one by one',
    'refused': 'refused',
}


def rows() -> list[str]:
    """The rows of the table, in its order."""
    found = [f'| torch.optim | {name} | {SHOWN[view]} |' for name, (_, view) in {**TORCH, **KERNELS}.items()]
    found += [f'| torch.optim | {name} | refused |' for name in REFUSED if name in ('LBFGS', 'SparseAdam')]
    return found + [f'| {package.split(".")[0]} | {name} | {SHOWN[view]} |' for package, name, _, view in CASES]


def test_the_table() -> None:
    page = PAGE.read_text(encoding='utf-8')
    assert [line for line in page.splitlines() if line.startswith('| ')][1:] == rows()
