"""Methods that a unit cannot be entered by are refused before anything is sharded."""

from collections.abc import Iterator

import pytest
from torch import nn

from mmzero.config import ZeroConfig
from mmzero.engines import build_engine
from mmzero.errors import PlanError
from mmzero.policies import make_plan, with_methods


class Part(nn.Linear):
    """A unit."""

    def scores(self) -> None:
        """Fine."""

    def each(self) -> Iterator[int]:
        yield 1


def check(*methods: str) -> None:
    model = nn.ModuleDict(dict(part=Part(2, 2)))
    plan = with_methods(make_plan(model, ['part'], 'test'), dict(part=methods))
    build_engine(ZeroConfig()).check_plan(model, plan)


def test_methods_that_exist() -> None:
    check('scores')


@pytest.mark.parametrize('name', ['score', 'forward', 'in_features'])
def test_method_that_is_none(name: str) -> None:
    with pytest.raises(PlanError, match=rf'the method {name} of the unit part \(Part\) is none that it can be entered'):
        check(name)


def test_generator() -> None:
    with pytest.raises(PlanError, match='the method each of the unit part .* is a generator .* leave Part out of wrap'):
        check('scores', 'each')
