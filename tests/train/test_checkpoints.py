"""A run that is saved under one plan goes on under any other, as if nobody had stopped it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.utils.data import TensorDataset

import shardwise as sw
from launch.gloo_ranks import RunRanks
from raising import refusal
from shardwise.train.parts import module_parts
from train.runs import go_on, make, split, tools, train

# Every split computes the same numbers in another order, in float64: 20 steps of rounding.
TOLERANCE = 1e-12


def whole_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Everything in a checkpoint but the generators, as torch reads it."""
    reader = HuggingFaceStorageReader(str(folder))
    entries = reader.read_metadata().state_dict_metadata
    found: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if not name.startswith("random.")
    }
    with warnings.catch_warnings(action="ignore"):
        dcp.load(found, storage_reader=reader, no_dist=True)
    return found


def chain(run_ranks: RunRanks, folder: Path, kinds: list[tuple[str, int]]) -> list[float]:
    """Losses of a run that goes from split to split, four steps each. What was loaded is saved again: bit-equal."""
    losses: list[float] = []
    for position, (kind, ranks) in enumerate(kinds):
        name = f"step-{4 * position + 4}"
        results = run_ranks(go_on, ranks, str(folder), kind, 4 * position, name)
        assert all(result["losses"] == results[0]["losses"] for result in results)
        losses += results[0]["losses"]
        written, held = [result["written"] for result in results], whole_tensors(folder / name)
        total = sum(tensor.nbytes for tensor in held.values())
        assert sum(written) < total + ranks * 30_000  # once each; generators and headers
        assert max(written) - min(written) < 0.3 * total  # balanced, but for the largest tensors
        if position:
            before, again = whole_tensors(folder / f"step-{4 * position}"), whole_tensors(folder / "again")
            assert before.keys() == again.keys()
            assert all(torch.equal(before[key], again[key]) for key in before)
            assert any("exp_avg_sq" in key for key in before)
            shutil.rmtree(folder / "again")
    return losses


def uninterrupted(run_ranks: RunRanks, folder: Path, steps: int) -> list[float]:
    (result,) = run_ranks(go_on, 1, str(folder), "dp1", 0, "", steps)
    found: list[float] = result["losses"]
    return found


def test_a_run_goes_on_under_another_plan_and_on_another_number_of_ranks(run_ranks: RunRanks, tmp_path: Path) -> None:
    losses = chain(run_ranks, tmp_path, [("tp2", 2), ("zero2", 2), ("dp1", 1)])
    assert losses == pytest.approx(uninterrupted(run_ranks, tmp_path, 12), rel=TOLERANCE)
    _goes_into_a_plain_module(tmp_path)
    _is_read_by_plain_torch(tmp_path)


@pytest.mark.long
def test_a_run_goes_on_under_many_plans(run_ranks: RunRanks, tmp_path: Path) -> None:
    kinds = [("dp4", 4), ("dp2 x tp2", 4), ("tp3", 3), ("zero4", 4), ("tp2", 2), ("dp1", 1), ("dp4", 4)]
    losses = chain(run_ranks, tmp_path, kinds)
    assert losses == pytest.approx(uninterrupted(run_ranks, tmp_path, 28), rel=TOLERANCE)


def _goes_into_a_plain_module(folder: Path) -> None:
    model = make(seed=3)
    optimizer, scheduler = tools(model, 1.0)
    loaded = sw.load_checkpoint(folder, model, optimizer, schedulers=scheduler)
    want = whole_tensors(folder / "step-12")
    assert (loaded.step, loaded.extra) == (12, {"by": "dp1"})
    assert loaded.path == folder / "step-12"
    for name, tensor in model.state_dict().items():
        if name != "head.weight":  # tied: stored once
            assert torch.equal(tensor, want[f"model.{name}"]), name
    for parameter, name in ((p, n) for n, p in model.named_parameters() if p in optimizer.state):
        for key, value in optimizer.state[parameter].items():
            assert torch.equal(value, want[f"optimizer.state.{name}.{key}"])
    assert model.unused not in optimizer.state
    assert scheduler.last_epoch == 12
    assert optimizer.param_groups[0]["lr"] == scheduler.get_last_lr()[0] != 1.0


def _is_read_by_plain_torch(folder: Path) -> None:
    script = f"""
import sys, warnings, torch, torch.distributed.checkpoint as dcp
warnings.simplefilter("ignore")
layers = {{"qkv": torch.nn.Linear(12, 36, bias=False), "down": torch.nn.Linear(10, 12)}}
state = {{f"model.{{n}}.{{k}}": t for n, m in layers.items() for k, t in m.double().state_dict().items()}}
dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader({str(folder / "step-4")!r}), no_dist=True)
assert "shardwise" not in sys.modules
torch.save(state, {str(folder / "read.pt")!r})
"""
    bare = {**os.environ, "PYTHONPATH": ""}
    subprocess.run([sys.executable, "-c", script], check=True, env=bare, timeout=120, cwd=folder)
    want = whole_tensors(folder / "step-4")
    for name, tensor in torch.load(folder / "read.pt").items():
        assert torch.equal(tensor, want[name])


# ------------------------------------------------------------------------------------------------ what else ranks do


def parts_on_ranks(folder: str) -> dict[str, Any]:
    """On a rank: precision, asynchronous saves, failures, what is read."""
    where, rank = Path(folder), dist.get_rank()
    par = split("tp2")
    optimizer, scheduler = tools(par)
    train(par, optimizer, scheduler, 0, 2)
    found: dict[str, Any] = {}

    held = [p.detach().clone() for p in par.parameters()]
    saving = sw.save_checkpoint(where / "meanwhile", par, optimizer, step=2, blocking=False)
    train(par, optimizer, scheduler, 2, 3)  # what was saved is what was held before
    assert saving.wait() == where / "meanwhile"
    assert saving.done
    sw.load_checkpoint(where / "meanwhile", par, optimizer)
    found["staged"] = all(map(torch.equal, held, par.parameters()))

    full = OSError(28, "No space left on device")
    real = os.write
    with mock.patch("os.write", side_effect=full if rank == 1 else real):
        found["full"] = refusal(lambda: sw.save_checkpoint(where / "full", par, optimizer, step=3))
    found["afterwards"] = refusal(lambda: sw.save_checkpoint(where / "full", par, optimizer, step=3))
    found["again"] = refusal(lambda: sw.save_checkpoint(where / "full", par, optimizer, step=3))
    found["own extra"] = refusal(lambda: sw.save_checkpoint(where / "x", par, step=3, extra=rank))
    found["own path"] = refusal(lambda: sw.save_checkpoint(where / f"own-{rank}", par, step=3))
    found["function"] = refusal(lambda: sw.save_checkpoint(where / "x", par, step=3, extra=[len] if rank else [1]))
    found["own step"] = refusal(lambda: sw.save_checkpoint(where / "x", par, step=3 + rank))
    found["no state"] = refusal(lambda: sw.save_checkpoint(where / "x", par, step=3, data=[1]))  # type: ignore[arg-type]
    found["inside"] = _inside_of_others(where, par)
    view = nn.Module()
    view.row = nn.Parameter(par.get_submodule("qkv").weight.data[:2])
    found["view"] = refusal(lambda: sw.save_checkpoint(where / "x", view, step=3))
    dist.barrier()
    if rank == 0:
        (where / "meanwhile" / "shard-00001-of-00002.safetensors").unlink()
    dist.barrier()
    held = [p.detach().clone() for p in par.parameters()]
    found["lost shard"] = refusal(lambda: sw.load_checkpoint(where / "meanwhile", par, optimizer))
    low = split("dp2", precision=sw.Precision(parameter=torch.bfloat16), dtype=torch.float32)
    other, _ = tools(low)
    with warnings.catch_warnings(record=True, action="always") as said:
        sw.load_checkpoint(where / "full", low, other)
    found["said"] = [str(one.message) for one in said]
    found["unchanged"] = all(map(torch.equal, held, par.parameters()))
    assert low.tokens.weight.dtype == torch.bfloat16
    state = other.state[low.tokens.weight]
    found["low"] = low.tokens.weight.detach().clone(), state["exp_avg"].dtype, state["step"].item()
    return found


def _inside_of_others(where: Path, par: sw.Parallel) -> list[str]:
    """On a rank: which kinds of a module around a parallel one, or of a part of it, do not come back as they were."""
    wrong = []
    around = torch.optim.swa_utils.AveragedModel(par)
    kinds = {"list": nn.ModuleList([nn.Linear(2, 2), par]), "average": around, "part": par.get_submodule("qkv")}
    for kind, module in kinds.items():
        sw.save_checkpoint(where / kind, module, step=3)
        tensors = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.zero_()
        sw.load_checkpoint(where / kind, module)
        wrong += [f"{kind}: {name}" for name, own in module.state_dict().items() if not own.equal(tensors[name])]
        if dist.get_rank() == 0:  # whole, as on one device
            shapes = [
                list(t.shape) for name, t in whole_tensors(where / kind).items() if "qkv" in name or kind == "part"
            ]
            wrong += [] if [36, 12] in shapes else [f"{kind}: {shapes}"]
    ids, labels = torch.zeros(2, 24, 5, dtype=torch.int64)
    local = split("dp2", inputs="local")
    (part, _), *_ = sw.DataLoader(TensorDataset(ids, labels), nn.Sequential(local), 12)
    return wrong + ([] if len(part) == 6 else [f"the loader gave {len(part)} samples"])


def test_saves_beside_training_and_failures_on_ranks(run_ranks: RunRanks, tmp_path: Path) -> None:
    ranks = run_ranks(parts_on_ranks, 2, str(tmp_path))
    want = whole_tensors(tmp_path / "full")
    for rank, found in enumerate(ranks):
        assert found["staged"]
        assert "was not saved: rank 1: [Errno 28] No space left on device" in found["full"]
        assert found["afterwards"] == "accepted"
        assert "exists already" in found["again"]
        assert "extra differs between rank 1 and rank 0" in found["own extra"]
        assert "path differs between rank 1" in found["own path"]
        assert "extra[0] is a builtin_function_or_method" in found["function"]
        assert "step differs between rank 1 and rank 0" in found["own step"]
        assert "data is a list, which has no state_dict()" in found["no state"]
        assert found["inside"] == []
        assert "row is a view of this rank's shard of qkv.weight" in found["view"]
        assert "shard-00001-of-00002.safetensors is a part of the checkpoint" in found["lost shard"]
        assert found["unchanged"]
        assert any("is converted from f64 to bf16" in text for text in found["said"]) == (rank == 0)
        weight, dtype, step = found["low"]
        assert torch.equal(weight, want["model.tokens.weight"].bfloat16())
        assert (dtype, step) == (torch.bfloat16, 2.0)
    assert sorted(path.name for path in tmp_path.glob("*.incomplete")) == []


def test_a_parameter_in_place_of_a_buffer_that_was_not_stored_is_stored() -> None:
    module = nn.Linear(2, 2)
    module.register_buffer("scale", torch.ones(2), persistent=False)
    assert "scale" not in module_parts(module)[0]
    del module._buffers["scale"]
    module.register_parameter("scale", nn.Parameter(torch.ones(2)))
    assert module.state_dict().keys() == module_parts(module)[0].keys() == {"weight", "bias", "scale"}
