"""The loop that an expert writes with DeepSpeed alone."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from mmzero.analysis.setting import Batch, Setting, Step
from mmzero.engines.deepspeed.package import forget_groups, import_deepspeed, known_local_rank, without_memory_reports


def deepspeed_by_hand(setting: Setting) -> Step:
    """Hand a model to ``deepspeed.initialize`` and make its training step.

    The same config as the pair's. Like MMEngine's loop it reads the gradient norm of each step for the log, and leaves
    the loss where it is.

    Args:
        setting (Setting): The training.

    Returns:
        Step: One optimizer step.

    Raises:
        ConfigError: If deepspeed is not installed.
    """
    deepspeed = import_deepspeed(setting.device.type)
    model = setting.model().to(setting.device)
    config: dict[str, Any] = dict(
        train_micro_batch_size_per_gpu=1,
        gradient_accumulation_steps=setting.accumulation,
        gradient_clipping=setting.max_norm,
        zero_optimization=dict(stage=setting.stage, reduce_bucket_size=sum(p.numel() for p in model.parameters())),
        # torch's AdamW, as the others have it, and gradients in float32.
        zero_allow_untested_optimizer=True,
        zero_force_ds_cpu_optimizer=False,
        communication_data_type='fp32',
        data_types=dict(grad_accum_dtype='fp32'),
        steps_per_print=None,
        log_level='warning',
    )
    if setting.bf16:
        config['bf16'] = dict(enabled=True)
    forget_groups()
    with known_local_rank(setting.device), without_memory_reports():
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=setting.optimizer(model), config=config, dist_init_required=False
        )
    norms = []

    def step(batches: Sequence[Batch]) -> list[Tensor]:
        losses = []
        for batch in batches:
            data = {name: tensor.to(setting.device, non_blocking=True) for name, tensor in batch.items()}
            with setting.autocast():
                loss = engine(**data, mode='loss')['loss']
            engine.backward(loss)
            losses.append(loss.detach())
            engine.step()
        norms.append(float(engine.get_global_grad_norm()))
        return losses

    return step
