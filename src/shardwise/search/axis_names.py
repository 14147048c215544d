"""Names of mesh axes by role: ``dp``, ``tp``, ``cp``, ``ep``, ``sp``, ``rep``.

A search tries meshes before the roles of their axes are known, and names axes after levels of the cluster
(``search.mesh_shapes``). The roles are read from the plan that was found. In every product with a weight, an axis may
split

``dp``  samples: of what is multiplied by the weight, the first dim that the weight lacks
``cp``  tokens: the second of two dims that the weight lacks, or the rest of the first if they are one dim
``sp``  any other dim that the weight lacks: rows and columns of images
``ep``  the first of three dims of the weight, which then has a matrix for each expert: in a product by expert, or where
        another weight has as many columns or rows, the router
``tp``  any other dim of the weight

An axis is named by its role in all products in which it splits anything, or by all its roles if it has several
(``dp_tp``: samples in some products, weights in others). An axis that splits only lookup tables is named by its role
there, one that splits only operators without weights is ``dp`` or ``sp``, and one that splits no operator is ``rep``:
its devices repeat the work. Axes with the same role are numbered. A mesh that the user named keeps its names. Only
names differ: a plan is listed under the new names, and its search, which has the old ones, is shown under the new ones.

Roles are also the kinds of splits by which a search tells the plainer of two plans that take equally long
(``search.candidates``).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from shardwise.graph.grouped import grouped_mm
from shardwise.graph.ir import Graph, Op
from shardwise.layouts.choice import ByKey
from shardwise.layouts.mesh import Mesh
from shardwise.layouts.strategy import Strategy
from shardwise.rules.rule import OpRule

_ROLES = ("dp", "cp", "sp", "ep", "tp")
_PRODUCT, _TABLE, _OTHER = range(3)  # kinds of operators: roles in the first of them count
_REPEATED = 3  # products of which an axis splits nothing


@dataclass(frozen=True)
class AxisUsage:
    """A graph (a model or a part of it) with the strategies of a plan."""

    graph: Graph
    rules: Mapping[str, OpRule]
    strategies: Mapping[str, Strategy]


def mesh_by_roles(mesh: Mesh, of: Iterable[AxisUsage]) -> tuple[Mesh, int]:
    """Return the mesh with its axes named by their roles in all of these graphs, and the number of kinds of splits:
    different roles in products and lookups, and one more if an axis repeats the work of a product."""
    roles_of: dict[tuple[int, str], set[str]] = defaultdict(set)
    for usage in of:
        for kind, axis, role in _roles(mesh, usage):
            roles_of[kind, axis].add(role)
    new_names, kinds = [], set[str]()
    for name, size in mesh.axes:
        if size == 1:
            new_names.append("dp")
            continue
        parts = mesh.expand(name)
        by_kind = [set().union(*(roles_of[kind, part] for part in parts)) for kind in (_PRODUCT, _TABLE, _OTHER)]
        roles = next(filter(None, by_kind), set())
        new_names.append("_".join(filter(roles.__contains__, _ROLES)) or "rep")
        kinds |= by_kind[_PRODUCT] | by_kind[_TABLE] | set().union(*(roles_of[_REPEATED, part] for part in parts))
    same, so_far = Counter(new_names), Counter[str]()
    names = []
    for name in new_names:
        so_far[name] += 1
        names.append(name if same[name] == 1 else f"{name}{so_far[name]}")
    return Mesh(zip(names, (size for _, size in mesh.axes), strict=True)), len(kinds)


def _roles(mesh: Mesh, usage: AxisUsage) -> Iterator[tuple[int, str, str]]:
    """Yield (kind of operator, sub-axis, role) for everything that the strategies split, and for products that an axis
    repeats."""
    graph = usage.graph
    shapes = {s.value: graph.by_name[s.value].shape for s in graph.sources if s.kind == "parameter"}
    weights = {name for name, shape in shapes.items() if len(shape) > 1}
    routed = {size for shape in shapes.values() if len(shape) == 2 for size in shape}
    for op in graph.ops:
        read, rule, strategy = weights.intersection(op.operands), usage.rules[op.name], usage.strategies[op.name]
        roles: dict[str, str] = {}
        if read and read.issuperset(op.operands):
            sizes = [sum(graph.by_name[name].numel for name in names) for names in (op.operands, op.results)]
            if len(op.operands) > 1 or sizes[1] <= sizes[0]:  # in another dtype, or transposed, not a token per sample
                weights.update(op.results)
        elif read:
            roles = _roles_of_factors(op, read, rule, routed)
        by_expert = op.target == grouped_mm._opoverload
        kind = _PRODUCT if by_expert or all(graph.by_name[n].dtype.is_floating_point for n in op.operands) else _TABLE
        first = next((factors[0] for dims in rule.operands for factors in dims if factors), "")
        for factor, axes in strategy.factors:
            role = roles.get(factor, "sp") if roles else "dp" if factor == first else "sp"
            yield from ((kind if roles else _OTHER, axis, role) for axis in axes)
        if roles and kind == _PRODUCT:
            yield from ((kind, axis, "ep") for axis, choice in strategy.rest if isinstance(choice, ByKey))
            yield from ((_REPEATED, axis, "rep") for axis in mesh.sub_axes if axis not in strategy.choice_of)


def _roles_of_factors(op: Op, weights: set[str], rule: OpRule, routed: set[int]) -> dict[str, str]:
    """Return factor -> role in an operator that is a product with weights or a lookup in them, and nothing in others.
    ``routed``: numbers of columns or rows of matrices, among them those of routers."""
    roles: dict[str, str] = {}
    by_expert = op.target == grouped_mm._opoverload
    for name, dims in zip(op.operands, rule.operands, strict=True):
        if name in weights:
            many = dims[0] if len(dims) == 3 and "conv" not in str(op.target) else ()
            is_experts = by_expert or prod(rule.factor(factor).size for factor in many) in routed
            experts = many if is_experts else ()
            roles.update((factor, "ep" if factor in experts else "tp") for factors in dims for factor in factors)
    if roles.keys() <= {factor for dims in rule.results for factors in dims for factor in factors}:
        return {}  # for example an addition to weights
    for name, dims in zip(op.operands, rule.operands, strict=True):
        others = [factors for factors in dims if not roles.keys() & set(factors)] if name not in weights else []
        for number, factors in enumerate(others):
            for place, factor in enumerate(factors):
                is_samples, is_tokens = (number, place) == (0, 0), number == len(others) - 1 < 2
                roles[factor] = "dp" if is_samples else "cp" if is_tokens else "sp"
    return roles


def meshes_by_roles(meshes: Sequence[Mesh], of: Sequence[AxisUsage]) -> list[Mesh]:
    """Return the meshes of stages with their axes named by role. Equal meshes get equal names."""
    pairs = list(zip(meshes, of, strict=True))
    named = {mesh: mesh_by_roles(mesh, (usage for other, usage in pairs if other == mesh))[0] for mesh in {*meshes}}
    return [named[mesh] for mesh in meshes]
