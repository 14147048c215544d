"""The tree of groups over which all ranks agree."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from launch.gloo_ranks import RunRanks
from shardwise.errors import ShardwiseError
from shardwise.runtime import agree
from shardwise.runtime.rank_tree import RankTree, RankValues


def passes_on(fanouts: list[int]) -> list[int]:
    """On a rank: pass values up and down trees. Returns how many ranks each tree connects it to."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    num_peers = []
    for fanout in fanouts:
        tree = RankTree(f"of {fanout}", None, fanout)
        assert tree.gather({"rank": rank}) == [{"rank": other} for other in range(num_ranks)]
        at_zero = tree.gather(rank, to_all=False)
        assert rank or at_zero == list(range(num_ranks))
        for last in (0, 3, num_ranks - 1):
            row = tree.largest(torch.tensor([0, rank == last, rank]), lambda work: work.wait())
            assert row.tolist() == [0, 1, num_ranks - 1]
        num_peers.append(sum(len(group.ranks) - 1 for group in tree._groups))
    agree.FANOUT = 3  # as with more ranks
    assert agree.gather_values(rank) == list(range(num_ranks))
    assert agree.rank_tree() is agree.rank_tree()
    agree.raise_first(ShardwiseError, None)
    with pytest.raises(ShardwiseError, match="fault" if rank == 2 else "rank 2: fault"):
        agree.raise_first(ShardwiseError, ShardwiseError("fault") if rank == 2 else None)
    return num_peers


def test_values_of_all_ranks_go_up_and_down_a_tree(run_ranks: RunRanks) -> None:
    peers = run_ranks(passes_on, 5, [2, 3, 8])
    assert peers == [[3, 3, 4], [1, 2, 4], [2, 2, 4], [1, 2, 4], [1, 1, 4]]


def test_equal_values_of_many_ranks_travel_once() -> None:
    same = ["a plan's digest" * 100, {"tp": 8}]
    leaves = [RankValues.of([same[0], rank % 8]) for rank in range(4096)]
    whole = RankValues.joined([RankValues.joined(leaves[at : at + 8]) for at in range(0, 4096, 8)])
    assert RankValues.unpacked(whole.packed()).by_rank == [[same[0], rank % 8] for rank in range(4096)]
    assert len(whole.packed()) < 8 * 1700
