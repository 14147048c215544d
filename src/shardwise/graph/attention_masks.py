"""Simplification of attention masks that are known at capture.

Attention kernels are fastest without a mask. Where a mask is known (``graph.positions``), attention takes

    no mask              if every query sees every key
    ``is_causal``        if query q sees the keys up to q, and there are as many queries as keys
    an interval mask     if the keys that a query sees are an interval: booleans over (query, key) alone; where these
                         would be large, blocks with masks of their own (``graph.attention_within``)
    its own mask         else, and where it depends on an input (padding) or on a parameter (a learned bias)

An additive mask is replaced only if it is 0 on visible keys, at most the least number of its dtype on the others, and
leaves every query a key: then the softmax is bitwise the same. (A query without keys gets zeros from a boolean mask,
and the mean of all values from an additive one of finite numbers.)

Keys and values that were repeated for groups of query heads (``unsqueeze``, ``expand``, ``reshape``, or
``repeat_interleave``) are passed unrepeated, with ``enable_gqa``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce

import torch
from torch import Tensor

from shardwise.graph.attention_within import ATTENTION_WITHIN, blocks_of, is_large
from shardwise.graph.emitter import Emitter, rewrite_graph
from shardwise.graph.ir import Arg, Graph, Op, Ref, Source, Value
from shardwise.graph.positions import evaluate_known_values
from shardwise.graph.predicates import Abstract, Intervals, IntervalSelect, KnownTensor, as_choice, varying_dims
from shardwise.graph.schema import arguments

aten = torch.ops.aten

_CONJUNCTIONS = (aten.logical_and.default, aten.bitwise_and.Tensor, aten.__and__.Tensor)
_JOINS_OF_DIMS = (aten.reshape.default, aten.flatten.using_ints)
_EXPANSIONS = (aten.expand.default, aten.broadcast_to.default)
ATTENTION = aten.scaled_dot_product_attention.default


def fold_masks(graph: Graph, constants: Mapping[str, Tensor]) -> tuple[Graph, dict[str, Tensor]]:
    """Return the graph with attention masks simplified as above, and the constants added for it: the intervals of the
    masks."""
    masks = {mask.name for op in graph.ops if op.target is ATTENTION and isinstance(mask := _mask_of(op), Ref)}
    rewriting = _Rewriting(graph, evaluate_known_values(graph, masks, constants))
    return rewrite_graph(graph, {ATTENTION: rewriting}), rewriting.constants


def _mask_of(op: Op) -> Arg:
    return arguments(op)["attn_mask"]


@dataclass
class _Rewriting:
    """Rewrite of attention calls (``emitter.Rewrite``). ``masks``: new masks by their intervals; ``bounds``: the ends
    of intervals, with their data."""

    graph: Graph
    known: Mapping[str, Abstract]
    constants: dict[str, Tensor] = field(default_factory=dict)
    masks: list[tuple[Intervals, Ref]] = field(default_factory=list)
    bounds: list[tuple[Tensor, Ref]] = field(default_factory=list)

    def __call__(self, op: Op, emitter: Emitter) -> tuple[Arg, ...] | None:
        before = arguments(op)
        args = before | grouped(before, emitter)
        mask = args["attn_mask"]
        original = _mask_of(emitter.origin)
        if isinstance(mask, Ref) and isinstance(original, Ref):
            query, key = (emitter.value(args[name]) for name in ("query", "key"))
            dtype = emitter.value(mask).dtype
            with torch.device("cpu"):
                seen, others = self._conditions(original.name, dtype, query.shape[-2], key.shape[-2])
            of_keys = tuple(emitter.known[name] for name in others)
            if seen is not None and seen.is_full:
                args["attn_mask"] = self._all_of(of_keys, emitter)
            elif seen is not None and seen.is_causal and not others:
                args |= {"attn_mask": None, "is_causal": True}
            elif (
                seen is not None
                and args["dropout_p"] == 0
                and is_large(seen, query.shape, key.shape, query.dtype.itemsize)
            ):
                conditions = (*self._bounds(seen, emitter), self._all_of(of_keys, emitter))
                operands = (args["query"], args["key"], args["value"], *conditions)
                blocks = blocks_of(seen, query.shape, query.dtype.itemsize)
                settings = args["enable_gqa"], args["scale"]
                return (emitter.emit(ATTENTION_WITHIN, *operands, *settings, *blocks),)
            elif seen is not None and not others:
                args["attn_mask"] = self._mask_of(seen, emitter)
        if args == before:
            return None
        positional = tuple(args.pop(name) for name in ("query", "key", "value", "attn_mask", "dropout_p", "is_causal"))
        return emitter.emit_as_is(ATTENTION, *positional, **args)

    def _conditions(
        self, mask: str, dtype: torch.dtype, queries: int, keys: int
    ) -> tuple[Intervals | None, tuple[str, ...]]:
        """Split a mask into a known interval (None: unknown) and boolean values over keys alone (padding). A key is
        visible if all of them hold."""
        if mask in self.known:
            return mask_intervals(self.known[mask], dtype, queries, keys), ()
        value, op = self.graph.by_name[mask], self.graph.producer.get(mask)
        if dtype != torch.bool:
            return None, ()
        if value.shape[-1:] == (keys,) and len(value.shape) > 1 and all(size == 1 for size in value.shape[-3:-1]):
            every = torch.zeros(queries, dtype=torch.int64)
            return Intervals(every, every + keys, keys), (mask,)
        if op is None or op.target not in _CONJUNCTIONS:
            return None, ()
        (first, of_first), (second, of_second) = (
            self._conditions(name, self.graph.by_name[name].dtype, queries, keys)
            for name in (op.operands[0], op.operands[-1])
        )
        if first is None or second is None:
            return None, ()
        return first.intersection(second), tuple(dict.fromkeys((*of_first, *of_second)))

    def _all_of(self, conditions: Sequence[Arg], emitter: Emitter) -> Arg:
        return reduce(partial(emitter.emit, aten.logical_and.default), conditions) if conditions else None

    def _mask_of(self, seen: Intervals, emitter: Emitter) -> Ref:
        """Return the boolean mask of some intervals, shared by all attention calls of the model."""
        for intervals, ref in self.masks:
            if intervals.equals(seen):
                return ref
        keys = emitter.emit(aten.arange.default, seen.num_keys)
        first, end = self._bounds(seen, emitter)
        parts = [
            emitter.emit(compare, keys, emitter.emit(aten.unsqueeze.default, bound, 1))
            for compare, bound in ((aten.lt.Tensor, end), (aten.ge.Tensor, first))
            if bound is not None
        ]
        mask = parts[0] if len(parts) == 1 else emitter.emit(aten.logical_and.default, *parts)
        self.masks.append((seen, mask))
        return mask

    def _bounds(self, seen: Intervals, emitter: Emitter) -> tuple[Ref | None, Ref | None]:
        """Return the first key that each query sees and the one after the last, None on a side without a bound. All
        attention calls of the model share them."""
        every = seen.every()
        end = None if torch.equal(seen.hi, every.hi) else self._bound(seen.hi, seen.num_keys, emitter)
        first = None if torch.equal(seen.lo, every.lo) else self._bound(seen.lo, seen.num_keys, emitter)
        return first, end

    def _bound(self, data: Tensor, num_keys: int, emitter: Emitter) -> Ref:
        for limit, ref in self.bounds:
            if torch.equal(limit, data):
                return ref
        # The bound of query q may be ``first + q``, clamped to the number of keys.
        rows, firsts = torch.arange(len(data)), (int(data[0]), int(data[-1]) - len(data) + 1)
        first = next((x for x in firsts if torch.equal((rows + x).clamp(0, num_keys), data)), None)
        if first is not None:
            bound = emitter.emit(aten.arange.start, first, first + len(data))
        else:
            name = f"mask_{len(self.bounds)}"
            while name in emitter.values:
                name += "_"
            self.constants[name] = data
            value = Value(name, tuple(data.shape), data.dtype)
            bound = emitter.add_source(Source(name, "constant", (name,)), value)
        self.bounds.append((data, bound))
        return bound


def mask_intervals(mask: Abstract, dtype: torch.dtype, num_queries: int, num_keys: int) -> Intervals | None:
    """Return the intervals of keys that queries see under a boolean or additive mask. None if they are no intervals, or
    if attention under a boolean mask would give another result."""
    every = torch.zeros(num_queries, dtype=torch.int64)
    full = Intervals(every, every + num_keys, num_keys)
    least = None if dtype == torch.bool else torch.finfo(dtype).min

    def shows(value: Tensor) -> bool | None:
        number = value.item()
        if least is None:
            return bool(number)
        return True if number == 0 else False if number <= least else None

    chosen: Abstract | None = mask
    if isinstance(mask, KnownTensor):
        if mask.core.numel() == 1:
            return full if shows(mask.core) else None
        if dtype != torch.bool:
            return None
        chosen = _dense(mask, num_queries, num_keys) or as_choice(mask, (num_queries, num_keys))
    if not isinstance(chosen, IntervalSelect) or (chosen.query, chosen.key) != (-2, -1):
        return None
    on, off = shows(chosen.on), shows(chosen.off)
    if {on, off} != {True, False} or (len(chosen.seen.lo), chosen.seen.num_keys) != (num_queries, num_keys):
        return None
    seen = chosen.seen if on else chosen.seen.complement()
    return None if seen is None or (least is not None and bool(seen.sees_none.any())) else seen


def _dense(mask: KnownTensor, num_queries: int, num_keys: int) -> IntervalSelect | None:
    """Reduce a mask that is known element by element to intervals."""
    values = mask.core
    if varying_dims(values) != (-2, -1):
        return None
    values = values.reshape(values.shape[-2:])
    lo = values.to(torch.uint8).argmax(1)
    hi = num_keys - values.flip(1).to(torch.uint8).argmax(1)
    number = values.sum(1)
    seen = Intervals.of(lo, torch.where(number > 0, hi, lo), num_keys)
    if not torch.equal(seen.hi - seen.lo, number):
        return None
    on = torch.ones(1, 1, dtype=torch.bool)
    return IntervalSelect((num_queries, num_keys), -2, -1, seen, on, ~on)


# ------------------------------------------------------------------------------------------------------ grouped heads


def grouped(args: Mapping[str, Arg], emitter: Emitter) -> dict[str, Arg]:
    """Undo the repetition of keys and values for every query head of a group."""
    query, *repeated = (args[name] for name in ("query", "key", "value"))
    before = [_before_repetition(ref, emitter) for ref in repeated]
    if args["enable_gqa"] or None in before:
        return {}

    def heads(refs: Sequence[Arg | None]) -> set[int]:
        return {emitter.value(ref).shape[-3] for ref in refs if isinstance(ref, Ref)}

    # Every query head has a head of its own among the repeated ones, and keys and values have equal groups.
    if len(emitter.value(query).shape) != 4 or len(heads([query, *repeated])) > 1 or len(heads(before)) > 1:
        return {}
    return {"key": before[0], "value": before[1], "enable_gqa": True}


def _before_repetition(ref: Arg, emitter: Emitter) -> Ref | None:
    """Return ``b g s d`` if the value is that with every head repeated, ``b (g r) s d``; else None."""
    op = _producer(ref, emitter)
    if op is None or not isinstance(op.args[0], Ref) or len(emitter.value(ref).shape) != 4:
        return None
    before = op.args[0]
    if op.target is aten.repeat_interleave.self_int:
        return before if arguments(op)["dim"] in (1, -3) else None
    expand = _producer(before, emitter) if op.target in _JOINS_OF_DIMS else None
    if expand is None or expand.target not in _EXPANSIONS or len(emitter.value(before).shape) != 5:
        return None
    batch, groups, repeats, *rest = emitter.value(before).shape
    unsqueeze = _producer(expand.args[0], emitter)
    if unsqueeze is None or unsqueeze.target is not aten.unsqueeze.default:
        return None
    if arguments(unsqueeze)["dim"] not in (2, -3):
        return None
    repeated = (batch, groups * repeats, *rest) == emitter.value(ref).shape
    original = unsqueeze.args[0]
    same = isinstance(original, Ref) and emitter.value(original).shape == (batch, groups, *rest)
    return original if repeated and same else None


def _producer(ref: Arg, emitter: Emitter) -> Op | None:
    return emitter.producer.get(ref.name) if isinstance(ref, Ref) else None
