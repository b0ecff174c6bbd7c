"""Files of the weights of sharded checkpoints: what rank 0 holds while they are made, and who reads them."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from mmengine.runner import load_checkpoint
from torch import nn
from torch.distributed.tensor import DTensor

from mmzero import ZeroModelWrapper
from mmzero._compat import return_freed_memory
from mmzero.analysis.start.memory import PeakOf
from mmzero.checkpoint import save_sharded, split
from mmzero.checkpoint.convert import convert_checkpoint, export_weights
from tests.detectors import rtmdet
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.distributed

# So large that its shards are no part of the heap, which the C library gives back as it likes.
WIDTH, LAYERS = 4608, 2
LARGEST_BYTES = 4 * WIDTH * WIDTH


def export(folder: str) -> dict[str, float]:
    """Save under stage 3, export on rank 0; the peaks in largest parameters."""
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    wanted = model[0].weight.detach().clone()
    wrapper = ZeroModelWrapper(module=model, stage=3, wrap_policy=dict(type='ModuleClassPolicy', classes=['Linear']))
    tensors, rest = split(dict(state_dict=wrapper.engine.sharded_state(), meta={}))
    save_sharded(tensors, rest, f'{folder}/epoch_1')
    if dist.get_rank():
        return {}
    # What is imported at the first time.
    export_weights(f'{folder}/epoch_1', f'{folder}/first.pth', None)
    peaks = {}
    for name, dtype in (('float32', torch.float32), ('bfloat16', torch.bfloat16)):
        return_freed_memory()
        with PeakOf([os.getpid()]) as peak:
            export_weights(f'{folder}/epoch_1', f'{folder}/{name}.pth', dtype)
        peaks[name] = peak.bytes / LARGEST_BYTES
        found = torch.load(f'{folder}/{name}.pth', weights_only=True)['state_dict']['0.weight']
        assert torch.equal(found, wanted.to(dtype))
    return_freed_memory()
    with PeakOf([os.getpid()]) as peak:
        convert_checkpoint(f'{folder}/epoch_1', f'{folder}/weights.safetensors')
    peaks['safetensors'] = peak.bytes / LARGEST_BYTES
    return peaks


def test_no_more_than_one_parameter_at_a_time(tmp_path: Path) -> None:
    peaks = run_ranks(2, export, str(tmp_path))[0]
    assert peaks.keys() == {'float32', 'bfloat16', 'safetensors'}
    assert all(0 < peak < 1.2 for peak in peaks.values()), peaks


def export_detector(folder: str) -> None:
    """Save a detector of mmdet's under stage 3, export it on rank 0, and write its weights down as they were."""
    torch.manual_seed(0)
    wrapper = ZeroModelWrapper(module=rtmdet(), stage=3)
    tensors, rest = split(dict(state_dict=wrapper.engine.sharded_state(), meta=dict(dataset_meta=dict(classes=('a',)))))
    if dist.get_rank():
        tensors = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, DTensor)}
    save_sharded(tensors, rest, f'{folder}/epoch_1')
    whole = wrapper.engine.model_state()
    if dist.get_rank() == 0:
        export_weights(f'{folder}/epoch_1', f'{folder}/epoch_1.pth', torch.float32)
        torch.save(whole, f'{folder}/saved.pth')


def test_stock_mmdet_reads_it_strictly(tmp_path: Path) -> None:
    run_ranks(2, export_detector, str(tmp_path))
    saved, model = torch.load(tmp_path / 'saved.pth', weights_only=True), rtmdet()
    loaded = load_checkpoint(model, str(tmp_path / 'epoch_1.pth'), map_location='cpu', strict=True)
    assert loaded['meta']['dataset_meta'] == dict(classes=('a',))
    state = model.state_dict()
    assert state.keys() == saved.keys()
    assert all(torch.equal(state[name], value) for name, value in saved.items())
