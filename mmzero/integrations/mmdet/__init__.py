"""What needs mmdet itself: pictures of a run and of what its detector finds."""

from .curves import draw_curves, read_scalars
from .detections import draw_detections

__all__ = ['draw_curves', 'draw_detections', 'read_scalars']
