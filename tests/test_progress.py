"""What is being done is shown on a terminal, with how long it will take; elsewhere nothing is."""

from __future__ import annotations

import io
import re
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    found = Terminal()
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=found))
    monkeypatch.setattr(progress, "SHOWN_AFTER_SECONDS", 0.0)
    return found


def plan() -> sw.Plan:
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        return sw.plan(
            net, torch.randn(8, 8), sw.Cluster.load("h100-2x2"), loss=lambda y: y.sum(), search="dynamic_programming"
        )


def test_it_is_quiet_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.show_progress("something long"):
        progress.report_progress("a part of it", 1, 2)
    plan()
    assert capsys.readouterr() == ("", "")


def test_planning_says_what_it_does_on_a_terminal(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    real = progress.describe_progress

    def noted(what: str, done: int, total: int, seconds: float) -> str:
        said.append(what)
        return real(what, done, total, seconds)

    monkeypatch.setattr(progress, "describe_progress", noted)
    plan()
    assert said[0] == "capturing the model"
    meshes = {line for line in said if line.startswith("prices and search on ")}  # not named by role yet
    assert meshes == {"prices and search on 2 x 2 devices", "prices and search on 4 devices"}
    assert said[-1] == "simulating candidates"
    plain = re.sub(r"\x1b\[[\d;?]*\w", "", terminal.getvalue())
    assert re.search(r"planning: \d+ s", plain)


def test_work_that_says_nothing_shows_its_name(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SHOWN_AFTER_SECONDS", 0.05)
    with progress.show_progress("something silent"):
        patience = time.monotonic() + 60.0
        while "something silent" not in terminal.getvalue():
            assert time.monotonic() < patience, "nothing appeared while it ran"
            time.sleep(0.05)


def test_short_work_leaves_no_line(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SHOWN_AFTER_SECONDS", 60.0)
    with progress.show_progress("something short"):
        progress.report_progress("a part of it")
    assert "something short" not in terminal.getvalue()
    assert "a part of it" not in terminal.getvalue()


def test_an_error_passes_and_the_terminal_is_given_back(terminal: Terminal) -> None:
    with pytest.raises(KeyError), progress.show_progress("something"):
        raise KeyError("x")
    progress.report_progress("nobody listens")
    assert "nobody listens" not in terminal.getvalue()


def test_what_is_left_is_told_from_what_is_done() -> None:
    assert progress.describe_progress("meshes", 0, 12, 0.0) == "meshes: 1 of 12"
    assert progress.describe_progress("meshes", 3, 12, 3.0) == "meshes: 4 of 12, about 9 s left"
    assert progress.describe_progress("capture", 0, 0, 3.0) == "capture"
    assert list(progress.each([1, 2], str)) == [1, 2]
