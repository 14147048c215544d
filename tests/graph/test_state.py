"""Python state that forward changes: refused by attribute and line where the next call would be another."""

from __future__ import annotations

import gc
import itertools
import threading
import warnings
from collections import deque
from contextvars import ContextVar

import pytest
import torch
from torch import nn

from graph import another_file
from raising import raises
from shardwise.errors import CaptureError, CaptureWarning
from shardwise.graph.capture import capture

TICKS = 0


HERE, THREADS, ROUND, QUEUE = ContextVar("HERE", default=0), threading.local(), itertools.count(), deque([1.0])
THREADS.count = 0


class Stateful(nn.Module):
    """Calls a function of (self, x), where it is linear in a parameter."""

    shared = 0

    def __init__(self, function):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.inner.seen = {"calls": 0}
        self.function, self.calls, self.history, self.cache, self.counter = function, 0, [], None, itertools.count()
        self.generator = torch.Generator()
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


def counted_in_a_context(self, x):
    HERE.set(HERE.get() + 1)
    return (x * HERE.get()).sum()


def counted_in_a_thread(self, x):
    THREADS.count += 1
    return (x * THREADS.count).sum()


def counted_by_an_iterator_of_the_file(self, x):
    return (x * next(ROUND)).sum()


def counted_in_a_queue_of_the_file(self, x):
    QUEUE.append(QUEUE[-1] + 1)
    return (x * QUEUE[-1]).sum()


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


COUNTS = {"calls": 0}


def counted_in_a_dict_of_the_file(self, x):
    COUNTS["calls"] += 1
    return (x * COUNTS["calls"]).sum()


def counted_in_a_default(self, x, box=()):
    box[0] += 1
    return (x * box[0]).sum()


counted_in_a_default.__defaults__ = ([0],)


def counted_on_the_function(self, x):
    counted_on_the_function.calls = getattr(counted_on_the_function, "calls", 0) + 1
    return (x * counted_on_the_function.calls).sum()


class Meter:
    count = 0


METER, ELSEWHERE = Meter(), nn.Linear(2, 2)


def counted_in_another_module(self, x):
    ELSEWHERE.count = getattr(ELSEWHERE, "count", 0) + 1
    return (x * ELSEWHERE.count).sum()


def counted_in_an_object_of_the_file(self, x):
    METER.count += 1
    return (x * METER.count).sum()


def counted_in_another_class(self, x):
    Meter.count += 1
    return (x * Meter.count).sum()


def counted_by_a_helper(self, x):
    return (x * ticks()).sum()


def ticks():
    ticks.count = getattr(ticks, "count", 0) + 1
    return ticks.count


def counted_in_another_file(self, x):
    another_file.COUNT += 1
    return (x * another_file.COUNT).sum()


def in_a_closure_over_an_object():
    meter = Meter()

    def counted_in_an_object(self, x):
        meter.total = getattr(meter, "total", 0) + 1
        return (x * meter.total).sum()

    return counted_in_an_object


def in_a_closure():
    box = [0]

    def counted_in_a_closure(self, x):
        box[0] += 1
        return (x * box[0]).sum()

    return counted_in_a_closure


def freezes(self, x):
    self.inner.weight.requires_grad_(False)
    return x.sum()


def adds_a_parameter(self, x):
    self.extra = nn.Parameter(torch.ones(4))
    return (x * self.extra).sum()


def replaces_a_parameter(self, x):
    self.inner.weight = nn.Parameter(self.inner.weight * 2)
    return x.sum()


def registers_a_buffer(self, x):
    self.register_buffer("new", x.detach().mean(0))
    return (x * self.new).sum()


def registers_a_table(self, x):
    self.inner.register_buffer("table", torch.arange(4.0), persistent=False)
    return (x * self.inner.table).sum()


def drops_a_buffer(self, x):
    y = x if self.ema is None else x + self.ema
    self.ema = None
    return y.sum()


def deletes_a_buffer(self, x):
    y = x + self.ema if hasattr(self, "ema") else x
    del self.ema
    return y.sum()


def lengthens_a_buffer(self, x):
    self.ema = torch.cat([self.ema, torch.ones(1)])
    return (x * self.ema[:4]).sum()


def hooks_a_module(self, x):
    self.inner.register_full_backward_hook(lambda module, before, after: (before[0] * 0,))
    return x.sum()


REFUSED = {
    counted_in_a_dict_of_the_file: "test_state.COUNTS",
    counted_in_a_default: "counted_in_a_default: box[0] (",
    counted_on_the_function: "counted_on_the_function: calls (",
    in_a_closure(): "counted_in_a_closure: box[0] (",
    counted_in_another_module: "Linear.count (",
    counted_in_an_object_of_the_file: "Meter.count (",
    counted_in_another_class: "Meter.count (",
    counted_by_a_helper: "ticks: count (",
    counted_in_another_file: "graph.another_file.COUNT (",
    in_a_closure_over_an_object(): "counted_in_an_object: meter.total (",
    registers_a_buffer: "parameters, buffers or hooks: new (nothing -> a buffer [4])",
    registers_a_table: "parameters, buffers or hooks: inner.table (nothing -> a buffer [4])",
    drops_a_buffer: "parameters, buffers or hooks: ema (a buffer [4] -> nothing)",
    deletes_a_buffer: "parameters, buffers or hooks: ema (a buffer [4] -> nothing)",
    lengthens_a_buffer: "parameters, buffers or hooks: ema (a buffer [4] -> a buffer [5])",
    freezes: "parameters, buffers or hooks: inner.weight (a parameter [4, 4] -> a frozen parameter [4, 4])",
    adds_a_parameter: "parameters, buffers or hooks: extra (nothing -> a parameter [4])",
    replaces_a_parameter: "parameters, buffers or hooks: inner.weight",
    hooks_a_module: "parameters, buffers or hooks: backward hooks of inner (0 -> 1)",
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
    counted_in_a_context: "test_state.HERE",
    counted_in_a_thread: "test_state.THREADS.count",
    counted_by_an_iterator_of_the_file: "test_state.ROUND",
    counted_in_a_queue_of_the_file: "test_state.QUEUE",
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("function", REFUSED, ids=lambda f: f.__name__)
def test_state_that_the_next_call_would_read_is_refused_by_attribute_and_line(function):
    model = Stateful(function)
    with raises(CaptureError, REFUSED[function], source="test_state.py") as refused:
        capture(model, (torch.ones(2, 4),))
    first = function.__code__.co_firstlineno
    assert first < int(refused.value.source.split(":")[1]) <= first + 5
    assert model.calls == 0
    assert not model.history
    assert model.cache is None


def test_the_line_is_the_models_whatever_the_garbage_collector_calls():
    def called(phase, info):
        return None

    before = gc.get_threshold()
    gc.callbacks.append(called)
    gc.set_threshold(1)
    try:
        line = keeps_noise.__code__.co_firstlineno + 2
        with raises(CaptureError, source=f"test_state.py:{line}", section="python-state"):
            capture(Stateful(keeps_noise), (torch.ones(2, 4),))
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(called)


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


def sets_a_constant_beside_a_generator(self, x):
    self.calls = 5
    return x.sum()


CAPTURED = [
    sets_a_constant_beside_a_generator,
    makes_a_table_once,
    makes_a_longer_table,
    clamps_an_attribute,
    keeps_for_inspection,
    updates_buffers,
]


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
