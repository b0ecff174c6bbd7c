"""``init_cfg`` reads what others have saved, and mmdet's Swin converts the official weights, as without mmzero."""

import copy
import json
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mmengine.config import ConfigDict

from mmzero.errors import CheckpointError
from tests.distributed.cases import Faults, differing, merged, refused
from tests.distributed.detector import Detector, detector_runner, pretrained, seeded, whole_state
from tests.distributed.ranks import run_ranks
from tests.models import TINY_DINO, tiny_dino

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

STAGES = (0, 3)
INDEX = 'relative_position_index'
WRAPPED = 'module._orig_mod._fsdp_wrapped_module.'


def written(folder: str) -> dict[str, str]:
    """The same weights in each layout, and the paths by layout."""
    state = seeded(Detector, 9).state_dict()
    inside = {name.replace('.weight', '._checkpoint_wrapped_module.weight'): value for name, value in state.items()}
    layouts: dict[str, Any] = {
        'timm.pth': dict(state_dict=state, arch='detector'),
        'deit.pth': dict(model=state, model_ema={name: value + 1 for name, value in state.items()}),
        'deepspeed.pt': dict(module=state, ds_version='0.19'),
        'wrapped.pth': dict(state_dict={f'{WRAPPED}{name}': value for name, value in inside.items()}),
        'pytorch_model.bin': state,
    }
    paths = {name: f'{folder}/{name}' for name in layouts}
    parts = {'a.bin': list(state)[:3], 'b.bin': list(state)[3:]}
    paths['parts'] = f'{folder}/parts'
    if dist.get_rank() == 0:
        for name, content in layouts.items():
            torch.save(content, paths[name])
        os.makedirs(paths['parts'])
        for file, names in parts.items():
            torch.save({name: state[name] for name in names}, f'{paths["parts"]}/{file}')
        index = dict(weight_map={name: file for file, names in parts.items() for name in names})
        with open(f'{paths["parts"]}/pytorch_model.bin.index.json', 'w') as file:
            json.dump(index, file)
    dist.barrier()
    return paths


def layouts(folder: str, paths: dict[str, str], stage: int) -> list[str]:
    """By ``load_from``, ``init_cfg`` with a prefix, and into shards."""
    state = seeded(Detector, 9).state_dict()
    backbone = {name: value for name, value in state.items() if name.startswith('backbone.')}
    faults = []
    for name, path in paths.items():
        ways: dict[str, tuple[dict, dict, dict]] = {
            'load_from': ({}, dict(load_from=path), state),
            'init_cfg': (dict(backbone_cfg=pretrained(path, prefix='backbone.')), {}, backbone),
            'later': ({}, {}, state),
        }
        for way, (model, fields, wanted) in ways.items():
            runner = detector_runner(f'{folder}/{stage}', stage, model, **fields)
            runner.prepare()
            if way == 'later':
                runner.load_checkpoint(path, strict=True)
            found = {key: value for key, value in whole_state(runner.model.module).items() if key in wanted}
            faults += [f'{name}, {way}: {text}' for text in differing(found, wanted)]
    return faults


def official_swin(folder: str, stage: int) -> list[str]:
    """Other names, an order of channels, and tables of another window, all of which the model converts by itself."""
    path = f'{folder}/swin.pth'
    before = {'stages.': 'layers.', 'attn.w_msa.': 'attn.', 'ffn.layers.0.0.': 'mlp.fc1.', 'ffn.layers.1.': 'mlp.fc2.'}
    before['patch_embed.projection'] = 'patch_embed.proj'
    if dist.get_rank() == 0:
        source = seeded(lambda: tiny_dino(window_size=7), 3).backbone.state_dict()
        for new, old in before.items():
            source = {name.replace(new, old): value for name, value in source.items()}
        # With it mmdet itself refuses another window.
        torch.save(dict(model={name: value for name, value in source.items() if INDEX not in name}), path)
        torch.save(dict(model=source), f'{folder}/indexed.pth')
    dist.barrier()
    changes = dict(convert_weights=True, init_cfg=ConfigDict(pretrained(path)))
    plain = seeded(lambda: tiny_dino(**changes), 0).backbone.state_dict()
    model = copy.deepcopy(TINY_DINO)
    model['backbone'].update(changes)
    runner = detector_runner(f'{folder}/swin {stage}', stage, copy.deepcopy(model), default_scope='mmdet')
    runner.prepare()
    found = whole_state(runner.model.module.backbone)
    # What is not in the file is the run's own.
    wanted = {name: value for name, value in plain.items() if not name.startswith('norm')}
    faults = differing({name: found[name] for name in wanted}, wanted)
    table = 'stages.0.blocks.0.attn.w_msa.relative_position_bias_table'
    faults += [] if wanted[table].shape == (49, 2) else [f'{wanted[table].shape}']
    model['backbone']['init_cfg'] = ConfigDict(pretrained(f'{folder}/indexed.pth'))
    with refused(faults, CheckpointError, 'indexed.pth does not fit', INDEX, '[49, 49]', '[16, 16]'):
        detector_runner(f'{folder}/swin {stage}', stage, copy.deepcopy(model), default_scope='mmdet').prepare()
    return faults


def run_cases(folder: str) -> Faults:
    import mmdet.models  # noqa: F401

    paths = written(folder)
    return {
        f'{name} {stage}': case(stage)
        for stage in STAGES
        for name, case in {
            'layouts': lambda stage: layouts(folder, paths, stage),
            'official_swin': lambda stage: official_swin(folder, stage),
        }.items()
    }


@pytest.fixture(scope='module')
def found(tmp_path_factory: pytest.TempPathFactory) -> Faults:
    return merged(run_ranks(2, run_cases, str(tmp_path_factory.mktemp('layouts'))))


@pytest.mark.parametrize('stage', STAGES)
@pytest.mark.parametrize('case', ['layouts', 'official_swin'])
def test_pretrained_layouts(found: Faults, case: str, stage: int) -> None:
    assert not found[f'{case} {stage}'], '\n'.join(found[f'{case} {stage}'])
