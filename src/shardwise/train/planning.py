"""``sw.planned``: plan once per number of ranks in an elastic job, and ahead of time for the next loss."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path

from shardwise.errors import ShardwiseError
from shardwise.plans.plan import Plan
from shardwise.plans.result import PlanningResult, plan_of
from shardwise.runtime.agree import rank_and_world_size
from shardwise.runtime.generation import current, plan_file, process_state

_turns = count()  # of this generation: a script may have several plans


@process_state.at_end
def _reset_turns() -> None:
    global _turns
    _turns = count()


def planned(make: Callable[[], Plan | PlanningResult]) -> Plan | PlanningResult | None:
    """Return the plan of ``make()`` on rank 0, and None on other ranks, as ``sw.parallelize`` takes it.

    Under ``shardwise run --elastic`` the plan is made once per job and number of ranks, and later generations reuse it.
    During training a low-priority process runs the script up to this call, as rank 0 of the number of ranks after the
    next loss, so that the plan is ready by then. Call this after ``sw.init_ranks``.

    Args:
        make: returns a plan for ``sw.world_size()`` ranks.

    Returns:
        The plan on rank 0, None on other ranks.
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
        except ShardwiseError:  # shardwise was updated during the job
            path.unlink()
    if plan is None:
        plan = plan_of(make())
        part = path.with_suffix(f".{os.getpid()}")
        plan.save(part)
        part.rename(path)
    if generation.rehearses:
        sys.exit(0)
    return plan
