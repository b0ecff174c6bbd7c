"""Training where ranks have different numbers of batches: no hang, every sample counts once, ranks step together."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mmengine.hooks import Hook
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import IterableDataset

from mmzero import ZeroModelWrapper, ZeroOptimWrapper, ZeroRunner
from mmzero.analysis.collectives import CollectiveLog
from mmzero.errors import DataError
from tests.distributed.cases import Faults, by_stage, merged, refused
from tests.distributed.ranks import run_ranks
from tests.distributed.training import full
from tests.models import ToyModel, toy_batch
from tests.vectors import Vectors, loader, vector_runner

pytestmark = pytest.mark.distributed

STAGES = (0, 1, 3)
FIELDS = dict(wrap_policy=dict(type='ModuleClassPolicy', classes=['Block']), find_unused_parameters=True)


class Branching(ToyModel):
    """Uses a layer on all ranks but the first, and has running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.rare = nn.Linear(12, 12)
        self.norm = nn.BatchNorm1d(12)

    def forward(self, inputs: torch.Tensor, labels: Any = None, mode: str = 'tensor') -> Any:
        inputs = self.norm(inputs)
        if int(labels[0]) == 1:
            inputs = inputs + self.rare(inputs)
        return super().forward(inputs, labels, mode)


class Stream(IterableDataset):
    """Each rank's own share of vectors, of a length that is that of all together."""

    def __init__(self, shares: list[int]) -> None:
        self.shares = shares

    def __len__(self) -> int:
        return sum(self.shares)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        rank = dist.get_rank()
        start = sum(self.shares[:rank])
        yield from (Vectors(start + self.shares[rank])[number] for number in range(start, start + self.shares[rank]))


def toy(cls: type[ToyModel] = ToyModel) -> ToyModel:
    torch.manual_seed(0)
    return cls()


def shares(kind: int = 0) -> list[int]:
    """Numbers of batches by rank."""
    return ([3, 2, 1, 4], [0, 2, 3, 0])[kind][: dist.get_world_size()]


def batch_of(rank: int, index: int, epoch: int = 0) -> dict:
    batch = toy_batch(100 * epoch + 10 * rank + index)
    # For Branching.
    batch['labels'][0] = 1 if rank else 0
    return batch


def in_one_process(
    counts: list[int], optimizer: Any, epochs: int = 2, group: int = 1, clip: float | None = None, cls: Any = ToyModel
) -> ToyModel:
    """Steps on sums of the gradients of all ranks' batches, divided by the number of ranks."""
    model = toy(cls)
    optim = optimizer(model.parameters())
    steps = epochs * max(counts)
    for step in range(steps):
        epoch, index = divmod(step, max(counts))
        of_group = min(group, steps - step // group * group)
        for rank, count in enumerate(counts):
            if index < count:
                loss = model(**batch_of(rank, index, epoch), mode='loss')['loss']
                (loss / len(counts) / of_group).backward()
        if (step + 1) % group == 0 or step == steps - 1:
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optim.step()
            optim.zero_grad()
    return model


def by_hand(
    stage: int, counts: list[int], optimizer: Any, epochs: int = 2, cls: Any = ToyModel, **optim: Any
) -> ZeroModelWrapper:
    model = ZeroModelWrapper(module=toy(cls), stage=stage, **FIELDS)
    wrapper = ZeroOptimWrapper(optimizer(model.module.parameters()), **optim)
    wrapper.initialize_count_status(model, 0, epochs * max(counts))
    rank = dist.get_rank()
    model.train()
    for epoch in range(epochs):
        for batch in model.join([batch_of(rank, index, epoch) for index in range(counts[rank])]):
            model.train_step(batch, wrapper)
    return model


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def differences(found: nn.Module, wanted: nn.Module, tolerance: float = 2e-6) -> list[str]:
    pairs = [(name, full(param), dict(wanted.named_parameters())[name]) for name, param in found.named_parameters()]
    return [
        f'{name} is off by {float((a - b).norm() / b.norm()):.1e}'
        for name, a, b in pairs
        if (a - b).norm() > tolerance * b.norm()
    ]


def as_in_one_process(folder: str, stage: int) -> list[str]:
    """Sums of gradients over the world size; with groups of micro-batches and clipping; ranks without any batch."""
    faults = []
    for kind in (0, 1):
        counts = shares(kind)
        found = by_hand(stage, counts, adam)
        faults += [f'{counts}: {fault}' for fault in differences(found.module, in_one_process(counts, adam))]
    found = by_hand(stage, shares(), sgd, epochs=1, accumulative_counts=2, clip_grad=dict(max_norm=0.1))
    wanted = in_one_process(shares(), sgd, epochs=1, group=2, clip=0.1)
    return faults + [f'in groups: {fault}' for fault in differences(found.module, wanted)]


def as_torchs_join(folder: str, stage: int) -> list[str]:
    """What DDP under torch's Join context gives on the same batches."""
    counts, rank = shares(), dist.get_rank()
    model = DistributedDataParallel(toy(), find_unused_parameters=True)
    optim = sgd(model.parameters())
    for epoch in range(2):
        with model.join():
            for index in range(counts[rank]):
                optim.zero_grad()
                model(**batch_of(rank, index, epoch), mode='loss')['loss'].backward()
                optim.step()
    return differences(by_hand(stage, counts, sgd).module, model.module)


def what_a_stand_in_leaves_alone(folder: str, stage: int) -> list[str]:
    """Running statistics of batch norms, and what only the batch that stands in uses."""
    rank, counts = dist.get_rank(), [3] + [1] * (dist.get_world_size() - 1)
    found = by_hand(stage, counts, adam, epochs=1, cls=Branching).module
    norm = nn.BatchNorm1d(12)
    for index in range(counts[rank]):
        norm(batch_of(rank, index)['inputs'])
    faults = []
    if int(found.norm.num_batches_tracked) != counts[rank]:
        faults.append(f'{int(found.norm.num_batches_tracked)} batches in the statistics')
    if not torch.allclose(found.norm.running_var, norm.running_var, rtol=1e-5):
        faults.append('other running statistics')
    # DDP notes what the batch used.
    return faults + (differences(found, in_one_process(counts, adam, epochs=1, cls=Branching)) if stage else [])


class Watch(Hook):
    """What hooks see in each iteration."""

    def __init__(self) -> None:
        self.iters: list[int] = []
        self.lrs: list[float] = []
        self.losses: list[float] = []
        self.lasts: list[bool] = []

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        self.iters.append(runner.iter)
        self.lrs += runner.optim_wrapper.get_lr()['lr']
        self.losses.append(float(outputs['loss']))
        self.lasts.append(self.end_of_epoch(runner.train_dataloader, batch_idx))


def runner_of(folder: str, stage: int, data: dict, **changes: Any) -> tuple[ZeroRunner, Watch]:
    watch = Watch()
    settings: dict[str, Any] = dict(
        train_dataloader=data,
        val_dataloader=loader(Vectors(2 * dist.get_world_size() + 1), round_up=False) | dict(batch_size=1),
        train_cfg=dict(by_epoch=True, max_epochs=2),
        optim_wrapper=dict(type='OptimWrapper', optimizer=dict(type='SGD', lr=0.1)),
        param_scheduler=dict(type='LinearLR', start_factor=0.1, by_epoch=True, end=2, convert_to_iter_based=True),
    )
    settings.update(changes)
    runner = vector_runner(
        folder, model=toy(), stage=stage, wrapper=FIELDS, launcher='pytorch', custom_hooks=[watch], **settings
    )
    return runner, watch


def the_same_on_all(value: Any) -> bool:
    values: list = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return all(item == values[0] for item in values)


def in_the_runner(folder: str, stage: int) -> list[str]:
    """Iterations, schedules, hooks and the end of an epoch are the same on all ranks; the log has own losses alone."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    size = 2 * ranks + 1
    data = loader(Vectors(size), round_up=False) | dict(batch_size=1)
    runner, watch = runner_of(folder, stage, data)
    runner.train()
    own = 2 * (2 + (rank < size % ranks))
    logged = runner.message_hub.get_scalar('train/loss').data[0].tolist()
    faults = []
    if (runner.iter, runner.max_iters, len(runner.train_dataloader)) != (6, 6, 3):
        faults.append(f'{runner.iter} of {runner.max_iters} iterations')
    if not the_same_on_all((watch.iters, watch.lrs, watch.lasts)) or watch.lasts != [False, False, True] * 2:
        faults.append(f'hooks saw {vars(watch)}')
    if len(logged) != own or not all(math.isfinite(loss) for loss in watch.losses):
        faults.append(f'{logged} was logged of {watch.losses}')
    return faults


def a_stream(folder: str, stage: int) -> list[str]:
    """Lengths that nobody knows, and that data loaders tell wrongly."""
    counts = [1, 3, 0, 2][: dist.get_world_size()]
    data = loader() | dict(dataset=Stream(counts), sampler=None, batch_size=1)
    runner, watch = runner_of(folder, stage, data, param_scheduler=None, train_cfg=dict(by_epoch=True, max_epochs=1))
    runner.train()
    model = toy()
    optim = sgd(model.parameters())
    for index in range(max(counts)):
        optim.zero_grad()
        for rank, count in enumerate(counts):
            if index < count:
                sample = toy_batch(sum(counts[:rank]) + index, size=1)
                (model(**sample, mode='loss')['loss'] / len(counts)).backward()
        optim.step()
    return differences(runner.model.module, model) + ([] if runner.iter == max(counts) else [f'{runner.iter}'])


def by_iterations(folder: str, stage: int) -> list[str]:
    """Such a loop starts each rank's loader anew, as ever; a rank that has nothing to start with ends all."""
    faults: list[str] = []
    by_iter = dict(train_cfg=dict(by_epoch=False, max_iters=2, val_interval=1), param_scheduler=None)
    size = 2 * dist.get_world_size() + 1
    data = loader(Vectors(size), round_up=False) | dict(batch_size=1)
    runner, watch = runner_of(f'{folder}/some', stage, data, **by_iter)
    runner.train()
    if runner.iter != 2 or not the_same_on_all(watch.iters):
        faults.append(f'{runner.iter} iterations')
    data = loader(Vectors(1), round_up=False) | dict(batch_size=1)
    with refused(faults, DataError, 'train_dataloader: ranks have 1, 0', 'needs one on each'):
        runner_of(f'{folder}/none', stage, data, **by_iter)[0].train()
    return faults


def leaving_early(folder: str, stage: int) -> list[str]:
    """A loop that ends by itself, after as many steps on each rank; one of them is at the end of its data."""
    model = ZeroModelWrapper(module=toy(), stage=stage, **FIELDS)
    optim = ZeroOptimWrapper(sgd(model.module.parameters()))
    optim.initialize_count_status(model, 0, 10)
    steps = 0
    for _ in range(2):
        for index, batch in enumerate(model.join([toy_batch(n) for n in range(2 if dist.get_rank() else 5)])):
            if index == 2:
                break
            model.train_step(batch, optim)
            steps += 1
    model.engine.model_state()
    return [] if steps == 4 else [f'{steps} steps']


def what_it_costs(folder: str, stage: int) -> list[str]:
    """With equal numbers of batches: one all-reduce of a number per rank and epoch."""
    model = ZeroModelWrapper(module=toy(), stage=stage, **FIELDS)
    optim = ZeroOptimWrapper(sgd(model.module.parameters()))
    optim.initialize_count_status(model, 0, 100)

    def run(batches: Any) -> list[tuple[str, int]]:
        with CollectiveLog() as log:
            for batch in batches:
                model.train_step(batch, optim)
        return sorted((call.kind, call.elements) for call in log.calls)

    batches = [toy_batch(n) for n in range(2)]
    run(batches)
    before, after = run(batches), run(model.join(batches))
    return [] if sorted([*before, ('all_reduce', dist.get_world_size())]) == after else [f'{before} became {after}']


CASES = (
    as_in_one_process,
    as_torchs_join,
    what_a_stand_in_leaves_alone,
    in_the_runner,
    a_stream,
    by_iterations,
    leaving_early,
    what_it_costs,
)


def run_cases(folder: str) -> Faults:
    return by_stage(CASES, STAGES, folder)


@pytest.fixture(scope='module')
def found(tmp_path_factory: pytest.TempPathFactory) -> Faults:
    return merged(run_ranks(2, run_cases, str(tmp_path_factory.mktemp('uneven')), timeout=500))


@pytest.mark.parametrize('stage', STAGES)
@pytest.mark.parametrize('case', [case.__name__ for case in CASES])
def test_uneven_training(found: Faults, case: str, stage: int) -> None:
    assert not found[f'{case} {stage}'], '\n'.join(found[f'{case} {stage}'])


@pytest.mark.slow
@pytest.mark.parametrize('ranks', [3, 4])
def test_uneven_training_on_more_ranks(ranks: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = str(tmp_path_factory.mktemp('uneven'))
    for case, faults in merged(run_ranks(ranks, run_cases, folder, timeout=600)).items():
        assert not faults, f'{case}: {faults}'
