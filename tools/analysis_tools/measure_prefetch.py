"""Measure ways to prefetch units beside FSDP2's own: time, collectives, memory.

Under torchrun it joins its ranks, else it starts them. The model is the ViT of benchmark.py.
"""

import argparse
import functools

import torch.distributed as dist

from mmzero.analysis.launch import join_ranks
from mmzero.analysis.prefetch import measure_prefetch, prefetch_table
from mmzero.analysis.setting import Setting
from mmzero.analysis.vit import ViT, ViTBlock
from mmzero.runner import run_tool


def parse_args() -> argparse.Namespace:
    """Read the command line.

    Returns:
        argparse.Namespace: The arguments.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--rounds', type=int, default=200, help='timed steps of each way')
    parser.add_argument('--dtype', choices=('float32', 'bfloat16'), default='float32', help='of the units')
    parser.add_argument('--batch-size', type=int, default=4, help='images of a micro-batch on a rank')
    parser.add_argument('--width', type=int, default=192, help="the model's channels, a multiple of 3")
    parser.add_argument('--depth', type=int, default=8, help="the model's blocks")
    parser.add_argument('--nproc', type=int, help='ranks to start; default: one a GPU, or 2 on CPUs')
    return parser.parse_args()


def main() -> None:
    """Measure and print."""
    args = parse_args()
    device = join_ranks(args.nproc)
    build = functools.partial(ViT, width=args.width, depth=args.depth)
    setting = Setting(build, ViTBlock, device, bf16=args.dtype == 'bfloat16')
    found = measure_prefetch(setting, args.rounds, args.batch_size)
    if dist.get_rank() == 0:
        print(prefetch_table(found), flush=True)


if __name__ == '__main__':
    run_tool(main)
