"""The plan entries of a program, and the comparison of a program with what its plan lists."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from shardwise.errors import PlanError
from shardwise.graph.float8 import E4M3
from shardwise.graph.ir import Graph, Source
from shardwise.graph.naming import value_name
from shardwise.graph.written_out import SEED
from shardwise.layouts.conversions import Collective
from shardwise.layouts.mesh import Mesh
from shardwise.layouts.placement import Placement
from shardwise.layouts.text import format_dtype, format_layout, format_move
from shardwise.layouts.transfer import Renaming
from shardwise.plans.entries import (
    CollectiveEntry,
    ConversionEntry,
    OperatorEntry,
    ParameterEntry,
    SharedEntry,
    Stage,
    TensorEntry,
)
from shardwise.programs.buckets import Bucket
from shardwise.programs.builder import Choice
from shardwise.programs.lower import model_operators
from shardwise.programs.spmd import SpmdProgram
from shardwise.programs.spmd_steps import Conversion
from shardwise.rules.rule import OpRule

_LONGEST = 2000  # characters of a conversion in a message: texts of a file may have any length


def stage_of(
    graph: Graph, rules: Mapping[str, OpRule], choice: Choice, spmd: SpmdProgram, called: Mesh | None = None
) -> Stage:
    """Return a program's stage. ``graph``: the model's (not lowered); ``choice``: what the program was built for;
    ``called``: its mesh under the axis names of the plan, if these differ."""
    names = Renaming(spmd.mesh, called or spmd.mesh)

    def described(source: Source) -> tuple[str, str, tuple[int, ...], str]:
        value = graph.by_name[source.value]
        layout = format_layout(names.layout(choice.sources[source.value]), value.kept_dtype)
        return source.names[0], format_dtype(value.kept_dtype), value.shape, layout

    def tensors(kind: str) -> tuple[TensorEntry, ...]:
        return tuple(TensorEntry(*described(s)) for s in graph.sources if s.kind == kind and s.names[0] != SEED)

    gathered = {c.origin for c in spmd.conversions if c.result in spmd.lifetimes.conversions}
    recomputed = model_operators(spmd.lifetimes.operators, graph)
    offloaded = model_operators(spmd.lifetimes.offloaded, graph)
    return Stage(
        placement=Placement.whole(names.target),
        inputs=tensors("input"),
        parameters=tuple(
            ParameterEntry(*described(source), source.value in gathered, source.value in spmd.lifetimes.once)
            for source in graph.sources
            if source.kind == "parameter"
        ),
        buffers=tensors("buffer"),
        operators=tuple(
            OperatorEntry(
                op.name,
                str(op.target),
                str(rules[op.name]),
                names.strategy(choice.strategies[op.name]).format(names.target),
                op.source,
                op.name in recomputed,
                op.name in offloaded,
            )
            for op in graph.ops
        ),
        conversions=conversion_entries(spmd, names),
        shared=tuple(
            SharedEntry(value_name(name, graph), format_layout(names.layout(layout)))
            for name, layout in choice.shared.items()
        ),
    )


def conversion_entries(spmd: SpmdProgram, names: Renaming) -> tuple[ConversionEntry, ...]:
    """Return all conversions of a program in order; buckets of several are numbered from 1."""
    entries: list[ConversionEntry] = []
    number = 0
    for step in spmd.steps:
        shares = isinstance(step, Bucket) and len(step.conversions) > 1
        number += shares
        bucket = number if shares else 0
        overlaps = isinstance(step, Bucket) and step.of_parameters
        entries += [_conversion_entry(conversion, spmd, bucket, overlaps, names) for conversion in step.conversions]
    return tuple(entries)


def _conversion_entry(
    conversion: Conversion, spmd: SpmdProgram, bucket: int, overlaps: bool, names: Renaming
) -> ConversionEntry:
    dtype = E4M3 if conversion.scale else spmd.graph.by_name[conversion.origin].dtype

    def entries(collectives: tuple[Collective, ...]) -> tuple[CollectiveEntry, ...]:
        return tuple(
            CollectiveEntry(c.kind, names.target.format_axes(names.axes(c.axes)), c.num_bytes) for c in collectives
        )

    backward = conversion.collectives(backward=True) if spmd.receives_gradient(conversion) else ()
    return ConversionEntry(
        value_name(conversion.origin, spmd.graph),
        conversion.op,
        format_layout(names.layout(conversion.source), dtype),
        format_layout(names.layout(conversion.target), dtype),
        entries(conversion.collectives()),
        entries(backward),
        bucket,
        overlaps,
        tuple(format_move(names.move(move)) for move in conversion.moves),
        conversion.result in spmd.lifetimes.conversions,
    )


def check_program(stage: Stage, spmd: SpmdProgram, *, widened: bool) -> None:
    """Raise PlanError if the program of a stage is not the one that the stage lists. ``widened``: the program computes
    in float64, whatever the stage says, so dtypes and bytes are not compared."""
    listed, emitted = stage.conversions or (), conversion_entries(spmd, Renaming(spmd.mesh, spmd.mesh))
    if widened:
        listed, emitted = (tuple(map(_without_dtypes, entries)) for entries in (listed, emitted))
    if listed == emitted:
        return
    differences = list(_differences(listed, emitted))
    op, first = differences[0]
    source = next((entry.source for entry in stage.operators if entry.name == op), "")
    more = [("more", f"{len(differences) - 1} more differ")] if len(differences) > 1 else []
    raise PlanError(
        f"the program is not the one that the plan lists: {len(differences)} of {len(listed)} conversions differ",
        op=op,
        source=source,
        facts=[*first, *more],
        fix="make the plan again with sw.plan, or derive its conversions again with Plan.load(path, edited=True)",
    )


def _differences(
    listed: tuple[ConversionEntry, ...], emitted: tuple[ConversionEntry, ...]
) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yield (operator, texts of plan and program) for every conversion that only one of them has, or that differs; if
    there is none, for the first in another position."""
    before = {(entry.value, entry.target): entry for entry in listed}
    after = {(entry.value, entry.target): entry for entry in emitted}
    changed = [key for key in dict.fromkeys((*before, *after)) if before.get(key) != after.get(key)]
    for key in changed:
        pair = before.get(key), after.get(key)
        op = next(entry.op for entry in pair if entry is not None)
        texts = ("no such conversion" if entry is None else _described(entry) for entry in pair)
        yield op, list(zip(("plan", "program"), texts, strict=True))
    if not changed:
        first = next(pair for pair in zip(listed, emitted, strict=True) if pair[0] != pair[1])
        yield first[0].op, list(zip(("plan", "program"), (f"next {_described(entry)}" for entry in first), strict=True))


def _described(entry: ConversionEntry) -> str:
    bucket = f" in bucket {entry.bucket}" if entry.bucket else ""
    overlaps = ", overlaps" if entry.overlaps else ""
    text = f"{entry}{bucket}{overlaps}, by {'; '.join(entry.path)}, for {entry.op or 'the user'}"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text):,} characters)"


def _without_dtypes(entry: ConversionEntry) -> ConversionEntry:
    def plain(layout: str) -> str:
        return layout[layout.index("[") :]

    def kinds(side: tuple[CollectiveEntry, ...]) -> tuple[CollectiveEntry, ...]:
        return tuple(replace(collective, num_bytes=0) for collective in side)

    return replace(
        entry,
        source=plain(entry.source),
        target=plain(entry.target),
        forward=kinds(entry.forward),
        backward=kinds(entry.backward),
    )
