"""The user's memory settings as lifetimes of the values of a program: recomputation of segments, offloading to the
host, parameters that are gathered again in backward.

``full``: inputs and outputs of a segment are kept, all between is recomputed (``all``: outputs, too). ``cheap``: the
fewest bytes are kept from which the others can be recomputed without a product (a minimum cut, as in torch.compile's
partitioner). ``gathers``: in the same cut only messages are repeated; ``cheap+gathers``: both.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import inf
from operator import itemgetter
from typing import Literal, NamedTuple

import torch

from shardwise.costs.flops import FLOPS
from shardwise.costs.kernels import is_view
from shardwise.costs.saved_for_backward import saved_for_backward
from shardwise.errors import ShardwiseError
from shardwise.graph.ir import Graph, Op, refs
from shardwise.graph.segments import How, Segment, block_of
from shardwise.programs.activation_offload import offloaded_operators
from shardwise.programs.instructions import Arrive, Compute, Convert, Instruction, memories, sent_by
from shardwise.programs.lifetimes import is_repeatable, repeated, with_lifetimes
from shardwise.programs.lower import lowered_by_model, lowered_operators, model_operators
from shardwise.programs.rank_program import RankProgram
from shardwise.programs.spmd import Lifetimes
from shardwise.search.constants import MIN_RESEND_SAVING

Offload = Literal["auto", "all", "none"]
OFFLOADS: tuple[Offload, ...] = ("auto", "all", "none")
# When a parameter that is stored in shards is gathered, from the least often:
# - "once": once per step. Micro-batches accumulate the whole gradient, which is reduced once (ZeRO-1);
# - "held": in every micro-batch, and held from forward to backward (ZeRO-2);
# - "again": in every forward, and again in backward (ZeRO-3).
# In a step of one micro-batch, "once" equals "held".
ReshardMode = Literal["once", "held", "again"]
RESHARD_MODES: tuple[ReshardMode, ...] = ("once", "held", "again")


class Repeats(NamedTuple):
    """What recomputation repeats in backward, and the weaker ways that are tried for the last blocks."""

    work: frozenset[str]
    easier: tuple[How, ...] = ("none",)


# Ways of recomputation that can be compared. Those that are missing here cannot.
REPEATS: Mapping[How | None, Repeats] = {
    None: Repeats(frozenset()),
    "gathers": Repeats(frozenset(("messages",))),
    "cheap": Repeats(frozenset(("kernels",))),
    "cheap+gathers": Repeats(frozenset(("messages", "kernels")), ("cheap", "gathers")),
    "full": Repeats(frozenset(("messages", "kernels", "products")), ("cheap", "cheap+gathers")),
}
# Of these a minimum cut decides what is kept: no product is repeated.
CUTS = frozenset(how for how, repeats in REPEATS.items() if repeats.work and "products" not in repeats.work)


@dataclass(frozen=True, slots=True)
class PricedPolicy:
    """A memory policy as the search prices it (``MemoryPolicy.priced``). Prices leave out other conversions that
    backward repeats, and copies to the host. The simulation counts them.

    Attributes:
        operators: Operators whose results are recomputed in backward, so they hold no bytes.
        reshard_mode: When sharded parameters are gathered.
        offloaded: Operators whose results wait in host memory, so they hold no bytes on the device.
        resent: Operators whose backward may receive saved operands again. The operand is then kept as it was before the
            message, if that takes fewer bytes, and the price adds the second message (``RESEND_TRAFFIC``).
        dropped: The results of ``operators`` and ``offloaded``.
        local: Those of them that are recomputed without repeating messages (``recompute="cheap"``). A copy in another
            layout, which a message delivered, is kept and counts.
        inputs: Values that recomputation begins from. They are kept although no operator's backward may read them.
        in_flight: Micro-batches whose values are kept for backward at once.
    """

    operators: frozenset[str] = frozenset()
    reshard_mode: ReshardMode = "held"
    offloaded: frozenset[str] = frozenset()
    resent: frozenset[str] = frozenset()
    dropped: frozenset[str] = frozenset()
    local: frozenset[str] = frozenset()
    inputs: frozenset[str] = frozenset()
    in_flight: int = 1


@dataclass(frozen=True)
class MemoryPolicy:
    """How a program saves memory. Policies are ordered by what they repeat (``repeats_no_less``).

    Attributes:
        recompute: How the repeated blocks are recomputed. None: only as the model asks.
        reshard_mode: When parameters that are stored in shards are gathered.
        offload: Whether saved values are offloaded: of all blocks, of the parts that the model asks for, or of none.
        segments: The parts of a graph that are recomputed or offloaded (``MemoryPolicy.of``).
    """

    recompute: How | None = None
    reshard_mode: ReshardMode = "held"
    offload: Offload = "auto"
    segments: tuple[Segment, ...] = ()

    def __bool__(self) -> bool:
        away = self.reshard_mode == "again" or self.offloads
        return away or any(segment.how != "none" for segment in self.segments)

    @property
    def offloads(self) -> bool:
        return self.offload == "all"

    @property
    def key(self) -> Hashable:
        """Return what decides a program: equal keys give equal programs."""
        return self.segments, self.reshard_mode, self.offloads

    def repeats_no_less(self, other: MemoryPolicy) -> bool:
        """Return whether backward repeats at least everything that it does under ``other``. False if the policies
        cannot be compared."""
        if not REPEATS.keys() >= {self.recompute, other.recompute} or self.offloads != other.offloads:
            return False
        gathers, fewer = (RESHARD_MODES.index(policy.reshard_mode) for policy in (self, other))
        return REPEATS[self.recompute].work >= REPEATS[other.recompute].work and gathers >= fewer

    @property
    def moves_to_host(self) -> bool:
        return self.offloads or any(segment.how == "offload" for segment in self.segments)

    @property
    def on_device(self) -> MemoryPolicy:
        return replace(self, segments=_kept_on_device(self.segments), offload="none")

    @staticmethod
    def of(
        graph: Graph,
        segments: Sequence[Segment],
        recompute: How | None = None,
        reshard_mode: ReshardMode = "held",
        offload: Offload = "auto",
    ) -> MemoryPolicy:
        """Return the policy that a user asks for. ``segments``: those that the model asks for; ``recompute``: how its
        repeated blocks are also recomputed (None: only as the model asks); ``offload``: whether saved values of the
        blocks are offloaded (``"all"``) or nothing is. Raises ShardwiseError if the model has no blocks for that."""
        empty = MemoryPolicy(recompute, reshard_mode, offload)
        segments = _kept_on_device(segments) if offload == "none" else tuple(segments)
        if empty.offloads and not blocks_of(graph):
            what = "offload='all': the model has no repeated blocks (modules whose path has a number)"
            raise ShardwiseError(what, fix="name the parts: sw.offload(model.encoder)")
        if recompute == "none":
            return replace(empty, segments=tuple(segment for segment in segments if segment.how == "offload"))
        if recompute is None:
            return replace(empty, segments=segments)
        taken = {name for segment in segments for name in segment.operators}
        blocks = [Segment(block.name, recompute, block.operators - taken) for block in blocks_of(graph)]
        if not blocks and not segments:
            what = f"recompute={recompute!r}: the model has no repeated blocks (modules whose path has a number)"
            raise ShardwiseError(what, fix="name the parts: sw.recompute(model.encoder)")
        return replace(empty, segments=(*segments, *(block for block in blocks if block.operators)))

    def priced(self, values: GraphValues, in_flight: int = 1) -> PricedPolicy:
        """Return the recomputation that the search prices: by the same rules as that of a program, but by the bytes of
        whole values, and without messages, which only a program has."""
        operators: set[str] = set()
        local: set[str] = set()
        resent: set[str] = set()
        inputs: set[str] = set()
        graph, of_parameters = values.graph, values.of_parameters
        waiting = {name for block in blocks_of(graph) for name in block.operators} if self.offloads else set[str]()
        for segment in self.segments:
            if segment.how == "offload":
                waiting |= segment.operators
            elif segment.how not in ("none", "gathers"):
                repeated, read = values.recomputed(segment)
                operators |= repeated
                inputs |= read
                if segment.how == "cheap":
                    local |= repeated
            if segment.how in CUTS and "messages" in REPEATS[segment.how].work:
                resent |= segment.operators
        operators = operators | of_parameters if self.reshard_mode == "again" else operators - of_parameters
        local -= of_parameters

        def results(names: set[str]) -> frozenset[str]:
            return frozenset(name for op in graph.ops if op.name in names for name in op.results)

        return PricedPolicy(
            frozenset(operators), self.reshard_mode, frozenset(waiting - operators), frozenset(resent),
            results(operators | waiting), results(local - waiting), frozenset(inputs), in_flight,
        )  # fmt: skip


# All policies that a search may try. The first one repeats least.
MEMORY_POLICIES: tuple[MemoryPolicy, ...] = (
    MemoryPolicy(None, "held"),
    MemoryPolicy(None, "once"),
    MemoryPolicy("gathers", "held"),
    MemoryPolicy("gathers", "once"),
    MemoryPolicy("cheap", "held"),
    MemoryPolicy("cheap", "once"),
    MemoryPolicy("cheap+gathers", "held"),
    MemoryPolicy("cheap+gathers", "once"),
    MemoryPolicy(None, "again"),
    MemoryPolicy("gathers", "again"),
    MemoryPolicy("offload", "held"),
    MemoryPolicy("offload", "once"),
    MemoryPolicy("cheap", "again"),
    MemoryPolicy("cheap+gathers", "again"),
    MemoryPolicy("full", "held"),
    MemoryPolicy("full", "once"),
    MemoryPolicy("full", "again"),
    MemoryPolicy("full", "again", "all"),
)


def _kept_on_device(segments: Iterable[Segment]) -> tuple[Segment, ...]:
    return tuple(replace(segment, how="none") if segment.how == "offload" else segment for segment in segments)


def blocks_of(graph: Graph) -> tuple[Segment, ...]:
    """Return the repeated blocks of a model."""
    members: dict[str, set[str]] = {}
    for op in graph.ops:
        if block_of(op.name):
            members.setdefault(block_of(op.name), set()).add(op.name)
    return tuple(Segment(path, "full", frozenset(names)) for path, names in members.items())


def ends_of(graph: Graph) -> tuple[tuple[Op, ...], tuple[Op, ...]]:
    """Return the operators ahead of all repeated blocks, and those behind them, if they read parameters: each can be a
    stage of its own."""
    inside = [number for number, op in enumerate(graph.ops) if block_of(op.name)]
    if not inside:
        return (), ()
    parameters = {source.value for source in graph.sources if source.kind == "parameter"}
    ahead, behind = (
        ops if any(parameters.intersection(op.operands) for op in ops) else ()
        for ops in (graph.ops[: inside[0]], graph.ops[inside[-1] + 1 :])
    )
    return ahead, behind


def with_memory_policy(kept: RankProgram, graph: Graph, memory_policy: MemoryPolicy) -> RankProgram:
    """Return the program of the busiest rank with the lifetimes of a policy applied. ``kept``: the one that keeps all;
    ``graph``: the model's (not lowered). Of operators and conversions to repeat, its ``spmd`` lists only those that
    backward really recomputes: the program is the same without the others."""
    spmd = kept.spmd
    operators: set[str] = set()
    conversions: set[str] = set()
    parameters = {source.value for source in graph.sources if source.kind == "parameter"}
    if memory_policy.reshard_mode == "again":
        conversions.update(c.result for c in spmd.conversions if c.origin in parameters and c.collectives())
    lowered = lowered_by_model(graph, spmd.graph)
    for segment in memory_policy.segments:
        inside = {lowered_name for name in segment.operators for lowered_name in lowered.get(name, ())}
        if segment.how in ("full", "all"):
            operators |= inside - (_leaving(spmd.graph, inside) if segment.how == "full" else set())
            repeat_values, repeat_parameters = segment.messages != "none", segment.messages == "parameters"
            conversions.update(
                c.result
                for c in spmd.conversions
                if c.op in inside and (repeat_parameters if c.origin in parameters else repeat_values)
            )
    partly = [segment for segment in memory_policy.segments if segment.how in CUTS]
    if partly:
        cuts = _MinimumCuts(kept)
        for segment in partly:
            inside = {lowered_name for name in segment.operators for lowered_name in lowered.get(name, ())}
            computed, converted = cuts.recomputed(inside, REPEATS[segment.how].work)
            operators |= computed
            conversions |= converted
    offloading = [
        *(blocks_of(graph) if memory_policy.offloads else ()),
        *(s for s in memory_policy.segments if s.how == "offload"),
    ]
    waiting = {lowered_name for part in offloading for name in part.operators for lowered_name in lowered.get(name, ())}
    depth = spmd.lifetimes.prefetch
    lifetimes = Lifetimes(frozenset(operators), frozenset(conversions), frozenset(waiting), prefetch=depth)
    program = with_lifetimes(replace(kept, spmd=replace(spmd, lifetimes=lifetimes)))
    recomputed, repeats = repeated(program)

    def listed(operators: frozenset[str]) -> frozenset[str]:  # as a plan lists them: by operator of the model
        return lowered_operators(model_operators(operators, graph), graph, spmd.graph)

    offloaded = listed(offloaded_operators(program)) & waiting
    lifetimes = Lifetimes(listed(recomputed) & operators, repeats, offloaded, prefetch=depth)
    return replace(program, spmd=replace(spmd, lifetimes=lifetimes))


def _leaving(graph: Graph, inside: Collection[str]) -> set[str]:
    """Return the operators of a segment whose results are read outside of it in forward."""
    delivered = {*refs(graph.outputs), *(value for _, value in graph.mutations)}

    def leaves(result: str) -> bool:
        return result in delivered or any(op.name not in inside for op in graph.consumers[result])

    return {name for name in inside if any(map(leaves, graph.op_by_name[name].results))}


# -- cuts --------------------------------------------------------------------------------------------------------------


class GraphValues:
    """The values of a graph, as recomputation sees them. ``root``: the value that first had a value's memory;
    ``wanted``: the memories that backward reads; ``fixed``: operators that are never repeated; ``views``: operators
    whose result is a view; ``of_parameters``: those of parameters, which live as long as these."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.root = {name: name for name in graph.source_of}
        self.wanted: set[str] = set()
        self.fixed: set[str] = set()
        self.views: set[str] = set()
        self._position = {op.name: number for number, op in enumerate(graph.ops)}
        self._recomputed: dict[tuple[How, frozenset[str]], tuple[frozenset[str], frozenset[str]]] = {}
        changed = {buffer for buffer, _ in graph.mutations}
        for op in graph.ops:
            operands = [graph.by_name[name] for name in op.operands]
            is_cast = any(graph.by_name[name].dtype != operands[0].dtype for name in op.results if operands)
            if operands and is_view(op.target) and not is_cast:
                self.views.add(op.name)
                self.root.update(dict.fromkeys(op.results, self.root[op.operands[0]]))
                continue
            self.root.update((name, name) for name in op.results)
            saved = saved_for_backward(op, operands)
            self.wanted.update(self.root[op.operands[i]] for i in saved.operands)
            self.wanted.update(op.results[i] for i in saved.results)
            draws = torch.Tag.nondeterministic_seeded in getattr(op.target, "tags", ())
            if draws or changed.intersection(op.operands):
                self.fixed.add(op.name)

    @cached_property
    def of_parameters(self) -> frozenset[str]:
        found: set[str] = set()
        memory = {source.value for source in self.graph.sources if source.kind == "parameter"}
        for op in self.graph.ops:
            if is_view(op.target) and memory.intersection(op.operands):
                found.add(op.name)
                memory.update(op.results)
        return frozenset(found)

    def recomputed(self, segment: Segment) -> tuple[frozenset[str], frozenset[str]]:
        """Return the operators of a segment that are recomputed, with their views, and what they read that is kept."""
        how: How = "cheap" if segment.how in CUTS else segment.how
        key = how, segment.operators
        if key not in self._recomputed:
            self._recomputed[key] = self._recomputed_as(how, segment.operators)
        return self._recomputed[key]

    def _recomputed_as(self, how: How, inside: frozenset[str]) -> tuple[frozenset[str], frozenset[str]]:
        by_name = self.graph.op_by_name
        ops = [by_name[name] for name in sorted(inside, key=self._position.__getitem__)]
        works = [op for op in ops if op.name not in self.views]
        if how == "cheap":
            again = self._least(works)
        else:
            stays = _leaving(self.graph, inside) if how == "full" else set[str]()
            again = self._all([op for op in works if op.name not in stays | self.fixed])
        operators = frozenset(op.name for op in ops if all(self.root[name] in again for name in op.results))
        read = (name for op in works if op.name in operators for name in op.operands)
        return operators, frozenset(name for name in read if self.root[name] not in again)

    def _all(self, ops: Sequence[Op]) -> set[str]:
        """Return the memories to recompute if all of some operators may be repeated: those that backward reads, and
        those from which they are made."""
        again: set[str] = set()
        read = set(self.wanted)
        for op in reversed(ops):
            if not read.isdisjoint(op.results):
                again.update(op.results)
                read.update(self.root[name] for name in op.operands)
        return again

    def _least(self, ops: Sequence[Op]) -> set[str]:
        """Return the memories to recompute, without products, so that the fewest bytes are kept."""
        value = self.graph.by_name
        prices: dict[str, float] = {}
        reads: dict[tuple[str, str], None] = {}
        for op in ops:
            before = [read for name in op.operands if (read := self.root[name]) in prices]
            for name in op.results:
                prices[name] = inf if op.target in FLOPS or op.name in self.fixed else 0
                reads |= {(read, name): None for read in before}
        if self.wanted.isdisjoint(prices):
            return set()
        number = {memory: i for i, memory in enumerate(prices)}
        nodes = tuple(
            (value[memory].numel * value[memory].dtype.itemsize, price, memory in self.wanted)
            for memory, price in prices.items()
        )
        begun, _ = _minimum_cut(nodes, tuple((number[read], number[memory]) for read, memory in reads))
        return {memory for memory, i in number.items() if i not in begun}


class _MinimumCuts:
    """Minimum cuts through the segments of a program that keeps everything."""

    def __init__(self, program: RankProgram) -> None:
        self.forms, graph = program.forms, program.spmd.graph
        self.root = memories(program.forward, graph.source_of)
        self.changed = {buffer for buffer, _ in program.mutations}
        self.wanted = {self.root[name] for name in program.saved}
        self.products = {op.name for op in graph.ops if op.target in FLOPS}
        self.work: set[str] = set()  # operators that are more than views
        self.positions: dict[str, list[tuple[int, Instruction]]] = {}  # of the instructions of an operator
        for i, instruction in enumerate(program.forward):
            if not (isinstance(instruction, (Convert, Arrive)) and instruction.of_parameters):
                self.positions.setdefault(instruction.origin.op, []).append((i, instruction))
            if isinstance(instruction, Compute) and not instruction.is_view:
                self.work.add(instruction.origin.op)

    def recomputed(self, inside: Collection[str], work: Collection[str]) -> tuple[set[str], set[str]]:
        """Return the operators and conversion results of a segment to recompute so that it holds the fewest bytes for
        backward. ``work``: what may be repeated, kernels that are no products, and messages."""
        makers: dict[str, list[Instruction]] = {}  # of a memory
        prices: dict[str, float] = {}  # of recomputing a memory, in bytes
        reads: dict[tuple[str, str], None] = {}  # (memory, memory that is made from it)
        ordered = [
            instruction
            for _, instruction in sorted((p for op in inside for p in self.positions.get(op, ())), key=itemgetter(0))
        ]
        brought = (
            self.forms[name].num_bytes
            for instruction in ordered
            if sent_by(instruction)
            for name in instruction.results
        )
        least = 1 + max(brought, default=0) // MIN_RESEND_SAVING
        for instruction in ordered:
            price = self._price(instruction, work, least)
            for name in instruction.results:
                memory = self.root[name]
                if memory != name and memory not in makers:
                    continue  # a view of what comes in
                makers.setdefault(memory, []).append(instruction)
                prices[memory] = max(price, prices.get(memory, 0))
                before = (self.root.get(operand, operand) for operand in instruction.operands)
                reads |= {(read, memory): None for read in before if read in makers and read != memory}
        if self.wanted.isdisjoint(makers):
            return set(), set()
        number = {memory: i for i, memory in enumerate(makers)}
        nodes = tuple((self.forms[memory].num_bytes, prices[memory], memory in self.wanted) for memory in makers)
        begun, kept = _minimum_cut(nodes, tuple((number[read], number[memory]) for read, memory in reads))
        steady: list[Instruction] = []
        again: list[Instruction] = []
        for i, instructions in enumerate(makers.values()):
            if i not in begun:
                again += instructions
            elif i not in kept:
                steady += instructions
        computed, once = (
            {instruction.origin.op for instruction in part if isinstance(instruction, Compute)}
            for part in (again, steady)
        )
        converted = {
            conversion.result
            for instruction in again
            if isinstance(instruction, Convert)
            for conversion in instruction.conversions
        }
        return computed - once - self.products, converted

    def _price(self, instruction: Instruction, work: Collection[str], of_message: float) -> float:
        """Return the price of recomputing an instruction; infinite if that is not wanted."""
        op = instruction.origin.op
        if isinstance(instruction, Compute):
            may = op not in self.products and ("kernels" in work or op not in self.work)
            return 0 if may and is_repeatable(instruction, self.changed) else inf
        if "messages" not in work:
            return inf
        return of_message if sent_by(instruction) else 0


@lru_cache(maxsize=1024)
def _minimum_cut(
    nodes: tuple[tuple[int, float, bool], ...], reads: tuple[tuple[int, int], ...]
) -> tuple[frozenset[int], frozenset[int]]:
    """Return the memories on the source's side of the minimum cut before and after they are made. Cached, as equal
    blocks have equal cuts.

    ``nodes``: per memory its bytes, the price of recomputing it, and whether backward reads it; ``reads``: (memory,
    one that is made from it).
    """
    import networkx as nx  # takes .3 s, and few plans ask for it

    flow = nx.DiGraph()
    for number, (num_bytes, price, is_wanted) in enumerate(nodes):
        flow.add_edge(("in", number), ("out", number), capacity=num_bytes)
        if is_wanted:
            flow.add_edge(("out", number), "backward")
        if price:
            flow.add_edge("kept", ("in", number), capacity=price)
    flow.add_edges_from((("out", read), ("in", number)) for read, number in reads)
    side = nx.minimum_cut(flow, "kept", "backward")[1][0] if "kept" in flow else set()
    begun, kept = (frozenset(i for i in range(len(nodes)) if (end, i) in side) for end in ("in", "out"))
    return begun, kept
