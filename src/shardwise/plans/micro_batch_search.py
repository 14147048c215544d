"""The call that a plan is made for, and the choice of the micro-batch that the plan is of."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any, Protocol, TypeVar

import torch

from shardwise.errors import CaptureError, NothingFits, PlanError, PlanWarning, ShardwiseError, warn_user
from shardwise.graph.batch import batch_size, with_samples
from shardwise.graph.capture import Capture, capture
from shardwise.graph.ir import Graph
from shardwise.graph.step_precision import MODELS_OWN, Precision
from shardwise.plans.bind import program_of
from shardwise.plans.plan import Plan
from shardwise.plans.price_scope import figures
from shardwise.plans.term_suggestions import check_terms, suggesting_terms
from shardwise.programs.micro_batches import Passes
from shardwise.programs.spmd import SpmdProgram
from shardwise.programs.time_axis import TimeSplit, split_in_time
from shardwise.progress import STOPPED, report_best, stop_with
from shardwise.search.planning_cache import PlanningCache
from shardwise.untrusted_text import shorten_repr

MOST_SAMPLES = 2**40  # of a step: all its divisors are looked for


@dataclass(frozen=True)
class MicroBatchOptions:
    """Candidates for the micro-batch. ``step``: the samples of an optimizer step; ``candidates``: sizes that may be
    chosen, largest first. ``is_asked``: whether the user gave a size. Otherwise sizes other than the step are tried
    only if that does not fit on the devices, and the least of them comes second: if it does not fit, none does."""

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
class Example:
    """A module with example arguments (args, kwargs), as ``sw.plan`` takes them. ``per_micro_batch``: names of terms of
    the loss; ``heads``: as of ``capture``; ``cache``: what configurations of the call share. Captures are cached, too:
    they are valid while the module stays as it is."""

    module: torch.nn.Module
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    loss: Callable[..., Any] | None = None
    strategies: Mapping[str, Any] | None = None
    precision: Precision = MODELS_OWN
    per_micro_batch: tuple[str, ...] = ()
    heads: frozenset[str] | int = 1
    cache: PlanningCache = field(default_factory=PlanningCache, compare=False, repr=False)
    _captures: dict[int | None, Capture] = field(default_factory=dict, compare=False, repr=False)
    _passes: dict[Hashable, Passes] = field(default_factory=dict, compare=False, repr=False)
    _splits: dict[Hashable, TimeSplit | PlanError] = field(default_factory=dict, compare=False, repr=False)

    @staticmethod
    def of(plan: Plan, module: torch.nn.Module, arguments: Any, loss: Callable[..., Any] | None) -> Example:
        """Return the call of a plan: with its precision and terms."""
        return Example(
            module, arguments, loss, precision=plan.precision, per_micro_batch=plan.terms, heads=plan.fused_heads
        )

    @property
    def captured_sizes(self) -> tuple[int, ...]:
        """Return the batch sizes other than the example's that were captured."""
        return tuple(size for size in self._captures if size is not None)

    def capture(self, samples: int | None = None) -> Capture:
        """Return the captured call. ``samples``: a batch size other than the example's."""
        if samples not in self._captures:
            args, kwargs = self.arguments if samples is None else with_samples(self.arguments, samples)
            try:
                captured = capture(
                    self.module, args, kwargs, loss=self.loss, strategies=self.strategies, precision=self.precision,
                    heads=self.heads,
                )  # fmt: skip
            except CaptureError as error:
                if samples is None:
                    raise
                what = f"with a micro-batch of {samples} samples: {error.what}"
                fix = "compute from the inputs alone: x.shape[0] for the number of samples, weights per sample as input"
                raise CaptureError(what, op=error.op, source=error.source, fix=fix, facts=error.facts) from error
            self._captures[samples] = captured.with_terms(self.per_micro_batch)
        return self._captures[samples]

    def graph(self, samples: int | None = None) -> Graph:
        """Return the graph of the call. ``samples``: as of ``capture``."""
        return self.capture(samples).graph

    def passes(self, whole: Graph, micro_batch: int, *, staged: bool) -> Passes:
        """Return the micro-batches of a graph of the call. ``staged``: those of its training step, for a pipeline."""

        def splitting(graph: Graph) -> TimeSplit:
            key = batch_size(graph), staged
            if key not in self._splits:
                try:
                    check_terms(graph)
                    self._splits[key] = split_in_time(graph)
                except PlanError as error:
                    self._splits[key] = suggesting_terms(error, graph, self.capture().output_names)
            split = self._splits[key]
            if isinstance(split, PlanError):
                raise split
            return split

        key = batch_size(whole), micro_batch, staged
        if key not in self._passes:
            self._passes[key] = (
                Passes.over(self.module, whole, micro_batch, self.graph, splitting)
                if staged
                else Passes.of(whole, micro_batch, self.graph, splitting)
            )
        return self._passes[key]

    def has_no_passes(self, whole: Graph, *, staged: bool) -> bool:
        """Return whether ``passes`` was refused for every size."""
        return isinstance(self._splits.get((batch_size(whole), staged)), PlanError)


def planned_graph(call: Example, plan: Plan) -> Graph:
    """Return the graph that a plan is of: the call, or a micro-batch of it, whether the example is a micro-batch or the
    batch of a step."""
    if plan.micro_batches == 1 or plan.micro_batch is None:
        return call.graph()
    batch = plan.micro_batch * plan.micro_batches
    return Passes.of(call.graph(batch), plan.micro_batch, call.graph).graphs[plan.micro_batch]


def planned_program(
    plan: Plan, module: torch.nn.Module, arguments: Any, loss: Callable[..., Any] | None
) -> SpmdProgram:
    """Return the program of a plan of one stage for a call of its model, as ``Example`` takes it."""
    graph = planned_graph(Example.of(plan, module, arguments, loss), plan)
    return program_of(plan, graph, training=module.training)


class _Planned(Protocol):
    @property
    def plan(self) -> Plan: ...


_AnyPlanned = TypeVar("_AnyPlanned", bound=_Planned)


def best_micro_batch(
    call: Example,
    whole: Graph,
    batches: MicroBatchOptions | None,
    plan_passes: Callable[[Passes], _AnyPlanned],
    *,
    staged: bool,
    to_host: bool = True,
) -> tuple[_AnyPlanned, tuple[MicroBatchOutcome, ...], tuple[Plan, ...]]:
    """Return the plan of the micro-batch size with the shortest predicted step, the outcomes of all sizes that were
    tried (of a single one: none), and the other plans. Warns about statistics of micro-batches.

    Sizes are tried from the largest on, until steps get longer that need not move values to the host.

    Args:
        call: The call.
        whole: The graph of a step: of the call, or (``staged``) of its training step.
        batches: The sizes; None: one pass.
        plan_passes: Plans a step.
        to_host: Whether values are moved to the host by request. Otherwise smaller sizes are compared with a plan that
            moves them only to fit.

    Raises:
        PlanError: No size has a plan. It is the error of the first one.
        CaptureError: The same.
    """
    best: tuple[float, _AnyPlanned, Passes] | None = None
    failure: PlanError | CaptureError | None = None
    tried: list[MicroBatchOutcome] = []
    others: list[Plan] = []
    options = batches or MicroBatchOptions(1, (1,))
    left = deque(options.candidates)
    while left:
        size, is_least = left.popleft(), best is None and bool(tried) and not options.is_asked
        passes, count = None, options.step // size
        try:
            passes = Passes.single(whole) if count == 1 else call.passes(whole, size, staged=staged)
            found = plan_passes(passes)
        except STOPPED:
            stop_with(best is not None)
            break
        except (CaptureError, PlanError) as error:
            failure = failure or error
            tried.append(MicroBatchOutcome(size, count, refused=str(error).partition("\n")[0]))
            if passes is None and call.has_no_passes(whole, staged=staged):
                break
            if is_least and isinstance(error, NothingFits):
                break  # no size fits
            if is_least:
                left.rotate(1)  # this size is refused for another reason: the next larger one is the least
            continue
        # Stages that are planned without prices have no prediction, and one size: nothing is compared.
        seconds, num_bytes = figures(found.plan) or (0.0, 0.0)
        tried.append(MicroBatchOutcome(size, count, seconds, num_bytes))
        report_best(seconds or inf, 0.0)
        is_moved = not to_host and any(entry.offloaded for entry in found.plan.operators)
        if is_moved and len(tried) == 1 and not options.is_asked:
            left.rotate(-1)  # the step fits: the larger sizes first
        if best is not None and seconds >= best[0]:
            others.append(found.plan)
            if is_moved:
                continue
            break
        others += [] if best is None else [best[1].plan]
        best = seconds, found, passes
        if not (options.is_asked or is_least or is_moved):
            break
    if best is None:
        assert failure is not None, "something was tried"
        raise failure
    announce_statistics(sorted(best[2].statistics))
    return best[1], tuple(tried) if len(tried) > 1 else (), tuple(others)


def announce_statistics(buffers: list[str]) -> None:
    if buffers:
        more = f" and {len(buffers) - 3} more" if len(buffers) > 3 else ""
        warn_user(
            f"running statistics ({', '.join(buffers[:3])}{more}) are updated by every micro-batch, one after another, "
            "as in gradient accumulation on one device: results differ from those of one pass over the whole batch",
            PlanWarning,
        )
