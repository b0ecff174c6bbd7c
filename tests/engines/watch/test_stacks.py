"""Waiting for other ranks is told from being slow by the stack."""

import sys
import types
from collections.abc import Callable
from types import FrameType

import pytest

from mmzero.engines.watch.stacks import in_backward, shown, waits_for_others


def frames_of(*modules: str) -> list[FrameType]:
    """A stack of functions that seem to be of some modules, the outermost first."""
    found: list[FrameType] = []

    def innermost() -> None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_name == 'call':
            found.append(frame)
            frame = frame.f_back

    call: Callable[[], None] = innermost
    for name in reversed(modules):
        module = types.ModuleType(name)
        exec('def call(): inner()', module.__dict__)
        module.__dict__['inner'] = call
        call = module.__dict__['call']
    call()
    return found


@pytest.mark.parametrize(
    'modules, waits',
    [
        (('user', 'torch.nn.modules.module', 'torch.distributed.fsdp._fully_shard._fsdp_state'), True),
        (('user', 'torch.distributed.distributed_c10d', 'torch._ops'), True),
        (('user', 'mmzero.engines.meeting'), True),
        (('torch.distributed.elastic.multiprocessing.errors', 'user', 'torch.nn.modules.module'), False),
        (('torch.distributed.elastic.multiprocessing.errors', 'torch.nn.modules.module'), False),
        (('user', 'torch.nn.modules.module'), False),
        (('torch.distributed.fsdp._fully_shard._fsdp_state', 'user'), False),
        (('user', 'torch.utils.data.dataloader', 'threading'), False),
        (('user', 'torch.distributedly'), False),
        ((), False),
    ],
)
def test_waits_for_others(modules: tuple[str, ...], waits: bool) -> None:
    assert waits_for_others(frames_of(*modules)) is waits


def test_backward() -> None:
    assert not in_backward([])
    assert not in_backward([sys._getframe()])


def test_shown_has_the_innermost_last() -> None:
    lines = shown(frames_of(*'abcdefghijklmnop')).splitlines()
    assert len(lines) == 12 and all(line.endswith(' call') for line in lines)
