"""Sharded checkpoints: saved on some ranks at some stage, gone on from on others, bit for bit."""

import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from mmengine.hooks import EMAHook, Hook
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from mmzero.checkpoint import state_of
from mmzero.checkpoint.convert import whole_checkpoint
from mmzero.checkpoint.scratch import scratch_beside
from mmzero.checkpoint.sharded import save as sharded_save
from mmzero.checkpoint.sharded.folder import FolderState
from mmzero.errors import CheckpointError
from tests.distributed.cases import Faults, damage, differing, merged, refused
from tests.distributed.ranks import run_ranks
from tests.models import ToyModel
from tests.vectors import Vectors, loader, vector_runner

pytestmark = pytest.mark.distributed

UNITS = dict(wrap_policy=dict(type='ModuleClassPolicy', classes=['Block']), find_unused_parameters=True)
SHARDED = dict(format='sharded')
SETTINGS: dict[str, dict[str, Any]] = {
    'stage 0': dict(stage=0),
    'stage 1': dict(stage=1),
    'stage 2': dict(stage=2),
    'stage 3': dict(stage=3),
    'HSDP': dict(stage=3, mesh=dict(replicate=2)),
    'offloaded': dict(stage=3, offload=dict(params='cpu')),
}


def runner_of(folder: str, setting: str, epochs: int, checkpoint: Any = SHARDED, **changes: Any) -> Any:
    """ToyModel, which has tied, frozen and 0-dim parameters, with EMA, a schedule and a scaled loss."""
    fields = dict(SETTINGS[setting])
    wrapper = dict(type='ZeroModelWrapper', **fields, **UNITS)
    torch.manual_seed(0)
    settings: dict[str, Any] = dict(
        train_cfg=dict(by_epoch=True, max_epochs=epochs, val_interval=1),
        optim_wrapper=dict(
            type='AmpOptimWrapper',
            dtype='float16',
            loss_scale=dict(init_scale=2.0**7, growth_interval=2),
            optimizer=dict(type='AdamW', lr=0.01),
            clip_grad=dict(max_norm=0.1),
        ),
        param_scheduler=dict(type='LinearLR', start_factor=0.1, by_epoch=False, end=20),
        custom_hooks=[dict(type='EMAHook', ema_type='MomentumAnnealingEMA', momentum=0.1, gamma=3)],
        default_hooks=dict(checkpoint=dict(type='CheckpointHook', interval=1, max_keep_ckpts=2)),
        cfg=dict(model_wrapper_cfg=wrapper, checkpoint=checkpoint),
    )
    return vector_runner(folder, **{**settings, **changes})


def saved(folder: str, setting: str) -> None:
    """One epoch: a sharded checkpoint, and the same state in a full one, to compare with."""
    runner = runner_of(folder, setting, 1)
    runner.train()
    runner.saves_shards = False
    runner.save_checkpoint(folder, 'full.pth', by_epoch=True, meta=dict(epoch=1, iter=runner.iter))


def loaded(folder: str, name: str, setting: str) -> list[str]:
    """Resume without a step, and save all that was loaded in full."""
    runner = runner_of(f'{folder}/{name}', setting, 1, load_from=f'{folder}/epoch_1', resume=True)
    runner.train()
    runner.saves_shards = False
    runner.save_checkpoint(f'{folder}/{name}', 'again.pth', meta=dict(epoch=1, iter=runner.iter))
    dist.barrier()
    again, full = (torch.load(f'{folder}/{path}', weights_only=True) for path in (f'{name}/again.pth', 'full.pth'))
    faults = differing(flat(again), flat(full))
    for part in ('param_schedulers', 'epoch', 'iter', 'groups', 'loss_scaler'):
        ours, theirs = (taken(checkpoint, part) for checkpoint in (again, full))
        faults += [] if ours == theirs else [f'{part}: {ours}, not {theirs}']
    return faults


def taken(checkpoint: dict[str, Any], part: str) -> Any:
    if part in ('epoch', 'iter'):
        return checkpoint['meta'][part]
    if part == 'groups':
        return checkpoint['optimizer']['param_groups'], checkpoint['optimizer']['param_names']
    return checkpoint['optimizer'][part] if part == 'loss_scaler' else checkpoint[part]


def flat(checkpoint: dict[str, Any]) -> dict[str, torch.Tensor]:
    state = checkpoint['optimizer']['state']
    return {
        **checkpoint['state_dict'],
        **{f'ema {name}': value for name, value in checkpoint['ema_state_dict'].items()},
        **{f'{name} {index}': value for index, entries in state.items() for name, value in entries.items()},
    }


def save_each(folder: str, settings: list[str]) -> None:
    for setting in settings:
        saved(f'{folder}/{setting}', setting)


def load_each(folder: str, sources: list[str], settings: list[str]) -> Faults:
    ranks = dist.get_world_size()
    return {
        f'{source} -> {setting} on {ranks}': loaded(f'{folder}/{source}', f'{setting} on {ranks}', setting)
        for source in sources
        for setting in settings
    }


def of_ranks(ranks: int, settings: list[str]) -> list[str]:
    return [setting for setting in settings if setting != 'HSDP' or ranks == 4]


@pytest.mark.parametrize(
    'there, here, settings',
    [
        (2, 4, ['stage 3', 'HSDP']),
        *(
            pytest.param(a, b, [name for name in SETTINGS if name != 'offloaded'], marks=pytest.mark.slow)
            for a in (1, 2, 4)
            for b in (1, 2, 4)
        ),
        pytest.param(2, 1, ['stage 0', 'stage 3', 'offloaded'], marks=pytest.mark.slow),
    ],
)
def test_state_is_the_saved_one(tmp_path: Path, there: int, here: int, settings: list[str]) -> None:
    run_ranks(there, save_each, str(tmp_path), of_ranks(there, settings))
    found = merged(run_ranks(here, load_each, str(tmp_path), of_ranks(there, settings), of_ranks(here, settings)))
    for case, faults in found.items():
        assert not faults, f'{case}: {faults}'


def goes_on(folder: str) -> Faults:
    """Broken runs against the unbroken one, with the writes beside training and not; each keeps one checkpoint."""
    kept = dict(checkpoint=dict(type='CheckpointHook', interval=1, max_keep_ckpts=1))
    whole = runner_of(f'{folder}/whole', 'stage 3', 3, default_hooks=kept)
    whole.train()
    wanted = flat_shards(whole)
    found: Faults = {}
    for name, checkpoint in (('sync', SHARDED), ('async', dict(SHARDED, async_save=True))):
        path = f'{folder}/{name}'
        runner_of(path, 'stage 3', 2, checkpoint, default_hooks=kept).train()
        faults = found[name] = named(path, ['epoch_2'])
        # What a process that died left behind.
        if dist.get_rank() == 0:
            shutil.copytree(f'{path}/epoch_2', f'{path}/epoch_7.part')
            Path(f'{path}/epoch_7.part/complete.json').unlink()
        dist.barrier()
        again = runner_of(path, 'stage 3', 3, checkpoint, default_hooks=kept, resume=True)
        again.train()
        faults += differing(flat_shards(again), wanted)
        faults += named(path, ['epoch_3', 'epoch_7.part'])
        faults += as_tested(path, f'{path}/epoch_3', again)
    return found


def named(path: str, wanted: list[str]) -> list[str]:
    """The folders of checkpoints there, and what is noted as the last one, once rank 0 has cleared up."""
    dist.barrier()
    names = sorted(item.name for item in Path(path).iterdir() if item.name.startswith('epoch'))
    last = Path(path, 'last_checkpoint').read_text()
    dist.barrier()
    return ([] if names == wanted else [f'{names}']) + ([] if last == f'{path}/{wanted[0]}' else [last])


def flat_shards(runner: Any) -> dict[str, torch.Tensor]:
    """This rank's weights and averages."""
    (hook,) = (hook for hook in runner.hooks if isinstance(hook, EMAHook))
    own = {f'ema {name}': value for name, value in hook.ema_model.state_dict().items()}
    state = runner.sharded.engine.sharded_state()
    return {**own, **{name: local(value).clone() for name, value in state.items()}}


def local(value: Any) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def as_tested(folder: str, path: str, trained: Any) -> list[str]:
    """A test with the checkpoint, without the hook, sees the averaged weights; so does training that starts from it."""
    (hook,) = (hook for hook in trained.hooks if isinstance(hook, EMAHook))
    wanted = {name: local(value) for name, value in hook.ema_model.module.state_dict().items()}
    faults = []
    for work in ('test', 'load'):
        runner = runner_of(f'{folder}/tested', 'stage 3', 3, load_from=path, custom_hooks=[])
        if work == 'test':
            runner.test()
        else:
            runner.prepare()
            runner.load_or_resume()
        found = {name: local(value) for name, value in runner.sharded.engine.sharded_state().items()}
        faults += [f'{work}: {fault}' for fault in differing(found, wanted)]
    return faults


@pytest.mark.parametrize('ranks', [2, pytest.param(4, marks=pytest.mark.slow)])
def test_broken_runs_end_as_the_unbroken_one(tmp_path: Path, ranks: int) -> None:
    for case, faults in merged(run_ranks(ranks, goes_on, str(tmp_path))).items():
        assert not faults, f'{case}: {faults}'


def a_full_disk(folder: str) -> Faults:
    """Rank 1 cannot write its second checkpoint: told on every rank; in the background training goes on."""
    found: Faults = {}
    real = sharded_save.FileSystemWriter.write_data

    def full(self: Any, *args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == 1 and 'epoch_2' in str(self.path):
            raise OSError(28, 'No space left on device')
        return real(self, *args, **kwargs)

    sharded_save.FileSystemWriter.write_data = full
    for name, checkpoint in (('sync', SHARDED), ('async', dict(SHARDED, async_save=True))):
        faults = found[name] = []
        kept = dict(checkpoint=dict(type='CheckpointHook', interval=1, max_keep_ckpts=1))
        runner = runner_of(f'{folder}/{name}', 'stage 3', 2, checkpoint, default_hooks=kept)
        if name == 'sync':
            with refused(faults, CheckpointError, 'rank 1', 'No space left on device', 'epoch_2'):
                runner.train()
        else:
            runner.train()
            if runner.iter != runner.max_iters:
                faults.append('training ended')
        dist.barrier()
        names = sorted(item.name for item in Path(folder, name).iterdir() if item.name.startswith('epoch'))
        faults += [] if names == ['epoch_1'] else [f'{names}']
        faults += named_last(f'{folder}/{name}', 'epoch_1')
    sharded_save.FileSystemWriter.write_data = real
    return found


def a_slow_rank(folder: str) -> Faults:
    """Rank 1 comes late to each save, and writes slowly: the others wait, beside training or not."""
    found: Faults = {}
    real = sharded_save.FileSystemWriter.write_data

    def slowly(self: Any, *args: Any, **kwargs: Any) -> Any:
        time.sleep(0.5 * dist.get_rank())
        return real(self, *args, **kwargs)

    class Late(Hook):
        priority = 'VERY_HIGH'

        def after_train_epoch(self, runner: Any) -> None:
            time.sleep(0.5 * dist.get_rank())

    with (
        patch.object(sharded_save.FileSystemWriter, 'write_data', slowly),
        patch('mmzero.engines.meeting.PATIENCE_SECONDS', 0.05),
    ):
        for name, checkpoint in (('sync', SHARDED), ('async', dict(SHARDED, async_save=True))):
            runner = runner_of(f'{folder}/{name}', 'stage 3', 2, checkpoint, custom_hooks=[Late()])
            runner.train()
            faults = found[name] = [] if runner.iter == runner.max_iters else [f'ended at {runner.iter}']
            dist.barrier()
            faults += [f'{state.path}: {state.fault}' for state in states_of(f'{folder}/{name}') if state.fault]
            faults += named_last(f'{folder}/{name}', 'epoch_2')
    return found


def states_of(folder: str) -> list[FolderState]:
    return [state_of(Path(folder, name)) for name in ('epoch_1', 'epoch_2')]


def test_a_slow_rank_is_waited_for(tmp_path: Path) -> None:
    for case, faults in merged(run_ranks(2, a_slow_rank, str(tmp_path))).items():
        assert not faults, f'{case}: {faults}'


def damaged_for_all(folder: str) -> Faults:
    """Each fault of a file of rank 1's is told on every rank, before anything is loaded."""
    runner_of(f'{folder}/run', 'stage 3', 1, SHARDED).train()
    found: Faults = {}
    for how in ('missing', 'cut', 'flipped'):
        faults, path = found.setdefault(how, []), Path(folder, how)
        if dist.get_rank() == 0:
            shutil.copytree(f'{folder}/run/epoch_1', path)
            damage(path, '__1_0.distcp', how)
        dist.barrier()
        with refused(faults, CheckpointError, str(path), '__1_0.distcp'):
            runner_of(f'{folder}/again', 'stage 3', 2, SHARDED, load_from=str(path), resume=True).train()
    return found


def test_damage_is_told_on_every_rank(tmp_path: Path) -> None:
    for case, faults in merged(run_ranks(2, damaged_for_all, str(tmp_path))).items():
        assert not faults, f'{case}: {faults}'


def on_disks_of_their_own(folder: str) -> Faults:
    """Each rank has a disk under the same path."""
    faults: list[str] = []
    path = f'{folder}/disk {dist.get_rank()}/epoch_1'
    with refused(faults, CheckpointError, 'rank 0 does not see __1_0.distcp, which rank 1 has written'):
        sharded_save.save_sharded(dict(a=torch.ones(2) + dist.get_rank(), **own_shard()), {}, path)
    return dict(disks=faults)


def own_shard() -> dict[str, torch.Tensor]:
    mesh = init_device_mesh('cpu', (dist.get_world_size(),))
    return dict(b=distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)]))


def test_disks_that_are_not_shared_are_told(tmp_path: Path) -> None:
    for case, faults in merged(run_ranks(2, on_disks_of_their_own, str(tmp_path))).items():
        assert not faults, f'{case}: {faults}'


def named_last(path: str, wanted: str) -> list[str]:
    last = Path(path, 'last_checkpoint').read_text()
    return [] if last == f'{path}/{wanted}' else [last]


def test_what_cannot_be_written_costs_that_save_alone(tmp_path: Path) -> None:
    for case, faults in merged(run_ranks(2, a_full_disk, str(tmp_path))).items():
        assert not faults, f'{case}: {faults}'


class Counted(nn.Module):
    """Saves a number as extra state."""

    def __init__(self, as_tensor: bool) -> None:
        super().__init__()
        self.as_tensor, self.count = as_tensor, 0

    def get_extra_state(self) -> Any:
        return torch.full((3,), float(self.count)) if self.as_tensor else dict(count=self.count)

    def set_extra_state(self, state: Any) -> None:
        self.count = int(state[0]) if self.as_tensor else state['count']


class Odd(ToyModel):
    """With buffers of its rank, as running statistics are, and extra state."""

    def __init__(self) -> None:
        super().__init__()
        for index in range(4):
            self.register_buffer(f'statistic{index}', torch.zeros(5, dtype=torch.float64 if index else torch.bfloat16))
        self.object, self.tensor = Counted(False), Counted(True)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.training:
            self.object.count += 1
            self.tensor.count += 1
            for index in range(4):
                getattr(self, f'statistic{index}').fill_(10 * index + dist.get_rank() + 1)
        return super().forward(*args, **kwargs)


class Keeps(Hook):
    """Saves weights a second time."""

    def before_save_checkpoint(self, runner: Any, checkpoint: dict) -> None:
        checkpoint['mine'] = dict(copies=[checkpoint['state_dict']['stem.weight']], count=3)


class Puts(Hook):
    """Changes weights as they are loaded."""

    def after_load_checkpoint(self, runner: Any, checkpoint: dict) -> None:
        checkpoint['state_dict']['stem.weight'] = torch.full((12, 12), 4.0)


def odd(folder: str) -> Faults:
    found: Faults = {}
    for name, checkpoint in (('sharded', SHARDED), ('full', 'none')):
        faults, path = found.setdefault(name, []), f'{folder}/{name}'
        plain = dict(checkpoint=checkpoint, model=Odd(), custom_hooks=[Keeps()])
        runner_of(path, 'stage 3', 1, **plain).train()
        plain |= dict(model=Odd(), custom_hooks=[Puts()])
        end = '' if name == 'sharded' else '.pth'
        again = runner_of(f'{path}/2', 'stage 3', 1, load_from=f'{path}/epoch_1{end}', resume=True, **plain)
        again.train()
        model, state = again.sharded.module, again.sharded.engine.sharded_state()
        for index in range(4):
            value = getattr(model, f'statistic{index}')
            faults += [] if (value == 10 * index + 1).all() else [f'statistic{index} is {value}, not of rank 0']
        faults += [] if model.object.count == model.tensor.count == 2 else [f'{model.object.count, model.tensor.count}']
        faults += [] if (local(state['stem.weight']) == 4).all() else ['what a hook had put there is not loaded']
        file = whole_of(f'{path}/epoch_1{end}')
        copy, count = file['mine']['copies'][0], file['mine']['count']
        faults += differing(dict(copy=copy), dict(copy=file['state_dict']['stem.weight']))
        faults += [] if count == 3 else [f'{count}']
        strict = runner_of(f'{path}/3', 'stage 3', 1, checkpoint=checkpoint, model=Odd(), custom_hooks=[])
        strict.prepare()
        strict.load_checkpoint(f'{path}/epoch_1{end}', strict=True)
        count = strict.sharded.module.object.count
        faults += [] if count == 2 else [f'{count} where it is sharded already']
    return found


def whole_of(path: str) -> dict[str, Any]:
    if path.endswith('.pth'):
        return torch.load(path, weights_only=True)
    with scratch_beside(f'{path}-{dist.get_rank()}') as scratch:
        return whole_checkpoint(path, scratch)


def test_what_is_no_shard_is_rank_0s(tmp_path: Path) -> None:
    for case, faults in merged(run_ranks(2, odd, str(tmp_path))).items():
        assert not faults, f'{case}: {faults}'


def converted(folder: str) -> Faults:
    """What a tool made of the folder is what the run would have saved in full, and goes on; and back again."""
    faults: list[str] = []
    full = torch.load(f'{folder}/full.pth', weights_only=True)
    made = torch.load(f'{folder}/made.pth', weights_only=True)
    faults += differing(flat(made), flat(full))
    for part in ('param_schedulers', 'groups', 'loss_scaler'):
        faults += [] if taken(made, part) == taken(full, part) else [f'{part} differs']
    for name in ('made.pth', 'back'):
        runner = runner_of(f'{folder}/{name}-run', 'stage 3', 1, load_from=f'{folder}/{name}', resume=True)
        runner.train()
        runner.saves_shards = False
        runner.save_checkpoint(f'{folder}/{name}-run', 'again.pth', meta=dict(epoch=1, iter=runner.iter))
        dist.barrier()
        again = torch.load(f'{folder}/{name}-run/again.pth', weights_only=True)
        faults += [f'{name}: {fault}' for fault in differing(flat(again), flat(full))]
    return dict(converted=faults)


@pytest.mark.slow
def test_converted(tmp_path: Path) -> None:
    run_ranks(2, saved, str(tmp_path), 'stage 3')
    paths = {name: str(tmp_path / name) for name in ('epoch_1', 'made.pth', 'back', 'made.safetensors', 'half.pth')}
    tool = [sys.executable, 'tools/convert_checkpoint.py']
    run_tool([*tool, paths['epoch_1'], paths['made.pth']])
    run_tool([*tool, paths['made.pth'], paths['back']])
    run_tool([*tool, paths['back'], paths['made.safetensors']])
    run_tool([*tool, paths['made.safetensors'], paths['half.pth'], '--dtype', 'bfloat16'])
    for case, faults in merged(run_ranks(2, converted, str(tmp_path))).items():
        assert not faults, f'{case}: {faults}'
    full = torch.load(tmp_path / 'full.pth', weights_only=True)['state_dict']
    half = torch.load(tmp_path / 'half.pth', weights_only=True)
    assert half.keys() == {'state_dict'}
    wanted = {name: value.bfloat16() if value.is_floating_point() else value for name, value in full.items()}
    assert not differing(half['state_dict'], wanted)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith('.')) == []
    refused_tool = subprocess.run([*tool, paths['epoch_1'], paths['back']], capture_output=True, text=True, check=False)
    assert refused_tool.returncode == 2
    assert 'back exists' in refused_tool.stderr


def run_tool(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr


class Losses(Hook):
    """Keeps the losses of a batch over all ranks."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        loss = outputs['loss'].detach().double() / dist.get_world_size()
        dist.all_reduce(loss)
        self.values.append(float(loss))


def losses_of(folder: str, setting: str, epochs: int, **changes: Any) -> list[float]:
    """Losses of eight samples per step, on any number of ranks, in float32."""
    data = loader(Vectors(40))
    data['sampler']['shuffle'], data['batch_size'] = True, 8 // dist.get_world_size()
    optim = dict(type='OptimWrapper', optimizer=dict(type='SGD', lr=0.05, momentum=0.9), clip_grad=dict(max_norm=0.1))
    runner = runner_of(
        folder,
        setting,
        epochs,
        train_dataloader=data,
        optim_wrapper=optim,
        val_cfg=None,
        val_dataloader=None,
        val_evaluator=None,
        **changes,
    )
    losses = Losses()
    runner.register_hook(losses)
    runner.train()
    return losses.values


def test_losses_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    """The same global batch: the next epoch's losses are those of the unbroken run."""
    whole = run_ranks(2, losses_of, str(tmp_path / 'whole'), 'stage 3', 2)[0]
    assert len(whole) == 10
    first = str(tmp_path / 'whole/epoch_1')
    for ranks, setting in ((4, 'HSDP'), (1, 'stage 1')):
        found = run_ranks(ranks, resumed_losses, str(tmp_path / setting), setting, first)[0]
        assert found == pytest.approx(whole[5:], rel=1e-6)


def resumed_losses(folder: str, setting: str, first: str) -> list[float]:
    return losses_of(folder, setting, 2, load_from=first, resume=True)


@pytest.mark.slow
def test_typos_of_the_tool(tmp_path: Path) -> None:
    run_ranks(1, saved, str(tmp_path), 'stage 3')
    tool = [sys.executable, 'tools/convert_checkpoint.py']
    for source, target, wanted in (
        ('epoch_1', 'x.safetensor', "would be a folder; did you mean '.safetensors'?"),
        ('epoch_2', 'x.pth', 'holds epoch_1, full.pth'),
        ('.', 'x.pth', 'is no complete checkpoint'),
    ):
        done = subprocess.run(
            [*tool, str(tmp_path / source), str(tmp_path / target)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 2
        assert wanted in done.stderr, done.stderr


def resumes_weights(folder: str) -> Faults:
    faults: list[str] = []
    with refused(faults, CheckpointError, 'cannot be resumed: it holds no meta, message_hub'):
        runner_of(f'{folder}/again', 'stage 3', 1, load_from=f'{folder}/weights', resume=True).train()
    return dict(weights=faults)


@pytest.mark.slow
def test_weights_alone_are_not_resumed(tmp_path: Path) -> None:
    run_ranks(1, saved, str(tmp_path), 'stage 3')
    tool = [sys.executable, 'tools/convert_checkpoint.py', str(tmp_path / 'epoch_1'), str(tmp_path / 'weights')]
    run_tool([*tool, '--weights-only'])
    for case, faults in merged(run_ranks(2, resumes_weights, str(tmp_path))).items():
        assert not faults, f'{case}: {faults}'
