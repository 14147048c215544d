"""Ring attention: queries, keys and values are split alike along the sequence, and keys and values are passed around.

With N devices the sequence is N blocks. In step i the queries of block j meet the keys of block j - i; between steps
every device hands its keys and values on (Liu, Zaharia and Abbeel, Ring attention, 2023). A step is a call of the
device's flash kernel, whose result is merged with those of the steps before (``graph/flash.py``). No device ever has
all keys at a time in forward; those of every step are kept for backward, which passes the gradients around in the other
direction, and no scores.

The steps compute without gradients (``ring_step``). Their result then passes through one ``ring_gradients`` for every
step, which leaves it as it is, and in backward calls the kernel with the log-sum-exp over all keys.

In the language of rules a ring is nothing special: the blocks are a dim of N, and handing on is ``roll`` along it,
which exchanges windows of one block (``rules/windows.py``).

Of a mask it may be known that queries see keys at some distances alone (``rules/attention_bands.py``). Steps in which
no block sees anything are left out, with their messages; where only the blocks behind see those before them, nothing is
handed from the last block to the first.

Under a causal mask the device of the last block has all the work. ``zigzag`` balances it (Zhu, zigzag ring attention,
2024): the sequence is 2N chunks, and device i works on chunks i and 2N - 1 - i. In every step but the first all devices
have two pairs of chunks in which something is seen, and both are seen in full.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F

from shardwise.graph.precision import cast
from shardwise.rules.attention_bands import CAUSAL, EVERYTHING, Band
from shardwise.rules.attention_kernels import RING_GRADIENTS, RING_STEP, scale_of
from shardwise.rules.lowerings.attention import attention_within, scaled_dot_product_attention


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
        runs: Sequence[int] = (),
        **options: Any,
    ) -> Tensor:
        """Scaled dot-product attention. ``runs``: how many queries and keys a device holds; all, where they do not
        divide, and there is no ring then; ``options``: ``scale`` and ``enable_gqa``."""
        run = _run(query, runs)
        if not run:
            return scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **options)
        band = self.band.within(CAUSAL) if is_causal else self.band
        return _in_turns((query, key, value), (attn_mask, None, None), is_causal, band, options.get("scale"), run)


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
        bounds = [None if x is None else x.unflatten(0, (-1, run)) for x in (first, end)]
        return _in_turns((query, key, value), (seen, *bounds), False, self.band, scale, run)


def zigzag(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = True,
    *,
    runs: Sequence[int] = (),
    **options: Any,
) -> Tensor:
    """Causal attention over equally many queries and keys, balanced. A ring where a device's queries are an odd
    number."""
    assert is_causal, "the rule offers it for causal attention alone"
    assert attn_mask is None, "causal attention has no other mask"
    run = _run(query, runs)
    if not run or run % 2:
        return RING(query, key, value, None, dropout_p, True, runs=runs, **options)
    number, chunk = query.shape[-2] // run, run // 2
    order = [chunk for i in range(number) for chunk in (i, 2 * number - 1 - i)]  # of the chunks, device by device
    q, k, v = (_chunks(x, order, chunk) for x in (query, key, value))
    # A device is handed the keys of every other one: each of them has chunks that another one sees.
    result = _in_turns((q, k, v), (None, None, None), True, EVERYTHING, options.get("scale"), run, chunks=2)
    return _chunks(result, sorted(range(2 * number), key=order.__getitem__), chunk)


def _run(query: Tensor, runs: Sequence[int]) -> int:
    """Return how many queries a device holds; 0 if it holds all, or they do not divide."""
    length = query.shape[-2]
    run = runs[query.dim() - 2] if runs else length
    return run if run < length else 0


def _in_turns(
    qkv: tuple[Tensor, Tensor, Tensor],
    seen: Sequence[Tensor | None],
    causal: bool,
    band: Band,
    scale: float | None,
    run: int,
    *,
    chunks: int = 1,
) -> Tensor:
    """The ring itself. ``seen``: the mask, and the first and the last key of each query, by device; ``run``: the
    queries of a device."""
    query, length = qkv[0], qkv[0].shape[-2]
    number = length // run
    mask, first, end = seen
    mask = None if mask is None else _in_blocks(mask, number, run, length)
    q, k, v = (x.unflatten(-2, (number, run)) for x in qkv)
    limits = [int(max(band.least, -length)), int(min(band.most, length))]
    met: list[tuple[Any, ...]] = []
    out = log_sum = None
    for step, k_now, v_now in _handed_on(k, v, number, run, band):
        settings = causal, scale_of(scale, query), limits, step, number, chunks, list(range(number))
        met.append((q, k_now, v_now, mask, first, end, *settings))
        out, log_sum = RING_STEP(out, log_sum, *met[-1])
    assert out is not None
    result = cast(out, query.dtype)
    for call in met:
        result = RING_GRADIENTS(result, log_sum, *call)
    return result.flatten(-3, -2)


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


def _in_blocks(mask: Tensor, number: int, run: int, length: int) -> Tensor:
    """``... t s -> ... (blocks of t) t (blocks of s) s``; 1 where the mask is broadcast."""
    columns = mask.unflatten(-1, (number, run) if mask.shape[-1] == length else (1, 1))
    blocks: Tensor = columns.unflatten(-3, (number, run) if mask.shape[-2] == length else (1, 1))
    return blocks


RING: Final = Ring()
