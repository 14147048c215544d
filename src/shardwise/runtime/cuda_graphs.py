"""Replay the kernels between messages as CUDA graphs (``compile="graphs"``).

A graph runs its kernels at the addresses that they had when it was captured, for one launch of the host. So of a
compiled program, runs of sections without a message in between become one instruction each (``graph_kernels``), whose
calls keep these rules:

* The first call runs the sections as they are, which loads their kernels. The second captures them, for good.
* Operands that stay (parameters, buffers, results of other graphs) are read where they are. All others are copied to
  one *landing* buffer first. Its content is needed during a replay only, so all graphs share it.
* Every graph has memory of its own for its results. What leaves the program (the loss, outputs, gradients) is copied
  out of it.
* Temporary memory is shared, also with results of graphs captured later. So while these are in use, an earlier graph is
  not replayed.
* The sections run uncaptured then, and likewise while the last results of their graph are in use (as in a second
  forward ahead of the first one's backward), and where an operand is elsewhere than at the capture.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count, groupby
from typing import Any, TypeGuard

import torch
from torch import Tensor, fx

from shardwise.errors import PlanError, PlanWarning, ShardwiseError, listed, warn_user
from shardwise.graph.ir import Ref
from shardwise.graph.written_out import SEED
from shardwise.plans.plan import Plan
from shardwise.programs.forms import Form
from shardwise.programs.instructions import Compute, Instruction, Origin, Part, memories
from shardwise.programs.rank_program import RankProgram
from shardwise.runtime.communicator import Communicator
from shardwise.runtime.compiled import CompiledKernels
from shardwise.runtime.emit import Boxed, ModuleWriter, take_all

MOST_PROGRAMS = 8  # of a module that are captured: each call signature has memory of its own


def check_graphs(plan: Plan, device: torch.device) -> None:
    """Raise ShardwiseError unless a plan can run as CUDA graphs on a device."""
    fix = "compile=True compiles the same kernels without CUDA graphs"
    if device.type != "cuda":
        raise ShardwiseError(f'compile="graphs" captures CUDA graphs, and this rank runs on {device}', fix=fix)
    if plan.is_pipeline:
        what = 'compile="graphs" is for plans without stages: micro-batches under way at once would need memory each'
        raise PlanError(what, fix=fix)
    if any(entry.offloaded for entry in plan.operators):
        what = 'compile="graphs" keeps saved values on the device for good, so that offload frees no memory'
        raise PlanError(what, fix=fix)


@dataclass(eq=False)
class GraphMemory:
    """The memory that the graphs of a module share. ``programs``: those that are captured; ``results``: address ->
    bytes of their results."""

    rank: int
    device: torch.device
    programs: set[object] = field(default_factory=set)
    results: dict[int, int] = field(default_factory=dict)
    pool: Any = None  # of the first graph: CUDA drops a pool that has none
    numbers: Iterator[int] = field(default_factory=count)  # of graphs, in the order of captures
    _warned: set[str] = field(default_factory=set)
    _replayed: list[_CapturedGraph] = field(default_factory=list)  # as they were captured; their results may be in use

    def __post_init__(self) -> None:
        self.stream = torch.cuda.Stream(self.device)
        self._landing = torch.empty(0, dtype=torch.uint8, device=self.device)

    @property
    def kept_bytes(self) -> int:
        """Return the bytes that graphs keep from step to step."""
        return sum(self.results.values()) + self._landing.nbytes

    def admits(self, program: object) -> bool:
        """Return whether a program may be captured."""
        if program in self.programs or len(self.programs) < MOST_PROGRAMS:
            self.programs.add(program)
            return True
        self.warn_once(
            f"this module was called with more than {MOST_PROGRAMS} signatures (shapes, dtypes, modes); the others run "
            "without CUDA graphs: pad batches to a few shapes"
        )
        return False

    def warn_once(self, what: str) -> None:
        if what not in self._warned and self.rank == 0:
            warn_user(what, PlanWarning)
        self._warned.add(what)

    def admits_replay(self, graph: _CapturedGraph) -> bool:
        """Return whether nothing uses results of graphs captured later, and note that this one is replayed if so."""
        while self._replayed and self._replayed[-1].number >= graph.number:
            if not self._replayed[-1].is_free():
                return False
            self._replayed.pop()
        self._replayed.append(graph)
        return True

    def landing(self, operands: Sequence[Tensor]) -> list[Tensor]:
        """Return memory for a copy of the operands, which other graphs overwrite."""
        sizes = [-(-operand.nbytes // 512) * 512 for operand in operands]  # aligned as torch aligns memory
        if self._landing.nbytes < sum(sizes):  # graphs so far keep the memory that they have
            self._landing = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
        parts = self._landing[: sum(sizes)].split(sizes)
        return [
            part[: operand.nbytes].view(operand.dtype).as_strided(operand.shape, _dense_stride(operand))
            for part, operand in zip(parts, operands, strict=True)
        ]


def _dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides of a copy, which has no element in several places."""
    return torch.empty_like(tensor, device="meta").stride()


def _memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _place_of(tensor: Tensor) -> tuple[int, tuple[int, ...]]:
    return tensor.data_ptr(), tensor.stride()


def copy_all(targets: Collection[Tensor], sources: Collection[Tensor]) -> None:
    """Copy tensors, those of one dtype by one kernel."""
    of_dtype: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
    for target, source in zip(targets, sources, strict=True):
        into, read = of_dtype[target.dtype]
        into.append(target)
        read.append(source)
    for into, read in of_dtype.values():
        torch._foreach_copy_(into, read)


class CopyOut(Boxed):
    """Copies tensors out of the memory of graphs."""

    def __call__(self, operands: list[Tensor]) -> Sequence[Tensor]:
        copies = [torch.empty_like(operand) for operand in operands]
        copy_all(copies, operands)
        operands.clear()
        return copies


@dataclass(eq=False)
class GraphKernels(Boxed):
    """A run of sections that is captured. ``kernels``: operands -> results; ``fixed``: positions of the operands that
    stay where they are; ``program``: what all runs of one program have in common; ``name``: for errors."""

    kernels: fx.GraphModule
    fixed: set[int]
    memory: GraphMemory
    program: object
    name: str
    _graph: _CapturedGraph | None = None
    _has_run: bool = False

    def __call__(self, operands: list[Tensor]) -> Sequence[Tensor]:
        is_first, self._has_run = not self._has_run, True
        if is_first or not self.memory.admits(self.program):
            return self._run(operands)
        with torch.inference_mode(False), torch.no_grad():
            self._graph = graph = self._graph or self._capture(operands)
            moved = [i for i, place in graph.places.items() if _place_of(operands[i]) != place]
            if not moved and graph.is_free() and self.memory.admits_replay(graph):
                return graph.replay(operands)
        if not self.fixed.isdisjoint(moved):
            self.memory.warn_once(
                "parameters or buffers are elsewhere than when CUDA graphs captured them, so that what reads them runs "
                "without: write into them in place (copy_)"
            )
        return self._run(operands)

    def _run(self, operands: list[Tensor]) -> Sequence[Tensor]:
        results: Sequence[Tensor] = self.kernels(*take_all(operands))
        return results

    def _capture(self, operands: Sequence[Tensor]) -> _CapturedGraph:
        stay = {i for i, x in enumerate(operands) if i in self.fixed or _memory_of(x) in self.memory.results}
        places = {i: _place_of(operands[i]) for i in stay}
        landed = [i for i in range(len(operands)) if i not in places]
        landing = dict(zip(landed, self.memory.landing([operands[i] for i in landed]), strict=True))
        copy_all(landing.values(), [operands[i] for i in landed])
        given = [landing.get(i, operand) for i, operand in enumerate(operands)]
        lands, read = set(map(_memory_of, landing.values())), set(map(_memory_of, given))
        graph, memory = torch.cuda.CUDAGraph(), self.memory
        try:  # Other threads ask for events. `torch.cuda.graph` leaves the stream only where its end succeeds.
            with (
                torch.cuda.stream(memory.stream),
                torch.cuda.graph(graph, memory.pool, memory.stream, capture_error_mode="thread_local"),
            ):
                results = [x.clone() if _memory_of(x) in lands else x for x in self.kernels(*given)]
        except Exception as error:
            reason = str(error.__context__ or error).strip().partition("\n")[0]
            what = f"{self.name} cannot be captured in a CUDA graph: {reason}"
            raise ShardwiseError(what, fix="compile=True runs the same kernels one by one") from error
        own = {_memory_of(x): x.untyped_storage() for x in results if _memory_of(x) not in read}
        memory.results |= {address: storage.nbytes() for address, storage in own.items()}
        memory.pool = memory.pool or graph.pool()
        return _CapturedGraph(graph, next(memory.numbers), results, own, landing, places)


@dataclass(eq=False)
class _CapturedGraph:
    """A captured run. ``number``: in the order of captures; ``own``: memory of the results that are no views of
    operands; ``landing``: position of an operand -> where it is copied to; ``places``: of the other operands."""

    graph: torch.cuda.CUDAGraph
    number: int
    results: Sequence[Tensor]
    own: dict[int, torch.UntypedStorage]
    landing: dict[int, Tensor]
    places: dict[int, tuple[int, tuple[int, ...]]]

    def __post_init__(self) -> None:
        self._uses = self._count()

    def _count(self) -> list[int]:
        return [torch._C._storage_Use_Count(storage._cdata) for storage in self.own.values()]

    def is_free(self) -> bool:
        """Return whether nothing holds the results of the last replay."""
        return all(map(int.__le__, self._count(), self._uses))

    def replay(self, operands: list[Tensor]) -> Sequence[Tensor]:
        copy_all(self.landing.values(), [operands[i] for i in self.landing])
        operands.clear()
        self.graph.replay()
        return [result.detach() for result in self.results]  # whose uses are counted


def graph_program(program: RankProgram, ranks: Communicator, device: torch.device, memory: GraphMemory) -> RankProgram:
    """Return a compiled program whose runs of sections are captured in CUDA graphs."""
    sources = program.spmd.graph.sources
    stay = {s.value for s in sources if s.kind in ("parameter", "buffer") and s.names[0] != SEED}
    writer = ModuleWriter(program, ranks, ranks, device, frozenset())
    return _Grouping(program, writer, memory, stay).run()


def graph_bytes(program: RankProgram) -> int:
    """Return the bytes that the graphs of a program's module keep from step to step."""
    targets = (getattr(instruction, "target", None) for instruction in (*program.forward, *program.backward))
    return next((target.memory.kept_bytes for target in targets if isinstance(target, GraphKernels)), 0)


def _is_section(instruction: Instruction) -> TypeGuard[Compute]:
    return isinstance(instruction, Compute) and isinstance(instruction.target, CompiledKernels)


@dataclass
class _Grouping:
    program: RankProgram
    writer: ModuleWriter
    memory: GraphMemory
    fixed: set[str]  # values that stay where they are
    captured: set[str] = field(default_factory=set)  # results of graphs
    outside: dict[str, None] = field(default_factory=dict)  # operators whose kernels are not captured

    def run(self) -> RankProgram:
        program, self.forms, self.key = self.program, dict(self.program.forms), object()
        forward = self._grouped(program.forward, (*program.ends, *program.saved))
        backward = self._grouped(program.backward, program.gradients.values())
        self.root = memories((*forward, *backward), program.taken)
        delivered, copies = self._copied_out(program.delivered, "forward")
        of_sources, gradients = self._copied_out([*program.gradients.values()], "input")
        if self.outside:
            what = "these operators run between CUDA graphs, since the host takes part in them"
            self.memory.warn_once(f"{what}: {listed(list(self.outside))}")
        return replace(
            program,
            forward=(*forward, *copies),
            backward=(*backward, *gradients),
            delivered=tuple(delivered),
            gradients=dict(zip(program.gradients, of_sources, strict=True)),
            forms=self.forms,
        )

    def _grouped(self, instructions: Sequence[Instruction], ends: Iterable[str]) -> list[Instruction]:
        """Return half a program with its runs of sections as one instruction each."""
        runs = [list(run) for _, run in groupby(instructions, _is_section)]
        readers: dict[str, set[int]] = defaultdict(set)
        for i, run in enumerate(runs):
            for name in chain.from_iterable(instruction.operands for instruction in run):
                readers[name].add(i)
        for name in ends:
            readers[name].add(len(runs))
        grouped: list[Instruction] = []
        for i, run in enumerate(runs):
            if sections := [instruction for instruction in run if _is_section(instruction)]:
                grouped.append(self._graph(sections, {name for name, places in readers.items() if places - {i}}))
            else:
                grouped += run
                self.outside |= {x.origin.op: None for x in run if isinstance(x, Compute) and not x.is_view}
        return grouped

    def _graph(self, run: Sequence[Compute], read_later: Collection[str]) -> Compute:
        made = [name for section in run for name in section.results]
        operands = [n for n in dict.fromkeys(n for section in run for n in section.operands) if n not in {*made}]
        results = [name for name in made if name in read_later]
        root = memories(run, operands)
        # Memory -> the first name of it outside. Views of operands that are copied first are copied as well.
        holder: dict[str, str | None] = {x: x if x in self.fixed or x in self.captured else None for x in operands}
        shares = []
        for name in results:
            shares.append(holder.setdefault(root[name], None))
            if root[name] not in operands:
                holder[root[name]] = holder[root[name]] or name
        self.captured.update(results)
        regions = list(dict.fromkeys(section.origin.op for section in run))
        target = GraphKernels(
            self.writer.kernels([(None, run)], operands, results),
            {i for i, name in enumerate(operands) if name in self.fixed},
            self.memory,
            self.key,
            f"{regions[0]} to {regions[-1]}" if len(regions) > 1 else regions[0],
        )
        origin = replace(run[0].origin, op=f"graph of {target.name}")
        return self._boxed(target, operands, results, shares, origin)

    def _boxed(
        self, target: Boxed, operands: Iterable[str], results: Sequence[str], shares: Iterable[str | None], of: Origin
    ) -> Compute:
        forms: tuple[Form, ...] = tuple(self.forms[name] for name in results)
        places = tuple((i,) for i in range(len(results)))
        return Compute(target, tuple(map(Ref, operands)), (), tuple(results), places, forms, tuple(shares), of)

    def _copied_out(self, names: Sequence[str], part: Part) -> tuple[list[str], list[Compute]]:
        """Return the names with those of graphs' results replaced by copies, and the instruction that copies."""
        copies = {x: f"{x}, copied out" for x in names if not self.captured.isdisjoint((x, self.root.get(x, x)))}
        self.forms |= {copy: self.forms[name] for name, copy in copies.items()}
        renamed = [copies.get(name, name) for name in names]
        if not copies:
            return renamed, []
        origin = Origin("results of graphs", "", part)
        return renamed, [self._boxed(CopyOut(), copies, [*copies.values()], [None] * len(copies), origin)]
