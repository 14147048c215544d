"""Layouts by device matrix and tensor map, and operators by split counts: the words of the cases in ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise as sw
from layouts.placing import convert, scatter, worst_difference
from proving import prove
from search.small_models import counts
from shardwise.graph.capture import capture_function
from shardwise.graph.ir import Graph, Op
from shardwise.layouts.layout import Atom, Layout
from shardwise.layouts.redistribute import redistribute
from shardwise.layouts.strategy import Strategy
from shardwise.layouts.text import format_layout
from shardwise.proof.virtual import VirtualCluster
from shardwise.rules.rule import OpRule
from shardwise.rules.tables import rule_of
from shardwise.runtime.local_shards import shard
from shardwise.search.user_strategies import choices_for


def classical(dev: Sequence[int], tensor_map: Sequence[int | Sequence[int]], shape: Sequence[int]) -> Layout:
    """A layout by device matrix and tensor map: device dims counted from the right, -1 for none, several major
    first."""
    mesh = sw.Mesh([(f"d{i}", size) for i, size in enumerate(dev)])

    def axes(entry: int | Sequence[int]) -> tuple[str, ...]:
        chosen = [entry] if isinstance(entry, int) else entry
        return tuple(part for k in chosen if k >= 0 for part in mesh.expand(f"d{len(dev) - 1 - k}"))

    return Layout(mesh, tuple((Atom(size, axes(k)),) for size, k in zip(shape, tensor_map, strict=True)))


def on(mesh: sw.Mesh, layout: Layout) -> Layout:
    """The layout with its sub-axes renamed to those of another mesh of the same devices (equal primes in order)."""
    assert [layout.mesh.sizes[a] for a in layout.mesh.sub_axes] == [mesh.sizes[a] for a in mesh.sub_axes]
    renamed = dict(zip(layout.mesh.sub_axes, mesh.sub_axes, strict=True))
    dims = tuple(tuple(Atom(a.size, tuple(renamed[x] for x in a.axes)) for a in dim) for dim in layout.dims)
    return Layout(mesh, dims, tuple((renamed[axis], state) for axis, state in layout.states))


def held(layout: Layout) -> list[Tensor]:
    """What every rank holds of the numbers 0, 1, 2, ... in the layout's shape, flattened."""
    numbers = torch.arange(prod(layout.shape)).reshape(layout.shape)
    return [shard(numbers, layout, layout.mesh.coordinates(r)).flatten() for r in range(layout.mesh.num_devices)]


def same_placement(one: Layout, other: Layout) -> bool:
    return all(torch.equal(a, b) for a, b in zip(held(one), held(other), strict=True))


def moved_correctly(source: Layout, target: Layout) -> list[str]:
    """The collectives of a redistribution that is exact, forward and backward, on the virtual cluster."""
    generator = torch.Generator().manual_seed(0)
    full = torch.randn(source.shape, dtype=torch.float64, generator=generator)
    seed = torch.randn(source.shape, dtype=torch.float64, generator=generator)
    cluster = VirtualCluster(source.mesh)
    before = [tensor.requires_grad_() for tensor in scatter(full, source, generator)]
    after = convert(cluster, before, redistribute(source, target))
    assert worst_difference(after, target, full) < 1e-12
    kinds = [collective.kind for collective in cluster.record]
    seeds = [shard(seed, target, own) for own in cluster.coordinates]
    torch.autograd.backward(after, [own.clone() for own in seeds])
    assert worst_difference([t.grad for t in before if t.grad is not None], source.dual, seed) < 1e-12
    return kinds


class Reshaped(nn.Module):
    """A parameter in one layout, viewed as another shape, in another layout."""

    def __init__(self, source: Layout, target: Layout) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(source.shape, generator=torch.Generator().manual_seed(2)))
        self.texts, self.shape = (format_layout(source), format_layout(target)), target.shape

    def forward(self) -> tuple[Tensor, Tensor]:
        x = sw.constrain(self.weight, self.texts[0])
        y = sw.constrain(x.sin().reshape(self.shape), self.texts[1])
        return y.exp().sum(), y


def reshaped_correctly(source: Layout, target: Layout) -> sw.Plan:
    """The plan of a reshape between two layouts, verified: loss, output and gradient."""
    module = Reshaped(source, target)
    plan = sw.plan(module, (), source.mesh.num_devices, mesh=source.mesh, search="sharding_propagation")
    report = sw.verify(module, (), plan, steps=1)
    assert report.ok, f"{source} -> {target}\n{report}"
    return plan


def chain_of_products(first: Any, second: Any) -> nn.Module:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.w, self.v = nn.Parameter(torch.randn(32, 16)), nn.Parameter(torch.randn(16, 16))

        def forward(self, x: Tensor) -> Tensor:
            y = sw.shard(torch.matmul, first)(x, self.w)
            return sw.shard(torch.matmul, second)(y, self.v).square().mean()

    return Chain()


def checked(
    module: nn.Module, inputs: tuple[Any, ...], devices: int, **options: Any
) -> tuple[sw.Plan, sw.results.Report]:
    """A plan on one axis ``x`` whose forward and gradients equal those of one device."""
    plan = sw.plan(module, inputs, devices, mesh=options.pop("mesh", sw.Mesh(x=devices)), **options)
    report = prove(module, inputs, plan, steps=1)
    return plan, report


class Called(nn.Module):
    """A function of tensors, split by counts; floating tensors are parameters, so that each has a gradient."""

    def __init__(self, function: Callable[..., Tensor], tensors: Sequence[Tensor], strategy: Any, out: Any = None):
        super().__init__()
        self.function, self.strategy, self.out = function, strategy, out
        for i, tensor in enumerate(tensors):
            if tensor.is_floating_point():
                self.register_parameter(f"p{i}", nn.Parameter(tensor))
            else:
                self.register_buffer(f"p{i}", tensor)
        self.count = len(tensors)

    def forward(self) -> tuple[Tensor, Tensor]:
        own = [getattr(self, f"p{i}") for i in range(self.count)]
        call = self.function if self.strategy is None else sw.shard(self.function, self.strategy, self.out)
        y = call(*own)
        return (y.sin() * y).sum(), y


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def onehot(depth: int) -> Callable[[Tensor], Tensor]:
    return lambda ids: F.one_hot(ids, depth)


def call_of(case: dict[str, Any]) -> tuple[Callable[..., Any], list[Tensor]]:
    """The operator of a case in torch's words, and operands of its shapes."""
    shapes = [shape for shape in case["inputs"] if shape]
    if case["op"] == "MatMul":
        if case.get("transpose_b"):
            return (lambda a, b: torch.einsum("mk,xynk->xymn", a, b)), [randn(*s) for s in shapes]
        return torch.matmul, [randn(*s) for s in shapes]
    if case["op"] == "Add":
        return torch.add, [randn(*s) for s in shapes]
    if case["op"] == "ReduceSum":
        return (lambda x: x.sum(case["axis"])), [randn(*shapes[0])]
    if case["op"] == "OneHot":
        return onehot(case["depth"]), [torch.arange(prod(shapes[0])).reshape(shapes[0]) % case["depth"]]
    if case["op"] == "Softmax":
        return (lambda x: torch.softmax(x, case["axis"])), [randn(*shapes[0])]
    if case["op"] == "SoftmaxCrossEntropyWithLogits":  # where logits and labels meet
        return torch.mul, [randn(*s) for s in shapes]
    if case["op"] == "Gather":
        ids = torch.randint(shapes[0][0], tuple(shapes[1]), generator=torch.Generator().manual_seed(1))
        return (lambda weight, index: F.embedding(index, weight)), [randn(*shapes[0]), ids]
    assert case["op"] == "Conv2D"
    (_, _, height, width), (_, _, k, _) = shapes
    stride, mode, groups = case["stride"], case["pad_mode"], case.get("group", 1)
    total = [max((-(-n // stride) - 1) * stride + k - n, 0) for n in (height, width)] if mode == "same" else [0, 0]
    left = [t // 2 for t in total]

    def conv(x: Tensor, w: Tensor) -> Tensor:
        if total == [2 * p for p in left]:
            return F.conv2d(x, w, stride=stride, padding=left, groups=groups)
        return F.conv2d(x, w, stride=stride, padding="same", groups=groups)

    return conv, [randn(*shapes[0]) / 4, randn(*shapes[1])]


def bound(case: dict[str, Any], strategy: Any = None) -> tuple[Op, Graph, OpRule, Strategy, sw.Mesh]:
    """The one operator of a case with its rule, and the strategy that its split counts mean on its devices."""
    function, tensors = call_of(case)
    graph = capture_function(function, tuple(t.requires_grad_(t.is_floating_point()) for t in tensors))
    op = next(op for op in graph.ops if len(op.operands) == len(tensors))
    rule = rule_of(op, graph)
    assert rule is not None
    mesh = sw.Mesh(x=case["device_num"])
    given = case["strategy"] if strategy is None else strategy
    split = tuple(tuple(own) for own, shape in zip(given, case["inputs"], strict=True) if shape)
    blockers = {factor.name: 0 for factor in rule.factors}
    return op, graph, rule, Strategy.of(choices_for(op, rule, rule, split, mesh, graph, blockers)), mesh


class Chain(nn.Module):
    """A chain of functions on a parameter; some of them are split by counts."""

    def __init__(self, shape: Sequence[int], steps: Sequence[tuple[Callable[..., Tensor], Any]]) -> None:
        super().__init__()
        self.weight, self.steps = nn.Parameter(torch.rand(tuple(shape)) + 0.5), steps

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.weight
        for function, strategy in self.steps:
            y = function(y) if strategy is None else sw.shard(function, strategy)(y)
        return y.square().mean()


def split_of(plan: sw.Plan, name: str, operand: int = 0) -> tuple[int, ...]:
    return counts(plan, name)[operand]


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
