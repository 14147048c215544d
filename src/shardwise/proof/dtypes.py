"""The proof of a precision: the plan's program in its own dtypes against one device that computes in the same.

A comparison in float64 sees a wrong sum at once, and no cast. Here everything is stored, computed, gathered and reduced
as on ranks, so that the dtype of every result and the bytes of every message are compared exactly: a cast that is
missing, doubled or on the wrong side of a message changes one of them. The numbers can agree only as far as the dtypes
reach. How far that is, is measured as in ``rounding``: one device, with every number that it starts from changed by one
unit in the last place, moves every tensor by so much in one step; and the bound is that, times what a plan rounds more.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from shardwise.graph.ir import Graph
from shardwise.layouts.text import format_dtype
from shardwise.plans.plan import Plan
from shardwise.programs.lifetimes import backward_collectives
from shardwise.proof.comparison import Difference, Key, compare
from shardwise.proof.rounding import disturbed_runs, local_part, moved_in_step
from shardwise.proof.runs import OneDevice, Ranks, Start, Values

RUNS_MARGIN = 4.0  # the worst of five disturbed runs is not the worst of all


@dataclass(frozen=True)
class InDtypes:
    """The outcome. ``judged``: every tensor with its bound, those first that come nearest to it; ``wrong_dtypes``:
    results that have another dtype than on one device; ``wrong_messages``: what the plan lists and the ranks sent
    otherwise; ``not_run``: why one device could not run the model in these dtypes."""

    judged: tuple[tuple[Difference, float], ...] = ()
    wrong_dtypes: tuple[str, ...] = ()
    wrong_messages: str = ""
    not_run: str = ""

    @property
    def beyond(self) -> tuple[tuple[Difference, float], ...]:
        """Tensors that differ by more than rounding explains."""
        return tuple((difference, bound) for difference, bound in self.judged if not difference.error <= bound)

    @property
    def ok(self) -> bool:
        return not (self.beyond or self.wrong_dtypes or self.wrong_messages)

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
        said += [f"  wrong dtype: {text}" for text in self.wrong_dtypes[:3]]
        return said + ([f"  wrong messages: {self.wrong_messages}"] if self.wrong_messages else [])


def in_dtypes(start: Start, plan: Plan, steps: int) -> InDtypes:
    """Compare ``steps`` steps, each from the state of one device. ``start``: in the dtypes of the plan's precision."""
    original, before, ranks = OneDevice(start), OneDevice(start), Ranks(start)
    unit = _unit(start.captured.graph)
    disturbed = disturbed_runs(start, unit)
    margin = RUNS_MARGIN + plan.num_ranks  # a sum over devices is rounded once for each, where one device rounds once
    judged: dict[Key, tuple[Difference, float]] = {}
    wrong: dict[str, None] = {}
    messages = ""
    for step in range(steps):
        before.adopt(original)
        ranks.adopt(original)
        try:
            expected = original.step(step)
        except RuntimeError as error:  # kernels that torch does not have: a batch norm of mixed dtypes, say
            return InDtypes(not_run=str(error).split("\n", 1)[0])
        actual = ranks.step(step)
        messages = messages or _wrong_messages(ranks)
        for rank, values in enumerate(actual):
            wrong.update(dict.fromkeys(_wrong_dtypes(expected, values, rank)))
        found: dict[Key, Difference] = {}
        compare(expected, actual, local_part(start.spmd), found)
        moved = moved_in_step(before, disturbed, expected, step, unit)
        for key, difference in found.items():
            if ("gradient", key[1]) in expected and key[0] == "parameter":
                continue  # judged by its gradient: an optimizer works element by element
            bound = max(unit, margin * moved.get(key, 0.0))
            if key not in judged or _share(difference, bound) > _share(*judged[key]):
                judged[key] = difference, bound
    ordered = sorted(judged.values(), key=lambda pair: -_share(*pair))
    return InDtypes(tuple(ordered), tuple(wrong), messages)


def stored_module(module: torch.nn.Module, plan: Plan) -> torch.nn.Module:
    """A copy with parameters in the dtype in which the plan stores them. ``module``: on the CPU, with values."""
    twin = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.data = parameter.data.to(plan.precision.stored(parameter.dtype))
    return twin


def _unit(graph: Graph) -> float:
    """The spacing at 1 of the coarsest dtype that the graph computes with."""
    found = {value.dtype for value in graph.values if value.dtype.is_floating_point}
    return max((torch.finfo(dtype).eps for dtype in found), default=torch.finfo(torch.float64).eps)


def _share(difference: Difference, bound: float) -> float:
    return difference.error / bound if difference.error == difference.error else float("inf")


def _wrong_dtypes(expected: Values, actual: Mapping[Key, torch.Tensor], rank: int) -> list[str]:
    return [
        f"{kind} {name} is {format_dtype(actual[kind, name].dtype)} on rank {rank}, {format_dtype(tensor.dtype)} alone"
        for (kind, name), tensor in expected.items()
        if (kind, name) in actual and actual[kind, name].dtype != tensor.dtype
    ]


def _wrong_messages(ranks: Ranks) -> str:
    """The first message that is not the program's own: kind, axes and bytes."""
    spmd = ranks.spmd
    sides = (
        ("forward", spmd.forward_collectives(), ranks.forward_record),
        ("backward", backward_collectives(ranks.programs[0]), ranks.backward_record),
    )
    for side, planned, performed in sides:
        if planned != performed:
            at = next((i for i, pair in enumerate(zip(planned, performed, strict=False)) if pair[0] != pair[1]), None)
            if at is None:
                return f"{side}: {len(planned)} planned, {len(performed)} sent"
            return f"{side} {at}: {planned[at]} planned, {performed[at]} sent"
    return ""
