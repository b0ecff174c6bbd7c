"""In which dtypes a step in 16 bit computes, beside DDP under autocast on the same model."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from mmengine.model import BaseModel
from mmengine.optim import OptimWrapper
from torch import Tensor, nn

from mmzero.engines import init_process_group
from tests.detectors import MASK_RCNN_BLOCKS, RTMDET_BLOCKS, has_full_mmcv, mask_batch, mask_rcnn, rtmdet, wide_batch
from tests.distributed.dtypes import Operators, Seen, dtypes_of, modules_seen, short
from tests.distributed.parity import sgd
from tests.distributed.training import build_pair
from tests.models import DINO_BLOCKS, TinyDecoder, detection_batch, tiny_dino, token_batch

pytestmark = pytest.mark.usefixtures('group')

DTYPES = ('bfloat16', 'float16')
FULL = pytest.mark.skipif(not has_full_mmcv(), reason='RoIAlign and nms need full mmcv')
DECODER_LAYER, ENCODER_LAYER = 'DeformableDetrTransformerDecoderLayer', 'DeformableDetrTransformerEncoderLayer'
NORMS = ('native_layer_norm', 'native_group_norm', 'native_batch_norm')
LOSSES = ('_log_softmax', 'nll_loss_forward', 'binary_cross_entropy_with_logits')
OPERATORS = (
    *NORMS,
    *LOSSES,
    '_softmax',
    '_scaled_dot_product_flash_attention_for_cpu',
    'grid_sampler_2d',
    'embedding',
    'addmm',
    'bmm',
    'convolution',
    'cos',
    'exp',
    'pow',
    'gelu',
    'sin',
)
LOSS_MODULES = ('CrossEntropyLoss', 'FocalLoss', 'QualityFocalLoss', 'L1Loss', 'GIoULoss')


def dino() -> nn.Module:
    return tiny_dino(with_cp=False)


# Model, batches, units.
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], dict], tuple[str, ...]]] = {
    'dino': (dino, detection_batch, DINO_BLOCKS),
    'decoder': (TinyDecoder, token_batch, ('Layer',)),
    'rtmdet': (rtmdet, wide_batch, RTMDET_BLOCKS),
    'mask_rcnn': (mask_rcnn, mask_batch, MASK_RCNN_BLOCKS),
}


def half(units: tuple[str, ...], dtype: str, **fields: Any) -> dict:
    """Fields of the wrapper."""
    policy = dict(type='ModuleClassPolicy', classes=list(units))
    precision = dict(param_dtype=dtype) | fields.pop('precision', {})
    return dict(stage=3, wrap_policy=policy, precision=precision, **fields)


def build(name: str, dtype: str, wrapper: dict) -> tuple[Any, OptimWrapper]:
    """The pair, or where ``wrapper`` is empty DDP, ready for a step."""
    init_process_group('none')
    torch.manual_seed(0)
    optim: dict = dict(dtype=dtype)
    if dtype == 'float16':
        optim['loss_scale'] = dict(init_scale=2.0**8)
    model, wrapped = build_pair(MODELS[name][0](), sgd, wrapper, optim)
    wrapped.initialize_count_status(model, 0, 10)
    torch.manual_seed(1)
    return model.train(), wrapped


def operators_of(name: str, dtype: str, wrapper: dict) -> Seen:
    """The operators of a whole training step."""
    model, optim = build(name, dtype, wrapper)
    with Operators(OPERATORS) as operators:
        model.train_step(MODELS[name][1](0), optim)
    return operators.seen


def differences(found: Seen, wanted: Seen) -> dict[tuple[str, str], int]:
    """How much oftener an operator runs on a dtype."""
    counts: Counter[tuple[str, str]] = Counter()
    for seen, sign in ((found, 1), (wanted, -1)):
        for (name, (into,), _), count in seen.items():
            counts[name, into] += sign * count
    return {key: count for key, count in counts.items() if count}


def moved(name: str, count: int, *, source: str, target: str) -> dict[tuple[str, str], int]:
    """Differences where an operator runs on another dtype."""
    return {(name, source): -count, (name, target): count}


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('name', ['dino', 'decoder', 'rtmdet'])
def test_a_step_computes_in_the_dtypes_of_ddp(name: str, dtype: str) -> None:
    """But for what is told here: losses that are written out, and Swin's biases, which are weights of units."""
    by_hand = operators_of(name, dtype, {})
    found = operators_of(name, dtype, half(MODELS[name][2], dtype))
    wanted: dict = {}
    if name == 'dino':
        # Blocks without a mask, which is float32, add their bias in 16 bit.
        wanted = moved('_softmax', 2, source='float32', target=dtype)
        # Five focal losses, forward and backward.
        wanted |= moved('pow', 10, source=dtype, target='float32')
    if name == 'rtmdet':
        wanted = moved('pow', 6, source=dtype, target='float32')
    assert differences(found, wanted=by_hand) == wanted
    assert {(into, out) for (operator, into, out), _ in found.items() if operator in LOSSES} == {
        (('float32',), ('float32',))
    }


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('name', ['dino', 'rtmdet', pytest.param('mask_rcnn', marks=FULL)])
def test_losses_are_float32(name: str, dtype: str) -> None:
    model, optim = build(name, dtype, half(MODELS[name][2], dtype))
    with modules_seen(model.module, LOSS_MODULES) as seen:
        log_vars = model.train_step(MODELS[name][1](0), optim)
    assert seen
    for (loss, into, out), _ in seen.items():
        assert out == ('float32',) and dtype not in into, (loss, into, out)
    assert dtypes_of(log_vars) == ('float32',)


@contextmanager
def deformable_attention_seen() -> Iterator[Counter[tuple[str, ...]]]:
    """The dtypes of values, sampling locations and attention weights."""
    from mmcv.ops import multi_scale_deform_attn as module

    original, seen = module.multi_scale_deformable_attn_pytorch, Counter()

    def noting(value: Tensor, shapes: Tensor, locations: Tensor, weights: Tensor) -> Tensor:
        seen[tuple(short(tensor.dtype) for tensor in (value, locations, weights))] += 1
        return original(value, shapes, locations, weights)

    with patch.object(module, 'multi_scale_deformable_attn_pytorch', noting):
        yield seen


def layer_inputs(wrapper: dict, dtype: str) -> tuple[Seen, Counter[tuple[str, ...]], set[str]]:
    """What goes into layers of DINO by name, what deformable attention takes, and dtypes of positional encodings."""
    model, optim = build('dino', dtype, wrapper)
    seen: Seen = Counter()

    def note(module: nn.Module, _: Any, kwargs: dict) -> None:
        for name, value in kwargs.items():
            if isinstance(value, Tensor):
                seen[name, (short(value.dtype),), ()] += 1

    for layer in [*model.module.encoder.layers, *model.module.decoder.layers]:
        # After FSDP2's own, which casts.
        layer.register_forward_pre_hook(note, with_kwargs=True)
    with deformable_attention_seen() as attention, modules_seen(model.module, ['SinePositionalEncoding']) as positions:
        model.train_step(detection_batch(0), optim)
    return seen, attention, {out for _, _, (out,) in positions}


@pytest.mark.parametrize('dtype', DTYPES)
def test_boxes_and_points_stay_float32(dtype: str) -> None:
    by_hand = layer_inputs({}, dtype)
    found = layer_inputs(half(DINO_BLOCKS, dtype), dtype)
    assert found == by_hand
    inputs, attention, positions = found
    kinds = {name: {dtypes for other, (dtypes,), _ in inputs if other == name} for name, _, _ in inputs}
    assert kinds['reference_points'] == {'float32'}
    assert kinds['spatial_shapes'] == kinds['level_start_index'] == {'int64'}
    assert kinds['self_attn_mask'] == {'bool'}
    assert {locations for _, locations, _ in attention} == positions == {'float32'}


def test_a_unit_casts_its_inputs_where_it_is_told_to() -> None:
    """Floating ones alone."""
    casts = [dict(units='decoder.layers.*', cast_forward_inputs=True)]
    inputs, _, _ = layer_inputs(half(DINO_BLOCKS, 'bfloat16', overrides=casts), 'bfloat16')
    assert inputs['reference_points', ('bfloat16',), ()] == 2  # those of the decoder
    assert inputs['reference_points', ('float32',), ()] == 2
    assert inputs['spatial_shapes', ('int64',), ()] == 4
    assert inputs['self_attn_mask', ('bool',), ()] == 2


class Odd(nn.Module):
    """A unit with buffers of several kinds, and outputs and inputs that are no floats."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)
        self.norms = nn.ModuleList([nn.BatchNorm2d(4), nn.BatchNorm2d(4, track_running_stats=False)])
        self.instance = nn.InstanceNorm2d(4, affine=True)
        self.embedding = nn.Embedding(7, 4)
        self.register_buffer('grid', torch.linspace(0, 1, 4).view(4, 1, 1))
        self.register_buffer('calls', torch.zeros((), dtype=torch.int64))
        self.taken: list[str] = []

    def forward(self, x: Tensor, tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self.taken += [short(value.dtype) for value in (x, tokens, mask)]
        self.calls += 1
        x = x + self.norms[0](self.conv(x)) + self.embedding(tokens)[:, :, None, None]
        # What is added up is float32, and so is what these norms get.
        x = self.norms[1](x + self.grid)
        return self.instance(x) * mask[:, None, None, None], tokens, mask


class OddModel(BaseModel):
    """A stem, two such units and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.units, self.head = nn.Conv2d(3, 4, 1), nn.ModuleList([Odd(), Odd()]), nn.Linear(4, 7)
        self.between: list[str] = []

    def forward(self, inputs: Tensor, labels: Any = None, mode: str = 'tensor') -> Any:
        state = self.stem(inputs).float(), labels, labels >= 0
        for unit in self.units:
            state = unit(*state)
            self.between += [short(value.dtype) for value in state]
        logits = self.head(state[0].mean((2, 3)))
        return dict(loss=nn.functional.cross_entropy(logits, labels))


def odd_batch(seed: int) -> dict:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(4, 3, 6, 6, generator=generator)
    return dict(inputs=inputs, labels=torch.randint(0, 7, (4,), generator=generator))


MODELS['odd'] = (OddModel, odd_batch, ('Odd',))


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('keep', [[], ['units.*.norms.*']], ids=['by itself', 'keep_fp32'])
def test_buffers_and_integers_keep_their_dtypes(dtype: str, keep: list[str]) -> None:
    model, optim = build('odd', dtype, half(('Odd',), dtype, precision=dict(keep_fp32=keep)))
    before = {name: buffer.clone() for name, buffer in model.module.named_buffers()}
    losses = [model.train_step(odd_batch(0), optim)['loss'].item() for _ in range(4)]
    assert losses[-1] < losses[0]
    after = dict(model.module.named_buffers())
    assert {name: buffer.dtype for name, buffer in after.items()} == {name: b.dtype for name, b in before.items()}
    moving = 'units.1.norms.0.running_var'
    # Averages that bfloat16 could not hold.
    assert not torch.equal(after[moving], after[moving].to(getattr(torch, dtype)).float())
    assert torch.equal(after['units.0.grid'], before['units.0.grid']) and after['units.0.calls'] == 4
    unit = model.module.units[1]
    assert unit.taken[:3] == ['float32', 'int64', 'bool']
    assert model.module.between[:3] == ['float32', 'int64', 'bool']
    saved = model.engine.model_state()
    assert saved[moving].dtype == saved['units.0.grid'].dtype == torch.float32


@pytest.mark.parametrize('output', [None, 'float32', 'bfloat16'])
def test_output_dtype(output: str | None) -> None:
    """Of the units' floating outputs; those of the whole model are left alone."""
    precision = dict(output_dtype=output) if output else {}
    model, optim = build('dino', 'bfloat16', half(DINO_BLOCKS, 'bfloat16', precision=precision))
    with modules_seen(model.module, ['SwinBlock', DECODER_LAYER]) as seen:
        log_vars = model.train_step(detection_batch(0), optim)
    found = {(name, out) for name, _, out in seen}
    blocks, layers = (output or 'bfloat16',), (output or 'float32',)
    assert found == {('SwinBlock', blocks), (DECODER_LAYER, layers)}
    assert dtypes_of(log_vars) == ('float32',)


def test_embeddings_around_units_stay_float32_and_those_in_units_are_rounded() -> None:
    model, optim = build('decoder', 'bfloat16', half(('Layer',), 'bfloat16'))
    with modules_seen(model.module, [nn.Embedding]) as seen:
        model.train_step(token_batch(0), optim)
    assert set(seen) == {('Embedding', ('int64',), ('float32',))}
    model, optim = build('odd', 'bfloat16', half(('Odd',), 'bfloat16', precision=dict(keep_fp32=['units.1.embedding'])))
    with modules_seen(model.module, [nn.Embedding]) as seen:
        model.train_step(odd_batch(0), optim)
    assert set(seen) == {('Embedding', ('int64',), (dtype,)) for dtype in ('bfloat16', 'float32')}
