"""mmcv's compiled operators under autocast: what reaches their kernels, and what comes back."""

import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import mmzero  # noqa: F401
from mmzero.engines.float32 import compute_in_float32, takes_float32
from mmzero.integrations.mmcv.float32 import teach_autocast_ops

ops: Any = pytest.importorskip('mmcv.ops')
HALVES = (torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def taught() -> None:
    teach_autocast_ops()


class Kernels:
    """In place of the compiled module: notes dtypes, and computes something of the right shape."""

    def __init__(self) -> None:
        self.seen: dict[str, list[torch.dtype]] = {}
        self.locations: Tensor | None = None

    def _note(self, name: str, *tensors: Tensor) -> None:
        self.seen[name] = [tensor.dtype for tensor in tensors]

    def ms_deform_attn_forward(
        self, value: Tensor, shapes: Tensor, starts: Tensor, locations: Tensor, weights: Tensor, im2col_step: int
    ) -> Tensor:
        self._note('forward', value, locations, weights)
        self.locations = locations.detach().clone()
        return value.new_ones(value.shape[0], locations.shape[1], value.shape[2] * value.shape[3])

    def ms_deform_attn_backward(
        self, value: Tensor, shapes: Tensor, starts: Tensor, locations: Tensor, weights: Tensor, *grads: Any, **_: Any
    ) -> None:
        self._note('backward', value, locations, weights, *grads)
        grads[1].fill_(1.0)

    def nms(self, boxes: Tensor, scores: Tensor, **_: Any) -> Tensor:
        self._note('nms', boxes, scores)
        return torch.arange(len(boxes))


def kernels(monkeypatch: pytest.MonkeyPatch, name: str) -> Kernels:
    made = Kernels()
    # mmcv.ops.nms is the function.
    monkeypatch.setattr(sys.modules[f'mmcv.ops.{name}'], 'ext_module', made)
    return made


def attend(value: Tensor, locations: Tensor) -> Tensor:
    shapes, starts = torch.tensor([[4, 4]]), torch.tensor([0])
    weights = torch.ones(1, 3, 2, 1, 1, dtype=value.dtype)
    function = ops.multi_scale_deform_attn.MultiScaleDeformableAttnFunction
    return function.apply(value, shapes, starts, locations, weights, 64)


@pytest.mark.parametrize('dtype', HALVES)
def test_sampling_locations_stay_as_exact_as_they_are(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    made = kernels(monkeypatch, 'multi_scale_deform_attn')
    value, locations = torch.randn(1, 16, 2, 4).to(dtype).requires_grad_(), torch.rand(1, 3, 2, 1, 1, 2)
    with torch.autocast('cpu', dtype=dtype):
        # Recomputed, as encoder layers are: what is saved may be asked for once.
        found = checkpoint(attend, value, locations, use_reentrant=False)
    found.sum().backward()
    assert found.dtype == value.grad.dtype == dtype
    assert torch.equal(made.locations, locations)
    assert set(made.seen['forward'] + made.seen['backward']) == {torch.float32}


@pytest.mark.parametrize('dtype', HALVES)
def test_without_autocast_mmcv_does_what_it_does(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """It rounds the locations to the dtype of the values."""
    made = kernels(monkeypatch, 'multi_scale_deform_attn')
    attend(torch.randn(1, 16, 2, 4).to(dtype), torch.rand(1, 3, 2, 1, 1, 2))
    assert set(made.seen['forward']) == {dtype}


def test_nms_takes_boxes_and_scores_in_one_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    made = kernels(monkeypatch, 'nms')
    boxes, scores = torch.rand(5, 4), torch.rand(5).bfloat16()
    with torch.autocast('cpu', dtype=torch.bfloat16):
        kept = sys.modules['mmcv.ops.nms'].NMSop.apply(boxes, scores, 0.5, 0, 0.0, -1)
    assert made.seen['nms'] == [torch.float32, torch.float32] and kept.dtype == torch.int64


def test_what_takes_float32() -> None:
    losses = pytest.importorskip('mmdet.models.losses')
    extractors = pytest.importorskip('mmdet.models.roi_heads.roi_extractors')
    layer = dict(type='RoIAlign', output_size=7, sampling_ratio=0)
    extractor = extractors.SingleRoIExtractor(layer, 4, [4])
    taken = [losses.FocalLoss(), losses.GIoULoss(), torch.nn.CrossEntropyLoss(), extractor]
    left = [torch.nn.Linear(1, 1), torch.nn.LayerNorm(1), torch.nn.Sequential()]
    assert [takes_float32(module) for module in (*taken, *left)] == [True] * len(taken) + [False] * len(left)


def test_a_loss_gets_float32_under_autocast_alone() -> None:
    seen: list[tuple[torch.dtype, torch.dtype]] = []

    class Loss(torch.nn.MSELoss):
        def forward(self, input: Tensor, target: Tensor) -> Tensor:
            seen.append((input.dtype, target.dtype))
            return super().forward(input, target)

    loss = Loss()
    compute_in_float32(loss, 'cpu')
    value, target = torch.ones(3).bfloat16(), torch.ones(3, dtype=torch.int64)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        loss(value, target=target)
    loss(value, value)
    assert seen == [(torch.float32, torch.int64), (torch.bfloat16, torch.bfloat16)]
