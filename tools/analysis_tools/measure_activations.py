"""Measure what a model keeps for backward and what recomputing it costs, for ways of activation checkpointing.

Nothing is loaded or trained: the config's model takes one batch of two images from mmdet's testing helpers.
"""

import argparse

import torch

from mmzero.analysis.activations import activations_table, case_without_checkpointing, measure_activations
from mmzero.analysis.sweep.families import read
from mmzero.runner import run_tool


def parse_args() -> argparse.Namespace:
    """Read the command line.

    Returns:
        argparse.Namespace: The arguments.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('config', help='a path, or a name like mmdet::dino/dino-5scale_swin-l_8xb2-12e_coco.py')
    parser.add_argument('--size', type=int, default=256, help='side of the square images in pixels')
    parser.add_argument('--rounds', type=int, default=3, help='steps of each way')
    return parser.parse_args()


def main() -> None:
    """Measure and print."""
    args = parse_args()
    device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    model, loss_of = case_without_checkpointing(read(args.config), args.size, device)
    print(activations_table(measure_activations(model, loss_of, args.rounds)), flush=True)


if __name__ == '__main__':
    run_tool(main)
