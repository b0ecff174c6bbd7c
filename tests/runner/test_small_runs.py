"""What users do with a runner besides one training from a config file."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.optim import OptimWrapper
from torch import nn

from mmzero.errors import CheckpointError, ConfigError, NonFiniteError
from tests.models import ToyModel
from tests.vectors import Vectors, loader, vector_runner

pytestmark = pytest.mark.usefixtures('group')


def weights(runner: Any) -> dict[str, torch.Tensor]:
    state = runner.model.engine.model_state()
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def save_weights(path: Path, model: nn.Module, **meta: Any) -> str:
    torch.save(dict(state_dict=model.state_dict(), **meta), path)
    return str(path)


def test_train_then_test_and_val(tmp_path: Path) -> None:
    runner = vector_runner(tmp_path)
    runner.train()
    assert runner.test() == runner.val() == dict(count=6)


def test_a_built_optim_wrapper_is_refused(tmp_path: Path) -> None:
    model = ToyModel()
    with pytest.raises(ConfigError, match='optim_wrapper: was built before the model is sharded'):
        vector_runner(tmp_path, model, optim_wrapper=OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1)))


class Initialised(ToyModel):
    """Counts calls of init_weights."""

    calls = 0

    def init_weights(self) -> None:
        type(self).calls += 1


def test_weights_are_initialised_once_for_training_and_not_for_testing_a_checkpoint(tmp_path: Path) -> None:
    runner = vector_runner(tmp_path, Initialised())
    runner.val()
    runner.train()
    assert Initialised.calls == 1
    file = save_weights(tmp_path / 'weights.pth', ToyModel())
    vector_runner(tmp_path, Initialised(), load_from=file).test()
    assert Initialised.calls == 1


def test_load_from_frees_the_file_and_loads_again(tmp_path: Path) -> None:
    source = ToyModel()
    file = save_weights(tmp_path / 'weights.pth', source)
    runner = vector_runner(tmp_path, load_from=file)
    runner.train()
    assert runner._read is None
    assert not torch.equal(weights(runner)['stem.weight'], source.stem.weight)
    runner.load_checkpoint(file)
    assert all(torch.equal(value, source.state_dict()[name]) for name, value in weights(runner).items())


@pytest.mark.parametrize('sharded', [False, True])
def test_names_that_fit_with_shapes_that_do_not(tmp_path: Path, sharded: bool) -> None:
    file = save_weights(tmp_path / 'wide.pth', ToyModel(width=24, classes=9, scalar=False))
    runner = vector_runner(tmp_path, ToyModel(scalar=False), load_from=None if sharded else file)
    runner.model.unused = nn.Identity()
    runner.model.frozen = nn.Identity()
    with pytest.raises(CheckpointError, match=r'no weight has the shape that the model wants; .* is \(24'):
        runner.train()
        runner.load_checkpoint(file)


@pytest.mark.parametrize('sharded', [False, True])
def test_a_head_of_another_size_is_left(tmp_path: Path, sharded: bool) -> None:
    source = ToyModel(classes=9)
    file = save_weights(tmp_path / 'nine.pth', source)
    runner = vector_runner(tmp_path, load_from=None if sharded else file)
    runner.prepare()
    if sharded:
        runner.load_checkpoint(file)
    assert torch.equal(weights(runner)['stem.weight'], source.stem.weight)
    with pytest.raises(CheckpointError, match=r'not fit the model:\n  size mismatch for head.weight: .*\n.* tied.w'):
        runner.load_checkpoint(file, strict=True)


class ReadsWhileBuilt(ToyModel):
    """Reads a parameter's value in its constructor."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = float(self.stem.weight.max())


class Outside(ToyModel):
    """Keeps a teacher where torch does not see it."""

    def __init__(self) -> None:
        super().__init__()
        self.__dict__['teacher'] = nn.Linear(2, 2)


def test_a_model_that_reads_its_weights_while_built(tmp_path: Path) -> None:
    vector_runner(tmp_path, dict(type=ReadsWhileBuilt)).train()


def test_a_module_outside_of_the_tree_is_told(tmp_path: Path) -> None:
    runner = vector_runner(tmp_path, dict(type=Outside), log_level='WARNING')
    runner.train()
    text = ' '.join(path.read_text() for path in tmp_path.rglob('*.log'))
    assert 'model.teacher lies outside of the module tree: its 6 parameters are whole on every rank' in text


class Extra(ToyModel):
    """Has extra state and an attribute named module."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(12, 12)
        self.extra: Any = None

    def get_extra_state(self) -> Any:
        return dict(seen=3)

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def test_extra_state_and_an_attribute_named_module(tmp_path: Path) -> None:
    vector_runner(tmp_path, Extra()).train()
    saved = torch.load(tmp_path / 'epoch_1.pth', weights_only=True)
    assert saved['state_dict']['_extra_state'] == dict(seen=3)
    runner = vector_runner(tmp_path, Extra(), load_from=str(tmp_path / 'epoch_1.pth'))
    runner.prepare()
    assert torch.equal(weights(runner)['module.weight'], saved['state_dict']['module.weight'])
    assert runner.model.module.extra == dict(seen=3)


class OnlyModule(BaseModel):
    """Has one child, which is called as DDP's is, and a part of which is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.module = ToyModel()
        self.module.stem = torch.compile(self.module.stem, backend='eager')

    def init_weights(self) -> None:
        """MMEngine's own does not know compiled parts."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


PREFIXES = ('', 'module.', '_orig_mod.', 'module._orig_mod.', '_fsdp_wrapped_module.module.', 'module.module.')


@pytest.mark.parametrize('stage', [0, 1, 2, 3])
def test_prefixes_of_wrappers(tmp_path: Path, stage: int) -> None:
    """None in ours; all understood, before and after sharding; a child of that name is the model's own."""
    wrapper = dict(find_unused_parameters=True)
    trained = vector_runner(tmp_path, OnlyModule(), stage, wrapper)
    trained.train()
    saved = torch.load(tmp_path / 'epoch_1.pth', weights_only=True)['state_dict']
    assert saved.keys() == {f'module.{name}' for name in ToyModel().state_dict()}
    for prefix in PREFIXES:
        file = str(tmp_path / 'other.pth')
        torch.save({prefix + name: value for name, value in saved.items()}, file)
        for before in (True, False):
            runner = vector_runner(tmp_path, OnlyModule(), stage, wrapper, load_from=file if before else None)
            runner.prepare()
            if not before:
                runner.load_checkpoint(file, strict=True)
            found = {name.replace('_orig_mod.', ''): value for name, value in weights(runner).items()}
            assert found.keys() == saved.keys()
            assert all(torch.equal(value, saved[name]) for name, value in found.items()), prefix
    resumed = vector_runner(tmp_path, OnlyModule(), stage, wrapper, resume=True)
    resumed.train()
    assert resumed.epoch == 1


def test_resuming_within_a_step_says_what_is_lost(tmp_path: Path) -> None:
    """As under MMEngine, whose checkpoints do not hold gradients of a step that is not complete either."""
    optim = dict(type='OptimWrapper', optimizer=dict(type='SGD', lr=0.01), accumulative_counts=2)
    vector_runner(tmp_path, optim_wrapper=dict(optim)).train()
    resumed = vector_runner(tmp_path, optim_wrapper=dict(optim), resume=True)
    with patch.object(resumed.logger, 'warning') as warning:
        resumed.train()
    said = [call.args[0] for call in warning.call_args_list]
    assert any('resumed after 1 of 2 micro-batches of a step' in text for text in said), said
    for counts in (3, 1):
        resumed = vector_runner(tmp_path, optim_wrapper=dict(optim, accumulative_counts=counts), resume=True)
        with patch.object(resumed.logger, 'warning') as warning:
            resumed.train()
        assert not any('micro-batches' in call.args[0] for call in warning.call_args_list)


class Spoiled(Vectors):
    """Some of the vectors are not numbers."""

    def __init__(self, size: int, bad: tuple[int, ...]) -> None:
        super().__init__(size)
        self.bad = bad

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        data = super().__getitem__(index)
        return dict(data, inputs=data['inputs'] * float('nan')) if index in self.bad else data


def test_steps_that_are_not_finite_are_counted_over_a_resume_and_end_a_run(tmp_path: Path) -> None:
    spoiled = loader(Spoiled(6, bad=(2,)))
    first = vector_runner(tmp_path, train_dataloader=spoiled)
    first.train()
    assert first.message_hub.get_scalar('train/skipped_steps').current() == 1
    assert all(value.isfinite().all() for value in weights(first).values())
    resumed = vector_runner(
        tmp_path, train_dataloader=spoiled, resume=True, train_cfg=dict(by_epoch=True, max_epochs=2, val_interval=1)
    )
    resumed.train()
    assert resumed.message_hub.get_scalar('train/skipped_steps').current() == 2
    optim = dict(type='OptimWrapper', optimizer=dict(type='SGD', lr=0.01), max_skips=1)
    runner = vector_runner(tmp_path, train_dataloader=loader(Spoiled(6, bad=(2, 4))), optim_wrapper=optim)
    with pytest.raises(NonFiniteError, match='max_skips: 2 optimizer .* in a row were skipped, 1 are'):
        runner.train()


class DropsTheBias(Hook):
    """Edits the checkpoint, as hooks of projects do."""

    def before_save_checkpoint(self, runner: Any, checkpoint: dict) -> None:
        del checkpoint['state_dict']['stem.bias']


def test_hooks_edit_the_checkpoint(tmp_path: Path) -> None:
    vector_runner(tmp_path, custom_hooks=[DropsTheBias()]).train()
    assert 'stem.bias' not in torch.load(tmp_path / 'epoch_1.pth')['state_dict']


def test_checkpointing_a_list_of_modules_is_refused(tmp_path: Path) -> None:
    wrapper = dict(activation_checkpointing=['blocks'])
    with pytest.raises(ConfigError, match='a ModuleList has no forward of its own; name the modules in it'):
        vector_runner(tmp_path, wrapper=wrapper)


@pytest.mark.parametrize('stage', [0, 3])
def test_the_key_compile_compiles_units(tmp_path: Path, stage: int) -> None:
    """And not train_step, as MMEngine's runner would; names in the checkpoint stay."""
    wrapper = dict(find_unused_parameters=True)
    cfg = dict(compile=dict(backend='eager'), model_wrapper_cfg=dict(type='ZeroModelWrapper', stage=stage, **wrapper))
    runner = vector_runner(tmp_path, cfg=cfg)
    runner.train()
    assert [unit.has_run for unit in runner.sharded.compilation.units] == [True] * 3
    assert 'train_step' not in runner.model.__dict__
    saved = torch.load(tmp_path / 'epoch_1.pth', weights_only=True)['state_dict']
    assert saved.keys() == ToyModel().state_dict().keys()
    vector_runner(tmp_path, stage=stage, wrapper=wrapper, resume=True).train()


def test_a_sharded_model_is_refused(tmp_path: Path) -> None:
    model = ToyModel()
    vector_runner(tmp_path, model).prepare()
    with pytest.raises(ConfigError, match='is sharded already'):
        vector_runner(tmp_path, model).prepare()


@pytest.mark.parametrize('wrapper', [dict(precision=dict(reduce_dtype='bfloat16')), dict(mesh=dict(replicate=2))])
def test_what_says_how_to_shard_is_refused_at_stage_0(tmp_path: Path, wrapper: dict) -> None:
    with pytest.raises(ConfigError, match='needs stage 1, 2 or 3'):
        vector_runner(tmp_path, stage=0, wrapper=wrapper)


class FromFile(Vectors):
    """Vectors that name a file."""

    def __init__(self, ann_file: str) -> None:
        super().__init__()


def test_testing_needs_no_training_data(tmp_path: Path) -> None:
    file = save_weights(tmp_path / 'weights.pth', ToyModel())
    lost = loader()
    lost['dataset'] = dict(type=FromFile, ann_file='lost.json')
    runner = vector_runner(tmp_path, load_from=file, train_dataloader=lost)
    assert runner.test() == dict(count=6)
    with pytest.raises(ConfigError, match='no file at lost.json'):
        vector_runner(tmp_path, load_from=file, train_dataloader=lost).train()


def test_the_infinity_norm_is_spelt_as_torch_does(tmp_path: Path) -> None:
    optim_wrapper = dict(
        type='OptimWrapper', optimizer=dict(type='SGD', lr=0.1), clip_grad=dict(max_norm=1.0, norm_type='inf')
    )
    runner = vector_runner(tmp_path, optim_wrapper=optim_wrapper, val_dataloader=None, val_cfg=None, val_evaluator=None)
    runner.train()
    assert runner.message_hub.get_scalar('train/grad_norm').current() > 0
