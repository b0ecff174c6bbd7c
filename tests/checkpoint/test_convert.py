"""Files of the converter that need no process group."""

from pathlib import Path

import pytest
import torch

from mmzero.checkpoint import read_checkpoint
from mmzero.checkpoint.convert import convert_checkpoint
from mmzero.errors import CheckpointError


def test_a_bin_is_the_weights_alone(tmp_path: Path) -> None:
    """As transformers and DeepSpeed's zero_to_fp32 write it, and read by the same."""
    source, target, back = (str(tmp_path / name) for name in ('a.pth', 'pytorch_model.bin', 'b.pth'))
    weights = {'a.weight': torch.randn(3, 2), 'a.count': torch.tensor(4)}
    torch.save(dict(meta=dict(epoch=3), state_dict=weights, optimizer=dict(state={}, param_groups=[])), source)
    convert_checkpoint(source, target)
    made = torch.load(target, weights_only=True)
    assert made.keys() == weights.keys()
    assert all(torch.equal(made[name], value) for name, value in weights.items())
    convert_checkpoint(target, back)
    assert torch.equal(read_checkpoint(back)['state_dict']['a.weight'], weights['a.weight'])


def test_a_suffix_that_is_nearly_known_is_told(tmp_path: Path) -> None:
    torch.save(dict(state_dict={'a': torch.ones(1)}), tmp_path / 'a.pth')
    with pytest.raises(CheckpointError, match=r"would be a folder; did you mean '.bin'"):
        convert_checkpoint(str(tmp_path / 'a.pth'), str(tmp_path / 'model.bim'))
