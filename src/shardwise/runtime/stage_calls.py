"""The programs and schedule that a rank of a pipeline runs for one kind of call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from shardwise.graph.capture import Capture
from shardwise.plans.bind_stages import BoundStages
from shardwise.programs.micro_batches import Passes
from shardwise.runtime.signatures import Wanted
from shardwise.runtime.stage import StageWorker
from shardwise.runtime.torch_schedules import Scheduled


@dataclass(frozen=True)
class StageCall:
    """One kind of call: the captured call, its micro-batches, their cuts by size, and this rank's scheduled stages."""

    captured: Capture
    passes: Passes
    bounds: Mapping[int, BoundStages]
    workers: tuple[StageWorker, ...]
    scheduled: Scheduled

    @property
    def bound(self) -> BoundStages:
        """Return the cut of the largest micro-batch."""
        return self.bounds[max(self.bounds)]

    @property
    def wanted(self) -> list[Wanted]:
        """Return the layouts and sample ranges in which the programs of all stages take the inputs."""
        wanted: list[Wanted] = []
        for start, size in zip(self.passes.starts, self.passes.sizes, strict=True):
            for part, spmd in zip(self.bounds[size].cut.parts, self.bounds[size].spmds, strict=True):
                inputs = [source for source in part.sources if source.kind == "input"]
                wanted.append(({s.names[0]: spmd.layouts[s.value] for s in inputs}, start, start + size))
        return wanted

    @property
    def draws(self) -> bool:
        """Return whether this rank draws random numbers."""
        programs = (program for worker in self.workers for program in worker.programs.values())
        return any(program.compiled.seed is not None for program in programs)

    def with_state(self, state: Mapping[str, Tensor]) -> StageCall:
        """Replace the parameters and buffers by those of ``state``, by name, and return self."""
        for worker in self.workers:
            worker.programs = {
                size: replace(program, compiled=program.compiled.with_state(state))
                for size, program in worker.programs.items()
            }
        return self


__all__ = ["StageCall"]
