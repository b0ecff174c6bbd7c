"""Models of transformers: their own gradient checkpointing, and layers or whole models by name, in training."""

import copy
from typing import Any

import pytest
import torch
from mmengine.model import BaseModel
from torch import nn

import mmzero  # noqa: F401
from mmzero.config import CheckpointingConfig
from mmzero.patches import apply_patches, huggingface
from tests.patches.families import check_same_step, counted, results

transformers = pytest.importorskip('transformers')

LAYERS = 3
SIZES = dict(vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=4)
GROUPED = dict(SIZES, num_key_value_heads=2, attention_dropout=0.5)
T5 = dict(vocab_size=40, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_decoder_layers=1, num_heads=4)
MODELS: dict[str, tuple[str, dict]] = {
    'Llama': ('AutoModelForCausalLM', dict(model_type='llama', **GROUPED)),
    # Its loss has a term of what hooks collect within the layers.
    'Mixtral': (
        'AutoModelForCausalLM',
        dict(model_type='mixtral', num_local_experts=4, output_router_logits=True, **GROUPED),
    ),
    'GPT-2': (
        'AutoModelForCausalLM',
        dict(model_type='gpt2', vocab_size=40, n_embd=32, n_layer=3, n_head=4, bos_token_id=0, eos_token_id=0),
    ),
    'BERT': ('AutoModelForMaskedLM', dict(model_type='bert', **SIZES)),
    'T5': ('AutoModelForSeq2SeqLM', dict(model_type='t5', decoder_start_token_id=0, **T5)),
}


def build(name: str, **options: Any) -> nn.Module:
    auto, fields = MODELS[name]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**dict(fields, **options))
    return getattr(transformers, auto).from_config(config).train()


def without_cache(model: nn.Module) -> nn.Module:
    """A copy that keeps none: tensors that come out of a cache are laid out otherwise, which changes the last bit."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, transformers.PreTrainedModel):
            module.config.use_cache = False
    return model


class Around(BaseModel):
    """What trains a model of transformers."""

    def __init__(self, llm: nn.Module) -> None:
        super().__init__()
        self.llm = llm

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.llm(input_ids=ids, labels=ids).loss


def run(model: nn.Module) -> torch.Tensor:
    return model(torch.randint(0, 40, (3, 12), generator=torch.Generator().manual_seed(0)))


def layers_of(model: nn.Module) -> list[str]:
    base = transformers.modeling_layers.GradientCheckpointingLayer
    return [name for name, module in model.named_modules() if isinstance(module, base)]


@pytest.fixture(params=MODELS)
def pair(request: pytest.FixtureRequest) -> tuple[nn.Module, nn.Module]:
    """A model, and one that stays as it is."""
    model = Around(build(request.param))
    return model, Around(without_cache(model.llm))


@pytest.mark.parametrize('options', [None, dict(use_reentrant=True), dict(use_reentrant=False)])
def test_its_own_checkpointing(pair: tuple, options: dict | None) -> None:
    model, plain = pair
    model.llm.activation_checkpointing_enable(options)
    assert list(check_same_step(model, run, plain=plain).regions) == layers_of(model)


def test_layers_by_name(pair: tuple) -> None:
    model, plain = pair
    layers = layers_of(model)
    applied = check_same_step(model, run, CheckpointingConfig(modules=tuple(layers)), plain=plain)
    assert list(applied.regions) == layers


@pytest.mark.parametrize('enabled', [False, True])
def test_whole_model_by_name(pair: tuple, enabled: bool) -> None:
    model, plain = pair
    if enabled:
        model.llm.activation_checkpointing_enable(dict(use_reentrant=True))
    applied = check_same_step(model, run, CheckpointingConfig(modules=('llm',)), plain=plain)
    assert list(applied.regions) == ['llm', *(layers_of(model) if enabled else [])]


def test_one_layer_by_name() -> None:
    """The others keep the model's cache."""
    model = Around(build('Llama'))
    assert model.llm.config.use_cache
    applied = check_same_step(model, run, CheckpointingConfig(modules=('llm.model.layers.1',)))
    assert applied.counts == dict(LlamaDecoderLayer=1)


def test_each_second_layer_of_its_own() -> None:
    model = build('Llama')
    model.activation_checkpointing_enable(dict(use_reentrant=True), every_n_layers=2)
    applied = check_same_step(Around(model), run)
    assert list(applied.regions) == ['llm.model.layers.0', 'llm.model.layers.2']


def test_settings_are_those_of_the_run() -> None:
    model = Around(build('Llama'))
    model.llm.activation_checkpointing_enable(dict(use_reentrant=True))
    applied = check_same_step(model, run, CheckpointingConfig(save='matmuls'))
    assert [region.config.save for region in applied.regions.values()] == ['matmuls'] * LAYERS


@pytest.mark.parametrize(
    ('options', 'said'),
    [
        (dict(offload=True), 'offload of transformers is not used'),
        (dict(activation_checkpointing_kwargs=dict(use_reentrant=False, debug=True)), 'debug of transformers'),
    ],
)
def test_what_is_not_carried_over_is_said_once(monkeypatch: pytest.MonkeyPatch, options: dict, said: str) -> None:
    texts: list[str] = []
    huggingface._warn.cache_clear()
    monkeypatch.setattr(huggingface, 'print_log', lambda text, **_: texts.append(text))
    model = build('Llama')
    model.activation_checkpointing_enable(**options)
    apply_patches(model)
    assert len(texts) == 1 and said in texts[0]


def test_undo() -> None:
    model = build('Llama')
    model.activation_checkpointing_enable()
    applied = apply_patches(model)
    applied.undo()
    with counted() as calls:
        results(Around(model), run)
    assert calls.non_reentrant == LAYERS


@pytest.mark.parametrize('target', ['model.layers.1', 'model', ''])
def test_cache_with_something_in_it_is_refused(target: str) -> None:
    """A recompute would add to it, and without it the result is another one."""
    model = Around(build('Llama'))
    ids = torch.randint(0, 40, (2, 4))
    with torch.no_grad():
        cache = model.llm(input_ids=ids, use_cache=True).past_key_values
    apply_patches(model, CheckpointingConfig(modules=(f'llm.{target}'.rstrip('.'),)))
    with pytest.raises(ValueError, match='with keys and values in it'):
        model.llm(input_ids=ids, past_key_values=cache)


def test_generation_keeps_its_cache() -> None:
    model, plain = build('Llama').eval(), build('Llama').eval()
    apply_patches(model, CheckpointingConfig(modules=('model.layers.0', 'model.layers.1')))
    ids = torch.randint(0, 40, (2, 4))
    options = dict(max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert torch.equal(model.generate(ids, **options), plain.generate(ids, **options))
    with torch.no_grad():
        assert model(input_ids=ids).past_key_values.get_seq_length() == 4


def test_encoder_that_calls_torch_itself() -> None:
    """CLVP's, which is no layer of that base and passes no options on."""
    decoder = dict(hidden_size=16, num_attention_heads=2, feature_size=4, num_mel_attn_blocks=2, n_inner=16)
    config = transformers.ClvpConfig(
        text_config=dict(vocab_size=40, hidden_size=16, max_position_embeddings=32, bos_token_id=0, eos_token_id=1),
        decoder_config=dict(decoder, vocab_size=40, max_position_embeddings=32, max_text_tokens=32),
    )
    torch.manual_seed(0)
    from transformers.models.clvp.modeling_clvp import ClvpConditioningEncoder

    model = ClvpConditioningEncoder(config).train()
    plain = copy.deepcopy(model)
    model.gradient_checkpointing = True

    def condition(model: nn.Module) -> Any:
        return model(input_features=torch.randn(2, 4, 9), input_ids=torch.full((2, 5), 7))

    applied = check_same_step(model, condition, plain=plain)
    assert list(applied.regions) == [
        'mel_conv',
        *(f'{n}.{i}' for n in ('group_norms', 'mel_attn_blocks') for i in (0, 1)),
    ]
