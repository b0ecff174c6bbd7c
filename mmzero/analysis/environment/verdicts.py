"""What of mmzero works here, and what is missing for the rest."""

import platform
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

GIB = 2**30
Facts = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Part:
    """A part of mmzero.

    Args:
        name (str): What it is.
        missing (tuple[str, ...]): What it lacks, each with what to do; it works where there is none.
        remarks (tuple[str, ...]): What may be slower or smaller than it could.
    """

    name: str
    missing: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def works(self) -> bool:
        """Whether it does."""
        return not self.missing


@dataclass
class _Judge:
    """Collects what a part lacks."""

    facts: Facts
    missing: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def get(self, probe: str, name: str, default: Any = None) -> Any:
        """A fact; the default where its probe failed."""
        return self.facts.get(probe, {}).get(name, default)

    def wants(self, *packages: str) -> None:
        """Look at packages and their versions."""
        for name in packages:
            found = self.get('packages', name, {})
            wanted = found.get('wanted') or ''
            advice = _INSTALL.get(name, f"pip install '{name}{wanted}'")
            if not found.get('version'):
                self.missing.append(f'{name} is missing: {advice}')
            elif found.get('fits') is False:
                self.missing.append(f'{name} {found["version"]} does not fit {wanted}: {advice}')

    def wants_core(self) -> None:
        """What every part stands on."""
        self.wants('torch', 'mmengine', 'addict', 'yapf', 'setuptools')
        if 'error' in self.facts.get('torch', {}) and self.get('packages', 'torch', {}).get('version'):
            self.missing.append(f'torch cannot be imported: {self.facts["torch"]["error"]}')
        if _python() < (3, 10):
            self.missing.append(f'Python {platform.python_version()}: use 3.10 or newer')

    def part(self, name: str) -> Part:
        """What was found."""
        return Part(name, tuple(self.missing), tuple(self.remarks))


def _python() -> tuple[int, ...]:
    return tuple(int(item) for item in platform.python_version_tuple()[:2])


_DET = "pip install -e '.[det]'"
_INSTALL = {
    'mmdet': _DET,
    'mmcv': _DET,
    'transformers': "pip install -e '.[hf]'",
    'peft': "pip install -e '.[peft]'",
    'safetensors': "pip install -e '.[peft]'",
    'deepspeed': "pip install -e '.[deepspeed]'",
    'mmseg': 'pip install mmsegmentation',
    'torch': "pip install 'torch>=2.11', from the index of the build that you want",
    'setuptools': "pip install 'setuptools<82', whose pkg_resources MMEngine reads",
}


def _core(judge: _Judge) -> None:
    judge.wants_core()


def _cpu_ranks(judge: _Judge) -> None:
    judge.wants_core()
    if judge.get('torch', 'gloo') is False:
        judge.missing.append('this torch was built without gloo')
    cores = judge.get('cpu', 'quota') or judge.get('cpu', 'usable')
    if cores:
        judge.remarks.append(f'{cores:g} core(s): set OMP_NUM_THREADS to cores per rank')
    _shared_memory(judge)


def _shared_memory(judge: _Judge) -> None:
    shm = judge.get('places', 'shm')
    if shm is not None and shm['free'] < GIB // 2:
        room = f'{shm["free"] / GIB:.2f} GiB'
        judge.remarks.append(
            f'/dev/shm has {room} free, which workers of data loaders fill; --shm-size of the container'
        )


def _gpu(judge: _Judge) -> None:
    judge.wants_core()
    gpus, seen = judge.get('gpus', 'gpus', []), judge.get('torch', 'gpus', 0)
    if not gpus:
        judge.missing.append('no GPU: nvidia-smi is missing, fails or lists none; install the driver, or train on CPUs')
    if judge.get('packages', 'torch', {}).get('version') and not judge.get('torch', 'cuda'):
        judge.missing.append('this torch is a CPU build: install a CUDA build')
    elif gpus and not seen:
        driver = judge.get('gpus', 'driver')
        why = (
            f'driver {driver} may be too old for CUDA {judge.get("torch", "cuda")}, or CUDA_VISIBLE_DEVICES hides them'
        )
        judge.missing.append(f'torch sees none of {len(gpus)} GPU(s): {why}')


def _nccl(judge: _Judge) -> None:
    _gpu(judge)
    if judge.get('torch', 'cuda') and not judge.get('torch', 'nccl'):
        judge.missing.append('this torch was built without NCCL')
    apart = judge.get('peers', 'apart')
    if apart:
        pairs = ', '.join(f'{a}-{b}' for a, b in apart[:4])
        judge.remarks.append(f'GPUs that do not reach each other (P2P): {pairs}; NCCL goes through host memory there')
    _shared_memory(judge)


def _nodes(judge: _Judge) -> None:
    judge.wants_core()
    up = [one for one in judge.get('network', 'interfaces', []) if not one['loopback'] and one['state'] != 'down']
    if not up:
        judge.missing.append('no network interface besides the loopback is up')
    for name, chosen in judge.get('network', 'chosen', {}).items():
        if not chosen['means']:
            names = ', '.join(one['name'] for one in up) or 'none'
            judge.missing.append(f'{name}={chosen["value"]} names no interface here; there are: {names}')
    locked = judge.get('limits', 'locked_memory')
    if judge.get('network', 'infiniband') and locked is not None:
        judge.missing.append(
            f'InfiniBand needs locked memory, and {locked / 2**20:.0f} MiB are allowed: ulimit -l unlimited'
        )
    elif not judge.get('network', 'infiniband'):
        judge.remarks.append('no InfiniBand or RoCE device: ranks talk by TCP')


def _bfloat16(judge: _Judge) -> None:
    judge.wants_core()
    old = [one['name'] for one in judge.get('gpus', 'gpus', []) if (one['capability'] or 8) < 8]
    if old and judge.get('torch', 'gpus'):
        judge.missing.append(f"{old[0]} computes no bfloat16; use optim_wrapper.dtype='float16'")
    flags = judge.get('cpu', 'flags', [])
    if not judge.get('torch', 'gpus') and not {'avx512_bf16', 'amx_bf16'} & set(flags):
        judge.remarks.append('these CPUs have no instructions for it: right, and slow')


def _offload(judge: _Judge) -> None:
    judge.wants_core()
    limit, available = judge.get('memory', 'limit'), judge.get('memory', 'available')
    room = min(size for size in (limit, available) if size) if limit or available else None
    if room:
        billions = room / 16 / 1e9
        judge.remarks.append(
            f'{room / GIB:.0f} GiB of host memory: with Adam {billions:.1f} billion parameters per node'
        )


def _compile(judge: _Judge) -> None:
    judge.wants_core()
    if not judge.get('compilers', 'cxx'):
        judge.missing.append('no C++ compiler for inductor: install g++, or set CXX')
    if not judge.get('compilers', 'python_headers'):
        judge.missing.append('no Python.h: install the headers of this Python (python3-dev)')
    if judge.get('torch', 'gpus'):
        judge.wants('triton')
        if not judge.get('compilers', 'cc'):
            judge.missing.append('no C compiler, with which triton builds its launcher: install gcc, or set CC')


def _mmdet(judge: _Judge) -> None:
    judge.wants_core()
    judge.wants('mmdet', 'mmcv')
    if judge.get('operators', 'mmcv') == 'stand-in':
        judge.remarks.append("mmcv has no compiled operators: mmzero's stand-in takes PyTorch's way where mmcv has one")


def _two_stage(judge: _Judge) -> None:
    judge.wants_core()
    judge.wants('mmdet', 'mmcv')
    if judge.get('operators', 'mmcv') == 'stand-in':
        advice = "pip uninstall mmcv-lite; pip install 'mmcv>=2.0,<2.2', which compiles them"
        judge.missing.append(f'mmcv has no compiled operators (RoIAlign, nms): {advice}')


def _packages(*names: str) -> Callable[[_Judge], None]:
    def judge_them(judge: _Judge) -> None:
        judge.wants_core()
        judge.wants(*names)

    return judge_them


def _mmpretrain(judge: _Judge) -> None:
    judge.wants_core()
    judge.wants('mmpretrain', 'mmcv')
    if not judge.get('packages', 'torchvision', {}).get('version'):
        judge.missing.append('torchvision is missing, which its registries import: install the one of this torch')


def _deepspeed(judge: _Judge) -> None:
    judge.wants_core()
    judge.wants('deepspeed')
    if not judge.get('compilers', 'ninja') and not judge.get('packages', 'ninja', {}).get('version'):
        judge.missing.append('no ninja, with which its operators are built: pip install ninja')
    if not judge.get('compilers', 'cxx'):
        judge.missing.append('no C++ compiler for its operators: install g++, or set CXX')
    if 'error' in judge.facts.get('deepspeed', {}) and judge.get('packages', 'deepspeed', {}).get('version'):
        judge.missing.append(f'it cannot be asked: {judge.facts["deepspeed"]["error"]}')
    for lock in judge.get('operators', 'locks', []):
        judge.remarks.append(
            f'{lock["path"]}, {lock["minutes"]} min old: a build that was killed leaves it, and every start waits for '
            'it; remove it if nothing is being built'
        )


def _nvme(judge: _Judge) -> None:
    _deepspeed(judge)
    if not (judge.get('compilers', 'libaio') and judge.get('compilers', 'libaio_headers')):
        judge.missing.append('libaio and its headers are missing: install libaio-dev')
    if judge.get('deepspeed', 'async_io') == 'missing':
        judge.missing.append("DeepSpeed's async_io cannot be built here; CFLAGS and LDFLAGS may say where libaio is")
    places = _places(judge)
    if not places:
        judge.missing.append('no local disk can be written to: mount one, and name a folder on it in offload.nvme_path')
    else:
        judge.remarks.append('offload.nvme_path could be below ' + ', '.join(places))
    locked = judge.get('limits', 'locked_memory')
    if locked is not None and locked < GIB:
        judge.remarks.append(
            f'{locked / 2**20:.0f} MiB of memory may be locked, which its buffers want: ulimit -l unlimited'
        )


def _places(judge: _Judge) -> list[str]:
    kinds = ('nvme', 'solid', 'virtual', 'unknown', 'rotating')
    mounts = [one for one in judge.get('places', 'mounts', []) if one['writable'] and one['kind'] in kinds]
    mounts.sort(key=lambda one: (kinds.index(one['kind']), -one['free']))
    return [f'{one["path"]} ({one["kind"]}, {one["free"] / GIB:.0f} GiB free)' for one in mounts[:3]]


def _checkpoints(judge: _Judge) -> None:
    judge.wants_core()
    here = judge.get('places', 'here')
    if here is not None:
        if not here['writable']:
            judge.missing.append(f'{here["path"]} cannot be written to: set work_dir, or --work-dir')
        judge.remarks.append(
            f'{here["free"] / GIB:.0f} GiB free here; weights and state of Adam take 12 bytes per parameter'
        )
    judge.remarks.append('all ranks have to see one file system')


PARTS: dict[str, Callable[[_Judge], None]] = {
    'mmzero itself, its tools and plans': _core,
    'training on CPUs, several ranks': _cpu_ranks,
    'training on a GPU': _gpu,
    'training on several GPUs (NCCL)': _nccl,
    'several nodes': _nodes,
    'bfloat16': _bfloat16,
    'offload to host memory': _offload,
    'torch.compile': _compile,
    'sharded checkpoints': _checkpoints,
    "mmdet's one-stage detectors, DINO": _mmdet,
    "mmdet's two-stage detectors": _two_stage,
    'mmpretrain': _mmpretrain,
    'mmseg': _packages('mmseg', 'mmcv'),
    "transformers' language models": _packages('transformers'),
    'adapters (PEFT)': _packages('transformers', 'peft', 'safetensors'),
    'DeepSpeed': _deepspeed,
    'NVMe offload (DeepSpeed)': _nvme,
    'tests': _packages('pytest'),
}


def judge(facts: Facts) -> list[Part]:
    """Say what works.

    Args:
        facts (Facts): What the probes have found; those that failed know nothing.

    Returns:
        list[Part]: The parts of mmzero.
    """
    parts = []
    for name, look in PARTS.items():
        one = _Judge(facts)
        look(one)
        parts.append(one.part(name))
    return parts
