"""Torch's distributed checkpoints, which would take shards for whole tensors, are refused on real gloo ranks; files of
one rank's part are not."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
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
from runtime.edges import batch, make, refusal

RunRanks = Callable[..., list[Any]]
WHOLE = StateDictOptions(full_state_dict=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


class Resumed(nn.Module):
    """What people hand to ``dcp.save``: an object with a state of its own."""

    def __init__(self, par: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self.held = (par, optimizer)

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.held[0].state_dict(), "optimizer": [self.held[1].state_dict()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("nothing is loaded")


def split(model: nn.Module, inputs: Any, loss: Any = None, layouts: Any = None, **strategies: str) -> sw.Parallel:
    plan = sw.plan(model, inputs, 2, mesh=sw.Mesh(tp=2), strategies=strategies, loss=loss, layouts=layouts)
    return sw.parallelize(model, plan, loss=loss)


def parts_on_ranks(folder: str) -> dict[str, Any]:
    torch.manual_seed(0)
    par = split(make(), batch(), up="n@tp", tokens="v@tp")
    optimizer = torch.optim.AdamW(par.parameters())
    par.step(*batch())
    optimizer.step()
    resumed = torch.optim.AdamW(par.parameters())  # has states and made no step
    resumed.load_state_dict(optimizer.state_dict())
    x = torch.randn(8, 6, dtype=torch.float64)
    normed = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8)).double()
    normed = split(normed, x, lambda out: out.sin().sum(), {"1.running_mean": "[8@tp]"}, **{"0": "n@tp"})
    odd = split(nn.Linear(6, 1, bias=False).double(), x, lambda out: out.sin().sum(), **{"": "n@tp"})
    copies = split(make(), batch(), up="m@tp")  # every rank holds everything
    state, whole = par.state_dict(), {"scale": torch.arange(4.0)}
    file = f"{folder}/checkpoint"
    cases: dict[str, Callable[[], Any]] = {
        "save": lambda: dcp.save(state, checkpoint_id=file),
        "save, nested": lambda: dcp.save({"app": {"model": [state]}}, checkpoint_id=file),
        "save, module": lambda: dcp.save({"model": par}, checkpoint_id=file),
        "save, stateful": lambda: dcp.save({"app": Resumed(par, optimizer)}, checkpoint_id=file),
        "save, one shard": lambda: dcp.save({"w": par.up.weight}, checkpoint_id=file),
        "save, a view": lambda: dcp.save({"w": par.up.weight.data.view(-1)[1:3]}, checkpoint_id=file),
        "save, gradients": lambda: dcp.save({"g": par.up.weight.grad}, checkpoint_id=file),
        "save, optimizer": lambda: dcp.save({"o": optimizer.state_dict()}, checkpoint_id=file),
        "save, resumed optimizer": lambda: dcp.save({"o": resumed.state_dict()}, checkpoint_id=file),
        "save, buffer": lambda: dcp.save({"b": normed.get_submodule("1").running_mean}, checkpoint_id=file),
        "save, no rows here": lambda: dcp.save(odd.state_dict(), checkpoint_id=file),
        "save_state_dict": lambda: dcp.save_state_dict(state, dcp.FileSystemWriter(file)),
        "async_save": lambda: dcp.async_save(state, checkpoint_id=file).result(),
        "load": lambda: dcp.load(state, checkpoint_id=file),
        "load, module": lambda: dcp.load({"model": par}, checkpoint_id=file),
        "load_state_dict": lambda: dcp.load_state_dict(state, dcp.FileSystemReader(file)),
        "get": lambda: get_model_state_dict(par),
        "get, whole": lambda: get_model_state_dict(par, options=WHOLE),
        "get, around": lambda: get_model_state_dict(nn.Sequential(par), options=WHOLE),
        "get, optimizer": lambda: get_optimizer_state_dict(par, optimizer, options=WHOLE),
        "get, both": lambda: get_state_dict(par, optimizer, options=WHOLE),
        "set": lambda: set_model_state_dict(par, state),
        "set, from rank 0": lambda: set_model_state_dict(par, make().state_dict(), options=FROM_RANK_0),
        "set, optimizer": lambda: set_optimizer_state_dict(par, optimizer, {}),
        "whole tensors": lambda: dcp.save(whole, checkpoint_id=file),
        "whole parameter": lambda: dcp.save({"w": par.norm.weight}, checkpoint_id=file),
        "copies": lambda: dcp.save(copies.state_dict(), checkpoint_id=file),
        "copies, loaded": lambda: dcp.load(copies.state_dict(), checkpoint_id=file),
        "copies, whole": lambda: get_model_state_dict(copies, options=WHOLE),
    }
    found: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, case in cases.items():
            found[name] = refusal(case)
            dist.barrier()
    return {**found, "own part": _own_part(par, optimizer)}


def _own_part(par: sw.Parallel, optimizer: torch.optim.Optimizer) -> bool:
    """Whether a file of this rank's part brings back what was saved, and training goes on alike."""
    file = io.BytesIO()
    torch.save({"model": par.state_dict(), "optimizer": optimizer.state_dict()}, file)
    before = [p.detach().clone() for p in par.parameters()]

    def step() -> list[torch.Tensor]:
        optimizer.zero_grad()
        par.step(*batch(1))
        optimizer.step()
        return [p.detach().clone() for p in par.parameters()]

    after = step()
    file.seek(0)
    saved = torch.load(file)
    par.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    same = all(map(torch.equal, par.parameters(), before))
    par.load_state_dict(par.state_dict())
    return same and all(map(torch.equal, step(), after))


def test_distributed_checkpoints_of_shards_are_refused_and_parts_of_ranks_are_files(
    run_ranks: RunRanks, tmp_path: Any
) -> None:
    accepted = {"whole tensors", "whole parameter", "copies", "copies, loaded", "copies, whole"}
    for found in run_ranks(parts_on_ranks, 2, str(tmp_path), time_limit_seconds=240):
        assert found.pop("own part")
        refused = {name for name, message in found.items() if message.startswith("ShardwiseError")}
        assert refused == found.keys() - accepted
        assert all(found[name] == "accepted" for name in accepted)
        assert all("torch.save(par.state_dict()" in found[name] for name in refused)
        assert "shard of 1.running_mean" in found["save, buffer"]
        assert "shard of weight" in found["save, no rows here"]
