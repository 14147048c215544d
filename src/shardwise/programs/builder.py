"""Puts operators of a graph behind each other as steps, with conversions of values between them.

Two uses of a value in the same layout share one conversion, placed where it is first needed.

Rows that follow keys (tokens that travel to the devices of their experts, and back) take more than moves.
The devices along an axis first hold slices of the rows. Each sorts the keys of its rows by owner
(``graph.grouped.order_by_owner``), tells every other device how many rows it will get, and sends them in that order;
results return by the same way. These three *ways* (order, counts sent, counts received) are values of the program like
any others. They are made once per vector of keys, for all values whose rows follow it, forward and backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import prod

import torch

from shardwise.graph.grouped import order_by_owner
from shardwise.graph.ir import Graph, Op, Ref, Value
from shardwise.layouts.choice import BY_KEY
from shardwise.layouts.conversions import Move
from shardwise.layouts.layout import Atom, Layout
from shardwise.layouts.mesh import Mesh
from shardwise.layouts.redistribute import redistribute
from shardwise.layouts.strategy import Strategy, apply_strategy
from shardwise.programs.lower import PlacedOp
from shardwise.programs.spmd_steps import Conversion, OpStep
from shardwise.rules.keyed_rows import KeyedRows
from shardwise.rules.rule import Factor, OpRule

# The moves between two layouts of a value.
Route = Callable[[Value, Layout, Layout], tuple[Move, ...]]


@dataclass(frozen=True)
class Choice:
    """The choices that determine a program: a strategy per operator, and per source the layout in which it is stored or
    passed. ``shared``: values that are first converted to one layout, from which all consumers convert them;
    ``delivered``: outputs that are delivered in a given layout, not whole (of a part of a cut graph those that it
    sends); ``route``: the moves between two layouts of a value (default: those that send the fewest bytes)."""

    strategies: Mapping[str, Strategy]
    sources: Mapping[str, Layout]
    shared: Mapping[str, Layout] = field(default_factory=dict)
    delivered: Mapping[str, Layout] = field(default_factory=dict)
    route: Route | None = None


class Builder:
    """Builds the steps of a program, with the layout of every name and the conversions that exist already."""

    def __init__(self, graph: Graph, mesh: Mesh, choice: Choice) -> None:
        self.graph, self.mesh, self.route, self.shared = graph, mesh, choice.route or fewest_bytes, choice.shared
        self.layouts = dict(choice.sources)
        self.steps: list[OpStep | Conversion] = []
        self.keyed = KeyedRowsWriter(self)
        self._shared_as: dict[str, str] = {}  # value -> the name of its shared layout
        self._results: dict[tuple[str, Layout, str], str] = {}
        self._count: Counter[str] = Counter()

    def add(self, placed: PlacedOp) -> None:
        applied = apply_strategy(placed.rule, placed.strategy, self.mesh)
        self.keyed.current = placed.rule.keyed if BY_KEY in placed.strategy.choice_of.values() else None
        names = tuple(
            self.convert(value, layout, placed.op.name)
            for value, layout in zip(placed.op.operands, applied.operands, strict=True)
        )
        layouts = tuple(self.layouts[name] for name in names)
        self.steps.append(OpStep(placed, names, layouts, applied.results))
        self.layouts.update(zip(placed.op.results, applied.results, strict=True))
        self.keyed.made.update(dict.fromkeys(placed.op.results, self.keyed.current))
        self.keyed.current = None

    def convert(self, value: str, target: Layout, op: str) -> str:
        """Return the name of ``value`` in layout ``target``, and add a conversion if needed. Without gradient,
        replicated and invariant are the same."""
        shared = self.shared.get(value)
        if shared is None or (shared.keyed_axes and self.keyed.current is None):  # a router reads what travels later
            return self.converted(value, value, target, op)
        if value not in self._shared_as:
            self._shared_as[value] = self.converted(value, value, shared, op)
        return self.converted(self._shared_as[value], value, target, op)

    def converted(self, name: str, origin: str, target: Layout, op: str) -> str:
        """Return the name of ``origin``, available as ``name``, in layout ``target``."""
        info, source = self.graph.by_name[origin], self.layouts[name]
        if not info.requires_grad:
            source, target = gradient_free(source), gradient_free(target)
        target = target.canonical()
        if source.canonical() == target:
            return name
        keyed = self.keyed.of(name, source, target)
        key = (origin, target, keyed.keys if keyed and target.keyed_axes else "")
        if key not in self._results:
            ways: tuple[str, ...] = ()
            if keyed is None:
                moves = self.route(info, source, target)
            else:  # by the slices from which the rows come, or to which they return
                slices = self.keyed.slices(keyed, source if source.keyed_axes else target)
                if source.keyed_axes and slices.canonical() != target:
                    return self.converted(self.converted(name, origin, slices, op), origin, target, op)
                ways = self.keyed.ways(keyed, slices, (*source.keyed_axes, *target.keyed_axes), op)
                if source.keyed_axes:
                    target, moves = slices, (Move(source, slices, source.keyed_axes),)
                else:
                    name, source = self.converted(name, origin, slices, op), slices
                    moves = (Move(slices, target, target.keyed_axes),)
            self._count[origin] += 1
            result = self._results[key] = f"{origin}:{self._count[origin]}"
            self.layouts[result], self.keyed.made[result] = target, keyed
            how = moves, info.requires_grad, info.dtype.itemsize, info.grad_itemsize, op, ways
            self.steps.append(Conversion(name, origin, result, source, target, *how))
        return self._results[key]


def fewest_bytes(value: Value, source: Layout, target: Layout) -> tuple[Move, ...]:
    """Return the moves that send the fewest bytes."""
    return redistribute(source, target, differentiable=value.requires_grad)


def gradient_free(layout: Layout) -> Layout:
    """Return the layout of a value without cotangent: invariant instead of replicated, which are then the same."""
    replicated = [axis for axis, state in layout.states if state == "R"]
    return layout.moved(dict.fromkeys(replicated, "I")) if replicated else layout


@dataclass
class KeyedRowsWriter:
    """Adds to a program what its conversions of keyed rows need.

    Attributes:
        current: What the operator that is being added does with keyed rows, if it takes them.
        made: The same of the operator or conversion that made a value.
        added: The operators that make ways, each with the operator before which it stands.
    """

    builder: Builder
    current: KeyedRows | None = None
    made: dict[str, KeyedRows | None] = field(default_factory=dict)
    values: list[Value] = field(default_factory=list)
    added: list[tuple[str, Op]] = field(default_factory=list)
    _ways: dict[tuple[str, Layout, tuple[str, ...]], tuple[str, ...]] = field(default_factory=dict)

    def of(self, name: str, source: Layout, target: Layout) -> KeyedRows | None:
        """Return the keys that rows follow in one of two layouts of the value ``name``, or None."""
        if source.keyed_axes:
            return self.made[name]
        return self.current if target.keyed_axes else None

    def slices(self, keyed: KeyedRows, layout: Layout) -> Layout:
        """Return the layout from which the rows of a keyed one come: an atom of the tokens is split over the axes.

        All values whose rows follow the same keys are split there, the first that divides evenly, else the largest.
        """
        mesh, axes = layout.mesh, layout.keyed_axes
        num_tokens = self.builder.graph.by_name[keyed.keys].shape[0] // keyed.copies
        tokens = list(self.builder.layouts[keyed.keys].atoms[0])
        while prod(tokens) > num_tokens:  # the keys of one token
            tokens.pop()
        atoms = tokens if tokens and prod(tokens) == num_tokens else [num_tokens]
        copies = layout.shape[0] // max(num_tokens, 1)
        plain = layout.unkeyed.refine(((*atoms, copies) if copies > 1 else tuple(atoms), *layout.atoms[1:]))
        parts = [mesh.size_of(atom.axes) * mesh.size_of(axes) for atom in plain.dims[0]]
        even = (i for i, size in enumerate(atoms) if size % parts[i] == 0)
        split = next(even, max(range(len(atoms)), key=lambda i: atoms[i] / parts[i]))
        return plain.moved(dict.fromkeys(axes, (0, split)))

    def ways(self, keyed: KeyedRows, slices: Layout, along: tuple[str, ...], op: str) -> tuple[str, ...]:
        """Return the names of the ways between slices and the owners along some axes."""
        builder, mesh = self.builder, slices.mesh
        keys = builder.graph.by_name[keyed.keys]
        copies = keys.shape[0] // slices.shape[0]
        dims = (*slices.dims[0], Atom(copies)) if copies > 1 else slices.dims[0]
        held = Layout(mesh, (dims,))
        key = keyed.keys, held.canonical(), along
        if key not in self._ways:
            name = builder.converted(keyed.keys, keyed.keys, held, op)
            self._ways[key] = self._write(keyed, name, builder.layouts[name], slices, along, op)
        return self._ways[key]

    def _write(
        self, keyed: KeyedRows, keys: str, held: Layout, slices: Layout, along: tuple[str, ...], op: str
    ) -> tuple[str, ...]:
        builder, mesh, number = self.builder, slices.mesh, sum(key[0] == keyed.keys for key in self._ways)
        order, sent, received = (f"{keyed.keys}.{what}{number or ''}" for what in ("order", "sent", "received"))
        others = tuple(axis for atom in slices.dims[0] for axis in atom.axes if axis not in along)
        devices, groups = mesh.size_of(along), mesh.size_of(others)
        by_sender = Layout(mesh, ((Atom(groups, others), Atom(devices, along)), (Atom(devices),)))
        by_receiver = Layout(mesh, ((Atom(groups, others), Atom(devices)), (Atom(devices, along),)))
        num_rows = builder.graph.by_name[keyed.keys].shape[0]
        self.values += [
            Value(order, (num_rows,), torch.int64),
            Value(sent, (groups * devices, devices), torch.int64),
            Value(received, (groups * devices, devices), torch.int64),
        ]
        ends = tuple((i + 1) * keyed.num_keys // devices for i in range(devices))
        consumer = builder.graph.op_by_name[op] if op else None
        way = Op(
            f"{keyed.keys}/order{number or ''}",
            order_by_owner._opoverload,
            (Ref(keyed.keys), ends),
            (),
            (order, sent),
            consumer.source if consumer else "",
        )
        self.added.append((op, way))
        factors = (Factor("r", num_rows), Factor("d", groups * devices), Factor("o", devices))
        rule = OpRule(factors, ((("r",),),), ((("r",),), (("d",), ("o",))))
        placed = PlacedOp(way, rule, Strategy())
        builder.steps.append(OpStep(placed, (keys,), (held,), (held, by_sender)))
        builder.layouts |= {order: held, sent: by_sender, received: by_receiver}
        move = Move(by_sender, by_receiver, along)
        builder.steps.append(Conversion(sent, sent, received, by_sender, by_receiver, (move,), False, 8, 8, op))
        return order, sent, received

    def extended(self, graph: Graph) -> Graph:
        """Return the graph with the operators that make ways."""
        if not self.added:
            return graph
        ops: list[Op] = []
        before: dict[str, list[Op]] = {}
        for consumer, way in self.added:
            before.setdefault(consumer, []).append(way)
        for op in graph.ops:
            ops += [*before.pop(op.name, ()), op]
        ops += [way for ways in before.values() for way in ways]
        return replace(graph, values=(*graph.values, *self.values), ops=tuple(ops))
