"""One dict of a config that names a class, held against that class."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from mmengine.registry import Registry

from mmzero.config import Faults
from mmzero.runner.lookup import advice, lookup
from mmzero.runner.signatures import check_fields
from mmzero.runner.toplevel import near_key

# What a config can hold where a dict belongs, besides objects that are built already.
PLAIN = (str, int, float, list, tuple)


class Nodes:
    """Checks of single dicts with ``type``.

    Args:
        scope (str): The default scope, in whose registries classes are looked up.
        faults (Faults): Takes what is wrong.
    """

    def __init__(self, scope: str, faults: Faults) -> None:
        self.scope = scope
        self.faults = faults

    def node(
        self,
        cfg: Any,
        path: str,
        registry: Registry,
        *,
        default: Callable | None = None,
        provided: Collection[str] = (),
        extra: Collection[str] = (),
        rest: Callable | None = None,
        lenient: bool = False,
    ) -> None:
        """Check one dict.

        Args:
            cfg: The dict; objects and None are left alone.
            path (str): Its config path.
            registry (Registry): Where its ``type`` is looked up.
            default (Callable, optional): What is built without a ``type``. Defaults to None: ``type`` is needed.
            provided (Collection[str]): Arguments that come from elsewhere.
            extra (Collection[str]): Further names that whoever builds it takes out.
            rest (Callable, optional): What gets the fields that the class does not have. Defaults to None.
            lenient (bool): Whether annotations may be taken loosely. Defaults to False.
        """
        if isinstance(cfg, PLAIN):
            self.faults.add(path, f'got {cfg!r}; expected a dict')
        if not isinstance(cfg, Mapping):
            return
        target = default
        if 'type' in cfg or default is None:
            target = self.find(cfg, path, registry)
        if target is not None:
            check_fields(target, cfg, path, self.faults, provided=provided, extra=extra, rest=rest, lenient=lenient)

    def find(self, cfg: Mapping, path: str, registry: Registry, field: str = '.type') -> Callable | None:
        """Look up the class that a dict names.

        Args:
            cfg (Mapping): With ``type``.
            path (str): Its config path.
            registry (Registry): Where to look.
            field (str): What the path gets where the class is at fault. Defaults to '.type'.

        Returns:
            Callable or None: The class; None, and a fault, where there is none.
        """
        given = cfg.get('type')
        if given is None:
            slips = [key for key in cfg if near_key(key, ('type',))]
            hint = f'; is {slips[0]!r} meant to be it?' if slips else ''
            self.faults.add(f'{path}{field}', f'is missing; name a class of the registry {registry.name!r}{hint}')
            return None
        if callable(given):
            return given
        if not isinstance(given, str):
            self.faults.add(f'{path}{field}', f'got {given!r}; expected the name of a class, or a class')
            return None
        scope = cfg.get('_scope_') or self.scope
        found, _ = lookup(registry, given, scope)
        if found is None:
            near = advice(registry, given, scope)
            self.faults.add(f'{path}{field}', f'no class {given!r} in the registry {registry.name!r}{near}')
        return found

    def each(self, cfg: Any, path: str, check: Callable[[Any, str], None]) -> None:
        """Check one dict, or each of a list."""
        if isinstance(cfg, (list, tuple)):
            for index, item in enumerate(cfg):
                check(item, f'{path}[{index}]')
        elif cfg is not None:
            check(cfg, path)
