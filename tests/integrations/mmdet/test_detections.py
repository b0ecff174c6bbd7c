"""Detections of a small DINO with random weights, drawn beside the ground truth."""

import json

import pytest
import torch
from mmengine.registry import MODELS, DefaultScope
from PIL import Image

from mmzero.errors import CheckpointError, ConfigError, DataError
from mmzero.integrations.mmdet import detections as module
from mmzero.integrations.mmdet import draw_detections
from tests.runs import digits_config


@pytest.fixture
def config(digits, tmp_path):
    return digits_config(str(digits), str(tmp_path))


@pytest.fixture(scope='session')
def weights(digits, tmp_path_factory):
    path = tmp_path_factory.mktemp('weights') / 'random.pth'
    with DefaultScope.overwrite_default_scope('mmdet'):
        torch.manual_seed(0)
        model = MODELS.build(digits_config(str(digits), '').model)
    # Without it DINO's level embedding is whatever the memory held, at times not finite.
    model.init_weights()
    torch.save(dict(state_dict=model.state_dict()), path)
    return path


@pytest.fixture
def drawn(monkeypatch):
    """The boxes of each image, in the order of drawing."""
    boxes = {module.TRUTH: [], module.FOUND: []}
    draw_boxes = module._draw_boxes

    def record(axes, given, colour, **kwargs):
        boxes[colour].append(given)
        draw_boxes(axes, given, colour, **kwargs)

    monkeypatch.setattr(module, '_draw_boxes', record)
    return boxes


def test_a_grid_is_drawn(config, weights, tmp_path, digits, drawn):
    before = config.pretty_text
    draw_detections(config, weights, tmp_path / 'new/grid.png', count=3, score=0.0)
    with Image.open(tmp_path / 'new/grid.png') as image:
        assert image.format == 'PNG'
        assert image.width >= 2 * 300 and image.height >= 2 * 300
        colours = {colour for _, colour in image.convert('RGB').getcolors(1 << 20)}
    assert {(50, 205, 50), (255, 69, 0)} <= colours
    assert config.pretty_text == before
    truth = json.loads((digits / 'annotations/val.json').read_text())
    for image_id, boxes in enumerate(drawn[module.TRUTH], start=1):
        objects = [item for item in truth['annotations'] if item['image_id'] == image_id]
        corners = [[x, y, x + w, y + h] for x, y, w, h in (item['bbox'] for item in objects)]
        assert boxes.corners == corners
        assert boxes.captions == [str(item['category_id']) for item in objects]
    assert len(drawn[module.TRUTH]) == len(drawn[module.FOUND]) == 3
    assert all(boxes.corners for boxes in drawn[module.FOUND])


def test_scores_and_images_are_limits(config, weights, tmp_path, drawn):
    draw_detections(config, weights, tmp_path / 'grid.png', count=9, score=1.1)
    assert len(drawn[module.FOUND]) == 4  # all val images there are
    assert not any(boxes.corners for boxes in drawn[module.FOUND])


def test_resized_images_keep_the_boxes_of_the_originals(config, weights, tmp_path, drawn):
    draw_detections(config, weights, tmp_path / 'a.png', count=1, score=0.0)
    pipeline = config.val_dataloader.dataset.pipeline
    pipeline[1].scale = (128, 128)
    pipeline[1], pipeline[2] = pipeline[2], pipeline[1]  # annotations resized too
    draw_detections(config, weights, tmp_path / 'b.png', count=1, score=0.0)
    first, second = drawn[module.TRUTH]
    assert first == second
    corners = torch.tensor(drawn[module.FOUND][1].corners)
    assert corners.max() <= 64


@pytest.mark.parametrize('missing', ['checkpoint', 'annotations', 'image'])
def test_a_missing_file_is_one_clear_error(config, weights, tmp_path, missing):
    error, match = DataError, 'val set cannot be read: .*absent'
    dataset = config.val_dataloader.dataset
    if missing == 'checkpoint':
        error, match, weights = CheckpointError, 'no checkpoint at', tmp_path / 'absent.pth'
    elif missing == 'annotations':
        dataset.ann_file = 'annotations/absent.json'
    else:
        dataset.data_prefix.img = 'absent/'
    with pytest.raises(error, match=match):
        draw_detections(config, weights, tmp_path / 'grid.png', count=1)


def test_a_missing_config_or_val_set_is_refused(config, weights, tmp_path):
    with pytest.raises(ConfigError, match='no such config file'):
        draw_detections(tmp_path / 'absent.py', weights, tmp_path / 'grid.png')
    config.val_dataloader = None
    with pytest.raises(ConfigError, match='val_dataloader: is missing'):
        draw_detections(config, weights, tmp_path / 'grid.png')


def test_a_checkpoint_of_another_model_is_refused(config, weights, tmp_path):
    state = torch.load(weights)['state_dict']
    first = next(name for name in state if name.startswith('neck.'))
    lacking = {name: value for name, value in state.items() if name != first}
    other = {'other.weight': torch.ones(1)}
    for wrong, match in ((other, 'none of its 1 weights'), (lacking, f'lacks 1 .*{first}')):
        torch.save(dict(state_dict=wrong), tmp_path / 'wrong.pth')
        with pytest.raises(CheckpointError, match=match):
            draw_detections(config, tmp_path / 'wrong.pth', tmp_path / 'grid.png')
