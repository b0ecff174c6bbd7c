"""Models with two optimizers train as under MMSeparateDistributedDataParallel, and where that cannot, as by hand."""

import copy
import functools
import itertools
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from mmengine.optim import OptimWrapperDict
from mmengine.optim.scheduler import CosineAnnealingLR, StepLR
from torch import nn

from mmzero import ZeroOptimWrapper
from mmzero.errors import ConfigError, NonFiniteError, PlanError
from tests.distributed import parity
from tests.distributed.cases import Faults, differing, merged, refused, same_on_all_ranks
from tests.distributed.gan import (
    Averaging,
    Bare,
    Gan,
    Network,
    Peeking,
    Penalised,
    PenalisedAlone,
    adams,
    build_gan_pair,
    gan_batch,
    named,
    train_by_hand,
    train_gan,
)
from tests.distributed.parity import BOUNDS
from tests.distributed.ranks import run_ranks
from tests.distributed.test_float16 import BOUNDS as HALF_BOUNDS
from tests.distributed.test_float16 import SCALE
from tests.distributed.training import compare, full

pytestmark = pytest.mark.distributed

LAYERS = dict(type='ModuleClassPolicy', classes=['Layer'])
SETTINGS = [(stage, units) for stage in range(4) for units in ('blocks', 'root') if stage or units == 'blocks']
NORM, VALUE = dict(clip_grad=dict(max_norm=0.1)), dict(clip_grad=dict(type='value', clip_value=0.01))

# What stock DDP can do.
CELLS: dict[str, tuple[Callable, dict]] = {
    'each step': (Gan, dict(generator=NORM, discriminator=VALUE)),
    'every third step': (functools.partial(Gan, 3), dict(generator=NORM, discriminator=NORM)),
    'not frozen': (functools.partial(Gan, 1, False), dict(generator=NORM, discriminator=NORM)),
    'accumulating': (
        functools.partial(Gan, 1, False),
        dict(generator=dict(accumulative_counts=3, **NORM), discriminator=dict(accumulative_counts=2, **VALUE)),
    ),
}
BY_HAND: dict[str, tuple[Callable, dict]] = {
    'frozen and accumulating': (
        Gan,
        dict(generator=dict(accumulative_counts=2, **NORM), discriminator=dict(accumulative_counts=3, **NORM)),
    ),
    'two backwards': (functools.partial(Gan, 1, True, 2), dict(generator=NORM, discriminator=NORM)),
    'penalties on gradients': (Penalised, dict(generator=NORM, discriminator=NORM)),
    'penalties that come by weights': (PenalisedAlone, dict(generator=NORM, discriminator=NORM)),
    'forwards around steps': (Peeking, dict(generator=NORM, discriminator=NORM)),
}


def fields_of(stage: int, units: str, **more: Any) -> dict:
    return dict(stage=stage, wrap_policy=LAYERS if units == 'blocks' else None, **more)


def both_schedulers(optim: OptimWrapperDict) -> list:
    return [StepLR(optim['generator'], 2, by_epoch=False), CosineAnnealingLR(optim['discriminator'], 9, by_epoch=False)]


def cells_on_rank(unused: bool, every: bool) -> list[tuple[tuple, dict[str, float]]]:
    """Runs on every rank: distances from MMSeparateDistributedDataParallel."""
    found = []
    for name, (build, optim) in CELLS.items():
        reference = train_gan(build, {}, optim, 6, scheduler=both_schedulers)
        # All settings for one, and those that are driven differently for the others.
        for stage, units in SETTINGS if name == 'each step' or every else [(0, 'blocks'), (1, 'root'), (3, 'blocks')]:
            fields = fields_of(stage, units, find_unused_parameters=unused)
            record = train_gan(build, fields, optim, 6, scheduler=both_schedulers)
            assert record['lr'] == reference['lr']
            found.append(((f'stage {stage}', units), compare(record, reference)))
    return found


@pytest.mark.parametrize('ranks', [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize('unused', [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize('every', [False, pytest.param(True, marks=pytest.mark.slow)])
def test_cells(ranks: int, unused: bool, every: bool) -> None:
    """Clipping each, accumulation of each, schedulers of each, frozen and not, the generator in some steps alone."""
    results = run_ranks(ranks, cells_on_rank, unused, every)
    cells = [
        (('gan', str(ranks), *key), {what: max(rank[index][1][what] for rank in results) for what in BOUNDS})
        for index, (key, _) in enumerate(results[0])
    ]
    parity.MEASURED += cells
    wrong = [fault for row, values in cells for fault in beyond(values, BOUNDS, row)]
    assert not wrong, '\n'.join(wrong)


def beyond(found: dict[str, float], bounds: dict[str, float], said: Any) -> list[str]:
    return [f'{said}: {what} {value:.1e}' for what, value in found.items() if not value <= bounds[what]]


def by_hand(build: Callable, optim: dict) -> list[str]:
    reference = train_by_hand(build, {}, optim, 4)
    faults = []
    for stage, units in SETTINGS:
        found = compare(train_gan(build, fields_of(stage, units), optim, 4), reference)
        faults += beyond(found, BOUNDS, (stage, units))
    return faults


def stock_ranks_drift() -> list[str]:
    """[Note: without DDP] A second backward is each rank's own under stock DDP."""
    after = train_gan(functools.partial(Gan, 1, True, 2), {}, {}, 1)['after']
    drifts = bool(same_on_all_ranks(after))
    return [] if drifts == bool(dist.get_rank()) else ['stock DDP averages a second backward; mmzero may, too']


def stock_marks_twice() -> list[str]:
    """[Note: without DDP] Nor can it accumulate while one of two networks is frozen."""
    faults: list[str] = []
    build, optim = BY_HAND['frozen and accumulating']
    with refused(faults, RuntimeError, 'mark a variable ready only once'):
        train_gan(build, {}, optim, 6)
    return faults


def in_half(dtype: str) -> list[str]:
    options = dict(dtype=dtype, **NORM, **(dict(loss_scale=SCALE) if dtype == 'float16' else {}))
    optim = dict(generator=options, discriminator=options)
    reference = train_gan(Gan, {}, optim, 5)
    faults = []
    for stage in (0, 1, 3):
        more = dict(precision=dict(param_dtype=dtype)) if stage else {}
        found = compare(train_gan(Gan, fields_of(stage, 'blocks', **more), optim, 5), reference)
        bounds = {what: bound * (8 if dtype == 'bfloat16' else 1) for what, bound in HALF_BOUNDS.items()}
        faults += beyond(found, bounds, stage)
    return faults


def one_overflows() -> list[str]:
    """In one optimizer on one rank: that one skips on all ranks, and the other steps."""
    faults = []
    options = dict(dtype='float16', loss_scale=SCALE)
    for stage, key in itertools.product((0, 1, 3), ('generator', 'discriminator')):
        torch.manual_seed(0)
        more = dict(precision=dict(param_dtype='float16')) if stage else {}
        fields = fields_of(stage, 'blocks', **more)
        model, optim = build_gan_pair(Gan(), adams, fields, dict(generator=options, discriminator=options))
        before = {name: full(param) for name, param in named(model).items()}
        factor = float('inf') if dist.get_rank() == 1 else 1.0
        spoilt = model.module.get_submodule(f'{key}.layers.1').register_full_backward_pre_hook(
            lambda _, grads, factor=factor: tuple(grad * factor for grad in grads)
        )
        if key == 'discriminator':
            # The generator's gradients come through it.
            model.module.critics = 2
        model.train_step(gan_batch(dist.get_rank()), optim)
        spoilt.remove()
        moved = {name.split('.')[0] for name in differing(_whole(model), before)}
        other = 'discriminator' if key == 'generator' else 'perceptual'
        if key in moved or (key == 'generator' and other not in moved):
            faults.append(f'stage {stage}, {key}: {moved} moved')
        scales = {name: one.engine.scaler_state()['scale'] for name, one in optim.items()}
        if scales[key] != SCALE['init_scale'] / 2:
            faults.append(f'stage {stage}, {key}: {scales}')
        model.module.critics, model.module.count = 1, 0
        model.train_step(gan_batch(dist.get_rank()), optim)
        moved = {name.split('.')[0] for name in differing(_whole(model), before)}
        faults += [] if key in moved else [f'stage {stage}, {key}: the next step is skipped, too']
        faults += same_on_all_ranks(_whole(model))
    return faults


def skipped_with_a_penalty() -> list[str]:
    """The parameters are named, though their units are still gathered at the step."""
    faults: list[str] = []
    for stage in (0, 2, 3):
        options = dict(max_skips=0)
        optimizers = dict(generator=options, discriminator=options)
        model, optim = build_gan_pair(PenalisedAlone(), adams, fields_of(stage, 'blocks'), optimizers)
        batch = gan_batch(dist.get_rank())
        if dist.get_rank() == 1:
            batch['inputs'][0] = float('nan')
        with refused(faults, NonFiniteError, 'the first in backward discriminator.', 'the loss is nan on rank 1'):
            model.train_step(batch, optim)
    return faults


def _whole(model: Any) -> dict[str, torch.Tensor]:
    return {name: full(param) for name, param in named(model).items()}


class Autoencoder(Gan):
    """Two children, one in a container, the other entered by a method, have one optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.encoders = nn.ModuleDict(dict(image=Network(12, 12)))
        self.generator = Decoder(12, 12)

    def train_generator(self, real: torch.Tensor, noise: torch.Tensor, optim: Any) -> dict:
        self.discriminator.requires_grad_(False)
        with optim.optim_context(self):
            fake = self.generator.decode(self.encoders['image'](noise))
            loss = nn.functional.softplus(-self.discriminator(fake)).mean() + (fake - real).square().mean()
        optim.update_params(loss)
        return dict(loss_g=loss.detach())


class Decoder(Network):
    def decode(self, code: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers[1](self.layers[0](self.stem(code)))) + code


def joint(net: nn.Module) -> dict[str, torch.optim.Optimizer]:
    both = [*net.encoders.parameters(), *net.generator.parameters()]
    discriminator = torch.optim.SGD(net.discriminator.parameters(), lr=0.1)
    return dict(generator=torch.optim.AdamW(both, lr=1e-3), discriminator=discriminator)


def halves(net: nn.Module) -> dict[str, torch.optim.Optimizer]:
    """A third optimizer has the layers of the generator."""
    inner = [*net.generator.layers.parameters()]
    ids = {id(param) for param in inner}
    rest = [param for param in net.generator.parameters() if id(param) not in ids]
    return dict(
        generator=torch.optim.AdamW(rest, lr=1e-3),
        discriminator=torch.optim.AdamW(net.discriminator.parameters(), lr=2e-3),
        layers=torch.optim.SGD(inner, lr=0.1, momentum=0.9),
    )


class Halved(Gan):
    """Two optimizers step after one backward, one of them in each second step."""

    def train_generator(self, real: torch.Tensor, noise: torch.Tensor, optim: Any) -> dict:
        found = super().train_generator(real, noise, optim)
        if self.count % 2 == 0:
            self.also.step()
            self.also.zero_grad()
        return found

    def train_step(self, data: dict, optim_wrapper: OptimWrapperDict) -> dict[str, torch.Tensor]:
        self.also = optim_wrapper['layers']
        return super().train_step(data, optim_wrapper)


class OneNetwork(Gan):
    """One network, called as a whole by its own step; backbone and head have an optimizer each."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.generator.requires_grad_(True)
        self.discriminator = Network(12, 3)

    def forward(self, inputs: torch.Tensor, labels: Any = None, mode: str = 'tensor') -> Any:
        out = self.discriminator(self.scale * torch.tanh(self.generator(inputs)))
        return list(out) if mode == 'predict' else out

    def train_step(self, data: dict, optim_wrapper: OptimWrapperDict) -> dict[str, torch.Tensor]:
        first, second = optim_wrapper['generator'], optim_wrapper['discriminator']
        data = self.data_preprocessor(data, True)
        with first.optim_context(self), second.optim_context(self):
            loss = self(data['inputs']).square().mean()
        first.backward(first.scale_loss(loss))
        for one in (first, second):
            one.step()
            one.zero_grad()
        return dict(loss=loss.detach())


def split(net: nn.Module) -> dict[str, torch.optim.Optimizer]:
    return dict(
        generator=torch.optim.SGD([*net.generator.parameters(), net.scale], lr=0.05, momentum=0.9),
        discriminator=torch.optim.AdamW(net.discriminator.parameters(), lr=2e-3),
    )


def shares(build: Callable, optimizers: Callable, optim: dict, unused: bool = False, **more: Any) -> list[str]:
    reference = train_by_hand(build, {}, optim, 6, optimizers=optimizers)
    faults = []
    for stage, units in SETTINGS[:2] + SETTINGS[-2:]:
        fields = fields_of(stage, units, find_unused_parameters=unused, **more)
        found = train_gan(build, fields, optim, 6, optimizers=optimizers)
        faults += beyond(compare(found, reference), BOUNDS, (stage, units, more))
    return faults


def uneven_by_hand() -> dict[str, torch.Tensor]:
    """What four steps give of which the last two have no gradient of rank 1."""
    torch.manual_seed(0)
    with patch.multiple('tests.distributed.gan', MMSeparateDistributedDataParallel=Bare, OptimWrapper=Averaging):
        model, optim = build_gan_pair(Gan(), adams, {}, {})
    for index in range(4):
        counts = dist.get_rank() == 0 or index < 2
        for one in optim.values():
            one.scale_loss = lambda loss, counts=counts: counts * loss
        torch.manual_seed(7)
        model.train_step(gan_batch(10 * (index if counts else 0) + dist.get_rank()), optim)
    return _whole(model)


def uneven() -> list[str]:
    """Rank 0 has more batches; the steps of the other count as zeros, and nobody waits."""
    faults, records = [], [uneven_by_hand()]
    for stage in (0, 1, 3):
        torch.manual_seed(0)
        model, optim = build_gan_pair(Gan(), adams, fields_of(stage, 'blocks'), {})
        torch.manual_seed(5 + dist.get_rank())
        batches = [gan_batch(10 * index + dist.get_rank()) for index in range(4 if dist.get_rank() == 0 else 2)]
        for batch in model.join(batches):
            torch.manual_seed(7)
            model.train_step(batch, optim)
        with torch.no_grad():
            model.eval()
            for batch in model.join(batches, 'val'):
                model.val_step(batch)
        faults += same_on_all_ranks(_whole(model))
        records.append(_whole(model))
    for record in records[1:]:
        for name, value in record.items():
            if not torch.allclose(value, records[0][name], rtol=1e-4, atol=1e-6):
                faults.append(f'{name} is not what it is by hand')
    return faults


def saved() -> list[str]:
    """Bit-equal on another stage, and the next step as without the break."""
    faults = []
    for stage, other in ((3, 1), (1, 0), (0, 3)):
        torch.manual_seed(0)
        model, optim = build_gan_pair(Gan(), adams, fields_of(stage, 'blocks'), {})
        for index in range(2):
            model.train_step(gan_batch(index), optim)
        weights, states = model.engine.model_state(), optim.state_dict()
        torch.manual_seed(1)
        again, fresh = build_gan_pair(Gan(), adams, fields_of(other, 'root'), {})
        again.engine.load_model_state(copy.deepcopy(weights))
        fresh.load_state_dict(copy.deepcopy(states))
        if dist.get_rank() == 0:
            torch.testing.assert_close(again.engine.model_state(), weights, rtol=0, atol=0)
        else:
            again.engine.model_state()
        for name, state in fresh.state_dict().items():
            torch.testing.assert_close(state.get('state'), states[name].get('state'), rtol=0, atol=0)
        for pair in ((model, optim), (again, fresh)):
            torch.manual_seed(3)
            pair[0].train_step(gan_batch(9), pair[1])
        wanted, found = _whole(model), _whole(again)
        off = [name for name, value in found.items() if not torch.allclose(value, wanted[name], atol=1e-6)]
        faults += [f'{stage} to {other}: {name}' for name in off]
    return faults


class Outside(Gan):
    """Trains a parameter that lies in no child."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(12))

    def train_discriminator(self, real: torch.Tensor, noise: torch.Tensor, optim: Any) -> dict:
        return super().train_discriminator(real + self.bias, noise, optim)


def with_bias(net: nn.Module) -> dict[str, torch.optim.Optimizer]:
    found = adams(net)
    found['discriminator'].add_param_group(dict(params=[net.bias]))
    return found


class Sharing(Gan):
    """Both networks have one head's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.discriminator.stem.weight = self.generator.stem.weight


class ReachingIn(Gan):
    """Uses a part of a network by another way than the network."""

    def train_generator(self, real: torch.Tensor, noise: torch.Tensor, optim: Any) -> dict:
        self.generator.stem(real)
        return super().train_generator(real, noise, optim)


def refusals() -> list[str]:
    faults: list[str] = []
    torch.manual_seed(0)
    with refused(faults, ConfigError, 'separate: no child that is called holds the trained bias'):
        build_gan_pair(Outside(), with_bias, dict(stage=3), {})
    # Nothing reduces it under MMEngine's wrapper either.
    after = train_gan(Outside, {}, {}, 2, optimizers=with_bias)['after']
    if not same_on_all_ranks(dict(bias=after['bias'])) and dist.get_rank():
        faults.append('stock DDP averages what lies in no child')
    with refused(faults, ConfigError, 'discriminator.stem.weight are one parameter, of the children'):
        build_gan_pair(Sharing(), adams, dict(stage=0), {})
    with refused(faults, PlanError, 'generator cannot be sharded by itself', 'uses generator.stem'):
        build_gan_pair(ReachingIn(), adams, dict(stage=3), {})
    model, _ = build_gan_pair(Gan(), adams, dict(stage=3), {})
    _, optim = build_gan_pair(Gan(), adams, dict(stage=3), {})
    with refused(faults, ConfigError, 'optim_wrapper.generator: a ZeroOptimWrapper that was not built on this model'):
        model.train_step(gan_batch(0), optim)
    other = Bare(Gan()).module
    with refused(faults, ConfigError, 'holds parameters that no ZeroModelWrapper has sharded'):
        ZeroOptimWrapper(torch.optim.SGD(other.parameters(), lr=0.1))
    return faults


def run_cases() -> Faults:
    accumulating = dict(generator=dict(accumulative_counts=2, **NORM), discriminator=NORM)
    found = {name: by_hand(*case) for name, case in BY_HAND.items()}
    return {
        **found,
        'stock ranks drift': stock_ranks_drift(),
        'stock marks twice': stock_marks_twice(),
        'bfloat16': in_half('bfloat16'),
        'float16': in_half('float16'),
        'one overflows': one_overflows(),
        'skipped with a penalty': skipped_with_a_penalty(),
        'one optimizer of two children': shares(Autoencoder, joint, accumulating),
        'two optimizers in a child, unused': shares(Halved, halves, dict(layers=NORM, **accumulating), True),
        'one network': shares(OneNetwork, split, dict(generator=NORM, discriminator=NORM), separate=False),
        'uneven': uneven(),
        'saved': saved(),
        'refusals': refusals(),
    }


@pytest.mark.slow
@pytest.mark.parametrize('ranks', [2, 4])
def test_two_optimizers(ranks: int) -> None:
    for case, faults in merged(run_ranks(ranks, run_cases)).items():
        assert not faults, f'{case}: {faults[:8]}'
