"""Measure the memory and traffic of one optimizer step of a config, beside the formulas.

Runs the config up to its second optimizer step, on its own data. Under torchrun, with --launcher pytorch, on its ranks;
without a launcher it starts them itself (--nproc).
"""

import argparse
from pathlib import Path

import torch.distributed as dist

from mmzero.analysis.launch import join_ranks
from mmzero.analysis.measure import measure_config
from mmzero.analysis.step_report import step_table, write_step
from mmzero.runner import config_of, run_tool, tool_parser


def parse_args() -> argparse.Namespace:
    """Read the command line.

    Returns:
        argparse.Namespace: The arguments.
    """
    parser = tool_parser(__doc__)
    parser.add_argument('--nproc', type=int, help='ranks to start without a launcher; default: one a GPU, or 2 on CPUs')
    parser.add_argument('--out', type=Path, help='folder for step.json and step.png; default: the work dir')
    return parser.parse_args()


def main() -> None:
    """Measure, print, write."""
    args = parse_args()
    cfg = config_of(args)
    if args.launcher == 'none':
        join_ranks(args.nproc)
        cfg.launcher = 'pytorch'
    reports = measure_config(cfg)
    if dist.get_rank() == 0:
        print(step_table(reports))
        for path in write_step(reports, args.out or Path(cfg.work_dir)):
            print(f'wrote {path}')


if __name__ == '__main__':
    run_tool(main)
