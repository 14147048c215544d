"""How little a plan makes again in order to fit: the levers in the order of what they cost.

Where a model fits as it is, nothing is made again. Otherwise every setting of the ladder is searched as a problem of
its own, operators, mesh and storage together, until two of them fit; the faster in the simulation is taken. Of its
segments as many are then eased as the limit allows. The bound that such a plan is compared with holds for all settings:
that of plans which make nothing again and have no limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardwise.graph.segments import How, Segment
from shardwise.search.levers import Gathered, Levers, blocks_of
from shardwise.search.planner import Planned, Planner

# What is done with the blocks of the model (None: what it asks for itself), and with gathered parameters.
LADDER: tuple[tuple[How | None, Gathered], ...] = (
    (None, "held"),
    ("cheap", "held"),
    (None, "again"),
    ("cheap", "again"),
    ("full", "held"),
    ("full", "again"),
)
_WEAKER: dict[How | None, How | None] = {"full": "cheap", "cheap": None}
ENOUGH = 2  # settings that fit


def plan_within(planner: Planner, segments: Sequence[Segment], gathered: Gathered | None = None) -> Planned:
    """The plan of the first rungs that fit. ``segments``: those that the model asks for; ``gathered``: where the user
    has decided. If no rung fits (``ranking.excess``): the plan that needs least."""
    fitting: list[tuple[Planner, Planned, How | None]] = []
    refused: list[Planned] = []
    has_blocks = bool(blocks_of(planner.graph))
    for how, held in LADDER:
        if (gathered is not None and held != gathered) or (how is not None and not has_blocks):
            continue
        own = _with(planner, Levers.of(planner.graph, segments, how, held))
        planned = own.plan()
        if planned.ranking.excess:
            refused.append(planned)
            continue
        fitting.append((own, planned, how))
        if how is None and held == (gathered or "held"):
            break  # nothing is made again but what the model asks for
        if len(fitting) == ENOUGH:
            break
    if not fitting:
        return min(refused, key=lambda planned: planned.ranking.best.num_bytes)
    eased = [_eased(own, planned, how, segments) for own, planned, how in fitting]
    best = min(eased, key=lambda one: one.prediction.simulated_seconds or one.prediction.step_seconds)
    if not refused:
        return best
    bound = min(best.prediction.bound, planner.bound_without_limit())
    return replace(best, prediction=replace(best.prediction, bound=bound))


def _eased(planner: Planner, planned: Planned, how: How | None, segments: Sequence[Segment]) -> Planned:
    if how is None or planned.ranking.best.step is None:
        return planned
    levers = planner.settings.levers
    weaker = Levers.of(planner.graph, segments, _WEAKER[how], levers.gathered)
    if how == "cheap":  # what is kept is named, too
        weaker = replace(
            levers, segments=tuple(s if s in segments else replace(s, how="none") for s in levers.segments)
        )
    return planner.eased(planned, weaker)


def _with(planner: Planner, levers: Levers) -> Planner:
    return replace(planner, settings=replace(planner.settings, levers=levers))
