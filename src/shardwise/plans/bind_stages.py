"""The programs of the stages of a pipeline plan, for a graph of the model.

A value crosses from one stage to the next between devices of the same number, in the layout of the receiver. If the
layouts are the same up to axis names, parts are sent as they are; otherwise the whole value is sent.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from shardwise.errors import LayoutError, PlanError
from shardwise.graph.cut import GraphCut, cut_apart
from shardwise.graph.dead_code import eliminate_dead_code
from shardwise.graph.ir import Graph, Ref, Source, refs
from shardwise.graph.stage_marks import with_stages
from shardwise.layouts.choice import layout_of, where_of
from shardwise.layouts.layout import Layout
from shardwise.layouts.mesh import Mesh
from shardwise.layouts.text import parse_layout
from shardwise.layouts.transfer import boundary_layout, on_mesh
from shardwise.plans.bind import bind, for_call, is_planned_for, program_of, program_of_choice
from shardwise.plans.entries import Stage
from shardwise.plans.plan import Plan
from shardwise.programs.builder import Choice
from shardwise.programs.micro_batches import whole_sources
from shardwise.programs.spmd import SpmdProgram
from shardwise.rules.atoms import Factored


@dataclass(frozen=True)
class BoundStages:
    """A graph cut into the stages of a plan, and the program of each."""

    cut: GraphCut
    spmds: tuple[SpmdProgram, ...]


def delivered_layouts(part: Graph, spmd: SpmdProgram) -> dict[str, Layout]:
    """Return the layout in which the program of a part delivers each output."""
    pairs = zip(part.outputs, spmd.outputs, strict=True)
    return {out.name: spmd.layouts[end.name] for out, end in pairs if isinstance(out, Ref) and isinstance(end, Ref)}


def step_graph(graph: Graph) -> Graph:
    """Return what a training step of a pipeline computes of a captured graph: the loss, and what is written back.
    Raises PlanError if there is no loss."""
    if graph.loss is None:
        raise PlanError(
            "stages need a loss, which the module does not return",
            fix="return the loss first, or give loss= to plan and parallelize",
        )
    return eliminate_dead_code(replace(graph, outputs=(Ref(graph.loss),)))


def cut_for_stages(
    graph: Graph, parts: Sequence[Sequence[str]], prelude: Graph | None, holders: Sequence[Collection[str]] = ()
) -> GraphCut:
    """Return the graph cut into the operators of stages. Parts that take values of the ``prelude`` of a step over
    micro-batches hold the buffers that it reads. ``holders``: as of ``cut_apart``."""
    cut = cut_apart(graph, parts, holders)
    if prelude is None:
        return cut
    read = [source for source in only_read(prelude).sources if source.kind == "buffer"]
    if not read:
        return cut
    return replace(cut, parts=tuple(_holding(part, read, prelude) for part in cut.parts))


def only_read(prelude: Graph) -> Graph:
    """Return a prelude with only the sources that it reads."""
    sources = tuple(source for source in prelude.sources if prelude.consumers[source.value])
    dropped = prelude.source_of.keys() - {source.value for source in sources}
    return replace(prelude, sources=sources, values=tuple(v for v in prelude.values if v.name not in dropped))


def _holding(part: Graph, sources: Sequence[Source], prelude: Graph) -> Graph:
    if not whole_sources(part):
        return part
    missing = [source for source in sources if source.value not in part.source_of]
    values = tuple(prelude.by_name[source.value] for source in missing)
    return replace(part, values=(*values, *part.values), sources=(*missing, *part.sources))


def check_last(cut: GraphCut, graph: Graph) -> None:
    """Raise PlanError unless the last part computes the loss."""
    home = dict(cut.output_parts)[graph.loss] if graph.loss is not None else len(cut.parts) - 1
    if home != len(cut.parts) - 1:
        op = graph.producer.get(graph.loss or "")
        raise PlanError(
            f"the loss is computed in stage {home}, and the last stage is {len(cut.parts) - 1}",
            op="" if op is None else op.name,
            fix="cut earlier, so that the loss is in the last stage",
        )


def bound(
    plan: Plan,
    graph: Graph,
    *,
    prelude: Graph | None = None,
    training: bool | None = None,
    original: Graph | None = None,
    constants: tuple[str, ...] | None = None,
) -> BoundStages:
    """Return the programs of all stages of a plan for a graph of its model: of a micro-batch of its step, or of another
    call. ``original``: the graph in the model's own dtypes, where ``graph`` computes in float64; ``constants``: as
    there. Raises PlanError as ``plans.bind.program_of`` does, and if other values cross than the plan lists."""
    if not plan.is_pipeline:  # one stage, of which nothing crosses
        spmd = program_of(plan, graph, training=training, original=original, constants=constants)
        return BoundStages(GraphCut((graph,), (), tuple((name, 0) for name in refs(graph.outputs))), (spmd,))
    return for_call(plan, constants, training, lambda mode: _bound(plan, graph, prelude, mode, original))


def _bound(
    plan: Plan, graph: Graph, prelude: Graph | None, training: bool | None, original: Graph | None
) -> BoundStages:
    names = [[entry.name for entry in stage.operators] for stage in plan.stages]
    kept = [stage.layouts.keys() for stage in plan.stages]
    cut = cut_for_stages(graph, with_stages(graph, names, kept), prelude, kept)
    plans = [plan.alone(number) for number in range(len(plan.stages))]
    bindings = [
        bind(alone, part, training=training, widened=original is not None)
        for alone, part in zip(plans, cut.parts, strict=True)
    ]
    choices = meeting(cut, bindings, [stage.mesh for stage in plan.stages])
    originals: tuple[Graph | None, ...] = (None,) * len(plans)
    if original is not None:
        originals = cut_for_stages(original, with_stages(original, names, kept), prelude, kept).parts
    spmds = tuple(
        program_of_choice(alone, part, factored, choice, training=training, original=narrow)
        for alone, part, (factored, _), choice, narrow in zip(
            plans, cut.parts, bindings, choices, originals, strict=True
        )
    )
    for number, (alone, part, spmd) in enumerate(zip(plans, cut.parts, spmds, strict=True)):
        if alone.only_stage.conversions is not None and is_planned_for(alone, part, training):
            _check_sends(alone.only_stage, number, cut, spmd)
    return BoundStages(cut, spmds)


def _check_sends(stage: Stage, number: int, cut: GraphCut, spmd: SpmdProgram) -> None:
    delivered = delivered_layouts(cut.parts[number], spmd)
    listed = {entry.name: parse_layout(entry.layout, stage.mesh).canonical() for entry in stage.sends}
    sent = {name: delivered[name].canonical() for name in cut.sends(number)}
    differing = sorted(name for name in listed.keys() | sent.keys() if listed.get(name) != sent.get(name))
    if differing:
        name = differing[0]
        raise PlanError(
            f"the program is not the one that the plan lists: stage {number} sends {name} "
            f"{sent.get(name, 'nowhere')}, and lists {listed.get(name, 'none')}",
            fix="make the plan again with sw.plan, or derive conversions again with Plan.load(path, edited=True)",
        )


def meeting(cut: GraphCut, bindings: Sequence[tuple[Factored, Choice]], meshes: Sequence[Mesh]) -> list[Choice]:
    """Return the choices of all stages with the layouts in which values cross: the receiver's, as far as the sender's
    devices correspond to the receiver's."""
    choices = [choice for _, choice in bindings]
    for number in reversed(range(len(choices) - 1)):
        delivered: dict[str, Layout] = {}
        later = choices[number + 1]
        sources = dict(later.sources)
        for name in cut.sends(number):
            passed_on = later.delivered.get(name)
            is_carried = passed_on is not None and not cut.parts[number + 1].consumers[name]
            target = boundary_layout(passed_on if is_carried and passed_on is not None else sources[name])
            fitted = _fitted(target, bindings[number][0].atoms[name], meshes[number])
            if fitted is None:
                target = Layout.whole(meshes[number + 1], target.shape)
                fitted = Layout.whole(meshes[number], target.shape)
            sources[name] = refined(target, bindings[number + 1][0].atoms[name]) or target
            delivered[name] = fitted
        choices[number + 1] = replace(later, sources=sources)
        choices[number] = replace(choices[number], delivered=delivered)
    return choices


def _fitted(layout: Layout, atoms: tuple[tuple[int, ...], ...], mesh: Mesh) -> Layout | None:
    """Return a layout on another mesh's devices, over the atoms of the value there, or None if there is none."""
    moved = on_mesh(layout, mesh)
    return None if moved is None else refined(moved, atoms)


def refined(layout: Layout, atoms: tuple[tuple[int, ...], ...]) -> Layout | None:
    """Return a layout over other atoms, or None if these do not allow it."""
    if layout.states or layout.windows:
        return None
    try:
        return layout_of(where_of(layout.canonical().refine(atoms)), atoms, layout.mesh)
    except LayoutError:
        return None
