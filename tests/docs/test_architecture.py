"""docs/architecture.md draws the folders as they are enforced; it and the glossary name files that exist."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
PACKAGE = ROOT / "src/shardwise"


def listed_folders() -> list[str]:
    """The first column of the table of folders, lowest first."""
    section = PAGE.partition("## Folders")[2].partition("\n## ")[0]
    return [name.rstrip("/") for name in re.findall(r"^\| `(\w+/?)` \|", section, re.MULTILINE)]


def test_the_folders_are_listed_in_the_order_that_import_linter_enforces() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (contract,) = [one for one in project["tool"]["importlinter"]["contracts"] if one["id"] == "layers"]
    assert listed_folders() == [layer.strip("()") for layer in reversed(contract["layers"])]


def test_every_folder_of_the_package_is_listed() -> None:
    modules = {path.stem for path in PACKAGE.iterdir() if path.is_dir() or path.suffix == ".py"}
    assert modules - {"__init__", "__pycache__", "py"} <= set(listed_folders())


def exists(name: str) -> bool:
    """Whether a file or folder, perhaps with a star in it, is in the repository or in the package."""
    return any(next(root.glob(name.rstrip("/")), None) is not None for root in (ROOT, PACKAGE))


@pytest.mark.parametrize("page", ["architecture.md", "glossary.md"])
def test_files_that_the_page_names_exist(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:[\w-]+/)+(?:[\w*]+(?:\.\w+)?)?)`", text))
    assert "layouts/conversions.py" in named
    assert [name for name in sorted(named) if not exists(name)] == []
    assert not exists("runtime/nothing.py")
