"""What is saved is plain: torch reads it without running anything."""

import enum
from collections import OrderedDict

import numpy as np
import pytest
import torch
from mmengine.logging import HistoryBuffer, MessageHub, MMLogger

from mmzero.checkpoint import message_hub_state, plain, write_checkpoint


class Kind(enum.IntEnum):
    """A number of a class of its own."""

    ONE = 1


def saved_and_loaded(value, path):
    """The value as bare torch reads it, without any allow-list."""
    write_checkpoint(dict(value=plain(value)), str(path))
    return torch.load(path, weights_only=True)['value']


@pytest.mark.parametrize(
    ('value', 'expected'),
    [
        (np.float64(0.1), 0.1),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (np.str_('a'), 'a'),
        (Kind.ONE, 1),
        (OrderedDict(a=1), dict(a=1)),
        ((1, [np.float64(2.0), None]), (1, [2.0, None])),
        (torch.Size([2, 3]), (2, 3)),
        ({3}, [3]),
        ({np.int64(1): 'a'}, {1: 'a'}),
        (b'x', b'x'),
    ],
    ids=lambda value: type(value).__name__,
)
def test_read_by_bare_torch(tmp_path, value, expected):
    found = saved_and_loaded(value, tmp_path / 'x.pth')
    assert found == expected
    assert type(found) is type(expected)


def test_tensors_and_arrays_are_bit_equal(tmp_path):
    array = np.arange(6, dtype=np.float64).reshape(2, 3).T / 7
    tensor = torch.randn(3).to(torch.bfloat16)
    found = saved_and_loaded([array, tensor, torch.nn.Parameter(tensor)], tmp_path / 'x.pth')
    assert np.array_equal(found[0].numpy(), array)
    assert torch.equal(found[1], tensor)
    assert torch.equal(found[2], tensor)


@pytest.mark.parametrize('value', [object(), np.array(['a']), torch.nn.Linear(1, 1)])
def test_what_is_not_plain_is_left_out_and_named(value, caplog):
    # Where print_log writes to; it does not hand messages on to the root logger.
    logger = MMLogger.get_current_instance()
    logger.addHandler(caplog.handler)
    try:
        assert plain(dict(a=[1, value]), 'checkpoint') == dict(a=[1, None])
    finally:
        logger.removeHandler(caplog.handler)
    said = f'checkpoint.a[1]: a {type(value).__name__} cannot be saved as plain data'
    assert said in caplog.text


def test_message_hub_comes_back(tmp_path):
    hub = MessageHub(f'hub of {tmp_path}')
    for value in (0.1, 0.2, 0.7):
        hub.update_scalar('train/loss', value, count=2)
    hub.update_info('iter', 3)
    hub.update_info('last', np.float64(0.3))
    saved = saved_and_loaded(hub.state_dict(), tmp_path / 'x.pth')
    other = MessageHub(f'other of {tmp_path}')
    other.load_state_dict(message_hub_state(saved))
    history = other.get_scalar('train/loss')
    assert isinstance(history, HistoryBuffer)
    for found, expected in zip(history.data, hub.get_scalar('train/loss').data, strict=True):
        assert np.array_equal(found, expected)
    assert history.max_length == hub.get_scalar('train/loss').max_length
    assert (other.get_info('iter'), other.get_info('last')) == (3, 0.3)
    # It goes on as it would have.
    history.update(0.9, 1)
    assert history.current() == 0.9


def test_histories_of_mmengine_stay():
    history = HistoryBuffer([1.0], [1])
    assert message_hub_state(dict(log_scalars=dict(a=history)))['log_scalars']['a'] is history
