"""``par.profile``: every operator and message of the prediction is measured, under the same name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shardwise as sw
from launch.gloo_ranks import RunRanks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(64, 256), nn.BatchNorm1d(256)
        self.down, self.drop = nn.Linear(256, 64), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.drop(torch.relu(self.norm(self.up(x))))).square().mean()


def profiled(folder: str) -> dict[str, Any]:
    outcomes: dict[str, Any] = {}
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    for name, settings in {
        "tp": {"mesh": sw.Mesh(tp=2), "strategies": {"up": "n@tp"}},
        "zero": {"mesh": sw.Mesh(dp=2), "mode": "data_parallel", "zero": 3},
        "passes": {"mesh": sw.Mesh(dp=2), "mode": "data_parallel", "global_batch": 32, "micro_batch": 8},
    }.items():
        torch.manual_seed(0)
        model = Net()
        if name == "passes":
            model.norm = nn.Identity()
        par, other = (sw.parallelize(model, sw.plan(model, x, 2, **settings)) for _ in range(2))
        par.step(x)
        gradients = {key: p.grad.clone() for key, p in par.named_parameters()}
        profile = par.profile(x, steps=2)
        kept = all(torch.equal(p.grad, gradients[key]) for key, p in par.named_parameters())
        other.step(x)
        same = torch.equal(par.step(x), other.step(x))  # the step after is the second one
        path = f"{folder}/{name}.json"
        if sw.rank() == 0:
            profile.trace(path)
        measured, predicted = ({(e.part, e.name, e.stream) for e in events} for events in profile.events)
        outcomes[name] = {
            "kept": kept and same,
            "only predicted": sorted(map(str, predicted - measured)),
            "messages": sorted({e.name for e in profile.events[0] if e.stream}),
            "text": str(profile),
            "largest first": [row.difference for row in profile.rows],
            "peaks": profile.peak_bytes,
            "seconds": profile.step_seconds,
            "figures": {f"{row.part} {row.name}": row.figure for row in profile.rows},
        }
    return outcomes


def test_a_step_is_measured_beside_its_prediction(run_ranks: RunRanks, tmp_path: Path) -> None:
    for outcome in run_ranks(profiled, 2, str(tmp_path)):
        for name, found in outcome.items():
            assert found["kept"], name
            assert found["only predicted"] == [], name
            assert found["messages"], name
            assert found["largest first"] == sorted(found["largest first"], reverse=True)
            measured, predicted = found["peaks"]
            assert 0.5 < measured / predicted < 1.5, (name, found["peaks"])
            assert all(seconds > 0 for seconds in found["seconds"])
            assert "predicted" in found["text"]
        assert "reduce_scatter" in outcome["zero"]["messages"]
        assert outcome["tp"]["figures"]["forward up/linear"] == "device.matmul_efficiency.f32"
        assert outcome["zero"]["figures"]["forward all_gather over dp"] == "levels.machine"
    trace = json.loads((tmp_path / "zero.json").read_text())["traceEvents"]
    assert [e["args"]["name"] for e in trace if e["name"] == "process_name"] == ["measured, one by one", "predicted"]
    names = [{e["name"] for e in trace if e["ph"] == "X" and e["pid"] == track} for track in (0, 1)]
    assert names[1] <= names[0]
