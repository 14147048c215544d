"""``sw.planned``: a job plans once for every number of ranks, and in advance for those that losses may leave."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path

from shardwise.errors import ShardwiseError
from shardwise.plans.plan import Plan
from shardwise.plans.result import PlanningResult, plan_of
from shardwise.runtime.generation import current, plan_file
from shardwise.train.agreement import rank_and_world_size

_turns = count()  # a script may have several plans


def planned(make: Callable[[], Plan | PlanningResult]) -> Plan | PlanningResult | None:
    """What ``make()`` returns on rank 0, and None on other ranks, as ``sw.parallelize`` takes it.

    Under ``shardwise run --elastic`` it is asked once per job and number of ranks; later generations find the plan.
    While training goes on, a further process of low priority runs the script up to here as rank 0 of as many ranks as
    there would be after the next loss, so that its plan is ready by then. ``make`` plans for ``sw.world_size()`` ranks;
    call this after ``sw.init_ranks``.
    """
    generation, turn = current.generation, next(_turns)
    rank, num_ranks = rank_and_world_size()
    if rank:
        return None
    if generation is None:
        return make()
    path = Path(generation.memory, plan_file(generation.rehearses or num_ranks, turn))
    plan: Plan | None = None
    if path.exists():
        try:
            plan = Plan.load(path)
        except ShardwiseError:  # of another version, in a job that was updated beneath
            path.unlink()
    if plan is None:
        plan = plan_of(make())
        part = path.with_suffix(f".{os.getpid()}")
        plan.save(part)
        part.rename(path)
    if generation.rehearses:
        sys.exit(0)
    return plan


__all__ = ["planned"]
