"""How little a plan makes again in order to fit: the levers in the order of what they cost.

Where a model fits as it is, nothing is made again. Otherwise every setting of the ladder is searched as a problem of
its own, operators, mesh and storage together, until two of them fit; the faster in the simulation is taken. Of its
segments as many are then eased as the limit allows. The bound that such a plan is compared with holds for all settings:
that of plans which make nothing again and have no limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardwise.graph.segments import How, Segment
from shardwise.search.levers import Gathered, Levers, Offload, blocks_of
from shardwise.search.planner import Answer, Planned, Planner
from shardwise.search.ranking import Ranked

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
    fitting: list[_Rung] = []
    refused: list[_Rung] = []
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
        answer = own.answer_that_may_fit()
        if answer is None:
            hopeless.append((own, how))
        elif answer.ranking.excess:
            refused.append(_Rung(own, answer, how))
        else:
            fitting.append(_Rung(own, answer, how))
            if how is None and held == (gathered or "held"):
                break  # nothing is made again but what the model asks for
            if len(fitting) == ENOUGH:
                break
    if not fitting:  # bytes that add up may be a few more than the peak
        for own, how in hopeless:
            answer = own.answer()
            (refused if answer.ranking.excess else fitting).append(_Rung(own, answer, how))
            if fitting:
                break
    if not fitting:
        least = min(refused, key=lambda rung: rung.answer.ranking.best.num_bytes)
        return least.planner.planned(least.answer)
    eased = [(rung, *_eased(rung, segments)) for rung in fitting]
    rung, easier, ranking = min(eased, key=lambda one: _seconds(one[2]))
    best = rung.planner.planned_as_eased(rung.answer, easier, ranking)
    if best.ranking.excess and planner.folded is not None:  # the estimate was too low
        return plan_within(replace(planner, folded=None), segments, gathered, offload)
    if not refused and not hopeless:
        return best
    bound = min(best.prediction.bound, planner.bound_without_limit())
    return replace(best, prediction=replace(best.prediction, bound=bound))


@dataclass(frozen=True, eq=False)
class _Rung:
    """A setting of the ladder and what was found for it. ``how``: what it does with the blocks."""

    planner: Planner
    answer: Answer
    how: How | None


def _eased(rung: _Rung, segments: Sequence[Segment]) -> tuple[Planner, Ranked]:
    ranking, planner = rung.answer.ranking, rung.planner
    if rung.how is None or ranking.best.step is None:
        return planner, ranking
    weaker: How = "cheap" if rung.how == "full" else "none"  # what is kept is named, too
    strong = planner.settings.levers
    asked = {*segments}
    eased = tuple(own if own in asked or own.how == "none" else replace(own, how=weaker) for own in strong.segments)
    return planner.eased(ranking, replace(strong, segments=eased))


def _seconds(ranking: Ranked) -> float:
    return ranking.prediction.step_seconds if ranking.best.step is None else ranking.best.step.seconds


def _with(planner: Planner, levers: Levers) -> Planner:
    return replace(planner, settings=replace(planner.settings, levers=levers))
