"""The tool that measures a step, as a user calls it."""

import json
import sys
from pathlib import Path

import pytest

from tests.runs import digits_config
from tests.tools.processes import run, succeed

pytestmark = pytest.mark.distributed

TOOL = 'tools/analysis_tools/measure_step.py'


@pytest.mark.slow
def test_it_starts_its_own_ranks(digits: str, tmp_path: Path) -> None:
    digits_config(digits, str(tmp_path / 'work')).dump(tmp_path / 'config.py')
    options = ('optim_wrapper.accumulative_counts=2', 'model_wrapper_cfg.stage=2')
    text = succeed(sys.executable, TOOL, tmp_path / 'config.py', '--nproc', 2, '--cfg-options', *options)
    assert 'ZeRO stage 2 on 1 x 2 ranks (replicate x shard), k = 2 micro-batches per step' in text
    ranks = json.loads((tmp_path / 'work/step.json').read_text())
    assert len(ranks) == 2
    for report in ranks:
        assert 0.95 < report['memory']['ratio'] < 1.05 and 0.99 < report['traffic']['ratio'] < 1.01
    assert (tmp_path / 'work/step.png').is_file()


def test_a_config_that_is_not_there_is_told_before_ranks_start() -> None:
    done = run(sys.executable, TOOL, 'nowhere.py', '--nproc', 2)
    assert done.returncode == 2
    assert 'nowhere.py: no such config file' in done.stdout and 'Traceback' not in done.stdout
    assert 'torch.distributed' not in done.stdout
