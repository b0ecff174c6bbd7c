"""Loading weights of a model of another size by the model's own hooks, under mmzero and by MMEngine."""

import copy

import torch
from mmengine.registry import MODELS
from mmengine.runner.checkpoint import load_state_dict
from torch import nn

from tests.distributed.cases import differing
from tests.distributed.detector import detector_runner, on_file, seeded
from tests.distributed.training import full


def weights_of(model: dict, seed: int) -> nn.Module:
    return seeded(lambda: MODELS.build(copy.deepcopy(model)), seed)


def loaded_by_mmengine(model: dict, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    plain = weights_of(model, 1)
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    load_state_dict(plain, copy.copy(state), logger='silent')
    # What is not in the file is the run's own.
    return {name: value for name, value in plain.state_dict().items() if not torch.equal(value, before[name])}


def resizes_alike(folder: str, stage: int, model: dict, source: dict) -> list[str]:
    """Load the weights of one model into another, before and after sharding; says where MMEngine loads others."""
    state = weights_of(source, 5).state_dict()
    path = on_file(f'{folder}.pth', dict(state_dict=state))
    wanted = loaded_by_mmengine(model, state)
    faults = [] if len(wanted) > 3 else [f'MMEngine loads {list(wanted)} alone']
    for later in (False, True):
        fields = {} if later else dict(load_from=path)
        runner = detector_runner(folder, stage, copy.deepcopy(model), **fields)
        runner.prepare()
        if later:
            runner.load_checkpoint(path)
        found = by_saved_names(runner.model.module, wanted)
        faults += [f'{"later" if later else "before"}: {text}' for text in differing(found, wanted)]
    return faults


def by_saved_names(model: nn.Module, wanted: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gathered, under the names of the state dict, which need not be those of modules."""
    return {name: full(value) for name, value in model.state_dict().items() if name in wanted}
