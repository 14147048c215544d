"""Verifies the precision of a plan: compares its program in its own dtypes with one device that uses the same dtypes.

A comparison in float64 finds wrong sums but no wrong casts. Here everything is stored, computed, gathered and reduced
in the dtypes of real ranks. The dtype of every result and the bytes of every message are compared exactly: a cast that
is missing, doubled or on the wrong side of a message changes one of them. The numbers can only agree to the resolution
of the dtypes, which is measured as in ``rounding``. One device runs a step with every initial number changed by one
unit in the last place. The bound of a tensor is its largest change, times a factor for a plan's additional rounding.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from shardwise.errors import ShardwiseError
from shardwise.layouts.text import format_dtype
from shardwise.plans.plan import Plan
from shardwise.proof.errors_by_tensor import Key, TensorError, Values, is_finite
from shardwise.proof.ranks import DirectionCollectives, VirtualRanks
from shardwise.proof.rounding import disturbed_runs, moved_in_step
from shardwise.proof.runs import OneDevice

RUNS_MARGIN = 4.0  # the worst of five disturbed runs is not the worst of all


@dataclass(frozen=True)
class DtypeReport:
    """The outcome of a comparison in the plan's dtypes. ``judged``: every tensor with its bound, nearest to the bound
    first; ``wrong_dtypes``: results with another dtype than on one device; ``wrong_messages``: the first message that
    differs from the program's list; ``not_run``: why one device could not run the model in these dtypes;
    ``not_finite``: the first loss or gradient of one device that is not finite and so proves nothing."""

    judged: tuple[tuple[TensorError, float], ...] = ()
    wrong_dtypes: tuple[str, ...] = ()
    wrong_messages: str = ""
    not_run: str = ""
    not_finite: str = ""

    @property
    def beyond(self) -> tuple[tuple[TensorError, float], ...]:
        """Return the tensors that differ by more than rounding explains."""
        return tuple((difference, bound) for difference, bound in self.judged if not difference.error <= bound)

    @property
    def ok(self) -> bool:
        return not (self.beyond or self.wrong_dtypes or self.wrong_messages or self.not_finite)

    def lines(self) -> list[str]:
        """Return the lines of the report."""
        if self.not_run:
            return [f"in the plan's precision: not compared, one device cannot run it ({self.not_run})"]
        lines = [f"in the plan's precision: {len(self.judged)} tensors"]
        if self.judged:
            worst, bound = self.judged[0]
            lines[0] += f", nearest to its bound {worst.kind} {worst.name}: {worst.error:.2g} of {bound:.2g}"
        lines += [
            f"  NOT EQUAL: {d.kind} {d.name} differs by {d.error:.2g} on rank {d.rank}" for d, _ in self.beyond[:3]
        ]
        lines += [f"  nothing is proven: {self.not_finite} is not finite on one device"] if self.not_finite else []
        lines += [f"  wrong dtype: {text}" for text in self.wrong_dtypes[:3]]
        return lines + ([f"  wrong messages: {self.wrong_messages}"] if self.wrong_messages else [])


def in_dtypes(ranks: VirtualRanks, steps: int) -> DtypeReport:
    """Compare ``steps`` steps, each from the state of one device. ``ranks``: in the dtypes of the plan's precision.

    One device runs the whole batch at once. A sum over devices or micro-batches is rounded once for each of them, but
    once on one device. An accumulated loss loses up to half a unit per micro-batch, which disturbed runs may not show.
    """
    start, passes = ranks.start, len(ranks.passes.sizes)
    original, before = OneDevice(start), OneDevice(start)
    dtypes = {value.dtype for value in start.captured.graph.values if value.dtype.is_floating_point}
    unit = max((torch.finfo(dtype).eps for dtype in dtypes), default=torch.finfo(torch.float64).eps)  # of the coarsest
    disturbed = disturbed_runs(start, unit)
    margin = RUNS_MARGIN + len(ranks.ranks) + (passes if passes > 1 else 0)
    judged: dict[Key, tuple[TensorError, float]] = {}
    wrong: dict[str, None] = {}
    messages = not_finite = ""
    for step in range(steps):
        before.adopt(original)
        ranks.adopt(original)
        try:
            expected = original.step(step)
        except (RuntimeError, ShardwiseError) as error:  # torch lacks kernels, such as a batch norm of mixed dtypes
            if isinstance(error, ShardwiseError) and not isinstance(error.__cause__, RuntimeError):
                raise
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
                continue  # its gradient is judged instead: optimizers work element by element
            floor = max(1.0, (passes + 1) / 2) if key[0] == "loss" else 1.0
            exact = not expected[key].dtype.is_floating_point
            # A sum close to the middle between two numbers is rounded to either.
            own = 0.0 if exact else torch.finfo(expected[key].dtype).eps
            bound = max(floor * unit, own, margin * moved.get(key, 0.0))
            if key not in judged or _share(difference, bound) > _share(*judged[key]):
                judged[key] = difference, bound
    ordered = sorted(judged.values(), key=lambda pair: -_share(*pair))
    return DtypeReport(tuple(ordered), tuple(wrong), messages, not_finite=not_finite)


def stored_module(module: torch.nn.Module, plan: Plan) -> torch.nn.Module:
    """Return a copy with parameters in the dtype in which the plan stores them. ``module``: on the CPU, with values."""
    twin = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.data = parameter.data.to(plan.precision.stored(parameter.dtype))
    return twin


def _share(difference: TensorError, bound: float) -> float:
    return difference.error / bound if difference.error == difference.error else float("inf")


def _wrong_dtypes(expected: Values, actual: Mapping[Key, torch.Tensor], rank: int) -> list[str]:
    return [
        f"{kind} {name} is {format_dtype(actual[kind, name].dtype)} on rank {rank}, {format_dtype(tensor.dtype)} alone"
        for (kind, name), tensor in expected.items()
        if (kind, name) in actual and actual[kind, name].dtype != tensor.dtype
    ]


def _wrong_messages(sides: Sequence[DirectionCollectives]) -> str:
    """Describe the first message whose kind, axes or bytes differ from the program's list; empty if there is none."""
    for side in sides:
        if side.planned != side.performed:
            pairs = zip(side.planned, side.performed, strict=False)
            at = next((i for i, pair in enumerate(pairs) if pair[0] != pair[1]), None)
            if at is None:
                return f"{side.name}: {len(side.planned)} planned, {len(side.performed)} sent"
            return f"{side.name} {at}: {side.planned[at]} planned, {side.performed[at]} sent"
    return ""
