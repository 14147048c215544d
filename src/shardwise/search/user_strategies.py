"""The strategies of the user, as texts (``"m@dp n@tp"``) or split counts (``((2, 4), (4, 1))``), mapped to sub-axes and
atoms.

Split counts, one per dim of every tensor operand, are mapped in the order of the operator's factors (first appearance
in the operands): each factor takes, major first, the earliest free sub-axes of the mesh whose sizes multiply to its
count. What is left of the mesh repeats the work. ``()`` for an operand leaves it to the others: it gets the counts of
the factors that it shares with them. On ``Mesh(dp=2, tp=4)`` the counts ``((2, 4), (4, 1))`` of a matrix product are
``m@dp k@tp``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from itertools import combinations
from math import gcd, prod
from typing import Any

from shardwise.errors import LayoutError, ShardwiseError, problem
from shardwise.graph.disjoint import DisjointSets
from shardwise.graph.ir import Graph, Op
from shardwise.layouts.choice import BY_KEY, INVARIANT, AxisChoice, ShardPositions, Split
from shardwise.layouts.mesh import Mesh
from shardwise.layouts.strategy import parse_choices
from shardwise.rules.rule import FactorKind, OpRule, base_name

SplitCounts = tuple[tuple[int, ...], ...]


def choices_for(
    op: Op,
    rule: OpRule,
    divided: OpRule,
    strategy: str | SplitCounts,
    mesh: Mesh,
    graph: Graph,
    blockers: Mapping[str, int],
) -> dict[str, AxisChoice]:
    """Return the choice of each sub-axis in the divided rule of one operator. ``blockers``: divided factor -> how many
    operators keep it whole.

    A text fixes the axes it names, split counts fix them all. Raises LayoutError naming the operator.
    """
    try:
        if isinstance(strategy, str):
            choices = parse_choices(strategy, mesh)
        else:
            shapes = [graph.by_name[name].shape for name in op.operands]
            split = axes_of_counts(_factor_counts(rule, strategy, shapes, mesh), mesh)
            choices = {axis: Split(split[axis]) if axis in split else INVARIANT for axis in mesh.sub_axes}
        return _divide_choices(rule, divided, choices, mesh, blockers)
    except ShardwiseError as error:
        text = problem(str(error), op=op.name, source=op.source, fix=splittable(rule), section="strategy-names")
        raise type(error)(text) from error


def splittable(rule: OpRule) -> str:
    """Describe, for messages, what a strategy of the rule may name."""
    can = [f.name for f in rule.factors if f.kind != "whole"]
    instead = "".join(f"; or {name}" for name, _ in rule.variants)
    return f"the rule is {rule}; factors that can be split: {', '.join(can) or 'none'}{instead}"


def _factor_counts(rule: OpRule, counts: SplitCounts, shapes: Sequence[tuple[int, ...]], mesh: Mesh) -> dict[str, int]:
    """Return the count per factor from split counts per operand dim, with the specification's checks in its order."""
    if len(counts) != len(shapes):
        hint = ""
        if len(shapes) == 1 and all(isinstance(c, int) for c in counts):
            hint = f"; write ({counts!r},)"
        raise LayoutError(
            f"{len(counts)} strategies for {len(shapes)} tensor operands of shapes {_shapes(shapes)}{hint}"
        )
    for i, (splits, shape) in enumerate(zip(counts, shapes, strict=True)):
        if not isinstance(splits, tuple):
            raise LayoutError(
                f"the strategy of operand {i} is {splits!r}: it needs one split count per dim of {list(shape)}"
            )
        if splits and len(splits) != len(shape):
            raise LayoutError(f"{len(splits)} split counts {splits} for operand {i} of {len(shape)} dims {list(shape)}")
    for i, (splits, shape) in enumerate(zip(counts, shapes, strict=True)):
        for d, count in enumerate(splits):
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise LayoutError(
                    f"split count {count!r} of dim {d} of operand {i} {list(shape)} must be a whole number from 1"
                )
            if count > shape[d]:
                raise LayoutError(f"dim {d} of operand {i} has {shape[d]} elements: it cannot be split {count} ways")
    shares: dict[str, int] = {}
    seen_in: dict[str, tuple[int, int]] = {}
    sizes = {factor.name: factor for factor in rule.factors}
    through = {name: window.factor for name, window in rule.windows}
    for i, (splits, dims) in enumerate(zip(counts, rule.operands, strict=True)):
        for d, (count, factors) in enumerate(zip(splits, dims, strict=bool(splits))):
            left = count
            for position, own_name in enumerate(factors):
                name = through.get(own_name, own_name)
                inside = gcd(left, sizes[own_name].size, sizes[name].size)  # of a concatenation, one operand: 1
                share = left if position == len(factors) - 1 else inside
                if sizes[name].kind == "whole":
                    share = 1 if position < len(factors) - 1 else left
                left //= share
                if share > 1 and sizes[name].kind == "whole":
                    raise LayoutError(
                        f"dim {d} of operand {i} {list(shapes[i])} cannot be split ({count} ways asked for)"
                    )
                if shares.setdefault(name, share) != share:
                    j, e = seen_in[name]
                    raise LayoutError(
                        f"dim {d} of operand {i} is split {share} ways and dim {e} of operand {j} {shares[name]} ways, "
                        f"but both are factor {name} of {rule}"
                    )
                seen_in.setdefault(name, (i, d))
            if not factors and count > 1:
                raise LayoutError(
                    f"dim {d} of operand {i} {list(shapes[i])} is broadcast: it cannot be split {count} ways"
                )
    needed = prod(shares.values())
    if needed > mesh.num_devices or mesh.num_devices % needed:
        why = "there are only" if needed > mesh.num_devices else "it does not divide the"
        product = " x ".join(f"{count} ({name})" for name, count in shares.items() if count > 1)
        raise LayoutError(f"the strategy needs {product} = {needed} devices: {why} {mesh.num_devices} of {mesh}")
    return shares


def _shapes(shapes: Sequence[tuple[int, ...]]) -> str:
    return ", ".join(str(list(shape)) for shape in shapes)


def axes_of_counts(counts: Mapping[str, int], mesh: Mesh) -> dict[str, str]:
    """Return the factor that each sub-axis splits, from the count per factor; sub-axes of the others are left out."""
    free = list(mesh.sub_axes)
    factor_of: dict[str, str] = {}
    for name, count in counts.items():
        if count == 1:
            continue
        for length in range(1, len(free) + 1):
            fitting = next((c for c in combinations(free, length) if mesh.size_of(c) == count), None)
            if fitting:
                break
        else:
            raise LayoutError(
                f"factor {name}: {count} is no product of the free sub-axes {[mesh.sizes[a] for a in free]} of {mesh}"
            )
        for axis in fitting:
            factor_of[axis] = name
            free.remove(axis)
    return {axis: factor_of[axis] for axis in mesh.sub_axes if axis in factor_of}


def _divide_choices(
    rule: OpRule, divided: OpRule, undivided: Mapping[str, AxisChoice], mesh: Mesh, blockers: Mapping[str, int]
) -> dict[str, AxisChoice]:
    """Return choices of the divided factors, from choices of the undivided rule.

    Each axis goes to a part that no other operator must keep whole (or the fewest), there to the first that it divides;
    a size that does not divide is split unevenly: four heads over three devices, rather than query, key and value
    apart.
    """
    parts: dict[str, list[str]] = {}
    for factor in divided.factors:
        parts.setdefault(base_name(factor.name), []).append(factor.name)
    left = {factor.name: factor.size for factor in divided.factors}
    factor_names = {factor.name for factor in rule.factors} | set(left)
    through = {name: window.factor for name, window in rule.windows}
    choices: dict[str, AxisChoice] = {}
    for axis, choice in undivided.items():
        if choice == BY_KEY and divided.keyed is None:
            raise LayoutError(f"K@{axis}: the rows of the operator follow no keys; those of products by expert do")
        if not isinstance(choice, Split):
            choices[axis] = choice
            continue
        name = through.get(choice.factor, choice.factor)
        if name not in factor_names:
            near = get_close_matches(name, factor_names, 1)
            raise LayoutError(f"the operator has no factor {name!r}" + (f", but {near[0]!r}" if near else ""))
        if divided.factor(parts.get(name, [name])[0]).kind == "whole":
            raise LayoutError(f"factor {name} cannot be split")
        open_parts = [part for part in parts.get(name, ()) if divided.factor(part).kind != "whole"]
        candidates = [name] if name in left else sorted(open_parts, key=lambda part: blockers.get(part, 0))
        size = mesh.sizes[axis]
        part = min(
            (part for part in candidates if left[part] % size == 0 or left[part] > size),
            key=lambda part: (blockers.get(part, 0), left[part] % size != 0),
            default=candidates[0],
        )
        left[part] = left[part] // size if left[part] % size == 0 else 1
        choices[axis] = Split(part)
    return choices


def num_blockers(
    graph: Graph, rules: Mapping[str, OpRule], kinds: tuple[FactorKind, ...] = ("whole",)
) -> dict[tuple[str, str], int]:
    """Return, for each (op, divided factor), in how many operators the same atom is a factor of one of these kinds: by
    default, must be kept whole. Atoms are followed through all operators."""
    atoms: DisjointSets[tuple[str, object]] = DisjointSets()
    whole: list[tuple[str, str]] = []
    for op in graph.ops:
        places = ShardPositions.of(rules[op.name])
        for factor in rules[op.name].factors:
            node = (op.name, factor.name)
            if factor.kind in kinds:
                whole.append(node)
            if factor.kind == "whole":
                continue
            for names, sides in ((op.operands, places.operands), (op.results, places.results)):
                for value, place_of in zip(names, sides, strict=True):
                    if factor.name in place_of:
                        atoms.join(node, (value, place_of[factor.name]))
    count: dict[Any, int] = {}
    for op_name, factor_name in whole:
        op, places = graph.op_by_name[op_name], ShardPositions.of(rules[op_name])
        touched = set()
        for names, sides in ((op.operands, places.operands), (op.results, places.results)):
            for value, place_of in zip(names, sides, strict=True):
                if factor_name in place_of:
                    touched.add(atoms.root((value, place_of[factor_name])))
        for root in touched:
            count[root] = count.get(root, 0) + 1
    return {
        (op.name, factor.name): count.get(atoms.root((op.name, factor.name)), 0)
        for op in graph.ops
        for factor in rules[op.name].factors
    }
