"""Runs of a flattened tensor are cut into boxes, without a process group."""

import math
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex

from mmzero.engines import FlatShard
from mmzero.engines.flat_shard import boxes


@pytest.mark.parametrize('shape', [(), (1,), (7,), (3, 4), (1, 5), (3, 1, 4), (2, 3, 2, 3), (3, 0), (0,)])
def test_boxes_are_the_run(shape: tuple[int, ...]) -> None:
    whole = torch.arange(math.prod(shape)).view(shape)
    for start in range(whole.numel() + 1):
        for end in range(start, whole.numel() + 1):
            found = list(boxes(shape, start, end))
            parts = [whole[tuple(map(slice, a, map(sum, zip(a, b, strict=True))))].flatten() for a, b in found]
            assert [int(value) for part in parts for value in part] == list(range(start, end))
            assert len(found) <= max(1, 2 * len(shape) - 1)


def test_what_is_loaded_goes_into_the_run(tmp_path: Any) -> None:
    whole = torch.randn(3, 4, 5)
    dcp.save(dict(a=whole), checkpoint_id=tmp_path, no_dist=True)
    memory = torch.zeros(40)
    dcp.load(dict(a=FlatShard(memory.narrow(0, 2, 33), 8, (3, 4, 5))), checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(memory, torch.cat([torch.zeros(2), whole.flatten()[8:41], torch.zeros(5)]))


def test_a_box_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match=r'no box at .* in elements 4 to 9'):
        FlatShard(torch.zeros(5), 4, (3, 4)).__get_tensor_shard__(MetadataIndex('a', torch.Size([0, 0])))
