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
from shardwise.search.levers import Gathered, Levers, Offload, blocks_of
from shardwise.search.planner import Planned, Planner

# What is done with the blocks of the model (None: what it asks for itself), and with gathered parameters; and whether
# what is still kept of the blocks waits on the host.
LADDER: tuple[tuple[How | None, Gathered, Offload], ...] = (
    (None, "held", "auto"),
    ("cheap", "held", "auto"),
    (None, "again", "auto"),
    ("offload", "held", "auto"),
    ("cheap", "again", "auto"),
    ("full", "held", "auto"),
    ("full", "again", "auto"),
    ("full", "again", "all"),
)
ENOUGH = 2  # settings that fit


def plan_within(
    planner: Planner, segments: Sequence[Segment], gathered: Gathered | None = None, offload: Offload = "auto"
) -> Planned:
    """The plan of the first rungs that fit. ``segments``: those that the model asks for; ``gathered``, ``offload``:
    where the user has decided. If no rung fits (``ranking.excess``): the plan that needs least. Nothing is moved to a
    host that is the device."""
    fitting: list[tuple[Planner, Planned, How | None]] = []
    refused: list[Planned] = []
    hopeless: list[tuple[Planner, How | None]] = []  # what adds up is too much already
    has_blocks = bool(blocks_of(planner.graph))
    decided = offload != "auto" or not planner.cluster.device.host_bandwidth
    for how, held, moved in LADDER:
        if (gathered is not None and held != gathered) or (how is not None and not has_blocks):
            continue
        if decided and (how == "offload" or moved != "auto"):
            continue
        levers = Levers.of(planner.graph, segments, how, held, moved if offload == "auto" else offload)
        own = _with(planner, levers)
        planned = own.plan_that_may_fit()
        if planned is None:
            hopeless.append((own, how))
        elif planned.ranking.excess:
            refused.append(planned)
        else:
            fitting.append((own, planned, how))
            if how is None and held == (gathered or "held"):
                break  # nothing is made again but what the model asks for
            if len(fitting) == ENOUGH:
                break
    if not fitting:  # bytes that add up may be a few more than the peak
        for own, how in hopeless:
            planned = own.plan()
            if planned.ranking.excess:
                refused.append(planned)
            else:
                fitting.append((own, planned, how))
                break
    if not fitting:
        return min(refused, key=lambda planned: planned.ranking.best.num_bytes)
    eased = [_eased(own, planned, how, segments) for own, planned, how in fitting]
    best = min(eased, key=lambda one: one.prediction.simulated_seconds or one.prediction.step_seconds)
    if not refused and not hopeless:
        return best
    bound = min(best.prediction.bound, planner.bound_without_limit())
    return replace(best, prediction=replace(best.prediction, bound=bound))


def _eased(planner: Planner, planned: Planned, how: How | None, segments: Sequence[Segment]) -> Planned:
    if how is None or planned.ranking.best.step is None:
        return planned
    weaker: How = "cheap" if how == "full" else "none"  # what is kept is named, too
    strong = planner.settings.levers
    asked = {*segments}
    eased = tuple(own if own in asked or own.how == "none" else replace(own, how=weaker) for own in strong.segments)
    return planner.eased(planned, replace(strong, segments=eased))


def _with(planner: Planner, levers: Levers) -> Planner:
    return replace(planner, settings=replace(planner.settings, levers=levers))
