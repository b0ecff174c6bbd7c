"""Tests of the digits data set: same bytes per seed, honest boxes, disjoint splits."""

import hashlib
import importlib.util
import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import cv2
import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
TINY = dict(train=6, val=4)


def load_tool() -> ModuleType:
    """Import the tool from its file: tools/ is no package."""
    path = ROOT / 'tools/dataset_converters/digits_coco.py'
    spec = importlib.util.spec_from_file_location('digits_coco', path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


digits_coco = load_tool()


def generate(out: Path, seed: int = 0) -> Path:
    """Run the tool with tiny settings."""
    digits_coco.main(
        [
            '--out',
            str(out),
            '--num-train',
            str(TINY['train']),
            '--num-val',
            str(TINY['val']),
            '--size',
            '96',
            '--seed',
            str(seed),
        ]
    )
    return out


def hashes(out: Path) -> dict[str, str]:
    """Map each file under out to the SHA-256 of its bytes."""
    return {
        str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in out.rglob('*')
        if path.is_file()
    }


@pytest.fixture(scope='module')
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One generated set, only read."""
    return generate(tmp_path_factory.mktemp('digits'))


def annotations(out: Path, split: str) -> dict:
    """Read one split's annotation file."""
    return json.loads((out / f'annotations/{split}.json').read_text())


def test_same_seed_gives_same_bytes(tiny: Path, tmp_path: Path) -> None:
    assert hashes(generate(tmp_path / 'again')) == hashes(tiny)


def test_other_seed_gives_other_images(tiny: Path, tmp_path: Path) -> None:
    other = hashes(generate(tmp_path / 'other', seed=1))
    assert other['train/000001.jpg'] != hashes(tiny)['train/000001.jpg']


@pytest.mark.parametrize('split', ['train', 'val'])
def test_coco_fields(tiny: Path, split: str) -> None:
    coco = annotations(tiny, split)
    images = {image['id']: image for image in coco['images']}
    assert len(images) == len(coco['images']) == TINY[split]
    ids = [annotation['id'] for annotation in coco['annotations']]
    assert len(set(ids)) == len(ids) > 0
    assert [category['name'] for category in coco['categories']] == list('0123456789')
    assert {image['file_name'] for image in images.values()} == {path.name for path in (tiny / split).iterdir()}
    for annotation in coco['annotations']:
        image = images[annotation['image_id']]
        x, y, w, h = annotation['bbox']
        assert 0 <= x < x + w <= image['width'] and 0 <= y < y + h <= image['height']
        assert annotation['area'] == w * h
        assert annotation['iscrowd'] == 0
        assert 0 <= annotation['category_id'] < 10


def test_boxes_are_tight_and_apart(tiny: Path) -> None:
    coco = annotations(tiny, 'train')
    for image in coco['images']:
        # Strokes are at least 180 in each channel before JPEG; the dimmed photo at most 153.
        darkest = cv2.imread(str(tiny / 'train' / image['file_name'])).min(axis=2)
        count = np.zeros(darkest.shape, int)
        for x, y, w, h in (a['bbox'] for a in coco['annotations'] if a['image_id'] == image['id']):
            count[y : y + h, x : x + w] += 1
            ys, xs = np.nonzero(darkest[y : y + h, x : x + w] > 155)
            assert ys.min() <= 2 and xs.min() <= 2
            assert ys.max() >= h - 3 and xs.max() >= w - 3
        assert count.max() == 1
        assert (darkest[count == 0] <= 165).all()


def test_splits_share_no_digit_and_no_photo_region() -> None:
    train, val = (digits_coco.split_sources(split) for split in ('train', 'val'))
    seen = {digit.tobytes() for digit in train[0]}
    assert not any(digit.tobytes() in seen for digit in val[0])
    assert set(train[1]) == set(val[1]) == set(range(10))
    for left, right, whole in zip(train[2], val[2], digits_coco.load_sample_images().images, strict=True):
        assert np.array_equal(np.concatenate([left, right], axis=1), whole)


def test_complete_set_is_kept(tiny: Path, capsys: pytest.CaptureFixture) -> None:
    before = {path: path.stat().st_mtime_ns for path in tiny.rglob('*')}
    generate(tiny)
    assert capsys.readouterr().out.count('\n') == 1
    assert {path: path.stat().st_mtime_ns for path in tiny.rglob('*')} == before


@pytest.mark.parametrize('lost', ['digits.json', 'annotations/val.json', 'train/000003.jpg'])
def test_half_written_set_is_remade(tiny: Path, tmp_path: Path, lost: str) -> None:
    out = generate(tmp_path)
    (out / lost).unlink()
    assert hashes(generate(out)) == hashes(tiny)


def test_mmdet_reads_the_set(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec('mmdet') is None:
        pytest.skip('needs mmdet')
    if importlib.util.find_spec('mmcv._ext') is None:
        # mmcv-lite lacks the compiled ops, which mmdet only imports here.
        class Ops(ModuleType):
            def __getattr__(self, name: str) -> object:
                if name.startswith('__'):
                    raise AttributeError(name)
                return lambda *args, **kwargs: pytest.fail(f'{name} needs the full mmcv')

        stand_in = Ops('mmcv._ext')
        stand_in.__spec__ = ModuleSpec('mmcv._ext', None)
        monkeypatch.setitem(sys.modules, 'mmcv._ext', stand_in)
    from mmdet.datasets import CocoDataset

    dataset = CocoDataset(
        data_root=str(tiny),
        ann_file='annotations/train.json',
        data_prefix=dict(img='train/'),
        metainfo=dict(classes=tuple('0123456789')),
        pipeline=[],
    )
    assert len(dataset) == TINY['train']
    expected = annotations(tiny, 'train')['annotations']
    found = [instance for info in dataset for instance in info['instances']]
    assert [i['bbox_label'] for i in found] == [a['category_id'] for a in expected]
