"""The legal strategies of an operator with their prices, as arrays.

Every mesh axis (as a whole) splits a factor, repeats the work (``I`` or ``R``) or lets a partial sum pass (``P0`` ...).
All combinations that leave every device a share are strategies. Operators of the same kind (target, arguments, shapes,
atoms) share their domain.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray

from shardwise.costs.cluster import Device
from shardwise.costs.flops import FLOPS
from shardwise.costs.kernels import is_view
from shardwise.costs.prices import Prices
from shardwise.costs.pricing import Fragments, Router, overlap_windows, owners_call
from shardwise.costs.saved_for_backward import saved_for_backward
from shardwise.graph.grouped import most_keys, order_by_owner
from shardwise.graph.ir import Arg, Graph, Op, Ref, Value, map_refs
from shardwise.layouts.choice import (
    BY_KEY,
    INVARIANT,
    REDUCTION_STATES,
    REPLICATED,
    AxisChoice,
    PassSum,
    ShardPositions,
    Split,
    Where,
    splits_owners,
)
from shardwise.layouts.routes import SHARDED, STATES, Axes, Floats, Ints, Routes, RouteTensor
from shardwise.layouts.strategy import Strategy
from shardwise.programs.builder import Choice
from shardwise.rules.atoms import Factored
from shardwise.rules.keyed_rows import KeyedRows, copies_of
from shardwise.rules.rule import OpRule, base_name
from shardwise.search.constants import HEAVY_INPUT_WORK, LOWERED_FORWARD_PARTS
from shardwise.search.elimination import Elimination, Shape
from shardwise.search.modes import choose
from shardwise.search.planning_cache import PlanningCache
from shardwise.search.user_strategies import num_blockers

COMBINED = frozenset(REDUCTION_STATES) - {"sum"}  # kinds of factors whose parts are combined by another operation


@dataclass(frozen=True)
class Domain:
    """Strategies 0, 1, ... of one kind of operator. ``choices``: per strategy the choice of each of ``axes``.
    ``operands``, ``results``: per tensor and strategy its node in the value's ``Routes`` (operands that carry no
    gradient and depend on no parameter: None). ``compute``: seconds of the operator; ``exposed``: of collectives that
    are part of it; ``kept``: bytes kept for backward besides operands; ``keeps``: operands that are kept; ``forward``:
    the part of ``compute`` that is recomputed if nothing is kept; ``holds``: results that are kept."""

    axes: Axes
    choices: tuple[tuple[AxisChoice, ...], ...]
    operands: tuple[Ints | None, ...]
    results: tuple[Ints | None, ...]
    compute: Floats
    exposed: Floats
    kept: Floats
    keeps: frozenset[int]
    forward: Floats
    holds: frozenset[int] = frozenset()

    def __len__(self) -> int:
        return len(self.choices)

    def strategy(self, index: int) -> Strategy:
        if index not in self._strategies:
            self._strategies[index] = strategy_of(self.choices[index], self.axes)
        return self._strategies[index]

    @cached_property
    def _strategies(self) -> dict[int, Strategy]:
        return {}

    def only(self, kept: Ints) -> Domain:
        per_strategy = {name: getattr(self, name)[kept] for name in ("compute", "exposed", "kept", "forward")}
        return replace(
            self,
            choices=tuple(self.choices[i] for i in kept.tolist()),
            operands=tuple(None if nodes is None else nodes[kept] for nodes in self.operands),
            results=tuple(None if nodes is None else nodes[kept] for nodes in self.results),
            **per_strategy,
        )


class SearchSpace:
    """The choices of a graph, on every mesh. ``active``: values that depend on a parameter or on much work; only these
    have layouts to choose, all others are made where they are needed."""

    def __init__(self, graph: Graph, factored: Factored) -> None:
        self.graph, self.rules, self.atoms = graph, factored.rules, factored.atoms
        self.parameters = frozenset(s.value for s in graph.sources if s.kind == "parameter")
        self._kinds: dict[str, int] = {}
        self._numbers: dict[object, int] = {}
        self._windows: dict[Device, Mapping[str, float]] = {}

    @cached_property
    def received(self) -> tuple[str, ...]:
        """Return the values of another stage that have a gradient."""
        graph = self.graph
        return tuple(s.value for s in graph.sources if s.kind == "activation" and graph.by_name[s.value].requires_grad)

    @cached_property
    def active(self) -> frozenset[str]:
        active = {*self.parameters, *self.received}
        for op in self.graph.ops:
            if op.name in self.heavy or any(name in active for name in op.operands):
                active.update(op.results)
        return frozenset(active)

    @cached_property
    def heavy(self) -> frozenset[str]:
        """Return the operators that have a choice though they depend on no parameter. They reduce the result of much
        work, as consumers of a whole result do not decide how that is split, or do much work for such a reduction."""
        dependent = {*self.parameters, *self.received}
        free: list[Op] = []
        for op in self.graph.ops:
            if any(name in dependent for name in op.operands):
                dependent.update(op.results)
            else:
                free.append(op)
        heavy: set[str] = set()
        reduced: set[str] = set()
        for op in reversed(free):
            rule, is_needed = self.rules[op.name], not reduced.isdisjoint(op.results)
            if prod(factor.size for factor in rule.factors) >= HEAVY_INPUT_WORK and (is_needed or _reduces(rule)):
                is_needed = True
                heavy.update(() if is_view(op.target) else (op.name,))
            if is_needed:
                reduced.update(op.operands)
        return frozenset(heavy)

    @cached_property
    def operators(self) -> tuple[Op, ...]:
        return tuple(
            op for op in self.graph.ops if op.name in self.heavy or any(name in self.active for name in op.operands)
        )

    @cached_property
    def consumers(self) -> dict[str, list[Op]]:
        """Return, for every active value, the operators with a choice that use it, each once."""
        consumers: dict[str, list[Op]] = {}
        for op in self.operators:
            for name in dict.fromkeys(op.operands):
                if name in self.active:
                    consumers.setdefault(name, []).append(op)
        return consumers

    @cached_property
    def keyed(self) -> Mapping[str, str]:
        """Return the keyed state of every value whose rows may follow keys."""
        states: dict[str, str] = {}
        for op in self.graph.ops:
            if (keyed := self.rules[op.name].keyed) is not None:
                tensors = zip((*op.operands, *op.results), (*keyed.operands, *keyed.results), strict=True)
                states = {name: state for name, state in tensors if copies_of(state)} | states
        return states

    @cached_property
    def partials(self) -> Mapping[str, str]:
        """Return the partial state of the values whose parts are combined by another operation than a sum."""
        return {
            result: REDUCTION_STATES[factor.kind]
            for op in self.graph.ops
            for result in op.results
            for factor in self.rules[op.name].factors
            if factor.kind in COMBINED
        }

    def windows(self, prices: Prices) -> Mapping[str, float]:
        """Return the seconds that the messages of each parameter can hide behind."""
        if prices.device not in self._windows:
            self._windows[prices.device] = overlap_windows(self.graph, prices)
        return self._windows[prices.device]

    def kind(self, op: Op) -> int:
        """Return a number that operators share which have the same domain."""
        number = self._kinds.get(op.name)
        if number is None:
            number = self._kinds[op.name] = self._numbers.setdefault(self.kind_of(op), len(self._numbers))
        return number

    def is_blocked(self, op: Op, factor: str) -> bool:
        """Return whether a factor is a part of a divided one that some operator must keep whole or lower."""
        return base_name(factor) != factor and self._num_blockers[op.name, factor] > 0

    @cached_property
    def _num_blockers(self) -> Mapping[tuple[str, str], int]:
        return num_blockers(self.graph, self.rules, ("whole", "lowered"))

    def kind_of(self, op: Op) -> Hashable:
        """Return everything that decides the domain of an operator on given axes and links."""
        rule = self.rules[op.name]

        def tensor(name: str) -> object:
            value = self.graph.by_name[name]
            state = (name in self.active, name in self.parameters, self.keyed.get(name), self.partials.get(name))
            return value.shape, value.dtype, value.requires_grad, self.atoms[name], state

        numbers: dict[str, int] = {}
        for name in op.operands:
            numbers.setdefault(name, len(numbers))

        def plain(arg: Arg) -> Arg:
            return map_refs(arg, lambda name: ("ref", numbers[name]))

        return (
            op.target,
            tuple(plain(arg) for arg in op.args),
            tuple((key, plain(arg)) for key, arg in op.kwargs),
            tuple(map(tensor, op.operands)),
            tuple(map(tensor, op.results)),
            (rule.factors, rule.operands, rule.results, rule.linear, rule.keyed, rule.windows, rule.lowering),
            tuple(self.is_blocked(op, factor.name) for factor in rule.factors),
        )


class Domains:
    """The domains of all operators of a graph on one mesh. ``eliminations``: of the problems of cost graphs over them,
    which mostly differ only in prices."""

    def __init__(self, choosing: SearchSpace, axes: Axes, prices: Prices, cache: PlanningCache | None = None) -> None:
        self.choosing, self.graph, self.rules, self.atoms = choosing, choosing.graph, choosing.rules, choosing.atoms
        self.parameters, self.active, self.received = choosing.parameters, choosing.active, choosing.received
        self.operators, self.consumers = choosing.operators, choosing.consumers
        where, of_call = (axes, prices.links, prices.bucket_bytes), (cache or PlanningCache()).call
        routes: dict[tuple[RouteTensor, bool], Routes] = of_call.table("routes", *where)
        self._known: dict[Hashable, Domain] = of_call.table("domains", *where)
        self.router, self.axes, self.prices = Router(axes, prices, self.atoms, self.parameters, routes), axes, prices
        self.fragments = Fragments(self.graph, self.router)
        self.eliminations: dict[Shape, Elimination] = {}
        self._routes: dict[str, Routes] = {}
        self._domains: dict[object, Domain] = {}
        self._renamed: dict[int, Ints | None] = {}

    @cached_property
    def windows(self) -> Mapping[str, float]:
        """Return the seconds that the messages of each parameter can hide behind."""
        return self.choosing.windows(self.prices)

    def routes(self, name: str) -> Routes:
        """Return the layouts of a value and the routes between them."""
        routes = self._routes.get(name)
        if routes is None:
            value, is_parameter = self.graph.by_name[name], name in self.parameters
            routes = self._routes[name] = self.router.routes(
                value,
                self.atoms[name],
                is_parameter=is_parameter,
                keyed=self.choosing.keyed.get(name, ""),
                partial=self.choosing.partials.get(name, "P"),
            )
        return routes

    def domain(self, op: Op, fixed: Mapping[str, AxisChoice] | None = None) -> Domain:
        """Return the strategies of an operator; ``fixed``: sub-axis -> choice, of those that the user decided."""
        key = self.choosing.kind(op)
        domain = self._domains.get(key)
        if domain is None:
            content = self.choosing.kind_of(op)
            if content not in self._known:
                self._known[content] = self._build(op)
            domain = self._domains[key] = self._known[content]
        if not fixed:
            return domain
        narrow = (key, tuple(sorted(fixed.items(), key=lambda item: item[0])))
        if narrow not in self._domains:
            rule = self.rules[op.name]
            fixed_choices = [{fixed[part] for part in group if part in fixed} for group in self.axes.groups]
            kept = [
                i
                for i, choices in enumerate(domain.choices)
                if all(
                    not want
                    or want == {choice}
                    or (choice == BY_KEY and all(splits_owners(wish, rule) for wish in want))
                    for want, choice in zip(fixed_choices, choices, strict=True)
                )
            ]
            self._domains[narrow] = domain.only(np.array(kept, dtype=np.int64))
        return self._domains[narrow]

    @cached_property
    def data_parallel(self) -> Choice:
        """Return data parallelism over all axes, whatever the user fixed."""
        return choose(self.graph, Factored(self.rules, self.atoms), self.axes.mesh, "data_parallel", {})

    def renamed_codes(self, op: Op) -> Ints | None:
        """Return the result's state for each state of the operand, for an operator with one of each where every atom of
        one is an atom of the other and every state passes; else None."""
        kind = self.choosing.kind(op)
        if kind not in self._renamed:
            self._renamed[kind] = self._renamed_by(op)
        return self._renamed[kind]

    def _renamed_by(self, op: Op) -> Ints | None:
        rule, before, after = self.rules[op.name], self.routes(op.operands[0]), self.routes(op.results[0])
        places = ShardPositions.of(rule)
        if replace(before.tensor, atoms=()) != replace(after.tensor, atoms=()):
            return None
        if (0,) not in rule.linear or any(factor.kind != "parallel" for factor in rule.factors):
            return None
        renamed = np.full(before.base, -1, dtype=np.int64)
        renamed[: len(STATES)] = np.arange(len(STATES))
        for split in (Split(factor.name) for factor in rule.factors if factor.size > 1):
            codes = before.code_of(places.operand(0, split)), after.code_of(places.result(0, split))
            if min(codes) < SHARDED or before.sizes[codes[0] - SHARDED] != rule.factor(split.factor).size:
                return None
            renamed[codes[0]] = codes[1]
        complete = (renamed >= 0).all() and len(set(renamed.tolist())) == after.base
        return renamed if complete else None

    def strategy_at(self, op: Op, node: int) -> Strategy:
        """Return the strategy of a view that takes its operand at a node of its routes (``renamed_codes``)."""
        places, routes = ShardPositions.of(self.rules[op.name]), self.routes(op.operands[0])
        choices = [places.choice_of_operand(0, routes.where(code)) for code in routes.codes[node].tolist()]
        return strategy_of([choice for choice in choices if choice is not None], self.axes)

    def _build(self, op: Op) -> Domain:
        rule = self.rules[op.name]
        per_axis = self._choices(op, rule)
        # [strategies, axes]: the number of each axis's choice in its list.
        every = list(product(*(range(len(choices)) for choices in per_axis)))
        grid = np.array(every, dtype=np.int64).reshape(len(every), len(per_axis))
        fitting = np.ones(len(grid), dtype=np.bool_)
        num_parts: dict[str, Ints] = {}
        for factor in rule.factors:
            num_parts[factor.name] = parts = np.ones(len(grid), dtype=np.int64)
            for axis, size in enumerate(self.axes.sizes):
                if Split(factor.name) in per_axis[axis]:
                    parts *= np.where(grid[:, axis] == per_axis[axis].index(Split(factor.name)), size, 1)
            fitting &= parts <= max(factor.size, 1)
        owners = np.ones(len(grid), dtype=np.int64)
        if rule.keyed is not None:
            for axis, size in enumerate(self.axes.sizes):
                owners *= np.where(grid[:, axis] == per_axis[axis].index(BY_KEY), size, 1)
            num_parts[rule.results[0][0][0]] = num_parts[rule.results[0][0][0]] * owners
            fitting &= owners <= rule.keyed.num_keys
            if rule.keyed.owned is not None:
                fitting &= (owners == 1) | (num_parts[rule.keyed.owned] == 1)
                num_parts[rule.keyed.owned] = num_parts[rule.keyed.owned] * owners
        fitting &= ~self._mixes_lowered(rule, per_axis, grid)
        places = ShardPositions.of(rule)
        operands = [self._nodes(name, partial(places.operand, i), per_axis, grid) for i, name in enumerate(op.operands)]
        results = [self._nodes(name, partial(places.result, i), per_axis, grid) for i, name in enumerate(op.results)]
        for nodes in (*operands, *results):
            if nodes is not None:
                fitting &= nodes >= 0
        kept = np.flatnonzero(fitting)
        return self._priced(
            op,
            rule,
            [tuple(choices[i] for choices, i in zip(per_axis, row, strict=True)) for row in grid[kept].tolist()],
            {name: parts[kept] for name, parts in num_parts.items()},
            owners[kept],
            [None if nodes is None else nodes[kept] for nodes in operands],
            [None if nodes is None else nodes[kept] for nodes in results],
        )

    def _choices(self, op: Op, rule: OpRule) -> list[list[AxisChoice]]:
        """Return, per axis, its choices: the factors that it may split, then the states.

        If the graph divides a factor into parts, those that some operator must keep whole or lower are left out: head
        dims that attention contracts, the halves that rotary embeddings swap.

        ``R`` and partial sums defer communication. They pass through operators that are linear in all their activations
        together (views, casts, sums, scaling), and not through contractions, which would repeat heavy work for it.
        """
        gradient = any(self.graph.by_name[name].requires_grad for name in (*op.operands, *op.results))
        others: list[AxisChoice] = [INVARIANT]
        activations = {i for i, name in enumerate(op.operands) if name in self.active - self.parameters}
        groups = [PassSum(group) for group, members in enumerate(rule.linear) if activations <= set(members)]
        if groups and op.target not in FLOPS:  # nothing makes a parameter partial
            others += [*([REPLICATED] if gradient else []), *(groups if activations else [])]
        if rule.keyed is not None:
            others.append(BY_KEY)
        named = [f for f in rule.factors if f.kind in ("parallel", "sum", "lowered", *COMBINED)]
        named = [f for f in named if not self.choosing.is_blocked(op, f.name)]
        return [[*(Split(f.name) for f in named if f.size >= size), *others] for size in self.axes.sizes]

    @staticmethod
    def _mixes_lowered(rule: OpRule, per_axis: Sequence[Sequence[AxisChoice]], grid: Ints) -> NDArray[np.bool_]:
        """Return a mask of the strategies that lower the operator on one axis, and on another defer a sum or repeat
        work that could be split. Nothing needs both, and every lowered strategy is priced by building its program."""
        splits = {kind: {Split(f.name) for f in rule.factors if f.kind == kind} for kind in ("parallel", "lowered")}
        some, idle = np.zeros(len(grid), dtype=np.bool_), np.zeros(len(grid), dtype=np.bool_)
        for axis, choices in enumerate(per_axis):
            some |= np.array([choice in splits["lowered"] for choice in choices])[grid[:, axis]]
            useful = not splits["parallel"].isdisjoint(choices)
            waits = [not isinstance(choice, Split) and (useful or choice != INVARIANT) for choice in choices]
            idle |= np.array(waits)[grid[:, axis]]
        return some & idle

    def _nodes(
        self, name: str, where: Callable[[AxisChoice], Where], per_axis: Sequence[Sequence[AxisChoice]], grid: Ints
    ) -> Ints | None:
        """Return, per strategy, the node of an operand or result; -1 if it is no layout of the value. ``where``: its
        position on an axis, for a choice."""
        if name not in self.active:
            return None
        routes = self.routes(name)
        codes = np.zeros_like(grid)
        for axis, (choices, size) in enumerate(zip(per_axis, self.axes.sizes, strict=True)):
            code_of = np.array([routes.code_of(where(choice), size) for choice in choices])
            codes[:, axis] = code_of[grid[:, axis]]
        nodes = routes.node(np.maximum(codes, 0))
        return np.where((codes < 0).any(axis=1), -1, nodes)

    def _priced(
        self,
        op: Op,
        rule: OpRule,
        choices: list[tuple[AxisChoice, ...]],
        num_parts: Mapping[str, Ints],
        owners: Ints,
        operands: list[Ints | None],
        results: list[Ints | None],
    ) -> Domain:
        count = len(choices)
        compute, exposed, kept, forward = np.zeros(count), np.zeros(count), np.zeros(count), np.zeros(count)
        lowered = {Split(factor.name) for factor in rule.factors if factor.kind == "lowered"}
        lowered |= {Split(rule.parts_of(window.factor)[0].name) for _, window in rule.windows}
        values = [self.graph.by_name[name] for name in op.operands]
        outputs = [self.graph.by_name[name] for name in op.results]
        saved = saved_for_backward(op, values)
        local = np.array([-(-f.size // num_parts[f.name]) for f in rule.factors], dtype=np.int64).reshape(-1, count)
        alive = np.ones(count, dtype=np.bool_)
        # Lowered strategies and those that exchange halos are priced by what is emitted for them.
        plain = np.array([lowered.isdisjoint(parts) for parts in choices], dtype=np.bool_)
        same, back = np.unique(np.vstack([local, owners])[:, plain], axis=1, return_inverse=True)
        place = {factor.name: i for i, factor in enumerate(rule.factors)}
        prices = np.zeros((3, same.shape[1]))
        for i, (*sizes, num_owners) in enumerate(same.T.tolist()):
            shapes = tuple(
                tuple(tuple(prod(sizes[place[f]] for f in dim) for dim in dims) for dims in side)
                for side in (rule.operands, rule.results)
            )
            call = op if num_owners == 1 else owners_call(op, rule, (shapes[0], shapes[1]))
            prices[2, i] = self.prices.forward(call, values, outputs, (shapes[0], shapes[1]))
            prices[0, i] = prices[2, i] + self.prices.backward(call, values, outputs, (shapes[0], shapes[1]))
            prices[1, i] = self._kept(saved.results, saved.other_bytes, values, outputs, shapes)
        busiest = np.ones(count) if rule.keyed is None else np.minimum(owners, rule.keyed.imbalance)
        compute[plain], kept[plain], forward[plain] = prices[:, back.reshape(-1)] * busiest[plain]
        if rule.keyed is not None and rule.keyed.is_first:
            for i in np.flatnonzero(owners > 1).tolist():
                sorting, counting = self._ways_seconds(
                    rule.keyed, choices[i], prod(int(num_parts[name][i]) for name in rule.results[0][0])
                )
                compute[i], exposed[i] = compute[i] + sorting, exposed[i] + counting
        for i in np.flatnonzero(~plain).tolist():
            fragment = self.fragments(op, rule, strategy_of(choices[i], self.axes))
            compute[i], exposed[i], kept[i] = fragment.compute, fragment.exposed, fragment.kept_bytes
            forward[i] = fragment.compute / LOWERED_FORWARD_PARTS
            taken = zip(operands, op.operands, fragment.operands, strict=True)
            produced = zip(results, op.results, fragment.results, strict=True)
            for nodes, name, layout in (*taken, *produced):
                if nodes is not None:
                    node = self.routes(name).node_of(layout)
                    alive[i] &= node is not None
                    nodes[i] = -1 if node is None else node
        domain = Domain(
            self.axes,
            tuple(choices),
            tuple(operands),
            tuple(results),
            compute,
            exposed,
            kept,
            frozenset(saved.operands),
            forward,
            frozenset(saved.results),
        )
        return domain if alive.all() else domain.only(np.flatnonzero(alive))

    def _ways_seconds(self, keyed: KeyedRows, choices: tuple[AxisChoice, ...], num_slices: int) -> tuple[float, float]:
        """Return the seconds of what says which rows go where (``programs.builder``), which all that follows the same
        keys shares: of sorting a slice of the keys, and of telling every owner how many rows it will get."""
        groups = zip(self.axes.groups, choices, strict=True)
        axes = tuple(part for group, choice in groups if choice == BY_KEY for part in group)
        owners, keys = self.axes.mesh.size_of(axes), self.graph.by_name[keyed.keys]
        counts = owners, most_keys(keyed.num_keys, owners)
        args = Ref(keys.name), keyed.num_keys, keyed.skips, owners
        way = Op("", order_by_owner._opoverload, args, (), ("order", "sent"), "")
        made = [Value("order", keys.shape, torch.int64), Value("sent", (num_slices, *counts), torch.int64)]
        slice_of_keys = (-(-keys.numel // num_slices),)
        sorting = self.prices.forward(way, [keys], made, ([slice_of_keys], [slice_of_keys, (1, *counts)]))
        return sorting, self.prices.links.seconds("all_to_all", axes, prod(counts) * torch.int64.itemsize)

    def _kept(
        self,
        results: tuple[int, ...],
        other_bytes: int,
        values: Sequence[Value],
        outputs: Sequence[Value],
        shapes: tuple[tuple[tuple[int, ...], ...], ...],
    ) -> float:
        """Return the bytes that a local call keeps besides its operands. What belongs to neither operands nor results
        (statistics of a norm, probabilities of a cross entropy) has its part of the largest tensor."""
        num_bytes = float(sum(prod(shapes[1][i]) * outputs[i].dtype.itemsize for i in results))
        if other_bytes:
            whole = max(value.numel for value in (*values, *outputs))
            num_bytes += other_bytes * max(prod(shape) for side in shapes for shape in side) / max(whole, 1)
        return num_bytes


def _reduces(rule: OpRule) -> bool:
    """Return whether a factor of an operator is in none of its results."""
    kept = {factor for dims in rule.results for dim in dims for factor in dim}
    return any(factor.size > 1 and factor.name not in kept for factor in rule.factors)


def strategy_of(choices: Sequence[AxisChoice], axes: Axes) -> Strategy:
    """Return the strategy of a choice per axis, with sub-axes that split a factor together in device order."""
    return Strategy.of({part: choice for group, choice in zip(axes.groups, choices, strict=True) for part in group})
