"""The index by which Hugging Face's libraries find weights that are in several files."""

import json
from pathlib import Path

from mmzero.errors import CheckpointError


def names_by_file(index: Path) -> dict[Path, set[str]]:
    """Read an index.

    Args:
        index (Path): A JSON file with ``weight_map``.

    Returns:
        dict[Path, set[str]]: Files, in the order of their names, with the names of the weights in each.

    Raises:
        CheckpointError: If it is no index, or a file that it names is not beside it.
    """
    try:
        files = json.loads(index.read_text(encoding='utf-8'))['weight_map']
        names: dict[Path, set[str]] = {}
        for name, file in files.items():
            # A path would leave the folder.
            names.setdefault(index.parent / Path(file).name, set()).add(name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f'{index} is no index of weights: {type(error).__name__}: {error}') from error
    missing = sorted(file.name for file in names if not file.is_file())
    if missing:
        raise CheckpointError(f'{index} names {", ".join(missing)}, which {index.parent} does not hold')
    return dict(sorted(names.items()))
