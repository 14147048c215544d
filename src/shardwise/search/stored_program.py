"""The settings of a search, and the program of a choice under them: parameters as they are stored, and lifetimes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf

from shardwise.costs.ledger import static_bytes
from shardwise.costs.memory import memory_of_program
from shardwise.costs.prediction import Prediction
from shardwise.costs.prices import Prices
from shardwise.costs.pricing import price_program
from shardwise.costs.timeline import figures_of, simulate_program
from shardwise.graph.ir import Graph
from shardwise.layouts.layout import Layout
from shardwise.layouts.mesh import Mesh
from shardwise.programs.buckets import BUCKET_BYTES
from shardwise.programs.builder import Choice, RowChunks
from shardwise.programs.differentiate import finish_exchanges, keeping_all
from shardwise.programs.float8_gathers import scaled_where_stored
from shardwise.programs.grad_accum_program import with_once
from shardwise.programs.program import busiest_rank, localize
from shardwise.programs.rank_program import RankProgram
from shardwise.programs.spmd import Lifetimes, SpmdProgram, build_spmd
from shardwise.programs.vjp import VjpCache
from shardwise.rules.keyed_rows import IMBALANCE
from shardwise.rules.rule import OpRule
from shardwise.search.constants import MAX_SIMULATED_OPERATORS
from shardwise.search.decide import Kept
from shardwise.search.memory_policy import MemoryPolicy, with_memory_policy
from shardwise.search.zero import Zero, reduce_at_parameter, shard_storage


@dataclass(frozen=True)
class SearchConfig:
    """The settings of a search. ``search``: one of ``search.auto``; ``passes``: micro-batches of a step;
    ``memory_bytes``: the limit for the tensors of a device (None: what the cluster's devices have beside their
    reserve); ``bucket_bytes``: the largest message that several parameters share; ``message_sizes``: others that the
    plan that is taken may have by price, with another ``prefetch`` depth of gathers (None: it keeps both);
    ``row_chunks``: as of a ``Choice``, None: 1, or another by price; ``layouts``: those in
    which the user keeps tensors; ``zero``: whether parameters are stored in parts wherever they would be copied;
    ``in_flight``: micro-batches whose values a device keeps for backward at once; ``turns``: the stages of a pipeline
    rank, which take turns, so that transient bytes are there once; ``taken``: the layouts in which the next stage takes
    values, device by device; ``known``: seconds of the step of an existing plan (a search for a better one ends where
    prices are clearly above it); ``together``: the equal stages of a pipeline rank, whose micro-batches all run one
    after the other in a step; ``imbalance``: the rows that are planned for on the busiest owner of experts, over the
    mean."""

    search: str = "dynamic_programming"
    optimizer: str = "adamw"
    passes: int = 1
    memory_bytes: float | None = None
    bucket_bytes: int = BUCKET_BYTES
    message_sizes: tuple[int, ...] | None = None
    prefetch: int = 1
    row_chunks: RowChunks | None = 1
    layouts: Mapping[str, Kept] = field(default_factory=dict)
    memory_policy: MemoryPolicy = field(default_factory=MemoryPolicy)
    zero: Zero | None = None
    in_flight: int = 1
    turns: int = 1
    taken: Mapping[str, Layout] = field(default_factory=dict)
    known: float = inf
    together: int = 1
    imbalance: float = IMBALANCE


@dataclass(frozen=True, eq=False)
class StoredProgram:
    """A choice with its parameters as they are stored, as a program that keeps everything for backward."""

    choice: Choice
    spmd: SpmdProgram
    vjp_cache: VjpCache

    @cached_property
    def kept(self) -> RankProgram:
        """Return the step of the busiest rank, before lifetimes are known."""
        return keeping_all(localize(self.spmd, busiest_rank(self.spmd)), self.vjp_cache)

    def with_lifetimes(self, graph: Graph, settings: SearchConfig) -> ProgramWithPolicy:
        """Return the program under the memory policy of some settings. ``graph``: the model's (not lowered)."""
        if not settings.memory_policy:
            return ProgramWithPolicy(self, as_grad_accum(self.spmd, settings))
        program = with_memory_policy(self.kept, graph, settings.memory_policy)
        return ProgramWithPolicy(self, as_grad_accum(program.spmd, settings), program)


@dataclass(frozen=True, eq=False)
class ProgramWithPolicy:
    """A program with its lifetimes. ``applied``: the program of the busiest rank with them, or None: it keeps all."""

    stored: StoredProgram
    spmd: SpmdProgram
    applied: RankProgram | None = None

    @property
    def choice(self) -> Choice:
        return self.stored.choice

    @property
    def busiest(self) -> RankProgram:
        return finish_exchanges(replace(self.applied or self.stored.kept, spmd=self.spmd))

    def prediction(self, prices: Prices) -> Prediction:
        """Predict a micro-batch of a plan that is compared with no others."""
        price, program = price_program(self.spmd, prices), self.busiest
        exposed, compute, traffic = price.exposed + price.update, price.compute, price.traffic
        is_large = len(self.spmd.graph.ops) > MAX_SIMULATED_OPERATORS
        step = None if is_large else simulate_program(program, prices)
        memory = memory_of_program(program, prices) if step is None else step
        return Prediction(
            exposed,
            compute,
            traffic,
            float(static_bytes(memory.peak) + memory.kept_bytes),
            peak_bytes=float(memory.peak.num_bytes),
            peak_at=memory.peak.where,
            passes=prices.passes,
            **figures_of(step),
        )


def build_stored_program(
    graph: Graph, rules: Mapping[str, OpRule], choice: Choice, mesh: Mesh, settings: SearchConfig, vjp_cache: VjpCache
) -> StoredProgram:
    """Return a choice's program before lifetimes. Of the policy it depends only on whether parameters are gathered
    again."""
    by_block = settings.memory_policy.reshard_mode == "again"
    choice = replace(choice, row_chunks=settings.row_chunks or 1)
    if settings.zero is not None:
        choice = reduce_at_parameter(choice, graph, rules, mesh)
    spmd = build_spmd(graph, rules, choice, mesh, bucket_bytes=settings.bucket_bytes, by_block=by_block)
    if settings.zero is not None:
        fixed = {s.value: choice.sources[s.value] for s in graph.sources if settings.layouts.keys() & set(s.names)}
        choice = shard_storage(choice, spmd, settings.zero)
        choice = replace(choice, sources={**choice.sources, **fixed})
        spmd = build_spmd(graph, rules, choice, mesh, bucket_bytes=settings.bucket_bytes, by_block=by_block)
    scaled = scaled_where_stored(choice, graph, rules)
    if scaled != choice:
        choice = scaled
        spmd = build_spmd(graph, rules, choice, mesh, bucket_bytes=settings.bucket_bytes, by_block=by_block)
    return StoredProgram(choice, replace(spmd, lifetimes=Lifetimes(prefetch=settings.prefetch)), vjp_cache)


def build_program(
    graph: Graph, rules: Mapping[str, OpRule], choice: Choice, mesh: Mesh, settings: SearchConfig, vjp_cache: VjpCache
) -> ProgramWithPolicy:
    return build_stored_program(graph, rules, choice, mesh, settings, vjp_cache).with_lifetimes(graph, settings)


def as_grad_accum(spmd: SpmdProgram, settings: SearchConfig) -> SpmdProgram:
    """Return the program with the conversions that a step of several micro-batches makes once."""
    if settings.passes == 1:
        return spmd
    return with_once(spmd, scattered=settings.memory_policy.reshard_mode == "once")
