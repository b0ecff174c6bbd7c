"""mmdet's hooks with a sharded detector do what they do under DDP; docs/hooks.md has the list."""

import itertools
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.registry import METRICS, RUNNERS
from mmengine.runner import Runner

from mmzero import ZeroRunner
from mmzero.errors import ConfigError
from tests.distributed.cases import Faults, by_stage, merged, refused
from tests.distributed.ranks import run_ranks
from tests.runs import digits_config
from tests.vectors import Count

pytest.importorskip('mmdet')
pytestmark = [pytest.mark.distributed, pytest.mark.slow]

STAGES = (0, 1, 2, 3)
QUICK = (3,)
# A config is written down whole, in which a class has no place.
COUNT = 'CountsPredictions'
METRICS.register_module(name=COUNT, module=Count, force=True)
_numbers = itertools.count()


class Notes(Hook):
    """Keeps what a function says at one point of the run."""

    priority = 'LOWEST'

    def __init__(self, point: str, note: Callable[..., Any]) -> None:
        self.kept: list[Any] = []
        setattr(self, point, lambda *args, **kwargs: self.kept.append(note(*args, **kwargs)))


def dino_config(folder: str, stage: int, digits: str, **changes: Any) -> Config:
    """A small DINO, at a stage."""
    cfg = digits_config(digits, folder, model_wrapper_cfg__stage=stage, launcher='pytorch', **changes)
    # A visualizer is found by the name of the experiment.
    cfg.update(experiment_name=f'digits {next(_numbers)}', log_level='ERROR')
    return cfg


def num_class_check(folder: str, stage: int, digits: str) -> list[str]:
    """A head with as many classes as the data goes through; another is refused, on every rank, by the hook."""
    faults: list[str] = []
    hooks = [dict(type='NumClassCheckHook')]
    RUNNERS.build(dino_config(f'{folder}/good', stage, digits, custom_hooks=hooks, train_cfg__max_epochs=1)).train()
    fewer = dict(classes=tuple('012345678'))
    cfg = dino_config(folder, stage, digits, custom_hooks=hooks, train_dataloader__dataset__metainfo=fewer)
    with refused(faults, ConfigError, 'custom_hooks[0]', 'The `num_classes` (10) in', 'the length of `classes` 9'):
        RUNNERS.build(cfg).train()
    return faults


def drawing(folder: str, stage: int, digits: str, hook: str, **changes: Any) -> Config:
    """Every picture that is tested, and one of val, is drawn."""
    return dino_config(
        folder,
        stage,
        digits,
        visualizer=dict(type='DetLocalVisualizer', vis_backends=[dict(type='LocalVisBackend')]),
        default_hooks__visualization=dict(type=hook, draw=True, test_out_dir='drawn', **changes),
    )


def of_test(digits: str) -> list[str]:
    """The pictures of val that rank 0 has."""
    return [path.name for path in sorted(Path(digits, 'val').iterdir())[:: dist.get_world_size()]]


def visualization(folder: str, stage: int, digits: str) -> list[str]:
    """DetVisualizationHook: rank 0 draws what it evaluates."""
    runner = RUNNERS.build(drawing(folder, stage, digits, 'DetVisualizationHook', interval=1))
    runner.val()
    dist.barrier()
    in_val = sorted(path.name for path in Path(folder).rglob('vis_image/*.png'))
    runner.test()
    dist.barrier()
    tested = sorted(path.name for path in Path(folder).rglob('drawn/*.jpg'))
    faults = [] if in_val and all(name.startswith('val_img') for name in in_val) else [f'of val: {in_val}']
    return faults if tested == of_test(digits) else [*faults, f'{tested} instead of {of_test(digits)}']


def with_text(samples: list[Any]) -> list[Any]:
    """As a grounding detector's predictions of classes by their names."""
    for sample in samples:
        sample.set_metainfo(dict(text=('0', '1')))
    return samples


def grounding_visualization(folder: str, stage: int, digits: str) -> list[str]:
    """GroundingVisualizationHook on names of classes; phrases it draws on rank 0 alone, and fails on others."""
    runner = RUNNERS.build(drawing(folder, stage, digits, 'GroundingVisualizationHook'))
    runner.prepare()
    model = runner.sharded.module
    predict = model.predict
    model.predict = lambda *args, **kwargs: with_text(predict(*args, **kwargs))
    runner.test()
    dist.barrier()
    tested = sorted(path.name for path in Path(folder).rglob('drawn/*.jpg'))
    return [] if tested == of_test(digits) else [f'{tested} instead of {of_test(digits)}']


def track_visualization(folder: str, stage: int, digits: str) -> list[str]:
    """Each picture is a video of one frame."""
    from mmdet.structures import TrackDataSample

    cfg = drawing(folder, stage, digits, 'TrackVisualizationHook', frame_interval=1)
    cfg.merge_from_dict({'test_dataloader.batch_size': 1})
    cfg.test_evaluator = dict(type=COUNT)
    runner = RUNNERS.build(cfg)
    runner.prepare()
    model = runner.sharded.module
    predict = model.predict
    model.predict = lambda *args, **kwargs: [
        TrackDataSample(video_data_samples=[sample]) for sample in predict(*args, **kwargs)
    ]
    runner.test()
    dist.barrier()
    tested = sorted(path.name for path in Path(folder).rglob('drawn/**/*.jpg'))
    return [] if tested == of_test(digits) else [f'{tested} instead of {of_test(digits)}']


def pipeline_switch(folder: str, stage: int, digits: str) -> list[str]:
    """From the second epoch on batches come from the other pipeline, also from workers that stay."""
    faults = []
    cfg = dino_config(folder, stage, digits)
    other = [*cfg.train_dataloader.dataset.pipeline]
    other.insert(2, dict(type='Resize', scale=(32, 32), keep_ratio=False))
    for workers in (0, 1):
        hook = dict(type='PipelineSwitchHook', switch_epoch=1, switch_pipeline=other)
        changes = dict(custom_hooks=[hook], train_cfg__max_epochs=3, train_cfg__val_interval=9)
        own = dino_config(f'{folder}/{workers}', stage, digits, **changes)
        own.train_dataloader.update(num_workers=workers, persistent_workers=bool(workers))
        runner = RUNNERS.build(own)
        sizes = Notes('after_train_iter', lambda runner, batch_idx, data_batch, outputs: batch_size(data_batch))
        runner.register_hook(sizes)
        # Ranks are daemons of the test, which may have no children.
        with patch.dict(multiprocessing.current_process()._config, daemon=False):
            runner.train()
        if sizes.kept != [64, 64, 32, 32, 32, 32]:
            faults.append(f'{workers} workers: {sizes.kept}')
    return faults


def batch_size(data_batch: Any) -> int:
    return max(image.shape[-1] for image in data_batch['inputs'])


class Sees(Hook):
    """Keeps running statistics as val has them, and losses."""

    priority = 'LOWEST'

    def __init__(self) -> None:
        self.statistics: list[dict[str, torch.Tensor]] = []
        self.losses: list[dict[str, float]] = []

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        self.losses.append({name: float(value) for name, value in outputs.items()})

    def before_val_epoch(self, runner: Any) -> None:
        buffers = runner.model.module.named_buffers()
        self.statistics.append({name: value.clone() for name, value in buffers if 'running' in name})


def yolox_config(folder: str, wrapper: dict, digits: str) -> Config:
    """mmdet's own config of YOLOX, reduced: its hooks, its pipeline, two epochs of which the second is a last one."""
    from mmengine.hub import get_config

    cfg = get_config('mmdet::yolox/yolox_s_8xb8-300e_coco.py')
    size = 64
    cfg.merge_from_dict(
        {
            'model.data_preprocessor.batch_augments': None,
            'model.backbone.widen_factor': 0.0625,
            'model.neck': dict(in_channels=[16, 32, 64], out_channels=16),
            'model.bbox_head': dict(num_classes=10, in_channels=16, feat_channels=16),
            # No box is left, for which nms, a compiled operator, would be called.
            'model.test_cfg.score_thr': 1.1,
            'train_cfg': dict(max_epochs=2, val_interval=1),
            'custom_hooks.0.num_last_epochs': 0,
            'custom_hooks.2.momentum': 0.1,
            'optim_wrapper.optimizer.lr': 0.001,
        }
    )
    cfg.param_scheduler = []
    for loader in (cfg.train_dataloader, cfg.val_dataloader):
        loader.update(num_workers=0, persistent_workers=False, batch_size=2)
    train = cfg.train_dataloader.dataset
    for dataset, split in ((train.dataset, 'train'), (cfg.val_dataloader.dataset, 'val')):
        dataset.update(
            data_root=f'{digits}/',
            ann_file=f'annotations/{split}.json',
            data_prefix=dict(img=f'{split}/'),
            metainfo=dict(classes=tuple('0123456789')),
        )
        dataset.pop('filter_cfg', None)
    for step in (*train.pipeline, *cfg.val_dataloader.dataset.pipeline):
        for name in ('img_scale', 'scale'):
            if name in step:
                step[name] = (size, size)
        if 'border' in step:
            step['border'] = (-size // 2, -size // 2)
    cfg.val_evaluator = dict(type=COUNT)
    for name in ('test_dataloader', 'test_cfg', 'test_evaluator', 'tta_model', 'tta_pipeline', 'visualizer'):
        cfg.pop(name, None)
    cfg.default_hooks.pop('visualization')
    cfg.update(
        model_wrapper_cfg=wrapper,
        work_dir=folder,
        launcher='pytorch',
        randomness=dict(seed=0),
        log_level='ERROR',
        experiment_name=f'yolox {next(_numbers)}',
    )
    return cfg


def yolox(folder: str, stage: int, digits: str) -> list[str]:
    """YOLOXModeSwitchHook, SyncNormHook and EMAHook, as mmdet's config has them, beside MMEngine's Runner."""
    found = []
    ddp = dict(type='MMDistributedDataParallel', device_ids=None, broadcast_buffers=False, find_unused_parameters=True)
    policy = dict(type='ModuleClassPolicy', classes=['CSPLayer'])
    own = dict(type='ZeroModelWrapper', stage=stage, wrap_policy=policy, find_unused_parameters=True)
    for runner, wrapper in ((Runner, ddp), (ZeroRunner, own)):
        built = runner.from_cfg(yolox_config(f'{folder}/{runner.__name__}', wrapper, digits))
        sees = Sees()
        built.register_hook(sees)
        built.train()
        found.append(sees)
    return compare(*found)


def compare(wanted: Sees, found: Sees) -> list[str]:
    faults = []
    if [list(losses) for losses in found.losses] != [list(losses) for losses in wanted.losses]:
        return [f'losses: {found.losses}']
    if ['loss_l1' in losses for losses in found.losses] != [False, False, True, True]:
        faults.append(f'L1 loss: {[list(losses) for losses in found.losses]}')
    for number, (own, theirs) in enumerate(zip(found.losses, wanted.losses, strict=True)):
        off = {name: abs(own[name] - value) / max(1, abs(value)) for name, value in theirs.items()}
        faults += [f'iteration {number}: {name} is {value:.0e} off' for name, value in off.items() if not value <= 1e-4]
    for number, (own, theirs) in enumerate(zip(found.statistics, wanted.statistics, strict=True)):
        everything = [torch.cat([state[name].flatten() for name in sorted(state)]) for state in (own, theirs)]
        off = float((everything[0] - everything[1]).norm() / everything[1].norm())
        faults += [] if off <= 1e-5 else [f'statistics of val {number} are {off:.0e} off']
    return faults


CASES = (
    num_class_check,
    visualization,
    grounding_visualization,
    track_visualization,
    pipeline_switch,
    yolox,
)


def run_cases(folder: str, stages: tuple[int, ...], digits: str) -> Faults:
    return by_stage([given(case, digits) for case in CASES], stages, folder)


def given(case: Callable[[str, int, str], list[str]], digits: str) -> Callable[[str, int], list[str]]:
    def run(folder: str, stage: int) -> list[str]:
        return case(folder, stage, digits)

    run.__name__ = case.__name__
    return run


@pytest.mark.parametrize('stages', [QUICK, (0, 1, 2)])
def test_hooks(tmp_path: Path, digits: str, stages: tuple[int, ...]) -> None:
    for case, faults in merged(run_ranks(2, run_cases, str(tmp_path), stages, digits)).items():
        assert not faults, f'{case}: {faults[:8]}'
