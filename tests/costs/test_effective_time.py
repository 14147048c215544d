"""How much of a month trains: the closed form against events that are simulated one by one, and published runs."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

import shardwise as sw
from shardwise.costs.effective_time import Recoveries, TrainingProcess
from shardwise.costs.failures import FailureStatistics


def simulated(process: TrainingProcess, every: float, seconds: float, seed: int) -> float:
    """The share of time that trains, event by event: training, saves beside it, interruptions, also while one is being
    handled. Nothing of the closed form is in it."""
    draw = random.Random(seed)
    kinds = [*process.kept, process.lost]
    now = done = saved = 0.0
    begins: list[tuple[float, float]] = []  # (when a save is complete, the work it has), of those under way
    since = 0.0  # work since the last save began

    def next_fault() -> float:
        return now + draw.expovariate(process.rate)

    fault = next_fault()
    while now < seconds:
        pace = 1.0 / (1.0 + process.overhead)
        until = now + (every - since) / pace
        if until < fault:  # train up to the next save, which stalls
            done += every - since
            now, since = until, 0.0
            begins.append((now + process.duration, done))
            if now + process.stall < fault:
                now += process.stall
                continue
            now = fault
        else:
            done += (fault - now) * pace
            since += (fault - now) * pace
            now = fault
        complete = [work for when, work in begins if when <= now]
        saved = max([saved, *complete])
        begins = [entry for entry in begins if entry[0] > now]
        kind = draw.choices(kinds, [kind.rate for kind in kinds])[0]
        while True:  # detection and restart, in which another one may come
            fault = next_fault()
            if fault > now + kind.down:
                now += kind.down
                break
            now = fault
        if kind is process.lost:
            done, since, begins = saved, 0.0, []
        else:
            lost = min(draw.uniform(0.0, 2.0 * kind.again), since)
            done -= lost
            since -= lost
    return done / now


HOUR = 3600.0
PROCESSES = {
    "checkpoints alone, rare faults": (TrainingProcess((), Recoveries(1 / (10 * HOUR), 300.0), 5.0, 60.0), 1800.0),
    "a fault every 20 minutes": (TrainingProcess((), Recoveries(1 / 1200.0, 120.0), 2.0, 30.0), 200.0),
    "slow saves": (TrainingProcess((), Recoveries(1 / (3 * HOUR), 600.0), 0.0, 900.0), 900.0),
    "half of the states in memory": (
        TrainingProcess([Recoveries(1 / (2 * HOUR), 60.0, 10.0)], Recoveries(1 / (4 * HOUR), 500.0), 10.0, 100.0, 0.01),
        1200.0,
    ),
    "copies on machines": (
        TrainingProcess(
            [Recoveries(1 / HOUR, 20.0, 5.0), Recoveries(1 / (3 * HOUR), 400.0, 150.0)],
            Recoveries(1 / (30 * HOUR), 900.0), 20.0, 200.0, 0.02,
        ),
        3600.0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PROCESSES)
def test_the_share_that_trains_is_that_of_simulated_months(name: str) -> None:
    process, every = PROCESSES[name]
    shares = [simulated(process, every, 90 * 24 * HOUR, seed) for seed in range(20)]
    assert process.share(every) == pytest.approx(sum(shares) / len(shares), abs=0.01)


def test_without_states_in_memory_it_is_dalys_formula() -> None:
    for rate, down, stall, every in ((1e-4, 300.0, 20.0, 600.0), (1e-3, 60.0, 5.0, 100.0)):
        process = TrainingProcess((), Recoveries(rate, down), stall, 0.0)
        took = math.exp(rate * down) * (math.exp(rate * (every + stall)) - 1) / rate
        assert process.share(every) == pytest.approx(every / took, rel=1e-12)


@pytest.mark.parametrize("name", PROCESSES)
def test_no_other_interval_is_better_than_the_best(name: str) -> None:
    process, _ = PROCESSES[name]
    best = process.best_interval()
    assert best >= process.duration
    others = [max(process.duration, best * factor) for factor in (0.25, 0.5, 0.9, 1.1, 2.0, 4.0)]
    assert all(process.share(best) >= process.share(other) - 1e-9 for other in others)
    young = TrainingProcess((), Recoveries(1e-6, 300.0), 10.0, 0.0)
    assert young.best_interval() == pytest.approx(math.sqrt(2 * 10.0 / 1e-6), rel=0.01)  # Young's first order


def test_the_interval_has_the_uncertainty_of_the_count_and_the_luck_of_a_month() -> None:
    statistics = FailureStatistics(45_566, interruptions=466)
    mean, low, high = statistics.count_between(16_384, 54 * 24 * HOUR)
    assert mean == pytest.approx(466, abs=1)
    assert (low, high) == (pytest.approx(416, abs=2), pytest.approx(517, abs=2))  # 1.645 * sqrt(2 * 466) = 50
    exact = replace(statistics, interruptions=0.0).count_between(16_384, 54 * 24 * HOUR)
    assert low < exact[1] < mean < exact[2] < high
    process = TrainingProcess((), Recoveries(statistics.rate(16_384), 360.0), 5.0, 60.0)
    month = process.interval(600.0, statistics, 16_384, 30.0)
    assert month.low < month.value < month.high
    year = process.interval(600.0, statistics, 16_384, 360.0)
    assert month.low < year.low < year.high < month.high


def test_the_run_of_llama_3_trained_for_more_than_nine_tenths_of_its_time() -> None:
    """Published: 466 interruptions in 54 days on 16,384 H100, more than 90 % effective training time."""
    cluster = sw.Cluster.load("h100-2048x8")
    statistics = cluster.failures
    assert statistics is not None
    assert 54 * 24 * HOUR * statistics.rate(cluster.num_devices) == pytest.approx(466, abs=1)
    state = 405e9 * 14 / cluster.num_devices  # bytes of a device: bf16 weights, float32 weights and two states
    save = TrainingProcess(
        (), Recoveries(statistics.rate(cluster.num_devices), statistics.detection + statistics.restart),
        state / 55e9, state / statistics.store,
    )  # fmt: skip
    share = save.interval(save.best_interval(), statistics, cluster.num_devices, 54.0)
    assert 0.90 < share.low < share.high < 0.98
