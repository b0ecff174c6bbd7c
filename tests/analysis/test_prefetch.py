"""Ways to prefetch train the same, and gather as often as they say."""

import functools

import pytest
import torch
import torch.distributed as dist

from mmzero import ZeroModelWrapper, ZeroOptimWrapper
from mmzero.analysis.prefetch import PLAIN, VARIANTS, Variant, measure_prefetch, prefetch_table, units_in_order
from mmzero.analysis.setting import Setting
from mmzero.analysis.vit import ViT, ViTBlock
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.distributed

DEPTH = 3
BUILD = functools.partial(ViT, width=12, depth=DEPTH)


def measured() -> dict[str, Variant]:
    return measure_prefetch(Setting(BUILD, ViTBlock, torch.device('cpu')), rounds=2, batch_size=2)


def losses() -> dict[str, list[float]]:
    """Of some steps, each way."""
    found = {}
    for name, change in VARIANTS.items():
        torch.manual_seed(0)
        source = BUILD()
        batch = source.batch(dist.get_rank(), 2)
        policy = dict(type='ModuleClassPolicy', classes=['ViTBlock'])
        model = ZeroModelWrapper(module=source.train(), wrap_policy=policy)
        optim = ZeroOptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1))
        optim.initialize_count_status(model, 0, 10)
        change(units_in_order(model, lambda model=model, optim=optim, batch=batch: model.train_step(batch, optim)))
        found[name] = [float(model.train_step(batch, optim)['loss'].detach()) for _ in range(4)]
    return found


def both() -> tuple[dict[str, Variant], dict[str, list[float]]]:
    return measured(), losses()


@pytest.mark.slow
def test_ways_to_prefetch() -> None:
    found, trained = run_ranks(2, both)[0]
    assert all(values == trained[PLAIN] for values in trained.values())
    gathers = {name: variant.collectives['all_gather'] for name, variant in found.items()}
    # The root and each block, in forward and in backward.
    assert gathers.pop('last unit kept after forward') == 2 * (DEPTH + 1) - 1
    assert set(gathers.values()) == {2 * (DEPTH + 1)}
    assert found['two units gathered ahead in backward'].everything > found[PLAIN].everything
    assert len(prefetch_table(found).splitlines()) == 2 + len(VARIANTS)
