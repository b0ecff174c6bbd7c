"""Other programs that are asked: what they print, or why not, within a time."""

import json
import os
import subprocess
import sys
from typing import Any

SECONDS = 60


def printed_by(command: list[str], seconds: float = SECONDS, **variables: str) -> str:
    """Run a program.

    Args:
        command (list[str]): Its words.
        seconds (float): How long it may take. Defaults to a minute.
        **variables (str): Added to its environment.

    Returns:
        str: What it has printed.

    Raises:
        RuntimeError: If it is not there, failed, or took longer.
    """
    environment = {**os.environ, **variables}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, stdin=subprocess.DEVNULL, env=environment
        )
    except FileNotFoundError:
        raise RuntimeError(f'{command[0]} is not installed') from None
    except subprocess.TimeoutExpired:
        raise RuntimeError(f'{command[0]} has not answered within {seconds:.0f} s') from None
    except OSError as error:
        raise RuntimeError(f'{command[0]}: {error}') from None
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        raise RuntimeError(f'{command[0]}: exit code {done.returncode} {" ".join(last)}'.strip())
    return done.stdout


def told_by_python(code: str, **variables: str) -> Any:
    """Run code in a process of its own, which imports and initialises what this one should not.

    Args:
        code (str): Prints JSON on its last line.
        **variables (str): Added to its environment.

    Returns:
        Any: What was printed.

    Raises:
        RuntimeError: If it failed.
    """
    text = printed_by([sys.executable, '-c', code], SECONDS, PYTHONWARNINGS='ignore', **variables)
    return json.loads(text.strip().splitlines()[-1])
