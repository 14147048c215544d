"""The code blocks of a Markdown file, and how to execute them.

A block opens with ```` ```python ```` and may carry, after the language,

    file=model.py    the block is the file model.py: it is written to a folder from which later blocks import it
    ranks=4          the block is executed on that many real gloo ranks, not in this process; what rank 0 prints counts
    raises=LayoutError  the block ends with this exception; what counts is its message

A ```` ```text ```` block that follows (with nothing but blank lines between) is what the block prints. In it, ``...``
stands for anything, as in doctest.
"""

from __future__ import annotations

import doctest
import re
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(r"^```(\w*)[ \t]*(.*?)[ \t]*$")
_OPTIONS = frozenset({"file", "ranks", "raises"})


@dataclass(frozen=True, slots=True)
class Block:
    """``line``: of the opening fence, from 1. ``prints``: what follows as text, if anything does."""

    line: int
    code: str
    file: str = ""
    ranks: int = 0
    raises: str = ""
    prints: str | None = None


def blocks_of(text: str) -> list[Block]:
    """The Python blocks of a Markdown text, in order. Raises ValueError for one that is not closed or understood."""
    found: list[Block] = []
    last = 0  # the line on which the previous Python block was closed, while only blank lines followed
    lines = text.splitlines()
    i = 0
    while i < len(lines):
        fence = _FENCE.match(lines[i])
        if fence is None:
            last = last if not lines[i].strip() else 0
            i += 1
            continue
        opened = i + 1
        close = next((j for j in range(i + 1, len(lines)) if lines[j].strip() == "```"), None)
        if close is None:
            raise ValueError(f"line {opened}: the block is not closed")
        content = "\n".join(lines[i + 1 : close]) + "\n"
        if fence.group(1) == "python":
            found.append(_block(opened, content, fence.group(2)))
        elif fence.group(1) == "text" and last and found:
            previous = found.pop()
            found.append(Block(previous.line, previous.code, previous.file, previous.ranks, previous.raises, content))
        last = close + 1 if fence.group(1) == "python" else 0
        i = close + 1
    return found


def _block(line: int, code: str, words: str) -> Block:
    options = dict(word.partition("=")[::2] for word in words.split())
    unknown = options.keys() - _OPTIONS
    if unknown:
        raise ValueError(f"line {line}: unknown {', '.join(sorted(unknown))}; known: {', '.join(sorted(_OPTIONS))}")
    return Block(line, code, options.get("file", ""), int(options.get("ranks", 0)), options.get("raises", ""))


def difference(wanted: str, got: str) -> str:
    """Empty when the output is as written, else a readable comparison. How wide a blank is does not count."""
    want, have = wanted.strip() + "\n", got.strip() + "\n"
    checker, options = doctest.OutputChecker(), doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    if checker.check_output(want, have, options):
        return ""
    return checker.output_difference(doctest.Example("", want), have, options | doctest.REPORT_NDIFF)


def documents(root: Path) -> list[Path]:
    return [
        root / "README.md",
        *(path for glob in ("*.md", "tutorials/*.md") for path in sorted((root / "docs").glob(glob))),
    ]
