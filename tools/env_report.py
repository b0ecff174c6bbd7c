"""Say what this machine and its packages have, what of mmzero works here, and what is missing for the rest.

Nothing is built, trained or sent anywhere, and CUDA is not initialised in this process. It works where torch, MMEngine
or any other package is missing.
"""

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).resolve().parents[1] / 'mmzero/analysis/environment'


def load_report() -> ModuleType:
    """Load the report by itself: mmzero cannot be imported without torch and MMEngine, whose lack is to be told.

    Returns:
        ModuleType: ``mmzero.analysis.environment``.
    """
    name = 'mmzero_environment'
    spec = importlib.util.spec_from_file_location(
        name, FOLDER / '__init__.py', submodule_search_locations=[str(FOLDER)]
    )
    if spec is None or spec.loader is None:
        raise RuntimeError(f'{FOLDER} is missing')
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Look and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--json', action='store_true', help='print the same as data')
    args = parser.parse_args()
    report = load_report()
    facts = report.probe_all()
    parts = report.judge(facts)
    if args.json:
        print(json.dumps(report.as_dict(facts, parts), indent=2))
    else:
        print(report.as_text(facts, parts))


if __name__ == '__main__':
    main()
