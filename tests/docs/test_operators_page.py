"""docs/operators.md is what the tables say today."""

from __future__ import annotations

import re

import pytest

from docs.operators import PAGE, calls, entry_of, page, row_of, sections
from shardwise.graph.composites import COMPOSITES
from shardwise.rules import RULES


def test_every_operator_with_a_rule_has_a_section() -> None:
    listed = [target for table in sections().values() for target in table]
    assert sorted(map(str, listed)) == sorted(map(str, RULES))


@pytest.mark.filterwarnings("ignore")  # PyTorch's own, about the samples
def test_rows_of_the_page_are_current() -> None:
    written = PAGE.read_text(encoding="utf-8")
    for target in RULES:
        assert f"`{str(target).removesuffix('.default')}`" in written
    lines = [line.partition(" | ") for line in written.splitlines()]
    for op, graph in [*{op.target: (op, graph) for op, graph in reversed(calls())}.values()][::8]:
        entry = entry_of(op, graph)
        assert entry is not None
        row = row_of([entry]).partition(" | ")[2]
        assert any(f"`{entry.operator}`" in names and row == rest for names, _, rest in lines), "run: make operators"


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(calls()), "run: make operators"


def test_operators_that_a_page_calls_without_a_rule_have_none() -> None:
    page_of_whole_dims = (PAGE.parent / "whole-dims.md").read_text(encoding="utf-8")
    lines = [line for line in page_of_whole_dims.splitlines() if "no rule" in line]
    named = [name for line in lines for name in re.findall(r"`(\w+)`", line.split("|")[1])]
    assert named
    with_rules = {target.overloadpacket.__name__ for target in (*RULES, *COMPOSITES)}
    assert not with_rules.intersection(named)
