"""Packaging of mmzero."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent


def read_version() -> str:
    """Read the version without importing mmzero, which needs torch and MMEngine."""
    text = (ROOT / 'mmzero' / 'version.py').read_text(encoding='utf-8')
    match = re.search(r"^__version__ = '([^']+)'$", text, flags=re.MULTILINE)
    if match is None:
        raise RuntimeError("mmzero/version.py has no line like __version__ = '1.2.3'")
    return match.group(1)


def read_readme() -> str:
    """Read the long description, which is empty in a tree without a README."""
    readme = ROOT / 'README.md'
    return readme.read_text(encoding='utf-8') if readme.is_file() else ''


setup(
    name='mmzero',
    version=read_version(),
    description='ZeRO training of OpenMMLab models by configuration',
    long_description=read_readme(),
    long_description_content_type='text/markdown',
    author='The mmzero Authors',
    license='Apache-2.0',
    keywords='deep learning, distributed training, ZeRO, FSDP, OpenMMLab',
    classifiers=[
        'Development Status :: 4 - Beta',
        'Operating System :: POSIX :: Linux',
        'Programming Language :: Python :: 3',
        'Topic :: Scientific/Engineering :: Artificial Intelligence',
    ],
    packages=find_packages(include=['mmzero', 'mmzero.*']),
    package_data={'mmzero': ['py.typed']},
    python_requires='>=3.10',
    install_requires=[
        'torch>=2.11',
        'mmengine>=0.10.7',
        'addict',
        'yapf',
        # MMEngine finds `mmdet::` configs through pkg_resources, which 82 dropped.
        'setuptools<82',
    ],
    extras_require={
        # The full mmcv of the same versions may take the place of mmcv-lite, and has to where a
        # model calls its compiled ops (RoIAlign, nms): uninstall mmcv-lite first, as both install
        # the package `mmcv`.
        'det': ['mmdet>=3.3', 'mmcv-lite>=2.0,<2.2'],
        'hf': ['transformers>=5.0'],
        'peft': ['transformers>=5.0', 'peft>=0.21', 'safetensors'],
        'deepspeed': ['deepspeed>=0.19'],
        'dev': [
            'codespell',
            'matplotlib',
            'mypy',
            'peft>=0.21',
            'pycocotools',
            'pytest',
            'ruff',
            'safetensors',
            'scikit-learn',
            'transformers>=5.0',
        ],
    },
)
