"""The loop that an expert writes with torch alone."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from mmzero.analysis.setting import Batch, Setting, Step
from mmzero.engines.fsdp2.stages import STAGES


def by_hand(setting: Setting) -> Step:
    """Shard a model by ``fully_shard`` and make its training step.

    The same units, rules of the stage and precision as the pair's; nothing is decided while it runs. Like MMEngine's
    loop it reads the gradient norm of each step for the log, and leaves the loss where it is.

    Args:
        setting (Setting): The training.

    Returns:
        Step: One optimizer step.
    """
    model, k = setting.model().to(setting.device), setting.accumulation
    rules = STAGES[setting.stage]
    _shard_by_hand(setting, model)
    optimizer = setting.optimizer(model)
    norms = []

    def step(batches: Sequence[Batch]) -> list[Tensor]:
        losses = []
        for index, batch in enumerate(batches, 1):
            if k > 1:
                model.set_requires_gradient_sync(index == k or rules.sync_every_micro_step)
                if rules.keep_gathered:
                    model.set_reshard_after_backward(index == k)
            data = {name: tensor.to(setting.device, non_blocking=True) for name, tensor in batch.items()}
            with setting.autocast():
                loss = model(**data, mode='loss')['loss']
            (loss / k if k > 1 else loss).backward()
            losses.append(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), setting.max_norm)
        norms.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))
        optimizer.step()
        optimizer.zero_grad()
        return losses

    return step


def _shard_by_hand(setting: Setting, model: nn.Module) -> None:
    mesh = init_device_mesh(setting.device.type, (dist.get_world_size(),))
    reshard = STAGES[setting.stage].reshard_after_forward
    for module in [*model.modules()][::-1]:
        if module is not model and not isinstance(module, setting.unit):
            continue
        precision = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if setting.bf16 and module is not model else None,
            reduce_dtype=torch.float32,
            # As the pair does it; see [Note: norms of 16-bit units].
            cast_forward_inputs=False,
        )
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard, mp_policy=precision)
