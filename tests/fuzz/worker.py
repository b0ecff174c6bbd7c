"""Runs cases in a process of its own and prints a line of JSON for each: ``python -m tests.fuzz.worker``."""

import argparse
import faulthandler
import json
import os
import sys
import warnings

from tests.fuzz.bases import register
from tests.fuzz.case import run_case

SECONDS_PER_CASE = 120


def main() -> None:
    """Run the cases that the command line names."""
    parser = argparse.ArgumentParser()
    parser.add_argument('digits')
    parser.add_argument('seeds', type=int, nargs='+')
    args = parser.parse_args()
    register()
    warnings.simplefilter('ignore')
    # What runs print is in nobody's way.
    out = os.fdopen(os.dup(1), 'w')
    os.dup2(2, 1)
    for seed in args.seeds:
        faulthandler.dump_traceback_later(SECONDS_PER_CASE, exit=True, file=sys.stderr)
        verdict = run_case(seed, args.digits)
        faulthandler.cancel_dump_traceback_later()
        print(json.dumps(verdict.as_dict()), file=out, flush=True)


if __name__ == '__main__':
    main()
