"""Checkpoints that bare DeepSpeed has written are read, and made files of, as DeepSpeed has trained them."""

import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mmzero.checkpoint import read_checkpoint
from mmzero.engines.deepspeed.package import import_deepspeed
from mmzero.errors import CheckpointError
from tests.distributed.cases import Faults, differing, merged
from tests.distributed.ranks import run_ranks
from tests.distributed.test_deepspeed_runs import PARTITIONED
from tests.distributed.test_deepspeed_state import Frozen
from tests.models import image_batch

pytestmark = [pytest.mark.deepspeed, pytest.mark.distributed]

CASES = [(stage, half) for stage in (1, 2, 3) for half in (False, True)]


class Buffered(Frozen):
    """With a buffer that is saved, and tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.also = torch.nn.Linear(self.head.in_features, self.head.out_features, bias=False)
        self.also.weight = self.head.weight
        self.register_buffer('mean', torch.full((3,), 0.3))


def trained(folder: str, stage: int, half: bool) -> Faults:
    """Two steps of bare DeepSpeed; rank 0 keeps what its weights are beside the checkpoint."""
    deepspeed = import_deepspeed('cpu')
    torch.manual_seed(0)
    model = Buffered()
    settings: dict[str, Any] = dict(
        train_micro_batch_size_per_gpu=4,
        zero_allow_untested_optimizer=True,
        zero_optimization=dict(PARTITIONED['zero_optimization'], stage=stage),
        bf16=dict(enabled=half),
    )
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad])
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, dist_init_required=False)
    batch = image_batch(dist.get_rank())
    inputs = batch.pop('inputs').bfloat16() if half else batch.pop('inputs')
    for _ in range(2):
        engine.backward(engine(inputs, **batch, mode='loss')['loss'])
        engine.step()
    engine.save_checkpoint(folder, tag='epoch_1', client_state=dict(meta=dict(epoch=1)))
    weights = dict(model.state_dict())
    for name, param in model.named_parameters(remove_duplicate=False):
        with deepspeed.zero.GatheredParameters([param]):
            weights[name] = param.detach().clone()
        if param.requires_grad:
            weights[name] = deepspeed.utils.safe_get_full_fp32_param(param).clone()
    if dist.get_rank() == 0:
        torch.save(floats(weights), f'{folder}.pth')
    return {}


def floats(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.float() for name, value in weights.items()}


def made(folder: str, cases: list[tuple[int, bool]]) -> Faults:
    os.environ['LOCAL_RANK'] = str(dist.get_rank())
    for stage, half in cases:
        trained(f'{folder}/{stage} {half}', stage, half)
    return {}


@pytest.fixture(scope='module')
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp('deepspeed')
    merged(run_ranks(2, made, str(folder), CASES))
    return folder


def run_tool(*args: str) -> str:
    done = subprocess.run([sys.executable, *args], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    return done.stdout


@pytest.mark.parametrize('case', CASES)
def test_weights_are_those_that_were_trained(folders: Path, case: tuple[int, bool]) -> None:
    name = ' '.join(map(str, case))
    wanted = torch.load(folders / f'{name}.pth', weights_only=True)
    tag, universal = folders / name / 'epoch_1', folders / f'{name}, universal'
    tool = ('-m', 'deepspeed.checkpoint.ds_to_universal', '--inject_missing_state')
    run_tool(*tool, '--input_folder', str(tag), '--output_folder', str(universal))
    for source in (folders / name, tag, universal):
        found = read_checkpoint(str(source))
        assert not differing(floats(found['state_dict']), wanted), source
        assert found['meta'] == dict(epoch=1)
    target = folders / f'{name}, made.pth'
    run_tool('tools/convert_checkpoint.py', str(tag), str(target))
    assert not differing(floats(torch.load(target, weights_only=True)['state_dict']), wanted)


def test_what_cannot_be_joined_is_told(folders: Path, tmp_path: Path) -> None:
    shutil.copytree(folders / '3 False', tmp_path / 'run')
    tag = tmp_path / 'run/epoch_1'
    (tag / 'zero_pp_rank_1_mp_rank_00_optim_states.pt').unlink()
    with pytest.raises(
        CheckpointError, match=r'epoch_1 is a checkpoint of DeepSpeed, which cannot join it: Expected 2'
    ):
        read_checkpoint(str(tag))
    (tag / 'zero_pp_rank_0_mp_rank_00_optim_states.pt').unlink()
    with pytest.raises(CheckpointError, match=r'lacks \*_optim_states.pt with its weights'):
        read_checkpoint(str(tag))


class Runs:
    """Makes a folder where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize('name', ['zero_pp_rank_0_mp_rank_00_optim_states.pt', 'mp_rank_00_model_states.pt'])
def test_no_code_runs(folders: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(folders / '2 False', tmp_path / 'run')
    file = tmp_path / 'run/epoch_1' / name
    torch.save(dict(torch.load(file, weights_only=False), extra=Runs(tmp_path / 'made')), file, pickle_module=pickle)
    with pytest.raises(CheckpointError, match='mkdir'):
        read_checkpoint(str(tmp_path / 'run/epoch_1'))
    assert not (tmp_path / 'made').exists()
