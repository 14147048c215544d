"""Eager and compiled steps take turns, ranks agree on the faster one, and it is remembered. No test depends on time:
watches show what they are told; no code is generated (``compiled.interpreted``)."""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from raising import raises
from runtime.staged_model import Staged, staged_batch
from shardwise.errors import PlanWarning
from shardwise.runtime import compile_benchmark, compiled
from shardwise.runtime.compile_benchmark import (
    MOST_STEPS,
    ROUND,
    WARM_UP,
    CompileBenchmark,
    CompiledVariant,
    CompileTrial,
    Stopwatch,
    TimedStep,
)
from shardwise.runtime.timing_cache import Times, TimesOnDisk

RunRanks = Callable[..., list[Any]]
CPU = torch.device("cpu")
ORDER = (*WARM_UP, *ROUND)
# The same kernels of float64, with sums in another order, through some steps of SGD.
TOLERANCE = 1e-11


class Told(Stopwatch):
    """A watch that shows what it was told."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.told = seconds

    @property
    def seconds(self) -> float:
        return self.told


def telling(eager: float, compiled: float) -> Callable[[torch.device], Stopwatch]:
    """Makes the watches of a trial, in the order of its turns."""
    turns = iter(ROUND * compile_benchmark.MOST_ROUNDS)
    return lambda device: Told(compiled if next(turns) else eager)


# ------------------------------------------------------------------------------------------------- one rank, no program


class Place:
    def device_of(self, rank: int) -> int:
        return rank


class Ranks:
    """This rank, and others that have measured ``others``."""

    def __init__(self, others: Sequence[Times] = ()) -> None:
        self.rank, self.place, self.others, self.messages = 0, Place(), others, 0
        self.mesh = sw.Mesh(dp=1 + len(others))

    def gather_from_all(self, row: Tensor, what: str) -> Tensor:
        self.messages += 1
        others = [[one.eager, one.compiled] for one in self.others]
        return torch.stack([row, *(torch.tensor(one, dtype=row.dtype) for one in others)])


class Keyed(CompileTrial):
    """A trial that is remembered under a given key."""

    def __init__(self, key: Mapping[str, str], *fields: Any) -> None:
        super().__init__(*fields)
        self.key = key

    def _key(self) -> Mapping[str, str]:
        return self.key


def trial_of(folder: Path, ranks: Any, key: Mapping[str, str] | None = None) -> CompileTrial:
    nothing: Any = None
    return Keyed(key or {"program": "a"}, CompileBenchmark("Net", TimesOnDisk(folder)), nothing, ranks, CPU)


def ran(trial: CompileTrial, steps: int, *, backward: bool = True) -> list[bool]:
    turns: list[TimedStep] = []
    for _ in range(steps):
        turns.append(trial.begin())
        turns[-1].is_complete = backward
    return [turn.compiled for turn in turns]


@pytest.mark.parametrize(
    ("eager", "compiled", "faster"), [(2, 1, True), (1, 2, False), (1, 0.995, False), (1, 0.985, True)]
)
def test_both_take_turns_and_the_faster_one_stays(
    eager: float,
    compiled: float,
    faster: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(compile_benchmark, "stopwatch_of", telling(eager, compiled))
    trial = trial_of(tmp_path, Ranks())
    assert ran(trial, len(ORDER)) == list(ORDER)
    assert trial.choice is None
    assert ran(trial, 3) == [faster] * 3
    assert trial.choice is faster is trial.is_preferred
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"runs {'compiled' if faster else 'eager'}: " in said
    # Another process remembers, and takes no turns.
    ranks = Ranks()
    again = trial_of(tmp_path, ranks)
    assert ran(again, 3) == [faster] * 3
    assert ranks.messages == 1
    assert "as measured before" in capsys.readouterr().err
    assert ran(trial_of(tmp_path, Ranks(), {"program": "a", "torch": "later"}), 2) == list(WARM_UP), "another key"


def test_a_step_is_as_fast_as_its_slowest_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_benchmark, "stopwatch_of", telling(2, 1))
    slow = trial_of(tmp_path / "slow", Ranks([Times(1, 3)]))
    ran(slow, len(ORDER) + 1)
    assert slow.choice is False
    monkeypatch.setattr(compile_benchmark, "stopwatch_of", telling(2, 1))
    failing = trial_of(tmp_path / "fails", Ranks([Times(1, math.inf)]))
    ran(failing, len(ORDER) + 1)
    assert failing.choice is False
    assert not list(tmp_path.glob("fails/*")), "that a rank cannot compile is not remembered"
    monkeypatch.setattr(compile_benchmark, "stopwatch_of", telling(2, 1))
    late = trial_of(tmp_path / "late", Ranks([Times(math.nan, 1)]))
    assert ran(late, len(ORDER) + 8) == [*ORDER, *ROUND], "another rank has timed too little"


def test_steps_without_backward_are_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compile_benchmark, "stopwatch_of", telling(2, 1))
    trial = trial_of(tmp_path, Ranks())
    ran(trial, MOST_STEPS, backward=False)
    assert trial.choice is None
    assert ran(trial, 1) == [False]
    assert "steps ran backward" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_failed_call_begins_a_trial_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_benchmark, "stopwatch_of", telling(2, 1))
    trial = trial_of(tmp_path, Ranks())
    ran(trial, 1)
    trial.trials.restart()
    assert ran(trial, len(ORDER)) == list(ORDER)
    ran(trial, 1)
    trial.trials.restart()
    assert ran(trial, 2) == [True, True], "what was agreed on stays"


def test_a_step_that_does_not_compile_runs_eager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_benchmark, "stopwatch_of", telling(2, 1))
    trial = trial_of(tmp_path, Ranks())
    calls: list[int] = []

    def make() -> str:
        calls.append(1)
        raise RuntimeError("no compiler\nat all")

    compiling = CompiledVariant(make, trial)
    compiling.begin()
    with pytest.warns(UserWarning, match=r"runs eager on rank 0, .* RuntimeError: no compiler; compile=True shows"):
        compiling.begin()
    for _ in range(len(ROUND) + 2):
        made, turn = compiling.begin()
        turn.is_complete = True
        assert made is None
    assert (len(calls), trial.choice, trial.is_preferred) == (1, False, False)
    with raises(RuntimeError, "at all"):
        CompiledVariant(make).begin()


def test_the_slower_variant_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_benchmark, "stopwatch_of", telling(1, 2))
    compiling = CompiledVariant(lambda: "compiled", trial_of(tmp_path, Ranks()))
    found = []
    for _ in range(len(ORDER) + 1):
        made, turn = compiling.begin()
        turn.is_complete = True
        found.append(made is not None)
    assert found == [*ORDER, False]
    assert compiling.variant is None


def test_a_turn_times_all_its_parts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now: Iterator[float] = iter([1.0, 2.0, 10.0, 15.0, 100.0, 200.0])
    monkeypatch.setattr("shardwise.runtime.compile_benchmark.time.perf_counter", lambda: next(now))
    turn = TimedStep(compiled=True, watch=Stopwatch())
    for _ in range(2):
        with turn.timed():
            pass
    turn.is_complete = True
    with turn.timed():  # a second backward of a retained graph
        pass
    assert turn.watch is not None
    assert turn.watch.seconds == 6.0


def test_on_a_gpu_events_of_its_stream_are_read_and_the_first_part_begins_when_it_is_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []
    times = iter([100.0, 103.0, 200.0, 211.0])

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: str) -> None:
            done.append(stream)
            self.at = next(times)

        def synchronize(self) -> None:
            done.append("wait")

        def elapsed_time(self, end: Event) -> float:
            return end.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: done.append(f"idle {device}"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    turn = TimedStep(compiled=True, watch=compile_benchmark.stopwatch_of(torch.device("cuda", 1)))
    for _ in range(2):
        with turn.timed():
            pass
    assert turn.watch is not None
    assert turn.watch.seconds == 0.014  # 3 + 11 ms; what is between the parts does not count
    assert done == ["idle cuda:1", *["stream of cuda:1"] * 4, "wait"]


# ------------------------------------------------------------------------------------------------------------ on disk


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "null", '{"version": 1}', "version", "key", "seconds", "negative", "nan", "\x00\xff"],
)
def test_a_file_that_says_nothing_is_ignored_with_a_sentence(content: str, tmp_path: Path) -> None:
    disk, key = TimesOnDisk(tmp_path), {"program": "a", "torch": "2"}
    disk.write(key, Times(2, 1))
    assert disk.read(key) == Times(2, 1)
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]
    own = json.loads(disk.path(key).read_text())
    changed = {
        "version": {**own, "version": 2},
        "key": {**own, "key": {"program": "b"}},
        "seconds": {**own, "eager_seconds": "fast"},
        "negative": {**own, "compiled_seconds": -1.0},
        "nan": {**own, "compiled_seconds": math.nan},
    }
    disk.path(key).write_bytes(
        json.dumps(changed[content]).encode() if content in changed else content.encode("latin1")
    )
    with pytest.warns(PlanWarning, match=r"\.json, which has no step times: "):
        assert disk.read(key) is None
    disk.write(key, Times(4, 3))
    assert disk.read(key) == Times(4, 3)
    assert disk.read({**key, "torch": "3"}) is None


@pytest.mark.parametrize("kind", ["fifo", "link", "folder"])
def test_what_is_no_file_of_the_users_is_not_waited_for(kind: str, tmp_path: Path) -> None:
    disk, key = TimesOnDisk(tmp_path / "shared"), {"program": "a"}
    disk.write(key, Times(2, 1))
    path = disk.path(key)
    path.rename(tmp_path / "elsewhere")
    {"fifo": os.mkfifo, "link": partial(os.symlink, tmp_path / "elsewhere"), "folder": os.mkdir}[kind](path)
    with pytest.warns(PlanWarning, match=r"\.json, which has no step times: "):
        assert disk.read(key) is None


def test_the_folder_is_the_users(tmp_path: Path) -> None:
    assert TimesOnDisk.of({"SHARDWISE_CACHE": "/a", "XDG_CACHE_HOME": "/b"}).folder == Path("/a/compile")
    assert TimesOnDisk.of({"XDG_CACHE_HOME": "/b"}).folder == Path("/b/shardwise/compile")
    assert TimesOnDisk.of({}).folder == Path.home() / ".cache/shardwise/compile"
    (tmp_path / "file").write_text("")
    assert "; not remembered: " in TimesOnDisk(tmp_path / "file" / "compile").write({"program": "a"}, Times(2, 1))


# ----------------------------------------------------------------------------------------------------------- on ranks


class Net(nn.Module):
    """Dropout, a running mean, two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.down(nn.functional.dropout(torch.tanh(self.up(x)), 0.3, self.training))
        y = self.norm(x + y)
        return y.square().mean(), y


def steps_beside_eager(
    made: Callable[..., Any], batches: Sequence[tuple[Tensor, ...]], between: Callable[[Any], Any] = lambda par: None
) -> tuple[list[bool], float, Any]:
    """Which turns a module took, and its largest difference to an eager one, in losses, gradients of every step,
    parameters and buffers."""
    pair, turns, worst = [made(compile="auto"), made(compile=False)], list[bool](), 0.0
    optimizers = [torch.optim.SGD(par.parameters(), lr=0.1) for par in pair]
    begin = CompileTrial.begin

    def noting(trial: CompileTrial) -> TimedStep:
        turn = begin(trial)
        turns.append(turn.compiled)
        return turn

    with mock.patch.object(CompileTrial, "begin", noting):
        for number, batch in enumerate(batches):
            found = []
            for par, optimizer in zip(pair, optimizers, strict=True):
                optimizer.zero_grad()
                if number % 2 or par.plan.is_pipeline or par.plan.micro_batches > 1:
                    losses = [par.step(*batch)]
                else:
                    loss, output = par(*batch)
                    loss.backward()
                    losses = [loss.detach(), output.detach()]
                gradients = [p.grad for p in par.parameters()]
                assert all(g is not None for g in gradients)
                found.append([*losses, *gradients, *(t.detach() for t in (*par.parameters(), *par.buffers()))])
                between(par)
                optimizer.step()
            worst = max(worst, *(float((a - b).abs().max()) for a, b in zip(*found, strict=True)))
    return turns, worst, pair[0]


def evaluated(par: Any) -> None:
    """Calls that are no training steps."""
    x = torch.ones(4, 8, dtype=torch.float64)
    with torch.no_grad():
        par.eval()(x)
        par.train()


def on_two_ranks(folder: str) -> dict[str, Any]:
    os.environ["SHARDWISE_CACHE"] = folder
    compiled.compile_with_inductor = compiled.interpret_section
    rank = dist.get_rank()
    torch.manual_seed(0)
    x = torch.randn(4, 8, dtype=torch.float64)
    found: dict[str, Any] = {}

    def whole(compile: Any) -> Any:
        torch.manual_seed(3)
        net = Net().double()
        plan = sw.plan(net, (x,), 2, mesh=sw.Mesh(tp=2), strategies={"up": "n@tp"}) if rank == 0 else None
        return sw.parallelize(net, plan, compile=compile, seed=5)

    # Steps and calls are two programs: turns of both, one after another. Ranks measure differently.
    both = [turn for turn in ORDER for _ in range(2)]
    for name, seconds in {"slow": (1.0, (0.5, 2.0)[rank]), "fast": ((3.0, 1.0)[rank], 2.0)}.items():
        for path in Path(folder).rglob("*.json") if rank == 0 else ():
            path.write_text("{" if name == "fast" else "")  # what is broken is measured again
        dist.barrier()
        watches = [telling(*seconds), telling(*seconds)]
        turn_of = iter(range(1000))
        compile_benchmark.stopwatch_of = lambda device, watches=watches, turn_of=turn_of: watches[next(turn_of) % 2](
            device
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            turns, worst, par = steps_beside_eager(whole, [(x + i,) for i in range(24)], evaluated)
        says = sum("has no step times" in str(w.message) for w in caught)
        want = [*both, *[name == "fast"] * 4]
        alone = [one.step._alone.keys() for one in par.compiled]
        found[name] = (turns == want, worst, says, [sorted(keys) for keys in alone])
    turns, worst, par = steps_beside_eager(whole, [(x,)] * 4)
    found["remembered"] = (turns == [True] * 4, worst, 0, [])

    def in_passes(compile: Any) -> Any:
        torch.manual_seed(3)
        net = Staged().double()
        plan = sw.plan(net, staged_batch(8), 2, mesh=sw.Mesh(dp=2), mode="data_parallel", global_batch=8, micro_batch=2)
        return sw.parallelize(net, plan, compile=compile, seed=5)

    def in_stages(compile: Any) -> Any:
        torch.manual_seed(3)
        net = Staged().double()
        plan = sw.plan(net, staged_batch(8), 2, stages=2, micro_batch=2, search="sharding_propagation")
        return sw.parallelize(net, plan, compile=compile, seed=5)

    batches = [staged_batch(8, seed) for seed in range(12)]
    for made in (in_passes, in_stages):
        # Of stages each decides for itself: only the second one is faster compiled.
        faster = made is in_passes or rank == 1
        compile_benchmark.stopwatch_of = telling(2.0, 1.0 if faster else 3.0)
        turns, worst, _ = steps_beside_eager(made, batches)
        found[made.__name__] = (turns == [*ORDER, faster, faster], worst, 0, [])
    with raises(sw.ShardwiseError, "False", '"auto"'):
        whole("always")
    return found


def test_every_step_of_a_trial_equals_an_eager_one_and_ranks_agree(run_ranks: RunRanks, tmp_path: Path) -> None:
    for rank, found in enumerate(run_ranks(on_two_ranks, 2, str(tmp_path), time_limit_seconds=400)):
        assert found.keys() == {"slow", "fast", "remembered", "in_passes", "in_stages"}
        for name, (as_expected, worst, _, _) in found.items():
            assert as_expected, (rank, name)
            assert worst < TOLERANCE, (rank, name)
        assert [found[name][2] for name in ("slow", "fast")] == [0, 2 if rank == 0 else 0]
        # Evaluation follows the last decision: eager before there is one, and where eager stays.
        assert found["slow"][3].count([False]) == 1
        assert found["fast"][3].count([False, True]) == 1
    assert len(list(tmp_path.rglob("*.json"))) == 5  # two of the net, one in passes, two of stages
