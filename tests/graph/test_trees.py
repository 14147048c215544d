"""Arguments and outputs beside tensors: dataclasses are trees, constants have keys, the rest is refused by name."""

from __future__ import annotations

import enum
import math
import pickle
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import shardwise as sw
from proving import prove
from raising import raises
from shardwise.errors import CaptureError, ShardwiseError
from shardwise.graph.capture import capture
from shardwise.graph.trees import (
    NotCarried,
    constant_key,
    flatten,
    flatten_call,
    flatten_output,
    is_constant,
    is_plain_tensor,
    unflatten,
)


class Mode(enum.Enum):
    A, B = 1, 2


@dataclass
class Batch:
    x: torch.Tensor
    scale: float = 1.0
    parts: list = field(default_factory=list)


@dataclass(frozen=True)
class Output:
    loss: torch.Tensor
    batch: Batch
    total: int = field(default=0, init=False)


class Plain:
    def __init__(self, x):
        self.x = x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, batch):
        y = self.fc(batch.x) * batch.scale
        for part in batch.parts:
            y = y + part
        return Output(y.square().mean(), Batch(y, 2.0))


def test_constants_have_equal_keys_only_if_they_make_equal_programs():
    constants = [1, 1.0, True, 1 + 0j, 0, 0.0, -0.0, False, complex(0.0, -0.0), complex(0.0, 0.0), "1", b"1", None]
    constants += [Mode.A, Mode.B, torch.float32, torch.float64, torch.Size([1]), np.float32(1), np.float64(1)]
    constants += [math.inf, -math.inf, math.nan, range(1), range(2), slice(1), frozenset({1}), frozenset({True}), int]
    constants += [math.sin, lambda x: x, lambda x: x + 1]
    assert all(map(is_constant, constants))
    keys = [constant_key(constant) for constant in constants]
    assert len(set(keys)) == len(keys)
    assert constant_key(float("nan")) == constant_key(math.nan)
    assert len({constant_key(lambda x: x) for _ in range(3)}) == 1


def test_a_call_is_the_tree_of_its_arguments_whatever_they_are():
    x, y = torch.zeros(2), torch.ones(3)
    for args, kwargs in (
        ((), {}), ((x,), {}), ((x, y), {}), ((), {"b": x, "a": y}), ((), {"a": y, "b": x}), ((x,), {"a": y}),
        ((nn.Parameter(x), y), {}), ((x, 2), {}), ((x, None), {"a": y}), (((x, y),), {}), ((Batch(x),), {}),
        (([],), {}),
    ):  # fmt: skip
        for _ in range(2):  # the second time the spec is known
            leaves, spec = flatten_call(args, kwargs)
            expected, expected_spec = flatten((args, kwargs))
            assert spec == expected_spec
            assert len(leaves) == len(expected)
            assert all(a is b for a, b in zip(leaves, expected, strict=True))
            assert unflatten(leaves, spec)[1].keys() == kwargs.keys()


def test_dataclasses_are_trees_in_arguments_and_outputs():
    batch = Batch(torch.randn(8, 4), 3.0, [torch.randn(4)])
    plan = sw.plan(Net(), (batch,), 2, mode="data_parallel")
    report = prove(Net(), (batch,), plan)
    assert {"args[0].x", "args[0].parts[0]"} == {entry.name for entry in plan.inputs}
    assert {d.name for d in report.differences if d.kind == "output"} == {"[1]"}


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch's own specs, when they are unpickled
def test_a_dataclass_comes_back_as_it_was_made():
    made = Output(torch.ones(()), Batch(torch.ones(2)))
    leaves, spec = flatten(made)
    again = unflatten(leaves, pickle.loads(pickle.dumps(spec)))
    assert isinstance(again, Output)
    assert again.batch.x is made.batch.x
    assert again.total == 0


def odd(value):
    class Returning(nn.Module):
        def forward(self, x):
            return x.sum(), value(x)

    return Returning()


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (Plain, "test_trees.Plain"),
        (lambda x: SimpleNamespace(x=x), "types.SimpleNamespace"),
        (lambda x: {x}, "set"),
        (lambda x: type("Rows", (list,), {})([x]), "Rows"),
        (lambda x: np.ones(2), "numpy.ndarray"),
        (lambda x: lambda: x, "function"),
        (lambda x: (x for _ in range(2)), "generator"),
        (lambda x: nn.Linear(2, 2), "torch.nn.modules.linear.Linear"),
    ],
)
def test_other_objects_are_refused_by_name(value, name):
    with raises(CaptureError, name, "output[1]"):
        capture(odd(value), (torch.ones(2),))
    given = {"options": [1, value(torch.ones(2))]}
    with raises(CaptureError, name, "kwargs['options'][1]"):
        capture(nn.Identity(), (torch.ones(2),), given)


class Doubling(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {}) * 2


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda x: x.to_sparse(), "a sparse_coo tensor"),
        (lambda x: x.to_sparse_csr(), "a sparse_csr tensor"),
        (lambda x: torch.nested.nested_tensor([x, x]), "a nested tensor"),
        (lambda x: x.as_subclass(Doubling), "test_trees.Doubling"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*(beta|prototype):UserWarning")
def test_tensors_that_are_more_than_their_numbers_are_refused_by_name(make, name):
    with raises(CaptureError, "args[1]['a']", name, "to_dense"):
        capture(nn.Identity(), (torch.ones(2), {"a": make(torch.ones(2, 2))}))
    assert is_plain_tensor(torch.ones(2).as_subclass(type("Named", (torch.Tensor,), {})))


def test_what_is_set_on_a_tensor_is_refused_by_name():
    x = torch.ones(2)
    x.length = 3
    with raises(CaptureError, "args[0]['a'].length"):
        capture(nn.Identity(), ({"a": x},))


def test_a_cache_of_transformers_is_not_carried_and_says_so_when_it_is_used():
    cache = pytest.importorskip("transformers").DynamicCache()
    ((stand_in, kept), _) = flatten_output((cache, 3))
    assert kept == 3
    assert isinstance(stand_in, NotCarried)
    again = pickle.loads(pickle.dumps(stand_in))
    for use in (len, list, lambda c: c[0], lambda c: c.get_seq_length()):
        with raises(ShardwiseError, "DynamicCache"):
            use(again)
