"""Steps amid gathered units, after errors, of thawed parameters, with odd state and odd norms."""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mmengine.logging import MessageHub
from mmengine.model import BaseModel
from torch import nn, optim

from mmzero import ZeroModelWrapper, ZeroOptimWrapper
from mmzero.errors import CheckpointError, NonFiniteError
from tests.distributed.cases import Faults, by_stage, differing, merged, refused
from tests.distributed.gan import Gan, Penalised, adams, build_gan_pair, gan_batch
from tests.distributed.ranks import run_ranks
from tests.distributed.test_nonfinite import pair, weights
from tests.models import TinyViT, ToyModel, image_batch, toy_batch

pytestmark = pytest.mark.distributed

_numbers = itertools.count()


def forward_alone(model: ZeroModelWrapper) -> None:
    """As in val; at stages 1 and 2 units stay gathered after it."""
    model.eval()
    with torch.no_grad():
        model(toy_batch(0)['inputs'])
    model.train()


def names_while_gathered(_: str, stage: int) -> list[str]:
    """Names that are saved, and of parts, do not depend on what ran last."""
    model, wrapper = pair(ToyModel(), stage)
    model.train_step(toy_batch(dist.get_rank()), wrapper)
    wanted = wrapper.state_dict()
    forward_alone(model)
    found = wrapper.state_dict()
    faults = [] if found.get('param_names') == wanted.get('param_names') else [str(found['param_names'])]
    forward_alone(model)
    again = ZeroOptimWrapper(optim.SGD(wrapper.optimizer.param_groups, lr=0.1), grad_norms=['stem', 'blocks'])
    return faults + ([] if len(again.parts['stem']) == 2 and len(again.parts['blocks']) == 21 else [str(again.parts)])


def a_stand_in_of_nan(_: str, stage: int) -> list[str]:
    """The first batch of the rank that ends early gives nan: its second one stands in."""
    model, wrapper = pair(ToyModel(), stage, max_skips=1)
    mine = [toy_batch(index) for index in range(2 if dist.get_rank() == 0 else 6)]
    if dist.get_rank() == 0:
        mine[0]['inputs'] = mine[0]['inputs'] * float('nan')
    for batch in model.join(mine, 'train'):
        model.train_step(batch, wrapper)
    skipped = wrapper.message_hub.get_scalar('train/skipped_steps').current()
    faults = [] if skipped == 1 else [f'{skipped} steps were skipped']
    options = dict(max_skips=1)
    both, several = build_gan_pair(Gan(), adams, dict(stage=stage), dict(generator=options, discriminator=options))
    for one in several.values():
        one.message_hub = MessageHub(f'odd steps {next(_numbers)}')
        one.initialize_count_status(both, 0, 10)
    mine = [gan_batch(index) for index in range(2 if dist.get_rank() == 0 else 6)]
    if dist.get_rank() == 0:
        mine[0]['inputs'] = mine[0]['inputs'] * float('nan')
    for batch in both.join(mine, 'train'):
        both.train_step(batch, several)
    found = {name: one.message_hub.get_scalar('train/skipped_steps').current() for name, one in several.items()}
    return faults + ([] if found == dict(generator=1, discriminator=1) else [f'{found} steps were skipped'])


def names_amid_penalties(_: str, stage: int) -> list[str]:
    """A penalty on gradients keeps units gathered up to the step that is skipped; the optimizer's path is told."""
    policy = dict(type='ModuleClassPolicy', classes=['Layer'])
    options = dict(max_skips=0, grad_norms='groups')
    wrapper = dict(stage=stage, wrap_policy=policy)
    model, several = build_gan_pair(Penalised(), adams, wrapper, dict(generator=options, discriminator=options))
    hub = MessageHub(f'odd steps {next(_numbers)}')
    for one in several.values():
        one.message_hub = hub
        one.initialize_count_status(model, 0, 10)
    model.train_step(gan_batch(dist.get_rank()), several)
    wanted = {'train/grad_norm/generator.0', 'train/grad_norm/discriminator.0'}
    faults = [] if set(hub.log_scalars) == wanted else [str([*hub.log_scalars])]
    batch = gan_batch(dist.get_rank())
    if dist.get_rank() == 1:
        batch['inputs'][0] = float('nan')
    told = ('optim_wrapper.discriminator.max_skips', '18 of 18 parameters', 'discriminator.head.bias', 'nan on rank 1')
    with refused(faults, NonFiniteError, *told):
        model.train_step(batch, several)
    return faults


def huge_norm_in_float16(_: str, stage: int) -> list[str]:
    """The squares of finite gradients are too large: their norm cannot clip, and nothing moves."""
    fields = dict(precision=dict(param_dtype='float16')) if stage else {}
    options = dict(dtype='float16', loss_scale=1.0, clip_grad=dict(max_norm=1.0))
    model, wrapper = pair(TinyViT(), stage, fields, **options)
    before, finish = weights(model), wrapper.engine.finish_gradients  # type: ignore[attr-defined]

    def finish_and_blow_up(only: Any = None) -> None:
        finish(only)
        for param in model.module.parameters():
            param.grad.add_(1e20)

    wrapper.engine.finish_gradients = finish_and_blow_up  # type: ignore[attr-defined]
    model.train_step(image_batch(dist.get_rank()), wrapper)
    return differing(weights(model), before)


def after_an_error(_: str, stage: int) -> list[str]:
    """Whoever catches an error of the optimizer goes on with the next step."""
    fields = dict(precision=dict(param_dtype='float16')) if stage else {}
    model, wrapper = pair(TinyViT(), stage, fields, dtype='float16', loss_scale=1.0)

    def fail(*_: Any) -> None:
        raise ValueError('on purpose')

    faults: list[str] = []
    handle = wrapper.optimizer.register_step_pre_hook(fail)
    with refused(faults, ValueError, 'on purpose'):
        model.train_step(image_batch(0), wrapper)
    handle.remove()
    wrapper.zero_grad()
    before = weights(model)
    model.train_step(image_batch(0), wrapper)
    return faults + ([] if differing(weights(model), before) else ['does not go on'])


def thawed_and_unused(_: str, stage: int) -> list[str]:
    """What a hook has unfrozen and no rank uses does not move, and norms of parts know what is used."""
    net = ToyModel()
    net.unused.requires_grad_(False)
    net.stem.weight.requires_grad_(False)
    model, wrapper = pair(net, stage, grad_norms=['stem'])
    model.train_step(toy_batch(0), wrapper)
    before = weights(model)
    first = wrapper.message_hub.get_scalar('train/grad_norm/stem').current()
    net.requires_grad_(True)
    model.train_step(toy_batch(0), wrapper)
    second = wrapper.message_hub.get_scalar('train/grad_norm/stem').current()
    faults = [fault for fault in differing(weights(model), before) if 'unused' in fault]
    return faults + ([] if second > 1.2 * first else [f'the norm of stem is {first} without its weight, {second} with'])


def thawed_matrices(_: str, stage: int) -> list[str]:
    """An optimizer is tried on what a hook may unfreeze as well."""
    found = []
    for own in (0, stage):
        torch.manual_seed(0)
        net = TinyViT()
        for param in net.parameters():
            param.requires_grad_(param.dim() < 2)
        model = ZeroModelWrapper(module=net, stage=own)
        wrapper = ZeroOptimWrapper(optim.Adafactor(model.parameters(), lr=0.01))
        wrapper.initialize_count_status(model, 0, 10)
        model.train_step(image_batch(0), wrapper)
        net.requires_grad_(True)
        model.train_step(image_batch(0), wrapper)
        found.append(weights(model))
    off = {name: float((found[1][name] - value).norm() / value.norm()) for name, value in found[0].items()}
    return [f'{name} is {share:.0e} off' for name, share in off.items() if share > 1e-5]


def added_later(_: str, stage: int) -> list[str]:
    """An optimizer is tried again on what a hook adds to it."""
    found = []
    for own in (0, stage):
        torch.manual_seed(0)
        net = TinyViT()
        model = ZeroModelWrapper(module=net, stage=own, find_unused_parameters=True)
        wrapper = ZeroOptimWrapper(optim.Adafactor([*net.norm.parameters()], lr=0.01))
        wrapper.initialize_count_status(model, 0, 10)
        model.train_step(image_batch(0), wrapper)
        wrapper.optimizer.add_param_group(dict(params=[*net.layers.parameters()], lr=0.01))
        model.train_step(image_batch(0), wrapper)
        found.append(weights(model))
    off = {name: float((found[1][name] - value).norm() / value.norm()) for name, value in found[0].items()}
    return [f'{name} is {share:.0e} off' for name, share in off.items() if share > 1e-5]


def val_keeps_nothing(_: str, stage: int) -> list[str]:
    """detect_anomaly looks at training: nothing would clear what val leaves."""
    model, _wrapper = pair(ToyModel(), stage, dict(detect_anomaly=True))
    forward_alone(model)
    kept = len(model.engine.anomalies._flags)  # type: ignore[union-attr]
    return [f'{kept} flags are kept'] if kept else []


class Counting(optim.Optimizer):
    """Elementwise, with a counter that has the shape of a shard of one row, and state for some shards alone."""

    def __init__(self, params: Any, lr: float = 0.1, skips_empty: bool = False) -> None:
        super().__init__(params, dict(lr=lr))
        self.skips_empty = skips_empty

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in (param for group in self.param_groups for param in group['params'] if param.grad is not None):
            if self.skips_empty and not param.numel():
                continue
            state = self.state[param]
            if not state:
                state.update(step=torch.zeros(1), mean=torch.zeros_like(param))
            state['step'] += 1
            state['mean'].lerp_(param.grad, 0.1)
            param.sub_(state['mean'], alpha=self.param_groups[0]['lr'])


class OneRow(BaseModel):
    """Its last layer has one row, so that a rank's shards are empty."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(12, 4), nn.Linear(4, 1)

    def forward(self, inputs: torch.Tensor, labels: Any = None, mode: str = 'tensor') -> Any:
        return dict(loss=self.head(self.stem(inputs)).mean())


def state_of_some_ranks(_: str, stage: int) -> list[str]:
    """Saving does not wait for what other ranks have not."""
    faults: list[str] = []
    for skips_empty in (False, True):
        model = ZeroModelWrapper(module=OneRow(), stage=stage)
        wrapper = ZeroOptimWrapper(Counting(model.parameters(), skips_empty=skips_empty))
        wrapper.initialize_count_status(model, 0, 10)
        model.train_step(toy_batch(0), wrapper)
        if skips_empty and stage:
            with refused(faults, CheckpointError, "rank 1 has no 'mean' of parameter 2"):
                wrapper.state_dict()
            continue
        for index, entries in wrapper.state_dict().get('state', {}).items():
            whole = [*model.module.parameters()][index].shape
            if entries['step'].tolist() != [1.0] or entries['mean'].shape != whole:
                faults.append(f'{index}: {entries}')
    return faults


def other_optimizers(_: str, stage: int) -> list[str]:
    """A checkpoint of another class is refused when it is loaded, not by the first step."""
    faults: list[str] = []
    for first, second, told in (('SGD', 'AdamW', "'betas'"), ('AdamW', 'SGD', "'momentum'"), ('AdamW', 'NAdam', 'mu')):
        saved: dict = {}
        for name in (first, second):
            model = ZeroModelWrapper(module=TinyViT(), stage=stage)
            wrapper = ZeroOptimWrapper(getattr(optim, name)(model.parameters(), lr=0.01))
            wrapper.initialize_count_status(model, 0, 10)
            if name == first:
                model.train_step(image_batch(0), wrapper)
                saved = wrapper.state_dict()
        with refused(faults, CheckpointError, f"another optimizer than this run's {second}", told):
            wrapper.load_state_dict(saved)
    return faults


def run_cases(stages: tuple[int, ...]) -> Faults:
    sharded = tuple(stage for stage in stages if stage)
    every = (
        huge_norm_in_float16,
        after_an_error,
        thawed_and_unused,
        val_keeps_nothing,
        state_of_some_ranks,
        a_stand_in_of_nan,
    )
    some = (added_later, names_while_gathered, names_amid_penalties, thawed_matrices, other_optimizers)
    return {**by_stage(every, stages, ''), **by_stage(some, sharded, '')}


@pytest.mark.parametrize('stages', [(0, 2), pytest.param((1, 3), marks=pytest.mark.slow)])
def test_odd_steps(stages: tuple[int, ...]) -> None:
    for case, faults in merged(run_ranks(2, run_cases, stages)).items():
        assert not faults, f'{case}: {faults}'
