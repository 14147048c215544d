"""The call that a plan is made for, and the graph that the plan is of: the whole call, or a micro-batch of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise.errors import PlanError, PlanWarning, ShardwiseError, warn_user
from shardwise.graph.batch import batch_size, num_samples, with_samples
from shardwise.graph.capture import capture
from shardwise.graph.ir import Graph
from shardwise.graph.step_precision import MODELS_OWN, Precision
from shardwise.plans.plan import Plan
from shardwise.plans.result import PlanningResult
from shardwise.programs.micro_batches import Passes
from shardwise.programs.time_axis import TimeSplit, split_in_time
from shardwise.programs.vjp import VjpCache
from shardwise.untrusted_text import shorten_repr

MOST_SAMPLES = 2**40  # of a step: all its divisors are looked for


@dataclass(frozen=True)
class MicroBatchOptions:
    """Candidates for the micro-batch. ``step``: the samples of an optimizer step; ``candidates``: sizes that may be
    chosen, largest first. ``is_asked``: whether the user gave a size. Otherwise sizes other than the step are tried
    only if that does not fit, and the least of them comes second: if it does not fit, none does."""

    step: int
    candidates: tuple[int, ...]
    is_asked: bool = True


@dataclass(frozen=True)
class MicroBatchOutcome:
    """A micro-batch that was planned: the seconds of its step, its peak, and why it is impossible, if it is."""

    micro_batch: int
    passes: int
    step_seconds: float = 0.0
    num_bytes: float = 0.0
    refused: str = ""


def batches_of(
    samples: int | None, global_batch: int | None, micro_batch: int | None, num_devices: int, *, chooses: bool
) -> MicroBatchOptions | None:
    """Return the options for the user's sizes and example inputs of some ``samples``; None: one micro-batch.

    ``chooses``: whether plans are compared by price. Raises ShardwiseError if the sizes contradict each other.
    """
    if global_batch is None and micro_batch is None:
        if not chooses or not samples or samples > MOST_SAMPLES:
            return None
        step, *smaller = _divisors(samples, num_devices)
        return MicroBatchOptions(step, (step, *smaller[-1:], *smaller[:-1]), is_asked=False)
    _check_size("global_batch", global_batch)
    _check_size("micro_batch", micro_batch)
    if samples is None or not samples:
        raise ShardwiseError(
            "global_batch and micro_batch count samples, and no example input has dims", fix="leave them out"
        )
    step = samples if global_batch is None else global_batch
    size = micro_batch
    if size is None and samples != step:
        size = samples
        if step % samples:
            what = f"global_batch is {step}, the example inputs have {samples} samples: {step} / {samples} is not whole"
            fix = "give example inputs whose number of samples divides it, or that have global_batch samples"
            raise ShardwiseError(what, fix=fix, section="micro-batch-size")
    if size is None:
        return MicroBatchOptions(step, _divisors(step, num_devices) if chooses else (step,))
    if samples not in (size, step):
        what = f"the example inputs have {samples} samples, neither those of a micro-batch ({size}) nor those of the "
        fix = "give the inputs of one micro-batch, or of the whole global batch"
        raise ShardwiseError(f"{what}global batch ({step})", fix=fix, section="micro-batch-size")
    if size > step or step % size:
        what = f"micro_batch is {size}, global_batch is {step}: {step} / {size} = {step / size:.4g} passes"
        fix = (
            "choose a micro_batch that divides it (a step over fewer samples, the last of an epoch, may be of any size)"
        )
        raise ShardwiseError(what, fix=fix, section="micro-batch-size")
    return MicroBatchOptions(step, (size,))


def _check_size(name: str, size: Any) -> None:
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        raise ShardwiseError(f"{name} is {size!r}", fix="a whole number of samples from 1")
    if size is not None and size > MOST_SAMPLES:
        raise ShardwiseError(f"{name} is {shorten_repr(size)}", fix=f"at most {MOST_SAMPLES:,} samples")


def _divisors(step: int, num_devices: int) -> tuple[int, ...]:
    """Return the divisors of a batch that may be worth a try, largest first: all of it by powers of two, powers of two,
    and what divides over all devices."""

    def is_power(number: int) -> bool:
        return number & (number - 1) == 0

    divisors = {d for n in range(1, int(step**0.5) + 1) if step % n == 0 for d in (n, step // n)}
    tried = (d for d in divisors if is_power(d) or is_power(step // d) or d % num_devices == 0)
    return tuple(sorted(tried, reverse=True))


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
    if buffers:
        more = f" and {len(buffers) - 3} more" if len(buffers) > 3 else ""
        warn_user(
            f"running statistics ({', '.join(buffers[:3])}{more}) are updated by every micro-batch, one after another, "
            "as in gradient accumulation on one device: results differ from those of one pass over the whole batch",
            PlanWarning,
        )
