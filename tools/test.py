"""Test a model: MMEngine's and mmdet's arguments, for any config with or without mmzero."""

import argparse

from mmengine.config import Config
from mmengine.runner import Runner

from mmzero.errors import ConfigError
from mmzero.runner import build_runner, config_of, enable_tta, run_tool, tool_parser


def parse_args() -> argparse.Namespace:
    """Read the command line.

    Returns:
        argparse.Namespace: The arguments.
    """
    parser = tool_parser('Test a model')
    parser.add_argument('checkpoint', help='checkpoint file or URL')
    parser.add_argument('--out', help='write the predictions to this .pkl file')
    parser.add_argument('--show', action='store_true', help='show each image with its predictions')
    parser.add_argument('--show-dir', help='write these images to this folder, below the work dir and the time')
    parser.add_argument('--wait-time', type=float, default=2, help='seconds that --show waits')
    parser.add_argument('--tta', action='store_true', help='test-time augmentation')
    args = parser.parse_args()
    if args.out and not args.out.endswith(('.pkl', '.pickle')):
        parser.error(f'--out must end in .pkl or .pickle, got {args.out}')
    return args


def draw_predictions(cfg: Config, args: argparse.Namespace) -> None:
    """Let mmdet's visualization hook draw, as ``--show`` and ``--show-dir`` ask for.

    Args:
        cfg (Config): Changed in place.
        args (argparse.Namespace): The command line.

    Raises:
        ConfigError: If the config has no such hook.
    """
    from mmdet.engine.hooks.utils import trigger_visualization_hook

    if 'visualization' not in cfg.get('default_hooks', {}):
        raise ConfigError(
            [
                'default_hooks.visualization: is missing, and --show and --show-dir need it; '
                "add dict(type='DetVisualizationHook')"
            ]
        )
    trigger_visualization_hook(cfg, args)


def dump_predictions(runner: Runner, out: str) -> None:
    """Write the predictions to a file, for mmdet's analysis tools.

    Args:
        runner (Runner): The runner.
        out (str): The file.
    """
    from mmdet.evaluation import DumpDetResults

    runner.test_evaluator.metrics.append(DumpDetResults(out_file_path=out))


def main() -> None:
    """Test."""
    args = parse_args()
    cfg = config_of(args)
    cfg.load_from = args.checkpoint
    cfg.resume = False
    if args.show or args.show_dir:
        draw_predictions(cfg, args)
    if args.tta:
        enable_tta(cfg)
    runner = build_runner(cfg)
    if args.out:
        dump_predictions(runner, args.out)
    runner.test()


if __name__ == '__main__':
    run_tool(main)
