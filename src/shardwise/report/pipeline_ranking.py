"""Alternatives to the chosen pipeline, planned and simulated like it: other cuts, micro-batches of other sizes, and the
other settings of a joint search."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from typing import NamedTuple

from shardwise.errors import PlanError
from shardwise.graph.cut import free_values
from shardwise.graph.ir import Graph
from shardwise.graph.segments import block_of
from shardwise.plans.auto_stages import AutoStagesReport
from shardwise.plans.pipelines import PipelineResult
from shardwise.plans.plan import Plan
from shardwise.plans.price_scope import priced_cluster
from shardwise.plans.quantities import format_bytes_interval, format_seconds_interval
from shardwise.plans.stage_planner import StagesDoNotFit
from shardwise.report.alternatives import WIDTH, empty_table, format_table
from shardwise.search.constants import MAX_CUT_MOVES


class RankedPipeline(NamedTuple):
    """A pipeline with its simulated figures and its difference from the chosen one (``changed``; empty: the chosen
    one). ``num_bytes``: of the device that holds most; ``bubble``: idle share of the time of all pipeline ranks;
    ``plan``: None if a joint search kept only figures, without ``bubble``."""

    step_seconds: float
    num_bytes: float
    changed: str
    bubble: float | None = None
    plan: Plan | None = None


def rank_pipelines(
    pipeline: PipelineResult, k: int, joint: AutoStagesReport | None = None
) -> tuple[tuple[RankedPipeline, ...], int, int]:
    """Return the chosen pipeline and the best ``k`` - 1 others, how many others were considered, and how many of these
    were impossible. Cuts are moved one by one, by one block (without blocks: one operator), then by two, until there
    are enough. Raises PlanError if nothing was chosen by price."""
    if pipeline.plan.pipeline is None:
        raise PlanError("no stage was chosen by price", fix='plan with search="dynamic_programming"')
    config = pipeline.planner.config  # plan slower ones to the end, too
    planner = replace(pipeline.planner, config=replace(config, settings=replace(config.settings, known=inf)))
    others = [_ranked(plan, _size(plan)) for plan in pipeline.others]
    refused = 0
    if joint is not None:
        planned = [t for t in joint.considered if t.setting != joint.taken]
        others += [RankedPipeline(t.step_seconds, t.num_bytes, str(t.setting)) for t in planned if t.step_seconds]
        refused += sum(bool(t.refused) for t in planned)
    for distance in range(1, MAX_CUT_MOVES + 1):
        if distance > 1 and len(others) >= k - 1:
            break
        for changed, parts in _moved(pipeline, distance):
            try:
                others.append(_ranked(planner.of_cut(parts)[0].plan, changed))
            except (PlanError, StagesDoNotFit):
                refused += 1
    best = sorted(others, key=lambda other: other.step_seconds)[: k - 1]
    return (_ranked(pipeline.plan, ""), *best), len(others) + refused, refused


def _ranked(plan: Plan, changed: str) -> RankedPipeline:
    assert plan.pipeline is not None, "it was chosen by price"
    return RankedPipeline(plan.pipeline.step_seconds, plan.pipeline.memory_bytes, changed, plan.pipeline.bubble, plan)


def _size(plan: Plan) -> str:
    return f"micro-batch {plan.micro_batch} ({plan.micro_batches} passes)"


def _moved(pipeline: PipelineResult, distance: int) -> Iterator[tuple[str, list[list[str]]]]:
    """Yield a text and the operators of every stage, with one cut moved by ``distance`` starts of blocks. Stages that
    the user marked are not changed."""
    if pipeline.planner.config.marks:
        return
    names = [op.name for op in pipeline.graph.ops]
    at = {name: i for i, name in enumerate(names)}
    starts = [at[part[0]] for part in pipeline.parts]
    places = _places(pipeline.graph)
    for number, start in enumerate(starts[1:], 1):
        earlier = [place for place in places if starts[number - 1] < place < start]
        after = starts[number + 1] if number + 1 < len(starts) else len(names)
        later = [place for place in places if start < place < after]
        for place in (*earlier[::-1][distance - 1 : distance], *later[distance - 1 : distance]):
            bounds = [*starts[:number], place, *starts[number + 1 :], len(names)]
            cut = [names[first:last] for first, last in pairwise(bounds)]
            yield f"stage {number} begins with {names[place]}, not with {names[start]}", cut


def _places(graph: Graph) -> list[int]:
    """Return where a stage may begin: at a repeated block or after the last one; without blocks, at any operator.
    Operators that every stage computes for itself do not count."""
    free = free_values(graph)
    positions = [i for i, op in enumerate(graph.ops) if not free.issuperset(op.results)]
    blocks = [block_of(graph.ops[i].name) for i in positions]
    block_starts = [i for i, before, block in zip(positions[1:], blocks, blocks[1:], strict=False) if block != before]
    return block_starts if any(blocks) else positions[1:]


@dataclass(frozen=True, slots=True)
class PipelineRanking:
    """The chosen pipeline, then the others in the order of their simulated step. ``looked_at``: the number of others
    that were tried. ``refused`` of them could not be planned: a stage has no parameters, or does not fit."""

    pipelines: tuple[RankedPipeline, ...]
    looked_at: int
    refused: int

    def __str__(self) -> str:
        table = empty_table(("", "step", "vs. chosen", "bubble", "memory", "differs in"), folded="differs in")
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
        refused = f" ({self.refused} of them could not be planned)" if self.refused else ""
        what = f"the best of {self.looked_at} others that were tried{refused}, not of all pipelines"
        return f"{format_table(table, WIDTH)}\nby simulated step after the chosen pipeline; {what}"
