"""Dropout by the hash of global indices: its draws are independent, and those of a block do not depend on the block."""

from __future__ import annotations

from itertools import combinations
from math import prod, sqrt
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.graph.custom_operators import decomposed_dropout, dropout, dropout_mask, mask_columns, splitmix64

SIZES = (6, 5, 4, 96)  # 384 columns


def test_the_hash_is_splitmix64():
    """The first outputs of the reference generator with seed 0 (state += golden ratio, then the finalizer)."""
    golden = -7046029254386353131  # 0x9E3779B97F4A7C15
    states = torch.arange(1, 4) * golden
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [int(bits) % 2**64 for bits in splitmix64(states)] == expected


def whole_mask(seed: int, p: float, call: int, shape: tuple[int, ...]) -> torch.Tensor:
    return dropout_mask(torch.tensor(seed), p, call, mask_columns(shape), shape, (0,) * len(shape), shape)


@given(st.data(), st.integers(0, 2**40))
def test_a_block_of_the_mask_is_the_mask_of_the_block(data: Any, seed: int) -> None:
    """In dims of rows and of columns."""
    offsets = [data.draw(st.integers(0, size - 1)) for size in SIZES]
    ends = [data.draw(st.integers(offset, size)) for offset, size in zip(offsets, SIZES, strict=True)]
    lengths = [end - offset for offset, end in zip(offsets, ends, strict=True)]
    block = dropout_mask(torch.tensor(seed), 0.4, 3, mask_columns(SIZES), SIZES, offsets, lengths)
    assert torch.equal(block, whole_mask(seed, 0.4, 3, SIZES)[tuple(map(slice, offsets, ends))])


@pytest.mark.parametrize("dim", range(4))
def test_a_micro_batch_continues_where_the_last_one_ended(dim: int) -> None:
    """Samples may be rows of any dim, also one of the columns."""
    x, whole = torch.ones(SIZES), whole_mask(3, 0.4, 1, SIZES)
    size = SIZES[dim] // 2
    for first in (0, size):
        part = x.narrow(dim, first, size)
        stride = prod(SIZES[dim + 1 :])
        kept = dropout(
            part, torch.tensor(3), 0.4, 1, mask_columns(SIZES), SIZES, (0,) * 4, part.shape, torch.tensor(first), stride
        )
        assert torch.equal(kept != 0, whole.narrow(dim, first, size))


# ---------------------------------------------------------------------------------------------------------- statistics

SHAPES = ((1024, 1024), (8192, 128), (64, 4, 32, 128))
SIGMAS = 5.5  # a deviation that one of the some 600 statistics below shows with probability 2e-5


def centred(mask: torch.Tensor, p: float) -> torch.Tensor:
    """Return draws with mean 0 and variance 1."""
    return (mask.double() - (1 - p)) / sqrt(p * (1 - p))


def deviation(products: torch.Tensor) -> float:
    """Return how many standard errors the mean of independent numbers of mean 0 and variance 1 is from 0."""
    return abs(float(products.mean())) * sqrt(products.numel())


@pytest.mark.parametrize("p", [0.1, 0.5])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_share_is_p_and_neighbours_do_not_correlate(shape: tuple[int, ...], p: float) -> None:
    draws = centred(whole_mask(17, p, 2, shape), p).reshape(-1, mask_columns(shape))
    assert deviation(draws) < SIGMAS
    for lag in (1, 2, 3, 4, 7, 8, 16, 31, 32, 64):
        assert deviation(draws[:, lag:] * draws[:, :-lag]) < SIGMAS, f"columns {lag} apart"
        assert deviation(draws[lag:] * draws[:-lag]) < SIGMAS, f"rows {lag} apart"
        assert deviation(draws[lag:, lag:] * draws[:-lag, :-lag]) < SIGMAS, f"diagonally {lag} apart"
    for dim in (0, 1):  # chi-square of the sums of rows and of columns: mean n, variance 2 n
        sums = draws.mean(dim) * sqrt(draws.shape[dim])
        assert abs(float(sums.square().sum()) - sums.numel()) < SIGMAS * sqrt(2 * sums.numel()), f"sums over dim {dim}"


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_all_patterns_of_four_neighbours_are_as_frequent_as_independent_draws(p: float) -> None:
    """Chi-square with 15 degrees of freedom is above 55 with probability 2e-6."""
    mask = whole_mask(5, p, 0, (1024, 1024))
    squares = [mask[i::2, j::2] for i in (0, 1) for j in (0, 1)]
    for parts in (squares, [mask[:, i::4] for i in range(4)], [mask[i::4] for i in range(4)]):
        codes = sum(part.long() << i for i, part in enumerate(parts)).flatten()
        counts = torch.bincount(codes, minlength=16).double()
        shares = [prod(1 - p if code >> bit & 1 else p for bit in range(4)) for code in range(16)]
        expected = torch.tensor(shares, dtype=torch.float64) * codes.numel()
        assert float(((counts - expected).square() / expected).sum()) < 55


def test_no_combination_of_rows_correlates_with_one_of_columns() -> None:
    """The largest singular value of n x m independent draws is near sqrt(n) + sqrt(m)."""
    draws = centred(whole_mask(1, 0.3, 0, (700, 500)), 0.3)
    assert abs(float(torch.linalg.matrix_norm(draws, 2)) / (sqrt(700) + sqrt(500)) - 1) < 0.03


def test_seeds_and_calls_are_independent() -> None:
    chosen = [(seed, call) for seed in (0, 1, 2, 2**32, 2**40, 2**62) for call in (0, 1, 2, 40)]
    masks = [centred(whole_mask(seed, 0.3, call, (128, 128)), 0.3) for seed, call in chosen]
    assert max(deviation(a * b) for a, b in combinations(masks, 2)) < SIGMAS


# --------------------------------------------------------------------------------------------------------- the operator


def test_backward_drops_what_forward_drops():
    x = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    y = dropout(x, torch.tensor(7), 0.5, 2, 5, (6, 5), (0, 0))
    y.sum().backward()
    assert torch.equal(x.grad, (y != 0) * 2.0)


def test_a_shard_of_a_factored_dim_is_given_by_its_atoms():
    x = torch.ones(4, 24)
    whole = dropout(x, torch.tensor(0), 0.5, 0, 24, (4, 24), (0, 0))
    part = dropout(x[:, :12], torch.tensor(0), 0.5, 0, 24, (4, 3, 8), (0, 0, 4), (4, 3, 4))
    assert torch.equal(part, whole.reshape(4, 3, 8)[:, :, 4:].reshape(4, 12))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (0, 200), (5,), (7, 3, 1)], ids=str)
@pytest.mark.parametrize("p", [0.0, 0.5, 1.0])
def test_small_and_empty_tensors_and_extreme_shares(shape: tuple[int, ...], p: float) -> None:
    x = torch.ones(shape)
    y = dropout(x, torch.tensor(0), p, 0, mask_columns(shape), shape, (0,) * len(shape))
    assert y.shape == x.shape
    assert p == 0.5 or torch.equal(y, x * (1 - p))


class CountingPasses(TorchDispatchMode):
    """Counts kernels whose result has as many elements as the mask, and remembers the largest int64 result."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.passes, self.int64 = size, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        if func.namespace == "aten" and not func.is_view:
            assert isinstance(result, torch.Tensor)
            self.passes += result.numel() >= self.size
            self.int64 = max(self.int64, result.numel() * (result.dtype == torch.int64))
        return result


def test_dropout_takes_four_passes_over_the_mask_and_none_in_int64() -> None:
    shape = (8, 4, 64, 128)
    x, seed = torch.ones(shape, dtype=torch.bfloat16), torch.tensor(3)
    with CountingPasses(x.numel()) as counted:
        dropout._init_fn(x, seed, 0.1, 0, mask_columns(shape), shape, (0,) * 4)
    assert counted.passes == 4
    assert counted.int64 == 8 * 4 * 64  # keys of rows


def test_what_a_compiler_sees_is_the_operator() -> None:
    arguments = torch.randn(12, 200), torch.tensor(3), 0.4, 1, 200, (12, 200), (0, 0)
    graph = make_fx(lambda x, seed: decomposed_dropout(x, seed, *arguments[2:]))(*arguments[:2])
    assert torch.equal(graph(*arguments[:2]), dropout(*arguments))
    called = [node.target for node in graph.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    assert not any(target._schema.is_mutable for target in called), "a partitioner loses what is written in place"
    assert sum(target.namespace == "shardwise" for target in called) == 1, "more than the keys is no kernel of PyTorch"
