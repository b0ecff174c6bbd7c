"""Adapters of PEFT: trained as under DDP, saved alone, read by plain PEFT, resumed."""

import copy
import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mmengine.model import BaseModel
from mmengine.registry import MODELS, DefaultScope
from torch import nn
from torch.distributed.tensor import DTensor

from mmzero import ZeroModelWrapper, ZeroOptimWrapper, save_adapters
from mmzero.analysis.collectives import CollectiveLog
from mmzero.checkpoint import load_into_real
from mmzero.errors import CheckpointError, ConfigError
from mmzero.policies import AutoPolicy
from mmzero.runner import prepare_plan
from tests.distributed.cases import Faults, differing, merged
from tests.distributed.parity import BOUNDS
from tests.distributed.ranks import run_ranks
from tests.distributed.training import compare, train
from tests.integrations.huggingface.test_causal_lm import GPT2, LLAMA, tokens
from tests.models import TINY_DINO, detection_batch, image_batch
from tests.vectors import loader, vector_runner

pytestmark = pytest.mark.zoo

peft = pytest.importorskip('peft', reason='make test-zoo installs it')
transformers = pytest.importorskip('transformers')

LORA = dict(type='LoraConfig', r=4, target_modules=['q_proj', 'v_proj', 'up_proj'])
HALF = dict(LLAMA, dtype='bfloat16')
TIED = dict(LLAMA, tie_word_embeddings=True)
STILL = dict(GPT2, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0)
LAYERS = ('LlamaDecoderLayer', 'GPT2Block')
VIRTUAL = dict(task_type='CAUSAL_LM', num_virtual_tokens=4)

MODELS_OF: dict[str, tuple[dict, dict]] = {
    'lora': (LLAMA, LORA),
    # A frozen base of 16 bit under adapters in float32.
    'lora on 16 bit': (HALF, LORA),
    'prefix': (LLAMA, dict(type='PrefixTuningConfig', **VIRTUAL)),
    'whole modules': (LLAMA, dict(LORA, modules_to_save=['lm_head', 'norm'])),
    'dora': (LLAMA, dict(LORA, use_dora=True)),
    'embeddings': (LLAMA, dict(LORA, target_modules=['q_proj', 'embed_tokens', 'lm_head'])),
    'tied': (TIED, dict(LORA, target_modules=['q_proj', 'embed_tokens'])),
    'tokens': (LLAMA, dict(LORA, trainable_token_indices=[1, 2, 3])),
    'ia3': (
        LLAMA,
        dict(peft_type='IA3', target_modules=['k_proj', 'v_proj', 'down_proj'], feedforward_modules=['down_proj']),
    ),
    'vera': (LLAMA, dict(type='VeraConfig', r=4, target_modules=['q_proj', 'k_proj'])),
    'prompt': (LLAMA, dict(type='PromptTuningConfig', **VIRTUAL)),
    'p-tuning': (LLAMA, dict(type='PromptEncoderConfig', encoder_hidden_size=16, **VIRTUAL)),
    'gpt2': (STILL, dict(type='LoraConfig', r=4, target_modules=['c_attn'], fan_in_fan_out=True)),
}
FEW = ('lora', 'lora on 16 bit', 'prefix', 'whole modules')


def stirred(model: nn.Module) -> nn.Module:
    """Give what is trained values that are not zero."""
    torch.manual_seed(3)
    for param in model.parameters():
        if param.requires_grad:
            nn.init.normal_(param, std=0.2)
    return model


def build(name: str) -> Any:
    config, adapter = MODELS_OF[name]
    torch.manual_seed(0)
    return stirred(MODELS.build(dict(type='HuggingFaceCausalLM', config=config, peft=adapter)))


class Classifier(BaseModel):
    """A ViT of timm, whose attention gets adapters by hand."""

    def __init__(self) -> None:
        super().__init__()
        from tests.patches.zoo.packages import models_of

        models_of('timm')
        from timm.models.vision_transformer import VisionTransformer

        vit = VisionTransformer(img_size=16, patch_size=4, embed_dim=32, depth=3, num_heads=2, num_classes=7)
        config = peft.LoraConfig(r=4, target_modules=['qkv', 'fc1'], modules_to_save=['head'])
        self.vit = peft.get_peft_model(vit, config)

    def forward(self, inputs: torch.Tensor, labels: Any = None, mode: str = 'tensor') -> Any:
        logits = self.vit(inputs)
        return dict(loss=nn.functional.cross_entropy(logits, labels)) if mode == 'loss' else logits


def dino() -> nn.Module:
    """A DINO of mmdet with adapters in its backbone; neck and transformer train whole."""
    import mmdet.models  # noqa: F401

    torch.manual_seed(0)
    adapter = dict(type='LoraConfig', r=2, target_modules=['qkv'])
    cfg = copy.deepcopy(TINY_DINO)
    # Re-entrant under stock DDP, which then finds parameters ready twice.
    cfg['backbone']['with_cp'] = False
    with DefaultScope.overwrite_default_scope('mmdet'):
        model = MODELS.build(dict(type='with_adapters', model=cfg, peft=adapter, module='backbone'))
    model.init_weights()
    return model


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def rounding(case: Callable[[], nn.Module], batch: Callable, optim: dict, reference: Any) -> dict[str, float]:
    """How far stock DDP is from itself where its learning rate is another one in the seventh digit.

    A base of 16 bit rounds every activation, so that the seventh digit of an adapter decides on the third one of a
    norm. First losses and gradients do not depend on it.
    """

    def nudged(share: float) -> Callable[[nn.Module], torch.optim.Optimizer]:
        return lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2 * (1 + share))

    runs = [train(case, batch, nudged(share), {}, optim) for share in (1e-7, -1e-7, 3e-7)]
    apart = [compare(run, reference) for run in runs]
    return {what: 1.5 * max(found[what] for found in apart) for what in BOUNDS}


def beyond(
    case: Callable[[], nn.Module], batch: Callable, classes: tuple, stages: tuple, lr: Any = adamw, half: bool = False
) -> list[str]:
    optim = dict(clip_grad=dict(max_norm=0.1))
    reference = train(case, batch, lr, {}, optim)
    room = rounding(case, batch, optim, reference) if half else {}
    faults = []
    for stage in stages:
        policy = dict(type='ModuleClassPolicy', classes=list(classes)) if classes else 'AutoPolicy'
        fields = dict(stage=stage, wrap_policy=policy, find_unused_parameters=case is dino)
        found = compare(train(case, batch, lr, fields, optim), reference)
        faults += [f'stage {stage}, {fault}' for fault in faults_of(found, room)]
    return faults


def faults_of(found: dict[str, float], room: dict[str, float]) -> list[str]:
    bounds = {what: max(bound, room.get(what, 0.0)) for what, bound in BOUNDS.items()}
    return [f'{what}: {value:.1e} > {bounds[what]:.1e}' for what, value in found.items() if not value <= bounds[what]]


def slow_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def layers_of(config: dict) -> tuple[str, ...]:
    """The classes of its layers."""
    return tuple(item for item in LAYERS if item.lower().startswith(config['model_type']))


def training(names: tuple[str, ...], stages: tuple[int, ...]) -> Faults:
    found: Faults = {}
    for name in names:
        classes = layers_of(MODELS_OF[name][0])
        found[name] = beyond(lambda name=name: build(name), tokens, classes, stages, half=MODELS_OF[name][0] is HALF)
    return found


def features() -> Faults:
    """Layers that are recomputed, by mmzero and as transformers asks for it, and autocast, on a base of 16 bit."""
    name, found = 'lora on 16 bit', {}
    units = dict(type='ModuleClassPolicy', classes=[LAYERS[0]])
    plain = lambda: build(name)  # noqa: E731

    def asked() -> Any:
        model = build(name)
        model.llm.gradient_checkpointing_enable()
        return model

    clip = dict(clip_grad=dict(max_norm=0.1))
    half = dict(clip, dtype='bfloat16')
    cases: dict[str, tuple[Callable, dict, dict]] = {
        'recomputed': (plain, clip, dict(activation_checkpointing=dict(policy=units))),
        'asked for': (asked, clip, {}),
        'autocast': (plain, half, dict(precision=dict(param_dtype='bfloat16'))),
    }
    for case, (make, optim, fields) in cases.items():
        reference = train(plain, tokens, adamw, {}, optim)
        room = rounding(plain, tokens, optim, reference)
        runs = [train(make, tokens, adamw, dict(stage=s, wrap_policy=units, **fields), optim) for s in (1, 3)]
        found[case] = [fault for run in runs for fault in faults_of(compare(run, reference), room)]
    return found


def vision() -> Faults:
    torch.manual_seed(0)
    found = {'mmdet': beyond(dino, detection_batch, ('SwinBlock',), (3,), slow_adamw)}
    # `make test-zoo` has it.
    if importlib.util.find_spec('timm') is not None:
        found['timm'] = beyond(lambda: stirred(Classifier()), image_batch, ('Block',), (1, 3))
    return found


def only_trained() -> list[str]:
    """Frozen parameters have neither gradients nor state; those that train have them in shards, in float32."""
    model = ZeroModelWrapper(
        module=build('lora on 16 bit'), wrap_policy=dict(type='ModuleClassPolicy', classes=[LAYERS[0]])
    )
    optim = ZeroOptimWrapper(adamw(model), clip_grad=dict(max_norm=0.1))
    optim.initialize_count_status(model, 0, 10)
    kept: list[torch.Tensor] = []

    def note(*_: Any) -> None:
        kept.extend(param.grad for param in model.parameters() if param.grad is not None)

    optim.optimizer.register_step_pre_hook(note)
    model.train_step(tokens(dist.get_rank()), optim)
    params = list(model.parameters())
    trained = [param for param in params if param.requires_grad]
    moments = [value for state in optim.optimizer.state.values() for value in state.values() if value.dim()]
    local = lambda tensors: sum(t.to_local().numel() for t in tensors)  # noqa: E731
    faults = (
        [] if len(optim.optimizer.state) == len(trained) == len(kept) else ['frozen parameters have state or grads']
    )
    faults += [] if local(kept) == local(trained) and local(moments) == 2 * local(trained) else ['not in shards']
    wanted = sum(param.numel() for param in trained) / dist.get_world_size()
    faults += [] if local(trained) == wanted else [f'{local(trained)} elements are kept, not {wanted}']
    dtypes = {(param.dtype, param.requires_grad, isinstance(param, DTensor)) for param in params}
    wanted_dtypes = {(torch.bfloat16, False, True), (torch.float32, True, True)}
    return faults + ([] if dtypes == wanted_dtypes else [f'{dtypes}'])


def saved(name: str, folder: str, stage: int) -> list[str]:
    """Train, save adapters alone, and let plain PEFT put them onto the plain base."""
    config, adapter = MODELS_OF[name]
    torch.manual_seed(0)
    base = MODELS.build(dict(type='HuggingFaceCausalLM', config=config)).llm
    module = build(name)
    load_into_real(
        module,
        module.state_dict(),
        dict(state_dict={f'llm.{k}': v for k, v in base.state_dict().items()}),
        name,
        False,
        (),
    )
    model = ZeroModelWrapper(
        module=module, stage=stage, wrap_policy=dict(type='ModuleClassPolicy', classes=list(layers_of(config)))
    )
    optim = ZeroOptimWrapper(adamw(model))
    optim.initialize_count_status(model, 0, 10)
    for step in range(2):
        model.train_step(tokens(2 * step + dist.get_rank()), optim)
    with CollectiveLog() as log:
        save_adapters(model, folder)
    model.eval()
    with torch.no_grad():
        found = torch.stack([item['logits'] for item in model.val_step(tokens(9))])
    if dist.get_rank():
        return []
    gathers = sum('gather' in call.kind for call in log.calls)
    tensors = sum(param.requires_grad for param in module.parameters())
    faults = [] if name not in ONE_EACH or gathers == tensors else [f'{gathers} gathers for {tensors} tensors']
    faults += [] if sorted(os.listdir(folder)) == sorted(FILES) else [f'{os.listdir(folder)}']
    read = peft.PeftModel.from_pretrained(copy.deepcopy(base), folder).eval()
    with torch.no_grad():
        wanted = read(input_ids=tokens(9)['input_ids'], use_cache=False).logits
        before = base(input_ids=tokens(9)['input_ids'], use_cache=False).logits
    off = float((found - wanted).abs().max() / wanted.abs().max())
    faults += [f'outputs are {off:.0e} off'] if not off <= 1e-6 else []
    faults += ['the adapter does nothing'] if torch.equal(before, wanted[:, -before.shape[1] :]) else []
    return faults + ([] if not os.path.exists(f'{folder}.part') else ['a part is left'])


# What is trained is what is saved.
ONE_EACH = ('lora', 'lora on 16 bit', 'whole modules', 'dora', 'ia3')
FILES = ('README.md', 'adapter_config.json', 'adapter_model.safetensors')


def saved_of_backbone(folder: str) -> list[str]:
    """Adapters in a module of a detector load onto that module alone."""
    from safetensors.torch import load_file

    model = ZeroModelWrapper(module=dino(), find_unused_parameters=True)
    save_adapters(model, folder)
    whole = model.engine.model_state()
    if dist.get_rank():
        return []
    tensors = load_file(f'{folder}/adapter_model.safetensors')
    ours = {f'base_model.model.{n.removeprefix("backbone.")}': v for n, v in whole.items() if 'lora_' in n}
    ours = {name.replace('.default', ''): value for name, value in ours.items()}
    plain = copy.deepcopy(TINY_DINO)['backbone']
    with DefaultScope.overwrite_default_scope('mmdet'):
        read = peft.PeftModel.from_pretrained(MODELS.build(plain), folder)
    return differing(tensors, ours) + differing(peft.get_peft_model_state_dict(read), ours)


def refused_without(folder: str) -> list[str]:
    model = ZeroModelWrapper(module=MODELS.build(dict(type='HuggingFaceCausalLM', config=LLAMA)))
    try:
        save_adapters(model, folder)
    except CheckpointError as error:
        return [] if 'has no adapters of PEFT' in str(error) else [str(error)]
    return ['no error']


def saving(folder: str, names: tuple[str, ...]) -> Faults:
    found = {
        f'{name}, stage {stage}': saved(name, f'{folder}/{name}{stage}', stage) for name in names for stage in (1, 3)
    }
    return {**found, 'backbone': saved_of_backbone(f'{folder}/swin'), 'none': refused_without(f'{folder}/none')}


def everything(folder: str, names: tuple[str, ...]) -> Faults:
    found = {**training(names, (1, 2, 3)), **saving(folder, names)}
    return {**found, **features(), **vision(), 'only trained': only_trained()} if 'lora' in names else found


@pytest.mark.distributed
@pytest.mark.parametrize('names', [FEW, pytest.param(tuple(set(MODELS_OF) - set(FEW)), marks=pytest.mark.slow)])
def test_two_ranks(tmp_path: Path, names: tuple[str, ...]) -> None:
    for case, faults in merged(run_ranks(2, everything, str(tmp_path), tuple(sorted(names)))).items():
        assert not faults, f'{case}: {faults}'


class Tokens(torch.utils.data.Dataset):
    """Sentences."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict:
        return {name: value[0] for name, value in tokens(index, size=1).items()}


def runner_of(folder: str, pretrained: str, epochs: int, stage: int = 3, **changes: Any) -> Any:
    settings = dict(
        train_dataloader=loader(Tokens()),
        val_dataloader=None,
        val_cfg=None,
        val_evaluator=None,
        test_dataloader=None,
        test_cfg=None,
        test_evaluator=None,
        train_cfg=dict(by_epoch=True, max_epochs=epochs),
        custom_hooks=[dict(type='AdapterCheckpointHook', max_keep=1)],
        launcher='pytorch' if dist.is_initialized() else 'none',
    )
    model = dict(type='HuggingFaceCausalLM', pretrained=pretrained, config=dict(dtype='bfloat16'), peft=LORA)
    units = dict(wrap_policy=dict(type='ModuleClassPolicy', classes=[LAYERS[0]]))
    return vector_runner(folder, model, stage, units, **{**settings, **changes})


def through_the_runner(folder: str) -> Faults:
    """Broken after the first epoch and resumed, also at another stage, against the unbroken run; the base stays."""
    base = f'{folder}/base'
    runner_of(f'{folder}/whole', base, 2).train()
    runner_of(f'{folder}/broken', base, 1).train()
    again = runner_of(f'{folder}/broken', base, 2, resume=True)
    again.train()
    other = runner_of(f'{folder}/other', base, 1, 1, load_from=f'{folder}/whole/epoch_1.pth', resume=True)
    other.train()
    other.save_checkpoint(f'{folder}/other', 'again.pth')
    dist.barrier()
    read = lambda path: torch.load(f'{folder}/{path}', weights_only=True)  # noqa: E731
    whole, first, end, same = map(
        read, ('whole/epoch_2.pth', 'whole/epoch_1.pth', 'broken/epoch_2.pth', 'other/again.pth')
    )
    found = {
        'resumed': differing(whole['state_dict'], end['state_dict']),
        'optimizer': _states_differ(whole, end),
        'other stage': differing(first['state_dict'], same['state_dict']) + _states_differ(first, same),
    }
    plain = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    state = {
        name.replace('llm.base_model.model.', '').replace('.base_layer', ''): v for name, v in end['state_dict'].items()
    }
    found['base'] = differing({name: v for name, v in state.items() if 'lora' not in name}, plain.state_dict())
    trained = sum(param.requires_grad for param in again.sharded.module.parameters())
    states = len(end['optimizer']['state'])
    found['state'] = [] if states == trained else [f'{states} states of {trained} trained']
    folders = sorted(os.listdir(f'{folder}/whole/adapters'))
    found['folders'] = [] if folders == ['epoch_2'] else [f'{folders}']
    loaded = peft.PeftModel.from_pretrained(plain, f'{folder}/whole/adapters/epoch_2')
    ours = {name.removeprefix('llm.'): v for name, v in whole['state_dict'].items() if 'lora' in name}
    found['adapters'] = differing({n: v for n, v in loaded.state_dict().items() if 'lora' in n}, ours)
    found['B moved'] = [name for name, value in ours.items() if not value.any()]
    return found


def _states_differ(one: dict, two: dict) -> list[str]:
    flat = [
        {f'{i} {name}': value for i, entry in run['optimizer']['state'].items() for name, value in entry.items()}
        for run in (one, two)
    ]
    return differing(*flat)


@pytest.mark.distributed
def test_runs_and_another_number_of_ranks(tmp_path: Path, group: None) -> None:
    torch.manual_seed(0)
    MODELS.build(dict(type='HuggingFaceCausalLM', config=HALF)).llm.save_pretrained(tmp_path / 'base')
    for case, faults in merged(run_ranks(2, through_the_runner, str(tmp_path))).items():
        assert not faults, f'{case}: {faults}'
    path = tmp_path / 'whole/epoch_1.pth'
    alone = runner_of(str(tmp_path / 'alone'), str(tmp_path / 'base'), 1, load_from=str(path), resume=True)
    alone.train()
    alone.save_checkpoint(str(tmp_path / 'alone'), 'again.pth')
    one, two = (torch.load(item, weights_only=True) for item in (path, tmp_path / 'alone/again.pth'))
    assert not differing(one['state_dict'], two['state_dict'])
    assert not _states_differ(one, two)


def test_a_hook_without_adapters_is_told(tmp_path: Path, group: None) -> None:
    with pytest.raises(CheckpointError, match='AdapterCheckpointHook: .* has no adapters of PEFT'):
        vector_runner(tmp_path, custom_hooks=[dict(type='AdapterCheckpointHook')]).train()
    with pytest.raises(ConfigError, match='interval: got 0'):
        vector_runner(tmp_path, custom_hooks=[dict(type='AdapterCheckpointHook', interval=0)])


@pytest.mark.parametrize('adapter', [LORA, dict(type='PrefixTuningConfig', **VIRTUAL)])
def test_decoder_layers_are_found_in_what_is_adapted(adapter: dict) -> None:
    model = MODELS.build(dict(type='HuggingFaceCausalLM', config=dict(LLAMA, num_hidden_layers=6), peft=adapter))
    units = [unit.class_name for unit in AutoPolicy(small=True)(model).units]
    assert units.count('LlamaDecoderLayer') == 6


def test_initial_weights_leave_adapters_alone() -> None:
    for cfg in (
        dict(type='HuggingFaceCausalLM', config=LLAMA, peft=LORA),
        dict(
            type='with_adapters',
            model=dict(type='TwoLayers', init_cfg=dict(type='Normal', layer='Linear', std=1.0)),
            peft=dict(type='LoraConfig', r=2, target_modules=['first']),
        ),
    ):
        model = MODELS.build(cfg)
        before = {name: param.detach().clone() for name, param in model.named_parameters() if 'lora_' in name}
        model.init_weights()
        after = {name: param.detach() for name, param in model.named_parameters() if 'lora_' in name}
        assert before and not differing(after, before)


@MODELS.register_module()
class TwoLayers(BaseModel):
    """Two layers."""

    def __init__(self, init_cfg: Any = None) -> None:
        super().__init__(init_cfg=init_cfg)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(inputs))


@pytest.mark.parametrize(
    ('adapter', 'message'),
    [
        (3, r'peft: got 3; expected a dict with type, such as'),
        (dict(type='LoraConfi'), "peft.type: no 'LoraConfi' in peft .*; did you mean 'LoraConfig'"),
        (dict(peft_type='LORO'), "peft.peft_type: no 'LORO' in peft .*; did you mean 'LORA'"),
        (dict(LORA, rank=3), 'peft.rank: LoraConfig has no such field'),
        (dict(LORA, init_lora_weights='pissa'), "peft.init_lora_weights: got 'pissa', which reads the base's weights"),
        (dict(LORA, peft_type='IA3'), "peft: type='LoraConfig' and peft_type='IA3' both name it; keep one"),
        (dict(LORA, layers_pattern='layers'), 'peft: LoraConfig refuses its fields: When `layers_pattern`'),
        (dict(LORA, target_modules='key'), 'Target modules key not found'),
        (
            dict(LORA, target_modules=['q_proj', 'v_prj']),
            "peft.target_modules: no module of LlamaForCausalLM is called 'v_prj'; did you mean 'v_proj'",
        ),
        (
            dict(LORA, modules_to_save=['lm_heads']),
            "peft.modules_to_save: no module of LlamaForCausalLM is called 'lm_heads'; did you mean 'lm_head'",
        ),
    ],
)
def test_wrong_fields_are_told(adapter: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare_plan(dict(model=dict(type='HuggingFaceCausalLM', config=LLAMA, peft=adapter)), 'llama.py', world_size=2)


def test_a_start_from_weights_that_come_later_is_another_model() -> None:
    # What the refusal of these is for: bare PEFT changes the base, and loading it takes that back.
    torch.manual_seed(0)
    plain = MODELS.build(dict(type='HuggingFaceCausalLM', config=LLAMA))
    late = copy.deepcopy(plain)
    config = peft.LoraConfig(r=4, target_modules=['q_proj'], init_lora_weights='pissa')
    late.llm = peft.get_peft_model(late.llm, config)
    ids = tokens(0)['input_ids']
    torch.testing.assert_close(late(ids), plain(ids))
    load_into_real(late, late.state_dict(), dict(state_dict=plain.state_dict()), 'plain', False, ())
    assert float((late(ids) - plain(ids)).abs().max()) > 1e-4


def test_the_module_that_is_adapted_has_to_be_there() -> None:
    with pytest.raises(ValueError, match="module: TwoLayers has no 'frist'; did you mean 'first'"):
        MODELS.build(dict(type='with_adapters', model=dict(type='TwoLayers'), peft=LORA, module='frist'))


def test_files_are_those_of_peft(tmp_path: Path, group: None) -> None:
    model = ZeroModelWrapper(module=build('lora'))
    save_adapters(model, f'{tmp_path}/one')
    # In place of an older one.
    save_adapters(model, f'{tmp_path}/one')
    config = json.loads((tmp_path / 'one/adapter_config.json').read_text())
    assert (config['peft_type'], config['task_type'], config['r']) == ('LORA', 'CAUSAL_LM', 4)
