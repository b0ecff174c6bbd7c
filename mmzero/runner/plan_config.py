"""The plans of a config, without ranks, data or weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mmengine.config import Config
from torch import nn

from mmzero._compat import pretended_process_group
from mmzero.config import CheckpointingConfig, Faults, ZeroConfig, read_zero_config
from mmzero.config.reader import optional_dtype
from mmzero.engines import build_engine, plan_units
from mmzero.errors import ConfigError
from mmzero.planner import PlanReport, plan_report
from mmzero.policies import build_policy
from mmzero.runner.blame import describe_error
from mmzero.runner.check import default_scope
from mmzero.runner.literals import read_literal
from mmzero.runner.model_check import build_on_meta, check_regions, whole_outside
from mmzero.runner.offline import no_network
from mmzero.runner.options import load_config
from mmzero.runner.translate import translate_optim_wrapper, type_name, wrapper_fields


@dataclass(frozen=True)
class PlannedConfig:
    """A config whose model is built, to be planned with any policy.

    Args:
        name (str): What the config is called.
        model (nn.Module): Its parameters are on the meta device.
        config (ZeroConfig): The fields of ``model_wrapper_cfg``.
        micro_batches (int): Per optimizer step.
        remarks (tuple[str, ...]): What of the config is not in the plan.
    """

    name: str
    model: nn.Module
    config: ZeroConfig
    micro_batches: int
    remarks: tuple[str, ...]

    def report(self, world_size: int, policy: Any, path: str = 'model_wrapper_cfg.wrap_policy') -> PlanReport:
        """Plan the model.

        Args:
            world_size (int): Number of ranks.
            policy (str or dict or callable, optional): As the field ``wrap_policy``.
            path (str): What the policy is called in errors. Defaults to its config path.

        Returns:
            PlanReport: For one rank.

        Raises:
            ConfigError: If the policy does not fit the model, or cannot be trained as the config asks.
        """
        try:
            engine = build_engine(replace(self.config, wrap_policy=policy))
            plan = plan_units(self.model, engine, world_size)
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError([f'{path}: {error}']) from error
        except Exception as error:
            # A policy may be a project's.
            raise ConfigError([f'{path}: {describe_error(error)}']) from error
        return plan_report(engine, plan, world_size=world_size, micro_batches=self.micro_batches)


def prepare_plan(cfg: Mapping, name: str, *, world_size: int, stage: int | None = None) -> PlannedConfig:
    """Read what a config says of sharding, with the defaults where it says nothing, and build its model on meta.

    Args:
        cfg (Mapping): The config; one without any field of mmzero is as good.
        name (str): What it is called.
        world_size (int): Number of ranks.
        stage (int, optional): Instead of the config's. Defaults to None.

    Returns:
        PlannedConfig: The config, ready to be planned.

    Raises:
        ConfigError: If fields of the sharding are wrong, or the model cannot be built.
    """
    faults = Faults()
    remarks: list[str] = []
    fields = _fields(dict(cfg), remarks)
    if stage is not None:
        fields['stage'] = stage
    config = read_zero_config(fields, 'model_wrapper_cfg', faults)
    try:
        config.mesh.sizes(world_size)
    except ValueError as error:
        faults.add('model_wrapper_cfg.mesh', str(error))
    try:
        build_policy(config.wrap_policy)
    except ValueError as error:
        faults.add('model_wrapper_cfg.wrap_policy', str(error))
    model = _model(dict(cfg), world_size, faults)
    faults.raise_if_any()
    if model is None:
        raise RuntimeError('no model and no fault')
    regions = check_regions(dict(cfg), config.activation_checkpointing, model, faults)
    faults.raise_if_any()
    if config.activation_checkpointing != CheckpointingConfig() or regions != 'nothing':
        remarks.append(f'recomputed in backward, which these figures do not depend on: {regions}')
    remarks += whole_outside(model)
    return PlannedConfig(name, model, config, _micro_batches(cfg.get('optim_wrapper')), tuple(remarks))


def _fields(cfg: dict, remarks: list[str]) -> dict:
    wrapper = cfg.get('model_wrapper_cfg')
    kind = type_name(wrapper.get('type', 'ZeroModelWrapper')) if isinstance(wrapper, Mapping) else None
    if kind not in (None, 'ZeroModelWrapper'):
        remarks.append(f'model_wrapper_cfg is of {kind}: planned with the defaults of ZeroModelWrapper')
        cfg = dict(cfg, model_wrapper_cfg=None)
    # What is wrong with the optimizer is for the check of a run to say; its dtype alone matters here.
    optim_wrapper = translate_optim_wrapper(cfg.get('optim_wrapper'), Faults())
    dtype = optim_wrapper.get('dtype') if isinstance(optim_wrapper, Mapping) else None
    try:
        optional_dtype(dtype)
    except (TypeError, ValueError) as error:
        remarks.append(f'optim_wrapper.dtype: got {dtype!r}; {error}. Planned as parameters are stored')
    return wrapper_fields(cfg, optim_wrapper)


def _model(cfg: dict, world_size: int, faults: Faults) -> nn.Module | None:
    scope = default_scope(cfg, faults)
    model = cfg.get('model')
    if not isinstance(model, Mapping):
        faults.add('model', 'is missing' if model is None else f'got {model!r}; expected a dict')
        return None
    if scope is None:
        return None
    # Some models ask for the number of ranks when they are built, and are others then.
    with no_network(), pretended_process_group(world_size):
        return build_on_meta(model, cfg, scope, faults)  # type: ignore[arg-type]


def _micro_batches(optim_wrapper: Any) -> int:
    count = optim_wrapper.get('accumulative_counts', 1) if isinstance(optim_wrapper, Mapping) else 1
    return count if type(count) is int and count > 0 else 1


def plan_configs(
    cfg: Config, name: str, *, world_size: int, policies: Sequence[str] = (), stage: int | None = None
) -> tuple[list[str], list[PlanReport], list[str]]:
    """Plan a config with one or several policies, and beside other configs.

    Args:
        cfg (Config): The config.
        name (str): What it is called.
        world_size (int): Number of ranks.
        policies (Sequence[str]): Names of policies, dicts as text, or paths of other configs, which are planned with
            their own models and policies. Without names and dicts the config has its own policy. Defaults to none.
        stage (int, optional): Instead of the configs' own. Defaults to None.

    Returns:
        tuple[list[str], list[PlanReport], list[str]]: What the plans are called, the plans, and what of the configs is
        not in them.

    Raises:
        ConfigError: If a config or a policy is wrong.
    """
    others = [text for text in policies if text.endswith('.py')]
    chosen = [text for text in policies if text not in others]
    planned = prepare_plan(cfg, name, world_size=world_size, stage=stage)
    found = [
        (f'{name}, --policy {text}', planned.report(world_size, read_policy(text), f'--policy {text}'))
        for text in chosen
    ] or [(name, planned.report(world_size, planned.config.wrap_policy))]
    remarks = [f'{name}: {remark}' for remark in planned.remarks]
    for path in others:
        other = prepare_plan(load_config(path), path, world_size=world_size, stage=stage)
        found.append((path, other.report(world_size, other.config.wrap_policy)))
        remarks += [f'{path}: {remark}' for remark in other.remarks]
    return [title for title, _ in found], [report for _, report in found], remarks


def read_policy(text: str) -> Any:
    """Read a policy from the command line.

    Args:
        text (str): A name, ``None`` for one unit, or a dict or list as it stands in a config.

    Returns:
        str or dict or list, optional: As the field ``wrap_policy``.

    Raises:
        ConfigError: If it is none of these.
    """
    if text.replace('.', '').isidentifier():
        return None if text == 'None' else text
    try:
        return read_literal(text)
    except ValueError as error:
        raise ConfigError(
            [
                f"--policy: cannot read {text!r} ({error}); expected a policy's name, such as AutoPolicy, a dict, such "
                "as \"dict(type='ModuleClassPolicy', classes=['SwinBlock'])\", or the path of a config"
            ]
        ) from error
