"""The proof of a precision: the plan's program in its own dtypes against one device that computes in the same.

A comparison in float64 sees a wrong sum at once, and no cast. Here everything is stored, computed, gathered and reduced
as on ranks, so that the dtype of every result and the bytes of every message are compared exactly: a cast that is
missing, doubled or on the wrong side of a message changes one of them. The numbers can agree only as far as the dtypes
reach. How far that is, is measured as in ``rounding``: one device, with every number that it starts from changed by one
unit in the last place, moves every tensor by so much in one step; and the bound is that, times what a plan rounds more.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from shardwise.graph.ir import Graph
from shardwise.layouts.text import format_dtype
from shardwise.plans.plan import Plan
from shardwise.proof.errors_by_tensor import Key, TensorError, Values, is_finite
from shardwise.proof.rounding import disturbed_runs, moved_in_step
from shardwise.proof.runs import DirectionCollectives, OneDevice, RunStart

RUNS_MARGIN = 4.0  # the worst of five disturbed runs is not the worst of all


@dataclass(frozen=True)
class DtypeReport:
    """The outcome. ``judged``: every tensor with its bound, those first that come nearest to it; ``wrong_dtypes``:
    results that have another dtype than on one device; ``wrong_messages``: what the plan lists and the ranks sent
    otherwise; ``not_run``: why one device could not run the model in these dtypes; ``not_finite``: the first loss or
    gradient of one device that is not, of which nothing is proven."""

    judged: tuple[tuple[TensorError, float], ...] = ()
    wrong_dtypes: tuple[str, ...] = ()
    wrong_messages: str = ""
    not_run: str = ""
    not_finite: str = ""

    @property
    def beyond(self) -> tuple[tuple[TensorError, float], ...]:
        """Tensors that differ by more than rounding explains."""
        return tuple((difference, bound) for difference, bound in self.judged if not difference.error <= bound)

    @property
    def ok(self) -> bool:
        return not (self.beyond or self.wrong_dtypes or self.wrong_messages or self.not_finite)

    def lines(self) -> list[str]:
        """As a report says it."""
        if self.not_run:
            return [f"in the plan's precision: not compared, one device can not run the model in it ({self.not_run})"]
        said = [f"in the plan's precision: {len(self.judged)} tensors"]
        if self.judged:
            worst, bound = self.judged[0]
            said[0] += f", nearest to its bound {worst.kind} {worst.name}: {worst.error:.2g} of {bound:.2g}"
        said += [
            f"  NOT EQUAL: {d.kind} {d.name} differs by {d.error:.2g} on rank {d.rank}" for d, _ in self.beyond[:3]
        ]
        said += [f"  nothing is proven: {self.not_finite} is not finite on one device"] if self.not_finite else []
        said += [f"  wrong dtype: {text}" for text in self.wrong_dtypes[:3]]
        return said + ([f"  wrong messages: {self.wrong_messages}"] if self.wrong_messages else [])


class PlanRanks(Protocol):
    """The ranks of a plan on virtual clusters: of a call, of passes, of stages."""

    def adopt(self, device: OneDevice) -> None:
        """Go on from where one device is."""

    def step(self, step: int) -> list[Values]:
        """Make a step: what every rank has then."""

    def compare(self, expected: Values, actual: Sequence[Values], worst: dict[Key, TensorError]) -> None:
        """Note how far every rank is from what one device has."""

    @property
    def sides(self) -> tuple[DirectionCollectives, ...]:
        """What is listed and what was sent in the last step."""


@dataclass(frozen=True)
class DtypeComparison:
    """``ranks`` beside one device, which ``alone`` makes. ``passes``: of a step."""

    ranks: PlanRanks
    alone: Callable[[RunStart], OneDevice] = OneDevice
    passes: int = 1


def in_dtypes(start: RunStart, compared: DtypeComparison, plan: Plan, steps: int) -> DtypeReport:
    """Compare ``steps`` steps, each from the state of one device. ``start``: in the dtypes of the plan's precision.

    One device takes the whole batch at once. A sum over devices or passes is rounded once for each of them, where one
    device rounds once; and a loss that is added up has lost up to half a unit with every pass, which its disturbed runs
    need not show."""
    original, before, ranks = compared.alone(start), compared.alone(start), compared.ranks
    unit = _unit(start.captured.graph)
    disturbed = disturbed_runs(start, unit, compared.alone)
    margin = RUNS_MARGIN + plan.num_ranks + (compared.passes if compared.passes > 1 else 0)
    judged: dict[Key, tuple[TensorError, float]] = {}
    wrong: dict[str, None] = {}
    messages = not_finite = ""
    for step in range(steps):
        before.adopt(original)
        ranks.adopt(original)
        try:
            expected = original.step(step)
        except RuntimeError as error:  # kernels that torch does not have: a batch norm of mixed dtypes, say
            return DtypeReport(not_run=str(error).split("\n", 1)[0])
        actual = ranks.step(step)
        bad = (
            f"{kind} {name}"
            for (kind, name), x in expected.items()
            if kind in ("loss", "gradient") and not is_finite(x)
        )
        not_finite = not_finite or next(bad, "")
        messages = messages or _wrong_messages(ranks.sides)
        for rank, values in enumerate(actual):
            wrong.update(dict.fromkeys(_wrong_dtypes(expected, values, rank)))
        differences: dict[Key, TensorError] = {}
        ranks.compare(expected, actual, differences)
        moved = moved_in_step(before, disturbed, expected, step, unit)
        for key, difference in differences.items():
            if ("gradient", key[1]) in expected and key[0] == "parameter":
                continue  # judged by its gradient: an optimizer works element by element
            floor = max(1.0, (compared.passes + 1) / 2) if key[0] == "loss" else 1.0
            bound = max(floor * unit, margin * moved.get(key, 0.0))
            if key not in judged or _share(difference, bound) > _share(*judged[key]):
                judged[key] = difference, bound
    ordered = sorted(judged.values(), key=lambda pair: -_share(*pair))
    return DtypeReport(tuple(ordered), tuple(wrong), messages, not_finite=not_finite)


def stored_module(module: torch.nn.Module, plan: Plan) -> torch.nn.Module:
    """A copy with parameters in the dtype in which the plan stores them. ``module``: on the CPU, with values."""
    twin = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.data = parameter.data.to(plan.precision.stored(parameter.dtype))
    return twin


def _unit(graph: Graph) -> float:
    """The spacing at 1 of the coarsest dtype that the graph computes with."""
    dtypes = {value.dtype for value in graph.values if value.dtype.is_floating_point}
    return max((torch.finfo(dtype).eps for dtype in dtypes), default=torch.finfo(torch.float64).eps)


def _share(difference: TensorError, bound: float) -> float:
    return difference.error / bound if difference.error == difference.error else float("inf")


def _wrong_dtypes(expected: Values, actual: Mapping[Key, torch.Tensor], rank: int) -> list[str]:
    return [
        f"{kind} {name} is {format_dtype(actual[kind, name].dtype)} on rank {rank}, {format_dtype(tensor.dtype)} alone"
        for (kind, name), tensor in expected.items()
        if (kind, name) in actual and actual[kind, name].dtype != tensor.dtype
    ]


def _wrong_messages(sides: Sequence[DirectionCollectives]) -> str:
    """The first message that is not the program's own: kind, axes and bytes."""
    for side in sides:
        if side.planned != side.performed:
            pairs = zip(side.planned, side.performed, strict=False)
            at = next((i for i, pair in enumerate(pairs) if pair[0] != pair[1]), None)
            if at is None:
                return f"{side.name}: {len(side.planned)} planned, {len(side.performed)} sent"
            return f"{side.name} {at}: {side.planned[at]} planned, {side.performed[at]} sent"
    return ""
