"""Fixtures of all tests: no test leaves a process group or a launcher's variable behind."""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

# What decides how a process joins a group, or how torch reads files.
WATCHED_VARIABLES = (
    'RANK',
    'WORLD_SIZE',
    'LOCAL_RANK',
    'MASTER_ADDR',
    'MASTER_PORT',
    'TORCH_FORCE_WEIGHTS_ONLY_LOAD',
)


def _watched() -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in WATCHED_VARIABLES}


@pytest.fixture(autouse=True)
def _no_leaks() -> Iterator[None]:
    """Clean up what a test leaves behind, so that later tests are not affected, and fail it."""
    had_group, before = dist.is_initialized(), _watched()
    yield
    leaks = []
    if dist.is_initialized() and not had_group:
        dist.destroy_process_group()
        leaks.append('a process group')
    for name, value in _watched().items():
        if value == before[name]:
            continue
        leaks.append(f'the environment variable {name}={value}')
        os.environ.pop(name, None)
        if before[name] is not None:
            os.environ[name] = before[name]
    if leaks:
        pytest.fail(f'the test left behind {" and ".join(leaks)}')


@pytest.fixture
def group() -> Iterator[None]:
    """A place for a process group, which the test or the code under test makes; destroyed after."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope='session')
def digits(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Path of a digits data set of 8 training and 4 validation images of 64 x 64 pixels."""
    path = Path(__file__).parents[1] / 'tools/dataset_converters/digits_coco.py'
    spec = importlib.util.spec_from_file_location('digits_coco', path)
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    out = str(tmp_path_factory.mktemp('digits'))
    tool.main(['--out', out, '--num-train', '8', '--num-val', '4', '--size', '64'])
    return out


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show the parity suite's table."""
    from tests.distributed.parity import report

    text = report()
    if text:
        terminalreporter.section('parity with DDP')
        terminalreporter.write_line(text)
