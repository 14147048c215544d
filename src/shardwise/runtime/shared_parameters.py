"""Parameters that stages on several places of a pipeline have: each place has all shards, on the devices of the same
numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from shardwise.errors import LaunchError, problem
from shardwise.plans.plan import Plan
from shardwise.runtime.torch_schedules import position_groups


def sharing_pipeline_ranks(plan: Plan) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Parameter that several places have -> the ranks of each of them."""
    places: dict[str, dict[tuple[int, ...], None]] = {}
    for stage in plan.stages:
        for entry in stage.parameters:
            places.setdefault(entry.name, {})[stage.placement.ranks] = None
    return {name: tuple(ranks) for name, ranks in places.items() if len(ranks) > 1}


@dataclass(frozen=True)
class PipelineRankGroups:
    """The process groups of a rank with those that have its device number in other places. ``every``: in all of them;
    ``shared``: of a parameter that several places have, in these."""

    every: Any
    shared: Mapping[str, Any]

    def __deepcopy__(self, memo: dict[int, Any]) -> PipelineRankGroups:
        return self  # ranks would have to make new ones together

    def __getstate__(self) -> NoReturn:
        """Raises LaunchError: groups are not in files."""
        raise LaunchError(
            problem(
                "a parallel module of stages is not stored whole: its stages exchange over process groups of this job",
                fix="store par.state_dict(), or sw.save_checkpoint(...), which any ranks can read",
            )
        )

    @staticmethod
    def of(plan: Plan, place: tuple[int, ...], position: int, host: frozenset[str]) -> PipelineRankGroups:
        """Those of a rank of a ``place``. ``host``: names of the tables on the CPU, whose groups are gloo's. All
        ranks make all groups."""
        everywhere = tuple(dict.fromkeys(stage.placement.ranks for stage in plan.stages))
        every = position_groups(everywhere)[position]
        groups: dict[tuple[tuple[tuple[int, ...], ...], bool], Any] = {}
        groups_of: dict[str, Any] = {}
        for name, places in sharing_pipeline_ranks(plan).items():
            key = places, name in host
            if key not in groups:
                groups[key] = position_groups(places, "gloo" if name in host else None)[position]
            if place in places:
                groups_of[name] = groups[key]
        return PipelineRankGroups(every, groups_of)


__all__ = ["PipelineRankGroups", "sharing_pipeline_ranks"]
