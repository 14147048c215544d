"""How much of a job's time trains, from failure statistics: a renewal process in closed form.

Interruptions come at a constant rate (one per ``hours_between`` hours of a device). Each costs its detection and the
restart, in which the next one may come. Behind it lies work to do again:

* If the state survives in memory, the work since it was kept there: a part of a step, or of the steps between copies.
* Else the work since the last complete checkpoint. Saves begin every ``T`` seconds of training, stall it for ``s``, and
  are complete ``W`` later. Between two returns to a checkpoint, at the rate ``m`` of these, the number of saves that
  complete is ``exp(-m W) / (exp(m (T + s)) - 1)`` in the mean, and each keeps ``T`` seconds of work. With ``W = 0`` and
  no states in memory this is Daly's formula (J. T. Daly, A higher order estimate of the optimum checkpoint interval,
  2006, eq. 20).

A simulation of the same events checks it (tests/costs/test_effective_time.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, expm1, inf, log

from shardwise.costs.failures import FailureStatistics
from shardwise.costs.prediction import Interval

DAY_SECONDS = 86400.0
_LONGEST_SECONDS = 30 * DAY_SECONDS  # between saves
_LARGEST_POWER = 700.0  # of e, in a float


@dataclass(frozen=True, slots=True)
class Recoveries:
    """Interruptions of one kind. ``rate``: per second; ``down``: seconds without training; ``again``: seconds of work
    to do again, in the mean, where the state is in memory."""

    rate: float
    down: float
    again: float = 0.0


@dataclass(frozen=True, slots=True)
class TrainingProcess:
    """Training, saves and interruptions of a job.

    Args:
        kept: Interruptions after which the state is in memory.
        lost: Interruptions after which training goes back to a checkpoint.
        stall: Seconds for which a save stops training.
        duration: Seconds from the begin of a save until it is complete.
        overhead: Share of training time that copies in memory take in addition.
    """

    kept: Sequence[Recoveries]
    lost: Recoveries
    stall: float
    duration: float
    overhead: float = 0.0

    @property
    def rate(self) -> float:
        return self.lost.rate + sum(kind.rate for kind in self.kept)

    @property
    def down_share(self) -> float:
        """Return seconds without training per second of training: an interruption may come while another is handled,
        which begins that again."""
        return sum(
            kind.rate * (expm1(self.rate * kind.down) / self.rate if self.rate else kind.down)
            for kind in (*self.kept, self.lost)
        )

    def share(self, every: float) -> float:
        """Return the share of time that trains, with a save every ``every`` seconds of training; 0 to 1."""
        net = 1.0 - sum(kind.rate * kind.again for kind in self.kept)
        if net <= 0:
            return 0.0
        returns = self.lost.rate / net
        period = every + self.stall
        if returns * (period + self.duration) > _LARGEST_POWER:  # no save ever completes
            return 0.0
        progress = every / period
        if returns:
            progress = returns * every * exp(-returns * self.duration) / expm1(returns * period)
        return net * progress / (1.0 + self.down_share) / (1.0 + self.overhead)

    def best_interval(self) -> float:
        """Return the seconds of training between saves with the largest share; infinite if no save helps."""
        if not self.lost.rate:
            return inf
        from scipy.optimize import minimize_scalar

        least = max(self.duration, 1.0)  # the next save waits for the last
        found = minimize_scalar(
            lambda power: -self.share(exp(power)), bounds=(log(least), log(_LONGEST_SECONDS)), method="bounded"
        )
        return max((least, float(exp(found.x))), key=self.share)  # the minimum may be at the bound

    def scaled(self, factor: float) -> TrainingProcess:
        """Return the process with ``factor`` times as many interruptions."""
        kinds = [Recoveries(kind.rate * factor, kind.down, kind.again) for kind in (*self.kept, self.lost)]
        return TrainingProcess(kinds[:-1], kinds[-1], self.stall, self.duration, self.overhead)

    def interval(self, every: float, statistics: FailureStatistics, num_devices: int, days: float) -> Interval:
        """Return the share of a period that trains, and between which shares it is nine times of ten."""
        mean, fewest, most = statistics.count_between(num_devices, days * DAY_SECONDS)
        value = self.share(every)
        low, high = (self.scaled(count / mean).share(every) if mean else value for count in (most, fewest))
        return Interval(value, low, high)
