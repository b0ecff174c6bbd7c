"""How far two trainings are apart, and how far they may be."""

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from mmzero.analysis.sweep.training import Record

BOUNDS = dict(first=1e-6, loss=1e-6, norm=1e-6, grad=1e-6, update=1e-5, tensor=1e-4, buffer=1e-5)
"""The project's bounds in fp32: of the first loss and gradient norm, which no rounding has grown into more yet; of each
loss and norm, relative; of the first gradients, per tensor with a floor; of the update after the last step, over the
model and per tensor; of buffers, per tensor."""

ROOM = 1.5
"""How many times farther than a reference that is rounded otherwise a training may be."""

FLOOR = 1e-3
"""What is added to the update of a tensor, as a share of that of the model: some gradients are truly zero, such as that
of a bias before a batch norm, and what rounding leaves of them is no measure."""


def distances(found: Record, reference: Record) -> dict[str, float]:
    """Measure how far a training is from another one.

    Args:
        found (Record): A training.
        reference (Record): The one to measure from.

    Returns:
        dict[str, float]: By the keys of :data:`BOUNDS`, those of weights only where both records hold weights.

    Raises:
        ValueError: If a loss or norm is not finite, or a parameter has a gradient, or moved, in one of them only.
    """
    for name, record in (('reference', reference), ('training', found)):
        if not all(map(math.isfinite, [*record.losses, *record.norms])):
            raise ValueError(f'the {name} has losses {record.losses} and gradient norms {record.norms}')
    losses, norms = _apart(found.losses, reference.losses), _apart(found.norms, reference.norms)
    apart = dict(first=largest([losses[0], norms[0]]), loss=largest(losses), norm=largest(norms))
    if reference.after:
        apart.update(_weights(found, reference))
    return apart


def _apart(ours: list[float], theirs: list[float]) -> list[float]:
    return [abs(a - b) / max(abs(b), 1e-12) for a, b in zip(ours, theirs, strict=True)]


def largest(values: Iterable[float]) -> float:
    """Find the largest value, NaN where there is one, which Python's ``max`` may pass over.

    Args:
        values (Iterable[float]): The values.

    Returns:
        float: The largest; 0 of none.
    """
    return float(torch.tensor([0.0, *values], dtype=torch.float64).max())


def _weights(found: Record, reference: Record) -> dict[str, float]:
    one_sided = [name for name, grad in reference.grads.items() if (grad is None) != (found.grads[name] is None)]
    if one_sided:
        raise ValueError(f'gradients in one of the trainings only: {", ".join(one_sided[:5])} ({len(one_sided)})')
    grads = {name: grad for name, grad in reference.grads.items() if grad is not None}
    ours = {name: grad for name, grad in found.grads.items() if grad is not None}
    still = [
        name
        for name in reference.before
        if name not in grads and not torch.equal(found.after[name], reference.after[name])
    ]
    if still:
        raise ValueError(f'moved without a gradient: {", ".join(still[:5])} ({len(still)})')
    # The floor is 1e-7 of the norm over the model, at the bound.
    total = float(_norm(grads))
    off = {name: found.after[name] - reference.after[name] for name in grads}
    moved = {name: reference.after[name] - reference.before[name] for name in grads}
    all_moved = float(_norm(moved))
    return dict(
        grad=largest(_share(ours[name] - grad, grad, 0.1 * total) for name, grad in grads.items()),
        update=float(_norm(off)) / max(all_moved, 1e-12),
        tensor=largest(_share(off[name], moved[name], FLOOR * all_moved) for name in grads),
        buffer=_buffers(found.buffers, reference.buffers),
    )


def _share(part: Tensor, whole: Tensor, floor: float) -> float:
    scale = float(whole.norm()) + floor
    return float(part.norm()) / scale if scale else 0.0


def _buffers(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    counts = [name for name, value in theirs.items() if not value.is_floating_point()]
    if not all(torch.equal(ours[name], theirs[name]) for name in counts):
        return math.inf
    floats = {name: value for name, value in theirs.items() if name not in counts}
    # Some running means are truly zero, too.
    floor = FLOOR * float(_norm(floats)) if floats else 0.0
    return largest(_share(ours[name] - value, value, floor) for name, value in floats.items())


def _norm(tensors: dict[str, Tensor]) -> Tensor:
    return torch.stack([tensor.norm() for tensor in tensors.values()]).norm()


def bound(what: str, rounded: Mapping[str, float]) -> float:
    """Say how far a quantity may be off.

    Args:
        what (str): A key of :data:`BOUNDS`.
        rounded (Mapping[str, float]): Distances of the reference from itself where its gradients are rounded otherwise.

    Returns:
        float: The project's bound, or ROOM times the distance that rounding alone makes.
    """
    return max(BOUNDS[what], ROOM * rounded.get(what, 0.0))


def beyond(found: Mapping[str, float], rounded: Mapping[str, float]) -> list[str]:
    """Say which distances are larger than allowed.

    Args:
        found (Mapping[str, float]): From :func:`distances`.
        rounded (Mapping[str, float]): As for :func:`bound`; empty for the project's bounds alone.

    Returns:
        list[str]: The quantities; one that is no number is among them.
    """
    return [what for what in found if not found[what] <= bound(what, rounded)]
