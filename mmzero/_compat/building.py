"""Building models on the meta device."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

T = TypeVar('T')


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Build modules whose parameters go to the meta device as they are registered; buffers stay real.

    ``torch.device('meta')`` would take everything, and models that read values while they are built (Swin calls
    ``.item()`` on a linspace) fail under it. Remove once torch offers this for parameters alone.

    Yields:
        None: Modules built inside have no parameter storage.
    """
    register = nn.Module.register_parameter
    # One parameter may be registered in several places; kept weakly, so that what is real is freed.
    made = WeakIdKeyDictionary()

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, param)
        if param is not None and not param.is_meta:
            if param not in made:
                meta = nn.Parameter(param.detach().to('meta'), requires_grad=param.requires_grad)
                meta.__dict__.update(vars(param))
                made[param] = meta
            self._parameters[name] = made[param]

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def build_with_meta_parameters(build: Callable[[], T]) -> T:
    """Build a model with its parameters on meta, or for real where it uses their values while it is built.

    Args:
        build (Callable[[], T]): Builds the model; may be called twice.

    Returns:
        T: The model.
    """
    try:
        with parameters_on_meta():
            built = build()
        if not _has_meta_attributes(built):
            return built
    except (NotImplementedError, RuntimeError) as error:
        if 'meta' not in str(error):
            raise
    return build()


def _has_meta_attributes(model: Any) -> bool:
    """Whether a tensor that is no parameter or buffer was computed from a parameter, so that nothing would fill it."""
    attributes = [value for module in model.modules() for value in vars(module).values()]
    held = [item for value in attributes if isinstance(value, (list, tuple)) for item in value]
    return any(isinstance(value, torch.Tensor) and value.is_meta for value in attributes + held)
