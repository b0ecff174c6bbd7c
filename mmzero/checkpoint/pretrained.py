"""Weights that ``init_cfg=dict(type='Pretrained', ...)`` and ``init_weights`` of models read by themselves."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from mmengine.runner import checkpoint as mmengine_checkpoint
from mmengine.runner.checkpoint import CheckpointLoader
from torch import nn

from mmzero.checkpoint.load import refuse_nothing
from mmzero.checkpoint.names import clean_names
from mmzero.checkpoint.read import read_checkpoint, safe_loading
from mmzero.errors import CheckpointError


@contextmanager
def pretrained_loading() -> Iterator[None]:
    """Let models read pretrained files inside, as safely as mmzero reads its own, and refuse to load nothing.

    Models read through MMEngine's CheckpointLoader and load by MMEngine's function or torch's method, with
    ``strict=False``: a file of another model would pass with a warning among many.

    Yields:
        None: For one rank alone.
    """
    files: list[str] = []
    load = CheckpointLoader.load_checkpoint

    def read(filename: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        files.append(filename)
        with patch.object(CheckpointLoader, 'load_checkpoint', load):
            return read_checkpoint(filename)

    def source() -> str:
        return files[-1] if files else 'init_weights'

    by_mmengine = _checked(mmengine_checkpoint.load_state_dict, source)
    by_torch = _checked(nn.Module.load_state_dict, source)
    with (
        safe_loading(),
        patch.object(CheckpointLoader, 'load_checkpoint', read),
        patch.object(mmengine_checkpoint, 'load_state_dict', by_mmengine),
        patch.object(nn.Module, 'load_state_dict', by_torch),
        patch.object(mmengine_checkpoint, '_load_checkpoint_with_prefix', _with_prefix),
    ):
        yield


@contextmanager
def nothing_loaded() -> Iterator[None]:
    """Let models that read files while they are built, such as those of a teacher, read none inside.

    On ranks other than 0, and where a config is only checked, what is read would go to the meta device.

    Yields:
        None: MMEngine's ``load_checkpoint`` does nothing inside.
    """

    def load(model: nn.Module, checkpoint: dict, *args: Any, **kwargs: Any) -> dict:
        return checkpoint

    with (
        patch.object(mmengine_checkpoint, '_load_checkpoint', lambda *args, **kwargs: dict(state_dict={})),
        patch.object(mmengine_checkpoint, '_load_checkpoint_to_model', load),
    ):
        yield


def _checked(load: Callable, source: Callable[[], str]) -> Callable:
    def checked(module: nn.Module, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        wanted = module.state_dict()
        state = clean_names(state_dict, wanted)
        refuse_nothing(module, state, wanted, source())
        try:
            return load(module, state, *args, **kwargs)
        except RuntimeError as error:
            # Shapes that differ, all of them, are none of a config's other faults.
            raise CheckpointError(f'{source()} does not fit {type(module).__name__}: {error}') from error

    return checked


def _with_prefix(prefix: str, filename: str, map_location: Any = None) -> dict[str, Any]:
    """As MMEngine's function of this name, which asserts that something has the prefix."""
    state = CheckpointLoader.load_checkpoint(filename)['state_dict']
    start = prefix.removesuffix('.') + '.'
    found = {name.removeprefix(start): value for name, value in state.items() if name.startswith(start)}
    if not found:
        heads = sorted({name.split('.')[0] for name in state})
        raise CheckpointError(
            f'init_cfg.prefix: got {prefix!r}, with which no weight in {filename} begins; they begin with '
            f'{", ".join(heads[:8])}'
        )
    return found
