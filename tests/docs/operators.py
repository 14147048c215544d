"""``make operators`` (``python -m docs.operators`` in tests/) writes docs/operators.md from tables and samples."""

from __future__ import annotations

import warnings
from pathlib import Path

from rules.harness import make_case
from rules.samples import SAMPLES
from shardwise.graph.ir import Graph, Op, Source
from shardwise.report.operator_page import page

PAGE = Path(__file__).parents[2] / "docs/operators.md"


def calls() -> list[tuple[Op, Graph]]:
    """The samples as graphs of one operator, with their operands as sources."""
    found = []
    for sample in SAMPLES:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            case = make_case(sample)
        names = tuple(dict.fromkeys(case.op.operands))
        sources = tuple(Source(name, "input", (name,)) for name in names)
        found.append((case.op, Graph(case.graph.values, sources, case.graph.ops, ())))
    return found


if __name__ == "__main__":
    PAGE.write_text(page(calls()), encoding="utf-8")
    print(f"wrote {PAGE}")
