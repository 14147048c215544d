"""Values that depend on no parameter: masks, positions, rotary tables, labels, and the inputs themselves.

They have no price worth a choice. Each is made as its consumers want it, where these agree, and whole on every device
otherwise, so that what a consumer needs is a slice of what is there and nothing is communicated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from shardwise.graph.ir import Graph, Op, Ref
from shardwise.layouts.mesh import Mesh
from shardwise.programs.propagate import Place, Where, factor_places
from shardwise.rules.rule import OpRule

Choices = dict[str, dict[str, str]]
Wanted = Callable[[str, str], Place | None]  # (value, axis) -> where all consumers want it; None: whole


def settle(
    graph: Graph, rules: Mapping[str, OpRule], mesh: Mesh, decided: Mapping[str, Mapping[str, str]]
) -> tuple[Choices, dict[str, dict[str, Where]]]:
    """The choices of all operators, those in ``decided`` and the others; and where every input is delivered."""
    choices: Choices = {name: dict(own) for name, own in decided.items()}
    places = {op.name: factor_places(rules[op.name]) for op in graph.ops}
    whole = {out.name for out in graph.outputs if isinstance(out, Ref)} | {value for _, value in graph.mutations}
    if graph.loss is not None:
        whole.add(graph.loss)

    def wanted(value: str, axis: str) -> Place | None:
        """Where all consumers want a value on an axis, or None: whole."""
        found: set[Place | None] = {None} if value in whole else set()
        for op in graph.consumers[value]:
            choice = choices[op.name].get(axis, "I")
            for position, name in enumerate(op.operands):
                if name == value:
                    found.add(places[op.name][0][position].get(choice))
        return found.pop() if len(found) == 1 else None

    for op in reversed(graph.ops):
        if op.name not in choices:
            choices[op.name] = _choices_of(op, rules[op.name], mesh, places[op.name][1], wanted)
    inputs: dict[str, dict[str, Where]] = {}
    for source in graph.sources:
        if source.kind == "input":
            inputs[source.value] = {axis: wanted(source.value, axis) or "I" for axis in mesh.sub_axes}
    return choices, inputs


def _choices_of(
    op: Op, rule: OpRule, mesh: Mesh, results: tuple[dict[str, Place], ...], wanted: Wanted
) -> dict[str, str]:
    """Per axis the factor that all results are wanted split on, or ``I``."""
    found: dict[str, str] = {}
    split: dict[str, int] = {}
    for axis in mesh.sub_axes:
        factors: set[str | None] = set()
        for value, places in zip(op.results, results, strict=True):
            place = wanted(value, axis)
            factors.add(next((name for name, own in places.items() if own == place), None))
        factor = factors.pop() if len(factors) == 1 else None
        found[axis] = "I"
        if factor is not None and rule.factor(factor).kind == "parallel":
            ways = split.get(factor, 1) * mesh.sizes[axis]
            if ways <= rule.factor(factor).size:
                found[axis], split[factor] = factor, ways
    return found
