"""Ring attention: queries, keys and values are split alike along the sequence, and keys and values are passed around.

With N devices the sequence is N blocks. In step i the queries of block j meet the keys of block j - i; between steps
every device hands its keys and values on. Softmax is computed *online*: a running maximum, sum and result per row are
scaled as larger scores come (Milakov and Gimelshein 2018; Liu, Zaharia and Abbeel, Ring attention, 2023). No device
ever has all keys at a time in forward; autograd keeps those of every step for backward, which passes the gradients
around in the other direction.

In the language of rules a ring is nothing special: the blocks are a dim of N, and handing on is ``roll`` along it,
which exchanges windows of one block (``rules/windows.py``).

Of a mask it may be known that queries see keys at some distances alone (``rules/attention_bands.py``). Steps in which
no block sees anything are left out, with their messages; where only the blocks behind see those before them, nothing is
handed from the last block to the first.

Under a causal mask the device of the last block has all the work. ``ZIGZAG`` balances it (Zhu, zigzag ring attention,
2024): the sequence is 2N chunks, and device i works on chunks i and 2N - 1 - i. Every pair of devices then has two
pairs of chunks in which something is seen, and both are seen in full.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from math import inf
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from shardwise.rules.attention_bands import CAUSAL, EVERYTHING, Band
from shardwise.rules.lowerings.attention import (
    as_queries,
    attention_within,
    masked,
    scaled_dot_product_attention,
    scaled_operands,
)

# Positions of queries and of keys, both broadcast over blocks, queries and keys -> which pairs are hidden.
Hidden = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Ring:
    """The lowering of attention over equally many queries and keys. ``band``: the distances at which the mask may show
    a key."""

    band: Band = EVERYTHING

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
        runs: Sequence[int] = (),
    ) -> Tensor:
        """Scaled dot-product attention. ``runs``: how many queries and keys a device holds; all, where they do not
        divide, and there is no ring then."""
        run = _run(query, runs)
        if not run:
            return scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        band = self.band.within(CAUSAL) if is_causal else self.band
        return _in_turns(query, key, value, attn_mask, _is_later if is_causal else None, band, (scale, enable_gqa, run))


@dataclass(frozen=True)
class RingWithin:
    """The lowering of ``shardwise::attention_within`` over equally many queries and keys; ``band`` as of ``Ring``."""

    band: Band = EVERYTHING

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        first: Tensor | None,
        end: Tensor | None,
        seen: Tensor | None,
        enable_gqa: bool,
        scale: float | None,
        *blocks: Sequence[int],
        runs: Sequence[int] = (),
    ) -> Tensor:
        """Attention of queries that see the keys from ``first`` up to ``end``; ``runs`` as of ``Ring``."""
        run = _run(query, runs)
        if not run:
            return attention_within(query, key, value, first, end, seen, enable_gqa, scale)
        bounds = [None if x is None else x.unflatten(0, (-1, run)).unsqueeze(-1) for x in (first, end)]

        def is_outside(rows: Tensor, columns: Tensor) -> Tensor:
            before, behind = bounds
            sides = ([] if before is None else [columns < before]) + ([] if behind is None else [columns >= behind])
            outside: Tensor = reduce(torch.logical_or, sides)
            return outside

        hidden = is_outside if any(bound is not None for bound in bounds) else None
        return _in_turns(query, key, value, seen, hidden, self.band, (scale, enable_gqa, run))


def _run(query: Tensor, runs: Sequence[int]) -> int:
    """Return how many queries a device holds; 0 if it holds all, or they do not divide."""
    length = query.shape[-2]
    run = runs[query.dim() - 2] if runs else length
    return run if run < length else 0


def _is_later(rows: Tensor, columns: Tensor) -> Tensor:
    return columns > rows


def _in_turns(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    hidden: Hidden | None,
    band: Band,
    settings: tuple[float | None, bool, int],
) -> Tensor:
    """The ring itself. ``settings``: scale, whether heads are grouped, and the queries of a device."""
    scale, enable_gqa, run = settings
    length = query.shape[-2]
    number = length // run
    q, k, v, mask = scaled_operands(query, key, value, attn_mask, scale, enable_gqa)
    q, k, v = (x.unflatten(-2, (number, run)) for x in (q, k, v))
    blocks = torch.arange(number, device=query.device)
    within = torch.arange(run, device=query.device)
    if mask is not None:
        mask = _in_blocks(mask, number, run, length)
    seen = _nothing(q)
    for step, k_now, v_now in _handed_on(k, v, number, run, band):
        origin = torch.remainder(blocks - step, number)  # of the keys that a block of queries meets now
        unseen = None
        if hidden is not None:
            rows = (blocks.unsqueeze(-1) * run + within).unsqueeze(-1)
            columns = (origin.unsqueeze(-1) * run + within).unsqueeze(-2)
            unseen = hidden(rows, columns)
        seen = _met(seen, q, k_now, v_now, unseen, None if mask is None else _columns_of(mask, origin, number))
    return as_queries(_attended(seen).flatten(-3, -2), query)


def zigzag(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = True,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    runs: Sequence[int] = (),
) -> Tensor:
    """Causal attention over equally many queries and keys, balanced. A ring where a device's queries are an odd
    number."""
    assert is_causal, "the rule offers it for causal attention alone"
    assert attn_mask is None, "causal attention has no other mask"
    run = _run(query, runs)
    if not run or run % 2:
        return Ring()(query, key, value, None, dropout_p, True, scale=scale, enable_gqa=enable_gqa, runs=runs)
    number, chunk = query.shape[-2] // run, run // 2
    q, k, v, _ = scaled_operands(query, key, value, None, scale, enable_gqa)
    order = [chunk for i in range(number) for chunk in (i, 2 * number - 1 - i)]  # of the chunks, device by device
    q, k, v = (_chunks(x, order, chunk).unflatten(-2, (number, 2, chunk)) for x in (q, k, v))
    first_q, last_q = q.unbind(-3)
    blocks = torch.arange(number, device=query.device).unsqueeze(-1).unsqueeze(-1)
    within = torch.arange(chunk, device=query.device)
    later = within > within.unsqueeze(-1)
    first, last = _nothing(q), _nothing(q)
    for step in range(number):
        if step:
            k, v = torch.roll(k, 1, -4), torch.roll(v, 1, -4)
        (first_k, last_k), (first_v, last_v) = k.unbind(-3), v.unbind(-3)
        if not step:
            first = _met(first, first_q, first_k, first_v, later)
            last = _met(_met(last, last_q, first_k, first_v), last_q, last_k, last_v, later)
            continue
        # The last chunk sees the first one of all others. Of a device before this one the first chunk sees the first
        # one, too; of a device behind it the last chunk sees the last one.
        last = _met(last, last_q, first_k, first_v)
        is_before = blocks >= step

        def chosen(first: Tensor, second: Tensor, before: Tensor = is_before) -> Tensor:
            return torch.where(before, first, second)

        met = _met(
            _SoftmaxState(*map(chosen, first, last)),
            chosen(first_q, last_q),
            chosen(first_k, last_k),
            chosen(first_v, last_v),
        )
        first, last = _SoftmaxState(*map(chosen, met, first)), _SoftmaxState(*map(chosen, last, met))
    result = torch.stack((_attended(first), _attended(last)), -3).flatten(-4, -2)
    return as_queries(_chunks(result, sorted(range(2 * number), key=order.__getitem__), chunk), query)


# ------------------------------------------------------------------------------------------------------ online softmax


class _SoftmaxState(NamedTuple):
    """Of the keys that rows have met: the largest score, the sum of the weights and of the weighted values."""

    top: Tensor
    total: Tensor
    result: Tensor


def _nothing(q: Tensor) -> _SoftmaxState:
    zero = torch.zeros((), dtype=q.dtype, device=q.device)
    return _SoftmaxState(torch.full((), -inf, dtype=q.dtype, device=q.device), zero, zero)


def _met(
    seen: _SoftmaxState, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None = None, mask: Tensor | None = None
) -> _SoftmaxState:
    """Update the softmax state with other keys, except those that are ``hidden`` or that the mask hides."""
    scores = torch.matmul(q, k.transpose(-2, -1))
    if hidden is not None:
        scores = scores.masked_fill(hidden, -inf)
    scores = masked(scores, mask)
    higher = torch.maximum(seen.top, scores.detach().amax(-1, keepdim=True))
    settled = torch.where(higher == -inf, 0, higher)  # nothing seen yet: any number will do
    weights, kept = torch.exp(scores - settled), torch.exp(seen.top - settled)
    total = seen.total * kept + weights.sum(-1, keepdim=True)
    return _SoftmaxState(higher, total, seen.result * kept + torch.matmul(weights, v))


def _attended(seen: _SoftmaxState) -> Tensor:
    return seen.result / torch.where(seen.total == 0, 1, seen.total)  # a row that sees nothing is 0, as in PyTorch


# -------------------------------------------------------------------------------------------------------- handing on


def _handed_on(k: Tensor, v: Tensor, number: int, run: int, band: Band) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Step by step the keys and values that a block meets, of those that come ``step`` blocks before it. Blocks that
    come before it by turning round are handed on in the steps in which one of them is seen."""

    def is_seen(offset: int) -> bool:
        """Return whether a block may see one that lies so many blocks behind it (negative: before it)."""
        return band.meets(offset * run - run + 1, offset * run + run - 1)

    before = [step for step in range(1, number) if is_seen(-step)]
    behind = [step for step in range(1, number) if is_seen(number - step)]
    yield 0, k, v
    for steps, last, moved in (
        ([step for step in before if step in behind], 0, _turned),
        ([step for step in before if step not in behind], 0, _shifted),
        ([step for step in reversed(behind) if step not in before], number, _shifted),
    ):
        held_k, held_v = k, v
        for step in steps:
            held_k, held_v = (moved(x, step - last) for x in (held_k, held_v))
            yield step, held_k, held_v
            last = step


def _turned(x: Tensor, number: int) -> Tensor:
    return torch.roll(x, number, -3)


def _shifted(x: Tensor, number: int) -> Tensor:
    """Every block is the one ``number`` blocks before it; zeros where there is none."""
    return F.pad(x, (0, 0, 0, 0, number, -number))


def _chunks(x: Tensor, order: Sequence[int], chunk: int) -> Tensor:
    count = len(order)
    moved: Tensor = torch.ops.shardwise.copied_runs(
        x, [x.dim() - 2], [count], [chunk] * count, [i * chunk for i in order], [1] * count
    )
    return moved


# -------------------------------------------------------------------------------------------------------------- masks


def _in_blocks(mask: Tensor, number: int, run: int, length: int) -> Tensor:
    """``... t s -> ... (blocks of t) t (blocks of s) s``; 1 where the mask is broadcast."""
    columns = mask.unflatten(-1, (number, run) if mask.shape[-1] == length else (1, 1))
    blocks: Tensor = columns.unflatten(-3, (number, run) if mask.shape[-2] == length else (1, 1))
    return blocks


def _columns_of(mask: Tensor, origin: Tensor, number: int) -> Tensor:
    """Return the columns of the blocks of keys ``origin``, one for each block of rows."""
    if mask.shape[-2] == 1:
        return mask.squeeze(-2)
    chosen = torch.arange(number, device=mask.device) == origin.unsqueeze(-1)  # blocks of rows, blocks of columns
    chosen = chosen.unsqueeze(-2).unsqueeze(-1)
    if mask.dtype == torch.bool:
        allowed: Tensor = (mask & chosen).any(-2)
        return allowed
    return torch.where(chosen, mask, 0).sum(-2)


RING: Final = Ring()
