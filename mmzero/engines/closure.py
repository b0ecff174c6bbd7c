"""Optimizers whose step runs forward and backward by itself."""

import inspect

NO_CLOSURE = (
    "its step needs a closure that runs forward and backward again, which MMEngine's OptimWrapper never gives, with or "
    'without sharding; use another optimizer'
)


def needs_closure(cls: type) -> bool:
    """Say whether an optimizer's step cannot be called without a closure.

    Args:
        cls (type): The optimizer's class, such as ``torch.optim.LBFGS``.

    Returns:
        bool: Whether it needs one.
    """
    closure = inspect.signature(cls.step).parameters.get('closure')  # type: ignore[attr-defined]
    return closure is not None and closure.default is inspect.Parameter.empty
