"""Names of mesh axes by role: ``dp``, ``tp``, ``cp``, ``ep``.

A search tries meshes before the roles of their axes are known, and names axes after levels of the cluster
(``search.mesh_shapes``). The roles are read from the plan that was found. In every product with a weight, an axis may
split

``dp``  samples: of what is multiplied by the weight, the first dim that the weight lacks
``cp``  tokens: the second of two dims that the weight lacks, or the rest of the first if they are one dim
``ep``  the first of three dims of the weight, which then has a matrix for each expert
``tp``  any other dim of the weight

An axis is named by its role in all products in which it splits anything, or by all its roles if it has several
(``dp_tp``: samples in some products, weights in others). An axis that splits only lookup tables is named by its role
there. Axes with the same role are numbered. An axis that splits none of these, or also something else, keeps the name
of its level, and so do all axes of a mesh that the user named. Only names differ: a plan is listed under the new names,
and its search, which has the old ones, is shown under the new names.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from shardwise.graph.ir import Graph, Op
from shardwise.layouts.mesh import Mesh
from shardwise.layouts.renaming import Renaming
from shardwise.layouts.strategy import Strategy
from shardwise.layouts.text import format_move, parse_layout, parse_move
from shardwise.plans.entries import CollectiveEntry, ConversionEntry, SharedEntry, Stage, TensorEntry
from shardwise.rules.rule import OpRule

_ROLES = ("dp", "cp", "ep", "tp")


@dataclass(frozen=True)
class AxisUsage:
    """A graph (a model or a part of it) with the strategies of a plan."""

    graph: Graph
    rules: Mapping[str, OpRule]
    strategies: Mapping[str, Strategy]


def mesh_by_roles(mesh: Mesh, of: Iterable[AxisUsage]) -> Mesh:
    """Return the mesh with its axes named by their roles in all of these graphs."""
    roles_of: dict[bool, dict[str, set[str]]] = {True: defaultdict(set), False: defaultdict(set)}
    for usage in of:
        for is_product, axis, role in _roles(usage):
            roles_of[is_product][axis].add(role)
    new_names = []
    for name, size in mesh.axes:
        parts = mesh.expand(name) if size > 1 else ()
        products, tables = (set().union(*(roles_of[kind][part] for part in parts)) for kind in (True, False))
        roles = products or tables
        new_names.append("_".join(filter(roles.__contains__, _ROLES)) if roles and "other" not in roles else name)
    same, so_far = Counter(new_names), Counter[str]()
    names = []
    for name in new_names:
        so_far[name] += 1
        names.append(name if same[name] == 1 else f"{name}{so_far[name]}")
    if len(set(names)) < len(names):  # a level is already called dp1
        return mesh
    return Mesh(zip(names, (size for _, size in mesh.axes), strict=True))


def _roles(usage: AxisUsage) -> Iterator[tuple[bool, str, str]]:
    """Yield (whether this is a product and no lookup, sub-axis, role) for every operator that reads a weight."""
    graph = usage.graph
    weights = {s.value for s in graph.sources if s.kind == "parameter" and len(graph.by_name[s.value].shape) > 1}
    for op in graph.ops:
        weights_read = weights.intersection(op.operands)
        if weights_read and weights_read.issuperset(op.operands):
            weights.update(op.results)  # a weight in another dtype, or transposed
        elif weights_read:
            is_product = all(graph.by_name[name].dtype.is_floating_point for name in op.operands)
            for axis, role in _roles_in(op, weights_read, usage.rules[op.name], usage.strategies[op.name]):
                yield is_product, axis, role


def _roles_in(op: Op, weights: set[str], rule: OpRule, strategy: Strategy) -> Iterator[tuple[str, str]]:
    """Yield (sub-axis, role) in one operator if it is a product with weights or a lookup in them."""
    roles: dict[str, str] = {}
    for name, dims in zip(op.operands, rule.operands, strict=True):
        if name in weights:
            many = dims[0] if len(dims) == 3 and "conv" not in str(op.target) else ()
            roles.update((factor, "ep" if factor in many else "tp") for factors in dims for factor in factors)
    if roles.keys() <= {factor for dims in rule.results for factors in dims for factor in factors}:
        return  # for example an addition to weights
    for name, dims in zip(op.operands, rule.operands, strict=True):
        others = [factors for factors in dims if not roles.keys() & set(factors)] if name not in weights else []
        for number, factors in enumerate(others):
            for place, factor in enumerate(factors):
                is_samples, is_tokens = (number, place) == (0, 0), number == len(others) - 1 < 2
                roles[factor] = "dp" if is_samples else "cp" if is_tokens else "other"
    for factor, axes in strategy.factors:
        yield from ((axis, roles.get(factor, "other")) for axis in axes)


@dataclass(frozen=True)
class _RenamedEntries:
    """The entries of a plan under new axis names. ``known``: cache from (kind: layout, move or strategy; text) to the
    renamed text, as stages have many texts in common."""

    names: Renaming
    known: dict[tuple[str, str], str] = field(default_factory=dict)

    def stage(self, stage: Stage) -> Stage:

        def tensors(entries: tuple[TensorEntry, ...]) -> tuple[TensorEntry, ...]:
            return tuple(replace(entry, layout=self._layout_text(entry.layout)) for entry in entries)

        return replace(
            stage,
            placement=replace(stage.placement, mesh=self.names.target),
            inputs=tensors(stage.inputs),
            parameters=tuple(replace(entry, layout=self._layout_text(entry.layout)) for entry in stage.parameters),
            buffers=tensors(stage.buffers),
            operators=tuple(
                replace(entry, strategy=self._renamed("strategy", entry.strategy, self._strategy_text))
                for entry in stage.operators
            ),
            conversions=None if stage.conversions is None else tuple(map(self._conversion, stage.conversions)),
            shared=tuple(SharedEntry(entry.name, self._layout_text(entry.layout)) for entry in stage.shared),
            receives=tensors(stage.receives),
            sends=tensors(stage.sends),
        )

    def _conversion(self, entry: ConversionEntry) -> ConversionEntry:
        return replace(
            entry,
            source=self._layout_text(entry.source),
            target=self._layout_text(entry.target),
            forward=tuple(map(self._collective, entry.forward)),
            backward=tuple(map(self._collective, entry.backward)),
            path=tuple(map(self._move_text, entry.path)),
        )

    def _collective(self, entry: CollectiveEntry) -> CollectiveEntry:
        return replace(
            entry, axes=self.names.target.format_axes(self.names.axes(self.names.source.parse_axes(entry.axes)))
        )

    def _renamed(self, kind: str, text: str, renamed: Callable[[str], str]) -> str:
        if (kind, text) not in self.known:
            self.known[kind, text] = renamed(text)
        return self.known[kind, text]

    def _layout_text(self, text: str) -> str:
        return self._renamed("layout", text, self._other_layout)

    def _move_text(self, text: str) -> str:
        return self._renamed("move", text, self._other_move)

    def _strategy_text(self, text: str) -> str:
        strategy = Strategy.parse(text, self.names.source)
        return self.names.strategy(strategy).format(self.names.target)

    def _other_layout(self, text: str) -> str:
        dtype = text[: text.index("[")]
        return dtype + self.names.layout(parse_layout(text, self.names.source)).text

    def _other_move(self, text: str) -> str:
        move = parse_move(text, self.names.source)
        ends = {"source": self.names.layout(move.source), "target": self.names.layout(move.target)}
        return format_move(replace(move, **ends, axes=self.names.axes(move.axes)))


def name_axes_by_role(stages: Sequence[Stage], of: Sequence[AxisUsage]) -> tuple[Stage, ...]:
    """Return the stages with mesh axes named by role. Equal meshes get equal names."""
    renamed_entries: dict[Mesh, _RenamedEntries] = {}
    for mesh in dict.fromkeys(stage.mesh for stage in stages):
        usages = (usage for stage, usage in zip(stages, of, strict=True) if stage.mesh == mesh)
        renamed_entries[mesh] = _RenamedEntries(Renaming(mesh, mesh_by_roles(mesh, usages)))
    return tuple(renamed_entries[stage.mesh].stage(stage) for stage in stages)
