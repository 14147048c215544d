"""Lightning's Trainer on real gloo ranks: it trains as on one device, and its checkpoints are those of one device."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("lightning")

import lightning.pytorch as pl

import shardwise as sw
from launch.gloo_ranks import run_on_ranks
from raising import refusal
from shardwise.lightning import ShardwiseStrategy

KINDS: dict[str, Any] = {
    "tp": {"mesh": sw.Mesh(tp=2), "strategies": {"0": "n@tp", "4": "n@tp"}},
    "zero3": {"mesh": sw.Mesh(dp=2), "zero": 3},
}


WHOLE: dict[str, Any] = {
    "Muon": lambda parameters: torch.optim.Muon(parameters, lr=0.02),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.02),
    "LBFGS": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=3),
}


class Module(pl.LightningModule):
    """``split``: a kind of plan, or None on one device."""

    def __init__(self, split: str | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.0), nn.Linear(8, 8), nn.Linear(8, 4))
        self.net[4].weight.data.mul_(2.0)
        self.double()
        self.split = split
        self.seen: list[float] = []

    def configure_model(self) -> None:
        if self.split is not None and not isinstance(self.net, sw.Parallel):
            example = torch.zeros(8, 6, dtype=torch.float64)
            plan = sw.plan(self.net, example, 2, search="sharding_propagation", **KINDS[self.split])
            self.net = sw.parallelize(self.net, plan)

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)
        self.seen.append(loss.item())
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        self.log("valid", nn.functional.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)]


class Matrices(Module):
    """Trained by an optimizer that looks at whole matrices."""

    def __init__(self, name: str, split: str | None = None) -> None:
        super().__init__(split)
        self.net = nn.Sequential(
            nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Identity(), nn.Identity(), nn.Linear(8, 4, bias=False)
        ).double()
        self.name = name

    def configure_optimizers(self) -> Any:
        return WHOLE[self.name](self.parameters())


def loader() -> Any:
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(24, 6, generator=generator, dtype=torch.float64), torch.randint(0, 4, (24,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=8)


def trainer(epochs: int, strategy: Any, folder: str, saves: bool = False) -> pl.Trainer:
    warnings.simplefilter("ignore")
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        default_root_dir=folder,
        gradient_clip_val=0.5,
        enable_checkpointing=saves,
        use_distributed_sampler=False,
        **quiet,
    )


def trains(folder: str) -> dict[str, Any]:
    os.environ.pop("SLURM_NTASKS", None)
    found: dict[str, Any] = {}
    for kind in KINDS:
        module = Module(kind)
        run = trainer(2, ShardwiseStrategy(), folder)
        run.fit(module, loader(), loader())
        found[kind] = module.seen, float(run.callback_metrics["valid"])
        run.save_checkpoint(f"{folder}/{kind}.ckpt")
    other = Module("tp")  # saved under another plan
    trainer(3, ShardwiseStrategy(), folder).fit(other, loader(), ckpt_path=f"{folder}/zero3.ckpt", weights_only=False)
    found["resumed"] = other.seen
    found["saved by another strategy"] = refusal(lambda: torch.save(other.state_dict(), f"{folder}/other.ckpt"))
    found["not parallel"] = refusal(lambda: trainer(1, ShardwiseStrategy(), folder).fit(Module(), loader()))
    return found


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_the_trainer_trains_as_on_one_device_and_saves_what_one_device_saves(tmp_path: Path) -> None:
    results = run_on_ranks(trains, 2, (str(tmp_path),), tmp_path, 240)
    module = Module()
    run = trainer(2, "auto", str(tmp_path))
    run.fit(module, loader(), loader())
    run.save_checkpoint(tmp_path / "alone.ckpt")
    valid = float(run.callback_metrics["valid"])
    longer = Module()
    trainer(3, "auto", str(tmp_path)).fit(longer, loader())
    for found in results:
        for kind in KINDS:
            assert found[kind][0] == pytest.approx(module.seen, rel=1e-12)
            assert found[kind][1] == pytest.approx(valid, rel=1e-12)
        assert found["resumed"] == pytest.approx(longer.seen[6:], rel=1e-10)
        assert "shards" in found["saved by another strategy"]
        assert "holds no parallel module" in found["not parallel"]
    want = torch.load(tmp_path / "alone.ckpt", weights_only=False)
    for kind in KINDS:
        saved = torch.load(tmp_path / f"{kind}.ckpt", weights_only=False)
        assert saved["state_dict"].keys() == want["state_dict"].keys()
        for name, value in want["state_dict"].items():
            torch.testing.assert_close(saved["state_dict"][name], value, rtol=1e-9, atol=1e-12)
        states, wanted = saved["optimizer_states"][0]["state"], want["optimizer_states"][0]["state"]
        for index, state in wanted.items():
            for key, value in state.items():
                torch.testing.assert_close(states[index][key], value, rtol=1e-9, atol=1e-12)
        again = Module()
        trainer(3, "auto", str(tmp_path)).fit(again, loader(), ckpt_path=tmp_path / f"{kind}.ckpt", weights_only=False)
        assert again.seen == pytest.approx(longer.seen[6:], rel=1e-10)


def trains_matrices(folder: str, name: str) -> list[float]:
    """On a rank: losses of an epoch, and of a second one that goes on with the checkpoint of one device."""
    os.environ.pop("SLURM_NTASKS", None)
    first, second = Matrices(name, "tp"), Matrices(name, "zero3")
    trainer(1, ShardwiseStrategy(), f"{folder}/split", saves=True).fit(first, loader())
    alone = f"{folder}/alone.ckpt"
    trainer(2, ShardwiseStrategy(), folder).fit(second, loader(), ckpt_path=alone, weights_only=False)
    return first.seen + second.seen


@pytest.mark.parametrize("name", ["Muon", *(pytest.param(name, marks=pytest.mark.long) for name in list(WHOLE)[1:])])
@pytest.mark.filterwarnings("ignore")
def test_optimizers_of_whole_matrices_save_and_resume_what_one_device_does(name: str, tmp_path: Path) -> None:
    """float64; Muon orthogonalizes in bfloat16, whose 2^-8 rounds what the order of a sum changes: at a learning rate
    of 0.02, 1e-3 of a loss."""
    module, longer, again = Matrices(name), Matrices(name), Matrices(name)
    run = trainer(1, "auto", str(tmp_path))
    run.fit(module, loader())
    run.save_checkpoint(tmp_path / "alone.ckpt")
    trainer(2, "auto", str(tmp_path)).fit(longer, loader())
    exactness = 1e-3 if name == "Muon" else 1e-9
    for losses in run_on_ranks(trains_matrices, 2, (str(tmp_path), name), tmp_path, 240):
        assert losses == pytest.approx(longer.seen, rel=exactness)
    (path,) = (tmp_path / "split").rglob("*.ckpt")  # of the Trainer's default callback
    saved, want = (torch.load(at, weights_only=False)["optimizer_states"][0] for at in (path, tmp_path / "alone.ckpt"))
    assert saved["state"].keys() == want["state"].keys()
    for index, state in want["state"].items():
        assert saved["state"][index].keys() == state.keys()
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(saved["state"][index][key], value, rtol=exactness, atol=1e-6)
    trainer(2, "auto", str(tmp_path)).fit(again, loader(), ckpt_path=path, weights_only=False)
    assert again.seen == pytest.approx(longer.seen[len(longer.seen) // 2 :], rel=exactness)
