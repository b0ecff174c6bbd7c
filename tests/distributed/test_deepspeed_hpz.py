"""hpZ: a second copy of the parameters among the ranks of a node changes where they come from, and no bit of a run."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from mmzero import ZeroModelWrapper
from mmzero.engines.flat_shard import FlatShard
from tests.distributed.cases import Faults, differing, merged
from tests.distributed.ranks import run_ranks
from tests.distributed.test_deepspeed_runs import PARTITIONED, kept, run
from tests.distributed.test_deepspeed_state import Frozen, pair, steps

pytestmark = [pytest.mark.deepspeed, pytest.mark.distributed]


def hpz(size: int, **offload: str) -> dict[str, Any]:
    zero = dict(PARTITIONED['zero_optimization'], zero_hpz_partition_size=size)
    return dict(engine_options=dict(zero_optimization=zero)) | (dict(offload=offload) if offload else {})


def copies(model: Any) -> set[int]:
    """Among how many ranks the second copies of parameters are shared, of those that have one."""
    whole = [(param.ds_numel, param.ds_secondary_tensor) for param in model.parameters()]
    return {round(numel / copy.numel()) for numel, copy in whole if copy is not None and copy.numel() > 500}


def second_copies() -> list[str]:
    """They are there after a forward, shared as asked for by each of two models, and are those of what was changed."""
    faults = []
    batch = torch.randn(2, 3, 16, 16)
    other, _ = pair('deepspeed', 3)
    other.eval()
    for size in (2, dist.get_world_size()):
        model, optim = pair('deepspeed', 3, wrapper=hpz(size))
        steps(model, optim, range(1))
        engine = model.eval().engine
        with torch.no_grad():
            model(batch)
            faults += [] if copies(model) == {size} else [f'shared among {copies(model)}, not {size}']
            engine.load_model_state({name: value + 0.3 for name, value in engine.model_state().items()})
            for change in ('loaded', 'averages', 'shards'):
                if change == 'averages':
                    for param in engine.fragments.of:
                        engine.fragments.own(param).mul_(0.5)
                elif change == 'shards':
                    # Frozen ones as well.
                    for shard in engine.sharded_state().values():
                        (shard.part if isinstance(shard, FlatShard) else shard).mul_(0.5)
                engine.refresh()
                other.engine.load_model_state(engine.model_state())
                faults += [] if torch.equal(model(batch), other(batch)) else [f'{change}: other outputs']
    return faults + evaluated_alone(batch)


def evaluated_alone(batch: torch.Tensor) -> list[str]:
    """Without training there are no second copies."""
    outputs = []
    for wrapper in (hpz(2), None):
        torch.manual_seed(0)
        model = ZeroModelWrapper(module=Frozen(), stage=3, engine='deepspeed', **(wrapper or {})).eval()
        model.engine.evaluate_only()
        with torch.no_grad():
            outputs.append(model(batch))
    return [] if torch.equal(*outputs) else ['evaluated alone: other outputs']


def compared(folder: str, half: bool) -> Faults:
    """A run with averages in val, whole and resumed."""
    sizes: dict[str, dict[str, Any] | None] = {'none': None, '2': hpz(2), 'host': hpz(2, params='cpu')}
    for name, fields in sizes.items():
        run(f'{folder}/{name}', 'deepspeed', 3, 2, half, fields)
    run(f'{folder}/again', 'deepspeed', 3, 1, half, hpz(2))
    run(f'{folder}/again', 'deepspeed', 3, 2, half, hpz(2), resume=True)
    if dist.get_rank():
        return dict.fromkeys(('2', 'host', 'again'), [])
    wanted = kept(f'{folder}/none/epoch_2.pth')
    return {name: differing(kept(f'{folder}/{name}/epoch_2.pth'), wanted) for name in ('2', 'host', 'again')}


def test_second_copies() -> None:
    assert run_ranks(4, second_copies) == [[]] * 4


@pytest.mark.parametrize('half', [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_run_is_the_same(half: bool, tmp_path: Any) -> None:
    for case, faults in merged(run_ranks(4, compared, str(tmp_path), half)).items():
        assert not faults, f'{case}: {faults}'
