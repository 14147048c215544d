"""The documentation as a site: it builds without a warning, and its reference has every public name once."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import shardwise

ROOT = Path(__file__).parents[2]


def test_the_site_builds_and_no_link_or_anchor_leads_nowhere(tmp_path: Path) -> None:
    command = (sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site"))
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    front = (tmp_path / "site/index.html").read_text(encoding="utf-8")
    assert 'src="images/report.png"' in front
    assert 'href="tutorials/vision/"' in front
    planning = (tmp_path / "site/reference/planning/index.html").read_text(encoding="utf-8")
    assert "Choose how to split" in planning, "the reference is made of docstrings"
    assert (tmp_path / "site/decisions/0008-redistribution-is-a-shortest-path/index.html").is_file()
    assert not list((tmp_path / "site").rglob("*.py"))


def test_every_public_name_is_on_one_page_of_the_reference() -> None:
    pages = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs/reference").glob("*.md"))
    assert sorted(re.findall(r"^::: shardwise\.(\w+)$", pages, re.MULTILINE)) == sorted(
        set(shardwise.__all__) - {"errors", "results"}
    )
    for module in ("errors", "results"):
        listed = re.findall(rf"^::: shardwise\.{module}\.(\w+)$", pages, re.MULTILINE)
        assert set(listed) <= set(dir(getattr(shardwise, module)))
        assert len(listed) == len(set(listed)) > 5
