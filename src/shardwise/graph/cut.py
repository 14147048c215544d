"""Cutting of a graph into parts, one per pipeline stage.

A part is a graph of its own. Values of other parts come in as sources of the kind ``activation``. Values that later
parts need are outputs, and also ``cotangents`` of the part if a gradient of the loss flows back through them. Executed
one after another, forward and then backward, the parts compute what the graph does:

* A value that a later part than the next one uses is *carried*: the parts between receive it and send it on, and its
  cotangent takes the same way back.
* What depends on no input and no parameter (positions, masks, random numbers of the seed) is not sent: every part that
  uses it *repeats* its operators.
* A parameter that several parts use (tied weights) is a source of each; its gradient is the sum of theirs. So is an
  input, and a buffer that is only read, or rewritten with repeated values.
* A buffer that is rewritten with computed data (running statistics) stays with the part that computes them. Later
  parts that read it receive its old value; an earlier reader is refused, since only cotangents are sent backwards.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property

from shardwise.errors import PlanError, listed, problem
from shardwise.graph.ir import Graph, Op, Ref, Source, refs
from shardwise.graph.schema import is_random

# Namespaces of operators that depend only on their arguments. A user's operators may not.
PURE = ("aten", "prims", "shardwise")


@dataclass(frozen=True, slots=True)
class CutValue:
    """A value that part ``maker`` makes and operators of ``users``, later parts, use."""

    value: str
    maker: int
    users: tuple[int, ...]

    @property
    def receivers(self) -> tuple[int, ...]:
        """Return the parts that receive it: from the next one to the last user."""
        return tuple(range(self.maker + 1, self.users[-1] + 1))


@dataclass(frozen=True)
class GraphCut:
    """A graph in parts. ``crossings``: the values that parts send, in order of definition. ``output_parts``: per tensor
    output of the graph, the part that computes it."""

    parts: tuple[Graph, ...]
    crossings: tuple[CutValue, ...]
    output_parts: tuple[tuple[str, int], ...]

    @cached_property
    def repeated(self) -> dict[str, tuple[int, ...]]:
        """Return operator -> the parts that repeat it, for operators in several parts."""
        return _in_several((op.name for op in part.ops) for part in self.parts)

    @cached_property
    def shared(self) -> dict[str, tuple[int, ...]]:
        """Return parameter, input or buffer -> the parts that hold it, for those in several parts."""
        return _in_several((s.value for s in part.sources if s.kind != "activation") for part in self.parts)

    def sends(self, part: int) -> tuple[str, ...]:
        """Return the values that a part sends to the next one."""
        return tuple(crossing.value for crossing in self.crossings if part + 1 in crossing.receivers)


def _in_several(names_of_parts: Iterable[Iterable[str]]) -> dict[str, tuple[int, ...]]:
    parts: dict[str, list[int]] = {}
    for part, names in enumerate(names_of_parts):
        for name in names:
            parts.setdefault(name, []).append(part)
    return {name: tuple(where) for name, where in parts.items() if len(where) > 1}


def cut_apart(graph: Graph, parts: Sequence[Sequence[str]], holders: Sequence[Collection[str]] = ()) -> GraphCut:
    """Cut the graph into parts of named operators. Every operator is in one part, none in an earlier one than its
    operands need. Operators keep their order inside a part. ``holders``: for every part, the names of parameters and
    buffers that it holds where no operator uses them; the others are with those before them in the module.

    Raises PlanError naming the operators at fault.
    """
    part_of: dict[str, int] = {}
    for number, names in enumerate(parts):
        _check_exist(graph, names)
        if not names:
            raise PlanError(f"part {number} of {len(parts)} has no operators", fix="cut at fewer or other operators")
        for name in names:
            if (first := part_of.get(name)) is not None:
                where = f"twice in part {number}" if first == number else f"in parts {first} and {number}"
                raise PlanError(f"operator {name} is named {where}", fix="name every operator once")
            part_of[name] = number
    missing = [op.name for op in graph.ops if op.name not in part_of]
    if missing:
        what = f"{len(missing)} of {len(graph.ops)} operators belong to no part: {listed(missing)}"
        raise PlanError(what, fix="put every operator into one part")
    cutter = _Cutter(graph, part_of, len(parts), holders)
    graphs = cutter.parts()
    for number, part in enumerate(graphs):
        if not part.ops:
            raise PlanError(
                f"part {number} of {len(parts)} has only operators that other parts repeat: "
                f"{listed(parts[number])} depend on no input and no parameter",
                fix="cut at fewer or other operators",
            )
    return GraphCut(graphs, cutter.crossings, tuple(cutter.output_part.items()))


def _check_exist(graph: Graph, names: Iterable[str]) -> None:
    for name in names:
        if name not in graph.op_by_name:
            near = get_close_matches(name, list(graph.op_by_name), 1)
            fix = f"did you mean {near[0]}?" if near else "print the graph to see the names of its operators"
            raise PlanError(f"the graph has no operator {name!r}", fix=fix)


def free_values(graph: Graph) -> frozenset[str]:
    """Return the values that depend on no input and no parameter."""
    fixed = (source.value for source in graph.sources if source.kind in ("buffer", "constant"))
    return frozenset(graph.made_from(fixed, lambda op: op.target.namespace in PURE and not is_random(op.target)))


@dataclass
class _Cutter:
    """Assigns everything in a graph to parts. ``maker``: the part that computes a sent value or a buffer's computed
    data. ``needed``: per part, the sources it uses and the values it repeats, unless it computes them or receives them
    from an operator."""

    graph: Graph
    part_of: dict[str, int]
    num_parts: int
    holders: Sequence[Collection[str]]
    maker: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        graph = self.graph
        activation = next((s.value for s in graph.sources if s.kind == "activation"), None)
        if activation is not None or graph.cotangents is not None:
            what = f"the graph is already a part of a graph{f': {activation} is an activation' if activation else ''}"
            raise PlanError(what, fix="cut the whole graph at all boundaries at once")
        self.free = free_values(graph)
        self.written = dict(graph.mutations)
        self.bound = [op for op in graph.ops if not self._is_free(op)]
        self.users: dict[str, set[int]] = {}
        for op in self.bound:
            self.maker.update(dict.fromkeys(op.results, self.part_of[op.name]))
            for name in op.operands:
                self.users.setdefault(name, set()).add(self.part_of[op.name])
        computed = {buffer: value for buffer, value in graph.mutations if value not in self.free}
        # The part that computes a buffer's new value; if that is an input, the buffer's first reader.
        homes = {buffer: self.maker.get(value, self._first_user(buffer)) for buffer, value in computed.items()}
        self.maker |= homes
        self.output_part = {}
        for name in [*refs(graph.outputs), *([] if graph.loss is None else [graph.loss])]:
            producer = graph.producer.get(name)
            here = self.maker.get(name, self._first_user(name))
            self.output_part[name] = here if producer is None else self.part_of[producer.name]
        self.needed = [self._needed(number) for number in range(self.num_parts)]
        self._place_unused()
        for buffer in computed:
            self.users[buffer] = {number for number, needed in enumerate(self.needed) if buffer in needed}
        for name, users in self.users.items():
            if early := [part for part in users if part < self.maker.get(name, 0)]:
                raise PlanError(self._out_of_order(name, min(early)))
        self.crossings = self._crossings()

    def _is_free(self, op: Op) -> bool:
        return self.free.issuperset(op.results)

    def _first_user(self, name: str) -> int:
        return min(self.users.get(name, ()), default=0)

    def _needed(self, number: int) -> set[str]:
        operands = [name for op in self.bound if self.part_of[op.name] == number for name in op.operands]
        operands += [name for name, part in self.output_part.items() if part == number]
        for buffer, value in self.graph.mutations:
            operands += [buffer, value] if self.maker.get(buffer) == number else []
        needed: set[str] = set()
        self._add_needed(needed, operands)
        return needed

    def _add_needed(self, needed: set[str], names: Iterable[str]) -> None:
        """Add values and what is needed to repeat them. Every part that holds a buffer rewritten with repeated values
        rewrites it."""
        pending = list(names)
        while pending:
            name = pending.pop()
            producer = self.graph.producer.get(name)
            if name in needed or (producer is not None and name not in self.free):
                continue
            needed.add(name)
            if producer is not None:
                pending += [*producer.operands, *producer.results]
            elif name in self.written and name not in self.maker:
                pending.append(self.written[name])

    def _place_unused(self) -> None:
        """Assign unused sources, which belong to the module or its call, and unused repeatable operators to parts."""
        latest = 0
        for source in self.graph.sources:
            using = [number for number, needed in enumerate(self.needed) if source.value in needed]
            if using or source.kind == "constant":
                latest = using[-1] if using and source.kind == "parameter" else latest
                continue
            holding = (number for number, names in enumerate(self.holders) if source.names[0] in names)
            beside = latest if source.kind in ("parameter", "buffer") else 0
            self._add_needed(self.needed[next(holding, beside)], [source.value])
        for op in self.graph.ops:
            if self._is_free(op) and not any(needed.intersection(op.results) for needed in self.needed):
                self._add_needed(self.needed[self.part_of[op.name]], op.results)

    def _out_of_order(self, name: str, part: int) -> str:
        home, source = self.maker[name], self.graph.source_of.get(name)
        op = next(op for op in self.graph.ops if name in op.operands and self._runs_in(op, part))
        if source is None:
            made_by = self.graph.producer[name].name
            what = f"{op.name} of part {part} needs {name}, the result of {made_by} of part {home}"
            fix = f"move {op.name} to part {home} or a later one, or {made_by} to part {part} or an earlier one"
        else:
            what = f"the buffer {source.names[0]} is read in part {part} and written with data of part {home}"
            fix = "put the operators that read and write it into one part: only cotangents are sent backward"
        return problem(what, op=op.name, source=op.source, fix=fix)

    def _crossings(self) -> tuple[CutValue, ...]:
        crossings = []
        for name in [source.value for source in self.graph.sources] + [n for op in self.bound for n in op.results]:
            later = self.users.get(name, set()) - {self.maker.get(name)}
            if name in self.maker and later:
                crossings.append(CutValue(name, self.maker[name], tuple(sorted(later))))
        return tuple(crossings)

    def parts(self) -> tuple[Graph, ...]:
        """Build all parts, last first, because cotangents are known from the end."""
        graphs: list[Graph] = []
        reached: set[str] = set()
        for number in reversed(range(self.num_parts)):
            graphs.append(self._part(number, reached))
            reached.update(graphs[-1].differentiated)
            for op in reversed(graphs[-1].ops):
                if any(name in reached and self.graph.by_name[name].requires_grad for name in op.results):
                    reached.update(name for name in op.operands if self.graph.by_name[name].requires_grad)
        return tuple(reversed(graphs))

    def _part(self, number: int, reached: Collection[str]) -> Graph:
        """Build a part. ``reached``: the values to which later parts send a cotangent."""
        graph = self.graph
        received = [c.value for c in self.crossings if number in c.receivers]
        sent = [c.value for c in self.crossings if number + 1 in c.receivers]
        delivered = [name for name, part in self.output_part.items() if part == number]
        loss = graph.loss if graph.loss in delivered else None
        cotangents = [name for name in sent if name in reached]
        cotangents += [name for name in delivered if graph.loss is None and graph.by_name[name].requires_grad]
        ops = [op for op in graph.ops if self._runs_in(op, number)]
        sources = [Source(name, "activation", (name,)) for name in received]
        sources += [source for source in graph.sources if self._is_held(source.value, number)]
        results = [name for op in ops for name in op.results]
        names = [*(source.value for source in sources), *results]
        outputs = dict.fromkeys([*refs(graph.outputs), *sent])
        return Graph(
            tuple(graph.by_name[name] for name in names),
            tuple(sources),
            tuple(ops),
            tuple(Ref(name) for name in outputs if name in delivered or name in sent),
            loss,
            tuple((buffer, value) for buffer, value in graph.mutations if self._is_held(buffer, number)),
            tuple((name, text) for name, text in graph.constraints if name in results),  # what is received is laid out
            tuple(dict.fromkeys(cotangents)),
        )

    def _runs_in(self, op: Op, number: int) -> bool:
        return self.needed[number].issuperset(op.results) if self._is_free(op) else self.part_of[op.name] == number

    def _is_held(self, source: str, number: int) -> bool:
        """Return whether a part holds a source and does not receive it."""
        return source in self.needed[number] and self.maker.get(source, number) == number
