"""Norms of parts of a model are those of the whole gradients under stock DDP, whatever is sharded how."""

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from mmengine.logging import MessageHub
from mmengine.model import MMDistributedDataParallel
from torch import nn

from mmzero import ZeroModelWrapper, ZeroOptimWrapper
from tests.distributed.cases import Faults, merged
from tests.distributed.parity import adamw
from tests.distributed.ranks import run_ranks
from tests.models import ToyModel, toy_batch

pytestmark = pytest.mark.distributed

BLOCKS = dict(type='ModuleClassPolicy', classes=['Block'])
PARTS = ('blocks', 'blocks.*.norm', '**.scale', 'stem.weight', 'unused')
CLIPS: dict[float, dict | None] = {
    2: dict(max_norm=0.05),
    1: dict(max_norm=0.05, norm_type=1),
    float('inf'): dict(max_norm=0.05, norm_type='inf'),
}


def by_ddp(norm_type: float) -> dict[str, float]:
    """Norms of the parts from whole gradients."""
    torch.manual_seed(0)
    model = MMDistributedDataParallel(ToyModel(), device_ids=None, broadcast_buffers=False, find_unused_parameters=True)
    model(**toy_batch(dist.get_rank()), mode='loss')['loss'].backward()

    def norm(module: nn.Module, *names: str) -> float:
        grads = [param.grad for name, param in module.named_parameters() if not names or name.endswith(names)]
        # In double precision: a sum of absolute values in float32 is off by 1e-6 itself.
        flat = [grad.flatten() for grad in grads if grad is not None]
        return float(torch.linalg.vector_norm(torch.cat(flat).double(), norm_type)) if flat else 0.0

    toy: ToyModel = model.module
    norms = nn.ModuleList(block.norm for block in toy.blocks)
    return {
        'blocks': norm(toy.blocks),
        'blocks.*.norm': norm(norms),
        '**.scale': norm(toy.blocks, 'scale'),
        'stem.weight': norm(toy.stem, 'weight'),
        'unused': norm(toy.unused),
    }


def logged(fields: dict, clip: dict | None, parts: str | Sequence[str]) -> dict[str, float]:
    torch.manual_seed(0)
    model = ZeroModelWrapper(module=ToyModel(), find_unused_parameters=True, **fields)
    optimizer = adamw(model.module) if parts == 'groups' else torch.optim.SGD(model.parameters(), lr=0.1)
    optim = ZeroOptimWrapper(optimizer, clip_grad=clip, grad_norms=parts)
    optim.message_hub = MessageHub(f'part norms {id(optim)}')
    optim.initialize_count_status(model, 0, 1)
    model.train_step(toy_batch(dist.get_rank()), optim)
    scalars = optim.message_hub.log_scalars
    return {name.removeprefix('train/grad_norm'): value.current() for name, value in scalars.items()}


def cases() -> Faults:
    found: Faults = {}
    ways = [dict(stage=stage, wrap_policy=BLOCKS) for stage in (0, 2, 3)]
    ways += [dict(wrap_policy=BLOCKS, overrides=[dict(units='blocks.1', shard=False)])]
    ways += [dict(wrap_policy=BLOCKS, overrides=[dict(units='blocks.1', shard_dim=1)])]
    ways += [dict(mesh=dict(replicate=2), wrap_policy=BLOCKS)] if dist.get_world_size() == 4 else []
    for norm_type, clip in CLIPS.items():
        wanted = by_ddp(norm_type)
        for fields in ways:
            norms = logged(fields, clip, PARTS)
            off = [name for name, value in wanted.items() if abs(norms[f'/{name}'] - value) > 2e-6 * value]
            found[f'{norm_type}, {fields}'] = [f'{name}: {norms[f"/{name}"]}, not {wanted[name]}' for name in off]
    # Without clipping they are 2-norms, and that of all is not asked for.
    norms = logged(ways[2], None, PARTS)
    found['not clipped'] = [] if norms.keys() == {f'/{name}' for name in PARTS} else [str(norms)]
    whole = logged(ways[2], CLIPS[2], 'groups')
    total = sum(value**2 for name, value in whole.items() if name) ** 0.5
    found['groups'] = [] if len(whole) > 10 and abs(total - whole['']) <= 1e-6 * total else [str(whole)]
    return found


@pytest.mark.parametrize('ranks', [2, pytest.param(4, marks=pytest.mark.slow)])
def test_norms_of_parts(ranks: int) -> None:
    for case, faults in merged(run_ranks(ranks, cases)).items():
        assert not faults, f'{case}: {faults}'
