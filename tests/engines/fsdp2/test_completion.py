"""What a plan gets so that FSDP2 trains it, on models whose plans can be told by hand."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from mmzero.config import OverrideConfig, PrecisionConfig, ZeroConfig
from mmzero.engines import build_engine, plan_units
from mmzero.errors import ConfigError
from mmzero.policies import UnitRules, WrapPlan, make_plan, with_methods

HALF = torch.bfloat16
FP32 = UnitRules(param_dtype=torch.float32, cast_forward_inputs=True)
NORM = replace(FP32, cast_forward_inputs=False)


class Block(nn.Module):
    """Linear layers and norms of two kinds, one in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.bn = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.norms = nn.ModuleList([nn.LayerNorm(4), nn.LayerNorm(4)])
        self.plain = nn.BatchNorm1d(4, affine=False)

    def method(self) -> None:
        """One by which it is entered."""


class Net(nn.Module):
    """Blocks, and what is around them."""

    def __init__(self) -> None:
        super().__init__()
        self.bn, self.blocks, self.head = nn.BatchNorm1d(4), nn.Sequential(Block(), Block()), nn.Linear(4, 2)


def plan(*keep: str, dtype: torch.dtype | None = HALF, overrides: tuple = ()) -> WrapPlan:
    def policy(model: nn.Module) -> WrapPlan:
        return with_methods(make_plan(model, ['blocks.0', 'blocks.1'], 'test'), {'blocks.0': ['method']})

    precision = PrecisionConfig(param_dtype=dtype, keep_fp32=keep)
    config = ZeroConfig(wrap_policy=policy, precision=precision, overrides=overrides)
    return plan_units(Net(), build_engine(config), 1)


def rules(found: WrapPlan) -> dict[str, UnitRules]:
    return {unit.name: unit.rules for unit in found.units}


def test_without_16_bit_nothing_is_added() -> None:
    assert (
        rules(plan(dtype=None))
        == rules(plan(dtype=torch.float32))
        == dict.fromkeys(['blocks.0', 'blocks.1', ''], UnitRules())
    )


def test_layers_with_running_statistics_are_units_of_their_own() -> None:
    found = plan()
    assert rules(found) == {
        'blocks.0.bn': NORM, 'blocks.1.bn': NORM, 'blocks.0': UnitRules(), 'blocks.1': UnitRules(), '': UnitRules()
    }  # fmt: skip
    assert found.notes == ('2 norm layers are gathered in float32, each by itself, as their statistics are',)
    assert 'bn.weight' in found.root.params and found.units[2].methods == ('method',)


@pytest.mark.parametrize(
    'norm',
    [
        nn.SyncBatchNorm(4),
        nn.BatchNorm1d(4, track_running_stats=False),
        nn.InstanceNorm1d(4, affine=True),
        nn.InstanceNorm1d(4, affine=True, track_running_stats=True),
    ],
    ids=str,
)
def test_norms_over_batches_and_images_are_too(norm: nn.Module) -> None:
    model = Net()
    model.blocks[0].bn = norm
    precision = PrecisionConfig(param_dtype=HALF)
    config = ZeroConfig(wrap_policy=lambda net: make_plan(net, ['blocks.0'], 'test'), precision=precision)
    assert rules(plan_units(model, build_engine(config), 1))['blocks.0.bn'] == NORM


@pytest.mark.parametrize('pattern', ['**.norms', '**.norms.*', 'blocks.*.norms'])
def test_modules_that_are_named(pattern: str) -> None:
    found = rules(plan(pattern))
    assert {name for name, rule in found.items() if rule == FP32} == {
        f'blocks.{i}.norms.{j}' for i in (0, 1) for j in (0, 1)
    }
    assert found['blocks.0.bn'] == NORM and found['blocks.0'] == UnitRules()


def test_a_unit_that_is_named_is_gathered_in_float32_as_a_whole() -> None:
    found = rules(plan('blocks.0'))
    assert found == {'blocks.1.bn': NORM, 'blocks.0': FP32, 'blocks.1': UnitRules(), '': UnitRules()}


def test_what_holds_units_is_no_unit_itself() -> None:
    found = rules(plan('blocks', overrides=(OverrideConfig(('(root)',), param_dtype=HALF),)))
    assert found['blocks.0'] == found['blocks.1'] == FP32 and 'blocks' not in found


def test_units_inside_have_the_rules_of_their_unit() -> None:
    overrides = (OverrideConfig(('blocks.0',), reshard_after_forward=False), OverrideConfig(('blocks.1',), shard=False))
    found = rules(plan(overrides=overrides))
    assert found['blocks.0.bn'] == replace(NORM, reshard_after_forward=False)
    assert found['blocks.1.bn'] == replace(NORM, shard=False)


def test_units_of_their_own_dtype() -> None:
    found = rules(plan(overrides=(OverrideConfig(('blocks.1',), param_dtype=torch.float32),)))
    assert 'blocks.0.bn' in found and 'blocks.1.bn' not in found


def test_patterns_that_name_nothing_come_together() -> None:
    with pytest.raises(ConfigError) as caught:
        plan('**.norms', 'head', 'blocks.*.nroms')
    first, second = caught.value.faults
    assert first.startswith("model_wrapper_cfg.precision.keep_fp32: 'head' names no module with parameters that is ")
    assert second.endswith("; did you mean 'blocks.1.norms' or 'blocks.0.norms' or 'blocks.1.norms.1'?")


def test_nothing_is_in_16_bit() -> None:
    with pytest.raises(ConfigError, match="'blocks' names no module .* no unit is; set precision.param_dtype"):
        plan('blocks', dtype=None)
