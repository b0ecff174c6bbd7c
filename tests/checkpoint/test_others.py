"""Files and folders that other programs have made."""

import argparse
import json
import pathlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mmzero.checkpoint import is_sharded, read_checkpoint
from mmzero.errors import CheckpointError

WEIGHTS = {'a.weight': torch.arange(3.0), 'a.bias': torch.ones(1)}
AVERAGES = {name: value + 1 for name, value in WEIGHTS.items()}
OTHER_WORK = dict(optimizer=dict(state={}), epoch=3, args=argparse.Namespace(lr=0.1, out=pathlib.PosixPath('runs')))

FILES: dict[str, dict[str, Any]] = {
    'timm, released': WEIGHTS,
    'timm, training': dict(state_dict=WEIGHTS, state_dict_ema=AVERAGES, arch='resnet50', version=2, **OTHER_WORK),
    'DeiT, Swin, MAE, DETR': dict(model=WEIGHTS),
    'DeiT, training': dict(model=WEIGHTS, model_ema=AVERAGES, scaler=dict(scale=1.0), **OTHER_WORK),
    'a training script': dict(model_state_dict=WEIGHTS, optimizer_state_dict=dict(state={}), loss=0.5),
    'SAM, segmentation': dict(net=WEIGHTS, epoch=1),
    'DeepSpeed, one rank of ZeRO-2': dict(module=WEIGHTS, ds_version='0.19', buffer_names=[]),
    'averages alone': dict(model_ema=WEIGHTS, epoch=1),
    'DINO, two networks': dict(student=AVERAGES, teacher=WEIGHTS),
    'DDP': dict(model={f'module.{name}': value for name, value in WEIGHTS.items()}),
    'a weight of that name': {'model': torch.ones(2), **WEIGHTS},
}


def same(found: dict, expected: dict) -> bool:
    return list(found) == list(expected) and all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize('kind', FILES)
def test_keys_of_weights(tmp_path: Path, kind: str) -> None:
    path = str(tmp_path / 'x.pth')
    torch.save(FILES[kind], path)
    found = read_checkpoint(path)
    expected = FILES[kind] if 'model' in kind or kind.startswith('a weight') else WEIGHTS
    assert same(found['state_dict'], expected)
    # Their epochs and optimizers are not MMEngine's.
    assert ('epoch' in found) is (kind == 'timm, training')


def test_which_weights_are_taken_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / 'x.pth')
    torch.save(FILES['DeiT, training'], path)
    told: list[str] = []
    monkeypatch.setattr('mmzero.checkpoint.others.keys.print_log', lambda text, *_: told.append(text))
    read_checkpoint(path)
    assert told == [f"{path}: weights are taken from 'model'; it also holds 'model_ema'"]


def test_a_file_without_weights(tmp_path: Path) -> None:
    path = str(tmp_path / 'x.pth')
    torch.save(dict(epoch=1, optimizer=dict(state={})), path)
    with pytest.raises(CheckpointError, match="x.pth holds no weights; it holds 'epoch', 'optimizer'"):
        read_checkpoint(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """As transformers saved its models in parts."""
    parts = {'pytorch_model-00001-of-00002.bin': ['a.weight'], 'pytorch_model-00002-of-00002.bin': ['a.bias']}
    for file, names in parts.items():
        torch.save({name: WEIGHTS[name] for name in names}, tmp_path / file)
    files = {name: file for file, names in parts.items() for name in names}
    (tmp_path / 'pytorch_model.bin.index.json').write_text(json.dumps(dict(metadata={}, weight_map=files)))
    return tmp_path


def test_parts_of_hugging_face(folder: Path) -> None:
    assert not is_sharded(folder)
    for path in (folder, folder / 'pytorch_model.bin.index.json'):
        assert same(read_checkpoint(str(path))['state_dict'], WEIGHTS)


def test_one_file_of_hugging_face(tmp_path: Path) -> None:
    torch.save(WEIGHTS, tmp_path / 'pytorch_model.bin')
    for path in (tmp_path, tmp_path / 'pytorch_model.bin'):
        assert same(read_checkpoint(str(path))['state_dict'], WEIGHTS)


def test_faults_of_parts(folder: Path) -> None:
    index = folder / 'pytorch_model.bin.index.json'
    torch.save({'b': torch.ones(1)}, folder / 'pytorch_model-00001-of-00002.bin')
    with pytest.raises(CheckpointError, match="names 'a.weight' in pytorch_model-00001-of-00002.bin, which does not"):
        read_checkpoint(str(folder))
    (folder / 'pytorch_model-00001-of-00002.bin').unlink()
    with pytest.raises(CheckpointError, match='names pytorch_model-00001-of-00002.bin, which .* does not hold'):
        read_checkpoint(str(folder))
    # No way out of the folder.
    torch.save(WEIGHTS, folder.parent / 'outside.bin')
    index.write_text(json.dumps(dict(weight_map={'a.weight': '../outside.bin'})))
    with pytest.raises(CheckpointError, match='does not hold'):
        read_checkpoint(str(folder))
    index.write_text('{"weight_map": 1')
    with pytest.raises(CheckpointError, match='is no index of weights'):
        read_checkpoint(str(folder))


def test_a_folder_of_deepspeed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / 'epoch_1.pth'
    folder.mkdir()
    torch.save({}, folder / 'zero_pp_rank_0_mp_rank_00_model_states.pt')
    assert not is_sharded(folder)
    with pytest.raises(CheckpointError, match=r'lacks \*_optim_states.pt with its weights'):
        read_checkpoint(str(folder))
    torch.save({}, folder / 'zero_pp_rank_0_mp_rank_00_optim_states.pt')
    monkeypatch.setitem(sys.modules, 'deepspeed', None)
    advice = f'python {tmp_path}/zero_to_fp32.py {tmp_path} TARGET --tag epoch_1.pth'
    with pytest.raises(CheckpointError, match=advice):
        read_checkpoint(str(folder))


def test_other_folders_are_looked_at_as_sharded_checkpoints(tmp_path: Path) -> None:
    assert is_sharded(tmp_path)
    assert not is_sharded(tmp_path / 'none')
