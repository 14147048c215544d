"""docs/operators.md is what the tables say today."""

from __future__ import annotations

import pytest

from docs.operators import PAGE, calls
from shardwise.report.operator_page import page, sections
from shardwise.rules import RULES


def test_every_operator_with_a_rule_has_a_section() -> None:
    listed = [target for table in sections().values() for target in table]
    assert sorted(map(str, listed)) == sorted(map(str, RULES))


@pytest.mark.filterwarnings("ignore")  # PyTorch's own, about the samples
def test_the_page_is_current() -> None:
    written = PAGE.read_text(encoding="utf-8")
    assert written == page(calls()), "run: make operators"
    for target in RULES:
        assert f"`{str(target).removesuffix('.default')}`" in written
