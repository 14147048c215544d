"""What a micro-batch computes as if it were the batch: terms of the loss that are taken per micro-batch, and whole
micro-batches that are separate.

A term's operators are those of the model captured for the samples of a micro-batch, so that every mean in them is over
these samples. They begin at values that hold samples: those are the same in the micro-batch of a batch and alone, which
is checked. Each term is multiplied by the micro-batch's share of the samples, and so is a summand of the average.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from shardwise.errors import PlanError, listed
from shardwise.graph.custom_operators import RANDOM
from shardwise.graph.dead_code import eliminate_dead_code
from shardwise.graph.ir import Arg, Graph, Op, Ref, Source, Value, map_refs, needed_for, rename_operands
from shardwise.graph.loss_terms import cut_terms, term_graph
from shardwise.graph.schema import arguments
from shardwise.layouts.choice import ShardPosition
from shardwise.programs.time_axis import FIX, TimeSplit
from shardwise.rules.arguments import replace_arguments

FIRST = "_shardwise_first_sample"  # names the source that is the index of a micro-batch's first sample
MUL = torch.ops.aten.mul.Tensor
WHOLE = "_shardwise_whole."


def whole_name(value: str) -> str:
    """Return the name of the source that stands for a value of the prelude."""
    return WHOLE + value


def numbered_in_batch(alone: Graph, whole: Graph, batch: int) -> Graph:
    """Return the graph of a separate micro-batch in which random operators index elements as in the whole batch."""
    first = Value(FIRST, (), torch.int64)
    written = replace(
        alone,
        values=(*alone.values[: len(alone.sources)], first, *alone.values[len(alone.sources) :]),
        sources=(*alone.sources, Source(FIRST, "constant", (FIRST,))),
        ops=tuple(_numbered(op, alone, whole, batch) for op in alone.ops),
        outputs=alone.outputs if alone.loss is None else (Ref(alone.loss),),
    )
    return eliminate_dead_code(written)


def _numbered(op: Op, alone: Graph, whole: Graph, batch: int) -> Op:
    """Return an operator of a separate micro-batch; a random one indexes its elements as in the whole batch."""
    twin = whole.op_by_name.get(op.name)
    if op.target not in RANDOM or twin is None:
        return op
    shape, full = (graph.by_name[of.results[0]].shape for graph, of in ((alone, op), (whole, twin)))
    differing = [dim for dim, (part, size) in enumerate(zip(shape, full, strict=True)) if part != size]
    if not differing:
        return op
    dim = differing[0]
    changes: dict[str, Any] = {"sizes": full, "offsets": (0,) * len(full), "lengths": shape}
    changes |= {"columns": arguments(twin)["columns"]} if "columns" in arguments(twin) else {}
    call = replace_arguments(op, **changes, first=Ref(FIRST), stride=full[dim] // batch * prod(full[dim + 1 :]))
    return replace(op, target=call.target, args=call.args, kwargs=call.kwargs)


@dataclass(frozen=True)
class TermGraphs:
    """The graphs of one device that takes terms per micro-batch. ``whole``: of the loss over the whole batch;
    ``alone``: size -> graph of the terms of a micro-batch."""

    whole: Graph
    alone: Mapping[int, Graph]

    @staticmethod
    def of(split: TimeSplit, captured: Callable[[int], Graph], sizes: Iterable[int]) -> TermGraphs | None:
        """Return the graphs for micro-batches of these sizes; None if no terms are taken per micro-batch."""
        whole = split.whole_graph
        if not whole.terms:
            return None
        alone = {size: numbered_in_batch(term_graph(captured(size)), whole, split.batch) for size in sizes}
        return TermGraphs(whole, alone)


@dataclass(frozen=True)
class TermOps:
    """The operators of terms in a micro-batch.

    Args:
        alone: The model captured for the samples of the micro-batch.
        placed: Every operator with the position in the whole batch's graph before which it runs, in order.
        values: Their results, by name.
        reads: The values that they take from the micro-batch, as these are alone.
    """

    alone: Graph
    placed: tuple[tuple[int, Op], ...]
    values: Mapping[str, Value]
    reads: tuple[Value, ...]

    @staticmethod
    def of(split: TimeSplit, alone: Graph, size: int) -> TermOps:
        """Return the operators for a micro-batch of ``size`` samples. ``alone``: the model captured for it. Raises
        PlanError if the model computes something else for so few samples."""
        whole = split.whole_graph
        terms, (rest, _) = dict(whole.terms), cut_terms(whole)
        fixed = (s.value for s in rest.sources if s.kind != "activation" and split.where[s.value] == "I")
        begins = {name for name, at in split.where.items() if isinstance(at, ShardPosition)}
        begins |= rest.made_from(fixed, lambda op: True)
        for value, name in whole.terms:
            if value not in alone.producer:
                raise _other_operators(name, size, split)
        graph = term_graph(replace(alone, terms=whole.terms), begins - terms.keys())
        for source in graph.sources:
            if source.kind == "constant" and whole.source_of.get(source.value) != source:
                raise _other_operators(source.names[0], size, split)
        order = {op.name: position for position, op in enumerate(whole.ops)}
        names = {term: f"{term}.of_pass" for term in terms}
        placed: list[tuple[int, Op]] = []
        values: dict[str, Value] = {}
        position = 0
        for op in graph.ops:
            position = max(position, order.get(op.name, 0))
            op_name = op.name
            if op.name in rest.op_by_name:  # the loss needs this sum over the whole batch, too
                op_name = f"{op.name}.of_term"
                names |= {name: f"{name}.of_term" for name in op.results if name not in terms}
            operands = [names.get(name, name) for name in op.operands]
            renamed = rename_operands(_numbered(op, graph, whole, split.batch), op.operands, operands)
            results = tuple(names.get(name, name) for name in op.results)
            placed.append((position, replace(renamed, name=op_name, results=results)))
            values |= {b: replace(graph.by_name[a], name=b) for a, b in zip(op.results, results, strict=True)}
            for term in op.results:
                if term in terms:
                    share, number = (Ref(names[term]), size / split.batch), list(terms).index(term)
                    placed.append(
                        (position, Op(f"/share_of_pass_{number}", MUL, share, (), (term,), op.source, op.scope))
                    )
                    values[term] = graph.by_name[term]
        return TermOps(alone, tuple(placed), values, tuple(graph.by_name[source.value] for source in graph.sources))

    def check(self, values: Mapping[str, Value], ops: Sequence[Op], split: TimeSplit, size: int) -> None:
        """Raise PlanError unless the values that terms take from a micro-batch are those of the micro-batch alone.
        ``values``, ``ops``: of the micro-batch."""
        for read in self.reads:
            have = values.get(read.name)
            if have is None or (have.shape, have.dtype) != (read.shape, read.dtype):
                raise _other_operators(read.name, size, split)
        whole = set(map(whole_name, split.prelude))
        for op in needed_for([read.name for read in self.reads], ops)[0]:
            twin = self.alone.op_by_name.get(op.name)
            rule = split.factored.rules.get(op.name)
            key = _numbers if rule is None or rule.localize is None else _numbers_but_sizes
            is_same = twin is None or twin.target != op.target or key(twin) == key(op)
            if whole.intersection(op.operands) or not (is_same or op.target in RANDOM):
                terms = listed([name for _, name in split.whole_graph.terms])
                raise PlanError(
                    f"per_micro_batch: {op.name} depends on the size of the batch, or on a sum over it. Both {terms} "
                    "and the rest of the loss read it: it cannot be that of the micro-batch and that of the batch",
                    op=op.name,
                    source=op.source,
                    fix=FIX,
                )


def _numbers(op: Op) -> Arg:
    return map_refs(tuple(arguments(op).values()), lambda name: None)


def _numbers_but_sizes(op: Op) -> Arg:
    """Return the arguments of a localized operator that are no sizes and no positions."""

    def without(arg: Arg) -> Arg:
        return tuple(map(without, arg)) if isinstance(arg, tuple) else None if type(arg) is int else arg

    return without(_numbers(op))


def _other_operators(what: str, size: int, split: TimeSplit) -> PlanError:
    return PlanError(
        f"per_micro_batch: the model computes {what} in another way for {size} samples than for {split.batch}", fix=FIX
    )
