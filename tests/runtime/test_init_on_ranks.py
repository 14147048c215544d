"""``init=`` on real gloo ranks: values from a file for what it has, the module's own values for the rest."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise as sw
from launch.gloo_ranks import RunRanks
from raising import refusal
from shardwise.runtime.local_shards import shard

IDS = torch.arange(12).reshape(4, 3)


class Net(nn.Module):
    """Tied weights, a buffer that no file has and one that is in files."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(12, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("angles", torch.empty(8), persistent=False)
        self.register_buffer("gain", torch.empty(8))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.angles.copy_(torch.arange(8.0) / 8)
        self.gain.fill_(2.0)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) * self.gain + self.angles.cos()
        return F.cross_entropy(self.head(self.down(torch.tanh(self.up(x)))).flatten(0, 1), ids.flatten())


def file() -> dict[str, Tensor]:
    torch.manual_seed(7)
    state = Net().state_dict()
    state["gain"] = torch.rand(8)
    del state["head.weight"]
    return state


def built(way: str) -> Net:
    with sw.deferred(seed=3, values="cpu") if way == "deferred" else torch.device("meta"):
        return Net()


def values_on_ranks() -> dict[str, Any]:
    saved, whole = file(), Net()
    whole.load_state_dict({**saved, "head.weight": saved["tokens.weight"]})
    with torch.random.fork_rng():
        torch.manual_seed(3)
        own = Net()
    plan = sw.plan(whole, IDS, 2, mesh=sw.Mesh(tp=2), strategies={"up": "n@tp", "tokens": "v@tp"})
    asked: list[str] = []

    def returns(name: str, tensor: Tensor) -> Any:
        asked.append(name)
        return saved.get(name, NotImplemented)

    def fills(name: str, tensor: Tensor) -> Any:
        if name not in saved:
            return NotImplemented
        tensor.copy_(saved[name])
        return None

    def some(name: str, tensor: Tensor) -> Any:
        return tensor.fill_(0.5) if name == "up.weight" else NotImplemented

    def worst(par: sw.Parallel, expected: Net) -> float:
        """The largest difference from this rank's part of another model, and from its loss."""
        tensors = dict(expected.named_parameters()) | dict(expected.named_buffers())
        mine = dict(par.named_parameters()) | dict(par.named_buffers())
        parts = {n: shard(t.detach(), plan.layouts[n], par._ranks.coordinates) for n, t in tensors.items()}
        differences = [(mine[n].detach() - part).abs().max().item() for n, part in parts.items()]
        return max(*differences, abs(par.step(IDS).item() - expected(IDS).item()))

    found: dict[str, Any] = {}
    for way in ("deferred", "meta"):
        for init in (returns, fills):
            par = sw.parallelize(built(way), plan, init=init)
            found[way, init.__name__] = worst(par, whole), par.head.weight is par.tokens.weight
        found[way, "asked"] = sorted(asked)
        asked.clear()
    mixed = built("deferred").to(torch.float32)
    with torch.no_grad():
        own.up.weight.fill_(0.5)
    found["own values"] = worst(sw.parallelize(mixed, plan, init=some), own)
    values = {
        "shape": lambda name, tensor: torch.zeros(3),
        "dtype": lambda name, tensor: torch.zeros(tensor.shape, dtype=torch.float64),
        "resized": lambda name, tensor: tensor.set_(torch.zeros(2)),
        "kind": lambda name, tensor: [1.0],
        "unknown": lambda name, tensor: saved[f"model.{name}"],
        "a view": lambda name, tensor: tensor.view(-1).fill_(1.0),
    }
    for name, init in values.items():
        found[name] = refusal(lambda init=init: sw.parallelize(built("deferred"), plan, init=init))
    found["real"] = refusal(lambda: sw.parallelize(Net(), plan, init=returns))
    return found


def test_init_gives_values_for_what_it_knows_and_the_module_for_the_rest(run_ranks: RunRanks) -> None:
    for found in run_ranks(values_on_ranks, 2):
        for way in ("deferred", "meta"):
            for init in ("returns", "fills"):
                difference, tied = found[way, init]
                assert difference < 1e-6, (way, init)
                assert tied
            names = ["angles", "down.bias", "down.weight", "gain", "tokens.weight", "up.bias", "up.weight"]
            assert found[way, "asked"] == names
        assert found["own values"] < 1e-6
        assert "f32[3], but the module has it as f32[12, 8]" in found["shape"]
        assert "f64[12, 8], but the module has it as f32[12, 8]" in found["dtype"]
        assert "f32[2], but the module has it as f32[12, 8]" in found["resized"]
        assert "init= returned a list for tokens.weight" in found["kind"]
        assert "init= failed for tokens.weight: KeyError" in found["unknown"]
        assert "NotImplemented" in found["unknown"]
        assert found["a view"] == "accepted"
        assert "init= would never be called: all 7 parameters and buffers" in found["real"]
