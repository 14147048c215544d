"""Under ``shardwise run --elastic`` a job is a row of *generations*: when a rank is lost, all ranks begin anew.

What a generation needs of the earlier ones is in a folder in memory, which outlives the processes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

GENERATION = "SHARDWISE_GENERATION"  # the environment variable in which the launcher tells it


@dataclass(frozen=True, slots=True)
class Generation:
    """``number``: from 0; ``memory``: the folder; ``suspect``: the last one ended because copies differed, so that what
    no check has passed is not to be trusted; ``rehearses``: the process is no rank, but makes the plan for so many
    ranks, as a later generation may have, and ends; ``num_machines``: of the job at its start, each of which has a
    folder of its own."""

    number: int
    memory: str
    suspect: bool = False
    rehearses: int = 0
    num_machines: int = 1

    def to_text(self) -> str:
        return json.dumps(asdict(self))


def read_generation(environment: Mapping[str, str]) -> Generation | None:
    """This process's generation; None where the job has no others."""
    text = environment.get(GENERATION)
    return None if text is None else Generation(**json.loads(text))


@dataclass(slots=True)
class Current:
    """``generation``: this process's, once it has joined the other ranks (``init_ranks``)."""

    generation: Generation | None = None


# Not a cache: a process is a rank of one generation.
current = Current()


def plan_file(num_ranks: int, turn: int) -> str:
    """The name of a plan in the folder: the script's ``turn``-th, for so many ranks."""
    return f"plan-{turn}-of-{num_ranks}-ranks.json"


__all__ = ["GENERATION", "Current", "Generation", "current", "plan_file", "read_generation"]
