"""Settings on the command line."""

from pathlib import Path
from typing import Any

import pytest
from mmengine.config import Config

from mmzero.runner.options import load_config, tool_parser


def options_of(*words: str) -> dict[str, Any]:
    return tool_parser('').parse_args(['config.py', '--cfg-options', *words]).cfg_options


@pytest.mark.parametrize(
    'text, value',
    [
        ("dict(params='cpu', optimizer='cpu')", dict(params='cpu', optimizer='cpu')),
        ("{'params': 'cpu'}", dict(params='cpu')),
        ("dict(policy=dict(type='A', classes=['B']), every=2)", dict(policy=dict(type='A', classes=['B']), every=2)),
        ("[dict(units='a', shard=False)]", [dict(units='a', shard=False)]),
        ('1e-3', 0.001),
        ('[a,b]', ['a', 'b']),
        ('None', None),
        ('a=b', 'a=b'),
    ],
)
def test_values(text: str, value: Any) -> None:
    assert options_of(f'a.b={text}', 'c=1') == {'a.b': value, 'c': 1}


def test_dicts_are_merged(tmp_path: Path) -> None:
    Config(dict(model_wrapper_cfg=dict(stage=3))).dump(tmp_path / 'config.py')
    cfg = load_config(str(tmp_path / 'config.py'), options_of("model_wrapper_cfg.offload=dict(params='cpu')"))
    assert cfg.model_wrapper_cfg == dict(stage=3, offload=dict(params='cpu'))


def test_a_config_of_a_package_with_a_sign_in_its_name() -> None:
    pytest.importorskip('mmdet')
    for name in ('gn+ws/faster-rcnn_r50_fpn_gn-ws-all_1x_coco.py', 'legacy_1.x/faster-rcnn_r50_fpn_1x_coco_v1.py'):
        assert load_config(f'mmdet::{name}').model.type == 'FasterRCNN'


@pytest.mark.parametrize('text', ['dict(a=1', 'dict(1)', 'dict(a=open("x"))', '{a: 1}'])
def test_what_is_no_literal(text: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        options_of(f'a={text}')
    assert '--cfg-options: cannot read' in capsys.readouterr().err
