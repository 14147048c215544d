"""Storage of parameters: the copies over which they are sharded, and the split counts that programs give them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import nn

from shardwise import Plan
from shardwise.errors import problem
from shardwise.mindspore.checks import closest
from shardwise.mindspore.holding import Held
from shardwise.mindspore.library import Box, boxes, parse_layout
from shardwise.mindspore.parameter_names import unwrapped

PARAMETERS = "_shardwise_parameter_plan"  # the attribute that holds ms.shard's parameter_plan


def shard_axes(plan: Plan, ranks: int) -> tuple[str, ...]:
    """Return the axes of the nearest ``ranks`` copies of parameters. Raises ValueError if there are fewer."""
    copied = copied_axes(plan)
    axes = [axis for axis in plan.mesh.sub_axes if any(axis in replicated for replicated in copied.values())]
    most, taken = plan.mesh.size_of(axes), list[str]()
    while axes and plan.mesh.size_of(taken) < ranks:
        taken.insert(0, axes.pop())
    if plan.mesh.size_of(taken) != ranks:
        what = f"optimizer_weight_shard_size is {ranks}, and parameters have at most {most} copies"
        raise ValueError(problem(what, fix=f"a power of two that divides {most}; -1: all of them"))
    return tuple(taken)


def copied_axes(plan: Plan) -> dict[str, frozenset[str]]:
    """Return for each parameter the axes along which the ranks that use it have equal copies."""
    stored, copied = plan.layouts, dict[str, frozenset[str]]()
    for entry in plan.conversions:
        if entry.value in stored:
            states = parse_layout(entry.target, plan.mesh).state_of
            replicated = {axis for axis, state in states.items() if state == "R"}
            copied[entry.value] = copied.get(entry.value, frozenset()) | replicated
    return copied


def parameter_plans(cell: nn.Module) -> dict[str, Any]:
    """Return the split counts of ``ms.shard(parameter_plan=)`` by parameter. Raises ValueError for unknown ones."""
    named, counts_by_name = dict(cell.named_parameters()), dict[str, Any]()
    for module in cell.modules():
        for candidate in (module, *vars(module).values()):
            plan = getattr(candidate, "__dict__", {}).get(PARAMETERS) or {}
            for key, counts in plan.items():
                path = key.removeprefix("self.")
                names = [n for n, p in named.items() if f".{n}".endswith(f".{path}") or getattr(p, "name", "") == path]
                if not names:
                    raise ValueError(problem(f"parameter_plan names {key!r}", fix=closest(path, named)))
                counts_by_name |= dict.fromkeys(names, counts)
    return counts_by_name


def held_by(plan: Plan) -> dict[str, Held]:
    """Return the distribution of each parameter and buffer of a plan by its path in the network."""
    return {
        unwrapped(entry.name): Held(stage.layouts[entry.name], stage.placement.ranks)
        for stage in reversed(plan.stages)
        for entry in (*stage.parameters, *stage.buffers)
    }


def boxes_of(holding: Held | None, rank: int, like: Held) -> tuple[Box, ...]:
    """Return a rank's boxes of a parameter. Without a distribution it is the whole parameter."""
    if holding is None:
        return (Box.whole(like.shape),)
    return boxes(holding.layout, holding.coordinates(rank)) if rank in holding.ranks else ()


def save_group(plan: Plan, rank: int, file: str) -> None:
    """Write the ranks with the same parts as this one, whose checkpoints can replace its own if that is lost."""
    holdings = held_by(plan).values()
    parts = {other: [boxes_of(holding, other, holding) for holding in holdings] for stage in plan.stages
             for other in stage.placement.ranks}  # fmt: skip
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    Path(file).write_text(json.dumps([other for other in sorted(parts) if parts[other] == parts[rank]]))
