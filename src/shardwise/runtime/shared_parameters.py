"""Parameters shared by stages on several pipeline ranks: each has all shards, on devices of the same numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from shardwise.errors import LaunchError
from shardwise.plans.plan import Plan
from shardwise.runtime.communicator import new_groups


def sharing_pipeline_ranks(plan: Plan) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Map each parameter that several pipeline ranks have to the global ranks of each of them."""
    places: dict[str, dict[tuple[int, ...], None]] = {}
    for stage in plan.stages:
        for entry in stage.parameters:
            places.setdefault(entry.name, {})[stage.placement.ranks] = None
    return {name: tuple(ranks) for name, ranks in places.items() if len(ranks) > 1}


@dataclass(frozen=True)
class PipelineRankGroups:
    """Process groups of a rank with the ranks of its device number in other pipeline ranks. ``every``: over all
    pipeline ranks; ``shared``: parameter -> the group over the pipeline ranks that have it."""

    every: Any
    shared: Mapping[str, Any]

    def __deepcopy__(self, memo: dict[int, Any]) -> PipelineRankGroups:
        return self  # creating new ones needs all ranks

    def __getstate__(self) -> NoReturn:
        """Raise LaunchError: process groups cannot be pickled."""
        what = "a parallel module of stages cannot be pickled: its stages use process groups of this job"
        raise LaunchError(what, fix="store par.state_dict(), or sw.save_checkpoint(...), which any ranks can read")

    @staticmethod
    def of(plan: Plan, place: tuple[int, ...], host: frozenset[str]) -> PipelineRankGroups:
        """Create the groups of a rank of pipeline rank ``place``. ``host``: names of the tables on the CPU, whose
        groups use gloo. All ranks of the job call this."""
        everywhere = tuple(dict.fromkeys(stage.placement.ranks for stage in plan.stages))
        every = new_groups([sorted(ranks) for ranks in zip(*everywhere, strict=True)])
        groups: dict[tuple[tuple[tuple[int, ...], ...], bool], Any] = {}
        groups_of: dict[str, Any] = {}
        for name, places in sharing_pipeline_ranks(plan).items():
            key = places, name in host
            if key not in groups:
                groups[key] = new_groups(
                    [sorted(ranks) for ranks in zip(*places, strict=True)], "gloo" if name in host else None
                )
            if place in places:
                groups_of[name] = groups[key]
        return PipelineRankGroups(every, groups_of)
