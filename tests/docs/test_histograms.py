"""The W&B side of the histograms in docs/training.md, on ranks; W&B is not installed: an object has its interface."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from docs.blocks import blocks_of
from docs.test_code_blocks import run_script
from launch.gloo_ranks import RunRanks

PAGE = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
STAND_IN = """
import json
import numpy

class Histogram:
    def __init__(self, sequence=None, np_histogram=None, num_bins=64):
        counts, edges = numpy.histogram(sequence, bins=num_bins)
        self.histogram, self.bins = counts.tolist(), edges.tolist()

class Run:
    logged = []

    def log(self, data, step=None):
        self.logged += [(step, name, value.histogram, value.bins) for name, value in data.items()]

    def finish(self):
        json.dump(self.logged, open("logged.json", "w"))

def init(project=None):
    return Run()
"""


def test_histograms_for_wandb_are_those_of_one_device(
    tmp_path: Path, run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {block.file: block.code for block in blocks_of(PAGE) if block.file}
    diff = (
        PAGE.partition("## Histograms of whole tensors")[2].partition("```diff\n")[2].partition("```")[0].splitlines()
    )
    script = files["histograms.py"]
    for removed, added in zip(diff[::2], diff[1::2], strict=True):
        assert (removed[0], added[0], script.count(removed[1:])) == ("-", "+", 1)
        script = script.replace(removed[1:], added[1:])
    for name, text in (("model.py", files["model.py"]), ("histograms.py", script), ("wandb.py", STAND_IN)):
        (tmp_path / name).write_text(text)
    run_ranks(run_script, 2, str(tmp_path), "histograms.py")

    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "model", raising=False)
    torch.manual_seed(0)
    namespace: dict[str, type[torch.nn.Module]] = {}
    exec(files["model.py"], namespace)
    net, text = namespace["Net"](), torch.randint(256, (16, 33), generator=torch.Generator().manual_seed(1))
    net(text[:, :-1], text[:, 1:]).backward()
    logged = json.loads((tmp_path / "logged.json").read_text())
    first = {name: (counts, edges) for step, name, counts, edges in logged if step == 0}
    assert len(logged) == 2 * len(first) == 4 * len([*net.parameters()])
    for name, parameter in net.named_parameters():
        counts, edges = first[f"parameters/{name}"]
        assert counts == np.histogram(parameter.detach().numpy(), bins=64)[0].tolist()
        counts, edges = first[f"gradients/{name}"]
        assert parameter.grad is not None
        assert sum(counts) == parameter.numel()
        low, high = parameter.grad.min().item(), parameter.grad.max().item()
        assert (edges[0], edges[-1]) == pytest.approx((low, high), rel=1e-4, abs=1e-9)
