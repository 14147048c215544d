"""Sharding propagation: complete a plan from the strategies that are fixed, by following the data.

Every sub-axis is decided by itself, major first. Two passes over the graph:

* *up*: an operator that is fixed and wants an operand sharded asks the operator (or the parameter) that makes it to
  produce it so, and that one its own operands, as long as the factor can be split there. A contraction (a matrix
  product, an embedding) whose operands come from an operator that is fixed differently obeys only if they do not decide
  otherwise on the way down: after an attention that is split by heads, the output projection sums over them, whatever
  layout the sum is then wanted in;
* *down*: in execution order, every operator that is still open takes the choice that converts the fewest bytes of its
  operands; one that reduces (a matrix product, attention, a norm) never gathers them in order to repeat the work. It
  splits a factor only where an operand already is split on it, or comes as a partial sum (``scatter``):
  reducing and scattering it costs no more than reducing it for everyone, and divides the work.

The result is greedy and local: no backtracking, no memory, one state per value. It is the specification's
``sharding_propagation``, a breadth-first search from every configured operator, made independent of the order in which
operators were configured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

from shardwise.graph.ir import Graph, Op
from shardwise.layouts.conversions import CELLS
from shardwise.layouts.layout import Layout
from shardwise.layouts.mesh import Mesh
from shardwise.layouts.strategy import REDUCTION_STATES, Strategy, is_rest
from shardwise.rules.rule import Dims, OpRule

# Where a value is on one axis: "I", "R", "P" (or another partial kind), or a place: (dim, stride of the atom in the
# dim, its size).
Place = tuple[int, int, int]
Where = str | Place

PRIMITIVE_SHARE = {"all_gather": 1.0, "reduce_scatter": 1.0, "all_reduce": 2.0}


def axis_cost(source: Where, target: Where, size: int, differentiable: bool) -> float:
    """What converting one axis moves, as a share of the tensor that is whole along it: each device sends (n-1)/n of it
    in an all-gather or reduce-scatter, twice that in an all-reduce, 1/n of that in an all-to-all."""
    if source == target:
        return 0.0
    states = [w if isinstance(w, str) else "S" for w in (source, target)]
    if not differentiable:
        states = ["I" if s == "R" else s for s in states]
    cell = CELLS["P" if states[0].startswith("P") else states[0], "P" if states[1].startswith("P") else states[1]]
    used = [cell.forward] + ([cell.backward] if differentiable else [])
    share = sum(1 / size if p == "all_to_all" else PRIMITIVE_SHARE.get(p, 0.0) for p in used)
    return share * (size - 1) / size


def factor_places(rule: OpRule) -> tuple[tuple[dict[str, Place], ...], tuple[dict[str, Place], ...]]:
    """For every operand and every result: factor -> its place there."""
    sizes = {factor.name: factor.size for factor in rule.factors}

    def places(tensor: Dims) -> dict[str, Place]:
        found: dict[str, Place] = {}
        for dim, factors in enumerate(tensor):
            stride = 1
            for factor in reversed(factors):
                found[factor] = (dim, stride, sizes[factor])
                stride *= sizes[factor]
        return found

    operands = tuple(map(places, rule.operands))
    for base, window in rule.windows:  # who splits the result wants the operand split in the same place
        seen, through = rule.parts_of(base)[0].name, rule.parts_of(window.factor)[0].name
        for own in operands:
            if seen in own:
                own[through] = own[seen]
    return operands, tuple(map(places, rule.results))


def where_of(layout: Layout) -> dict[str, Where]:
    """A layout as propagation sees it: sub-axis -> state or place; those that share a place are major first."""
    found: dict[str, Where] = {}
    for axis, (dim, atom) in layout.positions.items():
        sizes = [a.size for a in layout.dims[dim]]
        found[axis] = (dim, prod(sizes[atom + 1 :]), sizes[atom])
    return found | {axis: state for axis, state in layout.state_of.items() if axis not in found}


@dataclass
class Propagation:
    """The state of one propagation over a graph. ``choices``: op -> sub-axis -> factor, ``I``, ``R`` or ``P<group>``;
    ``sources``: source value -> sub-axis -> where it is stored. Both are filled in by ``run``; what they hold before is
    fixed.

    ``movable``: sources whose storage follows their consumers (parameters). ``closed``: (op, axis) pairs that repeat
    the work on an axis rather than follow their operands. ``scatter``: whether partial sums may be scattered where
    nothing else asks for a split (not inside lowerings, whose sums are small and needed whole).
    """

    graph: Graph
    rules: Mapping[str, OpRule]
    mesh: Mesh
    choices: dict[str, dict[str, str]] = field(default_factory=dict)
    sources: dict[str, dict[str, Where]] = field(default_factory=dict)
    movable: frozenset[str] = frozenset()
    closed: frozenset[tuple[str, str]] = frozenset()
    scatter: bool = False

    def run(self) -> dict[str, Strategy]:
        """Decide everything that is open and return a strategy per op."""
        self._places = {op.name: factor_places(self.rules[op.name]) for op in self.graph.ops}
        self._split: dict[tuple[str, str], int] = {}
        self._asked: dict[tuple[str, str], str] = {}  # (op, axis) -> the factor that a consumer would like split
        self._fixed = {name: tuple(choices.items()) for name, choices in self.choices.items()}
        for op in self.graph.ops:
            for axis, choice in self.choices.setdefault(op.name, {}).items():
                self._count(op.name, choice, axis)
        self._converted: set[tuple[str, str, Where]] = set()  # (value, axis, where) that some operator already needs
        for axis in self.mesh.sub_axes:
            self._up(axis)
            self._down(axis)
        return self._ordered()

    def _ordered(self) -> dict[str, Strategy]:
        """The choices as strategies. Axes of one factor are major first: in the order the user wrote, else in that of
        an operand which is split so, else in device order. A parameter takes the order of its first consumer."""
        order: dict[tuple[str, Place], tuple[str, ...]] = {}
        for value, where in self.sources.items():
            if value not in self.movable:
                for place in {own for own in where.values() if isinstance(own, tuple)}:
                    order[value, place] = tuple(axis for axis, own in where.items() if own == place)
        found: dict[str, Strategy] = {}
        for op in self.graph.ops:
            choices, places = self.choices[op.name], self._places[op.name]
            ordered: dict[str, str] = {}
            for factor in dict.fromkeys(choices.values()):
                axes = sorted((a for a, own in choices.items() if own == factor), key=self.mesh.order.__getitem__)
                written = [a for a, own in self._fixed.get(op.name, ()) if own == factor]
                at = [(value, own[factor]) for value, own in zip(op.operands, places[0], strict=True) if factor in own]
                known = next((order[key] for key in at if sorted(order.get(key, ())) == sorted(axes)), None)
                if written:
                    slots = [i for i, axis in enumerate(axes) if axis in written]
                    for slot, axis in zip(slots, written, strict=True):
                        axes[slot] = axis
                elif known is not None:
                    axes = list(known)
                ordered |= dict.fromkeys(axes, factor)
                results = [
                    (value, own[factor]) for value, own in zip(op.results, places[1], strict=True) if factor in own
                ]
                for key in (*at, *results):
                    order.setdefault(key, tuple(axes))
            found[op.name] = Strategy.of(ordered)
        for value, where in self.sources.items():
            for place in {own for own in where.values() if isinstance(own, tuple)}:
                axes = [a for a in order.get((value, place), ()) if where.get(a) == place]
                for axis in axes:
                    where[axis] = where.pop(axis)
        return found

    def _count(self, op: str, choice: str, axis: str) -> None:
        if not is_rest(choice):
            self._split[op, choice] = self._split.get((op, choice), 1) * self.mesh.sizes[axis]

    def _decide(self, op: Op, axis: str, choice: str) -> None:
        self.choices[op.name][axis] = choice
        self._count(op.name, choice, axis)
        self._store(op, axis)

    def _store(self, op: Op, axis: str) -> None:
        """Parameters that are not stored anywhere yet on this axis are stored as their consumer needs them."""
        for position, value in enumerate(op.operands):
            if value in self.movable and axis not in self.sources.setdefault(value, {}):
                need = self.operand_where(op.name, position, self.choices[op.name][axis])
                self.sources[value][axis] = need if isinstance(need, tuple) else "I"

    def _fits(self, op: Op, factor: str, axis: str) -> bool:
        """Whether a factor can be split over one more axis and leave every device a share."""
        own = self.rules[op.name].factor(factor)
        return own.kind != "whole" and own.size // self._split.get((op.name, factor), 1) >= self.mesh.sizes[axis]

    def operand_where(self, op: str, position: int, choice: str) -> Where:
        """Where an operand must be on an axis, given the op's choice for it."""
        if choice in ("I", "R"):
            return choice
        if is_rest(choice):
            return "P" if position in self.rules[op].linear[int(choice[1:])] else "R"
        return self._places[op][0][position].get(choice, "R")

    def result_where(self, op: str, index: int, choice: str) -> Where:
        """Where a result is on an axis, given the op's choice for it."""
        if is_rest(choice):
            return "P" if choice.startswith("P") else choice
        own = self._places[op][1][index].get(choice)
        return own if own is not None else REDUCTION_STATES.get(self.rules[op].factor(choice).kind, "I")

    def _value_where(self, value: str, axis: str) -> Where | None:
        """Where a value is on an axis, or None while that is open."""
        producer = self.graph.producer.get(value)
        if producer is None:
            return self.sources.get(value, {}).get(axis, None if value in self.movable else "I")
        choice = self.choices[producer.name].get(axis)
        return None if choice is None else self.result_where(producer.name, producer.results.index(value), choice)

    def _up(self, axis: str) -> None:
        """From the fixed operators against the data."""
        pending = [op for op in self.graph.ops if axis in self.choices[op.name]]
        for op in pending:
            self._store(op, axis)
        while pending:
            op = pending.pop()
            for producer, factor in self._makers(op, self.choices[op.name][axis], axis):
                if axis in self.choices[producer.name] or factor is None:
                    continue
                if self._contracts(producer) and self._meets_other(producer, factor, axis):
                    self._asked.setdefault((producer.name, axis), factor)
                else:
                    self._decide(producer, axis, factor)
                    pending.append(producer)

    def _makers(self, op: Op, choice: str, axis: str) -> list[tuple[Op, str | None]]:
        """The operators that make the operands which ``choice`` wants sharded, each with the factor to split for it, or
        None where it makes, or must make, something else."""
        if is_rest(choice):
            return []
        found: list[tuple[Op, str | None]] = []
        for position, value in enumerate(op.operands):
            place = self._places[op.name][0][position].get(choice)
            producer = self.graph.producer.get(value)
            if place is None or producer is None:
                continue
            index = producer.results.index(value)
            own = self.choices[producer.name].get(axis)
            if own is not None:
                found.append((producer, own if self.result_where(producer.name, index, own) == place else None))
                continue
            factors = [name for name, at in self._places[producer.name][1][index].items() if at == place]
            open_to = factors and (producer.name, axis) not in self.closed and self._fits(producer, factors[0], axis)
            found.append((producer, factors[0] if open_to else None))
        return found

    def _contracts(self, op: Op) -> bool:
        return len(op.operands) > 1 and any(factor.kind == "sum" for factor in self.rules[op.name].factors)

    def _meets_other(self, op: Op, factor: str, axis: str) -> bool:
        """Whether splitting ``factor`` would meet, before the next contraction, an operator that is decided
        otherwise."""
        pending, seen = [(op, factor)], {op.name}
        while pending:
            for producer, own in self._makers(*pending.pop(), axis):
                decided = axis in self.choices[producer.name]
                if decided and own is None:
                    return True
                if not decided and own is not None and producer.name not in seen and not self._contracts(producer):
                    seen.add(producer.name)
                    pending.append((producer, own))
        return False

    def _down(self, axis: str) -> None:
        """With the data, in execution order."""
        for op in self.graph.ops:
            if axis not in self.choices[op.name]:
                choice = self._best(op, axis)
                self._decide(op, axis, self._asked.get((op.name, axis), "I") if choice == "I" else choice)
            for position, value in enumerate(op.operands):
                self._converted.add((value, axis, self.operand_where(op.name, position, self.choices[op.name][axis])))

    def _best(self, op: Op, axis: str) -> str:
        rule = self.rules[op.name]
        if (op.name, axis) in self.closed:
            return "I"
        known = [self._value_where(value, axis) for value in op.operands]
        places = self._places[op.name][0]
        candidates: list[str] = []
        for factor in rule.factors:
            asked = any(where is not None and where == places[i].get(factor.name) for i, where in enumerate(known))
            if asked and self._fits(op, factor.name, axis):
                candidates.append(factor.name)
        scattered = self._scattered(op, axis, known)
        if scattered is not None and scattered not in candidates:
            candidates.append(scattered)
        if candidates and len(op.operands) > 1 and any(f.kind in ("sum", "lowered") for f in rule.factors):
            return min(candidates, key=lambda choice: self._cost(op, axis, choice, known))
        if (
            "R" in known
        ):  # inside a lowering: what comes replicated stays so, or a consumer that is split would pay for it
            candidates.append("R")
        candidates.append("I")
        for group, members in enumerate(rule.linear):
            if any(known[i] == "P" for i in members) and self._passes_on(op):
                candidates.append(f"P{group}")
        return min(candidates, key=lambda choice: self._cost(op, axis, choice, known))

    def _scattered(self, op: Op, axis: str, known: list[Where | None]) -> str | None:
        """The factor over which a partial sum among the operands is scattered: the one that other axes of that sum are
        scattered over, else the first that is not split yet; only where it divides."""
        rule = self.rules[op.name]
        position = next((i for i, where in enumerate(known) if where == "P"), None)
        if position is None or not self.scatter:
            return None
        value, own = op.operands[position], self.choices[op.name]
        summed = {own[other] for other in own if self._value_where(value, other) == "P" and not is_rest(own[other])}
        found: str | None = None
        for name in self._places[op.name][0][position]:
            factor, split = rule.factor(name), self._split.get((op.name, name), 1)
            if factor.kind not in ("parallel", "sum") or factor.size % (split * self.mesh.sizes[axis]):
                continue
            if name in summed:
                return name
            if split == 1 and found is None:
                found = name
        return found

    def _passes_on(self, op: Op) -> bool:
        """A partial sum is carried through an operator only while a single consumer waits for it: otherwise each would
        reduce it."""
        return len(op.results) == 1 and len(self.graph.consumers[op.results[0]]) == 1

    def _cost(self, op: Op, axis: str, choice: str, known: list[Where | None]) -> float:
        """Bytes that operands move for a choice. Rows of neighbours (windows) count as nothing: they are fewer than any
        other conversion of their operand moves, and counted they would only lose to repeating the work on an operand
        that somebody else has gathered."""
        total = 0.0
        for position, value in enumerate(op.operands):
            where = known[position]
            if where is None or (value in self.movable and where == "I"):
                continue
            need = self.operand_where(op.name, position, choice)
            if (value, axis, need) in self._converted:
                continue
            info = self.graph.by_name[value]
            total += info.num_bytes * axis_cost(where, need, self.mesh.sizes[axis], info.requires_grad)
        return total
