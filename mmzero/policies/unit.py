"""A unit of a plan: parameters that are gathered together, and the rules that it has for itself."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class UnitRules:
    """How one unit is treated where that differs from the rest; None: as the stage and the precision say.

    Args:
        reshard_after_forward (bool or int or str, optional): Whether its gathered parameters are freed after
            forward; a number of ranks, or 'node' for those of one node: resharded to so many, so that backward
            gathers among them alone.
        param_dtype (torch.dtype, optional): In which it is gathered.
        cast_forward_inputs (bool, optional): Whether floating inputs of its forward are cast to ``param_dtype``.
        shard_dim (int, optional): The dimension along which its parameters are split; those with fewer dimensions
            are split along dim 0.
        shard (bool): False: every rank keeps it whole, and gradients are averaged by all-reduce.
        compile (bool, optional): Whether it is compiled where units are; None: where it holds no other unit.
    """

    reshard_after_forward: bool | int | str | None = None
    param_dtype: torch.dtype | None = None
    cast_forward_inputs: bool | None = None
    shard_dim: int | None = None
    shard: bool = True
    compile: bool | None = None


@dataclass(frozen=True)
class Unit:
    """Parameters that are gathered together: those below a module that are in no smaller unit.

    Args:
        name (str): Path of the module in the model; '' is the model itself, the root unit.
        class_name (str): Class of the module.
        params (tuple[str, ...]): Names of its parameters in the model, each tensor once.
        shapes (tuple[tuple[int, ...], ...]): Their shapes.
        itemsizes (tuple[int, ...]): Bytes per element, parameter by parameter.
        trainable (tuple[bool, ...]): Which of them require gradients.
        places (tuple[int, ...]): Their indices in the order in which the model registers all its parameters,
            which is about the order in which forward uses them.
        rules (UnitRules): How it differs from other units.
        dtypes (tuple[torch.dtype, ...]): In which they are stored, parameter by parameter.
        whole (tuple[tuple[str, str], ...]): Names of parameters that every rank keeps whole, and why; 0-dim ones do
            so without being named.
        methods (tuple[str, ...]): Methods other than forward by which it is entered.
        separate (bool): Whether it is the root unit of a child that is sharded as a model of its own.
        compiled (bool): Whether torch.compile compiles its forward.
    """

    name: str
    class_name: str
    params: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    itemsizes: tuple[int, ...]
    trainable: tuple[bool, ...]
    places: tuple[int, ...]
    rules: UnitRules = UnitRules()
    dtypes: tuple[torch.dtype, ...] = ()
    whole: tuple[tuple[str, str], ...] = ()
    methods: tuple[str, ...] = ()
    separate: bool = False
    compiled: bool = False

    @property
    def is_root(self) -> bool:
        """Whether it holds what no smaller unit of the model, or of a child that is sharded by itself, does."""
        return self.separate or not self.name

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(_numel(shape) for shape in self.shapes)

    def gathered_bytes(self, itemsize: int | None = None) -> int:
        """Bytes while the unit is gathered.

        Args:
            itemsize (int, optional): Bytes per element in the gathered dtype. Defaults to None: as stored.

        Returns:
            int: Bytes.
        """
        sizes = self.itemsizes if itemsize is None else (itemsize,) * len(self.shapes)
        return sum(_numel(shape) * size for shape, size in zip(self.shapes, sizes, strict=True))

    def kept_bytes(self, shard_size: int) -> int:
        """Bytes of the largest shard that a rank keeps, with its padding.

        FSDP2 splits dim 0 into ``shard_size`` chunks of equal, rounded-up length
        (``torch.distributed.tensor.Shard(0)``), and another dim only where it divides evenly.

        Args:
            shard_size (int): Ranks that share the parameters.

        Returns:
            int: Bytes.
        """
        numels = self.kept_numels(shard_size)
        return sum(numel * size for numel, size in zip(numels, self.itemsizes, strict=True))

    def trained_numel(self, shard_size: int = 1) -> int:
        """Elements, kept by a rank, of the parameters that require gradients.

        Args:
            shard_size (int): Ranks that share the parameters. Defaults to 1.

        Returns:
            int: Elements.
        """
        return sum(numel for numel, train in zip(self.kept_numels(shard_size), self.trainable, strict=True) if train)

    def trained_bytes(self, shard_size: int = 1) -> int:
        """Bytes, kept by a rank, of the parameters that require gradients.

        Args:
            shard_size (int): Ranks that share the parameters. Defaults to 1.

        Returns:
            int: Bytes.
        """
        sizes = zip(self.kept_numels(shard_size), self.itemsizes, self.trainable, strict=True)
        return sum(numel * size for numel, size, train in sizes if train)

    def kept_numels(self, shard_size: int) -> tuple[int, ...]:
        """Elements of the largest shard of each parameter, with its padding.

        Args:
            shard_size (int): Ranks that share the parameters.

        Returns:
            tuple[int, ...]: Elements, parameter by parameter; all of one that is not split.
        """
        ranks, dims = self.ranks(shard_size), self.shard_dims(shard_size)
        split = zip(self.shapes, dims, self.is_whole, strict=True)
        return tuple(_numel(shape) if whole else _rows(shape, dim, ranks) for shape, dim, whole in split)

    def ranks(self, shard_size: int) -> int:
        """Ranks that share its parameters.

        Args:
            shard_size (int): Ranks of the shard dimension.

        Returns:
            int: As many, or 1 where it is not sharded.
        """
        return shard_size if self.rules.shard else 1

    @property
    def is_whole(self) -> tuple[bool, ...]:
        """Which parameters are on every rank, outside of what is gathered and reduced for the unit."""
        named = dict(self.whole)
        return tuple(not shape or name in named for name, shape in zip(self.params, self.shapes, strict=True))

    def shard_dims(self, shard_size: int) -> tuple[int, ...]:
        """The dimension along which each parameter is split.

        FSDP2 splits any other dim than 0 into even parts only; what has no such dim is split along dim 0.

        Args:
            shard_size (int): Ranks of the shard dimension.

        Returns:
            tuple[int, ...]: Dimensions, parameter by parameter.
        """
        dim, ranks = self.rules.shard_dim or 0, self.ranks(shard_size)
        return tuple(dim if len(shape) > dim and shape[dim] % ranks == 0 else 0 for shape in self.shapes)


def without(class_name: str) -> str:
    """The config line that leaves units of a class out.

    Args:
        class_name (str): The class.

    Returns:
        str: A value of ``wrap_policy``, in which POLICY stands for the one that is there.
    """
    denied = f"dict(type='Not', policy=dict(type='ModuleClassPolicy', classes=['{class_name}']))"
    return f"model_wrapper_cfg.wrap_policy=dict(type='AllOf', policies=[POLICY, {denied}])"


def _rows(shape: tuple[int, ...], dim: int, ranks: int) -> int:
    """Elements of the largest of so many chunks."""
    return -(-shape[dim] // ranks) * (_numel(shape) // shape[dim]) if shape[dim] else 0


def _numel(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
