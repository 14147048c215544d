"""Describe the generations of an elastic job (``shardwise run --elastic``): all ranks restart when one is lost.

Data that a generation needs from earlier ones is in an in-memory folder that outlives the processes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field

GENERATION = "SHARDWISE_GENERATION"  # environment variable set by the launcher


@dataclass(frozen=True, slots=True)
class Generation:
    """One generation of a job. ``number``: from 0; ``memory``: the folder; ``suspect``: the last one ended because
    copies differed, so unchecked data is not trusted; ``rehearses``: if not 0, the process only plans for this number
    of ranks and exits; ``num_machines``: of the job at its start, each with its own folder."""

    number: int
    memory: str
    suspect: bool = False
    rehearses: int = 0
    num_machines: int = 1

    def to_text(self) -> str:
        return json.dumps(asdict(self))


def read_generation(environment: Mapping[str, str]) -> Generation | None:
    """Return this process's generation; None if the job is not elastic."""
    text = environment.get(GENERATION)
    return None if text is None else Generation(**json.loads(text))


@dataclass(slots=True)
class Current:
    """Holder of this process's ``generation``, set once it has joined the other ranks (``init_ranks``)."""

    generation: Generation | None = None


# Not a cache: a process is a rank of one generation at a time.
current = Current()


class GenerationEnded(BaseException):
    """Leaves the script of a generation that has ended, in a process that may take part in the next one. No Exception:
    a script that handles errors of a step does not handle this one."""


@dataclass(slots=True)
class ProcessState:
    """What modules keep for one generation: functions that put it back to what it is in a fresh process."""

    resets: list[Callable[[], None]] = field(default_factory=list)

    def at_end(self, reset: Callable[[], None]) -> Callable[[], None]:
        """Register a function to call when this process leaves a generation; usable as a decorator."""
        self.resets.append(reset)
        return reset

    def reset(self) -> None:
        current.generation = None
        for reset in self.resets:
            reset()


# Not a cache: the modules of a process register here when they are imported.
process_state = ProcessState()


def plan_file(num_ranks: int, turn: int) -> str:
    return f"plan-{turn}-of-{num_ranks}-ranks.json"
