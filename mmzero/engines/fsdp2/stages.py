"""What distinguishes ZeRO stages on FSDP2.

Bytes at the peak over forward and backward, with 16-bit units, fp32 shards and Adam; elements moved per rank and
optimizer step, times (N-1)/N; a parameters, N ranks of the shard dimension, k micro-batches:

| stage | memory                                              | moved    |
|-------|-----------------------------------------------------|----------|
| 1     | 2a + 12a/N; k > 1: + 4a of unsynchronised gradients | 2a       |
| 2     | 2a + 12a/N; k > 1: 2a + 16a/N                       | (1 + k)a |
| 3     | 16a/N + the units alive at once                     | 3ka      |
| 3, no_sync | 16a/N + the units alive at once; k > 1: + 4a   | (2k + 1)a |

Without 16-bit units the 2a is 4a. For k = 1 a unit's gradients take the room that its parameters give up in backward,
so that 2a and the 4a/N of gradients are never there in full together. ``forecast.py`` has the exact bytes of a plan.
The ZeRO paper (arXiv:1910.02054, section 5) has 4a + 12a/N, 2a + 14a/N and 16a/N bytes, and 2a, 2a, 3a moved for k = 1;
there stages 1 and 2 coincide on FSDP2.
"""

from dataclasses import dataclass, replace

from mmzero.config import ZeroConfig


@dataclass(frozen=True)
class StageRules:
    """How FSDP2 is driven at a stage.

    Args:
        reshard_after_forward (bool): Free gathered parameters after a unit's forward.
        sync_every_micro_step (bool): Reduce-scatter gradients after every backward, else after the last.
        keep_gathered (bool): Keep parameters gathered from one micro-batch to the next.
    """

    reshard_after_forward: bool
    sync_every_micro_step: bool
    keep_gathered: bool


STAGES = {
    1: StageRules(reshard_after_forward=False, sync_every_micro_step=False, keep_gathered=True),
    2: StageRules(reshard_after_forward=False, sync_every_micro_step=True, keep_gathered=True),
    3: StageRules(reshard_after_forward=True, sync_every_micro_step=True, keep_gathered=False),
}


def rules_of(config: ZeroConfig) -> StageRules:
    """How FSDP2 is driven under a config.

    Args:
        config (ZeroConfig): The checked config.

    Returns:
        StageRules: Those of its stage. With ``no_sync`` gradients stay on their rank until the last micro-batch: 4a
            bytes more, (2k + 1)a elements moved.
    """
    rules = STAGES[config.stage]
    return replace(rules, sync_every_micro_step=False) if config.no_sync else rules
