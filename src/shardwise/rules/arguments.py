"""Reading and rewriting the arguments of an operator by the names in its schema, and shards of factors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from torch._ops import OpOverload

from shardwise.graph.ir import Arg, Op, refs
from shardwise.graph.schema import AnyCall
from shardwise.rules.rule import LocalContext, Localize, LocalOpCall, Piece


def operand_positions(op: AnyCall) -> dict[str, tuple[int, ...]]:
    """Argument name -> the positions in ``op.operands`` of the tensors it holds (absent when it holds none)."""
    schema = op.target._schema.arguments
    named = [(a.name, value) for a, value in zip(schema, op.args, strict=False)] + list(op.kwargs)
    positions: dict[str, tuple[int, ...]] = {}
    count = 0
    for name, value in named:
        number = len(tuple(refs(value)))
        if number:
            positions[name] = tuple(range(count, count + number))
        count += number
    return positions


def replace_arguments(op: Op, target: OpOverload | None = None, **changes: Arg) -> LocalOpCall:
    """Return the call of ``op`` with some arguments replaced by schema name, on ``target`` if given (same names)."""
    schema = op.target._schema.arguments
    args = tuple(changes.pop(a.name, value) for a, value in zip(schema, op.args, strict=False))
    kwargs = {name: changes.pop(name, value) for name, value in op.kwargs} | changes
    return LocalOpCall(target or op.target, args, tuple(kwargs.items()))


def same_call(op: Op) -> LocalOpCall:
    """Return the call of ``op`` as it stands."""
    return LocalOpCall(op.target, op.args, op.kwargs)


def normal_dim(dim: int, rank: int) -> int:
    """Return a dim counted from the front; scalars count as rank 1, as in PyTorch."""
    return dim % max(rank, 1)


def dims_of(dim: int | Sequence[int] | None, rank: int) -> tuple[int, ...]:
    """Return the dims that a reduction names, counted from the front; None or nothing: all of them."""
    if dim is None or dim == () or dim == []:
        return tuple(range(rank))
    chosen = (dim,) if isinstance(dim, int) else tuple(dim)
    return tuple(sorted(normal_dim(d, rank) for d in chosen)) if rank else ()


def broadcast_shape(*shapes: Sequence[int]) -> tuple[int, ...]:
    """Return the common shape of shapes that broadcast."""
    rank = max(map(len, shapes), default=0)
    padded = [(1,) * (rank - len(shape)) + tuple(shape) for shape in shapes]
    return tuple(next((size for size in sizes if size != 1), 1) for sizes in zip(*padded, strict=True))


def local_size(context: LocalContext, factor: str) -> int:
    """Return the number of indices of the factor on this rank."""
    return prod(piece.length for piece in context.pieces[factor])


def any_split(context: LocalContext, factors: Sequence[str]) -> bool:
    return any(context.is_split(factor) for factor in factors)


def if_split(localize: Localize, *factors: str) -> Localize:
    """Return ``localize`` for ranks with a part of one of the factors; the others make the call as it is."""
    return lambda op, context: localize(op, context) if any_split(context, factors) else same_call(op)


def block_offset(pieces: Sequence[Piece]) -> int | None:
    """Return the offset of the shard in the flattened factor when it is one contiguous block, else None.

    A shard of the atoms (3, 8), major first, is contiguous when the major part is one index, or the minor one is whole.
    """
    offset, stride = 0, prod(piece.size for piece in pieces)
    partial = False
    for piece in pieces:
        stride //= max(piece.size, 1)
        if partial and piece.length != piece.size:
            return None
        partial = partial or piece.length != 1
        offset += piece.offset * stride
    return offset


def with_pieces(op: Op, pieces: Sequence[Piece], **changes: Arg) -> LocalOpCall:
    """Return the call of ``op`` with the given pieces as its ``sizes``, ``offsets`` and ``lengths``."""
    sizes, offsets, lengths = flat_pieces(pieces)
    return replace_arguments(op, sizes=sizes, offsets=offsets, lengths=lengths, **changes)


def at_pieces(factor: str) -> Localize:
    """Return ``localize`` of an operator that takes the rank's pieces of a factor."""
    return lambda op, context: with_pieces(op, context.pieces[factor])


def of_pieces(
    kernel: OpOverload, factors: Sequence[str], before: Callable[[Op], tuple[Arg, ...]], *after: Arg
) -> Localize:
    """Return ``localize`` to a kernel that takes the rank's pieces of factors between other arguments; for ranks with a
    part of one of them."""

    def localize(op: Op, context: LocalContext) -> LocalOpCall:
        pieces = (numbers for name in factors for numbers in flat_pieces(context.pieces[name]))
        return LocalOpCall(kernel, (*before(op), *pieces, *after))

    return if_split(localize, *factors)


def flat_pieces(pieces: Sequence[Piece]) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """``(sizes, offsets, lengths)``, the form in which kernels take pieces."""
    return (
        tuple(piece.size for piece in pieces),
        tuple(piece.offset for piece in pieces),
        tuple(piece.length for piece in pieces),
    )
