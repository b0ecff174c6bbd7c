"""A checkpoint is there whole or not at all."""

import errno

import pytest
import torch

from mmzero.checkpoint import write_checkpoint
from mmzero.errors import CheckpointError


@pytest.fixture
def full_disk(monkeypatch):
    """Make torch.save write some bytes and then find the disk full."""

    def save(checkpoint, file):
        file.write(b'part')
        raise OSError(errno.ENOSPC, 'No space left on device')

    monkeypatch.setattr(torch, 'save', save)


def test_makes_folders_and_leaves_only_the_file(tmp_path):
    path = tmp_path / 'a' / 'b' / 'x.pth'
    write_checkpoint(dict(x=torch.ones(2)), str(path))
    assert [item.name for item in path.parent.iterdir()] == ['x.pth']
    assert torch.equal(torch.load(path)['x'], torch.ones(2))


def test_name_without_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_checkpoint(dict(x=1), 'x.pth')
    assert torch.load('x.pth') == dict(x=1)


def test_full_disk_keeps_the_old_file_and_no_part(tmp_path, request):
    path = tmp_path / 'x.pth'
    write_checkpoint(dict(x=1), str(path))
    request.getfixturevalue('full_disk')
    with pytest.raises(CheckpointError, match=r'could not save .*x\.pth: .*No space left'):
        write_checkpoint(dict(x=2), str(path))
    assert [item.name for item in tmp_path.iterdir()] == ['x.pth']
    assert torch.load(path) == dict(x=1)


def test_full_disk_leaves_nothing(tmp_path, full_disk):
    with pytest.raises(CheckpointError, match='No space left'):
        write_checkpoint(dict(x=2), str(tmp_path / 'x.pth'))
    assert list(tmp_path.iterdir()) == []


def test_value_that_cannot_be_pickled_leaves_no_part(tmp_path):
    with pytest.raises(CheckpointError, match='could not save'):
        write_checkpoint(dict(x=lambda: 1), str(tmp_path / 'x.pth'))
    assert list(tmp_path.iterdir()) == []


def test_folder_that_cannot_be_made(tmp_path):
    (tmp_path / 'file').write_text('')
    with pytest.raises(CheckpointError, match='could not save .*/file/x.pth'):
        write_checkpoint(dict(x=1), str(tmp_path / 'file' / 'x.pth'))


def test_name_appears_only_when_all_is_written(tmp_path, monkeypatch):
    path = tmp_path / 'x.pth'
    seen = []
    save = torch.save

    def watch(checkpoint, file):
        save(checkpoint, file)
        seen.extend(item.name for item in tmp_path.iterdir())

    monkeypatch.setattr(torch, 'save', watch)
    write_checkpoint(dict(x=1), str(path))
    assert seen == ['x.pth.part']
