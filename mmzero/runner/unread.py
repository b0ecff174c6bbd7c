"""Keys of a model's config that no constructor reads.

A dict with ``type`` is given to a constructor as keywords, and Python refuses what it does not know. A dict without
one may be read key by key, with a default for what is not there: a misspelt key has no effect then. So the model is
built once from dicts that note what is read from them.
"""

import copy
import gc
import weakref
from typing import Any

from mmengine.config import ConfigDict
from torch import nn

from mmzero.config import Faults
from mmzero.errors import near_names
from mmzero.runner.lookup import mentioned


class Record:
    """What happened to one dict and its copies.

    Args:
        path (str): The config path of the dict.
        keys (tuple): Its keys.
    """

    def __init__(self, path: str, keys: tuple) -> None:
        self.path = path
        self.keys = keys
        self.read: set = set()
        self.copies: list[weakref.ref] = []

    @property
    def unread(self) -> list:
        """Keys that were left, where others were read; none where a copy is kept, to be read later."""
        left = [key for key in self.keys if key not in self.read]
        if not self.read or 'type' in self.keys or not left:
            return []
        gc.collect()
        return [] if any(copy() is not None for copy in self.copies) else left


class WatchedDict(ConfigDict):
    """A ConfigDict that notes which keys are read. Copying it is no reading; going through all keys is one of all."""

    def _watch(self, record: Record) -> 'WatchedDict':
        # Past ConfigDict, whose attributes are keys.
        object.__setattr__(self, '_record', record)
        record.copies.append(weakref.ref(self))
        return self

    def _note(self, *keys: Any) -> None:
        record = self.__dict__.get('_record')
        if record is not None:
            record.read.update(keys)

    def __getitem__(self, key: Any) -> Any:
        self._note(key)
        return super().__getitem__(key)

    def __contains__(self, key: Any) -> bool:
        self._note(key)
        return super().__contains__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        """As dict's."""
        self._note(key)
        return super().get(key, default)

    def pop(self, key: Any, default: Any = None) -> Any:
        """As ConfigDict's."""
        self._note(key)
        return super().pop(key, default)

    def keys(self) -> Any:
        """As dict's."""
        self._note(*dict.keys(self))
        return super().keys()

    def values(self) -> Any:
        """As dict's."""
        self._note(*dict.keys(self))
        return super().values()

    def items(self) -> Any:
        """As dict's."""
        self._note(*dict.keys(self))
        return super().items()

    def __copy__(self) -> 'WatchedDict':
        return self._copied(lambda value: value)

    def __deepcopy__(self, memo: dict) -> 'WatchedDict':
        return self._copied(lambda value: copy.deepcopy(value, memo))

    def copy(self) -> 'WatchedDict':
        """As dict's."""
        return self._copied(lambda value: value)

    def _copied(self, copy_value: Any) -> 'WatchedDict':
        other = type(self)()
        plain: dict = self
        for key, value in dict.items(plain):
            dict.__setitem__(other, key, copy_value(value))
        record = self.__dict__.get('_record')
        return other if record is None else other._watch(record)


def watched(cfg: Any, path: str, records: list[Record]) -> Any:
    """Copy a tree of dicts and lists into one that notes what is read.

    Args:
        cfg: The tree.
        path (str): Its config path.
        records (list[Record]): Takes a record of each dict.

    Returns:
        Any: The copy.
    """
    if isinstance(cfg, dict):
        made = WatchedDict()
        for key, value in dict.items(cfg):
            dict.__setitem__(made, key, watched(value, f'{path}.{key}', records))
        records.append(Record(path, tuple(dict.keys(cfg))))
        return made._watch(records[-1])
    if type(cfg) in (list, tuple):
        return type(cfg)(watched(item, f'{path}[{index}]', records) for index, item in enumerate(cfg))
    return cfg


def refuse_unread(records: list[Record], model: nn.Module, faults: Faults) -> None:
    """Name the keys that were not read, once the model was built.

    A key that the code of the model's classes mentions is one that another setting made needless.

    Args:
        records (list[Record]): From :func:`watched`, of which no dict is held any more.
        model (nn.Module): What was built.
        faults (Faults): Takes the keys.
    """
    classes: set[Any] = {type(module) for module in model.modules()}
    for record in records:
        for key in record.unread:
            if not any(key in mentioned(cls) for cls in classes):
                near = near_names(str(key), map(str, record.read))
                faults.add(f'{record.path}.{key}', f'nothing reads it{near}')
