"""Settings of a pipeline search."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.costs.cluster import Cluster
from shardwise.graph.annotate import Annotation
from shardwise.graph.segments import How, Segment
from shardwise.layouts.mesh import Mesh
from shardwise.layouts.placement import Placement
from shardwise.plans.schedule import Schedule
from shardwise.search.config import SearchConfig
from shardwise.search.memory_policy import Offload, ReshardMode


@dataclass(frozen=True)
class PipelineConfig:
    """Configuration of the planning of a pipeline. ``marks``: path of a module -> its stage; None: stages are balanced.
    ``cluster``: all devices; ``stage_cluster``: the devices of one stage; ``meshes``: the candidates for a stage.
    ``by_price``: whether layouts are searched; ``recompute``, ``offload``: as in ``sw.plan``; ``reshard_mode``: None
    where the user left it free; ``fits_itself``: choose recomputation if nothing fits; ``chooses_mesh``: the
    user gave no mesh, so axes are named by role."""

    num_stages: int
    schedule: Schedule
    marks: Mapping[str, int] | None
    cluster: Cluster
    stage_cluster: Cluster
    meshes: tuple[Mesh, ...]
    annotations: tuple[Annotation, ...]
    segments: tuple[Segment, ...]
    mode: str
    by_price: bool
    settings: SearchConfig
    fits_itself: bool
    recompute: How | None
    reshard_mode: ReshardMode | None
    offload: Offload
    chooses_mesh: bool

    @property
    def limit(self) -> float:
        """Return the memory limit of a device in bytes."""
        memory_bytes = self.settings.memory_bytes
        return self.stage_cluster.device.usable_bytes if memory_bytes is None else memory_bytes

    @property
    def num_places(self) -> int:
        return self.num_stages // self.schedule.stages_per_place

    def place(self, stage: int, mesh: Mesh) -> Placement:
        """Return the placement of a stage on consecutive ranks."""
        size = self.stage_cluster.num_devices
        first = size * self.schedule.place_of(stage, self.num_places)
        return Placement(mesh, tuple(range(first, first + size)))
