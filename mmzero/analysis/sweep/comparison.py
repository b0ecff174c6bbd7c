"""How far two trainings are apart, and how far they may be."""

import math
from typing import Any

import torch
from torch import Tensor

from mmzero.analysis.sweep.training import Record

BOUNDS = dict(loss=1e-6, norm=1e-6, grad=1e-6, update=1e-5, tensor=1e-4, buffer=1e-5)
"""The project's bounds in fp32: of each loss and gradient norm, relative; of the first gradients, per tensor with a
floor; of the update after the last step, over the model and per tensor; of buffers, per tensor."""

ROOM = 1.5
"""How many times farther than a run that is rounded otherwise a model may be, where that run itself leaves the bound."""

NOISE = 1e-4
"""Elements of a gradient below this share of the tensor's root mean square are taken for rounding noise: Adam makes a
full step of any gradient, also of what rounding left of one that is truly zero, such as that of a key's bias."""


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
    apart = dict(loss=_largest(found.losses, reference.losses), norm=_largest(found.norms, reference.norms))
    if reference.after:
        apart.update(_weights(found, reference))
    return apart


def _largest(ours: list[float], theirs: list[float]) -> float:
    return max(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(ours, theirs, strict=True))


def _weights(found: Record, reference: Record) -> dict[str, float]:
    one_sided = [name for name, grad in reference.grads.items() if (grad is None) != (found.grads[name] is None)]
    if one_sided:
        raise ValueError(f'gradients in one of the trainings only: {", ".join(one_sided[:5])} ({len(one_sided)})')
    grads = {name: grad for name, grad in reference.grads.items() if grad is not None}
    still = [
        name
        for name in reference.before
        if name not in grads and not torch.equal(found.after[name], reference.after[name])
    ]
    if still:
        raise ValueError(f'moved without a gradient: {", ".join(still[:5])} ({len(still)})')
    total = float(_norm(grads))
    off, moved = {}, {}
    for name, grad in grads.items():
        real = grad.abs() >= NOISE * grad.square().mean().sqrt()
        off[name] = (found.after[name] - reference.after[name])[real]
        moved[name] = (reference.after[name] - reference.before[name])[real]
    return dict(
        grad=max(_grad(found.grads[name], grad, total) for name, grad in grads.items()),
        update=float(_norm(off) / _norm(moved)),
        tensor=max(float(off[name].norm() / moved[name].norm()) for name in grads if moved[name].norm()),
        buffer=max([0.0, *(_relative(found.buffers[name], value) for name, value in reference.buffers.items())]),
    )


def _grad(found: Any, reference: Tensor, total: float) -> float:
    # The floor: 1e-7 of the norm over the model, at the bound.
    scale = float(reference.norm()) + 0.1 * total
    return float((found - reference).norm()) / scale if scale else 0.0


def _relative(found: Tensor, reference: Tensor) -> float:
    if not reference.is_floating_point():
        return 0.0 if torch.equal(found, reference) else math.inf
    return float((found - reference).norm() / reference.norm().clamp_min(1e-12))


def _norm(tensors: dict[str, Tensor]) -> Tensor:
    return torch.stack([tensor.norm() for tensor in tensors.values()]).norm()


def beyond(found: dict[str, float], rounded: dict[str, float] | None = None) -> dict[str, float]:
    """Say which distances are larger than allowed.

    Args:
        found (dict[str, float]): From :func:`distances`.
        rounded (dict[str, float], optional): Distances of the reference from itself where its gradients are rounded
            otherwise. Defaults to None: the project's bounds alone.

    Returns:
        dict[str, float]: The bounds that are not kept, by quantity.
    """
    bounds = {what: max(BOUNDS[what], ROOM * (rounded or {}).get(what, 0.0)) for what in found}
    return {what: bound for what, bound in bounds.items() if not found[what] <= bound}
