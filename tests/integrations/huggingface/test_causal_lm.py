"""Causal language models of transformers, by config."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from mmengine.registry import MODELS

from mmzero import HuggingFaceCausalLM
from mmzero._compat import build_with_meta_parameters
from mmzero.errors import ConfigError
from mmzero.policies import ModuleClassPolicy
from mmzero.runner import offline, prepare_plan
from tests.distributed.parity import BOUNDS
from tests.distributed.ranks import run_ranks
from tests.distributed.training import compare, train

LLAMA = dict(
    model_type='llama',
    vocab_size=40,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
)
# Its output weights are its embedding's.
GPT2 = dict(model_type='gpt2', vocab_size=40, n_embd=32, n_layer=2, n_head=4, n_positions=16)


def build(config: dict) -> Any:
    return MODELS.build(dict(type='HuggingFaceCausalLM', config=config))


def test_what_to_install_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, 'transformers', None)
    with pytest.raises(ConfigError, match=r'model: cannot be built: ImportError: .*pip install .mmzero\[hf\]'):
        prepare_plan(dict(model=dict(type='HuggingFaceCausalLM', config=LLAMA)), 'llama.py', world_size=2)


def test_mmzero_works_without_transformers() -> None:
    # MMEngine imports it where it is there.
    code = 'import sys; sys.modules["transformers"] = None; import mmzero; mmzero.HuggingFaceCausalLM'
    subprocess.run([sys.executable, '-c', code], check=True)


transformers = pytest.importorskip('transformers')


def tokens(seed: int, size: int = 3, length: int = 12) -> dict:
    ids = torch.randint(0, 40, (size, length), generator=torch.Generator().manual_seed(seed))
    return dict(input_ids=ids, labels=ids)


def test_modes() -> None:
    torch.manual_seed(0)
    model, batch = build(LLAMA), tokens(0)
    logits = model(**batch)
    assert logits.shape == (3, 12, 40)
    wanted = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch['labels'][:, 1:].flatten())
    torch.testing.assert_close(model(**batch, mode='loss'), dict(loss=wanted))
    samples = model(batch['input_ids'], mode='predict')
    assert len(samples) == 3
    torch.testing.assert_close(samples[1]['logits'], logits[1])


def test_padding_is_neither_seen_nor_predicted() -> None:
    model, batch = build(LLAMA), tokens(0, size=1)
    short = {name: value[:, :8] for name, value in batch.items()}
    mask = torch.ones(1, 12, dtype=torch.long)
    mask[:, 8:] = 0
    labels = batch['labels'].masked_fill(mask == 0, -100)
    padded = dict(input_ids=batch['input_ids'], attention_mask=mask, labels=labels)
    torch.testing.assert_close(model(**padded, mode='loss'), model(**short, mode='loss'))


def test_wrong_calls_are_refused() -> None:
    model = build(LLAMA)
    with pytest.raises(ValueError, match="labels: are missing, and mode='loss' needs them"):
        model(tokens(0)['input_ids'], mode='loss')
    with pytest.raises(ValueError, match="mode: got 'generate'; allowed"):
        model(tokens(0)['input_ids'], mode='generate')


@pytest.mark.parametrize(
    ('config', 'message'),
    [
        ('llama', "config: got 'llama'; expected a dict with model_type, such as"),
        (dict(hidden_size=3), 'expected a dict with model_type'),
        (dict(model_type='lama'), "config.model_type: no 'lama' in transformers .*; did you mean 'llama'"),
        (dict(model_type='vit'), "config.model_type: 'vit' has no causal language model"),
        (dict(LLAMA, hidden_sise=3), "config.hidden_sise: LlamaConfig has no such field; did you mean 'hidden_size'"),
    ],
)
def test_wrong_configs_are_refused(config: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HuggingFaceCausalLM(config)


def test_wrong_changes_of_a_folder_are_refused(tmp_path: Path) -> None:
    build(LLAMA).llm.save_pretrained(tmp_path)
    for changes, message in [
        (dict(dtyp='bfloat16'), "config.dtyp: LlamaConfig has no such field; did you mean 'dtype'"),
        (dict(model_type='gpt2'), "config.model_type: got 'gpt2'; .* is of 'llama'"),
        ('llama', "config: got 'llama'; expected a dict of what differs"),
    ]:
        with pytest.raises(ValueError, match=message):
            HuggingFaceCausalLM(changes, pretrained=str(tmp_path))
    made = HuggingFaceCausalLM(dict(model_type='llama', torch_dtype='bfloat16'), pretrained=str(tmp_path))
    assert {param.dtype for param in made.parameters()} == {torch.bfloat16}


def test_other_names_of_fields_that_transformers_reads() -> None:
    model = build(dict(LLAMA, rope_theta=5e5, torch_dtype='bfloat16'))
    assert model.llm.config.rope_parameters['rope_theta'] == 5e5
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
    assert len(build(dict(GPT2, num_hidden_layers=3)).llm.transformer.h) == 3


@pytest.mark.parametrize('config', [LLAMA, GPT2], ids=['llama', 'gpt2'])
def test_on_meta_the_plan_is_that_of_the_real_model(config: dict) -> None:
    real, meta = build(config), build_with_meta_parameters(lambda: build(config))
    assert all(param.is_meta for param in meta.parameters())
    # What no state dict holds has to be real everywhere.
    assert not any(buffer.is_meta for buffer in meta.buffers())
    policy = ModuleClassPolicy(['LlamaDecoderLayer' if config is LLAMA else 'GPT2Block'])
    assert policy(meta) == policy(real)


def test_what_would_be_downloaded_is_refused_without_trying_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []
    monkeypatch.setattr(offline, '_refuse', lambda *address, **_: tries.append(address) or 1 / 0)
    with offline.no_network(), pytest.raises(OSError, match='offline'):
        transformers.AutoConfig.from_pretrained('nobody/nothing')
    assert not tries


CELLS = [
    (config, stage, block) for config, block in ((LLAMA, 'LlamaDecoderLayer'), (GPT2, 'GPT2Block')) for stage in (1, 3)
]


def distances() -> list[dict[str, float]]:
    def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-3)

    optim = dict(clip_grad=dict(max_norm=0.1))
    found = []
    for config, stage, block in CELLS:
        config = dict(config, **({} if config is LLAMA else dict(embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0)))
        reference = train(lambda config=config: build(config), tokens, adamw, {}, optim)
        policy = dict(type='ModuleClassPolicy', classes=[block])
        wrapper = dict(stage=stage, wrap_policy=policy)
        found.append(compare(train(lambda config=config: build(config), tokens, adamw, wrapper, optim), reference))
    return found


@pytest.mark.distributed
def test_it_trains_as_under_ddp() -> None:
    for ranks in run_ranks(2, distances):
        for cell, found in zip(CELLS, ranks, strict=True):
            assert not {name: value for name, value in found.items() if value > BOUNDS[name]}, cell
