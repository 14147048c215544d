"""Schedules of a pipeline by name: how many stages a place has under each, which, and what micro-batches it needs.

The orders themselves are those of ``torch.distributed.pipelining`` (``runtime.torch_schedules``).
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.errors import PlanError, problem


@dataclass(frozen=True, slots=True)
class Schedule:
    """``stages_per_place``: how many stages a place runs; ``folded``: place r has stages r and 2p - 1 - r (a V), where
    others have r, r + p (a loop); ``splits_backward``: gradients of inputs and of weights are apart; ``instead``: the
    schedule of the same stages that takes any number of micro-batches."""

    name: str
    stages_per_place: int
    folded: bool
    splits_backward: bool
    instead: str

    def place_of(self, stage: int, num_places: int) -> int:
        """The place that runs a stage."""
        if self.folded and stage >= num_places:
            return 2 * num_places - 1 - stage
        return stage % num_places

    def fault(self, num_places: int, num_micro_batches: int) -> str:
        """Why a schedule can not run so many micro-batches, or nothing."""
        stages = self.stages_per_place * num_places
        if self.name in ("1F1B", "DualPipeV") and num_micro_batches < stages:
            return f"{self.name} over {stages} stages needs {stages} micro-batches, and there are {num_micro_batches}"
        if self.name in ("Interleaved1F1B", "InterleavedZeroBubble"):
            rounds = max(1, num_micro_batches // num_places)
            if num_micro_batches % rounds:
                return (
                    f"{self.name} over {num_places} places makes {num_micro_batches} // {num_places} = {rounds} "
                    f"rounds, which do not divide {num_micro_batches} micro-batches"
                )
        return ""


SCHEDULES = {
    schedule.name: schedule
    for schedule in (
        Schedule("GPipe", 1, False, False, "GPipe"),
        Schedule("1F1B", 1, False, False, "GPipe"),
        Schedule("LoopedBFS", 2, False, False, "LoopedBFS"),
        Schedule("Interleaved1F1B", 2, False, False, "LoopedBFS"),
        Schedule("InterleavedZeroBubble", 2, False, True, "LoopedBFS"),
        Schedule("ZBVZeroBubble", 2, True, True, "ZBVZeroBubble"),
        Schedule("DualPipeV", 2, True, True, "ZBVZeroBubble"),
    )
}


def schedule_of(name: object) -> Schedule:
    """The schedule of a name, however it is capitalised. Raises PlanError listing those there are."""
    known = {own.lower(): own for own in SCHEDULES}
    if not isinstance(name, str) or name.lower() not in known:
        raise PlanError(problem(f"unknown schedule {name!r}", fix=f"one of {', '.join(SCHEDULES)}"))
    return SCHEDULES[known[name.lower()]]


__all__ = ["SCHEDULES", "Schedule", "schedule_of"]
