"""The table of the best pipelines that ``plan.top`` returns for a plan with stages."""

from __future__ import annotations

from dataclasses import dataclass
from io import StringIO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from shardwise.plans.format_intervals import format_bytes_interval, format_seconds_interval, priced_cluster
from shardwise.plans.other_pipelines import RankedPipeline

WIDTH = 120


@dataclass(frozen=True, slots=True)
class PipelineRanking:
    """The chosen pipeline, then the others in the order of their simulated step. ``looked_at``: the number of others
    that were tried. ``refused`` of them could not be planned: a stage has no parameters, or does not fit."""

    pipelines: tuple[RankedPipeline, ...]
    looked_at: int
    refused: int

    def __str__(self) -> str:
        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        for title in ("", "step", "vs. chosen", "bubble", "memory"):
            table.add_column(title, justify="right", no_wrap=True)
        table.add_column("differs in", overflow="fold")
        first = self.pipelines[0]
        cluster = None if first.plan is None else priced_cluster(first.plan)
        for number, pipeline in enumerate(self.pipelines, 1):
            table.add_row(
                str(number),
                format_seconds_interval(pipeline.step_seconds, cluster),
                f"{pipeline.step_seconds / first.step_seconds - 1:+.2%}" if pipeline.changed else "",
                "" if pipeline.bubble is None else f"{pipeline.bubble:.1%}",
                format_bytes_interval(pipeline.num_bytes, cluster),
                pipeline.changed or "the chosen pipeline",
            )
        console = Console(file=StringIO(), width=WIDTH, color_system=None)
        console.print(table)
        assert isinstance(console.file, StringIO)
        lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
        refused = f" ({self.refused} of them could not be planned)" if self.refused else ""
        what = f"the best of {self.looked_at} others that were tried{refused}, not of all pipelines"
        return "\n".join([*(line for line in lines if line), f"by simulated step after the chosen pipeline; {what}"])
