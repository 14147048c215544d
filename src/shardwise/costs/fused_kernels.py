"""The kernels that a compiler makes of a program: chains of element-wise operators are one pass over memory.

Products, and what scatters, stay kernels of their own. Between two messages, everything else at one *depth* (the number
of such kernels that come before it) is one kernel with what it exchanges values with, or with which it reads the same
large value: it reads what comes from outside once and writes what others read. Sums over rows are in the kernel of what
makes them and of what reads them, as in a norm; sums over columns (gradients of weights and biases) end a kernel. So
Inductor's scheduler fuses, but for its limits on the size of a kernel. What backward reads is what an eager step saves;
a compiler computes some of it again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

import networkx as nx
from torch._ops import OpOverload

from shardwise.costs.cluster import MOVES, PRODUCTS
from shardwise.costs.kernels import KernelCall, KernelWork, work_of
from shardwise.programs.instructions import Compute, Copy, Depart, Instruction, Land, sent_by
from shardwise.programs.rank_program import RankProgram

_BY_THEMSELVES = {"scatter", "pool", "pool_backward", *PRODUCTS}
_COLUMNS = {"column_reduction", "layer_norm_backward", "rms_norm_backward", "batch_norm", "batch_norm_backward"}
_LEAST_BYTES = 2**16  # of a value that two kernels are joined for because both read it
FusedKernels = dict[int, tuple[KernelWork, ...]]  # id of an instruction -> the kernels that start there


def fused_kernels(program: RankProgram, is_alone: Callable[[Compute], bool]) -> FusedKernels:
    """Return the kernels of all instructions that are fused with others, at the first of each group. ``is_alone``:
    whether an instruction is no part of any."""
    origin: dict[str, str] = {}  # of a view: what it looks at
    readers: dict[str, set[int]] = defaultdict(set)
    for half in (program.forward, program.backward):
        for instruction in half:
            for operand in instruction.operands:
                readers[origin.get(operand, operand)].add(id(instruction))
            for result, shared in zip(instruction.results, instruction.shares, strict=True):
                if shared is not None:
                    origin[result] = origin.get(shared, shared)
    for end in (*program.ends, *program.gradients.values()):
        readers[origin.get(end, end)].add(-1)
    found: FusedKernels = {}
    for half in (program.forward, program.backward):
        for section in _sections(half, is_alone):
            found |= _fused(section, program, origin, readers)
    return found


def _sections(half: Sequence[Instruction], is_alone: Callable[[Compute], bool]) -> Iterator[list[Compute]]:
    """Yield the kernels between messages."""
    section: list[Compute] = []
    for instruction in half:
        if isinstance(instruction, Depart | Copy | Land) or sent_by(instruction):
            yield section
            section = []
        elif isinstance(instruction, Compute) and not instruction.is_view and not is_alone(instruction):
            section.append(instruction)
    yield section


def _fused(
    section: list[Compute], program: RankProgram, origin: dict[str, str], readers: dict[str, set[int]]
) -> FusedKernels:
    """Return the kernels of a section."""
    joined = nx.Graph()
    depth: dict[str, int] = {}  # of a value: kernels by themselves that come before it
    maker: dict[str, Compute] = {}
    reader: dict[tuple[str, int, bool], int] = {}
    columns: set[int] = set()
    rows: set[int] = set()
    members = {id(instruction): instruction for instruction in section}
    for number, instruction in members.items():
        operands = list(dict.fromkeys(origin.get(name, name) for name in instruction.operands))
        level = max((depth.get(name, 0) for name in operands), default=0)
        forms = [program.forms[name] for name in instruction.operands]
        call = KernelCall(instruction.target, instruction.args, instruction.kwargs)
        work = work_of(call, forms, instruction.forms)
        alone = work.flops or work.kind in _BY_THEMSELVES or not isinstance(instruction.target, OpOverload)
        depth |= dict.fromkeys(instruction.results, level + bool(alone))
        if alone:
            continue
        (columns if work.kind in _COLUMNS else rows if work.kind in MOVES else set()).add(number)
        joined.add_node(number)
        for name in operands:
            made = maker.get(name)
            if made is not None and id(made) not in columns and depth[name] == level:
                joined.add_edge(id(made), number)
            elif program.forms[name].num_bytes >= _LEAST_BYTES:
                joined.add_edge(reader.setdefault((name, level, number in columns), number), number)
        maker |= dict.fromkeys(instruction.results, instruction)
    found: FusedKernels = {}
    groups: Iterable[set[int]] = nx.connected_components(joined)
    for group in groups:
        results = {name for number in group for name in members[number].results}
        read = {origin.get(name, name) for number in group for name in members[number].operands} - results
        written = [name for name in results if origin.get(name, name) == name and readers[name] - group]
        num_bytes = sum(program.forms[name].num_bytes for name in (*read, *written))
        kind = "column_reduction" if group & columns else "fused_reduction" if group & rows else ""
        found |= dict.fromkeys(group, ())
        first = next(number for number in members if number in group)
        found[first] = (KernelWork(kind, num_bytes=float(num_bytes)),) if num_bytes else ()
    return found
