"""timm's models with ``set_grad_checkpointing()``: their blocks or stages are recomputed, and their switch is off."""

from torch import nn

from mmzero.patches.switch import OwnBlock, OwnParts, parts
from mmzero.registry import CHECKPOINT_PATCHES

# Patterns of the paths of what a class recomputes, and the classes. With the package's name, since some of the names
# are common: transformers has a FocalNetStage, too.
PARTS = {
    'blocks.*': (
        'Beit Block Cait ConvMixer ConvNeXtStage DaVitStage DeepseekVitEncoder EdgeNeXtStage EfficientFormerStage '
        'EfficientFormerV2Stage EfficientNetFeatures EfficientViMStage Eva FastVitStage FocalNetStage '
        'Gemma4VitEncoder GlobalContextVitStage Hiera HieraDet HighPerfGpuStage MambaOutStage MaxxVitStage '
        'MetaFormerStage MetaNeXtStage MlpMixer MobileNetV3Features MultiScaleVitStage NaFlexVit NextStage OsaStage '
        'PyramidVisionTransformerStage Qwen3VitEncoder ResNetStage Stage StageBlock SwinTransformerStage '
        'SwinTransformerV2CrStage SwinTransformerV2Stage TNT VisionTransformer VisionTransformerRelPos '
        'VisionTransformerSAM XceptionAligned'
    ),
    'blocks.*.*': 'EfficientNet GhostNet MobileNetV3 MobileNetV5 MobileNetV5Encoder RepGhostNet',
    'stages.*': (
        'ByobNet CPUBone CSATv2 CspNext DaVit EfficientVit EfficientVitLarge EfficientVitMsra Levit LowFormer '
        'MbConvStages MetaFormer NextViT NormFreeNet RepVit StarNet TinyVit'
    ),
    'stages.*.*': 'LCNetV2',
    'features.*': 'DPN RexNet',
    'layer[1-4].*': 'ResNet',
    'body.layer*.*': 'TResNet',
    'dense_stages.*': 'RDNet',
    'transformer_encoder.*': 'NestLevel',
    'stage[1-3].*': 'Visformer',
    'network.* post_network.*': 'VOLO',
    'blocks.* cls_attn_blocks.*': 'Xcit',
    '*': 'RegStage',
}

for _patterns, _names in PARTS.items():
    CHECKPOINT_PATCHES.register_module(
        name=[f'timm.{name}' for name in _names.split()], module=parts(*_patterns.split())
    )

CHECKPOINT_PATCHES.register_module(name='timm.DenseLayer', module=OwnBlock)


@CHECKPOINT_PATCHES.register_module(name=['timm.FeatureDictNet', 'timm.FeatureHookNet'])
class FeatureNet(OwnParts):
    """A model cut into the steps between its feature maps (``features_only=True``)."""

    def find(self, module: nn.Module) -> list[nn.Module]:
        """As the base says; as timm does, without its ends and what only changes its input in place."""
        steps = list(module.children())[1:-1]
        return [step for step in steps if any(True for _ in step.parameters())]
