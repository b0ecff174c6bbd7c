"""Fields and values are held against constructors."""

import inspect
from typing import Any, Literal

import numpy as np
import pytest
import torch

from mmzero.config import Faults
from mmzero.runner.kinds import accepts, describe
from mmzero.runner.signatures import check_fields, check_value, signature_of


class Parent:
    """Takes two arguments."""

    def __init__(self, size: int, name: str = 'x') -> None: ...


class Passing(Parent):
    """Passes the rest to its parent."""

    def __init__(self, *args: Any, flag: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


class Popping(Parent):
    """Takes something out before it passes the rest on."""

    def __init__(self, **kwargs: Any) -> None:
        kwargs.pop('hidden', None)
        super().__init__(**kwargs)


class Untold:
    """Takes anything."""

    def __init__(self, **kwargs: Any) -> None: ...


class Bare:
    """Takes nothing."""


def faults_of(target: Any, **cfg: Any) -> list[str]:
    faults = Faults()
    check_fields(target, cfg, 'part', faults)
    return faults.lines


def test_parents_are_followed() -> None:
    signature = signature_of(Passing)
    assert set(signature.params) == {'size', 'name', 'flag'} and not signature.is_open
    assert faults_of(Passing, size=3, flag=True) == []
    assert faults_of(Passing, sizee=3) == ["part.sizee: Passing has no such field; did you mean 'size'?"]


@pytest.mark.parametrize('target', [Popping, Untold, dict, lambda **rest: None])
def test_what_cannot_be_told_is_left(target: Any) -> None:
    assert faults_of(target, anything=3) == []


def test_no_field_and_a_missing_one() -> None:
    assert faults_of(Parent, name='a') == ['part.size: is missing, and Parent needs it']
    assert faults_of(torch.optim.SGD, params=[], lr='abc', momentumm=0.9) == [
        "part.lr: got 'abc'; expected float or Tensor",
        "part.momentumm: SGD has no such field; did you mean 'momentum'?",
    ]


@pytest.mark.parametrize(
    ('wanted', 'right', 'wrong'),
    [
        (int, [1, 2.0, np.int64(3)], ['1', True, 2.5, float('nan'), float('inf'), None, [1]]),
        (float, [1, 2.5, float('inf')], ['1', True, None, [1.0]]),
        (bool, [True, np.bool_(False)], [0, 'yes', None]),
        (str, ['a'], [1, None, ['a']]),
        (int | None, [1, None], ['1', 1.5]),
        (list[int], [[1], (1,), ['unjudged']], [1, 'a', {}, None]),
        (dict, [{}], [1, 'a', []]),
        (Literal['a', 'b'], ['a'], ['c', 1]),
        (float | torch.Tensor, [1.0, torch.ones(1)], ['abc', {}]),
        (Any, [1, 'a', None], []),
        (torch.device, ['cpu', 1], []),
    ],
)
def test_values(wanted: Any, right: list, wrong: list) -> None:
    assert all(accepts(wanted, value) for value in right)
    assert not any(accepts(wanted, value) for value in wrong)


def test_the_default_tells_where_no_annotation_does() -> None:
    def function(flag=False, size=3, name='x', other=None):  # type: ignore[no-untyped-def]
        ...

    assert faults_of(function, flag=True, size=(3, 3), name=None, other='abc') == []
    assert faults_of(function, flag='yes') == ["part.flag: got 'yes'; expected bool"]
    assert faults_of(function, size='large') == ["part.size: got 'large'; expected int or a list or tuple or None"]


def test_an_annotation_that_cannot_be_resolved_spoils_no_other() -> None:
    """Names may exist for type checkers only, as those of torch's DataLoader do."""

    def function(size: 'int' = 1, other: 'OnlyForTypeCheckers' = 1) -> 'OnlyForTypeCheckers': ...  # noqa: F821

    assert faults_of(function, size='8', other=2) == ["part.size: got '8'; expected int"]
    assert signature_of(torch.utils.data.DataLoader).params['batch_size'].annotation == int | None


@pytest.mark.parametrize('value', [None, [1], {}, 1.5])
def test_lenient_takes_loose_annotations(value: Any) -> None:
    param = inspect.Parameter('size', inspect.Parameter.KEYWORD_ONLY, annotation=int)
    for lenient in (True, False):
        faults = Faults()
        check_value(param, value, 'part.size', faults, lenient)
        assert bool(faults.lines) != lenient


def test_types_are_named_as_users_write_them() -> None:
    assert describe(int | None) == 'int or None'
    assert describe(list[int] | dict[str, int]) == 'a list or tuple or a dict'
    assert describe(Literal['a', 3]) == "'a' or 3"
    assert describe(tuple[float | torch.Tensor, float]) == describe(tuple[int, int]) == 'a pair of numbers'
    assert describe(tuple[int, ...]) == describe(tuple[str, str]) == 'a list or tuple'
