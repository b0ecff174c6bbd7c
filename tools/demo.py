"""What `make demo` runs: make a small data set, train DINO + Swin on it with ZeRO-3, draw it.

Nothing is downloaded. It uses all GPUs, or two processes on a machine without one.
"""

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

from mmzero.errors import CheckpointError
from mmzero.runner import load_config, run_tool

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / 'configs/dino_swin_tiny_digits_zero3.py'
DIGITS = ROOT / 'data/digits'

# A launcher that got the signal too, as from a terminal, must not get it twice: the second one
# would stop it while it ends its processes.
SIGNAL_GRACE_SECONDS = 1


def parse_args() -> argparse.Namespace:
    """Read the command line; its paths become absolute."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--config', type=Path, default=CONFIG, help='config file')
    parser.add_argument('--work-dir', type=Path, help='folder for logs, checkpoints and pictures')
    parser.add_argument('--nproc', type=int, help='processes; default: one a GPU, or 2 on CPUs')
    parser.add_argument('--cfg-options', nargs='+', default=[], help='passed on to tools/train.py, as key=value')
    args = parser.parse_args()
    args.config = args.config.resolve()
    args.work_dir = (args.work_dir or ROOT / 'work_dirs' / args.config.stem).resolve()
    return args


def run(step: str, command: list[str]) -> None:
    """Run one step to its end; its output goes where ours goes.

    Args:
        step (str): What it does, for the message if it fails.
        command (list[str]): The command. On SIGINT and SIGTERM it ends, and we after it.

    Raises:
        SystemExit: With the command's exit code if it fails, with 128 + the signal if that came.
    """
    print(f'\n== {step}\n$ {shlex.join(command)}', flush=True)
    signals: list[int] = []
    names = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(name, lambda number, _: signals.append(number)) for name in names]
    process = subprocess.Popen(command)
    while process.poll() is None:
        time.sleep(0.1)
        if signals:
            end(process)
    for name, handler in zip(names, before, strict=True):
        signal.signal(name, handler)
    code = -signals[0] if signals else process.returncode
    if code != 0:
        reason = f'exit code {code}' if code > 0 else signal.Signals(-code).name
        print(f'\ndemo: the step "{step}" ended with {reason}', file=sys.stderr)
        raise SystemExit(code if code > 0 else 128 - code)


def end(process: subprocess.Popen) -> None:
    """Wait for a process that may have got our signal too, or else pass it on."""
    try:
        process.wait(SIGNAL_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait()


def launcher(nproc: int | None) -> list[str]:
    """Choose the processes, say which, and return the start of a command that runs in each."""
    import torch

    gpus = torch.cuda.device_count()
    count = nproc or gpus or 2
    if gpus == 0 and count > 1:
        os.environ.setdefault('OMP_NUM_THREADS', '1')
    threads = os.environ.get('OMP_NUM_THREADS', 'not set')
    devices = f'{gpus} GPU(s)' if gpus else 'CPUs, as there is no GPU'
    print(f'demo: {count} process(es) on {devices}; OMP_NUM_THREADS is {threads}')
    torchrun = [sys.executable, '-m', 'torch.distributed.run', '--standalone']
    return [*torchrun, '--nproc-per-node', str(count)]


def draw(work_dir: Path, config: Path) -> Path:
    """Draw the pictures beside the last checkpoint, and return that."""
    from mmzero.integrations.mmdet import draw_curves, draw_detections

    print('\n== draw', flush=True)
    pointer = work_dir / 'last_checkpoint'
    if not pointer.is_file():
        raise CheckpointError(f'{pointer} is not there, so training has saved no checkpoint')
    checkpoint = Path(pointer.read_text().strip())
    draw_curves(work_dir, work_dir / 'curves.png')
    draw_detections(config, checkpoint, work_dir / 'detections.png')
    return checkpoint


def summarise(work_dir: Path, checkpoint: Path, train: list[str], test: list[str]) -> None:
    """Print what came out, where it lies, and how to go on."""
    from mmzero.integrations.mmdet import read_scalars

    val = (read_scalars(work_dir)[1] or [{}])[-1]
    ap, ap50 = (val.get(f'coco/{name}', float('nan')) for name in ('bbox_mAP', 'bbox_mAP_50'))
    print('\n== done')
    print(f'AP {ap:.3f}, AP50 {ap50:.3f} on the val images')
    print(f'checkpoint   {checkpoint}')
    print(f'curves       {work_dir / "curves.png"}')
    print(f'detections   {work_dir / "detections.png"}')
    print(f'\nIn {ROOT}:')
    print(f'train again  {shlex.join(train)}')
    print(f'evaluate     {shlex.join(test)}')


def main() -> None:
    """Run the steps."""
    args = parse_args()
    os.chdir(ROOT)  # paths in configs are relative to it
    cfg = load_config(str(args.config))
    if Path(cfg.train_dataloader.dataset.data_root).resolve() == DIGITS:
        converter = ROOT / 'tools/dataset_converters/digits_coco.py'
        run('make the data set', [sys.executable, str(converter), '--out', str(DIGITS)])
    train = [*launcher(args.nproc), str(ROOT / 'tools/train.py'), str(args.config)]
    train += ['--launcher', 'pytorch', '--work-dir', str(args.work_dir)]
    train += ['--cfg-options', *args.cfg_options] if args.cfg_options else []
    run('train', train)
    trained_config = args.work_dir / args.config.name
    checkpoint = draw(args.work_dir, trained_config)
    test = [sys.executable, str(ROOT / 'tools/test.py'), str(trained_config), str(checkpoint)]
    summarise(args.work_dir, checkpoint, train, test)


if __name__ == '__main__':
    run_tool(main)
