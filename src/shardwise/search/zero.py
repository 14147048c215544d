"""Parameters, gradients and optimizer states split over the devices that would hold copies of them (ZeRO, Rajbhandari
et al. 2020, arXiv:1910.02054; FSDP, Zhao et al. 2023, arXiv:2304.11277).

Stages are only storage layouts and lifetimes. A parameter is stored in parts along the axes on which its operators need
it whole. It is all-gathered for them, and its gradient is reduce-scattered. Up to stage 2 the gathered parameter is
held from forward to backward; stage 3 reshards it after use and gathers it again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod

from shardwise.errors import LayoutError, ShardwiseError
from shardwise.graph.ir import Graph, Ref
from shardwise.layouts.choice import INVARIANT, REPLICATED, ShardPosition, ShardPositions, Where, layout_of, where_of
from shardwise.layouts.layout import Layout
from shardwise.layouts.mesh import Mesh
from shardwise.layouts.strategy import Strategy
from shardwise.programs.builder import Choice
from shardwise.programs.spmd import SpmdProgram
from shardwise.rules.rule import OpRule
from shardwise.search.memory_policy import ReshardMode


@dataclass(frozen=True, slots=True)
class Zero:
    """ZeRO settings: how parameters, gradients and optimizer states are split over devices.

    Attributes:
        stage: 1, 2 or 3. With one micro-batch 1 and 2 are the same; with several, 1 gathers parameters once and
            reduce-scatters whole gradients once, 2 does so in every micro-batch.
        whole_below: Parameters with fewer elements stay whole.
        over: Mesh axes; by default all on which a parameter would be copied (some of them: hybrid sharding, HSDP).

    Raises:
        ShardwiseError: A value is none of these.
    """

    stage: int = 3
    whole_below: int = 0
    over: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if type(self.stage) is not int or self.stage not in (1, 2, 3):
            raise ShardwiseError(f"zero is {self.stage!r}", fix="1, 2 or 3; None: no sharding")
        if isinstance(self.whole_below, bool) or not isinstance(self.whole_below, int) or self.whole_below < 0:
            raise ShardwiseError(f"whole_below is {self.whole_below!r}", fix="a number of elements from 0")

    @property
    def reshard_mode(self) -> ReshardMode:
        """Return the reshard-after-forward mode of gathered parameters."""
        modes: dict[int, ReshardMode] = {1: "once", 2: "held", 3: "again"}
        return modes[self.stage]

    @staticmethod
    def of(zero: int | Zero | None) -> Zero | None:
        return zero if zero is None or isinstance(zero, Zero) else Zero(zero)


def shard_storage(choice: Choice, spmd: SpmdProgram, zero: Zero) -> Choice:
    """Return the choice with parameters stored in parts. ``spmd``: its program, whose conversions show the axes along
    which a parameter is copied. Raises LayoutError for an axis that the mesh does not have."""
    mesh = spmd.mesh
    over = set(mesh.sub_axes)
    if zero.over is not None:
        unknown = [axis for axis in zero.over if axis not in dict(mesh.axes) and axis not in mesh.sub_axes]
        if unknown:
            raise LayoutError(
                f"zero cannot split over {unknown[0]!r}", fix=f"axes of the mesh: {', '.join(dict(mesh.axes))}"
            )
        over = {part for axis in zero.over for part in (mesh.expand(axis) if axis in dict(mesh.axes) else (axis,))}
    copied = _copied(spmd)
    everywhere = set().union(*copied.values())
    sources = dict(choice.sources)
    for source in spmd.graph.sources:
        if source.kind != "parameter":
            continue
        name, layout = source.value, sources[source.value]
        split = {axis for dim in layout.dims for atom in dim for axis in atom.axes}
        # Frozen parameters, and those only used without gradients (a teacher), have no gradient to sum: they are copied
        # where the others are.
        along = copied.get(name, set()) if _may_have_gradient(spmd.graph, name) else everywhere - split
        axes = [axis for axis in mesh.sub_axes if axis in along & over]
        if axes and not layout.windows and prod(layout.shape) >= zero.whole_below:
            sources[name] = _split(layout, axes, mesh)
    return replace(choice, sources=sources)


def reduce_at_parameter(choice: Choice, graph: Graph, rules: Mapping[str, OpRule], mesh: Mesh) -> Choice:
    """Return the choice in which values made of parameters alone (a transposed weight, an expert's rows) pass partial
    gradients on to them. They are summed at the parameter, which is what can be split over devices. This applies where
    all readers of such a value do different work along an axis."""
    derived = {source.value for source in graph.sources if source.kind == "parameter"}
    fixed = derived | {source.value for source in graph.sources if source.kind in ("buffer", "constant")}
    views = []
    for op in graph.ops:
        if fixed.issuperset(op.operands) and derived.intersection(op.operands):
            if any(graph.by_name[name].requires_grad for name in op.results):
                views.append(op)
            derived.update(op.results)
            fixed.update(op.results)
    returned = {out.name for out in graph.outputs if isinstance(out, Ref)} | {value for _, value in graph.mutations}
    strategies = dict(choice.strategies)
    for op in reversed(views):
        readers = {reader.name: reader for name in op.results for reader in graph.consumers[name]}
        if not readers or returned.intersection(op.results) or op.name not in strategies:
            continue
        places = {name: ShardPositions.of(rules[name]) for name in readers}
        by_axis = strategies[op.name].choice_of
        summed = {
            axis: REPLICATED
            for axis in mesh.sub_axes
            if by_axis.get(axis, INVARIANT) == INVARIANT
            and all(
                places[reader.name].operand(i, strategies[reader.name].choice_of.get(axis, INVARIANT)) == "R"
                for reader in readers.values()
                for i, name in enumerate(reader.operands)
                if name in op.results
            )
        }
        if summed:
            strategies[op.name] = Strategy.of({**by_axis, **summed})
    return replace(choice, strategies=strategies)


def _may_have_gradient(graph: Graph, parameter: str) -> bool:
    """Return whether a parameter is trained, and nothing rules out that a gradient reaches it."""
    results = [name for op in graph.consumers[parameter] for name in op.results]
    return graph.by_name[parameter].requires_grad and (
        not results or any(graph.by_name[name].requires_grad for name in results)
    )


def _copied(spmd: SpmdProgram) -> dict[str, set[str]]:
    """Return, for each parameter, the axes along which it is stored whole, and its gradient is summed."""
    parameters = {source.value for source in spmd.graph.sources if source.kind == "parameter"}
    whole_axes: dict[str, set[str]] = {}
    for conversion in spmd.conversions:
        if conversion.origin not in parameters:
            continue
        stored, used = spmd.layouts[conversion.origin], dict(conversion.target.states)
        split = {axis for dim in stored.dims for atom in dim for axis in atom.axes}
        axes = {axis for axis, state in used.items() if state == "R" and axis not in split}
        whole_axes.setdefault(conversion.origin, set()).update(axes)
    return whole_axes


def _split(layout: Layout, axes: Iterable[str], mesh: Mesh) -> Layout:
    """Return the layout split over further axes: all on one atom if one divides, the outermost first."""
    where: dict[str, Where] = dict(where_of(layout))
    places = [(d, i) for d, dim in enumerate(layout.dims) for i in range(len(dim))]
    left = {(d, i): layout.dims[d][i].size // mesh.size_of(layout.dims[d][i].axes) for d, i in places}
    together = list(axes)
    count = mesh.size_of(together)
    target = next((place for place in places if left[place] % count == 0), None)
    for axis in together:
        size = mesh.sizes[axis]
        at = target or next((place for place in places if left[place] % size == 0 and left[place]), None)
        at = at or next((place for place in places if left[place] > size), None)
        if at is None:
            continue
        exact = left[at] % size == 0
        left[at] = left[at] // size if exact else 1
        del where[axis]  # axes on the same atom are major first, in the order of insertion
        where[axis] = ShardPosition.of(at[0], layout.atoms[at[0]], at[1])
    return layout_of(where, layout.atoms, mesh)
