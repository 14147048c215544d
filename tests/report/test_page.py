"""The page of a plan: its figures are the plan's, nothing comes from a network, and a browser opens it."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shardwise as sw
from shardwise.plans.printing import format_figures, merged_operators
from shardwise.plans.quantities import format_bytes
from shardwise.report.page import write_page

BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.head = nn.Linear(64, 8)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.relu(layer(x))
        return F.cross_entropy(self.head(x), labels)


@pytest.fixture(scope="module")
def plan() -> sw.Plan:
    with torch.device("meta"):
        batch = torch.randn(32, 64), torch.zeros(32, dtype=torch.int64)
        return sw.plan(Net(), batch, sw.Cluster.load("h100-1x4"), mesh=sw.Mesh(dp=2, tp=2))


def text_of(page: Path) -> str:
    return html.unescape(page.read_text(encoding="utf-8"))


def test_every_figure_is_the_plans(plan: sw.Plan, tmp_path: Path) -> None:
    plan.report(tmp_path / "plan.html")
    text = text_of(tmp_path / "plan.html")
    assert f'id="figures">{format_figures(plan, plan.prediction)}</p>' in text
    assert f"{format_bytes(plan.prediction.peak_bytes)} in {plan.prediction.peak_at}" in text
    shares = [float(share) for share in re.findall(r"([\d.]+) %</td>", text.partition('id="memory"')[2])]
    assert sum(shares) == pytest.approx(100, abs=0.1 * len(shares))
    operators, _ = merged_operators(plan.only_stage)
    assert text.count('class="operator"') == len(operators)
    assert all(strategy in text and rule in text for _, strategy, rule, *_ in operators)
    assert all(entry.layout in text for entry in plan.parameters)
    assert text.count("<rect class=") == text.count("</title></rect>") > len(plan.operators)


def test_nothing_comes_from_elsewhere_and_names_are_texts(plan: sw.Plan, tmp_path: Path) -> None:
    hostile = plan.revised(
        operators=tuple(
            type(entry)(entry.name, entry.target, "<script>alert(1)</script>", entry.strategy, entry.source)
            for entry in plan.operators
        )
    )
    write_page(tmp_path / "plan.html", hostile)
    raw = (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert "<script" not in raw
    assert not re.search(r"(?:src|href)=\"(?!data:)", raw)
    assert "need the search that chose the plan" in raw  # no timeline of a plan without its search


def test_a_plan_without_a_prediction_says_so(tmp_path: Path) -> None:
    batch = torch.randn(8, 64), torch.zeros(8, dtype=torch.int64)
    unpriced = sw.plan(Net(), batch, 2, mode="data_parallel")
    write_page(tmp_path / "plan.html", unpriced)
    assert "has no prediction" in text_of(tmp_path / "plan.html")
    with pytest.raises(sw.PlanError, match="not chosen by price"):
        unpriced.report(tmp_path / "plan.html")


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here (Debian: apt-get install chromium)")
@pytest.mark.parametrize("dark", [False, True])
def test_a_browser_opens_it_without_complaints(plan: sw.Plan, tmp_path: Path, dark: bool) -> None:
    plan.report(tmp_path / "plan.html")
    assert BROWSER is not None
    shot = tmp_path / "page.png"
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--log-level=0"]
    command += ["--window-size=1200,1600", f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--force-dark-mode", "--blink-settings=preferredColorScheme=0"] if dark else []
    url = (tmp_path / "plan.html").as_uri()
    done = subprocess.run([*command, "--dump-dom", url], capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in done.stderr
    assert done.stdout.count("<details") == text_of(tmp_path / "plan.html").count("<details")
    subprocess.run([*command, f"--screenshot={shot}", url], capture_output=True, timeout=120, check=True)
    assert shot.stat().st_size > 10_000
