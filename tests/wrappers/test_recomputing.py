"""What the wrapper makes of ``activation_checkpointing``: a policy's choice, a budget, and what it tells."""

import functools

import pytest
import torch

import mmzero.wrappers.model
from mmzero import ZeroModelWrapper, ZeroOptimWrapper
from mmzero.config import CheckpointingConfig
from mmzero.errors import PlanError
from mmzero.wrappers.regions import chosen_regions
from tests.distributed.ranks import run_ranks
from tests.models import ToyModel, toy_batch

BLOCKS = dict(type='ModuleClassPolicy', classes=['Block'])


def active(model) -> list[str]:
    return [name for name, region in model.patched.regions.items() if region.active]


@pytest.mark.parametrize(
    ('fields', 'regions'),
    [
        (dict(policy=BLOCKS), ['blocks.0', 'blocks.1', 'blocks.2']),
        (dict(policy=BLOCKS, every=2), ['blocks.0', 'blocks.2']),
        (dict(policy=BLOCKS, every=3, modules=['stem']), ['stem', 'blocks.0']),
        (dict(modules=['stem'], save='all', offload='cpu'), ['stem']),
    ],
)
def test_policy(wrap, optim_of, fields, regions):
    model = wrap(activation_checkpointing=fields)
    assert list(model.patched.regions) == regions
    model.train_step(toy_batch(0), optim_of(model))
    assert model.patched.never_run() == ()


@pytest.mark.parametrize(
    ('policy', 'fault'),
    [
        ('AutPolicy', "no wrap policy 'AutPolicy'; did you mean 'AutoPolicy'"),
        (dict(type='ModuleClassPolicy', classes=['Blok']), "did you mean 'Block'"),
        (dict(type='DepthPolicy', depth=9), 'activation_checkpointing.policy: '),
    ],
)
def test_policy_that_cannot_be_used(policy, fault):
    with pytest.raises(PlanError, match=r'activation_checkpointing\.policy: ') as caught:
        chosen_regions(ToyModel(), CheckpointingConfig(policy=policy))
    assert fault in str(caught.value)


@pytest.mark.parametrize(
    ('fields', 'regions'), [({}, ('blocks.0', 'blocks.1', 'blocks.2')), (dict(modules=('stem',)), ())]
)
def test_a_budget_chooses_among_what_is_named(fields, regions):
    """Its default policy would add others, and the blocks in a named module would take its place."""
    assert chosen_regions(ToyModel(), CheckpointingConfig(type='Budget', memory=1000, **fields)) == regions


def test_module_whose_forward_is_never_called_is_told(wrap, optim_of, monkeypatch):
    texts = []
    monkeypatch.setattr(mmzero.wrappers.model, 'print_log', lambda text, level, **_: texts.append((level, text)))
    net = ToyModel()
    net.idle = torch.nn.Linear(2, 2).requires_grad_(False)
    model = wrap(net, activation_checkpointing=['idle', 'stem'])
    optim = optim_of(model)
    for step in range(2):
        model.train_step(toy_batch(step), optim)
    ((level, text),) = [entry for entry in texts if 'was called' in entry[1]]
    assert level == 30 and 'no forward of idle was called in the first iteration' in text


def test_a_train_step_that_is_not_called_is_told(wrap, optim_of, monkeypatch):
    class Steps(ToyModel):
        def train_step(self, data, optim_wrapper):
            raise AssertionError('called')

    texts = []
    monkeypatch.setattr(mmzero.wrappers.model, 'print_log', lambda text, level, **_: texts.append((level, text)))
    model = wrap(Steps())
    optim = optim_of(model)
    for step in range(2):
        model.train_step(toy_batch(step), optim)
    ((level, text),) = [entry for entry in texts if 'is not called' in entry[1]]
    assert level == 30 and 'the train_step of Steps is not called' in text


def test_expandable_segments(wrap, monkeypatch):
    settings = []
    wrap()  # makes the process group
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch._C, '_accelerator_setAllocatorSettings', settings.append)
    monkeypatch.setattr(mmzero.wrappers.model, 'build_engine', lambda config: 1 / 0)
    for wanted in (False, True):
        with pytest.raises(ZeroDivisionError):
            wrap(expandable_segments=wanted)
        assert settings == ['expandable_segments:True'] * wanted


def choose(unequal: bool) -> tuple[list[str], list[float], str]:
    """Train under a budget; ranks measure other times, and with ``unequal`` other sizes."""
    texts: list[str] = []
    mmzero.wrappers.model.print_log = lambda text, **_: texts.append(text)
    torch.manual_seed(0)
    rank = torch.distributed.get_rank()
    budget = dict(type='Budget', memory='2.4kB', policy=BLOCKS)
    model = ZeroModelWrapper(module=ToyModel(scalar=False), wrap_policy=BLOCKS, activation_checkpointing=budget)
    optim = ZeroOptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    optim.initialize_count_status(model, 0, 100)
    losses = []
    for step in range(5):
        batch = toy_batch(step)
        if unequal and rank:
            batch = {key: value[:2] for key, value in batch.items()}
        losses.append(float(model.train_step(batch, optim)['loss'].detach()))
    return active(model), losses, next((text for text in texts if 'a budget of' in text), '')


@pytest.mark.distributed
@pytest.mark.parametrize('unequal', [False, True])
def test_budget_is_the_same_on_all_ranks(unequal: bool) -> None:
    (chosen, losses, told), (others, other_losses, not_told) = run_ranks(2, functools.partial(choose, unequal))
    assert chosen == others and 0 < len(chosen) < 3
    assert 'a budget of' in told and not_told == ''
    assert all(map(torch.isfinite, torch.tensor(losses + other_losses)))
