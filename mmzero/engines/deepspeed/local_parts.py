"""A mirror of this rank's fragments, as :mod:`mmzero.engines.local_parts` has it of shards.

Averages are of the float32 values that the optimizer steps. What is frozen does not change, and is the model's.
"""

from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from mmzero.engines.deepspeed.fragments import Fragments
from mmzero.engines.deepspeed.weights import Weights, with_whole
from mmzero.engines.local_parts import LocalParts


class FragmentParts(LocalParts):
    """Mirrors a model that DeepSpeed has partitioned.

    Args:
        model (nn.Module): The model.
        weights (Weights): The model's.
        fragments (Fragments, optional): What of trained parameters this rank holds; None where none are trained.
    """

    def __init__(self, model: nn.Module, weights: Weights, fragments: Fragments | None) -> None:
        self._weights = weights
        self._fragments = fragments
        self._own = dict(model.named_parameters(remove_duplicate=False))
        super().__init__(model)

    @override
    def part_of(self, param: Any) -> Tensor:
        if self._fragments is not None and param in self._fragments.of:
            return self._fragments.own(param)
        return getattr(param, 'ds_tensor', param).detach()

    @override
    def gather(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return self._weights.gather({name: self._own.get(name, part) for name, part in state.items()}, state)

    @override
    def scatter(self, state: dict[str, Tensor], whole: dict[str, Tensor]) -> None:
        self._weights.scatter({name: self._own.get(name, part) for name, part in state.items()}, whole, state)

    @override
    def sharded(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: self._shard(self._own.get(name), part) for name, part in state.items()}

    def _shard(self, param: Any, part: Tensor) -> Tensor:
        if self._fragments is not None and param in self._fragments.of:
            return self._fragments.shard(param, part)
        return part if param is None else self._weights.shard(param)

    @override
    def to_save(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return with_whole(self.sharded(state), lambda names: self.gather({name: state[name] for name in sorted(names)}))
