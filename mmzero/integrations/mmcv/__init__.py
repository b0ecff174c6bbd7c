"""What lets mmcv-lite stand where a project asks for mmcv's compiled ops."""

from .stand_in import MissingOpError, install_stand_in

__all__ = ['MissingOpError', 'install_stand_in']
