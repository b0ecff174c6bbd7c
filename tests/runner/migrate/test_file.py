"""Writing migrated configs: overlays that say, on their bases, what the whole config says."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from mmengine.config import Config

from mmzero.errors import ConfigError
from mmzero.runner import load_config
from mmzero.runner.migrate import config_text, migrate_config, write_config
from mmzero.runner.migrate.file import bases_of, overlay

BASE = dict(a=dict(b=1, c=dict(d=2, e=3)), l=[1, 2], t=(1, 2), x=dict(y=1), strategy=dict(type='FSDPStrategy'), n=1)


@pytest.mark.parametrize(
    'changes, wanted',
    [
        (dict(), dict()),
        (dict(n=2, new=dict(k=1)), dict(n=2, new=dict(k=1))),
        (dict(a=dict(b=1, c=dict(d=4, e=3))), dict(a=dict(c=dict(d=4)))),
        # A key is gone: the dict that had it is replaced.
        (dict(a=dict(b=1, c=dict(d=2))), dict(a=dict(c=dict(_delete_=True, d=2)))),
        (dict(a=dict(c=dict(d=2, e=3))), dict(a=dict(_delete_=True, c=dict(d=2, e=3)))),
        (dict(x=None), dict(x=None)),
        (dict(n=dict(k=1)), dict(n=dict(_delete_=True, k=1))),
        (dict(l=[1, 2, 3]), dict(l=[1, 2, 3])),
        (dict(t=[1, 2]), dict(t=[1, 2])),
        (dict(n=True), dict(n=True)),
        (dict(x=dict(y=1, z={})), dict(x=dict(z={}))),
    ],
)
def test_an_overlay_on_its_base_is_the_config(tmp_path: Path, changes: dict[str, Any], wanted: dict[str, Any]) -> None:
    cfg = {**BASE, **changes}
    found = overlay(cfg, BASE)
    assert found == wanted
    Config(dict(BASE)).dump(tmp_path / 'base.py')
    (tmp_path / 'leaf.py').write_text("_base_ = ['base.py']\n" + Config(found).pretty_text)
    assert Config.fromfile(tmp_path / 'leaf.py').to_dict() == cfg


def test_a_key_at_the_top_that_is_gone_is_emptied() -> None:
    cfg = {name: value for name, value in BASE.items() if name != 'strategy'}
    assert overlay(cfg, BASE) == dict(strategy=None)


def write(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


def migrated_file(source: str, target: Path, **options: Any) -> Config:
    made = migrate_config(load_config(source))
    write_config(config_text(made.cfg, source, str(target), **options), str(target), made.cfg)
    return load_config(str(target))


STRATEGY = "strategy = dict(type='FSDPStrategy', state_dict_cfg='full')\n"


def test_a_strategy_of_a_base_is_emptied(tmp_path: Path) -> None:
    write(tmp_path / 'bases/deep/base.py', f"runner_type = 'FlexibleRunner'\n{STRATEGY}")
    write(tmp_path / 'bases/base.py', "_base_ = './deep/base.py'\nn = 1\n")
    source = write(tmp_path / 'leaf.py', "_base_ = 'bases/base.py'\nn = 2\n")
    cfg = migrated_file(source, tmp_path / 'elsewhere/new.py')
    assert "_base_ = ['../bases/base.py']" in (tmp_path / 'elsewhere/new.py').read_text()
    assert (cfg.strategy, cfg.n, cfg.runner_type) == (None, 2, 'mmzero.ZeroRunner')


def test_a_top_level_checkpoint_that_was_an_address_is_replaced(tmp_path: Path) -> None:
    write(tmp_path / 'base.py', "checkpoint = 'https://host/file.pth'\n")
    source = write(tmp_path / 'leaf.py', f"_base_ = 'base.py'\n{STRATEGY.replace('full', 'local')}")
    assert migrated_file(source, tmp_path / 'new.py').checkpoint == dict(format='sharded')


def test_the_whole_config_is_written_without_bases(tmp_path: Path) -> None:
    write(tmp_path / 'base.py', 'n = 1\n')
    for name, source, options in (
        ('asked', write(tmp_path / 'leaf.py', f"_base_ = 'base.py'\n{STRATEGY}"), dict(full=True)),
        ('alone', write(tmp_path / 'alone.py', f'n = 1\n{STRATEGY}'), dict()),
        ('yaml', write(tmp_path / 'leaf.yaml', 'n: 1\nstrategy: {type: FSDPStrategy}\n'), dict()),
    ):
        cfg = migrated_file(source, tmp_path / f'new_{name}.py', **options)
        text = (tmp_path / f'new_{name}.py').read_text()
        assert cfg.n == 1 and '_base_' not in text and 'strategy' not in text


def test_a_config_that_imports_is_written_as_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(
        tmp_path / 'lazy_base.py', 'from torch.optim import AdamW\noptim_wrapper = dict(optimizer=dict(type=AdamW))\n'
    )
    source = write(
        tmp_path / 'lazy_leaf.py',
        'from mmengine.config import read_base\n'
        'from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy\n'
        'from tests.models import Block\n'
        'with read_base():\n    from .lazy_base import *\n'
        "strategy = dict(type='FSDPStrategy', model_wrapper=dict(\n"
        '    auto_wrap_policy=dict(type=transformer_auto_wrap_policy, transformer_layer_cls=[Block])))\n',
    )
    cfg = migrated_file(source, tmp_path / 'new.py')
    assert cfg.optim_wrapper.optimizer.type == 'torch.optim.AdamW'
    policy = cfg.model_wrapper_cfg.wrap_policy
    assert policy.type == 'torch.distributed.fsdp.wrap.transformer_auto_wrap_policy'
    assert policy.transformer_layer_cls == ['tests.models.Block']


def test_bases_that_are_computed_are_written_out(tmp_path: Path) -> None:
    source = write(tmp_path / 'leaf.py', f"_base_ = ['base' + '.py']\n{STRATEGY}")
    assert bases_of(source) == []


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    file = write(tmp_path / 'there.py', 'n = 1\n')
    with pytest.raises(ConfigError, match=r'there\.py: exists; name a file that does not'):
        write_config('n = 2', file, dict(n=2))
    with pytest.raises(ConfigError, match='cannot be written'):
        write_config('n = 2', f'{file}/new.py', dict(n=2))


def test_a_file_that_says_something_else_is_no_migration(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match='does not say what the migration made'):
        write_config('n = 2\n', str(tmp_path / 'new.py'), dict(n=1))


@pytest.mark.zoo
@pytest.mark.skipif(importlib.util.find_spec('mmpretrain') is None, reason='needs mmpretrain')
@pytest.mark.parametrize(
    'name, stage, dtype',
    [
        ('mae/benchmarks/vit-huge-p14_8xb128-fsdp-coslr-50e_in1k.py', 3, None),
        ('mae/benchmarks/vit-large-p16_8xb128-fsdp-coslr-50e_in1k.py', 3, None),
        ('mae/benchmarks/vit-huge-p14_8xb128-ds-coslr-50e_in1k.py', 1, 'float16'),
        ('mae/benchmarks/vit-large-p16_8xb128-ds-coslr-50e_in1k.py', 1, 'float16'),
        ('minigpt4/minigpt-4_baichuan-7b_caption.py', 2, 'float16'),
    ],
)
def test_configs_of_mmpretrain(tmp_path: Path, name: str, stage: int, dtype: str | None) -> None:
    cfg = migrated_file(f'mmpretrain::{name}', tmp_path / 'new.py')
    text = (tmp_path / 'new.py').read_text()
    assert f"_base_ = ['mmpretrain::{name}']" in text and len(text.splitlines()) < 20
    assert cfg.model_wrapper_cfg.stage == stage and cfg.optim_wrapper.get('dtype') == dtype and cfg.strategy is None
