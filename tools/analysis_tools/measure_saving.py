"""Measure how long a save holds the loop: sharded, sharded and written beside training, full.

Under torchrun it joins its ranks, else it starts them. The model is the ViT of benchmark.py, with AdamW. Disks differ:
run it where checkpoints will be.
"""

import argparse
from pathlib import Path

import torch.distributed as dist

from mmzero.analysis.launch import join_ranks
from mmzero.analysis.saving import measure_saving, saving_table
from mmzero.analysis.setting import Setting
from mmzero.analysis.vit import ViTBlock
from mmzero.analysis.vit_options import add_vit_options, vit_of
from mmzero.runner import run_tool


def parse_args() -> argparse.Namespace:
    """Read the command line.

    Returns:
        argparse.Namespace: The arguments.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_vit_options(parser)
    parser.add_argument('--folder', type=Path, default=Path('work_dirs/measure_saving'), help='where to write')
    return parser.parse_args()


def main() -> None:
    """Measure and print."""
    args = parse_args()
    device = join_ranks(args.nproc)
    setting = Setting(vit_of(args), ViTBlock, device, bf16=args.dtype == 'bfloat16')
    found = measure_saving(setting, args.folder, args.rounds, args.batch_size, args.seed)
    if dist.get_rank() == 0:
        print(saving_table(found), flush=True)


if __name__ == '__main__':
    run_tool(main)
