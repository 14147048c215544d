"""Kinds of models whose right plans a plain comparison may call wrong, since norms make last bits visible or gradients
are near zero: right plans of them are equal, and every kind of mistake is found in them, wherever it is made."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise as sw
from museum.faults import NothingToBreak, cotangent, exchange, gradient, kernel, loaded

# A number that is zero by mathematics and computed from others of size 1 is smaller: twice zero is zero.
ZERO = 1e-12
PER_CASE = 3  # mistakes of a case that are made where not all are


class ConvNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.first = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.linear, self.last = nn.Linear(64, 6), nn.BatchNorm1d(6)

    def forward(self, x: Tensor, _: Tensor) -> Tensor:
        return self.last(self.linear(torch.relu(self.first(self.conv(x))).flatten(1))).square().mean()


def normalized(channels_in: int, channels_out: int, size: int, **options: Any) -> nn.Sequential:
    convolution = nn.Conv2d(channels_in, channels_out, size, padding=size // 2, **options)
    return nn.Sequential(convolution, nn.BatchNorm2d(channels_out))


class Residual(nn.Module):
    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.up = normalized(channels_in, channels_out, 3, stride=2, bias=False)
        self.down = normalized(channels_out, channels_out, 3, bias=False)
        self.shortcut = normalized(channels_in, channels_out, 1, stride=2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.down(torch.relu(self.up(x))) + self.shortcut(x))


class Inverted(nn.Module):
    """A block of MobileNet, with the biases that a norm takes away again."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = normalized(width, 2 * width, 1), normalized(2 * width, width, 1)
        self.depth = normalized(2 * width, 2 * width, 3, groups=2 * width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu6(self.depth(F.relu6(self.up(x)))))


class Images(nn.Module):
    def __init__(self, *blocks: nn.Module, width: int) -> None:
        super().__init__()
        self.stem, self.blocks, self.head = normalized(3, 4, 3), nn.Sequential(*blocks), nn.Linear(width, 5)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.blocks(F.relu6(self.stem(x))).mean((2, 3))), labels)


class NearZero(nn.Module):
    """Gates that are closed and a loss that is hardly there: gradients of 1e-8, 1e-12 and less."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.norm, self.down = (
            nn.Linear(6, 8),
            nn.Linear(6, 8),
            nn.LayerNorm(8),
            nn.Linear(8, 5),
        )

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        h = self.norm(self.up(x[:, :, 0, 0])) * torch.sigmoid(40 * self.gate(x[:, :, 0, 1]))
        return F.cross_entropy(60 * self.down(h), labels) * 1e-8


@dataclass(frozen=True)
class Case:
    model: nn.Module
    inputs: tuple[Tensor, ...]
    plan: sw.Plan

    def gradients(self) -> dict[str, float]:
        """Parameter -> the largest number in its gradient on one device, in float64."""
        wide = copy.deepcopy(self.model).double()
        wide(*(x.double() if x.is_floating_point() else x for x in self.inputs)).backward()
        return {name: float(p.grad.abs().max()) for name, p in wide.named_parameters() if p.grad is not None}

    def verified(self) -> sw.results.Report:
        return sw.verify(self.model, self.inputs, self.plan)


DATA: dict[str, Any] = {"mesh": sw.Mesh(dp=2), "mode": "data_parallel"}
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], dict[str, str]]] = {
    "conv-BN-linear-BN": (ConvNorm, (8, 3, 4, 4), {"conv": "co@tp", "linear": "n@tp"}),
    "ResNet": (lambda: Images(Residual(4, 8), width=8), (8, 3, 6, 6), {"blocks.*.up.0": "co@tp", "head": "n@tp"}),
    "MobileNet": (lambda: Images(Inverted(4), width=4), (8, 3, 4, 4), {"blocks.*.up.0": "co@tp"}),
    "near zero": (NearZero, (8, 6, 1, 2), {"up": "n@tp", "gate": "n@tp"}),
}


@cache
def case(name: str, splits_batch: bool) -> Case:
    make, shape, strategies = MODELS[name]
    torch.manual_seed(0)
    model, inputs = make(), (torch.randn(shape), torch.randint(5, shape[:1]))
    options = DATA if splits_batch else {"mesh": sw.Mesh(tp=2), "strategies": strategies}
    plan = sw.plan(model, inputs, 2, bucket_bytes=0, **options)
    return Case(model, inputs, plan)


CASES = [(name, splits_batch) for name in MODELS for splits_batch in (True, False)]
IDS = [f"{name}, {'dp' if splits_batch else 'tp'}" for name, splits_batch in CASES]


@pytest.mark.parametrize(("name", "splits_batch"), CASES, ids=IDS)
@pytest.mark.sampled(2)
def test_a_right_plan_is_equal(name: str, splits_batch: bool) -> None:
    made = case(name, splits_batch)
    report = made.verified()
    assert report.ok, str(report)
    assert report.forward
    assert report.backward
    if name == "conv-BN-linear-BN":  # of MobileNet it depends on the processor
        assert report.max_error > report.tolerance  # otherwise nothing tells rounding from error here
        assert report.rounding is not None


# ----------------------------------------------------------------------------------------------------------- mistakes


@dataclass
class Change:
    """A mistake in numbers that notes the largest difference it made."""

    change: Callable[[Tensor, Tensor], Tensor]  # what was there before (sent), what is right -> what is taken
    largest: float = field(default=0.0)

    def __call__(self, before: Tensor, right: Tensor) -> Tensor:
        made = self.change(before, right)
        if right.numel():
            self.largest = max(self.largest, float((made.double() - right.double()).abs().max()))
        return made


def not_sent(sent: Tensor, right: Tensor) -> Tensor:
    return sent if sent.shape == right.shape else torch.zeros_like(right)


def doubled(_: Tensor, right: Tensor) -> Tensor:
    return right * 2


def a_little_more(_: Tensor, right: Tensor) -> Tensor:
    return right * 1.001


def nothing(_: Tensor, right: Tensor) -> Tensor:
    return torch.zeros_like(right)


Mistake = tuple[str, Callable[[Change], AbstractContextManager[None]], Change]


def of_messages(plan: sw.Plan) -> Iterator[Mistake]:
    for entry in plan.conversions:
        for backward in (False, True):
            changes = (not_sent, doubled, a_little_more) if (entry.backward if backward else entry.forward) else ()
            if entry.value.endswith(".amax"):  # subtracted ahead of exponentials: a number that is every rank's cancels
                changes = changes[:1]
            for change in changes:

                def broken(
                    made: Change, value: str = entry.value, op: str = entry.op, backward: bool = backward
                ) -> AbstractContextManager[None]:
                    return exchange(value, op, backward=backward, receive=lambda _, sent, got: made(sent, got))

                way = "backward" if backward else "forward"
                yield f"{change.__name__}: {entry.value} for {entry.op}, {way}", broken, Change(change)


def of_kernels(plan: sw.Plan) -> Iterator[Mistake]:
    for op in plan.operators:
        for backward in (False, True):
            for change in (nothing, a_little_more):

                def broken(
                    made: Change, name: str = op.name, backward: bool = backward
                ) -> AbstractContextManager[None]:
                    def around(rank: int, target: Any, *args: Any, **kwargs: Any) -> Any:
                        right = target(*args, **kwargs) if rank == 1 else None
                        if not isinstance(right, Tensor) or not right.is_floating_point() or right._is_view():
                            return NotImplemented
                        return made(right, right)

                    return kernel(name, around, backward=backward)

                way = "backward" if backward else "forward"
                yield f"{change.__name__}: {op.name} of rank 1, {way}", broken, Change(change)


def of_parameters(plan: sw.Plan) -> Iterator[Mistake]:
    yield "the loss, doubled", lambda _: cotangent(2.0), Change(doubled, float("inf"))
    for entry in plan.parameters:
        yield f"gradient of {entry.name}", lambda _, name=entry.name: gradient(name, 0.5), Change(doubled)
        if "@" in entry.layout:

            def first_shard(made: Change, name: str = entry.name) -> AbstractContextManager[None]:
                return loaded(name, lambda rank, own, whole: made(whole[: len(own)], own))

            yield f"the first shard of {entry.name} for all", first_shard, Change(not_sent)


def not_found(made: Case, mistakes: list[Mistake]) -> tuple[int, list[str]]:
    """How many were made, and those that were taken for equal though they change numbers that are not zero."""
    of, count, missed = made.gradients(), 0, []
    for label, broken, change in mistakes:
        try:
            with broken(change):
                report = made.verified()
        except NothingToBreak:  # an operator of views only, or one whose backward has no kernel
            continue
        count += 1
        if label.startswith("gradient of"):
            change.largest = of[label.removeprefix("gradient of ")]
        if report.ok and change.largest > ZERO * max(of.values()):
            missed.append(f"{label} ({change.largest:.1e})")
        if not report.ok and report.rounding is not None and not report.rounding.unexplained:
            missed.append(f"{label}: not equal, and called rounding")
    return count, missed


KINDS = {"messages": of_messages, "kernels": of_kernels, "parameters": of_parameters}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sampled(4)
def test_some_mistakes_of_every_kind_are_found(name: str, kind: str) -> None:
    made = case(name, splits_batch=([*MODELS].index(name) + [*KINDS].index(kind)) % 2 == 0)
    mistakes = list(KINDS[kind](made.plan))
    count, missed = not_found(made, mistakes[:: max(1, len(mistakes) // PER_CASE)])
    assert count >= 1
    assert not missed


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "splits_batch"), CASES, ids=IDS)
def test_every_mistake_is_found(name: str, splits_batch: bool, kind: str) -> None:
    made = case(name, splits_batch)
    count, missed = not_found(made, list(KINDS[kind](made.plan)))
    print(f"{name}, {kind}: {count} mistakes")
    assert not missed
