"""The command line of the tools that measure the ViT."""

import argparse
import functools
from collections.abc import Callable

from mmengine.model import BaseModel

from mmzero.analysis.vit import ViT


def add_vit_options(parser: argparse.ArgumentParser) -> None:
    """Add what all of them take: the model, the batch and the ranks.

    Args:
        parser (argparse.ArgumentParser): The parser.
    """
    parser.add_argument('--rounds', type=positive, default=200, help='timed steps of each; default: 200')
    parser.add_argument('--dtype', choices=('float32', 'bfloat16'), default='float32', help='of the units')
    parser.add_argument('--batch-size', type=positive, default=4, help='images of a micro-batch on a rank')
    parser.add_argument('--width', type=_width, default=192, help="the model's channels, a multiple of 3")
    parser.add_argument('--depth', type=positive, default=8, help="the model's blocks")
    parser.add_argument('--seed', type=int, default=0, help='of the orders and the bootstrap')
    parser.add_argument('--nproc', type=positive, help='ranks to start; default: one a GPU, or 2 on CPUs')


def vit_of(args: argparse.Namespace) -> Callable[[], BaseModel]:
    """What builds the model.

    Args:
        args (argparse.Namespace): The command line.

    Returns:
        Callable[[], BaseModel]: Builds it.
    """
    return functools.partial(ViT, width=args.width, depth=args.depth)


def positive(text: str) -> int:
    """Read a number of at least 1.

    Args:
        text (str): The word of the command line.

    Returns:
        int: The number.

    Raises:
        argparse.ArgumentTypeError: If it is smaller.
    """
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f'expected at least 1; got {text}')
    return int(text)


def _width(text: str) -> int:
    if positive(text) % 3:
        raise argparse.ArgumentTypeError(f'expected a multiple of 3, the number of heads; got {text}')
    return int(text)
