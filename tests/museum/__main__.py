"""``make museum``, or ``python -m museum`` in tests/: every mistake is made, and what finds it is printed. ``--write``:
the list in docs/museum.md, written anew."""

from __future__ import annotations

import argparse
import time

from rich import box
from rich.console import Console
from rich.table import Table

from museum.exhibits import EXHIBITS, finding
from museum.page import PAGE, with_list


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the list in docs/museum.md")
    if parser.parse_args().write:
        PAGE.write_text(with_list(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
        return
    table = Table(box=box.SIMPLE_HEAD, show_lines=True, title="Published silent mistakes, made here on purpose")
    for column in ("mistake", "published", "found", "seconds"):
        table.add_column(column, overflow="fold")
    for exhibit in EXHIBITS:
        before = time.perf_counter()
        found = finding(exhibit)
        first = found.splitlines()[: 2 if exhibit.has_rank else 4]
        seconds = f"{time.perf_counter() - before:.1f}"
        table.add_row(exhibit.mistake, "\n".join(exhibit.published), "\n".join(first), seconds)
    console = Console()
    console.print(table)
    console.print(f"{len(EXHIBITS)} mistakes, all found")


if __name__ == "__main__":
    main()
