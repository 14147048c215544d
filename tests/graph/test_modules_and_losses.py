"""Modules and losses of kinds that cannot be captured, and tensors that share memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from raising import raises
from shardwise.errors import CaptureError
from shardwise.graph.capture import capture, capture_function


def uncopied():
    module = nn.Linear(2, 2)
    module.generator = (i for i in range(3))
    return module


ONES, TWO = torch.ones(2, 2), (torch.ones(2, 2), torch.ones(2, 2))
REFUSED = {
    "a loss with more targets than examples": (
        lambda: capture(nn.Linear(2, 2), (ONES,), loss=lambda out, a, b: out.sum()), (2, 1), {"op": "<lambda>"},
    ),
    "a loss without a signature": (lambda: capture(nn.Linear(2, 2), (ONES,), loss=torch.sum),
        ("sum has no signature",), {"fix": "loss=lambda output, target: ..."}),
    "a loss that is no function": (lambda: capture(nn.Linear(2, 2), (ONES,), loss=3),
        ("3 is not a function",), {"fix": "loss=lambda output, target: ..."}),
    "a loss that is not a scalar": (lambda: capture(nn.Linear(2, 2), TWO, loss=lambda out, target: out - target),
        ("[2, 2]", "loss.mean()"), {}),
    "what is no module": (lambda: capture(lambda x: x, (ONES,)), ("torch.nn.Module",), {}),
    "a module of another tool": (lambda: capture(torch.jit.ScriptModule(), (ONES,)), ("ScriptModule",), {}),
    "a function that needs constants": (lambda: capture_function(lambda x: x + torch.tensor([1.0, 2.0]), (ONES,)),
        ("torch.full",), {}),
    "a lazy module": (lambda: capture(nn.LazyLinear(3), (ONES,)), ("lazy module",), {"fix": "real inputs"}),
    "what cannot be copied": (lambda: capture(uncopied(), (ONES,)), ("Linear", "copy.deepcopy(module)"), {}),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_captured_is_explained(name):
    act, words, fields = REFUSED[name]
    with raises(CaptureError, *words, **fields):
        act()


class Overlapping(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))
        self.register_buffer("mean", torch.zeros(8))
        if kind == "buffers":
            self.register_buffer("part", self.mean[2:6])
        elif kind == "parameters":
            self.bias = nn.Parameter(self.weight.data[1])
        elif kind == "a buffer in a parameter":
            self.register_buffer("last", self.weight.detach()[3, 3:])
        elif kind == "parts between each other":
            table = torch.view_as_complex(torch.ones(8, 4, 2))
            self.register_buffer("cos", table.real)
            self.register_buffer("sin", table.imag)
            self.register_buffer("ones", torch.ones(1).expand(4))
        elif kind == "every other":
            self.register_buffer("odd", self.mean[1::2])
            self.register_buffer("third", self.mean[::3])
        elif kind == "parts side by side":
            flat = torch.ones(8)
            self.first, self.second = nn.Parameter(flat[:4]), nn.Parameter(flat[4:])
        elif kind == "tied":
            self.again, self.copied = self.weight, nn.Parameter(self.weight.data.clone())

    def forward(self, x):
        self.mean.add_(1)
        return sum((x @ p).sum() for p in self.parameters() if p.dim() == 2) + self.mean.sum()


@pytest.mark.parametrize("kind", ["buffers", "parameters", "a buffer in a parameter", "every other"])
def test_tensors_in_each_others_memory_are_refused_by_name(kind):
    names = {"buffers": "mean and part", "parameters": "weight and bias", "every other": "mean and third"}
    names["a buffer in a parameter"] = "weight and last"
    with raises(CaptureError, names[kind], "same memory"):
        capture(Overlapping(kind), (torch.ones(2, 4),))


@pytest.mark.parametrize("kind", ["parts side by side", "parts between each other", "tied"])
def test_tied_tensors_and_parts_of_one_storage_are_captured(kind):
    assert capture(Overlapping(kind), (torch.ones(2, 4),)).graph.ops
