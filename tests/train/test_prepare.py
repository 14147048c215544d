"""``sw.prepare``: a script for one device on real gloo ranks, with the five lines that change."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Subset, TensorDataset, WeightedRandomSampler

import shardwise as sw
from launch.gloo_ranks import RunRanks
from raising import raises, refusal
from runtime.training import train
from shardwise.errors import PlanWarning


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.down(torch.tanh(self.up(x))), labels)


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(22, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(0, 4, (22,), generator=generator))


def parts() -> tuple[nn.Module, torch.optim.Optimizer, Any, DataLoader[Any]]:
    torch.manual_seed(0)
    model = Net().double()
    optimizer = torch.optim.AdamW(
        [{"params": [model.up.weight, model.down.weight]}, {"params": [model.up.bias, model.down.bias], "lr": 0.01}],
        lr=0.05,
    )
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    return model, optimizer, schedule, DataLoader(data(), batch_size=8, shuffle=True)


def trains(folder: str, how: dict[str, Any]) -> dict[str, Any]:
    model, optimizer, schedule, loader = parts()
    par, prepared, batches = sw.prepare(model, optimizer, loader, search="sharding_propagation", **how)
    taken = [batch for _ in range(2) for batch in batches]
    losses = train(par, taken, optimizer, schedule).losses
    sw.save_checkpoint(f"{folder}/run", par, optimizer, schedule, data=batches)  # as people type it
    again_model, again, rates, again_loader = parts()
    other = sw.prepare(again_model, again, again_loader, plan=par.plan)
    found = sw.load_checkpoint(f"{folder}/run", other.par, again, rates, data=other.loader)
    return {
        "losses": losses,
        "whole": {name: sw.full_tensor(p) for name, p in other.par.named_parameters()},
        "same": prepared is optimizer,
        "steps": (found.step, other.loader.epoch, rates.last_epoch, again.param_groups[0]["lr"]),
        "samples": len(taken[-1][0]),
        "mesh": str(par.plan.mesh),
    }


@pytest.mark.parametrize("how", [{}, {"zero": 3}], ids=["dp", "zero 3"])
def test_a_prepared_script_trains_as_on_one_device(how: dict[str, Any], run_ranks: RunRanks, tmp_path: Any) -> None:
    results = run_ranks(trains, 2, str(tmp_path), how)
    model, optimizer, schedule, _ = parts()
    loader = sw.DataLoader(data(), nn.Identity(), 8)
    losses = train(model, [batch for _ in range(2) for batch in loader], optimizer, schedule).losses
    for found in results:
        assert found["losses"] == pytest.approx(losses, rel=1e-12)
        for name, value in model.named_parameters():
            torch.testing.assert_close(found["whole"][name], value.detach(), rtol=1e-9, atol=1e-12)
        assert found["same"], "schedulers keep their optimizer"
        assert found["steps"] == (6, 2, 6, pytest.approx(0.05 / 8))
        assert found["samples"] == 3, "this rank's part of the last six samples"
        assert found["mesh"] == "Mesh(dp=2)"


def last_batch_of_one() -> tuple[list[float], list[str]]:
    model, optimizer, _, _ = parts()
    loader = DataLoader(Subset(data(), range(17)), batch_size=8)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        par, _, batches = sw.prepare(model, optimizer, loader, mode="data_parallel", micro_batch=4)
        losses = train(par, list(batches), optimizer).losses
    return losses, [str(one.message) for one in said if "parts of" in str(one.message)]


def test_a_last_batch_of_one_sample_needs_no_micro_batches(run_ranks: RunRanks) -> None:
    model, optimizer, _, _ = parts()
    losses = train(model, list(DataLoader(Subset(data(), range(17)), batch_size=8)), optimizer).losses
    for found, said in run_ranks(last_batch_of_one, 2):
        assert found == pytest.approx(losses, rel=1e-12)
        assert not said, "the loader itself made an empty part"


class Stream(IterableDataset[Any]):
    """A data set that keeps its position in itself."""

    def __init__(self, handle: Any = None) -> None:
        self.at, self.handle = 0, handle

    def __iter__(self) -> Any:
        while self.at < 22:
            self.at += 1
            yield data()[self.at - 1]


class Resumable(Stream):
    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Broken(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        raise KeyError("no such sample")


STREAMS = {"copied": (Stream, False), "its state": (Resumable, False), "its state, not copied": (Resumable, True)}


def adagrad(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(model.parameters(), lr=0.05, initial_accumulator_value=0.3)


class Unknown(torch.optim.SGD):
    """An optimizer that no plan knows."""


class Eager(torch.optim.Adagrad):
    """An optimizer of whole matrices, which makes their states in its constructor."""

    def step(self, closure: Any = None) -> None: ...


def edges_on_ranks() -> dict[str, Any]:
    found: dict[str, Any] = {}
    how = {"search": "sharding_propagation", "mesh": sw.Mesh(dp=2)}

    def prepared(loader: DataLoader[Any], **settings: Any) -> Any:
        model, optimizer, _, _ = parts()
        return sw.prepare(model, optimizer, loader, **settings).loader

    for name, (kind, held) in STREAMS.items():
        with open(__file__) as file:
            found[name] = [y for _, y in prepared(DataLoader(kind(file if held else None), batch_size=8), **how)]
    with open(__file__) as file:
        found["handle"] = refusal(lambda: prepared(DataLoader(Stream(file), batch_size=8), **how), Exception)
    batches = DataLoader(data(), batch_size=8)
    found["nothing fits"] = refusal(lambda: prepared(batches, memory_bytes=100), Exception)
    found["setting"] = refusal(lambda: prepared(batches, **how, no_such_setting=1), Exception)
    found["sample"] = refusal(lambda: prepared(DataLoader(Broken(*data().tensors), batch_size=8), **how), Exception)
    model, _, _, loader = parts()
    with pytest.warns(PlanWarning, match="Unknown") if dist.get_rank() == 0 else nullcontext():
        sw.prepare(model, sw.elementwise_optimizer(Unknown)(model.parameters()), loader, **how)
    found["adagrad"] = []
    for settings in ({"mesh": sw.Mesh(tp=2), "strategies": {"up": "n@tp", "down": "k@tp"}}, {**how, "zero": 3}):
        model, _, _, loader = parts()
        par, optimizer, batches = sw.prepare(model, adagrad(model), loader, **settings)
        train(par, batches, optimizer)
        assert any(layout.positions for layout in par.layouts.values()), "some parameters are split"
        found["adagrad"].append((str(settings), {name: sw.full_tensor(p) for name, p in par.named_parameters()}))
    return found


def test_preparing_moves_no_data_set_raises_errors_on_all_ranks_and_splits_initial_states(run_ranks: RunRanks) -> None:
    results = run_ranks(edges_on_ranks, 2)
    for name in STREAMS:
        batches = zip(*(found[name] for found in results), strict=True)
        assert torch.cat([part for batch in batches for part in batch]).tolist() == data().tensors[1].tolist(), name
    model = parts()[0]
    optimizer = adagrad(model)
    train(model, sw.DataLoader(data(), nn.Identity(), 8), optimizer)
    for rank, found in enumerate(results):
        for settings, whole in found["adagrad"]:
            for name, value in model.named_parameters():
                # Rounding of float64 sums in another order, in three steps.
                torch.testing.assert_close(whole[name], value.detach(), rtol=1e-9, atol=1e-12, msg=settings + name)
        assert "cannot be copied" in found["handle"]
        assert found["nothing fits"].startswith("NothingFits")
        assert "no_such_setting" in found["setting"]
        assert found["sample"].startswith("ShardwiseError: rank 0: KeyError" if rank else "KeyError")


def test_what_cannot_be_prepared_is_refused_by_name() -> None:
    model, optimizer, _, loader = parts()
    with raises(sw.ShardwiseError, "(model, optimizer, loader)", "DataLoader"):
        sw.prepare(model, loader, optimizer)  # type: ignore[arg-type]
    with raises(sw.ShardwiseError, "not", "list", fix="sw.DataLoader"):
        sw.prepare(model, optimizer, [data()[:4]])  # type: ignore[arg-type]
    with raises(sw.ShardwiseError, "not the model's", fix="model.parameters()"):
        sw.prepare(Net(), optimizer, loader)
    with raises(sw.ShardwiseError, "plan=", "cluster, zero"):
        sw.prepare(model, optimizer, loader, plan="plan.json", cluster=2, zero=1)
    weights = WeightedRandomSampler([1.0] * 22, 22)
    for other in (
        DataLoader(data(), batch_size=4, sampler=weights),
        DataLoader(data(), batch_size=None),
        DataLoader(data(), batch_size=4, sampler=RandomSampler(data(), num_samples=5)),
        DataLoader(Subset(data(), range(5)), batch_size=2, sampler=RandomSampler(data(), replacement=True)),
    ):
        with raises(sw.ShardwiseError, "sampler", fix="shuffle"):
            sw.prepare(model, optimizer, other)
    with raises(sw.ShardwiseError, "Eager", fix="prepare before it"):
        sw.prepare(model, sw.matrix_optimizer(Eager)(model.parameters()), loader)
    meta = Net().to("meta")
    with raises(sw.ShardwiseError, "Adagrad made states", "without values", fix="par.parameters()"):
        sw.prepare(meta, adagrad(meta), loader)
    model(*data()[:4]).backward()
    optimizer.step()
    with raises(sw.ShardwiseError, "AdamW has stepped", fix="sw.load_checkpoint"):
        sw.prepare(model, optimizer, loader)


def test_the_step_of_a_checkpoint_is_in_its_name_or_in_the_optimizer(tmp_path: Any) -> None:
    model, optimizer, schedule, _ = parts()
    with raises(sw.ShardwiseError, "finished", "'run'", fix="step="):
        sw.save_checkpoint(tmp_path / "run", model, optimizer)
    sw.save_checkpoint(tmp_path / "step-40", model, optimizer, schedule)
    assert sw.load_checkpoint(tmp_path / "step-40", model, optimizer, schedule).step == 40
    for _ in range(3):
        model(*data()[:4]).backward()
        optimizer.step()
    sw.save_checkpoint(tmp_path / "run", model, optimizer, schedule)
    assert sw.load_checkpoint(tmp_path / "run", model).step == 3
