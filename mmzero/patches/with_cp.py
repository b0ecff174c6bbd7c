"""Blocks that checkpoint themselves by ``with_cp=True``: those of mmcv, mmdet, mmseg and mmpretrain.

They call torch.utils.checkpoint in its re-entrant form, which breaks sharding (FSDP1: "mat2 must be a matrix, got 1-D
tensor"; DDP: "marked ready twice"). Their subclasses, and copies in other projects under the same names, are found too.
"""

from collections.abc import Sequence
from typing import Any

from torch import nn

from mmzero.patches.switch import OwnBlock, OwnParts, parts
from mmzero.registry import CHECKPOINT_PATCHES

# Recomputed whole, also where the class itself recomputes only a part of its forward (DenseLayer, UNet's).
BLOCKS = (
    'BasicBlock',
    'BasicConvBlock',
    'Bottle2neck',
    'Bottleneck',
    'ChannelBlock',
    'ContextGuidedBlock',
    'ConvNeXtBlock',
    'DeconvModule',
    'DenseLayer',
    'EdgeResidual',
    'GlobalContextExtractor',
    'InterpConv',
    'InvertedResidual',
    'InvertedResidualV3',
    'RepVGGBlock',
    'SEBottleneck',
    'ShuffleUnit',
    'SparseConvNeXtBlock',
    'SpatialBlock',
    'SwinBlock',
    'SwinBlockV2',
    'TransformerEncoderLayer',
    'TridentBottleneck',
)

# What recomputes modules below it, and which.
PARENTS = {
    ('BasicStage', 'ConvStage', 'MixMIMLayer', 'RepLKNetStage'): ('blocks.*',),
    ('HRFPN',): ('reduction_conv', 'fpn_convs.*'),
    ('HorNet',): ('stages.*.*',),
    ('mmpretrain.OPTDecoder',): ('layers.*',),
    ('RepLKNet',): ('stem.[!0]',),
    ('VLFuse',): ('b_attn',),
}


@CHECKPOINT_PATCHES.register_module(name=list(BLOCKS))
class WithCp(OwnBlock):
    """Replaces a block's own re-entrant checkpointing by the non-re-entrant one, over its whole forward."""

    # DetectoRS enters its Bottleneck by another door, in each step but the first.
    methods = ('rfp_forward',)


@CHECKPOINT_PATCHES.register_module(name='mmpretrain.BertEncoder')
class BertEncoder(OwnParts):
    """The encoders of BLIP, BLIP-2, RAM and Chinese CLIP in mmpretrain; BLIP-2's has its switch in its config."""

    parts = ('layer.*',)

    def holders(self, module: nn.Module) -> Sequence[Any]:
        """As the base says."""
        return module, getattr(module, 'config', None)


for _names, _patterns in PARENTS.items():
    CHECKPOINT_PATCHES.register_module(name=list(_names), module=parts(*_patterns))
