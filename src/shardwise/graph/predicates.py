"""Exact values of tensors over positions, known before execution, in memory linear in the sequence length.

There are three kinds of values. ``KnownTensor``: a tensor; dims along which it is constant take no memory (stride 0).
``IntervalSelect``: one value where the key is in the query's interval, another elsewhere.
``PositionSum``: integers a[q] + b[k], such as the distance of positions. An operator on such values gives another that
is one of these and equal in every element, or None: results are never approximate.

Dims are counted from the end, so that broadcasting does not change them.

Nearly every mask that models build is of one interval of keys per query, whatever the operators that build it: two
numbers per query, where booleans take one per key. Query q sees lo[q] <= k < hi[q]:

    causal           [0, q + 1)                 sliding window   [q - w + 1, q + 1)
    full             [0, K)                     prefix           [0, max(q + 1, p))
    chunks           [c floor(q / c), q + 1)    packed documents [start of q's document, q + 1)

The intersection of two is always one. Their union or difference is one only if no query is left with two pieces;
otherwise the result is None.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Intervals:
    """The keys lo[q] <= k < hi[q] that each query sees, int64 of shape [queries]; 0 and 0 if it sees none."""

    lo: Tensor
    hi: Tensor
    num_keys: int

    @staticmethod
    def of(lo: Tensor, hi: Tensor, num_keys: int) -> Intervals:
        lo, hi = lo.clamp(0, num_keys), hi.clamp(0, num_keys)
        some = lo < hi
        return Intervals(torch.where(some, lo, 0), torch.where(some, hi, 0), num_keys)

    def equals(self, other: Intervals) -> bool:
        lo, hi = torch.equal(self.lo, other.lo), torch.equal(self.hi, other.hi)
        return self.num_keys == other.num_keys and lo and hi

    @property
    def is_full(self) -> bool:
        return bool(((self.lo == 0) & (self.hi == self.num_keys)).all())

    @property
    def sees_none(self) -> Tensor:
        """Return per query whether it sees no key."""
        return self.lo == self.hi

    @property
    def is_causal(self) -> bool:
        """Return whether query q sees the keys up to q, with as many queries as keys."""
        num_queries = len(self.lo)
        causal = torch.arange(1, num_queries + 1)
        return num_queries == self.num_keys and not self.lo.any() and torch.equal(self.hi, causal)

    def intersection(self, other: Intervals) -> Intervals:
        return Intervals.of(torch.maximum(self.lo, other.lo), torch.minimum(self.hi, other.hi), self.num_keys)

    def union(self, other: Intervals) -> Intervals | None:
        """Return the union, or None unless it is one interval per query."""
        lo, hi = torch.minimum(self.lo, other.lo), torch.maximum(self.hi, other.hi)
        disjoint = torch.maximum(self.lo, other.lo) > torch.minimum(self.hi, other.hi)
        first, second = self.sees_none, other.sees_none
        if bool((disjoint & ~first & ~second).any()):
            return None
        lo = torch.where(first, other.lo, torch.where(second, self.lo, lo))
        hi = torch.where(first, other.hi, torch.where(second, self.hi, hi))
        return Intervals.of(lo, hi, self.num_keys)

    def without(self, other: Intervals) -> Intervals | None:
        """Return the difference to ``other``, or None unless it is one interval per query."""
        taken = self.intersection(other)
        from_start, to_end = taken.lo == self.lo, taken.hi == self.hi
        if bool((~from_start & ~to_end & ~taken.sees_none).any()):
            return None
        lo = torch.where(taken.sees_none | ~from_start, self.lo, taken.hi)
        hi = torch.where(taken.sees_none | from_start, self.hi, taken.lo)
        return Intervals.of(lo, hi, self.num_keys)

    def complement(self) -> Intervals | None:
        return self.every().without(self)

    def every(self) -> Intervals:
        """Return intervals of all keys for the same number of queries."""
        zero = torch.zeros_like(self.lo)
        return Intervals(zero, zero + self.num_keys, self.num_keys)

    def part(self, queries: slice, keys: slice) -> Intervals:
        """Restrict to some of the queries and to contiguous keys."""
        assert keys.step == 1, "the keys of an interval that are apart"
        first, last = int(keys.start), int(keys.stop)
        lo, hi = self.lo[queries].clamp(first, last) - first, self.hi[queries].clamp(first, last) - first
        return Intervals.of(lo, hi, last - first)


# Limit of elements computed here: positions of the longest sequences, but never their squares.
MOST_ELEMENTS = 1 << 22

_FLIPPED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq", "ne": "ne"}


@dataclass(frozen=True, slots=True, eq=False)
class KnownTensor:
    """A CPU tensor whose elements are known; dims along which it is constant have stride 0."""

    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def core(self) -> Tensor:
        """Return the tensor with size 1 in constant dims."""
        return core(self.tensor)


@dataclass(frozen=True, slots=True, eq=False)
class IntervalSelect:
    """``on`` where the key is in the query's interval, ``off`` elsewhere: tensors of one element with the rank of the
    shape. ``query``, ``key``: the dims, from the end; it is constant along all others."""

    shape: tuple[int, ...]
    query: int
    key: int
    seen: Intervals
    on: Tensor
    off: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class PositionSum:
    """The integers ``of_query[q] + of_key[k]`` of a dtype that holds them all, or their ``absolute`` values."""

    shape: tuple[int, ...]
    query: int
    key: int
    of_query: Tensor
    of_key: Tensor
    dtype: torch.dtype
    absolute: bool = False


Abstract = KnownTensor | IntervalSelect | PositionSum
# An operator on tensors, with everything else that it takes filled in.
Function = Callable[..., Tensor]


# ------------------------------------------------------------------------------------------------------ known tensors


def core(tensor: Tensor) -> Tensor:
    """Return the tensor with size 1 in dims of stride 0."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def collapse_constant_dims(tensor: Tensor) -> KnownTensor | None:
    """Return the tensor with stride 0 wherever it is constant. None if it is too large to inspect."""
    shape, tensor = tensor.shape, core(tensor)
    if tensor.numel() > MOST_ELEMENTS:
        return None
    for dim, size in enumerate(tensor.shape):
        first = tensor.narrow(dim, 0, min(size, 1))
        if size > 1 and bool((tensor == first).all()):
            tensor = first
    return KnownTensor(tensor.contiguous().expand(shape))


def filled_tensor(value: Any, shape: Sequence[int], dtype: torch.dtype) -> KnownTensor:
    return KnownTensor(torch.full((1,) * len(shape), value, dtype=dtype).expand(tuple(shape)))


def varying_dims(tensor: Tensor) -> tuple[int, ...]:
    """Return the dims, from the end, along which a core is not constant."""
    return tuple(dim - tensor.dim() for dim, size in enumerate(tensor.shape) if size > 1)


def apply_pointwise(
    name: str, function: Function, operands: Sequence[Abstract], shape: tuple[int, ...], number: int | None = None
) -> Abstract | None:
    """Evaluate a pointwise operator. ``name``: of the operator; ``function``: its call on tensors in place of the
    operands; ``number``: the integer to which it compares its only operand."""
    if all(isinstance(x, KnownTensor) for x in operands):
        cores = [x.core for x in operands if isinstance(x, KnownTensor)]
        size = prod(torch.broadcast_shapes(*(x.shape for x in cores)))
        if size <= max([x.numel() for x in cores], default=1):
            return collapse_constant_dims(function(*cores).expand(shape))
    if name in _FLIPPED:
        left, *others = operands
        right = others[0] if others else None if number is None else filled_tensor(number, (), torch.int64)
        comparison = None if right is None else _compared(name, left, right, shape)
        if comparison is not None:
            return comparison
    summed = _summed(name, function, operands, shape)
    return summed if summed is not None else _by_corners(function, operands, shape)


# -------------------------------------------------------------------------------------------------------- comparisons


def _compared(name: str, left: Abstract, right: Abstract, shape: tuple[int, ...]) -> Abstract | None:
    if isinstance(left, KnownTensor) and isinstance(right, PositionSum):
        left, right, name = right, left, _FLIPPED[name]
    if isinstance(left, PositionSum) and isinstance(right, KnownTensor):
        return _compared_sum(name, left, right.core, shape)
    if not (isinstance(left, KnownTensor) and isinstance(right, KnownTensor)):
        return None
    first, second = left.core, right.core
    if len(varying_dims(first)) != 1 or len(varying_dims(second)) != 1:
        return None
    (query,), (key,) = varying_dims(first), varying_dims(second)
    if query > key:
        first, second, query, key, name = second, first, key, query, _FLIPPED[name]
    dtype = torch.result_type(first, second)  # in which they are compared; the wider one holds all its numbers
    wider = torch.float64 if dtype.is_floating_point else torch.int64
    rows, columns = (x.flatten().to(dtype).to(wider) for x in (first, second))
    return _chosen(_keys_where(_FLIPPED[name], columns, rows), query, key, shape)


def _compared_sum(name: str, x: PositionSum, bound: Tensor, shape: tuple[int, ...]) -> Abstract | None:
    """Compare ``x`` with one number: compare each key's summand with the bound minus the query's summand."""
    if bound.numel() != 1 or bound.dtype.is_floating_point or bound.dtype == torch.bool:
        return None
    number = int(bound)
    if abs(number) > 1 << 40:
        return None
    if not x.absolute:
        return _chosen(_keys_where(name, x.of_key, number - x.of_query), x.query, x.key, shape)
    if name in ("eq", "ne"):
        return None
    most = number if name in ("le", "gt") else number - 1  # |x| < n is |x| <= n - 1
    below = _keys_where("le", x.of_key, most - x.of_query)
    above = _keys_where("ge", x.of_key, -most - x.of_query)
    if below is None or above is None:
        return None
    near = below[0].intersection(above[0]), below[1]
    return _chosen(near if name in ("le", "lt") else (near[0], False), x.query, x.key, shape)


def _keys_where(name: str, keys: Tensor, bounds: Tensor) -> tuple[Intervals, bool] | None:
    """Return the keys that compare true with the bound of each query: those in the intervals, or (False) those outside.
    None unless the keys are sorted."""
    if keys.is_floating_point() and bool(keys.isnan().any() | bounds.isnan().any()):
        return None
    number = len(keys)
    falling = not bool((keys[1:] >= keys[:-1]).all())
    if falling:
        keys = keys.flip(0)
        if not bool((keys[1:] >= keys[:-1]).all()):
            return None
    keys, bounds = keys.contiguous(), bounds.contiguous()
    less = torch.searchsorted(keys, bounds)
    at_most = torch.searchsorted(keys, bounds, right=True)
    zero = torch.zeros_like(less)
    lo, hi = {
        "lt": (zero, less),
        "le": (zero, at_most),
        "gt": (at_most, zero + number),
        "ge": (less, zero + number),
        "eq": (less, at_most),
        "ne": (less, at_most),
    }[name]
    if falling:
        lo, hi = number - hi, number - lo
    return Intervals.of(lo, hi, number), name != "ne"


def _chosen(
    intervals_with_value: tuple[Intervals, bool] | None, query: int, key: int, shape: tuple[int, ...]
) -> KnownTensor | IntervalSelect | None:
    if intervals_with_value is None:
        return None
    inside = torch.full((1,) * len(shape), intervals_with_value[1])
    return interval_select(shape, query, key, intervals_with_value[0], inside, ~inside)


def interval_select(
    shape: tuple[int, ...], query: int, key: int, seen: Intervals, on: Tensor, off: Tensor
) -> KnownTensor | IntervalSelect:
    """Return an IntervalSelect, or the single value that it has everywhere."""
    if torch.equal(on, off) or seen.is_full:
        return KnownTensor(on.expand(shape))
    if bool(seen.sees_none.all()):
        return KnownTensor(off.expand(shape))
    return IntervalSelect(shape, query, key, seen, on, off)


# --------------------------------------------------------------------------------------------------------------- sums


def _summed(name: str, function: Function, operands: Sequence[Abstract], shape: tuple[int, ...]) -> PositionSum | None:
    """Evaluate sums, differences, multiples, negatives, absolute values and casts of positions."""
    x, is_one = operands[0], len(operands) == 1
    if name not in ("add", "sub", "rsub", "neg", "to", "abs") and not (is_one and name == "mul"):
        return None
    ranks = (1,) * len(shape)
    zeros = [torch.zeros(ranks, dtype=_dtype(operand)) for operand in operands]
    at_zero = function(*zeros)
    dtypes = [tensor.dtype for tensor in (at_zero, *zeros)]
    if any(dtype.is_floating_point or dtype.is_complex or dtype == torch.bool for dtype in dtypes):
        return None
    if name == "abs" or (isinstance(x, PositionSum) and x.absolute):
        if not (is_one and name in ("abs", "to") and isinstance(x, PositionSum)):
            return None
        return _checked(replace(x, shape=shape, dtype=at_zero.dtype, absolute=True))
    # A linear function is known from its values at 0 and 1.
    rest = int(at_zero)
    factors = [
        int(function(*(torch.ones_like(zero) if i == j else zero for j, zero in enumerate(zeros)))) - rest
        for i in range(len(operands))
    ]
    return _added(operands, factors, rest, shape, at_zero.dtype)


def _added(
    operands: Sequence[Abstract], factors: Sequence[int], rest: int, shape: tuple[int, ...], dtype: torch.dtype
) -> PositionSum | None:
    """Add the operands times their factors, and the rest. None unless the sum varies along two dims."""
    everywhere = torch.tensor([rest])
    parts: dict[int, Tensor] = {}
    for x, factor in zip(operands, factors, strict=True):
        if isinstance(x, KnownTensor):
            summands = {dim: x.core.flatten() for dim in varying_dims(x.core)}
            if len(summands) > 1:
                return None
            everywhere = everywhere if summands else everywhere + factor * x.core.reshape(1).to(torch.int64)
        elif isinstance(x, PositionSum) and not x.absolute:
            summands = {x.query: x.of_query, x.key: x.of_key}
        else:
            return None
        for dim, part in summands.items():
            parts[dim] = parts.get(dim, torch.zeros(1, dtype=torch.int64)) + factor * part.to(torch.int64)
    if len(parts) != 2:
        return None
    query, key = sorted(parts)
    return _checked(PositionSum(shape, query, key, parts[query] + everywhere, parts[key], dtype))


def _checked(x: PositionSum) -> PositionSum | None:
    """Return None if the dtype may not hold the values, or if there are too many numbers."""
    most = int(x.of_query.abs().max()) + int(x.of_key.abs().max())
    return x if most < min(torch.iinfo(x.dtype).max, 1 << 40) else None


def _dtype(x: Abstract) -> torch.dtype:
    if isinstance(x, KnownTensor):
        return x.tensor.dtype
    return x.on.dtype if isinstance(x, IntervalSelect) else x.dtype


# ------------------------------------------------------------------------------------------------------------ choices


def _by_corners(function: Function, operands: Sequence[Abstract], shape: tuple[int, ...]) -> Abstract | None:
    """Evaluate an operator on choices, which has at most four values: key in the one interval or not, in the other or
    not. The result is a choice if one of the four differs from the others and the intervals meet accordingly."""
    choices = [as_choice(x, shape) for x in operands]
    places = {(x.query, x.key) for x in choices if isinstance(x, IntervalSelect)}
    if len(places) != 1 or any(x is None for x in choices):
        return None
    ((query, key),) = places
    distinct: list[Intervals] = []
    for x in choices:
        if isinstance(x, IntervalSelect) and not any(x.seen.equals(seen) for seen in distinct):
            distinct.append(x.seen)
    if len(distinct) > 2:
        return None
    first, second = distinct[0], distinct[-1]
    values = {}
    for inside in product((True, False), repeat=2):
        taken = []
        for x in choices:
            if isinstance(x, IntervalSelect):
                taken.append(x.on if inside[0 if x.seen.equals(first) else 1] else x.off)
            elif isinstance(x, KnownTensor):
                taken.append(x.core)
        values[inside] = function(*taken).reshape((1,) * len(shape))
    if any(value.is_floating_point() and bool(value.isnan()) for value in values.values()):
        return None
    both, first_only, second_only, neither = values.values()
    if len(distinct) == 1:
        return interval_select(shape, query, key, first, both, neither)
    intervals: Intervals | None = None
    if _same(both, first_only) and _same(second_only, neither):
        intervals, on, off = first, both, neither
    elif _same(both, second_only) and _same(first_only, neither):
        intervals, on, off = second, both, neither
    elif _same(first_only, second_only, neither):
        intervals, on, off = first.intersection(second), both, neither
    elif _same(both, second_only, neither):
        intervals, on, off = first.without(second), first_only, neither
    elif _same(both, first_only, neither):
        intervals, on, off = second.without(first), second_only, neither
    elif _same(both, first_only, second_only):
        intervals, on, off = first.union(second), both, neither
    return None if intervals is None else interval_select(shape, query, key, intervals, on, off)


def _same(first: Tensor, *others: Tensor) -> bool:
    return all(torch.equal(first, other) for other in others)


def as_choice(x: Abstract, shape: tuple[int, ...]) -> KnownTensor | IntervalSelect | None:
    """Return a value as a choice over the last two dims of a shape, or as one number; None if it is neither."""
    if isinstance(x, PositionSum):
        return None
    if isinstance(x, IntervalSelect) or x.core.numel() == 1:
        return x
    values, dims = x.core, varying_dims(x.core)
    if values.dtype != torch.bool or len(dims) != 1 or dims[0] < -2 or len(shape) < 2:
        return None
    seen = values.flatten()
    num_queries, num_keys = shape[-2:]
    if dims == (-2,):
        intervals = Intervals.of(torch.zeros(len(seen), dtype=torch.int64), seen * num_keys, num_keys)
    else:
        chosen = seen.nonzero().flatten()
        lo, hi = (int(chosen[0]), int(chosen[-1]) + 1) if len(chosen) else (0, 0)
        if hi - lo != len(chosen):
            return None
        every = torch.ones(num_queries, dtype=torch.int64)
        intervals = Intervals.of(every * lo, every * hi, num_keys)
    on = torch.ones((1,) * values.dim(), dtype=torch.bool)
    return IntervalSelect(x.shape, -2, -1, intervals, on, ~on)


def triangle(x: Abstract, diagonal: int, upper: bool, shape: tuple[int, ...]) -> Abstract | None:
    """Evaluate ``tril`` or ``triu``: zero where the key is beyond the diagonal."""
    if len(shape) < 2:
        return None
    rows = torch.arange(shape[-2]) + diagonal
    zero = torch.zeros_like(rows)
    seen = Intervals.of(rows, zero + shape[-1], shape[-1]) if upper else Intervals.of(zero, rows + 1, shape[-1])
    inside = torch.full((1,) * len(shape), True)
    kept = interval_select(shape, -2, -1, seen, inside, ~inside)
    return apply_pointwise("where", lambda kept, x: torch.where(kept, x, torch.zeros_like(x)), (kept, x), shape)


# -------------------------------------------------------------------------------------------------------------- views


def apply_view(function: Function, x: Abstract) -> Abstract | None:
    """Evaluate a view: dims are moved, repeated or cut."""
    if isinstance(x, KnownTensor):
        try:
            return KnownTensor(function(x.tensor))
        except RuntimeError:  # not without a copy
            fits = x.tensor.numel() <= MOST_ELEMENTS
            return collapse_constant_dims(function(x.tensor.contiguous())) if fits else None
    # The view of a meta tensor with distinct strides shows what it does to the dims.
    rank, keys = len(x.shape), x.shape[x.key]
    strides = tuple({rank + x.query: keys, rank + x.key: 1}.get(dim, 0) for dim in range(rank))
    try:
        looked = function(torch.empty_strided(x.shape, strides, device="meta"))
    except RuntimeError:
        return None
    axes: dict[str, tuple[int, slice]] = {}
    starts = divmod(int(looked.storage_offset()), keys)
    for dim, (size, stride) in enumerate(zip(looked.shape, looked.stride(), strict=True)):
        if size < 2 or stride == 0:
            continue
        of_query = stride % keys == 0
        step, start = (stride // keys, starts[0]) if of_query else (stride, starts[1])
        stop = start + (size - 1) * step + 1
        name = "query" if of_query else "key"
        if name in axes or stop > x.shape[x.query if of_query else x.key]:
            return None
        axes[name] = dim - looked.dim(), slice(start, stop, step)
    if len(axes) != 2 or (isinstance(x, IntervalSelect) and axes["key"][1].step != 1):
        return None
    (query, queries), (key, columns) = axes["query"], axes["key"]
    shape = tuple(looked.shape)
    if isinstance(x, PositionSum):
        return PositionSum(shape, query, key, x.of_query[queries], x.of_key[columns], x.dtype, x.absolute)
    ranks = (1,) * len(shape)
    return interval_select(shape, query, key, x.seen.part(queries, columns), x.on.reshape(ranks), x.off.reshape(ranks))
