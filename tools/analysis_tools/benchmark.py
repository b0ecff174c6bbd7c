"""Measure the pair's step against fully_shard by hand, MMEngine's FSDP and DDP, in one process group.

Under torchrun it joins its ranks, else it starts them. Times of a busy machine drift, so steps are interleaved and
ratios of neighbouring ones are taken; see mmzero/analysis/paired.py. The model is a ViT-Tiny of 8 blocks on noise;
models of other configs are not measured yet.
"""

import argparse
import functools
from pathlib import Path

import torch.distributed as dist

from mmzero.analysis.launch import join_ranks
from mmzero.analysis.overhead import measure_overhead
from mmzero.analysis.overhead_report import overhead_table, write_json
from mmzero.analysis.setting import Setting
from mmzero.analysis.vit import ViT, ViTBlock
from mmzero.runner import run_tool


def parse_args() -> argparse.Namespace:
    """Read the command line.

    Returns:
        argparse.Namespace: The arguments.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--quick', action='store_true', help='stage 3 instead of all stages')
    parser.add_argument('--stages', type=int, nargs='+', choices=(1, 2, 3), help='ZeRO stages')
    parser.add_argument('--rounds', type=positive, help='timed steps of each contestant; default: 200')
    parser.add_argument('--accumulation', type=positive, default=1, help='micro-batches per optimizer step')
    parser.add_argument('--dtype', choices=('float32', 'bfloat16'), default='float32', help='of the units')
    parser.add_argument('--batch-size', type=positive, default=4, help='images of a micro-batch on a rank')
    parser.add_argument('--width', type=positive, default=192, help="the model's channels, a multiple of 3")
    parser.add_argument('--depth', type=positive, default=8, help="the model's blocks")
    parser.add_argument('--seed', type=int, default=0, help='of the orders and the bootstrap')
    parser.add_argument('--nproc', type=positive, help='ranks to start; default: one a GPU, or 2 on CPUs')
    parser.add_argument('--out', type=Path, help='a JSON file to write')
    args = parser.parse_args()
    args.stages = args.stages or ([3] if args.quick else [1, 2, 3])
    args.rounds = args.rounds or 200
    if args.width % 3:
        parser.error(f'--width: expected a multiple of 3, the number of heads; got {args.width}')
    return args


def positive(text: str) -> int:
    """Read a number of at least 1."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f'expected at least 1; got {text}')
    return int(text)


def main() -> None:
    """Measure and print."""
    args = parse_args()
    device = join_ranks(args.nproc)
    found = []
    for stage in args.stages:
        build = functools.partial(ViT, width=args.width, depth=args.depth)
        bf16 = args.dtype == 'bfloat16'
        setting = Setting(build, ViTBlock, device, stage=stage, accumulation=args.accumulation, bf16=bf16)
        found.append(measure_overhead(setting, rounds=args.rounds, batch_size=args.batch_size, seed=args.seed))
        if dist.get_rank() == 0:
            print(overhead_table(found[-1]), flush=True)
    if args.out and dist.get_rank() == 0:
        write_json(found, args.out)
    if any(item.faults for item in found):
        raise RuntimeError('the comparison does not hold; see FAULT above')


if __name__ == '__main__':
    run_tool(main)
