"""Train models of mmdet, mmseg and mmpretrain for a few steps under ZeRO, beside the plain model and stock DDP.

Each model runs on two ranks in processes of its own, within limits of time and memory. Verdicts are written as they
come, and a second start goes on where the first ended. docs/zoo.md has the rules and what came of them.
"""

import argparse
import json
from pathlib import Path

from mmzero.analysis.sweep import (
    FAILED,
    FAILS_PLAINLY,
    FAILS_UNDER_DDP,
    SIZES,
    TOO_LARGE,
    Limits,
    Results,
    families,
    summary,
    sweep,
    table,
)
from mmzero.runner import run_tool

RETRY = {'failed': (FAILED,), 'all': (FAILED, FAILS_PLAINLY, FAILS_UNDER_DDP, TOO_LARGE)}


def parse_args() -> argparse.Namespace:
    """Read the command line.

    Returns:
        argparse.Namespace: The arguments.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('configs', nargs='*', help='paths or names like mmdet::dino/...py; default: one per family')
    parser.add_argument('--package', default='mmdet', help='whose families; default: mmdet')
    parser.add_argument('--tries', type=int, default=5, help='most configs of a family, until one trains plainly')
    parser.add_argument('--every', type=int, default=1, help='take each n-th family or config only')
    parser.add_argument('--stages', type=int, nargs='+', choices=range(4), default=[3], help='ZeRO stages; default: 3')
    parser.add_argument('--sizes', type=int, nargs='+', default=list(SIZES), help='sides of the images in pixels')
    parser.add_argument('--seconds', type=float, default=Limits.seconds, help='time limit of one training')
    parser.add_argument('--gib', type=float, default=Limits.gib, help='memory limit of a rank')
    parser.add_argument('--retry', choices=list(RETRY), help='judge again what failed, or all that did not pass')
    parser.add_argument('--out', type=Path, default=Path('work_dirs/sweep'), help='folder for results.jsonl and tables')
    return parser.parse_args()


def main() -> None:
    """Sweep, print, write."""
    args = parse_args()
    results = Results(args.out / 'results.jsonl')
    chosen = [[config] for config in args.configs] or families(args.package, args.tries)
    limits = Limits(args.seconds, args.gib)
    verdicts = sweep(
        chosen[:: args.every], args.stages, results, limits=limits, sizes=args.sizes, retry=RETRY.get(args.retry, ())
    )
    text = f'{table(verdicts)}\n\n{summary(verdicts)}\n'
    (args.out / 'table.md').write_text(text)
    (args.out / 'results.json').write_text(json.dumps([verdict.as_dict() for verdict in verdicts], indent=2) + '\n')
    print(text)


if __name__ == '__main__':
    run_tool(main)
