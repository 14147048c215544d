"""Tensors that are not friendly: captured, split at random and compared with one device, outputs and gradients.

``make sweep`` runs more random splits of the same cases (``programs/sweep.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise as sw
from programs import running
from programs.building import Program
from programs.running import run
from proving import prove
from raising import raises
from rules.samples import bits, ids, leaf, plain, unit, x
from shardwise.errors import CaptureError
from shardwise.graph.capture import capture
from shardwise.proof import errors_by_tensor

NAN, INF = math.nan, math.inf
Function = Callable[..., Any]


class Calls(nn.Module):
    """A function as a module: differentiable tensors are its parameters, the others its inputs. The loss weighs every
    element of every differentiable result."""

    def __init__(self, function: Function, tensors: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.function = function
        self.order = [tensor.requires_grad for tensor in tensors]
        self.held = nn.ParameterList(tensor for tensor in tensors if tensor.requires_grad)

    def forward(self, *given: Tensor) -> Any:
        inputs, held = iter(given), iter(self.held)
        found = self.function(*(next(held) if own else next(inputs) for own in self.order))
        results = (found,) if isinstance(found, Tensor) else tuple(found)
        if not len(self.held):
            return results
        loss = torch.zeros((), dtype=torch.float64)
        for result in results:
            if result.requires_grad:
                numbers = torch.view_as_real(result.resolve_conj()) if result.is_complex() else result.double()
                weights = torch.arange(1, numbers.numel() + 1, dtype=numbers.dtype) % 7 - 2.5
                loss = loss + (numbers * weights.reshape(numbers.shape)).sum()
        return (loss, *results)


def program_of(function: Function, tensors: tuple[Tensor, ...]) -> Program:
    """The captured function, the tensors of its sources, and what it returns on one device."""
    module = Calls(function, tensors)
    inputs = tuple(tensor for tensor in tensors if not tensor.requires_grad)
    captured = capture(module, tuple(tensor.clone() for tensor in inputs))
    parameters = dict(module.named_parameters())
    given = iter(inputs)
    sources = {}
    for source in captured.graph.sources:
        if source.kind == "input":
            sources[source.value] = next(given)
        elif source.kind == "constant":
            sources[source.value] = captured.constants[source.value]
        else:
            sources[source.value] = parameters[source.names[0]]
    graph = captured.graph if parameters else replace(captured.graph, loss=None)
    return Program(graph, sources, module(*(tensor.clone() for tensor in inputs)))


def halves(value: Tensor) -> Tensor:
    value = value.clone()
    left, right = value[:, :3], value[:, 3:]
    left.mul_(2)
    right.add_(left)
    return value


def transform(signal: Tensor, *sizes: Any, **named: Any) -> Tensor:
    spectrum = torch.stft(signal, *sizes, **named, return_complex=True)
    return spectrum * spectrum.abs()  # not what its inverse makes the signal of again


def modes(value: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Parts of a tensor written one by one, as layers of Fourier neural operators do it."""
    value[:, :2] = a[:, :2]
    value[:, -2:] = b[:, :2]
    value[2] = a[1]
    value[-1, ::2] = b[0, 3:]
    value.t()[3].mul_(2j)
    value.narrow(1, -4, 2).add_(b[:, :2])
    value[1].copy_(value[3])
    value[1:, 1:2].conj_physical_()
    return value


def through_views(value: Tensor) -> Tensor:
    value = value * 1
    value.transpose(0, 1)[1:].zero_()
    value[0].fill_(3)
    value.view(-1)[-1] = 7
    return value


def masked(value: Tensor) -> Tensor:
    value = value.clone()
    value[value > 0.5] = -1.0
    value[:, 1:3][value[:, 1:3] < 0] = value[0, 0]
    return value


SEEDS = 1  # random plans of every case; the sweep takes ten

CASES: dict[str, tuple[Function, tuple[Tensor, ...]]] = {
    # nan and infinity
    "nan in a sum": (lambda a: (a.sum(1), a.mean(0)), (leaf([[1, NAN, 2, 3], [4, 5, 6, 7]]),)),
    "nan in an extreme": (
        lambda a: (a.amax(1), a.argmax(1), a.max(1)[1], a.min(0)[1]),
        (plain(leaf([[1, NAN, 2, NAN], [4, 5, 6, 7]])),),
    ),
    "nan beside what is looked up": (lambda a, i: a[i], (leaf([[NAN, 1], [2, 3], [4, INF], [5, 6]]), ids(2, 5) + 1)),
    "nan beside what is updated": (
        lambda a, i, b: a.index_add(0, i, b),
        (leaf([[NAN, 1], [2, 3], [4, INF], [5, 6]]), torch.tensor([1, 3, 1]), leaf([[1, 2], [NAN, 3], [4, 5]])),
    ),
    "infinite scores": (lambda a: (a.softmax(-1), a.log_softmax(0)), (leaf([[1, -INF, 2, 0], [4, 5, -INF, 7]]),)),
    "a row of minus infinity": (
        lambda a: torch.logsumexp(a, 1),
        (plain(leaf([[-INF, -INF, -INF, -INF], [1, 2, 3, INF]])),),
    ),
    "nan labels ignored": (
        lambda a, t: F.cross_entropy(a, t, ignore_index=-100),
        (leaf([[NAN, NAN, NAN], [1, 2, 3], [3, 2, 1], [0, 1, 0]]).detach(), torch.tensor([-100, 0, 2, 1])),
    ),
    "all labels ignored": (
        lambda a, t: (
            F.cross_entropy(a, t),
            F.cross_entropy(a, t, reduction="sum"),
            F.nll_loss(a, t, reduction="none"),
        ),
        (x(4, 5), torch.full((4,), -100)),
    ),
    "losses that look at data": (
        lambda a, t, v, s: (
            F.ctc_loss(s.log_softmax(2), t, (6, 6, 5, 6), (3, 2, 3, 1)),
            F.ctc_loss(s.log_softmax(2), t, torch.tensor([6, 6, 5, 6]), torch.tensor([3, 2, 3, 1]), reduction="sum"),
            F.ctc_loss(s.log_softmax(2), t, (6, 6, 1, 6), (3, 2, 3, 1), reduction="none", zero_infinity=True),
            F.ctc_loss(s[:, 0].log_softmax(1), t[0], torch.tensor(6), torch.tensor(3), blank=4),
            F.gaussian_nll_loss(a, a.detach() * 2, v, full=True),
            F.gaussian_nll_loss(a, a.detach() * 2, v[:, 0], reduction="none"),
            F.poisson_nll_loss(a, v.detach(), full=True),
        ),
        (x(4, 5), ids(4, 4, 3) + 1, unit(4, 5), x(6, 4, 5)),
    ),
    "nan to number": (lambda a: torch.nan_to_num(a, 0.0, 9.0).cumsum(1), (leaf([[1, NAN, INF, 2], [3, 4, 5, -INF]]),)),
    "infinity times zero": (lambda a, b: (a * b, a @ b.t()), (leaf([[0, 1], [INF, 2]]), leaf([[INF, 1], [0, 3]]))),
    # integers and booleans
    "integers": (
        lambda a, b: (a + b, a // 3, (a * b).sum(0), a @ b.t(), a.cumsum(1), a.prod(1), a.max(0)[0], a.sort(1)[0]),
        (ids(9, 4, 6), ids(9, 4, 6)),
    ),
    "booleans": (
        lambda a, b: (a & b, a.any(0), a.all(1), a.sum(1), a.cumsum(0), a.amax(1), ~a | b, a.long().argmax(1)),
        (bits(4, 6), bits(4, 6)),
    ),
    "integers meet floats": (lambda a, b: (a * b, b.div(2), b.double().mean(0) + a), (x(4, 6), ids(9, 4, 6))),
    "bytes": (lambda a: (a.sum(0), a + a, a.float().mean()), (ids(200, 4, 6).to(torch.uint8),)),
    "mean of a mask": (lambda a, m: (a * m).sum() / m.sum(), (x(4, 6), bits(4, 6) | (torch.arange(6) == 1))),
    # sizes 0 and 1
    "no rows": (lambda a, b: (a @ b, (a @ b).sum(0), a.relu(), torch.cat([a, b.t()])), (x(0, 4), x(4, 3))),
    "no terms": (
        lambda a, b: (torch.einsum("bi,ij->bj", a, b), torch.einsum("bi,ij->", a, b), torch.einsum("bi,bk", a, a)),
        (x(4, 0), x(0, 3)),
    ),
    "no terms, broadcast": (lambda a, b: torch.einsum("bi,ij->bj", a, b), (x(4, 1), x(0, 3))),
    "no columns": (lambda a, b: (a @ b, a.sum(1), F.pad(a, (1, 2))), (x(4, 0), x(0, 3))),
    "no samples in a layer": (
        lambda a, w, b: F.layer_norm(F.linear(a, w, b), (5,)).softmax(-1).sum(0),
        (x(0, 4), x(5, 4), x(5)),
    ),
    "no lookups": (lambda w, i: (F.embedding(i, w), w.index_select(0, i)), (x(4, 3), ids(4, 0))),
    "bags": (
        lambda w, i, p, o: (
            F.embedding_bag(i, w, mode="max"),
            F.embedding_bag(i, w, mode="max", padding_idx=2),
            F.embedding_bag(i, w, mode="sum", per_sample_weights=p),
            F.embedding_bag(i.flatten(), w, o, mode="max"),
            F.embedding_bag(i.flatten(), w, o, mode="mean", include_last_offset=True, padding_idx=1),
            F.embedding_bag(i.flatten(), w, o, mode="sum", per_sample_weights=p.flatten(), padding_idx=-6),
        ),
        (x(6, 5), ids(6, 4, 3), x(4, 3), torch.tensor([0, 4, 4, 12])),
    ),
    "no updates": (lambda a, i, b: a.index_add(0, i, b), (x(4, 3), ids(4, 0), x(0, 3))),
    "size 1": (
        lambda a, b: (a + b, a * b.t(), (a @ b.t()).softmax(-1), a.std(1, correction=0), a.max(0)[0], a.cumsum(0)),
        (x(1, 6), x(1, 6)),
    ),
    "one feature": (lambda a, w: F.layer_norm(F.linear(a, w), (1,)).sum(0), (x(6, 4), x(1, 4))),
    "smaller than the axis": (
        lambda a, w: (F.linear(a, w).softmax(-1), a.max(1)[0], a.topk(1, 0)[0], a.cumsum(0), a.var(0)),
        (x(2, 3), x(2, 3)),
    ),
    "smaller than the axis, one by one": (
        lambda a, b: (a.prod(0), a.cumprod(1), a.logcumsumexp(0), F.cosine_similarity(a, b, 0), a.norm(p=INF)),
        (x(3, 2), x(3, 2)),
    ),
    "scalars": (
        lambda a, b: (a * b, a.sum(), a.softmax(0), b.cumsum(0), torch.stack([a, b]), a.max(0)[0], a.reshape(1)[0]),
        (x(), x()),
    ),
    "a scalar with all": (lambda a, b: (a + b, torch.where(b > a, b, a), b.clamp(max=a)), (x(), x(3, 4))),
    # broadcasting from both sides
    "broadcasting": (
        lambda a, b: (a + b, a * b, torch.where(a > b, a, b), torch.addcmul(a, b, a), (a - b).pow(2).sum((0, 2))),
        (x(4, 1, 6), x(5, 1)),
    ),
    "broadcast products": (lambda a, b: (a @ b, torch.einsum("aij,bjk->abik", a, b)), (x(1, 3, 4), x(5, 4, 2))),
    "broadcast losses": (lambda a, b: (F.mse_loss(a, b), F.l1_loss(a, b, reduction="sum")), (x(4, 6), x(4, 6))),
    # in place, views
    "in place": (lambda a, b: (a * 1).add_(b).mul_(2).clamp_(-1, 1).div_(b.exp()), (x(4, 6), x(4, 6))),
    "in place on halves": (halves, (x(4, 6),)),
    "in place through views": (through_views, (x(4, 6),)),
    "in place by mask": (masked, (x(4, 6),)),
    "in place by index": (
        lambda a, i, b: (a * 1).index_add_(0, i, b).index_fill_(1, i, 0.5).scatter_(1, i.reshape(2, 2), 9.0),
        (x(4, 6), torch.tensor([3, 0, 1, 2]), x(4, 6)),
    ),
    "views that alias": (
        lambda a: (a.t().flatten(), a.view(2, 2, 6)[:, 1], a.expand(3, 4, 6).sum(0), a.unfold(1, 2, 2), a.diagonal()),
        (x(4, 6),),
    ),
    "twice the same tensor": (lambda a: (a @ a.t(), a * a, torch.cat([a, a]), F.mse_loss(a, a * 2)), (x(4, 6),)),
    "short-time transforms": (
        lambda a, w: (
            torch.istft(transform(a, 8, 2, window=w), 8, 2, window=w),
            torch.istft(transform(a, 8, 3), 8, 3, length=20),
            torch.istft(transform(a, 8, 2, 6, w[:6], normalized=True), 8, 2, 6, w[:6], normalized=True, length=22),
            torch.istft(transform(a[0], 8, onesided=False), 8, onesided=False),
            torch.istft(transform(a + 1j * a.flip(0), 8, 2, window=w), 8, 2, window=w, return_complex=True),
            torch.istft(transform(a, 8, 4, center=False), 8, 4, center=False),
        ),
        (x(4, 24), unit(8) + 0.5),
    ),
    "in place on complex slices": (
        lambda a, b, c: (
            modes(torch.zeros(4, 6, dtype=a.dtype), a, b),
            modes(a * 1, b * 2, a.conj()),
            modes(a.conj() * 1, c, b).t()[1:3],
        ),
        (
            torch.complex(x(4, 6), x(4, 6)).detach().requires_grad_(),
            torch.complex(x(4, 6), x(4, 6)).detach().requires_grad_(),
            x(4, 6),
        ),
    ),
    # memory formats
    "channels last": (
        lambda a, w: (
            F.conv2d(a.contiguous(memory_format=torch.channels_last), w).relu(),
            a.to(memory_format=torch.channels_last).flatten(1),
            F.group_norm(a.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2), 2),
        ),
        (x(2, 4, 5, 6).detach().to(memory_format=torch.channels_last).requires_grad_(), x(3, 4, 2, 2)),
    ),
    "strided input": (lambda a: (a.reshape(-1), a.softmax(0)), (plain(x(6, 8)).t()[::2].requires_grad_(),)),
    # complex numbers
    "complex": (
        lambda a, b: (a * b, a @ b.t(), a.abs(), a.conj(), a.angle(), a.real + b.imag, a.sum(0), a.mean(1), a.exp()),
        (torch.complex(x(4, 6), x(4, 6)).detach().requires_grad_(), torch.complex(x(4, 6), x(4, 6)).detach()),
    ),
    "rotary by complex numbers": (
        lambda a, f: torch.view_as_real(torch.view_as_complex(a.unflatten(-1, (-1, 2))) * torch.polar(f * 0 + 1, f)),
        (x(2, 3, 8), plain(unit(3, 4))),
    ),
    "numbers whose memory holds their conjugates or negatives": (
        lambda a, b: (
            torch.view_as_real(torch.fft.ihfft(b).resolve_conj()),
            torch.view_as_real(a.conj().resolve_conj()),
            a.conj().imag.resolve_neg() + b,
            a.conj().flip(0),
            a.conj().cumsum(0),
        ),
        (torch.complex(x(4, 6), x(4, 6)).detach().requires_grad_(), x(4, 6)),
    ),
    "complex products": (
        lambda a, b: (torch.einsum("ij,kj->ik", a, b), a.prod(1), torch.stack([a, b]).norm(dim=0), a.cumsum(0)),
        (torch.complex(x(3, 4), x(3, 4)).detach(), torch.complex(x(3, 4), x(3, 4)).detach()),
    ),
    "empty indices of another rank": (
        lambda a, i: (torch.gather(a, 0, i), a * 2, torch.scatter(a, 0, i, 1.0)),
        (x(4, 6), torch.zeros(0, dtype=torch.int64)),
    ),
    "similarities of all pairs": (
        lambda a, b: torch.cosine_similarity(a[:, None], b[None], -1),
        (x(4, 6), x(3, 6)),
    ),
    "stacks of matrices": (
        lambda a, b: (
            torch.linalg.solve(a, b),
            torch.linalg.svdvals(a),
            torch.linalg.slogdet(a)[1],
            torch.linalg.lu_factor(a)[0],
            torch.linalg.matrix_norm(a, 2),
            torch.linalg.pinv(a),
            torch.logdet(a @ a.mT),
        ),
        (x(4, 3, 3), x(4, 3, 2)),
    ),
    "functions of others": (
        lambda a, b: (
            torch.kron(a, b),
            torch.hstack([a, b]),
            *torch.hsplit(a, 2),
            torch.tensordot(a, b, ([0], [0])),
            torch.block_diag(a, b),
            torch.cov(a),
            torch.corrcoef(b),
            torch.trapezoid(a),
            torch.gradient(a)[0],
            torch.combinations(b[:, 0]),
            torch.dist(a, b[:, :1]),
            torch.trace(a),
        ),
        (x(4, 6), x(4, 3)),
    ),
    "fourier": (
        lambda a: (torch.fft.fft(a).abs(), torch.fft.irfft(torch.fft.rfft(a) * 2)),
        (x(4, 6),),
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled(16)
def test_odd_inputs_give_what_one_device_gives(name: str) -> None:
    function, tensors = CASES[name]
    program = program_of(function, tensors)
    for seed in range(SEEDS):
        outcome = run(program, seed)
        assert outcome.ok, f"seed {seed}: {outcome.error:.3g} at {outcome.where}, {outcome.collectives_match=}"


class Rotary(nn.Module):
    """Complex numbers in a buffer, an input, a parameter's path and the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)
        self.register_buffer("turns", torch.polar(torch.ones(3, 4), unit(3, 4).detach().float()))

    def forward(self, states: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
        turned = torch.view_as_complex(self.project(states).unflatten(-1, (-1, 2))) * self.turns * weights
        return torch.view_as_real(turned).square().sum(), turned, turned.abs() > 1, turned.imag.argmax(-1)


def test_verify_compares_complex_numbers() -> None:
    states, weights = torch.randn(4, 3, 8), torch.randn(4, 3, 4, dtype=torch.complex64)
    plan = sw.plan(Rotary(), (states, weights), 4, mesh=sw.Mesh(dp=2, tp=2), strategies={"project": "n@tp"})
    assert sw.verify(Rotary(), (states, weights), plan).ok


def test_a_wrong_imaginary_part_and_nan_on_one_side_are_differences() -> None:
    want = torch.tensor([1 + 2j, complex(NAN, 1)])
    assert errors_by_tensor.relative_difference(want, want.clone(), 2.0) == 0
    assert errors_by_tensor.relative_difference(want, torch.tensor([1 + 3j, complex(NAN, 1)]), 2.0) == 0.5
    assert not errors_by_tensor.relative_difference(want, torch.tensor([1 + 2j, 1 + 1j]), 2.0) <= 1


def test_nan_in_the_loss_stays_nan() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8))

        def forward(self, states: Tensor) -> tuple[Tensor, ...]:
            found = states @ self.weight
            return (found * NAN).sum(), found / 0, found.to(torch.complex64)

    states, module = torch.randn(4, 8), Broken()
    plan = sw.plan(module, states, 4, mesh=sw.Mesh(dp=2, tp=2), search="sharding_propagation")
    report = sw.verify(module, states, plan)
    assert "the loss is nan, from operator /mul" in report.not_proven
    assert not report.ok
    assert all(difference.error == 0 for difference in report.differences)


class Spaced(nn.Module):
    def __init__(self, space: Function) -> None:
        super().__init__()
        self.space, self.end, self.linear = space, nn.Parameter(torch.tensor(2.0)), nn.Linear(8, 8)

    def forward(self, states: Tensor) -> Tensor:
        return (self.linear(states) * self.space(self.end, self.linear.bias[1])).square().mean()


@pytest.mark.parametrize(
    "space",
    [
        lambda end, other: torch.linspace(0, end, 8),
        lambda end, other: torch.linspace(end, other, 8) * other,
        lambda end, other: torch.linspace(other, 3.0, 8),
        lambda end, other: torch.logspace(0.5, end, 8),
        lambda end, other: torch.logspace(other, end, 8, base=3.0),
        lambda end, other: torch.logspace(end, 1, 8),
    ],
)
@pytest.mark.sampled(3)
def test_no_gradient_flows_into_numbers_that_torch_reads_out_of_parameters(space: Function) -> None:
    states, module = torch.randn(4, 8), Spaced(space)
    module(states).backward()
    assert module.end.grad is None
    plan = sw.plan(module, states, 4, mesh=sw.Mesh(dp=2, tp=2), strategies={"linear": "n@tp"})
    report = prove(module, states, plan)
    assert ("gradient", "end") not in {(d.kind, d.name) for d in report.differences}


# -- lower precision ---------------------------------------------------------------------------------------------------

_OWN = torch.Generator().manual_seed(0)  # the samples' generator has drawn what other collected files ask for


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=_OWN, dtype=torch.float64, requires_grad=True)


def indices(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=_OWN)


ROUNDED: dict[str, tuple[Function, tuple[Tensor, ...]]] = {
    "layers": (
        lambda a, w, b, v: F.linear(F.gelu(F.linear(F.layer_norm(a, (6,)), w, b)), v).softmax(-1),
        (drawn(4, 6), drawn(8, 6), drawn(8), drawn(3, 8)),
    ),
    "reductions": (lambda a: (a.sum(0), a.mean(1), a.var(0), a.logsumexp(1), a.amax(0), a.cumsum(1)), (drawn(4, 6),)),
    "losses": (
        lambda a, t: (F.cross_entropy(a, t), F.cross_entropy(a, t, label_smoothing=0.1), a.log_softmax(1)),
        (drawn(6, 5), indices(5, 6)),
    ),
    "attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        (drawn(1, 2, 4, 4), drawn(1, 2, 4, 4), drawn(1, 2, 4, 4)),
    ),
    "lookups and updates": (lambda w, i: (F.embedding(i, w), w.index_add(0, i, w[i])), (drawn(6, 4), indices(6, 5))),
    # Eight elements in a group: of two, the normalised values are 1 and -1, and gradients are rounding alone.
    "norms": (lambda a, w: (F.rms_norm(a, (16,), w), F.group_norm(a, 2), a.norm(dim=0)), (drawn(4, 16), drawn(16))),
}


def relative_error(have: Tensor, want: Tensor) -> float:
    """The largest difference over the largest magnitude; scalars (the loss) are sums of what else is compared."""
    if not want.dim():
        return 0.0
    scale = want.detach().abs().max().double().clamp_min(1)
    return float((have.detach().double() - want.detach().double()).abs().max() / scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ROUNDED)
@pytest.mark.sampled(4)
def test_lower_precision_differs_by_rounding_only(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every operator and every message rounds by half an ``eps`` of its largest number, some 8 of them one after the
    other; the largest numbers (cotangents of 3.5, summands of stored partial values of 4) are some 30 times larger than
    the gradients they cancel to. Errors of the rules are of order 1, and found in float64 above."""
    monkeypatch.setattr(running, "_difference", relative_error)
    function, tensors = ROUNDED[name]
    rounded = tuple(
        tensor.detach().to(dtype).requires_grad_() if tensor.requires_grad else tensor for tensor in tensors
    )
    program = program_of(function, rounded)
    for seed in range(SEEDS):
        outcome = run(program, seed)
        bound = min(128 * torch.finfo(dtype).eps, 0.25)
        assert outcome.error <= bound, f"seed {seed}: {outcome.error:.3g} > {bound:.3g} at {outcome.where}"


# -- what has no fixed shape -------------------------------------------------------------------------------------------


def unique(a: Tensor) -> Tensor:
    return torch.unique(a).sum()


def where_nonzero(a: Tensor) -> Tensor:
    return torch.where(a > 0)[0].max()


def masked_select(a: Tensor) -> Tensor:
    return torch.masked_select(a, a > 0).std()


def boolean_index(a: Tensor) -> Tensor:
    return a[a > 0].cumsum(0).sum()


def counts(a: Tensor) -> Tensor:
    return torch.bincount(a.long().clamp_min(0).flatten(), minlength=5)


def repeats(a: Tensor) -> Tensor:
    return torch.repeat_interleave(a, a[:, 0].long().abs(), dim=0).sum()


@pytest.mark.parametrize(
    ("function", "what"),
    [
        (unique, "_unique2"),
        (where_nonzero, "max"),
        (masked_select, "std"),
        (boolean_index, "cumsum"),
        (counts, "bincount"),
        (repeats, "repeat_interleave"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_shapes_that_depend_on_data_are_refused_with_the_line(function: Function, what: str) -> None:
    line = function.__code__.co_firstlineno + 1
    with raises(CaptureError, what, "depends", source=f"test_odd_inputs.py:{line}"):
        capture(Calls(function, (x(3, 4),)), ())
