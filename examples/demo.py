"""The main job: a GPT trains on real text on eight ranks under two plans, and its losses are those of one process.

Three runs of ``train_gpt.py`` from the same seed: one process in plain PyTorch, eight ranks under the automatic plan,
eight ranks under a plan of two-way data by four-way tensor parallelism. All of them compute in float32, where a sum in
another order differs in the last bits; training amplifies that from step to step. The curves must agree to
``TOLERANCE``; that the programs are equal, not only close, is shown before, in float64, by ``sw.verify``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch
from gpt import GPT, GPTConfig
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from text import batches, load_bytes
from train_gpt import make_plan

import shardwise as sw

RANKS, STEPS = 8, 50
# float32 rounds to 6e-8, so a loss near 3 to 2e-7, and sums over ranks are taken in another order. Measured over the
# first 60 steps: 5e-7 for both plans. Twenty times that leaves room for other processors' rounding.
TOLERANCE = 1e-5
HERE = Path(__file__).parent


def run(console: Console, title: str, command: list[str], out: Path) -> dict[str, object]:
    """Run one training with a progress bar fed by its output; returns its losses and text."""
    columns = (
        TextColumn("{task.description:32}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("loss {task.fields[loss]}"),
    )
    process = subprocess.Popen([*command, "--steps", str(STEPS), "--out", str(out)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(title, total=STEPS, loss="-")
        for line in process.stdout:
            words = line.split()
            if words[:1] == ["step"]:
                progress.update(task, completed=int(words[1].split("/")[0]), loss=words[3])
            else:
                console.print(line.rstrip())
    if process.wait() != 0:
        raise SystemExit(f"{title} failed with exit code {process.returncode}: {' '.join(command)}")
    result: dict[str, object] = json.loads(out.read_text())
    return result


def prove(console: Console, name: str) -> None:
    """Verify the plan on the virtual cluster, for two layers of the model and a small batch."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=2, context=16))
    batch = next(batches(load_bytes(), 8, 16, seed=2))
    report = sw.verify(model, batch, make_plan(model, batch, name, RANKS))
    console.print(f"[bold]{name}[/bold] in float64 on the virtual cluster, 2 layers, 3 optimizer steps: {report}")
    if not report.ok:
        raise SystemExit(1)


def main() -> None:
    console = Console()
    out = HERE.parent / "out"
    out.mkdir(exist_ok=True)
    script = str(HERE / "train_gpt.py")
    launch = [sys.executable, "-m", "shardwise.cli", "run", "-n", str(RANKS), script]
    runs = {"none": [sys.executable, script], "auto": [*launch, "--plan", "auto"], "2x4": [*launch, "--plan", "2x4"]}
    titles = {"none": "one process", "auto": "8 ranks, automatic plan", "2x4": "8 ranks, 2 x 4 plan"}
    for name in ("auto", "2x4"):
        prove(console, name)
    results = {name: run(console, titles[name], command, out / f"{name}.json") for name, command in runs.items()}
    for name in ("auto", "2x4"):
        console.rule(f"plan {name}")
        console.print(str(sw.Plan.load(out / f"{name}.plan.json")), markup=False, highlight=False, soft_wrap=True)
    losses = {name: result["losses"] for name, result in results.items()}
    table = Table("step", *titles.values(), title="training loss")
    for step in sorted({0, *range(4, STEPS, 5), STEPS - 1}):
        table.add_row(str(step + 1), *(f"{losses[name][step]:.6f}" for name in titles))
    console.print(table)
    worst = {
        name: max(abs(a - b) for a, b in zip(losses[name], losses["none"], strict=True)) for name in ("auto", "2x4")
    }
    for name, difference in worst.items():
        console.print(
            f"largest difference of {titles[name]} from one process: {difference:.2g} (tolerance {TOLERANCE:g})"
        )
    console.rule("text written by the model of the 2 x 4 plan")
    console.print(str(results["2x4"]["text"]), markup=False, highlight=False)
    same = results["2x4"]["text"] == results["none"]["text"]
    console.print(f"(the model trained in one process writes {'the same' if same else 'another'} text)")
    if max(worst.values()) > TOLERANCE:
        raise SystemExit("the curves differ by more than the tolerance")


if __name__ == "__main__":
    main()
