"""What a detector finds, drawn beside the ground truth."""

import copy
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from mmengine.config import Config
from mmengine.dataset import pseudo_collate
from mmengine.registry import DATASETS, MODELS, DefaultScope
from torch import nn

from mmzero.checkpoint import matching_names, read_checkpoint
from mmzero.errors import CheckpointError, ConfigError, DataError
from mmzero.runner import load_config

from .figures import new_figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TRUTH, FOUND = 'limegreen', 'orangered'
CELL_INCHES = 3.4  # a side of one image's cell


class Boxes(NamedTuple):
    """Boxes of one image, each as (left, top, right, bottom) in pixels with a caption."""

    corners: list[list[float]]
    captions: list[str]


def draw_detections(
    config: str | Path | Config,
    checkpoint: str | Path,
    out: str | Path,
    count: int = 9,
    score: float = 0.3,
) -> None:
    """Draw what a detector finds on the first images of a config's val set.

    Stock mmdet does it, on one GPU or the CPU: of the config only ``model`` and
    ``val_dataloader.dataset`` are used.

    Args:
        config (str, Path or Config): The config.
        checkpoint (str or Path): A full checkpoint.
        out (str or Path): The PNG to write.
        count (int): How many images. Defaults to 9.
        score (float): Lowest score that is drawn. Defaults to 0.3.

    Raises:
        ConfigError: If the config is not there or has no val set.
        CheckpointError: If the checkpoint cannot be read or lacks weights of the model.
        DataError: If the data set cannot be read.
    """
    cfg = config if isinstance(config, Config) else load_config(str(config))
    with DefaultScope.overwrite_default_scope(cfg.get('default_scope', 'mmdet')):
        model = _build_detector(cfg, str(checkpoint))
        try:
            dataset = _build_val_set(cfg)
            _draw_grid(model, dataset, min(count, len(dataset)), score, out)
        except FileNotFoundError as error:
            raise DataError(f'the val set cannot be read: {error}; set its data_root') from error


def _build_val_set(cfg: Config) -> Any:
    if cfg.get('val_dataloader') is None:
        raise ConfigError(['val_dataloader: is missing, and its images are what is drawn'])
    dataset = DATASETS.build(copy.deepcopy(cfg.val_dataloader.dataset))
    if not len(dataset):
        raise DataError(f'the val set {cfg.val_dataloader.dataset.get("ann_file")} has no images')
    return dataset


def _build_detector(cfg: Config, checkpoint: str) -> nn.Module:
    weights = read_checkpoint(checkpoint)['state_dict']
    fields = copy.deepcopy(cfg.model)
    if cfg.get('data_preprocessor') is not None:
        fields.setdefault('data_preprocessor', copy.deepcopy(cfg.data_preprocessor))
    model = MODELS.build(fields)
    matching_names(weights, model.state_dict(), checkpoint)
    try:
        missing = model.load_state_dict(weights, strict=False).missing_keys
    except RuntimeError as error:
        raise CheckpointError(f'{checkpoint} does not fit the model: {error}') from None
    if missing:
        some = ', '.join(missing[:3])
        raise CheckpointError(f'{checkpoint} lacks {len(missing)} weights of the model: {some}')
    return model.to('cuda' if torch.cuda.is_available() else 'cpu').eval()


def _draw_grid(model: Any, dataset: Any, count: int, score: float, out: str | Path) -> None:
    from matplotlib.patches import Patch
    from mmcv import imread

    columns = math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    figure = new_figure(columns * CELL_INCHES, rows * CELL_INCHES + 0.6)
    grid = figure.subplots(rows, columns, squeeze=False).flat
    totals = [0, 0]
    for index, axes in enumerate(grid):
        axes.set_axis_off()
        if index >= count:
            continue
        path = dataset.get_data_info(index)['img_path']
        truth, found = _ground_truth(dataset, index), _detect(model, dataset, index, score)
        axes.imshow(imread(path, channel_order='rgb'), interpolation='bilinear')
        axes.set_title(Path(path).name, fontsize=9)
        _draw_boxes(axes, truth, TRUTH, width=3.5, below=True)
        _draw_boxes(axes, found, FOUND, width=1.6, below=False)
        totals = [totals[0] + len(truth.corners), totals[1] + len(found.corners)]
    labels = (
        f'{totals[0]} objects in the ground truth',
        f'{totals[1]} detections, score >= {score}',
    )
    patches = [Patch(color=c, label=text) for c, text in zip((TRUTH, FOUND), labels, strict=True)]
    figure.legend(handles=patches, loc='outside upper center', ncols=2, fontsize=12)
    save(figure, out)


def _ground_truth(dataset: Any, index: int) -> Boxes:
    # From the annotations: a pipeline may have resized the boxes of its samples.
    objects = [item for item in dataset.get_data_info(index)['instances'] if not item['ignore_flag']]
    classes = dataset.metainfo['classes']
    return Boxes([item['bbox'] for item in objects], [classes[o['bbox_label']] for o in objects])


@torch.no_grad()
def _detect(model: Any, dataset: Any, index: int, score: float) -> Boxes:
    (sample,) = model.test_step(pseudo_collate([dataset[index]]))
    found = sample.pred_instances
    found = found[found.scores >= score].cpu()
    found = found[found.scores.argsort()]  # the surest come last, on top
    classes = dataset.metainfo['classes']
    pairs = zip(found.labels.tolist(), found.scores.tolist(), strict=True)
    return Boxes(found.bboxes.tolist(), [f'{classes[label]} {value:.2f}' for label, value in pairs])


def _draw_boxes(axes: 'Axes', boxes: Boxes, colour: str, width: float, below: bool) -> None:
    """Draw boxes with their captions at a lower right or an upper left corner."""
    from matplotlib.patches import Rectangle

    for (left, top, right, bottom), caption in zip(*boxes, strict=True):
        size = (right - left, bottom - top)
        axes.add_patch(Rectangle((left, top), *size, fill=False, edgecolor=colour, linewidth=width))
        axes.text(
            right if below else left,
            bottom if below else top,
            caption,
            ha='right' if below else 'left',
            va='bottom' if below else 'top',
            fontsize=10,
            color='black' if below else 'white',
            bbox=dict(facecolor=colour, edgecolor='none', pad=1.2),
            clip_on=True,
        )
