"""Write the cost graph to a file: JSON with every choice and price, or DOT with the chosen ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shardwise.plans.quantities import format_seconds
from shardwise.report.explain import text_of, variable_reference
from shardwise.search.auto import MeshSearch
from shardwise.search.cost_graph import COMPONENTS


def write_cost_graph(search: MeshSearch, path: str | Path) -> None:
    """Write the cost graph as JSON, or as DOT if the path ends in ``.dot``."""
    path = Path(path)
    text = _dot(search) if path.suffix == ".dot" else json.dumps(_as_data(search), indent=1)
    path.write_text(text + "\n", encoding="utf-8")


def _as_data(search: MeshSearch) -> dict[str, Any]:
    cost, assignment = search.cost, search.outcome.assignment
    tables_of: dict[int, list[int]] = {}
    edges = []
    for scope, kind in cost.factors:
        if len(scope) == 1:
            tables_of.setdefault(scope[0], []).append(kind)
        else:
            edges.append(
                {
                    "from": variable_reference(cost, scope[0]),
                    "to": variable_reference(cost, scope[1]),
                    "prices": kind,
                    **_at(search, scope, kind),
                }
            )
    variables = [
        {
            "name": variable_reference(cost, i),
            "kind": variable.kind,
            "alternatives": [text_of(search, i, value) for value in range(variable.size)],
            "prices": tables_of.get(i, []),
            "chosen": assignment[i],
        }
        for i, variable in enumerate(cost.variables)
    ]
    tables = [
        {name: table.tolist() for name, table in zip(COMPONENTS, kind, strict=True) if table is not None}
        for kind in cost.kinds
    ]
    return {
        "mesh": dict(search.names.target.axes),
        "units": {"exposed": "s", "compute": "s", "traffic": "s", "bytes": "B"},
        "step_seconds": search.outcome.seconds,
        "bound": search.outcome.bound,
        "variables": variables,
        "edges": edges,
        "views": [{"operator": view.op, "follows": variable_reference(cost, view.home)} for view in cost.folded],
        "tables": tables,
    }


def _at(search: MeshSearch, scope: tuple[int, ...], kind: int) -> dict[str, float]:
    at = tuple(search.outcome.assignment[v] for v in scope)
    tables = zip(COMPONENTS, search.cost.kinds[kind], strict=True)
    return {name: float(table[at]) for name, table in tables if table is not None and table[at]}


def _dot(search: MeshSearch) -> str:
    cost, assignment = search.cost, search.outcome.assignment
    shapes = {"operator": "box", "storage": "cylinder", "shared": "ellipse", "received": "cylinder"}
    lines = ["digraph cost {", "  node [fontname=monospace];"]
    price_of: dict[int, float] = {}
    for scope, kind in cost.factors:
        if len(scope) == 1:
            entry = _at(search, scope, kind)
            price_of[scope[0]] = price_of.get(scope[0], 0.0) + sum(v for name, v in entry.items() if name != "bytes")
    for i, variable in enumerate(cost.variables):
        label = json.dumps(
            f"{variable_reference(cost, i)}\n{text_of(search, i, assignment[i])}\n"
            f"1 of {variable.size}, {format_seconds(price_of.get(i, 0.0))}"
        )
        lines.append(f"  v{i} [shape={shapes[variable.kind]}, label={label}];")
    for scope, kind in cost.factors:
        if len(scope) == 2:
            seconds = sum(v for name, v in _at(search, scope, kind).items() if name != "bytes")
            style = f' [label="{format_seconds(seconds)}", style=bold]' if seconds else ""
            lines.append(f"  v{scope[0]} -> v{scope[1]}{style};")
    return "\n".join([*lines, "}"])
