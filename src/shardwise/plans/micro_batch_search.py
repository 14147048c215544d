"""The call that a plan is made for, and the graph that the plan is of: the whole call, or a micro-batch of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise.errors import PlanError, PlanWarning, warn_user
from shardwise.graph.batch import batch_size, num_samples, with_samples
from shardwise.graph.capture import capture
from shardwise.graph.ir import Graph
from shardwise.graph.step_precision import MODELS_OWN, Precision
from shardwise.plans.plan import Plan
from shardwise.plans.result import PlanningResult
from shardwise.programs.micro_batches import Passes
from shardwise.programs.time_axis import TimeSplit, split_in_time
from shardwise.programs.vjp import VjpCache
from shardwise.search.micro_batch import MicroBatchOptions, MicroBatchOutcome


@dataclass(frozen=True)
class Captures:
    """Cache of what one call of ``sw.plan`` captured. ``graphs``: samples -> the graph; ``passes``: (batch,
    micro-batch, for stages or not) -> the micro-batches of a graph; ``splits``: the part that is the same for all
    sizes; ``vjp_cache``: the calls that were traced."""

    graphs: dict[int, Graph] = field(default_factory=dict)
    passes: dict[tuple[int | None, int, bool], Passes] = field(default_factory=dict)
    splits: dict[tuple[int | None, bool], TimeSplit] = field(default_factory=dict)
    vjp_cache: VjpCache = field(default_factory=VjpCache)


@dataclass(frozen=True)
class Example:
    """A module with example arguments (args, kwargs), as ``sw.plan`` takes them. ``known``: cache of captures, valid
    while the module stays as it is."""

    module: torch.nn.Module
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    loss: Callable[..., Any] | None = None
    strategies: Mapping[str, Any] | None = None
    precision: Precision = MODELS_OWN
    known: Captures | None = field(default=None, compare=False, repr=False)

    def graph(self, samples: int | None = None) -> Graph:
        """Return the graph of the call. ``samples``: a batch size other than the example's."""
        if self.known is None or samples is None:
            return self._captured(samples)
        if samples not in self.known.graphs:
            self.known.graphs[samples] = self._captured(samples)
        return self.known.graphs[samples]

    def passes(self, whole: Graph, micro_batch: int, *, staged: bool) -> Passes:
        """Return the micro-batches of a graph of the call. ``staged``: those of its training step, for a pipeline."""
        key = batch_size(whole), micro_batch, staged
        if self.known is not None and key in self.known.passes:
            return self.known.passes[key]

        def splitting(graph: Graph) -> TimeSplit:
            if self.known is None:
                return split_in_time(graph)
            split_key = batch_size(graph), staged
            if split_key not in self.known.splits:
                self.known.splits[split_key] = split_in_time(graph)
            return self.known.splits[split_key]

        if staged:
            passes = Passes.over(self.module, whole, micro_batch, self.graph, splitting)
        else:
            passes = Passes.of(whole, micro_batch, self.graph, splitting)
        if self.known is not None:
            self.known.passes[key] = passes
        return passes

    def _captured(self, samples: int | None) -> Graph:
        arguments = self.arguments if samples is None else with_samples(self.arguments, samples)
        captured = capture(
            self.module, *arguments, loss=self.loss, strategies=self.strategies, precision=self.precision
        )
        return captured.graph


def planned_graph(call: Example, plan: Plan) -> Graph:
    """Return the graph that a plan is of: the call, or a micro-batch of it, whether the example is a micro-batch or the
    batch of a step."""
    if plan.micro_batches == 1 or plan.micro_batch is None:
        return call.graph()
    batch = plan.micro_batch * plan.micro_batches
    return Passes.of(call.graph(batch), plan.micro_batch, call.graph).graphs[plan.micro_batch]


@dataclass
class MicroBatchSearch:
    """Search over the graphs that a step may be planned as. ``graph``: that of the example; ``batches``: None if the
    user gave no batch sizes. If the micro-batch is free, the size with the shortest predicted step that fits is chosen:
    sizes are tried from the largest on, until steps get longer."""

    call: Example
    graph: Graph
    batches: MicroBatchOptions | None
    tried: list[MicroBatchOutcome] = field(default_factory=list)
    _best: PlanningResult | None = None
    _statistics: frozenset[str] = frozenset()
    _failure: PlanError | None = None
    _is_done: bool = False
    _next: tuple[int, int] = (0, 1)
    _of_passes: frozenset[str] = frozenset()

    def __iter__(self) -> Iterator[tuple[Graph, int]]:
        """Yield (graph of a micro-batch, number of micro-batches). Callers add the plan of each before the next."""
        if self.batches is None:
            yield self.graph, 1
            return
        step = self.batches.step
        whole = self.graph if num_samples(self.call.arguments) == step else self.call.graph(step)
        for micro_batch in self.batches.candidates:
            self._next = micro_batch, step // micro_batch
            self._of_passes = frozenset()
            if self._is_done:
                return
            if micro_batch == step:
                yield whole, 1
            else:
                try:
                    passes = self.call.passes(whole, micro_batch, staged=False)
                except PlanError as error:
                    self.refuse(error)
                    return  # it fails for all sizes
                self._of_passes = passes.statistics
                yield passes.graphs[micro_batch], step // micro_batch

    def add(self, found: PlanningResult) -> None:
        """Take the plan of the latest graph."""
        prediction = found.plan.predicted
        if self.batches is None or prediction is None:
            self._best = found
            self._statistics = frozenset() if self.batches is None else self._of_passes
            return
        seconds = prediction.step_seconds
        self.tried.append(MicroBatchOutcome(*self._next, seconds, prediction.peak_bytes))
        if self._best is None or self._best.plan.predicted is None or seconds < self._best.plan.predicted.step_seconds:
            self._best, self._statistics = found, self._of_passes
        else:
            self._is_done = True
        if not self.batches.is_asked and self._next[0] not in self.batches.candidates[1:2]:
            self._is_done = True

    def refuse(self, error: PlanError) -> None:
        """Record why the latest graph has no plan. Raises the error if there is nothing else to try."""
        if self.batches is None or len(self.batches.candidates) == 1:
            raise error
        self.tried.append(MicroBatchOutcome(*self._next, refused=str(error).partition("\n")[0]))
        self._failure = self._failure or error
        if not self.batches.is_asked and self._next[0] in self.batches.candidates[1:2]:
            self._is_done = True

    def best(self) -> PlanningResult:
        """Return the best plan. Raises PlanError if there is none; warns about statistics of micro-batches."""
        if self._best is None:
            assert self._failure is not None, "nothing was tried"
            raise self._failure
        announce_statistics(sorted(self._statistics))
        return self._best

    @property
    def choices(self) -> tuple[MicroBatchOutcome, ...]:
        """Return what was tried, if there was a choice."""
        if self.batches is None or len(self.tried if not self.batches.is_asked else self.batches.candidates) == 1:
            return ()
        return tuple(self.tried)


def announce_statistics(buffers: list[str]) -> None:
    """Warn that running statistics are updated for every micro-batch."""
    if buffers:
        more = f" and {len(buffers) - 3} more" if len(buffers) > 3 else ""
        warn_user(
            f"running statistics ({', '.join(buffers[:3])}{more}) are updated by every micro-batch, one after another, "
            "as in gradient accumulation on one device: results differ from those of one pass over the whole batch",
            PlanWarning,
        )
