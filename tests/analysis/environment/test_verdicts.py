"""What works, judged by facts of machines that are not this one."""

import copy
from typing import Any

import pytest

from mmzero.analysis.environment import Part, as_dict, as_text, judge
from mmzero.analysis.environment.gpus import parse_gpus

GIB = 2**30
SMI = (
    '0, NVIDIA H100 80GB HBM3, 81559, 80994, 550.54.15, 9.0\n1, NVIDIA H100 80GB HBM3, 81559, 80994, 550.54.15, [N/A]\n'
)


def package(version: str | None = '1.0', fits: bool | None = True, wanted: str = '>=1') -> dict[str, Any]:
    return dict(version=version, distribution=None, wanted=wanted, fits=fits)


NAMES = (
    'torch triton mmengine mmcv mmdet mmpretrain mmseg transformers peft safetensors deepspeed addict yapf setuptools '
    'torchvision pytest ninja'
).split()

FULL: dict[str, dict[str, Any]] = dict(
    packages={name: package() for name in NAMES},
    torch=dict(version='2.13.0', cuda='12.8', hip=None, gloo=True, nccl='2.28', gpus=2, initialised_cuda=False),
    gpus=parse_gpus(SMI),
    peers=dict(apart=[]),
    operators=dict(mmcv='compiled', root='/cache', locks=[]),
    deepspeed=dict(async_io='compatible', cpu_adam='built'),
    compilers=dict(
        cxx='/g++', cc='/gcc', ninja='/ninja', nvcc=None, python_headers=True, libaio='libaio.so.1', libaio_headers=True
    ),
    mmengine=dict(GCC='gcc 12'),
    cpu=dict(model='cpu', cores=64, usable=64, quota=None, flags=['avx512_bf16']),
    memory=dict(total=1000 * GIB, available=900 * GIB, swap=0, limit=800 * GIB),
    limits=dict(locked_memory=None, open_files=65536, processes=None, memory=None),
    places=dict(
        here=dict(path='/here', writable=True, total=100 * GIB, free=50 * GIB),
        shm=dict(total=64 * GIB, free=64 * GIB),
        mounts=[
            dict(path='/slow', kind='rotating', writable=True, total=9 * GIB, free=8 * GIB),
            dict(path='/fast', kind='nvme', writable=True, total=9 * GIB, free=7 * GIB),
            dict(path='/shared', kind='network', writable=True, total=9 * GIB, free=8 * GIB),
        ],
    ),
    network=dict(
        interfaces=[
            dict(name='lo', state='unknown', mbits=None, loopback=True),
            dict(name='eth0', state='up', mbits=100000, loopback=False),
        ],
        infiniband=['mlx5_0'],
        chosen={},
    ),
    variables=dict(RANK='0'),
)


def judged(**changes: Any) -> dict[str, Part]:
    """The parts, where a fact, as ``probe__name``, is another."""
    facts = copy.deepcopy(FULL)
    for key, value in changes.items():
        probe, _, name = key.partition('__')
        if name:
            facts[probe][name] = value
        else:
            facts[probe] = value
    return {part.name: part for part in judge(facts)}


def test_where_nothing_is_missing_all_works() -> None:
    assert [part for part in judged().values() if not part.works] == []


@pytest.mark.parametrize(
    'changes, part, text',
    [
        (dict(packages__torch=package(None)), 'mmzero itself, its tools and plans', 'torch is missing: pip install'),
        (dict(packages__mmengine=package('0.9', False, '>=0.10.7')), 'bfloat16', 'mmengine 0.9 does not fit >=0.10.7'),
        (dict(torch=dict(error='OSError: libfoo')), 'offload to host memory', 'torch cannot be imported: OSError'),
        (dict(torch__gloo=False), 'training on CPUs, several ranks', 'built without gloo'),
        (dict(gpus__gpus=[]), 'training on a GPU', 'no GPU: nvidia-smi'),
        (dict(torch__cuda=None), 'training on a GPU', 'a CPU build'),
        (dict(torch__gpus=0), 'training on a GPU', 'driver 550.54.15 may be too old for CUDA 12.8'),
        (dict(torch__nccl=None), 'training on several GPUs (NCCL)', 'built without NCCL'),
        (dict(network__interfaces=[]), 'several nodes', 'no network interface'),
        (
            dict(network__chosen=dict(GLOO_SOCKET_IFNAME=dict(value='ib0', means=[]))),
            'several nodes',
            'GLOO_SOCKET_IFNAME=ib0 names no interface here; there are: eth0',
        ),
        (dict(limits__locked_memory=2**23), 'several nodes', 'InfiniBand needs locked memory, and 8 MiB'),
        (dict(gpus=parse_gpus('0, Tesla V100, 1, 1, 1, 7.0')), 'bfloat16', 'Tesla V100 computes no bfloat16'),
        (dict(compilers__cxx=None), 'torch.compile', 'no C++ compiler for inductor'),
        (dict(compilers__python_headers=False), 'torch.compile', 'no Python.h'),
        (dict(compilers__cc=None), 'torch.compile', 'no C compiler'),
        (dict(packages__triton=package(None)), 'torch.compile', 'triton is missing'),
        (
            dict(places__here=dict(path='/r', writable=False, free=1, total=1)),
            'sharded checkpoints',
            '/r cannot be wri',
        ),
        (
            dict(packages__mmcv=package(None)),
            "mmdet's one-stage detectors, DINO",
            "mmcv is missing: pip install -e '.[d",
        ),
        (dict(operators__mmcv='stand-in'), "mmdet's two-stage detectors", 'no compiled operators (RoIAlign, nms)'),
        (dict(packages__torchvision=package(None)), 'mmpretrain', 'torchvision is missing'),
        (dict(packages__mmseg=package(None)), 'mmseg', 'pip install mmsegmentation'),
        (dict(packages__transformers=package(None)), "transformers' language models", 'transformers is missing'),
        (dict(packages__safetensors=package(None)), 'adapters (PEFT)', 'safetensors is missing'),
        (dict(packages__deepspeed=package('0.18', False, '>=0.19')), 'DeepSpeed', 'deepspeed 0.18 does not fit >=0.19'),
        (dict(deepspeed=dict(error='ImportError: x')), 'DeepSpeed', 'it cannot be asked: ImportError: x'),
        (dict(compilers__libaio=None), 'NVMe offload (DeepSpeed)', 'install libaio-dev'),
        (dict(deepspeed__async_io='missing'), 'NVMe offload (DeepSpeed)', 'async_io cannot be built here'),
        (dict(places__mounts=[]), 'NVMe offload (DeepSpeed)', 'no local disk can be written to'),
        (dict(packages__pytest=package(None)), 'tests', 'pytest is missing'),
    ],
)
def test_what_is_missing_for_what(changes: dict[str, Any], part: str, text: str) -> None:
    found = judged(**changes)[part]
    assert not found.works and any(text in line for line in found.missing), found


@pytest.mark.parametrize(
    'changes, part, text',
    [
        (dict(peers__apart=[[0, 1], [1, 0]]), 'training on several GPUs (NCCL)', 'do not reach each other (P2P): 0-1'),
        (dict(places__shm=dict(total=2**26, free=2**26)), 'training on CPUs, several ranks', '0.06 GiB free'),
        (dict(cpu__quota=1.5), 'training on CPUs, several ranks', '1.5 core(s)'),
        (dict(network__infiniband=[]), 'several nodes', 'ranks talk by TCP'),
        (dict(torch__gpus=0, cpu__flags=[]), 'bfloat16', 'right, and slow'),
        # The smaller of what is free and what the cgroup allows: 800 GiB / 16 bytes.
        (dict(), 'offload to host memory', '800 GiB of host memory: with Adam 53.7 billion'),
        (dict(operators__mmcv='stand-in'), "mmdet's one-stage detectors, DINO", "mmzero's stand-in"),
        (dict(operators__locks=[dict(path='/c/lock', minutes=90)]), 'DeepSpeed', '/c/lock, 90 min old'),
        (dict(), 'NVMe offload (DeepSpeed)', 'could be below /fast (nvme, 7 GiB free), /slow (rotating'),
    ],
)
def test_what_could_be_better(changes: dict[str, Any], part: str, text: str) -> None:
    found = judged(**changes)[part]
    assert any(text in line for line in found.remarks), found
    assert not any('/shared' in line for line in found.remarks)


def test_failed_probes_are_told_and_stop_nothing() -> None:
    facts = {name: dict(error=f'ValueError: {name}') for name in FULL}
    text = as_text(facts, judge(facts))
    assert text.count('could not be looked at: ValueError') == len(FULL) - 1  # peers have no section
    assert '  no  mmzero itself' in text


def test_the_report_of_a_full_machine() -> None:
    parts = judge(FULL)
    text, data = as_text(FULL, parts), as_dict(FULL, parts)
    for line in (
        '0: NVIDIA H100 80GB HBM3, 79.6 GiB, 79.1 GiB free, compute capability 9.0',
        'built: cpu_adam',
        'locked memory: unlimited',
        'eth0: up, 100000 Mbit/s',
        'RANK=0',
        'yes training on several GPUs (NCCL)',
    ):
        assert line in text, text
    assert [one['name'] for one in data['parts'] if one['works']] == [part.name for part in parts]
