"""docs/commands.md shows what the commands print, and has every one of them."""

from __future__ import annotations

import sys

import pytest

from docs.commands import MODEL, PAGE, page
from shardwise.cli import COMMANDS


def test_the_outputs_of_the_commands_are_current(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, "model", sys)  # the page's model.py takes this place, and is gone afterwards
    written = PAGE.read_text(encoding="utf-8")
    assert MODEL.strip() in written
    assert page(written) == written, "run: make commands"
    assert all(f"| `{command.name}` |" in written for command in COMMANDS)
