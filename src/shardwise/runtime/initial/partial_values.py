"""The initial value of a part of a tensor, computed from a tape without the rest of the tensor.

``Regions.box`` works backwards: which operator wrote these elements last, and which elements of its operands did it
read? A draw computes its own part (``runtime.initial.draws``). A fill is a constant. An elementwise operator needs the
same elements of its operands, a copy the elements that were copied. Elements that an operator did not write come from
before it. That covers the initialisers of torch and of transformers: normal, uniform, truncated normal, Xavier,
Kaiming, constants, rows of zeros, fused projections that are copied together.

An operator that reads more than one element (a QR decomposition, a sort) runs whole if its result is small. Otherwise
``box`` raises ``NotByParts``, and ``InitTape.replay`` computes the tensor from the part of the tape that it needs, each
draw with the same numbers. Both agree bit for bit.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch.utils import _pytree as pytree

from shardwise.graph.switches import default_dtype
from shardwise.layouts.boxes import Box, index_of
from shardwise.runtime.initial.bitwise_elementwise import apply_elementwise
from shardwise.runtime.initial.draws import Fill, draw_box
from shardwise.runtime.initial.replay import SEEDED, Draw, InitTape, StorageRef, TapeConstant, TapeEntry, op_name

# Draws whose elements are independent and identically distributed, by the operator that fills a tensor with them.
FILLS = frozenset(
    {"normal_", "uniform_", "random_", "exponential_", "log_normal_", "cauchy_", "geometric_", "bernoulli_"}
)
_MADE_NORMAL = frozenset({"randn", "randn_like"})
_MADE_UNIFORM = frozenset({"rand", "rand_like"})
_BLANK = frozenset({"empty_strided", "zeros", "zeros_like", "new_zeros", "zero_", "zero"})
_COPIES = frozenset({"clone", "_to_copy", "lift_fresh"})
_MOST_WRITERS = 200  # of one storage: a read goes back through all of them
_MOST_READS = 1000  # of one box
_MOST_KEPT = 4  # boxes of values that several operators read
_DEEPEST = 100  # operators in a chain
_SMALL = 2**16  # elements of a result that is computed whole for a part of it


class NotByParts(Exception):
    """An element depends on others, or its dependencies are unknown."""


@dataclass(frozen=True, slots=True)
class _StorageBox:
    """A tensor as a box of its storage's base. ``dims``: per dim of the tensor the base's dim, None for dims of size 1
    or repeated by ``expand`` (``repeats``)."""

    box: Box
    dims: tuple[int | None, ...]
    repeats: bool = False


class Regions:
    """Values of a tape's tensors for one seed."""

    def __init__(self, tape: InitTape, seed: int) -> None:
        self.tape, self.seed = tape, seed
        self._keys: dict[int, tuple[str, int]] = {}  # draw -> seed of its generator, draws since
        self._writers: dict[int, list[int]] = {}
        self._depth = self._num_reads = 0
        self._cache: dict[tuple[int, int, Box], torch.Tensor] = {}  # while one box is computed
        self._num_readers = Counter(storage for entry in tape.entries for storage in entry.reads)
        for index, entry in enumerate(tape.entries):
            for storage in entry.writes | entry.creates:
                self._writers.setdefault(storage, []).append(index)

    def box(self, ref: StorageRef, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """Return rows ``[offset, offset + size)`` of each dim of a tensor at the end of the tape. Raises NotByParts."""
        self._depth = self._num_reads = 0
        self._cache.clear()
        with torch.no_grad(), torch._C.DisableTorchFunction():
            return self._part(ref, len(self.tape.entries), offsets, sizes)

    def draw(self, index: int, entry: TapeEntry) -> torch.Tensor | None:
        """Return the whole result of a draw with independent, identically distributed elements; None for others."""
        window = _written(entry)
        fill = _fill_of(entry)
        if fill is None or window is None:
            return None
        zeros = (0,) * len(window.shape)
        return draw_box(self.key(index), fill, window.shape, zeros, window.shape, window.dtype)

    def key(self, index: int) -> str:
        """Return a key for the position of a draw: equal for draws to which torch would give the same numbers."""
        chain: list[int] = []
        place: int | torch.Tensor = index
        while isinstance(place, int) and place != SEEDED and place not in self._keys:
            draw = self.tape.entries[place].draw
            assert isinstance(draw, Draw), "a draw continues another one"
            chain.append(place)
            place = draw.after
        if isinstance(place, torch.Tensor):
            origin, count = hashlib.blake2b(place.numpy().tobytes(), digest_size=16).hexdigest(), 0
        else:
            origin, count = (f"seed {self.seed}", 0) if place == SEEDED else self._keys[place]
        for link in reversed(chain):
            count += 1
            self._keys[link] = origin, count
        return "{}, draw {}".format(*self._keys[index])

    def _part(self, ref: StorageRef, time: int, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """Return a box of a tensor as it was before entry ``time``."""
        if ref.conjugate or ref.negative:
            raise NotByParts("a lazy conjugate")
        base = self._base(ref.storage)
        window = _window(ref, base)
        box = _inside(window, offsets, sizes, len(base.shape))
        key = ref.storage, bisect_left(self._writers[ref.storage], time), box
        value = self._cache.pop(key, None)
        if value is None:
            self._depth, self._num_reads = self._depth + 1, self._num_reads + 1
            if self._depth > _DEEPEST or self._num_reads > _MOST_READS:
                raise NotByParts("it goes through too many operators")
            value = self._read(base, time, box)
            self._depth -= 1
        if self._num_readers[ref.storage] > 1:
            self._cache[key] = value.clone()
            if len(self._cache) > _MOST_KEPT:
                del self._cache[next(iter(self._cache))]
        return _as_window(value, window, sizes)

    def _base(self, storage: int) -> StorageRef:
        """Return the tensor with which a storage began."""
        writers = self._writers.get(storage)
        if writers is None:
            raise NotByParts("nothing wrote it")
        for ref in self.tape.entries[writers[0]].results:
            if ref is not None and ref.storage == storage and ref.covers:
                return ref
        raise NotByParts("its storage began as something else")

    def _read(self, base: StorageRef, time: int, wanted: Box) -> torch.Tensor:
        """Return a box of a storage as it was before entry ``time``, in memory of its own."""
        writers = self._writers[base.storage]
        if len(writers) > _MOST_WRITERS:
            raise NotByParts(f"it is written {len(writers):,} times, part by part")
        written: list[tuple[int, StorageRef, _StorageBox, Box]] = []  # the last first
        is_covered = False
        for index in reversed(writers[: bisect_left(writers, time)]):
            entry = self.tape.entries[index]
            target = base if base.storage in entry.creates else _written(entry)
            if target is None or target.storage != base.storage:
                raise NotByParts(f"{entry.target} writes several tensors")
            window = _window(target, base)
            if window.repeats:
                raise NotByParts(f"{entry.target} writes an element several times")
            common = wanted.common(window.box.offsets, window.box.sizes)
            if common is not None:
                written.append((index, target, window, common))
                is_covered = common.sizes == wanted.sizes
            if is_covered:
                break
        box = None if is_covered else torch.zeros(wanted.sizes, dtype=base.dtype)
        for index, target, window, common in reversed(written):
            offsets, sizes = _outside(window, common)
            value = self._result(index, self.tape.entries[index], target, offsets, sizes).to(base.dtype)
            part = _as_base(value, window, common.sizes)
            if box is None:
                box = part
                continue
            starts = [at - first for at, first in zip(common.offsets, wanted.offsets, strict=True)]
            box[index_of(starts, common.sizes)].copy_(part)
        assert box is not None, "a box that is covered was written"
        return box

    def _result(
        self, index: int, entry: TapeEntry, target: StorageRef, offsets: Sequence[int], sizes: Sequence[int]
    ) -> torch.Tensor:
        """Return a box of the values that an entry writes into ``target``, in memory of its own."""
        name = op_name(entry.target)
        if entry.draw is not None:
            fill = _fill_of(entry)
            if fill is None:
                raise NotByParts(f"{entry.target} draws numbers that depend on each other")
            return draw_box(self.key(index), fill, target.shape, offsets, sizes, target.dtype)
        if name in _BLANK:
            return torch.zeros(tuple(sizes), dtype=target.dtype)
        if name in ("ones", "ones_like", "new_ones"):
            return torch.ones(tuple(sizes), dtype=target.dtype)
        if name in ("full", "full_like", "new_full", "fill_", "fill"):
            value = entry.args[2] if name == "new_full" else entry.args[1]
            return self._operand(value, index, target, offsets, sizes, target.dtype).expand(tuple(sizes)).contiguous()
        if name in ("copy_", *_COPIES):
            source = entry.args[1] if name == "copy_" else entry.args[0]
            return self._operand(source, index, target, offsets, sizes).expand(tuple(sizes)).contiguous()
        if name == "cat":
            return self._joined(index, entry, offsets, sizes)
        if not entry.is_elementwise:
            return self._cut(index, entry, target, offsets, sizes)
        operands = [
            self._operand(arg, index, target, offsets, sizes) if isinstance(arg, (StorageRef, TapeConstant)) else arg
            for arg in entry.args
        ]
        with default_dtype(entry.default_dtype):
            return apply_elementwise(entry.target, operands, entry.kwargs, sizes)

    def _cut(
        self, index: int, entry: TapeEntry, target: StorageRef, offsets: Sequence[int], sizes: Sequence[int]
    ) -> torch.Tensor:
        """Return a box of a small result of any operator, computed whole."""
        operands = _operands((entry.args, entry.kwargs))
        counts = [prod(x.shape if isinstance(x, StorageRef) else x.tensor.shape) for x in (target, *operands)]
        if entry.writes or len(entry.results) > 1 or max(counts) > _SMALL:
            raise NotByParts(f"{entry.target} is not known to work element by element")

        def whole(leaf: Any) -> Any:
            if isinstance(leaf, StorageRef):
                return self._part(leaf, index, (0,) * len(leaf.shape), leaf.shape)
            return leaf.value() if isinstance(leaf, TapeConstant) else leaf

        args, kwargs = pytree.tree_map(whole, (entry.args, entry.kwargs))
        with default_dtype(entry.default_dtype):
            whole_result: torch.Tensor = entry.target(*args, **kwargs)
        return whole_result[index_of(offsets, sizes)].clone(memory_format=torch.contiguous_format)

    def _joined(self, index: int, entry: TapeEntry, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        dim = (entry.args[1] if len(entry.args) > 1 else 0) % len(sizes)
        parts, at = [], 0
        for part in entry.args[0]:
            if not isinstance(part, StorageRef):
                raise NotByParts("a real tensor is joined")
            low, high = max(offsets[dim], at), min(offsets[dim] + sizes[dim], at + part.shape[dim])
            if low < high:
                starts, counts = list(offsets), list(sizes)
                starts[dim], counts[dim] = low - at, high - low
                parts.append(self._part(part, index, starts, counts))
            at += part.shape[dim]
        return torch.cat(parts, dim)

    def _operand(
        self,
        arg: Any,
        index: int,
        target: StorageRef,
        offsets: Sequence[int],
        sizes: Sequence[int],
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Return the elements of an operand that correspond to a box of the result. ``dtype``: of a number."""
        if not isinstance(arg, (StorageRef, TapeConstant)):
            return torch.tensor(arg, dtype=dtype)
        shape = tuple(arg.shape) if isinstance(arg, StorageRef) else tuple(arg.tensor.shape)
        lead = len(target.shape) - len(shape)
        if lead < 0 or any(extent not in (1, size) for extent, size in zip(shape, target.shape[lead:], strict=True)):
            raise NotByParts(f"an operand of shape {shape} for a result of {target.shape}")
        starts = [0 if extent == 1 else at for extent, at in zip(shape, offsets[lead:], strict=True)]
        counts = [min(extent, count) for extent, count in zip(shape, sizes[lead:], strict=True)]
        if isinstance(arg, StorageRef):
            return self._part(arg, index, starts, counts)
        return arg.value()[index_of(starts, counts)].clone()


def _operands(arguments: Any) -> list[StorageRef | TapeConstant]:
    return [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, (StorageRef, TapeConstant))]


def _written(entry: TapeEntry) -> StorageRef | None:
    """Return the one tensor that an entry creates or changes; None if there are several."""
    created = [ref for ref in entry.results if ref is not None]
    if len(created) == 1 and not entry.writes:
        return created[0]
    first = entry.args[0] if entry.args else None
    return first if not created and isinstance(first, StorageRef) and entry.writes == {first.storage} else None


def _fill_of(entry: TapeEntry) -> Fill | None:
    """Return the function that fills a tensor like a draw; None if its elements are not identically distributed."""
    name = op_name(entry.target)
    if name in _MADE_NORMAL:
        return lambda tensor, generator: tensor.normal_(generator=generator)
    if name in _MADE_UNIFORM:
        return lambda tensor, generator: tensor.uniform_(generator=generator)
    if name == "randint":
        bounds = [arg for arg in entry.args if isinstance(arg, int)]
        low, high = (0, bounds[0]) if len(bounds) == 1 else bounds
        return lambda tensor, generator: tensor.random_(low, high, generator=generator)
    numbers = entry.args[1:]
    if name not in FILLS or _operands((numbers, entry.kwargs)):
        return None
    named = {key: value for key, value in entry.kwargs.items() if key != "generator"}
    return partial(_drawn, entry.target, numbers, named)


def _drawn(target: Any, numbers: Any, named: Any, tensor: torch.Tensor, generator: torch.Generator) -> None:
    target(tensor, *numbers, **named, generator=generator)


# ------------------------------------------------------------------------------------------------------- geometry


def _window(ref: StorageRef, base: StorageRef) -> _StorageBox:
    """Return the box of a tensor in its storage's base. Raises NotByParts if it is not a box."""
    if ref.dtype != base.dtype:
        raise NotByParts("its storage is read as another dtype")
    steps = sorted(((step, dim) for dim, step in enumerate(base.stride) if base.shape[dim] > 1), reverse=True)
    offsets, rest = [0] * len(base.shape), ref.offset - base.offset
    for step, dim in steps:
        offsets[dim], rest = divmod(rest, step)
    at, sizes = dict(steps), [1] * len(base.shape)
    dims: list[int | None] = []
    repeats = any(size > 1 and step == 0 for size, step in zip(ref.shape, ref.stride, strict=True))
    for size, step in zip(ref.shape, ref.stride, strict=True):
        if size > 1 and step and step not in at:
            raise NotByParts("it is not a box of its storage")
        dims.append(at.pop(step) if size > 1 and step else None)
        if (along := dims[-1]) is not None:
            sizes[along] = size
    if 0 in ref.shape or rest or any(o + s > n for o, s, n in zip(offsets, sizes, base.shape, strict=True)):
        raise NotByParts("it is not a box of its storage")
    return _StorageBox(Box(tuple(offsets), tuple(sizes), tuple(offsets)), tuple(dims), repeats)


def _inside(window: _StorageBox, offsets: Sequence[int], sizes: Sequence[int], num_dims: int) -> Box:
    """Convert a box of a window to coordinates of the base."""
    starts, counts = list(window.box.offsets), [1] * num_dims
    for dim, offset, size in zip(window.dims, offsets, sizes, strict=True):
        if dim is not None:
            starts[dim] += offset
            counts[dim] = size
    return Box(tuple(starts), tuple(counts), tuple(starts))


def _outside(window: _StorageBox, box: Box) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Convert a box of the base to (offsets, sizes) in coordinates of a window."""
    offsets = tuple(0 if dim is None else box.offsets[dim] - window.box.offsets[dim] for dim in window.dims)
    return offsets, tuple(1 if dim is None else box.sizes[dim] for dim in window.dims)


def _as_base(value: torch.Tensor, window: _StorageBox, sizes: Sequence[int]) -> torch.Tensor:
    """Permute a part of a window to the dims of the base."""
    kept = [dim for dim in window.dims if dim is not None]
    value = value.reshape([size for dim, size in zip(window.dims, value.shape, strict=True) if dim is not None])
    return value.permute([kept.index(dim) for dim in sorted(kept)]).reshape(tuple(sizes))


def _as_window(value: torch.Tensor, window: _StorageBox, sizes: Sequence[int]) -> torch.Tensor:
    """Permute a part of the base to the dims of a window."""
    kept = [dim for dim in window.dims if dim is not None]
    value = value.reshape([value.shape[dim] for dim in sorted(kept)])
    value = value.permute([sorted(kept).index(dim) for dim in kept])
    value = value.reshape([1 if dim is None else size for dim, size in zip(window.dims, sizes, strict=True)])
    return value.expand(tuple(sizes)).contiguous() if window.repeats else value
