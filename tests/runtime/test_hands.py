"""What a rank that waits reads in the ranks' store, of a rank that may be calls ahead of it."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from unittest import mock

import pytest
import torch.distributed as dist

from raising import raises
from shardwise.errors import CollectiveError, ShardwiseError
from shardwise.runtime import faults
from shardwise.runtime.faults import FailureStore


class Late:
    """A collective that others do not join while somebody waits ``times`` times."""

    def __init__(self, times: int) -> None:
        self.times = times

    def is_completed(self) -> bool:
        return not self.times

    def wait(self, patience: timedelta | None = None) -> None:
        if self.times:
            self.times -= 1
            if self.times:
                raise RuntimeError("Operation timed out!")


class Ranks:
    def __init__(self) -> None:
        self.hands, self.rank = (FailureStore(), FailureStore()), 0
        self.begin_group()

    def begin_group(self) -> None:
        self.store = self.WORLD = dist.HashStore()

    def of(self, rank: int) -> FailureStore:
        self.rank = rank
        return self.hands[rank]


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made = Ranks()
    with (
        mock.patch.object(faults, "_PATIENCE_SECONDS", -1.0),  # every wait looks into the store
        mock.patch.object(dist, "is_initialized", return_value=True),
        mock.patch.object(dist, "get_world_size", return_value=2),
        mock.patch.object(dist, "get_rank", side_effect=lambda: made.rank),
        mock.patch.object(dist.distributed_c10d, "_get_default_store", side_effect=lambda: made.store),
        mock.patch.object(dist, "group", made),
    ):
        yield made


def test_who_leaves_a_later_call_is_known_when_the_others_come_to_it(ranks: Ranks) -> None:
    for _ in range(2):
        ranks.of(1).call += 1
    ranks.of(1).leave(ValueError("no such file"))
    ranks.of(0).call += 1
    ranks.of(0).wait(Late(3))  # of the first call, which rank 1 has made; the hand was read meanwhile
    ranks.of(0).call += 1
    with raises(CollectiveError, "rank 1", "ValueError: no such"):
        ranks.of(0).wait(Late(3))
    ranks.of(0).call += 1
    ranks.of(0).wait(Late(3))


def test_who_leaves_a_call_of_a_second_group_is_known(ranks: Ranks) -> None:
    for group in (1, 2):
        for rank in (0, 1):
            ranks.of(rank).call += 1
        ranks.of(1).leave(ValueError(f"group {group}"))
        assert f"group {group}" in str(ranks.of(0).explained())
        ranks.begin_group()
        assert ranks.of(0).explained() is None


def test_who_asks_about_a_later_call_is_known_when_the_others_come_to_it(ranks: Ranks) -> None:
    for _ in range(2):
        ranks.of(1).call += 1
    ranks.of(1).ask("an evaluation")
    ranks.of(0).call += 1
    ranks.of(0).wait(Late(3))
    ranks.of(0).call += 1
    with raises(ShardwiseError, "rank 1", "rank 0", "an evaluation"):
        ranks.of(0).wait(Late(3))
    ranks.of(0).ask("an evaluation")
    ranks.of(0).wait(Late(3))  # both ask, and wait for each other


def test_a_rank_whose_host_is_a_call_ahead_of_the_watched_one_has_agreed_on_it(ranks: Ranks) -> None:
    """A GPU may still be in a call on which both ranks agreed when this rank asks about the next one."""
    for rank in (0, 1):
        ranks.of(rank).call = 5
        ranks.of(rank).ask("another batch")
    ranks.of(0).call = 6
    ranks.of(0).ask("yet another batch")
    assert ranks.of(0).explained(5) is None
    assert ranks.of(1).explained(5) is None
