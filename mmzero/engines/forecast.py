"""What an engine says beforehand about one optimizer step."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from mmzero.policies import Unit


@dataclass(frozen=True)
class Forecast:
    """Memory and traffic of one optimizer step on one rank.

    Memory is what ZeRO is about: parameters, gradients, optimizer state, gathered parameters and the buffers of
    collectives under way; not activations.

    Args:
        memory (dict[str, int]): Bytes by category at the peak over all forwards and backwards of the step.
        formula_bytes (float): The closed formula of the stage, which knows no single units.
        formula (str): Its text, with a parameters, N ranks that shard; where most are frozen, with p bytes of
            parameters as stored and t of those that train.
        moved (float): Elements that a rank sends, and receives, by ring algorithms.
        formula_moved (float): The closed formula of the stage, without padding and frozen parts.
        moved_formula (str): Its text, to be multiplied by (N-1)/N.
        collectives (dict[str, int]): Number by kind, named as :class:`mmzero.analysis.collectives.Collective` names
            them, of forward, backward and the completion of gradients; clipping by norm and ``broadcast_buffers``
            add their own.
        host (dict[str, int]): Bytes in host memory by category, where something is offloaded. Defaults to none.
        to_device (int): Bytes copied from host memory. Defaults to 0.
        to_host (int): Bytes copied to host memory. Defaults to 0.
    """

    memory: dict[str, int]
    formula_bytes: float
    formula: str
    moved: float
    formula_moved: float
    moved_formula: str
    collectives: dict[str, int]
    host: dict[str, int] = field(default_factory=dict)
    to_device: int = 0
    to_host: int = 0

    @property
    def bytes(self) -> int:
        """Bytes of all categories at the peak, on the device."""
        return sum(self.memory.values())


def is_fine_tuning(units: Sequence[Unit]) -> bool:
    """Whether most of a model is frozen, so that gradients and state of all its parameters are no measure.

    Args:
        units (Sequence[Unit]): Its units.

    Returns:
        bool: Whether it is.
    """
    return 2 * sum(unit.trained_numel() for unit in units) < sum(unit.numel for unit in units)
