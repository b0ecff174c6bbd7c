"""MMEngine's own activation checkpointing loses keyword arguments, which mmdet's encoder layers are given."""

import pytest
import torch
from mmengine.runner.activation_checkpointing import turn_on_activation_checkpointing
from torch import nn

from mmzero.config import CheckpointingConfig
from mmzero.patches import apply_patches
from tests.models import detection_batch, tiny_dino

pytest.importorskip('mmdet')

LAYERS = ['encoder.layers.0', 'encoder.layers.1', 'decoder.layers.0']


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    data = model.data_preprocessor(detection_batch(0), True)
    loss, _ = model.parse_losses(model(**data, mode='loss'))
    loss.backward()
    return {name: param.grad for name, param in model.named_parameters()}


def build() -> nn.Module:
    torch.manual_seed(0)
    return tiny_dino(with_cp=False).train()


def test_keyword_arguments_of_encoder_and_decoder_layers() -> None:
    """Red under MMEngine; if that goes away, its key needs no translation."""
    model = build()
    turn_on_activation_checkpointing(model, LAYERS)
    with pytest.raises(TypeError, match='unexpected keyword argument'):
        gradients(model)
    model, wanted = build(), gradients(build())
    applied = apply_patches(model, CheckpointingConfig(modules=LAYERS))
    for name, grad in gradients(model).items():
        assert torch.equal(grad, wanted[name]), name
    assert not applied.never_run()
