"""How much of a period a job trains, with checkpoints alone and with copies of the state on other machines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import expm1, isfinite, prod
from typing import Any

from shardwise.costs.cluster import Cluster
from shardwise.costs.effective_time import DAY_SECONDS, Recoveries, TrainingProcess
from shardwise.costs.failures import FailureStatistics
from shardwise.costs.prediction import Interval
from shardwise.errors import ShardwiseError
from shardwise.plans.quantities import format_seconds
from shardwise.plans.survival import Survival
from shardwise.untrusted_text import is_number

_STALL_SECONDS = 1.5e-3  # of a save beside the copy itself: measured (make bench-checkpoints)
_COPY_STEPS = 10  # as sw.Recovery copies in an elastic job on several machines
_CURVE_SECONDS = 60.0, 300.0, 900.0, 3600.0, 14400.0  # between saves


@dataclass(frozen=True)
class SavingPolicy:
    """A way to keep the state. ``copies``: on other machines; ``every``: seconds of training between checkpoints, the
    best; ``share``: of the time that trains; ``curve``: the share for other intervals."""

    copies: bool
    every: float
    stall: float
    duration: float
    share: Interval
    curve: Mapping[float, float]


@dataclass(frozen=True)
class TrainingTime:
    """The predicted share of a period that trains; printable.

    Attributes:
        days: The period.
        num_devices: Devices of the job.
        step_seconds: Predicted seconds of a step.
        statistics: Failure statistics of the cluster.
        interruptions: The expected number, and between which it is nine times of ten.
        policies: Ways to keep the state, the best first.
    """

    days: float
    num_devices: int
    step_seconds: float
    statistics: FailureStatistics
    interruptions: Interval
    policies: tuple[SavingPolicy, ...]

    @property
    def share(self) -> Interval:
        return self.policies[0].share

    def __str__(self) -> str:
        count = self.interruptions
        lines = [
            f"of {self.days:g} days {_percent(self.share)} train, with {count.value:,.3g} interruptions "
            f"({count.low:,.0f}-{count.high:,.0f}), each noticed in {format_seconds(self.statistics.detection)} and "
            f"restarted in {format_seconds(self.statistics.restart)}"
        ]
        for policy in self.policies:
            what = f"with copies on other machines every {_COPY_STEPS} steps" if policy.copies else "checkpoints alone"
            steps = max(1, round(float(f"{policy.every / self.step_seconds:.3g}")))  # no more digits than the seconds
            lines.append(
                f"  {what}: {_percent(policy.share)}, a checkpoint every {format_duration(policy.every)} "
                f"({steps:,} steps), which stalls for {format_seconds(policy.stall)} and is complete after "
                f"{format_seconds(policy.duration)}"
            )
            curve = ", ".join(f"every {format_duration(every)} {share:.1%}" for every, share in policy.curve.items())
            lines += [f"    {curve}"] if curve else []
        return "\n".join(lines)

    def as_data(self) -> dict[str, Any]:
        """Return the data that ``--json`` prints."""
        count = self.interruptions
        return {
            "days": self.days,
            "interruptions": count.value,
            "interruptions_between": [count.low, count.high],
            "policies": [
                {
                    "copies": policy.copies,
                    "share": policy.share.value,
                    "share_between": [policy.share.low, policy.share.high],
                    "checkpoint_every_seconds": policy.every,
                    "stall_seconds": policy.stall,
                    "save_seconds": policy.duration,
                    "curve": [list(point) for point in policy.curve.items()],
                }
                for policy in self.policies
            ],
        }


def training_time(survival: Survival, cluster: Cluster, step_seconds: float, days: float) -> TrainingTime:
    """Predict how much of a period trains.

    Interruptions that end processes only lose a part of a step (``shardwise run --elastic``). Those that take a machine
    go back to the last complete checkpoint, or to the copies on other machines.

    Args:
        survival: The state that ranks hold, by machines (``plan.survives(ranks_per_machine)``).
        cluster: A cluster with failure statistics.
        step_seconds: Seconds of a step.
        days: The period.

    Returns:
        The shares, best first.

    Raises:
        ShardwiseError: The cluster has no failure statistics, or a number is not positive.
    """
    statistics = cluster.failures
    if statistics is None or not statistics.store:
        what = "no failure statistics" if statistics is None else "no speed of its store of checkpoints"
        fix = "give [failures] in the cluster file, or --mtbf and --store"
        raise ShardwiseError(f"{cluster.name} has {what}, from which the time that trains follows", fix=fix)
    for name, number in (("days", days), ("step_seconds", step_seconds)):
        if not (is_number(number) and number > 0 and isfinite(number)):
            raise ShardwiseError(f"{name} must be a positive number, got {number!r}")
    num_devices = sum(len(machine) for machine in survival.machines)
    written = sum(sum(tensors.values()) for tensors in survival.held.values()) / num_devices
    read = sum(len(holders) * sum(tensors.values()) for holders, tensors in survival.held.items()) / num_devices
    to_host = written / (cluster.device.host_bandwidth or cluster.device.memory_bandwidth)
    stall = to_host + _STALL_SECONDS
    duration, load = stall + written / statistics.store, read / statistics.store
    rate, share = statistics.rate(num_devices), statistics.machine_share
    down = statistics.detection + statistics.restart
    process_loss = Recoveries(rate * (1 - share), down, step_seconds / 2)
    machine_rate, num_machines = rate * share, len(survival.machines)
    plain = TrainingProcess([process_loss], Recoveries(machine_rate, down + load), stall, duration)
    processes = [(False, plain)]
    if num_machines > 1:
        repeated = step_seconds * (_COPY_STEPS / 2 + 1)  # copies are sent beside the next step
        window = down + 2 * repeated  # in which the one machine that has a copy may be lost as well
        both = machine_rate * -expm1(-machine_rate / num_machines * window)
        kinds = [process_loss, Recoveries(machine_rate - both, down, repeated)]
        overhead = 2 * to_host / (_COPY_STEPS * step_seconds)
        lost = Recoveries(both, down + load)
        processes.append((True, TrainingProcess(kinds, lost, stall, duration, overhead)))
    policies = []
    for copies, process in processes:
        every = max(process.best_interval(), step_seconds)
        curve = {at: process.share(at) for at in _CURVE_SECONDS if at >= max(duration, step_seconds)}
        between = process.interval(every, statistics, num_devices, days)
        policies.append(SavingPolicy(copies, every, stall, duration, between, curve))
    policies.sort(key=lambda policy: -policy.share.value)
    count = Interval(*statistics.count_between(num_devices, days * DAY_SECONDS))
    return TrainingTime(days, num_devices, step_seconds, statistics, count, tuple(policies))


def format_duration(seconds: float) -> str:
    """Format seconds, minutes or hours with three significant digits."""
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return format_seconds(seconds)


def ranks_per_machine(cluster: Cluster) -> int:
    """Return how many devices are lost with a machine: those of all levels below the last."""
    return prod(level.size for level in cluster.levels[:-1]) if len(cluster.levels) > 1 else cluster.num_devices


def _percent(share: Interval) -> str:
    between = f" ({share.low:.1%}-{share.high:.1%})" if share.low < share.high else ""
    return f"{share.value:.1%}{between}"
