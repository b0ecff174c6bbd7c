"""Run a script with the stand-in of ``mmcv._ext`` in place.

For scripts that import mmcv's ops before they import mmzero, like ``tools/test.py`` of mmdet::

    python -m mmzero.integrations.mmcv tools/test.py CONFIG CHECKPOINT
"""

import os
import runpy
import sys
from typing import NoReturn

from .stand_in import install_stand_in


def main(argv: list[str]) -> None:
    """Install the stand-in, then run a script as ``python SCRIPT ARGS...`` would.

    Args:
        argv (list[str]): The path of the script, followed by its arguments.

    Raises:
        SystemExit: With code 2 if the script is not given or not there; with the script's own
            code if it exits.
    """
    if not argv:
        _fail('usage: python -m mmzero.integrations.mmcv SCRIPT [ARGS ...]')
    script = argv[0]
    if not os.path.isfile(script):
        _fail(f'python -m mmzero.integrations.mmcv: no such script: {script!r}')
    install_stand_in()
    sys.argv = argv
    # Scripts may import their neighbours; runpy does not add the folder of a script.
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    runpy.run_path(script, run_name='__main__')


def _fail(message: str) -> NoReturn:
    print(message, file=sys.stderr)
    raise SystemExit(2)


if __name__ == '__main__':
    main(sys.argv[1:])
