"""What the pages say to those who come from other libraries, run on real ranks beside these."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TUTORIALS, LIGHTNING = ROOT / "docs" / "tutorials", ROOT / "examples" / "lightning_gpt.py"
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0", "--rdzv-backend", "c10d")
RUN = ("-m", "shardwise.cli", "run", "-n", "2")
PRINT = """
import json, os
whole = {WHOLE}
norms = [float(torch.linalg.vector_norm(whole(p).double())) for p in model.parameters()]
if os.environ["RANK"] == "0":
    print(json.dumps([float(loss), *norms]))
"""


def outputs(*arguments: str, folder: Path) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=240
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


@pytest.mark.parametrize(
    ("title", "package", "ranks", "whole", "count"),
    [
        ("accelerate", "accelerate", 2, "lambda p: p.detach()", 4),
        ("Lightning", "lightning", 2, "lambda p: p.detach()", 4),
        ("torchtitan", "torch", 2, "lambda p: p.full_tensor()", 10),
        pytest.param("torchtitan", "torch", 4, "lambda p: p.full_tensor()", 10, marks=pytest.mark.long),
    ],
)
def test_both_sides_of_a_diff_train_alike(
    title: str, package: str, ranks: int, whole: str, count: int, tmp_path: Path
) -> None:
    pytest.importorskip(package)
    results: list[Any] = []
    for sign, start, gathers in (("-", TORCHRUN, whole), ("+", RUN, "sw.full_tensor")):
        script = side(title, sign)
        script += "\nloss, model = torch.zeros(()), module" if title == "Lightning" else ""
        folder = tmp_path / sign
        folder.mkdir()
        (folder / "train.py").write_text(script + PRINT.replace("{WHOLE}", gathers))
        command = [str(ranks) if word == "2" else word for word in start]
        results.append(json.loads(outputs(*command, "train.py", folder=folder).splitlines()[-1]))
    # The loss of rank 0 is that of its part of the batch, where the other tool splits batches.
    first = 0 if (title, ranks) == ("torchtitan", 2) else 1
    assert results[1][first:] == pytest.approx(results[0][first:], rel=1e-5)
    assert len(results[0]) == 1 + count


@pytest.mark.long
def test_the_lightning_example_trains_on_ranks_as_on_one_device(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    steps = ("--steps", "3", "--layers", "1")
    alone = outputs(str(LIGHTNING), *steps, folder=tmp_path)
    together = outputs(*RUN, str(LIGHTNING), "--ranks", *steps, "--save", "two.ckpt", folder=tmp_path)
    assert re.search(r"3 steps, loss (\d\.\d{4})", alone)[1] in together  # type: ignore[index]
    longer = outputs(str(LIGHTNING), "--resume", "two.ckpt", "--steps", "4", "--layers", "1", folder=tmp_path)
    assert "4 steps" in longer


def test_both_sides_of_the_ray_train_page_train_alike(tmp_path: Path) -> None:
    pytest.importorskip("ray.train", exc_type=ImportError)
    results: list[Any] = []
    for sign in "-+":
        script = side("Ray Train", sign).replace("ray.init(", "ray.init(num_cpus=3, object_store_memory=10**8, ")
        (tmp_path / "job.py").write_text(script)
        outputs("job.py", folder=tmp_path)
        results.append(json.loads((tmp_path / "norms.json").read_text()))
        (tmp_path / "norms.json").unlink()
    assert results[1] == pytest.approx(results[0], rel=1e-5)
    assert len(results[0]) == 4


def test_actors_of_ray_are_ranks(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    (block,) = re.findall(r"```py\n(import ray\n.*?)```", (TUTORIALS / "schedulers.md").read_text(), re.DOTALL)
    start = "import ray\n\nray.init(num_cpus=2, include_dashboard=False, object_store_memory=10**8)\n"
    job = block.replace("num_gpus=1", "num_cpus=1").replace("64", "2").replace("import ray\n", start, 1)
    (tmp_path / "job.py").write_text(job)
    (tmp_path / "train.py").write_text(
        "import torch, shardwise as sw\nfrom torch import nn\n"
        "sw.init_ranks()\ntorch.manual_seed(0)\n"
        "model, batch = nn.Linear(8, 4), torch.randn(4, 8)\n"
        "plan = sw.plan(model, batch, sw.world_size(), mesh=sw.Mesh(dp=2), loss=lambda y: y.sum())\n"
        "par = sw.parallelize(model, plan, loss=lambda y: y.sum())\n"
        f"open(f'{tmp_path}/{{sw.rank()}}', 'w').write(str(float(par.step(batch))))\n"
    )
    outputs("job.py", folder=tmp_path)
    values = [(tmp_path / str(number)).read_text() for number in range(2)]
    assert values[0] == values[1]
