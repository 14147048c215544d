"""Divides rows into chunks, so that the message of one chunk travels beside the products of another.

Between two operators that mix rows (attention mixes tokens), a model computes row by row: products, norms, experts. The
operators there run once per chunk, and so do the messages between them, forward and backward. A chunk is like a
micro-batch that lasts from one mixing operator to the next: rules say which factor of an operator has the rows
(``DividedRows``), and ``localize`` gives its call for a chunk. What follows has no other kind of operator: conversions,
their duals, routes and the rows that go to their experts are those of smaller tensors.

An operator is divided if a product or message lies both ahead of it and behind it among such operators (or if it is
one), so that no more is divided than hides a message. Values enter by ``split_rows`` and leave by ``join_rows``.

Order: operators up to the next message form a *run*. A run is written for one chunk after the other, behind the
conversions of all chunks. So message i + 1 departs before the products of chunk i (``programs.overlap_messages``).

Rounding: products of a chunk are those of its rows. The gradient of a weight is the sum of the chunks' gradients, where
one product would add the same terms in another order: n chunks round n - 1 times more, in the gradient's dtype.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import torch

from shardwise.errors import LayoutError
from shardwise.graph.custom_operators import RANDOM
from shardwise.graph.disjoint import DisjointSets
from shardwise.graph.ir import Graph, Op, Ref, Value, refs, rename_operands
from shardwise.graph.operator_library import composite
from shardwise.graph.schema import is_random
from shardwise.layouts.choice import BY_KEY, REPLICATED, AxisChoice, PassSum, ShardPosition, ShardPositions, Split
from shardwise.layouts.layout import Atom, Layout, common_atoms
from shardwise.layouts.mesh import Mesh
from shardwise.layouts.strategy import Strategy, apply_strategy
from shardwise.programs.builder import Choice, gradient_free
from shardwise.programs.lower import PlacedOp
from shardwise.rules.rule import Dims, Factor, LocalContext, LocalOpCall, OpRule, Piece, base_name


def _split_rows(x: torch.Tensor, dim: int, blocks: int, chunks: int) -> list[torch.Tensor]:
    """Return a tensor in chunks of its rows. These are in ``blocks``, such as one per device that has a part of them:
    chunk i has the i-th part of every block, so that a device finds its part of every chunk in its own block."""
    rows = x.shape[dim] // max(blocks * chunks, 1)
    parts = x.unflatten(dim, (blocks, chunks, rows)).unbind(dim + 1)
    return [part.flatten(dim, dim + 1).contiguous() for part in parts]


def _join_rows(chunks: Sequence[torch.Tensor], dim: int, blocks: int) -> torch.Tensor:
    """Return the tensor of its chunks."""
    if blocks == 1:
        return torch.cat(list(chunks), dim)
    rows = chunks[0].shape[dim] // max(blocks, 1)
    return torch.stack([chunk.unflatten(dim, (blocks, rows)) for chunk in chunks], dim + 1).flatten(dim, dim + 2)


SPLIT_ROWS, JOIN_ROWS = composite(_split_rows), composite(_join_rows)
SMALLEST_SHARE = 16  # smaller messages than this part of the largest one, such as sums of a loss, are not worth two
_Node = tuple[str, ShardPosition]  # the rows of a value


@dataclass(frozen=True)
class DividedRows:
    """Rows that are divided. ``place``: where a value has them; ``factors``: operator -> the factor that has them;
    ``parts``: the parts in which devices have them; ``sent``: the elements of the values in messages."""

    place: Mapping[str, ShardPosition]
    factors: Mapping[str, str]
    parts: int
    sent: int


def in_chunks(
    placed: Sequence[PlacedOp], graph: Graph, choice: Choice, mesh: Mesh
) -> tuple[Sequence[PlacedOp | Ahead], Graph, Choice]:
    """Divide the rows of a lowered graph's operators into ``choice.row_chunks`` chunks, where messages are to be hidden
    and the sizes allow it.

    Returns:
        The operators in order, and where their operands are converted ahead of them; the graph and the choice that
        have them.
    """
    if choice.row_chunks in (1, "fused"):
        return placed, graph, choice
    return _Writer(_Operators(placed, graph, choice, mesh)).write()


class _Operators:
    """The operators of a lowered graph in their layouts, and which of them treat rows alike."""

    def __init__(self, placed: Sequence[PlacedOp], graph: Graph, choice: Choice, mesh: Mesh) -> None:
        self.placed, self.graph, self.choice, self.mesh, self.chunks = (
            placed,
            graph,
            choice,
            mesh,
            int(choice.row_chunks),
        )
        applied = {item.op.name: apply_strategy(item.rule, item.strategy, mesh) for item in placed}
        self.made = dict(choice.sources)
        self.wanted: dict[str, tuple[Layout, ...]] = {}
        self.places = {item.op.name: ShardPositions.of(item.rule) for item in placed}
        self.calls = {item.op.name: self._calls(item) for item in placed}
        self.messages: dict[str, set[str]] = {}  # operator -> the operands that a message brings
        for item in placed:
            op, layouts = item.op, applied[item.op.name]
            self.wanted[op.name] = layouts.operands
            self.messages[op.name] = {
                name
                for name, layout in zip(op.operands, layouts.operands, strict=True)
                if not self._is_parameter(name) and self._differ(name, layout)
            }
            self.made.update(zip(op.results, layouts.results, strict=True))
        largest = max((graph.by_name[name].numel for names in self.messages.values() for name in names), default=0)
        for name, names in self.messages.items():
            self.messages[name] = {n for n in names if SMALLEST_SHARE * graph.by_name[n].numel >= largest}
        self.readers: dict[str, set[str]] = {}
        for item in placed:
            for name in item.op.operands:
                self.readers.setdefault(name, set()).add(item.op.name)
        ends = refs((graph.outputs, *(Ref(value) for _, value in graph.mutations)))
        self.ends = {*ends, *(graph.cotangents or ()), *([graph.loss] if graph.loss is not None else [])}

    def _is_parameter(self, name: str) -> bool:
        source = self.graph.source_of.get(name)
        return source is not None and source.kind == "parameter"

    def _differ(self, name: str, wanted: Layout) -> bool:
        ends = self.made[name], wanted
        if not self.graph.by_name[name].requires_grad:
            ends = gradient_free(ends[0]), gradient_free(ends[1])
        return ends[0].canonical() != ends[1].canonical()

    def _calls(self, item: PlacedOp) -> dict[str, LocalOpCall]:
        """Return, per factor that can have the rows, the call of the operator for a chunk of them."""
        op, rule = item.op, item.rule
        if is_random(op.target) or op.target in RANDOM or rule.windows or rule.largest is not None:
            return {}
        fixed = {name for name, _ in item.strategy.cuts}
        factors = (f for f in rule.factors if f.kind == "parallel" and f.size and f.size % self.chunks == 0)
        calls: dict[str, LocalOpCall] = {}
        for factor in factors:
            if factor.name in fixed or not all(factor.name in at for at in self.places[op.name].results):
                continue
            if rule.localize is None:
                calls[factor.name] = LocalOpCall(op.target, op.args, op.kwargs)
                continue
            first, *others = (rule.localize(op, self._context(item, factor, i)) for i in range(self.chunks))
            if all(call == first for call in others):
                calls[factor.name] = first
        return calls

    def _context(self, item: PlacedOp, rows: Factor, chunk: int) -> LocalContext:
        op, length = item.op, rows.size // self.chunks

        def shapes(names: Sequence[str], places: Sequence[Mapping[str, ShardPosition]]) -> tuple[tuple[int, ...], ...]:
            values = (self.graph.by_name[name].shape for name in names)
            return tuple(
                chunk_shape(shape, at[rows.name], self.chunks) if rows.name in at else shape
                for shape, at in zip(values, places, strict=True)
            )

        pieces: dict[str, tuple[Piece, ...]] = {}
        for factor in item.rule.factors:
            held = (chunk * length, length) if factor.name == rows.name else (0, factor.size)
            base = base_name(factor.name)
            pieces[base] = (*pieces.get(base, ()), Piece(factor.size, *held))
        places = self.places[op.name]
        return LocalContext(shapes(op.operands, places.operands), shapes(op.results, places.results), pieces)

    # -- which rows ----------------------------------------------------------------------------------------------------

    def divided(self) -> list[DividedRows]:
        """Return the rows that are divided, no operator twice. Those with products come first, then those whose
        messages have the most elements (whatever their dtypes: a plan is also bound to the model in float64)."""
        products = {item.op.name for item in self.placed if item.rule.is_product}

        def rank(rows: DividedRows) -> tuple[bool, bool, int]:
            return rows.sent > 0, not products.isdisjoint(rows.factors), rows.sent

        joined: DisjointSets[_Node] = DisjointSets()
        for item in self.placed:
            for factor in self.calls[item.op.name]:
                first, *others = self._nodes(item.op, factor)
                for node in others:
                    joined.join(node, first)
        members: dict[_Node, list[_Node]] = {}
        for node, root in joined.roots().items():
            members.setdefault(root, []).append(node)
        sent = {name for names in self.messages.values() for name in names}
        classes = [nodes for nodes in members.values() if any(name in sent for name, _ in nodes)]
        taken: set[str] = set()
        chosen: list[DividedRows] = []
        while classes:
            found = [(self._rows(nodes, taken), nodes) for nodes in classes]
            classes = [nodes for rows, nodes in found if rows.sent]
            best = max((rows for rows, _ in found), key=rank)
            if not best.sent:
                break
            chosen.append(best)
            taken.update(best.factors)
        return chosen

    def _nodes(self, op: Op, factor: str) -> list[_Node]:
        places = self.places[op.name]
        named = zip((*op.operands, *op.results), (*places.operands, *places.results), strict=True)
        return [(name, at[factor]) for name, at in named if factor in at]

    def _rows(self, nodes: Sequence[_Node], taken: Collection[str]) -> DividedRows:
        """Return the operators that are divided along some rows; none if nothing is gained."""
        place = dict(nodes)
        several = {name for name, at in nodes if place[name] != at}  # such as scores of all tokens with all tokens
        able: dict[str, str] = {}
        for item in self.placed:
            op, places = item.op, self.places[item.op.name]
            tensors = zip((*op.operands, *op.results), (*places.operands, *places.results), strict=True)
            factors = {f for name, at in tensors for f, position in at.items() if place.get(name) == position}
            if len(factors) == 1 and op.name not in taken and several.isdisjoint((*op.operands, *op.results)):
                (factor,) = factors
                able |= {op.name: factor} if factor in self.calls[op.name] else {}
        ops = {item.op.name: item for item in self.placed}
        parts = max(
            (self.mesh.size_of(ops[name].strategy.axes_of.get(factor, ())) for name, factor in able.items()), default=1
        )
        able = {name: factor for name, factor in able.items() if self._fits(ops[name], factor, parts)}
        kept = self._useful(able)
        read = {name for op in kept for name in self.messages[op] if name in place and kept[op]}
        return DividedRows(place, kept, parts, sum(self.graph.by_name[name].numel for name in read))

    def _fits(self, item: PlacedOp, factor: str, parts: int) -> bool:
        """Return whether every tensor of the operator with the rows can be divided, on every device."""
        op, places = item.op, self.places[item.op.name]
        for i, (name, at) in enumerate(zip(op.operands, places.operands, strict=True)):
            if factor in at:
                for layout in (self.made[name], self.wanted[op.name][i]):
                    if not layout.keyed_axes and divide(layout, at[factor], parts, self.chunks) is None:
                        return False
        results = zip(op.results, places.results, strict=True)
        return all(
            bool(self.made[name].keyed_axes) or divide(self.made[name], at[factor], parts, self.chunks) is not None
            for name, at in results
        )

    def _useful(self, able: Mapping[str, str]) -> dict[str, str]:
        """Return the operators that are, or lie between, products and messages. Rows at the owners of their keys can
        neither be split nor joined: all operators on them are divided, or none."""
        ops = [item for item in self.placed if item.op.name in able]
        ahead: set[str] = set()  # values
        for item in ops:
            if self._marks(item, able) or not ahead.isdisjoint(item.op.operands):
                ahead.update(item.op.results)
        behind: set[str] = set()
        kept: dict[str, str] = {}
        for item in reversed(ops):
            if self._marks(item, able) or not behind.isdisjoint(item.op.results):
                behind.update(name for name in item.op.operands)
                if not ahead.isdisjoint(item.op.results):
                    kept[item.op.name] = able[item.op.name]
        by_key = {item.op.name: item for item in self.placed if BY_KEY in item.strategy.choice_of.values()}
        whole = {item.rule.keyed.keys for name, item in by_key.items() if item.rule.keyed and name not in kept}
        mixed = {name for name, item in by_key.items() if item.rule.keyed and item.rule.keyed.keys in whole}
        if mixed.isdisjoint(kept):
            return kept
        return self._useful({name: factor for name, factor in able.items() if name not in mixed})

    def _marks(self, item: PlacedOp, able: Mapping[str, str]) -> bool:
        factor, places = able[item.op.name], self.places[item.op.name].operands
        brought = self.messages[item.op.name]
        rows = (name for name, at in zip(item.op.operands, places, strict=True) if factor in at)
        return item.rule.is_product or any(name in brought for name in rows)


def chunk_shape(shape: tuple[int, ...], rows: ShardPosition, chunks: int) -> tuple[int, ...]:
    return tuple(size // chunks if dim == rows.dim else size for dim, size in enumerate(shape))


def divide(layout: Layout, rows: ShardPosition, parts: int, chunks: int) -> tuple[Layout, int] | None:
    """Return the layout with an atom for the chunks of its rows, and the index of this atom in its dim; None if the
    devices cannot have a share of every chunk in the ``parts`` of the rows."""
    if rows.size % (parts * chunks) or layout.windows:
        return None
    inside = rows.size // (parts * chunks) * rows.stride
    sizes: tuple[int, ...] = (layout.shape[rows.dim] // (chunks * inside), chunks, inside)
    if parts > 1:
        sizes = (sizes[0] // parts, parts, *sizes[1:])
    atoms = common_atoms(layout.atoms[rows.dim], tuple(size for size in sizes if size > 1))
    if atoms is None:
        return None
    try:
        refined = layout.refine((*layout.atoms[: rows.dim], atoms, *layout.atoms[rows.dim + 1 :]))
    except LayoutError:
        return None
    found = [i for i, size in enumerate(atoms) if size == chunks and prod(atoms[i + 1 :]) == inside]
    is_whole = bool(found) and not refined.dims[rows.dim][found[0]].axes
    return (refined, found[0]) if is_whole else None


def _without(layout: Layout, dim: int, atom: int) -> Layout:
    """Return the layout of one chunk: without the atom of the chunks."""
    left = (*layout.dims[dim][:atom], *layout.dims[dim][atom + 1 :])
    return replace(layout, dims=(*layout.dims[:dim], left or (Atom(1),), *layout.dims[dim + 1 :]))


def _in_the_middle(run: Sequence[PlacedOp | Ahead], inserted: Sequence[PlacedOp | Ahead]) -> list[PlacedOp | Ahead]:
    """Return a run with steps in the middle of its products, or behind the only one."""
    products = [i for i, step in enumerate(run) if isinstance(step, PlacedOp) and step.rule.is_product]
    middle = products[(len(products) - 1) // 2] + 1 if products else len(run)
    return [*run[:middle], *inserted, *run[middle:]]


def _local_blocks(op: Op, context: LocalContext) -> LocalOpCall:
    """Return the call with this device's number of blocks: those of the atoms ahead of the chunks."""
    blocks = prod(pieces[0].length for name, pieces in context.pieces.items() if name.startswith("o"))
    return LocalOpCall(op.target, (*op.args[:2], blocks, *op.args[3:]))


@dataclass(frozen=True)
class Ahead:
    """Stands where the values that operators read of chunks are converted, as far as these are computed."""

    operators: tuple[PlacedOp, ...]


@dataclass
class _Writer:
    """Writes operators in chunks.

    Attributes:
        steps: What is written.
        run: The operators of the run that is read.
        last: Per chunk, the last run with products, which is not written yet.
        between: Per chunk, the runs without products behind it, which are not written yet.
        joins: The joins behind these.
        unwritten: The results of all these.
        names: By the number of the rows and a value, its chunks.
    """

    operators: _Operators
    steps: list[PlacedOp | Ahead] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    run: list[PlacedOp] = field(default_factory=list)
    last: list[list[PlacedOp | Ahead]] = field(default_factory=list)
    between: list[list[PlacedOp | Ahead]] = field(default_factory=list)
    joins: list[PlacedOp] = field(default_factory=list)
    unwritten: set[str] = field(default_factory=set)
    names: dict[tuple[int, str], tuple[str, ...]] = field(default_factory=dict)

    def write(self) -> tuple[list[PlacedOp | Ahead], Graph, Choice]:
        self.rows = self.operators.divided()
        self.owner = {name: number for number, rows in enumerate(self.rows) for name in rows.factors}
        now: int | None = None  # the rows of what is not written yet
        for item in self.operators.placed:
            number = self.owner.get(item.op.name)
            if number is None:
                if not self.unwritten.isdisjoint(item.op.operands):
                    self._finish()
                self.steps.append(item)
                continue
            if now != number:
                self._finish()
            made = {name for waiting in self.run for name in waiting.op.results}
            if not made.isdisjoint(self.operators.messages[item.op.name]):
                self._end_run()
            now = number
            self.run.append(item)
            self.unwritten.update(item.op.results)
        self._finish()
        graph = self.operators.graph
        ops = tuple(step.op for step in self.steps if isinstance(step, PlacedOp))
        return self.steps, replace(graph, values=(*graph.values, *self.values), ops=ops), self._choice()

    def _finish(self) -> None:
        """Write everything that is not written yet."""
        self._end_run()
        for chunks in (self.last, self.between):
            self.steps += [step for chunk in chunks for step in chunk]
        self.steps += self.joins
        self.last, self.between, self.joins, self.unwritten = [], [], [], set()

    def _end_run(self) -> None:
        if not self.run:
            return
        run, self.run = self.run, []
        chunks = self._in_chunks(run)
        if not any(item.rule.is_product for item in run):
            self.between = [
                [*before, Ahead(tuple(chunk)), *chunk]
                for before, chunk in zip(self.between or [[]] * len(chunks), chunks, strict=True)
            ]
            return
        current: list[list[PlacedOp | Ahead]] = [[*chunk] for chunk in chunks]
        if self.between:  # chunk i in the middle of the products of chunk i + 1, the last one in those that follow
            lines = [*self.last[1:], *current][: len(chunks)] if self.last else [[], *current][: len(chunks)]
            between = [[*before, Ahead(tuple(chunk))] for before, chunk in zip(self.between, chunks, strict=True)]
            lines = [_in_the_middle(line, inserted) for line, inserted in zip(lines, between, strict=True)]
            if self.last:
                self.last[1:], current[0] = lines[:-1], lines[-1]
            else:
                self.steps += lines[0]
                current[: len(chunks) - 1] = lines[1:]
        elif self.last:
            self.last = [[*before, Ahead(tuple(chunk))] for before, chunk in zip(self.last, chunks, strict=True)]
        else:
            self.steps.append(Ahead(tuple(item for chunk in chunks for item in chunk)))
        self.steps += [step for chunk in self.last for step in chunk]
        self.last, self.between = current, []

    def _in_chunks(self, run: Sequence[PlacedOp]) -> list[list[PlacedOp]]:
        """Return the operators of a run per chunk. Write the splits ahead of it, and keep the joins for behind it."""
        number = self.owner[run[0].op.name]
        rows = self.rows[number]
        for item in run:
            for name in item.op.results:
                self._name_chunks(number, name)
        for item in run:
            operands = zip(item.op.operands, self.operators.places[item.op.name].operands, strict=True)
            read = [name for name, at in operands if rows.factors[item.op.name] in at]
            for name in (*read, *([item.rule.keyed.keys] if item.rule.keyed else [])):
                if (number, name) not in self.names:
                    self._split(number, name, item.op)
            for i, name in enumerate(item.op.results):
                readers = self.operators.readers.get(name, ())
                if name in self.operators.ends or any(self.owner.get(op) != number for op in readers):
                    self._join(number, name, item.op, i)
        return [[self._chunk(item, number, i) for item in run] for i in range(self.operators.chunks)]

    def _choice(self) -> Choice:
        """Return the choice with the shared layouts of chunks."""
        choice, shared = self.operators.choice, dict(self.operators.choice.shared)
        for (number, name), chunks in self.names.items():
            if name in choice.shared:
                found = divide(choice.shared[name], self.rows[number].place[name], self.rows[number].parts, len(chunks))
                if found is not None:
                    shared |= dict.fromkeys(chunks, _without(found[0], self.rows[number].place[name].dim, found[1]))
                if all(self.owner.get(op) == number for op in self.operators.readers[name]):
                    shared.pop(name, None)
        return replace(choice, shared=shared)

    def _name_chunks(self, number: int, name: str) -> tuple[str, ...]:
        chunks = self.operators.chunks
        names = self.names[number, name] = tuple(f"{name}./chunk{number}.{i}" for i in range(chunks))
        value = self.operators.graph.by_name[name]
        shape = chunk_shape(value.shape, self.rows[number].place[name], chunks)
        self.values += [replace(value, name=chunk, shape=shape, stored=None, reduced=None) for chunk in names]
        return names

    def _chunk(self, item: PlacedOp, number: int, chunk: int) -> PlacedOp:
        """Return the operator on one chunk."""
        op, rule, factor = item.op, item.rule, self.rows[number].factors[item.op.name]
        chunks, call = self.operators.chunks, self.operators.calls[op.name][factor]
        operands = [
            self.names[number, name][chunk] if factor in at else name
            for name, at in zip(op.operands, self.operators.places[op.name].operands, strict=True)
        ]
        factors = tuple(replace(f, size=f.size // chunks) if f.name == factor else f for f in rule.factors)
        keyed = rule.keyed and replace(rule.keyed, keys=self.names[number, rule.keyed.keys][chunk])
        called = rename_operands(
            replace(op, target=call.target, args=call.args, kwargs=call.kwargs), op.operands, operands
        )
        results = tuple(self.names[number, name][chunk] for name in op.results)
        called = replace(called, name=f"{op.name}./chunk{number}.{chunk}", results=results)
        return PlacedOp(called, replace(rule, factors=factors, keyed=keyed), item.strategy)

    def _split(self, number: int, name: str, reader: Op) -> None:
        layout, operators = self.operators.made[name], self.operators
        whole, strategy, dims, chunk_dims = self._factors(number, name, layout)
        names = self._name_chunks(number, name)
        rule = OpRule(whole, (dims,), (chunk_dims,) * len(names), ((0,),), localize=_local_blocks)
        rows = self.rows[number].place[name]
        blocks = self._blocks(number, name)
        op = Op(
            f"{reader.name}./split{number}.{len(self.values)}",
            SPLIT_ROWS,
            (Ref(name), rows.dim, blocks, operators.chunks),
            (),
            names,
            reader.source,
        )
        self.steps.append(PlacedOp(op, rule, strategy))

    def _join(self, number: int, name: str, maker: Op, position: int) -> None:
        whole, strategy, dims, chunk_dims = self._factors(number, name, self.operators.made[name])
        names = self.names[number, name]
        linear = (tuple(range(len(names))),)
        rule = OpRule(whole, (chunk_dims,) * len(names), (dims,), linear, localize=_local_blocks)
        rows = self.rows[number].place[name]
        args = tuple(map(Ref, names)), rows.dim, self._blocks(number, name)
        op = Op(f"{maker.name}./join{number}.{position}", JOIN_ROWS, args, (), (name,), maker.source)
        self.joins.append(PlacedOp(op, rule, strategy))

    def _blocks(self, number: int, name: str) -> int:
        rows = self.rows[number].place[name]
        shape = self.operators.graph.by_name[name].shape
        return shape[rows.dim] // (rows.stride * rows.size) * self.rows[number].parts

    def _factors(self, number: int, name: str, layout: Layout) -> tuple[tuple[Factor, ...], Strategy, Dims, Dims]:
        """Return the factors of splitting or joining a value, the strategy that leaves it in its layout, and the
        factors per dim of the whole value and of a chunk. Those ahead of the chunks are called o0, o1, ..."""
        rows = self.rows[number]
        found = divide(layout, rows.place[name], rows.parts, self.operators.chunks)
        assert found is not None, "values of operators that are divided were tried"
        divided, chunk = found
        dims: list[tuple[str, ...]] = []
        factors: list[Factor] = []
        choices: dict[str, AxisChoice] = {}
        for d, atoms in enumerate(divided.dims):
            of_dim = [f"x{d}_{i}" for i in range(len(atoms))]
            if d == rows.place[name].dim:
                of_dim[:chunk] = [f"o{i}" for i in range(chunk)]
                of_dim[chunk] = "c"
            factors += [
                Factor(factor, atom.size, "whole" if factor == "c" else "parallel")
                for factor, atom in zip(of_dim, atoms, strict=True)
            ]
            choices |= {axis: Split(factor) for factor, atom in zip(of_dim, atoms, strict=True) for axis in atom.axes}
            dims.append(tuple(of_dim))
        for axis, state in divided.states:
            choices[axis] = REPLICATED if state == "R" else PassSum(0)
        whole = tuple(dims)
        chunk_dims = tuple(tuple(factor for factor in dim if factor != "c") for dim in whole)
        return tuple(factors), Strategy.of(choices), whole, chunk_dims
