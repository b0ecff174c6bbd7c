"""Every model family of mmdet can be planned, but for models that stock MMEngine cannot build either.

``python -m tests.runner.test_plan_stock_configs`` does the same with all configs.
"""

import copy
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mmengine.config import Config
from mmengine.registry import MODELS, DefaultScope

import mmzero  # noqa: F401
from mmzero.analysis.sweep.families import UNREADABLE, shipped_configs
from mmzero.runner import prepare_plan
from mmzero.runner.offline import no_network
from tests.runner.test_stock_configs import stock_configs

PAGE = Path(__file__).resolve().parents[2] / 'docs/plans.md'


def one_per_family() -> Iterator[tuple[str, Path, Any]]:
    """The first config of each family that can be read and has a model, with what was read; None without such."""
    for family, paths in shipped_configs().items():
        yield next(
            ((family, path, cfg) for path in paths if (cfg := _read(path)) is not None), (family, paths[0], None)
        )


def _read(path: Path) -> Any:
    try:
        cfg = Config.fromfile(path)
    except UNREADABLE:
        return None
    return cfg if cfg.get('model') is not None else None


def plan_failure(cfg: Any, name: str) -> str | None:
    """What print_plan says where it fails."""
    try:
        planned = prepare_plan(cfg, name, world_size=8)
        report = planned.report(8, planned.config.wrap_policy)
        assert report.text(tree=True) and report.as_dict()
    except Exception as error:  # noqa: BLE001
        return f'{type(error).__name__}: {error}'
    assert all(param.is_meta for param in planned.model.parameters()), name
    return None


def stock_failure(cfg: Any) -> str | None:
    """What MMEngine says where it cannot build the model."""
    try:
        with no_network(), DefaultScope.overwrite_default_scope(cfg.get('default_scope') or 'mmengine'):
            MODELS.build(copy.deepcopy(cfg.model))
    except Exception as error:  # noqa: BLE001
        return f'{type(error).__name__}: {error}'
    return None


def known() -> set[str]:
    """Families that the page lists as without a plan."""
    section = PAGE.read_text().split('\n## Families without a plan\n')[1].split('\n## ')[0]
    return set(re.findall(r'^\| `([\w-]+)` \|', section, flags=re.MULTILINE))


@pytest.mark.slow
def test_one_config_per_family() -> None:
    failed, ours, count = set(), [], 0
    for family, path, cfg in one_per_family():
        count += 1
        failure = plan_failure(cfg, path.name) if cfg is not None else 'cannot be read, or has no model'
        if failure is None:
            continue
        failed.add(family)
        if cfg is not None and stock_failure(cfg) is None:
            ours.append(f'{path.parent.name}/{path.name}: {failure}')
    assert not ours, '\n'.join(ours)
    assert count >= 100
    # Fewer where more packages are installed than mmzero needs.
    assert failed <= known()


def main() -> None:
    """Count what becomes of all configs, and print those that fail here alone."""
    counts: Counter[str] = Counter()
    for path in stock_configs():
        cfg = _read(path)
        failure = 'no model, or cannot be read' if cfg is None else plan_failure(cfg, path.name)
        stock = failure is not None and cfg is not None and stock_failure(cfg) is None
        counts['planned' if failure is None else 'no model' if cfg is None else 'fails' if stock else 'not built'] += 1
        if stock:
            print(f'{path.parent.name}/{path.name}: {failure}')
    print(dict(counts))


if __name__ == '__main__':
    main()
