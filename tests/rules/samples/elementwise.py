"""Point-wise operators: those that need a call of their own, and one by its schema for every other."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch._ops import OpOverload

from rules.samples.calls import Sample, bits, call, ids, plain, unit, x
from shardwise.rules.elementwise import ELEMENTWISE

aten = torch.ops.aten

POINTWISE = [
    call(aten.add.Tensor, x(2, 3, 5), x(3, 1), alpha=2),
    call(aten.add.Tensor, x(3), 1.5),
    call(aten.sub.Tensor, x(1, 3), x(2, 1)),
    call(aten.mul.Tensor, x(2, 3), x(3)),
    call(aten.mul.Tensor, x(2, 3), 2.0),
    call(aten.div.Tensor, x(2, 3), unit(3)),
    call(aten.div.Tensor_mode, x(2, 3), unit(3), rounding_mode=None),
    call(aten.div.Tensor_mode, x(2, 3), unit(3), rounding_mode="floor"),
    call(aten.div.Scalar_mode, x(2, 3), 2.0, rounding_mode=None),
    call(aten.divide.Tensor_mode, x(2, 3), unit(3), rounding_mode="trunc"),
    call(aten.divide.Scalar_mode, x(2, 3), 2.0, rounding_mode="trunc"),
    call(aten.where.self, bits(3, 1), x(2, 3, 4), x(4)),
    call(aten.__and__.Tensor, bits(), bits(2, 1, 3)),
    call(aten.where.ScalarOther, bits(3, 4), x(4), 0.0),
    call(aten.where.ScalarSelf, bits(3, 4), 0.0, x(4)),
    call(aten.where.Scalar, bits(3, 4), 1.0, 0.0),
    call(aten.masked_fill.Scalar, x(3, 4), bits(4), 0.0),
    call(aten.masked_fill.Scalar, x(3, 4), bits(4), -1.0),
    call(aten.masked_fill.Tensor, x(3, 4), bits(4), x()),
    call(aten.fill.Scalar, x(3, 4), 2.0),
    call(aten.fill.Tensor, x(3, 4), x()),
    call(aten.copy.default, plain(x(3, 4)), plain(x(4))),
    call(aten.round.decimals, x(3, 4), decimals=1),
    call(aten.clamp.default, x(3, 4), -0.5, 0.5),
    call(aten.clip.default, x(3, 4), -0.5),
    call(aten.clamp.Tensor, x(3, 4), x(4) - 1, x(3, 1) + 1),
    call(aten.clip.Tensor, x(3, 4), x(4)),
    call(aten.complex.default, x(3, 4), x(4)),
    call(aten.polar.default, unit(3, 4), unit(3, 4)),
    call(aten.imag.default, torch.complex(x(3), x(3)).detach().requires_grad_()),
    call(aten._conj.default, torch.complex(x(3), x(3)).detach().requires_grad_()),
    call(aten.real.default, torch.complex(x(3), x(3)).detach().requires_grad_()),
    call(aten.to.dtype, x(3, 4), torch.float32),
    call(aten.to.dtype, ids(4, 3, 4), torch.float64),
    call(aten.to.dtype, x(3, 4), torch.int64),
    call(aten.to.dtype, x(3, 4), torch.bool),
    call(aten.to.dtype_layout, x(3, 4), dtype=torch.float32),
    call(aten.to.device, x(3, 4), torch.device("cpu"), torch.float64),
    call(aten.to.prim_Device, x(3, 4), torch.device("cpu")),
    call(aten.to.prim_dtype, x(3, 4), torch.float32),
    call(aten.to.prim_other, x(3, 4)),
    call(aten._to_copy.default, x(3, 4), dtype=torch.float64),
    call(aten.view.dtype, plain(x(3, 4)), torch.int64),
    call(aten.prelu.default, x(2, 3, 4), x(3)),
    call(aten.prelu.default, x(2, 3), x(1)),
    call(aten.lerp.Scalar, x(3, 4), x(4), 0.3),
    call(aten.lerp.Tensor, x(3, 4), x(4), unit(3, 1)),
    call(aten.clone.default, x(3, 4)),
    call(aten.acosh.default, unit(3, 4) + 1),
    call(aten.arccosh.default, unit(3, 4) + 1),
    call(aten.mvlgamma.default, unit(3, 4) + 3, 2),
    call(aten.polygamma.default, 1, unit(3, 4)),
    call(aten.nan_to_num.default, x(3, 4)),
    call(aten.isclose.default, plain(x(3, 4)), plain(x(4))),
    call(aten.addcmul.default, x(3, 4), x(4), x(3, 1), value=0.5),
    call(aten.addcdiv.default, x(3, 4), x(4), unit(3, 1)),
    call(aten.gelu.default, x(3, 4), approximate="tanh"),
    call(aten.fmod.Tensor, x(3, 4), plain(unit(4))),
    call(aten.remainder.Tensor, x(3, 4), plain(unit(4))),
    Sample(aten.empty_like.default, (x(3, 4),), {}, unspecified=True),
]

_INTEGER_ONLY = ("bitwise", "gcd", "lcm", "__")

_NO_GRADIENT = [
    "floor_divide",
    "heaviside",
    "nextafter",
    "igamma",
    "igammac",
    "special_gammainc",
    "special_gammaincc",
    "special_zeta",
    "remainder",
    "fmod",
    "isclose",
    "special_round",
    "special_bessel_j0",
    "special_bessel_j1",
    "special_log_ndtr",
    "silu_backward",
]

_SHAPES = ((2, 3, 5), (3, 1), (5,))


def _from_schema(target: OpOverload) -> Sample:
    """A call with broadcasting operands, for a point-wise operator that needs nothing special."""
    name = target._schema.name.partition("::")[2]
    make: Callable[..., Tensor] = unit
    if name.startswith(_INTEGER_ONLY):
        make = lambda *shape: ids(4, *shape) + 1  # noqa: E731
    elif name in _NO_GRADIENT:
        make = lambda *shape: plain(unit(*shape))  # noqa: E731
    constants = {"number": 2 if make is not unit else 0.6, "float": 0.5, "int": 2, "bool": False}
    shapes = iter(_SHAPES)
    required = [a for a in target._schema.arguments if not a.has_default_value()]
    args = [make(*next(shapes)) if str(a.type) == "Tensor" else constants[str(a.type)] for a in required]
    return Sample(target, tuple(args), {})


_EXPLICIT = {sample.target for sample in POINTWISE}
ELEMENTWISE_SAMPLES = POINTWISE + [_from_schema(target) for target in ELEMENTWISE if target not in _EXPLICIT]
