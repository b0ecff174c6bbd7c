"""``model_wrapper_cfg.activation_checkpointing``: what is recomputed in backward, and what is kept instead."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mmzero.config.policy import wrap_policy
from mmzero.config.reader import Faults, flag, module_names, one_of, option, read_fields

SAVES = ('inputs', 'matmuls', 'all')
_UNITS = dict(B=1, kB=10**3, MB=10**6, GB=10**9, TB=10**12, KiB=2**10, MiB=2**20, GiB=2**30, TiB=2**40)


def each_nth(value: Any) -> int:
    """A reader for n in each n-th."""
    if type(value) is int and value > 0:
        return value
    raise ValueError('allowed: 1 for each, 2 for each second, and so on')


def memory_size(value: Any) -> int | None:
    """A reader for an amount of memory: bytes, or a number with its unit."""
    if value is None or type(value) is int and value > 0:
        return value
    found = re.fullmatch(r'(\d+(?:\.\d+)?) ?([a-zA-Z]+)', value) if isinstance(value, str) else None
    if found and found[2] in _UNITS and len(found[1]) < 20 and (size := round(float(found[1]) * _UNITS[found[2]])) > 0:
        return size
    raise ValueError(f"expected bytes, or a number with one of {', '.join(_UNITS)}, such as '20GiB'")


def host(value: Any) -> str | None:
    """A reader for where what is kept is put."""
    return one_of(None, 'cpu')(value)


def kind(value: Any) -> str | None:
    """A reader for the type of the dict."""
    return one_of(None, 'Budget')(value)


@dataclass(frozen=True)
class CheckpointingConfig:
    """What is recomputed in backward; a list of module names stands for ``dict(modules=...)``.

    Modules that ask for it by an option of their own (``with_cp=True``, ``num_cp``, gradient checkpointing of
    Hugging Face or timm) are found by themselves, with the same settings.

    Args:
        modules (tuple[str, ...]): Names of modules, as MMEngine's key of that name takes them. Defaults to none.
        policy: A wrap policy (:func:`mmzero.policies.build_policy`) that chooses further modules. Defaults to None:
            none, and for a 'Budget' all repeated blocks, ``dict(type='AutoPolicy', small=True)``.
        every (int): Of the modules that the policy has chosen, in the order of the model, take the first of each
            so many. Defaults to 1: all of them.
        save (str): What a module keeps from forward. 'inputs': its inputs alone, all else is recomputed. 'matmuls':
            also the outputs of matrix products, convolutions and attention, so that what is recomputed is cheap.
            'all': all that it would keep without checkpointing, for ``offload``. Defaults to 'inputs'.
        offload (str, optional): 'cpu' puts what is kept for backward into pinned host memory, copied on a stream of
            its own; on a CPU it is there already. Defaults to None.
        early_stop (bool): Whether a recompute ends with the last tensor that backward needs. Defaults to True.
        preserve_rng_state (bool): Whether a recompute draws the random numbers of the forward. Defaults to True.
        determinism_check (bool): Whether shapes, dtypes and devices of what is recomputed are compared with the
            forward's. Defaults to True.
        debug (bool): Whether an error of that comparison shows the operators of both. Defaults to False.
        type (str, optional): 'Budget': of the modules, recompute those alone whose recompute is cheapest, so that
            ``memory`` is kept. Defaults to None: all of them.
        memory (int, optional): For 'Budget': bytes that may be kept for backward on a rank, activations alone.
        is_asked (bool): Whether a dict says something, so that it has to match something. No field of the dict.
    """

    modules: tuple[str, ...] = option((), module_names)
    policy: Any = option(None, wrap_policy)
    every: int = option(1, each_nth)
    save: str = option('inputs', one_of(*SAVES))
    offload: str | None = option(None, host)
    early_stop: bool = option(True, flag)
    preserve_rng_state: bool = option(True, flag)
    determinism_check: bool = option(True, flag)
    debug: bool = option(False, flag)
    type: str | None = option(None, kind)
    memory: int | None = option(None, memory_size)
    is_asked: bool = field(default=False, compare=False)

    @classmethod
    def read_config(cls, value: Any, path: str, faults: Faults) -> 'CheckpointingConfig':
        """Read a list of module names or a dict.

        Args:
            value (list or dict): The config; not changed.
            path (str): Its config path.
            faults (Faults): Takes what is wrong.

        Returns:
            CheckpointingConfig: The config, with defaults where a field has a fault.
        """
        if not isinstance(value, Mapping):
            try:
                return cls(modules=module_names(value))
            except ValueError as error:
                faults.add(path, f"got {value!r}; {error}, or a dict, such as dict(policy='AutoPolicy')")
                return cls()
        config = read_fields(cls, value, path, faults)
        if faults.at(path):
            # What is read without its fault may match nothing, which would be a fault that nobody made.
            return config
        _refuse_contradictions(config, path, faults)
        return replace(config, is_asked=bool(value))

    @property
    def chooses(self) -> bool:
        """Whether the first iterations show which modules are recomputed."""
        return self.type == 'Budget'


def _refuse_contradictions(config: CheckpointingConfig, path: str, faults: Faults) -> None:
    if config.every > 1 and config.policy is None and (config.modules or not config.chooses):
        faults.add(f'{path}.every', 'counts what a policy chooses, and there is none; name one in policy')
    if config.save == 'all' and config.offload is None:
        faults.add(f'{path}.save', "got 'all', which recomputes nothing; it is for offload='cpu'")
    if config.save == 'all':
        for name in ('early_stop', 'preserve_rng_state', 'determinism_check', 'debug'):
            if getattr(config, name) != getattr(CheckpointingConfig, name):
                faults.add(f'{path}.{name}', "is for what is recomputed, and with save='all' nothing is; remove it")
    if config.save == 'matmuls' and config.offload is not None:
        faults.add(
            f'{path}.offload',
            f"got {config.offload!r} beside save='matmuls', whose outputs torch keeps where they are; use "
            "save='inputs' or 'all'",
        )
    if config.debug and (config.save == 'matmuls' or config.chooses):
        other = "type='Budget'" if config.chooses else "save='matmuls'"
        faults.add(f'{path}.debug', f'got True beside {other}, which torch cannot debug; look for the error without it')
    if config.chooses:
        if config.memory is None:
            faults.add(f'{path}.memory', "is missing; say what may be kept for backward, such as memory='20GiB'")
        if config.save != 'inputs':
            faults.add(f'{path}.save', f'got {config.save!r}; a Budget recomputes modules whole, or not at all')
    elif config.memory is not None:
        faults.add(f'{path}.memory', "is for type='Budget'")
