"""Every wrap policy has a config, and each of them trains the digits as stage 0 does. Slow: minutes.

Gradients and weights are compared in ``tests/distributed/test_wrap_policies.py``.
"""

import sys
from pathlib import Path

import pytest

from tests.configs.test_configs import POLICIES
from tests.tools.processes import ROOT, TORCHRUN, succeed
from tests.tools.test_promises import scalars

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def train(config: Path, work: Path, *options: str) -> None:
    """Five steps on two ranks."""
    steps = ['train_cfg.max_epochs=1', 'train_dataloader.dataset.indices=80', 'val_evaluator.metric=proposal_fast']
    # Under seed 0 the fourth step lies on a kink: stage 0 itself moves by 1e-5 there if lr changes by 1e-7.
    steps += ['randomness.seed=1']
    steps += ['default_hooks.logger.interval=1', 'log_processor.window_size=1', 'val_dataloader.dataset.indices=2']
    command = [*TORCHRUN, 2, ROOT / 'tools/train.py', config, '--launcher', 'pytorch', '--work-dir', work]
    succeed(*command, '--cfg-options', *steps, *options)


@pytest.fixture(scope='module')
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """Stage 0: stock DDP's arithmetic, by `test_parity.py`."""
    succeed(sys.executable, ROOT / 'tools/dataset_converters/digits_coco.py')
    work = tmp_path_factory.mktemp('reference')
    train(POLICIES[0], work, 'model_wrapper_cfg.stage=0')
    return scalars(work)


@pytest.mark.parametrize('config', POLICIES, ids=lambda path: path.stem)
def test_trains_as_stage_0(config: Path, reference: list[dict], tmp_path: Path) -> None:
    train(config, tmp_path)
    rows = scalars(tmp_path)
    assert len(rows) == len(reference) == 5
    for found, expected in zip(rows, reference, strict=True):
        for name in ('loss', 'grad_norm'):
            assert found[name] == pytest.approx(expected[name], rel=1e-6), name


def test_the_project_trains(reference: list[dict], tmp_path: Path) -> None:
    """A policy of one's own, outside of the package."""
    train(ROOT / 'projects/custom_wrap_policy/dino_r18_tiny_digits_zero3.py', tmp_path)
    assert len(scalars(tmp_path)) == 5
