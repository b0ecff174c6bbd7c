"""Other programs that are asked: what they print, or why not, within a time."""

import json
import os
import subprocess
import sys
from typing import Any

SECONDS = 60


def printed_by(command: list[str], seconds: float = SECONDS) -> str:
    """Run a program.

    Args:
        command (list[str]): Its words.
        seconds (float): How long it may take. Defaults to a minute.

    Returns:
        str: What it has printed.

    Raises:
        RuntimeError: If it is not there, failed, or took longer.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, stdin=subprocess.DEVNULL)
    except FileNotFoundError:
        raise RuntimeError(f'{command[0]} is not installed') from None
    except (OSError, subprocess.TimeoutExpired) as error:
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
    environment = {**os.environ, **variables, 'PYTHONWARNINGS': 'ignore'}
    try:
        done = subprocess.run(
            [sys.executable, '-c', code],
            capture_output=True,
            text=True,
            timeout=SECONDS,
            stdin=subprocess.DEVNULL,
            env=environment,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(str(error)) from None
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f'exit code {done.returncode}']
        raise RuntimeError(last[0])
    return json.loads(done.stdout.strip().splitlines()[-1])
