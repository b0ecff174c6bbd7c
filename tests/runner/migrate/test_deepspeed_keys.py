"""Every key of the installed DeepSpeed's config has an answer."""

import importlib.util
import inspect
import re
from typing import Any

import pytest

from mmzero.runner.migrate.ds_config import DS_ANSWERS
from mmzero.runner.migrate.ds_optim import OWN
from mmzero.runner.migrate.ds_precision import BF16_ANSWERS, FP16_ANSWERS
from mmzero.runner.migrate.ds_zero import OFFLOAD_ANSWERS, ZERO_ANSWERS

pytestmark = pytest.mark.deepspeed


def names(model: Any) -> set[str]:
    fields = model.model_fields
    return {*fields, *(field.alias for field in fields.values() if field.alias)}


def test_groups() -> None:
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero import config, offload_config

    own = {'stage', 'offload_param', 'offload_optimizer', 'cpu_offload', 'cpu_offload_param'}
    assert names(config.DeepSpeedZeroConfig) - own <= ZERO_ANSWERS.keys()
    for kind in (offload_config.DeepSpeedZeroOffloadParamConfig, offload_config.DeepSpeedZeroOffloadOptimizerConfig):
        assert names(kind) - {'device', 'nvme_path'} <= OFFLOAD_ANSWERS.keys()
    scale = {'loss_scale', 'initial_scale_power', 'loss_scale_window'}
    assert names(DeepSpeedFP16Config) - {'enabled'} - scale <= FP16_ANSWERS.keys()
    assert names(DeepSpeedBF16Config) - {'enabled'} <= BF16_ANSWERS.keys()


def test_the_top() -> None:
    """Keys are named by the constants of its modules, which its reading functions use."""
    from deepspeed.runtime import config, constants

    read = inspect.getsource(config)
    known = {
        value
        for module in (config, constants)
        for name, value in vars(module).items()
        if isinstance(value, str)
        and re.search(rf'(get_scalar_param\(param_dict,\s*|param_dict\.get\(|in param_dict.*){name}\b', read)
    }
    found = known | set(re.findall(r"param_dict\.get\('(\w+)'", read))
    assert {'train_batch_size', 'gradient_clipping', 'prescale_gradients'} <= found
    # Keys of the group `optimizer`, which are read there as well.
    found -= {'type', 'legacy_fusion', 'params'}
    assert found <= DS_ANSWERS.keys(), found - DS_ANSWERS.keys()


def test_its_optimizers_are_where_they_are_said_to_be() -> None:
    assert all(hasattr(importlib.import_module(module), name) for name, module in OWN.items())
    assert importlib.util.find_spec('deepspeed.runtime.fp16.onebit') is None
