"""Which gradients are None and which are zeros: those that eager autograd has, since weight decay skips the former."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from raising import raises
from shardwise.errors import CaptureError
from shardwise.graph.capture import capture
from shardwise.plans.bind import program_of
from shardwise.programs.differentiate import differentiate
from shardwise.programs.program import localize
from shardwise.programs.vjp import VjpCache

MESH = sw.Mesh(dp=2)


class Net(nn.Module):
    def __init__(self, loss: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Parameter(torch.rand(8) + 0.5)
        self.loss = loss

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self, x)


class Half(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        return x * y

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def overwritten(write: Callable[[Net, Tensor, Tensor], object]) -> Callable[[Net, Tensor], Tensor]:
    def loss(net: Net, x: Tensor) -> Tensor:
        h = net.a(x)
        write(net, h, x)
        return (h * net.b(x)).sum()

    return loss


def assign(h: Tensor, value: object) -> None:
    h[:] = value


def in_place(name: str, *args: object) -> Callable[[Net, Tensor], Tensor]:
    return overwritten(lambda net, h, x: getattr(h, name)(*args))


ONES = torch.ones(8, 8, dtype=torch.bool)
ROWS = torch.arange(8)
WRITES = {
    "h[:] = 1.5": overwritten(lambda net, h, x: assign(h, 1.5)),
    "h[:] = a value": overwritten(lambda net, h, x: assign(h, net.b(x))),
    "h[:] = a parameter": overwritten(lambda net, h, x: assign(h, net.c)),
    "copy_ of an input": overwritten(lambda net, h, x: h.copy_(x)),
    "copy_ of itself, detached": overwritten(lambda net, h, x: h.copy_(h.detach() * 2)),
    "fill_ by a tensor": overwritten(lambda net, h, x: h.fill_(net.c.sum())),
    "fill_ of a view": overwritten(lambda net, h, x: h.view(-1).fill_(2.0)),
    "copy_ into a transpose": overwritten(lambda net, h, x: h.t().copy_(x.t())),
    "row by row": overwritten(lambda net, h, x: [h[i].fill_(1.0) for i in range(8)]),
    "twice": overwritten(lambda net, h, x: [h.fill_(1.0), h.copy_(net.b(x)), h.zero_()]),
    "index_put_ everywhere": overwritten(lambda net, h, x: h.index_put_((ROWS,), x)),
    "bernoulli_ of a value": overwritten(lambda net, h, x: h.bernoulli_(net.b(x).sigmoid())),
    "eq_ of a value": overwritten(lambda net, h, x: h.eq_(net.b(x))),
    "copysign_": overwritten(lambda net, h, x: h.copysign_(net.b(x))),
    "sub_ of itself": overwritten(lambda net, h, x: h.sub_(h)),
    **{f"{name}": in_place(f"{name}_") for name in ("zero", "sign", "sgn", "floor", "ceil", "round", "trunc", "frac")},
    **{name: in_place(f"{name}_") for name in ("normal", "uniform", "exponential", "cauchy", "log_normal")},
    **{name: in_place(f"{name}_", 0.5) for name in ("fill", "eq", "ne", "ge", "gt", "le", "lt", "geometric")},
    "mul_(0)": in_place("mul_", 0),
    "masked_fill_ everywhere": in_place("masked_fill_", ONES, 3.0),
}
LOSSES = {
    "hinge_embedding_loss": lambda net, x: F.hinge_embedding_loss(net.a(x), net.b(x)),
    "cosine_embedding_loss": lambda net, x: F.cosine_embedding_loss(net.a(x), x, net.b(x)[:, 0]),
    "margin_ranking_loss": lambda net, x: F.margin_ranking_loss(net.a(x), x, net.b(x)),
    "kl_div": lambda net, x: F.kl_div(net.a(x), net.b(x).softmax(1), reduction="sum"),
    "a function of the user's without one": lambda net, x: Half.apply(net.a(x), net.b(x)).sum(),
    "norm of order 0": lambda net, x: net.a(x).norm(0) + net.b(x).sum(),
    "cat with an empty part": lambda net, x: torch.cat([net.a(x)[:0], net.b(x), x]).sum(),
    "cat of one beside an empty part": lambda net, x: torch.cat([net.a(x)[:0], net.b(x)]).sum(),
    "the other part of a stack": lambda net, x: torch.stack([net.a(x), net.b(x)])[0].sum(),
    "addmm with beta=0": lambda net, x: torch.addmm(net.a(x), net.b(x), x, beta=0).sum(),
    "addmm with alpha=0": lambda net, x: torch.addmm(net.a(x), net.b(x), x, alpha=0).sum(),
    "lerp by 0": lambda net, x: torch.lerp(net.a(x), net.b(x), 0.0).sum(),
    "times 0": lambda net, x: (net.a(x) * 0 + net.b(x)).sum(),
    "to the power of 0": lambda net, x: (net.a(x) ** 0 + net.b(x)).sum(),
    "dropout of all": lambda net, x: (F.dropout(net.a(x), 1.0) + net.b(x)).sum(),
    "bernoulli": lambda net, x: (torch.bernoulli(net.a(x).sigmoid()) + net.b(x)).sum(),
    "normal": lambda net, x: torch.normal(net.a(x), net.b(x).abs()).sum() + net.c.sum(),
    "multinomial": lambda net, x: (torch.multinomial(net.a(x).softmax(1), 1) * net.b(x)).sum(),
    "where by a value": lambda net, x: torch.where(net.a(x) > 0, net.b(x), x).sum(),
    "clamp by a value": lambda net, x: torch.clamp(net.a(x), min=net.b(x) - 1000).sum(),
    "expand_as": lambda net, x: (net.c.expand_as(net.a(x)) + net.b(x)).sum(),
    "zeros_like": lambda net, x: (torch.zeros_like(net.a(x)) + net.b(x)).sum(),
    "an index": lambda net, x: (net.a(x).argmax(1) * net.b(x).sum(1)).sum(),
    "an empty slice": lambda net, x: net.a(x)[:0].sum() + net.b(x).sum(),
    "nothing above a diagonal": lambda net, x: net.a(x).triu(9).sum() + net.b(x).sum(),
}


def kinds_of(gradients: dict[str, Tensor | None]) -> dict[str, str]:
    return {
        name: "None" if gradient is None else "zero" if not gradient.any() else "some"
        for name, gradient in gradients.items()
    }


def eager(net: nn.Module, x: Tensor) -> dict[str, str]:
    net = copy.deepcopy(net)
    net(x).backward()
    return kinds_of({name: parameter.grad for name, parameter in net.named_parameters()})


@pytest.mark.parametrize("loss", [*WRITES, *LOSSES])
def test_what_is_none_and_what_is_zero_is_as_in_eager(loss: str) -> None:
    torch.manual_seed(0)
    net, x = Net({**WRITES, **LOSSES}[loss]).double(), torch.randn(8, 8, dtype=torch.float64)
    plan = sw.plan(net, (x,), 2, mesh=MESH, mode="data_parallel")
    program = differentiate(localize(program_of(plan, capture(net, (x,)).graph), 0), VjpCache())
    expected = eager(net, x)
    assert {name for name, kind in expected.items() if kind != "None"} == set(program.gradients)
    report = sw.verify(net, (x,), plan, steps=1)
    all_zero = set(expected.values()) <= {"None", "zero"}
    equal = all(difference.error <= report.tolerance for difference in report.differences)
    assert report.ok or (all_zero and equal), report


def test_the_proof_tells_zeros_from_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.graph.emitter.Emitter.is_reached", lambda *_: True)
    net, x = Net(WRITES["fill"]).double(), torch.randn(8, 8, dtype=torch.float64)
    report = sw.verify(net, (x,), sw.plan(net, (x,), 2, mesh=MESH, mode="data_parallel", optimizer="sgd"), steps=1)
    assert not report.ok
    assert {d.name for d in report.differences if d.error == float("inf")} == {"a.weight", "a.bias"}


LOGICAL = {
    "logical_and_": lambda h, x: h.logical_and_(x),
    "logical_or_": lambda h, x: h.logical_or_(x),
    "logical_xor_": lambda h, x: h[:4].logical_xor_(x[:4]),
    "logical_not_": lambda h, x: h.logical_not_(),
}


@pytest.mark.parametrize("name", LOGICAL)
def test_a_logical_operator_in_place_on_what_carries_a_gradient_is_refused(name: str) -> None:
    net, x = Net(overwritten(lambda net, h, x: LOGICAL[name](h, x))), torch.randn(8, 8)
    with raises(CaptureError, f"{name}()", "gradient", source="test_none_and_zero.py"):
        capture(net, (x,))
    free = Net(overwritten(lambda net, h, x: LOGICAL[name](x.clone(), x)))  # without a gradient it may
    capture(free, (x,))


def test_no_other_operator_is_invisible_to_autograd_in_place() -> None:
    """Of all of PyTorch's operators that change their first operand: that ``grad_fn`` stays as it was."""
    same: set[str] = set()
    for name in filter(lambda name: name.endswith("_") and not name.startswith("_"), dir(torch.ops.aten)):
        for overload in getattr(torch.ops.aten, name).overloads():
            target = getattr(getattr(torch.ops.aten, name), overload)
            arguments = target._schema.arguments
            if [a.name for a in arguments if a.alias_info and a.alias_info.is_write] != ["self"]:
                continue
            examples = {"Tensor": torch.full((4, 4), 0.5), "number": 0.5, "float": 0.5, "int": 1, "bool": True}
            x = torch.full((4, 4), 0.25).requires_grad_().clone()
            before = x.grad_fn
            try:
                target(x, *(examples[str(a.type)] for a in arguments[1:] if not a.kwarg_only))
            except (KeyError, RuntimeError, IndexError, TypeError):  # it takes other operands than these
                continue
            if x.grad_fn == before:
                same.add(name)
    # It changes no number, and is listed only once something in the process has asked for it.
    assert same - {"requires_grad_"} == set(LOGICAL)


def trained(loss: str, kind: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The parameters after three steps with weight decay, and which gradients there were."""
    torch.manual_seed(0)
    net, x = Net({**WRITES, **LOSSES}[loss]).double(), torch.randn(8, 8, dtype=torch.float64)
    if dist.is_initialized() and dist.get_world_size() > 1:  # other tests of a process may leave a group of one
        net = sw.parallelize(
            net, sw.plan(net, (x,), 2, mesh=MESH, mode="data_parallel") if dist.get_rank() == 0 else None
        )
    optimizer = getattr(torch.optim, kind)(net.parameters(), lr=0.1, weight_decay=0.3)
    for _ in range(3):
        optimizer.zero_grad()
        net(x).backward()
        optimizer.step()
    gradients = {name: parameter.grad for name, parameter in net.named_parameters()}
    return {name: parameter.detach().clone() for name, parameter in net.named_parameters()}, kinds_of(gradients)


ON_RANKS = [
    ("h[:] = 1.5", "AdamW"),
    ("zero", "SGD"),
    ("hinge_embedding_loss", "AdamW"),
    ("a function of the user's without one", "SGD"),
]
MORE_ON_RANKS = [("h[:] = 1.5", "SGD"), ("copy_ of an input", "AdamW"), ("cat with an empty part", "AdamW")]


def all_trained(*cases: tuple[str, str]) -> list[tuple[dict[str, Tensor], dict[str, str]]]:
    return [trained(*case) for case in cases]


@pytest.mark.parametrize("cases", [ON_RANKS, pytest.param(MORE_ON_RANKS, marks=pytest.mark.long)], ids=["some", "more"])
def test_weight_decay_on_ranks_is_that_of_one_device(cases: list[tuple[str, str]], run_ranks) -> None:
    expected = all_trained(*cases)
    for rank in run_ranks(all_trained, 2, *cases):
        for (parameters, kinds), (want, want_kinds) in zip(rank, expected, strict=True):
            assert kinds == want_kinds
            for name, parameter in parameters.items():
                torch.testing.assert_close(parameter, want[name])
