"""Measure the pair's step against fully_shard by hand, MMEngine's FSDP and DDP, in one process group.

With --engine deepspeed against deepspeed.initialize by hand and DDP.

Under torchrun it joins its ranks, else it starts them. Times of a busy machine drift, so steps are interleaved and
ratios of neighbouring ones are taken; see mmzero/analysis/paired.py. The model is a ViT-Tiny of 8 blocks on noise;
models of other configs are not measured yet.
"""

import argparse
from pathlib import Path

import torch.distributed as dist

from mmzero.analysis.launch import join_ranks
from mmzero.analysis.overhead import measure_overhead
from mmzero.analysis.overhead_report import overhead_table, write_json
from mmzero.analysis.setting import Setting
from mmzero.analysis.vit import ViTBlock
from mmzero.analysis.vit_options import add_vit_options, positive, vit_of
from mmzero.runner import run_tool


def parse_args() -> argparse.Namespace:
    """Read the command line.

    Returns:
        argparse.Namespace: The arguments.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--quick', action='store_true', help='stage 3 instead of all stages')
    parser.add_argument('--stages', type=int, nargs='+', choices=(1, 2, 3), help='ZeRO stages')
    parser.add_argument('--engine', choices=('fsdp2', 'deepspeed'), default='fsdp2', help="the pair's")
    parser.add_argument('--accumulation', type=positive, default=1, help='micro-batches per optimizer step')
    add_vit_options(parser)
    parser.add_argument('--out', type=Path, help='a JSON file to write')
    args = parser.parse_args()
    args.stages = args.stages or ([3] if args.quick else [1, 2, 3])
    return args


def main() -> None:
    """Measure and print."""
    args = parse_args()
    device = join_ranks(args.nproc)
    found = []
    for stage in args.stages:
        bf16 = args.dtype == 'bfloat16'
        setting = Setting(
            vit_of(args), ViTBlock, device, stage, accumulation=args.accumulation, bf16=bf16, engine=args.engine
        )
        found.append(measure_overhead(setting, rounds=args.rounds, batch_size=args.batch_size, seed=args.seed))
        if dist.get_rank() == 0:
            print(overhead_table(found[-1]), flush=True)
    if args.out and dist.get_rank() == 0:
        write_json(found, args.out)
    if any(item.faults for item in found):
        raise RuntimeError('the comparison does not hold; see FAULT above')


if __name__ == '__main__':
    run_tool(main)
