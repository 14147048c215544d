"""``sw.fits``: check whether a model fits a cluster, predict its speed, and suggest changes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import inf
from typing import Any

import torch
from torch import nn

from shardwise.costs.cluster import Cluster
from shardwise.costs.flops import flops_of
from shardwise.costs.kernels import DTYPE_NAMES
from shardwise.costs.ledger import Peak
from shardwise.costs.memory import memory_of
from shardwise.costs.prediction import Interval
from shardwise.errors import ShardwiseError
from shardwise.graph.ir import Graph
from shardwise.graph.trees import flatten
from shardwise.planning.execute import Planning
from shardwise.planning.suggestions import NUM_SHOWN, Option, plan_variants, suggest_changes, suggest_fixes, try_request
from shardwise.plans.bind import program_of
from shardwise.plans.micro_batch_search import Example, planned_graph
from shardwise.plans.plan import Plan
from shardwise.plans.price_scope import format_step_interval, prices_of
from shardwise.plans.quantities import (
    format_bytes,
    format_bytes_interval,
    format_interval_seconds,
    format_parts,
    format_seconds,
)
from shardwise.plans.request import PlanRequest
from shardwise.plans.result import PlanningResult
from shardwise.progress import until_deadline
from shardwise.report.search_reports import MeshReport, PipelineReport
from shardwise.report.stage_passes import fullest_place, stage_peak, step_interval
from shardwise.untrusted_text import is_number

SECONDS = 30.0
_FEW = 4  # the parts of peaks are printed for up to this number of stages; as_data has those of all


@dataclass(frozen=True)
class StepSummary:
    """Time and memory of a step. ``seconds``: with its interval; ``peak``: that of the fullest device; ``stages``: the
    peak of a device of every pipeline stage, with all micro-batches in flight; ``flops``: the model's FLOPs without
    recomputation; ``peak_flops``: FLOP/s of all devices in the dtype of the model's products."""

    seconds: Interval
    peak: Peak
    stages: tuple[Peak, ...]
    flops: float
    peak_flops: float


@dataclass(frozen=True)
class Fits:
    """The result of ``sw.fits``; true if the model fits.

    Attributes:
        asked: The plan for the given settings, or the reason that nothing fits.
        step: Time and memory of a step of that plan; None if nothing fits.
        tokens: Token ids per step; None if the inputs are not token ids.
        options: Suggested changes, cheapest first: those that make the model fit, or those that save the most.
        untried: Names of the changes for which there was no time.
        price_per_hour: The price of a device, in any currency.
        limit: Bytes that the tensors of a device may take; None if no limit is known.
    """

    asked: Option
    step: StepSummary | None
    tokens: int | None
    options: tuple[Option, ...]
    untried: tuple[str, ...]
    price_per_hour: float | None = None
    limit: float | None = None

    @property
    def ok(self) -> bool:
        return self.asked.fits

    def __bool__(self) -> bool:
        return self.ok

    @property
    def step_seconds(self) -> float:
        return self.asked.step_seconds

    @property
    def utilisation(self) -> float:
        """Return the model FLOPs utilisation, a share from 0 to 1. Recomputation does not count."""
        step = self.step
        return step.flops / (self.step_seconds * step.peak_flops) if step and self.step_seconds and step.flops else 0.0

    @property
    def rate(self) -> float:
        """Return tokens per second; samples per second if the inputs are not token ids."""
        return self._units / self.step_seconds if self.step_seconds else 0.0

    @property
    def _units(self) -> int:
        return self.tokens or self.asked.samples or 0

    @property
    def price(self) -> float | None:
        """Return the price of 1e9 tokens (or samples); None if devices have no price."""
        if self.price_per_hour is None or not self.rate:
            return None
        return 1e9 / self.rate / 3600 * self.asked.cluster.num_devices * self.price_per_hour

    def __str__(self) -> str:
        asked, unit = self.asked, "tokens" if self.tokens else "samples"
        where = f"{asked.cluster.num_devices} x {asked.cluster.device.name}"
        if asked.plan is None or self.step is None:
            why = [line for line in asked.refused.split("\n") if not line.lstrip().startswith("fix:")]
            lines = [f"does NOT fit {where}:", *(f"  {line}" for line in why)]  # options replace the fix
        else:
            limit = "" if self.limit is None else f" of {format_bytes(self.limit)}"
            took, peak = self.step.seconds, self.step.peak
            between = f" ({self._units / took.high:,.0f}-{self._units / took.low:,.0f})" if took.low < took.high else ""
            lines = [
                f"fits {where}, {_split(asked.plan)}",
                f"  step {format_interval_seconds(took)}, {self.rate:,.0f} {unit}/s{between}, "
                f"{self.utilisation:.1%} of the devices' peak",
                f"  peak {format_bytes_interval(peak.num_bytes, asked.cluster)}{limit} a device, in {peak.where}: "
                f"{format_parts(peak)}",
                *_stages(asked.plan, self.step.stages),
            ]
            if self.price is not None:
                lines.append(f"  1e9 {unit} cost {self.price:,.2f} at {self.price_per_hour:g} a device and hour")
        lines.append("  what would make it fit:" if not self.ok else "  what would change it:")
        lines += [f"    {line}" for line in map(self._option, self.options)] or ["    nothing that was tried"]
        lines += [f"  not tried (out of time): {'; '.join(self.untried)}"] if self.untried else []
        return "\n".join(lines)

    def _option(self, option: Option) -> str:
        if option.plan is None:
            return f"{option.what}: does not fit"
        figures = (
            f"step {format_step_interval(option.plan)}, peak {format_bytes_interval(option.peak_bytes, option.cluster)}"
        )
        if not self.ok:
            return f"{option.what}: {figures}"
        share = option.price / self.asked.price - 1
        return f"{option.what}: {abs(share):.1%} {'less' if share < 0 else 'more'} device time a sample, {figures}"

    def as_data(self) -> dict[str, Any]:
        """Return the data that ``--json`` prints. Keys name their units; absent values are None."""
        asked, step, plan = self.asked, self.step, self.asked.plan
        peak = None if step is None else step.peak
        pipeline = None if plan is None else plan.pipeline
        return {
            "fits": self.ok,
            "refused": asked.refused or None,
            "devices": asked.cluster.num_devices,
            "mesh": None if plan is None or pipeline is not None else dict(plan.mesh.axes),
            "step_seconds": self.step_seconds or None,
            "step_seconds_between": None if step is None else [step.seconds.low, step.seconds.high],
            "tokens_per_second": self.rate if self.tokens else None,
            "samples_per_second": asked.samples / self.step_seconds if asked.samples and self.step_seconds else None,
            "model_flops_utilisation": self.utilisation or None,
            "price_of_1e9": self.price,
            "peak_bytes": None if peak is None else peak.num_bytes,
            "limit_bytes": self.limit,
            "peak_at": None if peak is None else peak.where,
            "peak_parts": None if peak is None else {k: v for k, v in peak.parts.items() if v},
            "schedule": None if plan is None or pipeline is None else plan.schedule,
            "micro_batches": None if plan is None else plan.micro_batches,
            "bubble": None if pipeline is None else pipeline.bubble,
            "stages": []
            if plan is None or pipeline is None or step is None
            else [
                {
                    "mesh": dict(stage.mesh.axes),
                    "ranks": list(stage.placement.ranks),
                    "forward_seconds": times.forward,
                    "backward_seconds": times.backward,
                    "bubble": times.bubble,
                    "peak_bytes": peak.num_bytes,
                    "peak_at": peak.where,
                    "peak_parts": {k: v for k, v in peak.parts.items() if v},
                }
                for stage, times, peak in zip(plan.stages, pipeline.stages, step.stages, strict=True)
            ],
            "options": [
                {
                    "what": option.what,
                    "fits": option.fits,
                    "step_seconds": option.step_seconds or None,
                    "peak_bytes": option.peak_bytes or None,
                    "device_seconds_per_sample": option.price or None,
                }
                for option in self.options
            ],
            "untried": list(self.untried),
        }


def _split(plan: Plan) -> str:
    if plan.pipeline is None:
        passes = f", {plan.micro_batches} micro-batches of {plan.micro_batch} samples" if plan.micro_batches > 1 else ""
        return f"{plan.mesh}{passes}"
    meshes = ", ".join(dict.fromkeys(str(stage.mesh) for stage in plan.stages))
    return (
        f"{len(plan.stages)} stages of {meshes}, {plan.schedule} over {plan.micro_batches} micro-batches, bubble "
        f"{plan.pipeline.bubble:.1%}"
    )


def _stages(plan: Plan, peaks: Sequence[Peak]) -> list[str]:
    """Return a line per stage (one for equal neighbours): times per micro-batch, and the peak with all in flight."""
    texts = [
        f"forward {format_seconds(times.forward)}, backward {format_seconds(times.backward)}, bubble "
        f"{times.bubble:.1%}, peak {format_bytes(peak.num_bytes)} in {peak.phase}"
        + (f": {format_parts(peak)}" if len(peaks) <= _FEW else "")
        for times, peak in zip(() if plan.pipeline is None else plan.pipeline.stages, peaks, strict=True)
    ]
    lines = []
    for text, group in groupby(enumerate(texts), key=lambda numbered: numbered[1]):
        numbers = [number for number, _ in group]
        which = f"stage {numbers[0]}" if len(numbers) == 1 else f"stages {numbers[0]}-{numbers[-1]}, each"
        lines.append(f"    {which}: {text}")
    return lines


def fits(
    module: nn.Module,
    example_inputs: Any,
    cluster: Cluster | str | int,
    *,
    kwargs: Mapping[str, Any] | None = None,
    loss: Callable[..., Any] | None = None,
    seconds: float | None = None,
    price_per_hour: float | None = None,
    **settings: Any,
) -> Fits:
    """Check whether ``module`` trains on ``cluster``, predict its speed and memory, and suggest changes.

    If the model fits, the suggestions are the changes that save the most device time per sample: another batch,
    bfloat16, other recomputation, more devices, other meshes. If not, they are the changes that make it fit, the fewest
    device-seconds per sample first: micro-batches, bfloat16, optimizer states on the host, more devices, a smaller
    batch. With ``stages``, other numbers of stages and schedules are tried as well, and the answer has the bubble and
    the memory of every stage. Each suggestion is planned in full. Nothing is allocated if parameters and inputs are
    meta tensors.

    Args:
        module: The model.
        example_inputs: As for ``sw.plan``.
        cluster: A cluster, its name (``"h100-2x8"``), or a number of devices of this machine.
        kwargs: Named inputs, in addition to positional ones.
        loss: As for ``sw.plan``.
        seconds: Time for everything: the plan is the best that was found by then, and suggestions without time are
            listed in ``untried``. 0: no suggestions, and a plan without a deadline. Default: also without one, and no
            suggestion is begun after 30 seconds.
        price_per_hour: The price of a device, for the price of 1e9 tokens. Default: that of the cluster file.
        **settings: Other settings of ``sw.plan`` (``global_batch``, ``precision``, ``optimizer``, ...).

    Returns:
        The answer with its suggestions; print it, or use it as a bool.

    Raises:
        ShardwiseError: As ``sw.plan`` raises it, except that a model that does not fit is an answer.
    """
    if seconds is not None and not (is_number(seconds) and seconds >= 0):
        raise ShardwiseError(f"seconds is {seconds!r}", fix="seconds for planning, 0 or more")
    if price_per_hour is not None and not (is_number(price_per_hour) and 0 <= price_per_hour < inf):
        fix = "what a device costs in an hour, from 0; or leave it out"
        raise ShardwiseError(f"the price of a device and hour is {price_per_hour!r}", fix=fix)
    request = PlanRequest.of(module, example_inputs, cluster, kwargs=kwargs, loss=loss, **settings)
    captures: list[Planning] = []
    start = time.monotonic()
    asked = try_request(request, captures=captures, seconds=seconds or inf)
    rest = SECONDS if seconds is None else max(0.0, seconds - (time.monotonic() - start) * (seconds > 0))
    if asked.plan is not None and asked.plan.predicted is None and asked.plan.pipeline is None:
        raise ShardwiseError(
            "sw.fits answers from prices. Stages have no prices under a mode, or if strategies are completed "
            "without a search",
            fix='leave them out, or add search="dynamic_programming"',
        )
    step = None
    found = asked.found
    most = 2 * NUM_SHOWN if found is None else inf
    if found is None:
        variants = suggest_fixes(request)
    else:
        step = _step(request, found)
        variants = suggest_changes(request, found.plan)

    def enough(options: Sequence[Option]) -> bool:
        return sum(option.is_priced for option in options) >= most

    with until_deadline(rest if seconds else inf):
        options, untried = plan_variants(variants, rest, enough, captures)
    priced = [option for option in options if option.is_priced and (found is None or option.price < asked.price)]
    best = sorted(priced, key=lambda option: option.price)
    tokens = _tokens(asked)
    limit = None if request.limit == inf else request.limit
    price = request.cluster.price_per_hour or None if price_per_hour is None else price_per_hour
    return Fits(asked, step, tokens, tuple(best[:NUM_SHOWN]), tuple(untried), price, limit)


def _step(request: PlanRequest, found: PlanningResult) -> StepSummary:
    plan, report, cluster = found.plan, found.search_report, request.cluster
    if isinstance(report, PipelineReport):
        passes = report.passes()
        peaks = tuple(stage_peak(plan, number, stage_pass.step) for number, stage_pass in enumerate(passes))
        seconds, peak = step_interval(plan, passes, cluster), fullest_place(plan, passes)
        return StepSummary(seconds, peak, peaks, *_arithmetic(report.found.graph, plan, cluster))
    assert plan.predicted is not None, "plans without stages are priced"
    if isinstance(report, MeshReport):
        graph, peak = report.finished_search.cost.domains.graph, report.peak
    else:
        call = Example.of(plan, request.module, (request.args, dict(request.kwargs)), request.loss)
        spmd = program_of(plan, planned_graph(call, plan), training=request.module.training)
        graph, peak = spmd.graph, memory_of(spmd, prices_of(plan)).peak
    return StepSummary(plan.predicted.step_interval(cluster), peak, (), *_arithmetic(graph, plan, cluster))


def _arithmetic(graph: Graph, plan: Plan, cluster: Cluster) -> tuple[float, float]:
    flops = peak = 0.0
    for op in graph.ops:
        operands, results = (tuple(tuple(graph.by_name[n].shape) for n in names) for names in (op.operands, op.results))
        needed = sum(
            graph.by_name[name].requires_grad and len(shape) > 1
            for name, shape in zip(op.operands, operands, strict=True)
        )
        op_flops = flops_of(op, operands, results)
        flops += op_flops * (1 + needed) * plan.micro_batches
        if op_flops:
            dtype = DTYPE_NAMES.get(graph.by_name[op.operands[0]].dtype, "f32")
            peak = max(peak, cluster.device.peak_flops(dtype) * cluster.num_devices)
    return flops, peak


def _tokens(asked: Option) -> int | None:
    """Return the number of token ids in a step, from the first input of integers with samples and positions."""
    for leaf in flatten((asked.request.args, dict(asked.request.kwargs)))[0]:
        if isinstance(leaf, torch.Tensor) and leaf.dim() == 2 and not leaf.is_floating_point():
            return leaf.numel() // leaf.shape[0] * (asked.samples or leaf.shape[0])
    return None
