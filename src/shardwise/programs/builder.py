"""Puts operators of a graph behind each other as steps, with conversions of values between them.

Two uses of a value in the same layout share one conversion, placed where it is first needed.

Rows that follow keys (tokens that travel to the devices of their experts, and back) take more than moves.
The devices along an axis first hold slices of the rows. Each sorts its rows by key, and so by owner
(``graph.grouped.order_by_owner``), tells every other device how many rows of each key it will get, and sends them in
that order; the owner puts what arrives into the order of the keys. Results return by the same way. These three *ways*
(order, counts sent, counts received) are values of the program like any others. They are made once per vector of keys,
for all values whose rows follow it, forward and backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Literal

import torch
from torch._ops import OpOverload

from shardwise.graph.float8 import LARGEST
from shardwise.graph.grouped import grouped_mm, keys_of_rows, most_keys, order_by_owner
from shardwise.graph.ir import Arg, Graph, Op, Ref, Value
from shardwise.layouts.choice import BY_KEY
from shardwise.layouts.conversions import Move
from shardwise.layouts.layout import Atom, Layout
from shardwise.layouts.mesh import Mesh
from shardwise.layouts.redistribute import redistribute
from shardwise.layouts.strategy import Strategy, apply_strategy
from shardwise.programs.lower import PlacedOp
from shardwise.programs.spmd_steps import Conversion, OpStep, chunk_of
from shardwise.rules.keyed_rows import KeyedRows
from shardwise.rules.rule import Factor, LocalContext, LocalOpCall, OpRule

# The moves between two layouts of a value.
Route = Callable[[Value, Layout, Layout], tuple[Move, ...]]


RowChunks = int | Literal["fused"]


@dataclass(frozen=True)
class Choice:
    """The choices that determine a program: a strategy per operator, and per source the layout in which it is stored or
    passed. ``shared``: values that are first converted to one layout, from which all consumers convert them;
    ``delivered``: outputs that are delivered in a given layout, not whole (of a part of a cut graph those that it
    sends); ``route``: the moves between two layouts of a value (default: those that send the fewest bytes);
    ``row_chunks``: the chunks of rows whose messages travel beside products (``programs.row_chunks``), or "fused": rows
    stay whole, and messages are joined with products (``programs.fused_products``)."""

    strategies: Mapping[str, Strategy]
    sources: Mapping[str, Layout]
    shared: Mapping[str, Layout] = field(default_factory=dict)
    delivered: Mapping[str, Layout] = field(default_factory=dict)
    route: Route | None = None
    row_chunks: RowChunks = 1


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

    def convert_ahead(self, placed: PlacedOp) -> None:
        """Convert what an operator will read of chunks of rows, as far as that is there (``programs.row_chunks``)."""
        self._converted_operands(placed, lambda name: bool(chunk_of(name)) and name in self.layouts)
        self.keyed.current = None

    def _converted_operands(self, placed: PlacedOp, is_wanted: Callable[[str], bool]) -> tuple[str, ...]:
        applied = apply_strategy(placed.rule, placed.strategy, self.mesh)
        self.keyed.current = placed.rule.keyed if BY_KEY in placed.strategy.choice_of.values() else None
        return tuple(
            value if self._is_scale_of(placed.op, value, layout) else self.convert(value, layout, placed.op.name)
            for value, layout in zip(placed.op.operands, applied.operands, strict=True)
            if is_wanted(value)
        )

    def add(self, placed: PlacedOp) -> None:
        applied = apply_strategy(placed.rule, placed.strategy, self.mesh)
        names = self._converted_operands(placed, lambda name: True)
        layouts = tuple(self.layouts[name] for name in names)
        if self.keyed.current and placed.op.target is grouped_mm._opoverload:  # they arrive sorted by key
            placed = replace(placed, op=replace(placed.op, args=(*placed.op.args[:6], False, True)))
        self.steps.append(OpStep(placed, names, layouts, applied.results))
        self.layouts.update(zip(placed.op.results, applied.results, strict=True))
        self.keyed.made.update(dict.fromkeys(placed.op.results, self.keyed.current))
        self.keyed.current = None

    def _is_scale_of(self, op: Op, value: str, layout: Layout) -> bool:
        """Return whether an operator finds the largest number of a value as it is, whatever its others share."""
        stored = self.layouts[value]
        return op.target == LARGEST and gradient_free(stored).canonical() == gradient_free(layout).canonical()

    def convert(self, value: str, target: Layout, op: str) -> str:
        """Return the name of ``value`` in layout ``target``, and add a conversion if needed. Without gradient,
        replicated and invariant are the same."""
        shared = self.shared.get(value)
        # A router reads what travels later; products whose experts are split over other axes need other rows.
        if shared is None or (shared.keyed_axes and (self.keyed.current is None or shared != target)):
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
                rows = self.keyed.arrived.get(ways)
                if origin == keyed.keys and target.keyed_axes and rows is not None:
                    self._results[key] = self.keyed.keys_of(keyed, rows, ways, target, op)
                    return self._results[key]
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
            if keyed and target.keyed_axes:
                self.keyed.arrived.setdefault(ways, (origin, result))
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
        arrived: By ways, a value whose rows arrived at the owners of their keys, and its name there.
        added: The operators that make ways, each with the operator before which it stands.
    """

    builder: Builder
    current: KeyedRows | None = None
    made: dict[str, KeyedRows | None] = field(default_factory=dict)
    arrived: dict[tuple[str, ...], tuple[str, str]] = field(default_factory=dict)
    values: list[Value] = field(default_factory=list)
    added: list[tuple[str, Op]] = field(default_factory=list)
    _ways: dict[tuple[str, Layout, tuple[str, ...]], tuple[str, ...]] = field(default_factory=dict)

    def of(self, name: str, source: Layout, target: Layout) -> KeyedRows | None:
        """Return the keys that rows follow in one of two layouts of the value ``name``, or None."""
        if source.keyed_axes:
            return self.made[name]
        return self.current if target.keyed_axes else None

    def slices(self, keyed: KeyedRows, layout: Layout) -> Layout:
        """Return the layout from which the rows of a keyed one come: atoms of the tokens are split over the axes.

        All values whose rows follow the same keys are split there. Every axis takes the first atom that it divides
        evenly, else the largest: samples that are split over one axis stay where they are, whatever another takes.
        """
        mesh, axes = layout.mesh, layout.keyed_axes
        num_tokens = self.builder.graph.by_name[keyed.keys].shape[0] // keyed.copies
        tokens = list(self.builder.layouts[keyed.keys].atoms[0])
        while prod(tokens) > num_tokens:  # the keys of one token
            tokens.pop()
        atoms = tokens if tokens and prod(tokens) == num_tokens else [num_tokens]
        copies = layout.shape[0] // max(num_tokens, 1)
        plain = layout.unkeyed.refine(((*atoms, copies) if copies > 1 else tuple(atoms), *layout.atoms[1:]))
        parts, where = [mesh.size_of(atom.axes) for atom in plain.dims[0]], dict[str, tuple[int, int]]()
        for name, _ in mesh.axes:
            of_name = [axis for axis in mesh.expand(name) if axis in axes]
            devices = mesh.size_of(of_name)
            even = (i for i, size in enumerate(atoms) if size % (parts[i] * devices) == 0)
            split = next(even, max(range(len(atoms)), key=lambda i: atoms[i] / parts[i]))
            parts[split] *= devices
            where.update(dict.fromkeys(of_name, (0, split)))
        return plain.moved(where)

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
        num_rows, num_keys = builder.graph.by_name[keyed.keys].shape[0], keyed.num_keys
        most = most_keys(num_keys, devices)
        by_sender = Layout(mesh, ((Atom(groups, others), Atom(devices, along)), (Atom(devices),), (Atom(most),)))
        by_receiver = Layout(mesh, ((Atom(groups, others), Atom(devices)), (Atom(devices, along),), (Atom(most),)))
        self.values += [
            Value(order, (num_rows,), torch.int64),
            Value(sent, (groups * devices, devices, most), torch.int64),
            Value(received, (groups * devices, devices, most), torch.int64),
        ]
        target = order_by_owner._opoverload
        args = Ref(keyed.keys), num_keys, keyed.skips, devices
        way = self._added(op, f"{op}/order{number or ''}", target, args, (order, sent))
        factors = (*map(Factor, "rdok", (num_rows, groups * devices, devices, most)),)
        rule = OpRule(factors, ((("r",),),), ((("r",),), (("d",), ("o",), ("k",))))
        placed = PlacedOp(way, rule, Strategy())
        builder.steps.append(OpStep(placed, (keys,), (held,), (held, by_sender)))
        builder.layouts |= {order: held, sent: by_sender, received: by_receiver}
        move = Move(by_sender, by_receiver, along)
        builder.steps.append(Conversion(sent, sent, received, by_sender, by_receiver, (move,), False, 8, 8, op))
        return order, sent, received

    def keys_of(self, keyed: KeyedRows, rows: tuple[str, str], ways: tuple[str, ...], target: Layout, op: str) -> str:
        """Return the name of the keys of rows that arrived. No message brings them: the owners know how many rows of
        each of their keys were sent."""
        builder, received, along = self.builder, ways[2], target.keyed_axes
        read, num_rows = (builder.layouts[rows[1]], builder.layouts[received]), target.shape[0]
        devices, result = target.mesh.size_of(along), f"{received}.keys"
        self.values.append(Value(result, (num_rows,), torch.int64))
        args = Ref(rows[0]), Ref(ways[1]), keyed.num_keys, devices
        way = self._added(
            op, f"{op}/arrived{received.rpartition('received')[2]}", keys_of_rows._opoverload, args, (result,)
        )
        factors = [[Factor(f"{x}{i}", n) for i, n in enumerate(each.shape)] for x, each in zip("rd", read, strict=True)]
        dims = tuple(tuple((factor.name,) for factor in each) for each in factors)

        def localize(op: Op, context: LocalContext) -> LocalOpCall:
            return LocalOpCall(op.target, (*op.args, context.pieces["d1"][0].offset))

        rule = OpRule((*factors[0], *factors[1], Factor("k", num_rows)), dims, ((("k",),),), localize=localize)
        placed = PlacedOp(way, rule, Strategy((("d1", along),)))
        builder.steps.append(OpStep(placed, (rows[1], received), read, (target,)))
        builder.layouts[result] = target
        return result

    def _added(
        self, consumer: str, name: str, target: OpOverload, args: tuple[Arg, ...], results: tuple[str, ...]
    ) -> Op:
        """Return an operator that stands before its first consumer in the graph."""
        before = self.builder.graph.op_by_name.get(consumer)
        way = Op(name, target, args, (), results, before.source if before else "")
        self.added.append((consumer, way))
        return way

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
