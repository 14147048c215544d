"""Other settings for a model that does not fit, or that could run at a lower price, each planned like the asked one."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shardwise.api import plan as find_plan
from shardwise.costs.cluster import Cluster
from shardwise.errors import NothingFitsError, PlanError, ShardwiseError
from shardwise.graph.batch import num_samples, with_samples
from shardwise.graph.called import call_arguments
from shardwise.graph.precision import Precision
from shardwise.layouts.mesh import Mesh
from shardwise.plans.plan import Plan
from shardwise.search.mesh_shapes import candidate_meshes

NUM_SHOWN = 3
_MOST_NODES = 8  # times as many
_MOST_MESHES = 4


@dataclass(frozen=True)
class Option:
    """Settings (``what``, in words) with their plan, or why there is none. ``samples``: of a step."""

    what: str
    samples: int | None
    cluster: Cluster
    plan: Plan | None = None
    refused: str = ""

    @property
    def fits(self) -> bool:
        return self.plan is not None

    @property
    def step_seconds(self) -> float:
        own = None if self.plan is None else self.plan.predicted
        return 0.0 if own is None else own.planned_seconds

    @property
    def peak_bytes(self) -> float:
        own = None if self.plan is None else self.plan.predicted
        return 0.0 if own is None else own.memory_bytes

    @property
    def price(self) -> float:
        """Device-seconds of a sample."""
        return self.step_seconds * self.cluster.num_devices / (self.samples or 1)


@dataclass
class Question:
    """What was asked, and how a variant of it is planned. ``settings``: of ``sw.plan``."""

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
        module: nn.Module,
        example_inputs: Any,
        kwargs: Mapping[str, Any] | None,
        cluster: Cluster,
        settings: Mapping[str, Any],
    ) -> Question:
        args, named = call_arguments(example_inputs, kwargs)
        return Question(module, args, named, cluster, {k: v for k, v in settings.items() if v is not None})

    def planned(self, what: str, cluster: Cluster | None = None, samples: int | None = None, **changes: Any) -> Option:
        """The option of some changes. ``samples``: of the inputs. A plan that does not fit is an answer; other errors
        are raised."""
        own = cluster or self.cluster
        args, kwargs = self.args, dict(self.kwargs)
        step = self.samples if samples is None else samples
        if samples is not None:
            args, kwargs = with_samples((args, kwargs), samples)
        settings = {**self.settings, **changes}
        if "global_batch" in settings and settings["global_batch"] is not None:
            step = settings["global_batch"]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore" if what else "default")
                found = find_plan(self.module, args, own, kwargs=kwargs, **settings)
        except PlanError as error:
            if not (what or isinstance(error, NothingFitsError)):
                raise  # what was asked for is no question of memory
            return Option(what, step, own, refused=str(error))
        return Option(what, step, own, found)


Variant = tuple[str, Callable[[], Option]]


def mends(question: Question) -> Iterator[Variant]:
    """What may make a model fit, the least change first."""
    samples, batch = question.samples, num_samples((question.args, dict(question.kwargs)))
    if samples and batch == samples and "micro_batch" not in question.settings:
        for parts in (2, 4, 8):
            if samples % parts == 0 and samples // parts >= 1:
                size = samples // parts
                what = f"the same batch in {parts} passes (global_batch={samples}, micro_batch={size})"
                yield _variant(question, what, global_batch=samples, micro_batch=size)
    yield from _precision(question)
    yield from _clusters(question)
    yield from _batches(question, (0.5, 0.25))


def changes(question: Question, found: Plan) -> Iterator[Variant]:
    """What may make a model that fits run at a lower price."""
    yield from _precision(question)
    yield from _batches(question, (2, 0.5))
    again = any(entry.again for entry in found.operators) or any(entry.again for entry in found.parameters)
    yield (
        _variant(question, 'nothing is made again (recompute="none")', recompute="none")
        if again
        else _variant(question, 'blocks are made again in backward (recompute="full")', recompute="full")
    )
    yield from _clusters(question, most=2)
    if "mesh" not in question.settings:
        meshes = candidate_meshes(question.cluster, question.settings.get("max_mesh_axes", 2))
        others = [mesh for mesh in meshes if [*_sizes(mesh)] != [*_sizes(found.mesh)]]
        for mesh in others[:_MOST_MESHES]:
            axes = ", ".join(f"{name}={size}" for name, size in mesh.axes)
            yield _variant(question, f"another mesh: Mesh({axes})", mesh=mesh)


def _sizes(mesh: Mesh) -> Iterator[int]:
    """Of its axes, whatever they are called."""
    return (size for _, size in mesh.axes)


def tried(
    variants: Iterator[Variant], seconds: float, enough: Callable[[Sequence[Option]], bool]
) -> tuple[list[Option], list[str]]:
    """Options in order, for so many seconds and until they are enough, and the names of those that were not tried. What
    a model or cluster cannot have (a batch that does not divide, say) is left out."""
    start, options, left = time.monotonic(), list[Option](), list[str]()
    for what, make in variants:
        if time.monotonic() - start > seconds or enough(options):
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
    """Twice the nodes, and so on: units of the outermost level."""
    sizes = [level.size for level in question.cluster.levels]
    if question.cluster.mixed or question.settings.get("mesh") is not None:
        return
    factor = 2
    while factor <= most:
        outer = [*sizes[:-1], sizes[-1] * factor]
        count = question.cluster.num_devices * factor
        own = question.cluster.resized(outer).renamed(f"{question.cluster.name} x {factor}")
        yield _variant(question, f"{factor} times the devices ({count})", cluster=own)
        factor *= 2
