"""``model_wrapper_cfg.compile``: torch.compile of each unit by itself."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from mmzero.config.reader import Faults, flag, one_of, option, optional_flag, read_fields
from mmzero.errors import near_names


def backend(value: Any) -> str | Callable:
    """A reader for a backend of torch.compile: its name, or a function as torch takes it."""
    if callable(value):
        return value
    # Those of other packages, which register themselves, are among them.
    known = torch.compiler.list_backends(exclude_tags=())
    if isinstance(value, str) and value in known:
        return value
    raise ValueError(f'no backend of torch.compile{near_names(str(value), known)}')


def mode(value: Any) -> str | None:
    """A reader for a mode of inductor."""
    # Their other homes would import inductor.
    return one_of(None, 'default', 'reduce-overhead', 'max-autotune', 'max-autotune-no-cudagraphs')(value)


def optional_dict(value: Any) -> dict | None:
    """A reader for options by name, or None."""
    if value is None:
        return None
    if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        return dict(value)
    raise ValueError("expected None or a dict of options of the backend, such as {'shape_padding': True}")


def target(value: Any) -> str:
    """A reader for what MMEngine's strategies call the method to be compiled."""
    if value == 'forward':
        return value
    raise ValueError(
        "allowed: 'forward'; each unit is compiled by itself, and what is between units, such as the rest of "
        'train_step, runs as it is'
    )


@dataclass(frozen=True)
class CompileConfig:
    """What torch.compile does with units; True stands for ``dict()``, False and None for none.

    Args:
        backend (str or Callable): What compiles. Defaults to 'inductor'.
        mode (str, optional): Of inductor: 'default', 'reduce-overhead', 'max-autotune', 'max-autotune-no-cudagraphs'.
        options (dict, optional): Of the backend, in place of ``mode``.
        dynamic (bool, optional): Whether sizes may change without compiling again. Defaults to None: those that have
            changed once.
        fullgraph (bool): Whether a graph break is an error. Defaults to False.
        disable (bool): Whether nothing is compiled after all. Defaults to False.
        target (str): 'forward', the only one: the method of each unit that is compiled.
        is_asked (bool): Whether units are to be compiled. No field of the dict.
    """

    backend: str | Callable = option('inductor', backend)
    mode: str | None = option(None, mode)
    options: dict | None = option(None, optional_dict)
    dynamic: bool | None = option(None, optional_flag)
    fullgraph: bool = option(False, flag)
    disable: bool = option(False, flag)
    target: str = option('forward', target)
    is_asked: bool = field(default=False, compare=False)

    @classmethod
    def read_config(cls, value: Any, path: str, faults: Faults) -> 'CompileConfig':
        """Read True, False, None or a dict.

        Args:
            value (bool or dict, optional): The config; not changed.
            path (str): Its config path.
            faults (Faults): Takes what is wrong.

        Returns:
            CompileConfig: The config, with defaults where a field has a fault.
        """
        if value is None or value is False:
            return cls()
        if value is not True and not isinstance(value, Mapping):
            faults.add(path, f"got {value!r}; expected True, False, or a dict, such as dict(backend='inductor')")
            return cls()
        config = replace(read_fields(cls, {} if value is True else value, path, faults), is_asked=True)
        if not faults.at(path):
            _refuse_contradictions(config, path, faults)
        return config

    @property
    def is_on(self) -> bool:
        """Whether units are compiled."""
        return self.is_asked and not self.disable

    @property
    def backend_name(self) -> str:
        """The backend, for logs and errors."""
        return self.backend if isinstance(self.backend, str) else getattr(self.backend, '__name__', repr(self.backend))

    def arguments(self) -> dict[str, Any]:
        """What ``torch.compile`` is called with.

        Returns:
            dict[str, Any]: Its keyword arguments.
        """
        # It takes keys out of the options that it is given.
        options = None if self.options is None else dict(self.options)
        return dict(
            backend=self.backend, mode=self.mode, options=options, dynamic=self.dynamic, fullgraph=self.fullgraph
        )


def _refuse_contradictions(config: CompileConfig, path: str, faults: Faults) -> None:
    if config.mode is not None and config.options is not None:
        faults.add(f'{path}.mode', f'got {config.mode!r} beside options, which torch.compile takes in its place')
    if config.backend != 'inductor':
        # Other backends get it as an argument that none of torch's own has.
        if config.mode not in (None, 'default'):
            faults.add(f'{path}.mode', f"got {config.mode!r}; it is for backend='inductor'; remove it")
        return
    if config.options is not None:
        import torch._inductor

        known = torch._inductor.list_options()
        for name in config.options.keys() - {*known, 'guard_filter_fn', 'use_aoti'}:
            faults.add(f'{path}.options', f'{name!r} is no option of inductor{near_names(name, known)}')
