"""Measure how much host memory the ranks of a node take until a model can be trained, by mmzero and by MMEngine.

Memory is what ranks hold alone, beyond what they hold once all is imported, at its peak over all of them; files that
are mapped do not count. MMEngine starts under DDP, which is what it has on a CPU. Needs Linux.
"""

import argparse
from pathlib import Path

from mmzero.analysis.start.measure import measure_starts, starts_table
from mmzero.analysis.start.rank import SOURCES, WAYS
from mmzero.runner import run_tool


def parse_args() -> argparse.Namespace:
    """Read the command line.

    Returns:
        argparse.Namespace: The arguments.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('config', help='config file, or a name such as mmdet::dino/...py')
    parser.add_argument('--nproc', type=int, default=4, help='ranks')
    parser.add_argument('--sources', nargs='+', choices=SOURCES, default=list(SOURCES), help='where weights come from')
    parser.add_argument('--ways', nargs='+', choices=WAYS, default=list(WAYS), help='what starts')
    parser.add_argument('--folder', type=Path, default=Path('work_dirs/measure_start'), help='for files of weights')
    return parser.parse_args()


def main() -> None:
    """Measure and print."""
    args = parse_args()
    found = measure_starts(args.config, args.nproc, args.folder, args.sources, args.ways)
    print(starts_table(found), flush=True)


if __name__ == '__main__':
    run_tool(main)
