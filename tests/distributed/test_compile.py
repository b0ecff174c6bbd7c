"""Units that torch.compile compiles train as those that run as they are, under the same names."""

import copy
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mmengine.logging import MMLogger
from torch import nn
from torch._dynamo.utils import counters

from mmzero import ZeroModelWrapper, ZeroOptimWrapper
from mmzero.engines.local_parts import LocalParts
from mmzero.engines.watch import COMPILING, watcher
from mmzero.errors import CompileError
from mmzero.policies import ModuleClassPolicy, with_methods
from tests.distributed.cases import Faults, differing, merged, refused
from tests.distributed.compiling import BROKEN, LAYERS, Convs, sized_batch, vit
from tests.distributed.gan import Penalised, train_gan
from tests.distributed.parity import sgd
from tests.distributed.ranks import run_ranks
from tests.distributed.test_methods import Entered
from tests.distributed.training import compare, full, train
from tests.models import image_batch, toy_batch

pytestmark = pytest.mark.distributed

EAGER = dict(backend='eager')
AOT = dict(backend='aot_eager')
BF16 = dict(dtype='bfloat16')


def anew() -> None:
    torch._dynamo.reset()
    counters.clear()


def graphs() -> int:
    return counters['stats']['unique_graphs']


def both(build: Any, batch: Any, fields: dict, optim: dict | None = None, compile: Any = AOT) -> tuple[dict, dict]:
    anew()
    off = dict(compile if isinstance(compile, dict) else {}, disable=True)
    found, reference = (
        train(build, batch, sgd, dict(fields, compile=how), dict(optim or {})) for how in (compile, off)
    )
    return found, reference


# [Fields, those of the optimizer, graphs]
PARITY: dict[str, tuple[dict, dict, int]] = {
    'stage 0': (dict(stage=0), {}, 1),
    'stage 0, recomputed': (dict(stage=0, activation_checkpointing=dict(policy=LAYERS)), {}, 1),
    'stage 1': (dict(stage=1), dict(accumulative_counts=2), 1),
    'stage 2': (dict(stage=2, find_unused_parameters=True), dict(accumulative_counts=2), 1),
    'stage 3': (dict(stage=3), dict(accumulative_counts=2, clip_grad=dict(max_norm=0.1)), 1),
    'recomputed': (dict(stage=3, activation_checkpointing=dict(policy=LAYERS)), {}, 1),
    'matmuls': (dict(stage=3, activation_checkpointing=dict(policy=LAYERS, save='matmuls')), {}, 1),
    'offloaded': (dict(stage=3, activation_checkpointing=dict(policy=LAYERS, offload='cpu')), {}, 1),
    'a part': (dict(stage=3, activation_checkpointing=['layers.0.attention', 'layers.1.attention']), {}, 2),
    'enclosing': (dict(stage=3, activation_checkpointing=['layers.1']), {}, 2),
    'bf16': (dict(stage=3, precision=dict(param_dtype='bfloat16')), BF16, 1),
    'one is left out': (dict(stage=3, overrides=[dict(units='layers.1', compile=False)]), {}, 1),
}


def run_parity() -> Faults:
    faults: Faults = {}
    for name, (fields, optim, wanted) in PARITY.items():
        found, reference = both(vit, image_batch, dict(fields, wrap_policy=LAYERS), optim)
        # Gradients of 16 bit are rounded in another order.
        distances = compare(found, reference) if 'dtype' not in optim else dict(loss=0.0)
        faults[name] = [f'{what}: {off:.1e}' for what, off in distances.items() if off > 1e-6]
        faults[name] += [] if graphs() == wanted else [f'{graphs()} graphs instead of {wanted}']
        faults[name] += [f'breaks: {dict(counters["graph_break"])}'] if counters['graph_break'] else []
    return faults


def test_it_trains_as_without() -> None:
    for case, faults in merged(run_ranks(2, run_parity)).items():
        assert not faults, f'{case}: {faults}'


def wrapped(net: nn.Module, **fields: Any) -> tuple[Any, ZeroOptimWrapper]:
    model = ZeroModelWrapper(module=net, **dict(dict(stage=3, wrap_policy=LAYERS, compile=EAGER), **fields))
    optim = ZeroOptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    optim.initialize_count_status(model, 0, 9)
    return model, optim


def names_and_checkpoints() -> list[str]:
    """Names are those of the bare model, and states fit both ways."""
    anew()
    plain, _ = wrapped(vit(), compile=False)
    model, optim = wrapped(vit())
    for step in range(3):
        model.train_step(image_batch(step), optim)
    faults = [] if [*model.state_dict()] == [*vit().state_dict()] == [*plain.state_dict()] else ['state dict']
    named = [name for name, _ in model.module.named_parameters()]
    faults += [] if named == [name for name, _ in vit().named_parameters()] else ['named_parameters']
    faults += [] if [*map(type, model.module.modules())] == [*map(type, plain.module.modules())] else ['classes']
    saved = {name: full(value) for name, value in model.state_dict().items()}
    plain.load_state_dict(saved)
    back = {name: full(value) for name, value in plain.state_dict().items()}
    faults += differing(back, saved)
    model.load_state_dict(back)
    batch = image_batch(5)
    losses = [each.train_step(batch, wrapper)['loss'] for each, wrapper in ((model, optim), (plain, _))]
    return faults + ([] if torch.equal(*losses) else [f'losses: {losses}'])


def evaluation() -> list[str]:
    """Val and test compile once more, for no gradients; the mirror of an average does not."""
    anew()
    model, optim = wrapped(vit())
    for step in range(3):
        model.train_step(image_batch(step), optim)
    model.engine.refresh()
    mirror = LocalParts(model.module).module
    faults = ['the mirror has a forward'] if any('forward' in module.__dict__ for module in mirror.modules()) else []
    model.eval()
    seen = []
    with torch.no_grad():
        for _ in range(3):
            seen.append([model.val_step(image_batch(7)), graphs()])
            model.test_step(image_batch(7))
    faults += [] if [count for _, count in seen] == [1, 2, 2] else [f'graphs: {[count for _, count in seen]}']
    faults += [] if all(torch.equal(a, b) for a, b in zip(seen[0][0], seen[2][0], strict=True)) else ['predictions']
    return faults


def hooks() -> list[str]:
    """Hooks of users stay outside, and are called as ever."""
    anew()
    calls: list[int] = []
    net = vit()
    for layer in net.layers:
        layer.register_forward_pre_hook(lambda *_: calls.append(len(calls)))
        layer.register_forward_hook(lambda *_: calls.append(len(calls)))
    model, optim = wrapped(net)
    for step in range(3):
        model.train_step(image_batch(step), optim)
    faults = [] if calls == list(range(18)) else [f'calls: {calls}']
    return faults + ([] if graphs() == 1 else [f'{graphs()} graphs'])


def methods() -> list[str]:
    """A method that a unit is entered by runs as it is, and the forward that it runs is compiled."""

    def entered(net: nn.Module) -> Any:
        return with_methods(ModuleClassPolicy(['Part'])(net), {'part': ('plain', 'before')})

    def build() -> nn.Module:
        return Entered(('before', 'plain', 'forward'))

    found, reference = both(build, toy_batch, dict(stage=3, wrap_policy=entered, find_unused_parameters=True))
    faults = [f'{what}: {off:.1e}' for what, off in compare(found, reference).items() if off > 1e-6]
    return faults + ([] if graphs() == 1 else [f'{graphs()} graphs'])


def nested() -> list[str]:
    """A unit that holds others is compiled where a rule says so, and is cut at each of them."""
    fields = dict(
        stage=3,
        wrap_policy=dict(type='ModuleNamePolicy', names=['layers.*', 'layers.*.ffn']),
        overrides=[dict(units='layers.0', compile=True)],
    )
    found, reference = both(vit, image_batch, fields)
    faults = [f'{what}: {off:.1e}' for what, off in compare(found, reference).items() if off > 1e-6]
    return faults + ([] if counters['graph_break'] else ['no graph break'])


def reports() -> list[str]:
    """One report, of rank 0 alone, that says where graphs break; sizes that change compile again, and no more."""
    anew()
    said: list[str] = []
    logger = MMLogger.get_current_instance()
    logger.addFilter(lambda record: said.append(record.getMessage()) or True)  # type: ignore[arg-type, func-returns-value]
    model, optim = wrapped(Convs(), wrap_policy=BROKEN)
    for step in range(6):
        model.train_step(sized_batch(step, 16 if step < 3 else 12 + 4 * (step % 2)), optim)
    told = [text for text in said if text.startswith('compile: ')]
    if dist.get_rank():
        return [f'told: {told}'] if told else []
    if told[:1] != ['compile: compiling 2 units, which may take minutes']:
        return [f'not told beforehand: {told}']
    told = told[1:]
    wanted = ('2 x Broken by eager', 'graph breaks at 1 place(s)', 'compiling.py:', '(forward)')
    faults = [] if len(told) == 1 else [f'told {len(told)} times: {told}']
    return faults + [f'{text!r} is not in {told}' for text in wanted if not all(text in line for line in told)]


def statistics() -> list[str]:
    """Norms in a unit that is recomputed, and whose graph breaks, count a batch once."""
    fields = dict(stage=3, wrap_policy=BROKEN, activation_checkpointing=dict(policy=BROKEN))
    found, reference = both(Convs, sized_batch, fields)
    faults = [f'{what}: {off:.1e}' for what, off in compare(found, reference).items() if off > 1e-6]
    return faults + ([] if graphs() else ['nothing is compiled'])


def failures() -> list[str]:
    """What cannot be compiled ends with the unit and the config's line."""
    faults: list[str] = []

    def fails(*_: Any) -> Any:
        raise RuntimeError('no compiler here')

    for compile, parts in (
        (dict(backend=fails), ("backend 'fails' cannot compile the unit blocks.0 (Broken)", 'no compiler here')),
        (dict(backend='eager', fullgraph=True), ('cannot compile the unit blocks.0 (Broken)', 'fullgraph=False')),
    ):
        for more in ({}, dict(activation_checkpointing=dict(policy=BROKEN))):
            anew()
            model, optim = wrapped(Convs(), wrap_policy=BROKEN, compile=compile, **more)
            model.train_step(sized_batch(0), optim)
            line = "model_wrapper_cfg.overrides=[dict(units='blocks.0', compile=False)]"
            with refused(faults, CompileError, *parts, line):
                model.train_step(sized_batch(0), optim)
            model.engine.refresh()
    return faults


def penalties() -> list[str]:
    """A penalty on gradients differentiates a backward, which no compiled one can be: told, and right with eager."""
    anew()
    faults: list[str] = []
    fields = dict(stage=3, wrap_policy=LAYERS)
    with refused(faults, CompileError, "backend 'aot_eager' compiles backwards", 'create_graph', 'double backward'):
        train_gan(Penalised, dict(fields, compile=AOT), steps=2)
    anew()
    found, reference = (train_gan(Penalised, dict(fields, compile=how), steps=3) for how in (EAGER, False))
    faults += [f'{what}: {off:.1e}' for what, off in compare(found, reference).items() if off > 1e-6]
    return faults + ([] if graphs() else ['nothing is compiled'])


def a_slow_compiler() -> list[str]:
    """A rank that compiles for longer than the watch's limit is waited for."""
    anew()

    def slow(graph: Any, _: Any) -> Any:
        # As a pool of compilers looks on a GPU: the main thread stays where it is.
        time.sleep(5 if dist.get_rank() else 0)
        return graph.forward

    model, optim = wrapped(vit(), compile=dict(backend=slow), watch=1)
    watch: Any = watcher._watch
    watch.on_gpu = True
    for step in range(3):
        model.train_step(image_batch(step), optim)
    return [] if COMPILING.seconds > 4 or not dist.get_rank() else ['it was not slow']


def copies() -> list[str]:
    """A deep copy of a compiled module computes with its own weights."""
    anew()
    model, optim = wrapped(vit(), stage=0)
    layer = model.module.layers[0]
    for step in range(2):
        model.train_step(image_batch(step), optim)
    copied = copy.deepcopy(layer)
    with torch.no_grad():
        for param in copied.parameters():
            param.zero_()
        x = torch.randn(2, 5, 32)
        return [] if torch.equal(copied(x), x) and not torch.equal(layer(x), x) else ['the copy has other weights']


CASES = (
    names_and_checkpoints,
    evaluation,
    hooks,
    methods,
    nested,
    reports,
    statistics,
    failures,
    penalties,
    a_slow_compiler,
    copies,
)


def run_cases() -> Faults:
    return {case.__name__: case() for case in CASES}


@pytest.mark.slow
def test_what_stays_as_it_is() -> None:
    for case, faults in merged(run_ranks(2, run_cases)).items():
        assert not faults, f'{case}: {faults}'


def run_hsdp() -> Faults:
    fields = dict(stage=3, mesh=dict(replicate=2, shard=1), wrap_policy=LAYERS)
    found, reference = both(vit, image_batch, fields)
    return {'hsdp': [f'{what}: {off:.1e}' for what, off in compare(found, reference).items() if off > 1e-6]}


def run_inductor() -> Faults:
    fields = dict(stage=3, wrap_policy=LAYERS, activation_checkpointing=dict(policy=LAYERS))
    found, reference = both(vit, image_batch, fields, compile=True)
    # Fused operators round in another order.
    return {'inductor': [f'{what}: {off:.1e}' for what, off in compare(found, reference).items() if off > 1e-5]}


@pytest.mark.slow
@pytest.mark.parametrize('run', [run_hsdp, run_inductor])
def test_slow_ones(run: Any) -> None:
    for case, faults in merged(run_ranks(2, run)).items():
        assert not faults, f'{case}: {faults}'
