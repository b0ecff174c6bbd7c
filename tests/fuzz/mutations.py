"""Spoiling a config at a place that a seed draws."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

KINDS = ('misspelt key', 'unknown key', 'wrong type', 'out of range', 'dropped key', 'several')

# Dicts whose owner takes anything, by the end of their path: nobody can tell a misspelling there.
FREE_FORM = {
    'model.train_cfg': 'read key by key by the heads that the model happens to have',
    'model.test_cfg': 'read key by key by the heads that the model happens to have',
    'metainfo': 'whatever a data set wants to say about itself',
    'data_prefix': 'names that transforms of a project look up',
    'backend_args': 'arguments of a file client that is made when a file is read',
}
# Single values that say nothing wrong however they are set: names and places.
NAMES = {
    'experiment_name': 'any text is a name',
    'work_dir': 'any text is a folder',
    'visualizer.name': 'any text is a name',
    'prefix': 'any text is a prefix of metrics',
    'load_from': 'a path; tested by itself',
}
WRONG = ('abc', 7.5, [1, 2], {'a': 1}, True)
OUT_OF_RANGE = (-1, 0, -7, 0.5, -0.5, 1.5, float('nan'), float('inf'), float('-inf'))


@dataclass(frozen=True)
class Mutation:
    """One change of a config.

    Args:
        kind (str): One of KINDS, without 'several'.
        owner (tuple): Keys that lead to the dict that was changed.
        key (str): The key there, after the change.
        before: The value, or the key's old name.
        after: The value now, if there is one.
    """

    kind: str
    owner: tuple
    key: str
    before: Any
    after: Any = None

    @property
    def path(self) -> str:
        """The config path."""
        return dotted((*self.owner, self.key))

    def __str__(self) -> str:
        text = {'misspelt key': f'was {self.before!r}', 'dropped key': f'was {self.before!r}'}
        return f'{self.kind} {self.path}: {text.get(self.kind, f"{self.before!r} -> {self.after!r}")}'[:160]


def dotted(keys: tuple) -> str:
    """Write a path as errors do."""
    text = ''.join(f'[{key}]' if isinstance(key, int) else f'.{key}' for key in keys)
    return text.lstrip('.')


def is_free(path: str) -> bool:
    """Whether a path lies in or below a dict whose owner takes anything."""
    return any(path == name or f'.{path}.'.find(f'.{name}.') >= 0 for name in FREE_FORM)


def mutate(cfg: dict, seed: int, kind: str) -> list[Mutation]:
    """Change a config in place.

    Args:
        cfg (dict): Plain dicts and lists.
        seed (int): Draws the place and the change.
        kind (str): One of KINDS.

    Returns:
        list[Mutation]: What was changed.
    """
    rng = random.Random(f'{kind} {seed}')
    if kind != 'several':
        return [_one(cfg, rng, kind)]
    done: list[Mutation] = []
    for _ in range(rng.choice((2, 3))):
        # Not what was changed before, nor below it.
        taken = [mutation.path for mutation in done]
        done.append(_one(cfg, rng, rng.choice(KINDS[:-1]), taken))
    return done


def _one(cfg: dict, rng: random.Random, kind: str, taken: list[str] = []) -> Mutation:  # noqa: B006
    places = [place for place in _places(cfg) if _fits(place, kind, taken)]
    # Each part of the config is as likely as another, however large the model's is.
    top = rng.choice(sorted({owner[0] if owner else key for owner, _, key in places}))
    owner, holder, key = rng.choice([p for p in places if (p[0][0] if p[0] else p[2]) == top])
    value = holder[key]
    if kind == 'misspelt key':
        slip = _slip(key, rng)
        items = [(slip if name == key else name, item) for name, item in holder.items()]
        holder.clear()
        holder.update(items)
        return Mutation(kind, owner, slip, key, value)
    if kind == 'unknown key':
        name = ''.join(rng.choice('qzxvkj') for _ in range(6))
        holder[name] = rng.choice((1, 'abc', None, True))
        return Mutation(kind, owner, name, None, holder[name])
    if kind == 'dropped key':
        del holder[key]
        return Mutation(kind, owner, key, value)
    if kind == 'wrong type':
        holder[key] = rng.choice([item for item in WRONG if not _same_kind(item, value)])
    else:
        holder[key] = rng.choice([item for item in OUT_OF_RANGE if item != value])
    return Mutation(kind, owner, key, value, holder[key])


def _places(cfg: Any, path: tuple = ()) -> Iterator[tuple[tuple, dict, str]]:
    if isinstance(cfg, dict):
        for key, value in cfg.items():
            yield path, cfg, key
            yield from _places(value, (*path, key))
    elif isinstance(cfg, (list, tuple)):
        for index, item in enumerate(cfg):
            yield from _places(item, (*path, index))


def _fits(place: tuple[tuple, dict, str], kind: str, taken: list[str]) -> bool:
    owner, holder, key = place
    path = dotted((*owner, key))
    if is_free(path) or any(path.startswith(other) or other.startswith(path) for other in taken):
        return False
    if kind == 'unknown key':
        # Top-level keys that nobody reads are the user's variables.
        return bool(owner)
    if kind == 'misspelt key':
        return len(key) > 2
    if kind == 'out of range':
        return isinstance(holder[key], (int, float)) and not isinstance(holder[key], bool)
    if kind == 'wrong type':
        return not any(f'.{path}'.endswith(f'.{name}') for name in NAMES)
    return True


def _slip(word: str, rng: random.Random) -> str:
    """One letter dropped, doubled or swapped with the next."""
    at = rng.randrange(1, len(word) - 1)
    slips = [word[:at] + word[at + 1 :], word[:at] + word[at] + word[at:]]
    if word[at] != word[at + 1]:
        slips.append(word[:at] + word[at + 1] + word[at] + word[at + 2 :])
    return rng.choice([slip for slip in slips if slip != word])


def _same_kind(one: Any, other: Any) -> bool:
    kinds = (bool, (int, float), str, dict, (list, tuple), type(None))
    return [isinstance(one, kind) for kind in kinds][:2] == [isinstance(other, kind) for kind in kinds][:2] and any(
        isinstance(one, kind) and isinstance(other, kind) for kind in kinds
    )
