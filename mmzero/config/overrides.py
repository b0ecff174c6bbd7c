"""``model_wrapper_cfg.overrides``: rules for single units."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch

from mmzero.config.reader import Faults, option, optional_dtype, optional_flag


def unit_patterns(value: Any) -> tuple[str, ...]:
    """A reader for one pattern on the names of units or a list of them."""
    patterns = (value,) if isinstance(value, str) else value
    if isinstance(patterns, (list, tuple)) and patterns and all(isinstance(p, str) and p for p in patterns):
        return tuple(patterns)
    raise ValueError("expected a pattern on the names of units, or a list of them, such as 'backbone.layers.*'")


def reshard_after_forward(value: Any) -> bool | int | str | None:
    """A reader for what becomes of gathered parameters after forward."""
    if value is None or isinstance(value, bool) or value == 'node' or type(value) is int and value > 1:
        return value
    if value == 1 and type(value) is int:
        raise ValueError('one rank that holds all of a unit is what False means')
    raise ValueError("allowed: True, False, 'node', or a number of ranks that divides those of the shard dimension")


def tensor_dim(value: Any) -> int | None:
    """A reader for a dimension of a parameter, counted from the first."""
    if value is None or type(value) is int and value >= 0:
        return value
    raise ValueError('allowed: 0, 1, 2, ... for the dimensions of a parameter')


@dataclass(frozen=True)
class OverrideConfig:
    """One entry of ``overrides``; what it leaves out stays as an earlier entry or the stage says.

    Args:
        units (tuple[str, ...]): Patterns on the names of units, segment by segment; an entry is for the units that
            one names, and for those that lie below what one names. '(root)' is the root unit.
        reshard_after_forward (bool or int or str, optional): Whether gathered parameters are freed after forward;
            a proper divisor of the shard ranks, or 'node': resharded to so many. Stage 3 only.
        param_dtype (torch.dtype, optional): In which a unit is gathered.
        cast_forward_inputs (bool, optional): Whether floating inputs are cast to ``param_dtype``.
        shard_dim (int, optional): The dimension along which parameters are split.
        shard (bool, optional): False: every rank keeps the unit whole.
        compile (bool, optional): Whether ``compile`` is for the unit; by default for units that hold no other one.
    """

    units: tuple[str, ...] = option((), unit_patterns)
    reshard_after_forward: bool | int | str | None = option(None, reshard_after_forward)
    param_dtype: torch.dtype | None = option(None, optional_dtype)
    cast_forward_inputs: bool | None = option(None, optional_flag)
    shard_dim: int | None = option(None, tensor_dim)
    shard: bool | None = option(None, optional_flag)
    compile: bool | None = option(None, optional_flag)

    def rules(self) -> dict[str, Any]:
        """What it says, by the names of the fields of ``UnitRules``."""
        names = [field.name for field in fields(self) if field.name != 'units']
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


def check_overrides(
    overrides: tuple[OverrideConfig, ...], stage: int, path: str, faults: Faults, compiles: bool = False
) -> None:
    """Refuse entries that contradict themselves or the stage.

    Args:
        overrides (tuple[OverrideConfig, ...]): The entries.
        stage (int): ZeRO stage.
        path (str): Their config path.
        faults (Faults): Takes what is wrong.
        compiles (bool): Whether units are compiled. Defaults to False.
    """
    if stage == 0 and any(entry.rules().keys() != {'compile'} for entry in overrides):
        faults.add(
            path,
            'needs stage 1, 2 or 3; at stage 0 every rank holds all, in the dtype of the model, and an entry may have '
            'units and compile alone',
        )
        return
    for index, entry in enumerate(overrides):
        place = f'{path}[{index}]'
        # An entry with a fault was read without what is wrong in it.
        if not faults.at(place):
            for name, fault in _faults(entry, stage):
                faults.add(f'{place}{name}', fault)
            if entry.compile and not compiles:
                faults.add(f'{place}.compile', 'got True, and nothing says how; set model_wrapper_cfg.compile, too')


def _faults(entry: OverrideConfig, stage: int) -> Iterator[tuple[str, str]]:
    rules = entry.rules()
    if not entry.units:
        yield '.units', "is missing; name the units that the entry is for, such as 'backbone.layers.*'"
    if not rules:
        allowed = ', '.join(field.name for field in fields(entry) if field.name != 'units')
        yield '', f'says nothing about its units; give one of {allowed}'
    if stage in (1, 2) and 'reshard_after_forward' in rules:
        yield (
            '.reshard_after_forward',
            f'got {entry.reshard_after_forward!r}; at stage {stage} parameters stay gathered after forward. Use '
            'stage=3, where reshard_after_forward=False keeps those of single units gathered',
        )
    for name in ('reshard_after_forward', 'shard_dim'):
        if entry.shard is False and name in rules:
            yield f'.{name}', f'got {rules[name]!r} beside shard=False, which leaves nothing to shard; remove one'
