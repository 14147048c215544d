"""The initial value of a part of a tensor, out of a tape, without making the rest.

``Regions.box`` asks backwards: which operator wrote these elements last, and which elements of its operands did it
read? A draw gives its own part (``runtime.initial.draws``); a fill gives a constant; an operator that works element by
element asks for the same elements of its operands; a copy for those that were copied; and what an operator did not
write was there before. That covers the initialisers of torch and of transformers: normal, uniform, truncated normal,
Xavier, Kaiming, constants, rows of zeros, fused projections that are copied together.

Where an operator looks at more than one element (a QR decomposition, a sort), ``box`` raises ``NotByParts``, and
``whole`` runs what the tensor needs of the tape, each draw with the same numbers. Both agree to the last bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch

from shardwise.layouts.boxes import Box
from shardwise.runtime.initial.draws import Fill, Tally, draw_box
from shardwise.runtime.initial.replay import SEEDED, Constant, Draw, Entry, GeneratorRef, Ref, Tape, leaves

# Draws that treat all elements alike, by what fills a tensor like them.
_FILLS = frozenset(
    {"normal_", "uniform_", "random_", "exponential_", "log_normal_", "cauchy_", "geometric_", "bernoulli_"}
)
_MADE_NORMAL = frozenset({"randn", "randn_like"})
_MADE_UNIFORM = frozenset({"rand", "rand_like"})
_BLANK = frozenset({"empty_strided", "zeros", "zeros_like", "new_zeros", "zero_", "zero"})
_COPIES = frozenset({"clone", "_to_copy", "lift_fresh"})
_MOST_WRITERS = 200  # of one storage: it is read back through all of them


class NotByParts(Exception):
    """An element depends on others, or nobody knows on which."""


@dataclass(frozen=True, slots=True)
class _Window:
    """A tensor as a box of its storage's base: ``dims``: per dim of the tensor the base's dim, None where its size is
    1."""

    box: Box
    dims: tuple[int | None, ...]


class Regions:
    """Values of a tape's tensors for one seed. ``tally`` counts the elements that were drawn."""

    def __init__(self, tape: Tape, seed: int) -> None:
        self.tape, self.seed, self.tally = tape, seed, Tally()
        self._keys: dict[int, tuple[str, int]] = {}  # draw -> what its generator was seeded with, draws since
        self._writers: dict[int, list[int]] = {}
        for index, entry in enumerate(tape.entries):
            for storage in entry.writes | entry.creates:
                self._writers.setdefault(storage, []).append(index)

    def box(self, ref: Ref, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """Rows ``[offset, offset + size)`` of every dim of a tensor, at the end of the tape. Raises NotByParts."""
        with torch.no_grad(), torch._C.DisableTorchFunction():
            return self._part(ref, len(self.tape.entries), offsets, sizes)

    def draw(self, index: int, entry: Entry) -> torch.Tensor | None:
        """The whole result of a draw that treats all elements alike; None for others."""
        window = _written(entry)
        fill = _fill_of(entry)
        if fill is None or window is None:
            return None
        zeros = (0,) * len(window.shape)
        return draw_box(self.key(index), fill, window.shape, zeros, window.shape, window.dtype, self.tally)

    def key(self, index: int) -> str:
        """Where a draw stands, as a text: it is the same for draws that torch would give the same numbers."""
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
        for found in reversed(chain):
            count += 1
            self._keys[found] = origin, count
        return "{}, draw {}".format(*self._keys[index])

    def _part(self, ref: Ref, time: int, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """Of a tensor as it was ahead of entry ``time``."""
        if ref.conjugate or ref.negative:
            raise NotByParts("a lazy conjugate")
        base = self._base(ref.storage)
        window = _window(ref, base)
        value = self._read(base, time, _inside(window, offsets, sizes, len(base.shape)))
        return _as_window(value, window, sizes)

    def _base(self, storage: int) -> Ref:
        """The tensor with which a storage began."""
        writers = self._writers.get(storage)
        if writers is None:
            raise NotByParts("nothing wrote it")
        for ref in self.tape.entries[writers[0]].results:
            if ref is not None and ref.storage == storage and ref.covers:
                return ref
        raise NotByParts("its storage began as something else")

    def _read(self, base: Ref, time: int, wanted: Box) -> torch.Tensor:
        """A box of a storage, as it was ahead of entry ``time``."""
        if len(self._writers[base.storage]) > _MOST_WRITERS:
            raise NotByParts(f"it is written {len(self._writers[base.storage]):,} times, part by part")
        index = max((i for i in self._writers[base.storage] if i < time), default=None)
        if index is None:
            return torch.zeros(wanted.sizes, dtype=base.dtype)
        entry = self.tape.entries[index]
        target = base if base.storage in entry.creates else _written(entry)
        if target is None or target.storage != base.storage:
            raise NotByParts(f"{entry.target} writes several tensors")
        window = _window(target, base)
        common = wanted.common(window.box.offsets, window.box.sizes)
        if common is None:
            return self._read(base, index, wanted)
        offsets, sizes = _outside(window, common)
        value = self._result(index, entry, target, offsets, sizes).to(base.dtype)
        part = _as_base(value, window, common.sizes)
        if common.sizes == wanted.sizes:
            return part
        before = self._read(base, index, wanted)
        place = before
        for dim, (at, size, first) in enumerate(zip(common.offsets, common.sizes, wanted.offsets, strict=True)):
            place = place.narrow(dim, at - first, size)
        place.copy_(part)
        return before

    def _result(
        self, index: int, entry: Entry, target: Ref, offsets: Sequence[int], sizes: Sequence[int]
    ) -> torch.Tensor:
        """A box of what an entry writes into ``target``."""
        name = _name(entry)
        if entry.draw is not None:
            fill = _fill_of(entry)
            if fill is None:
                raise NotByParts(f"{entry.target} draws numbers that depend on each other")
            return draw_box(self.key(index), fill, target.shape, offsets, sizes, target.dtype, self.tally)
        if name in _BLANK:
            return torch.zeros(tuple(sizes), dtype=target.dtype)
        if name in ("ones", "ones_like", "new_ones"):
            return torch.ones(tuple(sizes), dtype=target.dtype)
        if name in ("full", "full_like", "new_full", "fill_", "fill"):
            value = entry.args[2] if name == "new_full" else entry.args[1]
            return self._operand(value, index, target, offsets, sizes, target.dtype).expand(tuple(sizes)).clone()
        if name in ("copy_", *_COPIES):
            source = entry.args[1] if name == "copy_" else entry.args[0]
            return self._operand(source, index, target, offsets, sizes).expand(tuple(sizes)).clone()
        if name == "cat":
            return self._joined(index, entry, offsets, sizes)
        if torch.Tag.pointwise not in entry.target.tags or len(entry.results) > 1:
            raise NotByParts(f"{entry.target} is not known to work element by element")
        operands = [
            self._operand(arg, index, target, offsets, sizes) if isinstance(arg, (Ref, Constant)) else arg
            for arg in entry.args
        ]
        if any(isinstance(leaf, (Ref, Constant, GeneratorRef)) for leaf in leaves((entry.kwargs, _nested(entry.args)))):
            raise NotByParts(f"{entry.target} has tensors in lists")
        default = torch.get_default_dtype()
        torch.set_default_dtype(entry.default_dtype)
        try:
            result: torch.Tensor = entry.target(*operands, **entry.kwargs)
        finally:
            torch.set_default_dtype(default)
        return result.expand(tuple(sizes))

    def _joined(self, index: int, entry: Entry, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """A box of tensors that are joined along a dim."""
        dim = (entry.args[1] if len(entry.args) > 1 else 0) % len(sizes)
        found, at = [], 0
        for part in entry.args[0]:
            if not isinstance(part, Ref):
                raise NotByParts("a real tensor is joined")
            low, high = max(offsets[dim], at), min(offsets[dim] + sizes[dim], at + part.shape[dim])
            if low < high:
                starts, counts = list(offsets), list(sizes)
                starts[dim], counts[dim] = low - at, high - low
                found.append(self._part(part, index, starts, counts))
            at += part.shape[dim]
        return torch.cat(found, dim)

    def _operand(
        self,
        arg: Any,
        index: int,
        target: Ref,
        offsets: Sequence[int],
        sizes: Sequence[int],
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """The elements of an operand that meet a box of the result. A number is one of ``dtype``."""
        if not isinstance(arg, (Ref, Constant)):
            return torch.tensor(arg, dtype=dtype)
        shape = tuple(arg.shape) if isinstance(arg, Ref) else tuple(arg.tensor.shape)
        lead = len(target.shape) - len(shape)
        if lead < 0 or any(own not in (1, size) for own, size in zip(shape, target.shape[lead:], strict=True)):
            raise NotByParts(f"an operand of shape {shape} for a result of {target.shape}")
        starts = [0 if own == 1 else at for own, at in zip(shape, offsets[lead:], strict=True)]
        counts = [min(own, count) for own, count in zip(shape, sizes[lead:], strict=True)]
        if isinstance(arg, Ref):
            return self._part(arg, index, starts, counts)
        rows = tuple(slice(start, start + count) for start, count in zip(starts, counts, strict=True))
        return arg.value()[rows].clone()


def _name(entry: Entry) -> str:
    return entry.target._schema.name.removeprefix("aten::")


def _nested(args: Sequence[Any]) -> list[Any]:
    return [arg for arg in args if isinstance(arg, (list, tuple))]


def _written(entry: Entry) -> Ref | None:
    """The one tensor that an entry makes or changes; None where there are several."""
    made = [ref for ref in entry.results if ref is not None]
    if len(made) == 1 and not entry.writes:
        return made[0]
    first = entry.args[0] if entry.args else None
    return first if not made and isinstance(first, Ref) and entry.writes == {first.storage} else None


def _fill_of(entry: Entry) -> Fill | None:
    """What fills a tensor as a draw does; None where its elements are not alike."""
    name = _name(entry)
    if name in _MADE_NORMAL:
        return lambda tensor, generator: tensor.normal_(generator=generator)
    if name in _MADE_UNIFORM:
        return lambda tensor, generator: tensor.uniform_(generator=generator)
    if name == "randint":
        bounds = [arg for arg in entry.args if isinstance(arg, int)]
        low, high = (0, bounds[0]) if len(bounds) == 1 else bounds
        return lambda tensor, generator: tensor.random_(low, high, generator=generator)
    numbers = entry.args[1:]
    if name not in _FILLS or any(isinstance(leaf, (Ref, Constant)) for leaf in leaves((numbers, entry.kwargs))):
        return None
    named = {key: value for key, value in entry.kwargs.items() if key != "generator"}
    return partial(_drawn, entry.target, numbers, named)


def _drawn(target: Any, numbers: Any, named: Any, tensor: torch.Tensor, generator: torch.Generator) -> None:
    target(tensor, *numbers, **named, generator=generator)


# ------------------------------------------------------------------------------------------------------- geometry


def _window(ref: Ref, base: Ref) -> _Window:
    """Where a tensor lies in its storage's first one. Raises NotByParts unless it is a box of it."""
    if ref.dtype != base.dtype:
        raise NotByParts("its storage is read as another dtype")
    steps = sorted(((step, dim) for dim, step in enumerate(base.stride) if base.shape[dim] > 1), reverse=True)
    offsets, rest = [0] * len(base.shape), ref.offset - base.offset
    for step, dim in steps:
        offsets[dim], rest = divmod(rest, step)
    at, sizes = dict(steps), [1] * len(base.shape)
    dims: list[int | None] = []
    for size, step in zip(ref.shape, ref.stride, strict=True):
        if size > 1 and step not in at:
            raise NotByParts("it is no box of its storage")
        dims.append(at.pop(step) if size > 1 else None)
        if (along := dims[-1]) is not None:
            sizes[along] = size
    if 0 in ref.shape or rest or any(o + s > n for o, s, n in zip(offsets, sizes, base.shape, strict=True)):
        raise NotByParts("it is no box of its storage")
    return _Window(Box(tuple(offsets), tuple(sizes), tuple(offsets)), tuple(dims))


def _inside(window: _Window, offsets: Sequence[int], sizes: Sequence[int], num_dims: int) -> Box:
    """A box of a window, in coordinates of the base."""
    starts, counts = list(window.box.offsets), [1] * num_dims
    for dim, offset, size in zip(window.dims, offsets, sizes, strict=True):
        if dim is not None:
            starts[dim] += offset
            counts[dim] = size
    return Box(tuple(starts), tuple(counts), tuple(starts))


def _outside(window: _Window, box: Box) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(offsets, sizes) of a box of the base, in coordinates of a window."""
    offsets = tuple(0 if dim is None else box.offsets[dim] - window.box.offsets[dim] for dim in window.dims)
    return offsets, tuple(1 if dim is None else box.sizes[dim] for dim in window.dims)


def _as_base(value: torch.Tensor, window: _Window, sizes: Sequence[int]) -> torch.Tensor:
    """A part of a window with the dims of the base."""
    kept = [dim for dim in window.dims if dim is not None]
    value = value.reshape([size for dim, size in zip(window.dims, value.shape, strict=True) if dim is not None])
    return value.permute([kept.index(dim) for dim in sorted(kept)]).reshape(tuple(sizes))


def _as_window(value: torch.Tensor, window: _Window, sizes: Sequence[int]) -> torch.Tensor:
    """A part of the base with the dims of a window."""
    kept = [dim for dim in window.dims if dim is not None]
    value = value.reshape([value.shape[dim] for dim in sorted(kept)])
    value = value.permute([sorted(kept).index(dim) for dim in kept])
    assert value.numel() == prod(sizes), "a box has as many elements in every form"
    return value.reshape(tuple(sizes))


__all__ = ["NotByParts", "Regions"]
