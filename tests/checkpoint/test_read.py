"""Reading: old and foreign checkpoints come in, code does not run, faults say what to do."""

import os
import pickle

import numpy as np
import pytest
import torch
from mmengine.logging import HistoryBuffer, MessageHub

from mmzero.checkpoint import placeholders, read_checkpoint, safe_loading
from mmzero.errors import CheckpointError

FORCE = 'TORCH_FORCE_WEIGHTS_ONLY_LOAD'
FORCE_NO = 'TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD'


class Trap:
    """Runs code when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.fixture
def stock(tmp_path):
    """A checkpoint with what MMEngine's Runner puts into its own."""
    hub = MessageHub(f'stock of {tmp_path}')
    for value in (0.5, 0.25):
        hub.update_scalar('train/loss', value)
    hub.update_scalar('lr', np.float64(0.1))
    hub.update_info('best', np.float64(0.3))
    hub.update_info('count', np.int64(3))
    optimizer = dict(state={}, param_groups=[dict(lr=np.float64(0.1), params=[0])])
    checkpoint = dict(
        meta=dict(epoch=2, iter=8, seed=np.int64(7), cfg='a = 1'),
        state_dict={'module.weight': torch.ones(2), 'module.bias': torch.zeros(1)},
        message_hub=hub.state_dict(),
        optimizer=optimizer,
    )
    path = tmp_path / 'epoch_2.pth'
    torch.save(checkpoint, path)
    return path


def write(path, content):
    """Write a file of given bytes or of an object, and return its name."""
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    return str(path)


def test_checkpoint_of_mmengine(stock):
    with pytest.raises(pickle.UnpicklingError):
        torch.load(stock, weights_only=True)
    found = read_checkpoint(str(stock))
    assert found['meta'] == dict(epoch=2, iter=8, seed=7, cfg='a = 1')
    assert list(found['state_dict']) == ['weight', 'bias']
    assert found['optimizer']['param_groups'][0]['lr'] == 0.1
    hub = MessageHub(f'other of {stock}')
    hub.load_state_dict(found['message_hub'])
    history = hub.get_scalar('train/loss')
    assert isinstance(history, HistoryBuffer)
    assert history.data[0].tolist() == [0.5, 0.25]
    assert (hub.get_info('best'), hub.get_info('count')) == (0.3, 3)


@pytest.mark.parametrize('key', ['state_dict', 'model', None])
def test_layouts(tmp_path, key):
    weights = {'module.a': torch.ones(2)}
    name = write(tmp_path / 'x.pth', dict({key: weights}, epoch=1) if key else weights)
    found = read_checkpoint(name)
    assert list(found['state_dict']) == ['a']
    assert found.get('epoch') == (1 if key == 'state_dict' else None)


def test_legacy_format(tmp_path):
    path = tmp_path / 'x.pth'
    torch.save(dict(a=torch.ones(2)), path, _use_new_zipfile_serialization=False)
    assert torch.equal(read_checkpoint(str(path))['state_dict']['a'], torch.ones(2))


@pytest.mark.parametrize('legacy', [False, True])
def test_code_is_refused_and_does_not_run(tmp_path, legacy):
    path, made = tmp_path / 'x.pth', tmp_path / 'made'
    torch.save(dict(state_dict={}, x=Trap(made)), path, _use_new_zipfile_serialization=not legacy)
    with pytest.raises(CheckpointError, match='holds Python objects that mmzero does not run .*mkdir'):
        read_checkpoint(str(path))
    assert not made.exists()
    torch.load(path, weights_only=False)
    assert made.exists()  # the trap works


def test_getattr_reaches_nothing_but_histories(tmp_path):
    class Reach:
        def __reduce__(self):
            return getattr, (HistoryBuffer, '__setstate__')

    with pytest.raises(CheckpointError, match="mmzero does not run .*getattr of .*'__setstate__'"):
        read_checkpoint(write(tmp_path / 'x.pth', dict(x=Reach())))


def test_missing_file_names_the_others(tmp_path):
    for number in range(7):
        write(tmp_path / f'epoch_{number}.pth', dict(a=1))
    with pytest.raises(CheckpointError, match='no checkpoint at .*epoch_9.pth; .* holds ') as caught:
        read_checkpoint(str(tmp_path / 'epoch_9.pth'))
    assert 'epoch_2.pth, epoch_3.pth, epoch_4.pth, epoch_5.pth, epoch_6.pth' in str(caught.value)


@pytest.mark.parametrize('name', ['x.pth', 'no/such/folder/x.pth'])
def test_missing_file_alone(tmp_path, name):
    with pytest.raises(CheckpointError, match=r'no checkpoint at .*x\.pth$'):
        read_checkpoint(str(tmp_path / name))


@pytest.mark.parametrize('share', [0.1, 0.5, 0.99])
@pytest.mark.parametrize('legacy', [False, True])
def test_file_that_was_cut(tmp_path, share, legacy):
    path = tmp_path / 'x.pth'
    torch.save(dict(a=torch.ones(1000)), path, _use_new_zipfile_serialization=not legacy)
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(CheckpointError, match='x.pth.* is damaged or was cut off') as caught:
        read_checkpoint(str(path))
    assert '\n' not in str(caught.value)


@pytest.mark.parametrize('name', ['hello.txt', 'log.txt', 'page.html', 'list.json', 'empty.pth', 'x.png'])
def test_file_that_is_no_checkpoint(tmp_path, name):
    contents = {
        'hello.txt': b'hello',
        'log.txt': b'2024/01/01 12:00:00 - mmengine - INFO - loss: 1.0\n' * 9,
        'page.html': b'<!DOCTYPE html>\n<html>404 Not Found</html>\n',
        'list.json': b'{"a": 1, "b": [1, 2]}',
        'empty.pth': b'',
        'x.png': b'\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR',
    }
    write(tmp_path / 'good.pth', dict(a=1))
    with pytest.raises(CheckpointError, match='damaged or was cut off') as caught:
        read_checkpoint(write(tmp_path / name, contents[name]))
    assert '\n' not in str(caught.value)
    assert 'good.pth' in str(caught.value)
    # What torch advises, to unpickle all the same.
    assert 'weights_only' not in str(caught.value)


@pytest.mark.parametrize('value', [[1, 2], 3, torch.ones(2)])
def test_value_that_is_no_dict(tmp_path, value):
    with pytest.raises(CheckpointError, match=f'holds a {type(value).__name__}, not a dict of weights'):
        read_checkpoint(write(tmp_path / 'x.pth', value))


@pytest.mark.parametrize('before', [None, '0', '1'])
@pytest.mark.parametrize('variable', [FORCE, FORCE_NO])
def test_environment_and_allow_list_are_restored(stock, monkeypatch, variable, before):
    monkeypatch.delenv(variable, raising=False)
    if before is not None:
        monkeypatch.setenv(variable, before)
    allowed = set(torch.serialization.get_safe_globals())
    with pytest.raises(KeyError), safe_loading():
        torch.load(stock)
        assert os.environ.get(FORCE) == '1'
        raise KeyError
    assert os.environ.get(variable) == before
    assert set(torch.serialization.get_safe_globals()) == allowed


def test_code_does_not_run_where_torch_was_told_to_unpickle(tmp_path, monkeypatch):
    monkeypatch.setenv(FORCE_NO, '1')
    name = write(tmp_path / 'x.pth', dict(x=Trap(tmp_path / 'made')))
    with pytest.raises(CheckpointError, match='mmzero does not run'):
        read_checkpoint(name)
    assert not (tmp_path / 'made').exists()
    assert read_checkpoint(write(tmp_path / 'y.pth', dict(a=torch.ones(1))))['state_dict'] == dict(a=1)


def test_placeholders_replace_large_tensors_only():
    large, small = torch.ones(65537), torch.ones(65536)
    found = placeholders(dict(state_dict=dict(a=large), optimizer=[small, 'text']))
    assert found['state_dict']['a'].is_meta
    assert found['state_dict']['a'].shape == large.shape
    assert found['optimizer'] == [small, 'text']
    assert not large.is_meta
