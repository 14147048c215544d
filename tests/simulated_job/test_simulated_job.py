"""The real launchers, heads and hang detectors of many machines on a simulated clock and network, with faults."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardwise.launch import coordinator, job, node_agent
from shardwise.train import data, saving
from simulated_job import laws, sweep
from simulated_job.simulated_launchers import Setting, SimulatedJob
from simulated_job.simulated_time import SimulationError
from simulated_job.simulated_training import Training

FOUR = Setting(4, min_ranks=8, num_steps=5)
Fault = Callable[[SimulatedJob], object]

FAULTS: dict[str, tuple[Fault, str]] = {
    "a rank is killed": (lambda run: run.kill_rank(13), "rank 13 was killed by SIGKILL after step 3"),
    "a rank of the head's machine is killed": (lambda run: run.kill_rank(5), "rank 5 was killed by SIGKILL"),
    "rank 0 is killed": (lambda run: run.kill_rank(0), "rank 0 was killed by SIGKILL"),
    "a rank is stopped": (lambda run: run.stop_rank(13), "rank 13 gave no sign of life for 10 seconds"),
    "a script fails": (lambda run: run.fail_rank(21, ValueError("bad")), "rank 21 failed with exit code 1 .ValueError"),
    "a machine loses its power": (lambda run: run.end_machine(2), "machine 2 with ranks"),
    "a launcher is killed": (lambda run: run.end_machine(3, by_power=False), "machine 3 with ranks .* is gone"),
    "the head loses its power": (lambda run: run.end_machine(0), "machine 0, the head, is silent after step 3"),
    "the head is killed": (lambda run: run.end_machine(0, by_power=False), "machine 0, the head, is gone after step 3"),
    "two ranks at once": (lambda run: (run.kill_rank(5), run.kill_rank(20)), "rank (5|20) was killed"),
    "a rank and its machine": (
        lambda run: (run.kill_rank(13), run.end_machine(1, by_power=False)), "(rank 13|machine 1)"
    ),
    "two machines at once": (
        lambda run: [run.end_machine(node, by_power=False) for node in (1, 2)], "machine 1 .*; machine 2"
    ),
}  # fmt: skip


def simulated(fault: Fault, setting: Setting = FOUR, step: int = 3) -> SimulatedJob:
    run = SimulatedJob(setting)
    run.when_step(step, lambda: fault(run))
    return run.run()


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("name", FAULTS)
def test_the_job_goes_on_and_names_who_is_at_fault(name: str, keeps: bool) -> None:
    fault, expected = FAULTS[name]
    run = simulated(fault, replace(FOUR, keeps=keeps))
    assert set(run.codes()) == {0}
    again = [rank for rank in run.cluster.ranks if rank.generation == 1 and rank.code == 0]
    pids = {(rank.machine.node, rank.pid) for rank in run.cluster.ranks if rank.generation == 0}
    num_kept = sum((rank.machine.node, rank.pid) in pids for rank in again)
    num_replaced = int(name == "two ranks at once")  # fewer go on without the other one
    assert num_kept == (len(again) - num_replaced if keeps else 0)
    said = [text for _, text in run.simulation.trace if "; generation 1 goes on" in text]
    assert said
    assert all(re.search(expected, text) for text in said), said


def test_the_same_seed_gives_the_same_run_and_another_seed_another_one() -> None:
    first, again, other = (
        simulated(FAULTS["a machine loses its power"][0], replace(FOUR, seed=seed)).simulation.trace
        for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


@pytest.mark.parametrize("node", [0, 2])  # the head's, and another one
@pytest.mark.parametrize("seconds", [86400.0, -86400.0])
def test_a_clock_that_jumps_changes_nothing(node: int, seconds: float, tmp_path: Path) -> None:
    def jump(run: SimulatedJob) -> None:
        run.machines[node].skew += seconds

    run = SimulatedJob(Setting(3, 2, min_ranks=2), Training(tmp_path / "run", save_every=2))
    run.when_step(3, lambda: jump(run))
    assert run.run().codes() == [0, 0, 0]
    assert run.worlds.newest == 0, "no generation ends for it"
    run = SimulatedJob(Setting(3, 2, min_ranks=2), Training(tmp_path / "lost", save_every=2))
    run.when_step(3, lambda: jump(run))
    run.when_step(5, lambda: run.kill_rank(2 * node + 1))  # and the one at fault is named as ever (``run.check``)
    run.run()
    assert run.training is not None
    assert run.training.resumed == [(0, 0), (1, 5)]


def test_the_smaller_part_of_a_divided_network_does_not_train() -> None:
    for node in (0, 3):
        run = simulated(lambda run, node=node: run.divide([node]))
        assert [machine.code for machine in run.machines] == [int(other == node) for other in range(4)]


@pytest.mark.parametrize(
    ("late_by", "joins_again"), [(20.0, 0), (15.15, 1)]
)  # later than the one after it, and beside it
def test_a_next_head_that_is_late_does_not_lead_beside_the_one_after_it(
    late_by: float, joins_again: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    follow = node_agent.NodeAgent._follow

    def late(self: node_agent.NodeAgent) -> int | None:
        if self.node == 1:
            node_agent.time.sleep(late_by)
        return follow(self)

    monkeypatch.setattr(node_agent.NodeAgent, "_follow", late)
    run = simulated(FAULTS["the head is killed"][0])
    assert run.codes() == [0, 0, 0]
    assert run.worlds.newest == 1
    assert len([text for _, text in run.simulation.trace if "asks to join again" in text]) == joins_again


def test_a_machine_that_is_back_behind_a_cut_takes_part_again() -> None:
    def cut(run: SimulatedJob) -> None:
        run.divide([3])
        run.simulation.at(run.simulation.now + 14.0, run.unite)

    run = simulated(cut, replace(FOUR, num_steps=40))
    assert run.codes() == [0, 0, 0, 0]
    assert run.worlds.newest == 2


@pytest.mark.parametrize("seconds", [9.0, 27.0])
@pytest.mark.parametrize(("node", "heirs"), [(1, coordinator._NUM_HEIRS), (7, 3)], ids=["next head", "never leads"])
def test_a_machine_that_is_cut_off_as_the_head_is_killed_does_not_train_beside_the_others_and_takes_part_again(
    seconds: float, node: int, heirs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator, "_NUM_HEIRS", heirs)

    def fault(run: SimulatedJob) -> None:
        run.end_machine(0, by_power=False)
        run.divide([node])
        run.simulation.at(run.simulation.now + seconds, run.unite)

    run = simulated(fault, Setting(8, 2, min_ranks=2, num_steps=60))
    assert run.codes() == [0] * 7


def test_launchers_that_have_ended_count_for_no_side_of_a_network_that_may_be_divided() -> None:
    def fault(run: SimulatedJob) -> None:
        run.end_machine(0, by_power=False)
        run.end_machine(len(run.machines) - 1)

    for machines, code in ((4, 0), (3, 1)):  # left are 2 of 3, and 1 of 2
        assert set(simulated(fault, Setting(machines, 2, min_ranks=2, num_steps=30)).codes()) == {code}


def test_a_switch_that_takes_the_head_and_the_next_seven_costs_less_than_half_a_minute() -> None:
    for by_power in (False, True):
        setting = Setting(20, 2, min_ranks=2, num_steps=5)
        run = simulated(lambda run, by=by_power: [run.end_machine(node, by_power=by) for node in range(8)], setting)
        assert run.codes() == [0] * 12
        assert run.seconds_to_go_on()[0] < 30


@pytest.mark.long
def test_a_switch_takes_the_head_and_the_next_31_of_512_launchers() -> None:
    setting = Setting(512, 1, min_ranks=8, num_steps=5)
    run = simulated(lambda run: [run.end_machine(node) for node in range(32)], setting)
    assert run.codes() == [0] * 480
    assert run.seconds_to_go_on()[0] < 30


# ----------------------------------------------------------------------------------- training, copies and checkpoints


def trained(folder: Path, fault: Fault | None = None, machines: int = 3, **named: Any) -> SimulatedJob:
    run = SimulatedJob(Setting(machines, 2, min_ranks=2), Training(folder, **named))
    if fault is not None:
        run.when_step(5, lambda: fault(run))
    return run.run()


@pytest.mark.parametrize("blocking", [True, False])
def test_no_sample_is_lost_or_repeated_and_every_save_is_whole_or_absent(tmp_path: Path, blocking: bool) -> None:
    lost_rank = trained(tmp_path / "rank", lambda run: run.kill_rank(3), blocking=blocking)
    assert lost_rank.training is not None
    assert lost_rank.training.resumed == [(0, 0), (1, 5)]
    lost_machine = trained(tmp_path / "machine", lambda run: run.end_machine(1), blocking=blocking)
    assert lost_machine.training is not None
    assert lost_machine.training.resumed == [
        (0, 0),
        (1, 4),
    ]  # the copies are of every tenth step: a checkpoint is newer


def test_a_slow_rank_is_named(tmp_path: Path) -> None:
    run = SimulatedJob(Setting(3, 2), Training(tmp_path, num_steps=22))
    run.when_step(1, lambda: setattr(run.machines[1], "slow", 1.5))
    run.run()
    assert run.training is not None
    assert sorted(text[:10] for text in run.training.warned) == ["rank 2 is ", "rank 3 is "]


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_random_faults_at_random_moments_lose_nothing(seed: int, keeps: bool, tmp_path: Path) -> None:
    sweep.window(seed, tmp_path, most_ranks=8, keeps=keeps)


def test_a_rank_that_does_not_come_to_a_collective_is_replaced_and_frees_those_that_wait_for_it() -> None:
    run = SimulatedJob(Setting(4, num_steps=5, keeps=True))
    run.when_step(2, lambda: setattr(run.machines[2], "slow", 4.0))  # a step longer than a rank may take to leave
    run.when_step(4, lambda: run.kill_rank(5))
    run.run()
    said = {text for _, text in run.simulation.trace if "processes of the last one" in text}
    assert "machine 1: generation 1 has 8 of 8 processes of the last one" in said
    assert "machine 0: generation 1 has 7 of 8 processes of the last one" in said
    assert not any(text.startswith("machine 2") for text in said)
    assert run.seconds_to_go_on()[0] < 9.0


def test_a_generation_that_took_no_step_keeps_no_process() -> None:
    run = SimulatedJob(Setting(2, num_steps=5, keeps=True))
    run.when_step(2, lambda: run.kill_rank(3))
    run.when_step(2, lambda: run.kill_rank(9), seconds=1.9)  # as the ranks of generation 1 meet
    run.run()
    said = [text for _, text in run.simulation.trace if "processes of the last one" in text]
    assert {text.split()[3] for text in said} == {"1"}
    assert run.worlds.newest == 2


# --------------------------------------------------------------------------------------------------------------- laws


def test_what_a_launcher_does_does_not_grow_with_the_number_of_machines() -> None:
    def counts(machines: int) -> tuple[Counter[str], Counter[str]]:
        run = simulated(FAULTS["a rank is killed"][0], Setting(machines, 8, min_ranks=8, num_steps=4))
        every = run.counts_of_launchers()
        return every[0], every[-1]

    head, last = counts(8)
    larger_head, larger_last = counts(64)
    for name in ("connects", "messages sent", "messages received", "polls"):
        assert larger_last[name] < 1.3 * last[name] + 3, name
    for name in ("messages sent", "messages received", "accepts", "polls"):  # a few for each machine
        assert larger_head[name] < 1.2 * 8 * head[name], name


def test_what_a_rank_sends_hardly_grows_with_the_number_of_ranks(tmp_path: Path) -> None:
    def counts(machines: int) -> Counter[str]:
        setting = Setting(machines, 8)
        run = SimulatedJob(setting, Training(tmp_path / str(machines), num_steps=4, batch_size=8, save_every=2)).run()
        total: Counter[str] = Counter()
        for rank in run.cluster.ranks:
            total.update(rank.counts)
        return Counter({name: number // setting.num_ranks for name, number in total.items()})

    some, more = counts(2), counts(5)
    for name in ("rank messages", "file operations", "store requests"):
        assert more[name] < 1.2 * some[name], name


def test_what_a_rank_does_to_resume_after_a_loss_hardly_grows_with_the_number_of_ranks() -> None:
    """A rank hears of the files that its group needs, and of no others. First ranks of groups pass on what is more."""
    (_, some), (_, more) = laws.resumed(2), laws.resumed(8)
    for name in ("rank bytes", "rank messages", "rank connections", "store requests", "file operations"):
        assert more[name] < 1.1 * some[name] + 1, name


# ------------------------------------------------------------------------------------- faults in the launcher itself


def test_a_launcher_that_does_not_end_its_ranks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_until_decided(one: job.Job) -> int:
        while one.exit_code is None:
            one._turn()
        return one.exit_code

    monkeypatch.setattr(job.Job, "kill", lambda self: None)
    monkeypatch.setattr(job.Job, "_stop", lambda self, others, failed: None)
    monkeypatch.setattr(job.Job, "run", run_until_decided)
    with pytest.raises(SimulationError, match="still runs"):
        simulated(FAULTS["a rank is killed"][0])


def test_a_head_that_begins_before_all_machines_have_ended_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def go_on(self: coordinator.Coordinator, now: float) -> None:
        if self.running and not self.stopping and (self.lost or any(m.ended and m.ended.code for m in self._active)):
            self._stop()
            self._decide(now)
        else:
            whole(self, now)

    whole = coordinator.Coordinator._go_on
    monkeypatch.setattr(coordinator.Coordinator, "_go_on", go_on)
    with pytest.raises(SimulationError):
        simulated(FAULTS["a rank is killed"][0])


def test_a_head_that_blames_the_wrong_rank_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "lost_rank", lambda cause, absent: replace(cause, rank=cause.rank ^ 1))
    with pytest.raises(SimulationError, match="names rank 12; at fault were"):
        simulated(FAULTS["a rank is killed"][0])


def test_two_halves_that_both_go_on_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    halve = lambda run: run.divide([2, 3])  # noqa: E731
    assert set(simulated(halve).codes()) == {0, 1}
    take_over = node_agent.NodeAgent._take_over
    monkeypatch.setattr(node_agent.NodeAgent, "_take_over", lambda self, left, silent: take_over(self, left, False))
    with pytest.raises(SimulationError, match="takes a step beside"):
        simulated(halve)


def test_a_save_that_is_complete_before_its_files_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def late(run: SimulatedJob) -> None:
        whole = saving.write

        def write(folder: Any, staged: Any, suffix: str = "") -> Any:
            written = whole(folder, staged, suffix)
            (folder.path / f"{staged.file.name}{suffix}").unlink()  # as if the note came first
            return written

        monkeypatch.setattr(saving, "write", write)

    run = SimulatedJob(Setting(2, 2), Training(tmp_path))
    run.when_step(2, lambda: late(run))
    with pytest.raises(SimulationError, match="is there and cannot be read"):
        run.run()


def test_a_loader_that_begins_anew_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(data.DataLoader, "load_state_dict", lambda self, state: None)
    with pytest.raises(SimulationError, match="step 6 has"):
        trained(tmp_path, lambda run: run.kill_rank(3))
