"""Random programs: graphs built while their operators run eagerly, so that the reference and its gradients exist at
once."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from rules.samples import Sample
from shardwise.graph.ir import Graph, Op, Ref, Source, SourceKind, Value

aten = torch.ops.aten


@dataclass(frozen=True)
class Program:
    """A graph, the tensors of its sources, and what its outputs are when everything runs whole."""

    graph: Graph
    sources: dict[str, Tensor]
    results: tuple[Tensor, ...]


class Builder:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.values: list[Value] = []
        self.sources: list[Source] = []
        self.tensors: dict[str, Tensor] = {}
        self.ops: list[Op] = []
        self._names: dict[int, str] = {}

    def name(self, tensor: Tensor) -> str:
        return self._names[id(tensor)]

    def _register(self, name: str, tensor: Tensor) -> Tensor:
        self.values.append(Value(name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad))
        self._names[id(tensor)], self.tensors[name] = name, tensor
        return tensor

    def source(self, tensor: Tensor, kind: SourceKind) -> Tensor:
        name = f"s{len(self.sources)}"
        self.sources.append(Source(name, kind, (name,), kind == "parameter"))
        return self._register(name, tensor)

    def parameter(self, *shape: int) -> Tensor:
        return self.source(
            torch.randn(shape, generator=self.generator, dtype=torch.float64).requires_grad_(), "parameter"
        )

    def ids(self, high: int, *shape: int) -> Tensor:
        return self.source(torch.randint(0, high, shape, generator=self.generator), "input")

    def call(self, target: OpOverload, *args: Any, **kwargs: Any) -> Any:
        result = target(*args, **kwargs)
        results = (result,) if isinstance(result, Tensor) else tuple(result)
        results = tuple(r.view_as(r) if id(r) in self._names else r for r in results)  # a no-op returned its operand
        number = len(self.ops)
        names = tuple(f"v{number}" if len(results) == 1 else f"v{number}.{i}" for i in range(len(results)))
        for name, tensor in zip(names, results, strict=True):
            self._register(name, tensor)
        self.ops.append(
            Op(
                f"/op_{number}",
                target,
                tuple(self._arg(a) for a in args),
                tuple((key, self._arg(value)) for key, value in kwargs.items()),
                names,
                "random.py:1",
            )
        )
        return results[0] if isinstance(result, Tensor) else results

    def _arg(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return Ref(self.name(value))
        return tuple(map(self._arg, value)) if isinstance(value, (list, tuple)) else value

    def finish(self, outputs: tuple[Tensor, ...], loss: Tensor | None) -> Program:
        graph = Graph(
            tuple(self.values),
            tuple(self.sources),
            tuple(self.ops),
            tuple(Ref(self.name(tensor)) for tensor in outputs),
            None if loss is None else self.name(loss),
        )
        return Program(graph, {s.value: self.tensors[s.value] for s in self.sources}, outputs)


# Appends operators on a tensor of the pool; returns what they compute, or nothing where they do not fit.
MakeStep = Callable[[Builder, Tensor, list[Tensor]], list[Tensor]]


def program_of_sample(sample: Sample) -> Program:
    """One operator, and a loss that weighs every element of every differentiable result."""
    builder = Builder(0)
    known: dict[int, Tensor] = {}

    def place(value: Any) -> Any:
        if isinstance(value, Tensor):
            if id(value) not in known:
                leaf = value.detach().clone().requires_grad_(value.requires_grad)
                known[id(value)] = builder.source(leaf, "parameter" if value.requires_grad else "input")
            return known[id(value)]
        return [place(item) for item in value] if isinstance(value, (list, tuple)) else value

    result = builder.call(
        sample.target, *map(place, sample.args), **{key: place(value) for key, value in sample.kwargs.items()}
    )
    results = (result,) if isinstance(result, Tensor) else result
    loss = _weighted_sum(builder, [r for r in results if r.requires_grad and not r.is_complex()])
    return builder.finish((*results,) if loss is None else (loss, *results), loss)


def _weighted_sum(builder: Builder, tensors: list[Tensor]) -> Tensor | None:
    """A scalar in which every element has a weight of its own."""
    total: Tensor | None = None
    for tensor in tensors:
        weight = torch.randn(tensor.shape, generator=builder.generator, dtype=torch.float64).to(tensor.dtype)
        term = builder.call(aten.sum.default, builder.call(aten.mul.Tensor, tensor, builder.source(weight, "input")))
        total = term if total is None else builder.call(aten.add.Tensor, total, term)
    return total


def random_program(seed: int, steps: Sequence[MakeStep] | None = None) -> Program:
    """Four to nine random operators over small tensors, several consumers per value, and a loss of all that is left
    over. ``steps``: what there is to choose from (by default ``STEPS``)."""
    b = Builder(seed)
    rng = b.rng
    sizes = (2, 3, 4, 5, 6, 8, 12)
    pool = [b.parameter(*(rng.choice(sizes[:5]) for _ in range(2)), rng.choice(sizes[2:])) for _ in range(2)]
    used: set[int] = set()
    for _ in range(rng.randint(4, 9)):
        step = rng.choice(steps or STEPS)
        x = rng.choice(pool[-4:])
        made = step(b, x, pool)
        for tensor in made:
            if tensor is not x and tensor.numel() <= 3000:
                pool.append(tensor)
        if made and made[0] is not x:
            used.add(id(x))
    left = [tensor for tensor in pool if id(tensor) not in used and tensor.requires_grad]
    loss = _weighted_sum(b, left or pool[:1])
    assert loss is not None
    return b.finish((loss, rng.choice(pool)), loss)


def _same_shape(x: Tensor, pool: list[Tensor], b: Builder) -> Tensor:
    fitting = [y for y in pool if y.shape == x.shape]
    return b.rng.choice(fitting)


def _pointwise(b: Builder, x: Tensor, pool: list[Tensor]) -> list[Tensor]:
    target = b.rng.choice(
        (aten.tanh.default, aten.gelu.default, aten.neg.default, aten.alias.default, aten.sigmoid.default)
    )
    return [b.call(target, x)]


def _binary(b: Builder, x: Tensor, pool: list[Tensor]) -> list[Tensor]:
    target = b.rng.choice((aten.add.Tensor, aten.mul.Tensor, aten.sub.Tensor))
    if b.rng.random() < 0.5:
        y = _same_shape(x, pool, b)
    else:  # broadcast: fewer dims, and some of size 1
        kept = b.rng.randint(0, x.dim())
        y = b.parameter(*(1 if b.rng.random() < 0.3 else size for size in x.shape[x.dim() - kept :]))
    return [b.call(target, x, y) if b.rng.random() < 0.5 else b.call(target, y, x)]


def _linear(b: Builder, x: Tensor, pool: list[Tensor]) -> list[Tensor]:
    if not x.dim():
        return []
    weight = b.parameter(b.rng.choice((2, 3, 6, 8, 12)), x.shape[-1])
    return [b.call(aten.tanh.default, b.call(aten.linear.default, x, weight))]


def _product_with_itself(b: Builder, x: Tensor, pool: list[Tensor]) -> list[Tensor]:
    if x.dim() < 2:
        return []
    y = b.call(aten.transpose.int, _same_shape(x, pool, b), -1, -2)
    return [b.call(aten.tanh.default, b.call(aten.matmul.default, x, y))]


def _along_a_dim(b: Builder, x: Tensor, pool: list[Tensor]) -> list[Tensor]:
    if not x.dim():
        return []
    dim = b.rng.randrange(x.dim())
    kind = b.rng.randrange(6)
    if kind == 0:
        return [b.call(aten.softmax.int, x, dim)]
    if kind == 1:
        return [b.call(aten.log_softmax.int, x, dim)]
    if kind == 2:
        return [b.call(aten.sum.dim_IntList, x, [dim], b.rng.random() < 0.5)]
    if kind == 3:
        return [b.call(aten.mean.dim, x, [dim], True)]
    if kind == 4:
        return [b.call(aten.logsumexp.default, x, [dim])]
    return [b.call(aten.cumsum.default, x, dim)]


def _norm(b: Builder, x: Tensor, pool: list[Tensor]) -> list[Tensor]:
    if not x.dim() or x.shape[-1] < 3:
        return []
    width = x.shape[-1]
    return [b.call(aten.layer_norm.default, x, [width], b.parameter(width), b.parameter(width), 0.1)]


def _merge(b: Builder, x: Tensor, pool: list[Tensor]) -> list[Tensor]:
    if x.dim() < 2:
        return []
    d = b.rng.randrange(x.dim() - 1)
    return [b.call(aten.reshape.default, x, [*x.shape[:d], x.shape[d] * x.shape[d + 1], *x.shape[d + 2 :]])]


def _divide(b: Builder, x: Tensor, pool: list[Tensor]) -> list[Tensor]:
    choices = [(d, k) for d, size in enumerate(x.shape) for k in (2, 3, 4) if size % k == 0 and size > k]
    if not choices or x.dim() > 4:
        return []
    d, k = b.rng.choice(choices)
    return [b.call(aten.reshape.default, x, [*x.shape[:d], k, x.shape[d] // k, *x.shape[d + 1 :]])]


def _permute(b: Builder, x: Tensor, pool: list[Tensor]) -> list[Tensor]:
    order = list(range(x.dim()))
    b.rng.shuffle(order)
    return [b.call(aten.permute.default, x, order)]


def _split(b: Builder, x: Tensor, pool: list[Tensor]) -> list[Tensor]:
    choices = [(d, k) for d, size in enumerate(x.shape) for k in (2, 3) if size % k == 0 and size > k]
    if not choices:
        return []
    d, k = b.rng.choice(choices)
    return list(b.call(aten.split.Tensor, x, x.shape[d] // k, d))


def _half(b: Builder, x: Tensor, pool: list[Tensor]) -> list[Tensor]:
    choices = [d for d, size in enumerate(x.shape) if size % 2 == 0]
    if not choices:
        return []
    d = b.rng.choice(choices)
    half = x.shape[d] // 2
    start = b.rng.choice((0, half))
    return [b.call(aten.slice.Tensor, x, d, start, start + half)]


def _join(b: Builder, x: Tensor, pool: list[Tensor]) -> list[Tensor]:
    if not x.dim():
        return []
    return [b.call(aten.cat.default, [x, _same_shape(x, pool, b)], b.rng.randrange(x.dim()))]


def _expand(b: Builder, x: Tensor, pool: list[Tensor]) -> list[Tensor]:
    if x.dim() > 3:
        return []
    d = b.rng.randrange(x.dim() + 1)
    opened = b.call(aten.unsqueeze.default, x, d)
    return [b.call(aten.expand.default, opened, [*x.shape[:d], b.rng.choice((2, 3, 4)), *x.shape[d:]])]


def _embed(b: Builder, x: Tensor, pool: list[Tensor]) -> list[Tensor]:
    rows = b.rng.choice((5, 6, 12))
    table = b.parameter(rows, b.rng.choice((3, 4)))
    return [b.call(aten.embedding.default, table, b.ids(rows, b.rng.choice((2, 4)), 3))]


def _select_by_mask(b: Builder, x: Tensor, pool: list[Tensor]) -> list[Tensor]:
    mask = b.source(torch.rand(x.shape, generator=b.generator) < 0.5, "input")
    return [b.call(aten.where.self, mask, x, _same_shape(x, pool, b))]


def _gather(b: Builder, x: Tensor, pool: list[Tensor]) -> list[Tensor]:
    if not x.dim():
        return []
    d = b.rng.randrange(x.dim())
    index = b.ids(x.shape[d], *x.shape[:d], b.rng.choice((2, 3)), *x.shape[d + 1 :])
    return [b.call(aten.gather.default, x, d, index)]


def _attend(b: Builder, x: Tensor, pool: list[Tensor]) -> list[Tensor]:
    batch, heads, time, width = 2, b.rng.choice((2, 4)), b.rng.choice((3, 4)), 3
    gqa = heads == 4 and b.rng.random() < 0.5
    q = b.parameter(batch, heads, time, width)
    k, v = (b.parameter(batch, heads // (2 if gqa else 1), time, width) for _ in range(2))
    kind = b.rng.randrange(3)
    mask = None
    if kind == 1:
        mask = b.source(torch.rand((batch, 1, time, time), generator=b.generator) < 0.8, "input")
        mask[..., 0] = True
    return [
        b.call(aten.scaled_dot_product_attention.default, q, k, v, mask, 0.0, kind == 2, scale=None, enable_gqa=gqa)
    ]


def _classify(b: Builder, x: Tensor, pool: list[Tensor]) -> list[Tensor]:
    if x.dim() < 2 or x.shape[-1] < 2:
        return []
    logits = b.call(aten.reshape.default, x, [x.numel() // x.shape[-1], x.shape[-1]])
    labels = b.ids(x.shape[-1], logits.shape[0])
    labels[0] = -100
    return [b.call(aten.cross_entropy_loss.default, logits, labels, None, 2, -100, 0.0)]


STEPS = (
    _pointwise, _pointwise, _binary, _binary, _linear, _linear, _product_with_itself, _along_a_dim, _along_a_dim,
    _norm, _merge, _divide, _permute, _split, _half, _join, _expand, _embed, _select_by_mask, _gather, _attend,
    _classify,
)  # fmt: skip


def _convolve(b: Builder, x: Tensor, pool: list[Tensor]) -> list[Tensor]:
    if x.dim() not in (3, 4):
        return []
    spatial = x.dim() - 2
    width, dilation = b.rng.choice((2, 3)), b.rng.choice((1, 1, 2))
    padding = b.rng.randint(0, width - 1)
    if min(x.shape[2:]) + 2 * padding < dilation * (width - 1) + 2:
        return []
    weight = b.parameter(b.rng.choice((2, 3, 4)), x.shape[1], *[width] * spatial)
    target = (aten.conv1d.default, aten.conv2d.default)[spatial - 1]
    stride = b.rng.choice((1, 1, 2))
    made = b.call(target, x, weight, None, [stride] * spatial, [padding] * spatial, [dilation] * spatial)
    return [b.call(aten.tanh.default, made)]


def _convolve_back(b: Builder, x: Tensor, pool: list[Tensor]) -> list[Tensor]:
    if x.dim() != 3 or x.shape[-1] < 3:
        return []
    weight = b.parameter(x.shape[1], b.rng.choice((2, 3)), 3)
    return [b.call(aten.tanh.default, b.call(aten.conv_transpose1d.default, x, weight, None, [2], [1]))]


def _pool(b: Builder, x: Tensor, pool: list[Tensor]) -> list[Tensor]:
    if x.dim() != 3 or x.shape[-1] < 3:
        return []
    return [b.call(aten.avg_pool1d.default, x, [3], [b.rng.choice((1, 2))], [b.rng.choice((0, 1))])]


def _roll(b: Builder, x: Tensor, pool: list[Tensor]) -> list[Tensor]:
    if not x.dim():
        return []
    d = b.rng.randrange(x.dim())
    return [b.call(aten.roll.default, x, [b.rng.randint(1, x.shape[d])], [d])]


def _pad(b: Builder, x: Tensor, pool: list[Tensor]) -> list[Tensor]:
    if not x.dim():
        return []
    return [b.call(aten.constant_pad_nd.default, x, [b.rng.randint(0, 2), b.rng.randint(1, 3)], 0.5)]


def _slice(b: Builder, x: Tensor, pool: list[Tensor]) -> list[Tensor]:
    """Any rows, some of them left out; and those against their successors."""
    choices = [d for d, size in enumerate(x.shape) if size > 3]
    if not choices:
        return []
    d = b.rng.choice(choices)
    if b.rng.random() < 0.5:
        start, step = b.rng.randrange(x.shape[d] - 2), b.rng.choice((1, 2, 3))
        return [b.call(aten.slice.Tensor, x, d, start, b.rng.randint(start + 2, x.shape[d]), step)]
    rest = x.shape[d] - 1
    ends = [b.call(aten.slice.Tensor, x, d, start, start + rest) for start in (0, 1)]
    return [b.call(aten.mul.Tensor, *ends)]


# Operators that read an operand through windows.
WINDOWED = (_convolve, _convolve, _convolve, _convolve_back, _pool, _roll, _pad, _slice, _slice)
