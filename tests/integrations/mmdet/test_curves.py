"""The curves of a run, from scalars.json files as MMEngine writes them."""

import json
import math

import pytest
from PIL import Image

from mmzero.errors import DataError
from mmzero.integrations.mmdet import draw_curves, read_scalars


def train_line(step, **more):
    return dict(lr=1e-3 / step, loss=10 / step, epoch=1 + step // 4, iter=step, step=step, **more)


def val_line(step, ap):
    return {'coco/bbox_mAP': ap, 'coco/bbox_mAP_50': 2 * ap, 'time': 0.1, 'step': step}


def write_run(work_dir, name, lines, end=''):
    path = work_dir / name / 'vis_data/scalars.json'
    path.parent.mkdir(parents=True)
    path.write_text(''.join(f'{json.dumps(line)}\n' for line in lines) + end)


def assert_is_drawn(path):
    with Image.open(path) as image:
        assert image.format == 'PNG'
        assert image.size == (1200, 800)
        assert len(image.convert('RGB').getcolors(1 << 20)) > 50


def test_a_run_is_drawn(tmp_path):
    lines = [train_line(step, grad_norm=step) for step in range(1, 9)]
    write_run(tmp_path, '20260101_000000', [*lines[:4], val_line(1, 0.1), *lines[4:], val_line(2, 0.2)])
    draw_curves(tmp_path, tmp_path / 'new/curves.png')
    assert_is_drawn(tmp_path / 'new/curves.png')


@pytest.mark.parametrize(
    'lines',
    [
        [dict(loss=1.0, step=1, iter=1)],
        [train_line(1, grad_norm=math.inf), train_line(2, grad_norm=math.nan)],
        [train_line(1), val_line(1, 0.0)],
        [train_line(1), dict(accuracy=1.0, step=1)],
    ],
    ids=['no lr, no val', 'norms not finite', 'no norms, AP of 0', 'other metric'],
)
def test_a_run_with_little_in_it_is_drawn(tmp_path, lines):
    write_run(tmp_path, '20260101_000000', lines)
    draw_curves(tmp_path, tmp_path / 'curves.png')
    assert_is_drawn(tmp_path / 'curves.png')


def test_the_newest_training_run_is_read(tmp_path):
    write_run(tmp_path, '20260101_000000', [train_line(1)])
    write_run(tmp_path, '20260102_000000', [train_line(2), val_line(1, 0.3)])
    write_run(tmp_path, '20260103_000000', [val_line(0, 0.4)])
    assert read_scalars(tmp_path) == ([train_line(2)], [val_line(1, 0.3)])


def test_half_a_line_at_the_end_is_left_out(tmp_path):
    write_run(tmp_path, '20260101_000000', [train_line(1)], end='{"loss": 0.')
    assert read_scalars(tmp_path) == ([train_line(1)], [])


@pytest.mark.parametrize('lines', [None, [], [val_line(0, 0.4)]])
def test_no_losses_are_an_error(tmp_path, lines):
    if lines is not None:
        write_run(tmp_path, '20260101_000000', lines)
    with pytest.raises(DataError, match=r'no training run with losses in .*scalars\.json'):
        draw_curves(tmp_path, tmp_path / 'curves.png')
    assert not (tmp_path / 'curves.png').exists()
