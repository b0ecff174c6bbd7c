"""AutoPolicy beside the lists of classes that one would write by hand, on models at full size, on meta.

``python -m tests.policies.hand_written`` prints the table of docs/choosing_a_policy.md.
"""

from collections.abc import Callable
from pathlib import Path

from torch import nn

from mmzero._compat import build_with_meta_parameters
from mmzero.policies import AutoPolicy, ModuleClassPolicy, WrapPlan

CONFIGS = Path(__file__).parents[2] / 'configs'
ENCODER, DECODER = 'DeformableDetrTransformerEncoderLayer', 'DeformableDetrTransformerDecoderLayer'


def of_config(path: Path) -> nn.Module:
    """The model of a config."""
    from mmengine.config import Config
    from mmengine.registry import MODELS, DefaultScope

    cfg = Config.fromfile(path)
    with DefaultScope.overwrite_default_scope(cfg.get('default_scope')):
        return MODELS.build(cfg.model)


def of_mmdet(config: str) -> Callable[[], nn.Module]:
    """A model of a config in mmdet's wheel."""

    def build() -> nn.Module:
        import mmdet.models

        return of_config(Path(mmdet.__file__).parent / '.mim' / 'configs' / config)

    return build


def of_transformers(model_type: str, auto: str = 'AutoModel', **sizes: object) -> Callable[[], nn.Module]:
    """A model of Hugging Face's transformers, from its config alone."""

    def build() -> nn.Module:
        import transformers

        config = transformers.AutoConfig.for_model(model_type, **sizes)
        return getattr(transformers, auto).from_config(config)

    return build


MODELS: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    'DINO Swin-L': (of_mmdet('dino/dino-5scale_swin-l_8xb2-12e_coco.py'), ['SwinBlock', ENCODER, DECODER]),
    'ViT-H/14': (
        of_transformers(
            'vit', hidden_size=1280, num_hidden_layers=32, num_attention_heads=16, intermediate_size=5120, patch_size=14
        ),
        ['ViTLayer'],
    ),
    'Mask R-CNN R-50': (of_mmdet('mask_rcnn/mask-rcnn_r50_fpn_1x_coco.py'), ['Bottleneck']),
    'Mask2Former R-50': (
        of_mmdet('mask2former/mask2former_r50_8xb2-lsj-50e_coco-panoptic.py'),
        ['Bottleneck', ENCODER, 'Mask2FormerTransformerDecoderLayer'],
    ),
    'RTMDet-l': (of_mmdet('rtmdet/rtmdet_l_8xb32-300e_coco.py'), ['CSPLayer']),
    'ConvNeXt-L': (
        of_transformers('convnext', hidden_sizes=[192, 384, 768, 1536], depths=[3, 3, 27, 3]),
        ['ConvNextLayer'],
    ),
    'RetinaNet PVT-L': (of_mmdet('pvt/retinanet_pvt-l_fpn_1x_coco.py'), ['PVTEncoderLayer']),
    'Llama, 8B': (
        lambda: of_config(CONFIGS / 'llama_8b_zero3.py'),
        ['LlamaDecoderLayer'],
    ),
}


def plans(name: str) -> tuple[WrapPlan, WrapPlan]:
    """AutoPolicy's plan of a model, and that of the classes."""
    build, classes = MODELS[name]
    model = build_with_meta_parameters(build)
    return AutoPolicy()(model), ModuleClassPolicy(classes)(model)


def peak(plan: WrapPlan) -> int:
    """Elements of the root unit and of the two consecutive units that are largest together."""
    sizes = [unit.numel for unit in sorted(plan.units[:-1], key=lambda unit: unit.places[0])]
    return plan.root.numel + max(sum(sizes[index : index + 2]) for index in range(len(sizes)))


def row(name: str) -> tuple[float, float, str]:
    """Ratios of AutoPolicy to the classes in peak and number of units, and the table's row."""
    auto, by_hand = plans(name)
    peaks, units = peak(auto) / peak(by_hand), len(auto.units) / len(by_hand.units)
    classes = ', '.join(MODELS[name][1])
    cells = [name, f'{auto.numel / 1e6:,.0f} M', classes, str(len(by_hand.units)), str(len(auto.units)), f'{units:.2f}']
    cells += [f'{peak(by_hand) / 1e6:,.1f} M', f'{peak(auto) / 1e6:,.1f} M', f'{peaks:.3f}']
    return peaks, units, f'| {" | ".join(cells)} |'


if __name__ == '__main__':
    print('| model | parameters | classes by hand | units | AutoPolicy | ratio | peak | AutoPolicy | ratio |')
    print('|---' * 9 + '|')
    for name in MODELS:
        print(row(name)[2], flush=True)
