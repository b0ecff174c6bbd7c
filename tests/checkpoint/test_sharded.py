"""A sharded checkpoint is there whole or not at all, and what is damaged afterwards is told."""

import os
import pickle
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mmzero.checkpoint import check_files, load_saved, newest_complete, save_sharded, state_of
from mmzero.checkpoint.sharded import folder as folders
from mmzero.checkpoint.sharded import load_rest, load_tensors, tensors_in
from mmzero.errors import CheckpointError
from tests.distributed.cases import damage


class Killed(BaseException):
    """Stands for a signal: nothing of ours catches it."""


@pytest.fixture(autouse=True)
def alone(group: None) -> Iterator[None]:
    dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)
    yield


def save(path: Path, value: float = 1.0) -> None:
    tensors = dict(a=torch.full((4, 3), value), b=torch.full((), value))
    save_sharded(tensors, dict(optimizer=dict(lr=value), meta=dict(epoch=3)), path)


def value_of(path: Path) -> float:
    check_files(path)
    targets = dict(a=torch.zeros(4, 3), b=torch.zeros(()))
    load_tensors(targets, path)
    assert float(targets['b']) == load_rest(path)['optimizer']['lr']
    return float(targets['a'].mean())


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    save(tmp_path / 'x')
    assert value_of(tmp_path / 'x') == 1.0
    assert [path.name for path in tmp_path.iterdir()] == ['x']
    assert state_of(tmp_path / 'x').holds == ('meta', 'optimizer')
    (saved,) = [item for item in tensors_in(tmp_path / 'x').values() if item.name == 'a']
    assert saved.shape == (4, 3)
    target = torch.zeros(4, 3)
    load_saved([(saved, target)])
    assert target.mean() == 1


def test_one_of_the_same_name_is_replaced(tmp_path: Path) -> None:
    save(tmp_path / 'x')
    save(tmp_path / 'x', 2.0)
    assert value_of(tmp_path / 'x') == 2.0
    assert [path.name for path in tmp_path.iterdir()] == ['x']


def calls_of_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a save does to the file system, in order."""
    calls: list[str] = []
    watch(monkeypatch, lambda name: calls.append(name))
    save(tmp_path / 'x', 2.0)
    monkeypatch.undo()
    return calls


def watch(monkeypatch: pytest.MonkeyPatch, note: Callable[[str], None]) -> None:
    for owner, name in ((os, 'fsync'), (os, 'replace'), (folders.shutil, 'rmtree'), (folders, 'checksum')):
        real = getattr(owner, name)

        def noted(*args: Any, name: str = name, real: Any = real, **kwargs: Any) -> Any:
            note(name)
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, noted)


def test_killed_anywhere_costs_at_most_that_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it replaces the only checkpoint."""
    save(tmp_path / 'first' / 'x')
    calls = calls_of_a_save(tmp_path / 'first', monkeypatch)
    assert calls.count('replace') == 2
    found = []
    for last in range(len(calls)):
        root = tmp_path / str(last)
        save(root / 'x')
        left = iter(range(last, -1, -1))

        def die(name: str, left: Iterator[int] = left) -> None:
            if next(left, None) == 0:
                raise Killed(name)

        watch(monkeypatch, die)
        # DCP catches whatever is raised.
        with pytest.raises((Killed, CheckpointError)):
            save(root / 'x', 2.0)
        monkeypatch.undo()
        was_complete = any(state_of(path).fault is None and rest_of(path) == 2.0 for path in root.iterdir())
        newest, _ = newest_complete(root)
        assert newest == root / 'x', calls[last]
        found.append(value_of(newest))
        # Whatever was left of the renames is done.
        assert found[-1] == (2.0 if was_complete else 1.0), calls[last]
        assert sum(state_of(path).fault is None for path in root.iterdir()) == 1
        # And the next save is as ever.
        save(root / 'x', 3.0)
        assert value_of(root / 'x') == 3.0
        assert [path.name for path in root.iterdir()] == ['x']
    assert found == sorted(found)
    assert set(found) == {1.0, 2.0}


def rest_of(path: Path) -> float:
    return load_rest(path)['optimizer']['lr']


def test_a_link_is_replaced(tmp_path: Path) -> None:
    """To a folder on another disk, which stays."""
    save(tmp_path / 'elsewhere' / 'x')
    (tmp_path / 'run').mkdir()
    (tmp_path / 'run' / 'x').symlink_to(tmp_path / 'elsewhere' / 'x')
    save(tmp_path / 'run' / 'x', 2.0)
    assert value_of(tmp_path / 'run' / 'x') == 2.0
    assert value_of(tmp_path / 'elsewhere' / 'x') == 1.0
    assert [path.name for path in (tmp_path / 'run').iterdir()] == ['x']


def test_the_newest_complete_one_with_an_optimizer(tmp_path: Path) -> None:
    assert newest_complete(tmp_path / 'none') == (None, [])
    for name in ['epoch_1', 'epoch_2', 'epoch_3', 'epoch_4', 'best']:
        save_sharded(dict(a=torch.ones(2)), {} if name == 'best' else dict(optimizer={}), tmp_path / name)
    (tmp_path / 'epoch_4' / 'complete.json').unlink()
    # As where the folders were copied in another order.
    os.utime(tmp_path / 'epoch_1')
    (tmp_path / 'epoch_3' / '__0_0.distcp').write_bytes(b'')
    (tmp_path / 'notes').mkdir()
    newest, skipped = newest_complete(tmp_path)
    assert newest == tmp_path / 'epoch_2'
    assert [line.split()[0] for line in skipped] == ['epoch_4', 'epoch_3']
    assert 'has 0 bytes of __0_0.distcp instead of' in skipped[1]


@pytest.mark.parametrize('how', ['missing', 'cut', 'flipped'])
@pytest.mark.parametrize('name', ['__0_0.distcp', '.metadata', 'rest.pth', 'complete.json'])
def test_damage_is_told(tmp_path: Path, name: str, how: str) -> None:
    save(tmp_path / 'x')
    damage(tmp_path / 'x', name, how)
    if (name, how) == ('complete.json', 'flipped'):
        # JSON, or a number in it.
        with pytest.raises(CheckpointError):
            value_of(tmp_path / 'x')
        return
    with pytest.raises(CheckpointError, match=name.replace('.', r'\.')):
        value_of(tmp_path / 'x')


def test_names_and_shapes_that_do_not_fit_are_listed(tmp_path: Path) -> None:
    save(tmp_path / 'x')
    with pytest.raises(CheckpointError, match=r'c is not in it; a has the shape \(4, 3\) there and \(4, 4\) here'):
        load_tensors(dict(c=torch.zeros(2), a=torch.zeros(4, 4)), tmp_path / 'x')


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r'is no complete checkpoint: it has no complete\.json'):
        check_files(tmp_path)


def test_metadata_run_no_code(tmp_path: Path) -> None:
    save(tmp_path / 'x')
    made = tmp_path / 'made'
    (tmp_path / 'x' / '.metadata').write_bytes(pickle.dumps(Runs(made)))
    with pytest.raises(CheckpointError, match=r'names posix\.mkdir, which is not read'):
        tensors_in(tmp_path / 'x')
    assert not made.exists()


class Runs:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / 'file').write_text('')
    with pytest.raises(CheckpointError, match='could not save .*/file/x'):
        save(tmp_path / 'file' / 'x')


@pytest.mark.parametrize('name', ['__0_0.distcp', 'rest.pth'])
def test_a_full_disk_keeps_what_was_there(tmp_path: Path, name: str) -> None:
    """And does not stay full by what was written in vain."""
    save(tmp_path / 'x')
    size = torch.ones(2**16)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**15, before[1]))
    try:
        with pytest.raises(CheckpointError, match='could not save .*/x: ') as caught:
            if name == 'rest.pth':
                save_sharded(dict(a=torch.ones(2)), dict(optimizer=size), tmp_path / 'x')
            else:
                save_sharded(dict(a=size), dict(optimizer={}), tmp_path / 'x')
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert name != 'rest.pth' or 'File too large' in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ['x']
    assert value_of(tmp_path / 'x') == 1.0
