"""A plan as one would explain it: operators with their strategies, conversions with their collectives; equal layers once."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwise.plans.plan import CollectiveEntry, ConversionEntry, Plan


def format_plan(plan: Plan) -> str:
    """The printed form. Operators of layers that differ in their number only are shown for the first of them, with the count."""
    lines = [
        f"plan for {plan.mesh}, {plan.mesh.num_devices} devices; mode {plan.mode}, search {plan.search}, optimizer {plan.optimizer}",
        f"  {len(plan.operators)} operators, {len(plan.conversions)} conversions; per step and device:",
        f"    forward   {_totals(tuple(plan.collectives()))}",
        f"    backward  {_totals(tuple(plan.collectives(backward=True)))}",
    ]
    for title, entries in (("inputs", plan.inputs), ("parameters", plan.parameters), ("buffers", plan.buffers)):
        if entries:
            lines.append(f"{title}:")
            lines += _grouped([(entry.name, entry.layout) for entry in entries])
    lines.append("operators:")
    by_op: dict[str, list[ConversionEntry]] = {}
    for conversion in plan.conversions:
        by_op.setdefault(conversion.op, []).append(conversion)
    names = {operator.name for operator in plan.operators}
    blocks = []
    for operator in plan.operators:
        inner = [c for op, found in by_op.items() for c in found if op == operator.name or _owner(op, names) == operator.name]
        text = "\n".join([f"{operator.rule}   {operator.strategy or 'whole'}", *map(_conversion, inner)])
        blocks.append((operator.name, text))
    lines += _grouped(blocks)
    if by_op.get(""):
        lines.append("delivered:")
        lines += [f"  {_conversion(conversion).strip()}" for conversion in by_op[""]]
    return "\n".join(lines)


def _owner(op: str, names: set[str]) -> str:
    """The operator of the plan that a lowered operator belongs to: ``loss/cross_entropy.sum`` -> ``loss/cross_entropy``."""
    while op and op not in names:
        op = op.rpartition(".")[0]
    return op


def _conversion(entry: ConversionEntry) -> str:
    def side(found: Sequence[CollectiveEntry]) -> str:
        return " ".join(map(str, found)) or "none"

    if not entry.forward and not entry.backward:
        return f"    {entry.source} -> {entry.target}    no communication"
    return f"    {entry.source} -> {entry.target}    {side(entry.forward)} / {side(entry.backward)}"


def _totals(collectives: Sequence[CollectiveEntry]) -> str:
    from shardwise.plans.plan import format_bytes

    if not collectives:
        return "no communication"
    count: Counter[tuple[str, str]] = Counter()
    size: Counter[tuple[str, str]] = Counter()
    for entry in collectives:
        count[entry.kind, entry.axes] += 1
        size[entry.kind, entry.axes] += entry.num_bytes
    return ", ".join(f"{n} {kind}({axes.strip('()')}) {format_bytes(size[kind, axes])}" for (kind, axes), n in count.items())


def _grouped(entries: list[tuple[str, str]]) -> list[str]:
    """One block per (name without numbers, text), with the number of repetitions."""
    first: dict[tuple[str, str], str] = {}
    count: Counter[tuple[str, str]] = Counter()
    for name, text in entries:
        key = (re.sub(r"\d+", "*", name), re.sub(r"\b(\w*[A-Za-z_./]\w*\.)\d+", r"\1*", text))
        first.setdefault(key, name)
        count[key] += 1
    texts = {key: text for name, text in entries for key in first if first[key] == name}
    lines = []
    for key, name in first.items():
        head, *rest = texts[key].split("\n")
        times = f"  ({count[key]} x)" if count[key] > 1 else ""
        lines.append(f"  {name}{times}   {head}")
        lines += rest
    return lines
