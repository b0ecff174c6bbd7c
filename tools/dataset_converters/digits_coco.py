"""Write a small COCO-format detection set: handwritten digits on photographs.

The pixels are real and come with scikit-learn, so nothing is downloaded. Train and val share neither digit samples nor
photograph regions, and a seed fixes every byte.
"""

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from sklearn.datasets import load_digits, load_sample_images

LAYOUT_VERSION = 2  # part of the settings, so that a set drawn by older code is remade
SPLITS = ('train', 'val')
TRAIN_SHARE = 0.7  # of the digit samples and of each photograph's columns; val has the rest
DIGITS_PER_IMAGE = (3, 5)  # smallest and largest count
DIGIT_SCALE = (0.3, 0.45)  # a digit's height over the image's


def split_sources(split: str) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """Return one split's digits (N, 8, 8) in [0, 1], labels (N,), photo regions (H, W, 3) RGB."""
    data = load_digits()

    def share(values: np.ndarray) -> np.ndarray:
        # Cut in the stored order, which keeps a writer's digits mostly in one split.
        cut = int(len(values) * TRAIN_SHARE)
        return values[:cut] if split == 'train' else values[cut:]

    regions = [share(photo.swapaxes(0, 1)).swapaxes(0, 1) for photo in load_sample_images().images]
    return share(data.images) / 16.0, share(data.target), regions


def stroke_mask(digit: np.ndarray, height: int) -> np.ndarray:
    """Enlarge a digit to smooth strokes, cropped tight to what is visible.

    Args:
        digit (np.ndarray): (8, 8) ink in [0, 1].
        height (int): Height to enlarge the 8 rows to, in pixels.

    Returns:
        np.ndarray: (h, w) float32 opacity in [0, 1]; each border line has some >= 0.5.
    """
    ink = cv2.resize(digit.astype(np.float32), (height, height), interpolation=cv2.INTER_CUBIC)
    alpha = np.clip((ink - 0.3) * 4, 0, 1)
    ys, xs = np.nonzero(alpha >= 0.5)
    return alpha[ys.min() : ys.max() + 1, xs.min() : xs.max() + 1]


def free_box(rng: np.random.Generator, size: int, h: int, w: int, taken: list[list[int]], gap: int = 3) -> Any:
    """Return a box xywh of w x h pixels, gap pixels off those taken; None if 50 tries fail."""
    for _ in range(50):
        x, y = (int(rng.integers(2, size - side - 1)) for side in (w, h))
        if all(
            x + w + gap <= bx or bx + bw + gap <= x or y + h + gap <= by or by + bh + gap <= y
            for bx, by, bw, bh in taken
        ):
            return [x, y, w, h]
    return None


def draw(image: np.ndarray, mask: np.ndarray, box: list[int], colour: np.ndarray) -> None:
    """Paint strokes (h, w) in [0, 1] at box xywh in pixels, in place; colours in [0, 255]."""
    x, y, w, h = box
    alpha = np.zeros(image.shape[:2], np.float32)
    alpha[y : y + h, x : x + w] = mask
    # Bright strokes in a dark halo stay readable on any background.
    halo = cv2.GaussianBlur(cv2.dilate(alpha, np.ones((3, 3))), (0, 0), 1.5)
    image *= 1 - 0.7 * halo[..., None]
    image += alpha[..., None] * (colour - image)


def make_images(split: str, count: int, size: int, seed: int) -> Iterator[tuple]:
    """Compose the images of one split; the Args are the command line's.

    Yields:
        tuple: RGB image (size, size, 3) uint8, and [(label, box xywh in pixels), ...].
    """
    digits, labels, regions = split_sources(split)
    rng = np.random.default_rng([seed, SPLITS.index(split)])
    for _ in range(count):
        region = regions[rng.integers(len(regions))]
        side = min(2 * size, *region.shape[:2])
        y, x = (rng.integers(length - side + 1) for length in region.shape[:2])
        crop = region[y : y + side, x : x + side].astype(np.float32)
        image = 0.6 * cv2.resize(crop, (size, size), interpolation=cv2.INTER_AREA)  # dimmed
        objects: list[tuple[int, list[int]]] = []
        for _ in range(rng.integers(DIGITS_PER_IMAGE[0], DIGITS_PER_IMAGE[1] + 1)):
            pick = rng.integers(len(labels))
            mask = stroke_mask(digits[pick], int(size * rng.uniform(*DIGIT_SCALE)))
            if box := free_box(rng, size, *mask.shape, [b for _, b in objects]):
                draw(image, mask, box, rng.uniform(180, 255, 3))
                objects.append((int(labels[pick]), box))
        yield image.round().astype(np.uint8), objects


def write_split(out: Path, split: str, count: int, size: int, seed: int) -> None:
    """Write one split's images and annotation file; the Args are the command line's."""
    categories = [dict(id=i, name=str(i), supercategory='digit') for i in range(10)]
    coco: dict[str, list[dict[str, Any]]] = dict(images=[], annotations=[], categories=categories)
    for folder in (out / split, out / 'annotations'):
        folder.mkdir(parents=True, exist_ok=True)
    for image_id, (image, objects) in enumerate(make_images(split, count, size, seed), start=1):
        name = f'{image_id:06d}.jpg'
        cv2.imwrite(str(out / split / name), image[..., ::-1], [cv2.IMWRITE_JPEG_QUALITY, 95])
        coco['images'].append(dict(id=image_id, file_name=name, width=size, height=size))
        for label, box in objects:
            numbers = dict(id=len(coco['annotations']) + 1, image_id=image_id, category_id=label)
            coco['annotations'].append(dict(numbers, bbox=box, area=box[2] * box[3], iscrowd=0))
    (out / 'annotations' / f'{split}.json').write_text(json.dumps(coco))


def is_complete(out: Path, settings: dict[str, int]) -> bool:
    """Say whether out holds a finished set made with these settings."""
    meta = out / 'digits.json'
    if not meta.is_file() or json.loads(meta.read_text()) != settings:
        return False
    counts = {split: len(list((out / split).glob('*.jpg'))) for split in SPLITS}
    files = [out / 'annotations' / f'{split}.json' for split in SPLITS]
    return all(counts[s] >= settings[f'num_{s}'] for s in SPLITS) and all(file.is_file() for file in files)


def main(argv: list[str] | None = None) -> None:
    """Write the set, unless it is there already."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--out', type=Path, default=Path('data/digits'), help='folder to write')
    parser.add_argument('--num-train', type=int, default=1600, help='training images')
    parser.add_argument('--num-val', type=int, default=100, help='validation images')
    parser.add_argument('--size', type=int, default=96, help='side of an image, pixels')
    parser.add_argument('--seed', type=int, default=0, help='same seed, same bytes')
    settings = dict(vars(parser.parse_args(argv)), version=LAYOUT_VERSION)
    out = settings.pop('out')
    if is_complete(out, settings):
        print(f'{out} is already complete')
        return
    meta = out / 'digits.json'
    meta.unlink(missing_ok=True)
    for split in SPLITS:
        write_split(out, split, settings[f'num_{split}'], settings['size'], settings['seed'])
    meta.with_suffix('.tmp').write_text(json.dumps(settings))
    os.replace(meta.with_suffix('.tmp'), meta)  # last, in one step: it vouches for all the rest
    print(f'wrote {settings["num_train"]} + {settings["num_val"]} images to {out}')


if __name__ == '__main__':
    main()
