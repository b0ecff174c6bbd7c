"""Where a checkpoint is converted to."""

from pathlib import Path

import pytest
import torch

from mmzero.checkpoint.convert import convert_checkpoint
from mmzero.errors import CheckpointError


def test_a_target_that_cannot_be_written_is_one_error(tmp_path: Path) -> None:
    torch.save(dict(state_dict=dict(a=torch.ones(2))), tmp_path / 'a.pth')
    (tmp_path / 'file').write_text('')
    target = tmp_path / 'file/b.pth'
    with pytest.raises(CheckpointError) as caught:
        convert_checkpoint(str(tmp_path / 'a.pth'), str(target))
    assert str(caught.value) == f'{target} cannot be written (File exists); name another target'
