"""Rewrite of loops over experts as products by expert.

    for e in range(n):                                          Mixtral's reference, litgpt, DeepSeek
        tokens, choice = torch.where(chosen == e)
        out.index_add_(0, tokens, expert[e](x[tokens]) * weights[tokens, choice, None])

In masked form (``graph.selected``) each expert computes all rows, and zeros take the place of those of other experts. A
row has one expert, and every operator in the loop computes row by row. So the sum over the experts is one computation
in which each row reads what belongs to its own expert: products with ``weight[e]`` become ``shardwise::grouped_mm`` of
all weights, in one parameter or one per expert, and vectors such as a bias are looked up.

The bodies are compared operator by operator. They stay as they are if they differ in more than the expert, if an
operator other than a product or a pointwise one reads what belongs to it, or if ``chosen`` are not the indices of the
largest of n scores: numbers out of range select nothing, which the product would not tell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from shardwise.graph.emitter import Emitter, rewrite_graph
from shardwise.graph.expert_masks import ExpertMask, expert_mask, hides_others, num_choices
from shardwise.graph.functionalize import BETWEEN
from shardwise.graph.gathered_experts import reshaped, unrepeated
from shardwise.graph.grouped import grouped_mm
from shardwise.graph.ir import Arg, Graph, Op, Ref, map_operands, only_ref
from shardwise.graph.schema import arguments, is_random
from shardwise.graph.selected_rows import Accumulation, Rows

aten = torch.ops.aten
_PRODUCTS = (aten.linear.default, aten.matmul.default, aten.mm.default)
Names = tuple[str, ...]  # a value of each iteration


class _Differs(Exception):
    """Raised if the iterations of a loop are no one computation."""


def merge_expert_loops(graph: Graph, rows: Mapping[str, Rows], accumulations: Sequence[Accumulation]) -> Graph:
    """Return the graph with one computation in place of each loop; what it leaves behind is dead code.

    ``rows``, ``accumulations``: of the selected rows.
    """
    loops = {loop.chain[-1].after: loop for loop in _loops(graph, rows, accumulations)}

    def rewrite(op: Op, emitter: Emitter) -> tuple[Arg, ...] | None:
        loop = loops.pop(emitter.origin.results[0], None)
        try:
            return None if loop is None else (_Merging(graph, loop, emitter).merged(),)
        except _Differs:
            return None

    return rewrite_graph(graph, {graph.producer[after].target: rewrite for after in loops}) if loops else graph


@dataclass(frozen=True, slots=True)
class _Loop:
    """The accumulations of experts 0, 1, 2, ..., each into the value of the one before."""

    chain: tuple[Accumulation, ...]
    mask: ExpertMask
    rows: Mapping[str, Rows]


def _loops(graph: Graph, rows: Mapping[str, Rows], accumulations: Sequence[Accumulation]) -> list[_Loop]:
    found: list[_Loop] = []
    chain: list[Accumulation] = []
    for item in accumulations:
        mask = expert_mask(graph.producer, graph.by_name, item.mask)
        if mask is None:
            continue
        if not chain or item.before != chain[-1].after or mask.expert != len(chain):
            chain = []
        if mask.expert != len(chain):
            continue
        chain.append(item)
        if num_choices(graph, mask.chosen) == len(chain) > 1:
            found.append(_Loop(tuple(chain), mask, rows))
            chain = []
    return found


@dataclass
class _Merging:
    """Emits the iterations of a loop as one."""

    graph: Graph
    loop: _Loop
    emitter: Emitter
    same: dict[Names, bool] = field(default_factory=dict)
    merged_ops: dict[Names, tuple[Arg, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.befores = tuple(item.before for item in self.loop.chain)
        self.of_loop = frozenset[str]().union(*(item.ops for item in self.loop.chain))
        mask, emit = self.loop.mask, self.emitter
        chosen = emit.permuted(emit.now(mask.chosen), mask.order)
        self.keys = reshaped(emit, chosen, (emit.value(chosen).numel,))
        if emit.value(self.keys).dtype not in (torch.int32, torch.int64):
            self.keys = emit.emit(aten.to.dtype, self.keys, torch.int64)
        self.count = len(self.loop.chain)

    def merged(self) -> Ref:
        """Return what the last iteration leaves. Raises _Differs."""
        if self.emitter.value(self.keys).numel != self.graph.by_name[self.loop.chain[-1].mask].numel:
            raise _Differs  # several rows have one choice
        after, before = self._value(tuple(item.after for item in self.loop.chain)), self.emitter.now(self.befores[0])
        if self.emitter.value(before).requires_grad and not self.emitter.is_reached(before, after):
            return self.emitter.with_zero_gradient((before.name,), after)  # every row was overwritten
        return after

    def _value(self, names: Names) -> Ref:
        """Return a value of the iterations: for each row, that of its expert."""
        if names == self.befores or self._is_same(names):
            return self.emitter.now(names[0])
        producers = [self.graph.producer.get(name) for name in names]
        ops = [op for op in producers if op is not None]
        if (
            len(ops) != self.count
            or len({(op.target, op.results.index(name)) for op, name in zip(ops, names, strict=True)}) > 1
        ):
            raise _Differs
        if not all(name in self.loop.rows or op.name in self.of_loop for op, name in zip(ops, names, strict=True)):
            raise _Differs
        key = tuple(op.name for op in ops)
        if key not in self.merged_ops:
            self.merged_ops[key] = self._results(ops)
        result = only_ref(self.merged_ops[key][ops[0].results.index(names[0])])
        old, new = self.graph.by_name[names[0]], self.emitter.value(result)
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            raise _Differs
        return result

    def _is_same(self, names: Names) -> bool:
        """Return whether the iterations compute the same value from the same values."""
        if len(set(names)) == 1:
            return True
        if names not in self.same:
            self.same[names] = self._is_computed_alike(names)
        return self.same[names]

    def _is_computed_alike(self, names: Names) -> bool:
        ops = [self.graph.producer.get(name) for name in names]
        first, at = ops[0], names[0]
        if first is None or is_random(first.target):
            return False
        index, without = first.results.index(at), _without_operands(first)
        return all(
            op is not None and op.results.index(name) == index and _without_operands(op) == without
            for op, name in zip(ops, names, strict=True)
        ) and all(self._is_same(column) for column in zip(*(op.operands for op in ops if op is not None), strict=True))

    def _results(self, ops: Sequence[Op]) -> tuple[Arg, ...]:
        """Emit the operators of the iterations as one: in the region of the loop, which strategies name, and in the
        segment of the first, which says what is recomputed."""
        origin = self.emitter.origin
        region, segment = origin.scope.partition(BETWEEN)[0], "".join(ops[0].scope.partition(BETWEEN)[1:])
        self.emitter.origin = replace(origin, scope=region + segment)
        try:
            return self._emitted(ops)
        finally:
            self.emitter.origin = origin

    def _emitted(self, ops: Sequence[Op]) -> tuple[Arg, ...]:
        calls = [arguments(op) for op in ops]
        first = ops[0]
        if first.target is aten.masked_fill.Scalar:  # every row has an expert
            self._check_masks([hides_others(self.graph, call["mask"].name) for call in calls])
            return (self._value(tuple(call["self"].name for call in calls)),)
        if first.target is aten.where.self and first.name in self.of_loop:
            conditions = (call["condition"].name for call in calls)
            self._check_masks([expert_mask(self.graph.producer, self.graph.by_name, name) for name in conditions])
            return (self._value(tuple(call["self"].name for call in calls)),)
        args = tuple(self._argument(items, first) for items in zip(*(op.args for op in ops), strict=True))
        named = zip(*(op.kwargs for op in ops), strict=True)
        kwargs = tuple((items[0][0], self._argument([value for _, value in items], first)) for items in named)
        owned = [arg for arg in (*args, *(value for _, value in kwargs)) if isinstance(arg, _Owned)]
        if not owned:
            return self.emitter.apply(replace(self.emitter.origin, target=first.target, args=args, kwargs=kwargs))
        self._check_rows(first)
        if first.target in _PRODUCTS:
            return (self._product(first, args + tuple(value for _, value in kwargs)),)
        if torch.Tag.pointwise not in first.target.tags:
            raise _Differs
        args = tuple(self._looked_up(arg) if isinstance(arg, _Owned) else arg for arg in args)
        kwargs = tuple((key, self._looked_up(arg) if isinstance(arg, _Owned) else arg) for key, arg in kwargs)
        return self.emitter.apply(replace(self.emitter.origin, target=first.target, args=args, kwargs=kwargs))

    def _check_masks(self, masks: Sequence[ExpertMask | None]) -> None:
        expected = [replace(self.loop.mask, expert=expert) for expert in range(self.count)]
        if masks != expected:
            raise _Differs

    def _check_rows(self, op: Op) -> None:
        """Raise _Differs unless the result has the mask's rows in dim 0 of two."""
        name = op.results[0]
        rows, rank = self.loop.rows.get(name), len(self.graph.by_name[name].shape)
        if rows is None or (rows.dim, rows.copies, rank) != (0, 1, 2) or len(op.results) != 1:
            raise _Differs

    def _argument(self, items: Sequence[Any], op: Op) -> Any:
        first = items[0]
        if isinstance(first, Ref):
            names = tuple(item.name for item in items)
            return self.emitter.now(names[0]) if self._is_same(names) else self._owned(names) or self._value(names)
        if isinstance(first, tuple):
            if len({len(item) for item in items}) > 1:
                raise _Differs
            inner = tuple(self._argument(column, op) for column in zip(*items, strict=True))
            if any(isinstance(item, _Owned) for item in inner):
                raise _Differs
            return inner
        if any(type(item) is not type(first) or item != first for item in items):
            raise _Differs
        return first

    def _owned(self, names: Names) -> _Owned | None:
        """Return what belongs to the experts, stacked in dim 0; None if the values do not."""
        producers = [self.graph.producer.get(name) for name in names]
        sources = [self.graph.source_of.get(name) for name in names]
        if all(source is not None and source.kind in ("parameter", "buffer") for source in sources):
            if len({(self.graph.by_name[name].shape, self.graph.by_name[name].dtype) for name in names}) > 1:
                raise _Differs
            return _Owned(self.emitter.emit(aten.stack.default, tuple(Ref(name) for name in names)))
        ops = [op for op in producers if op is not None]
        if len(ops) != self.count or len({op.target for op in ops}) > 1 or any(len(op.operands) != 1 for op in ops):
            return None
        inner, args = tuple(op.operands[0] for op in ops), [arguments(op) for op in ops]
        if len(set(inner)) == 1:
            experts = [arg.get("index", op.results.index(name)) for arg, op, name in zip(args, ops, names, strict=True)]
            is_picked = ops[0].target in (aten.select.int, aten.unbind.int) and all(arg["dim"] == 0 for arg in args)
            size = self.graph.by_name[inner[0]].shape[:1]
            is_whole = is_picked and experts == list(range(self.count)) and size == (self.count,)
            return _Owned(self.emitter.now(inner[0])) if is_whole else None
        owned = self._owned(inner)
        if owned is None:
            return None
        if ops[0].target in (aten.t.default, aten.mT.default) or (
            ops[0].target is aten.transpose.int and len(self.graph.by_name[names[0]].shape) == 2
        ):
            return _Owned(self.emitter.emit(aten.transpose.int, owned.stacked, 1, 2))
        if ops[0].target is aten.to.dtype and len({arg["dtype"] for arg in args}) == 1:
            return _Owned(self.emitter.emit(aten.to.dtype, owned.stacked, args[0]["dtype"]))
        raise _Differs

    def _product(self, op: Op, args: Sequence[Any]) -> Ref:
        x, weight, bias = (*args, None)[:3]
        if (
            not isinstance(weight, _Owned)
            or not isinstance(x, Ref)
            or len(self.emitter.value(weight.stacked).shape) != 3
        ):
            raise _Differs
        matrices = weight.stacked
        if op.target is aten.linear.default:
            matrices = self.emitter.emit(aten.transpose.int, matrices, 1, 2)
        experts = (self.count,)
        x = unrepeated(self.emitter, x)
        product = self.emitter.emit(grouped_mm._opoverload, x, matrices, self.keys, experts, (0,), experts)
        if bias is None:
            return product
        added = self._looked_up(bias) if isinstance(bias, _Owned) else bias
        return self.emitter.emit(aten.add.Tensor, product, added)

    def _looked_up(self, owned: _Owned) -> Ref:
        """Emit the vector of every row's expert."""
        shape = self.emitter.value(owned.stacked).shape
        if len(shape) > 2:
            raise _Differs
        vectors = owned.stacked if len(shape) == 2 else self.emitter.emit(aten.unsqueeze.default, owned.stacked, 1)
        return self.emitter.emit(aten.index.Tensor, vectors, (self.keys,))


def _without_operands(op: Op) -> Op:
    """Return the call with its operands left out, for comparison."""
    return replace(map_operands(op, lambda _: Ref("")), name="", results=(), source="", scope="")


@dataclass(frozen=True, slots=True)
class _Owned:
    """A value of which each expert has its own: parameters, or parts of one."""

    stacked: Ref
