"""``Custom``: an operator of the program's own."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.errors import CaptureError, problem
from shardwise.mindspore.ops.primitive import Primitive


class Custom(Primitive):
    """An operator by a function of numpy arrays: ``Custom(func, out_shape, out_dtype, func_type="pyfunc")``.

    Args:
        func: takes and returns numpy arrays.
        out_shape, out_dtype: shape and dtype of the result, or functions of those of the inputs; accepted without
            effect: the result has them.
        func_type: "pyfunc". Kernels for other devices are refused.
        bprop: returns the gradients of the inputs: ``bprop(*inputs, out, dout)``, of tensors. Without it the result
            has no gradient.
        reg_info: accepted without effect.

    Raises:
        NotImplementedError: for another ``func_type``.
        CaptureError: in a split cell, which cannot see into numpy.
    """

    def __init__(
        self, func: Any, out_shape: Any = None, out_dtype: Any = None, func_type: str = "pyfunc", bprop: Any = None,
        reg_info: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.func, self.bprop = func, bprop
        if func_type != "pyfunc" or not callable(func):
            fix = "a function of torch operators, which can be split; a kernel of one's own is torch.library.custom_op"
            raise NotImplementedError(problem(f"Custom(func_type={func_type!r}): kernels for other devices", fix=fix))

    def compute(self, *args: Any) -> Any:
        if torch.compiler.is_exporting():
            raise CaptureError(
                "a function of numpy (Custom) in a split cell", op=self.title, fix="a function of torch operators"
            )
        return _OfNumpy.apply(self, *args)  # type: ignore[no-untyped-call]  # torch has no types for it


class _OfNumpy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, primitive: Custom, *args: Any) -> Any:
        arrays = (x.detach().cpu().numpy() if isinstance(x, torch.Tensor) else x for x in args)
        results = primitive.func(*arrays)
        tensors = tuple(map(torch.as_tensor, results if isinstance(results, tuple) else (results,)))
        ctx.primitive, ctx.operands, ctx.outs = primitive, args, tensors
        if primitive.bprop is None:
            ctx.mark_non_differentiable(*tensors)
        return tensors if isinstance(results, tuple) else tensors[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        outs = (ctx.outs, gradients) if len(gradients) > 1 else (ctx.outs[0], gradients[0])
        grads = ctx.primitive.bprop(*ctx.operands, *outs)
        return (None, *(grads if isinstance(grads, tuple) else (grads,)))


__all__ = ["Custom"]
