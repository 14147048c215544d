"""Sharding propagation: completes a plan from the fixed strategies by following the data.

Every sub-axis is decided separately, major first, in two passes over the graph:

* *up*: a fixed operator that needs a sharded operand makes its producer (operator or parameter) produce it sharded, and
  that one its own operands, as long as the factor can be split there. If the operands of a contraction (a matrix
  product, an embedding) come from an operator that is fixed differently, the request only applies when they do not
  decide otherwise on the way down. Example: after attention split by heads, the output projection sums over heads,
  whatever layout its consumer needs;
* *down*: in execution order, every undecided operator takes the choice that converts the fewest bytes of its operands.
  Operators that reduce (a matrix product, attention, a norm) never gather them to replicate the work. A factor is split
  only if an operand is already split on it, or is a partial sum (``scatter``): a reduce-scatter costs no more than an
  all-reduce, and divides the work.

The algorithm is greedy and local: no backtracking, no memory, one state per value. It is the specification's
``sharding_propagation``, a breadth-first search from every configured operator, made independent of the order in which
operators were configured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardwise.graph.ir import Graph, Op
from shardwise.layouts.choice import (
    BY_KEY,
    INVARIANT,
    REPLICATED,
    AxisChoice,
    Choices,
    PassSum,
    ShardPosition,
    ShardPositions,
    Split,
    Where,
)
from shardwise.layouts.conversions import CELLS
from shardwise.layouts.mesh import Mesh
from shardwise.layouts.strategy import Strategy
from shardwise.rules.keyed_rows import copies_of
from shardwise.rules.rule import OpRule

PRIMITIVE_SHARE = {"all_gather": 1.0, "reduce_scatter": 1.0, "all_reduce": 2.0}


def axis_cost(source: Where, target: Where, size: int, differentiable: bool) -> float:
    """Return the bytes that converting one axis sends, as a share of the tensor that is whole along it: (n-1)/n per
    device in an all-gather or reduce-scatter, twice that in an all-reduce, 1/n of that in an all-to-all."""
    if source == target:
        return 0.0
    states = [w if isinstance(w, str) and not copies_of(w) else "S" for w in (source, target)]
    if not differentiable:
        states = ["I" if s == "R" else s for s in states]
    cell = CELLS["P" if states[0].startswith("P") else states[0], "P" if states[1].startswith("P") else states[1]]
    used = [cell.forward] + ([cell.backward] if differentiable else [])
    share = sum(1 / size if p == "all_to_all" else PRIMITIVE_SHARE.get(p, 0.0) for p in used)
    return share * (size - 1) / size


@dataclass
class Propagation:
    """The state of one propagation over a graph. ``choices``: of operators; ``sources``: source value -> sub-axis ->
    where it is stored. ``run`` fills in both; entries that exist before are fixed.

    ``movable``: sources whose storage follows their consumers (parameters). ``closed``: (op, axis) pairs that replicate
    the work on an axis instead of following their operands. ``inside``: operators that follow a constraint inside their
    scope, and no operator outside of it. ``scatter``: whether partial sums may be scattered if
    nothing else asks for a split (not inside lowerings, whose sums are small and needed whole).
    """

    graph: Graph
    rules: Mapping[str, OpRule]
    mesh: Mesh
    choices: Choices = field(default_factory=dict)
    sources: dict[str, dict[str, Where]] = field(default_factory=dict)
    movable: frozenset[str] = frozenset()
    closed: frozenset[tuple[str, str]] = frozenset()
    inside: frozenset[str] = frozenset()
    scatter: bool = False

    def run(self) -> dict[str, Strategy]:
        """Decide all open choices and return a strategy per operator."""
        self._places = {op.name: ShardPositions.of(self.rules[op.name]) for op in self.graph.ops}
        self._parts: dict[tuple[str, Split], int] = {}  # (op, split) -> number of parts so far
        self._hints: dict[tuple[str, str], Split] = {}  # (op, axis) -> the split that a consumer prefers
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
        """Return the choices as strategies. Axes of one factor are major first: in the user's order, else in that of an
        operand with the same split, else in device order. A parameter takes the order of its first consumer."""
        order: dict[tuple[str, ShardPosition], tuple[str, ...]] = {}
        for value, where in self.sources.items():
            if value not in self.movable:
                for place in {location for location in where.values() if isinstance(location, ShardPosition)}:
                    order[value, place] = tuple(axis for axis, location in where.items() if location == place)
        strategies: dict[str, Strategy] = {}
        for op in self.graph.ops:
            choices, places = self.choices[op.name], self._places[op.name]
            ordered: dict[str, AxisChoice] = {}
            for choice in dict.fromkeys(choices.values()):
                axes = sorted((a for a, c in choices.items() if c == choice), key=self.mesh.order.__getitem__)
                written = [a for a, c in self._fixed.get(op.name, ()) if c == choice]
                operands = zip(op.operands, (places.operand(i, choice) for i in range(len(op.operands))), strict=True)
                at = [(value, where) for value, where in operands if isinstance(where, ShardPosition)]
                same_axes = next((order[key] for key in at if sorted(order.get(key, ())) == sorted(axes)), None)
                if written:
                    slots = [i for i, axis in enumerate(axes) if axis in written]
                    for slot, axis in zip(slots, written, strict=True):
                        axes[slot] = axis
                elif same_axes is not None:
                    axes = list(same_axes)
                ordered |= dict.fromkeys(axes, choice)
                results = zip(op.results, (places.result(i, choice) for i in range(len(op.results))), strict=True)
                for key in (*at, *((value, where) for value, where in results if isinstance(where, ShardPosition))):
                    order.setdefault(key, tuple(axes))
            strategies[op.name] = Strategy.of(ordered)
        for value, where in self.sources.items():
            for place in {location for location in where.values() if isinstance(location, ShardPosition)}:
                axes = [a for a in order.get((value, place), ()) if where.get(a) == place]
                for axis in axes:
                    where[axis] = where.pop(axis)
        return strategies

    def _count(self, op: str, choice: AxisChoice, axis: str) -> None:
        if isinstance(choice, Split):
            self._parts[op, choice] = self._parts.get((op, choice), 1) * self.mesh.sizes[axis]

    def _decide(self, op: Op, axis: str, choice: AxisChoice) -> None:
        self.choices[op.name][axis] = choice
        self._count(op.name, choice, axis)
        self._store(op, axis)

    def _store(self, op: Op, axis: str) -> None:
        """Store parameters that are undecided on this axis as their consumer needs them."""
        for position, value in enumerate(op.operands):
            if value in self.movable and axis not in self.sources.setdefault(value, {}):
                need = self._places[op.name].operand(position, self.choices[op.name][axis])
                self.sources[value][axis] = need if isinstance(need, ShardPosition) else "I"

    def _fits(self, op: Op, split: Split, axis: str) -> bool:
        """Return whether a factor can be split over one more axis so that every device gets a non-empty part."""
        factor = self.rules[op.name].factor(split.factor)
        return factor.kind != "whole" and factor.size // self._parts.get((op.name, split), 1) >= self.mesh.sizes[axis]

    def _value_where(self, value: str, axis: str) -> Where | None:
        """Return the placement of a value on an axis, or None while it is undecided."""
        producer = self.graph.producer.get(value)
        if producer is None:
            return self.sources.get(value, {}).get(axis, None if value in self.movable else "I")
        choice = self.choices[producer.name].get(axis)
        return None if choice is None else self._places[producer.name].result(producer.results.index(value), choice)

    def _up(self, axis: str) -> None:
        """Propagate from the fixed operators against the data flow."""
        pending = [op for op in self.graph.ops if axis in self.choices[op.name]]
        for op in pending:
            self._store(op, axis)
        while pending:
            op = pending.pop()
            for producer, split in self._makers(op, self.choices[op.name][axis], axis):
                if axis in self.choices[producer.name] or split is None:
                    continue
                if self._contracts(producer) and self._meets_other(producer, split, axis):
                    self._hints.setdefault((producer.name, axis), split)
                else:
                    self._decide(producer, axis, split)
                    pending.append(producer)

    def _makers(self, op: Op, choice: AxisChoice, axis: str) -> list[tuple[Op, Split | None]]:
        """Return the producers of the operands that ``choice`` needs sharded, each with the split that produces this,
        or None if it is decided otherwise or cannot be split so."""
        makers: list[tuple[Op, Split | None]] = []
        for position, value in enumerate(op.operands):
            place = self._places[op.name].operand(position, choice)
            producer = self.graph.producer.get(value)
            if not isinstance(place, ShardPosition) or producer is None:
                continue
            places, index = self._places[producer.name], producer.results.index(value)
            decided = self.choices[producer.name].get(axis)
            if decided is not None:
                agrees = places.result(index, decided) == place
                makers.append((producer, decided if isinstance(decided, Split) and agrees else None))
                continue
            split = places.split_of_result(index, place)
            is_open = (producer.name, axis) not in self.closed
            is_open &= producer.name not in self.inside or producer.scope == op.scope
            fits = split is not None and is_open and self._fits(producer, split, axis)
            makers.append((producer, split if fits else None))
        return makers

    def _contracts(self, op: Op) -> bool:
        return len(op.operands) > 1 and any(factor.kind == "sum" for factor in self.rules[op.name].factors)

    def _meets_other(self, op: Op, split: Split, axis: str) -> bool:
        """Return whether the split meets an operator that is decided otherwise before the next contraction."""
        pending, seen = [(op, split)], {op.name}
        while pending:
            for producer, choice in self._makers(*pending.pop(), axis):
                decided = axis in self.choices[producer.name]
                if decided and choice is None:
                    return True
                if not decided and choice is not None and producer.name not in seen and not self._contracts(producer):
                    seen.add(producer.name)
                    pending.append((producer, choice))
        return False

    def _down(self, axis: str) -> None:
        """Propagate with the data flow, in execution order."""
        for op in self.graph.ops:
            if axis not in self.choices[op.name]:
                choice = self._best(op, axis)
                self._decide(op, axis, self._hints.get((op.name, axis), INVARIANT) if choice == INVARIANT else choice)
            for position, value in enumerate(op.operands):
                need = self._places[op.name].operand(position, self.choices[op.name][axis])
                self._converted.add((value, axis, need))

    def _best(self, op: Op, axis: str) -> AxisChoice:
        rule = self.rules[op.name]
        if (op.name, axis) in self.closed:
            return INVARIANT
        operands = [self._value_where(value, axis) for value in op.operands]
        places = self._places[op.name].operands
        candidates: list[AxisChoice] = []
        for factor in rule.factors:
            fits = any(where is not None and where == places[i].get(factor.name) for i, where in enumerate(operands))
            if fits and self._fits(op, Split(factor.name), axis):
                candidates.append(Split(factor.name))
        for position, where in enumerate(operands):
            if not copies_of(where):
                continue
            if rule.keyed is not None:
                return BY_KEY
            rows = (Split(name) for name, at in places[position].items() if at.dim == 0)
            candidates += [split for split in rows if self._fits(op, split, axis) and split not in candidates][:1]
        scattered = self._scattered(op, axis, operands)
        if scattered is not None and scattered not in candidates:
            candidates.append(scattered)
        if candidates and len(op.operands) > 1 and any(f.kind in ("sum", "lowered") for f in rule.factors):
            return min(candidates, key=lambda choice: self._cost(op, axis, choice, operands))
        if "R" in operands and rule.largest is None:
            # Inside a lowering: stay replicated, else a split consumer would pay a conversion.
            candidates.append(REPLICATED)
        candidates.append(INVARIANT)
        # A partial sum is passed on to a single consumer only, because every consumer would reduce it.
        passes_on = len(op.results) == 1 and len(self.graph.consumers[op.results[0]]) == 1
        for group, members in enumerate(rule.linear):
            if passes_on and any(operands[i] == "P" for i in members):
                candidates.append(PassSum(group))
        return min(candidates, key=lambda choice: self._cost(op, axis, choice, operands))

    def _scattered(self, op: Op, axis: str, operands: list[Where | None]) -> Split | None:
        """Return the factor over which to scatter a partial sum among the operands, or None: the factor that other axes
        of that sum are scattered over, else the first unsplit one. It must be divisible."""
        rule = self.rules[op.name]
        position = next((i for i, where in enumerate(operands) if where == "P"), None)
        if position is None or not self.scatter:
            return None
        value, choices = op.operands[position], self.choices[op.name]
        summed = {choice for other, choice in choices.items() if self._value_where(value, other) == "P"}
        first: Split | None = None
        for split in map(Split, self._places[op.name].operands[position]):
            factor, parts = rule.factor(split.factor), self._parts.get((op.name, split), 1)
            if factor.kind not in ("parallel", "sum") or factor.size % (parts * self.mesh.sizes[axis]):
                continue
            if split in summed:
                return split
            if parts == 1 and first is None:
                first = split
        return first

    def _cost(self, op: Op, axis: str, choice: AxisChoice, operands: list[Where | None]) -> float:
        """Return the bytes that operands move for a choice. Halo rows (windows) count as zero: they are fewer than any
        other conversion of their operand moves. If they counted, replicating the work on an operand that another
        consumer has gathered would win."""
        total = 0.0
        for position, value in enumerate(op.operands):
            where = operands[position]
            if where is None or (value in self.movable and where == "I"):
                continue
            need = self._places[op.name].operand(position, choice)
            if (value, axis, need) in self._converted:
                continue
            info = self.graph.by_name[value]
            total += info.num_bytes * axis_cost(where, need, self.mesh.sizes[axis], info.requires_grad)
        return total
