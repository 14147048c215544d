"""docs/specification.md has every row once, names what exists, and knows every row that a test names."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/specification.md"
ROWS = {"A": 47, "B": 28, "C": 10, "D": 11, "E": 7, "F": 6, "G": 14}
TEST = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")
# How tests and comments name rows: "A24: ..." at the start of a docstring, or "row G9", "rows G3 and G4".
NAMED = re.compile(r'"""([A-G]\d{1,2}): |\brows? ((?:[A-G]\d{1,2})(?:(?:, | and )[A-G]\d{1,2})*)')


@dataclass(frozen=True)
class Row:
    number: str
    asked: str
    state: str
    where: str
    shown_by: str


def rows(text: str) -> list[Row]:
    """The rows of the page's tables. In G the fourth column says what is done, not where."""
    lines = [line.strip() for line in text.splitlines() if re.match(r"\| [A-G]\d+ \|", line)]
    return [Row(*(cell.strip() for cell in line[1:-1].split("|"))) for line in lines]


def named_rows(text: str) -> set[str]:
    return {row for one, several in NAMED.findall(text) for row in re.findall(r"[A-G]\d+", one or several)}


def test_every_row_is_on_the_page_once() -> None:
    numbers = [row.number for row in rows(PAGE.read_text(encoding="utf-8"))]
    assert numbers == [f"{part}{i}" for part, count in ROWS.items() for i in range(1, count + 1)]


@pytest.mark.parametrize("row", rows(PAGE.read_text(encoding="utf-8")), ids=lambda row: row.number)
def test_a_row_has_a_state_and_what_it_names_exists(row: Row) -> None:
    assert re.match(r"works|partly: \S|not yet", row.state), row.state
    for file, name in TEST.findall(row.shown_by):
        assert (ROOT / file).is_file(), f"{row.number}: {file}"
        functions = {node.name for node in ast.parse((ROOT / file).read_text()).body if hasattr(node, "name")}
        assert not name or name in functions, f"{row.number}: {file}::{name}"
    if not row.number.startswith("G"):
        assert TEST.search(row.shown_by), f"no test shows {row.number}, or that it is refused"
        for place in re.findall(r"`([\w/.]+)`", row.where):
            base = ROOT if place.startswith(("examples/", "benchmarks/")) else ROOT / "src/shardwise"
            assert (base / place).exists(), f"{row.number}: {place}"


def test_rows_that_tests_name_are_on_the_page() -> None:
    known = {row.number for row in rows(PAGE.read_text(encoding="utf-8"))}
    files = [path for folder in ("tests", "src", "examples") for path in (ROOT / folder).rglob("*.py")]
    named = {path: named_rows(path.read_text(encoding="utf-8")) for path in files}
    assert {row for each in named.values() for row in each} >= {"A24", "B22", "G9"}  # the pattern sees them
    assert {str(path): each - known for path, each in named.items() if each - known} == {}


def test_names_of_rows_are_read_from_docstrings_and_comments() -> None:
    assert named_rows('"""A24: words""" # rows G3 and G4, of row D2 (F64)') == {"A24", "G3", "G4", "D2"}
