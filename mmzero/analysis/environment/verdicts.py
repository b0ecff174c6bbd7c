"""What of mmzero works here, and what is missing for the rest."""

from collections.abc import Callable

from .judging import Facts, Judge, Part

GIB = 2**30


def _core(judge: Judge) -> None:
    judge.wants_core()


def _cpu_ranks(judge: Judge) -> None:
    judge.wants_core()
    if judge.get('torch', 'gloo') is False:
        judge.missing.append('this torch was built without gloo')
    cores = judge.get('cpu', 'quota') or judge.get('cpu', 'usable')
    if cores:
        judge.remarks.append(f'{cores:g} core(s): set OMP_NUM_THREADS to cores per rank')
    _shared_memory(judge)


def _shared_memory(judge: Judge) -> None:
    shm = judge.get('places', 'shm')
    if shm is not None and shm['free'] < GIB // 2:
        room = f'{shm["free"] / GIB:.2f} GiB'
        judge.remarks.append(
            f'/dev/shm has {room} free, which workers of data loaders fill; --shm-size of the container'
        )


def _gpu(judge: Judge) -> None:
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


def _nccl(judge: Judge) -> None:
    _gpu(judge)
    if judge.get('torch', 'cuda') and not judge.get('torch', 'nccl'):
        judge.missing.append('this torch was built without NCCL')
    apart = judge.get('peers', 'apart')
    if apart:
        pairs = ', '.join(f'{a}-{b}' for a, b in apart[:4])
        judge.remarks.append(f'GPUs that do not reach each other (P2P): {pairs}; NCCL goes through host memory there')
    _shared_memory(judge)


def _nodes(judge: Judge) -> None:
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


def _bfloat16(judge: Judge) -> None:
    judge.wants_core()
    old = [one['name'] for one in judge.get('gpus', 'gpus', []) if (one['capability'] or 8) < 8]
    if old and judge.get('torch', 'gpus'):
        judge.missing.append(f"{old[0]} computes no bfloat16; use optim_wrapper.dtype='float16'")
    flags = judge.get('cpu', 'flags', [])
    if not judge.get('torch', 'gpus') and not {'avx512_bf16', 'amx_bf16'} & set(flags):
        judge.remarks.append('these CPUs have no instructions for it: right, and slow')


def _offload(judge: Judge) -> None:
    judge.wants_core()
    limit, available = judge.get('memory', 'limit'), judge.get('memory', 'available')
    room = min(size for size in (limit, available) if size) if limit or available else None
    if room:
        billions = room / 16 / 1e9
        judge.remarks.append(
            f'{room / GIB:.0f} GiB of host memory: with Adam {billions:.1f} billion parameters per node'
        )


def _compile(judge: Judge) -> None:
    judge.wants_core()
    if not judge.get('compilers', 'cxx'):
        judge.missing.append('no C++ compiler for inductor: install g++, or set CXX')
    if not judge.get('compilers', 'python_headers'):
        judge.missing.append('no Python.h: install the headers of this Python (python3-dev)')
    if judge.get('torch', 'gpus'):
        judge.wants('triton')
        if not judge.get('compilers', 'cc'):
            judge.missing.append('no C compiler, with which triton builds its launcher: install gcc, or set CC')


def _mmdet(judge: Judge) -> None:
    judge.wants_core()
    judge.wants('mmdet', 'mmcv')
    if judge.get('operators', 'mmcv') == 'stand-in':
        judge.remarks.append("mmcv has no compiled operators: mmzero's stand-in takes PyTorch's way where mmcv has one")


def _two_stage(judge: Judge) -> None:
    judge.wants_core()
    judge.wants('mmdet', 'mmcv')
    if judge.get('operators', 'mmcv') == 'stand-in':
        advice = "pip uninstall mmcv-lite; pip install 'mmcv>=2.0,<2.2', which compiles them"
        judge.missing.append(f'mmcv has no compiled operators (RoIAlign, nms): {advice}')


def _packages(*names: str) -> Callable[[Judge], None]:
    def judge_them(judge: Judge) -> None:
        judge.wants_core()
        judge.wants(*names)

    return judge_them


def _mmpretrain(judge: Judge) -> None:
    judge.wants_core()
    judge.wants('mmpretrain', 'mmcv')
    if not judge.get('packages', 'torchvision', {}).get('version'):
        judge.missing.append('torchvision is missing, which its registries import: install the one of this torch')


def _deepspeed(judge: Judge) -> None:
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


def _nvme(judge: Judge) -> None:
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


def _places(judge: Judge) -> list[str]:
    kinds = ('nvme', 'solid', 'virtual', 'unknown', 'rotating')
    mounts = [one for one in judge.get('places', 'mounts', []) if one['writable'] and one['kind'] in kinds]
    mounts.sort(key=lambda one: (kinds.index(one['kind']), -one['free']))
    return [f'{one["path"]} ({one["kind"]}, {one["free"] / GIB:.0f} GiB free)' for one in mounts[:3]]


def _checkpoints(judge: Judge) -> None:
    judge.wants_core()
    here = judge.get('places', 'here')
    if here is not None:
        if not here['writable']:
            judge.missing.append(f'{here["path"]} cannot be written to: set work_dir, or --work-dir')
        judge.remarks.append(
            f'{here["free"] / GIB:.0f} GiB free here; weights and state of Adam take 12 bytes per parameter'
        )
    judge.remarks.append('all ranks have to see one file system')


PARTS: dict[str, Callable[[Judge], None]] = {
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
        one = Judge(facts)
        look(one)
        parts.append(one.part(name))
    return parts
