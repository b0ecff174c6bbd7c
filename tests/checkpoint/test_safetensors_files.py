"""``.safetensors``: one file, several with an index, and what is wrong with them."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mmzero.checkpoint import is_sharded, read_checkpoint
from mmzero.checkpoint.safetensors_files import is_safetensors
from mmzero.checkpoint.sharded import is_whole
from mmzero.errors import CheckpointError

STATE = {'a.weight': torch.arange(12.0).view(4, 3), 'a.bias': torch.ones(4), 'scale': torch.tensor(2.0)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Weights in two files and an index, as transformers writes them."""
    names = {'a.weight': 'model-1.safetensors', 'a.bias': 'model-2.safetensors', 'scale': 'model-2.safetensors'}
    for file in set(names.values()):
        save_file({name: STATE[name] for name in STATE if names[name] == file}, tmp_path / file)
    (tmp_path / 'model.safetensors.index.json').write_text(json.dumps(dict(metadata={}, weight_map=names)))
    return tmp_path


def test_file_folder_and_index(folder: Path) -> None:
    save_file(STATE, folder.parent / 'one.safetensors')
    for path in (folder, folder / 'model.safetensors.index.json', folder.parent / 'one.safetensors'):
        assert is_safetensors(path)
        assert not is_sharded(path)
        found = read_checkpoint(str(path))['state_dict']
        assert found.keys() == STATE.keys()
        assert all(torch.equal(found[name], value) for name, value in STATE.items())


def test_what_is_none(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / 'x.pth', tmp_path / 'no_such_folder'):
        assert not is_safetensors(path)


@pytest.mark.parametrize(
    ('change', 'whole'),
    [
        ({}, True),
        ({'a.bias': torch.ones(5)}, False),
        ({'a.more': torch.ones(1)}, False),
        ({'_extra_state': dict(x=1)}, True),
    ],
)
def test_whole_only_with_every_weight_of_its_shape(folder: Path, change: dict, whole: bool) -> None:
    assert is_whole(folder, STATE | change) is whole
    assert is_whole(folder, {f'module.{name}': value for name, value in (STATE | change).items()}) is whole


def test_weights_that_a_file_has_besides_are_left(folder: Path) -> None:
    assert is_whole(folder, {'a.bias': STATE['a.bias']})


def test_a_file_that_the_index_names_is_missing(folder: Path) -> None:
    (folder / 'model-2.safetensors').unlink()
    with pytest.raises(CheckpointError, match='index.json names model-2.safetensors, which .* does not hold'):
        read_checkpoint(str(folder))


@pytest.mark.parametrize('text', ['{', '[]', '{"weight_map": 3}', '{}'])
def test_an_index_that_is_none(folder: Path, text: str) -> None:
    (folder / 'model.safetensors.index.json').write_text(text)
    with pytest.raises(CheckpointError, match='is no index of weights'):
        read_checkpoint(str(folder))


def test_several_files_need_an_index(folder: Path) -> None:
    (folder / 'model.safetensors.index.json').unlink()
    with pytest.raises(CheckpointError, match='holds model-1.safetensors, model-2.safetensors and no index; name one'):
        read_checkpoint(str(folder))


def test_several_indices(folder: Path) -> None:
    (folder / 'other.safetensors.index.json').write_text('{}')
    with pytest.raises(CheckpointError, match='name one of them'):
        read_checkpoint(str(folder))


@pytest.mark.parametrize('share', [0.0, 0.1, 0.5, 0.99])
def test_a_file_that_was_cut(tmp_path: Path, share: float) -> None:
    path = tmp_path / 'x.safetensors'
    save_file(STATE, path)
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(CheckpointError, match='x.safetensors'):
        read_checkpoint(str(path))
    with pytest.raises(CheckpointError, match='x.safetensors'):
        is_whole(path, STATE)


def test_a_missing_file_names_the_others(tmp_path: Path) -> None:
    save_file(STATE, tmp_path / 'y.safetensors')
    with pytest.raises(CheckpointError, match='no checkpoint at .*x.safetensors; .* holds y.safetensors'):
        read_checkpoint(str(tmp_path / 'x.safetensors'))
