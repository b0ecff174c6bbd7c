"""Real models of several packages: a step with their own switches off and one with mmzero's regions are the same."""

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint as torch_checkpoint

from mmzero.config import CheckpointingConfig
from mmzero.patches import Applied, apply_patches
from mmzero.patches.switch import SWITCHES


class Calls:
    """How often torch's checkpoint was called, in each of its forms."""

    reentrant = 0
    non_reentrant = 0


@contextlib.contextmanager
def counted() -> Iterator[Calls]:
    """Count calls of torch's checkpoint, however its caller has imported it."""
    calls = Calls()
    function, generator = torch_checkpoint.CheckpointFunction, torch_checkpoint._checkpoint_without_reentrant_generator

    class Counting:
        @staticmethod
        def apply(*args: Any) -> Any:
            calls.reentrant += 1
            return function.apply(*args)

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.non_reentrant += 1
        return generator(*args, **kwargs)

    torch_checkpoint.CheckpointFunction = Counting
    torch_checkpoint._checkpoint_without_reentrant_generator = counting
    try:
        yield calls
    finally:
        torch_checkpoint.CheckpointFunction = function
        torch_checkpoint._checkpoint_without_reentrant_generator = generator


def without_switches(model: nn.Module) -> nn.Module:
    """Copy a model, with all its own checkpointing off."""
    plain = copy.deepcopy(model)
    for module in plain.modules():
        for holder in (module, getattr(module, 'config', None)):
            for name in SWITCHES:
                if isinstance(getattr(holder, name, None), (bool, int)):
                    setattr(holder, name, False)
    return plain


def results(model: nn.Module, run: Callable[[nn.Module], Any]) -> dict[str, Tensor | None]:
    """All that a step with a fixed random state computes, by name."""
    torch.manual_seed(1)
    total(run(model)).backward()
    found = {f'grad of {name}': param.grad for name, param in model.named_parameters()}
    return dict(found, drawn=torch.rand(3), **{name: buffer.clone() for name, buffer in model.named_buffers()})


def total(outputs: Any) -> Tensor:
    """A loss of all tensors in what a model returns."""
    if isinstance(outputs, Tensor):
        return outputs.float().square().mean() if outputs.is_floating_point() else torch.zeros(())
    if isinstance(outputs, dict):
        outputs = list(outputs.values())
    return sum(map(total, outputs)) if isinstance(outputs, (tuple, list)) else torch.zeros(())


def check_same_step(
    model: nn.Module,
    run: Callable[[nn.Module], Any],
    config: CheckpointingConfig = CheckpointingConfig(),  # noqa: B008
    plain: nn.Module | None = None,
) -> Applied:
    """Patch a model, and check that a step is bitwise that of the same model without checkpointing.

    Also, that torch's checkpoint is called in its non-re-entrant form alone, and by regions alone.
    """
    plain = without_switches(model) if plain is None else plain
    applied = apply_patches(model, config)
    with counted() as calls:
        found = results(model, run)
    expected = results(plain, run)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        both_none = value is None and found[name] is None
        assert both_none or torch.equal(value, found[name]), name
    assert any(value is not None for name, value in expected.items() if name.startswith('grad of'))
    assert calls.reentrant == 0
    assert applied.never_run() == ()
    assert calls.non_reentrant >= len(applied.regions)
    assert not applied.left
    return applied
