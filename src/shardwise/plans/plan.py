"""The plan: what every rank will do, as data that a person can read, compare, edit and commit.

What decides is the mesh, the layout in which every parameter, buffer and input is kept, and the strategy of every operator, keyed by
module path. The conversions follow from these; they are listed with their collectives so that they can be read and counted, and
are derived again whenever the plan is used.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from shardwise.errors import PlanError, ShardwiseError, problem
from shardwise.layouts.layout import Layout
from shardwise.layouts.mesh import Mesh
from shardwise.layouts.strategy import parse_choices
from shardwise.layouts.text import parse_layout

FORMAT = "shardwise-plan"
VERSION = 1


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A parameter, buffer or input: ``dtype`` and global ``shape``, and its layout as text."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    layout: str


@dataclass(frozen=True, slots=True)
class OperatorEntry:
    """An operator: its target, its rule (for reading), its strategy, and the line of the model it stands on (for reading)."""

    name: str
    target: str
    rule: str
    strategy: str
    source: str


@dataclass(frozen=True, slots=True)
class CollectiveEntry:
    """``num_bytes``: the whole message on the busiest rank (the gathered tensor of an all_gather, the input of the others)."""

    kind: str
    axes: str
    num_bytes: int

    def __str__(self) -> str:
        return f"{self.kind}({self.axes.strip('()')}, {format_bytes(self.num_bytes)})"


@dataclass(frozen=True, slots=True)
class ConversionEntry:
    """A value on its way from one layout to another, first needed by ``op`` (empty: delivered to the user). ``backward`` is in the
    order of execution."""

    value: str
    op: str
    source: str
    target: str
    forward: tuple[CollectiveEntry, ...]
    backward: tuple[CollectiveEntry, ...]


@dataclass(frozen=True)
class Plan:
    """A complete plan. Two plans are equal when all their entries are."""

    mesh: Mesh
    mode: str
    search: str
    optimizer: str
    inputs: tuple[TensorEntry, ...]
    parameters: tuple[TensorEntry, ...]
    buffers: tuple[TensorEntry, ...]
    operators: tuple[OperatorEntry, ...]
    conversions: tuple[ConversionEntry, ...]

    @cached_property
    def digest(self) -> str:
        """SHA-256 over everything in the plan."""
        return _digest(self._body())

    @cached_property
    def strategies(self) -> dict[str, str]:
        return {entry.name: entry.strategy for entry in self.operators}

    @cached_property
    def layouts(self) -> dict[str, Layout]:
        """Parameter, buffer or input name -> its layout."""
        entries = (*self.inputs, *self.parameters, *self.buffers)
        return {entry.name: parse_layout(entry.layout, self.mesh) for entry in entries}

    def collectives(self, *, backward: bool = False) -> Iterator[CollectiveEntry]:
        """All collectives of a forward pass in order (or those of a backward pass, newest conversion first)."""
        for entry in reversed(self.conversions) if backward else self.conversions:
            yield from entry.backward if backward else entry.forward

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        body = self._body()
        text = json.dumps({"format": FORMAT, "version": VERSION, "digest": _digest(body), **body}, indent=1)
        Path(path).write_text(text + "\n", encoding="utf-8")

    def to_json(self) -> str:
        body = self._body()
        return json.dumps({"format": FORMAT, "version": VERSION, "digest": _digest(body), **body})

    @staticmethod
    def load(path: str | Path, *, edited: bool = False) -> Plan:
        """Read a plan. ``edited``: accept that the file was changed by hand since it was saved (strategies and layouts are
        then checked when the plan meets its model; the listed conversions are dropped and derived anew).

        Raises PlanError for what is not a plan of this version, is damaged, or does not fit together.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(f"cannot read the plan {path}: {error}") from error
        return Plan.from_json(text, name=str(path), edited=edited)

    @staticmethod
    def from_json(text: str, *, name: str = "plan", edited: bool = False) -> Plan:
        """The inverse of ``to_json``; see ``load``."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise PlanError(
                problem(
                    f"{name} is not JSON: {error.msg} at line {error.lineno} column {error.colno} of {len(text)} characters",
                    fix="the file may be truncated: save the plan again",
                )
            ) from error
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise PlanError(f'{name} is not a shardwise plan: "format" is not "{FORMAT}"')
        if data.get("version") != VERSION:
            raise PlanError(
                problem(
                    f"{name} has plan version {data.get('version')!r}; this shardwise reads version {VERSION}",
                    fix="make the plan again with sw.plan",
                )
            )
        body = {key: value for key, value in data.items() if key not in ("format", "version", "digest")}
        if not edited and data.get("digest") != _digest(body):
            raise PlanError(
                problem(
                    f"{name} was changed after it was saved: its content has digest {_digest(body)[:12]}, it says "
                    f"{str(data.get('digest'))[:12]}",
                    fix="if you edited it on purpose, load it with Plan.load(path, edited=True); otherwise save it again",
                )
            )
        try:
            plan = _from_body(body)
        except (KeyError, TypeError, AttributeError) as error:
            raise PlanError(f"{name}: an entry is missing or has the wrong form ({type(error).__name__}: {error})") from error
        plan.check(name)
        return replace(plan, conversions=()) if edited else plan

    def check(self, name: str = "plan") -> None:
        """Raise PlanError listing every layout and strategy text that does not fit the mesh or the tensor."""
        faults: list[str] = []
        for kind, entries in (("input", self.inputs), ("parameter", self.parameters), ("buffer", self.buffers)):
            for entry in entries:
                try:
                    layout = parse_layout(entry.layout, self.mesh)
                    if layout.shape != entry.shape:
                        faults.append(f"{kind} {entry.name}: layout {entry.layout} is not of shape {list(entry.shape)}")
                    if kind != "input" and any(state != "I" for _, state in layout.states):
                        faults.append(f"{kind} {entry.name}: {entry.layout} is neither sharded nor invariant")
                except ShardwiseError as error:
                    faults.append(f"{kind} {entry.name}: {error}")
        for operator in self.operators:
            try:
                parse_choices(operator.strategy, self.mesh)
            except ShardwiseError as error:
                faults.append(f"operator {operator.name}: {error}")
        if faults:
            raise PlanError("\n".join([f"{name} does not fit together:", *(f"  {fault}" for fault in faults)]))

    def _body(self) -> dict[str, Any]:
        return {
            "mesh": dict(self.mesh.axes),
            "mode": self.mode,
            "search": self.search,
            "optimizer": self.optimizer,
            "inputs": _table(self.inputs),
            "parameters": _table(self.parameters),
            "buffers": _table(self.buffers),
            "operators": _table(self.operators),
            "conversions": [asdict(entry) for entry in self.conversions],
        }

    def __str__(self) -> str:
        from shardwise.plans.printing import format_plan

        return format_plan(self)


def _table(entries: tuple[Any, ...]) -> dict[str, Any]:
    """Entries keyed by name."""
    return {entry.name: {key: value for key, value in asdict(entry).items() if key != "name"} for entry in entries}


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _from_body(body: dict[str, Any]) -> Plan:
    def tensors(key: str) -> tuple[TensorEntry, ...]:
        return tuple(
            TensorEntry(name, str(entry["dtype"]), tuple(map(int, entry["shape"])), str(entry["layout"]))
            for name, entry in body[key].items()
        )

    def collectives(entries: list[dict[str, Any]]) -> tuple[CollectiveEntry, ...]:
        return tuple(CollectiveEntry(**entry) for entry in entries)

    return Plan(
        mesh=Mesh(body["mesh"]),
        mode=str(body["mode"]),
        search=str(body["search"]),
        optimizer=str(body["optimizer"]),
        inputs=tensors("inputs"),
        parameters=tensors("parameters"),
        buffers=tensors("buffers"),
        operators=tuple(OperatorEntry(name=name, **entry) for name, entry in body["operators"].items()),
        conversions=tuple(
            ConversionEntry(
                **{**entry, "forward": collectives(entry["forward"]), "backward": collectives(entry["backward"])}
            )
            for entry in body["conversions"]
        ),
    )


def format_bytes(count: float) -> str:
    """``65536`` -> ``64 KiB``; three significant digits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.3g} {unit}" if count % 1 else f"{int(count)} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"
