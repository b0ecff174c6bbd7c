"""Which configs a sweep takes."""

from pathlib import Path

from mmengine.config import Config
from mmengine.utils import get_installed_path

from mmzero.errors import ConfigError
from mmzero.runner import load_config

UNREADABLE = (ImportError, FileNotFoundError)
"""What reading a config raises that needs a package or a file that is not there."""


def shipped_configs(package: str = 'mmdet') -> dict[str, list[Path]]:
    """List the configs that an OpenMMLab package was installed with.

    Args:
        package (str): Its import name. Defaults to 'mmdet'.

    Returns:
        dict[str, list[Path]]: By family, the folder right below ``configs``; bases are left out.

    Raises:
        ConfigError: If the package is not installed, or was without its configs.
    """
    try:
        root = Path(get_installed_path(package)) / '.mim' / 'configs'
    except Exception as error:
        # It raises PackageNotFoundError of one of two modules.
        raise ConfigError([f'{package}: is not installed ({error})']) from error
    found: dict[str, list[Path]] = {}
    for path in sorted(root.rglob('*.py')):
        parts = path.relative_to(root).parts
        if '_base_' not in parts and len(parts) > 1:
            found.setdefault(parts[0], []).append(path)
    if not found:
        raise ConfigError([f'{package}: no configs in {root}; install a wheel that ships them'])
    return found


def families(package: str = 'mmdet', tries: int = 1) -> list[list[str]]:
    """Choose configs of each family: the first that can be read and has a model, and others spread over the rest.

    Args:
        package (str): Import name of the package. Defaults to 'mmdet'.
        tries (int): At most how many of a family; the others are for where the first does not train. Defaults to 1.

    Returns:
        list[list[str]]: Names such as ``mmdet::dino/dino-4scale_r50_8xb2-12e_coco.py``, by family.
    """
    return [[_name(package, path) for path in _spread(paths, tries)] for paths in shipped_configs(package).values()]


def _spread(paths: list[Path], tries: int) -> list[Path]:
    first = next((path for path in paths if _has_model(path)), paths[0])
    others = [path for path in paths if path != first]
    count = min(tries - 1, len(others))
    return [first, *(others[index * len(others) // count] for index in range(count))]


def _name(package: str, path: Path) -> str:
    parts = path.parts[len(path.parts) - path.parts[::-1].index('configs') :]
    return f'{package}::{"/".join(parts)}'


def _has_model(path: Path) -> bool:
    try:
        return Config.fromfile(path).get('model') is not None
    except UNREADABLE:
        return False


def read(name: str) -> Config:
    """Read a config that has a model.

    Args:
        name (str): A path, or a name such as ``mmseg::fcn/...py``.

    Returns:
        Config: The config.

    Raises:
        ConfigError: If it cannot be read, or has no model.
    """
    cfg = load_config(name)
    if not isinstance(cfg.get('model'), dict):
        raise ConfigError([f'{name}: has no model; it is part of other configs'])
    return cfg
