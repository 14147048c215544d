"""What a model reads from outside while it runs: refused where the next call would be another, else announced."""

import cProfile
import datetime
import functools
import gc
import importlib
import os
import random
import secrets
import threading
import time
import uuid
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from raising import raises
from shardwise.errors import CaptureError, CaptureWarning
from shardwise.graph import impure_reads
from shardwise.graph.capture import capture
from shardwise.graph.code_reachability import reachable_code
from shardwise.graph.module_state import snapshot_state

GENERATOR, PYTHONS = np.random.default_rng(0), random.Random(0)
HERE = Path(__file__)


class Scaled(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.fc, self.factor = nn.Linear(4, 4), factor

    def forward(self, x):
        return (self.fc(x) * self.factor()).square().mean()


REFUSED = {
    "the clock (time.perf_counter)": lambda: time.perf_counter(),
    "the clock (datetime.now)": lambda: datetime.datetime.now().timestamp() * 1e3,
    "the system (os.urandom)": lambda: float(secrets.randbits(64)),
    "the system (os.urandom) ": lambda: uuid.uuid4().int / 2**128,
    "the clock (uuid.uuid1)": lambda: float(uuid.uuid1().int),
    "a generator of random numbers (random.Random)": lambda: PYTHONS.random(),
    "a generator of random numbers (numpy.random)": lambda: float(GENERATOR.random()),
    "the system (os.urandom)  ": lambda: float(np.random.default_rng().random()),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_another_in_the_next_call_is_refused_by_name_and_line(what):
    with raises(CaptureError, what.strip(), source="test_reads.py"):
        capture(Scaled(REFUSED[what]), (torch.randn(2, 4),))


ANNOUNCED = {
    "os.environ": lambda: 2.0 if "SHARDWISE_NOT_SET" in os.environ else 1.0,
    "os.environ ": lambda: float(os.getenv("SHARDWISE_NOT_SET", "1")),
    "the system (os.getpid)": lambda: float(os.getpid()),
    "the system (os.getcwd)": lambda: float(len(os.getcwd())),
    "the system (threading.get_ident)": lambda: float(threading.get_ident() % 7),
    "a file": lambda: float(len(HERE.read_text())),
    "the clock (date.today)": lambda: float(datetime.date.today().year),
    "whether gradients are recorded (torch.is_grad_enabled)": lambda: 1.0 if torch.is_grad_enabled() else 2.0,
    "the seed of random numbers (torch.initial_seed)": lambda: float(torch.initial_seed()),
}


@pytest.mark.parametrize("what", ANNOUNCED)
def test_what_may_be_another_elsewhere_is_announced_by_name_and_line(what):
    with pytest.warns(CaptureWarning, match="forward reads state from outside of the model") as caught:
        capture(Scaled(ANNOUNCED[what]), (torch.randn(2, 4),))
    assert f"{what.strip()}, test_reads.py:" in str(caught[0].message)


class AsksForStrides(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = (x * 2.0).t()
        assert not hidden.is_contiguous()  # of what the model made itself: so it is in every call
        return hidden.sum() if x.is_contiguous() else (3.0 * hidden).sum()


def test_a_branch_on_how_an_input_lies_in_memory_is_announced():
    with pytest.warns(
        CaptureWarning, match=r"test_reads.py:\d+ asks for the memory layout of an input \(is_contiguous\)"
    ) as told:
        capture(AsksForStrides(), (torch.randn(2, 4),))
    assert len({str(one.message) for one in told}) == 1


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.sum()


def test_that_layers_are_compared_by_how_their_inputs_lie_is_not_what_the_model_asks():
    with warnings.catch_warnings(record=True, action="always") as caught:
        capture(Residual(), (torch.randn(2, 4),))
    assert not caught


def same_numbers_in_every_call():
    return float(np.random.default_rng(3).random()) + random.Random(3).random()


def test_a_generator_that_every_call_makes_anew_and_time_that_nobody_reads_are_neither():
    names = {"time": 1.0}  # a name alone reads nothing
    with warnings.catch_warnings(action="error"):
        capture(Scaled(same_numbers_in_every_call), (torch.randn(2, 4),))
        capture(Scaled(lambda: names["time"]), (torch.randn(2, 4),))


def test_what_the_garbage_collectors_callbacks_read_is_not_the_models():
    def called(phase, info):
        time.perf_counter()

    def collects():
        return float(len(gc.get_referents([object() for _ in range(9)]))) + 0 * len(os.sep)

    before = gc.get_threshold()
    gc.callbacks.append(called)
    gc.set_threshold(1)
    try:
        with warnings.catch_warnings(action="error"):
            capture(Scaled(lambda: collects() if time.perf_counter else 0.0), (torch.randn(2, 4),))
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(called)


def seeded():
    torch.manual_seed(0)
    return torch.rand(4)


def test_a_seed_that_forward_sets_is_refused():
    with raises(CaptureError, "torch.manual_seed", source="test_reads.py"):
        capture(Scaled(seeded), (torch.randn(2, 4),))


@functools.lru_cache
def table(size):
    return torch.arange(float(size))


def test_a_cached_table_has_its_numbers_after_capture_whatever_was_called_before():
    net, x = Scaled(lambda: table(4)), torch.randn(4, 4)
    table.cache_clear()
    expected = net(x)  # the table is in the cache
    plan = sw.plan(net, x, 2, mesh=sw.Mesh(dp=2))
    torch.testing.assert_close(net(x), expected)
    table.cache_clear()
    assert sw.verify(net, x, plan).ok
    torch.testing.assert_close(net(x), expected)


class Settings:
    scale = 1.0


@functools.lru_cache
def settings():
    return Settings()


@functools.cache
def teacher():
    return nn.Linear(4, 4).requires_grad_(False)


def test_settings_and_modules_that_a_cache_holds_stay_what_they_are():
    settings().scale, before = 5.0, teacher()
    for read in (lambda: settings().scale, lambda: teacher().weight.sum(0)):
        net, x = Scaled(read), torch.randn(4, 4)
        expected = net(x)
        plan = sw.plan(net, x, 2, mesh=sw.Mesh(dp=2))
        assert torch.equal(net(x), expected)
        assert sw.verify(net, x, plan).ok
    assert teacher() is before


class Checkpointed(nn.Module):
    def __init__(self, effect: float = 0.0) -> None:
        super().__init__()
        self.fc, self.effect, self.checkpointing = nn.Linear(4, 4), effect, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = x.abs().max()
        asked = torch.is_grad_enabled() and self.checkpointing
        hidden = checkpoint(self.fc, x / scale, use_reentrant=False) if asked else self.fc(x / scale)
        return hidden.sum() * (1.0 if not torch.is_inference_mode_enabled() else 1.0 + self.effect)


def test_a_capture_under_a_profiler_leaves_it_on():
    """cProfile's hook is an object that ``sys.setprofile`` cannot take back."""
    profiler = cProfile.Profile()
    profiler.enable()
    try:
        capture(Checkpointed(), (torch.randn(2, 4),))
        sorted(range(3))
    finally:
        profiler.disable()
    profiler.create_stats()
    assert any("sorted" in name for _, _, name in profiler.stats)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_reading_that_changes_nothing_is_silent(checkpointing):
    net = Checkpointed()
    net.checkpointing = checkpointing
    with warnings.catch_warnings(action="error", category=CaptureWarning):
        capture(net, (torch.randn(2, 4),))
    assert torch.is_grad_enabled()


def test_a_reading_that_changes_the_call_is_announced_by_line():
    with pytest.warns(CaptureWarning, match=r"torch.is_inference_mode_enabled\), test_reads.py"):
        capture(Checkpointed(effect=1.0), (torch.randn(2, 4),))


def test_the_environment_that_an_installed_package_reads_is_silent(monkeypatch, tmp_path):
    (tmp_path / "installed_layers.py").write_text("import os\ndef scale(): return float(os.getenv('UNSET', '2'))\n")
    monkeypatch.syspath_prepend(tmp_path)
    scale = importlib.import_module("installed_layers").scale
    with pytest.warns(CaptureWarning, match="os.environ, installed_layers.py:2"):
        capture(Scaled(scale), (torch.randn(2, 4),))
    monkeypatch.setattr(impure_reads, "INSTALLED", str(tmp_path))
    with warnings.catch_warnings(action="error", category=CaptureWarning):
        capture(Scaled(scale), (torch.randn(2, 4),))


HANDS_ON = {
    "flatten": lambda x: x.flatten(),
    "plus": lambda x: +x,
    "t": lambda x: x.t(),
    "real": lambda x: x.real,
    "resolve_conj": lambda x: x.resolve_conj().resolve_neg(),
    "conj": lambda x: x.conj_physical().conj(),
    "atleast": lambda x: torch.atleast_1d(x, x)[0],
    "contiguous": lambda x: x.contiguous(),
    "to": lambda x: x.to(x.dtype).cpu(),
    "expand": lambda x: x.expand(4).expand_as(x),
    "view": lambda x: x.view(4).reshape(4).ravel(),
}


@pytest.mark.parametrize("name", HANDS_ON)
def test_inputs_read_through_operators_that_return_their_operand_are_the_same_in_the_next_call(name):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x):
            assert torch.is_grad_enabled() is not None
            return (HANDS_ON[name](x) * self.weight + x * HANDS_ON[name](self.weight)).sum() + x.sum()

    with warnings.catch_warnings(action="error", category=CaptureWarning):
        capture(Model(), (torch.randn(4),))


def test_an_assertion_that_pytest_rewrote_does_not_lead_to_the_test_session():
    class Checked(nn.Module):
        def forward(self, x):
            assert x.dim() == 2, "the rewritten assert calls pytest"
            return x.sum()

    leaves = snapshot_state(Checked(), reachable_code(Checked()).values).leaves
    assert not [place for place in leaves if "pytest_runtest_protocol" in place]
