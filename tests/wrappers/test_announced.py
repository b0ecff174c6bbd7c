"""The plan is printed once, by rank 0, when a model is wrapped."""

import pytest
import torch.distributed as dist

import mmzero.wrappers.model
from mmzero import ZeroModelWrapper
from mmzero.policies import make_plan
from tests.distributed.ranks import run_ranks
from tests.models import ToyModel


def noted(model: ToyModel):
    return make_plan(model, ['blocks.0', 'blocks.1'], 'two blocks', notes=('blocks: repeated',))


def printed() -> list[str]:
    texts: list[str] = []
    mmzero.wrappers.model.print_log = lambda text, **kwargs: texts.append(text)
    ZeroModelWrapper(module=ToyModel(), stage=2, wrap_policy=noted)
    assert dist.is_initialized()
    return texts


@pytest.mark.distributed
def test_plan_with_collectives_and_notes() -> None:
    (text,), nothing = run_ranks(2, printed)
    assert nothing == []
    assert text.startswith('ZeRO stage 2 on 1 x 2 ranks (replicate x shard), wrap policy: two blocks\n')
    wanted = (
        '\nblocks.0-1 ',
        'peak of gathered',
        '1 micro-batch: 3 all_gather, 3 reduce_scatter',
        '\nblocks: repeated\n',
    )
    places = [text.index(part) for part in wanted]
    assert places == sorted(places)
    assert text.endswith('activation checkpointing (non-re-entrant): nothing')
