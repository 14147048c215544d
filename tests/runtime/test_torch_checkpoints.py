"""Torch's distributed checkpoints, on real gloo ranks: of shards they hold the global tensors, under any plan; what
would go wrong is refused; and files of one rank's part go on working."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import shardwise as sw
from launch.gloo_ranks import RunRanks
from raising import refusal
from runtime.edges import batch, make
from shardwise.layouts.layout import Layout
from shardwise.runtime.guards.dcp import optimizer_states
from shardwise.runtime.guards.registry import ShardRecord

WHOLE = StateDictOptions(full_state_dict=True)
LENIENT = StateDictOptions(full_state_dict=True, strict=False)  # a parameter is not used, and has no state
ON_RANK_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
COPIED = StateDictOptions(cpu_offload=True)


class Resumed(nn.Module):
    """What people hand to ``dcp.save``: an object with a state of its own."""

    def __init__(self, par: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self.held = (par, optimizer)

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.held[0].state_dict(), "optimizer": get_optimizer_state_dict(*self.held), "step": 7}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.held[0].load_state_dict(state["model"])
        set_optimizer_state_dict(*self.held, state["optimizer"], options=StateDictOptions(strict=False))
        assert state["step"] == 7


class Fused(nn.Module):
    """Queries, keys and values in one projection: every rank holds three chunks of it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.odd = nn.Linear(6, 12, bias=False), nn.Linear(6, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(len(x), 3, 4).unbind(1)
        return (q * k * v).sin().sum() + self.odd(x).sum()


def split(model: nn.Module, inputs: Any, **strategies: str) -> sw.Parallel:
    return sw.parallelize(model, sw.plan(model, inputs, 2, mesh=sw.Mesh(tp=2), strategies=strategies))


def run(seed: int = 0) -> tuple[sw.Parallel, torch.optim.Optimizer]:
    torch.manual_seed(0)
    par = split(make(), batch(), up="n@tp", tokens="v@tp")
    optimizer = torch.optim.AdamW(par.parameters())
    par.step(*batch(seed))
    optimizer.step()
    return par, optimizer


def alone() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = make()
    optimizer = torch.optim.AdamW(model.parameters())
    model(*batch()).backward()
    optimizer.step()
    return model, optimizer


def equal(found: Any, want: Any) -> bool:
    if isinstance(want, dict):
        return found.keys() == want.keys() and all(equal(found[key], want[key]) for key in want)
    if isinstance(want, list):
        return len(found) == len(want) and all(map(equal, found, want))
    if isinstance(want, torch.Tensor):
        return found.shape == want.shape and torch.allclose(found.to(want), want, rtol=1e-11, atol=1e-13)
    return bool(found == want)


def right_on_ranks(folder: str) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    par, optimizer = run()
    model, plain = alone()
    found: dict[str, Any] = {}

    def whole_file(name: str) -> dict[str, Any]:
        """What is in a checkpoint of torch's, read as whole tensors into another model."""
        entries = dcp.FileSystemReader(f"{folder}/{name}").read_metadata().state_dict_metadata
        state: dict[str, Any] = {
            key: torch.empty(entry.size, dtype=entry.properties.dtype)
            for key, entry in entries.items()
            if hasattr(entry, "size")
        }
        dcp.load(state, checkpoint_id=f"{folder}/{name}")
        return state

    want = {f"model.{key}": tensor for key, tensor in model.state_dict().items()}
    dcp.save({"model": par.state_dict()}, checkpoint_id=f"{folder}/plain")
    found["save"] = equal(whole_file("plain"), want)
    dcp.save({"model": par}, checkpoint_id=f"{folder}/module")
    found["save, module"] = equal(whole_file("module"), want)
    future: Any = dcp.async_save({"model": par.state_dict()}, checkpoint_id=f"{folder}/async")
    held = [p.detach().clone() for p in par.parameters()]
    with torch.no_grad():
        for p in par.parameters():
            p.zero_()
    future.result()
    found["async_save"] = equal(whole_file("async"), want)
    dcp.load({"model": par}, checkpoint_id=f"{folder}/async")
    found["load, module"] = all(map(torch.equal, held, par.parameters()))
    state = get_model_state_dict(par, options=COPIED)
    dcp.save({"model": state}, checkpoint_id=f"{folder}/copied")
    found["save, copies by torch"] = equal(whole_file("copied"), want)
    app = Resumed(par, optimizer)
    dcp.save({"app": app}, checkpoint_id=f"{folder}/app")
    other, fresh = run(5)
    dcp.load({"app": Resumed(other, fresh)}, checkpoint_id=f"{folder}/app")
    found["resumed"] = equal(other.state_dict(), par.state_dict()) and equal(fresh.state_dict(), optimizer.state_dict())
    another = split(make(), batch(), down="k@tp", tokens="e@tp")
    assert another.tokens.weight.shape != par.tokens.weight.shape
    dcp.load({"app": {"model": another.state_dict()}}, checkpoint_id=f"{folder}/app")
    found["another plan"] = equal(get_model_state_dict(another, options=WHOLE), model.state_dict())
    own = get_optimizer_state_dict(model, plain)
    found["get, whole"] = equal(get_model_state_dict(par, options=WHOLE), model.state_dict())
    found["get, around"] = equal(
        get_model_state_dict(nn.Sequential(par), options=WHOLE), nn.Sequential(model).state_dict()
    )
    on_rank_0 = get_model_state_dict(par, options=ON_RANK_0)
    found["get, rank 0"] = equal(on_rank_0, model.state_dict() if dist.get_rank() == 0 else {})
    found["get, optimizer"] = equal(get_optimizer_state_dict(par, optimizer, options=WHOLE), own)
    found["get, both"] = equal(list(get_state_dict(par, optimizer, options=WHOLE)), [model.state_dict(), own])
    other, fresh = run(5)
    set_model_state_dict(other, par.state_dict())
    found["set"] = equal(other.state_dict(), par.state_dict())
    other, fresh = run(5)
    set_model_state_dict(other, copy.deepcopy(model.state_dict()), options=WHOLE)
    found["set, whole"] = equal(other.state_dict(), par.state_dict())
    set_optimizer_state_dict(other, fresh, copy.deepcopy(own), options=LENIENT)
    found["set, optimizer"] = equal(fresh.state_dict()["state"], optimizer.state_dict()["state"])
    other, _ = run(5)
    given = copy.deepcopy(model.state_dict()) if dist.get_rank() == 0 else {}
    set_model_state_dict(other, given, options=FROM_RANK_0)
    found["set, from rank 0"] = equal(other.state_dict(), par.state_dict())
    x = torch.randn(8, 6, dtype=torch.float64)
    fused = split(Fused().double(), x, qkv="n@tp", odd="n@tp")
    before = [p.detach().clone() for p in fused.parameters()]
    dcp.save({"fused": fused.state_dict()}, checkpoint_id=f"{folder}/fused")
    with torch.no_grad():
        for p in fused.parameters():
            p.zero_()
    dcp.load({"fused": fused.state_dict()}, checkpoint_id=f"{folder}/fused")
    found["several chunks, none"] = all(map(torch.equal, before, fused.parameters()))
    whole = whole_file("fused")["fused.qkv.weight"]
    found["several chunks, whole"] = torch.equal(whole, get_model_state_dict(fused, options=WHOLE)["qkv.weight"])
    normal = {"scale": torch.arange(4.0), "step": 3}
    dcp.save(normal, checkpoint_id=f"{folder}/normal")
    loaded: dict[str, Any] = {"scale": torch.zeros(4), "step": 0}
    dcp.load(loaded, checkpoint_id=f"{folder}/normal")
    found["whole tensors"] = equal(loaded, normal)
    refused = {
        "a view": lambda: dcp.save({"w": par.up.weight.data.view(-1)[1:3]}, checkpoint_id=f"{folder}/no"),
        "a copying writer": lambda: dcp.async_save(
            par.state_dict(), storage_writer=dcp.FileSystemWriter(f"{folder}/no")
        ).result(),
        "one chunk a name": lambda: dcp.save(
            fused.state_dict(), storage_writer=dcp.HuggingFaceStorageWriter(f"{folder}/no")
        ),
    }
    for name, action in refused.items():
        found[name] = refusal(action)
        dist.barrier()
    return {
        **found,
        "own part": _own_part(par, optimizer, f"{folder}/rank{dist.get_rank()}.pt"),
        "files": Path(f"{folder}/no").exists(),
    }


def _own_part(par: sw.Parallel, optimizer: torch.optim.Optimizer, file: str) -> bool:
    """Whether a file of this rank's part brings back what was saved, and training goes on alike."""
    torch.save({"model": par.state_dict(), "optimizer": optimizer.state_dict()}, file)
    before = [p.detach().clone() for p in par.parameters()]

    def step() -> list[torch.Tensor]:
        optimizer.zero_grad()
        par.step(*batch(1))
        optimizer.step()
        return [p.detach().clone() for p in par.parameters()]

    after = step()
    saved = torch.load(file)
    par.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    same = all(map(torch.equal, par.parameters(), before))
    par.load_state_dict(par.state_dict())
    return same and all(map(torch.equal, step(), after))


def test_torchs_checkpoints_hold_global_tensors(run_ranks: RunRanks, tmp_path: Any) -> None:
    for found in run_ranks(right_on_ranks, 2, str(tmp_path)):
        assert "a view of this rank's shard of up.weight" in found.pop("a view")
        assert "copies tensors without their position" in found.pop("a copying writer")
        assert "stores one chunk per name and rank, but ranks hold several chunks of qkv.weight" in found.pop(
            "one chunk a name"
        )
        assert not found.pop("files")
        assert [name for name, right in found.items() if right is not True] == []


class OwnState(dict[str, Any]):
    """The state that an optimizer of a user keeps per parameter."""


def test_states_of_optimizers_are_found_in_mappings_of_any_class() -> None:
    parameter, average = nn.Parameter(torch.ones(4)), torch.zeros(4)
    optimizer = torch.optim.SGD([parameter])
    optimizer.state[parameter] = OwnState(inner=[OwnState(average=average)], step=torch.tensor(1.0))
    ranks: Any = None  # nothing is exchanged
    record = ShardRecord("weight", Layout.whole(sw.Mesh(dp=1), (4,)), True, ranks)
    ((state, owner, is_part),) = optimizer_states([(parameter, record)])
    assert state is average
    assert owner is record
    assert is_part
