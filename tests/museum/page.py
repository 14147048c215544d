"""The list of exhibits in docs/museum.md."""

from __future__ import annotations

from pathlib import Path

from museum.exhibits import EXHIBITS

PAGE = Path(__file__).parents[2] / "docs/museum.md"
BEGIN, END = "<!-- exhibits: written by make museum-page -->\n", "<!-- end of exhibits -->\n"


def exhibits_table() -> str:
    rows = ["| mistake | published in | made here as | the finding names |", "|---|---|---|---|"]
    for exhibit in EXHIBITS:
        links = ", ".join(f"[{name}]({link(name)})" for name in exhibit.published)
        named = f"`{exhibit.named.removeprefix('the gradient of ')}`" + ", a rank" * exhibit.has_rank
        rows.append(f"| {exhibit.mistake} | {links} | {exhibit.modelled} | {named} |")
    return "\n".join(rows) + "\n"


def link(name: str) -> str:
    """``owner/repository#number`` -> its address, which serves issues and pull requests alike."""
    repository, _, number = name.partition("#")
    return f"https://github.com/{repository}/issues/{number}"


def with_list(page: str) -> str:
    """The page with the list as the code has it."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin, f"{PAGE} has lost the mark before its list"
    assert end, f"{PAGE} has lost the mark behind its list"
    return before + BEGIN + exhibits_table() + END + after
