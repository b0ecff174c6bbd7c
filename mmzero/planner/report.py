"""A plan with what it costs: as text, as data for JSON, and beside other plans."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mmzero.engines import Engine, Forecast
from mmzero.errors import PlanError
from mmzero.policies import PlanFigures, WrapPlan, plan_figures, plan_table, plan_tree, replicated
from mmzero.policies.groups import alike
from mmzero.policies.table import align, rules_text, wrap

ADAM_STATE_ITEMSIZE = 8


@dataclass(frozen=True)
class PlanReport:
    """A plan on some ranks at a stage.

    Args:
        stage (int): ZeRO stage.
        micro_batches (int): Forwards and backwards per optimizer step.
        figures (PlanFigures): The plan and its bytes.
        forecast (Forecast, optional): The engine's; None where it has none.
    """

    stage: int
    micro_batches: int
    figures: PlanFigures
    forecast: Forecast | None

    @property
    def heading(self) -> str:
        """Stage, ranks, policy."""
        gathering = self.figures.gathering
        return (
            f'ZeRO stage {self.stage} on {gathering.replicate} x {gathering.shard} ranks (replicate x shard), '
            f'wrap policy: {self.figures.plan.policy}'
        )

    def text(self, tree: bool = False) -> str:
        """Draw the plan.

        Args:
            tree (bool): As a tree, too. Defaults to False.

        Returns:
            str: Heading, table, collectives and the plan's notes, at most 120 columns but for the tree.
        """
        parts = [*wrap(self.heading), plan_table(self.figures)]
        if self.forecast is not None:
            parts += wrap(f'collectives per optimizer step of {_batches(self.micro_batches)}: {self.collectives}')
            parts += wrap(self.on_host) if self.forecast.host else []
        for note in self.figures.plan.notes:
            parts += wrap(note)
        return '\n'.join([*parts, *(['', plan_tree(self.figures)] if tree else [])])

    @property
    def collectives(self) -> str:
        """Their numbers by kind, in words."""
        counts = self.forecast.collectives if self.forecast is not None else {}
        return ', '.join(f'{count} {kind}' for kind, count in counts.items()) or 'none'

    @property
    def on_host(self) -> str:
        """What lies in host memory and is copied, in words."""
        forecast: Any = self.forecast
        sizes = ', '.join(f'{size / 2**20:,.2f} MiB of {name}' for name, size in forecast.host.items())
        return (
            f'in host memory, per rank, with Adam: {sizes}; copied per optimizer step: '
            f'{forecast.to_device / 2**20:,.2f} MiB to the GPU, {forecast.to_host / 2**20:,.2f} MiB back'
        )

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON.

        Returns:
            dict[str, Any]: Sizes in bytes on one rank; a group of alike units is one entry of ``units``.
        """
        figures, gathering = self.figures, self.figures.gathering
        return dict(
            policy=figures.plan.policy,
            stage=self.stage,
            replicate=gathering.replicate,
            shard=gathering.shard,
            micro_batches=self.micro_batches,
            parameters=figures.plan.numel,
            gathered_bytes=figures.gathered_bytes,
            kept_bytes=figures.kept_bytes,
            padding=figures.padding,
            peak_gathered_bytes=figures.peak_gathered_bytes,
            collectives=dict(self.forecast.collectives) if self.forecast is not None else None,
            elements_moved=self.forecast.moved if self.forecast is not None else None,
            host_bytes=dict(self.forecast.host) if self.forecast is not None else None,
            bytes_to_device=self.forecast.to_device if self.forecast is not None else None,
            bytes_to_host=self.forecast.to_host if self.forecast is not None else None,
            units=[_group_dict([item.unit.name for item in group], group[0]) for group in alike(figures.units)],
            replicated=[dict(parameters=list(item.params), reason=item.reason) for item in replicated(figures.plan)]
            if gathering.shard > 1
            else [],
            notes=list(figures.plan.notes),
        )


def _group_dict(names: list[str], item: Any) -> dict[str, Any]:
    return dict(
        names=names,
        class_name=item.unit.class_name,
        alike=len(names),
        parameters=item.unit.numel,
        gathered_bytes=item.gathered_bytes,
        kept_bytes=item.kept_bytes,
        padding=item.padding,
        dtypes=list(item.dtypes),
        rules=rules_text(item.unit.rules),
        compiled=item.unit.compiled,
    )


def _batches(count: int) -> str:
    return f'{count} micro-batch' + ('es' if count > 1 else '')


def plan_report(engine: Engine, plan: WrapPlan, *, world_size: int, micro_batches: int = 1) -> PlanReport:
    """Work out what a plan costs. Needs neither a model nor a process group.

    Args:
        engine (Engine): Of the config.
        plan (WrapPlan): The plan.
        world_size (int): Number of ranks.
        micro_batches (int): Forwards and backwards per optimizer step. Defaults to 1.

    Returns:
        PlanReport: For one rank.

    Raises:
        ValueError: If the config's mesh does not fill the world.
    """
    figures = plan_figures(plan, engine.gathering(world_size))
    try:
        forecast = engine.forecast(
            plan, world_size=world_size, micro_batches=micro_batches, state_itemsize=ADAM_STATE_ITEMSIZE
        )
    except PlanError:
        forecast = None
    return PlanReport(engine.config.stage, micro_batches, figures, forecast)


def compare_plans(reports: Sequence[PlanReport], names: Sequence[str]) -> str:
    """Lay plans side by side.

    Args:
        reports (Sequence[PlanReport]): Two or more.
        names (Sequence[str]): What they are called.

    Returns:
        str: Totals of each and, from the second on, their ratio to the first's.
    """
    letters = [chr(ord('A') + index) for index in range(len(reports))]
    header = ('', *letters, *(f'{letter}/A' for letter in letters[1:]))
    rows = [header, *(_compared(title, values) for title, values in _totals(reports))]
    legend = [line for letter, name in zip(letters, names, strict=True) for line in wrap(f'{letter}: {name}')]
    return '\n'.join([*legend, *align(rows, left=(0,), rules=(1,))])


def _totals(reports: Sequence[PlanReport]) -> list[tuple[str, list[float]]]:
    figures = [report.figures for report in reports]
    totals: list[tuple[str, list[float]]] = [
        ('units', [len(item.units) for item in figures]),
        ('parameters', [item.plan.numel for item in figures]),
        ('parameters in the root', [item.root.unit.numel for item in figures]),
        ('largest unit MiB', [max(unit.gathered_bytes for unit in item.units) / 2**20 for item in figures]),
        ('kept MiB', [item.kept_bytes / 2**20 for item in figures]),
        ('padding', [item.padding for item in figures]),
        ('peak gathered MiB', [item.peak_gathered_bytes / 2**20 for item in figures]),
    ]
    forecasts = [report.forecast for report in reports if report.forecast is not None]
    if len(forecasts) < len(reports):
        return totals
    kinds = sorted({kind for item in forecasts for kind in item.collectives})
    totals += [(f'{kind} per step', [item.collectives.get(kind, 0) for item in forecasts]) for kind in kinds]
    totals.append(('collectives per step', [sum(item.collectives.values()) for item in forecasts]))
    totals.append(('elements moved per step', [round(item.moved) for item in forecasts]))
    return totals


def _compared(title: str, values: list[float]) -> tuple[str, ...]:
    cells = [f'{value:,}' if isinstance(value, int) else f'{value:,.2f}' for value in values]
    ratios = [f'{value / values[0]:.2f}' if values[0] else '' for value in values[1:]]
    return title, *cells, *ratios
