"""About how long the settings of a joint search take: from searches for the model with few of its equal blocks.

The blocks of a run are equal, so that a model with two of each run says what all of them take: seconds of a pass by
component, bytes that stay, bytes per micro-batch. A place has its share of these, and keeps its micro-batches in
flight; where that is too much, as much of forward is made again as makes room. This orders settings and decides
nothing else: which are planned, and in which order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf

import numpy as np

from shardwise.costs.cluster import Cluster
from shardwise.errors import PlanError
from shardwise.graph.folding import Folding
from shardwise.graph.ir import Graph
from shardwise.graph.segments import block_of
from shardwise.layouts.mesh import Mesh
from shardwise.layouts.routes import Floats
from shardwise.plans.joint import Setting
from shardwise.search.auto import Search, searched
from shardwise.search.cost_graph import BYTES, COMPUTE, EXPOSED, TRAFFIC, StorageVariable
from shardwise.search.planner import Planner, Settings

ROOM = 0.9  # of a device, for what adds up; the rest is held for moments
MADE_AGAIN = 0.85  # of what a block keeps, where all of it is made again (its input stays)
FORWARD = 1 / 3  # of the seconds of a pass


@dataclass(frozen=True, eq=False)
class Totals:
    """Of all operators of a model on the devices of one place. ``seconds``: of a pass, by component; ``stays``: bytes
    of parameters, gradients and states; ``kept``: of one micro-batch for its backward."""

    seconds: Floats
    stays: float
    kept: float


@dataclass
class Shallow:
    """``whole``: the training graph of a step; ``passes``: the graph of a pass over so many of its samples, of a
    shortened one; ``meshes``: those that a place of so many devices may have."""

    whole: Graph
    passes: Callable[[Graph, int], Graph]
    meshes: Callable[[Cluster], tuple[Mesh, ...]]
    cluster: Cluster
    settings: Settings
    known: dict[tuple[int, int], Totals | None] = field(default_factory=dict)
    graphs: dict[int, Graph | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        folding = Folding.of(self.whole)
        runs = folding.runs(lambda number: 0)
        short = folding.without({number for run in runs for number in run[1:-1]})
        self.short = self.whole if short is None else short
        self.stands_for: dict[str, float] = {}  # block that stays -> for how many
        for run in runs if short is not None else ():
            ends = {run[0], run[-1]}
            self.stands_for |= {folding.blocks[end].path: len(run) / len(ends) for end in ends}

    def seconds(self, setting: Setting) -> float:
        """About the seconds of a step; infinite where the model is no sum over such micro-batches, or is by far too
        large."""
        places = setting.places
        per_place = setting.stages // places
        totals = self._totals(self.cluster.num_devices // places, setting)
        if totals is None:
            return inf
        compute = float(totals.seconds[COMPUTE])
        seconds = float(totals.seconds[EXPOSED]) + max(compute, float(totals.seconds[TRAFFIC]))
        flying = _in_flight(setting)
        given = self.settings.memory_bytes
        limit = ROOM * (self.cluster.device.usable_bytes if given is None else given)
        too_much = (totals.stays + flying * totals.kept) / places - limit
        if too_much > 0:
            again = too_much / (flying * totals.kept / places * MADE_AGAIN)
            if again > 1:
                return inf
            seconds += again * FORWARD * compute
        return setting.passes * seconds / places * (1 + (places - 1) / (per_place * setting.passes))

    def _totals(self, num_devices: int, setting: Setting) -> Totals | None:
        key = num_devices, setting.micro_batch
        if key not in self.known:
            self.known[key] = self._searched(num_devices, setting)
        return self.known[key]

    def _searched(self, num_devices: int, setting: Setting) -> Totals | None:
        size = setting.micro_batch
        if size not in self.graphs:
            try:
                self.graphs[size] = self.passes(self.short, size)
            except PlanError:
                self.graphs[size] = None
        graph = self.graphs[size]
        if graph is None:
            return None
        part = self.cluster.with_devices(num_devices)
        settings = replace(self.settings, passes=setting.passes)
        planner = Planner.of(graph, (), part, self.meshes(part), settings)
        found = [searched(planner.cost_graph(mesh), self.settings.search, None) for mesh in planner.meshes]
        return self._added_up(min(found, key=lambda search: search.outcome.seconds))

    def _added_up(self, search: Search) -> Totals:
        cost, assignment = search.cost, search.outcome.assignment
        seconds, stays, kept = np.zeros(4), 0.0, 0.0
        for scope, kind in cost.factors:
            variable = cost.variables[scope[-1]]
            count = self.stands_for.get(block_of(variable.name), 1.0)
            at = tuple(assignment[v] for v in scope)
            own = np.array([0.0 if table is None else count * float(table[at]) for table in cost.kinds[kind]])
            seconds += own
            if isinstance(variable, StorageVariable):
                stays += own[BYTES]
            else:
                kept += own[BYTES]
        return Totals(seconds, float(stays), float(kept))


def _in_flight(setting: Setting) -> float:
    """How many micro-batches the fullest place keeps, in shares of all its stages (Narayanan et al. 2021,
    arXiv:2104.04473, section 2.2)."""
    if setting.schedule == "GPipe":
        return setting.passes
    places, per_place = setting.places, setting.stages // setting.places
    if per_place == 1:
        return min(setting.passes, places)
    return min(setting.passes, (2 * (places - 1) + (per_place - 1) * places + 1) / per_place)


__all__ = ["Shallow"]
