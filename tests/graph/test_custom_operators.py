"""Dropout by the hash of global indices: whoever computes an element drops it alike."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.graph.custom_operators import dropout, dropout_mask, splitmix64


def test_the_hash_is_splitmix64():
    """The first outputs of the reference generator with seed 0 (state += golden ratio, then the finalizer)."""
    golden = -7046029254386353131  # 0x9E3779B97F4A7C15
    states = torch.arange(1, 4) * golden
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [int(bits) % 2**64 for bits in splitmix64(states)] == expected


@given(st.integers(0, 4), st.integers(0, 4), st.integers(1, 4), st.integers(1, 6), st.integers(0, 2**40))
def test_a_block_of_the_mask_is_the_mask_of_the_block(row, column, rows, columns, seed):
    sizes = (8, 10)
    key = torch.tensor(seed)
    whole = dropout_mask(key, 0.4, 3, sizes, (0, 0), sizes)
    block = dropout_mask(key, 0.4, 3, sizes, (row, column), (rows, columns))
    assert torch.equal(block, whole[row : row + rows, column : column + columns])


def test_the_share_that_is_dropped_is_p_and_calls_and_seeds_differ():
    masks = [
        dropout_mask(torch.tensor(seed), 0.3, call, (400, 400), (0, 0), (400, 400)).double()
        for seed, call in [(0, 0), (0, 1), (1, 0)]
    ]
    for i, mask in enumerate(masks):
        assert abs(mask.mean() - 0.7) < 0.005
        for other in masks[:i]:
            correlation = torch.corrcoef(torch.stack([mask.flatten(), other.flatten()]))[0, 1]
            assert abs(correlation) < 0.01


def test_backward_drops_what_forward_drops():
    x = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    y = dropout(x, torch.tensor(7), 0.5, 2, (6, 5), (0, 0))
    y.sum().backward()
    assert torch.equal(x.grad, (y != 0) * 2.0)


def test_a_shard_of_a_factored_dim_is_given_by_its_atoms():
    x = torch.ones(4, 24)
    whole = dropout(x, torch.tensor(0), 0.5, 0, (4, 24), (0, 0))
    part = dropout(x[:, :12], torch.tensor(0), 0.5, 0, (4, 3, 8), (0, 0, 4), (4, 3, 4))
    assert torch.equal(part, whole.reshape(4, 3, 8)[:, :, 4:].reshape(4, 12))
