"""DeepSpeed's ``scheduler`` section, which MMEngine's ``param_scheduler`` stands for."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mmzero.config import section
from mmzero.engines.options import Training


def scheduler_fault(options: Mapping[str, Any], training: Training) -> Iterator[tuple[str, str]]:
    """Refuse a section that does not say what ``param_scheduler`` says.

    Args:
        options (Mapping[str, Any]): DeepSpeed's config, without 'auto'.
        training (Training): What the run says of its steps.

    Yields:
        tuple[str, str]: Path in the options, and what to write instead.
    """
    given = section(options, 'scheduler')
    if 'type' not in given or training.schedulers is None:
        return
    params = section(given, 'params')
    meant = _TRANSLATIONS.get(str(given['type']), lambda _: None)(params)
    own = [_plain(item) for item in training.schedulers]
    if meant is None and not params:
        # With all values 'auto', or none: those of param_scheduler.
        return
    if meant is None:
        advice = 'say it as param_scheduler, and remove this section'
    elif all(_plain(item) in own for item in meant):
        return
    else:
        told = ', '.join(f'dict({", ".join(f"{k}={v!r}" for k, v in item.items())})' for item in meant)
        advice = f'say param_scheduler=[{told}], and remove this section'
    yield 'scheduler', f"got {given['type']!r}; MMEngine's schedulers alone own the learning rate: {advice}"


def _plain(item: Mapping[str, Any]) -> dict[str, Any]:
    """Without defaults."""
    found = {key: value for key, value in item.items() if key not in ('begin', '_scope_') or value}
    return {
        key: float(value) if isinstance(value, int) and key != 'by_epoch' else value for key, value in found.items()
    }


def _warmup(params: Mapping[str, Any]) -> Sequence[dict[str, Any]] | None:
    steps, low, high = (params.get(f'warmup_{name}') for name in ('num_steps', 'min_lr', 'max_lr'))
    if not steps or params.get('warmup_type', 'log') != 'linear':
        # MMEngine has no logarithmic warmup.
        return None
    factor = float(low or 0) / float(high) if high else 0.0
    return [dict(type='LinearLR', start_factor=factor or 1e-6, by_epoch=False, end=steps)]


def _warmup_decay(params: Mapping[str, Any]) -> Sequence[dict[str, Any]] | None:
    warmup, total = _warmup({'warmup_type': 'linear', **params}), params.get('total_num_steps')
    if warmup is None or not total:
        return None
    decay = dict(type='LinearLR', start_factor=1.0, end_factor=0.0, by_epoch=False, begin=warmup[0]['end'], end=total)
    return [*warmup, decay]


def _warmup_cosine(params: Mapping[str, Any]) -> Sequence[dict[str, Any]] | None:
    steps, total = params.get('warmup_num_steps'), params.get('total_num_steps')
    if not steps or not total:
        return None
    first = params.get('warmup_min_ratio', 0.0) or 1e-6
    ratio = params.get('cos_min_ratio', 0.0001)
    return [
        dict(type='LinearLR', start_factor=first, by_epoch=False, end=steps),
        dict(type='CosineAnnealingLR', eta_min_ratio=ratio, by_epoch=False, begin=steps, end=total),
    ]


_TRANSLATIONS = dict(WarmupLR=_warmup, WarmupDecayLR=_warmup_decay, WarmupCosineLR=_warmup_cosine)
