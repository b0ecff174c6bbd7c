"""Val and test where ranks have different numbers of batches or views: no hang, and every sample counts once."""

import copy
import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from mmengine.evaluator import BaseMetric
from mmengine.model import BaseModel, BaseTTAModel
from mmengine.runner import ValLoop
from torch import nn
from torch.utils.data import Dataset, IterableDataset

from mmzero import ZeroModelWrapper, ZeroRunner
from mmzero.analysis.collectives import CollectiveLog
from mmzero.engines import started
from tests.distributed.cases import Faults, by_stage, merged, refused
from tests.distributed.ranks import run_ranks
from tests.models import ToyModel, toy_batch
from tests.vectors import Vectors, vector_runner
from tests.vectors import loader as vector_loader

pytestmark = pytest.mark.distributed

BLOCKS = dict(type='ModuleClassPolicy', classes=['Block'])
STAGES = (0, 1, 3)


class Numbered(Dataset):
    """Inputs whose label is their number, in as many views as ``views`` says."""

    def __init__(self, size: int, views: Callable[[int], int] = lambda number: 1) -> None:
        self.size, self.views = size, views

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, number: int) -> dict[str, Any]:
        if number >= self.size:
            raise IndexError(number)
        x = toy_batch(number, size=1)['inputs'][0]
        return dict(inputs=[x + 0.1 * view for view in range(self.views(number))], labels=torch.tensor(number))


class Stream(IterableDataset):
    """Each rank's own share, which only iterating tells; its length is that of all together."""

    def __init__(self, shares: list[int]) -> None:
        self.shares = shares

    def __len__(self) -> int:
        return sum(self.shares)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        rank = dist.get_rank()
        start = sum(self.shares[:rank])
        yield from (Numbered(len(self))[number] for number in range(start, start + self.shares[rank]))


def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    return dict(
        inputs=torch.stack([sample['inputs'][0] for sample in samples]),
        labels=torch.stack([sample['labels'] for sample in samples]),
    )


def collate_views(samples: list[dict[str, Any]]) -> dict[str, Any]:
    (sample,) = samples
    return dict(
        inputs=[view[None] for view in sample['inputs']], labels=[sample['labels'][None] for _ in sample['inputs']]
    )


class MeanOfViews(BaseTTAModel):
    def merge_preds(self, data_samples_list: list) -> list:
        return [torch.stack(list(views)).mean(0) for views in data_samples_list]


class Scores(BaseMetric):
    """All samples that were seen, each with the sum of its logits."""

    def process(self, data_batch: Any, data_samples: Any) -> None:
        numbers = data_batch['labels']
        numbers = numbers[0] if isinstance(numbers, list) else numbers
        self.results += [(int(n), float(x.sum())) for n, x in zip(numbers, data_samples, strict=True)]

    def compute_metrics(self, results: list) -> dict[str, Any]:
        return dict(seen=sorted(results))


class TwoPasses(ValLoop):
    """Evaluates twice, as mmdet's loop for teacher and student does, the second time on the first two batches."""

    def run(self) -> dict:
        self.runner.call_hook('before_val_epoch')
        self.runner.model.eval()
        found = {}
        for name, most in (('all', 99), ('few', 2)):
            for index, batch in enumerate(self.dataloader):
                if index == most:
                    break
                self.run_iter(index, batch)
            found[name] = self.evaluator.evaluate(len(self.dataloader.dataset))['seen']
        return found


def toy() -> ToyModel:
    torch.manual_seed(0)
    return ToyModel()


def loader(dataset: Dataset, batch_size: int = 1, views: bool = False) -> dict:
    sampler = dict(type='DefaultSampler', shuffle=False, round_up=False)
    return dict(
        dataset=dataset,
        batch_size=batch_size,
        num_workers=0,
        sampler=None if isinstance(dataset, IterableDataset) else sampler,
        collate_fn=collate_views if views else collate,
    )


def runner_of(folder: str, data: dict, model: nn.Module | None = None, stage: int = 3, **changes: Any) -> ZeroRunner:
    evaluator = dict(type=Scores)
    return vector_runner(
        folder,
        model=model or toy(),
        stage=stage,
        wrapper=dict(wrap_policy=BLOCKS),
        launcher='pytorch',
        **{
            **dict(val_dataloader=data, test_dataloader=data, val_evaluator=evaluator, test_evaluator=evaluator),
            **changes,
        },
    )


def alone(dataset: Any) -> list[tuple[int, float]]:
    """What one process finds, without mmzero."""
    model, seen = toy().eval(), []
    for number in range(len(dataset)):
        views = Numbered(len(dataset), getattr(dataset, 'views', lambda number: 1))[number]['inputs']
        with torch.no_grad():
            seen.append((number, float(torch.stack([model(view[None])[0] for view in views]).mean(0).sum())))
    return seen


def differences(found: list[tuple[int, float]], wanted: list[tuple[int, float]]) -> list[str]:
    if [number for number, _ in found] != [number for number, _ in wanted]:
        return [f'saw {[number for number, _ in found]}']
    return [
        f'{number}: {a} instead of {b}'
        for (number, a), (_, b) in zip(found, wanted, strict=True)
        if abs(a - b) > 1e-6 * max(1, abs(b))
    ]


def numbers_of_batches(folder: str, stage: int) -> list[str]:
    """One more on rank 0; none at all on the last ranks, in the first val of the process, too; twice in a row."""
    faults = []
    for size in (1, 3, 2 * dist.get_world_size() + 1):
        data = Numbered(size)
        runner = runner_of(f'{folder}/{size}', loader(data), stage=stage)
        for found in (runner.val(), runner.test(), runner.val()):
            faults += [f'{size}: {fault}' for fault in differences(found['seen'], alone(data))]
    return faults


def a_stream(folder: str, stage: int) -> list[str]:
    """Lengths that nobody knows, and that data loaders tell wrongly."""
    faults = []
    for shares in ([1, 4] + [0] * dist.get_world_size(), [0, 2] + [1] * dist.get_world_size()):
        data = Stream(shares[: dist.get_world_size()])
        found = runner_of(f'{folder}/{shares}', loader(data, 2), stage=stage).val()
        faults += differences(found['seen'], alone(data))
    return faults


def views(folder: str, stage: int) -> list[str]:
    """Test-time augmentation with more views for some images than for others, and ranks without an image."""
    faults = []
    for size in (1, 5):
        data = Numbered(size, lambda number: 1 + number % 3)
        found = runner_of(f'{folder}/{size}', loader(data, views=True), MeanOfViews(toy()), stage).test()
        faults += differences(found['seen'], alone(data))
    return faults


def workers(folder: str, stage: int) -> list[str]:
    """Batches come from processes that stay from one loop to the next."""
    size = dist.get_world_size() + 1
    data = {**loader(Numbered(size)), 'num_workers': 1, 'persistent_workers': True}
    runner = runner_of(folder, data, stage=stage)
    # Ranks are daemons of the test, which may have no children.
    with patch.dict(multiprocessing.current_process()._config, daemon=False):
        return [fault for _ in range(2) for fault in differences(runner.val()['seen'], alone(Numbered(size)))]


def views_in_16_bit(folder: str, stage: int) -> list[str]:
    """Units compute in their precision then, too, and hand on float32."""
    data = Numbered(5, lambda number: 1 + number % 3)
    wrapper = dict(wrap_policy=BLOCKS, precision=dict(param_dtype='bfloat16'))
    runner = vector_runner(
        folder,
        model=MeanOfViews(toy()),
        stage=stage,
        wrapper=wrapper,
        launcher='pytorch',
        test_dataloader=loader(data, views=True),
        test_evaluator=dict(type=Scores),
    )
    found, wanted = runner.test()['seen'], alone(data)
    near = all(abs(a - b) <= 0.05 * max(1, abs(b)) for (_, a), (_, b) in zip(found, wanted, strict=True))
    return [] if near and [number for number, _ in found] == list(range(5)) else [f'{found} instead of {wanted}']


def an_own_loop(folder: str, stage: int) -> list[str]:
    """A loop that goes through its data twice, and leaves it early."""
    size, ranks = 2 * dist.get_world_size() + 1, dist.get_world_size()
    found = runner_of(folder, loader(Numbered(size)), stage=stage, val_cfg=dict(type=TwoPasses)).val()
    wanted = alone(Numbered(size))
    return differences(found['all'], wanted) + differences(found['few'], wanted[: 2 * ranks])


def before_and_after_training(folder: str, stage: int) -> list[str]:
    """Val between epochs, within a group of micro-batches, and the checkpoint after it."""
    data = loader(Numbered(3))
    runner = runner_of(
        folder,
        data,
        stage=stage,
        train_dataloader=vector_loader(Vectors(4 * dist.get_world_size())),
        train_cfg=dict(by_epoch=True, max_epochs=3),
        optim_wrapper=dict(type='OptimWrapper', optimizer=dict(type='SGD', lr=0.0), accumulative_counts=3),
        # ToyModel has a layer that it does not use.
        cfg=dict(model_wrapper_cfg=dict(type='ZeroModelWrapper', stage=stage, find_unused_parameters=True)),
    )
    runner.train()
    return differences(runner.val()['seen'], alone(Numbered(3)))


class ByMethod(ToyModel):
    """Enters its blocks by a method that runs their forward."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.__class__ = Twice

    def forward(self, inputs: torch.Tensor, labels: Any = None, mode: str = 'tensor') -> Any:
        x = self.stem(inputs)
        for block in self.blocks:
            x = block.twice(x)
        return list(self.head(x))


class Twice(type(toy().blocks[0])):  # type: ignore[misc]
    def twice(self, x: torch.Tensor) -> torch.Tensor:
        return self(self(x)) + self.scale


def by_hand(folder: str, stage: int) -> list[str]:
    """The pair alone, with units that are entered by a method, and part of the ranks that stay gathered."""
    faults = []
    rules = [dict(units='blocks.1', reshard_after_forward=2)] if dist.get_world_size() == 4 and stage == 3 else []
    torch.manual_seed(0)
    plain = ByMethod()
    policy = dict(type='ModuleClassPolicy', classes=['Twice'])
    model = ZeroModelWrapper(module=copy.deepcopy(plain), stage=stage, wrap_policy=policy, overrides=rules)
    rank = dist.get_rank()
    if rank == 0:
        # As a rank has that failed in a step which others did not start.
        started('a step')
    for counts in ([0, 3, 1, 0], [2, 1, 0, 4]):
        found = []
        for number in model.join(range(counts[rank]), 'val'):
            with torch.no_grad():
                found += model.val_step(toy_batch(10 * rank + number))
        wanted = [x for number in range(counts[rank]) for x in plain(**toy_batch(10 * rank + number))]
        if len(found) != len(wanted) or not all(map(torch.allclose, found, wanted)):
            faults.append(f'{counts}: other predictions')
    return faults


class Several(ToyModel):
    """Runs a forward for each part of its data."""

    def val_step(self, data: Any) -> list:
        return [x for part in data for x in BaseModel.val_step(self, part)]


def several_forwards_in_a_step(folder: str, stage: int) -> list[str]:
    """More on one rank than on the other, in the first step of the model, too."""
    torch.manual_seed(0)
    plain, rank = Several(), dist.get_rank()
    model = ZeroModelWrapper(module=copy.deepcopy(plain), stage=stage, wrap_policy=BLOCKS)
    found, batches = [], [[toy_batch(part + 9 * rank) for part in range(3 - rank % 3)] for _ in range(2 + rank)]
    for batch in model.join(batches, 'val'):
        with torch.no_grad():
            found += model.val_step(batch)
    wanted = [x for batch in batches for x in plain.val_step(batch)]
    same = len(found) == len(wanted) and all(map(torch.allclose, found, wanted))
    return [] if same else ['other predictions']


def what_it_costs(folder: str, stage: int) -> list[str]:
    """With equal numbers of batches: one all-reduce of a number per rank, and not a unit more."""
    model = ZeroModelWrapper(module=toy(), stage=stage, wrap_policy=BLOCKS)

    def run(batches: Any) -> list[tuple[str, int]]:
        with CollectiveLog() as log, torch.no_grad():
            for number in batches:
                model.val_step(toy_batch(number))
        return sorted((c.kind, c.elements) for c in log.calls)

    run(range(1))
    before, after = run(range(3)), run(model.join(range(3), 'val'))
    extra = [('all_reduce', dist.get_world_size())] if stage else []
    return [] if sorted(before + extra) == after else [f'{before} became {after}']


class Damaged(Numbered):
    """Data that one rank cannot read."""

    def __getitem__(self, number: int) -> dict[str, Any]:
        if number == 4:
            raise KeyError('a damaged image')
        return super().__getitem__(number)


def a_rank_that_fails(folder: str, stage: int) -> list[str]:
    """The rank that waits for another one ends with its error, long before any timeout."""
    faults: list[str] = []
    ranks = dist.get_world_size()
    runner = runner_of(folder, loader(Damaged(5)), stage=stage)
    if stage and ranks == 2:
        said = ('a damaged image',) if dist.get_rank() == 0 else ('rank 0 failed with', 'a damaged image')
        with refused(faults, Exception, *said):
            runner.val()
    return faults


CASES = (
    numbers_of_batches,
    a_stream,
    views,
    workers,
    views_in_16_bit,
    an_own_loop,
    before_and_after_training,
    by_hand,
    several_forwards_in_a_step,
    what_it_costs,
    a_rank_that_fails,
)


def run_cases(folder: str) -> Faults:
    return by_stage(CASES, STAGES, folder)


@pytest.fixture(scope='module')
def found(tmp_path_factory: pytest.TempPathFactory) -> Faults:
    return merged(run_ranks(2, run_cases, str(tmp_path_factory.mktemp('uneven')), timeout=500))


@pytest.mark.parametrize('stage', STAGES)
@pytest.mark.parametrize('case', [case.__name__ for case in CASES])
def test_uneven_val(found: Faults, case: str, stage: int) -> None:
    assert not found[f'{case} {stage}'], '\n'.join(found[f'{case} {stage}'])


class Changing(ToyModel):
    """Runs its units in another order each time."""

    calls = 0

    def forward(self, inputs: torch.Tensor, labels: Any = None, mode: str = 'tensor') -> Any:
        self.calls += 1
        for index in (0, 1) if self.calls % 2 else (1, 0):
            inputs = self.blocks[index](inputs)
        return list(self.head(inputs))


def changing_order(folder: str) -> None:
    runner_of(folder, loader(Numbered(5)), Changing()).val()


@pytest.mark.slow
def test_an_order_that_changes_is_named(tmp_path: Path) -> None:
    """A rank without a batch cannot know what the next forward runs."""
    with pytest.raises(AssertionError, match='PlanError: rank 1 has no more batches in val, and cannot take part'):
        run_ranks(2, changing_order, str(tmp_path), timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize('ranks', [3, 4])
def test_uneven_val_on_more_ranks(ranks: int, tmp_path: Path) -> None:
    for case, faults in merged(run_ranks(ranks, run_cases, str(tmp_path), timeout=600)).items():
        assert not faults, f'{case}: {faults}'
