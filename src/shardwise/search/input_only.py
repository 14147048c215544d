"""Values that depend on no parameter: masks, positions, rotary tables, labels, and the inputs themselves.

They have no price worth a choice, unless they are ``Choosing.heavy``. Each is made in the layout that its consumers
want if these agree, and whole on every device otherwise. A consumer then needs a slice of what is there, and nothing is
communicated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from shardwise.graph.ir import Graph, Op, Ref
from shardwise.layouts.choice import INVARIANT, AxisChoice, Choices, ShardPosition, ShardPositions, Split, Where
from shardwise.layouts.mesh import Mesh
from shardwise.layouts.strategy import Strategy
from shardwise.rules.rule import OpRule

Demand = Callable[[str, str], ShardPosition | None]  # (value, axis) -> where all consumers want it; None: whole


def assign_input_only_ops(
    graph: Graph, rules: Mapping[str, OpRule], mesh: Mesh, decided: Mapping[str, Strategy]
) -> tuple[dict[str, Strategy], dict[str, dict[str, Where]]]:
    """Return the strategies of all operators (``decided`` and others), and where every input is delivered."""
    choices: Choices = {name: strategy.choice_of for name, strategy in decided.items()}
    places = {op.name: ShardPositions.of(rules[op.name]) for op in graph.ops}
    whole = {out.name for out in graph.outputs if isinstance(out, Ref)} | {value for _, value in graph.mutations}
    if graph.loss is not None:
        whole.add(graph.loss)

    def demand(value: str, axis: str) -> ShardPosition | None:
        """Return the position at which all consumers want a value on an axis, or None for whole."""
        needs: set[ShardPosition | None] = {None} if value in whole else set()
        for op in graph.consumers[value]:
            choice = choices[op.name].get(axis, INVARIANT)
            for position, name in enumerate(op.operands):
                if name == value:
                    where = places[op.name].operand(position, choice)
                    needs.add(where if isinstance(where, ShardPosition) else None)
        return needs.pop() if len(needs) == 1 else None

    for op in reversed(graph.ops):
        if op.name not in choices:
            choices[op.name] = _choices_of(op, rules[op.name], mesh, places[op.name], demand)
    inputs: dict[str, dict[str, Where]] = {}
    for source in graph.sources:
        if source.kind == "input":
            inputs[source.value] = {axis: demand(source.value, axis) or "I" for axis in mesh.sub_axes}
    return {name: decided.get(name) or Strategy.of(by_axis) for name, by_axis in choices.items()}, inputs


def _choices_of(op: Op, rule: OpRule, mesh: Mesh, places: ShardPositions, demand: Demand) -> dict[str, AxisChoice]:
    """Return, per axis, the factor that all results are wanted split on, or none."""
    choices: dict[str, AxisChoice] = {}
    num_parts: dict[Split, int] = {}
    for axis in mesh.sub_axes:
        splits: set[Split | None] = set()
        for position, value in enumerate(op.results):
            place = demand(value, axis)
            splits.add(None if place is None else places.split_of_result(position, place))
        split = splits.pop() if len(splits) == 1 else None
        choices[axis] = INVARIANT
        if split is not None and rule.factor(split.factor).kind == "parallel":
            parts = num_parts.get(split, 1) * mesh.sizes[axis]
            if parts <= rule.factor(split.factor).size:
                choices[axis], num_parts[split] = split, parts
    return choices
