"""``sw.fits``: check whether a model fits a cluster, predict its speed, and suggest changes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from math import inf
from typing import Any

import torch
from torch import nn

from shardwise.costs.cluster import Cluster
from shardwise.costs.flops import training_flops
from shardwise.costs.kernels import peak_flops
from shardwise.costs.ledger import Peak
from shardwise.costs.memory import memory_of
from shardwise.costs.prediction import Interval
from shardwise.errors import ShardwiseError
from shardwise.graph.ir import Graph
from shardwise.graph.trees import flatten
from shardwise.planning.execute import Planning
from shardwise.planning.plan_cache import NoKey, PlanCache, key_of
from shardwise.planning.suggestions import (
    NUM_SHOWN,
    Option,
    Variant,
    plan_variants,
    suggest_changes,
    suggest_fixes,
    try_request,
)
from shardwise.plans.micro_batch_search import planned_program
from shardwise.plans.plan import Plan
from shardwise.plans.price_scope import format_step_interval, prices_of
from shardwise.plans.printing import advice
from shardwise.plans.quantities import (
    format_bytes,
    format_bytes_interval,
    format_interval_seconds,
    format_parts,
    format_seconds,
)
from shardwise.plans.request import PlanRequest
from shardwise.plans.result import PlanningResult
from shardwise.plans.training_time import TrainingTime, ranks_per_machine, training_time
from shardwise.progress import until_deadline
from shardwise.report.search_reports import SearchReport
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

    @staticmethod
    def of_data(data: Mapping[str, Any]) -> StepSummary:
        """Return the summary that ``asdict`` wrote. Raises KeyError or TypeError for other data."""
        stages = tuple(Peak(**peak) for peak in data["stages"])
        return StepSummary(Interval(**data["seconds"]), Peak(**data["peak"]), stages, data["flops"], data["peak_flops"])


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
        training: How much of a period trains; None unless it was asked for.
    """

    asked: Option
    step: StepSummary | None
    tokens: int | None
    options: tuple[Option, ...]
    untried: tuple[str, ...]
    price_per_hour: float | None = None
    limit: float | None = None
    training: TrainingTime | None = None

    @property
    def ok(self) -> bool:
        return self.asked.fits

    def __bool__(self) -> bool:
        return self.ok

    @property
    def step_seconds(self) -> float:
        """Return the predicted seconds of a step as it runs by default: compiled on CUDA. 0: nothing fits."""
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
                *(f"  {line}" for line in advice(asked.plan)),
                *_stages(asked.plan, self.step.stages),
            ]
            if self.price is not None:
                lines.append(f"  1e9 {unit} cost {self.price:,.2f} at {self.price_per_hour:g} a device and hour")
        if self.training is not None:
            lines += [f"  {line}" for line in str(self.training).split("\n")]
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
        if option.request.candidates:
            figures += f", {_split(option.plan)}"
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
            "training": None if self.training is None else self.training.as_data(),
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
    loss: Callable[..., Any] | None = None,
    seconds: float | None = None,
    price_per_hour: float | None = None,
    days: float | None = None,
    cache: bool = True,
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
        loss: As for ``sw.plan``.
        seconds: Time for everything: the plan is the best that was found by then, and suggestions without time are
            listed in ``untried``. 0: no suggestions, and a plan without a deadline. Default: also without one, and no
            suggestion is begun after 30 seconds.
        price_per_hour: The price of a device, for the price of 1e9 tokens. Default: that of the cluster file.
        days: Also predict how much of so many days trains, from the failure statistics of the cluster.
        cache: As for ``sw.plan``; the suggestions of the same question are remembered, too.
        **settings: Other arguments of ``sw.plan`` (``kwargs``, ``global_batch``, ``precision``, ``optimizer``, ...).

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
    request = PlanRequest.of(module, example_inputs, cluster, loss=loss, **settings)
    captures: list[Planning] = []
    start = time.monotonic()
    store = PlanCache.of_user() if cache else None
    asked = try_request(request, captures=captures, seconds=seconds or inf, cache=store)
    rest = SECONDS if seconds is None else max(0.0, seconds - (time.monotonic() - start) * (seconds > 0))
    if asked.plan is not None and asked.plan.predicted is None and asked.plan.pipeline is None:
        raise ShardwiseError(
            "sw.fits answers from prices. Stages have no prices under a mode, or if strategies are completed "
            "without a search",
            fix='leave them out, or add search="dynamic_programming"',
        )
    step = None
    found, remembered = asked.found, _Remembered.of(store, captures[0], asked, seconds)
    most = 2 * NUM_SHOWN if found is None else inf
    if found is None:
        variants = suggest_fixes(request)
    else:
        step = remembered.step or _step(request, found)
        variants = suggest_changes(request, found.plan)

    def enough(options: Sequence[Option]) -> bool:
        return sum(option.is_priced for option in options) >= most

    with until_deadline(rest if seconds else inf) as deadline:
        options, untried = plan_variants(remembered.chosen(variants), rest, enough, captures, cache=store)
    untried += remembered.untried
    priced = [option for option in options if option.is_priced and (found is None or option.price < asked.price)]
    best = sorted(priced, key=lambda option: option.price)
    if not deadline.why and (not untried or seconds == 0):  # another time there may be time for them
        remembered.keep(step, best[:NUM_SHOWN], untried)
    tokens = _tokens(asked)
    limit = None if request.limit == inf else request.limit
    price = request.cluster.price_per_hour or None if price_per_hour is None else price_per_hour
    training = None
    if days is not None and found is not None:
        survival = found.plan.survives(ranks_per_machine(request.cluster))
        training = training_time(survival, request.cluster, asked.step_seconds, days)
    return Fits(asked, step, tokens, tuple(best[:NUM_SHOWN]), tuple(untried), price, limit, training)


@dataclass(frozen=True)
class _Remembered:
    """An earlier answer to the same question: the step, the suggestions that it showed (None: there is no answer), and
    those that it left out because no time was given. ``key``: "" if nothing can be remembered."""

    cache: PlanCache | None
    key: str = ""
    step: StepSummary | None = None
    shown: tuple[str, ...] | None = None
    untried: tuple[str, ...] = ()

    @staticmethod
    def of(cache: PlanCache | None, planning: Planning, asked: Option, seconds: float | None) -> _Remembered:
        if cache is None:
            return _Remembered(None)
        try:
            answer = asked.refused if asked.plan is None else asked.plan.digest
            key = key_of(planning.key(), answer, "suggestions", seconds)
        except NoKey:
            return _Remembered(cache)
        data = cache.read(key) or {}
        try:
            step = data["step"] and StepSummary.of_data(data["step"])
            return _Remembered(cache, key, step, tuple(map(str, data["shown"])), tuple(map(str, data["untried"])))
        except (KeyError, TypeError):
            return _Remembered(cache, key)

    def chosen(self, variants: Iterable[Variant]) -> Iterator[Variant]:
        """Yield the variants that were shown; all if that is not known."""
        return (variant for variant in variants if self.shown is None or variant[0] in self.shown)

    def keep(self, step: StepSummary | None, shown: Sequence[Option], untried: Sequence[str]) -> None:
        if self.cache is not None and self.key and self.shown is None:
            names = [option.what for option in shown]
            self.cache.write(self.key, {"step": step and asdict(step), "shown": names, "untried": untried})


def _step(request: PlanRequest, found: PlanningResult) -> StepSummary:
    plan, cluster = found.plan, request.cluster
    report = found.report if plan.is_pipeline and found.search_again is not None else found.search_report
    if isinstance(report, SearchReport) and plan.is_pipeline:
        passes = report.passes()
        peaks = tuple(stage_peak(plan, number, stage_pass.step) for number, stage_pass in enumerate(passes))
        seconds, peak = step_interval(plan, passes, cluster), fullest_place(plan, passes)
        return StepSummary(seconds, peak, peaks, *_arithmetic(report.graph, plan, cluster))
    assert plan.predicted is not None, "plans without stages are priced"
    if isinstance(report, SearchReport) and report.peak is not None:
        graph, peak = report.graph, report.peak
    else:
        spmd = planned_program(plan, request.module, (request.args, dict(request.kwargs)), request.loss)
        graph, peak = spmd.graph, memory_of(spmd, prices_of(plan)).peak
    return StepSummary(plan.predicted.step_interval(cluster), peak, (), *_arithmetic(graph, plan, cluster))


def _arithmetic(graph: Graph, plan: Plan, cluster: Cluster) -> tuple[float, float]:
    flops, dtypes = training_flops(graph)
    return flops * plan.micro_batches, peak_flops(cluster, dtypes)


def _tokens(asked: Option) -> int | None:
    """Return the number of token ids in a step, from the first input of integers with samples and positions."""
    for leaf in flatten((asked.request.args, dict(asked.request.kwargs)))[0]:
        if isinstance(leaf, torch.Tensor) and leaf.dim() == 2 and not leaf.is_floating_point():
            return leaf.numel() // leaf.shape[0] * (asked.samples or leaf.shape[0])
    return None
