"""Shards in host memory: the same run with and without, on a host without GPUs too; what a GPU does is in tests/gpu."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

from mmzero import ZeroModelWrapper, ZeroOptimWrapper
from tests.distributed.cases import Faults, differing, merged
from tests.distributed.ranks import run_ranks
from tests.models import ToyModel, toy_batch
from tests.vectors import vector_runner

pytestmark = pytest.mark.distributed

HOST = dict(offload=dict(params='cpu', optimizer='cpu'))
UNITS = dict(wrap_policy=dict(type='ModuleClassPolicy', classes=['Block']), find_unused_parameters=True)
EMA = [dict(type='EMAHook', momentum=0.1)]


class Ops(TorchDispatchMode):
    """Notes which operators ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.__name__)
        return func(*args, **(kwargs or {}))


def kernels() -> list[str]:
    """The fused kernel is taken where nobody has chosen, and is no trace in the groups."""
    faults = []
    for name, options, wanted in (
        ('AdamW', {}, True),
        ('Adam', dict(amsgrad=True), True),
        ('SGD', dict(momentum=0.9), True),
        ('Adagrad', {}, True),
        ('RMSprop', {}, False),
        ('AdamW', dict(foreach=True), False),
        ('AdamW', dict(fused=False), False),
    ):
        model = ZeroModelWrapper(module=ToyModel(), stage=3, **UNITS, **HOST)
        optimizer = getattr(torch.optim, name)(model.module.parameters(), lr=0.01, **options)
        optim = ZeroOptimWrapper(optimizer)
        before = [{key: value for key, value in group.items() if key != 'params'} for group in optimizer.param_groups]
        optim.initialize_count_status(model, 0, 2)
        model.train()
        with Ops() as ops:
            model.train_step(toy_batch(dist.get_rank()), optim)
        after = [{key: value for key, value in group.items() if key != 'params'} for group in optimizer.param_groups]
        if any(op.startswith('_fused_') for op in ops.names) is not wanted:
            faults.append(f'{name} {options}: {sorted(op for op in ops.names if "_f" in op)}')
        if before != after:
            faults.append(f'{name} {options}: {before} became {after}')
        policies = [group.offload_policy for group in param_groups(model)]
        if not policies or any(policy != CPUOffloadPolicy(pin_memory=False) for policy in policies):
            faults.append(f'{policies}')
    return faults


def param_groups(model: Any) -> list[Any]:
    units: list[Any] = [module for module in model.module.modules() if isinstance(module, FSDPModule)]
    return [unit._get_fsdp_state()._fsdp_param_group for unit in units]


def run(folder: str, stage: int, epochs: int, offloads: bool, **changes: Any) -> dict[str, Any]:
    """Train with the runner, and give what it saved last."""
    torch.manual_seed(0)
    runner = vector_runner(
        folder,
        stage=stage,
        wrapper=dict(UNITS, **(HOST if offloads else {})),
        train_cfg=dict(by_epoch=True, max_epochs=epochs, val_interval=1),
        optim_wrapper=dict(
            type='OptimWrapper',
            optimizer=dict(type='AdamW', lr=0.01),
            clip_grad=dict(max_norm=0.1),
            **changes.pop('optim', {}),
        ),
        custom_hooks=EMA,
        **changes,
    )
    runner.train()
    runner.save_checkpoint(folder, 'last.pth')
    dist.barrier()
    return torch.load(f'{folder}/last.pth', weights_only=True)


def resumed(folder: str, stage: int, other: int) -> list[str]:
    """What was saved with offload is gone on with without, and the other way round; loaded state is that saved."""
    faults = []
    for offloads in (True, False):
        name = f'{folder}/{offloads}'
        saved = run(f'{name}/first', stage, 1, offloads)
        again = run(f'{name}/again', other, 1, not offloads, load_from=f'{name}/first/last.pth', resume=True)
        faults += differing(flat(again), flat(saved))
        groups = [checkpoint['optimizer']['param_groups'] for checkpoint in (again, saved)]
        faults += [] if groups[0] == groups[1] else [f'{groups}']
        ends = [
            run(f'{name}/{to}', other, 2, to, load_from=f'{name}/first/last.pth', resume=True) for to in (True, False)
        ]
        faults += [f'after it: {text}' for text in apart(*map(flat, ends))]
    return faults


def flat(checkpoint: dict[str, Any]) -> dict[str, torch.Tensor]:
    state = checkpoint['optimizer']['state']
    return {
        **checkpoint['state_dict'],
        **{f'ema {name}': value for name, value in checkpoint['ema_state_dict'].items()},
        **{f'{name} {index}': value for index, entries in state.items() for name, value in entries.items()},
    }


def apart(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> list[str]:
    """Fused kernels round otherwise."""
    faults = [f'{name} is on one side only' for name in found.keys() ^ wanted.keys()]
    pairs = [(found[name].double(), value.double()) for name, value in wanted.items()]
    off = torch.stack([(a - b).norm() for a, b in pairs]).norm() / torch.stack([b.norm() for _, b in pairs]).norm()
    return faults + ([f'{off:.0e} apart'] if not off <= 1e-6 else [])


def cases(folder: str) -> Faults:
    return dict(
        kernels=kernels(),
        resumed=resumed(f'{folder}/plain', 3, 1),
    )


@pytest.mark.parametrize('ranks', [2, pytest.param(4, marks=pytest.mark.slow)])
def test_offload(tmp_path: Path, ranks: int) -> None:
    for case, faults in merged(run_ranks(ranks, cases, str(tmp_path))).items():
        assert not faults, f'{case}: {faults}'
