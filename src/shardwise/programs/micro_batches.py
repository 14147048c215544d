"""Builds the graph of one micro-batch, an ordinary graph over some of the samples that the step repeats.

It has the operators of the whole batch's graph under the same names, with the sizes of a micro-batch given by their
rules (``localize``, along the time axis). Constants such as the count in a mean stay those of the whole batch.
Micro-batches of one size share a graph: the index of the first sample (``FIRST``) and the values of the prelude are
constant sources.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch.nn import Module

from shardwise.errors import PlanError
from shardwise.graph.batch import batch_size
from shardwise.graph.custom_operators import RANDOM
from shardwise.graph.dead_code import eliminate_dead_code
from shardwise.graph.infer import TypeInference
from shardwise.graph.ir import Arg, Graph, Op, Ref, Source, Value, rename_operands
from shardwise.graph.schema import arguments, run_call
from shardwise.layouts.choice import ShardPosition, Split
from shardwise.programs.lower import lowered_by_model
from shardwise.programs.separate_batches import FIRST, WHOLE, TermGraphs, TermOps, numbered_in_batch, whole_name
from shardwise.programs.time_axis import FIX, TimeSplit, split_in_time
from shardwise.rules.arguments import replace_arguments
from shardwise.rules.rule import LocalContext, LocalOpCall, Piece, base_name

aten = torch.ops.aten
APART = "_shardwise_passes_apart"  # attribute of a module whose loss is the sum of separate micro-batch losses


def is_of_step(value: str) -> bool:
    """Return whether the step supplies a source of a micro-batch's graph, with a new value per micro-batch or step."""
    return value == FIRST or value.startswith(WHOLE)


def whole_sources(graph: Graph) -> tuple[str, ...]:
    """Return the values of the prelude that a graph takes."""
    return tuple(s.value.removeprefix(WHOLE) for s in graph.sources if s.value.startswith(WHOLE))


def numbers_samples(graph: Graph) -> bool:
    """Return whether a micro-batch uses the indices of its samples in the batch for more than random numbers."""
    return any(op.target not in RANDOM and op.target != aten.eq.Scalar for op in graph.consumers.get(FIRST, ()))


def pass_sizes(batch: int, micro_batch: int) -> tuple[int, ...]:
    """Return the number of samples of every micro-batch of a batch. The last one has the remainder.

    >>> pass_sizes(7, 2)
    (2, 2, 2, 1)
    """
    full, rest = divmod(batch, micro_batch)
    return (micro_batch,) * full + (rest,) * (rest > 0)


def pass_graph(split: TimeSplit, size: int, captured: Callable[[int], Graph]) -> Graph:
    """Return the graph of a micro-batch of ``size`` samples. ``captured``: returns the model's graph for a batch size;
    called only for operators that treat a micro-batch as the batch: of running statistics, and of terms of the loss.
    Raises PlanError if the micro-batch cuts groups of samples that the model forms."""
    alone = captured(size) if split.local or split.whole_graph.terms else None
    return _MicroBatchWriter(split, size, alone).write()


@dataclass(frozen=True)
class Passes:
    """A step over a batch as micro-batches. ``sizes``: the samples of each; ``prelude``: the graph over the whole batch
    that runs before them, or None; ``whole``: the values that it delivers; ``graphs``: size -> graph of a micro-batch;
    ``statistics``: names of the buffers that every micro-batch writes; other buffers are written once. ``terms``: the
    graphs of what one device takes per micro-batch. ``local``: the operators that treat a micro-batch as the batch."""

    sizes: tuple[int, ...]
    prelude: Graph | None
    whole: tuple[str, ...]
    graphs: Mapping[int, Graph]
    statistics: frozenset[str]
    terms: TermGraphs | None = None
    local: frozenset[str] = frozenset()

    @staticmethod
    def of(
        graph: Graph,
        micro_batch: int,
        captured: Callable[[int], Graph],
        splitting: Callable[[Graph], TimeSplit] = split_in_time,
    ) -> Passes:
        """Divide the batch of a graph into micro-batches. ``captured``: returns the graph of a batch size;
        ``splitting``: ``split_in_time`` or a cached version. Raises PlanError for a model whose step is no sum over
        micro-batches."""
        split = splitting(graph)
        sizes = pass_sizes(split.batch, micro_batch)
        graphs = {size: pass_graph(split, size, captured) for size in dict.fromkeys(sizes)}
        statistics = frozenset(split.graph.source_of[buffer].names[0] for buffer in split.statistics)
        terms = TermGraphs.of(split, captured, graphs)
        return Passes(sizes, split.prelude_graph, split.prelude, graphs, statistics, terms, frozenset(split.local))

    @staticmethod
    def over(
        module: Module,
        graph: Graph,
        micro_batch: int,
        captured: Callable[[int], Graph],
        splitting: Callable[[Graph], TimeSplit] = split_in_time,
    ) -> Passes:
        """Divide the batch of a module's graph into micro-batches, as ``of`` does unless the module has the attribute
        ``APART``. Then each micro-batch is the model on its samples alone, and the step's loss is the sum of theirs."""
        if not hasattr(module, APART):
            return Passes.of(graph, micro_batch, captured, splitting)
        batch = batch_size(graph) or 1
        if rest := batch % micro_batch:
            raise PlanError(
                f"micro-batches of {micro_batch} of {batch} samples, each with a separate loss, leave {rest}",
                fix="choose a micro_batch that divides the batch",
            )
        alone = numbered_in_batch(captured(micro_batch), graph, batch)
        written = frozenset(alone.source_of[buffer].names[0] for buffer, _ in alone.mutations)
        return Passes((micro_batch,) * (batch // micro_batch), None, (), {micro_batch: alone}, written)

    @staticmethod
    def single(graph: Graph) -> Passes:
        """Return a step in one pass over the batch of a graph."""
        size = batch_size(graph) or 1
        return Passes((size,), None, (), {size: graph}, frozenset())

    @property
    def starts(self) -> tuple[int, ...]:
        """Return the index of the first sample of every micro-batch."""
        return tuple(accumulate(self.sizes[:-1], initial=0))


@dataclass
class _MicroBatchWriter:
    split: TimeSplit
    size: int
    alone: Graph | None
    values: dict[str, Value] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)
    derived: dict[tuple[str, Any], str] = field(default_factory=dict)  # (value, derivation) -> name

    def __post_init__(self) -> None:
        self.graph = self.split.graph
        self.types = TypeInference()

    def write(self) -> Graph:
        graph = self.graph
        terms = None
        if self.split.whole_graph.terms:
            assert self.alone is not None, "there are terms"
            terms = TermOps.of(self.split, self.alone, self.size)
        of_terms = deque(() if terms is None else terms.placed)
        place = {op.name: position for position, op in enumerate(self.split.whole_graph.ops)}
        model = {name: op for op, names in lowered_by_model(self.split.whole_graph, graph).items() for name in names}
        held = tuple(source for source in graph.sources if source.kind != "activation")
        for source in held:
            value = graph.by_name[source.value]
            self.values[value.name] = replace(value, shape=self._shape(value.shape, self.split.where[value.name]))
        of_step = [replace(graph.by_name[name], name=whole_name(name)) for name in self.split.prelude]
        of_step.append(Value(FIRST, (), torch.int64))  # what the step supplies, in addition to the samples
        self.values |= {value.name: value for value in of_step}
        for op in graph.ops:
            while of_terms and of_terms[0][0] < place[model[op.name]]:
                self._add_of_term(of_terms.popleft()[1], terms)
            self._add(op)
        if terms is not None:
            for _, op in of_terms:
                self._add_of_term(op, terms)
            terms.check(self.values, self.ops, self.split, self.size)
        assert graph.loss is not None, "a loss was asked for"
        loss = self._once(graph.loss, graph.producer.get(graph.loss)) if self.split.loss_once else graph.loss
        sources = (*held, *(Source(value.name, "constant", (value.name,)) for value in of_step))
        order = [s.value for s in sources] + [name for op in self.ops for name in op.results]
        values = tuple(self.values[name] for name in order)
        of_pass = replace(graph, values=values, sources=sources, ops=tuple(self.ops), cotangents=None)
        return eliminate_dead_code(replace(of_pass, outputs=(Ref(loss),), loss=loss))

    # -- sizes ---------------------------------------------------------------------------------------------------------

    def _part(self, atom: int, start: int = 0) -> tuple[int, int]:
        """Return (offset, length) of a micro-batch that begins at sample ``start``, in an atom of samples or groups."""
        bounds = [divmod(atom * number, self.split.batch) for number in (start, start + self.size)]
        if any(rest for _, rest in bounds):
            group = self.split.batch // atom
            raise PlanError(
                f"the model takes samples in groups of {group} ({self.split.batch} = {atom} x {group}), and a "
                f"micro-batch of {self.size} cuts a group",
                fix=f"choose a micro_batch that {group} divides",
            )
        return bounds[0][0], bounds[1][0] - bounds[0][0]

    def _shape(self, shape: tuple[int, ...], where: object) -> tuple[int, ...]:
        if not isinstance(where, ShardPosition):
            return shape
        _, length = self._part(where.size)
        return tuple(s // where.size * length if d == where.dim else s for d, s in enumerate(shape))

    # -- operators -----------------------------------------------------------------------------------------------------

    def _add(self, op: Op) -> None:
        if op.name in self.split.local:
            self._append(self._as_alone(op), op)
            return
        operands = [self._operand(op, i, name) for i, name in enumerate(op.operands)]
        try:
            local = self._localized(op, self.split.splits.get(op.name))
        except _MovesWithSamples:
            why = f"{op.name} depends on the position of a sample in the batch"
            what = f"the step is not a sum over micro-batches: {why}"
            raise PlanError(what, op=op.name, source=op.source, fix=FIX) from None
        call = rename_operands(local, op.operands, operands)
        if op.name in self.split.shifted:
            call = self._shifted_once(call, op)
        self._append(call, op)

    def _shifted_once(self, call: Op, op: Op) -> Op:
        """Return the sum that adds the number of an operator in the first micro-batch only, after the operator with 0
        in place of the number."""
        (result,) = op.results
        linear = tuple(arg if isinstance(arg, Ref) else 0 for arg in call.args)
        self._append(replace(call, name=f"{op.name}.linear", args=linear, results=(f"{result}.linear",)), op)
        number = run_call(op, lambda _: torch.zeros((), dtype=torch.float64)).item()
        dtype = self.graph.by_name[result].dtype
        added = self._emit(op, "number", aten.full.default, ((), number), (result, "number"), (("dtype", dtype),))
        return replace(
            call, target=aten.add.Tensor, args=(Ref(f"{result}.linear"), Ref(self._once(added, op))), kwargs=()
        )

    def _add_of_term(self, op: Op, terms: TermOps | None) -> None:
        assert terms is not None, "it has operators"
        self.ops.append(op)
        self.values |= {name: terms.values[name] for name in op.results}

    def _as_alone(self, op: Op) -> Op:
        """Return an operator that treats the micro-batch as the batch, as captured for that batch size."""
        assert self.alone is not None, "there are such operators"
        twin = self.alone.op_by_name.get(op.name)
        if twin is None or twin.target != op.target or twin.results != op.results or twin.operands != op.operands:
            why = f"the model computes something else for {self.size} samples than for {self.split.batch}"
            raise PlanError(f"{op.name} depends on the batch size: {why}", op=op.name, source=op.source, fix=FIX)
        return twin

    def _operand(self, op: Op, position: int, name: str) -> str:
        """Return the name of an operand in the form that the operator needs in a micro-batch."""
        if (op.name, position) in self.split.whole:
            return whole_name(name)
        if (op.name, position) in self.split.once:
            return self._once(name, op)
        split, where = self.split.splits.get(op.name), self.split.where[name]
        if split is None or isinstance(where, ShardPosition):
            return name
        place = self.split.places[op.name].operand(position, split)
        return self._samples(name, place, op) if isinstance(place, ShardPosition) else name

    def _localized(self, op: Op, split: Split | None) -> Op:
        """Return the call with the sizes of a micro-batch, which must be the same for the first and the last one."""
        if split is None:
            return op
        rule = self.split.factored.rules[op.name]
        if op.target in RANDOM:
            return self._numbered(op, split)
        call = LocalOpCall(op.target, op.args, op.kwargs)
        if rule.localize is not None:
            calls = [rule.localize(op, self._context(op, split, at)) for at in (0, self.split.batch - self.size)]
            if calls[0] != calls[1]:
                raise _MovesWithSamples
            call = calls[0]
        return replace(op, target=call.target, args=call.args, kwargs=call.kwargs)

    def _context(self, op: Op, split: Split, start: int) -> LocalContext:
        rule, places = self.split.factored.rules[op.name], self.split.places[op.name]
        shapes = [
            tuple(self._shape(self.graph.by_name[name].shape, at(i, split)) for i, name in enumerate(names))
            for names, at in ((op.operands, places.operand), (op.results, places.result))
        ]
        pieces: dict[str, list[Piece]] = {}
        for factor in rule.factors:
            piece = (0, factor.size) if factor.name != split.factor else self._part(factor.size, start)
            pieces.setdefault(base_name(factor.name), []).append(Piece(factor.size, *piece))
        return LocalContext(shapes[0], shapes[1], {name: tuple(factor_parts) for name, factor_parts in pieces.items()})

    def _numbered(self, op: Op, split: Split) -> Op:
        """Return a random operator whose elements keep their indices in the whole batch."""
        place = self.split.places[op.name].result(0, split)
        whole = self.graph.by_name[op.results[0]].shape
        assert isinstance(place, ShardPosition), f"{op.name} is split, but its result is not"
        stride = self._rows(place, whole, op) * prod(whole[place.dim + 1 :])
        shape, zeros = self._shape(whole, place), (0,) * len(whole)
        changes: dict[str, Any] = {"sizes": whole, "offsets": zeros, "lengths": shape}
        changes |= {"shape": shape} if "shape" in arguments(op) else {}
        call = replace_arguments(op, **changes, first=Ref(FIRST), stride=stride)
        return replace(op, target=call.target, args=call.args, kwargs=call.kwargs)

    def _rows(self, place: ShardPosition, shape: tuple[int, ...], op: Op) -> int:
        """Return how many rows of the split dim belong to one sample."""
        rows, rest = divmod(place.stride * place.size, self.split.batch)
        if rest or place.stride * place.size != shape[place.dim]:
            what = f"the samples of a micro-batch are not rows of dim {place.dim} of {list(shape)}"
            raise PlanError(what, op=op.name, source=op.source, fix=FIX)
        return rows

    # -- values that are the same in every micro-batch -----------------------------------------------------------------

    def _once(self, name: str, op: Op | None) -> str:
        """Return a name for the value in the first micro-batch and zero in the others."""
        key = (name, "once")
        if key not in self.derived:
            is_first = self._emit(op, "is_first", aten.eq.Scalar, (Ref(FIRST), 0), ("is_first", None))
            self.derived[key] = self._emit(op, "once", aten.where.ScalarOther, (Ref(is_first), Ref(name), 0), key)
        return self.derived[key]

    def _samples(self, name: str, place: ShardPosition, op: Op) -> str:
        """Return the micro-batch's samples of a value common to all: computed alone if possible, else selected."""
        key = (name, place)
        if key in self.derived:
            return self.derived[key]
        maker = self.graph.producer.get(name)
        if maker is not None and len(maker.results) == 1 and maker.name not in self.split.local:
            places = self.split.places[maker.name]
            split = places.split_of_result(0, place)
            if split is not None and places.kinds[split.factor] == "parallel":
                try:
                    local = self._localized(maker, split)
                    operands = []
                    for i, operand in enumerate(maker.operands):
                        where = places.operand(i, split)
                        if not isinstance(where, ShardPosition):
                            operands.append(self._operand(maker, i, operand))
                        elif (maker.name, i) in self.split.whole:
                            raise _MovesWithSamples
                        else:
                            operands.append(self._samples(operand, where, op))
                    number = sum(value == name for value, _ in self.derived)
                    end = f".of_pass{number or ''}"
                    self.derived[key] = result = name + end
                    part = replace(local, name=maker.name + end, results=(result,))
                    self._append(rename_operands(part, maker.operands, operands), maker, place)
                    return result
                except _MovesWithSamples:
                    pass
        whole = self.graph.by_name[name].shape
        rows = self._rows(place, whole, op)
        count = self._emit(op, "rows", aten.arange.default, (self.size * rows,), ("rows", self.size * rows))
        first = self._emit(op, "first_row", aten.mul.Tensor, (Ref(FIRST), rows), ("first", rows))
        index = self._emit(op, "index", aten.add.Tensor, (Ref(count), Ref(first)), ("index", rows))
        self.derived[key] = self._emit(
            op, "of_pass", aten.index_select.default, (Ref(name), place.dim, Ref(index)), key
        )
        return self.derived[key]

    # -- the list ------------------------------------------------------------------------------------------------------

    def _append(self, op: Op, origin: Op, where_of_result: ShardPosition | None = None) -> None:
        """Append an operator that comes from one of the whole graph, ``origin``."""
        self.ops.append(op)
        for name, source in zip(op.results, origin.results, strict=True):
            value = self.graph.by_name[source]
            shape = self._shape(value.shape, where_of_result or self.split.where[source])
            self.values[name] = replace(value, name=name, shape=shape)

    def _emit(
        self,
        op: Op | None,
        word: str,
        target: Any,
        args: tuple[Arg, ...],
        key: tuple[Any, Any],
        kwargs: tuple[tuple[str, Arg], ...] = (),
    ) -> str:
        """Append an operator that only micro-batches have, once per key. It gets the source line of its consumer."""
        if key in self.derived:
            return self.derived[key]
        number = sum(emitted.name.startswith(f"/{word}_of_pass") for emitted in self.ops)
        result = self.derived[key] = f"_shardwise_{word}_{number}"
        source = "" if op is None else op.source
        self.ops.append(Op(f"/{word}_of_pass_{number}", target, args, kwargs, (result,), source))
        (value,) = self.types.results(self.ops[-1], self.values.__getitem__)
        self.values[result] = replace(value, name=result)
        return result


class _MovesWithSamples(Exception):
    """Raised when the arguments of an operator depend on the position of its samples in the batch."""


def values_of_step(
    graph: Graph, whole: Mapping[str, torch.Tensor], first: Callable[[], torch.Tensor]
) -> dict[str, Any]:
    """Return source -> tensor for the sources that the step supplies. ``whole``: the values of the prelude; ``first``:
    returns the index of the micro-batch's first sample."""
    values: dict[str, Any] = {}
    for source in graph.sources:
        if source.value == FIRST:
            values[FIRST] = first()
        elif source.value.startswith(WHOLE):
            values[source.value] = whole[source.value.removeprefix(WHOLE)]
    return values
