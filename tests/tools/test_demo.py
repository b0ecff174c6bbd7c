"""The demo on a tiny data set: what it leaves, what it says, and how it ends."""

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / 'tools/demo.py'

CONFIG = """
_base_ = '{root}/configs/dino_swin_tiny_digits_zero3.py'
data_root = '{data}/'
train_dataloader = dict(batch_size=2, dataset=dict(data_root=data_root))
val_dataloader = dict(dataset=dict(data_root=data_root))
test_dataloader = val_dataloader
val_evaluator = dict(ann_file=data_root + 'annotations/val.json')
test_evaluator = val_evaluator
default_hooks = dict(logger=dict(interval=1))
"""


@pytest.fixture
def config(tmp_path):
    """The demo's config on 8 + 4 images of 64 pixels."""
    data = tmp_path / 'digits'
    tool = ROOT / 'tools/dataset_converters/digits_coco.py'
    size = ['--num-train', '8', '--num-val', '4', '--size', '64']
    subprocess.run([sys.executable, str(tool), '--out', str(data), *size], check=True)
    path = tmp_path / 'tiny.py'
    path.write_text(CONFIG.format(root=ROOT, data=data))
    return path


@pytest.fixture
def demo():
    """The tool as a module: tools/ is no package."""
    spec = importlib.util.spec_from_file_location('demo', DEMO)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def start(*args, cwd):
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get('PYTHONPATH')]))
    return subprocess.Popen(
        [sys.executable, str(DEMO), *args],
        cwd=cwd,
        env=dict(os.environ, PYTHONPATH=path),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.distributed
def test_it_trains_draws_and_says_where(config, tmp_path):
    options = ['--cfg-options', 'train_cfg.max_epochs=1', 'train_cfg.val_begin=1']
    process = start('--config', 'tiny.py', '--work-dir', 'run', '--nproc', '2', *options, cwd=tmp_path)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    work_dir = tmp_path / 'run'
    checkpoint = work_dir / 'epoch_1.pth'
    assert checkpoint.is_file()
    for name in ('curves.png', 'detections.png'):
        with Image.open(work_dir / name) as image:
            assert min(image.size) >= 600
    assert '2 process(es) on ' in output
    summary = output[output.index('== done') :]
    for part in ('AP 0.', 'AP50 0.', str(checkpoint), str(work_dir / 'curves.png')):
        assert part in summary
    again, evaluate = summary.splitlines()[-2:]
    assert again.startswith('train again') and again.endswith(' '.join(options))
    assert evaluate.endswith(f'tools/test.py {work_dir / "tiny.py"} {checkpoint}')


@pytest.mark.slow
@pytest.mark.distributed
def test_sigterm_ends_every_process(config, tmp_path):
    options = ['--nproc', '2', '--cfg-options', 'train_cfg.max_epochs=1000']
    process = start('--config', str(config), '--work-dir', str(tmp_path / 'run'), *options, cwd=ROOT)
    lines = []
    for line in process.stdout:
        lines.append(line)
        if 'Epoch(train)' in line:
            process.terminate()
            break
    # Ranks hold the pipe as well: it ends once all of them have gone.
    output = ''.join(lines) + process.communicate()[0]
    assert process.returncode == 128 + signal.SIGTERM, output
    assert 'the step "train" ended with SIGTERM' in output


def test_a_failing_step_is_named_and_its_code_passed_on(demo, capfd):
    with pytest.raises(SystemExit) as caught:
        demo.run('fail', [sys.executable, '-c', 'print("said so"); raise SystemExit(7)'])
    assert caught.value.code == 7
    out, err = capfd.readouterr()
    assert 'said so' in out
    assert err.strip() == 'demo: the step "fail" ended with exit code 7'


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_demo_alone_ends_the_step(demo, capfd, number):
    handlers = [signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM)]
    code = f'import os, signal; os.kill(os.getppid(), {int(number)}); signal.pause()'
    with pytest.raises(SystemExit) as caught:
        demo.run('wait', [sys.executable, '-c', code])
    assert caught.value.code == 128 + number
    assert f'the step "wait" ended with {number.name}' in capfd.readouterr().err
    assert handlers == [signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM)]


@pytest.mark.parametrize(
    'nproc, gpus, count, note',
    [
        (None, 0, 2, '2 process(es) on CPUs, as there is no GPU; OMP_NUM_THREADS is 1'),
        (1, 0, 1, '1 process(es) on CPUs, as there is no GPU; OMP_NUM_THREADS is not set'),
        (None, 4, 4, '4 process(es) on 4 GPU(s)'),
        (2, 4, 2, '2 process(es) on 4 GPU(s)'),
    ],
)
def test_the_processes_fit_the_machine(demo, monkeypatch, capsys, nproc, gpus, count, note):
    monkeypatch.setattr('torch.cuda.device_count', lambda: gpus)
    environ = {k: v for k, v in os.environ.items() if k != 'OMP_NUM_THREADS'}
    monkeypatch.setattr(os, 'environ', environ)
    assert demo.launcher(nproc)[-2:] == ['--nproc-per-node', str(count)]
    assert note in capsys.readouterr().out


def test_own_data_is_left_alone_and_the_demos_is_made(demo, monkeypatch, config):
    commands = []

    def record(step, command):
        commands.append((step, command))
        if step == 'train':
            raise SystemExit(3)

    monkeypatch.setattr(demo, 'run', record)
    for path in (config, demo.CONFIG):
        monkeypatch.chdir(ROOT)
        monkeypatch.setattr(sys, 'argv', ['demo.py', '--config', str(path), '--nproc', '1'])
        with pytest.raises(SystemExit):
            demo.main()
    assert [step for step, _ in commands] == ['train', 'make the data set', 'train']
    assert commands[1][1][-2:] == ['--out', str(ROOT / 'data/digits')]
    assert commands[2][1][-2:] == ['--work-dir', str(ROOT / 'work_dirs' / demo.CONFIG.stem)]
