"""The entries of a plan as texts and numbers: tensors, operators, conversions, and the stage that they belong to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from math import inf

from shardwise.costs.cluster import Cluster
from shardwise.costs.cluster_file import format_cluster
from shardwise.errors import ShardwiseError, problem
from shardwise.layouts.layout import Layout
from shardwise.layouts.mesh import Mesh
from shardwise.layouts.placement import Placement
from shardwise.layouts.strategy import Strategy
from shardwise.layouts.text import parse_layout, parse_move
from shardwise.plans.quantities import format_bytes
from shardwise.untrusted_text import shorten_repr

NO_LIMIT = "none"


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A parameter, buffer or input: ``dtype`` and global ``shape``, and its layout as text."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    layout: str


@dataclass(frozen=True, slots=True)
class ParameterEntry(TensorEntry):
    """A parameter. ``again``: it is resharded after forward and gathered again in backward; ``once``: a step of several
    micro-batches gathers it once, and reduces its gradient once."""

    again: bool = False
    once: bool = False


@dataclass(frozen=True, slots=True)
class OperatorEntry:
    """An operator: its target, its strategy, and, for the reader, its rule and its line of the model. ``again``:
    backward recomputes its results; ``offloaded``: saved results wait for backward in host memory."""

    name: str
    target: str
    rule: str
    strategy: str
    source: str
    again: bool = False
    offloaded: bool = False

    @property
    def backward(self) -> str:
        """Return as text how backward gets its results; empty if they are kept."""
        return " and ".join(["again in backward"] * self.again + ["waits on the host"] * self.offloaded)


@dataclass(frozen=True, slots=True)
class CollectiveEntry:
    """A collective. ``num_bytes``: the whole message on the busiest rank (the gathered tensor of an all_gather, the
    input of the others)."""

    kind: str
    axes: str
    num_bytes: int

    def __str__(self) -> str:
        return f"{self.kind}({self.axes.strip('()')}, {format_bytes(self.num_bytes)})"


@dataclass(frozen=True, slots=True)
class ConversionEntry:
    """A conversion of a value from one layout to another, first needed by ``op`` (empty: delivered to the user).

    ``value``: the parameter, buffer or input, or the operator that computes it. ``backward`` is in the order of
    execution. Conversions of the same ``bucket`` (other than 0) are adjacent and share their messages. ``overlaps``:
    its messages leave before operators that do not need them, and arrive after (those of parameters). ``path``: its
    moves as texts (``layouts.text.format_move``). ``again``: the converted value is not
    kept, and backward converts again (a parameter is gathered again).
    """

    value: str
    op: str
    source: str
    target: str
    forward: tuple[CollectiveEntry, ...]
    backward: tuple[CollectiveEntry, ...]
    bucket: int
    overlaps: bool = False
    path: tuple[str, ...] = ()
    again: bool = False

    def __str__(self) -> str:
        return f"{self.value}: {self.source} -> {self.target}    {self.communication}"

    @property
    def communication(self) -> str:
        """Return the forward and backward collectives as text."""
        sides = (" ".join(map(str, side)) or "none" for side in (self.forward, self.backward))
        text = " / ".join(sides) if self.forward or self.backward else "no communication"
        return f"{text}, again in backward" if self.again else text


@dataclass(frozen=True, slots=True)
class SharedEntry:
    """A value that all its consumers convert from one layout. ``name``: as in ``ConversionEntry.value``."""

    name: str
    layout: str


@dataclass(frozen=True, slots=True)
class PricingEntry:
    """The prices of a plan: the cluster as TOML, and the mesh axes whose parts are treated differently. The program
    does not depend on it. ``compute``, ``parameter``, ``reduce``: empty: the precision is the plan's. ``limit``: the
    bytes that the tensors of a device may take, as text, if not what the devices have (``NO_LIMIT``: none)."""

    cluster: str
    compute: str
    parameter: str
    reduce: str
    separate: tuple[str, ...]
    limit: str = ""

    @staticmethod
    def of(cluster: Cluster, memory_bytes: float | None, separate: tuple[str, ...] = ()) -> PricingEntry:
        """Return the entry of a cluster. ``memory_bytes``: the limit, if one was given."""
        limit = "" if memory_bytes is None else NO_LIMIT if memory_bytes == inf else format_bytes(memory_bytes)
        return PricingEntry(format_cluster(cluster), "", "", "", separate, limit)


@dataclass(frozen=True)
class Stage:
    """The part of a plan that runs on one group of ranks. ``operators`` are in execution order; ``shared`` belongs to a
    stage that was chosen by price. ``conversions``: None if the stage was edited by hand; they are derived when the
    plan is used. ``receives``, ``sends``: values that a pipeline stage gets from the previous stage and sends to the
    next, by their names in the graph, in the layouts in which they cross."""

    placement: Placement
    inputs: tuple[TensorEntry, ...]
    parameters: tuple[ParameterEntry, ...]
    buffers: tuple[TensorEntry, ...]
    operators: tuple[OperatorEntry, ...]
    conversions: tuple[ConversionEntry, ...] | None
    shared: tuple[SharedEntry, ...] = ()
    receives: tuple[TensorEntry, ...] = ()
    sends: tuple[TensorEntry, ...] = ()

    @property
    def mesh(self) -> Mesh:
        return self.placement.mesh

    @cached_property
    def strategies(self) -> dict[str, str]:
        return {entry.name: entry.strategy for entry in self.operators}

    @cached_property
    def layouts(self) -> dict[str, Layout]:
        """Return the layout of each parameter, buffer, input or received value."""
        entries = (*self.inputs, *self.parameters, *self.buffers, *self.receives)
        return {entry.name: parse_layout(entry.layout, self.mesh) for entry in entries}

    def collectives(self, *, backward: bool = False) -> Iterator[CollectiveEntry]:
        """Yield all collectives of a forward pass in order (or of a backward pass, newest conversion first). The
        conversions of a bucket share one collective."""
        entries = self.conversions or ()
        ordered = reversed(entries) if backward else entries
        for _, together in groupby(enumerate(ordered), lambda pair: pair[1].bucket or -pair[0] - 1):
            members = [entry for _, entry in together]
            directions = [[entry.backward if backward else entry.forward for entry in members]]
            if backward and members[0].again:
                directions.insert(0, [entry.forward for entry in members])
            for sides in directions:
                for same in zip(*sides, strict=True):
                    yield replace(same[0], num_bytes=sum(entry.num_bytes for entry in same))

    def faults(self) -> Iterator[str]:
        """Yield what does not fit the mesh or the tensor: layouts, strategies, paths."""
        for kind, entries in (
            ("input", self.inputs),
            ("parameter", self.parameters),
            ("buffer", self.buffers),
            ("received value", self.receives),
            ("sent value", self.sends),
        ):
            for entry in entries:
                fault = _layout_fault(entry, kind, self.mesh)
                if fault:
                    yield problem(fault, op=f"{kind} {entry.name}")
        for shared in self.shared:
            try:
                parse_layout(shared.layout, self.mesh)
            except ShardwiseError as error:
                yield problem(f"layout {shorten_repr(shared.layout)}: {error}", op=f"shared {shared.name}")
        for operator in self.operators:
            try:
                Strategy.parse(operator.strategy, self.mesh)
            except ShardwiseError as error:
                yield problem(str(error), op=operator.name, source=operator.source, fix=f"the rule is {operator.rule}")
        for conversion in self.conversions or ():
            fault = _path_fault(conversion, self.mesh)
            if fault:
                yield problem(fault, op=f"conversion of {conversion.value} for {conversion.op or 'the user'}")
        for number, together in groupby(self.conversions or (), lambda entry: entry.bucket):
            members = list(together)
            sides = {(len(entry.forward), len(entry.backward)) for entry in members}
            if number and len(sides) > 1:
                yield f"bucket {number} has conversions with different numbers of collectives"
            if number and len({entry.again for entry in members}) > 1:
                yield f"bucket {number} mixes conversions that backward repeats with others"


def _layout_fault(entry: TensorEntry, kind: str, mesh: Mesh) -> str:
    try:
        layout = parse_layout(entry.layout, mesh)
    except ShardwiseError as error:
        return f"layout {shorten_repr(entry.layout)}: {error}"
    if layout.shape != entry.shape:
        return f"layout {entry.layout[:60]} has shape {list(layout.shape)}, the tensor {list(entry.shape)}"
    if any(kind == "input" or not cut.tile(layout.dims[cut.dim][cut.atom].size) for cut in layout.windows):
        whose = "inputs are split evenly" if kind == "input" else "the parts of a tensor follow one another"
        return f"{entry.layout}: {whose}, and every row is on one device"
    if any(state != "I" for _, state in layout.states):
        return f"{entry.layout}: {kind}s are sharded or whole (invariant), never replicated or partial"
    return ""


def _path_fault(entry: ConversionEntry, mesh: Mesh) -> str:
    try:
        moves = [parse_move(text, mesh) for text in entry.path]
        stations = [parse_layout(entry.source, mesh)]
        for move in moves:
            stations += [move.source, move.target]
        stations.append(parse_layout(entry.target, mesh))
    except ShardwiseError as error:
        return f"from {shorten_repr(entry.source)} to {shorten_repr(entry.target)}: {error}"
    for before, after in zip(stations[::2], stations[1::2], strict=True):
        if before.canonical() != after.canonical():
            return f"the path from {entry.source} to {entry.target} breaks between {before} and {after}"
    return ""
