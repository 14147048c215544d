"""Schedules of a pipeline by name: the stages of a pipeline rank, and the micro-batches that each schedule needs.

The orders are those of ``torch.distributed.pipelining`` (``order_of``), except for ``Solved``: its order is computed
for the given stages (``search.orders``), and the plan keeps it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.pipelining.schedules import get_schedule_class

from shardwise.costs.pipeline_simulation import Action, Kind, Order, StageSeconds, simulate_pipeline
from shardwise.errors import PlanError
from shardwise.untrusted_text import shorten_repr

_KINDS: dict[str, Kind] = {"F": "forward", "B": "backward", "I": "input", "W": "weight"}


@dataclass(frozen=True, slots=True)
class Schedule:
    """A pipeline schedule. ``stages_per_place``: stages of a pipeline rank; ``folded``: rank r has stages r and 2p - 1
    - r (a V), where others have r, r + p (a loop); ``splits_backward``: gradients of inputs and of weights are separate
    actions; ``instead``: the schedule of the same stages that takes any number of micro-batches; ``actions``: of a
    solved schedule, the actions of every rank."""

    name: str
    stages_per_place: int
    folded: bool
    splits_backward: bool
    instead: str
    actions: Order = ()

    @property
    def base(self) -> str:
        """Return its name without a number of stages."""
        return self.name.partition(":")[0]

    @property
    def is_solved(self) -> bool:
        """Return whether the order is computed for the given stages."""
        return self.name == SOLVED

    def place_of(self, stage: int, num_places: int) -> int:
        """Return the pipeline rank of a stage."""
        if self.folded and stage >= num_places:
            return 2 * num_places - 1 - stage
        return stage % num_places

    def fault(self, num_places: int, num_micro_batches: int) -> str:
        """Return why the schedule cannot run so many micro-batches; empty if it can."""
        stages = self.stages_per_place * num_places
        if self.actions and num_micro_batches != self.num_micro_batches:
            return f"the solved order is of {self.num_micro_batches} micro-batches, and there are {num_micro_batches}"
        if self.name in ("1F1B", "DualPipeV") and num_micro_batches < stages:
            return f"{self.name} over {stages} stages needs {stages} micro-batches, and there are {num_micro_batches}"
        if self.base in ("Interleaved1F1B", "InterleavedZeroBubble"):
            rounds = max(1, num_micro_batches // num_places)
            if num_micro_batches % rounds:
                return (
                    f"{self.name} over {num_places} places makes {num_micro_batches} // {num_places} = {rounds} "
                    f"rounds, which do not divide {num_micro_batches} micro-batches"
                )
        return ""

    @property
    def num_micro_batches(self) -> int:
        """Return the number of micro-batches of a solved order."""
        return 1 + max(action.micro_batch for actions in self.actions for action in actions)


SOLVED = "Solved"
ONE_STAGE = Schedule("", 1, False, False, "")  # no pipeline
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
        Schedule(SOLVED, 2, True, True, "ZBVZeroBubble"),
    )
}


def schedule_of(name: object, order: Sequence[str] = ()) -> Schedule:
    """Return the schedule of a name, in any capitalisation. A looped schedule may state the stages of a rank:
    ``Interleaved1F1B:4`` has four, and without a number two. ``order``: of a solved one, as ``format_order`` wrote it.
    Raises PlanError listing the known names, and for an order that cannot be read."""
    names = {known_name.lower(): known_name for known_name in SCHEDULES}
    base, colon, number = name.partition(":") if isinstance(name, str) else ("", "", "")
    if base.lower() not in names:
        raise PlanError(f"unknown schedule {name!r}", fix=f"one of {', '.join(SCHEDULES)}")
    schedule = SCHEDULES[names[base.lower()]]
    if colon:
        schedule = _with_stages(schedule, number)
    return replace(schedule, actions=tuple(map(_parsed, order))) if order else schedule


def _with_stages(schedule: Schedule, number: str) -> Schedule:
    """Return the schedule with another number of stages on every pipeline rank."""
    loops = [other.name for other in SCHEDULES.values() if other.stages_per_place > 1 and not other.folded]
    if schedule.name not in loops:
        what = f"{schedule.name} has {schedule.stages_per_place} stages on every place, and no other number of them"
        raise PlanError(what, fix=f"leave out :{shorten_repr(number)}; others may have more: {', '.join(loops)}")
    if not re.fullmatch("[1-9][0-9]{0,2}", number, re.ASCII) or int(number) < 2:
        what = f"{schedule.name}:{shorten_repr(number)} does not say how many stages a place has"
        raise PlanError(what, fix=f"a whole number from 2: {schedule.name}:4")
    if int(number) == schedule.stages_per_place:
        return schedule
    instead = f"{schedule.instead}:{number}"
    return replace(schedule, name=f"{schedule.name}:{number}", stages_per_place=int(number), instead=instead)


def format_order(order: Order) -> tuple[str, ...]:
    """Format an order, a line per pipeline rank, in torch's notation: ``1F0 1I0 1W0`` is forward, input and weight part
    of micro-batch 0 in stage 1."""
    letters = {kind: letter for letter, kind in _KINDS.items()}
    return tuple(" ".join(f"{a.stage}{letters[a.kind]}{a.micro_batch}" for a in actions) for actions in order)


def _parsed(line: str) -> tuple[Action, ...]:
    actions = []
    for text in line.split():
        match = re.fullmatch(r"(\d{1,6})([FBIW])(\d{1,6})", text, re.ASCII)
        if match is None:
            raise PlanError(f"order has {shorten_repr(text)}, which is no action (as 0F3, 1I0, 1W0)")
        actions.append(Action(int(match[1]), _KINDS[match[2]], int(match[3])))
    return tuple(actions)


def check_order(schedule: Schedule, num_places: int, num_micro_batches: int) -> None:
    """Raise PlanError unless a solved order runs every action once, on its pipeline rank, and ends. A whole backward
    counts as its two parts."""
    required = {
        (place, Action(stage, kind, number))
        for stage in range(num_places * schedule.stages_per_place)
        for place in [schedule.place_of(stage, num_places)]
        for kind in _SOLVED_KINDS
        for number in range(num_micro_batches)
    }
    have = [
        (place, replace(action, kind=kind))
        for place, actions in enumerate(schedule.actions)
        for action in actions
        for kind in (_SOLVED_KINDS[1:] if action.kind == "backward" else (action.kind,))
    ]
    if len(have) != len(required) or set(have) != required:
        wrong = next(iter(sorted(required.symmetric_difference(have), key=str)), None)
        example = "" if wrong is None else f": {format_order(((wrong[1],),))[0]} on place {wrong[0]}"
        raise PlanError(
            f"order has {len(have):,} actions; {num_micro_batches} micro-batches in {num_places} places have "
            f"{len(required):,}, each once{example}"
        )
    try:
        simulate_pipeline(schedule.actions, [StageSeconds(1.0, 1.0, 1.0, 0.0, 0.0)] * num_places * 2)
    except ValueError as error:
        raise PlanError(f"order: {error}") from error


def order_of(schedule: Schedule | None, num_places: int, num_micro_batches: int) -> Order:
    """Return the actions of every pipeline rank, in the solved order or in torch's. Until an order is solved, the
    schedule that replaces it counts. Without a schedule there is one stage: forward and backward of each micro-batch.
    Needs no process group."""
    if schedule is None:
        kinds: tuple[Kind, ...] = "forward", "backward"
        return (tuple(Action(0, kind, number) for number in range(num_micro_batches) for kind in kinds),)
    if schedule.actions:
        return schedule.actions
    if schedule.is_solved:
        schedule = schedule_of(schedule.instead)
    places: list[tuple[Action, ...]] = []
    num_stages = num_places * schedule.stages_per_place
    stages = [
        SimpleNamespace(
            num_stages=num_stages,
            group_size=num_places,
            group_rank=0,
            stage_index=number,
            is_last=number == num_stages - 1,
            submod=torch.nn.Module(),
        )
        for number in range(schedule.stages_per_place)
    ]
    stages_or_one: Any = stages if schedule.stages_per_place > 1 else stages[0]
    schedule_of_torch: Any = get_schedule_class(schedule.base)(stages_or_one, num_micro_batches)
    for place in range(num_places):
        actions: list[Action] = []
        for action in schedule_of_torch.pipeline_order[place]:
            actions += _actions(action)
        places.append(tuple(actions if schedule.stages_per_place > 1 else _numbered(actions)))
    return tuple(places)


def _actions(action: Any) -> list[Action]:
    if action is None:
        return []
    if action.sub_actions:
        return [action_of_part for part in action.sub_actions for action_of_part in _actions(part)]
    kind = _KINDS.get(action.computation_type.value)
    return [] if kind is None else [Action(action.stage_index, kind, action.microbatch_index)]


def _numbered(actions: Sequence[Action]) -> list[Action]:
    """Number the actions of the only stage of a pipeline rank, which takes micro-batches in order. (torch's table of
    1F1B, which is for pictures, numbers the last rank's forwards from 1.)"""
    seen: Counter[Kind] = Counter()
    numbered = []
    for action in actions:
        numbered.append(replace(action, micro_batch=seen[action.kind]))
        seen[action.kind] += 1
    return numbered


_SOLVED_KINDS: tuple[Kind, ...] = ("forward", "input", "weight")
