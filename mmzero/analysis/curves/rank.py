"""What a rank of one training runs: ``python -m mmzero.analysis.curves.rank CONFIG``, under torchrun."""

import sys

from mmzero.engines import init_process_group
from mmzero.runner import build_runner, load_config, run_tool


def main() -> None:
    """Train."""
    # MMEngine's own Runner would ask for a GPU.
    init_process_group('pytorch')
    build_runner(load_config(sys.argv[1])).train()


if __name__ == '__main__':
    run_tool(main)
