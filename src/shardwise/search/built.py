"""The program of a choice under the settings of a plan: parameters as they are stored, and lifetimes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from shardwise.costs.ledger import stays_at
from shardwise.costs.memory import memory_of_program
from shardwise.costs.prediction import Prediction
from shardwise.costs.prices import Prices
from shardwise.costs.pricing import price_program
from shardwise.costs.timeline import simulate_program
from shardwise.graph.ir import Graph
from shardwise.layouts.mesh import Mesh
from shardwise.programs.differentiate import finished, keeping_all
from shardwise.programs.once import with_once
from shardwise.programs.program import busiest_rank, localize
from shardwise.programs.rank_program import Program
from shardwise.programs.spmd import Choice, Spmd, build_spmd
from shardwise.programs.vjp import Kinds
from shardwise.rules.rule import OpRule
from shardwise.search.candidates import MAX_OPERATORS
from shardwise.search.levers import with_levers
from shardwise.search.settings import Settings
from shardwise.search.zero import stored_apart, summed_at_source


@dataclass(frozen=True, eq=False)
class Stored:
    """A choice with its parameters as they are stored, as a program that keeps everything for backward."""

    choice: Choice
    spmd: Spmd
    kinds: Kinds

    @cached_property
    def kept(self) -> Program:
        """The step of the rank that holds most, before anything is said of lifetimes."""
        return keeping_all(localize(self.spmd, busiest_rank(self.spmd)), self.kinds)

    def with_lifetimes(self, graph: Graph, settings: Settings) -> Built:
        """The program under the levers of some settings. ``graph``: the model's (not lowered)."""
        spmd = with_levers(self.kept, graph, settings.levers) if settings.levers else self.spmd
        return Built(self, in_passes(spmd, settings))


@dataclass(frozen=True, eq=False)
class Built:
    """A program with its lifetimes."""

    stored: Stored
    spmd: Spmd

    @property
    def choice(self) -> Choice:
        """Strategies, and parameters as they are stored."""
        return self.stored.choice

    @property
    def busiest(self) -> Program:
        """The step of the rank that holds most."""
        return finished(replace(self.stored.kept, spmd=self.spmd))

    def prediction(self, prices: Prices) -> Prediction:
        """What a pass takes, of a plan that is compared with no others."""
        price, program = price_program(self.spmd, prices), self.busiest
        exposed, compute, traffic = price.exposed + price.update, price.compute, price.traffic
        if len(self.spmd.graph.ops) > MAX_OPERATORS:
            seconds, kept_bytes, peak = 0.0, (memory := memory_of_program(program, prices)).kept_bytes, memory.peak
        else:
            seconds, kept_bytes, peak = (step := simulate_program(program, prices)).seconds, step.kept_bytes, step.peak
        num_bytes = float(stays_at(peak) + kept_bytes)
        return Prediction(
            exposed,
            compute,
            traffic,
            num_bytes,
            simulated_seconds=seconds,
            peak_bytes=float(peak.num_bytes),
            peak_at=peak.where,
            passes=prices.passes,
        )


def stored(
    graph: Graph, rules: Mapping[str, OpRule], choice: Choice, mesh: Mesh, settings: Settings, kinds: Kinds
) -> Stored:
    """The program of a choice before lifetimes. Of the levers it depends on whether parameters are gathered again."""
    by_block = settings.levers.gathered == "again"
    if settings.zero is not None:
        choice = summed_at_source(choice, graph, rules, mesh)
    spmd = build_spmd(graph, rules, choice, mesh, bucket_bytes=settings.bucket_bytes, by_block=by_block)
    if settings.zero is not None:
        said = {s.value: choice.sources[s.value] for s in graph.sources if settings.layouts.keys() & set(s.names)}
        choice = stored_apart(choice, spmd, settings.zero)
        choice = replace(choice, sources={**choice.sources, **said})
        spmd = build_spmd(graph, rules, choice, mesh, bucket_bytes=settings.bucket_bytes, by_block=by_block)
    return Stored(choice, spmd, kinds)


def built(
    graph: Graph, rules: Mapping[str, OpRule], choice: Choice, mesh: Mesh, settings: Settings, kinds: Kinds
) -> Built:
    """The program of a choice under some settings."""
    return stored(graph, rules, choice, mesh, settings, kinds).with_lifetimes(graph, settings)


def in_passes(spmd: Spmd, settings: Settings) -> Spmd:
    """The program with what a step of several passes does once."""
    if settings.passes == 1:
        return spmd
    scattered = settings.levers.gathered == "once" or (settings.zero is not None and settings.zero.stage == 1)
    return with_once(spmd, scattered=scattered)
