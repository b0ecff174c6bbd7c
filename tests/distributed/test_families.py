"""Checkpointing that models ask for by options of their own, at stage 3: gradients are those without it."""

import copy
import functools
from collections.abc import Callable

import pytest
import torch
from mmengine.registry import MODELS, DefaultScope
from torch import nn

from tests.distributed.ranks import run_ranks
from tests.distributed.training import train
from tests.models import TINY_DINO, detection_batch
from tests.patches.families import counted

pytestmark = pytest.mark.distributed

LLAMA = dict(model_type='llama', vocab_size=40, hidden_size=32, intermediate_size=48, attention_dropout=0.5)
LLAMA.update(num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2)


def dino(checkpointed: bool) -> nn.Module:
    """A small DINO with dropout, of whose two encoder layers the first is recomputed."""
    import mmdet.models  # noqa: F401

    cfg = copy.deepcopy(TINY_DINO)
    cfg['backbone'].update(with_cp=False)
    cfg['encoder'].update(num_cp=1 if checkpointed else -1)
    cfg['encoder']['layer_cfg']['self_attn_cfg']['dropout'] = 0.3
    with DefaultScope.overwrite_default_scope('mmdet'):
        model = MODELS.build(cfg)
    model.init_weights()
    return model


def llama(checkpointed: bool) -> nn.Module:
    """A small Llama that transformers was told to recompute re-entrantly."""
    model = MODELS.build(dict(type='HuggingFaceCausalLM', config=LLAMA))
    if checkpointed:
        model.llm.activation_checkpointing_enable(dict(use_reentrant=True))
    return model


def tokens(seed: int) -> dict:
    ids = torch.randint(0, 40, (3, 12), generator=torch.Generator().manual_seed(seed))
    return dict(input_ids=ids, labels=ids)


def differing(build: Callable, batch: Callable, unit: str | None, calls_of_torch: int) -> list[str]:
    """Runs on every rank: what differs between checkpointing and none."""
    policy = None if unit is None else dict(type='ModuleClassPolicy', classes=[unit])
    sgd = functools.partial(torch.optim.SGD, lr=0.01)

    def step(checkpointed: bool) -> dict:
        wrapper = dict(stage=3, wrap_policy=policy)
        made = functools.partial(build, checkpointed)
        return train(made, batch, lambda model: sgd(model.parameters()), wrapper, None, steps=1)['grads']

    with counted() as calls:
        found = step(True)
    faults = [] if (calls.reentrant, calls.non_reentrant) == (0, calls_of_torch) else [f'{vars(calls)}']
    wanted = step(False)
    return faults + [name for name, grad in wanted.items() if grad is not None and not torch.equal(found[name], grad)]


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    'unit', [pytest.param('DeformableDetrTransformerEncoderLayer', marks=SLOW), None], ids=['layers', 'root']
)
def test_num_cp(unit: str | None) -> None:
    pytest.importorskip('mmdet')
    assert run_ranks(2, differing, dino, detection_batch, unit, 1) == [[], []]


@pytest.mark.parametrize('unit', ['LlamaDecoderLayer', pytest.param(None, marks=SLOW)], ids=['layers', 'root'])
def test_layers_of_transformers(unit: str | None) -> None:
    pytest.importorskip('transformers')
    assert run_ranks(2, differing, llama, tokens, unit, 3) == [[], []]
