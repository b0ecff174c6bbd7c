"""A budget chooses after two iterations, the same on every rank, and keeps to it."""

import contextlib
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mmzero.config import CheckpointingConfig
from mmzero.patches import Budget, KeptBytes, apply_patches
from mmzero.patches.cheapest import cheapest
from tests.patches.test_save import Operators

WIDTH = 16


class Wide(nn.Module):
    """Keeps about three times its inputs."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, x):
        return x + self.layers(x)


class Model(nn.Module):
    def __init__(self, depth=6):
        super().__init__()
        self.blocks = nn.ModuleList(Wide() for _ in range(depth))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Training:
    """Trains a model under a budget, on one rank or as if others had measured something else."""

    def __init__(self, memory, names, others=(), units=()):
        torch.manual_seed(0)
        self.model = Model()
        self.texts = []
        self.regions = apply_patches(self.model, CheckpointingConfig(modules=names)).regions
        gather = lambda own: [own, *(other(own) for other in others)]  # noqa: E731
        self.budget = Budget(self.regions, memory, gather, lambda text, bad: self.texts.append((text, bad)), units)

    def step(self, rows=64):
        """One iteration; says what was kept for backward at the end of forward."""
        kept = KeptBytes()
        with kept.counting(), self.budget.forward():
            loss = self.model(torch.ones(rows, WIDTH))
        loss.backward()
        self.budget.after_step()
        return kept.total

    @property
    def recomputed(self):
        return {name for name, region in self.regions.items() if region.active}


BLOCKS = tuple(f'blocks.{index}' for index in range(6))
ROW = 4 * WIDTH


def kept_without():
    kept = KeptBytes()
    model = Model()
    with kept.counting():
        model(torch.ones(64, WIDTH))
    return kept.total


def test_half():
    training = Training(kept_without() // 2, BLOCKS)
    first, second = training.step(), training.step()
    assert first == second < kept_without() / 2
    assert training.budget.choice is not None
    third = training.step()
    assert second < third <= kept_without() // 2
    assert training.recomputed == training.budget.choice.recomputed
    assert 0 < len(training.recomputed) < 6
    ((text, bad),) = training.texts
    assert not bad and 'a budget of' in text and 'recomputed are' in text and sorted(training.recomputed)[0] in text


def test_iterations_that_measure_keep_no_activations():
    """A model that needs the budget would not survive them; hooks do not see what is held beside them."""
    training = Training(10 * kept_without(), BLOCKS)
    held = []
    for _ in range(3):
        with Operators() as operators, training.budget.forward():
            loss = training.model(torch.ones(64, WIDTH))
        held.append(operators.held())
        loss.backward()
        training.budget.after_step()
    assert held[0] == held[1] < held[2] / 2


def test_forecast_is_what_is_kept():
    training = Training(10 * kept_without(), BLOCKS)
    training.step(), training.step()
    assert training.recomputed == set()
    # The output of each block is the input of the next, which both may keep.
    assert training.step() == pytest.approx(training.budget.choice.peak, rel=0.02)


def test_observed_forwards_hold_no_more_than_recomputed_ones():
    """A model that needs the budget has to get through the iterations that measure."""

    def held(config, budget):
        torch.manual_seed(0)
        model = Model()
        regions = apply_patches(model, config).regions
        made = Budget(regions, 10**9, lambda own: [own], lambda *_: None) if budget else None
        seen = weakref.WeakSet()

        class Tensors(TorchDispatchMode):
            """Notes the storages of all that is computed."""

            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                out = func(*args, **(kwargs or {}))
                if isinstance(out, torch.Tensor):
                    seen.add(out.untyped_storage())
                return out

        with Tensors(), made.forward() if made else contextlib.nullcontext():
            loss = model(torch.ones(64, WIDTH))
        gc.collect()
        return sum(storage.nbytes() for storage in seen), loss

    recomputed, one = held(CheckpointingConfig(modules=BLOCKS), False)
    observed, two = held(CheckpointingConfig(modules=BLOCKS), True)
    assert 0 < recomputed < held(CheckpointingConfig(), False)[0] / 2
    assert observed <= recomputed


def test_gradients_stay():
    plain, training = Model(), Training(kept_without() // 2, BLOCKS)
    plain.load_state_dict(training.model.state_dict())
    for _ in range(4):
        training.step()
        plain(torch.ones(64, WIDTH)).backward()
    for one, other in zip(plain.parameters(), training.model.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_nothing_is_watched_once_the_choice_stands():
    training = Training(kept_without() // 2, BLOCKS)
    for _ in range(3):
        training.step()
    with training.budget.forward():
        assert all(region.observe is None for region in training.regions.values())
        x = torch.ones(2, WIDTH, requires_grad=True)
        # As torch gives it: no hook packs what is saved.
        assert torch.tanh(x).grad_fn._saved_result is not None


def test_even_all_of_them_are_too_many():
    training = Training(1000, BLOCKS)
    training.step(), training.step()
    assert training.recomputed == set(BLOCKS)
    ((text, bad),) = training.texts
    assert bad and 'more than the budget, so all of them are recomputed; give that much' in text


def test_largest_of_all_ranks():
    def twice(own):
        """A rank whose batch is twice as large."""
        from dataclasses import replace

        if isinstance(own, int):
            return 2 * own
        grown = [
            replace(
                one,
                other=2 * one.other,
                modules={
                    name: replace(
                        module, inputs=2 * module.inputs, kept=2 * module.kept, at_once=2 * module.at_once, seconds=9.0
                    )
                    for name, module in one.modules.items()
                },
            )
            for one in own
        ]
        return grown

    alone, beside = Training(kept_without(), BLOCKS), Training(kept_without(), BLOCKS, [twice])
    for training in (alone, beside):
        training.step(), training.step()
    assert len(alone.recomputed) < len(beside.recomputed)


def test_smallest_memory_of_all_ranks():
    """A config in Python may ask each card for its size; ranks that choose differently would hang."""
    memory = 10 * kept_without()
    training = Training(memory, BLOCKS, [lambda own: memory // 20 if own == memory else own])
    training.step(), training.step()
    assert training.budget.memory == memory // 20 and training.recomputed


def test_more_is_kept_than_was_forecast():
    """As where a module keeps other tensors than the observed iterations have shown."""
    memory = kept_without() // 2
    more = lambda own: own + memory // 4 if isinstance(own, int) else own  # noqa: E731
    training = Training(memory, BLOCKS, [more])
    training.step(), training.step()
    before = training.recomputed
    training.step()
    assert len(before) < len(training.recomputed)
    assert len(training.texts) == 2


def test_larger_batches_are_recomputed():
    training = Training(10 * kept_without(), BLOCKS)
    usual = [training.step() for _ in range(3)][-1]
    assert training.step(32) < usual
    # Twice the rows, and less than before.
    assert training.step(128) < usual
    assert training.step() == usual
    assert [bad for _, bad in training.texts] == [False, True]
    assert 'a batch is larger than those' in training.texts[-1][0]


def test_modules_that_hold_units_keep_to_the_choice():
    """Ranks would gather the units inside in different numbers."""
    training = Training(10 * kept_without(), BLOCKS, units=('blocks.0', 'blocks.1.layers', 'blocks.1.layers.0'))
    for _ in range(3):
        training.step()
    assert [region.largest for region in training.regions.values()] == [4096, None, 4096, 4096, 4096, 4096]


@pytest.mark.parametrize('norm', [nn.SyncBatchNorm, type('NaiveSyncBatchNorm', (nn.Identity,), {})])
def test_modules_whose_norms_communicate_keep_to_the_choice(norm):
    """A recompute on one rank alone would wait for the others."""
    training = Training(10 * kept_without(), ())
    training.model.blocks[2].norm = norm(4)
    training.regions = apply_patches(training.model, CheckpointingConfig(modules=BLOCKS)).regions
    training.budget = Budget(training.regions, 10 * kept_without(), lambda own: [own], lambda *_: None)
    training.step(), training.step()
    assert [region.largest for region in training.regions.values()] == [4096, 4096, None, 4096, 4096, 4096]


def test_of_nested_modules_the_inner_ones():
    training = Training(10 * kept_without(), ('blocks.0', 'blocks.0.layers', 'blocks.1'))
    assert not training.regions['blocks.0'].active
    training.step(), training.step()
    assert training.budget.choice.recomputed == frozenset()


def test_what_is_compiled_or_idle_stays_recomputed_and_is_told():
    """torch.compile takes no contexts of a checkpoint but its own, so that such modules cannot be measured."""
    training = Training(10 * kept_without(), BLOCKS)
    training.model.blocks[1].compile(backend='eager')
    training.model.blocks = training.model.blocks[:5]
    for _ in range(4):
        training.step()
    assert training.recomputed == {'blocks.1', 'blocks.5'}
    ((text, bad),) = training.texts
    assert not bad and 'not measured, and recomputed as they were: blocks.1, blocks.5' in text


def test_a_frozen_module_keeps_nothing():
    """Nor do its inputs stay, since there is nothing to recompute."""
    training = Training(10 * kept_without(), BLOCKS)
    for block in training.model.blocks[:3]:
        block.requires_grad_(False)
    training.step(), training.step()
    needed = training.budget._other + sum(module.kept for module in training.budget._modules)
    choice = cheapest(training.budget._modules, training.budget._other, needed + 100)
    assert choice is not None and not choice.recomputed and choice.peak == needed


def test_what_is_offloaded_is_not_on_the_device(monkeypatch):
    monkeypatch.setattr('mmzero.patches.offload.SMALLEST', 1)
    training = Training(10 * kept_without(), ())
    training.regions = apply_patches(training.model, CheckpointingConfig(modules=BLOCKS, offload='cpu')).regions
    training.budget = Budget(training.regions, 10 * kept_without(), lambda own: [own], lambda *_: None)
    recomputing = [training.step() for _ in range(2)]
    assert [module.inputs for module in training.budget._modules] == [0] * 6
    assert recomputing == [training.budget._other] * 2 and recomputing[0] > 0
    assert training.step() == pytest.approx(training.budget.choice.peak, rel=0.02)


def test_a_tensor_that_many_modules_get():
    """The memory of a decoder stays for as long as one of its layers is recomputed; it is no layer's own."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x, memory):
            return self.linear(x).tanh() * memory

    class Decoder(Model):
        def __init__(self):
            super().__init__(0)
            self.blocks = nn.ModuleList(Layer() for _ in range(6))

        def forward(self, x):
            memory = 2 * x.repeat(1, 1)
            for block in self.blocks:
                x = block(x, memory=memory)
            return x.square().mean()

    training = Training(10**9, ())
    training.model = Decoder()
    training.regions = apply_patches(training.model, CheckpointingConfig(modules=BLOCKS)).regions
    training.budget = Budget(training.regions, 10**9, lambda own: [own], lambda *_: None)
    for _ in range(2):
        recomputing = training.step()
    tensor = 64 * ROW
    # Inputs of six layers, the memory, the last output.
    assert recomputing == pytest.approx(8 * tensor, rel=0.01)
    modules = training.budget._modules
    assert [module.inputs for module in modules[1:]] == [tensor] * 5
    assert training.step() == pytest.approx(training.budget.choice.peak, rel=0.02)
