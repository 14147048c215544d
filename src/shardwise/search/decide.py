"""The choice of a plan by propagation of what the user fixed; ``search.planner`` chooses by price.

Uneven splits by hand: ``"v@tp{10,20,30,4}"`` gives the first device along tp ten rows, the second twenty. The axes that
split a factor are decided as if all splits were even. The number of indices of each device is added to that decision,
and parameters are then stored as the operators that split them by hand need them.

Layouts of tensors that the user names apply after everything else is chosen, by price too (``apply_layouts``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from difflib import get_close_matches

from shardwise.errors import LayoutError, ShardwiseError, problem
from shardwise.graph.annotate import SUMMED, Annotation
from shardwise.graph.ir import Graph
from shardwise.layouts.choice import layout_of, where_of
from shardwise.layouts.layout import Atom, Layout
from shardwise.layouts.mesh import Mesh
from shardwise.layouts.strategy import Strategy, apply_strategy, check_strategy, parse_cuts
from shardwise.layouts.text import parse_layout
from shardwise.programs.builder import Choice
from shardwise.rules.atoms import Factored
from shardwise.rules.keyed_rows import IMBALANCE
from shardwise.rules.rule import OpRule
from shardwise.search.modes import choose, with_travelling_rows
from shardwise.search.user_choices import alias_choices, annotated_ops, annotated_rules, fixed_choices
from shardwise.search.user_strategies import axes_of_counts, splittable

# Operator -> factor -> its indices on each device.
Cuts = Mapping[str, Mapping[str, tuple[int, ...]]]


def decide(
    graph: Graph, annotations: Iterable[Annotation], mesh: Mesh, mode: str, imbalance: float = IMBALANCE
) -> tuple[Factored, Choice]:
    """Complete what the user annotated, in the given mode. ``imbalance``: see ``user_choices.rules_of``."""
    rules, factored = annotated_rules(graph, annotations := tuple(annotations), imbalance)
    fixed = fixed_choices(graph, rules, factored, annotations, mesh)
    choice = sum_whole(
        choose(graph, factored, mesh, mode, with_travelling_rows(factored, fixed)), graph, factored, mesh
    )
    cuts = {
        op.name: parse_cuts(annotation.strategy)
        for annotation in annotations
        if isinstance(annotation.strategy, str) and parse_cuts(annotation.strategy)
        for op in annotated_ops(graph, factored, annotation)
    }
    return factored, stored_as_cut(with_cuts(choice, cuts, graph, factored.rules, mesh), graph, factored.rules, mesh)


def with_cuts(choice: Choice, cuts: Cuts, graph: Graph, rules: Mapping[str, OpRule], mesh: Mesh) -> Choice:
    """Return the choice with factors split by hand. Raises LayoutError naming the operator if that is not possible."""
    strategies = dict(choice.strategies)
    for name, counts in cuts.items():
        strategies[name] = replace(strategies[name], cuts=tuple(sorted(counts.items())))
        try:
            check_strategy(rules[name], strategies[name], mesh)
        except LayoutError as error:
            op = graph.op_by_name[name]
            text = problem(str(error), op=name, source=op.source, fix=splittable(rules[name]))
            raise LayoutError(text) from error
    return replace(choice, strategies=strategies)


def stored_as_cut(choice: Choice, graph: Graph, rules: Mapping[str, OpRule], mesh: Mesh) -> Choice:
    """Return the choice with parameters stored as their first consumer with a split by hand needs them, over the axes
    that they are stored over anyway."""
    sources = dict(choice.sources)
    for op in graph.ops:
        strategy = choice.strategies[op.name]
        if not strategy.cuts:
            continue
        for value, need in zip(op.operands, apply_strategy(rules[op.name], strategy, mesh).operands, strict=True):
            source = graph.source_of.get(value)
            if source is not None and source.kind == "parameter" and not sources[value].windows:
                layout = sources[value]
                windows = tuple(cut for cut in need.windows if layout.dims[cut.dim] == need.dims[cut.dim])
                sources[value] = replace(layout, windows=windows)
    return replace(choice, sources=sources)


Kept = str | tuple[int, ...]  # a layout as text, or how many ways each dim is split


def check_layout_names(layouts: Mapping[str, Kept], graph: Graph, *, has_mesh: bool) -> None:
    """Raise LayoutError for a name that no input, parameter or buffer has. ``has_mesh``: whether axes have names before
    the search."""
    values = {name for source in graph.sources for name in source.names if source.kind != "constant"}
    for name, requested in layouts.items():
        if not has_mesh and isinstance(requested, str) and "@" in requested:
            what = f"the layout {requested!r} of {name} names axes, and the search names those of the mesh it chooses"
            raise LayoutError(what, fix="give the mesh as well: mesh=sw.Mesh(dp=2, tp=4)")
        if name not in values:
            near = get_close_matches(name, values, n=1)
            fix = f"did you mean {near[0]!r}?" if near else f"one of {', '.join(sorted(values)[:8])}"
            raise LayoutError(f"layouts names {name!r}, which the model does not have", fix=fix)


def apply_layouts(choice: Choice, layouts: Mapping[str, Kept], graph: Graph, factored: Factored, mesh: Mesh) -> Choice:
    """Return the choice with some inputs, parameters or buffers in given layouts, from which operators convert them.
    Split counts take the mesh's axes in order, the first dim the outermost; where a dim is used in blocks (heads, parts
    of a fused projection) whose number they do not divide, each block is split. Raises LayoutError for what does not
    fit, and for two layouts of one parameter that has several names."""
    values = {name: source.value for source in graph.sources for name in source.names}
    sources = dict(choice.sources)
    kept: dict[str, str] = {}  # value -> the name that it was kept by
    for name, requested in layouts.items():
        shape, atoms = graph.by_name[values[name]].shape, factored.atoms[values[name]]
        requested_layout: Layout | None = None
        inside: Layout | None = None
        try:
            requested_layout = _layout(requested, shape, mesh)
            inside = _inside_blocks(requested_layout, atoms)
            by_counts = not isinstance(requested, str)
            where = where_of(inside if by_counts and inside is not None else requested_layout.canonical().refine(atoms))
        except ShardwiseError as error:
            fix = f"a layout of shape {list(shape)} on {mesh}"
            if inside is not None:
                fix = f'its blocks are used apart: split each of them, "{inside}"'
            raise type(error)(problem(f"{name} cannot be kept as {requested!r}: {error}", fix=fix)) from error
        layout = layout_of(where, atoms, mesh)
        first = kept.setdefault(values[name], name)
        if first != name and layout != sources[values[name]]:
            what = f"{first} and {name} are one tensor, and cannot be kept as {layouts[first]!r} and as {requested!r}"
            raise LayoutError(what, fix=f"name {first} only")
        sources[values[name]] = layout
    return replace(choice, sources=sources)


def sum_whole(choice: Choice, graph: Graph, factored: Factored, mesh: Mesh) -> Choice:
    """Return the choice in which values marked ``constrain(x, "summed")`` are split as their operator leaves them, with
    its partial sums summed by an all-reduce, although a consumer would have taken a part by a reduce-scatter."""
    strategies = dict(choice.strategies)
    for value, text in graph.constraints:
        if text != SUMMED or value not in graph.producer:  # what another stage has sent was summed there
            continue
        mark = graph.producer[value]
        (operand,) = mark.operands
        producer = graph.producer.get(operand)
        if producer is None:
            continue
        results = apply_strategy(factored.rules[producer.name], strategies[producer.name], mesh).results
        layout = replace(results[producer.results.index(operand)], states=())
        strategies[mark.name] = Strategy.of(alias_choices(factored.rules[mark.name], layout, factored.atoms[value]))
    return replace(choice, strategies=strategies)


def _inside_blocks(layout: Layout, atoms: tuple[tuple[int, ...], ...]) -> Layout | None:
    """Return the layout with the axes of every dim on the outermost of its atoms that they divide, if there is one."""
    dims = []
    for dim, sizes in zip(layout.dims, atoms, strict=True):
        axes = tuple(axis for atom in dim for axis in atom.axes)
        at = next((i for i, size in enumerate(sizes) if size % layout.mesh.size_of(axes) == 0), None)
        if at is None:
            return None
        dims.append(tuple(Atom(size, axes if i == at else ()) for i, size in enumerate(sizes)))
    return replace(layout, dims=tuple(dims))


def _layout(requested: Kept, shape: tuple[int, ...], mesh: Mesh) -> Layout:
    if isinstance(requested, str):
        layout = parse_layout(requested, mesh)
        if layout.shape != shape:
            raise LayoutError(f"it is of shape {list(layout.shape)}, not {list(shape)}")
        if layout.states or layout.windows:
            raise LayoutError("kept tensors are split evenly, and whole along the axes that are not named")
        return layout
    if not isinstance(requested, (tuple, list)) or not all(type(count) is int for count in requested):
        raise LayoutError("it is neither a layout's text nor whole numbers, one per dim")
    if len(requested) != len(shape):
        raise LayoutError(f"{len(requested)} split counts for {len(shape)} dims {list(shape)}")
    splits = axes_of_counts({str(dim): count for dim, count in enumerate(requested)}, mesh)
    axes = [",".join(axis for axis, dim in splits.items() if dim == str(d)) for d in range(len(shape))]
    dims = [f"{size}@({split_over})" if split_over else str(size) for size, split_over in zip(shape, axes, strict=True)]
    return parse_layout(f"[{', '.join(dims)}]", mesh)
