"""Compile regions: parts of a step that are compiled together, forward with its backward.

A compiler decides for a region which values are kept between its two halves, once for all equal regions. So the
repeated layers of a model are regions of one *kind*; the kernels before, between and after them form the remaining
regions. Messages stay where the program has them: a region is cut into *sections*, runs of kernels without a message in
between. The order of exchanges is the same on all ranks and never changes.

Layers are found as a stretch of forward in which the same kernels repeat, regardless of names (``_longest``), and cut
where the fewest bytes are alive. Kernels of backward belong to the region of their operator. Correctness does not
depend on this search: two regions are of one kind only if they are equal kernel by kernel (``kind_of``).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from shardwise.programs.forms import Form
from shardwise.programs.instructions import Compute, Convert, Copy, Instruction, Land, memories, sent_by, with_operands
from shardwise.programs.invariants import BrokenProgram
from shardwise.programs.rank_program import RankProgram
from shardwise.programs.vjp import numbered, typed_key

FEWEST_REPEATS = 3  # of a layer: two are not worth a shared kind
FEWEST_KERNELS = 8  # in a layer: shorter ones lose more at their edges than they gain
Kernel = Compute | Convert  # a conversion without a message
Section = tuple[Kernel, ...]


@dataclass(frozen=True)
class CompileRegion:
    """Sections of forward and of backward that are compiled together. ``inputs``: outside values that forward reads;
    ``late``: those that only backward reads; ``outputs``, ``results``: values of forward and backward read outside."""

    forward: tuple[Section, ...]
    backward: tuple[Section, ...]
    inputs: tuple[str, ...]
    late: tuple[str, ...]
    outputs: tuple[str, ...]
    results: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SectionIndex:
    """Refers to a section: the number of its region, and its number in this half of the region."""

    region: int
    section: int


@dataclass(frozen=True)
class RegionProgram:
    """A step as sections of regions, and the instructions between them. ``program``: the step after values that several
    layers compute equally were merged."""

    program: RankProgram
    regions: tuple[CompileRegion, ...]
    forward: tuple[SectionIndex | Instruction, ...]
    backward: tuple[SectionIndex | Instruction, ...]


def divide(program: RankProgram, is_kernel: Callable[[Instruction], bool]) -> RegionProgram:
    """Divide the step into regions. ``is_kernel``: whether an instruction may be compiled; messages never are."""

    def inside(instruction: Instruction) -> bool:
        return isinstance(instruction, (Compute, Convert)) and not sent_by(instruction) and is_kernel(instruction)

    cuts = _cuts(program)
    labels = _forward_labels(program.forward, cuts)
    if cuts:
        program, labels = _with_common(program, labels, len(cuts))
    of_op = dict(zip((instruction.origin.op for instruction in program.forward), labels, strict=True))
    forward = list(zip(program.forward, labels, strict=True))
    backward = list(zip(program.backward, _backward_labels(program, of_op, len(cuts)), strict=True))
    if cuts:
        forward = _with_exchanges_first(forward, backwards=False)
        backward = _with_exchanges_first(reversed(_sorted(backward, inside)), backwards=True)[::-1]
    first, sections = _sections(forward, inside)
    second, late_sections = _sections(backward, inside)
    numbers = sorted({*sections, *late_sections})
    regions = _regions(program, [(sections.get(n, []), late_sections.get(n, [])) for n in numbers])
    place = {number: i for i, number in enumerate(numbers)}

    def renumbered(items: Iterable[SectionIndex | Instruction]) -> tuple[SectionIndex | Instruction, ...]:
        return tuple(
            replace(item, region=place[item.region]) if isinstance(item, SectionIndex) else item for item in items
        )

    return RegionProgram(program, regions, renumbered(first), renumbered(second))


def kind_of(region: CompileRegion, program: RankProgram) -> object:
    """Return a key that is equal for regions that can share one compiled pair of halves: the same kernels on tensors of
    the same forms, connected in the same way, inside and to the outside."""
    number: dict[str, int] = {}
    static = {source.value for source in program.spmd.graph.sources if source.kind == "parameter"} | {*program.given}

    def numbers(names: Iterable[str]) -> tuple[int, ...]:
        return tuple(number.setdefault(name, len(number)) for name in names)

    def kernel(instruction: Kernel) -> object:
        content = _content(instruction)
        operands = numbers(dict.fromkeys(instruction.operands))
        shares = numbers(name for name in instruction.shares if name is not None)
        writes = numbers(instruction.writes)
        return content, operands, numbers(instruction.results), shares, writes

    outside = tuple((program.forms[name], name in static) for name in (*region.inputs, *region.late))
    ends = numbers(region.inputs), numbers(region.late)
    halves = tuple(tuple(tuple(map(kernel, section)) for section in half) for half in (region.forward, region.backward))
    return outside, ends, halves, numbers(region.outputs), numbers(region.results)


def _content(instruction: Instruction) -> object:
    """Return a key for what an instruction does, without names."""
    forms: tuple[Form, ...] = instruction.forms
    if isinstance(instruction, Compute):
        return typed_key(numbered(instruction)[0]), instruction.places, forms
    if isinstance(instruction, (Copy, Land)):
        return type(instruction), getattr(instruction, "to", None), forms
    ways = tuple((c.source, c.target, c.moves, c.itemsize, c.grad_itemsize) for c in instruction.conversions)
    return type(instruction), ways, instruction.backward, forms


# ---------------------------------------------------------------------------------------------------- where layers are


def _cuts(program: RankProgram) -> list[int]:
    """Return the positions in forward where a layer begins or the last one ends."""
    # Buckets may put exchanges of parameters anywhere.
    positions = [i for i, instruction in enumerate(program.forward) if not instruction.of_parameters]
    codes: dict[object, int] = {}
    tokens = [codes.setdefault(_content(program.forward[i]), len(codes)) for i in positions]
    operators = [program.forward[i].origin.op for i in positions]
    alive = _alive(program)
    boundaries: list[int] = []

    def search(start: int, stop: int) -> None:
        stretch = _longest(tokens, start, stop)
        if stretch is None:
            return
        first, period, end = stretch
        # A layer keeps the kernels of each operator together.
        starts = [
            s
            for s in range(first, min(first + period, end - (FEWEST_REPEATS - 1) * period))
            if s == 0 or not operators[s - 1] or operators[s - 1] != operators[s]
        ]
        if not starts:
            return
        begin = min(starts, key=lambda s: (alive[positions[s + period]], s))
        count = (end - begin) // period
        cuts = [begin + i * period for i in range(count + 1)]
        boundaries.extend(positions[c] if c < len(positions) else len(program.forward) for c in cuts)
        search(start, begin)
        search(cuts[-1], stop)

    search(0, len(tokens))
    return sorted(set(boundaries))


def _longest(tokens: Sequence[int], start: int, stop: int) -> tuple[int, int, int] | None:
    """Return (first, period, end) of the longest periodic stretch in a range of tokens; of equal lengths the one with
    the shortest period."""
    last: dict[int, int] = {}
    gaps: Counter[int] = Counter()
    for i in range(start, stop):
        if tokens[i] in last:
            gaps[i - last[tokens[i]]] += 1
        last[tokens[i]] = i
    best: tuple[int, int, int] | None = None
    for period in sorted(gap for gap in gaps if gap >= FEWEST_KERNELS):
        run = 0
        for i in range(start, stop - period + 1):
            if i < stop - period and tokens[i] == tokens[i + period]:
                run += 1
                continue
            if run >= (FEWEST_REPEATS - 1) * period and (best is None or run + period > best[2] - best[0]):
                best = i - run, period, i + period
            run = 0
    return best


def _alive(program: RankProgram) -> list[int]:
    """Return per position in forward the bytes that were allocated before and are read there or later."""
    root = memories(program.forward, program.taken)
    last: dict[str, int] = {}
    for i, instruction in enumerate(program.forward):
        for name in instruction.operands:
            last[root[name]] = i
    alive, ends, total = [], Counter[int](), 0
    for i, instruction in enumerate(program.forward):
        alive.append(total)
        for name, form in zip(instruction.results, instruction.forms, strict=True):
            if root[name] == name and last.get(name, i) > i:
                total += form.num_bytes
                ends[last[name]] += form.num_bytes
        total -= ends[i]
    return [*alive, 0]


# -------------------------------------------------------------------------------------------- what belongs to a region

Labelled = tuple[Instruction, int]


def _forward_labels(instructions: Sequence[Instruction], cuts: Sequence[int]) -> list[int]:
    """Return the number of cuts before each instruction. An exchange of parameters gets the label of the next one."""
    labels, label = [0] * len(instructions), len(cuts)
    for i in reversed(range(len(instructions))):
        if not instructions[i].of_parameters:
            label = bisect_right(cuts, i)
        labels[i] = label
    return labels


def _with_common(program: RankProgram, labels: Sequence[int], last: int) -> tuple[RankProgram, list[int]]:
    """Merge values that several layers compute equally from values before them (masks, position tables). They are
    computed once, before the layers, and so kept once."""
    ahead = set(program.taken)
    for instruction, label in zip(program.forward, labels, strict=True):
        if label == 0 and not instruction.of_parameters:
            ahead.update(instruction.results)
    available = set(ahead)
    written = {name for instruction in program.forward for name in instruction.writes}
    twins_of: dict[object, list[int]] = {}
    same: dict[str, str] = {}

    def key(instruction: Compute) -> object:
        operands = tuple(same.get(name, name) for name in dict.fromkeys(instruction.operands))
        return _content(instruction), operands

    for i, instruction in enumerate(program.forward):
        if not 0 < labels[i] < last or not isinstance(instruction, Compute):
            continue
        seeded = torch.Tag.nondeterministic_seeded in getattr(instruction.target, "tags", ())
        if seeded or instruction.writes or written.intersection((*instruction.results, *instruction.operands)):
            continue
        if ahead.issuperset(same.get(name, name) for name in instruction.operands):
            twins = twins_of.setdefault(key(instruction), [])
            first = program.forward[twins[0] if twins else i]
            same.update(zip(instruction.results, first.results, strict=True))
            ahead.update(first.results)
            twins.append(i)
    shared = []
    for twins in sorted(twins_of.values()):
        first = program.forward[twins[0]]
        if len(twins) > 1 and available.issuperset(same.get(name, name) for name in first.operands):
            available.update(first.results)
            shared.append(twins)
    gone = {i for twins in shared for i in twins[1:]}
    moved = sorted(twins[0] for twins in shared)
    kept = {name for i in moved for name in program.forward[i].results}
    names = {name: other for name, other in same.items() if other in kept and name != other}
    start = next((i for i, label in enumerate(labels) if label > 0), len(labels))
    order = [*range(start), *moved, *(i for i in range(start, len(labels)) if i not in gone and i not in moved)]
    forward = tuple(program.forward[i] for i in order)
    merged = replace(program, forward=forward, aliases={**program.aliases, **names})
    return renamed(merged, names), [0 if i in moved else labels[i] for i in order]


def renamed(program: RankProgram, names: Mapping[str, str]) -> RankProgram:
    """Return the program in which values go by other names, those of equal values."""
    if not names:
        return program

    def all_of(values: Iterable[str]) -> tuple[str, ...]:
        return tuple(names.get(name, name) for name in values)

    return replace(
        program,
        forward=tuple(with_operands(instruction, names) for instruction in program.forward),
        backward=tuple(with_operands(instruction, names) for instruction in program.backward),
        saved=tuple(dict.fromkeys(all_of(program.saved))),
        delivered=all_of(program.delivered),
        mutations=tuple((buffer, names.get(value, value)) for buffer, value in program.mutations),
        gradients={source: names.get(name, name) for source, name in program.gradients.items()},
    )


def _backward_labels(program: RankProgram, of_op: dict[str, int], last: int) -> list[int]:
    """Return the label of each instruction: the smallest of its operator and its operands. It runs last in backward."""
    maker: dict[str, int] = {}
    labels = []
    for instruction in program.backward:
        label = min([of_op.get(instruction.origin.op, last), *(maker.get(name, last) for name in instruction.operands)])
        maker.update(dict.fromkeys(instruction.results, label))
        labels.append(label)
    return labels


def _sorted(instructions: Sequence[Labelled], inside: Callable[[Instruction], bool]) -> list[Labelled]:
    """Sort the kernels between two messages, those of later layers first. Their operands never have smaller labels."""
    ordered: list[Labelled] = []
    run: list[Labelled] = []
    for item in instructions:
        if inside(item[0]):
            run.append(item)
            continue
        ordered += sorted(run, key=lambda labelled: -labelled[1])
        run = []
        ordered.append(item)
    return ordered + sorted(run, key=lambda labelled: -labelled[1])


def _with_exchanges_first(instructions: Iterable[Labelled], *, backwards: bool) -> list[Labelled]:
    """Move exchanges of parameters to the start of their region, but not past their operands or another exchange. So
    layers have equal sections wherever a bucket ends. ``backwards``: the instructions come from last to first, and
    exchanges of gradients do not move past what reads their results."""
    moved: list[Labelled] = []
    for item in instructions:
        place = len(moved)
        while place and item[0].of_parameters:
            other, label = moved[place - 1]
            first, second = (item[0], other) if backwards else (other, item[0])
            if not isinstance(other, Compute) or label != item[1] or set(first.results).intersection(second.operands):
                break
            place -= 1
        moved.insert(place, item)
    return moved


def _sections(
    instructions: Sequence[Labelled], inside: Callable[[Instruction], bool]
) -> tuple[list[SectionIndex | Instruction], dict[int, list[Section]]]:
    """Return the list in which runs of kernels of one region are sections, and the sections of each region."""
    listed: list[SectionIndex | Instruction] = []
    sections: dict[int, list[list[Kernel]]] = {}
    current: int | None = None
    for instruction, label in instructions:
        if not inside(instruction):
            listed.append(instruction)
            current = None
            continue
        assert isinstance(instruction, (Compute, Convert))
        of_region = sections.setdefault(label, [])
        if label != current:
            listed.append(SectionIndex(label, len(of_region)))
            of_region.append([])
        of_region[-1].append(instruction)
        current = label
    return listed, {label: [tuple(section) for section in of_region] for label, of_region in sections.items()}


def _regions(
    program: RankProgram, halves: Sequence[tuple[Sequence[Section], Sequence[Section]]]
) -> tuple[CompileRegion, ...]:
    home: dict[str, tuple[int, int]] = {}  # name -> (region, half)
    for number, both in enumerate(halves):
        for side, sections in enumerate(both):
            home.update({name: (number, side) for section in sections for k in section for name in k.results})
    outside: dict[str, None] = dict.fromkeys((*program.ends, *program.gradients.values()))
    mine = {id(k) for both in halves for sections in both for section in sections for k in section}
    for instruction in (*program.forward, *program.backward):
        if id(instruction) not in mine:
            outside.update(dict.fromkeys(instruction.operands))
    inputs: list[tuple[str, ...]] = []
    late: list[tuple[str, ...]] = []
    for number, both in enumerate(halves):
        names_inside = {name for name, (region, _) in home.items() if region == number}
        read = [dict.fromkeys(n for section in sections for k in section for n in k.operands) for sections in both]
        inputs.append(tuple(name for name in read[0] if name not in names_inside))
        late.append(tuple(name for name in read[1] if name not in names_inside and name not in read[0]))
        outside.update(dict.fromkeys((*inputs[-1], *late[-1])))
    outputs: defaultdict[tuple[int, int], tuple[str, ...]] = defaultdict(tuple)
    for name in home:
        if name in outside:
            outputs[home[name]] += (name,)
    _check_writes(program, home)
    return tuple(
        CompileRegion(tuple(first), tuple(second), inputs[n], late[n], outputs[n, 0], outputs[n, 1])
        for n, (first, second) in enumerate(halves)
    )


def _check_writes(program: RankProgram, home: dict[str, tuple[int, int]]) -> None:
    """Raise BrokenProgram if a kernel overwrites memory that its own region did not allocate."""
    root = memories([*program.forward, *program.backward], (*program.taken, *program.handed))
    for instruction in (*program.forward, *program.backward):
        for name in instruction.writes:
            maker = home.get(root[name])
            if instruction.results and maker != home.get(instruction.results[0], maker):
                raise BrokenProgram(f"{instruction.origin.op} overwrites {name!r} of another region")
