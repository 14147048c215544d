"""The result of ``sw.check``, as text and as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardwise.foreign.first_error import FirstError, RankError
from shardwise.foreign.tools import ForeignPlan
from shardwise.foreign.work_counter import SentMessages
from shardwise.plans.plan import Plan
from shardwise.plans.quantities import format_bytes, format_seconds
from shardwise.proof.errors_by_tensor import TensorError

_MOST = 3


@dataclass(frozen=True)
class StepComparison:
    """A step of rank 0 under the other tool's plan, without overlap of messages, and the plan that ``sw.plan`` finds.

    Args:
        cluster: Name of the cluster.
        compute: Seconds of forward, backward and the update, every kernel by the same roofline.
        messages: The messages of the step.
        held_bytes: Bytes of parameters on the rank.
        own: The plan of ``sw.plan``, or None if it finds none.
        refused: Why it finds none.
    """

    cluster: str
    compute: float
    messages: SentMessages
    held_bytes: int
    own: Plan | None
    refused: str = ""

    @property
    def seconds(self) -> float:
        return self.compute + self.messages.seconds

    def lines(self) -> list[str]:
        sent = self.messages
        unpriced = f" and {', '.join(sent.unpriced)}, which have no price" if sent.unpriced else ""
        lines = [
            f"a step on {self.cluster}: {format_seconds(self.seconds)}: kernels {format_seconds(self.compute)}, "
            f"{sent.count} messages {format_bytes(sent.num_bytes)} {format_seconds(sent.seconds)}{unpriced}; "
            f"a rank holds {format_bytes(self.held_bytes)} of parameters"
        ]
        if self.own is None:
            return [*lines, f"sw.plan finds no plan to compare: {self.refused}"]
        predicted = self.own.predicted
        if predicted is not None:
            seconds = predicted.planned_seconds
            lines.append(f"under the plan of sw.plan, {self.own.mesh}: {format_seconds(seconds)}, by the same prices")
        return lines


@dataclass(frozen=True)
class Checked:
    """The result of ``sw.check``; print it for a summary.

    Args:
        plan: The plan, recognised.
        differences: The worst error of every compared tensor, worst first.
        tolerance: The largest relative error that counts as equal.
        first_wrong: The first call at which the plan goes wrong.
        failure: The error of a rank and its line, if the plan cannot be run.
        layouts: Layouts of outputs and gradients that ranks hold in parts, which is no fault.
        notes: Further remarks.
        beside: Prices under this plan and under that of ``sw.plan``.
    """

    plan: ForeignPlan
    differences: tuple[TensorError, ...] = ()
    tolerance: float = 0.0
    first_wrong: FirstError | None = None
    failure: RankError | None = None
    layouts: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    beside: StepComparison | None = None

    @property
    def max_error(self) -> float:
        return self.differences[0].error if self.differences else 0.0

    @property
    def ok(self) -> bool:
        return self.failure is None and bool(self.differences) and self.max_error <= self.tolerance

    @property
    def verdict(self) -> str:
        """Return ``"equal"``, ``"wrong"``, or ``"not run"`` after an error that proves nothing about the plan."""
        if self.failure is not None:
            return "wrong" if self.failure.refutes else "not run"
        return "equal" if self.ok else "wrong"

    def __str__(self) -> str:
        head = f"{self.plan.kind} on {self.plan.mesh}"
        if self.failure is not None:
            word = {"wrong": "WRONG", "not run": "NOT RUN"}[self.verdict]
            lines = [f"{word}: {head} stops: {self.failure}"]
        else:
            lines = [
                f"{'equal' if self.ok else 'WRONG'}: {head}: worst relative error {self.max_error:.2g} over "
                f"{len(self.differences)} tensors (tolerance {self.tolerance:g})"
            ]
        wrong = [d for d in self.differences if not d.error <= self.tolerance]
        lines += [f"  {d.kind} {d.name}: {d.error:.2g} on rank {d.rank}" for d in wrong[:_MOST]]
        lines += [f"  and {len(wrong) - _MOST} more"] if len(wrong) > _MOST else []
        lines += [f"  {line}" for line in self.first_wrong.lines()] if self.first_wrong else []
        lines += [f"  delivered in parts: {text}" for text in self.layouts[:_MOST]]
        lines += [f"  rules that name nothing: {', '.join(self.plan.unused)}"] if self.plan.unused else []
        lines += [f"  {note}" for note in self.notes]
        lines += [f"  {line}" for line in self.beside.lines()] if self.beside else []
        return "\n".join(lines)

    def as_data(self) -> dict[str, Any]:
        """Return the data that ``--json`` prints."""
        first, beside = self.first_wrong, self.beside
        predicted = None if beside is None or beside.own is None else beside.own.predicted
        return {
            "verdict": self.verdict,
            "ok": self.ok,
            "plan": self.plan.kind,
            "mesh": dict(self.plan.mesh.axes),
            "max_error": self.max_error,
            "tolerance": self.tolerance,
            "num_tensors": len(self.differences),
            "failure": None if self.failure is None else str(self.failure),
            "first_wrong": None if first is None else first.as_data(),
            "unused_rules": list(self.plan.unused),
            "notes": list(self.notes),
            "step_seconds": None if beside is None else beside.seconds,
            "own_step_seconds": None if predicted is None else predicted.planned_seconds,
        }
