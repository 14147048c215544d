"""Point-wise operators with broadcasting: every dim of the result is a parallel factor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch._ops import OpOverload

from shardwise.graph.ir import Graph, Op
from shardwise.graph.schema import arguments, by_operator
from shardwise.rules.arguments import operand_positions
from shardwise.rules.binding import Linear, RuleFunction, RuleTable, build, dim_names
from shardwise.rules.rule import Dims, Localize, OpRule

aten = torch.ops.aten


def broadcast_dims(shape: Sequence[int], result: Sequence[int], names: Sequence[str]) -> Dims:
    """Return the dims of an operand that broadcasts to a result with dims ``names``; no factor where the size is 1."""
    skipped = len(result) - len(shape)
    return tuple((name,) if size != 1 else () for name, size in zip(names[skipped:], shape, strict=True))


def pointwise_rule(op: Op, graph: Graph, linear: Linear = (), localize: Localize | None = None) -> OpRule:
    """Operands broadcast to the result, dims ``d0 d1 ...``."""
    shape = graph.by_name[op.results[0]].shape
    names = dim_names(len(shape))
    operands = [broadcast_dims(graph.by_name[name].shape, shape, names) for name in op.operands]
    results = [broadcast_dims(graph.by_name[name].shape, shape, names) for name in op.results]
    return build(op, graph, operands, results, linear=linear, localize=localize)


def _linear_in(*groups: Iterable[str]) -> RuleFunction:
    """Jointly linear in each group of arguments (by schema name), if all of the group are tensors."""
    named = tuple(tuple(group) for group in groups)

    def function(op: Op, graph: Graph) -> OpRule:
        positions = operand_positions(op)
        whole = [group for group in named if all(len(positions.get(name, ())) == 1 for name in group)]
        return pointwise_rule(op, graph, tuple(tuple(positions[name][0] for name in group) for group in whole))

    return function


def _when(condition: Callable[[dict[str, object]], bool], linear: RuleFunction, op: Op, graph: Graph) -> OpRule | None:
    """Linear only if the arguments say so."""
    return linear(op, graph) if condition(arguments(op)) else pointwise_rule(op, graph)


def _prelu(op: Op, graph: Graph) -> OpRule:
    """One slope for all, or one per channel (dim 1)."""
    shape, slopes = (graph.by_name[name].shape for name in op.operands)
    names = dim_names(len(shape))
    dims = broadcast_dims(shape, shape, names)
    per_channel = len(slopes) == 1 and slopes[0] != 1 and len(shape) > 1
    return build(op, graph, [dims, (dims[1],) if per_channel else tuple(() for _ in slopes)], [dims])


def _view_dtype(op: Op, graph: Graph) -> OpRule | None:
    """Reinterpreting the bits keeps the dims when the element size stays."""
    same = graph.by_name[op.operands[0]].shape == graph.by_name[op.results[0]].shape
    return pointwise_rule(op, graph) if same else None


# Names of packets all of whose tensor overloads are point-wise and not linear.
_NONLINEAR = """
    __and__ __lshift__ __or__ __rshift__ __xor__ abs absolute acos acosh addcdiv addcmul angle arccos arccosh arcsin
    arcsinh arctan arctan2 arctanh asin asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_not bitwise_or
    bitwise_right_shift bitwise_xor ceil celu clamp clamp_max clamp_min clip copysign cos cosh deg2rad digamma elu
    eq erf erfc erfinv exp exp2 expm1 floor floor_divide fmax fmin fmod frac gcd ge gelu greater greater_equal gt
    hardshrink hardsigmoid hardswish hardtanh heaviside hypot i0 igamma igammac isclose isfinite isinf isnan
    isneginf isposinf lcm ldexp le leaky_relu less less_equal lgamma log log10 log1p log2 log_sigmoid logaddexp
    logaddexp2 logical_and logical_not logical_or logical_xor logit lt maximum minimum mish mvlgamma nan_to_num ne
    nextafter not_equal polar polygamma pow float_power rad2deg reciprocal relu relu6 remainder round rsqrt selu sgn
    sigmoid sign signbit silu sin sinc sinh softplus softshrink special_airy_ai special_bessel_j0 special_bessel_j1
    special_bessel_y0 special_bessel_y1 special_chebyshev_polynomial_t special_chebyshev_polynomial_u
    special_chebyshev_polynomial_v special_chebyshev_polynomial_w special_digamma special_entr special_erf
    special_erfc special_erfcx special_erfinv special_exp2 special_expit special_expm1 special_gammainc
    special_gammaincc special_gammaln special_hermite_polynomial_h special_hermite_polynomial_he special_i0
    special_i0e special_i1 special_i1e special_laguerre_polynomial_l special_legendre_polynomial_p special_log1p
    special_log_ndtr special_logit special_modified_bessel_i0 special_modified_bessel_i1 special_modified_bessel_k0
    special_modified_bessel_k1 special_multigammaln special_ndtr special_ndtri special_polygamma special_psi
    special_round special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1
    special_shifted_chebyshev_polynomial_t special_shifted_chebyshev_polynomial_u
    special_shifted_chebyshev_polynomial_v special_shifted_chebyshev_polynomial_w special_sinc
    special_spherical_bessel_j0 special_xlog1py special_xlogy special_zeta sqrt square tan tanh threshold trunc fix
    xlogy ones_like full_like empty_like gelu_backward sigmoid_backward silu_backward tanh_backward
    threshold_backward
"""

# Packets that are linear in their only tensor, or in the first.
_LINEAR = """
    _conj _neg_view alias clone conj conj_physical detach imag neg negative real resolve_conj resolve_neg to _to_copy
    zeros_like
"""


def _overloads(name: str) -> list[OpOverload]:
    """Return the functional overloads of an ATen packet that take and return tensors."""
    packet = getattr(aten, name, None)
    targets: list[OpOverload] = []
    for overload in packet.overloads() if packet is not None else ():
        target = getattr(packet, overload)
        schema = target._schema
        tensors = [a for a in schema.arguments if str(a.type) in ("Tensor", "Optional[Tensor]")]
        named = any("Dimname" in str(a.type) for a in schema.arguments)
        returned = [str(r.type) for r in schema.returns]
        if tensors and returned == ["Tensor"] and not schema.is_mutable and not named:
            targets.append(target)
    return targets


_FIRST = _linear_in(("self",))
_SPECIAL: RuleTable = by_operator(
    {
        "add.Tensor sub.Tensor subtract.Tensor rsub.Tensor where.self": _linear_in(("self", "other")),
        # Adding a Python number is not linear: every part would add it.
        "add.Scalar sub.Scalar subtract.Scalar rsub.Scalar where.Scalar fill.Scalar": pointwise_rule,
        "frexp.Tensor max.other min.other": pointwise_rule,
        "mul.Tensor multiply.Tensor": _linear_in(("self",), ("other",)),
        "mul.Scalar multiply.Scalar div.Tensor divide.Tensor true_divide.Tensor": _FIRST,
        "div.Scalar divide.Scalar true_divide.Scalar": _FIRST,
        "div.Tensor_mode div.Scalar_mode divide.Tensor_mode divide.Scalar_mode": partial(
            _when, lambda a: a["rounding_mode"] is None, _FIRST
        ),
        "lerp.Scalar lerp.Tensor": _linear_in(("self", "end")),
        "complex": _linear_in(("real", "imag")),
        "where.ScalarOther": partial(_when, lambda a: a["other"] == 0, _FIRST),
        "where.ScalarSelf": partial(_when, lambda a: a["self"] == 0, _linear_in(("other",))),
        "masked_fill.Scalar": partial(_when, lambda a: a["value"] == 0, _FIRST),
        "masked_fill.Tensor": _linear_in(("self", "value")),
        "fill.Tensor": _linear_in(("value",)),
        "copy": _linear_in(("src",)),
        "prelu": _prelu,
        "view.dtype": _view_dtype,
    }
)

ELEMENTWISE: RuleTable = (
    dict(_SPECIAL)
    | {target: pointwise_rule for name in _NONLINEAR.split() for target in _overloads(name)}
    | {target: _FIRST for name in _LINEAR.split() for target in _overloads(name) if target not in _SPECIAL}
)
