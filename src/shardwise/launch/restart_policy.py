"""Restart policy of an elastic job: whether to start another generation after a loss, and on which slots.

Standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardwise.errors import LaunchError
from shardwise.launch.hang_detector import count_ranks
from shardwise.launch.processes import Failure

_SAME_ERROR = 2  # times that an exception of the script may end a generation without a step in between


@dataclass(frozen=True, slots=True)
class ElasticConfig:
    """Settings of an elastic job. ``min_ranks``: minimum number of ranks (None: the initial number); ``spares``: slots
    of this machine that replace lost ones; ``max_failures``: losses without a step in between before the job ends;
    ``silent_seconds``: limit without a heartbeat, of a rank (while others send some) or a machine; ``idle_seconds``:
    limit outside the collective or pipeline exchange in which all others wait (None: its own timeout);
    ``wait_seconds``: how long to wait for machines, at the start and when too few are left; ``preload``: more modules
    to import once for all ranks; ``keeps``: whether processes of ranks that are not lost run the next generation."""

    min_ranks: int | None = None
    spares: int = 0
    max_failures: int = 10
    silent_seconds: float = 60.0
    idle_seconds: float | None = None
    wait_seconds: float = 600.0
    preload: Sequence[str] = ()
    keeps: bool = False

    def check(self, num_ranks: int) -> None:
        """Raise LaunchError for invalid values. ``num_ranks``: of all machines."""
        if self.min_ranks is not None and not 1 <= self.min_ranks <= num_ranks:
            what = f"--min-ranks {self.min_ranks} is not from 1 to the {num_ranks} ranks that start"
            raise LaunchError(what, fix="give the fewest ranks with which training should go on")
        if self.spares < 0 or self.max_failures < 0:
            raise LaunchError("--spares and --max-failures cannot be negative", fix="give 0 or more")
        if not self.silent_seconds > 1 or (self.idle_seconds is not None and not self.idle_seconds > 0):
            what = "ranks send two heartbeats a second: --silent-after must be more than 1, --idle-after more than 0"
            raise LaunchError(what, fix="leave them out, or give a number of seconds")
        if not self.wait_seconds > 0:
            what = f"--wait-for-machines must be more than 0, got {self.wait_seconds:g}"
            raise LaunchError(what, fix="leave it out, or give a number of seconds")


@dataclass(slots=True)
class RestartPolicy:
    """Decides after each loss. ``num_ranks``: initial number; ``step``: the last step that a rank reported as done."""

    settings: ElasticConfig
    num_ranks: int
    step: int = -1
    num_failures: int = 0  # since the last step
    num_errors: int = 0  # of the script, since the last step

    @property
    def fewest(self) -> int:
        return self.num_ranks if self.settings.min_ranks is None else self.settings.min_ranks

    @property
    def after_step(self) -> str:
        return f" after step {self.step}" if self.step >= 0 else ""

    def reach(self, step: int) -> None:
        if step > self.step:
            self.step, self.num_failures, self.num_errors = step, 0, 0

    def why_end(self, *, by_the_script: bool) -> str:
        """Count a loss; return why the job must end, or an empty text to start another generation."""
        self.num_failures += 1
        self.num_errors += by_the_script
        if self.num_errors >= _SAME_ERROR:
            return "the script failed twice without a step in between: another generation would fail as well"
        if self.num_failures > self.settings.max_failures:
            return f"{self.num_failures} losses without a step in between: --max-failures {self.settings.max_failures}"
        return ""

    def replaced(
        self, slots: list[int], spares: list[int], lost: int, num_ranks: int
    ) -> tuple[list[int], list[int], str]:
        """Return (a machine's slots of the next generation, its remaining spares, a text on how the job goes on).
        ``lost``: the lost slot; ``num_ranks``: of all machines."""
        if spares:
            chosen, *rest = spares
            how = f"with slot {chosen} in place of slot {lost}"
            return [chosen if slot == lost else slot for slot in slots], rest, how
        if num_ranks > self.fewest:
            left = [slot for slot in slots if slot != lost]
            return left, spares, f"with {count_ranks(num_ranks - 1)}, without slot {lost}"
        return slots, spares, f"with a fresh process on slot {lost}"


def lost_rank(cause: Failure, absent: Sequence[int]) -> Failure:
    """Return the failure of the lost rank: the one that failed first, or the one that it waited for. ``absent``: ranks
    that were in no collective when they were stopped."""
    if cause.differs and cause.blames:
        return replace(cause, rank=cause.blames[0])
    if not cause.waited_in_vain:
        return cause
    named = [number for number in absent if number in cause.blames]  # ranks may also wait for what no page shows
    lost = next(iter(named or absent or cause.blames), None)
    if lost is None:
        return cause
    return replace(cause, rank=lost, killed_by="", traceback="", hangs="did not come to a collective of the others")
