"""Binds a plan to a graph of its model: derives the choice and the program, without prices or a search."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import TypeVar

import torch

from shardwise.errors import LayoutError, PlanError, ShardwiseError, problem
from shardwise.graph.float8 import E4M3
from shardwise.graph.ir import Graph, Value
from shardwise.graph.naming import value_name
from shardwise.layouts.choice import INVARIANT, AxisChoice, Choices, Split, Where, where_of
from shardwise.layouts.conversions import Move
from shardwise.layouts.layout import Atom, Layout
from shardwise.layouts.mesh import Mesh
from shardwise.layouts.strategy import Strategy, check_strategy, parse_choices, parse_cuts
from shardwise.layouts.text import format_dtype, format_layout, parse_layout, parse_move
from shardwise.plans.entries import ConversionEntry, Stage
from shardwise.plans.listing import check_program
from shardwise.plans.plan import Plan
from shardwise.programs.buckets import Bucket
from shardwise.programs.builder import Choice, fewest_bytes
from shardwise.programs.grad_accum_program import converted_once
from shardwise.programs.lower import lowered_operators
from shardwise.programs.row_chunks import in_chunks
from shardwise.programs.spmd import (
    Lifetimes,
    SpmdProgram,
    fill,
    gather_in_float8,
    insert_conversions,
    place_ops,
    with_buckets,
)
from shardwise.programs.spmd_steps import Conversion
from shardwise.rules.atoms import Factored, factor_graph
from shardwise.rules.rule import OpRule
from shardwise.search.decide import with_cuts
from shardwise.search.modes import choose, spread_axes
from shardwise.search.user_choices import rules_of, variant
from shardwise.search.user_strategies import splittable

_NUM_SHOWN = 8  # faults in one message
T = TypeVar("T")


def program_of(
    plan: Plan,
    graph: Graph,
    *,
    training: bool | None = None,
    original: Graph | None = None,
    constants: tuple[str, ...] | None = None,
) -> SpmdProgram:
    """Return the program of a plan of one stage for a graph of its model.

    For the inputs and the mode of the plan, the program has the conversions and buckets that the plan lists. It is
    checked against the list. For inputs of other sizes, and for evaluation, values take the listed paths where these
    apply. Otherwise they take the paths that send the fewest bytes.

    Args:
        plan: A plan of one stage.
        graph: The graph of a call of its model.
        training: The mode of the call, if the caller knows it.
        original: The graph in the model's own dtypes, if ``graph`` computes in float64.
        constants: The constants of the call, if the caller knows them (``for_call``).

    Raises:
        PlanError: The graph does not fit the plan, or the program differs from what the plan lists.
    """

    def program(training: bool | None) -> SpmdProgram:
        factored, choice = bind(plan, graph, training=training, widened=original is not None)
        return program_of_choice(plan, graph, factored, choice, training=training, original=original)

    return for_call(plan, constants, training, program)


def for_call(
    plan: Plan, constants: tuple[str, ...] | None, training: bool | None, make: Callable[[bool | None], T]
) -> T:
    """Return ``make(training)``. If it fails for a call with other constants, return ``make(not plan.training)``.

    A constant, such as a flag, can add operators or outputs, and the plan does not list such a call. A mode that is not
    the plan's makes ``bind`` treat the call like inputs of other sizes, without comparing it with the list.
    """
    try:
        return make(training)
    except PlanError:
        if constants is None or constants == plan.constants:
            raise
        return make(not plan.training)


def program_of_choice(
    plan: Plan,
    graph: Graph,
    factored: Factored,
    choice: Choice,
    *,
    training: bool | None = None,
    original: Graph | None = None,
) -> SpmdProgram:
    """Return the program of a choice that ``bind`` returned. Raises as ``program_of`` does."""
    stage, is_planned = plan.only_stage, is_planned_for(plan, graph, training)
    placed, lowered = place_ops(graph, factored.rules, choice.strategies, stage.mesh, original)
    steps, lowered, choice = in_chunks(placed, lowered, choice, stage.mesh)
    route = ListedPaths.of(stage, lowered, sizes_match=is_planned)
    spmd = insert_conversions(steps, lowered, replace(choice, route=route), stage.mesh)
    if is_planned and stage.conversions is not None:
        entries = [entry for entry in stage.conversions if entry.source.startswith(f"{format_dtype(E4M3)}[")]
        rounded = {_entry_key(entry, stage.mesh) for entry in entries}
        spmd = gather_in_float8(spmd, lambda conversion: _conversion_key(conversion, spmd.graph) in rounded)
        try:
            spmd = with_buckets(spmd, _listed_buckets(stage, spmd))
        except LayoutError as error:
            fix = "make the plan again with sw.plan"
            raise PlanError(f"the buckets that the plan lists do not fit its program: {error}", fix=fix) from error
    else:
        gathers_again = any(entry.again for entry in stage.parameters)
        spmd = fill(gather_in_float8(spmd), plan.bucket_bytes, original, by_block=gathers_again)
    lifetimes = _lifetimes(stage, spmd, graph, listed=is_planned and stage.conversions is not None)
    spmd = replace(spmd, lifetimes=replace(lifetimes, prefetch=plan.prefetch))
    spmd = _with_once(stage, spmd, graph, listed=is_planned and stage.conversions is not None)
    if is_planned and stage.conversions is not None:
        _check_strategies(stage, graph, choice)
        check_program(stage, spmd, widened=original is not None)
    return spmd


def is_planned_for(plan: Plan, graph: Graph, training: bool | None) -> bool:
    """Return whether the graph has the plan's mode, inputs and operators."""
    same_mode = training in (None, plan.training)
    return same_mode and same_inputs(plan, graph) and {op.name for op in graph.ops} == plan.strategies.keys()


def _conversion_key(conversion: Conversion, graph: Graph) -> tuple[str, str]:
    return value_name(conversion.origin, graph), format_layout(conversion.target)


def _entry_key(entry: ConversionEntry, mesh: Mesh) -> tuple[str, str]:
    return entry.value, format_layout(parse_layout(entry.target, mesh))


def _listed_buckets(stage: Stage, spmd: SpmdProgram) -> list[Bucket]:
    """Return the buckets that the stage lists, of the conversions of a program without buckets.

    A listed conversion that overlaps without sharing messages is a bucket of its own.
    """
    by_entry = {_conversion_key(conversion, spmd.graph): conversion for conversion in spmd.conversions}
    members: dict[object, list[ConversionEntry]] = {}
    for number, entry in enumerate(stage.conversions or ()):
        if entry.bucket or entry.overlaps:
            members.setdefault(entry.bucket or ("alone", number), []).append(entry)
    buckets = []
    for entries in members.values():
        keys = [_entry_key(entry, stage.mesh) for entry in entries]
        conversions = tuple(by_entry[key] for key in keys if key in by_entry)
        if conversions:  # check_program reports missing ones
            buckets.append(Bucket(conversions, entries[0].overlaps))
    return buckets


def _lifetimes(stage: Stage, spmd: SpmdProgram, graph: Graph, *, listed: bool) -> Lifetimes:
    """Return the memory policy that the stage lists, without ``once`` (``_with_once``) and ``prefetch``.

    ``listed``: the stage lists the conversions of exactly this program. Then backward repeats the conversions that are
    listed with ``again``. In any other program (other sizes, evaluation) it repeats:

    * of a parameter, the conversions if the stage gathers the parameter again;
    * of any other value, a conversion for a recomputed operator, or one that is listed with ``again``.
    """
    operators = lowered_operators({entry.name for entry in stage.operators if entry.again}, graph, spmd.graph)
    waiting = lowered_operators({entry.name for entry in stage.operators if entry.offloaded}, graph, spmd.graph)
    listed_again = [entry for entry in stage.conversions or () if entry.again]
    repeated = {_entry_key(entry, stage.mesh) for entry in listed_again}
    keys = {conversion.result: _conversion_key(conversion, spmd.graph) for conversion in spmd.conversions}
    repeats = {result for result, key in keys.items() if key in repeated}
    if listed:
        return Lifetimes(operators, frozenset(repeats), waiting)
    parameters = {source.value: source.names[0] for source in graph.sources if source.kind == "parameter"}
    gathered = {entry.name for entry in stage.parameters if entry.again}
    results = {
        c.result
        for c in spmd.conversions
        if (parameters[c.origin] in gathered if c.origin in parameters else c.op in operators or c.result in repeats)
    }
    return Lifetimes(operators, frozenset(results), waiting)


def _with_once(stage: Stage, spmd: SpmdProgram, graph: Graph, *, listed: bool) -> SpmdProgram:
    """Return the program with ``lifetimes.once``: the parameters that the stage converts once a step, where possible.

    ``listed``: as in ``_lifetimes``. Then PlanError is raised if one of them cannot be converted once.
    """
    listed_once = {entry.name for entry in stage.parameters if entry.once}
    if not listed_once:
        return spmd
    named = {source.value: source.names[0] for source in graph.sources}
    once = converted_once(spmd, lambda value, _: named[value] in listed_once)
    left = sorted(listed_once - {named[value] for value in once})
    if left and listed:
        what = (
            f"the plan converts {', '.join(left[:3])} once a step, which is used in several layouts or gathered again"
        )
        fix = 'write "once": false there, or make the plan again with sw.plan'
        raise PlanError(what, facts=[("count", str(len(left)))], fix=fix)
    return replace(spmd, lifetimes=replace(spmd.lifetimes, once=once))


def _check_strategies(stage: Stage, graph: Graph, choice: Choice) -> None:
    faults = []
    for op in graph.ops:
        text = choice.strategies[op.name].format(stage.mesh)
        if text != stage.strategies[op.name]:
            what = f"the plan lists the strategy {stage.strategies[op.name]!r}, the program has {text!r}"
            faults.append(problem(what, op=op.name, source=op.source))
    if faults:
        more = [f"and {len(faults) - 8} more"] if len(faults) > 8 else []
        raise PlanError("\n".join(["the program is not the one that the plan lists:", *faults[:8], *more]))


def bind(plan: Plan, graph: Graph, *, training: bool | None = None, widened: bool = False) -> tuple[Factored, Choice]:
    """Return the divided rules of a graph, and the choice that a plan makes for it.

    For the inputs and the mode of the plan, the graph must have the plan's operators, and every strategy must fit. For
    inputs of other sizes, and for evaluation, operators that still exist keep their strategies where these still apply.
    Strategies of the other operators are chosen to match these.

    Args:
        plan: A plan of one stage.
        graph: The graph of a call of its model.
        training: The mode of the call, if the caller knows it.
        widened: The graph computes in float64, whatever dtypes the plan has.

    Raises:
        PlanError: Lists everything that does not fit.
    """
    _check_sources(plan, graph, widened)
    same = same_inputs(plan, graph)
    if same and training == plan.training:
        _check_operators(plan, graph)
    rules = rules_of(graph, known=plan.strategies, imbalance=plan.imbalance)
    rules = {name: variant(rule, plan.strategies.get(name, "")) for name, rule in rules.items()}
    factored = factor_graph(graph, rules, _unread(plan, graph))
    exact = same and {op.name for op in graph.ops} == set(plan.strategies)
    fixed: Choices = {}
    faults: list[str] = []
    for op in graph.ops:
        if op.name not in plan.strategies:
            continue
        try:
            fixed[op.name] = _parse(plan.strategies[op.name], factored.rules[op.name], plan.mesh)
        except ShardwiseError as error:
            if exact:
                rule = factored.rules[op.name]
                text = f"strategy {plan.strategies[op.name]!r}: {error}"
                faults.append(problem(text, op=op.name, source=op.source, fix=splittable(rule)))
    if faults:
        raise PlanError("\n".join(["the plan does not fit its model:", *faults]))
    storage = {
        source.value: _storage(plan, source.names, factored.atoms[source.value], graph.by_name[source.value].shape)
        for source in graph.sources
        if source.kind != "constant"
    }
    choice = choose(graph, factored, plan.mesh, "auto", fixed, storage=storage)
    cuts = {name: parse_cuts(plan.strategies[name]) for name in fixed if parse_cuts(plan.strategies[name])}
    choice = _stored_as_planned(with_cuts(choice, cuts, graph, factored.rules, plan.mesh), plan, graph)
    return factored, replace(choice, shared=_shared(plan, graph), row_chunks=plan.row_chunks)


def _unread(plan: Plan, graph: Graph) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Return the atoms of parameters and buffers that the graph does not read.

    No operator determines how they are divided, so they keep the atoms that they have in the plan.
    """
    atoms: dict[str, tuple[tuple[int, ...], ...]] = {}
    for source in graph.sources:
        layout = None if graph.consumers[source.value] else plan.layouts.get(source.names[0])
        if layout is not None and source.kind != "input" and layout.shape == graph.by_name[source.value].shape:
            atoms[source.value] = layout.atoms
    return atoms


def _stored_as_planned(choice: Choice, plan: Plan, graph: Graph) -> Choice:
    """Return the choice with the plan's uneven splits of parameters and buffers.

    Raises PlanError if such a split is of a dim that the choice divides in another way.
    """
    sources = dict(choice.sources)
    for source in graph.sources:
        planned = plan.layouts.get(source.names[0])
        if planned is None or not planned.windows:
            continue
        layout = sources[source.value]
        if any(layout.dims[cut.dim] != planned.dims[cut.dim] for cut in planned.windows):
            raise PlanError(
                f"{source.names[0]} is kept as {planned}, but the model divides it as {layout}",
                fix="split a dim by hand only where no view divides it",
            )
        sources[source.value] = replace(layout, windows=planned.windows)
    return replace(choice, sources=sources)


def _shared(plan: Plan, graph: Graph) -> dict[str, Layout]:
    """Return the plan's shared layouts (``Choice.shared``) of the values that have the planned shape."""
    planned = {entry.name: parse_layout(entry.layout, plan.mesh) for entry in plan.shared}
    names = {value_name(value.name, graph): value for value in graph.values} if planned else {}
    return {
        names[name].name: layout
        for name, layout in planned.items()
        if name in names and names[name].shape == layout.shape
    }


def _parse(text: str, rule: OpRule, mesh: Mesh) -> dict[str, AxisChoice]:
    """Return the choice of every axis in a strategy's text. Axes that it does not name are invariant.

    Raises LayoutError if the rule does not allow the strategy.
    """
    check_strategy(rule, Strategy.parse(text, mesh), mesh)
    choices = parse_choices(text, mesh)
    for axis, choice in choices.items():
        size = rule.factor(choice.factor).size if isinstance(choice, Split) else 2
        if size < 2:
            raise LayoutError(f"factor {choice} has size {size}: nothing to split over {axis}")
    return choices | {axis: INVARIANT for axis in mesh.sub_axes if axis not in choices}


def same_inputs(plan: Plan, graph: Graph) -> bool:
    """Return whether the graph has the names and shapes of the plan's inputs and, in a stage, of received values."""

    def shapes(kind: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
        return tuple((s.names[0], graph.by_name[s.value].shape) for s in graph.sources if s.kind == kind)

    received = plan.only_stage.receives
    same = shapes("input") == tuple((entry.name, entry.shape) for entry in plan.inputs)
    return same and shapes("activation") == tuple((entry.name, entry.shape) for entry in received)


def _check_sources(plan: Plan, graph: Graph, widened: bool) -> None:
    """Raise PlanError unless the parameters, buffers and inputs of a graph fit the plan.

    Parameters must have the plan's names. Parameters, and the buffers that both have, must have its shapes and dtypes.
    Inputs must have its dtypes and numbers of dims.
    """
    faults: list[str] = []
    near = _Near()
    for kind, entries in (("parameter", plan.parameters), ("buffer", plan.buffers)):
        have = {s.names[0]: graph.by_name[s.value] for s in graph.sources if s.kind == kind}
        want = {entry.name: entry for entry in entries}
        for name in sorted(want.keys() - have.keys()) if kind == "parameter" else ():
            faults.append(f"{kind} {name} of the plan is missing in the model{near(name, have.keys() - want.keys())}")
        for name in have.keys() - want.keys() if kind == "parameter" else ():
            faults.append(f"{kind} {name} of the model is not in the plan")
        for name in have.keys() & want.keys():
            value, planned = have[name], want[name]
            texts = [str(list(shape)) for shape in (value.shape, planned.shape)]
            if not widened:
                texts = [format_dtype(value.kept_dtype) + texts[0], planned.dtype + texts[1]]
            if texts[0] != texts[1]:
                faults.append(f"{kind} {name} is {texts[0]} in the model and {texts[1]} in the plan")
    inputs = {s.names[0]: graph.by_name[s.value] for s in graph.sources if s.kind == "input"}
    _raise_faults(faults + input_faults(plan, {n: (v.kept_dtype, v.shape) for n, v in inputs.items()}, widened))


def _check_operators(plan: Plan, graph: Graph) -> None:
    have = {op.name: op for op in graph.ops}
    want = {entry.name: entry for entry in plan.operators}
    near, others = _Near(), have.keys() - want.keys()
    faults = [
        f"operator {name} ({want[name].source}) of the plan is missing in the model{near(name, others)}"
        for name in sorted(want.keys() - have.keys())
    ]
    for name, op in have.items():
        if name not in want:
            faults.append(f"operator {name} ({op.source}) of the model is not in the plan")
        elif str(op.target) != want[name].target:
            faults.append(
                f"operator {name} ({op.source}) is {op.target} in the model and {want[name].target} in the plan"
            )
    _raise_faults(faults)


class _Near:
    """Suggests the most similar name of the model for a missing one.

    It does so only for the first few, since comparing all names takes minutes if the plan is of another model.
    """

    def __init__(self) -> None:
        self._left = _NUM_SHOWN

    def __call__(self, name: str, names: Iterable[str]) -> str:
        self._left -= 1
        matches = get_close_matches(name, list(names), 1) if self._left >= 0 else []
        return f"; the model has {matches[0]}" if matches else ""


def _raise_faults(faults: list[str]) -> None:
    if faults:
        shown = sorted(faults)[:_NUM_SHOWN]
        more = [f"  and {len(faults) - len(shown)} more"] if len(faults) > len(shown) else []
        what = "\n".join(
            [
                "the plan is for another model or other inputs, or of another version of shardwise:",
                *(f"  {f}" for f in shown),
                *more,
            ]
        )
        raise PlanError(what, fix="make a plan for this model and these inputs with sw.plan")


def input_faults(
    plan: Plan, inputs: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], widened: bool = False
) -> list[str]:
    """Return the faults of a call's inputs (name -> dtype and shape) under a plan.

    A missing input is no fault, since evaluation has no labels.
    """
    faults: list[str] = []
    for entry in plan.inputs:
        if entry.name not in inputs:
            continue
        dtype, shape = inputs[entry.name]
        if format_dtype(dtype) != entry.dtype and not (widened and dtype in (torch.float64, torch.complex128)):
            faults.append(f"input {entry.name} has dtype {format_dtype(dtype)}; the plan was made for {entry.dtype}")
        elif len(shape) != len(entry.shape):
            faults.append(
                f"input {entry.name} has {len(shape)} dims {list(shape)}; the plan was made for {list(entry.shape)}"
            )
    return faults


def _storage(
    plan: Plan, names: tuple[str, ...], atoms: tuple[tuple[int, ...], ...], shape: tuple[int, ...]
) -> dict[str, Where]:
    """Return where the plan keeps a source, over the graph's atoms.

    A source of another size than planned is split over the same axes in the same dims. A source that the plan lacks is
    invariant.
    """
    layout = plan.layouts.get(names[0])
    if layout is None:
        return dict.fromkeys(plan.mesh.sub_axes, "I")
    if layout.shape == shape:
        try:
            return where_of(layout.canonical().refine(atoms))
        except LayoutError:
            return where_of(layout)
    where: dict[str, Where] = dict.fromkeys(plan.mesh.sub_axes, "I")
    for dim, dim_atoms in enumerate(layout.dims):
        axes = [axis for atom in dim_atoms for axis in atom.axes]
        if axes and shape[dim] > 1:
            spread = spread_axes(atoms, dim, axes, plan.mesh)
            where = spread | {axis: where_kept for axis, where_kept in where.items() if axis not in spread}
    return where


@dataclass(frozen=True)
class ListedPaths:
    """The route (``programs.spmd.Route``) of a stage for a lowered graph of its model. For another batch size than the
    plan's the same values take the same paths: layouts get the actual sizes, and the axes of moves stay. ``moves``: by
    the value's name and its layouts before and after; for other sizes (``sizes_match`` is false), by these layouts
    without sizes. What the stage does not list takes the path that sends the fewest bytes."""

    graph: Graph
    moves: dict[Hashable, tuple[Move, ...]]
    sizes_match: bool

    @staticmethod
    def of(stage: Stage, graph: Graph, *, sizes_match: bool) -> ListedPaths:
        moves: dict[Hashable, tuple[Move, ...]] = {}
        for entry in stage.conversions or ():
            ends = (parse_layout(text, stage.mesh) for text in (entry.source, entry.target))
            listed = tuple(parse_move(text, stage.mesh) for text in entry.path)
            moves.setdefault(_key(entry.value, *ends, sizes_match=sizes_match), listed)
        return ListedPaths(graph, moves, sizes_match)

    def __call__(self, value: Value, source: Layout, target: Layout) -> tuple[Move, ...]:
        """Return the moves that turn ``source`` into ``target``."""
        key = _key(value_name(value.name, self.graph), source, target, sizes_match=self.sizes_match)
        moves = self.moves.get(key)
        if moves is not None and not self.sizes_match:
            moves = resize_moves(moves, source, target)
        return fewest_bytes(value, source, target) if moves is None else moves


def _key(name: str, source: Layout, target: Layout, *, sizes_match: bool) -> Hashable:
    describe = format_layout if sizes_match else split_dims
    return name, describe(source), describe(target)


def split_dims(layout: Layout) -> Hashable:
    """Return a layout without sizes: the axes that split each dim, and the states of the others."""
    return tuple(tuple(axis for atom in dim for axis in atom.axes) for dim in layout.dims), layout.states


def resize_moves(moves: tuple[Move, ...], source: Layout, target: Layout) -> tuple[Move, ...] | None:
    """Return the moves between two layouts of a value of another size, or None. A dim of another size must be one atom
    all the way, and every device must have a share of what is split on the way. Splits by hand do not follow."""
    if source.shape == moves[0].source.shape:
        path = moves
    elif any(layout.windows for move in moves for layout in (move.source, move.target)):
        return None
    else:
        written = [_written(move, source.shape) for move in moves]
        path = tuple(move for move in written if move is not None)
        if len(path) < len(moves):
            return None
    stations = [source, *(end for move in path for end in (move.source, move.target)), target]
    meets = all(a.canonical() == b.canonical() for a, b in zip(stations[::2], stations[1::2], strict=True))
    return path if meets and all(_has_shares(move.target) for move in path[:-1]) else None


def _written(move: Move, shape: tuple[int, ...]) -> Move | None:
    """Return the move with the sizes of ``shape``, or None if a dim of another size has several atoms."""
    ends = []
    for layout in (move.source, move.target):
        if any(size != new and len(dim) > 1 for dim, size, new in zip(layout.dims, layout.shape, shape, strict=True)):
            return None
        dims = (
            dim if size == new else (Atom(new, dim[0].axes),)
            for dim, size, new in zip(layout.dims, layout.shape, shape, strict=True)
        )
        ends.append(Layout(layout.mesh, tuple(dims), layout.states))
    return Move(ends[0], ends[1], move.axes)


def _has_shares(layout: Layout) -> bool:
    return all(layout.mesh.size_of(atom.axes) <= atom.size for dim in layout.dims for atom in dim)
