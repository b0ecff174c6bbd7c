"""RTMDet, Mask R-CNN, DINO and a decoder train, validate and test in 16 bit; the first two stay as close as DDP."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from mmengine.structures import InstanceData
from torch import Tensor, nn

from mmzero import ZeroModelWrapper, ZeroOptimWrapper
from mmzero.engines.float32 import compute_in_float32
from tests.detectors import MASK_RCNN_BLOCKS, RTMDET_BLOCKS, has_full_mmcv, mask_batch, mask_rcnn, rtmdet, wide_batch
from tests.distributed import parity
from tests.distributed.parity import HALF_BOUND, Cell
from tests.distributed.ranks import run_ranks
from tests.models import DINO_BLOCKS, TinyDecoder, detection_batch, tiny_dino, token_batch

DTYPES = ('bfloat16', 'float16')
FULL = pytest.mark.skipif(not has_full_mmcv(), reason='RoIAlign and nms need full mmcv')
NMS = ('rtmdet', 'mask_rcnn')

MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], dict], tuple[str, ...]]] = {
    'dino': (tiny_dino, detection_batch, DINO_BLOCKS),
    'decoder': (TinyDecoder, token_batch, ('Layer',)),
    'rtmdet': (rtmdet, wide_batch, RTMDET_BLOCKS),
    'mask_rcnn': (mask_rcnn, mask_batch, MASK_RCNN_BLOCKS),
}


def found_tensors(predictions: list) -> list[Tensor]:
    """Boxes, scores and logits."""
    if isinstance(predictions[0], Tensor):
        return predictions
    instances: list[InstanceData] = [sample.pred_instances for sample in predictions]
    return [instance[name] for instance in instances for name in ('bboxes', 'scores')]


@pytest.mark.usefixtures('group')
@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('name', ['dino', 'decoder', 'rtmdet', pytest.param('mask_rcnn', marks=FULL)])
def test_it_trains_and_predicts(name: str, dtype: str) -> None:
    build, batch, units = MODELS[name]
    torch.manual_seed(0)
    policy = dict(type='ModuleClassPolicy', classes=list(units))
    model = ZeroModelWrapper(module=build(), stage=3, wrap_policy=policy, precision=dict(param_dtype=dtype))
    scale: dict[str, Any] = dict(loss_scale=dict(init_scale=2.0**8)) if dtype == 'float16' else {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    optim = ZeroOptimWrapper(optimizer, dtype=dtype, clip_grad=dict(max_norm=1.0), **scale)
    optim.initialize_count_status(model, 0, 10)
    model.train()
    losses = []
    for _ in range(8):
        torch.manual_seed(1)  # the same noise, and the same samples of regions
        losses.append(float(model.train_step(batch(0), optim)['loss']))
    # RTMDet weighs boxes by how good they are: its loss rises until the first ones are.
    assert torch.tensor(losses).isfinite().all() and losses[-1] < (max(losses) if name == 'rtmdet' else losses[0]), (
        losses
    )
    model.eval()
    if name in NMS and not has_full_mmcv():
        return
    for step in (model.val_step, model.test_step):
        with torch.no_grad():
            tensors = found_tensors(step(batch(1)))
        assert tensors and all(value.dtype == torch.float32 and value.isfinite().all() for value in tensors)


def taught_mask_rcnn() -> nn.Module:
    """For DDP as well, which without it stops in nms on a CPU."""
    model = mask_rcnn()
    compute_in_float32(model, 'cpu')
    return model


def ratios(name: str, dtype: str) -> list[dict[str, float]]:
    """Runs on every rank."""
    _, batch, units = MODELS[name]
    build = dict(rtmdet=rtmdet, mask_rcnn=taught_mask_rcnn)[name]
    # Adam makes full steps of rounding noise, and a matching that flips with it moves a loss by a tenth.
    parity.MODELS[name] = (build, batch, units, dict(find_unused_parameters=True))
    return parity.half_on_rank([Cell('stage 3', 'blocks', 1, 'norm', 'sgd', name)], dtype, 5)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('name', ['rtmdet', pytest.param('mask_rcnn', marks=FULL)])
def test_as_close_to_float32_as_ddp_is(name: str, dtype: str) -> None:
    ranks = run_ranks(2, ratios, name, dtype)
    theirs, mine = ({what: sum(rank[i][what] for rank in ranks) for what in ranks[0][i]} for i in (0, 1))
    found = {what: mine[what] / total for what, total in theirs.items()}
    print(name, dtype, found)
    assert max(found.values()) <= HALF_BOUND, found
