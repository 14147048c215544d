"""Entries of a rank's local program while its step is written, and their order in backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.programs.buckets import Bucket
from shardwise.programs.program import LocalOp
from shardwise.programs.spmd import backward_order, conversions_of
from shardwise.programs.spmd_steps import Conversion, OpStep
from shardwise.programs.vjp import BackwardTrace, Call, ForwardTrace


@dataclass(eq=False)
class LocalCall:
    """An operator's call. ``names``, ``results``: its operands and results in the Spmd program."""

    local: LocalOp
    call: Call
    names: tuple[str, ...]
    kind: ForwardTrace
    results: tuple[str, ...]
    backward: BackwardTrace | None = None


@dataclass(eq=False)
class ConversionGroup:
    """Conversions that share messages, or a single conversion."""

    conversions: tuple[Conversion, ...]
    of_parameters: bool


def in_backward_order(
    entries: Sequence[LocalCall | ConversionGroup], steps: Sequence[OpStep | Conversion | Bucket]
) -> list[LocalCall | ConversionGroup]:
    """Return the entries in the order that ``spmd.backward_order`` gives to their steps. It depends only on the program
    that all ranks share, not on this rank."""
    by_result: dict[str, LocalCall | ConversionGroup] = {}
    for entry in entries:
        results = entry.results if isinstance(entry, LocalCall) else [c.result for c in entry.conversions]
        by_result.update(dict.fromkeys(results, entry))
    ordered: dict[int, LocalCall | ConversionGroup] = {}
    for step in backward_order(steps):
        for result in step.placed.op.results if isinstance(step, OpStep) else [c.result for c in conversions_of(step)]:
            if result in by_result:
                ordered.setdefault(id(by_result[result]), by_result[result])
    return list(ordered.values())
