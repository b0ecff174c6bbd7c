"""What MMEngine's FSDPStrategy saves as 'local': a folder with a file per rank, each with its shards.

[Note: local shards of FSDP1]
Weights lie in one flat tensor per unit, ``UNIT._flat_param``, of which each rank has a part: parameters of the unit one
after the other, in the order of the model's modules, without names and shapes, which are taken from the model, or from
the optimizer's state. With ``use_orig_params`` the flat tensor has gaps; but each rank's part of every parameter, flat
as well, stands there by its name too, and these parts are joined. State of the optimizer is cut along the first
dimension, by names and with shapes.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from mmzero.checkpoint.allowed import SavedShards
from mmzero.checkpoint.names import clean_names
from mmzero.errors import CheckpointError

FIRST_FILE = 'rank0.pth'
_FLAT = '_flat_param'


def read_local(folder: Path, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Join the ranks' files. On one rank, within :func:`mmzero.checkpoint.read.safe_loading`.

    Memory: the files are mapped; what is joined is one copy of weights and optimizer.

    Args:
        folder (Path): The folder.
        wanted (Mapping[str, Any]): The model's state dict, for names, order and shapes; where it is empty, those in
            the optimizer's state are taken.

    Returns:
        dict: As FSDPStrategy saves it as 'full'.

    Raises:
        CheckpointError: If a rank's file is missing, or the model's shapes are not known or not those that were saved.
    """
    first = _read(folder / FIRST_FILE)
    names = [f'rank{rank}.pth' for rank in range(_ranks_of(first))]
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(f'{folder} was saved by {len(names)} ranks and lacks {", ".join(missing)}')
    ranks = [first, *(_read(folder / name) for name in names[1:])]
    optimizer = first.get('optimizer')
    if optimizer is not None:
        states = [rank['optimizer']['state'] for rank in ranks]
        optimizer = dict(optimizer, state={name: _joined_entries(name, states) for name in states[0]})
    like = wanted or _in_order_of_groups(optimizer)
    weights = _Weights([clean_names(rank['state_dict']) for rank in ranks], like, not wanted, folder).joined()
    return {**first, 'state_dict': weights, **({} if optimizer is None else dict(optimizer=optimizer))}


def refuse_a_part(state: Mapping[str, Any], filename: str) -> None:
    """Refuse one rank's file.

    Args:
        state (Mapping[str, Any]): Its weights.
        filename (str): The file.

    Raises:
        CheckpointError: If they are shards.
    """
    if any(isinstance(value, SavedShards) for value in state.values()):
        raise CheckpointError(f"{filename} holds one rank's shards; give the folder with those of all ranks")


def _read(file: Path) -> dict[str, Any]:
    return torch.load(file, map_location='cpu', weights_only=True, mmap=True)


def _ranks_of(first: Mapping[str, Any]) -> int:
    # Of several replicas the first is enough.
    return next((value.ranks for value in first['state_dict'].values() if isinstance(value, SavedShards)), 1)


def _joined_entries(name: str, states: list[Mapping[str, Any]]) -> dict[str, Any]:
    """What all ranks hold of one parameter's state; counters are the same on each."""
    return {
        key: _whole([state[name][key] for state in states]) if isinstance(value, SavedShards) else value
        for key, value in states[0][name].items()
    }


def _whole(shards: list[SavedShards]) -> Tensor:
    whole = torch.empty(shards[0].shape, dtype=shards[0].dtype)
    for offsets, part in (pair for shard in shards for pair in shard.parts):
        place = tuple(slice(start, start + size) for start, size in zip(offsets, part.shape, strict=True))
        whole[place] = part.detach()
    return whole


def _in_order_of_groups(optimizer: Mapping[str, Any] | None) -> dict[str, Tensor]:
    """What stands for the weights where no model is there: state of their shapes."""
    if optimizer is None:
        return {}
    state, shaped = optimizer['state'], {}
    for name in (name for group in optimizer['param_groups'] for name in group['params']):
        for value in state.get(name, {}).values():
            if isinstance(value, Tensor) and value.dim():
                shaped[name] = torch.empty(value.shape, device='meta')
    return shaped


class _Weights:
    """Joins the ranks' weights.

    Args:
        ranks (list[Mapping[str, Any]]): By rank, under clean names.
        like (Mapping[str, Any]): Tensors of the shapes that are meant, in the model's order.
        is_guessed (bool): Whether these are not the model's.
        folder (Path): For errors.
    """

    def __init__(self, ranks: list[Mapping[str, Any]], like: Mapping[str, Any], is_guessed: bool, folder: Path) -> None:
        self.ranks = ranks
        self.like = {name: value for name, value in like.items() if isinstance(value, Tensor)}
        self.is_guessed = is_guessed
        self.folder = folder
        self.units = [name for name in ranks[0] if name.rpartition('.')[2] == _FLAT]

    def joined(self) -> dict[str, Any]:
        if self.units and not self.like:
            raise self._needs_model('whose names and shapes are not in it')
        weights: dict[str, Any] = {}
        for name, value in self.ranks[0].items():
            if name not in self.units:
                parts = [rank[name] for rank in self.ranks]
                weights[name] = _whole(parts) if isinstance(value, SavedShards) else self._by_name(name, parts)
        # Inner units come first: what is theirs is not of the outer ones.
        for name in sorted(self.units, key=lambda name: -name.count('.')):
            weights |= self._apart(name, weights)
        return weights | self._tied(weights)

    def _by_name(self, name: str, parts: list[Tensor]) -> Tensor:
        """A parameter whose flat parts stand there by its name, or what every rank holds whole."""
        like, numel = self.like.get(name), sum(part.numel() for part in parts)
        if like is None and self.is_guessed and not all(torch.equal(parts[0], part) for part in parts):
            raise self._needs_model(f'of which {name} has no shape in it')
        if like is None or (parts[0].shape == like.shape and numel != like.numel()):
            return parts[0]
        if numel != like.numel():
            raise self._other_size(name, numel, like.numel())
        return torch.cat([part.detach().flatten() for part in parts]).view(like.shape)

    def _apart(self, unit: str, known: Mapping[str, Any]) -> dict[str, Tensor]:
        """What of a unit's flat tensor has no name yet."""
        start = unit.removesuffix(_FLAT)
        names = [name for name in _once(self.like) if name.startswith(start) and name not in known]
        if not names and any(name.startswith(start) for name in known):
            return {}
        flat, sizes = _whole([rank[unit] for rank in self.ranks]), [self.like[name].numel() for name in names]
        if sum(sizes) != flat.numel():
            raise self._other_size(unit, flat.numel(), sum(sizes))
        parts = zip(names, flat.split(sizes), strict=True)
        return {name: part.view(self.like[name].shape) for name, part in parts}

    def _tied(self, weights: Mapping[str, Any]) -> dict[str, Any]:
        """Further names of the same weights, which FSDP saves once."""
        places = {_place(self.like[name]): name for name in weights if name in self.like}
        return {
            name: weights[places[_place(value)]]
            for name, value in self.like.items()
            if name not in weights and _place(value) in places
        }

    def _needs_model(self, why: str) -> CheckpointError:
        return CheckpointError(
            f'{self.folder} holds the weights in flat shards, {why}: give it as load_from of the config with which it '
            'was saved, and save from there'
        )

    def _other_size(self, name: str, saved: int, meant: int) -> CheckpointError:
        return CheckpointError(
            f"{self.folder}: {name} has {saved} elements there and {meant} in the model: its units' weights lie one "
            'after the other without names, so that they load into the model with which they were saved alone'
        )


def _once(tensors: Mapping[str, Tensor]) -> Iterable[str]:
    """Names without those of tensors that have one already."""
    places = {_place(tensor): name for name, tensor in reversed(list(tensors.items()))}
    return [name for name, tensor in tensors.items() if places[_place(tensor)] == name]


def _place(tensor: Tensor) -> Any:
    """The same for names of one tensor."""
    own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    address = 0 if own.is_meta else own.data_ptr()
    return (address, tensor.shape) if address else id(tensor)
