"""The operators of a plan as a tree of modules, equal layers merged: types, conversions, seconds, alternatives."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from markupsafe import Markup, escape

from shardwise.layouts.mesh import Mesh
from shardwise.plans.entries import Stage
from shardwise.plans.printing import merged_operators, owner_of
from shardwise.plans.quantities import format_bytes, format_seconds
from shardwise.report.explain import Explanation
from shardwise.report.stage_passes import StagePass

_AXES = re.compile(r"@(\([\w.,]+\)|[\w.]+)|(replicated|partial)\(([^)]*)\)")


@dataclass
class Row:
    """A row of equal operators. ``types``: those of the results; ``reads``: the operators whose results the first one
    reads; ``seconds``: the sum over a pass; ``why``: the alternatives, or the reason that there are none;
    ``messages``: the conversions that send something, as (row or tensor, communication, bytes, axes); ``members``: the
    operators."""

    name: str
    strategy: str
    rule: str
    conversions: tuple[str, ...]
    count: int
    types: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    seconds: float | None = None
    source: str = ""
    why: Mapping[str, Any] | None = None
    messages: tuple[tuple[str, str, int, list[str]], ...] = ()
    members: tuple[str, ...] = ()

    @property
    def time(self) -> str:
        return "" if self.seconds is None else format_seconds(self.seconds)


@dataclass
class Module:
    """A module of the model: its submodules, and the operators that it calls itself."""

    name: str
    modules: dict[str, Module] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    @property
    def count(self) -> int:
        return sum(row.count for row in self.rows) + sum(module.count for module in self.modules.values())

    @property
    def seconds(self) -> float | None:
        parts = [row.seconds for row in self.rows] + [module.seconds for module in self.modules.values()]
        priced = [seconds for seconds in parts if seconds is not None]
        return sum(priced) if priced else None

    @property
    def time(self) -> str:
        return "" if self.seconds is None else format_seconds(self.seconds)


def rows_of(stage: Stage, seconds: Mapping[str, float] | None, known: StagePass | None) -> tuple[list[Row], list[str]]:
    """Return the rows of a stage's operators, and the conversions of its outputs. ``known``: a pass of the stage."""
    merged, delivered = merged_operators(stage, buckets=False)
    sources = {entry.name: entry.source for entry in stage.operators}
    home = {member: row[0] for row, members in merged for member in members}
    names, messages = set(home), dict[str, list[tuple[str, str, int, list[str]]]]()
    for entry in stage.conversions or ():
        if sent := (*entry.forward, *entry.backward):
            text = f"{entry.source} -> {entry.target}    {entry.communication}"
            axes = axes_in(" ".join(f"@{collective.axes}" for collective in sent))
            size = sum(collective.num_bytes for collective in sent)
            messages.setdefault(owner_of(entry.op, names), []).append(
                (home.get(entry.value, entry.value), text, size, axes)
            )
    rows = []
    for (name, strategy, rule, *conversions), members in merged:
        first = members[0]
        reads = () if known is None else known.reads(first)
        seconds_of_row = None if seconds is None else sum(seconds.get(member, 0.0) for member in members)
        rows.append(
            Row(
                name,
                strategy,
                rule,
                tuple(line.strip() for line in conversions),
                len(members),
                () if known is None else known.types(first),
                tuple(dict.fromkeys(home[read] for read in reads if read in home)),
                seconds_of_row,
                sources.get(first, ""),
                None if known is None else known.why(first),
                tuple(messages.get(first, ())),
                tuple(members),
            )
        )
    return rows, [line.strip() for line in delivered]


def tree_of(rows: Iterable[Row]) -> Module:
    """Return the tree of modules that contains the rows, by their names."""
    root = Module("the model itself")
    for row in rows:
        at = root
        path = row.name.rpartition("/")[0]
        for part in path.split(".") if path else ():
            at = at.modules.setdefault(part, Module(part))
        at.rows.append(row)
    return root


def alternatives(explanation: Explanation) -> dict[str, Any]:
    """Return an explanation as table rows: the best few alternatives and the chosen one."""
    return {
        "said": explanation.reason,
        "more": len(explanation.alternatives) - len(explanation.shown),
        "rows": [
            (
                alternative.choice,
                alternative.chosen,
                format_seconds(alternative.step_seconds),
                format_seconds(alternative.seconds),
                format_bytes(alternative.num_bytes),
            )
            for alternative in explanation.shown
        ],
    }


def axes_in(text: str) -> list[str]:
    """Return the mesh axes of a strategy or layout that split something."""
    split = (match[1] for match in _AXES.finditer(text) if match[1])
    return list(dict.fromkeys(name for axes in split for name in re.findall(r"[A-Za-z_]\w*", axes)))


def mark_axes(text: str, meshes: Sequence[Mesh]) -> Markup:
    """Return the HTML of a layout, strategy or conversion, with a numbered CSS class for every mesh axis."""
    names = list(dict.fromkeys(name for mesh in meshes for name, _ in mesh.axes))

    def marked(axes: str) -> Markup:
        pieces = re.split(r"([A-Za-z_]\w*(?:\.\d+)?)", axes)
        return Markup("").join(
            Markup('<b class="axis a{}">{}</b>').format(names.index(base) % 6, piece)
            if (base := piece.partition(".")[0]) in names
            else escape(piece)
            for piece in pieces
        )

    markup, end = Markup(""), 0
    for match in _AXES.finditer(text):
        markup += escape(text[end : match.start()])
        if match[1]:
            markup += Markup("@") + marked(match[1])
        else:
            markup += escape(match[2]) + Markup("(") + marked(match[3]) + Markup(")")
        end = match.end()
    return markup + escape(text[end:])
