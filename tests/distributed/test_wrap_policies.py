"""Whatever a policy makes units, the model trains as under stock DDP."""

import pytest
from mmengine.config import Config

from mmzero.config import Faults, read_zero_config
from tests.configs.test_configs import POLICIES
from tests.distributed.cases import Faults as Found
from tests.distributed.cases import merged
from tests.distributed.parity import BOUNDS, adamw
from tests.distributed.ranks import run_ranks
from tests.distributed.training import compare, train
from tests.models import detection_batch, tiny_dino

pytestmark = pytest.mark.distributed


def policies() -> dict[str, object]:
    """Those of the shipped configs, by name."""
    found = {}
    for path in POLICIES:
        fields = dict(Config.fromfile(path).model_wrapper_cfg)
        fields.pop('type')
        found[path.stem] = read_zero_config(fields, 'model_wrapper_cfg', Faults()).wrap_policy
    return found


def on_rank() -> Found:
    """What of each policy lies out of the design's bounds."""
    optim = dict(clip_grad=dict(max_norm=0.1))
    # DDP refuses re-entrant checkpointing together with unused parameters.
    reference = train(lambda: tiny_dino(with_cp=False), detection_batch, adamw, None, optim)
    found = {}
    for name, policy in policies().items():
        mine = train(tiny_dino, detection_batch, adamw, dict(stage=3, wrap_policy=policy), optim)
        off = compare(mine, reference)
        found[name] = [
            f'{what} {value:.1e} > {BOUNDS[what]:.0e}' for what, value in off.items() if value > BOUNDS[what]
        ]
    return found


@pytest.fixture(scope='module')
def found() -> Found:
    return merged(run_ranks(2, on_rank))


@pytest.mark.parametrize('name', [path.stem for path in POLICIES])
def test_parity(found: Found, name: str) -> None:
    assert not found[name]
