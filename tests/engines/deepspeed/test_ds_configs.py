"""Files of DeepSpeed as people have them train two steps by what they say, or are refused with the reason."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mmzero.config import without_auto
from mmzero.config.engine_options import optim_fields_of
from mmzero.errors import ConfigError
from tests.distributed.cases import merged
from tests.distributed.ranks import run_ranks
from tests.engines.deepspeed.ds_configs import CASES, Case
from tests.models import ToyModel
from tests.vectors import vector_runner

pytestmark = [pytest.mark.deepspeed, pytest.mark.distributed]


class Plain(ToyModel):
    """Without what DeepSpeed cannot train."""

    def __init__(self) -> None:
        super().__init__(scalar=False)
        del self.unused


def runner_of(folder: str, case: Case) -> Any:
    path = f'{folder}/ds_config.json'
    if dist.get_rank() == 0:
        Path(folder).mkdir(exist_ok=True)
        Path(path).write_text(case.options if isinstance(case.options, str) else json.dumps(case.options))
    dist.barrier()
    steps = 2
    if not isinstance(case.options, str):
        steps *= optim_fields_of(case.options).get('accumulative_counts', 1)
    wrapper = dict(type='ZeroModelWrapper', engine='deepspeed', engine_options=path)
    evaluation = dict(val_dataloader=None, val_cfg=None, val_evaluator=None)
    changes: dict[str, Any] = dict(evaluation, train_cfg=dict(by_epoch=False, max_iters=steps), launcher='pytorch')
    changes |= dict(test_dataloader=None, test_cfg=None, test_evaluator=None, default_hooks=dict(checkpoint=None))
    return vector_runner(folder, dict(type=Plain), cfg=dict(model_wrapper_cfg=wrapper), **changes | case.run)


def differing(given: Any, found: Any, path: str) -> list[str]:
    """Where what DeepSpeed runs with is not what the file says."""
    if isinstance(given, dict):
        return [
            fault
            for name, value in given.items()
            for fault in differing(value, found.get(name) if isinstance(found, dict) else None, f'{path}.{name}')
        ]
    return [] if found == given or str(found) == str(given) else [f'{path}: {found!r} instead of {given!r}']


SHORT = {torch.bfloat16: 'bf16', torch.float32: 'fp32'}


def attributes(engine: Any) -> dict[str, Any]:
    """What a ds_config's keys have become."""
    config = engine.runtime._config
    zero = config.zero_config.model_dump(by_alias=True)
    return dict(
        train_batch_size=engine.runtime.train_batch_size(),
        train_micro_batch_size_per_gpu=engine.runtime.train_micro_batch_size_per_gpu(),
        gradient_accumulation_steps=engine.runtime.gradient_accumulation_steps(),
        gradient_clipping=engine.runtime.gradient_clipping(),
        steps_per_print=engine.runtime.steps_per_print(),
        wall_clock_breakdown=config.wall_clock_breakdown,
        dump_state=config.dump_state,
        memory_breakdown=config.memory_breakdown,
        communication_data_type={'torch.bfloat16': 'bf16', 'torch.float32': 'fp32'}[
            str(config.communication_data_type)
        ],
        data_types=dict(grad_accum_dtype=config.grad_accum_dtype),
        bf16=config.bfloat16_config.model_dump(),
        fp16=dict(config.float16_config.model_dump(), enabled=config.float16_config.enabled),
        zero_optimization=dict(zero, cpu_offload=bool(zero.get('cpu_offload'))),
    )


# MMEngine's, and what only DeepSpeed's own logging looks at.
NOT_COMPARED = ('optimizer', 'scheduler', 'comms_logger', 'flops_profiler', 'tensorboard', 'csv_monitor')


def trained(folder: str, case: Case) -> list[str]:
    runner = runner_of(folder, case)
    runner.train()
    engine = runner.sharded.engine
    options = case.options if isinstance(case.options, dict) else {}
    given = {name: value for name, value in without_auto(options).items() if name not in NOT_COMPARED}
    faults = differing(given, attributes(engine), 'options')
    if engine.runtime.global_steps != 2:
        faults.append(f'{engine.runtime.global_steps} steps')
    engine.runtime.destroy()
    return faults


def outcome(folder: str, case: Case) -> list[str]:
    if not case.refused:
        return trained(folder, case)
    try:
        runner_of(folder, case)
    except ConfigError as error:
        faults = [f'{part!r} is not in: {error}' for part in case.refused if part not in str(error)]
        # What else is told has to be meant, too.
        told = [fault for fault in error.faults if not any(part in fault for part in case.refused)]
        return faults + [f'not meant: {fault}' for fault in told]
    return ['was not refused']


def outcomes(folder: str) -> dict[str, list[str]]:
    found = {}
    for number, (name, case) in enumerate(CASES.items()):
        found[name] = outcome(f'{folder}/{number}', case)
    return found


def test_files_as_people_have_them(tmp_path: Path) -> None:
    assert len(CASES) >= 20
    wrong = {name: faults for name, faults in merged(run_ranks(2, outcomes, str(tmp_path))).items() if faults}
    assert not wrong, '\n'.join(f'{name}: {faults}' for name, faults in wrong.items())
