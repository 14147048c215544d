"""What a user's type checker knows of the package."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from mypy import api

PROGRAM = Path(__file__).with_name("user_program.py")
MARK = re.compile(r"# error: ([\w-]+)$")
SAID = re.compile(r":(\d+): error: .*\[([\w-]+)\]$")


@pytest.mark.long  # mypy reads the package and torch's types: half a minute
def test_a_type_checker_sees_the_public_names_and_refuses_what_there_is_not(tmp_path: Path) -> None:
    lines = PROGRAM.read_text(encoding="utf-8").splitlines()
    marked = {(i, found.group(1)) for i, line in enumerate(lines, 1) if (found := MARK.search(line))}
    settings = tmp_path / "mypy.ini"  # not this repository's: its mypy_path would hide a package without py.typed
    settings.write_text("[mypy]\nstrict = True\n", encoding="utf-8")
    said, problems, _ = api.run(["--config-file", str(settings), "--cache-dir", str(tmp_path), str(PROGRAM)])
    errors = {(int(found.group(1)), found.group(2)) for line in said.splitlines() if (found := SAID.search(line))}
    assert not problems
    assert errors == marked, said
