"""The tool that prints plans, as a user calls it."""

import json
import sys
from pathlib import Path

from tests.tools.processes import ROOT, run, succeed

TOOL = 'tools/print_plan.py'
CONFIG = 'configs/dino_swin_tiny_digits_zero3.py'
SWIN = "dict(type='ModuleClassPolicy', classes=['SwinBlock'])"


def test_policies_side_by_side_with_tree_and_json(tmp_path: Path) -> None:
    out = tmp_path / 'new' / 'plans.json'
    options = ('--world-size', 8, '--policy', SWIN, '--policy', 'None', '--stage', 1, '--tree', '--json', out)
    text = succeed(sys.executable, TOOL, CONFIG, *options, '--cfg-options', 'model.backbone.embed_dims=16')
    assert 'ZeRO stage 1 on 1 x 8 ranks (replicate x shard), wrap policy: ModuleClassPolicy(SwinBlock)' in text
    assert 'backbone.stages.0.blocks.0-1' in text and '`- ' in text and 'B/A' in text
    # No unit is trained or loaded: no word of weights, data or a work dir.
    assert 'Traceback' not in text and 'annotations' not in text and f'wrote {out}' in text
    first, second = json.loads(out.read_text())
    assert first['name'] == f'{CONFIG}, --policy {SWIN}' and first['stage'] == 1
    assert first['parameters'] == second['parameters'] and len(second['units']) == 1


def test_a_stock_config_needs_no_data(tmp_path: Path) -> None:
    import mmdet

    stock = Path(mmdet.__file__).parent / '.mim/configs/retinanet/retinanet_r50_fpn_1x_coco.py'
    text = succeed(sys.executable, TOOL, stock, '--world-size', 2)
    assert 'RetinaNet' in text and 'on 1 x 2 ranks' in text
    # Lines of the table stay within its width.
    lines = text.splitlines()
    assert max(len(line) for line in lines if str(stock) not in line) <= 120


def test_errors_are_one_line_without_traceback() -> None:
    done = run(sys.executable, TOOL, CONFIG, '--world-size', 8, '--policy', 'Nope')
    assert done.returncode == 2
    assert "--policy Nope: no wrap policy 'Nope'; known are: " in done.stdout and 'Traceback' not in done.stdout
    done = run(sys.executable, TOOL, CONFIG, '--world-size', 8, '--json', Path(CONFIG) / 'plan.json')
    assert done.returncode == 2
    assert '--json: cannot write' in done.stdout and 'Traceback' not in done.stdout


def test_the_tool_is_short() -> None:
    assert len((ROOT / TOOL).read_text().splitlines()) <= 150
