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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardwise.graph.ir import Graph, Op
from shardwise.layouts.mesh import Mesh
from shardwise.layouts.strategy import Strategy
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


def meshes_by_roles(meshes: Sequence[Mesh], of: Sequence[AxisUsage]) -> list[Mesh]:
    """Return the meshes of stages with their axes named by role. Equal meshes get equal names."""
    pairs = list(zip(meshes, of, strict=True))
    named = {mesh: mesh_by_roles(mesh, (usage for other, usage in pairs if other == mesh)) for mesh in {*meshes}}
    return [named[mesh] for mesh in meshes]
