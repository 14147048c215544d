"""Whole states of modules in stages and in shards, on real gloo ranks: torch's functions bring what all ranks hold to
rank 0, or to all, and set it again; files of one rank's part under the names of the whole are refused."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
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
    set_state_dict,
)
from torch.nn import functional as F

import shardwise as sw
from launch.gloo_ranks import RunRanks
from raising import message, refusal
from runtime.test_torch_checkpoints import COPIED, FROM_RANK_0, ON_RANK_0, WHOLE, equal
from runtime.training import train
from shardwise.runtime.guards import dcp as dcp_guards

FLAT = StateDictOptions(full_state_dict=True, cpu_offload=True, flatten_optimizer_state_dict=True)
PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "stages": (2, {"stages": 2, "micro_batch": 2, "global_batch": 8}),
    "folded": (2, {"stages": 4, "micro_batch": 2, "global_batch": 8, "schedule": "ZBVZeroBubble"}),
    "stages of shards": (
        4,
        {"stages": 2, "micro_batch": 2, "global_batch": 8, "mesh": sw.Mesh(tp=2),
         "strategies": {"blocks.*": "n@tp", "tokens": "v@tp"}},
    ),
    "shards": (2, {"mesh": sw.Mesh(tp=2), "strategies": {"blocks.*": "n@tp", "tokens": "v@tp"}}),
    "zero": (2, {"mesh": sw.Mesh(dp=2), "zero": 3}),
}  # fmt: skip


class Net(nn.Module):
    """Tied embeddings in the first and the last stage; a frozen, an unused and a 0-dim parameter; buffers of several
    dtypes, one of them in all stages, one in none, one that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(20, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.odd, self.odder = nn.Linear(8, 1), nn.Linear(8, 1)  # ZeRO leaves some ranks nothing of their biases
        self.scale, self.unused = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.ones(4))
        self.register_buffer("offset", torch.arange(8.0) / 50)
        self.register_buffer("mask", torch.arange(8) != 3)
        self.register_buffer("spare", torch.arange(3))
        self.register_buffer("shift", torch.arange(8.0) / 50, persistent=False)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.tokens.weight
        self.blocks[1].bias.requires_grad_(False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.offset + self.shift
        for i, block in enumerate(self.blocks):
            if i in (1, 3):
                x = x * torch.sigmoid((self.odd if i == 1 else self.odder)(x))
            x = x + torch.tanh(block(x)) * (self.scale if i == 3 else 1) * self.mask
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 20, (2, 8, 5), generator=torch.Generator().manual_seed(seed))
    return ids[0], ids[1]


def make() -> Net:
    torch.manual_seed(0)
    return Net().double()


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    decayed = [p for name, p in module.named_parameters() if name.endswith("weight")]
    others = [p for name, p in module.named_parameters() if not name.endswith("weight") and p.requires_grad]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2)


def split(options: dict[str, Any], steps: int) -> tuple[Any, torch.optim.Optimizer]:
    warnings.simplefilter("ignore")
    size = dist.get_world_size()
    plan = None
    if dist.get_rank() == 0:
        plan = sw.plan(make(), batch(0), size, search="sharding_propagation", **options)
    par = sw.parallelize(make(), plan, compile=False)
    optimizer = optimizer_of(par)
    train(par, map(batch, range(steps)), optimizer)
    return par, optimizer


def alone(steps: int) -> tuple[Net, torch.optim.Optimizer]:
    model = make()
    optimizer = optimizer_of(model)
    train(model, map(batch, range(steps)), optimizer)
    return model, optimizer


def by_name(state: dict[str, Any]) -> dict[str, Any]:
    """The state of an optimizer, with the names of groups in one order."""
    groups = [{**group, "params": sorted(group["params"])} for group in state["param_groups"]]
    return {"state": state["state"], "param_groups": groups}


def whole_states(options: dict[str, Any], folder: str) -> dict[str, Any]:
    par, optimizer = split(options, 2)
    model, plain = alone(2)
    lenient = StateDictOptions(strict=False)  # the unused parameter has no state
    want, own = model.state_dict(), by_name(get_optimizer_state_dict(model, plain, options=lenient))
    is_first = dist.get_rank() == 0
    found: dict[str, Any] = {}
    state = get_model_state_dict(par, options=WHOLE)
    found["model, all"] = equal(state, want)
    state = get_model_state_dict(par, options=ON_RANK_0)
    found["model, rank 0"] = equal(state, want if is_first else {})
    found["tied"] = (
        not options.get("stages")
        or not state
        or (state["tokens.weight"].data_ptr() == state["head.weight"].data_ptr() != par.tokens.weight.data_ptr())
    )
    found["dtypes"] = all(tensor.dtype == want[name].dtype for name, tensor in state.items())
    around = nn.Sequential(nn.Identity(), par)
    found["around"] = equal(
        get_model_state_dict(around, options=ON_RANK_0),
        nn.Sequential(nn.Identity(), model).state_dict() if is_first else {},
    )
    states = get_optimizer_state_dict(par, optimizer, options=ON_RANK_0)
    found["optimizer, rank 0"] = equal(by_name(states), own) if is_first else states == {}
    found["optimizer, all"] = equal(by_name(get_optimizer_state_dict(par, optimizer, options=WHOLE)), own)
    flat = get_optimizer_state_dict(par, optimizer, options=FLAT)
    flat_own = get_optimizer_state_dict(model, plain, options=FLAT)
    found["optimizer, flat"] = equal(flat, flat_own)
    both = get_state_dict(par, optimizer, options=WHOLE)
    found["both"] = equal([both[0], by_name(both[1])], [want, own])
    trainable = get_model_state_dict(par, options=StateDictOptions(full_state_dict=True, ignore_frozen_params=True))
    found["trainable"] = equal(trainable, {name: t for name, t in want.items() if name != "blocks.1.bias"})

    def goes_on(set_states: Callable[[Any, torch.optim.Optimizer], Any]) -> bool:
        other, fresh = split(options, 1)
        set_states(other, fresh)
        same = equal(other.state_dict(), par.state_dict())
        other.step(*batch(2))
        fresh.step()
        return same and equal(get_model_state_dict(other, options=WHOLE), alone(3)[0].state_dict())

    def from_all(other: Any, fresh: torch.optim.Optimizer) -> None:
        set_model_state_dict(other, copy.deepcopy(want), options=WHOLE)
        set_optimizer_state_dict(
            other, fresh, copy.deepcopy(own), options=StateDictOptions(full_state_dict=True, strict=False)
        )

    def from_rank_0(other: Any, fresh: torch.optim.Optimizer) -> None:
        set_model_state_dict(other, copy.deepcopy(want) if is_first else {}, options=FROM_RANK_0)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
        set_optimizer_state_dict(other, fresh, copy.deepcopy(own) if is_first else {}, options=options)

    def flat_from_rank_0(other: Any, fresh: torch.optim.Optimizer) -> None:
        other.load_state_dict(want)
        set_optimizer_state_dict(other, fresh, copy.deepcopy(flat_own) if is_first else {}, options=FROM_RANK_0)

    def own_parts(other: Any, fresh: torch.optim.Optimizer) -> None:
        set_state_dict(
            other, fresh, model_state_dict=par.state_dict(),
            optim_state_dict=get_optimizer_state_dict(par, optimizer), options=lenient,
        )  # fmt: skip

    for way in (from_all, from_rank_0, flat_from_rank_0, own_parts):
        found[way.__name__] = goes_on(way)
    dcp.save({"model": get_model_state_dict(par, options=COPIED)}, checkpoint_id=f"{folder}/dcp")
    read = {"model": {name: torch.zeros_like(tensor) for name, tensor in want.items()}}
    dcp.load(read, checkpoint_id=f"{folder}/dcp")
    found["dcp"] = equal(read["model"], want)
    sw.save_pretrained(par, f"{folder}/weights")
    loaded = _safetensors(f"{folder}/weights")
    found["save_pretrained"] = equal({**loaded, "head.weight": loaded["tokens.weight"]}, want)
    optimizer.param_groups[0]["lr"] = 1e-2 * (1 + dist.get_rank())
    disagreement = refusal(lambda: get_optimizer_state_dict(par, optimizer, options=ON_RANK_0))
    found["rates differ"] = "ranks disagree on param_groups.0.lr of" in disagreement or not options.get("stages")
    return found


def read_whole(options: dict[str, Any]) -> dict[str, Any]:
    par, optimizer = split(options, 1)
    model, plain = alone(1)
    par.step(*batch(1))
    model(*batch(1)).backward()
    found: dict[str, Any] = {}
    wanted = dict(model.named_parameters())
    for name, parameter in par.named_parameters():
        own = wanted[name]
        read = [sw.full_tensor(parameter)]
        want = [own]
        if own.grad is not None:
            read.append(sw.full_tensor(parameter.grad))
            want.append(own.grad)
        if "exp_avg" in plain.state.get(own, {}):
            want.append(plain.state[own]["exp_avg"])
            read.append(sw.full_tensor(optimizer.state[parameter]["exp_avg"]))
        found[name] = all(torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in zip(read, want, strict=True))
    for name, buffer in par.named_buffers():
        found[name] = torch.equal(sw.full_tensor(buffer), dict(model.named_buffers())[name])
    of_parameters, of_gradients = sw.norms(par)
    norm = {name: float(p.detach().norm()) for name, p in wanted.items()}
    norm_of_gradients = {name: float(p.grad.norm()) for name, p in wanted.items() if p.grad is not None}
    found["norms"] = list(of_parameters.items()) == [(name, pytest.approx(x, rel=1e-9)) for name, x in norm.items()]
    found["gradients"] = of_gradients == pytest.approx(norm_of_gradients, rel=1e-9, abs=1e-15)
    weight = next(p for name, p in par.named_parameters() if name.startswith("blocks.") and p.grad is not None)
    found["a copy"] = "unknown which part of which tensor" in refusal(lambda: sw.full_tensor(weight.grad.clone()))
    return found


def read_beside_shards() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    x, y, loss = torch.randn(8, 16), torch.randn(8, 8), nn.functional.mse_loss

    def gradient(**how: Any) -> torch.Tensor:
        module = nn.Linear(16, 8)
        module.load_state_dict({"weight": torch.ones(8, 16), "bias": torch.ones(8)})
        kept.append(sw.parallelize(module, sw.plan(module, (x, y), 2, loss=loss, **how), loss=loss))
        kept[-1].step(x, y)
        return sw.full_tensor(kept[-1].weight.grad)

    kept: list[Any] = []  # both modules live
    return gradient(mesh=sw.Mesh(tp=2), strategies={"": "n@tp"}), gradient(mode="data_parallel")


def test_a_gradient_of_a_whole_module_is_read_beside_one_with_shards(run_ranks: RunRanks) -> None:
    for sharded, whole in run_ranks(read_beside_shards, 2):
        torch.testing.assert_close(whole, sharded)


@pytest.mark.parametrize("kind", list(PLANS))
@pytest.mark.sampled(2)
def test_tensors_and_norms_are_read_whole(run_ranks: RunRanks, kind: str) -> None:
    size, options = PLANS[kind]
    for found in run_ranks(read_whole, size, options):
        assert len(found) > 8, found
        assert all(found.values()), found


@sw.elementwise_optimizer
class Flattening(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("flat", torch.zeros(parameter.numel()))


def odd_states(options: dict[str, Any], folder: str) -> list[str]:
    par, _ = split(options, 0)
    optimizer = Flattening(par.parameters(), lr=0.1)
    optimizer.step()
    return [
        refusal(lambda: get_optimizer_state_dict(par, optimizer, options=ON_RANK_0)),
        refusal(lambda: dcp.save(get_optimizer_state_dict(par, optimizer), checkpoint_id=f"{folder}/odd")),
    ]


@pytest.mark.parametrize("kind", ["stages of shards", "shards"])
@pytest.mark.sampled(1)
def test_states_of_which_nothing_says_what_part_they_are_are_refused(
    run_ranks: RunRanks, tmp_path: Path, kind: str
) -> None:
    size, options = PLANS[kind]
    for found in run_ranks(odd_states, size, options, str(tmp_path)):
        assert all("it is unknown which part of the whole that is" in text for text in found), found


def _safetensors(folder: str) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    (path,) = Path(folder).glob("*.safetensors")
    return load_file(path)


@pytest.mark.parametrize("kind", PLANS)
@pytest.mark.sampled(2)
def test_whole_states_are_those_of_one_device(run_ranks: RunRanks, tmp_path: Path, kind: str) -> None:
    size, options = PLANS[kind]
    for found in run_ranks(whole_states, size, options, str(tmp_path)):
        assert [name for name, right in found.items() if right is not True] == []


# Errors of safetensors are around ours.
OF_LIBRARIES = (ValueError, RuntimeError)


def pickle_a_tensor() -> None:
    """Pickle calls torch.save for each tensor, which must not look through all objects for shards each time."""
    with mock.patch.object(dcp_guards, "ShardIndex", side_effect=AssertionError("it looks for shards")):
        pickle.dumps(torch.ones(3))


def files_of_ranks(options: dict[str, Any], folder: str) -> dict[str, Any]:
    """What refuses a file, or "", by who writes it."""
    import accelerate
    import safetensors.torch
    from accelerate import Accelerator

    par, optimizer = split(options, 1)
    rank, path = dist.get_rank(), f"{folder}/epoch=0-step=1.pt"
    torch.manual_seed(rank)

    def as_lightning(state: dict[str, Any]) -> None:
        buffer = io.BytesIO()
        torch.save({"epoch": 0, "state_dict": state, "optimizer_states": [optimizer.state_dict()]}, buffer)
        Path(path).write_bytes(buffer.getvalue())

    def opened(name: str) -> None:
        with Path(folder, name).open("wb") as file:
            torch.save(par.state_dict(), file)

    wrapped = nn.ModuleDict({"net": par})
    accelerator = Accelerator(cpu=True)
    refused: dict[str, Callable[[], Any]] = {
        "a state": lambda: torch.save(par.state_dict(), path),
        "of another rank": lambda: torch.save(par.state_dict(), f"{folder}/rank{1 - rank}.pt"),
        "of another rank, longer": lambda: torch.save(par.state_dict(), f"{folder}/rank{rank}5.pt"),
        "on the host": lambda: torch.save({name: t.cpu() for name, t in par.state_dict().items()}, path),
        "a wrapper": lambda: torch.save({"ema": wrapped.state_dict(), "epoch": 3}, path),
        "a module": lambda: torch.save({"model": wrapped}, path),
        "states": lambda: torch.save([optimizer.state_dict()], path),
        "an optimizer": lambda: torch.save(optimizer, path),
        "gradients": lambda: torch.save([p.grad for p in par.parameters()], path),
        "an old format": lambda: torch.save(par.state_dict(), path, _use_new_zipfile_serialization=False),
        "a file": lambda: opened("all.pt"),
        "Lightning": lambda: as_lightning(wrapped.state_dict()),
        "accelerate's model": lambda: accelerator.save_model(par, folder),
        "accelerate's model, pickled": lambda: accelerator.save_model(par, folder, safe_serialization=False),
        "accelerate.save": lambda: accelerate.utils.save(par.state_dict(), path, save_on_each_node=True),
        "safetensors": lambda: safetensors.torch.save_file(dict(_untied(par)), f"{folder}/a.safetensors"),
        "safetensors, bytes": lambda: safetensors.torch.save(dict(_untied(par))),
        "safetensors, model": lambda: safetensors.torch.save_model(par, f"{folder}/b.safetensors"),
    }
    par.step(*batch(1))
    Path(path).write_bytes(b"of before")
    found = {name: message(action, OF_LIBRARIES) for name, action in refused.items()}
    on_rank_0 = ("accelerate's model", "accelerate's model, pickled")  # the others write nothing
    found = {
        name: text for name, text in found.items() if "its shards of" not in text and not (rank and name in on_rank_0)
    }
    if Path(path).read_bytes() != b"of before":
        found["a file of before"] = "written over"
    dist.barrier()
    taken: dict[str, Callable[[], Any]] = {
        "a rank's": lambda: torch.save(par.state_dict(), f"{folder}/part-rank{rank}.pt"),
        "a rank's folder": lambda: torch.save(optimizer.state_dict(), Path(folder, f"mp_rank_0{rank}_states.pt")),
        "a rank's file": lambda: opened(f"rank={rank}"),
        "what ranks have equally": lambda: torch.save({"step": 3, "x": torch.ones(3), "net": nn.Linear(2, 2)}, path),
        "copies": lambda: torch.save({name: t.clone() for name, t in par.state_dict().items()}, path),
        "a pickled tensor": pickle_a_tensor,
        "torch's": lambda: dcp.save({"m": par.state_dict()}, checkpoint_id=f"{folder}/dcp"),
        "whole": lambda: torch.save(get_model_state_dict(par, options=ON_RANK_0), f"{folder}/whole-{rank}.pt"),
    }
    found |= {name: text for name, action in taken.items() if (text := message(action, OF_LIBRARIES))}
    before = [p.detach().clone() for p in par.parameters()]
    optimizer.step()
    par.load_state_dict(torch.load(f"{folder}/part-rank{rank}.pt"))
    optimizer.load_state_dict(torch.load(f"{folder}/mp_rank_0{rank}_states.pt"))
    if not all(map(torch.equal, before, par.parameters())):
        found["loaded"] = "other values"
    if rank == 0:
        make().load_state_dict(torch.load(f"{folder}/whole-0.pt"))
    return found


def _untied(par: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in par.state_dict().items() if name != "head.weight"}


@pytest.mark.parametrize("kind", ["stages", "shards"])
@pytest.mark.sampled(1)
def test_files_of_one_ranks_part_under_whole_names_are_refused(run_ranks: RunRanks, tmp_path: Path, kind: str) -> None:
    size, options = PLANS[kind]
    for found in run_ranks(files_of_ranks, size, options, str(tmp_path)):
        assert found == {}
