"""The program of a choice under the settings of a plan: parameters as they are stored, and lifetimes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from shardwise.costs.memory import busiest_program
from shardwise.graph.ir import Graph
from shardwise.layouts.mesh import Mesh
from shardwise.programs.differentiate import finished, keeping_all
from shardwise.programs.once import with_once
from shardwise.programs.program import busiest_rank, localize
from shardwise.programs.rank_program import Program
from shardwise.programs.spmd import Choice, Spmd, build_spmd
from shardwise.programs.vjp import Kinds
from shardwise.rules.rule import OpRule
from shardwise.search.levers import with_levers
from shardwise.search.settings import Settings
from shardwise.search.zero import stored_apart, summed_at_source


@dataclass(frozen=True, eq=False)
class Built:
    """A choice with its parameters as they are stored, and its program. ``kept``: that of the busiest rank before
    anything was said of lifetimes, where they were asked for."""

    choice: Choice
    spmd: Spmd
    kinds: Kinds
    kept: Program | None = None

    @property
    def busiest(self) -> Program:
        """The step of the rank that holds most."""
        if self.kept is None:
            return busiest_program(self.spmd, self.kinds)
        return finished(replace(self.kept, spmd=self.spmd))


def built(
    graph: Graph, rules: Mapping[str, OpRule], choice: Choice, mesh: Mesh, settings: Settings, kinds: Kinds
) -> Built:
    """The program of a choice under some settings."""
    by_block = settings.levers.gathered == "again"
    if settings.zero is not None:
        choice = summed_at_source(choice, graph, rules, mesh)
    spmd = build_spmd(graph, rules, choice, mesh, bucket_bytes=settings.bucket_bytes, by_block=by_block)
    if settings.zero is not None:
        said = {s.value: choice.sources[s.value] for s in graph.sources if settings.layouts.keys() & set(s.names)}
        choice = stored_apart(choice, spmd, settings.zero)
        choice = replace(choice, sources={**choice.sources, **said})
        spmd = build_spmd(graph, rules, choice, mesh, bucket_bytes=settings.bucket_bytes, by_block=by_block)
    if not settings.levers:
        return Built(choice, in_passes(spmd, settings), kinds)
    kept = keeping_all(localize(spmd, busiest_rank(spmd)), kinds)
    return Built(choice, in_passes(with_levers(kept, graph, settings.levers), settings), kinds, kept)


def in_passes(spmd: Spmd, settings: Settings) -> Spmd:
    """The program with what a step of several passes does once."""
    if settings.passes == 1:
        return spmd
    scattered = settings.levers.gathered == "once" or (settings.zero is not None and settings.zero.stage == 1)
    return with_once(spmd, scattered=scattered)
