"""The pair says no more to other ranks and to the device than a loop by hand; what is unequal is called so."""

import functools
import json
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mmzero.analysis.contestants import BY_HAND, DDP, DEEPSPEED, FSDP1, PAIR, contestants
from mmzero.analysis.overhead import Overhead, measure_overhead
from mmzero.analysis.overhead_report import overhead_table
from mmzero.analysis.setting import Setting, Step
from mmzero.analysis.vit import ViT, ViTBlock
from tests.distributed.ranks import run_ranks
from tests.tools.processes import ROOT, run, succeed

pytestmark = pytest.mark.distributed

DEPTH = 3
UNITS = DEPTH + 1
CELLS = {
    'stage 1': dict(stage=1, accumulation=2),
    'stage 2': dict(stage=2, accumulation=2),
    'stage 3': dict(stage=3, accumulation=1),
    'stage 3, bf16': dict(stage=3, accumulation=2, bf16=True),
}
# All-gathers and reduce-scatters per optimizer step, by the rules of the stages.
EXPECTED = {'stage 1': (1, 1), 'stage 2': (1, 2), 'stage 3': (2, 1), 'stage 3, bf16': (4, 2)}


def setting(**fields) -> Setting:
    return Setting(functools.partial(ViT, width=24, depth=DEPTH), ViTBlock, torch.device('cpu'), **fields)


def one_more_collective(common: Setting) -> dict[str, Step]:
    """The pair, made to talk and to wait once more than it has to."""
    steps = contestants(common)
    step = steps[PAIR]

    def talkative(batches):
        losses = step(batches)
        dist.all_reduce(losses[0].detach().clone())
        float(losses[0].detach())
        return losses

    return {**steps, PAIR: talkative}


def another_training(common: Setting) -> dict[str, Step]:
    """By hand, other gradients are clipped away."""
    other = contestants(Setting(**{**vars(common), 'max_norm': 1e-3}))
    return {**contestants(common), BY_HAND: other[BY_HAND]}


def measure_all() -> dict[str, Overhead]:
    found = {name: measure_overhead(setting(**cell), rounds=2, batch_size=2) for name, cell in CELLS.items()}
    for make in (one_more_collective, another_training):
        found[make.__name__] = measure_overhead(setting(), rounds=1, batch_size=2, make=make)
    return found


@pytest.fixture(scope='module')
def measured() -> dict[str, Overhead]:
    first, second = run_ranks(2, measure_all)
    for name in first:
        assert first[name].faults == second[name].faults
        assert {n: cost.ratio for n, cost in first[name].costs.items()} == {
            n: cost.ratio for n, cost in second[name].costs.items()
        }
    return first


@pytest.mark.parametrize('cell', CELLS)
def test_the_pair_says_what_a_loop_by_hand_says(measured: dict[str, Overhead], cell: str) -> None:
    found = measured[cell]
    assert found.faults == ()
    gathers, scatters = (number * UNITS for number in EXPECTED[cell])
    ours, by_hand = found.costs[PAIR], found.costs[BY_HAND]
    # The all-reduce is the norm's.
    assert ours.collectives == dict(all_gather=gathers, reduce_scatter=scatters, all_reduce=1)
    assert (ours.collectives, ours.moved, ours.syncs) == (by_hand.collectives, by_hand.moved, by_hand.syncs)
    assert ours.loss_difference == by_hand.loss_difference == 0
    assert found.costs[DDP].losses == 5 and found.costs[FSDP1].losses == 1


@pytest.mark.parametrize('cell', CELLS)
def test_the_pair_asks_python_for_little_more(measured: dict[str, Overhead], cell: str) -> None:
    ours, by_hand = (measured[cell].costs[name].python_calls for name in (PAIR, BY_HAND))
    assert ours <= 1.02 * by_hand


def test_one_more_collective_is_a_fault(measured: dict[str, Overhead]) -> None:
    faults = measured['one_more_collective'].faults
    assert [fault.partition(' of ')[0] for fault in faults] == ['collectives', 'moved', 'syncs']
    assert "'all_reduce': 2" in faults[0]
    assert 'FAULT collectives' in overhead_table(measured['one_more_collective'])


def test_another_training_is_a_fault(measured: dict[str, Overhead]) -> None:
    (fault,) = measured['another_training'].faults
    assert fault.startswith(f'{BY_HAND}: losses differ')


@pytest.mark.slow
def test_the_tool(tmp_path: Path) -> None:
    out = tmp_path / 'folder' / 'overhead.json'
    tool = ROOT / 'tools/analysis_tools/benchmark.py'
    options = ['--quick', '--rounds', 3, '--width', 24, '--depth', DEPTH, '--stages', 1, 3, '--out', out]
    printed = succeed(sys.executable, tool, *options)
    assert printed.count('are equal in collectives') == 2
    for name in (PAIR, BY_HAND, FSDP1, DDP):
        assert printed.count(f'\n{name} ') == 2
    found = json.loads(out.read_text())
    assert [item['setting']['stage'] for item in found] == [1, 3]
    for item in found:
        assert item['faults'] == [] and item['setting']['ranks'] == 2
        for cost in item['costs'].values():
            ratio = cost['ratio']
            assert ratio['pairs'] == 3 and 0 < ratio['low'] <= ratio['median'] <= ratio['high']
        assert item['costs'][PAIR]['collectives'] == item['costs'][BY_HAND]['collectives']


@pytest.mark.parametrize('wrong', [('--stages', 0), ('--width', 25)])
def test_wrong_options_are_refused_before_ranks_start(wrong: tuple) -> None:
    done = run(sys.executable, ROOT / 'tools/analysis_tools/benchmark.py', *wrong)
    assert done.returncode == 2
    assert wrong[0] in done.stdout and 'Traceback' not in done.stdout


def measure_deepspeed() -> dict[str, Overhead]:
    cells = {**CELLS, 'stage 1, bf16': dict(stage=1, bf16=True), 'stage 2, bf16': dict(stage=2, bf16=True)}
    return {
        name: measure_overhead(setting(engine='deepspeed', **cell), rounds=1, batch_size=2)
        for name, cell in cells.items()
    }


@pytest.mark.deepspeed
def test_deepspeed_says_what_a_loop_by_hand_says() -> None:
    """And asks Python for little more: what MMEngine's loop does around each micro-batch and step."""
    for rank in run_ranks(2, measure_deepspeed):
        for name, found in rank.items():
            assert found.faults == (), name
            ours, by_hand = found.costs[PAIR], found.costs[DEEPSPEED]
            assert ours.collectives and ours.collectives == by_hand.collectives, name
            more = ours.python_calls - by_hand.python_calls
            assert more <= 200 + 250 * found.setting['accumulation'], f'{name}: {more} more of {by_hand.python_calls}'
