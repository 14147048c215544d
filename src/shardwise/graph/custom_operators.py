"""Custom operators of graphs: sharded dropout and random numbers, and the mark of ``constrain``.

Random numbers under sharding must not depend on which device computes an element: one seed would give every shard the
same numbers, different seeds would give replicas different ones. So they are *hashes of the global index*, in wrapping
integer arithmetic, the same on every device.

``uniform`` applies the finalizer of splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", 2014) to seed, call and index. ``dropout`` compares one hash per element and may be cheaper. Its global
tensor is a matrix of ``columns`` columns. Row r has the keys a_r (odd) and d_r, column c the key b_c, and

    keep[r, c] = f(d_r + a_r b_c) >= p 2^32 - 2^31    in int32,    f(x) = x (2 x + 1)

f is a permutation that carries all bits to the highest ones (as in RC6: Rivest, Robshaw, Sidney and Yin, 1998). The
keys are small vectors. Of the size of the mask are two int32 kernels, the comparison and the product with ``x``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from math import prod
from typing import Any

import torch

from shardwise.graph.operator_library import kernel


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
    sizes: Sequence[int], offsets: Sequence[int], lengths: Sequence[int], *, device: torch.device
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
        return _hashed_indices(key, global_indices(sizes, offsets, lengths, device=seed.device))
    bits = torch.empty(tuple(lengths), dtype=torch.int64)
    for begin, stop in _pieces(lengths):
        first = tuple(a + b for a, b in zip(offsets, begin, strict=True))
        part = global_indices(sizes, first, tuple(b - a for a, b in zip(begin, stop, strict=True)), device=seed.device)
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
_BLOCK = f"int columns, int[] sizes, int[] offsets, int[]? lengths=None, {_IN_TIME}"
_ODD_64 = _signed(0xC2B2AE3D27D4EB4F)
_ODD_32 = 0x1E3779B1
_CALL_BITS = 40  # row r of call c is number c 2^40 + r
_FEWEST_COLUMNS = 128


def mask_columns(shape: Sequence[int]) -> int:
    """Return how many columns the matrix has as which dropout sees a tensor: enough for few keys of rows, and not
    dependent on dim 0, which counts samples."""
    columns = 1
    for size in reversed(shape[1:]):
        if columns >= _FEWEST_COLUMNS:
            break
        columns *= size
    return columns


def _first_column_dim(columns: int, sizes: Sequence[int]) -> int:
    return next(i for i in range(len(sizes), -1, -1) if prod(sizes[i:]) == columns)


def _permute_(bits: torch.Tensor) -> torch.Tensor:
    """Apply f(x) = x (2 x + 1) in place."""
    return bits.addcmul_(bits, bits, value=2)


def _start(seed: torch.Tensor, first: torch.Tensor | None = None, stride: int = 0) -> torch.Tensor | int:
    """Return the number of elements ahead of a micro-batch."""
    return 0 if first is None else first.to(seed.device) * stride


def mask_keys(
    seed: torch.Tensor,
    call: int,
    columns: int,
    sizes: Sequence[int],
    offsets: Sequence[int],
    lengths: Sequence[int],
    first: torch.Tensor | None = None,
    stride: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys of rows [rows, 2] and of columns [columns] of a block, in int32."""
    split = _first_column_dim(columns, sizes)
    row, column = (
        global_indices(sizes[part], offsets[part], lengths[part], device=seed.device).flatten()
        for part in (slice(split), slice(split, None))
    )
    if first is not None:
        start = _start(seed, first, stride)
        row, column = row + start // columns, column + start % columns
    rows = _permute_(torch.add(seed * _ODD_64, row + (call << _CALL_BITS), alpha=_GOLDEN))
    rows ^= rows >> 32
    rows |= 1
    keys = _permute_(rows).view(torch.int32).view(-1, 2)
    return keys, _permute_(_permute_(column.to(torch.int32) * _ODD_32))


def _fake_keys(seed: torch.Tensor, call: int, columns: int, sizes: Sequence[int], *rest: Any) -> Any:
    lengths, split = rest[1], _first_column_dim(columns, sizes)
    shapes = (prod(lengths[:split]), 2), (prod(lengths[split:]),)
    return tuple(torch.empty(shape, dtype=torch.int32, device=seed.device) for shape in shapes)


@kernel(_fake_keys, _BLOCK)
def _mask_keys(seed: torch.Tensor, call: int, *block: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return mask_keys(seed, call, *block)


def _mask_of(
    keys: tuple[torch.Tensor, torch.Tensor],
    p: float,
    permute: Callable[[torch.Tensor], torch.Tensor] = _permute_,
) -> torch.Tensor:
    """Return which elements are kept: bool, [rows, columns]."""
    rows, columns = keys
    bits = torch.addcmul(rows[:, 1:], rows[:, :1], columns)
    return permute(bits) >= min(int(p * 2**32) - 2**31, 2**31 - 1)


def dropout_mask(
    seed: torch.Tensor,
    p: float,
    call: int,
    columns: int,
    sizes: Sequence[int],
    offsets: Sequence[int],
    lengths: Sequence[int],
) -> torch.Tensor:
    """Return which elements of the block are kept: bool, shape ``lengths``."""
    return _mask_of(mask_keys(seed, call, columns, sizes, offsets, lengths), p).reshape(tuple(lengths))


def _scaled(x: torch.Tensor, keep: torch.Tensor, p: float) -> torch.Tensor:
    """Return ``x`` where it is kept, scaled by 1 / (1 - p)."""
    zero = torch.zeros((), dtype=x.dtype, device=x.device)
    return torch.addcmul(zero, x.reshape(keep.shape), keep, value=1.0 / (1.0 - p) if p < 1.0 else 0.0).reshape(x.shape)


@kernel(lambda x, *rest: torch.empty(x.shape, dtype=x.dtype, device=x.device), _BLOCK)
def dropout(x: torch.Tensor, seed: torch.Tensor, p: float, call: int, *block: Any) -> torch.Tensor:
    """Apply dropout whose mask depends only on the global index of an element.

    ``seed``: int64 of shape (). ``call``: which dropout of the model. ``block``: the arguments of ``_mask_block``.
    """
    return _scaled(x, _mask_of(mask_keys(seed.to(x.device), call, *_mask_block(x, *block)), p), p)


def _mask_block(
    x: torch.Tensor,
    columns: int,
    sizes: Sequence[int],
    offsets: Sequence[int],
    lengths: Sequence[int] | None = None,
    first: torch.Tensor | None = None,
    stride: int = 0,
) -> tuple[Any, ...]:
    """Return where the elements of ``x`` lie, as ``mask_keys`` takes it.

    ``columns``: ``mask_columns`` of the shape on one device. ``sizes``: the global shape, ``offsets``: the global index
    of the first element of ``x`` in every dim. ``lengths``: the shape of ``x`` when ``sizes`` factors its dims, such as
    sizes (3, 8, 8), offsets (0, 4, 0) and lengths (3, 4, 8) for a ``x`` of 96 elements; by default ``x.shape``.
    ``first``: number of a micro-batch's first sample (int64 of shape ()); the elements then begin ``first * stride``
    behind ``offsets``.
    """
    return columns, sizes, offsets, x.shape if lengths is None else lengths, first, stride


def decomposed_dropout(x: torch.Tensor, seed: torch.Tensor, p: float, call: int, *block: Any) -> torch.Tensor:
    """Apply ``dropout`` in operators that a compiler fuses to one kernel. The keys stay an operator, so that they are
    not hashed again for each element. Nothing is written in place: compilers do not take that from here."""
    keys = torch.ops.shardwise.mask_keys(seed, call, *_mask_block(x, *block))
    return _scaled(x, _mask_of(keys, p, lambda bits: torch.addcmul(bits, bits, bits, value=2)), p)


# How many bits of the hash become a number of [0, 1) that its type holds exactly.
_BITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


@kernel(lambda seed, *rest: torch.empty(tuple(rest[4]), dtype=rest[5], device=seed.device), _IN_TIME)
def uniform(
    seed: torch.Tensor,
    call: int,
    sizes: Sequence[int],
    offsets: Sequence[int],
    lengths: Sequence[int],
    shape: Sequence[int],
    dtype: torch.dtype,
    *in_time: Any,
) -> torch.Tensor:
    """Return uniform numbers of [0, 1) that depend only on the seed, the random call and the global index of an
    element.

    The result is the block of ``lengths`` at ``offsets`` of the tensor of ``sizes``, in ``shape`` (``sizes`` may factor
    its dims; ``in_time``: ``first`` and ``stride``, as for ``dropout``).
    """
    bits = _shift_right_(hash_bits(seed, call, sizes, offsets, lengths, _start(seed, *in_time)), 64 - _BITS[dtype])
    return (bits.to(torch.float64) * 2.0 ** -_BITS[dtype]).to(dtype).reshape(tuple(shape))


def _same_mask(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Return the cotangent under the same mask, which is drawn again."""
    seed, *first = ctx.saved_tensors
    numbers, stride = ctx.numbers
    return dropout(gradient, seed, *numbers, *(first or (None,)), stride), *[None] * 9


def _keep_numbers(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, seed, *numbers, first, stride = inputs
    ctx.numbers = numbers, stride
    ctx.save_for_backward(*((seed,) if first is None else (seed, first)))


dropout.register_autograd(_same_mask, setup_context=_keep_numbers)
RANDOM = frozenset((dropout._opoverload, uniform._opoverload))  # operators that read the seed


@kernel(lambda x, tag: torch.empty_like(x))
def mark(x: torch.Tensor, tag: str) -> torch.Tensor:
    """Return ``x`` unchanged.

    The operator exists only while a model is captured; ``tag`` is the layout text of ``sw.constrain``.
    """
    return x.clone()


mark.register_autograd(lambda ctx, gradient: (gradient, None))
