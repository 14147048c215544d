"""Other pipelines than the one that was chosen, planned and simulated as it was: with a cut elsewhere, with
micro-batches of another size, and of a joint search with other settings."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from shardwise.errors import PlanError, problem
from shardwise.graph.cut import free_values
from shardwise.graph.ir import Graph
from shardwise.graph.segments import block_of
from shardwise.plans.auto_stages import AutoStagesReport, figures
from shardwise.plans.pipelines import PipelineResult
from shardwise.plans.plan import Plan
from shardwise.search.constants import MAX_CUT_MOVES


class RankedPipeline(NamedTuple):
    """A pipeline as what is simulated for it, and in what it differs from the chosen one (nothing: it is that).
    ``num_bytes``: of the device that holds most; ``bubble``: the share of all places' time in which they wait;
    ``plan``: None where a joint search kept figures alone, of which ``bubble`` is none."""

    step_seconds: float
    num_bytes: float
    changed: str
    bubble: float | None = None
    plan: Plan | None = None


def rank_pipelines(
    pipeline: PipelineResult, k: int, joint: AutoStagesReport | None = None
) -> tuple[tuple[RankedPipeline, ...], int, int]:
    """The chosen pipeline, then the best ``k`` - 1 of the others; how many others were looked at, and how many of them
    could not be. Cuts are moved one by one, by one block (or operator, where there are none), then by two, until there
    are enough. Raises PlanError where nothing was chosen by price."""
    if pipeline.plan.pipeline is None:
        raise PlanError(problem("no stage was chosen by price", fix='plan with search="dynamic_programming"'))
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
                others.append(_ranked(pipeline.again(parts).plan, changed))
            except PlanError:
                refused += 1
    best = sorted(others, key=lambda other: other.step_seconds)[: k - 1]
    return (_ranked(pipeline.plan, ""), *best), len(others) + refused, refused


def _ranked(plan: Plan, changed: str) -> RankedPipeline:
    assert plan.pipeline is not None, "it was chosen by price"
    return RankedPipeline(*figures(plan), changed, plan.pipeline.bubble, plan)


def _size(plan: Plan) -> str:
    return f"micro-batch {plan.micro_batch} ({plan.micro_batches} passes)"


def _moved(pipeline: PipelineResult, distance: int) -> Iterator[tuple[str, list[list[str]]]]:
    """What is moved, and the operators of every stage, with one cut so many places earlier or later. Stages that the
    user marked stay."""
    if pipeline.is_marked:
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
    """Where a stage may begin: with a repeated block or behind the last one; with any operator, where there are none.
    What every stage makes by itself begins none."""
    free = free_values(graph)
    positions = [i for i, op in enumerate(graph.ops) if not free.issuperset(op.results)]
    blocks = [block_of(graph.ops[i].name) for i in positions]
    block_starts = [i for i, before, block in zip(positions[1:], blocks, blocks[1:], strict=False) if block != before]
    return block_starts if any(blocks) else positions[1:]


__all__ = ["RankedPipeline", "rank_pipelines"]
