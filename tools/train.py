"""Train a model: MMEngine's and mmdet's arguments, for any config with or without mmzero."""

import argparse

from mmzero.runner import build_runner, config_of, enable_amp, enable_auto_scale_lr, run_tool, tool_parser


def parse_args() -> argparse.Namespace:
    """Read the command line.

    Returns:
        argparse.Namespace: The arguments.
    """
    parser = tool_parser('Train a model')
    parser.add_argument(
        '--amp', action='store_true', help='mixed precision; bfloat16 unless optim_wrapper.dtype names another'
    )
    parser.add_argument('--auto-scale-lr', action='store_true', help='scale the learning rate by the batch size')
    parser.add_argument(
        '--resume',
        nargs='?',
        const='auto',
        help='a checkpoint to resume from; without a value the latest one in the work dir',
    )
    return parser.parse_args()


def main() -> None:
    """Train."""
    args = parse_args()
    cfg = config_of(args)
    if args.amp:
        enable_amp(cfg)
    if args.auto_scale_lr:
        enable_auto_scale_lr(cfg)
    if args.resume is not None:
        cfg.resume = True
        cfg.load_from = None if args.resume == 'auto' else args.resume
    build_runner(cfg).train()


if __name__ == '__main__':
    run_tool(main)
