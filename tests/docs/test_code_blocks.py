"""Every Python block of README.md and docs/*.md runs, in order, and prints what the page says (``blocks.py``)."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys
from collections.abc import Iterator
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch

from docs.blocks import Block, blocks_of, difference, documents
from launch.gloo_ranks import RunRanks
from raising import raises
from shardwise.planning import suggestions

ROOT = Path(__file__).parents[2]
PAGES = documents(ROOT)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working directory from which the blocks can import what they write. Refusals have their suggestions."""
    monkeypatch.setattr(suggestions, "MAX_REFUSED_SECONDS", inf)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", None)):
            del sys.modules[name]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_of_the_page_runs_and_prints_what_it_says(page: Path, folder: Path, run_ranks: RunRanks) -> None:
    blocks = blocks_of(page.read_text(encoding="utf-8"))
    namespace: dict[str, Any] = {"__name__": "__main__"}
    torch.manual_seed(0)
    for block in blocks:
        where = f"{page.name}:{block.line}"
        if block.file:
            (folder / block.file).write_text(block.code, encoding="utf-8")
        if block.ranks:
            name = block.file or f"block_{block.line}.py"
            (folder / name).write_text(block.code, encoding="utf-8")
            with _ended(block, where) as printed:
                printed.append(run_ranks(run_script, block.ranks, str(folder), name)[0])
        else:
            with _ended(block, where) as printed:
                printed.append(_execute(block, namespace, where))
        if block.prints is not None:
            problem = difference(block.prints, printed[0])
            assert not problem, f"{where} prints something else:\n{problem}"


def run_script(folder: str, name: str) -> str:
    """On a rank: runs a file of the folder as a script; returns what it prints."""
    os.chdir(folder)
    sys.path.insert(0, folder)
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        runpy.run_path(name, run_name="__main__")
    return output.getvalue()


def _execute(block: Block, namespace: dict[str, Any], where: str) -> str:
    """Runs a block in this process; returns what it prints."""
    # The padding gives tracebacks the line of the page; a block that is a file has the lines of the file.
    padding = "" if block.file else "\n" * block.line
    code = compile(padding + block.code, block.file or where.partition(":")[0], "exec")
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(code, namespace)
    return output.getvalue()


@contextlib.contextmanager
def _ended(block: Block, where: str) -> Iterator[list[str]]:
    """Checks that what runs inside ends as the block says, and appends the message of the exception to the list."""
    printed: list[str] = []
    try:
        yield printed
    except Exception as error:
        if type(error).__name__ != block.raises:
            raise AssertionError(f"the block at {where} fails: {type(error).__name__}: {error}") from error
        printed.append(f"{type(error).__name__}: {error}")
    else:
        assert not block.raises, f"the block at {where} does not raise {block.raises}"


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (Block(1, "1 + 1", raises="ValueError"), "the block at p.md:1 does not raise ValueError"),
        (Block(1, "int('x')"), "the block at p.md:1 fails: ValueError: invalid"),
        (Block(1, "int('x')", raises="TypeError"), "the block at p.md:1 fails: ValueError: invalid"),
    ],
)
def test_a_block_that_ends_otherwise_than_it_says_fails(block: Block, message: object) -> None:
    with raises(AssertionError, message), _ended(block, "p.md:1"):
        _execute(block, {}, "p.md:1")


def test_pages_have_blocks_that_run() -> None:
    assert {page.name for page in PAGES} >= {"README.md", "tour.md", "adding-a-rule.md"}
    tables = {
        "operators.md",
        "whole-dims.md",
        "planning-time.md",
        "specification.md",
        "architecture.md",
        "glossary.md",
        "museum.md",
        "checked-plans.md",
        "benchmarks.md",
        "simulated-jobs.md",
        "operator-database.md",
        "search.md",
        "how-capture-works.md",
        "how-programs-work.md",
        "how-ranks-run.md",
    }
    assert all(blocks_of(page.read_text(encoding="utf-8")) for page in PAGES if page.name not in tables)


def test_a_block_takes_the_text_that_follows_it() -> None:
    page = "```python\na\n```\n\n```text\nx\n```\n\n```python file=m.py ranks=4\nb\n```\nwords\n```text\ny\n```\n"
    assert blocks_of(page) == [
        Block(1, "a\n", prints="x\n"),
        Block(9, "b\n", file="m.py", ranks=4),
    ]


@pytest.mark.parametrize(
    ("page", "message"),
    [("```python\na\n", "line 1: the block is not closed"), ("\n```python rank=4\n```\n", "line 2: unknown rank")],
)
def test_a_block_that_is_not_understood_is_an_error(page: str, message: object) -> None:
    with raises(ValueError, message):
        blocks_of(page)


def test_output_is_compared_up_to_the_ellipsis() -> None:
    assert not difference("loss ...\nend", "loss 0.25\nend  \n")
    assert "loss 0.25" in difference("loss 0.5", "loss 0.25")
