"""From strategies to the one program that all ranks run: operators in their layouts, and the conversions between them.

Two uses of a value in the same layout share one conversion, made where it is first needed (so that in backward the
collectives interleave with the computation). Every tensor the model returns is delivered invariant.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from shardwise.errors import LayoutError, problem
from shardwise.graph.ir import Arg, Graph, Op, Ref
from shardwise.layouts.conversions import Collective, Move, collective_of
from shardwise.layouts.layout import Layout
from shardwise.layouts.mesh import Mesh
from shardwise.layouts.redistribute import redistribute
from shardwise.layouts.strategy import Strategy, apply_strategy, check_strategy
from shardwise.partition.lower import PlacedOp, lower_all
from shardwise.rules.rule import OpRule


@dataclass(frozen=True, slots=True)
class Conversion:
    """``value`` from the layout it is in to ``target``, under the name ``result``, by ``moves``. ``op``: the consumer
    it was first made for."""

    value: str
    result: str
    source: Layout
    target: Layout
    moves: tuple[Move, ...]
    differentiable: bool
    itemsize: int
    op: str

    def collectives(self, *, backward: bool = False) -> tuple[Collective, ...]:
        """What it communicates, in the order of execution."""
        if backward and not self.differentiable:
            return ()
        moves = self.moves[::-1] if backward else self.moves
        found = (collective_of(move, self.itemsize, backward=backward) for move in moves)
        return tuple(collective for collective in found if collective is not None)


@dataclass(frozen=True, slots=True)
class Step:
    """An operator over converted operands. ``operands`` follow ``placed.op.operands``."""

    placed: PlacedOp
    operands: tuple[str, ...]
    operand_layouts: tuple[Layout, ...]
    result_layouts: tuple[Layout, ...]


@dataclass(frozen=True)
class Spmd:
    """The program of all ranks. ``layouts``: every value (and every conversion's result) -> its layout. ``graph`` is
    the lowered graph.

    ``outputs``: per flattened output the name of a value that is whole on every rank, or a constant; ``loss`` likewise;
    ``mutations``: (buffer value, name of the value in the buffer's layout).
    """

    mesh: Mesh
    graph: Graph
    layouts: Mapping[str, Layout]
    steps: tuple[Step | Conversion, ...]
    outputs: tuple[Arg, ...]
    loss: str | None
    mutations: tuple[tuple[str, str], ...]

    @cached_property
    def conversions(self) -> tuple[Conversion, ...]:
        return tuple(step for step in self.steps if isinstance(step, Conversion))

    def forward_collectives(self) -> tuple[Collective, ...]:
        """Every collective of one forward pass, in order."""
        return tuple(c for conversion in self.conversions for c in conversion.collectives())

    def backward_collectives(self) -> tuple[Collective, ...]:
        """Every collective of one backward pass, in the order in which autograd runs them: newest conversion first, and
        only those through which a gradient of the loss flows."""
        return tuple(
            c
            for conversion in reversed(self.conversions)
            if self.receives_gradient(conversion)
            for c in conversion.collectives(backward=True)
        )

    def receives_gradient(self, conversion: Conversion) -> bool:
        """Whether a cotangent of the loss reaches the conversion's result."""
        return conversion.differentiable and conversion.result in self._reached

    @cached_property
    def _reached(self) -> frozenset[str]:
        """Names that receive a cotangent when the loss is differentiated."""
        if self.loss is None:
            return frozenset()
        reached = {self.loss}
        grad = self.graph.by_name
        for step in reversed(self.steps):
            if isinstance(step, Conversion):
                if step.result in reached and step.differentiable:
                    reached.add(step.value)
            elif any(result in reached and grad[result].requires_grad for result in step.placed.op.results):
                for name, original in zip(step.operands, step.placed.op.operands, strict=True):
                    if grad[original].requires_grad:
                        reached.add(name)
        return frozenset(reached)


def build_spmd(
    graph: Graph,
    rules: Mapping[str, OpRule],
    strategies: Mapping[str, Strategy],
    sources: Mapping[str, Layout],
    mesh: Mesh,
) -> Spmd:
    """Insert the conversions. ``rules``: the divided rules; ``sources``: source value -> the layout it is stored or
    delivered in.

    Raises LayoutError naming the operator when a strategy is not one of its own.
    """
    for op in graph.ops:
        _check(op, rules[op.name], strategies[op.name], mesh)
    placed, lowered = lower_all(graph, rules, strategies, mesh)
    builder = _Builder(lowered, mesh, {name: sources[name] for name in graph.source_of})
    for item in placed:
        builder.add(item)
    outputs = tuple(Ref(builder.whole(out.name)) if isinstance(out, Ref) else out for out in graph.outputs)
    loss = builder.whole(graph.loss) if graph.loss is not None else None
    mutations = tuple((buffer, builder.convert(value, sources[buffer], "")) for buffer, value in graph.mutations)
    return Spmd(mesh, lowered, builder.layouts, tuple(builder.steps), outputs, loss, mutations)


def _check(op: Op, rule: OpRule, strategy: Strategy, mesh: Mesh) -> None:
    try:
        check_strategy(rule, strategy, mesh)
    except LayoutError as error:
        raise LayoutError(problem(str(error), op=op.name, source=op.source)) from error


class _Builder:
    """The steps so far, the layout of every name, and the conversions already made."""

    def __init__(self, graph: Graph, mesh: Mesh, layouts: dict[str, Layout]) -> None:
        self.graph, self.mesh, self.layouts = graph, mesh, layouts
        self.steps: list[Step | Conversion] = []
        self._made: dict[tuple[str, Layout], str] = {}
        self._count: dict[str, int] = {}

    def add(self, placed: PlacedOp) -> None:
        applied = apply_strategy(placed.rule, placed.strategy, self.mesh)
        names = tuple(
            self.convert(value, layout, placed.op.name)
            for value, layout in zip(placed.op.operands, applied.operands, strict=True)
        )
        layouts = tuple(self.layouts[name] for name in names)
        self.steps.append(Step(placed, names, layouts, applied.results))
        self.layouts.update(zip(placed.op.results, applied.results, strict=True))

    def whole(self, value: str) -> str:
        """The name of the value, invariant on every axis."""
        return self.convert(value, Layout.whole(self.mesh, self.graph.by_name[value].shape), "")

    def convert(self, value: str, target: Layout, op: str) -> str:
        """The name under which ``value`` is available in ``target``; without gradient, replicated and invariant are the
        same."""
        info, source = self.graph.by_name[value], self.layouts[value]
        if not info.requires_grad:
            source, target = _gradient_free(source), _gradient_free(target)
        target = target.canonical()
        if source.canonical() == target:
            return value
        key = (value, target)
        if key not in self._made:
            moves = redistribute(source, target, differentiable=info.requires_grad)
            self._count[value] = self._count.get(value, 0) + 1
            result = f"{value}:{self._count[value]}"
            self._made[key] = result
            self.layouts[result] = target
            self.steps.append(
                Conversion(value, result, source, target, moves, info.requires_grad, info.dtype.itemsize, op)
            )
        return self._made[key]


def _gradient_free(layout: Layout) -> Layout:
    replicated = [axis for axis, state in layout.states if state == "R"]
    return layout.moved(dict.fromkeys(replicated, "I")) if replicated else layout
