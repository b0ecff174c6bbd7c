"""Memory and time of a detector on one GPU as more is done about its activations, beside stock mmdet in the same run.

[Note: the published series]
For DINO 5-scale Swin-L at two images a GPU, 49 GB were published to go to 18 by checkpointing backbone and encoder, to
13 with AMP, to 8.5 with FSDP, at up to 2.7 times the time. This takes such steps on one GPU, where nothing is sharded,
so that what differs are activations, and two more: offloading, and a budget.
"""

import copy
import functools
import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from mmengine.optim import OptimWrapper
from mmengine.registry import MODELS, DefaultScope
from torch import nn

from mmzero.analysis.activations import OWN_OPTIONS, blocks_by_part
from mmzero.analysis.sweep.reduction import reduced, walk
from mmzero.patches import KeptBytes
from mmzero.wrappers import ZeroModelWrapper, ZeroOptimWrapper

STOCK, BF16 = 'stock mmdet, fp32', '+ bf16'


@dataclass(frozen=True)
class Entry:
    """One way to train.

    Args:
        name (str): As the table has it.
        dtype (str, optional): Of autocast. Defaults to None: fp32.
        checkpointing (Any): As in a config. Defaults to none.
    """

    name: str
    dtype: str | None = None
    checkpointing: Any = field(default_factory=list)


@dataclass(frozen=True)
class Measured:
    """What one way takes.

    Args:
        peak (int): Bytes that CUDA's allocator gave out at the peak of a step; 0 on a CPU.
        kept (int): Bytes kept for backward at the end of forward.
        seconds (float): Of a step, the median.
    """

    peak: int
    kept: int
    seconds: float


def series_of(model: nn.Module) -> list[Entry]:
    """List the ways, one on top of the other.

    Args:
        model (nn.Module): The detector.

    Returns:
        list[Entry]: From fp32 without anything on.
    """
    parts = blocks_by_part(model)
    backbone, encoder = parts['backbone'], parts.get('encoder', [])
    return [
        Entry('mmzero, fp32'),
        Entry(BF16, 'bfloat16'),
        Entry('+ backbone recomputed', 'bfloat16', backbone),
        Entry('+ encoder recomputed', 'bfloat16', backbone + encoder),
        Entry('+ offloaded', 'bfloat16', dict(modules=backbone + encoder, offload='cpu')),
    ]


def measure_series(
    build: Callable[[], nn.Module], batch: Callable[[], dict], steps: int, device: torch.device
) -> dict[str, Measured]:
    """Train a detector for a few steps each way, one after the other.

    Args:
        build (Callable): Builds the detector, with the same weights each time.
        batch (Callable): Makes a batch.
        steps (int): Steps of each, of which the first half warm up: at least 8, since a budget chooses in the first.
        device (torch.device): Where to train.

    Returns:
        dict[str, Measured]: By name, stock mmdet first.
    """
    found = {STOCK: _measure(lambda: _stock(build(), device), batch, steps, device)}
    for entry in series_of(build()):
        found[entry.name] = _measure(functools.partial(_pair, build, entry), batch, steps, device)
    half = dict(type='Budget', memory=found[BF16].kept // 2)
    budget = Entry('Budget at half', 'bfloat16', half)
    found[budget.name] = _measure(functools.partial(_pair, build, budget), batch, steps, device)
    return found


def _stock(model: nn.Module, device: torch.device) -> tuple[Any, Any]:
    model.to(device)
    return model, OptimWrapper(torch.optim.AdamW(model.parameters(), lr=1e-4), clip_grad=dict(max_norm=0.1))


def _pair(build: Callable[[], nn.Module], entry: Entry) -> tuple[Any, Any]:
    wrapped = ZeroModelWrapper(
        build(), stage=3, precision=dict(param_dtype=entry.dtype), activation_checkpointing=entry.checkpointing
    )
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-4)
    return wrapped, ZeroOptimWrapper(optimizer, dtype=entry.dtype, clip_grad=dict(max_norm=0.1))


def _measure(make: Callable[[], tuple], batch: Callable[[], dict], steps: int, device: torch.device) -> Measured:
    on_gpu = device.type == 'cuda'
    model, optim = make()
    optim.initialize_count_status(model, 0, steps)
    model.train()
    seconds, kept = [], KeptBytes()
    for step in range(steps):
        if on_gpu and step == steps // 2:
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
        data, start = batch(), time.perf_counter()
        if step < steps - 1:
            model.train_step(data, optim)
        else:
            # Hooks on saved tensors cost time: this step counts bytes.
            kept = _count_kept(model, optim, data)
        if on_gpu:
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated(device) if on_gpu else 0
    del model, optim
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
    return Measured(peak, kept.total, statistics.median(seconds[steps // 2 : -1]))


def _count_kept(model: Any, optim: Any, data: dict) -> KeptBytes:
    """Take a step; what backward saves for itself, as the recompute of a region does, is not counted."""
    kept = KeptBytes()
    inner = getattr(model, 'module', model)
    with kept.counting():
        with optim.optim_context(model):
            losses = inner(**inner.data_preprocessor(data, True), mode='loss')
    loss, _ = inner.parse_losses(losses)
    optim.update_params(loss)
    return kept


def detector(cfg: Mapping, size: int) -> Callable[[], nn.Module]:
    """What builds a config's detector, without weights of others and without checkpointing of its own.

    Args:
        cfg (Mapping): The config, of mmdet.
        size (int): To which its data preprocessor scales or pads, if it does.

    Returns:
        Callable: Builds it.
    """
    model_cfg = reduced(cfg, size)
    for part in walk(model_cfg):
        part.update({name: off for name, off in OWN_OPTIONS.items() if name in part})

    def build() -> nn.Module:
        torch.manual_seed(0)
        with DefaultScope.overwrite_default_scope('mmdet'):
            model = MODELS.build(copy.deepcopy(model_cfg))
        model.init_weights()
        return model

    return build


def series_table(found: dict[str, Measured]) -> str:
    """Lay out what was measured.

    Args:
        found (dict[str, Measured]): By name.

    Returns:
        str: A Markdown table.
    """
    stock = found[STOCK]
    rows = ['| | peak, GiB | kept for backward, GiB | time / stock |', '|---' * 4 + '|']
    for name, one in found.items():
        peak = f'{one.peak / 2**30:.1f}' if one.peak else ''
        rows.append(f'| {name} | {peak} | {one.kept / 2**30:.2f} | {one.seconds / stock.seconds:.2f} |')
    return '\n'.join(rows)
