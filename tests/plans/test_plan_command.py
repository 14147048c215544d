"""``shardwise plan`` and ``sw.compare``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shardwise as sw
from search.cost_graphs import cluster_of
from search.small_models import Mlp
from shardwise import cli
from shardwise.api import SEARCHES

MODEL = '''
import torch
from torch import nn

class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))

def build():
    """Meta tensors: planning needs no memory."""
    with torch.device("meta"):
        return Mlp(), (torch.zeros(32, 64), torch.zeros(32, 64)), nn.functional.mse_loss

def three():
    return 1, 2, 3, 4

one = 1
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "planned_model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("model", ["planned_model.py:build", "planned_model:build"])
def test_a_model_is_planned_from_the_command_line_and_its_plan_is_written(folder, capsys, model):
    code = cli.main(["plan", model, "--cluster", "h100", "--mesh", "dp=4,tp=2", "-o", "plan.json"])
    printed = capsys.readouterr().out
    assert code == 0
    assert printed.startswith("plan for Mesh(dp=4, tp=2), 8 devices")
    assert "search dynamic_programming" in printed
    assert sw.Plan.load(folder / "plan.json").prediction.step_seconds > 0
    assert "written to plan.json" in printed


@pytest.mark.usefixtures("folder")
def test_all_searches_are_shown_side_by_side(capsys):
    assert cli.main(["plan", "planned_model.py:build", "--cluster", "h100", "--compare", "-o", "plan.json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    titles = "search planned in mesh simulated step compute exposed communication peak price gap"
    assert " ".join(lines[0].split()) == titles
    assert [line.split()[0] for line in lines[2:5]] == list(SEARCHES)
    assert sw.Plan.load("plan.json").mesh.num_devices == 8


def test_a_comparison_prices_every_search_alike_and_the_exact_one_is_the_fastest():
    model, x = Mlp(64, 256), torch.randn(32, 64)
    comparison = sw.compare(model, (x,), cluster_of(1, 4), mesh=sw.Mesh(dp=4), bucket_bytes=0)
    assert [row.search for row in comparison] == list(SEARCHES)
    exact = comparison["dynamic_programming"]
    for row in comparison:
        assert row.plan is not None
        assert row.step is not None
        assert row.planning_seconds > 0
        assert row.step.peak_bytes > 0
        assert row.step.seconds >= exact.step.seconds * 0.95  # searches add up what a simulation lays on a timeline
        if row.plan.predicted is not None and row.plan.prediction.simulated_seconds:
            assert row.step.seconds == pytest.approx(row.plan.prediction.simulated_seconds, rel=1e-9)
    assert not comparison["sharding_propagation"].plan.is_searched
    assert comparison["sharding_propagation"].num_bytes > 0
    assert comparison.best.step.seconds == min(row.step.seconds for row in comparison)


def test_a_search_that_finds_nothing_has_a_row_that_says_so():
    comparison = sw.compare(
        Mlp(64, 256), (torch.randn(32, 64),), cluster_of(1, 4), mesh=sw.Mesh(dp=4), memory_bytes=1000,
        searches=("dynamic_programming", "sharding_propagation"),
    )  # fmt: skip
    row = comparison["dynamic_programming"]
    assert row.plan is None
    assert "every division keeps at least" in row.error
    assert "dynamic_programming: no plan fits" in str(comparison)
    assert comparison.best is comparison["sharding_propagation"], "which knows no limit"


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["planned_model.py", "--cluster", "h100"], "names no function"),
        (["absent.py:build", "--cluster", "h100"], "no file absent.py"),
        (["absent_module:build", "--cluster", "h100"], "no module absent_module"),
        (["planned_model.py:other", "--cluster", "h100"], "no function other"),
        (["planned_model.py:one", "--cluster", "h100"], "no function one"),
        (["planned_model.py:three", "--cluster", "h100"], "returned 4 values"),
        (["planned_model.py:build", "--cluster", "h1000"], "h1000"),
        (["planned_model.py:build", "--cluster", "h100", "--memory", "80 foo"], "--memory: unknown unit 'foo'"),
        (["planned_model.py:build", "--cluster", "h100", "--memory", "1 KiB"], "every division keeps"),
        (["planned_model.py:build", "--cluster", "h100", "--mesh", "dp=4"], "the cluster has 8"),
        (["planned_model.py:build", "--cluster", "h100", "--mesh", "dp"], "a mesh reads dp=2, tp=4"),
        (["planned_model.py:build", "--cluster", "h100", "--search", "best"], "unknown search 'best'"),
        (
            ["planned_model.py:build", "--cluster", "h100", "--search", "recursive_programming", "--compare"],
            "every search",
        ),
    ],
)
def test_what_is_wrong_with_the_command_is_said(capsys, arguments, said):
    assert cli.main(["plan", *arguments]) == cli.EXIT_USAGE
    assert said in capsys.readouterr().err
