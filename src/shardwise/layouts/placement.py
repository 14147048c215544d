"""A place: a mesh over some of the job's ranks. The one stage of a plan has the whole job; a stage of a pipeline a part
of it, alone or together with other stages that have the same ranks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from shardwise.errors import LayoutError
from shardwise.layouts.mesh import Mesh


@dataclass(frozen=True)
class Placement:
    """``ranks[i]``: the global rank of the mesh's device ``i`` (row-major over its axes). They ascend, since a process
    group numbers its members so. Raises LayoutError where they do not, are not as many as the devices, or where one is
    negative or named twice."""

    mesh: Mesh
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.ranks) != self.mesh.num_devices:
            what = f"{self.mesh} has {self.mesh.num_devices} devices, the placement names {len(self.ranks)} ranks: "
            fix = "list one global rank for every device of the mesh, in row-major order of its axes"
            raise LayoutError(what + _shown(self.ranks), fix=fix)
        for before, rank in pairwise((-1, *self.ranks)):
            if rank > before:
                continue
            if rank < 0:
                what, fix = f"rank {rank} is negative", "ranks are counted from 0"
            elif rank == before:
                what, fix = f"rank {rank} is listed twice", "list every rank once"
            else:
                what = f"rank {rank} comes after rank {before}"
                fix = "list ranks in ascending order; reorder the axes of the mesh to rearrange devices"
            raise LayoutError(f"{what} in the placement {_shown(self.ranks)} of {self.mesh}", fix=fix)

    def __str__(self) -> str:
        return f"{self.mesh} on ranks {_shown(self.ranks)}"

    @staticmethod
    def whole(mesh: Mesh) -> Placement:
        """Return the placement on all ranks of a job with as many ranks as the mesh has devices."""
        return Placement(mesh, tuple(range(mesh.num_devices)))

    def device_of(self, rank: int) -> int:
        """Return the position in the mesh of a global rank. Raises LayoutError for a rank that is elsewhere."""
        device = bisect_left(self.ranks, rank)
        if self.ranks[device : device + 1] != (rank,):
            raise LayoutError(f"rank {rank} is not in {self}", fix="call this on one of these ranks")
        return device

    def coordinates(self, rank: int) -> dict[str, int]:
        """Sub-axis -> coordinate of a global rank."""
        return self.mesh.coordinates(self.device_of(rank))

    def group(self, axes: tuple[str, ...], rank: int) -> tuple[int, ...]:
        """The global ranks that differ from ``rank`` along ``axes`` only, ordered by their position along them."""
        return tuple(self.ranks[device] for device in self.mesh.group(axes, self.device_of(rank)))


def check_placements(placements: Sequence[Placement], num_ranks: int) -> None:
    """Two stages of one plan have the same ranks or none in common, and all stages together have all ranks. Raises
    LayoutError naming stages and ranks."""
    if not placements:
        raise LayoutError("the plan has no stages", fix="add at least one stage with a placement")
    for stage, placement in enumerate(placements):
        absent = [rank for rank in placement.ranks if rank >= num_ranks]
        if absent:
            what = (
                f"stage {stage} names {len(absent)} of its {len(placement.ranks)} ranks beyond the {num_ranks} of "
                "the job: "
            )
            fix = f"start {absent[-1] + 1} ranks, or use ranks from 0 to {num_ranks - 1}"
            raise LayoutError(what + _shown(absent), fix=fix)
    stage_of: dict[int, int] = {}  # rank -> the first stage that has it
    for number, second in enumerate(placements):
        for before in sorted({stage_of.setdefault(rank, number) for rank in second.ranks} - {number}):
            first = placements[before]
            if first.ranks == second.ranks:
                continue
            common = sorted(set(first.ranks) & set(second.ranks))
            what = f"stages {before} and {number} share {_counted(common)}, but not all: stage {before} has "
            what += f"{_shown(first.ranks)}, stage {number} has {_shown(second.ranks)}"
            raise LayoutError(what, fix="give them the same ranks or separate ranks")
    missing = sorted(set(range(num_ranks)).difference(stage_of))
    if missing:
        what = f"{len(missing)} of {num_ranks} ranks are in no stage: {_shown(missing)}"
        raise LayoutError(what, fix="add them to the placement of a stage, or start fewer ranks")


def _counted(ranks: Sequence[int]) -> str:
    return f"{len(ranks)} rank{'s' if len(ranks) > 1 else ''} ({_shown(ranks)})"


def _shown(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f", ... ({len(ranks)})" if len(ranks) > 8 else "")
