"""One rank of a large plan runs by itself, and is measured beside the prediction."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import shardwise as sw
from raising import raises
from shardwise.cli import main
from shardwise.errors import LaunchError, PlanError, ShardwiseError
from shardwise.plans.schedule import SCHEDULES
from shardwise.runtime.single_rank import StagesProfile, run_alone

MODEL = """
import torch
from torch import nn
from torch.nn import functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.up = nn.Embedding(96, 64), nn.Linear(64, 256)
        self.down, self.head = nn.Linear(256, 64), nn.Linear(64, 96, bias=False)
        self.register_buffer("order", torch.arange(96).flip(0))

    def forward(self, ids, labels):
        x = self.table(self.order[ids])
        x = x + self.down(F.dropout(F.gelu(self.up(x)), 0.1))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())

def build():
    with torch.device("meta"):
        ids = torch.zeros(64, 12, dtype=torch.int64)
        return Net(), (ids, ids)
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "model.py").write_text(MODEL)
    return tmp_path


def built(place: Path) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    scope: dict[str, Any] = {}
    exec((place / "model.py").read_text(), scope)
    made: tuple[nn.Module, tuple[torch.Tensor, ...]] = scope["build"]()
    return made


SETTINGS = {
    "tensor-parallel": {"mesh": sw.Mesh(dp=64, tp=8), "strategies": {"up": "m@dp n@tp", "head": "n@tp"}},
    "zero 3": {"mesh": sw.Mesh(dp=16), "mode": "data_parallel", "zero": 3},
    "passes": {"mesh": sw.Mesh(dp=8), "mode": "data_parallel", "global_batch": 64, "micro_batch": 16},
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.sampled(2)
def test_a_rank_is_measured_alone(place: Path, name: str) -> None:
    module, inputs = built(place)
    plan = sw.plan(module, inputs, SETTINGS[name]["mesh"].num_devices, **SETTINGS[name])
    rank = plan.num_ranks - 3
    measured = run_alone(module, inputs, plan, rank, steps=1)
    assert measured.alone == rank
    assert not dist.is_initialized(), "nothing is left of it"
    own, predicted = ({(e.part, e.name) for e in events} for events in measured.events)
    assert predicted <= own, "all that is predicted is measured, and views besides"
    assert len(predicted) > 12, "forward and backward of every operator"
    assert not any(event.stream for events in measured.events for event in events), "messages are left out"
    seconds, expected = measured.step_seconds
    assert seconds > 0 < expected
    held, foreseen = measured.peak_bytes
    least = 0.6 if name == "zero 3" else 0.95  # buffers of messages are predicted; CPU ranks count values only
    assert least < held / foreseen < 1.05
    assert f"rank {rank} of {plan.num_ranks} alone" in str(measured)


STAGES = {
    "1F1B": {"mesh": sw.Mesh(dp=2, tp=2), "stages": 2, "global_batch": 64, "micro_batch": 32},
    "ZBVZeroBubble": {"mesh": sw.Mesh(dp=2), "stages": 4, "micro_batch": 8, "zero": 2, "mode": "data_parallel"},
    "GPipe": {"mesh": sw.Mesh(dp=2), "stages": 2, "global_batch": 64, "micro_batch": 64},
}


@pytest.mark.parametrize("schedule", STAGES)
@pytest.mark.sampled(2)
def test_the_stages_of_a_rank_are_measured_alone(place: Path, schedule: str) -> None:
    module, inputs = built(place)
    options = STAGES[schedule]
    places = options["stages"] // SCHEDULES[schedule].stages_per_place
    plan = sw.plan(module, inputs, places * options["mesh"].num_devices, schedule=schedule, **options)
    for rank in (0, plan.num_ranks - 1):
        measured = run_alone(module, inputs, plan, rank, steps=1)
        assert isinstance(measured, StagesProfile)
        assert not dist.is_initialized(), "nothing is left of it"
        assert [i for i, stage in enumerate(plan.stages) if rank in stage.placement.ranks] == [*measured.stages]
        for number, profile in measured.stages.items():
            own, predicted = ({(e.part, e.name) for e in events} for events in profile.events)
            assert predicted <= own, "all that is predicted is measured, and views besides"
            names = {entry.name for entry in plan.stages[number].operators}
            assert {name for part, name in predicted if part == "forward"} <= names
            assert {"forward", "backward"} <= {part for part, _ in predicted}
            assert not any(event.stream for events in profile.events for event in events), "messages are left out"
            assert profile.step_seconds[0] > 0 < profile.step_seconds[1]
        assert f"rank {rank} of {plan.num_ranks} alone" in str(measured)


def test_a_stage_whose_parameters_are_frozen_runs_forward_alone(place: Path) -> None:
    module, inputs = built(place)
    for name in ("table", "up"):
        sw.stage(module.get_submodule(name), 0).requires_grad_(False)
    sw.stage(module.get_submodule("down"), 1)
    plan = sw.plan(module, inputs, 2, mesh=sw.Mesh(dp=1), stages="marked", global_batch=64, micro_batch=32)
    assert [entry.name for entry in plan.stages[0].parameters] == ["table.weight", "up.weight", "up.bias"]
    measured = run_alone(module, inputs, plan, 0, steps=1)
    assert isinstance(measured, StagesProfile)
    assert {event.part for event in measured.stages[0].events[0]} == {"forward"}


def test_the_command_measures_a_rank_of_a_plan_file(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module, inputs = built(place)
    plan = sw.plan(module, inputs, 16384, mesh=sw.Mesh(dp=64, tp=8, more=32), strategies={"up": "m@dp n@tp"})
    plan.save(place / "plan.json")
    model = f"{place / 'model.py'}:build"
    assert main(["run", "--alone", "16000", str(place / "plan.json"), model, "--steps", "1"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("rank 16000 of 16384 alone: without messages\nforward and backward ")
    assert "forward of up/linear" in said or "backward of up/linear" in said
    for arguments, words in (
        (["--alone", "16384", str(place / "plan.json"), model], "the plan is for ranks 0 to 16383, not 16384"),
        (["-n", "2", "--alone", "1", str(place / "plan.json"), model], "--alone runs one rank, and -n"),
        (["--alone", "1", str(place / "none.json"), model], "none.json"),
        (["--alone", "1", str(place / "plan.json"), model, "--steps", "0"], "steps is a number from 1, not 0"),
        (["--alone", "1", str(place / "plan.json"), model, "--device", "nope"], "'nope' is not a device"),
        (["--alone", "1", str(place / "plan.json"), model, "--device", "cuda:99"], "this machine has no cuda:99"),
    ):
        assert main(["run", *arguments]) == 2
        assert words in capsys.readouterr().err


def test_what_can_not_run_alone_is_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, inputs = built(place)
    plan = sw.plan(module, inputs, 2, mesh=sw.Mesh(dp=2), mode="data_parallel")
    staged = sw.plan(module, inputs, 2, mesh=sw.Mesh(dp=1), stages=2, global_batch=64, micro_batch=32)
    with raises(PlanError, "0 to 1, not 2"):
        run_alone(module, inputs, staged, 2)
    with monkeypatch.context() as patched:
        patched.setattr(dist, "is_initialized", lambda: True)
        with raises(LaunchError, "this process", "a rank", fix=("run -n", "torchrun")):
            run_alone(module, inputs, plan, 0)
    no_loss, x = nn.Linear(4, 4), torch.zeros(8, 4)
    other = sw.plan(no_loss, x, 2, mesh=sw.Mesh(dp=2))
    with raises(ShardwiseError, "no loss"):
        run_alone(no_loss, x, other, 0)
    assert run_alone(no_loss, (x,), sw.plan(no_loss, x, 2, mesh=sw.Mesh(dp=2), loss=_mean), 0, loss=_mean).rows


def _mean(y: torch.Tensor) -> torch.Tensor:
    return F.relu(y).mean()
