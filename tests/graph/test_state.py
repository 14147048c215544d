"""Python state that forward changes: refused by attribute and line where the next call would be another."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
from torch import nn

from shardwise.errors import CaptureError, CaptureWarning
from shardwise.graph.capture import capture

TICKS = 0


class Stateful(nn.Module):
    """Calls a function of (self, x), where it is linear in a parameter."""

    shared = 0

    def __init__(self, function):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.inner.seen = {"calls": 0}
        self.function, self.calls, self.history, self.cache, self.counter = function, 0, [], None, itertools.count()
        self.register_buffer("ema", torch.zeros(4))

    def forward(self, x):
        return self.function(self, self.inner(x))


def scaled_by_counter(self, x):
    self.calls += 1
    return (x * self.calls).sum()


def warmed_up(self, x):
    self.calls += 1
    return (x if self.calls == 1 else 2 * x).sum()


def counted_in_a_dict(self, x):
    self.inner.seen["calls"] += 1
    return (x * self.inner.seen["calls"]).sum()


def counted_in_a_list(self, x):
    self.history.append(1.0)
    return (x * len(self.history)).sum()


def counted_by_an_iterator(self, x):
    return (x * next(self.counter)).sum()


def counted_in_the_class(self, x):
    type(self).shared += 1
    return (x * type(self).shared).sum()


def counted_globally(self, x):
    global TICKS
    TICKS += 1
    return (x * TICKS).sum()


def carries_a_hidden_state(self, x):
    if self.cache is not None:
        x = x + self.cache
    self.cache = x.detach()
    return x.sum()


def keeps_the_first_weight(self, x):
    if self.cache is None:
        self.cache = self.inner.weight.detach().clone()
    return (x @ self.cache).sum()


def keeps_noise(self, x):
    if self.cache is None:
        self.cache = torch.randn(4)
    return (x * self.cache).sum()


def turns_itself_off(self, x):
    y = x * 2 if self.training else x
    self.training = False
    return y.sum()


def returns_another_tree(self, x):
    self.calls += 1
    return x.sum(), self.calls


REFUSED = {
    scaled_by_counter: "calls (0 -> 1)",
    warmed_up: "calls (0 -> 1)",
    counted_in_a_dict: "inner.seen['calls'] (0 -> 1)",
    counted_in_a_list: "history (0 items -> 1 items)",
    counted_by_an_iterator: "counter",
    counted_in_the_class: "Stateful.shared",
    counted_globally: "TICKS",
    carries_a_hidden_state: "cache (None -> a tensor [2, 4])",
    keeps_the_first_weight: "cache (None -> a tensor [4, 4])",
    keeps_noise: "cache (None -> a tensor [4])",
    turns_itself_off: "training (True -> False)",
    returns_another_tree: "calls (0 -> 1)",
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("function", REFUSED, ids=lambda f: f.__name__)
def test_state_that_the_next_call_would_read_is_refused_by_attribute_and_line(function):
    model = Stateful(function)
    with pytest.raises(CaptureError) as refused:
        capture(model, (torch.ones(2, 4),))
    assert REFUSED[function] in str(refused.value)
    first = function.__code__.co_firstlineno
    named = int(str(refused.value).split("test_state.py:")[1].split("\n")[0].rstrip(")"))
    assert first < named <= first + 5
    assert model.calls == 0
    assert not model.history
    assert model.cache is None


def makes_a_table_once(self, x):
    if self.cache is None:
        self.cache = torch.arange(4.0).sin()
    return (x * self.cache).sum()


def makes_a_longer_table(self, x):
    if self.calls < x.shape[0]:
        self.calls, self.cache = x.shape[0], torch.arange(float(x.shape[0])).cos()
    return (x * self.cache[:, None]).sum()


def clamps_an_attribute(self, x):
    """As Swin's blocks do with the size of their windows; what casts to the same dtype returns its operand."""
    if x.shape[0] <= 2:
        self.calls = 1
    y = x.to(torch.float32)
    return (y * self.calls + self.ema.to(torch.float32)).sum()


def keeps_for_inspection(self, x):
    self.cache = x
    return x.sum()


def updates_buffers(self, x):
    self.ema.mul_(0.9).add_(x.detach().mean(0))
    self.ema = self.ema + 1
    self.calls = 7
    return (x * self.ema).sum()


CAPTURED = [makes_a_table_once, makes_a_longer_table, clamps_an_attribute, keeps_for_inspection, updates_buffers]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("function", CAPTURED)
def test_state_that_changes_nothing_in_the_next_call_is_captured(function):
    model = Stateful(function)
    captured = capture(model, (torch.ones(2, 4),))
    assert captured.graph.loss is not None
    assert model.cache is None


def only_counts(self, x):
    self.calls += 1
    return x.sum()


def records_losses(self, x):
    self.history.append(x.sum().detach())
    return x.sum()


@pytest.mark.parametrize(("function", "what"), [(only_counts, r"calls \(1 -> 2\)"), (records_losses, "history")])
def test_state_that_goes_on_changing_and_is_not_used_is_announced(function, what):
    with pytest.warns(CaptureWarning, match=what):
        capture(Stateful(function), (torch.ones(2, 4),))


@pytest.mark.filterwarnings("error")
def test_a_model_that_was_called_before_is_captured_with_what_that_left():
    model = Stateful(makes_a_table_once)
    model(torch.ones(2, 4))
    with warnings.catch_warnings():
        assert capture(model, (torch.ones(2, 4),)).graph.loss is not None
