"""Convert a checkpoint: a sharded folder, .pth, .bin or .safetensors, or a folder of others, into one of the first.

Needs neither GPUs nor the code of the model, and little memory: tensors are mapped from files. The suffix of TARGET
says what to make; without one it is a sharded folder.
"""

import argparse

from mmzero.checkpoint.convert import convert_checkpoint
from mmzero.config.reader import optional_dtype
from mmzero.engines import init_process_group
from mmzero.runner import run_tool


def parse_args() -> argparse.Namespace:
    """Read the command line.

    Returns:
        argparse.Namespace: The arguments.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('source', help='the checkpoint')
    parser.add_argument('target', help='what to make: NAME.pth, NAME.bin, NAME.safetensors, or a folder')
    parser.add_argument('--dtype', help='of floating weights, such as bfloat16; as they are without it')
    parser.add_argument('--weights-only', action='store_true', help='leave optimizer, schedulers and the rest out')
    args = parser.parse_args()
    try:
        args.dtype = optional_dtype(args.dtype)
    except ValueError as error:
        parser.error(f'--dtype: got {args.dtype!r}; {error}')
    return args


def main() -> None:
    """Convert."""
    args = parse_args()
    init_process_group()
    convert_checkpoint(args.source, args.target, args.dtype, args.weights_only)
    print(f'{args.source} -> {args.target}')


if __name__ == '__main__':
    run_tool(main)
