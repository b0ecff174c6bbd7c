"""Train a config in 16 bit under ZeRO and in float32 under stock DDP with several seeds, and compare how they end.

The trainings run one after the other, on ranks that it starts; what is complete is not trained again by a second start.
It ends with exit code 1 where a training in 16 bit ends elsewhere. docs/precision.md has the rule and what came of it.
"""

import argparse
from pathlib import Path

from mmzero.analysis.curves import TAIL, curves_table, judge, planned, train_all, write_curves
from mmzero.runner import load_config, run_tool
from mmzero.runner.options import Settings


def parse_args() -> argparse.Namespace:
    """Read the command line.

    Returns:
        argparse.Namespace: The arguments.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('config', help='config file for ZeroRunner')
    parser.add_argument('--seeds', type=int, nargs='+', default=[0, 1, 2], help='of DDP')
    parser.add_argument('--half-seeds', type=int, nargs='+', default=[], help='of 16 bit; default: the first of DDP')
    parser.add_argument('--dtypes', nargs='+', choices=['bfloat16', 'float16'], default=['bfloat16', 'float16'])
    parser.add_argument('--nproc', type=int, default=2, help='ranks of each training; default: 2')
    parser.add_argument('--tail', type=int, default=TAIL, help=f'steps at the end to compare; default: {TAIL}')
    parser.add_argument('--out', type=Path, default=Path('work_dirs/curves'), help='folder for logs and results')
    parser.add_argument('--cfg-options', nargs='+', action=Settings, help='settings of the config, as key=value')
    return parser.parse_args()


def main() -> None:
    """Train, judge, write."""
    args = parse_args()
    cfg = load_config(args.config, args.cfg_options)
    found = train_all(cfg, planned(args.seeds, args.dtypes, args.half_seeds), args.out.resolve(), args.nproc)
    verdicts = judge(found, args.tail)
    print(curves_table(found, verdicts, args.tail))
    for path in write_curves(found, verdicts, args.out):
        print(f'wrote {path}')
    if not all(verdict.holds for verdict in verdicts):
        raise SystemExit(1)


if __name__ == '__main__':
    run_tool(main)
