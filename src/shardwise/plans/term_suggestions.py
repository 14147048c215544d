"""Terms of the loss that a step over micro-batches could take per micro-batch, for messages; and whether it must."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from shardwise.errors import PlanError, PlanWarning, listed, warn_user
from shardwise.graph.batch import batch_size
from shardwise.graph.dead_code import eliminate_dead_code
from shardwise.graph.ir import Graph, Op, Ref, refs
from shardwise.graph.loss_terms import LOSS
from shardwise.programs.time_axis import FIX, split_in_time

_SCALES = (torch.ops.aten.mul.Tensor, torch.ops.aten.mul.Scalar, torch.ops.aten.div.Tensor, torch.ops.aten.div.Scalar)
_MOST_TRIES = 16  # each splits the whole graph
_NUMBER = re.compile(r"(?<=\.)\d+(?=[./])|^\d+(?=[./])")  # in a path of modules


def check_terms(graph: Graph) -> None:
    """Raise PlanError for an output that is a sum over micro-batches anyway, or if all terms are. A module may compute
    such a term beside one that is none. Warn of inputs that every micro-batch has whole."""
    if graph.terms and (whole := _without_samples(graph)):
        warn_user(f"per_micro_batch: {whole}; every micro-batch has these whole", PlanWarning)
    sums = [(value, name) for value, name in graph.terms if _is_sum(graph, value)]
    for value, name in sums:
        if "/" in name and len(sums) < len(graph.terms):
            continue
        raise PlanError(
            f"per_micro_batch: {name} is a sum over samples, which micro-batches compute exactly: there is nothing to "
            "average",
            op=graph.producer[value].name,
            source=graph.producer[value].source,
            fix=f"leave {name} out of per_micro_batch",
        )


def _is_sum(graph: Graph, value: str) -> bool:
    """Return whether the value is a sum over micro-batches."""
    try:
        split_in_time(replace(graph, loss=value, mutations=(), terms=()))
    except PlanError:
        return False
    return True


def suggesting_terms(error: PlanError, graph: Graph, output_names: Sequence[str]) -> PlanError:
    """Return the error of a loss that is no sum over micro-batches, with the terms to take per micro-batch as a fix if
    there are such."""
    if error.fix != FIX or graph.terms:
        return error
    if whole := _without_samples(graph):
        fix = f"pass inputs whose first dim is the samples ({whole}); or {FIX}"
        return PlanError(error.what, op=error.op, source=error.source, fix=fix)
    names = _suggested(graph, output_names)
    if not names:
        return error
    shown = ", ".join(f'"{name}"' for name in names)
    fix = f"average it over micro-batches, as gradient accumulation does: per_micro_batch=[{shown}]; or {FIX}"
    return PlanError(error.what, op=error.op, source=error.source, fix=fix)


def _without_samples(graph: Graph) -> str:
    """Return as text the rows of the inputs that have others than the batch has samples, or ""."""
    inputs = [source for source in graph.sources if source.kind == "input"]
    rows = {s.names[0]: graph.by_name[s.value].shape[0] for s in inputs if graph.by_name[s.value].shape}
    others = [f"{name} has {count}" for name, count in rows.items() if count != batch_size(graph)]
    if not others:
        return ""
    return f"the batch has {batch_size(graph)} samples, dim 0 of {next(iter(rows))}, and {listed(others)}"


def _suggested(graph: Graph, output_names: Sequence[str]) -> tuple[str, ...]:
    """Return names of terms without which the loss is a sum over micro-batches, outputs if possible; none if there are
    no such."""
    outputs = {out.name: name for out, name in zip(graph.outputs, output_names, strict=False) if isinstance(out, Ref)}
    graph = eliminate_dead_code(replace(graph, outputs=(Ref(graph.loss or ""),)))
    for out, name in outputs.items():
        is_scalar = out in graph.producer and not graph.by_name[out].shape
        if is_scalar and out != graph.loss and _refused(graph, {out: name}) is None:
            return (name,)
    terms: dict[str, str] = {}
    for _ in range(_MOST_TRIES):
        refused = _refused(graph, terms)
        if refused is None:
            return tuple(dict.fromkeys(terms.values()))
        if refused not in graph.op_by_name:
            return ()
        found = _term_of(graph, refused, terms)
        if found is None:
            return ()
        terms |= found
    return ()


def _term_of(graph: Graph, refused: str, terms: dict[str, str]) -> dict[str, str] | None:
    """Return the first scalar after a refused operator, times the numbers and counts that it is multiplied by, with its
    likes in other layers. None if the refusal stays."""
    chosen = None
    fixed = [s.value for s in graph.sources if s.kind != "parameter"]
    inputs = graph.made_from(fixed, lambda op: True)
    for op, reached in _only_ways(graph, graph.op_by_name[refused]):
        if chosen is not None and not (op.target in _SCALES and reached.union(inputs).issuperset(op.operands)):
            break  # the rest of the loss is added
        if not graph.by_name[op.results[0]].shape:
            chosen = op
    if chosen is None:
        return None
    pattern = _pattern(chosen)
    alike = [op for op in graph.ops if _pattern(op) == pattern]
    found = {op.results[0]: pattern if len(alike) > 1 else op.name for op in alike}
    if chosen.results[0] == graph.loss:
        found = {chosen.results[0]: LOSS}
    still = _refused(graph, terms | found)
    order = [op.name for op in graph.ops]
    return found if still is None or (still in order and order.index(still) > order.index(refused)) else None


def _pattern(op: Op) -> str:
    """Return the name of an operator without the numbers of layers."""
    return _NUMBER.sub("*", op.module) + op.name[len(op.module) :]


def _only_ways(graph: Graph, op: Op) -> Iterator[tuple[Op, set[str]]]:
    """Iterate over the operators from ``op`` on through which all of its effect on the loss goes, with the values
    before them that depend on it."""
    position = graph.ops.index(op)
    last_read = {name: number for number, reader in enumerate(graph.ops) for name in reader.operands}
    last_read |= dict.fromkeys([*refs(graph.outputs), *(value for _, value in graph.mutations)], len(graph.ops))
    reached, until = set[str](), position  # what depends on the operator, and the last reader of it
    for number, later in enumerate(graph.ops[position:], position):
        if number > position and reached.isdisjoint(later.operands):
            continue
        if number >= until and len(later.results) == 1 and graph.by_name[later.results[0]].dtype.is_floating_point:
            yield later, reached
        reached.update(later.results)
        until = max([until, *(last_read.get(name, 0) for name in later.results)])


def _refused(graph: Graph, terms: dict[str, str]) -> str | None:
    """Return the operator at which the graph is refused, or None."""
    try:
        split_in_time(replace(graph, terms=tuple(terms.items())))
    except PlanError as error:
        return error.op
    return None
