"""What the code of a model or of its loss reads beside inputs and tensors of the model, changed between two steps:
ranks would go on with what was captured, so it is refused by name."""

from __future__ import annotations

import argparse
import copy
import functools
import types
import warnings
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise as sw
from launch.gloo_ranks import RunRanks
from raising import message, raises
from shardwise.graph.closure_guards import ClosureGuards
from shardwise.graph.code_reachability import reachable_code

SCALE, FACTORS, STATE = 2.0, [1.0, 2.0], torch.ones(3, dtype=torch.float64)
TABLE = torch.ones(3000, dtype=torch.float64)
CONFIG: dict[str, Any] = {"scale": 2.0, "deep": {"scale": 1.0}}
ARGUMENTS, SETTINGS = argparse.Namespace(scale=2.0), types.SimpleNamespace(scale=2.0)
CONTEXT = ContextVar("CONTEXT", default=2.0)
KINDS = {"tanh"}
ACTIVATION: Callable[[Tensor], Tensor] = torch.tanh
REGISTRY: dict[str, Any] = {"double": lambda: 2.0}
step = 0  # forward has an attribute of this name


class Schedule:
    rate = 1.0

    def __init__(self) -> None:
        self.scale = 2.0

    def factor(self) -> float:
        return self.scale * self.rate


SCHEDULE = Schedule()
TEACHER = nn.Linear(3, 3).double().requires_grad_(False)


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.step, self.settings = nn.Linear(3, 3), 5, SETTINGS


class Net(Base):
    rate = 1.0

    def __init__(self, loss: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self, self.fc(x))


def scaled(h: Tensor) -> Tensor:
    return h * CONFIG["deep"]["scale"]


def doubled(h: Tensor) -> Tensor:
    return h * 2.0


def put(**values: Any) -> None:
    globals().update(values)


Change = tuple[Callable[[Any, Tensor], Tensor], Callable[[], Any], str]
CHANGES: dict[str, Change] = {
    "a number of the file": (lambda _, h: (h * SCALE).sum(), lambda: put(SCALE=3.0), "SCALE (2.0 -> 3.0)"),
    "an item": (lambda _, h: (h * CONFIG["scale"]).sum(), lambda: CONFIG.update(scale=3.0), "CONFIG['scale'] (2.0 -> "),
    "an item of an item, in a function": (
        lambda _, h: scaled(h).sum(),
        lambda: CONFIG["deep"].update(scale=3.0),
        "CONFIG['deep']['scale'] (1.0 -> 3.0)",
    ),
    "an argument": (
        lambda _, h: (h * ARGUMENTS.scale).sum(),
        lambda: put_in(ARGUMENTS),
        "ARGUMENTS.scale (2.0 -> 3.0)",
    ),
    "a list": (lambda _, h: (h * FACTORS[1]).sum(), lambda: FACTORS.__setitem__(1, 3.0), "FACTORS[1] (2.0 -> 3.0)"),
    "a longer list": (lambda _, h: (h * len(FACTORS)).sum(), lambda: FACTORS.append(1.0), "FACTORS[2] (none -> 1.0)"),
    "a set": (lambda _, h: (h * len(KINDS)).sum(), lambda: KINDS.add("relu"), "KINDS (1 items -> 2 items)"),
    "a context": (
        lambda _, h: (h * CONTEXT.get()).sum(),
        lambda: CONTEXT.set(3.0),
        "CONTEXT, in its context (2.0 -> 3.0)",
    ),
    "a tensor": (lambda _, h: (h * STATE).sum(), lambda: STATE.mul_(2), "STATE ([1.0, 1.0, 1.0] -> [2.0, 2.0, 2.0])"),
    "a tensor past its version": (lambda _, h: (h * STATE).sum(), lambda: STATE.data.mul_(2), "-> [4.0, 4.0, 4.0])"),
    "another tensor": (lambda _, h: (h * STATE).sum(), lambda: put(STATE=STATE + 1), "-> [5.0, 5.0, 5.0])"),
    "a large tensor": (lambda _, h: (h * TABLE[:3]).sum(), lambda: TABLE.mul_(2), "[3000] after 0 writes -> "),
    "a function": (lambda _, h: ACTIVATION(h).sum(), lambda: put(ACTIVATION=torch.sigmoid), "ACTIVATION (_Variable"),
    "an object": (lambda _, h: (h * SCHEDULE.factor()).sum(), lambda: put_in(SCHEDULE), "SCHEDULE.scale (2.0 -> 3.0)"),
    "its class": (
        lambda _, h: (h * SCHEDULE.factor()).sum(),
        lambda: put_in(Schedule, "rate"),
        "Schedule.rate (1.0 ->",
    ),
    "the model's class": (lambda net, h: (h * net.rate).sum(), lambda: put_in(Net, "rate"), "Net.rate (1.0 -> 3.0)"),
    "a new attribute of its class": (
        lambda net, h: (h * getattr(net, "more", 1.0)).sum(),
        lambda: put_in(Base, "more"),
        "Base.more (none -> 3.0)",
    ),
    "a new attribute of torch's class": (
        lambda net, h: (h * getattr(net.fc, "more_of_linear", 1.0)).sum(),
        lambda: put_in(nn.Linear, "more_of_linear"),
        "Linear.more_of_linear (none -> 3.0)",
    ),
    "another model": (
        lambda _, h: F.mse_loss(h, TEACHER(h.detach())),
        lambda: TEACHER.weight.data.mul_(2),
        "TEACHER.weight (a tensor [3, 3] -> ",
    ),
    "another model's new data": (
        lambda _, h: F.mse_loss(h, TEACHER(h.detach())),
        lambda: put_in(TEACHER.bias, "data", TEACHER.bias.data + 1),
        "TEACHER.bias ([",
    ),
    "another model's mode": (
        lambda _, h: F.mse_loss(h, TEACHER(h.detach())),
        lambda: TEACHER.eval(),
        "TEACHER.training (True -> False)",
    ),
    "settings of the model": (
        lambda net, h: (h * net.settings.scale).sum(),
        lambda: put_in(SETTINGS),
        "settings.scale (2.0 -> 3.0)",
    ),
    "the default dtype": (
        lambda _, h: (h * torch.tensor(0.1)).sum(),
        lambda: torch.set_default_dtype(torch.float64),
        "torch's default dtype (torch.float32 -> torch.float64)",
    ),
    "forward": (
        lambda _, h: h.sum(),
        lambda: put_in(Net, "forward", lambda self, x: self.fc(x).sum() * 3),
        "Net.forward (Net.forward -> ",
    ),
}
HARMLESS: dict[str, tuple[Callable[[Any, Tensor], Tensor], Callable[[], Any]]] = {
    "a name that is an attribute in forward": (lambda net, h: (h * net.step).sum(), lambda: put(step=7)),
    "an equal number": (lambda _, h: (h * SCALE).sum(), lambda: put(SCALE=float(str(SCALE)))),
    "an equal dict": (lambda _, h: (h * CONFIG["scale"]).sum(), lambda: put(CONFIG=copy.deepcopy(CONFIG))),
    "an equal tensor": (lambda _, h: (h * STATE).sum(), lambda: put(STATE=STATE.clone())),
    "a registry that grows": (
        lambda _, h: (h * REGISTRY["double"]()).sum(),
        lambda: REGISTRY.update(triple=lambda: 3.0, more={"factor": 4.0}),
    ),
    "what forward does not read": (lambda _, h: h.sum(), lambda: put(SCALE=4.0)),
}


def put_in(holder: Any, name: str = "scale", value: Any = 3.0) -> None:
    setattr(holder, name, value)


def split(net: nn.Module, inputs: tuple[Tensor, ...], **settings: Any) -> Any:
    plan = sw.plan(net, inputs, 2, mode="data_parallel", **settings)
    return sw.parallelize(net, plan, **settings)


def changed_between_steps() -> tuple[dict[str, str], dict[str, str]]:
    refused, went_on = {}, {}
    x = torch.randn(4, 3, dtype=torch.float64)
    for name, (loss, change, _) in CHANGES.items():
        par = split(Net(loss).double(), (x,))
        par(x).backward()
        par(x).backward()
        change()
        refused[name] = message(lambda par=par: par(x))
        assert refused[name] == message(lambda par=par: par.eval()(x))  # and so until it is put back
        torch.set_default_dtype(torch.float32)
    for name, (loss, change) in HARMLESS.items():
        par = split(Net(loss).double(), (x,))
        before = par(x)
        change()
        went_on[name] = message(lambda par=par, before=before: torch.testing.assert_close(par(x), before))
    return refused, went_on


def test_what_the_code_reads_is_refused_when_it_changes(run_ranks: RunRanks) -> None:
    forward = Net.forward
    for refused, went_on in run_ranks(changed_between_steps, 2):
        for name, (_, _, words) in CHANGES.items():
            assert "the code of the model or of its loss uses " in refused[name], name
            assert words in refused[name], name
        assert set(went_on.values()) == {""}, went_on
    assert Net.forward is forward  # ranks are other processes


class Criterion(nn.Module):
    weight: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.alpha = 1.0
        self.register_buffer("weight", torch.ones(3, dtype=torch.float64))

    def forward(self, out: Tensor, target: Tensor) -> Tensor:
        return ((out - target).square() * self.weight).mean() * self.alpha


class Trainer:
    gamma = 1.0

    def __init__(self) -> None:
        self.beta = 1.0

    def loss(self, out: Tensor, target: Tensor) -> Tensor:
        return (out - target).square().mean() * self.beta * self.gamma


def times(out: Tensor, target: Tensor, factor: float) -> Tensor:
    return (out - target).square().mean() * factor


class Given(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
        return activation(self.fc(x)).square().mean()


def losses_changed_between_steps() -> dict[str, str]:
    alpha, criterion, trainer, partly = 1.0, Criterion(), Trainer(), functools.partial(times, factor=1.0)

    def closure(out: Tensor, target: Tensor) -> Tensor:
        return (out - target).square().mean() * alpha

    def anneal() -> None:
        nonlocal alpha
        alpha = 0.5

    cases: dict[str, tuple[Callable[..., Tensor], Callable[[], Any]]] = {
        "alpha (1.0 -> 0.5)": (closure, anneal),
        "the loss.alpha (1.0 -> 3.0)": (criterion, lambda: put_in(criterion, "alpha")),
        "the loss.weight ([1.0, 1.0, 1.0] -> [2.0, 2.0, 2.0])": (criterion, lambda: criterion.weight.mul_(2)),
        "the Trainer.beta (1.0 -> 3.0)": (trainer.loss, lambda: put_in(trainer, "beta")),
        "Trainer.gamma (1.0 -> 3.0)": (trainer.loss, lambda: put_in(Trainer, "gamma")),
        "arguments of a partial['factor'] (1.0 -> 2.0)": (partly, lambda: partly.keywords.update(factor=2.0)),
    }
    x, said_of = torch.randn(4, 3, dtype=torch.float64), {}
    for words, (loss, change) in cases.items():
        par = split(nn.Sequential(nn.Linear(3, 3)).double(), (x, x), loss=loss)
        par.step(x, x)
        par.step(x, x)
        again = copy.deepcopy(par)
        change()
        said_of[words] = message(lambda par=par: par.step(x, x))
        again.step(x, x)  # is captured anew
    par = split(Given().double(), (x, scaled))
    for given in (scaled, doubled):
        par.step(x, given)
    CONFIG["deep"]["scale"] = 5.0
    said_of["CONFIG['deep']['scale']"] = message(lambda: par.step(x, doubled))
    return said_of


def test_a_loss_whose_numbers_change_is_refused(run_ranks: RunRanks) -> None:
    for said_of in run_ranks(losses_changed_between_steps, 2):
        for words, text in said_of.items():
            assert words in text


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        global step
        step += 1
        return self.last(self.first(x)).sum() * SCALE


def in_stages() -> list[str]:
    """What forward itself has changed while it was captured is no change; what somebody else has changed is."""
    net, x = Counting().double(), torch.randn(4, 3, dtype=torch.float64)
    with warnings.catch_warnings(action="ignore", category=sw.errors.CaptureWarning):  # that it counts
        plan = sw.plan(net, x, 2, stages=2)
        par = sw.parallelize(net, plan)
        found = [message(lambda: par.step(x)), message(lambda: par.step(x[:2])), message(lambda: par.step(x))]
    put(SCALE=3.0)
    return [*found, message(lambda: par.step(x))]


def test_under_stages_it_is_refused_as_well(run_ranks: RunRanks) -> None:
    for *before, after in run_ranks(in_stages, 2):
        assert before == [""] * 3
        assert "SCALE (2.0 -> 3.0)" in after


@pytest.mark.parametrize("kind", [list, set])
def test_what_is_read_anew_may_hold_other_objects_of_equal_value(kind: Callable[..., Any]) -> None:
    put(FACTORS=kind([1.0, 2.0]))
    found = ClosureGuards.of_code(reachable_code(Net(lambda _, h: h * len(FACTORS))))
    put(FACTORS=kind([1.0, 2.0]))
    found.check()
    put(FACTORS=kind([1.0, 3.0]))
    with raises(sw.ShardwiseError, "FACTORS"):
        found.check()
