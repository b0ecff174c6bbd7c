"""Waiting that no stack shows."""

import sys
from types import FrameType

import pytest

from mmzero.engines.watch.compiling import COMPILING
from mmzero.engines.watch.trail import TRAIL
from mmzero.engines.watch.watcher import Watch


def frame() -> FrameType:
    return sys._getframe()


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    """Without a process group, and so without its thread."""
    made = object.__new__(Watch)
    made.waits_in_backward, made.on_gpu, made._instruction = False, True, None
    monkeypatch.setattr(TRAIL, 'doing', 'in train_step 3')
    return made


def test_a_step_that_stays_at_one_instruction_on_a_gpu(watch: Watch) -> None:
    one, other = frame(), frame()
    assert [watch._waits_unseen([at]) for at in (one, one, other, other, one)] == [False, True, False, True, False]


def test_not_without_a_gpu(watch: Watch) -> None:
    watch.on_gpu, one = False, frame()
    assert not any(watch._waits_unseen([one]) for _ in range(3))


def test_not_between_steps(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TRAIL, 'doing', 'after train_step 3')
    one = frame()
    assert not any(watch._waits_unseen([one]) for _ in range(3))


def test_no_thread_to_look_at(watch: Watch) -> None:
    assert not any(watch._waits_unseen([]) for _ in range(2))


def test_a_compiler_waits_for_nobody(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    watch._since, watch._moves, watch._looks, watch.limit = None, None, 0, 0.0
    watch.rank, watch.host, watch.pid = 0, 'here', 1
    monkeypatch.setattr('mmzero.engines.watch.watcher.waits_for_others', lambda _: True)
    monkeypatch.setattr(COMPILING, 'active', True)
    watch._look()
    assert watch._since is None
    monkeypatch.setattr(COMPILING, 'active', False)
    watch._look()
    assert watch._since is not None
