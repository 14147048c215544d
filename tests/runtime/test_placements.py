"""Programs on some of a job's ranks: their collectives stay among them."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock, patch

import torch
import torch.distributed as dist

import shardwise as sw
from launch.gloo_ranks import RunRanks
from raising import message
from shardwise.errors import LayoutError
from shardwise.graph.ir import Graph
from shardwise.layouts.placement import Placement
from shardwise.layouts.redistribute import redistribute
from shardwise.layouts.text import parse_layout
from shardwise.runtime.communicator import Communicator, new_groups
from shardwise.runtime.messages import Purpose
from shardwise.runtime.transit import stages

EMPTY = Graph((), (), (), ())
PLACES = (
    Placement(sw.Mesh(dp=2), (0, 2)),
    Placement(sw.Mesh(tp=2), (1, 3)),
    Placement(sw.Mesh(tp=2), (0, 2)),  # a later stage of a looped schedule, on the first one's ranks
)


def sums_among_ranks() -> list[Any]:
    """On a rank: per placement the sum of its ranks' numbers, those of all of them, and what an outsider is told."""
    found: list[Any] = []
    communicators = [Communicator(place) for place in PLACES]
    for place, communicator in zip(PLACES, communicators, strict=True):
        communicator.create_groups([place.mesh.sub_axes])
    for place, communicator in zip(PLACES, communicators, strict=True):
        (axis,) = place.mesh.sub_axes
        if not communicator.coordinates:
            found.append(message(lambda own=communicator, axis=axis: own.group((axis,)), LayoutError))
            continue
        moves = redistribute(
            parse_layout(f"[2] partial(sum@{axis})", place.mesh), parse_layout("[2]", place.mesh), differentiable=False
        )
        tensor = torch.full((2,), 10.0 ** dist.get_rank())
        tensors: Any = [tensor]
        for stage in stages([moves], Purpose((), EMPTY, communicator, backward=False)):
            tensors = stage(tensors)
        found.append(
            (tensors[0].tolist(), communicator.gather_from_all(torch.tensor([dist.get_rank()]), "ranks").tolist())
        )
    return found


def test_collectives_of_a_placement_are_among_its_ranks(run_ranks: RunRanks) -> None:
    even, odd = ([101.0] * 2, [[0], [2]]), ([1010.0] * 2, [[1], [3]])
    outside = "rank {} is not in Mesh({}=2) on ranks {}\n  fix:    call this on one of these ranks"
    for rank, found in enumerate(run_ranks(sums_among_ranks, 4)):
        if rank % 2:
            told = [outside.format(rank, axis, "0, 2") for axis in ("dp", "tp")]
            assert found == [told[0], odd, told[1]]
        else:
            assert found == [even, outside.format(rank, "tp", "1, 3"), even]


def asked_to_split() -> list[int]:
    """On a rank of a job that looks like one of NCCL: how often torch has it split the communicator of all ranks, for
    groups of gloo and for another one."""
    source, mesh = Mock(), sw.Mesh(dp=2, tp=2)
    dist.group.WORLD.bound_device_id = torch.device("cuda", 0)
    found = []
    with patch.object(dist.distributed_c10d, "_get_split_source", lambda group: source):
        ranks = Communicator(Placement.whole(mesh), backend="gloo")
        ranks.create_groups([("dp",), ("tp",)])
        groups = [new_groups([(0, 2), (1, 3)], "gloo"), ranks.group(("dp",))]
        found.append(source.perform_nocolor_split.call_count)
        if dist.get_rank() > 1:
            dist.new_group([0, 1])  # as torch has it otherwise
        found.append(source.perform_nocolor_split.call_count)
    assert dist.group.WORLD.bound_device_id == torch.device("cuda", 0)
    number = torch.ones(1)
    dist.all_reduce(number, group=groups[0])
    dist.all_reduce(number, group=groups[1])
    return [*found, int(number)]


def test_groups_on_the_host_do_not_split_those_of_gpus(run_ranks: RunRanks) -> None:
    """The ranks outside would wait in NCCL for members that never come."""
    assert run_ranks(asked_to_split, 4) == [[0, 0, 4], [0, 0, 4], [0, 1, 4], [0, 1, 4]]
