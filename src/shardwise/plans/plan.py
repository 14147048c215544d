"""The plan: what every rank will do, as data that a person can read, compare, edit and commit.

What decides is the mesh, the layout in which every parameter, buffer and input is kept, and the strategy of every
operator, keyed by module path. The conversions follow from these; they are listed with their collectives so that they
can be read and counted, and are derived again whenever the plan is used. To edit a plan, change strategies or layouts
in its file and load it with ``Plan.load(path, edited=True)``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from shardwise.errors import PlanError, ShardwiseError, problem
from shardwise.layouts.layout import Layout
from shardwise.layouts.mesh import Mesh
from shardwise.layouts.strategy import parse_choices, parse_cuts
from shardwise.layouts.text import parse_layout
from shardwise.plans.alternatives import Ranking, WhatIf, top, what_if
from shardwise.plans.cost_graph_file import write_cost_graph
from shardwise.plans.difference import Difference, difference
from shardwise.plans.explain import Explanation, explain
from shardwise.plans.printing import format_bytes, format_plan
from shardwise.search.auto import PassedOver, Prediction, Search

FORMAT = "shardwise-plan"
VERSION = 4


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A parameter, buffer or input: ``dtype`` and global ``shape``, and its layout as text."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    layout: str


@dataclass(frozen=True, slots=True)
class OperatorEntry:
    """An operator: its target, its strategy, and for reading its rule and the line of the model it stands on."""

    name: str
    target: str
    rule: str
    strategy: str
    source: str


@dataclass(frozen=True, slots=True)
class CollectiveEntry:
    """``num_bytes``: the whole message on the busiest rank (the gathered tensor of an all_gather, the input of the
    others)."""

    kind: str
    axes: str
    num_bytes: int

    def __str__(self) -> str:
        return f"{self.kind}({self.axes.strip('()')}, {format_bytes(self.num_bytes)})"


@dataclass(frozen=True, slots=True)
class ConversionEntry:
    """A value on its way from one layout to another, first needed by ``op`` (empty: delivered to the user).

    ``value``: the parameter, buffer or input, or the operator that computes it. ``backward`` is in the order of
    execution. Conversions of the same ``bucket`` (other than 0) stand side by side and share their messages.
    """

    value: str
    op: str
    source: str
    target: str
    forward: tuple[CollectiveEntry, ...]
    backward: tuple[CollectiveEntry, ...]
    bucket: int


@dataclass(frozen=True, slots=True)
class SharedEntry:
    """A value that all its consumers convert from one layout. ``name``: as in ``ConversionEntry.value``."""

    name: str
    layout: str


@dataclass(frozen=True, slots=True)
class PricingEntry:
    """What the plan was priced with, which decides the moves between layouts: the cluster as TOML, dtypes of
    ``Precision`` (empty: the model's), and the mesh axes whose parts are treated differently."""

    cluster: str
    compute: str
    parameter: str
    reduce: str
    separate: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """A complete plan. Two plans are equal when all their entries are, and then their digests are equal too.

    ``training``: whether the module was in training mode. ``bucket_bytes``: the largest message that several parameters
    share. ``operators`` are in execution order. ``shared``, ``pricing`` and ``prediction`` are those of
    a plan that was chosen by price. ``found``: the search that chose it, which ``explain`` and its like ask; it is not
    part of the plan's file, nor of comparisons.
    """

    mesh: Mesh
    mode: str
    search: str
    optimizer: str
    training: bool
    bucket_bytes: int
    inputs: tuple[TensorEntry, ...]
    parameters: tuple[TensorEntry, ...]
    buffers: tuple[TensorEntry, ...]
    operators: tuple[OperatorEntry, ...]
    conversions: tuple[ConversionEntry, ...]
    shared: tuple[SharedEntry, ...] = ()
    pricing: PricingEntry | None = None
    prediction: Prediction | None = None
    found: Search | None = field(default=None, compare=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {own.name: getattr(self, own.name) for own in fields(self) if own.name != "found"} | {"found": None}

    @property
    def optimality_gap(self) -> float | None:
        """By which share the predicted step of this plan is longer, at most, than the shortest predicted of any plan
        of the searched space; 0: proven to be the shortest; None: nothing was searched. It says nothing about simulated
        steps: where a simulation preferred this plan to the one of the shortest predicted step
        (``prediction.passed_over``), the gap shows by how much the two predictions differ."""
        return None if self.prediction is None else self.prediction.optimality_gap

    @cached_property
    def digest(self) -> str:
        """SHA-256 over everything in the plan."""
        return _digest(self._body())

    @cached_property
    def model(self) -> str:
        """A fingerprint of the model that the plan is for: its parameters, buffers and operators, however they are
        split."""
        tensors = [(e.name, e.dtype, e.shape) for e in (*self.parameters, *self.buffers)]
        return _digest({"tensors": tensors, "operators": [(e.name, e.target) for e in self.operators]})[:12]

    @cached_property
    def strategies(self) -> dict[str, str]:
        return {entry.name: entry.strategy for entry in self.operators}

    @cached_property
    def layouts(self) -> dict[str, Layout]:
        """Parameter, buffer or input name -> its layout."""
        entries = (*self.inputs, *self.parameters, *self.buffers)
        return {entry.name: parse_layout(entry.layout, self.mesh) for entry in entries}

    def collectives(self, *, backward: bool = False) -> Iterator[CollectiveEntry]:
        """All collectives of a forward pass in order (or those of a backward pass, newest conversion first); what
        travels in one bucket is one collective."""
        entries = reversed(self.conversions) if backward else self.conversions
        for _, together in groupby(enumerate(entries), lambda pair: pair[1].bucket or -pair[0] - 1):
            sides = [entry.backward if backward else entry.forward for _, entry in together]
            for same in zip(*sides, strict=True):
                yield replace(same[0], num_bytes=sum(one.num_bytes for one in same))

    def explain(self, name: str) -> Explanation:
        """Why an operator (or the storage of a parameter) is as it is: its alternatives with their prices, term by
        term, and the neighbour that made the choice. Raises PlanError for an unknown name, and for a plan that no
        search of this process chose."""
        return explain(self._search(), name)

    def what_if(self, name: str, choice: str) -> WhatIf:
        """What the best plan would be if an operator had the strategy (or a parameter the layout) ``choice``. Raises
        PlanError as ``explain`` does."""
        return what_if(self._search(), name, choice)

    def top(self, k: int = 5) -> Ranking:
        """The best ``k`` plans of the search, by the same prices. Raises PlanError as ``explain`` does."""
        if k < 1:
            raise PlanError(f"top({k}): at least one plan")
        return top(self._search(), k)

    def cost_graph(self, path: str | Path) -> None:
        """Write what the search minimised, with the chosen entries marked: JSON, or DOT if the path ends in ``.dot``.
        Raises PlanError as ``explain`` does."""
        write_cost_graph(self._search(), path)

    def diff(self, other: Plan) -> Difference:
        """What another plan does differently."""
        return difference(self, other)

    def _search(self) -> Search:
        if self.found is None:
            why = "it was not chosen by price" if self.prediction is None else "a plan file has no search in it"
            raise PlanError(
                problem(
                    f"the plan cannot be explained: {why}",
                    fix='plan again with sw.plan(..., search="dynamic_programming")',
                )
            )
        return self.found

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        Path(path).write_text(json.dumps(self._file(), indent=1) + "\n", encoding="utf-8")

    def to_json(self) -> str:
        """The content of the file that ``save`` writes, on one line."""
        return json.dumps(self._file())

    @staticmethod
    def load(path: str | Path, *, edited: bool = False) -> Plan:
        """Read a plan. ``edited``: accept that the file was changed by hand since it was saved (strategies and layouts
        are then checked when the plan meets its model; the listed conversions are dropped and derived anew).

        Raises PlanError for what is not a plan of this version, is damaged, or does not fit together.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(f"cannot read the plan {path}: {error}") from error
        return Plan.from_json(text, name=str(path), edited=edited)

    @staticmethod
    def from_json(text: str, *, name: str = "plan", edited: bool = False) -> Plan:
        """The inverse of ``to_json``; see ``load``. ``name``: what messages call it."""
        body = _checked_body(text, name, edited)
        try:
            plan = _from_body(body)
        except ShardwiseError as error:
            raise PlanError(f"{name}: {error}") from error
        plan.check(name)
        return replace(plan, conversions=()) if edited else plan

    def check(self, name: str = "plan") -> None:
        """Raise PlanError listing every layout and strategy text that does not fit the mesh or the tensor."""
        faults: list[str] = []
        for kind, entries in (("input", self.inputs), ("parameter", self.parameters), ("buffer", self.buffers)):
            for entry in entries:
                fault = _layout_fault(entry, kind, self.mesh)
                if fault:
                    faults.append(problem(fault, op=f"{kind} {entry.name}"))
        for shared in self.shared:
            try:
                parse_layout(shared.layout, self.mesh)
            except ShardwiseError as error:
                faults.append(problem(f"layout {shared.layout!r}: {error}", op=f"shared {shared.name}"))
        for operator in self.operators:
            try:
                parse_choices(operator.strategy, self.mesh)
                parse_cuts(operator.strategy)
            except ShardwiseError as error:
                faults.append(
                    problem(str(error), op=operator.name, source=operator.source, fix=f"the rule is {operator.rule}")
                )
        if faults:
            raise PlanError("\n".join([f"{name} does not fit together:", *faults]))

    def _file(self) -> dict[str, Any]:
        body = self._body()
        return {"format": FORMAT, "version": VERSION, "digest": _digest(body), **body}

    def _body(self) -> dict[str, Any]:
        return {
            "mesh": dict(self.mesh.axes),
            "mode": self.mode,
            "search": self.search,
            "optimizer": self.optimizer,
            "training": self.training,
            "bucket_bytes": self.bucket_bytes,
            "inputs": _table(self.inputs),
            "parameters": _table(self.parameters),
            "buffers": _table(self.buffers),
            "operators": _table(self.operators),
            "conversions": [asdict(entry) for entry in self.conversions],
            "shared": _table(self.shared),
            "pricing": None if self.pricing is None else {**asdict(self.pricing), "separate": [*self.pricing.separate]},
            "prediction": None if self.prediction is None else asdict(self.prediction),
        }

    def __str__(self) -> str:
        return format_plan(self)


def _table(entries: tuple[Any, ...]) -> dict[str, Any]:
    """Entries keyed by name."""
    return {entry.name: {key: value for key, value in asdict(entry).items() if key != "name"} for entry in entries}


def _layout_fault(entry: TensorEntry, kind: str, mesh: Mesh) -> str:
    """What is wrong with the layout of a source, or nothing."""
    try:
        layout = parse_layout(entry.layout, mesh)
    except ShardwiseError as error:
        return f"layout {entry.layout!r}: {error}"
    if layout.shape != entry.shape:
        return f"layout {entry.layout} has shape {list(layout.shape)}, the tensor {list(entry.shape)}"
    if any(kind == "input" or not cut.tile(layout.dims[cut.dim][cut.atom].size) for cut in layout.windows):
        whose = "inputs are split evenly" if kind == "input" else "the parts of a tensor follow one another"
        return f"{entry.layout}: {whose}, and every row is on one device"
    if any(state != "I" for _, state in layout.states):
        return f"{entry.layout}: {kind}s are sharded or whole (invariant), never replicated or partial"
    return ""


def _digest(body: Any) -> str:
    """Over the entries in their order: that of mesh axes and of operators matters."""
    return hashlib.sha256(json.dumps(body).encode()).hexdigest()


def _checked_body(text: str, name: str, edited: bool) -> dict[str, Any]:
    """The content of a plan file without its head. Raises PlanError unless it is a plan of this version, unchanged
    since it was saved (``edited``: or changed on purpose)."""
    try:
        data = json.loads(text)
    except ValueError as error:
        where = f"{error}; the file has {len(text)} characters"
        raise PlanError(
            problem(f"{name} is not JSON: {where}", fix="the file may be truncated: save the plan again")
        ) from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise PlanError(f'{name} is not a shardwise plan: it has no "format": "{FORMAT}"')
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
    return body


def _from_body(body: dict[str, Any]) -> Plan:
    """Raises PlanError naming the entry that is missing or has the wrong form."""

    def collectives(entries: list[Any], where: str) -> tuple[CollectiveEntry, ...]:
        return tuple(_entry(CollectiveEntry, item, f"{where}[{i}]") for i, item in enumerate(entries))

    def conversion(entry: Any, where: str) -> ConversionEntry:
        found: ConversionEntry = _entry(ConversionEntry, entry, where)
        return replace(
            found,
            forward=collectives(list(found.forward), f"{where}.forward"),
            backward=collectives(list(found.backward), f"{where}.backward"),
        )

    def table(kind: Any, key: str) -> tuple[Any, ...]:
        entries = _field(body, key, dict, key)
        return tuple(_entry(kind, entry, f"{key}[{name!r}]", name=name) for name, entry in entries.items())

    unknown = body.keys() - {own.name for own in fields(Plan) if own.name != "found"}
    if unknown:
        raise PlanError(f"unknown entry {', '.join(sorted(unknown))}")
    listed = _field(body, "conversions", list, "conversions")
    return Plan(
        mesh=Mesh(_field(body, "mesh", dict, "mesh")),
        mode=_field(body, "mode", str, "mode"),
        search=_field(body, "search", str, "search"),
        optimizer=_field(body, "optimizer", str, "optimizer"),
        training=_field(body, "training", bool, "training"),
        bucket_bytes=_field(body, "bucket_bytes", int, "bucket_bytes"),
        inputs=table(TensorEntry, "inputs"),
        parameters=table(TensorEntry, "parameters"),
        buffers=table(TensorEntry, "buffers"),
        operators=table(OperatorEntry, "operators"),
        conversions=tuple(conversion(entry, f"conversions[{i}]") for i, entry in enumerate(listed)),
        shared=table(SharedEntry, "shared"),
        pricing=_optional(PricingEntry, body.get("pricing"), "pricing"),
        prediction=_prediction(body.get("prediction")),
    )


def _prediction(data: Any) -> Any:
    """The prediction of a searched plan, which may have another plan's inside."""
    if not isinstance(data, dict):
        return _optional(Prediction, data, "prediction")
    other = _optional(PassedOver, data.get("passed_over"), "prediction.passed_over")
    rest = {key: own for key, own in data.items() if key != "passed_over"}
    return _entry(Prediction, rest, "prediction", passed_over=other)


def _optional(kind: Any, data: Any, where: str) -> Any:
    """An entry that may be absent."""
    return None if data is None else _entry(kind, data, where)


def _entry(kind: Any, data: Any, where: str, **given: Any) -> Any:
    """An entry of ``kind`` from the object at ``where``: every field there, and of its type."""
    if not isinstance(data, dict):
        raise PlanError(f"{where} is {_shown(data)}, not an object")
    forms = {"str": str, "int": int, "float": float}  # other annotations are tuples, lists in JSON
    own = [entry for entry in fields(kind) if entry.name not in given]
    unknown = data.keys() - {entry.name for entry in own}
    if unknown:
        raise PlanError(f"{where} has an unknown entry {', '.join(sorted(unknown))}")
    values = {f.name: _field(data, f.name, forms.get(str(f.type), list), f"{where}.{f.name}") for f in own}
    shape = values.get("shape")
    if shape is not None:
        if not all(isinstance(size, int) and not isinstance(size, bool) and size >= 0 for size in shape):
            raise PlanError(f"{where}.shape is {_shown(shape)}, not a list of sizes")
        values["shape"] = tuple(shape)
    if "separate" in values:
        values["separate"] = tuple(values["separate"])
    return kind(**given, **values)


def _field(data: dict[str, Any], key: str, form: type, where: str) -> Any:
    """``data[key]``, which must be there and of type ``form``."""
    if key not in data:
        raise PlanError(f"{where} is missing")
    value = data[key]
    if form is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, form) or (isinstance(value, bool) and form is not bool):
        named = {
            str: "a text",
            int: "a whole number",
            float: "a number",
            bool: "true or false",
            list: "a list",
            dict: "an object",
        }[form]
        raise PlanError(f"{where} is {_shown(value)}, not {named}")
    return value


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."
