"""DeepSpeed's own config, from mmzero's."""

from typing import Any

from torch import nn

from mmzero.config import ZeroConfig

# DeepSpeed's default; it allocates the bucket whole, whatever the size of the model.
LARGEST_BUCKET = 500_000_000


def ds_config(config: ZeroConfig, model: nn.Module) -> dict[str, Any]:
    """Translate a config.

    Args:
        config (ZeroConfig): The checked config.
        model (nn.Module): The model, real.

    Returns:
        dict[str, Any]: The argument of ``deepspeed.initialize``.
    """
    numel = sum(param.numel() for param in model.parameters() if param.requires_grad)
    return dict(
        # MMEngine owns batches and accumulation: its OptimWrapper scales the loss and says when a step is due. To
        # DeepSpeed each micro-batch is one of one, so that it scales nothing.
        train_micro_batch_size_per_gpu=1,
        gradient_accumulation_steps=1,
        # Given anew with each step.
        gradient_clipping=0.0,
        zero_optimization=dict(
            stage=config.stage,
            reduce_bucket_size=min(LARGEST_BUCKET, max(numel, 1)),
        ),
        zero_allow_untested_optimizer=True,
        communication_data_type='fp32',
        steps_per_print=None,
        wall_clock_breakdown=False,
    )
