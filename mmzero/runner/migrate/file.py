"""Writing a migrated config: an overlay on the bases of the old one, or the whole."""

import ast
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmengine.config import Config

from mmzero.errors import ConfigError
from mmzero.runner.migrate.values import plain
from mmzero.runner.options import load_config

DELETE, SCOPE = '_delete_', '_scope_'


def config_text(cfg: Mapping[str, Any], source: str, target: str | None, *, full: bool = False) -> str:
    """Write a config as a file.

    Args:
        cfg (Mapping[str, Any]): The whole config, of plain values.
        source (str): The file that it was made of.
        target (str, optional): Where it will be; bases are named from there. Defaults to None: beside the source.
        full (bool): Whether bases are written out. Defaults to False.

    Returns:
        str: The text of a Python config.
    """
    head = f'# Made of {Path(source).name} by tools/migrate_config.py.\n'
    bases = [] if full else bases_of(source)
    base = _merged(bases, Path(source).parent)
    if base is None:
        return head + _pretty(cfg)
    folder = Path(target).parent if target is not None else Path(source).parent
    named = [_seen_from(folder, name, Path(source).parent) for name in bases]
    return f'{head}_base_ = {named!r}\n\n{_pretty(overlay(cfg, base))}'


def overlay(cfg: Mapping[str, Any], base: Mapping[str, Any], *, top: bool = True) -> dict[str, Any]:
    """Find what, merged into a base as MMEngine does, gives a config.

    Args:
        cfg (Mapping[str, Any]): The config.
        base (Mapping[str, Any]): The base.
        top (bool): Whether these are whole configs. Defaults to True.

    Returns:
        dict[str, Any]: The difference; where keys of the base are gone, ``_delete_=True`` replaces the dict that had
        them.
    """
    # A key at the top can be emptied, not deleted.
    found: dict[str, Any] = dict.fromkeys(base.keys() - cfg.keys()) if top else {}
    for key, value in cfg.items():
        if key not in base:
            found[key] = value
        elif not _same(value, base[key]):
            found[key] = _difference(value, base[key])
    return found


def _difference(value: Any, base: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    if not isinstance(base, Mapping) or base.keys() - value.keys() - {SCOPE}:
        return {DELETE: True, **value}
    return overlay(value, base, top=False)


def _same(value: Any, other: Any) -> bool:
    """Equality that tells a tuple from a list, and True from 1; a base of a package adds its scope to dicts."""
    if isinstance(value, Mapping) and isinstance(other, Mapping):
        keys = {*value, *other} - {SCOPE}
        return all(key in value and key in other and _same(value[key], other[key]) for key in keys)
    if type(value) is not type(other):
        return False
    if isinstance(value, (list, tuple)):
        return len(value) == len(other) and all(map(_same, value, other))
    return value == other


def bases_of(source: str) -> list[str]:
    """Read which bases a config file names.

    Args:
        source (str): The file.

    Returns:
        list[str]: As they are written; a config of a package is a base itself. Empty for other formats than Python, and
        for configs that import their bases.
    """
    if '::' in source:
        return [source]
    if not source.endswith('.py'):
        return []
    for node in ast.parse(Path(source).read_text(encoding='utf-8')).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], 'id', None) == '_base_':
            try:
                value = ast.literal_eval(node.value)
            except ValueError:
                return []
            return [value] if isinstance(value, str) else list(value)
    return []


def _merged(bases: list[str], folder: Path) -> dict[str, Any] | None:
    if not bases:
        return None
    named = [name if '::' in name else str((folder / name).resolve()) for name in bases]
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary, 'bases.py')
        file.write_text(f'_base_ = {named!r}\n', encoding='utf-8')
        return plain(load_config(str(file)).to_dict())


def _seen_from(folder: Path, name: str, old: Path) -> str:
    if '::' in name or os.path.isabs(name):
        return name
    return Path(os.path.relpath((old / name).resolve(), folder.resolve())).as_posix()


def _pretty(cfg: Mapping[str, Any]) -> str:
    return Config(dict(cfg)).pretty_text.rstrip() + '\n'


def write_config(text: str, target: str, cfg: Mapping[str, Any]) -> None:
    """Write a config file, and read it again.

    Args:
        text (str): Its text.
        target (str): Where to write it.
        cfg (Mapping[str, Any]): What it has to say.

    Raises:
        ConfigError: If there is a file already, or it cannot be written.
    """
    if Path(target).exists():
        raise ConfigError([f'{target}: exists; name a file that does not'])
    try:
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        Path(target).write_text(text, encoding='utf-8')
    except OSError as error:
        raise ConfigError([f'{target}: cannot be written: {error.strerror}']) from error
    read = {
        key: value for key, value in plain(load_config(target).to_dict()).items() if key in cfg or value is not None
    }
    if not _same(read, plain(cfg)):
        raise RuntimeError(f'{target} does not say what the migration made')
