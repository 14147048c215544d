"""Custom operators of graphs: sharded dropout and random numbers, and the mark of ``constrain``.

Dropout under sharding must not depend on which device computes an element: one seed would give every shard the same
mask, different seeds would give replicas different masks. So the mask is a *hash of the global index*: element ``i`` of
the ``c``-th dropout of the model under seed ``s`` is kept if ``uniform(hash(s, c, i)) >= p``. The hash is the finalizer
of splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014), computed with wrapping
int64 arithmetic, the same on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from math import prod
from typing import Any

import torch
from torch._ops import OpOverload


def _signed(unsigned: int) -> int:
    return unsigned - (1 << 64) if unsigned >= 1 << 63 else unsigned


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = _signed(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = _signed(0x94D049BB133111EB)


def _shift_right_(bits: torch.Tensor, count: int) -> torch.Tensor:
    """Shift int64 right logically, in place (torch's ``>>`` copies the sign)."""
    bits >>= count
    bits &= (1 << (64 - count)) - 1
    return bits


def splitmix64(bits: torch.Tensor) -> torch.Tensor:
    """Apply the 64-bit finalizer of splitmix64, element-wise on int64."""
    return _splitmix64_(bits.clone())


def _splitmix64_(bits: torch.Tensor) -> torch.Tensor:
    for count, multiplier in ((30, _MULTIPLIER_1), (27, _MULTIPLIER_2), (31, 1)):
        bits ^= _shift_right_(bits.clone(), count)
        if multiplier != 1:
            bits *= multiplier
    return bits


def global_indices(
    sizes: Sequence[int], offsets: Sequence[int], lengths: Sequence[int], device: torch.device
) -> torch.Tensor:
    """Return row-major indices in the tensor of ``sizes`` of the block of ``lengths`` that begins at ``offsets``.

    Int64, shape ``lengths``.
    """
    index = torch.zeros((), dtype=torch.int64, device=device)
    stride = 1
    dims = zip(reversed(sizes), reversed(offsets), reversed(lengths), strict=True)
    for trailing, (size, offset, length) in enumerate(dims):
        position = torch.arange(offset, offset + length, dtype=torch.int64, device=device)
        index = index + (position * stride).reshape(length, *[1] * trailing)
        stride *= size
    return index


# On a CPU the hash is computed in pieces of so many elements, whose dozen passes stay in the cache.
_PIECE = 1 << 15


def hash_bits(
    seed: torch.Tensor,
    call: int,
    sizes: Sequence[int],
    offsets: Sequence[int],
    lengths: Sequence[int],
    start: torch.Tensor | int = 0,
) -> torch.Tensor:
    """Return 64 random bits per element of the block, for random call ``call``: int64, shape ``lengths``. ``start``:
    the number of elements by which the block lies behind ``offsets``."""
    key = splitmix64(splitmix64(seed + _GOLDEN) + call) + _GOLDEN + start * _GOLDEN
    if seed.device.type != "cpu" or prod(lengths) <= _PIECE:
        return _hashed_indices(key, global_indices(sizes, offsets, lengths, seed.device))
    bits = torch.empty(tuple(lengths), dtype=torch.int64)
    for begin, stop in _pieces(lengths):
        first = tuple(a + b for a, b in zip(offsets, begin, strict=True))
        part = global_indices(sizes, first, tuple(b - a for a, b in zip(begin, stop, strict=True)), seed.device)
        bits[tuple(map(slice, begin, stop))] = _hashed_indices(key, part)
    return bits


def _hashed_indices(key: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return the bits of the elements with these global indices; ``index`` is overwritten."""
    index *= _GOLDEN
    index += key
    return _splitmix64_(index)


def _pieces(lengths: Sequence[int]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Split a block of ``lengths`` into blocks of at most ``_PIECE`` elements: (first, one past the last) per dim."""
    dim = next(d for d in range(len(lengths)) if prod(lengths[d + 1 :]) <= _PIECE)
    rows = _PIECE // prod(lengths[dim + 1 :])
    rest = tuple(lengths[dim + 1 :])
    for outer in product(*map(range, lengths[:dim])):
        for row in range(0, lengths[dim], rows):
            last = min(row + rows, lengths[dim])
            yield (*outer, row, *[0] * len(rest)), (*(i + 1 for i in outer), last, *rest)


# ``first``: number of a micro-batch's first sample; ``stride``: elements per sample.
_IN_TIME = "Tensor? first=None, int stride=0"
_DROPOUT = (
    f"(Tensor x, Tensor seed, float p, int call, int[] sizes, int[] offsets, int[]? lengths=None, {_IN_TIME}) -> Tensor"
)
_UNIFORM = (
    "(Tensor seed, int call, int[] sizes, int[] offsets, int[] lengths, int[] shape, ScalarType dtype, "
    f"{_IN_TIME}) -> Tensor"
)


def dropout_mask(
    seed: torch.Tensor,
    p: float,
    call: int,
    sizes: Sequence[int],
    offsets: Sequence[int],
    lengths: Sequence[int],
    start: torch.Tensor | int = 0,
) -> torch.Tensor:
    """Return which elements of the block are kept: bool, shape ``lengths``. Compares 53 bits of the hash with ``p``."""
    return _shift_right_(hash_bits(seed, call, sizes, offsets, lengths, start), 11) >= int(p * (1 << 53))


def _start(first: torch.Tensor | None, stride: int, device: torch.device) -> torch.Tensor | int:
    """Return the number of elements ahead of a micro-batch."""
    return 0 if first is None else first.to(device) * stride


@torch.library.custom_op("shardwise::dropout", mutates_args=(), schema=_DROPOUT)
def dropout(
    x: torch.Tensor,
    seed: torch.Tensor,
    p: float,
    call: int,
    sizes: Sequence[int],
    offsets: Sequence[int],
    lengths: Sequence[int] | None = None,
    first: torch.Tensor | None = None,
    stride: int = 0,
) -> torch.Tensor:
    """Apply dropout whose mask depends only on the global index of an element.

    ``seed``: int64 of shape (). ``call``: which dropout of the model. ``sizes``: the global shape, ``offsets``: the
    global index of the first element of ``x`` in every dim. ``lengths``: the shape of ``x`` when ``sizes`` factors its
    dims, such as sizes (3, 8, 8), offsets (0, 4, 0) and lengths (3, 4, 8) for a ``x`` of 96 elements; by default
    ``x.shape``. ``first``: number of a micro-batch's first sample (int64 of shape ()); the elements then begin
    ``first * stride`` behind ``offsets``.
    """
    shape, start = tuple(x.shape) if lengths is None else tuple(lengths), _start(first, stride, x.device)
    keep = dropout_mask(seed.to(x.device), p, call, sizes, offsets, shape, start).reshape(x.shape)
    scale = 1.0 / (1.0 - p) if p < 1.0 else 0.0
    return torch.where(keep, x * scale, torch.zeros((), dtype=x.dtype, device=x.device))


# How many bits of the hash become a number of [0, 1) that its type holds exactly.
_BITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


@torch.library.custom_op("shardwise::uniform", mutates_args=(), schema=_UNIFORM)
def uniform(
    seed: torch.Tensor,
    call: int,
    sizes: Sequence[int],
    offsets: Sequence[int],
    lengths: Sequence[int],
    shape: Sequence[int],
    dtype: torch.dtype,
    first: torch.Tensor | None = None,
    stride: int = 0,
) -> torch.Tensor:
    """Return uniform numbers of [0, 1) that depend only on the seed, the random call and the global index of an
    element.

    The result is the block of ``lengths`` at ``offsets`` of the tensor of ``sizes``, in ``shape`` (``sizes`` may factor
    its dims; ``first`` and ``stride`` as for ``dropout``).
    """
    start = _start(first, stride, seed.device)
    bits = _shift_right_(hash_bits(seed, call, sizes, offsets, lengths, start), 64 - _BITS[dtype])
    return (bits.to(torch.float64) * 2.0 ** -_BITS[dtype]).to(dtype).reshape(tuple(shape))


# The same from a generator of every shard's own: faster, and other numbers under every plan. A stream is seeded by what
# replicas have in common and shards have not: the seed, the random call and where the shard lies.


def _stream(seed: torch.Tensor, call: int, offsets: Sequence[int], first: torch.Tensor | None) -> torch.Generator:
    key = splitmix64(splitmix64(seed.cpu() + _GOLDEN) + call)
    for offset in (*offsets, *(() if first is None else (int(first),))):
        key = splitmix64(key + offset + _GOLDEN)
    return torch.Generator(seed.device).manual_seed(int(key) & (2**63 - 1))


@torch.library.custom_op("shardwise::stream_dropout", mutates_args=(), schema=_DROPOUT)
def stream_dropout(
    x: torch.Tensor,
    seed: torch.Tensor,
    p: float,
    call: int,
    sizes: Sequence[int],
    offsets: Sequence[int],
    lengths: Sequence[int] | None = None,
    first: torch.Tensor | None = None,
    stride: int = 0,
) -> torch.Tensor:
    """Apply ``dropout`` with the shard's own random stream."""
    kept = torch.empty_like(x, memory_format=torch.contiguous_format)
    kept.bernoulli_(1.0 - p, generator=_stream(seed, call, offsets, first))
    return kept.mul_(1.0 / (1.0 - p) if p < 1.0 else 0.0).mul_(x)


@torch.library.custom_op("shardwise::stream_uniform", mutates_args=(), schema=_UNIFORM)
def stream_uniform(
    seed: torch.Tensor,
    call: int,
    sizes: Sequence[int],
    offsets: Sequence[int],
    lengths: Sequence[int],
    shape: Sequence[int],
    dtype: torch.dtype,
    first: torch.Tensor | None = None,
    stride: int = 0,
) -> torch.Tensor:
    """Return ``uniform`` numbers from the shard's own random stream."""
    return torch.rand(tuple(shape), generator=_stream(seed, call, offsets, first), dtype=dtype, device=seed.device)


@dropout.register_fake
@stream_dropout.register_fake
def _(x: torch.Tensor, *rest: Any) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@uniform.register_fake
@stream_uniform.register_fake
def _(seed: torch.Tensor, *rest: Any) -> torch.Tensor:
    shape, dtype = rest[4:6]
    return torch.empty(tuple(shape), dtype=dtype, device=seed.device)


def _same_mask(operator: OpOverload) -> Callable[..., tuple[torch.Tensor | None, ...]]:
    """Return the backward of a dropout: the cotangent under the same mask, which is drawn again."""

    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        seed, *first = ctx.saved_tensors
        numbers, stride = ctx.numbers
        return operator(gradient, seed, *numbers, *(first or (None,)), stride), *[None] * 8

    return backward


def _keep_numbers(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, seed, *numbers, first, stride = inputs
    ctx.numbers = numbers, stride
    ctx.save_for_backward(*((seed,) if first is None else (seed, first)))


dropout.register_autograd(_same_mask(dropout._opoverload), setup_context=_keep_numbers)
stream_dropout.register_autograd(_same_mask(stream_dropout._opoverload), setup_context=_keep_numbers)


# Operator that draws by the global index -> the one that draws from the shard's own stream.
STREAMS = {dropout._opoverload: stream_dropout._opoverload, uniform._opoverload: stream_uniform._opoverload}


@torch.library.custom_op("shardwise::mark", mutates_args=(), schema="(Tensor x, str tag) -> Tensor")
def mark(x: torch.Tensor, tag: str) -> torch.Tensor:
    """Return ``x`` unchanged.

    The operator exists only while a model is captured; ``tag`` is the layout text of ``sw.constrain``.
    """
    return x.clone()


@mark.register_fake
def _(x: torch.Tensor, tag: str) -> torch.Tensor:
    return torch.empty_like(x)


mark.register_autograd(lambda ctx, gradient: (gradient, None))
