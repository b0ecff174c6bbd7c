"""Ranks that part ways end within seconds, and say where they stand."""

from mmzero.engines.watch.compiling import COMPILING
from mmzero.engines.watch.trail import TRAIL
from mmzero.engines.watch.watcher import (
    leave_quietly,
    record_for_launcher,
    say_last,
    start_watch,
    stop_watch,
    tell_others,
    watched,
)

__all__ = [
    'COMPILING',
    'TRAIL',
    'leave_quietly',
    'record_for_launcher',
    'say_last',
    'start_watch',
    'stop_watch',
    'tell_others',
    'watched',
]
