"""What a migration has made so far: the config as it will be, and a line about every field that it came to."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mmzero.config import Faults
from mmzero.errors import near_names
from mmzero.runner.several import optimizers_of

BECOMES, DIFFERS, NEEDLESS, LOST = 'becomes', 'differs', 'needless', 'lost'

_SHOWN = 160


@dataclass(frozen=True)
class Note:
    """What became of one field.

    Args:
        kind (str): 'becomes': other fields say it; 'differs': it stays, or goes, and something acts otherwise now;
            'needless': nothing has to say it; 'lost': nothing stands for it.
        path (str): Where the config had it.
        value (Any): What it said; None where it was left out.
        targets (dict[str, Any]): What says it now, by config path.
        why (str): The reason, and for what is lost what to do.
    """

    kind: str
    path: str
    value: Any
    targets: dict[str, Any]
    why: str

    @property
    def given(self) -> str:
        """The field as the config had it."""
        return self.path if self.value is None else f'{self.path} = {shown(self.value)}'

    @property
    def says(self) -> str:
        """What says it now; empty where nothing does."""
        return ', '.join(f'{path} = {shown(value)}' for path, value in self.targets.items())


def shown(value: Any) -> str:
    """Write a value as a config does, cut where it is long.

    Args:
        value (Any): The value.

    Returns:
        str: One line.
    """
    text = ' '.join(_written(value).split())
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + '...'


def _written(value: Any) -> str:
    if isinstance(value, Mapping) and all(isinstance(key, str) and key.isidentifier() for key in value):
        return f'dict({", ".join(f"{key}={_written(item)}" for key, item in value.items())})'
    return getattr(value, '__qualname__', None) or repr(value)


class Draft:
    """A config on its way.

    Args:
        cfg (dict): The config, of plain values; changed in place.
        engine (str): 'fsdp2' or 'deepspeed'.
        ranks_per_node (int, optional): For strategies that shard within a node. Defaults to None.
    """

    def __init__(self, cfg: dict[str, Any], engine: str = 'fsdp2', ranks_per_node: int | None = None) -> None:
        self.cfg = cfg
        self.engine = engine
        self.ranks_per_node = ranks_per_node
        self.notes: list[Note] = []
        self.faults = Faults()

    def becomes(self, path: str, value: Any, targets: Mapping[str, Any], why: str) -> None:
        """Let other fields say what one said.

        Args:
            path (str): Where the config had it.
            value (Any): What it said.
            targets (Mapping[str, Any]): Config path to value, which are set.
            why (str): The reason.
        """
        for target, result in targets.items():
            self.set(target, result)
        self.notes.append(Note(BECOMES, path, value, dict(targets), why))

    def differs(self, path: str, value: Any, why: str) -> None:
        """Tell of something that acts otherwise now."""
        self.notes.append(Note(DIFFERS, path, value, {}, why))

    def needless(self, path: str, value: Any, why: str) -> None:
        """Leave out what nothing has to say."""
        self.notes.append(Note(NEEDLESS, path, value, {}, why))

    def lost(self, path: str, value: Any, why: str) -> None:
        """Leave out what nothing stands for."""
        self.notes.append(Note(LOST, path, value, {}, why))

    def set(self, path: str, value: Any) -> None:
        """Set a field.

        Args:
            path (str): Its config path; dicts on the way are made.
            value (Any): What it says.
        """
        *parents, name = path.split('.')
        node = self.cfg
        for parent in parents:
            if not isinstance(node.get(parent), dict):
                node[parent] = {}
            node = node[parent]
        node[name] = value

    def get(self, path: str) -> Any:
        """Read a field.

        Args:
            path (str): Its config path.

        Returns:
            Any: What it says; None where it is not there.
        """
        node: Any = self.cfg
        for name in path.split('.'):
            node = node.get(name) if isinstance(node, dict) else None
        return node

    @property
    def stage(self) -> int:
        """The stage that has been chosen; 3, the default of ZeroModelWrapper, before."""
        stage = self.get('model_wrapper_cfg.stage')
        return 3 if stage is None else stage

    def optimizers(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Go through the optimizer wrappers.

        Yields:
            tuple[str, dict]: Config path and fields of each, of one or several.
        """
        wrapper = self.cfg.get('optim_wrapper')
        several = {name: one for name, one in optimizers_of(wrapper).items() if isinstance(one, dict)}
        if several:
            yield from ((f'optim_wrapper.{name}', one) for name, one in several.items())
        elif isinstance(wrapper, dict):
            yield 'optim_wrapper', wrapper

    def for_optimizers(self, field: str, value: Any) -> dict[str, Any]:
        """Say a field of every optimizer wrapper.

        Args:
            field (str): Its name.
            value (Any): What it is to say.

        Returns:
            dict[str, Any]: Config paths to the value; empty where there is no optimizer.
        """
        return {f'{path}.{field}': value for path, _ in self.optimizers()}


Answer = Callable[[Draft, str, Any], None]
"""Decides what becomes of a field: called with the draft, the field's path and its value."""


def needless(why: str) -> Answer:
    """An answer for what nothing has to say."""
    return lambda draft, path, value: draft.needless(path, value, why)


def lost(why: str) -> Answer:
    """An answer for what nothing stands for."""
    return lambda draft, path, value: draft.lost(path, value, why)


def moved(target: str, why: str) -> Answer:
    """An answer for what another field says in the same words."""
    return lambda draft, path, value: draft.becomes(path, value, {target: value}, why)


def answer_all(draft: Draft, path: str, given: Mapping[str, Any], answers: Mapping[str, Answer], owner: str) -> None:
    """Answer every field of a dict, in the order of the answers.

    Args:
        draft (Draft): Takes the outcome.
        path (str): The config path of the dict.
        given (Mapping[str, Any]): The dict; a field that is None says nothing.
        answers (Mapping[str, Answer]): By the name of the field.
        owner (str): Whose fields they are, for names without an answer.
    """
    for name in (*[name for name in answers if name in given], *[name for name in given if name not in answers]):
        value = given[name]
        if value is None:
            continue
        if name in answers:
            answers[name](draft, f'{path}.{name}', value)
        else:
            draft.lost(f'{path}.{name}', value, f'{owner} has no such field{near_names(str(name), answers)}')
