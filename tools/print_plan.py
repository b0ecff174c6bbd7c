"""Print how a config's model would be sharded, without GPUs, data or a process group.

Any config does, also one that says nothing of sharding: then ZeroModelWrapper's defaults hold. The model is built with
its parameters on the meta device; nothing is downloaded. Several --policy give a comparison.
"""

import argparse
import json
from pathlib import Path

from mmzero.errors import ConfigError
from mmzero.planner import compare_plans
from mmzero.runner import load_config, plan_configs, run_tool
from mmzero.runner.options import Settings


def parse_args() -> argparse.Namespace:
    """Read the command line.

    Returns:
        argparse.Namespace: The arguments.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('config', help='config file')
    parser.add_argument('--world-size', type=int, required=True, help='number of ranks')
    parser.add_argument(
        '--policy',
        action='append',
        default=[],
        help="instead of the config's: a policy's name, a dict as in a config, or None for one unit; the path of "
        'another config is planned beside it; repeatable',
    )
    parser.add_argument('--stage', type=int, choices=range(4), help="ZeRO stage instead of the config's")
    parser.add_argument('--tree', action='store_true', help='show where in the model units lie, too')
    parser.add_argument('--json', type=Path, help='file for the same as data, a list with an entry per plan')
    parser.add_argument(
        '--cfg-options', nargs='+', action=Settings, help='settings that override the config, as key=value'
    )
    args = parser.parse_args()
    if args.world_size < 1:
        parser.error(f'--world-size: got {args.world_size}; expected 1 or more')
    return args


def main() -> None:
    """Plan, print, write."""
    args = parse_args()
    names, reports, remarks = plan_configs(
        load_config(args.config, args.cfg_options),
        args.config,
        world_size=args.world_size,
        policies=args.policy,
        stage=args.stage,
    )
    for remark in remarks:
        print(remark)
    for name, report in zip(names, reports, strict=True):
        print(f'{name}\n{report.text(args.tree)}\n')
    if len(reports) > 1:
        print(compare_plans(reports, names))
    if args.json is not None:
        plans = [dict(name=name, **report.as_dict()) for name, report in zip(names, reports, strict=True)]
        try:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps(plans, indent=2) + '\n')
        except OSError as error:
            raise ConfigError([f'--json: cannot write {args.json}: {error.strerror}']) from error
        print(f'wrote {args.json}')


if __name__ == '__main__':
    run_tool(main)
