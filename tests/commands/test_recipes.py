"""``shardwise recipe``: every recipe trains, small, on two ranks as in one process, and is planned at its real size."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise import cli
from shardwise.commands.recipe import recipes

RunRanks = Callable[..., list[Any]]
PARAMETERS = {  # as published, in 1e9
    "gpt2": 0.124,
    "llama3-8b": 8.03,
    "llama3-70b": 70.6,
    "mixtral": 46.7,
    "qwen3-moe": 30.5,
    "vit-g": 1.01,
}


@pytest.fixture(autouse=True)
def _apart(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget the scripts that commands import: ``train`` is also a folder of tests."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = sys.modules.pop("train", None)
    yield
    sys.modules.pop("train", None)
    if before is not None:
        sys.modules["train"] = before


def script_of(folder: str) -> Any:
    spec = importlib.util.spec_from_file_location("recipe_script", Path(folder, "train.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def trains(folder: str) -> str:
    script_of(folder).main()
    return str(sw.Plan.load(Path(folder, "plan.json")).mesh)


def losses_of_one_process(folder: str) -> list[float]:
    script = script_of(folder)
    how = script.TRAIN
    torch.manual_seed(how["seed"])
    model = script.make_model()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=how["learning_rate"], betas=(0.9, 0.95), weight_decay=how["weight_decay"]
    )
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, script.schedule)
    losses = []
    loader = sw.DataLoader(script.Data(), nn.Identity(), how["batch"], drop_last=True, seed=how["seed"])
    for _, batch in zip(range(how["steps"]), loader, strict=False):
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), how["clip_norm"])
        optimizer.step()
        optimizer.zero_grad()
        rates.step()
        losses.append(loss.item())
    return losses


# The models of Llama differ in sizes alone, and two have experts.
LIKE_ANOTHER = ("llama3-70b", "mixtral")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.long] if n in LIKE_ANOTHER else []) for n in sorted(PARAMETERS)]
)
def test_a_small_recipe_trains_on_two_ranks_as_in_one_process(name: str, tmp_path: Path, run_ranks: RunRanks) -> None:
    folder = str(tmp_path / name)
    assert cli.main(["recipe", name, "--cluster", "2", "--tiny", "-o", folder]) == 0
    run_ranks(trains, 2, folder)
    lines = [json.loads(line) for line in Path(folder, "checkpoints", "log.jsonl").read_text().splitlines()]
    alone = losses_of_one_process(folder)
    assert len(alone) == 3
    assert [line["loss"] for line in lines] == pytest.approx(alone, rel=2e-6)
    assert alone[-1] != alone[0]


def plan_real(name: str, cluster: str, folder: Path) -> sw.Plan:
    assert cli.main(["recipe", name, "--cluster", cluster, "-o", str(folder)]) == 0
    plan = sw.Plan.load(folder / "plan.json")
    module, _ = script_of(str(folder)).build()
    assert sum(p.numel() for p in module.parameters()) / 1e9 == pytest.approx(PARAMETERS[name], rel=0.01)
    assert plan.precision.compute == torch.bfloat16
    assert plan.prediction.peak_bytes <= sw.Cluster.load(cluster).device.usable_bytes
    return plan


def test_a_recipe_of_real_size_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_real("gpt2", "h100-1x8", tmp_path / "gpt2")
    assert plan.num_ranks == 8
    text = (tmp_path / "gpt2" / "train.py").read_text()
    assert "shardwise plan train.py:build --cluster h100-1x8 --precision compute=bf16" in text
    assert "{" + "{" not in text
    assert cli.main(["recipe", "gpt2", "--cluster", "h100-1x8", "-o", str(tmp_path / "gpt2")]) == 2
    assert "exists" in capsys.readouterr().err


def test_a_recipe_reads_data_beside_its_script_and_takes_any_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, cluster = tmp_path / "my recipe", tmp_path / "of\\new\\x.toml"
    bundled = resources.files("shardwise.costs.clusters").joinpath("local.toml")
    text = bundled.read_text(encoding="utf-8").replace("size = 65536", "size = 2")
    cluster.write_text(text, encoding="utf-8")
    assert cli.main(["recipe", "gpt2", "--cluster", str(cluster), "--tiny", "-o", str(folder)]) == 0
    assert f"-n N '{folder}/train.py' trains" in capsys.readouterr().out
    sizes = folder / "recipe.toml"
    sizes.write_text(sizes.read_text().replace('data = ""', 'data = "ids"'))
    (folder / "ids").write_bytes(bytes(4 * 64))
    script = script_of(str(folder))
    assert len(script.Data()) == 4
    assert str(cluster) in script.__doc__


def test_a_recipe_that_does_not_fit_leaves_no_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["recipe", "vit-g", "--cluster", "t4-1x1", "-o", str(tmp_path)]) == 2
    assert "are allowed" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "cluster"),
    [
        ("gpt2", "h100-1x8"),
        ("llama3-8b", "h100-1x8"),
        ("llama3-70b", "h100-8x8"),
        ("mixtral", "h100-4x8"),
        ("qwen3-moe", "h100-4x8"),
        ("vit-g", "a100-80-1x8"),
    ],
)
def test_every_recipe_of_real_size_is_planned(name: str, cluster: str, tmp_path: Path) -> None:
    plan_real(name, cluster, tmp_path / name)


def test_every_recipe_is_tested() -> None:
    assert recipes().keys() == PARAMETERS.keys()
