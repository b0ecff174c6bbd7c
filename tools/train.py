"""Train a model: MMEngine's and mmdet's arguments, for any config with or without mmzero."""

import argparse
import os
from pathlib import Path

from mmengine.config import DictAction

from mmzero.runner import build_runner, enable_amp, enable_auto_scale_lr, load_config, run_tool


def parse_args() -> argparse.Namespace:
    """Read the command line.

    Returns:
        argparse.Namespace: The arguments.
    """
    parser = argparse.ArgumentParser(description='Train a model')
    parser.add_argument('config', help='config file')
    parser.add_argument('--work-dir', help='folder for logs and checkpoints')
    parser.add_argument('--amp', action='store_true', help='mixed precision: bfloat16 units under autocast')
    parser.add_argument('--auto-scale-lr', action='store_true', help='scale the learning rate by the batch size')
    parser.add_argument(
        '--resume',
        nargs='?',
        const='auto',
        help='a checkpoint to resume from; without a value the latest one in the work dir',
    )
    parser.add_argument(
        '--cfg-options',
        nargs='+',
        action=DictAction,
        help='settings that override the config, as key=value; lists as key="[a,b]"',
    )
    parser.add_argument('--launcher', choices=['none', 'pytorch', 'slurm', 'mpi'], default='none')
    # torch.distributed.launch passes it; torchrun sets the variable.
    parser.add_argument('--local_rank', '--local-rank', type=int, default=0)
    args = parser.parse_args()
    os.environ.setdefault('LOCAL_RANK', str(args.local_rank))
    return args


def main() -> None:
    """Train."""
    args = parse_args()
    cfg = load_config(args.config, args.cfg_options)
    cfg.launcher = args.launcher
    cfg.work_dir = args.work_dir or cfg.get('work_dir') or str(Path('work_dirs') / Path(args.config).stem)
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
