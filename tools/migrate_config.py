"""Turn a config for MMEngine's FSDP or DeepSpeed into one for mmzero, and say what changed and why.

It takes configs for FlexibleRunner with FSDPStrategy or DeepSpeedStrategy, and for Runner with
MMFullyShardedDataParallel. TARGET is an overlay on the same bases; without TARGET the config is printed, and what
changed goes to stderr. What has no counterpart is named.
"""

import argparse
import sys

from mmzero.errors import ConfigError
from mmzero.runner import load_config, run_tool
from mmzero.runner.migrate import ENGINES, check_migrated, config_text, migrate_config, write_config
from mmzero.runner.options import Settings


def parse_args() -> argparse.Namespace:
    """Read the command line.

    Returns:
        argparse.Namespace: The arguments.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('source', help='config file, or one of a package, such as mmpretrain::mae/benchmarks/...py')
    parser.add_argument('target', nargs='?', help='file to write; printed without it')
    parser.add_argument('--engine', choices=ENGINES, default='fsdp2', help='what takes the place of DeepSpeedStrategy')
    parser.add_argument('--full', action='store_true', help='write bases out, too')
    parser.add_argument('--ranks-per-node', type=int, help='for HYBRID_SHARD, which shards within a node')
    parser.add_argument('--world-size', type=int, default=1, help='ranks that the check takes for there')
    parser.add_argument('--no-check', action='store_true', help='do not build the model and check the result')
    parser.add_argument(
        '--cfg-options', nargs='+', action=Settings, help='settings that override the source, as key=value'
    )
    return parser.parse_args()


def main() -> None:
    """Migrate, write, check."""
    args = parse_args()
    source = load_config(args.source, args.cfg_options)
    made = migrate_config(source, engine=args.engine, ranks_per_node=args.ranks_per_node)
    text = config_text(made.cfg, args.source, args.target, full=args.full or bool(args.cfg_options))
    out = sys.stderr if args.target is None else sys.stdout
    print(made.text(), file=out)
    if args.target is None:
        print(text)
    else:
        write_config(text, args.target, made.cfg)
        print(f'wrote {args.target}')
    if args.no_check:
        return
    faults = check_migrated(made.cfg, args.world_size)
    if faults:
        raise ConfigError(faults)
    print("mmzero's check: no faults", file=out)


if __name__ == '__main__':
    run_tool(main)
