"""What the tests of pictures share."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope='session')
def digits(tmp_path_factory):
    """8 + 4 images of 64 pixels."""
    out = tmp_path_factory.mktemp('digits')
    tool = ROOT / 'tools/dataset_converters/digits_coco.py'
    size = ['--num-train', '8', '--num-val', '4', '--size', '64']
    subprocess.run([sys.executable, str(tool), '--out', str(out), *size], check=True)
    return out
