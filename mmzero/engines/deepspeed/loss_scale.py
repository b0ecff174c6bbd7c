"""The loss scale of float16: DeepSpeed's own, told and saved as torch's GradScaler tells it."""

import math
from typing import Any

from mmzero.config import LossScale
from mmzero.errors import ConfigError

PATH = 'optim_wrapper.loss_scale'
_GROWTH, _BACKOFF = 2.0, 0.5


def fp16_section(scale: LossScale) -> dict[str, Any]:
    """Translate to DeepSpeed's section.

    Args:
        scale (LossScale): What the config asks for.

    Returns:
        dict: Fields of ``fp16``.

    Raises:
        ConfigError: If DeepSpeed has no such scale; it lists all faults.
    """
    if scale.static is not None:
        return dict(enabled=True, loss_scale=scale.static)
    options, faults = dict(scale.options), []
    for name, only in (('growth_factor', _GROWTH), ('backoff_factor', _BACKOFF)):
        if options.get(name, only) != only:
            faults.append(f'{PATH}.{name}: DeepSpeed has {only}, got {options[name]}; leave it out')
    first = options.get('init_scale', 2.0**16)
    power = math.log2(first)
    if power != int(power) or power < 0:
        faults.append(f'{PATH}.init_scale: DeepSpeed takes a power of 2 from 1 on, got {first}')
    if faults:
        raise ConfigError([f"{fault}, or use engine='fsdp2'" for fault in faults])
    # One overflow halves the scale, as under torch; DeepSpeed's own default waits for a second one.
    section = dict(enabled=True, loss_scale=0, initial_scale_power=int(power), hysteresis=1)
    section['loss_scale_window'] = options.get('growth_interval', 2000)
    return section


class Scaler:
    """DeepSpeed's scaler in the words of torch's.

    Args:
        zero: DeepSpeed's ZeRO optimizer.
    """

    def __init__(self, zero: Any) -> None:
        self.own = zero.loss_scaler
        # What ends a run of steps that are all skipped is optim_wrapper.max_skips.
        self.own.raise_error_at_min_scale = False

    def state(self) -> dict[str, Any]:
        """The state.

        Returns:
            dict: As ``torch.amp.GradScaler.state_dict()``, with DeepSpeed's hysteresis.
        """
        own = self.own
        if not own.dynamic:
            interval, tracker, hysteresis = 2000, 0, 1
        else:
            interval, hysteresis = own.scale_window, own.cur_hysteresis
            tracker = max(own.cur_iter - own.last_overflow_iter - 1, 0) % interval
        return dict(
            scale=float(own.cur_scale),
            growth_factor=_GROWTH,
            backoff_factor=_BACKOFF,
            growth_interval=interval,
            _growth_tracker=tracker,
            hysteresis=hysteresis,
        )

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a state; a fixed scale is the config's.

        Args:
            state (dict): Of this scaler, or of torch's.
        """
        if not self.own.dynamic:
            return
        self.own.cur_scale = float(state['scale'])
        self.own.cur_iter = 0
        self.own.last_overflow_iter = -1 - int(state['_growth_tracker'])
        self.own.cur_hysteresis = state.get('hysteresis', self.own.delayed_shift)
