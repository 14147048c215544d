"""Alternative settings for a model that does not fit, or that could run at a lower price, each planned in full.

``sw.fits`` lists them. An error of ``sw.plan`` that nothing fits lists those that fit, if planning takes only seconds.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from shardwise.costs.cluster import Cluster
from shardwise.costs.optimizers import ON_HOST, is_on_host, states_of
from shardwise.errors import PlanError, ShardwiseError
from shardwise.graph.batch import num_samples, with_samples
from shardwise.graph.call_arguments import call_arguments
from shardwise.graph.step_precision import Precision
from shardwise.layouts.mesh import Mesh
from shardwise.plans.auto_stages import figures
from shardwise.plans.plan import Plan
from shardwise.plans.printing import format_bytes, format_seconds
from shardwise.plans.refusal import NothingFits
from shardwise.plans.schedule import schedule_of
from shardwise.search.mesh_shapes import candidate_meshes

NUM_SHOWN = 3
_MOST_NODES = 8  # the largest factor by which nodes are multiplied
_MOST_MESHES = 4
_PLACES = (2, 4)  # numbers of pipeline ranks that are tried if no pipeline was requested
_SCHEDULES = ("1F1B", "Interleaved1F1B", "ZBVZeroBubble")
# CPU time: suggestions are planned if the plan that does not fit took at most the first; they may take the second.
CHEAP_SECONDS, SUGGESTION_SECONDS = 2.0, 8.0

_alone: ContextVar[bool] = ContextVar("_alone", default=False)  # errors come without suggestions


@dataclass(frozen=True)
class Option:
    """A change of settings (``what``, in words) with its plan, or the error of planning (``refused``). ``samples``: per
    step."""

    what: str
    samples: int | None
    cluster: Cluster
    plan: Plan | None = None
    refused: str = ""

    @property
    def fits(self) -> bool:
        return self.plan is not None

    @property
    def is_priced(self) -> bool:
        """Return whether it fits and has a price; pipelines that are planned by a mode have none."""
        return self.step_seconds > 0

    @property
    def step_seconds(self) -> float:
        """Return the predicted seconds of a step; 0 if the plan was not priced."""
        return self._figures[0]

    @property
    def peak_bytes(self) -> float:
        return self._figures[1]

    @property
    def _figures(self) -> tuple[float, float]:
        plan = self.plan
        return (0.0, 0.0) if plan is None or (plan.predicted is None and plan.pipeline is None) else figures(plan)

    @property
    def price(self) -> float:
        """Return the device-seconds per sample."""
        return self.step_seconds * self.cluster.num_devices / (self.samples or 1)


@dataclass
class Question:
    """The arguments of a call of ``sw.plan``, of which variants are planned. ``find``: ``sw.plan`` itself."""

    find: Callable[..., Plan]
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    cluster: Cluster
    settings: Mapping[str, Any]
    samples: int | None = field(init=False)

    def __post_init__(self) -> None:
        self.samples = self.settings.get("global_batch") or num_samples((self.args, dict(self.kwargs)))

    @staticmethod
    def of(
        find: Callable[..., Plan],
        module: nn.Module,
        example_inputs: Any,
        kwargs: Mapping[str, Any] | None,
        cluster: Cluster,
        settings: Mapping[str, Any],
    ) -> Question:
        args, named = call_arguments(example_inputs, kwargs)
        return Question(find, module, args, named, cluster, {k: v for k, v in settings.items() if v is not None})

    def planned(self, what: str, cluster: Cluster | None = None, samples: int | None = None, **changes: Any) -> Option:
        """Plan with some changes. ``samples``: the samples of the inputs. A plan that does not fit is returned as a
        refused option; other errors are raised. Skips planning if parameters and states exceed the devices' memory."""
        devices = cluster or self.cluster
        args, kwargs = self.args, dict(self.kwargs)
        step = self.samples if samples is None else samples
        if samples is not None:
            args, kwargs = with_samples((args, kwargs), samples)
        settings = {**self.settings, **changes}
        if "global_batch" in settings and settings["global_batch"] is not None:
            step = settings["global_batch"]
        stays, room = _stays(self.module, settings), devices.num_devices * limit_of(devices, settings)
        if what and stays > room:
            refused = f"{format_bytes(stays)} of parameters and states do not fit in {format_bytes(room)}"
            return Option(what, step, devices, refused=refused)
        try:
            with warnings.catch_warnings(), without_suggestions():
                warnings.simplefilter("ignore" if what else "default")
                plan = self.find(self.module, args, devices, kwargs=kwargs, **settings)
        except PlanError as error:
            if not (what or isinstance(error, NothingFits)):
                raise  # the requested plan fails for another reason than memory
            return Option(what, step, devices, refused=str(error))
        limit, needed = limit_of(devices, settings), 0.0 if plan.predicted is None else plan.predicted.peak_bytes
        if needed > limit:  # sw.plan checks the memory only of searched plans
            refused = f"the peak is {format_bytes(needed)} a device, {format_bytes(limit)} are allowed"
            return Option(what, step, devices, refused=refused)
        return Option(what, step, devices, plan)


def _stays(module: nn.Module, settings: Mapping[str, Any]) -> int:
    """Return a lower bound on the bytes of parameters and optimizer states over all devices between steps."""
    optimizer = settings.get("optimizer", "adamw")
    dtype = (settings.get("precision") or Precision()).parameter
    states = 0 if is_on_host(optimizer) else states_of(optimizer)
    return sum(
        p.numel() * (dtype if dtype is not None and p.is_floating_point() else p.dtype).itemsize
        * (1 + states * p.requires_grad)
        for p in module.parameters()
    )  # fmt: skip


def limit_of(cluster: Cluster, settings: Mapping[str, Any]) -> float:
    """Return the memory limit of a device in bytes."""
    limit: float | None = settings.get("memory_bytes")
    return cluster.device.usable_bytes if limit is None else limit


Variant = tuple[str, Callable[[], Option]]


@contextmanager
def without_suggestions() -> Iterator[None]:
    """Raise NothingFits without planning suggestions inside this context."""
    token = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(token)


@contextmanager
def with_suggestions(find: Callable[..., Plan], arguments: dict[str, Any]) -> Iterator[None]:
    """Add suggestions, each planned in full, to a NothingFits error inside this context. If the plan took too long, add
    the reason for their absence. ``find``: ``sw.plan``; ``arguments``: its arguments."""
    start = time.process_time()
    try:
        yield
        return
    except NothingFits as refusal:
        if _alone.get():
            raise
        took, refused = time.process_time() - start, refusal
    if took > CHEAP_SECONDS:
        why = f"not planned, as this plan took {took:.0f} s of CPU time: sw.fits plans them"
        raise refused.naming([], why) from None
    raise refused.naming(*_suggestions_of(find, arguments)) from None


def _suggestions_of(find: Callable[..., Plan], arguments: dict[str, Any]) -> tuple[list[str], str]:
    """Return a line for each change that makes a plan fit, and the text to print if none does. ``arguments``: those of
    ``sw.plan``."""
    module, inputs, cluster = (arguments.pop(name) for name in ("module", "example_inputs", "cluster"))
    question = Question.of(find, module, inputs, arguments.pop("kwargs", None), Cluster.of(cluster), arguments)

    def enough(planned: Sequence[Option]) -> bool:
        return sum(option.fits for option in planned) >= NUM_SHOWN

    options, untried = plan_options(suggest_fixes(question), SUGGESTION_SECONDS, enough, clock=time.process_time)
    best = sorted((option for option in options if option.fits), key=lambda option: option.price)
    left = f"; not planned (out of time): {'; '.join(untried)}" if untried else ""
    return [suggestion_line(option) for option in best], f"none of the {len(options)} that were planned fits{left}"


def suggestion_line(option: Option) -> str:
    """Format a change with the step time and peak memory that it leads to, if its plan is priced."""
    if not option.step_seconds:
        return option.what
    return f"{option.what}: step {format_seconds(option.step_seconds)}, peak {format_bytes(option.peak_bytes)}"


def suggest_fixes(question: Question) -> Iterator[Variant]:
    """Yield changes that may make a model fit, the smallest change first."""
    samples, batch = question.samples, num_samples((question.args, dict(question.kwargs)))
    micro_batch = question.settings.get("micro_batch", 0)
    for part in (2, 4):
        if micro_batch and batch == samples and micro_batch % part == 0:
            yield _variant(
                question, f"smaller micro-batches (micro_batch={micro_batch // part})", micro_batch=micro_batch // part
            )
    if question.settings.get("recompute", "auto") != "auto":
        yield _variant(question, 'recompute in backward as much as needed (recompute="auto")', recompute="auto")
    if question.settings.get("zero") in (1, 2):
        yield _variant(question, "sharded parameters, all-gathered again in backward (zero=3)", zero=3)
    if samples and batch == samples and "micro_batch" not in question.settings:
        for parts in (2, 4, 8):
            if samples % parts == 0 and samples // parts >= 1:
                size = samples // parts
                what = f"the same batch in {parts} micro-batches (global_batch={samples}, micro_batch={size})"
                yield _variant(question, what, global_batch=samples, micro_batch=size)
    yield from _precision(question)
    yield from _states_on_host(question)
    yield from _stages(question)
    yield from _clusters(question)
    yield from _batches(question, (0.5, 0.25))


def suggest_changes(question: Question, plan: Plan) -> Iterator[Variant]:
    """Yield changes that may lower the price of a model that fits. Stages that ``stages="auto"`` chose are kept, except
    by the changes of stages themselves."""
    if question.settings.get("stages") == "auto":
        chosen = {"stages": len(plan.stages), "schedule": plan.schedule} if plan.is_pipeline else {}
        free = {key: value for key, value in question.settings.items() if key not in ("stages", "schedule")}
        question = replace(question, settings={**free, **chosen})
    yield from _precision(question)
    yield from _batches(question, (2, 0.5))
    recomputes = any(entry.again for entry in plan.operators) or any(entry.again for entry in plan.conversions)
    yield (
        _variant(question, 'recompute nothing (recompute="none")', recompute="none")
        if recomputes
        else _variant(question, 'recompute blocks in backward (recompute="full")', recompute="full")
    )
    yield from _clusters(question, most=2)
    if "mesh" not in question.settings:
        part = question.cluster.with_devices(plan.stages[0].mesh.num_devices)
        meshes = candidate_meshes(part, question.settings.get("max_mesh_axes", 2))
        others = [mesh for mesh in meshes if any([*_sizes(mesh)] != [*_sizes(stage.mesh)] for stage in plan.stages)]
        for mesh in others[:_MOST_MESHES]:
            axes = ", ".join(f"{name}={size}" for name, size in mesh.axes)
            of = "another mesh for every stage" if plan.is_pipeline else "another mesh"
            yield _variant(question, f"{of}: Mesh({axes})", mesh=mesh)
    yield from _stages(question)


def _stages(question: Question) -> Iterator[Variant]:
    """Yield other numbers of stages, no stages, and other schedules on the same number of pipeline ranks."""
    stages, devices = question.settings.get("stages"), question.cluster.num_devices
    if question.settings.get("mesh") is not None or stages in ("marked", "auto"):
        return
    if stages is None:
        for number in _PLACES:
            if devices % number == 0 and (question.samples or 0) >= 2 * number:
                yield _variant(question, f"{number} stages (stages={number})", stages=number)
        return
    schedule = schedule_of(question.settings.get("schedule", "1F1B"))
    places = stages // schedule.stages_per_place
    for number in (places // 2, places * 2):
        if number > 1 and devices % number == 0:
            count = number * schedule.stages_per_place
            yield _variant(question, f"{count} stages (stages={count})", stages=count)
    yield _variant(question, "no stages (stages=None)", stages=None, schedule=None)
    for other in map(schedule_of, _SCHEDULES):
        if other.name != schedule.name:
            count = places * other.stages_per_place
            what = f'another schedule (schedule="{other.name}", stages={count})'
            yield _variant(question, what, stages=count, schedule=other.name)


def _sizes(mesh: Mesh) -> Iterator[int]:
    return (size for _, size in mesh.axes)


def plan_options(
    variants: Iterator[Variant],
    seconds: float,
    enough: Callable[[Sequence[Option]], bool],
    clock: Callable[[], float] = time.monotonic,
) -> tuple[list[Option], list[str]]:
    """Plan variants in order until ``seconds`` have passed or ``enough`` returns true. Return the options, and the
    names of those not tried. Variants with an error (a batch that does not divide, for example) are left out."""
    start, options, left = clock(), list[Option](), list[str]()
    for what, make in variants:
        if clock() - start > seconds or enough(options):
            left.append(what)
            continue
        try:
            options.append(make())
        except ShardwiseError:
            continue
    return options, left


def _variant(question: Question, what: str, **changes: Any) -> Variant:
    return what, lambda: question.planned(what, **changes)


def _precision(question: Question) -> Iterator[Variant]:
    floats = {p.dtype for p in question.module.parameters() if p.is_floating_point()}
    if floats == {torch.float32} and "precision" not in question.settings:
        yield _variant(
            question,
            "computing in bfloat16 (precision=sw.Precision(compute=torch.bfloat16, parameter=torch.float32))",
            precision=Precision(compute=torch.bfloat16, parameter=torch.float32),
        )


def _states_on_host(question: Question) -> Iterator[Variant]:
    optimizer = question.settings.get("optimizer", "adamw")
    if question.cluster.device.host_bandwidth and states_of(optimizer) and not is_on_host(optimizer):
        named = f"{optimizer}{ON_HOST}"
        yield _variant(question, f'the optimizer\'s states on the host (optimizer="{named}")', optimizer=named)


def _batches(question: Question, factors: Sequence[float]) -> Iterator[Variant]:
    batch = num_samples((question.args, dict(question.kwargs)))
    if not batch or batch != question.samples or "micro_batch" in question.settings:
        return
    for factor in factors:
        size = int(batch * factor)
        if size >= 1 and size == batch * factor:
            word = f"{factor:g} times the batch" if factor > 1 else f"1/{1 / factor:g} of the batch"
            changed = {"global_batch": size} if "global_batch" in question.settings else {}
            yield _variant(question, f"{word} ({size} samples)", samples=size, **changed)


def _clusters(question: Question, most: int = _MOST_NODES) -> Iterator[Variant]:
    """Yield clusters with 2, 4, ... times the units of the outermost level."""
    sizes = [level.size for level in question.cluster.levels]
    if question.cluster.mixed or question.settings.get("mesh") is not None:
        return
    factor = 2
    while factor <= most:
        outer = [*sizes[:-1], sizes[-1] * factor]
        count = question.cluster.num_devices * factor
        larger = question.cluster.resized(outer).renamed(f"{question.cluster.name} x {factor}")
        yield _variant(question, f"{factor} times the devices ({count})", cluster=larger)
        factor *= 2
