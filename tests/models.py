"""Small models that the tests train."""

import copy
from typing import Any

import torch
from mmengine.model import BaseModel
from torch import nn

TINY_DINO = dict(
    type='DINO',
    num_queries=12,
    with_box_refine=True,
    as_two_stage=True,
    num_feature_levels=2,
    data_preprocessor=dict(type='DetDataPreprocessor', mean=[120.0] * 3, std=[60.0] * 3, pad_size_divisor=1),
    backbone=dict(
        type='SwinTransformer',
        embed_dims=16,
        depths=(2, 2),
        num_heads=(2, 2),
        strides=(4, 2),
        out_indices=(0, 1),
        window_size=4,
        mlp_ratio=2,
        drop_path_rate=0.0,
        with_cp=True,
    ),
    neck=dict(
        type='ChannelMapper',
        in_channels=[16, 32],
        kernel_size=1,
        out_channels=256,
        act_cfg=None,
        norm_cfg=dict(type='GN', num_groups=32),
        num_outs=2,
    ),
    encoder=dict(
        num_layers=2,
        layer_cfg=dict(
            self_attn_cfg=dict(embed_dims=256, num_heads=4, num_levels=2, dropout=0.0),
            ffn_cfg=dict(embed_dims=256, feedforward_channels=64, ffn_drop=0.0),
        ),
    ),
    decoder=dict(
        num_layers=2,
        return_intermediate=True,
        layer_cfg=dict(
            self_attn_cfg=dict(embed_dims=256, num_heads=4, dropout=0.0),
            cross_attn_cfg=dict(embed_dims=256, num_heads=4, num_levels=2, dropout=0.0),
            ffn_cfg=dict(embed_dims=256, feedforward_channels=64, ffn_drop=0.0),
        ),
        post_norm_cfg=None,
    ),
    positional_encoding=dict(num_feats=128, normalize=True, offset=0.0, temperature=20),
    bbox_head=dict(
        type='DINOHead',
        num_classes=5,
        embed_dims=256,
        sync_cls_avg_factor=True,
        loss_cls=dict(type='FocalLoss', use_sigmoid=True, gamma=2.0, alpha=0.25, loss_weight=1.0),
        loss_bbox=dict(type='L1Loss', loss_weight=5.0),
        loss_iou=dict(type='GIoULoss', loss_weight=2.0),
    ),
    dn_cfg=dict(
        label_noise_scale=0.5,
        box_noise_scale=1.0,
        group_cfg=dict(dynamic=True, num_groups=None, num_dn_queries=6),
    ),
    train_cfg=dict(
        assigner=dict(
            type='HungarianAssigner',
            match_costs=[
                dict(type='FocalLossCost', weight=2.0),
                dict(type='BBoxL1Cost', weight=5.0, box_format='xywh'),
                dict(type='IoUCost', iou_mode='giou', weight=2.0),
            ],
        )
    ),
    test_cfg=dict(max_per_img=12),
)

DINO_BLOCKS = ('SwinBlock', 'DeformableDetrTransformerEncoderLayer', 'DeformableDetrTransformerDecoderLayer')


def tiny_dino(**backbone: Any) -> nn.Module:
    """Build a small DINO with a two-stage Swin, from the seed that is set."""
    import mmdet.models  # noqa: F401
    from mmengine.registry import MODELS, DefaultScope

    cfg = copy.deepcopy(TINY_DINO)
    cfg['backbone'].update(backbone)
    with DefaultScope.overwrite_default_scope('mmdet'):
        model = MODELS.build(cfg)
    model.init_weights()
    return model


def detection_batch(seed: int, images: int = 2, size: int = 32) -> dict:
    """Make a batch for a detector: random images with two boxes each."""
    from mmdet.structures import DetDataSample
    from mmengine.structures import InstanceData

    generator = torch.Generator().manual_seed(seed)
    inputs, samples = [], []
    for _ in range(images):
        inputs.append(torch.randint(0, 255, (3, size, size), generator=generator, dtype=torch.uint8))
        sample = DetDataSample(metainfo=dict(img_shape=(size, size), ori_shape=(size, size), scale_factor=(1.0, 1.0)))
        corner = torch.rand(2, 2, generator=generator) * size / 2
        extent = (torch.rand(2, 2, generator=generator) + 0.2) * size / 2.5
        labels = torch.randint(0, 5, (2,), generator=generator)
        sample.gt_instances = InstanceData(bboxes=torch.cat([corner, corner + extent], dim=1), labels=labels)
        samples.append(sample)
    return dict(inputs=inputs, data_samples=samples)


class Block(nn.Module):
    """A residual block with a norm, a frozen bias and a scalar that cannot be sharded."""

    def __init__(self, width: int, scalar: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.scale = nn.Parameter(torch.tensor(0.7)) if scalar else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.down(torch.relu(self.up(self.norm(x))))
        return x + (out if self.scale is None else out * self.scale)


class ToyModel(BaseModel):
    """A classifier of vectors with what bites: tied weights, a frozen layer, 0-dim and unused parameters."""

    def __init__(self, width: int = 12, depth: int = 3, classes: int = 7, scalar: bool = True) -> None:
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width, scalar) for _ in range(depth))
        self.frozen = nn.Linear(width, width)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(width, classes, bias=False)
        self.tied = nn.Linear(width, classes, bias=False)
        self.tied.weight = self.head.weight
        self.unused = nn.Linear(3, 3)
        self.register_buffer('offset', torch.full((width,), 0.25), persistent=False)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor | None = None, mode: str = 'tensor') -> Any:
        x = self.stem(inputs) + self.offset + self.frozen(inputs)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x) + 0.5 * self.tied(x)
        if mode == 'loss':
            return dict(loss=nn.functional.cross_entropy(logits, labels))
        return list(logits) if mode == 'predict' else logits


def toy_batch(seed: int, size: int = 4, width: int = 12, classes: int = 7) -> dict:
    """Make a batch for ToyModel."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, width, generator=generator)
    return dict(inputs=inputs, labels=torch.randint(0, classes, (size,), generator=generator))


class Attention(nn.Module):
    """Multi-head self-attention, causal where asked for."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Layer(nn.Module):
    """A pre-norm transformer layer; the unit of TinyViT and TinyDecoder."""

    def __init__(self, width: int, heads: int, causal: bool, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal)
        self.ffn = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.ffn(self.norm2(x)))


class TinyViT(BaseModel):
    """A ViT-like classifier of images of 16 x 16 pixels, with dropout."""

    def __init__(self, width: int = 32, depth: int = 3, classes: int = 7, dropout: float = 0.1) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, stride=4)
        self.cls_token = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.position = nn.Parameter(torch.randn(1, 17, width) * 0.02)
        self.layers = nn.ModuleList(Layer(width, 4, False, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor | None = None, mode: str = 'tensor') -> Any:
        x = self.patch(inputs).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1) + self.position
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x)[:, 0])
        if mode == 'loss':
            return dict(loss=nn.functional.cross_entropy(logits.float(), labels))
        return list(logits) if mode == 'predict' else logits


class TinyDecoder(BaseModel):
    """A causal language model whose output weights are its embedding's, as GPT-2 ties them."""

    def __init__(self, width: int = 32, depth: int = 3, vocabulary: int = 50) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(16, width)
        self.layers = nn.ModuleList(Layer(width, 4, True, 0.0) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor | None = None, mode: str = 'tensor') -> Any:
        x = self.embedding(inputs) + self.position.weight[: inputs.shape[1]]
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        if mode == 'loss':
            return dict(loss=nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten()))
        return list(logits) if mode == 'predict' else logits


def image_batch(seed: int, size: int = 4, classes: int = 7) -> dict:
    """Make a batch for TinyViT."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, 3, 16, 16, generator=generator)
    return dict(inputs=inputs, labels=torch.randint(0, classes, (size,), generator=generator))


def token_batch(seed: int, size: int = 3, length: int = 12, vocabulary: int = 50) -> dict:
    """Make a batch for TinyDecoder: each token's label is the next one."""
    tokens = torch.randint(0, vocabulary, (size, length + 1), generator=torch.Generator().manual_seed(seed))
    return dict(inputs=tokens[:, :-1], labels=tokens[:, 1:])
