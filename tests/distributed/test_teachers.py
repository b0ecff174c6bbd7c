"""Teachers inside of detectors: averaged from a student over shards, or frozen outside of the module tree."""

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mmengine.config import ConfigDict
from mmengine.model import BaseModel, MMDistributedDataParallel
from mmengine.optim import OptimWrapper
from mmengine.registry import DefaultScope
from torch import nn

from mmzero import ZeroModelWrapper, ZeroOptimWrapper
from mmzero._compat import build_with_meta_parameters
from mmzero.analysis.collectives import CollectiveLog
from mmzero.checkpoint import nothing_loaded
from mmzero.engines import modules_outside_of
from mmzero.errors import PlanError
from mmzero.hooks import teach_over_shards
from tests.detectors import has_full_mmcv, wide_batch
from tests.distributed.cases import Faults, count_opened_files, differing, merged, opened, refused
from tests.distributed.ranks import run_ranks
from tests.distributed.training import full
from tests.models import ToyModel
from tests.teachers import DISTILLED, LAD, SEMI, SOFT_TEACHER, TEACHER, build, images, semi, semi_batch
from tests.vectors import vector_runner

pytestmark = pytest.mark.distributed

STEPS = 5
BLOCKS = dict(type='ModuleClassPolicy', classes=['BasicBlock'])


def mean_teacher(**fields: Any) -> Any:
    from mmdet.engine.hooks import MeanTeacherHook

    return MeanTeacherHook(**fields)


def elsewhere_on_meta(make: Callable[[], Any]) -> Any:
    """Real on rank 0, as ZeroRunner builds it."""
    if dist.get_rank() == 0:
        return make()
    with nothing_loaded():
        return build_with_meta_parameters(make)


def trained(
    make: Callable[[], Any], batch: Callable[[int], dict], fields: dict | None, hook: Any = None, counts: int = 1
) -> dict[str, Any]:
    """Train with a hook, by stock DDP without fields, and note losses, weights, and what val sees."""
    torch.manual_seed(0)
    optim_fields = dict(accumulative_counts=counts, clip_grad=dict(max_norm=1.0))
    if fields is None:
        net = make()
        model: Any = MMDistributedDataParallel(
            net, device_ids=None, broadcast_buffers=False, find_unused_parameters=True
        )
        optim: Any = OptimWrapper(torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9), **optim_fields)
    else:
        model = ZeroModelWrapper(module=elsewhere_on_meta(make), find_unused_parameters=True, **fields)
        net = model.module
        optim = ZeroOptimWrapper(torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9), **optim_fields)
        hook = hook and teach_over_shards(hook)
    optim.initialize_count_status(model, 0, STEPS)
    runner = SimpleNamespace(model=model, sharded=model, iter=0, epoch=0, max_iters=STEPS, max_epochs=1)
    # Leaves units gathered at stages 1 and 2.
    seen(model, net)
    before = whole(model)
    if hook is not None:
        hook.before_train(runner)
    losses, communicated = [], 0
    for runner.iter in range(STEPS):
        model.train()
        torch.manual_seed(runner.iter)
        log_vars = model.train_step(batch(runner.iter * dist.get_world_size() + dist.get_rank()), optim)
        losses.append(float(log_vars['loss'].detach()))
        with CollectiveLog() as log:
            if hook is not None:
                hook.after_train_iter(runner, runner.iter)
        communicated += len(log.calls)
    return dict(losses=losses, before=before, after=whole(model), communicated=communicated, seen=seen(model, net))


def whole(model: Any) -> dict[str, torch.Tensor]:
    """Parameters and buffers, gathered."""
    net = model.module
    params = model.engine.named_params() if isinstance(model, ZeroModelWrapper) else dict(net.named_parameters())
    return {name: full(value) for name, value in [*params.items(), *net.named_buffers()]}


def seen(model: Any, net: Any) -> torch.Tensor:
    """What val sees: the scores and boxes of one image, where there is an nms."""
    if not hasattr(net, 'teacher'):
        return torch.zeros(1)
    model.eval()
    with torch.no_grad():
        found = (model if hasattr(model, 'val_step') else net).val_step(images(77, 1))[0].pred_instances
    return torch.cat([found.scores[:, None], found.bboxes / 64], dim=1)


def apart(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    faults = [f'{found["communicated"]} collectives in the hook'] if found['communicated'] else []
    for step, (a, b) in enumerate(zip(found['losses'], wanted['losses'], strict=True)):
        faults += [] if abs(a - b) <= 1e-6 * abs(b) else [f'loss {step}: {a} for {b}']
    for part in ('student', 'teacher', ''):
        names = [n for n in wanted['after'] if n.startswith(part) and wanted['after'][n].is_floating_point()]
        join = lambda run, at: torch.cat([run[at][n].flatten() for n in names])  # noqa: B023, E731
        if names:
            moved = (join(wanted, 'after') - join(wanted, 'before')).norm()
            off = (join(found, 'after') - join(wanted, 'after')).norm()
            faults += [] if off <= 1e-5 * moved else [f'{part or "weights"}: {off / moved:.0e} off']
    far = float((found['seen'] - wanted['seen']).abs().max())
    return faults + ([f'val is {far:.0e} off'] if not far <= 1e-5 else [])


def on_one_rank() -> Any:
    """Labels of the teacher on rank 0 alone."""
    return semi(0.0 if dist.get_rank() == 0 else 2.0)


SEMI_CASES: dict[str, tuple[Callable, dict, int]] = {
    'averaged': (semi, dict(momentum=0.1), 1),
    'buffers, every second': (semi, dict(momentum=0.1, interval=2, skip_buffer=False), 1),
    'no labels on one rank': (on_one_rank, dict(momentum=0.1), 1),
    'micro-batches': (semi, dict(momentum=0.1), 2),
}
OUTSIDE_CASES = {'distilled': DISTILLED, 'label assignment': LAD}


def settings(name: str, stages: tuple[int, ...]) -> list[dict]:
    found = [dict(stage=stage, wrap_policy=BLOCKS) for stage in stages]
    return [*found, dict(stage=3)] if name == 'averaged' else found


def teachers(stages: tuple[int, ...]) -> Faults:
    found: Faults = {}
    for name, (make, fields, counts) in SEMI_CASES.items():
        wanted = trained(make, semi_batch, None, mean_teacher(**fields), counts)
        for setting in settings(name, stages):
            run = trained(make, semi_batch, setting, mean_teacher(**fields), counts)
            found[f'{name}, {setting}'] = apart(run, wanted)
    for name, cfg in OUTSIDE_CASES.items():
        make = lambda cfg=cfg: build(cfg)  # noqa: E731
        wanted = trained(make, wide_batch, None)
        for stage in stages:
            found[f'{name}, stage {stage}'] = apart(
                trained(make, wide_batch, dict(stage=stage, wrap_policy=BLOCKS)), wanted
            )
    return {**found, 'outside': outside(), 'not alike': not_alike(), 'shared': shared()}


class Hides(ToyModel):
    """Keeps modules where torch does not see them, in three ways, and one that it knows."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        vars(self)['teacher'] = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.others = [nn.Linear(2, 3)]
        self.named = dict(one=nn.Linear(3, 2), text='')
        self.again = [self.stem]


def outside() -> list[str]:
    """Real on every rank, with rank 0's values, whole."""
    net = elsewhere_on_meta(lambda: Hides(dist.get_rank()))
    ZeroModelWrapper(module=net, find_unused_parameters=True)
    wanted = Hides(0)
    parts = modules_outside_of(net)
    names = ['teacher', 'others[0]', "named['one']"]
    faults = [] if list(parts) == names else [f'{list(parts)}']
    for path, module in modules_outside_of(wanted).items():
        faults += differing({**parts[path].state_dict()}, {**module.state_dict()})
    return faults


def shared() -> list[str]:
    """What is in the tree as well would be left behind by sharding."""
    net = ToyModel()
    vars(net)['teacher'] = copy.copy(net.stem)
    faults: list[str] = []
    with refused(faults, PlanError, 'teacher lies outside of the module tree and shares', 'with stem.'):
        ZeroModelWrapper(module=net)
    return faults


class Pair(BaseModel):
    """A student some weights of which are whole, since they have another dtype than the rest, and a frozen teacher."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = self._one(), self._one().requires_grad_(False)

    @staticmethod
    def _one() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1).bfloat16())

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.student(inputs)


def not_alike() -> list[str]:
    """Of a weight of one row rank 0 holds the same either way; it is told all the same."""
    model = ZeroModelWrapper(module=Pair())
    hook: Any = teach_over_shards(mean_teacher(momentum=0.1))
    faults: list[str] = []
    with refused(faults, PlanError, 'student.1.weight and teacher.1.weight are kept differently', '(1, 8)', '(0, 8)'):
        hook.before_train(SimpleNamespace(model=model, sharded=model, iter=0))
    return faults


@pytest.mark.parametrize('stages', [(3,), pytest.param((0, 1, 2), marks=pytest.mark.slow)])
def test_teachers(stages: tuple[int, ...]) -> None:
    for case, faults in merged(run_ranks(2, teachers, stages)).items():
        assert not faults, f'{case}: {faults}'


def soft() -> Faults:
    make = lambda: build(SOFT_TEACHER)  # noqa: E731
    wanted = trained(make, semi_batch, None, mean_teacher(momentum=0.1))
    return {
        f'stage {stage}': apart(
            trained(make, semi_batch, dict(stage=stage, wrap_policy=policy), mean_teacher(momentum=0.1)), wanted
        )
        for stage, policy in ((0, BLOCKS), (1, BLOCKS), (2, BLOCKS), (3, BLOCKS), (3, 'AutoPolicy'))
    }


@pytest.mark.slow
@pytest.mark.skipif(not has_full_mmcv(), reason='RoIAlign and nms are in full mmcv alone')
def test_soft_teacher() -> None:
    for case, faults in merged(run_ranks(2, soft)).items():
        assert not faults, f'{case}: {faults}'


class Branches(torch.utils.data.Dataset):
    """Images with labels and without by turns on each of two ranks, in the form of mmdet's transform of this name."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict:
        batch = semi_batch(index)
        own = ('sup',) if index // 2 % 2 == 0 else ('unsup_teacher', 'unsup_student')
        return {key: {n: v[0] if n in own else None for n, v in value.items()} for key, value in batch.items()}


class Images(torch.utils.data.Dataset):
    """Images to predict on."""

    metainfo: dict = {}

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> dict:
        return {key: value[0] for key, value in images(index, 1).items()}


def loader_of(dataset: Any) -> dict:
    sampler = dict(type='DefaultSampler', shuffle=False, round_up=False)
    return dict(dataset=dataset, batch_size=2, num_workers=0, sampler=sampler, collate_fn=dict(type='pseudo_collate'))


def runner_of(folder: str, epochs: int, stage: int = 3, model: Any = SEMI, **changes: Any) -> Any:
    settings = dict(
        train_dataloader=loader_of(Branches()),
        val_dataloader=loader_of(Images()),
        val_cfg=dict(type='TeacherStudentValLoop'),
        test_dataloader=None,
        test_cfg=None,
        test_evaluator=None,
        train_cfg=dict(by_epoch=True, max_epochs=epochs, val_interval=1),
        custom_hooks=[dict(type='MeanTeacherHook', momentum=0.1)],
        optim_wrapper=dict(type='OptimWrapper', optimizer=dict(type='SGD', lr=0.01, momentum=0.9)),
        default_scope='mmdet',
        launcher='pytorch' if dist.is_initialized() else 'none',
    )
    units = dict(wrap_policy=BLOCKS, find_unused_parameters=True)
    return vector_runner(folder, ConfigDict(copy.deepcopy(model)), stage, units, **{**settings, **changes})


def through_the_runner(folder: str) -> Faults:
    """Broken after the first epoch and resumed, at the same and another stage, against the unbroken run."""
    runner_of(f'{folder}/whole', 2).train()
    runner_of(f'{folder}/broken', 1).train()
    runner_of(f'{folder}/broken', 2, resume=True).train()
    runner_of(f'{folder}/plain', 2, stage=0).train()
    read = lambda path: torch.load(f'{folder}/{path}/epoch_2.pth', weights_only=True)['state_dict']  # noqa: E731
    one, two, plain = map(read, ('whole', 'broken', 'plain'))
    found = {'resumed': differing(one, two)}
    off = {n: float((one[n] - plain[n]).abs().max()) for n in plain if plain[n].is_floating_point()}
    found['stages'] = [f'{name}: {value:.0e}' for name, value in off.items() if not value <= 1e-5]
    names = [name for name in one if name.startswith('student.') and name.endswith('conv1.weight')]
    found['moved'] = [n for n in names if torch.equal(one[n], one[n.replace('student.', 'teacher.')])]
    return {**found, **distilled(folder)}


def distilled(folder: str) -> Faults:
    """The teacher's file is read by rank 0 alone, by the config's path; a missing one ends all ranks."""
    if dist.get_rank() == 0:
        torch.save(dict(state_dict=build(TEACHER, seed=5).state_dict()), f'{folder}/teacher.pth')
    dist.barrier()

    class Labelled(Images):
        def __getitem__(self, index: int) -> dict:
            return {key: value[0] for key, value in wide_batch(index).items()}

    model = dict(DISTILLED, teacher_ckpt=f'{folder}/teacher.pth')
    more: dict = dict(
        train_dataloader=loader_of(Labelled()), val_dataloader=None, val_cfg=None, val_evaluator=None, custom_hooks=None
    )
    count_opened_files()
    runner = runner_of(f'{folder}/distilled', 1, model=model, **more)
    runner.train()
    times = sum(count for path, count in opened.items() if path.endswith('teacher.pth'))
    teacher = runner.sharded.module.teacher_model
    faults = differing({**teacher.state_dict()}, {**build(TEACHER, seed=5).state_dict()})
    faults += ['in the checkpoint'] if any('teacher' in name for name in runner.sharded.module.state_dict()) else []
    faults += ['read on another rank'] if dist.get_rank() and times else []
    missing: list[str] = []
    with refused(missing, ValueError, 'no checkpoint at', 'nothing.pth'):
        runner_of(f'{folder}/none', 1, model=dict(model, teacher_ckpt=f'{folder}/nothing.pth'), **more)
    return {'read': faults, 'missing': missing}


@pytest.mark.slow
def test_runs(tmp_path: Path) -> None:
    with DefaultScope.overwrite_default_scope('mmdet'):
        for case, faults in merged(run_ranks(2, through_the_runner, str(tmp_path))).items():
            assert not faults, f'{case}: {faults}'
