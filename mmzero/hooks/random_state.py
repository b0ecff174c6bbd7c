"""Training that draws the same numbers whether it was broken or not."""

from typing import Any

from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import EpochBasedTrainLoop

from mmzero.checkpoint import set_random_state


@HOOKS.register_module()
class RandomStateHook(Hook):
    """Go on from the random state of a checkpoint, after saving as after resuming it.

    What lies between a save and the next training iteration, such as validation, draws numbers in a run that goes
    on and not in one that resumes. By going on from the saved state in both, they are equal.

    Workers of a loader draw from states of their own, which are not saved: where they persist from epoch to epoch, and
    in an iteration-based loop, random augmentations of a resumed run are other ones. With ``persistent_workers=False``
    those of an epoch-based loop are the same.
    """

    priority = 'LOWEST'

    def __init__(self) -> None:
        self._state: dict[str, Any] | None = None

    def continue_from(self, state: dict[str, Any]) -> None:
        """Set the state from which training goes on.

        Args:
            state (dict): From :func:`mmzero.checkpoint.random_state`, of this rank.
        """
        self._state = state

    def before_batch(self) -> None:
        """Set the state before an iteration-based loop loads a batch, after a save as after resuming."""
        if self._state is not None:
            set_random_state(self._state, data=True)

    def before_train_epoch(self, runner) -> None:  # type: ignore # noqa: D102
        loop = runner.train_loop
        if isinstance(loop, EpochBasedTrainLoop) and self._state is not None:
            set_random_state(self._state, data=True)
            # Within an epoch the loader draws anew before the first batch, which a run that goes on has not done.
            if loop.iter <= loop.epoch * len(loop.dataloader):
                self._state = None

    def before_train_iter(self, runner, batch_idx, data_batch=None) -> None:  # type: ignore # noqa: D102
        # Saved within an epoch or by a loop by iterations: the batch is there, and drew what it drew. A loop with a
        # run() of its own may have loaded its data once more.
        if self._state is not None:
            set_random_state(self._state, data=False)
            self._state = None
