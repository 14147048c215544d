"""Attention that knows its mask: which calls go without one, which get one made anew, which keep their own; and that
every one of them computes what the model computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graph.against_eager import check_against_eager, operators, run_graph
from shardwise.graph.attention_within import ATTENTION_WITHIN, MOST_BLOCKS
from shardwise.graph.capture import Capture, capture
from shardwise.graph.ir import Op, Ref
from shardwise.graph.schema import arguments
from shardwise.rules.attention_bands import EVERYTHING, Band, band_between, band_of
from shardwise.rules.tables import rule_of

INF = float("inf")
LEAST = torch.finfo(torch.float64).min
Mask = Callable[[Tensor, Tensor, Tensor], Tensor]  # positions of queries [Q, 1], of keys [1, K], lengths of the samples


class Attend(nn.Module):
    """Attention under a mask that is made in the call."""

    def __init__(
        self, mask: Mask | None, repeat: Callable[[Tensor], Tensor] | None = None, width: int = 4, **options: Any
    ) -> None:
        super().__init__()
        self.mask, self.repeat, self.options = mask, repeat, options
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor) -> Tensor:
        rows, columns = torch.arange(query.shape[-2])[:, None], torch.arange(key.shape[-2])[None, :]
        mask = None if self.mask is None else self.mask(rows, columns, lengths)
        key = key * self.weight
        if self.repeat is not None:
            key, value = self.repeat(key), self.repeat(value)
        return F.scaled_dot_product_attention(query * self.weight, key, value, attn_mask=mask, **self.options)


def operands(queries: int, keys: int, heads: int = 2, key_heads: int = 2, width: int = 4) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    shapes = (2, heads, queries, width), (2, key_heads, keys, width), (2, key_heads, keys, width)
    made = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    return *made, torch.tensor([keys, keys - 2])


def attention_of(captured: Capture) -> list[Op]:
    return [op for op in captured.graph.ops if "attention" in str(op.target)]


def kind_of(op: Op, captured: Capture) -> str:
    args = arguments(op)
    if op.target is ATTENTION_WITHIN:
        return "blocks"
    if args["is_causal"]:
        assert args["attn_mask"] is None
        return "causal"
    if args["attn_mask"] is None:
        return "none"
    names, seen = [args["attn_mask"].name], set()
    while names:
        name = names.pop()
        seen.add(name)
        names += captured.graph.producer[name].operands if name in captured.graph.producer else ()
    counted = any(
        op.target is torch.ops.aten.arange.start and seen.intersection(op.results) for op in captured.graph.ops
    )
    return "made" if counted or any(name.startswith("mask_") for name in seen) else "own"


def packed(q: Tensor, k: Tensor, _: Tensor) -> Tensor:
    """Documents of 3, 2 and 3 positions, one after the other, in both samples."""
    document = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2]).expand(2, 8)
    return ((document[:, :, None] == document[:, None, :]) & (k <= q))[:, None]


def padded_right(q: Tensor, k: Tensor, lengths: Tensor) -> Tensor:
    return (k <= q) & (k < lengths[:, None, None, None])


def padded_left(q: Tensor, k: Tensor, lengths: Tensor) -> Tensor:
    return (k <= q) & (k >= k.shape[-1] - lengths[:, None, None, None])


def additive(hidden: float, mask: Mask) -> Mask:
    return lambda q, k, n: torch.zeros(q.shape[0], k.shape[1], dtype=torch.float64).masked_fill(~mask(q, k, n), hidden)


def causal(q: Tensor, k: Tensor, _: Tensor) -> Tensor:
    return k <= q


def begun(begins: list[list[int]]) -> Mask:
    """Documents that begin where positions do not go on, as transformers finds them: summed up and looked up."""

    def mask(q: Tensor, k: Tensor, _: Tensor) -> Tensor:
        positions = torch.tensor(begins).expand(2, 8)
        jumps = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1
        document = jumps.cumsum(-1)
        sample = torch.arange(2)[:, None, None, None]
        of_query, of_key = (document[sample, at.expand(2, 1, *at.shape[-2:])] for at in (q, k))
        return (of_query == of_key) & (k <= q)

    return mask


def summed_over_samples(q: Tensor, k: Tensor, _: Tensor) -> Tensor:
    sample = torch.ones(2, 8, dtype=torch.int64).cumsum(0)  # 1, and 2 in the other sample
    return (k < 4 * sample[:, None, None, :]) & (k <= q)


MASKS: dict[str, tuple[str, Mask]] = {
    "one document": ("causal", begun([[0, 1, 2, 3, 4, 5, 6, 7]])),
    "documents that begin": ("made", begun([[0, 1, 2, 0, 1, 0, 1, 2]])),
    "documents of every sample": ("own", begun([[0, 1, 2, 0, 1, 0, 1, 2], [0, 1, 2, 3, 4, 0, 1, 2]])),
    "summed over samples": ("own", summed_over_samples),
    "causal": ("causal", causal),
    "causal, from the top": ("causal", lambda q, k, n: torch.ones(8, 8, dtype=torch.bool).tril()),
    "causal, with heads": ("causal", lambda q, k, n: (q >= k).expand(2, 1, 8, 8)),
    "causal, by distance": ("causal", lambda q, k, n: q - k >= 0),
    "causal, additive": ("causal", lambda q, k, n: torch.full((8, 8), -INF, dtype=torch.float64).triu(1)),
    "causal, the least number": ("causal", additive(LEAST, causal)),
    "causal, inverted": ("causal", lambda q, k, n: (1.0 - (k <= q).double()) * LEAST),
    "causal, as numbers": ("causal", lambda q, k, n: torch.tensor([[j <= i for j in range(8)] for i in range(8)])),
    "full": ("none", lambda q, k, n: torch.ones_like(n)[:, None, None, None].bool().expand(2, 1, 8, 8)),
    "full, additive": ("none", lambda q, k, n: torch.zeros(8, 8, dtype=torch.float64)),
    "wider than the sequence": ("causal", lambda q, k, n: (k <= q) & (k > q - 9)),
    "window": ("made", lambda q, k, n: ((k <= q) & (k > q - 3)).expand(2, 1, 8, 8)),
    "window, additive": ("made", additive(-INF, lambda q, k, n: (k <= q) & (k > q - 3))),
    "window, both ways": ("made", lambda q, k, n: (q - k).abs() < 2),
    "chunks": ("made", lambda q, k, n: (k <= q) & (k // 3 == q // 3)),
    "prefix": ("made", lambda q, k, n: (k <= q) | (k < 3)),
    "packed": ("made", packed),
    "later": ("made", lambda q, k, n: k >= q),
    "rows without keys": ("made", lambda q, k, n: (k < q - 2) & (k >= 1)),
    "the same for all rows": ("made", lambda q, k, n: (k < 5).expand(8, 8)),
    "padded on the right": ("own", padded_right),
    "padded on the left": ("own", padded_left),
    "two pieces": ("own", lambda q, k, n: (k <= q) & (k != 2)),
    "rows without keys, additive": ("own", additive(LEAST, lambda q, k, n: k < q)),
    "some large number": ("own", additive(-1e9, causal)),
    "distances": ("own", lambda q, k, n: -0.5 * (q - k).abs().double()),
}


@pytest.mark.parametrize("name", MASKS)
def test_attention_under_a_mask_that_is_known_goes_without_it(name: str):
    expected, mask = MASKS[name]
    captured = check_against_eager(Attend(mask), *operands(8, 8), tolerance=1e-15)
    (op,) = attention_of(captured)
    assert kind_of(op, captured) == expected
    if expected in ("causal", "none"):  # nothing is left of the mask
        assert not {"arange.default", "le.Tensor", "masked_fill.Scalar", "full.default"}.intersection(
            operators(captured)
        )


@pytest.mark.parametrize(("queries", "keys"), [(3, 8), (8, 3), (1, 8), (8, 1)])
def test_is_causal_counts_from_the_first_key_so_other_lengths_keep_a_mask(queries: int, keys: int):
    at_the_start = check_against_eager(Attend(causal), *operands(queries, keys), tolerance=1e-15)
    shown = kind_of(*attention_of(at_the_start), at_the_start)
    assert shown == ("none" if keys == 1 else "made")
    last = Attend(lambda q, k, n: k <= q + (keys - queries))
    at_the_end = check_against_eager(last, *operands(queries, keys), tolerance=1e-15)
    assert kind_of(*attention_of(at_the_end), at_the_end) == ("none" if queries == 1 else "made")


def test_a_bias_that_is_learned_stays():
    class Biased(nn.Module):
        """T5's: a number for every distance."""

        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Embedding(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            distance = (torch.arange(6)[:, None] - torch.arange(6)).clamp(min=0)
            bias = self.bias(distance).permute(2, 0, 1)[None]
            return F.scaled_dot_product_attention(x, x, x, attn_mask=bias + torch.full((6, 6), -INF).triu(1))

    captured = check_against_eager(Biased(), torch.randn(2, 2, 6, 4, dtype=torch.float64), tolerance=1e-12)
    assert kind_of(*attention_of(captured), captured) == "own"


def test_a_mask_of_a_buffer_stays_since_buffers_are_loaded_later():
    class Buffered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))
            self.register_buffer("mask", torch.ones(6, 6, dtype=torch.bool).tril())

        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x * self.weight, x, x, attn_mask=self.mask)

    captured = check_against_eager(Buffered(), torch.randn(2, 2, 6, 4, dtype=torch.float64))
    assert kind_of(*attention_of(captured), captured) == "own"


@pytest.mark.parametrize("name", ["causal", "window", "rows without keys"])
def test_dropout_behind_a_mask_drops_the_same_weights(name: str):
    """The mask is known before dropout takes attention apart; both give what the mask itself would."""
    inputs = operands(8, 8)
    folded = Attend(MASKS[name][1], dropout_p=0.3).double()
    captured = capture(folded, inputs)
    assert not attention_of(captured)
    as_input = Attend(lambda q, k, mask: mask, dropout_p=0.3).double()
    rows, columns = torch.arange(8)[:, None], torch.arange(8)[None, :]
    given = (*inputs[:3], MASKS[name][1](rows, columns, inputs[3]).expand(2, 1, 8, 8))
    (found,), _ = run_graph(captured, folded, inputs, {})
    (expected,), _ = run_graph(capture(as_input, given), as_input, given, {})
    torch.testing.assert_close(found, expected, rtol=1e-15, atol=1e-15)


REPEATS: dict[str, tuple[bool, Callable[[Tensor], Tensor]]] = {
    "expanded": (True, lambda x: x[:, :, None].expand(2, 2, 3, 8, 4).reshape(2, 6, 8, 4)),
    "expanded, flattened": (True, lambda x: x[:, :, None].expand(2, 2, 3, 8, 4).flatten(1, 2)),
    "broadcast": (True, lambda x: x[:, :, None].broadcast_to(2, 2, 3, 8, 4).reshape(2, 6, 8, 4)),
    "repeat_interleave": (True, lambda x: x.repeat_interleave(3, dim=1)),
    "repeat_interleave, from the end": (True, lambda x: x.repeat_interleave(3, -3)),
    "repeat": (False, lambda x: x.repeat(1, 3, 1, 1)),
    "repeated rows": (False, lambda x: torch.cat([x, x, x], 1).repeat_interleave(1, dim=2)),
    "flattened elsewhere": (False, lambda x: x.mT[:, :, None].expand(2, 2, 3, 4, 8).flatten(1, 2).mT),
    "expanded outside": (False, lambda x: x[:, None].expand(2, 3, 2, 8, 4).reshape(2, 6, 8, 4)),
}


@pytest.mark.parametrize("name", REPEATS)
def test_keys_that_were_repeated_for_groups_of_heads_go_to_attention_as_they_were(name: str):
    grouped, repeat = REPEATS[name]
    inputs = operands(8, 8, heads=6)
    captured = check_against_eager(Attend(causal, repeat), *inputs, tolerance=1e-14)
    (op,) = attention_of(captured)
    assert arguments(op)["enable_gqa"] is grouped
    assert kind_of(op, captured) == "causal"
    assert captured.graph.by_name[op.operands[1]].shape == (2, 2 if grouped else 6, 8, 4)


UNEQUAL: dict[str, tuple[int, int, int, int, int]] = {  # heads: queries, keys, values; times that these are repeated
    "keys and values by other factors": (6, 3, 2, 2, 3),
    "one query head": (1, 2, 2, 3, 3),
    "keys alone": (6, 2, 6, 3, 1),
}


@pytest.mark.parametrize("name", UNEQUAL)
def test_heads_that_are_no_groups_stay_repeated(name: str):
    class Unequal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            key, value = (key * self.weight).repeat_interleave(of_keys, 1), value.repeat_interleave(of_values, 1)
            return F.scaled_dot_product_attention(query * self.weight, key, value)

    *heads, of_keys, of_values = UNEQUAL[name]
    given = (torch.randn(2, number, 8, 4, dtype=torch.float64) for number in heads)
    captured = check_against_eager(Unequal(), *given, tolerance=1e-14)
    (op,) = attention_of(captured)
    assert not arguments(op)["enable_gqa"]
    assert captured.graph.by_name[op.operands[1]].shape[1] == 6
    assert rule_of(op, captured.graph) is not None


def test_all_attention_of_a_model_shares_a_mask_that_is_made_anew():
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Attend(MASKS["window"][1]) for _ in range(3)])

        def forward(self, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor) -> Tensor:
            for layer in self.layers:
                query = layer(query, key, value, lengths)
            return query

    captured = check_against_eager(Layers(), *operands(8, 8), tolerance=1e-14)
    assert len({arguments(op)["attn_mask"] for op in attention_of(captured)}) == 1
    assert operators(captured).count("logical_and.default") == 1
    assert not [name for name in captured.constants if name.startswith("mask_")]  # positions are counted, not kept
    mask = arguments(attention_of(captured)[0])["attn_mask"]
    assert isinstance(mask, Ref)
    assert captured.graph.by_name[mask.name].shape == (8, 8)


BANDS = {
    "window": Band(-2, 0),
    "window, both ways": Band(-1, 1),
    "later": Band(0, 7),
    "rows without keys": EVERYTHING,  # its bounds are constants, of which rules know nothing
}


@pytest.mark.parametrize("name", BANDS)
def test_a_mask_that_is_made_anew_says_at_which_distances_keys_are_seen(name: str):
    captured = check_against_eager(Attend(MASKS[name][1]), *operands(8, 8), tolerance=1e-15)
    (op,) = attention_of(captured)
    assert band_of(op.operands[-1], captured.graph) == BANDS[name]


def test_a_mask_of_the_longest_sequences_takes_no_memory():
    """A causal mask over 131,072 positions is 16 GiB of booleans."""

    class Long(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, device="meta"))

        def forward(self, x: Tensor) -> Tensor:
            q, k = torch.arange(x.shape[-2])[:, None], torch.arange(x.shape[-2])[None, :]
            window = (k <= q) & (k > q - 4096)
            seen = (k <= q)[None, None].expand(x.shape[0], 1, -1, -1)
            attended = F.scaled_dot_product_attention(x * self.weight, x, x, seen)
            return F.scaled_dot_product_attention(attended, x, x, window)

    captured = capture(Long(), (torch.empty(2, 2, 131_072, 4, device="meta"),))
    assert [kind_of(op, captured) for op in attention_of(captured)] == ["causal", "blocks"]
    assert all(len(data) <= 131_072 for data in captured.constants.values())
    assert all(value.numel < 131_072**2 for value in captured.graph.values)
    named = arguments(attention_of(captured)[1])
    assert band_between(named["first"], named["end"], captured.graph) == Band(-4095, 0)
    assert named["rows"] == (4096,) * 32
    assert max(end - first for first, end in zip(named["firsts"], named["ends"], strict=True)) == 8191


LARGE: dict[str, tuple[str, Mask]] = {
    "window": ("blocks", lambda q, k, n: (k <= q) & (k > q - 9)),
    "window, additive": ("blocks", additive(-INF, lambda q, k, n: (k <= q) & (k > q - 9))),
    "window, both ways": ("blocks", lambda q, k, n: (q - k).abs() < 9),
    "prefix": ("blocks", lambda q, k, n: (k <= q) | (k < 9)),
    "documents": ("blocks", lambda q, k, n: (q * q // 300 == k * k // 300) & (k <= q)),
    "rows without keys": ("blocks", lambda q, k, n: (k < q - 40) & (k >= 1)),
    "padded on the right": ("blocks", padded_right),
    "padded on the left": ("blocks", padded_left),
    "window and padding": ("blocks", lambda q, k, n: padded_left(q, k, n) & (k > q - 9)),
    "padded twice": ("blocks", lambda q, k, n: padded_left(q, k, n) & (k != n[:, None, None, None] - 5)),
    "causal": ("causal", causal),
    "two pieces": ("own", lambda q, k, n: (k <= q) & (k != 2)),
}


@pytest.mark.parametrize("name", LARGE)
def test_a_mask_that_would_take_more_memory_than_queries_and_keys_becomes_blocks_of_small_ones(name: str):
    expected, mask = LARGE[name]
    number = 80  # of a sample's queries and keys: 2 heads and 1 of 2 numbers of 8 bytes
    repeat = REPEATS["repeat_interleave"][1] if name == "window" else None
    heads = (3, 1) if repeat else (2, 2)
    captured = check_against_eager(
        Attend(mask, repeat, width=1), *operands(number, number, *heads, width=1), tolerance=1e-14
    )
    (op,) = attention_of(captured)
    assert kind_of(op, captured) == expected
    if expected == "blocks":
        largest = max(value.numel for value in captured.graph.values)
        assert largest < number**2
        rows, firsts, ends = (arguments(op)[each] for each in ("rows", "firsts", "ends"))
        assert sum(rows) == number
        assert len(rows) <= MOST_BLOCKS
        assert all(first < end <= number for first, end in zip(firsts, ends, strict=True))


def test_of_padding_alone_the_mask_has_a_row_for_all_queries():
    captured = check_against_eager(
        Attend(lambda q, k, n: (q >= 0) & (k < n[:, None, None, None])), *operands(8, 8), tolerance=1e-15
    )
    (op,) = attention_of(captured)
    assert captured.graph.by_name[arguments(op)["attn_mask"].name].shape == (2, 1, 1, 8)


def test_documents_of_a_very_large_batch_are_found_without_its_positions():
    """16 Mi positions of 2,048 samples, which are all alike, as transformers looks documents up in them."""

    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, device="meta"))

        def forward(self, x: Tensor) -> Tensor:
            batch, length = x.shape[0], x.shape[-2]
            positions = torch.arange(length).expand(batch, length)
            document = (torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1).cumsum(-1)
            sample = torch.arange(batch)[:, None, None, None]
            q, k = torch.arange(length)[None, None, :, None], torch.arange(length)[None, None, None, :]
            seen = (document[sample, q] == document[sample, k]) & (k <= q)
            return F.scaled_dot_product_attention(x * self.weight, x, x, seen)

    captured = capture(Large(), (torch.empty(2048, 1, 8192, 4, device="meta"),))
    assert [kind_of(op, captured) for op in attention_of(captured)] == ["causal"]
