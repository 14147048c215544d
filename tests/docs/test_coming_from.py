"""What the pages say to those who come from other libraries, run on real ranks beside these."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shardwise as sw
from launch.gloo_ranks import RunRanks
from shardwise.hosts import free_port

ROOT = Path(__file__).parents[2]
TUTORIALS, LIGHTNING = ROOT / "docs" / "tutorials", ROOT / "examples" / "lightning_gpt.py"
RUN = ("-m", "shardwise.cli", "run", "-n", "2")


def outputs(*arguments: str, folder: Path) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )
    assert not done.returncode, done.stdout + done.stderr
    return done.stdout


def side(title: str, sign: str) -> str:
    """Return the script of one side of the diff under a title of the page."""
    section = (TUTORIALS / "coming-from.md").read_text().partition(f"## {title}\n")[2]
    diff = section.partition("```diff\n")[2].partition("```")[0].splitlines()
    lines = [line[1:] for line in diff if line[:1] in (" ", sign, "")]
    assert 15 < len(lines) < len(diff)
    return "\n".join(lines)


def train_both(folder: str, title: str, ports: Sequence[int]) -> list[list[float]]:
    """On a rank: run both scripts as a launcher starts them, and return the loss of each and the norms of its
    parameters. The other library is imported once for both."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "ACCELERATE_USE_CPU": "1"}
    os.environ["TORCHELASTIC_RUN_ID"] = "torchrun"  # by which Lightning knows that its ranks are there
    whole: Any = (lambda p: p.full_tensor()) if title == "torchtitan" else torch.detach
    results = []
    for sign, port, gathered in zip("-+", ports, (whole, sw.full_tensor), strict=True):
        dist.destroy_process_group()
        os.environ["MASTER_PORT"] = str(port)
        os.chdir(Path(folder, sign))
        names = runpy.run_path("train.py", run_name="__main__")
        model = names["module"] if title == "Lightning" else names["model"]
        loss = torch.zeros(()) if title == "Lightning" else names["loss"]
        norms = [torch.linalg.vector_norm(gathered(p).double()) for p in model.parameters()]
        results.append([float(value.detach()) for value in (loss, *norms)])
    return results


@pytest.mark.parametrize(
    ("title", "package", "ranks", "count"),
    [
        ("accelerate", "accelerate", 2, 4),
        ("Lightning", "lightning", 2, 4),
        ("torchtitan", "torch", 2, 10),
        pytest.param("torchtitan", "torch", 4, 10, marks=pytest.mark.long),
    ],
)
def test_both_sides_of_a_diff_train_alike(
    title: str, package: str, ranks: int, count: int, run_ranks: RunRanks, tmp_path: Path
) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    for sign in "-+":
        (tmp_path / sign).mkdir()
        (tmp_path / sign / "train.py").write_text(side(title, sign))
    theirs, ours = run_ranks(train_both, ranks, str(tmp_path), title, (free_port(), free_port()))[0]
    # The loss of rank 0 is that of its part of the batch, where the other tool splits batches.
    first = 0 if (title, ranks) == ("torchtitan", 2) else 1
    assert ours[first:] == pytest.approx(theirs[first:], rel=1e-5)
    assert len(theirs) == 1 + count


@pytest.mark.long
def test_the_lightning_example_trains_on_ranks_as_on_one_device(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    steps = ("--steps", "3", "--layers", "1")
    alone = outputs(str(LIGHTNING), *steps, folder=tmp_path)
    together = outputs(*RUN, str(LIGHTNING), "--ranks", *steps, "--save", "two.ckpt", folder=tmp_path)
    assert re.search(r"3 steps, loss (\d\.\d{4})", alone)[1] in together  # type: ignore[index]
    longer = outputs(str(LIGHTNING), "--resume", "two.ckpt", "--steps", "4", "--layers", "1", folder=tmp_path)
    assert "4 steps" in longer


RAY_JOB = """
import os, runpy

for name in {names}:
    runpy.run_path(f"{{name}}.py", run_name="__main__")
    if name != "actors":
        os.rename("norms.json", f"{{name}}.json")
"""


def train_alone() -> list[float]:
    """Train what both sides of the page about Ray Train train, in this process."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    data = TensorDataset(torch.randn(64, 16), torch.randint(4, (64,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for inputs, labels in DataLoader(data, batch_size=8):
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.norm().item() for p in model.parameters()]


@pytest.mark.parametrize(
    "names", [("ours", "actors"), pytest.param(("theirs", "ours"), marks=pytest.mark.long)], ids=str
)
def test_scripts_of_the_pages_about_ray_train_as_one_process(names: tuple[str, ...], tmp_path: Path) -> None:
    """The sides of the page about Ray Train, and ranks that are actors: in one session, which takes long to start."""
    pytest.importorskip("ray.train", exc_type=ImportError)
    (block,) = re.findall(r"```py\n(import ray\n.*?)```", (TUTORIALS / "schedulers.md").read_text(), re.DOTALL)
    actors = block.replace("num_gpus=1", "num_cpus=1").replace("64", "2")
    actors = actors.replace("import ray\n", "import ray\n\nray.init()\n", 1)
    scripts = {"theirs": side("Ray Train", "-"), "ours": side("Ray Train", "+"), "actors": actors}
    settings = "ignore_reinit_error=True, num_cpus=3, include_dashboard=False, object_store_memory=10**8"
    for name, script in scripts.items():
        assert script.count("ray.init()") == 1
        (tmp_path / f"{name}.py").write_text(script.replace("ray.init()", f"ray.init({settings})"))
    (tmp_path / "train.py").write_text(
        "import torch, shardwise as sw\nfrom torch import nn\n"
        "sw.init_ranks()\ntorch.manual_seed(0)\n"
        "model, batch = nn.Linear(8, 4), torch.randn(4, 8)\n"
        "plan = sw.plan(model, batch, sw.world_size(), mesh=sw.Mesh(dp=2), loss=lambda y: y.sum())\n"
        "par = sw.parallelize(model, plan, loss=lambda y: y.sum())\n"
        f"open(f'{tmp_path}/{{sw.rank()}}', 'w').write(str(float(par.step(batch))))\n"
    )
    (tmp_path / "job.py").write_text(RAY_JOB.format(names=names))
    outputs("job.py", folder=tmp_path)
    norms = [json.loads((tmp_path / f"{name}.json").read_text()) for name in names if name != "actors"]
    assert norms == [pytest.approx(train_alone(), rel=1e-5)] * len(norms)
    if "actors" in names:
        values = [(tmp_path / str(number)).read_text() for number in range(2)]
        assert values[0] == values[1]
