"""MMEngine's hooks with a sharded model do what they do under DDP; docs/hooks.md has the list."""

import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from mmengine.evaluator import BaseMetric
from mmengine.hooks import Hook, NaiveVisualizationHook, PrepareTTAHook, ProfilerHook
from mmengine.runner import Runner
from mmengine.structures import BaseDataElement
from mmengine.visualization import Visualizer

from mmzero import ZeroModelWrapper
from mmzero.errors import ConfigError
from tests.distributed.cases import Faults, by_stage, merged, refused
from tests.distributed.ranks import run_ranks
from tests.distributed.test_uneven_val import BLOCKS, MeanOfViews, Numbered, Scores, alone, differences
from tests.distributed.test_uneven_val import loader as views_loader
from tests.distributed.test_watch import run
from tests.models import ToyModel
from tests.vectors import Vectors, loader, vector_runner

pytestmark = pytest.mark.distributed

STAGES = (0, 1, 2, 3)
QUICK = (0, 3)
_numbers = itertools.count()


class Falling(BaseMetric):
    """A score that is best at the first val, and that differs from rank to rank: hooks get rank 0's."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = iter([0.9, 0.5, 0.4, 0.3])

    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.results += [1] * len(data_samples)

    def compute_metrics(self, results: list) -> dict[str, float]:
        return dict(score=next(self.scores))


def toy() -> ToyModel:
    torch.manual_seed(0)
    return ToyModel()


def settings_of(**changes: Any) -> dict[str, Any]:
    """Three epochs of two iterations on each rank."""
    return dict(
        dict(
            train_dataloader=loader(Vectors(4 * dist.get_world_size())),
            train_cfg=dict(by_epoch=True, max_epochs=3, val_interval=1),
            val_evaluator=dict(type=Falling),
            launcher='pytorch',
        ),
        **changes,
    )


def runner_of(folder: str, stage: int, **changes: Any) -> Any:
    wrapper = dict(wrap_policy=BLOCKS, find_unused_parameters=True)
    return vector_runner(folder, toy(), stage, wrapper, **settings_of(**changes))


def stock_runner(folder: str, **changes: Any) -> Runner:
    """The same run by MMEngine under DDP."""
    wrapper = dict(
        type='MMDistributedDataParallel', device_ids=None, broadcast_buffers=False, find_unused_parameters=True
    )
    plain = dict(
        val_dataloader=loader(),
        val_cfg=dict(),
        optim_wrapper=dict(type='OptimWrapper', optimizer=dict(type='AdamW', lr=0.01)),
        randomness=dict(seed=0),
        log_level='ERROR',
        experiment_name=f'stock {next(_numbers)}',
        cfg=dict(model_wrapper_cfg=wrapper),
    )
    return Runner(model=toy(), work_dir=folder, **{**plain, **settings_of(**changes)})


class Notes(Hook):
    """Keeps what a function says of the runner at one point of the run."""

    priority = 'LOWEST'

    def __init__(self, point: str, note: Callable[[Any], Any]) -> None:
        self.kept: list[Any] = []
        setattr(self, point, lambda runner, *args, **kwargs: self.kept.append(note(runner)))


def logged(folder: str) -> list[dict[str, Any]]:
    """What LoggerHook wrote, by line; times and memory aside, which mmzero's runner logs on CPUs, too."""
    (path,) = Path(folder).rglob('scalars.json')
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: value for name, value in line.items() if 'time' not in name and name != 'memory'} for line in lines]


DEFAULTS = dict(
    param_scheduler=[
        dict(type='LinearLR', start_factor=0.1, begin=0, end=4, by_epoch=False),
        dict(type='ReduceOnPlateauLR', monitor='score', rule='greater', patience=1, factor=0.5, by_epoch=True),
    ],
    default_hooks=dict(
        logger=dict(type='LoggerHook', interval=1),
        checkpoint=dict(
            type='CheckpointHook',
            interval=1,
            max_keep_ckpts=1,
            save_best='score',
            rule='greater',
            published_keys=['meta', 'state_dict'],
        ),
    ),
)


def default_hooks(folder: str, stage: int) -> list[str]:
    """RuntimeInfoHook, IterTimerHook, DistSamplerSeedHook, LoggerHook, ParamSchedulerHook and CheckpointHook."""
    faults, seen = [], []
    data = dict(loader(Vectors(4 * dist.get_world_size())))
    data['sampler'] = dict(type='DefaultSampler', shuffle=True)
    for own in (runner_of(f'{folder}/own', stage, train_dataloader=data, **DEFAULTS), None):
        # torch refuses to read MMEngine's own checkpoints, and with that what publishes them.
        stock = dict(DEFAULTS['default_hooks']['checkpoint'], published_keys=None)  # type: ignore[index]
        hooks = dict(DEFAULTS['default_hooks'], checkpoint=stock)  # type: ignore[arg-type]
        runner = own or stock_runner(f'{folder}/stock', train_dataloader=data, **dict(DEFAULTS, default_hooks=hooks))
        epochs = Notes('after_train_epoch', lambda runner: runner.train_dataloader.sampler.epoch)
        infos = Notes('after_train_iter', info)
        for hook in (epochs, infos):
            runner.register_hook(hook)
        runner.train()
        dist.barrier()
        seen.append((epochs.kept, infos.kept))
    faults += [f'{a} instead of {b}' for a, b in zip(*seen, strict=True) if a != b]
    if seen[0][0] != [0, 1, 2]:
        faults.append(f'epochs of the sampler: {seen[0][0]}')
    return faults if dist.get_rank() else faults + on_disk(folder)


def info(runner: Any) -> dict[str, Any]:
    """What RuntimeInfoHook, IterTimerHook and ParamSchedulerHook tell others."""
    hub = runner.message_hub
    names = ('epoch', 'iter', 'max_epochs', 'max_iters', 'loop_stage', 'seed')
    found = {name: hub.get_info(name) for name in names}
    found['lr'] = round(hub.get_scalar('train/lr').current(), 9)
    found['times'] = [hub.get_scalar(f'train/{name}').current() > 0 for name in ('time', 'data_time')]
    found['loss'] = len(hub.get_scalar('train/loss').data[0])
    return found


def on_disk(folder: str) -> list[str]:
    own, stock = (logged(f'{folder}/{name}') for name in ('own', 'stock'))
    faults = [] if len(own) == len(stock) == 9 else [f'{len(own)} lines, not {len(stock)}']
    for line, wanted in zip(own, stock, strict=False):
        if line.keys() != wanted.keys():
            faults.append(f'{line.keys()} instead of {wanted.keys()}')
        faults += [
            f'{name}: {line[name]} instead of {value}'
            for name, value in wanted.items()
            if name in line and abs(line[name] - value) > 1e-5 * max(1, abs(value))
        ]
    there = sorted(path.name for path in Path(folder, 'own').glob('*.pth'))
    wanted_names = sorted(path.name for path in Path(folder, 'stock').glob('*.pth'))
    published = [name for name in there if name not in wanted_names]
    if len(published) != 2 or not set(wanted_names) <= set(there):
        return [*faults, f'{there} beside {wanted_names}']
    found = torch.load(Path(folder, 'own', published[-1]), weights_only=True)
    return faults if found.keys() == {'meta', 'state_dict'} else [*faults, f'published: {found.keys()}']


def early_stopping(folder: str, stage: int) -> list[str]:
    """Every rank stops after the same epoch."""
    hook = dict(type='EarlyStoppingHook', monitor='score', rule='greater', patience=1)
    runner = runner_of(folder, stage, custom_hooks=[hook])
    runner.train()
    return [] if runner.epoch == 2 else [f'stopped after {runner.epoch} epochs']


def empty_cache(folder: str, stage: int) -> list[str]:
    """It asks for a GPU; here it is told of one."""
    hook = dict(type='EmptyCacheHook', before_epoch=True, after_epoch=True, after_iter=True)
    runner = runner_of(folder, stage, custom_hooks=[hook])
    with (
        patch('mmengine.hooks.empty_cache_hook.is_cuda_available', lambda: True),
        patch.object(torch.cuda, 'empty_cache') as emptied,
    ):
        runner.train()
    # In each of three epochs: two iterations of training and as many batches of val, and two loops.
    val = len(runner.val_dataloader)
    return [] if emptied.call_count == 3 * (2 + val + 4) else [f'emptied {emptied.call_count} times']


def profiler(folder: str, stage: int) -> list[str]:
    """The trace has the collectives of the rank that wrote it."""
    path = f'{folder}/trace_{dist.get_rank()}.json'
    hook = ProfilerHook(by_epoch=False, profile_times=2, json_trace_path=path)
    Path(folder).mkdir(parents=True, exist_ok=True)
    runner_of(folder, stage, custom_hooks=[hook]).train()
    names = {event.get('name') for event in json.loads(Path(path).read_text())['traceEvents']}
    wanted = ('gloo:all_reduce',) if stage == 0 else ('FSDP::pre_forward', 'c10d::_allgather_base_')
    return [f'no {name} in the trace' for name in wanted if name not in names]


def profiler_logs(folder: str, stage: int) -> list[str]:
    """By epoch, with a table on the screen."""
    hook = ProfilerHook(on_trace_ready=dict(type='log_trace', row_limit=3), profile_memory=True)
    with patch('builtins.print') as printed:
        runner_of(folder, stage, custom_hooks=[hook]).train()
    tables = [call for call in printed.call_args_list if 'Self CPU' in str(call)]
    return [] if len(tables) == 1 else [f'{len(tables)} tables']


def npu_profiler(folder: str, stage: int) -> list[str]:
    """Its package is for NPUs; without it the run ends with its config path."""
    faults: list[str] = []
    with refused(faults, ConfigError, 'custom_hooks[0]', 'Failed to import torch_npu module'):
        runner_of(folder, stage, custom_hooks=[dict(type='NPUProfilerHook')])
    return faults


class Drawn(Visualizer):
    """Notes what it is given."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.given: list[Any] = []

    def add_graph(self, model: Any, data_batch: Any, **kwargs: Any) -> None:
        self.given.append(type(model).__name__)

    def add_datasample(self, name: str, image: np.ndarray, *args: Any, **kwargs: Any) -> None:
        self.given.append((name, image.shape))


class Pictured(ToyModel):
    """Takes batches as NaiveVisualizationHook does, lists of samples."""

    def test_step(self, data: Any) -> list:
        return self(torch.stack([sample['vector'] for sample in data]))


class Pictures(Vectors):
    """Vectors, each with a picture."""

    def __getitem__(self, index: int) -> Any:
        sample = BaseDataElement(metainfo=dict(ori_width=6, ori_height=4, img_path=f'/{index}.png'))
        vector = super().__getitem__(index)['inputs']
        return dict(inputs=torch.zeros(1, 3, 8, 8), data_sample=sample, vector=vector)


def naive_visualization(folder: str, stage: int) -> list[str]:
    """It is given the model, and every sample that is tested."""
    torch.manual_seed(0)
    drawn = Drawn(f'drawn {next(_numbers)}')
    changes = settings_of(
        test_dataloader=dict(loader(Pictures(4)), collate_fn=dict(type='pseudo_collate')),
        custom_hooks=[NaiveVisualizationHook()],
        visualizer=drawn,
    )
    changes['test_dataloader']['collate_fn'] = list
    runner = vector_runner(folder, Pictured(), stage, dict(wrap_policy=BLOCKS, find_unused_parameters=True), **changes)
    runner.train()
    runner.test()
    rank = dist.get_rank()
    wanted = ['ZeroModelWrapper', *((f'{index}.png', (4, 6, 3)) for index in (rank, rank + 2))]
    return [] if drawn.given == wanted else [f'{drawn.given}']


def prepare_tta(folder: str, stage: int) -> list[str]:
    """The model that merges views is around the sharded one while it is tested, once and again."""
    data = Numbered(5, lambda number: 1 + number % 3)
    runner = vector_runner(
        folder,
        toy(),
        stage,
        dict(wrap_policy=BLOCKS),
        test_dataloader=views_loader(data, views=True),
        test_evaluator=dict(type=Scores),
        launcher='pytorch',
    )
    runner.register_hook(PrepareTTAHook(dict(type=MeanOfViews)))
    faults = [fault for _ in range(2) for fault in differences(runner.test()['seen'], alone(data))]
    return faults if isinstance(runner.model, ZeroModelWrapper) else [*faults, 'it stays around the model']


class Scheduled(ToyModel):
    """A model that is told the epoch."""

    epochs: tuple[int, ...] = ()

    def set_epoch(self, epoch: int) -> None:
        self.epochs += (epoch,)


def set_epoch_info(folder: str, stage: int) -> list[str]:
    torch.manual_seed(0)
    fields = dict(wrap_policy=BLOCKS, find_unused_parameters=True)
    changes = settings_of(custom_hooks=[dict(type='mmdet.SetEpochInfoHook')])
    runner = vector_runner(folder, Scheduled(), stage, fields, **changes)
    runner.train()
    epochs = runner.model.module.epochs
    return [] if epochs == (0, 1, 2) else [f'told {epochs}']


def memory_profiler(folder: str, stage: int) -> list[str]:
    """Its packages are stood in for, where they are not there; each rank logs its own memory."""
    memory = SimpleNamespace(available=2**30, used=2**30, percent=50.0, total=2**31)
    modules = {
        'psutil': SimpleNamespace(swap_memory=lambda: memory, virtual_memory=lambda: memory),
        'memory_profiler': SimpleNamespace(memory_usage=lambda: [123.4]),
    }
    with patch.dict(sys.modules, modules):
        runner = runner_of(folder, stage, custom_hooks=[dict(type='mmdet.MemoryProfilerHook', interval=1)])
    with patch.object(runner.logger, 'info') as said:
        runner.train()
    lines = [call for call in said.call_args_list if 'current_process_memory: 123 MB' in str(call)]
    wanted = 3 * (2 + len(runner.val_dataloader))
    return [] if len(lines) == wanted else [f'{len(lines)} lines, not {wanted}']


def check_invalid_loss(folder: str, stage: int) -> list[str]:
    """A good run goes through."""
    runner = runner_of(folder, stage, custom_hooks=[dict(type='mmdet.CheckInvalidLossHook', interval=1)])
    runner.train()
    return [] if runner.iter == 6 else [f'ended after {runner.iter} iterations']


CASES = (
    default_hooks,
    early_stopping,
    empty_cache,
    profiler,
    profiler_logs,
    npu_profiler,
    naive_visualization,
    prepare_tta,
    set_epoch_info,
    memory_profiler,
    check_invalid_loss,
)


def run_cases(folder: str, stages: tuple[int, ...]) -> Faults:
    return by_stage(CASES, stages, folder)


@pytest.mark.parametrize('stages', [QUICK, pytest.param((1, 2), marks=pytest.mark.slow)])
def test_hooks(tmp_path: Path, stages: tuple[int, ...]) -> None:
    for case, faults in merged(run_ranks(2, run_cases, str(tmp_path), stages)).items():
        assert not faults, f'{case}: {faults[:8]}'


def test_a_loss_that_is_not_finite() -> None:
    """CheckInvalidLossHook raises on the rank whose loss it is, and the others end with it."""
    other, failed = run('invalid loss')
    assert failed.code == 1 and failed.last.startswith('AssertionError')
    assert other.code == 1 and 'Error' not in other.err
