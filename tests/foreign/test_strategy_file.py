"""Strategy files of MindSpore: what they say is placed as they say it, proven, and refuted where it cannot be."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shardwise as sw
from raising import raises
from shardwise import cli
from shardwise.foreign.strategy_file import read_strategies
from shardwise.graph.capture import capture
from shardwise.layouts.text import parse_layout

SCOPE = "Default/network-TrainOneStepCell/network-WithLossCell/_backbone-Net"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.fc1, self.fc2 = nn.Embedding(32, 16), nn.Linear(16, 64), nn.Linear(64, 8)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.fc2(F.relu(self.fc1(self.table(ids))))
        return F.cross_entropy(x.flatten(0, 1), labels.flatten())


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(32, (8, 4), generator=generator), torch.randint(8, (8, 4), generator=generator)


def slices(sizes: list[int], places: list[int], shape: list[int], shard: tuple[int, int] = (0, 0)) -> dict[str, Any]:
    return {
        "dev_matrix": sizes,
        "tensor_map": places,
        "tensor_shape": shape,
        "field": 0,
        "opt_weight_shard_step": shard[0],
        "opt_weight_shard_size": shard[1],
    }


def strategy(*counts: list[int], stage: int = 0) -> dict[str, Any]:
    return {"stage": stage, "parallel_strategy": list(counts)}


def megatron() -> dict[str, Any]:
    """Samples over two, features over four devices; the second layer is summed; states of the optimizer go along."""
    return {
        "current_stage": 0,
        "parallel_strategy_item": {
            f"{SCOPE}/fc1-Dense/MatMul-op3": strategy([2, 1], [4, 1]),
            f"{SCOPE}/fc2-Dense/MatMul-op5": strategy([2, 4], [1, 4]),
            f"{SCOPE}/table-Embedding/Gather-op1": strategy([1, 1], [2, 1]),
            f"{SCOPE}/ReLU-op4": strategy([2, 4]),
        },
        "parallel_layout_item": {
            "fc1.weight": slices([2, 4], [0, -1], [64, 16]),
            "fc1.bias": slices([2, 4], [0], [64]),
            "network._backbone.fc2.weight": slices([2, 4], [-1, 0], [8, 64]),
            "table.embedding_table": slices([8], [-1, -1], [32, 16], (4, 2)),
            "moments.fc1.weight": slices([2, 4], [0, -1], [64, 16]),
            "lost.weight": slices([2, 4], [0], [4]),
        },
    }


def changed(item: str, name: str, **fields: Any) -> dict[str, Any]:
    plan = copy.deepcopy(megatron())
    kind = "parallel_strategy_item" if "parallel_strategy" in fields or "stage" in fields else "parallel_layout_item"
    key = next(key for key in plan[kind] if item in key)
    assert name in key
    plan[kind][key].update(fields)
    return plan


def test_what_the_file_says_is_proven_and_priced() -> None:
    report = sw.check(net(), batch(), megatron(), 8)
    assert report.ok, report
    assert report.plan.mesh == sw.Mesh(d0=2, d1=4)
    assert 0 < report.max_error < 1e-12
    assert {d.kind for d in report.differences} >= {"loss", "gradient", "parameter"}
    assert "parameter fc1.weight: f32[64@d1, 16]" in report.layouts
    assert "parameter table.weight: f32[32@d0, 16]" in report.layouts
    assert report.plan.unused == (f"{SCOPE}/ReLU-op4", "lost.weight")
    assert "the rest is derived" in str(report)
    assert report.beside is not None
    assert report.beside.own is not None
    assert report.beside.messages.count > 0


@pytest.mark.parametrize("sizes", [[2, 4], [4, 2], [8], [2, 2, 2]])
def test_slices_lie_where_mindspore_puts_them(sizes: list[int]) -> None:
    """Rank by rank: a dim that is on device dim i has slice number (rank // (product of the sizes behind i)) % size."""
    module, shape = net(), (64, 16)
    captured = capture(module, *(batch(), {}))
    for first in range(-1, len(sizes)):
        for second in range(-1, len(sizes)):
            if first == second >= 0:
                continue
            plan = {"parallel_layout_item": {"fc1.weight": slices(sizes, [first, second], list(shape))}}
            plan["parallel_layout_item"]["fc1.bias"] = slices([2, 2, 2], [-1], [64])  # cuts the axes finer
            found = read_strategies(module, plan, captured.graph, 8)
            layout = parse_layout(found.layouts["fc1.weight"], found.mesh)
            for rank in range(8):
                coordinates = found.mesh.coordinates(rank)
                for dim, place in enumerate((first, second)):
                    at = len(sizes) - 1 - place
                    behind = 1
                    for size in sizes[at + 1 :]:
                        behind *= size
                    number, ways = ((rank // behind) % sizes[at], sizes[at]) if place >= 0 else (0, 1)
                    axes = [axis for atom in layout.dims[dim] for axis in atom.axes]
                    own = 0
                    for axis in axes:
                        own = own * found.mesh.sizes[axis] + coordinates[axis]
                    assert (own, found.mesh.size_of(axes)) == (number, ways), (sizes, first, second, rank)


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (changed("fc1.weight", "fc1", tensor_map=[0, 0]), "names a device dim twice"),
        (changed("fc1.weight", "fc1", tensor_map=[2, -1]), "or one that [2, 4] lacks"),
        (changed("fc1.bias", "fc1", tensor_map=[0, -1]), "has 2 dims, the parameter [64]"),
        (changed("fc1.bias", "fc1", dev_matrix=[8], opt_weight_shard_step=1, opt_weight_shard_size=0), None),
        (
            changed("fc1-Dense", "MatMul", parallel_strategy=[[2, 1], [4, 2]]),
            "is split 2 ways and dim 2 of operand 0 1 ways",
        ),
        (changed("fc1-Dense", "MatMul", parallel_strategy=[[3, 1], [1, 1]]), "3 slices do not divide"),
        (changed("fc1-Dense", "MatMul", parallel_strategy=[[2, 1]]), "1 strategies for 2 tensor operands"),
        (
            changed("fc2-Dense", "MatMul", parallel_strategy=[[8, 4], [1, 4]]),
            "32 slices, which do not divide over 8 devices",
        ),
        (
            changed("fc2-Dense", "MatMul", parallel_strategy=[[2, 4], [8, 4]]),
            "32 slices, which do not divide over 8 devices",
        ),
        (changed("fc2-Dense", "MatMul", parallel_strategy=[[2, 2], [4, 2]]), "needs 2 (b) x 2 (k) x 4 (n) = 16"),
    ],
)
def test_what_cannot_be_is_wrong_with_its_reason(plan: dict[str, Any], says: str | None) -> None:
    report = sw.check(net(), batch(), plan, 8, beside=False)
    assert report.verdict == ("equal" if says is None else "wrong"), report
    assert says is None or says in str(report.failure), report
    assert " on rank " not in str(report).partition("\n")[0]


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        ({"parallel_layout_item": {"other.weight": slices([8], [-1], [4])}}, ("Net", "other.weight", "names nothing")),
        ({"parallel_layout_item": {"fc1.weight": slices([4], [-1, -1], [64, 16])}}, ("is for 4 devices", "[4]")),
        ({"parallel_layout_item": {"fc1.weight": {"dev_matrix": [8]}}}, "not a strategy file of MindSpore: KeyError"),
        (
            {"parallel_layout_item": {"fc1.weight": {**slices([8], [-1, -1], [64, 16]), "dev_matrix": ["8"]}}},
            "not a strategy file of MindSpore",
        ),
        (
            changed("fc1.bias", "fc1", opt_weight_shard_step=1, opt_weight_shard_size=-1),
            "opt_weight_shard of fc1.bias is",
        ),
        ({"parallel_strategy_item": [1, 2]}, "not a strategy file of MindSpore"),
        (changed("fc1-Dense", "MatMul", stage=1), "pipelines of MindSpore are not checked"),
        (
            {
                "parallel_layout_item": {
                    "fc1.weight": slices([2, 6], [1, -1], [64, 16]),
                    "fc1.bias": slices([3, 4], [-1], [64]),
                }
            },
            "runs of 4 and of 6 ranks overlap",
        ),
    ],
)
def test_what_is_no_file_for_this_module_is_one_sentence_and_the_mend(plan: dict[str, Any], says: object) -> None:
    with raises(sw.ShardwiseError, says, "fix:"):
        sw.check(net(), batch(), plan, 12 if "6 ranks" in str(says) else 8)


def test_the_mesh_is_the_files() -> None:
    with raises(sw.ShardwiseError, "MindSpore", "mesh="):
        sw.check(net(), batch(), megatron(), 8, mesh=sw.Mesh(dp=8))


def test_from_the_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    Path("strategy.json").write_text(json.dumps(megatron()))
    Path("net.py").write_text(
        "from foreign.test_strategy_file import batch, net\n\n\ndef build():\n    return net(), batch()\n"
    )
    few = ["--plan", "strategy.json", "--devices", "8", "--no-price", "--json"]
    assert cli.main(["check", "net.py:build", *few]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["verdict"], data["plan"], data["mesh"]) == ("equal", "MindSpore strategy file", {"d0": 2, "d1": 4})
    Path("strategy.json").write_text(json.dumps(changed("fc1.weight", "fc1", tensor_map=[0, 0])))
    assert cli.main(["check", "net.py:build", *few]) == 1


def test_a_parameter_under_two_names_has_one_layout() -> None:
    plan = megatron()
    plan["parallel_layout_item"]["fc2.weight"] = slices([2, 4], [0, -1], [8, 64])
    report = sw.check(net(), batch(), plan, 8, beside=False)
    assert report.verdict == "wrong"
    assert "under another name" in str(report.failure)
    plan["parallel_layout_item"]["fc2.weight"] = slices([2, 4], [-1, 0], [8, 64])
    assert sw.check(net(), batch(), plan, 8, beside=False).ok


def test_the_cluster_has_as_many_devices_as_the_file() -> None:
    with raises(sw.ShardwiseError, "h100-1x4", "4 devices", "for 8"):
        sw.check(net(), batch(), megatron(), 8, cluster=sw.Cluster.load("h100-1x4"))


class Scores(nn.Module):
    """A product beside other work in one module, of three dims."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.bmm(x.softmax(-1), x.transpose(1, 2)))


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scores = Scores()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scores(x).square().mean()


@pytest.mark.parametrize("counts", [([2, 1, 1], [2, 1, 1]), ([2, 2, 1, 1], [2, 2, 1, 1])])
def test_what_a_strategy_for_a_module_cannot_say_refutes_nothing(counts: tuple[list[int], ...]) -> None:
    node, last = f"{SCOPE}/scores-Scores/BatchMatMul-op3", f"{SCOPE}/scores-Scores/last-Dense/MatMul-op4"
    plan = {"parallel_strategy_item": {node: strategy(*counts), last: strategy([2, 1], [1, 1])}}
    report = sw.check(Around(), (torch.randn(8, 16, 16),), plan, 4, beside=False)
    assert report.ok, report
    assert report.plan.unused == (node,)
    report = sw.check(
        Around(),
        (torch.randn(8, 16, 16),),
        {
            "parallel_strategy_item": {last: strategy([2, 1, 1, 1, 1], [1, 1])},
            "parallel_layout_item": {"scores.last.bias": slices([4], [0], [16])},
        },
        4,
        beside=False,
    )
    assert report.plan.unused == (last,)
    assert report.ok, report


@pytest.mark.parametrize("outer", ["decoder-Decoder", "encoder-Cell/layers-CellList", "fc2-Dense"])
def test_an_operator_of_another_cell_is_not_that_of_a_namesake_outside_of_it(outer: str) -> None:
    """Only the cells that training puts around a network may be missing in the module: ``decoder/fc1`` is no
    ``fc1``."""
    node = f"{SCOPE}/{outer}/fc1-Dense/MatMul-op3"
    plan = {**megatron(), "parallel_strategy_item": {node: strategy([2, 1], [4, 1])}}
    module = net()
    found = read_strategies(module, plan, capture(module, *(batch(), {})).graph, 8)
    assert found.strategies == {}
    assert node in found.unused
    with raises(sw.ShardwiseError, "fc1-Dense/MatMul-op3", facts=["there is"]):
        sw.check(module, batch(), {"parallel_strategy_item": {node: strategy([2, 1], [4, 1])}}, 8)
