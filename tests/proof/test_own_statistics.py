"""Buffers of a model's own that every micro-batch updates: proven, and equal to gradient accumulation by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from shardwise.proof import ranks

pytestmark = pytest.mark.filterwarnings(
    "ignore::shardwise.errors.PlanWarning"
)  # every micro-batch updates them: it says that
DATA_PARALLEL = {"mode": "data_parallel", "micro_batch": 3}


class Average(nn.Module):
    """The loss does not depend on the buffers."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
            self.calls += 1
        return x


class RunningNorm(nn.Module):
    """The loss depends on the buffer, and so on the micro-batches before."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.register_buffer("square", torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.square.copy_(0.9 * self.square + 0.1 * (x * x).mean(0))
        return x * torch.rsqrt(self.square + 1e-5)


class OwnBatchNorm(nn.Module):
    """The loss depends on what the buffer is made from."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("variance", torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        mean, square = x.mean(0), (x * x).mean(0)
        with torch.no_grad():
            self.mean.lerp_(mean, 0.1)
            self.variance.lerp_(square - mean * mean, 0.1)
        return (x - mean) * torch.rsqrt(square - mean * mean + 0.1)


class Codebook(nn.Module):
    """Vector quantization whose codes are running means of the rows that are nearest to them."""

    def __init__(self, width: int = 16, codes: int = 6) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(codes, width))
        self.register_buffer("counts", torch.ones(codes))

    def forward(self, x: Tensor) -> Tensor:
        nearest = torch.cdist(x, self.codes).argmin(1)
        chosen = F.one_hot(nearest, len(self.codes)).to(x.dtype)
        quantized = self.codes[nearest]
        with torch.no_grad():
            self.counts.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
            self.codes.lerp_(chosen.T @ x / self.counts[:, None], 0.1)
        return x + (quantized - x).detach()


class Net(nn.Module):
    def __init__(self, middle: nn.Module, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(8, 16), middle, nn.Linear(16, 5)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.dropout(torch.tanh(self.middle(self.first(x)))))


def tokens_that_count(output: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(output, labels, ignore_index=-100)


MIDDLES: dict[str, tuple[Callable[[], nn.Module], bool]] = {  # and whether the loss depends on the buffers
    "average": (Average, False),
    "batch norm and average": (lambda: nn.Sequential(nn.BatchNorm1d(16), Average()), False),
    "running norm": (RunningNorm, True),
    "own batch norm": (OwnBatchNorm, True),
    "codebook": (Codebook, True),
    "batch norm and running norm": (lambda: nn.Sequential(nn.BatchNorm1d(16), RunningNorm()), True),
}


def asked(
    name: str, loss: Callable[[Tensor, Tensor], Tensor], dropout: float
) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    net, x = Net(MIDDLES[name][0](), dropout), torch.randn(12, 8)
    labels = torch.randint(0, 5, (12,))
    labels[[2, 7, 8]] = -100
    return net, (x, labels if loss is tokens_that_count else torch.randn(12, 5))


@pytest.mark.parametrize("name", MIDDLES)
@pytest.mark.parametrize(
    "options",
    [
        DATA_PARALLEL,
        {"mode": "data_parallel", "micro_batch": 4, "stages": 2},
        {"mesh": sw.Mesh(tp=2), "micro_batch": 3},
    ],
    ids=["data parallel", "stages", "tensor parallel"],
)
@pytest.mark.sampled(3)
def test_a_right_plan_is_equal(name: str, options: dict[str, Any]) -> None:
    if options.get("mesh"):
        options = {**options, "strategies": {"first": "n@tp", "last": "k@tp"}}
    net, batch = asked(name, tokens_that_count, 0.0 if "stages" in options else 0.3)
    plan = sw.plan(net, batch, 2, loss=tokens_that_count, **options)
    report = sw.verify(net, batch, plan, loss=tokens_that_count)
    assert report.ok, str(report)
    assert ("one after another" in str(report)) == MIDDLES[name][1]


@pytest.mark.parametrize("name", ["average", "running norm"])
@pytest.mark.parametrize("fault", ["a buffer that is written wrong", "a buffer that only the last micro-batch writes"])
def test_a_wrong_rank_is_found(name: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net, batch = asked(name, F.mse_loss, 0.0)
    plan = sw.plan(net, batch, 2, loss=F.mse_loss, **DATA_PARALLEL)
    write, calls = ranks.write_buffers, []

    def wrong(held: list[Tensor], new: list[Tensor]) -> None:
        calls.append(new)
        is_last = len(calls) % (2 * 4 * len(list(net.buffers()))) > 2 * 3 * len(list(net.buffers())) - 1
        if fault == "a buffer that is written wrong":
            write(held, [value * 1.001 if value.is_floating_point() else value for value in new])
        elif is_last:
            write(held, new)

    monkeypatch.setattr(ranks, "write_buffers", wrong)
    report = sw.verify(net, batch, plan, loss=F.mse_loss)
    assert not report.ok
    assert {d.kind for d in report.differences if d.error > report.tolerance} >= {"buffer"}


def on_ranks(name: str) -> float:
    """The largest difference from gradient accumulation by hand, in losses, gradients and buffers of three steps."""
    net, batch = asked(name, F.mse_loss, 0.0)
    net, batch = net.double(), tuple(tensor.double() for tensor in batch)
    alone = copy.deepcopy(net)
    plan = sw.plan(net, batch, 2, loss=F.mse_loss, **DATA_PARALLEL) if dist.get_rank() == 0 else None
    par = sw.parallelize(net, plan, loss=F.mse_loss)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (alone, par)]
    worst = 0.0
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = sum(F.mse_loss(alone(x), y) / 4 for x, y in zip(*(tensor.split(3) for tensor in batch), strict=True))
        loss.backward()
        differences = [par.step(*batch) - loss]
        held = dict(par.named_buffers())
        differences += [held[name] - buffer for name, buffer in alone.named_buffers()]
        differences += [sw.full_tensor(par.get_parameter(n).grad) - p.grad for n, p in alone.named_parameters()]
        worst = max(worst, *(float(difference.detach().abs().max()) for difference in differences))
        for optimizer in optimizers:
            optimizer.step()
    return worst


def test_ranks_do_what_gradient_accumulation_does(run_cases: Callable[..., list[list[float]]]) -> None:
    for name, found in zip(MIDDLES, run_cases(on_ranks, 2, [(name,) for name in MIDDLES]), strict=True):
        assert max(found) < 1e-12, (name, found)  # values near 1, a few hundred terms
