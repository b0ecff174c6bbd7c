"""Errors say all they know, also after a journey between ranks."""

import pickle

import pytest

from mmzero.errors import CheckpointError, ConfigError, ZeroError, near_names


def test_config_error_survives_pickling():
    error = ConfigError(['a.b: got 1', 'a.c: got 2'])
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is ConfigError
    assert again.faults == ('a.b: got 1', 'a.c: got 2')
    assert str(again) == str(error)


@pytest.mark.parametrize(
    ('faults', 'message'),
    [
        (['a: x'], '1 fault in the config:\n  a: x'),
        (['a: x', 'b: y'], '2 faults in the config:\n  a: x\n  b: y'),
    ],
)
def test_config_error_lists_every_fault(faults, message):
    assert str(ConfigError(faults)) == message


def test_all_errors_are_value_errors():
    assert issubclass(CheckpointError, ZeroError)
    assert issubclass(ConfigError, ZeroError)
    assert issubclass(ZeroError, ValueError)


@pytest.mark.parametrize(
    ('name', 'known', 'said'),
    [
        ('SwinBlok', ['SwinBlock', 'Linear'], "; did you mean 'SwinBlock'?"),
        ('ab1', ['ab2', 'ab3'], "; did you mean 'ab3' or 'ab2'?"),
        ('xyz', ['b', 'a'], '; known are: a, b'),
        ('xyz', [], ''),
    ],
)
def test_near_names(name, known, said):
    assert near_names(name, known) == said


def test_near_names_of_many_are_cut():
    said = near_names('xyz', [f'n{i:02d}' for i in range(13)])
    assert said.endswith('n11, ...')
    assert 'n12' not in said
