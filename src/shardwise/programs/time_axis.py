"""Decides how a step divides into micro-batches, by treating them as a mesh axis in time.

A step over several micro-batches is also a choice of layouts. There is one more axis, ``micro``, whose coordinates are
micro-batches instead of devices. The samples of the inputs are split over it, and the rules determine the rest: values
that contain samples are split (``S``), a sum over samples is partial (``P``), and everything else is the same in every
micro-batch (``I``). Only these conversions along the axis are possible:

* gradients of the micro-batches are summed: backward of ``I -> R`` is gradient accumulation;
* the loss is delivered as a partial sum: the losses of the micro-batches add up to that of the batch;
* values that depend only on inputs (a count of valid labels) are summed before the micro-batches, in a *prelude*;
* values that are the same in every micro-batch and added to partial sums count in the first one only (``I -> P``), and
  so do numbers (the 1 of ``1 - similarity``).

Any other conversion along the axis would need a value of all micro-batches while one of them runs. The loss is then no
sum over micro-batches, and the model is refused with the operator's name. There is one exception: running statistics
(batch norm) are, in practice, computed per micro-batch. The operators that compute them from sums over samples treat
the micro-batch as the batch. So do scales of products in float8, and the terms of the loss that the user names
(``per_micro_batch``). Terms are cut out of the graph here, and received as partial sums.

The axis needs no size: operators do the same along it for every length.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

import torch

from shardwise.errors import PlanError
from shardwise.graph.batch import batch_size, inputs_with_samples
from shardwise.graph.dead_code import eliminate_dead_code
from shardwise.graph.disjoint import DisjointSets
from shardwise.graph.float8 import LARGEST
from shardwise.graph.ir import Graph, Op, Ref, needed_for
from shardwise.graph.loss_terms import cut_terms
from shardwise.graph.schema import is_random
from shardwise.layouts.choice import ShardPosition, ShardPositions, Split, Where
from shardwise.layouts.mesh import Mesh
from shardwise.layouts.strategy import Strategy
from shardwise.programs.lower import PlacedOp, lower, rule_within
from shardwise.rules.atoms import Factored, factor_graph
from shardwise.rules.rule import Lowering

aten = torch.ops.aten
_SHIFTS = frozenset({aten.add.Tensor, aten.sub.Tensor, aten.rsub.Scalar})  # with a number and one tensor
AXIS = Mesh(micro=2)  # the length is arbitrary: operators do the same for every length
FIX = "plan with micro_batch equal to global_batch, or write the loss as a sum over samples"


def split_in_time(graph: Graph) -> TimeSplit:
    """Split the samples of a graph's inputs over micro-batches. Raises PlanError, naming the operator, if the loss is
    no sum over micro-batches."""
    if graph.loss is None:
        raise PlanError(
            "micro-batches need a loss, but the module returns none",
            fix="return the loss first, or pass loss= to plan and parallelize",
        )
    batch = batch_size(graph)
    if batch is None or batch < 2:
        have = "no input has dims" if batch is None else f"the inputs have {batch} sample"
        raise PlanError(f"no batch to split into micro-batches: {have}", fix="pass a whole batch")
    whole = eliminate_dead_code(replace(graph, outputs=(Ref(graph.loss),)))
    graph = cut_terms(whole)[0] if whole.terms else whole
    used: dict[str, Lowering] = {}  # operator of a lowering -> that lowering, so that it is not lowered again
    while True:
        rules = {op.name: rule_within(used.get(op.name), op, graph) for op in graph.ops}
        factored = factor_graph(graph, rules)
        axis = TimeSplit(graph, factored, batch, whole)
        ops: list[Op] = []
        values = list(graph.values)
        for op in graph.ops:
            split, rule = axis.splits.get(op.name), factored.rules[op.name]
            if split is None or axis.places[op.name].kinds[split.factor] != "lowered":
                ops.append(op)
                continue
            items, added = lower(PlacedOp(op, rule, Strategy.of({"micro": split})), graph, AXIS)
            assert rule.lowering is not None, f"{op.name} has a lowered factor and no lowering"
            used.update({item.op.name: rule.lowering for item in items})
            ops += [item.op for item in items]
            values += added
        if tuple(ops) == graph.ops:
            axis.decide_sums()
            return axis
        graph = replace(graph, ops=tuple(ops), values=tuple(values))


@dataclass
class TimeSplit:
    """The strategies of a graph's operators along the time axis, decided in the order of execution.

    ``whole_graph``: of the whole batch, reduced to the loss and mutations. ``graph``: the same without the terms that
    every micro-batch computes alone, and lowered where the axis splits a lowered factor. ``where``: placement of every
    value; ``splits``: operator -> the factor that is split, for operators with samples. ``whole``: (operator, position)
    of operands that are partial sums but needed whole; they depend on inputs only. ``once``: (operator, position) of
    operands that are the same in every micro-batch and join partial sums, so they count in the first one only;
    ``loss_once``: whether the loss does; ``shifted``: operators that add a number to partial sums. ``local``: operators
    that treat a micro-batch as the batch; ``statistics``: buffers that every one writes.
    """

    graph: Graph
    factored: Factored
    batch: int
    whole_graph: Graph
    where: dict[str, Where] = field(default_factory=dict)
    splits: dict[str, Split] = field(default_factory=dict)
    whole: set[tuple[str, int]] = field(default_factory=set)
    once: set[tuple[str, int]] = field(default_factory=set)
    loss_once: bool = False
    shifted: set[str] = field(default_factory=set)
    local: set[str] = field(default_factory=set)
    statistics: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.places = {op.name: ShardPositions.of(self.factored.rules[op.name]) for op in self.graph.ops}
        self.of_inputs = _of_inputs(self.graph)
        split = inputs_with_samples(self.graph)
        for source in self.graph.sources:
            is_split = source.kind == "input" and source.names[0] in split
            other: Where = "P" if source.kind == "activation" else "I"
            self.where[source.value] = self._samples(source.value) if is_split else other
        for op in self.graph.ops:
            self._follow(op)

    @property
    def prelude(self) -> tuple[str, ...]:
        """Return the values that are computed before all micro-batches."""
        return tuple(sorted({self.graph.op_by_name[op].operands[position] for op, position in self.whole}))

    @property
    def prelude_graph(self) -> Graph | None:
        """Return the graph over the whole batch that runs before all micro-batches, or None."""
        if not self.prelude:
            return None
        terms, graph, outputs = dict(self.whole_graph.terms), self.graph, tuple(map(Ref, self.prelude))
        values = tuple(value for value in graph.values if value.name not in terms)
        sources = tuple(source for source in graph.sources if source.value not in terms)
        graph = replace(graph, values=values, sources=sources, outputs=outputs)
        return eliminate_dead_code(replace(graph, loss=None, mutations=(), constraints=(), cotangents=None))

    def _samples(self, value: str) -> ShardPosition:
        """Return the position of the major atom of dim 0: the samples, or groups of adjacent samples."""
        atoms = self.factored.atoms[value][0]
        return ShardPosition.of(0, atoms, next(i for i, size in enumerate(atoms) if size > 1))

    def _follow(self, op: Op) -> None:
        """Decide an operator: it is split if an operand has samples, else the same in every micro-batch."""
        places = self.places[op.name]
        consumer_of: dict[Split | None, str] = {}
        for position, name in enumerate(op.operands):
            where = self.where[name]
            if isinstance(where, ShardPosition):
                choice = places.choice_of_operand(position, where)
                consumer_of.setdefault(choice if isinstance(choice, Split) else None, name)
        if not consumer_of:
            self.where.update(dict.fromkeys(op.results, "I"))
            return
        split = next(iter(consumer_of))
        if len(consumer_of) > 1 or split is None or places.kinds[split.factor] == "whole":
            name = consumer_of.get(None, next(reversed(consumer_of.values())))
            raise _refusal(op, f"needs {_named(name, self.graph)} of all samples at once")
        self.splits[op.name] = split
        for i, result in enumerate(op.results):
            self.where[result] = places.result(i, split)

    # -- partial sums --------------------------------------------------------------------------------------------------

    def decide_sums(self) -> None:
        """Decide where partial sums go, after all split operators were lowered."""
        loss = self.graph.loss
        assert loss is not None, "it was asked for"
        self.local, statistics = self._running_statistics(loss)
        self.of_inputs = _of_inputs(self.graph, without=self.local)
        apart = statistics | {name for op in self.local for name in self.graph.op_by_name[op].results}
        apart |= {name for op in self.graph.ops if op.target is LARGEST for name in op.results}
        for op in self.graph.ops:
            self._sum(op, apart)
        if isinstance(self.where[loss], ShardPosition) or (_is_partial(self.where[loss]) and self.where[loss] != "P"):
            raise _refusal(self.graph.producer[loss], "computes a loss that is not a sum over samples")
        for buffer, value in self.graph.mutations:
            if self.where[value] != "I" and value not in statistics:
                name = self.graph.source_of[buffer].names[0]
                op = self.graph.producer.get(value) or self.graph.consumers[value][0]
                self._check_only_added(op, value, f"writes it into the buffer {name}")
                raise _refusal(op, f"writes samples of the batch into the buffer {name}")
        self.loss_once, self.statistics = self.where[loss] != "P", self._written_by_passes(statistics)

    def _running_statistics(self, loss: str) -> tuple[set[str], set[str]]:
        """Return the operators without samples that compute buffers from sums over samples, and these sums."""
        written = {value for _, value in self.graph.mutations}
        components = self._components(frozenset())
        if any(components.get(name) == components.get(loss) for name in written if name in components):
            components = self._components(self.of_inputs)  # a stored count may also divide the loss
        entering = {name for name, where in self.where.items() if _is_partial(where) and name in components}
        statistics = {components[name] for name in written if name in components} & {components[n] for n in entering}
        statistics.discard(components.get(loss, ""))
        local = {op.name for op in self.graph.ops if any(components.get(name) in statistics for name in op.results)}
        return local - self.splits.keys(), {name for name in entering if components[name] in statistics}

    def _components(self, separate: frozenset[str]) -> dict[str, str]:
        """Map each computed value without samples to a representative of its component, connected by operators without
        samples. ``separate``: values that connect nothing."""
        connected: DisjointSets[str] = DisjointSets()

        def is_inside(name: str) -> bool:
            computed = name in self.graph.producer and name not in separate
            return computed and not isinstance(self.where[name], ShardPosition)

        for op in self.graph.ops:
            names = op.results if op.name in self.splits else (*op.results, *op.operands)
            inside = list(filter(is_inside, names))
            for name in inside:
                connected.join(name, inside[0])
        return connected.roots()

    def _sum(self, op: Op, apart: set[str]) -> None:
        """Decide which partial sums among the operands pass through the operator and which are needed whole. ``apart``:
        values that every micro-batch has of its own."""
        partial = [i for i, n in enumerate(op.operands) if n not in apart and _is_partial(self.where[n])]
        if op.name in self.local or not partial:
            return
        hard = {i for i in partial if op.operands[i] not in self.of_inputs}
        group = None if op.name in self.splits else self._group(op, hard, partial)
        if (
            hard
            and group is None
            and op.target in _SHIFTS
            and self.where[op.operands[0]] == "P"
            and not op.operands[1:]
        ):
            self.shifted.add(op.name)
            group = (0,)
        if hard and group is None:
            name = op.operands[min(hard)]
            self._check_only_added(op, name, "needs it before")
            raise _refusal(op, f"needs {_named(name, self.graph)}, a sum over all samples")
        passing = set(group or ())
        self.whole.update((op.name, i) for i in partial if i not in passing)
        self.once.update((op.name, i) for i in passing.difference(partial))
        for i in passing if any(i not in passing for i in partial) else ():
            self._check_only_added(op, op.operands[i], "divides it by a sum over the batch: name the quotient")
        if group is not None:
            self.where.update(dict.fromkeys(op.results, "P"))

    def _check_only_added(self, op: Op, value: str, what: str) -> None:
        """Raise PlanError if a value comes from a term that is taken per micro-batch. ``what``: else happens to it."""
        needed = needed_for([value], self.graph.ops)[1]
        for term, name in self.whole_graph.terms:
            if term in needed:
                raise PlanError(
                    f"per_micro_batch: {name} is an average over micro-batches, which is known after the last of them; "
                    f"{_of_user(op)} {what}",
                    op=_of_user(op),
                    source=op.source,
                    fix="name a term that is only added to the loss, multiplied by a number or a parameter at most",
                )

    def _group(self, op: Op, hard: set[int], partial: list[int]) -> tuple[int, ...] | None:
        """Return the operands, jointly linear in the operator, through which partial sums pass; None if there are none.
        They contain all partial sums, or at least ``hard``, those that cannot be computed in the prelude."""
        sums = {i for i in partial if self.where[op.operands[i]] == "P"}
        if not hard <= sums:
            return None
        groups = self.factored.rules[op.name].linear
        whole = next((group for group in groups if sums == set(partial) and sums <= set(group)), None)
        if whole is not None and (hard or set(whole) == sums):
            return whole
        return next((group for group in groups if hard and hard <= set(group)), None)

    def _written_by_passes(self, statistics: set[str]) -> tuple[str, ...]:
        """Return the buffers of running statistics, and other written buffers of their modules, such as counters."""
        names = {buffer: self.graph.source_of[buffer].names[0] for buffer, _ in self.graph.mutations}
        buffers = {
            buffer
            for buffer, value in self.graph.mutations
            if value in statistics or (value in self.graph.producer and self.graph.producer[value].name in self.local)
        }
        owners = {names[buffer].rpartition(".")[0] for buffer in buffers}
        return tuple(b for b, _ in self.graph.mutations if b in buffers or names[b].rpartition(".")[0] in owners)


def _is_partial(where: Where) -> bool:
    return isinstance(where, str) and where.startswith("P")


def _of_inputs(graph: Graph, without: Collection[str] = ()) -> frozenset[str]:
    """Return the values that depend only on inputs and on sources that do not change during a step, excluding results
    of the operators ``without``."""
    changed = {buffer for buffer, _ in graph.mutations}
    kinds = ("input", "buffer", "constant")
    fixed = (s.value for s in graph.sources if s.kind in kinds and s.value not in changed)
    return frozenset(graph.made_from(fixed, lambda op: op.name not in without and not is_random(op.target)))


def _named(name: str, graph: Graph) -> str:
    """Return a description of a value for messages."""
    producer = graph.producer.get(name)
    return graph.source_of[name].names[0] if producer is None else f"the result of {_of_user(producer)}"


def _of_user(op: Op) -> str:
    """Return the name of an operator, or for one that a lowering made the name of the lowered operator."""
    module, _, name = op.name.rpartition("/")
    return f"{module}/{name.partition('.')[0]}"


def _refusal(op: Op, why: str) -> PlanError:
    name = _of_user(op)
    return PlanError(f"the step is not a sum over micro-batches: {name} {why}", op=name, source=op.source, fix=FIX)
