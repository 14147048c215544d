"""Dtypes of a training step that differ from those of the model.

A parameter has three: storage (``Value.stored``), compute (``Value.dtype``), and gradient reduction
(``Value.reduced``). A graph is captured in compute dtypes; what is stored or passed in others is cast once per step, by
instructions of the program (``programs.casts``).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
from torch import nn

from shardwise.errors import CaptureError, ShardwiseError, listed
from shardwise.graph.autocast import Autocast, no_autocast
from shardwise.graph.float8 import PRODUCTS
from shardwise.graph.ir import Graph, Value

DTYPES = ("compute", "parameter", "reduce")
FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Precision:
    """Dtypes of a training step; None: the model's own.

    The step equals that of one device which calls
    ``torch.func.functional_call(model, {name: p.to(compute)}, inputs cast to compute)``. Buffers, targets of a loss
    function, and integers keep their dtypes, and so do casts in the model's code.

    Args:
        compute: dtype to which parameters and floating inputs are cast once per step; parameters before they are
            gathered.
        parameter: dtype in which parameters, their gradients and the optimizer's states are kept.
        reduce: dtype in which gradients of parameters are summed over devices (None: the one they are computed in).
        products: how linear layers in bfloat16 multiply: "float8" (one dynamic scale per tensor) or "float8 rows" (one
            per row; gradients of weights in bfloat16), forward and backward (``graph.float8``). Other products stay
            as they are, and so do layers whose sizes are no multiples of 16, about which capture warns.
        autocast: the ``torch.autocast`` around the call, instead of the above; ``sw.plan`` sets it if one is active.

    Raises:
        ShardwiseError: a dtype is not float64, float32, bfloat16 or float16, ``products`` is unknown, or ``autocast``
            is combined with other fields.
    """

    compute: torch.dtype | None = None
    parameter: torch.dtype | None = None
    reduce: torch.dtype | None = None
    autocast: Autocast | None = None
    products: str | None = None

    def __post_init__(self) -> None:
        wrong = [(name, dtype) for name in DTYPES if (dtype := getattr(self, name)) not in (None, *FLOATING)]
        if wrong:
            text = ", ".join(f"{name}={dtype!r}" for name, dtype in wrong)
            is_dtype = all(isinstance(dtype, torch.dtype) for _, dtype in wrong)
            what = "such a dtype carries no gradients" if is_dtype else "not a dtype of torch"
            raise ShardwiseError(
                f"Precision({text}): {what}",
                fix=f"choose one of {', '.join(map(str, FLOATING))}, or None for the model's own",
            )
        if self.products not in (None, *PRODUCTS):
            raise ShardwiseError(
                f"Precision(products={self.products!r}): not a way to multiply",
                fix=f"choose {' or '.join(map(repr, PRODUCTS))}; compute= has the dtypes",
            )
        if not isinstance(self.autocast, Autocast | None):
            raise ShardwiseError(
                f"Precision(autocast={self.autocast!r}): not what sw.plan records of an active torch.autocast",
                fix="call sw.plan inside of torch.autocast(...), or use compute=",
            )
        fields = [name for name in (*DTYPES, "products") if getattr(self, name) is not None]
        if self.autocast is not None and fields:
            raise ShardwiseError(
                f"{self.autocast} is active with a Precision of {', '.join(fields)}: both would set the casts",
                fix="use only one of them",
            )

    @property
    def is_models(self) -> bool:
        """Return whether every dtype is the model's own."""
        return self == MODELS_OWN

    def around_call(self) -> AbstractContextManager[None]:
        """Return the context in which the model is called: the autocast of this precision, and no other."""
        return no_autocast() if self.autocast is None else self.autocast.active()

    @property
    def at_hand(self) -> Precision:
        """Return this precision with the active autocast. Raises CaptureError and ShardwiseError if it cannot be
        honoured."""
        ambient = Autocast.ambient()
        return self if ambient in (None, self.autocast) else replace(self, autocast=ambient)

    @property
    def lost_share(self) -> float:
        """Return the share of a parameter below which its update is lost, if it is stored with fewer bits than it is
        computed with; else 0."""
        if self.parameter is None or self.compute is None:
            return 0.0
        stored, computed = (torch.finfo(dtype).eps for dtype in (self.parameter, self.compute))
        return stored / 2 if stored > computed else 0.0

    def of_parameter(self, value: Value) -> Value:
        """Return a parameter's value with the dtypes of a graph; ``value`` has the model's."""
        dtype, computed = value.dtype, self.computed(value.dtype)
        reduced = other_dtype(self.reduced(dtype), computed) if value.requires_grad else None
        return replace(value, dtype=computed, stored=other_dtype(self.stored(dtype), computed), reduced=reduced)

    def computed(self, dtype: torch.dtype) -> torch.dtype:
        """Return the compute dtype of a parameter or input of the module whose dtype in the model is ``dtype``."""
        return self.compute if self.compute is not None and dtype.is_floating_point else dtype

    def stored(self, dtype: torch.dtype) -> torch.dtype:
        """Return the storage dtype of a parameter whose dtype in the model is ``dtype``."""
        return self.parameter if self.parameter is not None and dtype.is_floating_point else dtype

    def reduced(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which a gradient is reduced, for a parameter whose dtype in the model is ``dtype``."""
        return self.reduce if self.reduce is not None and dtype.is_floating_point else self.computed(dtype)


MODELS_OWN = Precision()


def check_real(module: nn.Module, precision: Precision) -> None:
    """Raise CaptureError if a precision is requested for complex parameters, which have none of these dtypes."""
    names = [name for name, tensor in module.named_parameters() if tensor.is_complex()]
    if names and not precision.is_models:
        raise CaptureError(
            f"the parameter {listed(names, most=1)} is complex, and a Precision names real dtypes",
            fix="omit precision=, or keep the real and the imaginary part as parameters (torch.view_as_real)",
        )


def with_reductions(graph: Graph) -> Graph:
    """Return the graph in which values computed from parameters and from no input (a transposed weight, the rows of a
    position table) have a reduction dtype like parameters: they may be converted in place of the parameters."""
    values = dict(graph.by_name)
    fixed = {source.value for source in graph.sources if source.kind in ("parameter", "buffer", "constant")}
    for op in graph.ops:
        if not fixed.issuperset(op.operands):
            continue
        fixed.update(op.results)
        dtypes = {values[name].reduced for name in op.operands if values[name].requires_grad}
        reduced = dtypes.pop() if len(dtypes) == 1 else None
        for name in op.results if reduced is not None else ():
            if values[name].requires_grad and values[name].dtype != reduced:
                values[name] = replace(values[name], reduced=reduced)
    return replace(graph, values=tuple(values[value.name] for value in graph.values))


def other_dtype(dtype: torch.dtype, computed: torch.dtype) -> torch.dtype | None:
    """Return ``dtype`` if it is not the compute dtype, else None (``Value.stored``, ``Value.reduced``)."""
    return None if dtype == computed else dtype
