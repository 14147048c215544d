"""Vector-Jacobian products of single calls: which kernels, what is kept, what shares memory; and equal to autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardwise.graph.ir import Ref
from shardwise.graph.switches import CallCache
from shardwise.programs.forms import Form
from shardwise.programs.instructions import Compute
from shardwise.programs.vjp import BackwardTrace, ForwardTrace, VjpCache, numbered
from shardwise.rules.rule import LocalOpCall

aten = torch.ops.aten
VJP_CACHE = VjpCache()


def form(*shape: int, dtype: torch.dtype = torch.float32, requires_grad: bool = True) -> Form:
    return Form.contiguous(shape, dtype, requires_grad)


def kinds_of(target: Any, *forms: Form, rest: tuple[Any, ...] = ()) -> tuple[ForwardTrace, BackwardTrace]:
    call, _ = numbered(LocalOpCall(target, (*(Ref(str(i)) for i in range(len(forms))), *rest), ()))
    forward = VJP_CACHE.forward(call, forms)
    cotangents = tuple(f.with_gradient(False) if f.requires_grad else None for f in forward.forms)
    return forward, VJP_CACHE.backward(call, forms, cotangents)


def names_of(kernels: tuple[Compute, ...]) -> list[str]:
    return [str(kernel.target.overloadpacket).partition(".")[2] for kernel in kernels]


def test_a_linear_layer_stays_one_call_and_keeps_input_and_weight() -> None:
    forward, backward = kinds_of(aten.linear.default, form(2, 16, 8), form(16, 8), form(16))
    assert backward.whole
    assert set(backward.needs) == {"0", "1"}
    assert [f.shape for f in backward.forms if f] == [(2, 16, 8), (16, 8), (16,)]
    assert names_of(backward.kernels).count("mm") == 2
    assert forward.forms[0].shape == (2, 16, 16)


def test_a_sum_keeps_nothing_and_passes_its_cotangent_to_both_operands() -> None:
    _, backward = kinds_of(aten.add.Tensor, form(4, 4), form(4, 4))
    assert backward == BackwardTrace((), ("c0", "c0"), backward.forms, (), True)


def test_a_view_has_the_memory_of_its_operand() -> None:
    forward, _ = kinds_of(aten.transpose.int, form(4, 8), rest=(0, 1))
    assert forward.shares == ("0",)
    assert forward.forms[0].stride == (1, 8)
    assert forward.workspace == 0


def test_attention_and_norms_keep_their_fused_backward_kernels() -> None:
    _, attention = kinds_of(
        aten.scaled_dot_product_attention.default, *(form(2, 4, 128, 16),) * 3, rest=(None, 0.0, True)
    )
    assert names_of(attention.kernels) == ["_scaled_dot_product_flash_attention_for_cpu_backward"]
    _, norm = kinds_of(aten.layer_norm.default, form(4, 8, 16), rest=((16,),))
    assert names_of(norm.kernels) == ["native_layer_norm_backward"]
    assert not norm.whole, "mean and reciprocal deviation are kept, which the call alone does not return"


def test_one_and_one_point_nought_are_different_kinds() -> None:
    (whole, _), (broken, _) = (
        kinds_of(aten.mul.Tensor, form(3, dtype=torch.int64, requires_grad=False), rest=(n,)) for n in (1, 1.0)
    )
    assert (whole.forms[0].dtype, broken.forms[0].dtype) == (torch.int64, torch.float32)


def executed(
    target: Any, operands: list[Tensor], rest: tuple[Any, ...], cotangents: list[Tensor]
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Results and gradients by the kernels of the kind alone."""
    forms = tuple(Form.of(t) for t in operands)
    forward, backward = kinds_of(target, *forms, rest=rest)
    values: dict[str, Any] = {str(i): t.detach() for i, t in enumerate(operands)}
    values |= {f"c{i}": c for i, c in enumerate(cotangents)}

    def fill(arg: Any) -> Any:
        if isinstance(arg, Ref):
            return values[arg.name]
        return [fill(item) for item in arg] if isinstance(arg, tuple) else arg

    for kernel in (*forward.kernels, *backward.kernels):
        returned = kernel.target(*map(fill, kernel.args), **{k: fill(v) for k, v in kernel.kwargs})
        for name, place in zip(kernel.results, kernel.places, strict=True):
            result = returned
            for index in place:
                result = result[index]
            values[name] = result
    gradients = [None if name is None else values[name] for name in backward.cotangents]
    return [values[name] for name in forward.results], gradients


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).requires_grad_()


CALLS: dict[str, tuple[Any, list[Tensor], tuple[Any, ...]]] = {
    "linear": (aten.linear.default, [randn(2, 5, 4), randn(3, 4), randn(3)], ()),
    "transposed matmul": (aten.matmul.default, [randn(2, 4, 5).transpose(1, 2), randn(2, 4, 3)], ()),
    "layer norm": (aten.layer_norm.default, [randn(3, 4)], ((4,),)),
    "rms norm": (aten.rms_norm.default, [randn(3, 4)], ((4,),)),
    "softmax": (aten.softmax.int, [randn(3, 4)], (-1,)),
    "gelu": (aten.gelu.default, [randn(3, 4)], ()),
    "square": (aten.mul.Tensor, [randn(3, 4)], (2.0,)),
    "attention": (aten.scaled_dot_product_attention.default, [randn(1, 2, 4, 8) for _ in range(3)], (None, 0.0, True)),
    "split": (aten.split.Tensor, [randn(6, 4)], (2,)),
    "maximum": (aten.amax.default, [randn(3, 4)], ((1,),)),
    "cumulative product": (aten.cumprod.default, [randn(3, 4)], (1,)),
    "convolution": (aten.conv2d.default, [randn(1, 2, 6, 6), randn(3, 2, 3, 3)], ()),
    "index": (aten.select.int, [randn(3, 4)], (0, 1)),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_kernels_of_a_kind_are_its_forward_and_its_backward(name: str) -> None:
    target, operands, rest = CALLS[name]
    leaves = [t.detach().requires_grad_() for t in operands]
    returned = target(*leaves, *rest)
    results = [returned] if isinstance(returned, Tensor) else list(returned)
    cotangents = [torch.randn_like(result) for result in results]
    wanted = torch.autograd.grad(results, leaves, cotangents)
    made, gradients = executed(target, [t.detach().requires_grad_() for t in operands], rest, cotangents)
    for have, want in zip([*made, *gradients], [*results, *wanted], strict=True):
        assert have is not None
        if name == "cumulative product":  # torch 2.11 adds in another order where its backward is traced
            torch.testing.assert_close(have, want, rtol=1e-14, atol=1e-14)
        else:
            assert torch.equal(have, want), "the same kernels in the same order give the same bits"


class WithoutFormula(torch.autograd.Function):
    """For an operator whose backward looks at values, which nothing can trace."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return cotangent * x.cos() * (1.0 if float(x.sum()) > -1e9 else 2.0)


def test_what_cannot_be_traced_stays_with_autograd_inside_one_instruction() -> None:
    from shardwise.programs.vjp import Differentiate, Record

    vjp_cache = VjpCache()
    call = (WithoutFormula.apply, (Ref("0"),), ())
    forms = (form(3, dtype=torch.float64),)
    backward = vjp_cache.backward(call, forms, (form(3, dtype=torch.float64, requires_grad=False),))
    assert backward.opaque
    assert vjp_cache.untraceable
    x = torch.randn(3, dtype=torch.float64)
    result, tape = Record(call, (True,))(x)
    (gradient,) = Differentiate((True,))(tape, torch.ones(3, dtype=torch.float64))
    assert not result.requires_grad
    assert torch.equal(gradient, x.cos())


def test_what_is_filled_through_a_view_is_kept_and_not_made_again_from_nothing() -> None:
    def weighted(x: Tensor) -> Tensor:
        weights = torch.zeros(2, 3)
        weights[1].copy_(x.detach())
        return x * weights

    _, backward = kinds_of(weighted, form(3))
    assert "zeros" not in names_of(backward.kernels)
    assert not backward.whole


def test_what_is_known_of_a_call_holds_for_the_switches_as_they_are() -> None:
    """Of PyTorch's own operators, for the whole process."""
    call, _ = numbered(LocalOpCall(aten.scaled_dot_product_attention.default, (Ref("0"), Ref("1"), Ref("2")), ()))
    forms = (form(2, 2, 16, 8),) * 3
    fused = VjpCache().forward(call, forms)
    assert VjpCache().forward(call, forms) is fused
    with sdpa_kernel(SDPBackend.MATH):
        plain = VjpCache().forward(call, forms)
    flash = "_scaled_dot_product_flash_attention_for_cpu"
    assert flash in names_of(fused.kernels)
    assert flash not in names_of(plain.kernels)
    assert VjpCache().forward(call, forms) is fused
    assert VjpCache("meta").forward(call, forms) is not fused
    ratio, _ = numbered(LocalOpCall(aten.div.Tensor, (Ref("0"), Ref("1")), ()))
    whole = (form(3, dtype=torch.int64, requires_grad=False),) * 2
    found = []
    for dtype in (torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            found.append(VjpCache().forward(ratio, whole).forms[0].dtype)
        finally:
            torch.set_default_dtype(torch.float32)
    assert found == [torch.float32, torch.float64]


def test_nothing_is_kept_of_operators_that_may_be_registered_anew() -> None:
    known: CallCache[int] = CallCache()
    for target in (WithoutFormula.apply, torch.ops.shardwise.mark.default):
        known.keep(target, "signature", 1)
        assert known.get(target, "signature") is None
    known.keep(aten.add.Tensor, "signature", 1)
    assert known.get(aten.add.Tensor, "signature") == 1
