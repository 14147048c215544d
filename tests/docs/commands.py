"""The outputs in docs/commands.md: every command is run in an empty folder, and what it prints is written down.

``make commands`` writes the page anew; its test runs the commands and compares.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import tempfile
from collections.abc import Iterator
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path

from shardwise import cli

PAGE = Path(__file__).parents[2] / "docs" / "commands.md"
MOST_LINES = 16
# What differs from machine to machine (rounding), and from version to version of plan files (digests).
_LEFT_OUT = re.compile(
    r"; model \w{12}, plan \w{12}| worst relative error \S+|^  (?:parameter|gradient|loss|output) .* on rank \d+\n",
    re.MULTILINE,
)
MODEL = """import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn import functional as F


def build():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512))
    return net, (torch.randn(1024, 512), torch.randint(512, (1024,))), F.cross_entropy


tp = {"0": ColwiseParallel(), "2": RowwiseParallel()}
"""


def page(written: str) -> str:
    """The page with the outputs as they are: what follows each ``$ shardwise`` line of a ``console`` block."""
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        Path("model.py").write_text(MODEL, encoding="utf-8")
        return "\n".join(_lines(written.split("\n")))


def _lines(lines: list[str]) -> Iterator[str]:
    inside = False
    for line in lines:
        if line.startswith("```"):
            inside = line == "```console"
            yield line
        elif not inside:
            yield line
        elif line.startswith("$ "):
            yield line
            yield from _output(line.removeprefix("$ "))


def _output(command: str) -> Iterator[str]:
    """What a command prints, the first lines of it; and its exit code, if that is not 0."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = cli.main(shlex.split(command)[1:])
    said = _LEFT_OUT.sub("", out.getvalue() + err.getvalue())
    found = said.rstrip("\n").replace(os.getcwd(), ".").split("\n")
    yield from (line.rstrip() for line in found[:MOST_LINES])
    if len(found) > MOST_LINES:
        yield f"... and {len(found) - MOST_LINES} more lines"
    if code:
        yield f"(exit code {code})"


if __name__ == "__main__":
    os.environ["SHARDWISE_CACHE"] = "off"  # as in the test: what a search says is said every time
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {PAGE}")
