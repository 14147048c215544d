"""From rule templates and rule functions to the rule of one op: names, sizes and checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch._ops import OpOverload

from shardwise.errors import LayoutError, NotationError, problem
from shardwise.graph.ir import Graph, Op
from shardwise.rules.notation import ELLIPSIS, Pattern, format_dims, parse_rule
from shardwise.rules.rule import Dims, Factor, FactorKind, Localize, Lowering, OpRule, Window

Linear = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class RuleTemplate:
    """One entry of a rule table, before sizes are known: the notation and the kind of each factor.

    ``kinds``: factors that are not parallel. The other fields are those of ``OpRule``.
    """

    pattern: Pattern
    kinds: Mapping[str, FactorKind] = field(default_factory=dict)
    linear: Linear = ()
    localize: Localize | None = None
    lowering: Lowering | None = None


RuleFunction = Callable[[Op, Graph], OpRule | None]
RuleTable = Mapping[OpOverload, RuleTemplate | RuleFunction]


def rule(
    text: str,
    *,
    reduction: Mapping[str, FactorKind] | None = None,
    lowered: Sequence[str] = (),
    whole: Sequence[str] = (),
    linear: Linear = (),
    localize: Localize | None = None,
    lowering: Lowering | None = None,
) -> RuleTemplate:
    """Return a rule template: ``rule("m k, k n -> m n", reduction={"k": "sum"}, linear=((0,), (1,)))``.

    ``shardwise.rules.custom.rule`` documents the arguments. A product also needs its FLOPs in ``costs/flops.py``.
    Raises NotationError if the text does not parse, or if a keyword names a factor that the text lacks.
    """
    kinds: dict[str, FactorKind] = dict(reduction or {})
    kinds.update(dict.fromkeys(lowered, "lowered"))
    kinds.update(dict.fromkeys(whole, "whole"))
    pattern = parse_rule(text)
    names = {name for dims in pattern.operands + pattern.results for dim in dims for name in dim}
    if not names >= kinds.keys():
        raise NotationError(f"{text!r} has no factor {', '.join(sorted(kinds.keys() - names))}")
    return RuleTemplate(pattern, kinds, linear, localize, lowering)


def bind(template: RuleTemplate, op: Op, graph: Graph, sizes: Mapping[str, int] | None = None) -> OpRule:
    """Return the template with the sizes of ``op``. Raises LayoutError when a tensor does not fit the pattern."""
    pattern = template.pattern
    shapes = [graph.by_name[name].shape for name in (*op.operands, *op.results)]
    tensors = (*pattern.operands, *pattern.results)
    if len(op.operands) != len(pattern.operands) or len(op.results) != len(pattern.results):
        counts = f"{len(op.operands)} operands and {len(op.results)} results"
        raise LayoutError(f"{op.target} has {counts}: its rule is {pattern}", op=op.name, source=op.source)
    leading = [
        len(shape) - len(dims) + 1 for dims, shape in zip(tensors, shapes, strict=True) if (ELLIPSIS,) in dims[:1]
    ]
    names = leading_names(leading[0]) if leading and leading[0] >= 0 else ()

    def expand(dims: Dims) -> Dims:
        return tuple((name,) for name in names) + dims[1:] if dims[:1] == ((ELLIPSIS,),) else dims

    return build(
        op,
        graph,
        [expand(dims) for dims in pattern.operands],
        [expand(dims) for dims in pattern.results],
        kinds=template.kinds,
        sizes=sizes,
        linear=template.linear,
        localize=template.localize,
        lowering=template.lowering,
    )


def leading_names(count: int) -> tuple[str, ...]:
    """Return names for leading (batch) dims: ``b``, or ``b0 b1 ...``."""
    return ("b",) if count == 1 else tuple(f"b{i}" for i in range(count))


def dim_names(count: int) -> tuple[str, ...]:
    """Return names for dims that have no role: ``d0 d1 ...``."""
    return tuple(f"d{i}" for i in range(count))


def rank_of(op: Op, graph: Graph) -> int:
    """Return the number of dims of the first operand."""
    return len(graph.by_name[op.operands[0]].shape)


def with_dim(names: Sequence[str], place: int, *factors: str) -> Dims:
    """Return the dims of a tensor with one factor per dim, but for one dim, which has these factors."""
    return tuple(factors if i == place else (name,) for i, name in enumerate(names))


def without_dim(names: Sequence[str], place: int) -> Dims:
    """Return the dims of a tensor with one factor per dim, without one of them."""
    return single([name for i, name in enumerate(names) if i != place])


def single(names: Sequence[str]) -> Dims:
    """Return the dims of a tensor with one factor per dim."""
    return tuple((name,) for name in names)


def build(
    op: Op,
    graph: Graph,
    operands: Sequence[Dims],
    results: Sequence[Dims],
    *,
    kinds: Mapping[str, FactorKind] | None = None,
    sizes: Mapping[str, int] | None = None,
    linear: Linear = (),
    localize: Localize | None = None,
    lowering: Lowering | None = None,
    windows: Mapping[str, Window] | None = None,
) -> OpRule:
    """Return the rule of ``op``: solve the factor sizes from the shapes, and check every dim against them.

    A sum over booleans becomes ``whole``, because booleans cannot be added.

    Args:
        op: The operator.
        graph: Its graph, which has the shapes and dtypes.
        operands: The factors of each operand, per dim.
        results: The factors of each result, per dim.
        kinds: The kinds of factors that are not parallel. Factors that do not appear are ignored.
        sizes: The sizes of factors that no shape determines.
        linear: As in ``OpRule``.
        localize: As in ``OpRule``.
        lowering: As in ``OpRule``.
        windows: Factors of operands that are read through windows. Their kind is ``whole``.

    Raises:
        LayoutError: A shape does not fit, or a factor's kind contradicts the results that have it.
    """
    operands, results = tuple(operands), tuple(results)
    tensors = list(zip((*op.operands, *op.results), (*operands, *results), strict=True))
    factor_sizes = _solve(op, graph, tensors, dict(sizes or {}))
    booleans = any(graph.by_name[name].dtype == torch.bool for name in op.results)

    def kind(name: str) -> FactorKind:
        factor_kind = "whole" if name in (windows or {}) else (kinds or {}).get(name, "parallel")
        return "whole" if factor_kind == "sum" and booleans else factor_kind

    factors = tuple(
        Factor(name, factor_sizes[name], kind(name))
        for name in dict.fromkeys(name for _, dims in tensors for dim in dims for name in dim)
    )
    for factor in factors:
        nonempty = [dims for name, dims in zip(op.results, results, strict=True) if graph.by_name[name].numel]
        places = [any(factor.name in dim for dim in dims) for dims in nonempty or results]
        fault = kind_fault(factor.name, factor.kind, places, lowering)
        if fault:
            raise LayoutError(f"{op.target}: {fault}", op=op.name, source=op.source)
    through = tuple((windows or {}).items())
    return OpRule(factors, operands, results, _additive(op, graph, linear), localize, lowering, through)


def kind_fault(name: str, kind: FactorKind, in_results: Sequence[bool], lowering: Lowering | None) -> str:
    """Return why a factor cannot have its kind, or "". ``in_results``: per result, whether it has the factor."""
    if kind == "parallel" and not all(in_results):
        return f'{name} is parallel but not in all results: declare reduction={{"{name}": "sum"}}, lowered or whole'
    if kind in ("sum", "max", "min", "any") and any(in_results):
        return f"{name} is reduced ({kind}) but in a result"
    if kind == "lowered" and lowering is None:
        return f"{name} is lowered, but there is no lowering"
    return ""


def _solve(op: Op, graph: Graph, tensors: Sequence[tuple[str, Dims]], factor_sizes: dict[str, int]) -> dict[str, int]:
    dims_left: list[tuple[str, int, tuple[str, ...], int]] = []
    for name, dims in tensors:
        shape = graph.by_name[name].shape
        if len(shape) != len(dims):
            raise LayoutError(_misfit(op, name, shape, dims, f"{len(shape)} dims where the rule has {len(dims)}"))
        assert len({f for dim in dims for f in dim}) == sum(map(len, dims)), f"{op.target}: a factor repeats in {dims}"
        dims_left += [(name, i, dim, size) for i, (dim, size) in enumerate(zip(dims, shape, strict=True))]
    shapes = dict(tensors)
    while dims_left:
        later = []
        for name, i, dim, size in dims_left:
            unknown = [factor for factor in dim if factor not in factor_sizes]
            if len(unknown) > 1:
                later.append((name, i, dim, size))
                continue
            rest = prod(factor_sizes[factor] for factor in dim if factor in factor_sizes)
            fits = (rest > 0 and size % rest == 0) if unknown else rest == size
            if not fits:
                sizes = " ".join(f"{factor}={factor_sizes[factor]}" for factor in dim if factor in factor_sizes)
                what = f"dim {i} has size {size}, the rule needs {sizes or '1'}"
                raise LayoutError(_misfit(op, name, graph.by_name[name].shape, shapes[name], what))
            if unknown:
                factor_sizes[unknown[0]] = size // rest
        assert len(later) < len(dims_left), (
            f"{op.target}: sizes of {[dim for _, _, dim, _ in later]} are not determined"
        )
        dims_left = later
    return factor_sizes


def _misfit(op: Op, name: str, shape: Sequence[int], dims: Dims, what: str) -> str:
    text = f"{name} {list(shape)} does not fit {format_dims(dims)} of {op.target}: {what}"
    return problem(text, op=op.name, source=op.source)


def _additive(op: Op, graph: Graph, linear: Linear) -> Linear:
    """Return the linear groups that hold for the dtypes of ``op``: no booleans, and no float rounded to an integer."""
    results = [graph.by_name[name].dtype for name in op.results]

    def adds(group: tuple[int, ...]) -> bool:
        dtypes = [graph.by_name[op.operands[i]].dtype for i in group]
        if torch.bool in dtypes or torch.bool in results:
            return False
        inexact = any(d.is_floating_point or d.is_complex for d in dtypes)
        exact = any(not (d.is_floating_point or d.is_complex) for d in results)
        return not (inexact and exact)

    return tuple(group for group in linear if group and adds(group))


def whole_rule(op: Op, graph: Graph) -> OpRule:
    """Return the rule of an operator without one: no dim may be split."""
    operands = [single([f"x{i}_{j}" for j in range(len(graph.by_name[n].shape))]) for i, n in enumerate(op.operands)]
    results = [single([f"y{i}_{j}" for j in range(len(graph.by_name[n].shape))]) for i, n in enumerate(op.results)]
    names = [name for dims in (*operands, *results) for dim in dims for name in dim]
    return build(op, graph, operands, results, kinds=dict.fromkeys(names, "whole"))
