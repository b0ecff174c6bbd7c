"""Models that are evaluated and not trained: parameters streamed from the host or a disk, predictions of the whole."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mmengine.evaluator import BaseMetric
from safetensors.torch import save_file

from mmzero.errors import PlanError
from tests.distributed.cases import Faults, merged, refused
from tests.distributed.ranks import run_ranks
from tests.models import ToyModel
from tests.vectors import Vectors, loader, vector_runner

pytestmark = pytest.mark.distributed

UNITS = dict(wrap_policy=dict(type='ModuleClassPolicy', classes=['Block']))
SMALL = dict(engine='deepspeed', engine_options=dict(zero_optimization=dict(stage3_param_persistence_threshold=20)))
FSDP2: dict[str, dict[str, Any]] = {
    'stage 3': UNITS,
    'from the host': dict(UNITS, offload=dict(params='cpu')),
}
DEEPSPEED: dict[str, dict[str, Any]] = {
    'stage 3': SMALL,
    'from the host': dict(SMALL, offload=dict(params='cpu', optimizer='cpu')),
}


class Kept(BaseMetric):
    """Keeps predictions."""

    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.results += [sample.clone() for sample in data_samples]

    def compute_metrics(self, results: list) -> dict[str, Any]:
        return dict(logits=torch.stack(results).tolist())


class Whole(ToyModel):
    """Without what DeepSpeed cannot have."""

    def __init__(self) -> None:
        super().__init__(scalar=False)


def predictions(
    folder: str, stage: int, half: bool, load_from: str, fields: dict[str, Any], run: str, hooks: Any = None
) -> Any:
    optim = dict(type='AmpOptimWrapper', dtype='bfloat16') if half else dict(type='OptimWrapper')
    # Five samples: two batches on rank 0, one on rank 1.
    data, metric = loader(Vectors(5), round_up=False), dict(type=Kept)
    runner = vector_runner(
        folder,
        dict(type=Whole),
        stage,
        fields,
        test_dataloader=data,
        test_evaluator=metric,
        val_dataloader=data,
        val_evaluator=metric,
        optim_wrapper=dict(optim, optimizer=dict(type='AdamW', lr=0.01)),
        launcher='pytorch',
        load_from=load_from,
        custom_hooks=hooks,
    )
    found = torch.tensor(getattr(runner, run)()['logits'])
    model = runner.sharded.module
    held = sum(param.ds_tensor.numel() if hasattr(param, 'ds_tensor') else 0 for param in model.parameters())
    return found, held / sum(getattr(param, 'ds_numel', param.numel()) for param in model.parameters())


def evaluated(folder: str, settings: dict[str, dict[str, Any]]) -> Faults:
    torch.manual_seed(1)
    if dist.get_rank() == 0:
        model = Whole()
        torch.save(dict(state_dict=model.state_dict()), f'{folder}/a.pth')
        # Each rank reads its shards of it.
        save_file({name: value.clone() for name, value in model.state_dict().items()}, f'{folder}/a.safetensors')
    dist.barrier()
    found: Faults = {}
    for half in (False, True):
        for run, source in (('test', 'a.pth'), ('val', 'a.pth'), ('test', 'a.safetensors')):
            wanted, _ = predictions(f'{folder}/whole', 0, half, f'{folder}/a.pth', {}, run)
            hooks = [dict(type='EMAHook')] if run == 'test' else None
            for name, fields in settings.items():
                faults = found[f'{name}, {half}, {run}, {source}'] = []
                own, share = predictions(f'{folder}/{name}', 3, half, f'{folder}/{source}', fields, run, hooks)
                off = float((own - wanted).abs().max() / wanted.abs().max())
                faults += [] if off <= (2e-2 if half else 1e-6) else [f'{off:.1e} off']
                if 'engine' in fields:
                    faults += [] if 0.4 < share <= 0.6 else [f'a rank holds {share:.2f} of the model']
    return found


@pytest.mark.parametrize('settings', [FSDP2, pytest.param(DEEPSPEED, marks=pytest.mark.deepspeed)])
def test_predictions_are_those_of_the_whole_model(tmp_path: Path, settings: dict[str, dict[str, Any]]) -> None:
    for case, faults in merged(run_ranks(2, evaluated, str(tmp_path), settings)).items():
        assert not faults, f'{case}: {faults}'


def trained_afterwards(folder: str) -> Faults:
    faults: list[str] = []
    runner = vector_runner(folder, dict(type=Whole), 3, SMALL, launcher='pytorch')
    runner.val()
    with refused(faults, PlanError, 'has partitioned the model to be evaluated alone', "use engine='fsdp2'"):
        runner.train()
    return dict(trained=faults)


@pytest.mark.deepspeed
def test_what_was_evaluated_alone_is_not_trained(tmp_path: Path) -> None:
    for case, faults in merged(run_ranks(2, trained_afterwards, str(tmp_path))).items():
        assert not faults, f'{case}: {faults}'
