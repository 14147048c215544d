"""The modes: how much of a plan the user gives, and how it is completed.

``stand_alone``    every device does everything
``data_parallel``  the batch is split over the whole mesh, parameters are whole everywhere
``semi_auto``      operators without a strategy default to data parallelism; views, casts and the operators of one
                   annotated call follow
``auto``           (``sharding_propagation``) everything follows what is fixed; where nothing is fixed, data parallelism
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, get_args

from shardwise.errors import ShardwiseError
from shardwise.graph.annotate import SUMMED
from shardwise.graph.batch import batch_size
from shardwise.graph.grouped import stacked_weights
from shardwise.graph.ir import Graph, Op
from shardwise.layouts.choice import (
    BY_KEY,
    INVARIANT,
    Choices,
    ShardPosition,
    Split,
    Where,
    layout_of,
    splits_owners,
)
from shardwise.layouts.mesh import Mesh
from shardwise.programs.builder import Choice
from shardwise.programs.propagate import Propagation
from shardwise.rules.atoms import Factored

Mode = Literal["auto", "semi_auto", "data_parallel", "stand_alone"]
MODES: tuple[Mode, ...] = get_args(Mode)
DATA_AXES = frozenset({"dp", "data", "batch", "ddp", "fsdp", "replica"})


def choose(
    graph: Graph,
    factored: Factored,
    mesh: Mesh,
    mode: str,
    fixed: Choices,
    *,
    storage: Mapping[str, dict[str, Where]] | None = None,
) -> Choice:
    """Complete ``fixed`` (op -> sub-axis -> choice) in the given mode.

    ``storage``: where some sources are kept, if that is fixed too. Raises ShardwiseError for an unknown mode, or one
    that takes no strategies.
    """
    if mode not in MODES:
        raise ShardwiseError(f"unknown mode {mode!r}", fix=f"one of {', '.join(MODES)}")
    if mode in ("stand_alone", "data_parallel") and fixed:
        op = graph.op_by_name[next(iter(fixed))]
        others = f" and {len(fixed) - 1} more operators" if len(fixed) > 1 else ""
        what = f"mode {mode!r} takes no strategies and constraints, but {op.name}{others} has one"
        fix = 'plan with mode="semi_auto" or mode="auto", or remove the annotations'
        raise ShardwiseError(what, op=op.name, source=op.source, fix=fix)
    if mode in ("stand_alone", "data_parallel"):
        axes = mesh.sub_axes if mode == "data_parallel" else ()
        return _complete(graph, factored, mesh, {}, axes, storage, frozenset(), movable=False)
    axes = data_axes(mesh, fixed)
    fixed = _with_divided_lists(graph, factored, mesh, fixed)
    if mode == "auto":
        return _complete(graph, factored, mesh, fixed, axes, storage, frozenset(), movable=True)
    default = _complete(graph, factored, mesh, {}, axes, storage, frozenset(), movable=False)
    scopes = {graph.op_by_name[name].scope for name in fixed} - {""}
    merged: Choices = {name: dict(choices) for name, choices in fixed.items()}
    closed: set[tuple[str, str]] = set()
    for op in graph.ops:
        if op.name in fixed or op.scope in scopes or follows_operand(op, factored):
            continue
        by_default = default.strategies[op.name].choice_of
        merged[op.name] = {axis: by_default.get(axis, INVARIANT) for axis in mesh.sub_axes}
        closed |= {(op.name, axis) for axis in mesh.sub_axes}
    return _complete(graph, factored, mesh, merged, axes, storage, frozenset(closed), movable=True)


def with_travelling_rows(factored: Factored, fixed: Choices) -> Choices:
    """Return the user's choices with rows that travel to the owners of their keys where these are split: nothing prices
    gathering them instead."""
    return {
        op: {axis: BY_KEY if splits_owners(choice, factored.rules[op]) else choice for axis, choice in choices.items()}
        for op, choices in fixed.items()
    }


def _with_divided_lists(graph: Graph, factored: Factored, mesh: Mesh, fixed: Choices) -> Choices:
    """Return the user's choices with every matrix of a list of experts divided where the experts are. Each device keeps
    a part of all matrices, and an all-to-all of these parts gives it the whole matrices of its own experts."""
    divided = dict(fixed)
    for name, choices in fixed.items():
        op, rule = graph.op_by_name[name], factored.rules[name]
        stack = stacked_weights(graph, op)
        if stack is None or stack.name in fixed:
            continue
        of_stack = factored.rules[stack.name]
        parts = [of_stack.factor(factor) for dim in of_stack.operands[0] for factor in dim]
        left = {part.name: part.size for part in parts if part.kind == "parallel"}
        for axis, choice in choices.items():
            size = mesh.sizes[axis]
            factor = next((factor for factor, length in left.items() if length % size == 0), None)
            if factor is not None and (choice == BY_KEY or splits_owners(choice, rule)):
                left[factor] //= size
                divided[stack.name] = {**divided.get(stack.name, {}), axis: Split(factor)}
    return divided


def data_axes(mesh: Mesh, fixed: Choices) -> tuple[str, ...]:
    """Return the sub-axes over which the batch is split: axes called dp, data, batch, ddp, fsdp or replica, and those
    that no strategy mentions, or only for rows that follow keys."""
    mentioned = {
        axis for choices in fixed.values() for axis, choice in choices.items() if choice not in (INVARIANT, BY_KEY)
    }
    named = [name for name, _ in mesh.axes if name in DATA_AXES]
    return tuple(
        axis
        for name, _ in mesh.axes
        for axis in mesh.expand(name)
        if name in named or not mentioned.intersection(mesh.expand(name))
    )


def follows_operand(op: Op, factored: Factored) -> bool:
    """Return whether an operator only rearranges or casts its single operand, and so takes whatever layout that has."""
    rule = factored.rules[op.name]
    return len(op.operands) == 1 and (0,) in rule.linear and all(f.kind in ("parallel", "whole") for f in rule.factors)


def _complete(
    graph: Graph,
    factored: Factored,
    mesh: Mesh,
    fixed: Choices,
    axes: tuple[str, ...],
    storage: Mapping[str, dict[str, Where]] | None,
    closed: frozenset[tuple[str, str]],
    *,
    movable: bool,
) -> Choice:
    batch = batch_size(graph)
    fixed_values = (graph.producer.get(value) for value, text in graph.constraints if text != SUMMED)
    constrained = {op.scope for op in fixed_values if op is not None and op.name in fixed} - {""}
    sources: dict[str, dict[str, Where]] = {}
    follow: set[str] = set()
    for source in graph.sources:
        stored = (storage or {}).get(source.value)
        if stored is not None:
            sources[source.value] = dict(stored)
        elif source.kind in ("input", "activation"):
            sources[source.value] = _batch_where(graph, factored, mesh, source.value, batch, axes)
        elif source.kind != "parameter" or not movable:
            sources[source.value] = dict.fromkeys(mesh.sub_axes, "I")
        if source.kind == "parameter":
            follow.add(source.value)
    propagation = Propagation(
        graph,
        factored.rules,
        mesh,
        choices={name: dict(choices) for name, choices in fixed.items()},
        sources=sources,
        movable=frozenset(follow),
        closed=closed,
        inside=frozenset(op.name for op in graph.ops if op.scope in constrained),
        scatter=movable,
    )
    strategies = propagation.run()
    places = {**propagation.sources, **(storage or {})}  # what is given keeps the order of its axes
    layouts = {
        source.value: layout_of(places.get(source.value, {}), factored.atoms[source.value], mesh)
        for source in graph.sources
    }
    return Choice(strategies, layouts)


def _batch_where(
    graph: Graph, factored: Factored, mesh: Mesh, value: str, batch: int | None, axes: tuple[str, ...]
) -> dict[str, Where]:
    """Return the samples of an input or activation over the data axes: dim 0 where it has the size of the batch."""
    where: dict[str, Where] = dict.fromkeys(mesh.sub_axes, "I")
    shape = graph.by_name[value].shape
    if batch is None or not shape or shape[0] != batch:
        return where
    return where | spread_axes(factored.atoms[value], 0, axes, mesh)  # both in device order


def spread_axes(atoms: tuple[tuple[int, ...], ...], dim: int, axes: Iterable[str], mesh: Mesh) -> dict[str, Where]:
    """Return the axes spread over the atoms of a dim, major first. What does not divide is split unevenly while every
    device gets a share."""
    sizes = atoms[dim]
    parts = [1] * len(sizes)
    places: dict[str, Where] = {}
    for axis in axes:
        size = mesh.sizes[axis]
        devices = [count * size for count in parts]
        position = next((i for i, atom in enumerate(sizes) if atom % devices[i] == 0), None)
        if position is None:
            position = next((i for i, atom in enumerate(sizes) if atom > devices[i]), None)
        if position is None:
            continue
        parts[position] = devices[position]
        places[axis] = ShardPosition.of(dim, sizes, position)
    return places
