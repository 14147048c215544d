"""Failure statistics of a cluster, and how many interruptions follow from them."""

from __future__ import annotations

from dataclasses import dataclass

HOUR_SECONDS = 3600.0
_TAILS = 0.05, 0.95  # nine of ten, as all intervals


@dataclass(frozen=True, slots=True)
class FailureStatistics:
    """Failure statistics of a cluster.

    Args:
        hours_between: Hours of one device between two interruptions: devices times hours of a run, by interruptions.
        interruptions: How many were counted, from which the uncertainty follows; 0: the rate is taken as exact.
        machine_share: Share of interruptions in which a machine is lost with its memory; the others end processes.
        detection: Seconds until an interruption is noticed.
        restart: Seconds from there to the first step, without reading a checkpoint.
        store: Bytes per second and device to and from checkpoints; 0: not known.
    """

    hours_between: float
    interruptions: float = 0.0
    machine_share: float = 1.0
    detection: float = 60.0
    restart: float = 300.0
    store: float = 0.0

    def rate(self, num_devices: int) -> float:
        """Return interruptions per second of a job."""
        return num_devices / (self.hours_between * HOUR_SECONDS)

    def count_between(self, num_devices: int, seconds: float) -> tuple[float, float, float]:
        """Return how many interruptions a job has: the mean, and between which numbers it is nine times of ten. The
        number of a period is Poisson, and its rate as uncertain as the interruptions counted (Jeffreys' prior)."""
        from scipy.stats import nbinom, poisson  # takes half a second, which few need

        mean = self.rate(num_devices) * seconds
        if not self.interruptions:
            low, high = (float(poisson.ppf(tail, mean)) for tail in _TAILS)
        else:
            shape, counted = self.interruptions + 0.5, self.interruptions
            low, high = (float(nbinom.ppf(tail, shape, counted / (counted + mean))) for tail in _TAILS)
        return mean, low, high
