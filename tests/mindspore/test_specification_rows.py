"""Rows of docs/specification.md that no other test of the dialect shows: import paths, ``ms.shard`` of
functions and cells, gradients of several outputs, the column split of document 004, the memory of its large model."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import shardwise as sw
import shardwise.mindspore as ms
from mindspore.applied import equal_to_one_device, planned
from raising import raises
from shardwise.api import step_memory
from shardwise.mindspore import calls, nn, ops, planning
from shardwise.mindspore.strict import StrategyError
from shardwise.runtime.hooks import announce_hooks


def block(x: Tensor, w: Tensor) -> Tensor:
    return ops.relu(ops.matmul(x, w))


class Calls(nn.Cell):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.w = ms.Parameter(torch.rand(8, 8).double(), "w")
        self.function = function

    def construct(self, x: Tensor) -> Tensor:
        result: Any = self.function(x, self.w)
        return result if isinstance(result, Tensor) else result[0] + result[1]


X = torch.rand(8, 8).double()


def both(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return a @ b, a + b


@pytest.mark.parametrize(
    ("function", "given", "aliases"),
    [
        (block, (((2, 1), (1, 2)),), [(2, 1), (1, 2)]),
        (block, ([[4, 1], [1, 1]], [[1, 4]]), [(4, 1), (1, 1), (1, 4)]),
        (block, (((1, 4), (4, 1)), ((4, 1),)), [(1, 4), (4, 1), (4, 1)]),
        (block, ((None, (1, 2)),), [(1, 2)]),
        (block, (None, ((2, 2),)), [(2, 2)]),
        (both, (((4, 1), (4, 1)), ((4, 1), (1, 4))), [(4, 1), (4, 1), (4, 1), (1, 4)]),
    ],
)
def test_a_function_takes_strategies_of_its_inputs_and_outputs(function: Any, given: Any, aliases: list[Any]) -> None:
    """B22: its inputs and outputs are split by the counts, and every result and gradient is that of one device."""
    cell = Calls(ms.shard(function, *given))
    plan = equal_to_one_device(cell, (X,), 4)
    split = {entry.name: _counts(entry.strategy) for entry in plan.operators if "alias" in entry.name}
    assert list(split.values()) == aliases, plan


def _counts(strategy: str) -> tuple[int, int]:
    """The counts of "d0@data.0 d1@data.1" on four devices, of which data.0 and data.1 are factors of 2."""
    counts = [1, 1]
    for word in strategy.split():
        dim, axes = word.removeprefix("d").split("@")
        counts[int(dim)] *= 2 ** len(axes.strip("()").split(",")) if "." in axes else 4
    return counts[0], counts[1]


def test_propagation_carries_the_strategies_of_a_function_inside() -> None:
    cell = Calls(ms.shard(block, ((1, 4), (4, 1)), ((4, 1),)))
    ms.set_auto_parallel_context(parallel_mode="auto_parallel", search_mode="sharding_propagation", device_num=4)
    with calls.inside():
        plan = planning.decided(cell, cell, (X,), {}, {}, ms.context.options())
        assert sw.verify(cell, (X,), plan, steps=1).ok
    strategies = {entry.name: entry.strategy for entry in plan.operators}
    assert strategies["/matmul"] == "k@data"
    assert strategies["/relu"] == "d0@data"
    with raises(StrategyError, "There is no operator that is configured sharding strategy", op="Calls"):
        planning.decided(Calls(block), Calls(block), (X,), {}, {}, ms.context.options())


@pytest.mark.parametrize("method", [False, True])
def test_a_cell_with_strategies_keeps_its_parameters(method: bool) -> None:
    class Outer(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            inner = nn.Dense(8, 8).to(ms.float64)
            self.inner = inner.shard(((2, 2),), ((4, 1),)) if method else ms.shard(inner, ((2, 2),), ((4, 1),))

        def construct(self, x: Tensor) -> Tensor:
            return self.inner(x)

    cell = Outer()
    assert list(cell.parameters_dict()) == ["inner.weight", "inner.bias"]
    plan = equal_to_one_device(cell, (X,), 4)
    marks = [_counts(entry.strategy) for entry in plan.operators if entry.name.startswith("inner/alias")]
    assert (marks[0], marks[-1]) == ((2, 2), (4, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        announce_hooks(cell)  # its marks are no hooks of the user's


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ((((2, 1),),), StrategyError, "size: 1 is not equal to inputs size: 2"),
        ((((2, 1, 1), (1, 1)),), StrategyError, "strategy len: 3 is not equal to inputs len: 2, index: 0"),
        ((((3, 1), (1, 1)),), StrategyError, "must be the power of 2, but get 3"),
        ((((4, 2), (1, 1)),), StrategyError, ("((4, 2), (1, 1))", "it requires 8 devices")),
        ((((2, 1), (1, 1)), ((2, 1), (1, 1))), StrategyError, "size: 2 is not equal to outputs size: 1"),
        (((2, 1),), ValueError, "block: in_strategy (2, 1) is one tuple of numbers"),
    ],
)
def test_wrong_strategies_of_a_function_are_refused(given: Any, error: type[Exception], words: object) -> None:
    with raises(error, words):
        planned(Calls(ms.shard(block, *given)), (X,), 4)


def test_alone_a_function_with_strategies_is_the_function() -> None:
    assert torch.equal(ms.shard(block, ((2, 1), (1, 2)))(X, X), block(X, X))


# ------------------------------------------------------------------------------------------------------ import paths

PATHS = """
import shardwise.mindspore as ms
import shardwise.mindspore.nn as nn
import shardwise.mindspore.dataset as ds
import shardwise.mindspore.communication as D
from shardwise.mindspore.nn import Cell, Momentum, SoftmaxCrossEntropyWithLogits, MSELoss, DistributedGradReducer
from shardwise.mindspore.nn import TrainOneStepCell, WithLossCell, PipelineCell
from shardwise.mindspore.nn.wrap import TrainOneStepWithLossScaleCell
from shardwise.mindspore.nn.loss import MSELoss
from shardwise.mindspore.ops import operations as ops
from shardwise.mindspore.ops import operations as P
from shardwise.mindspore.ops import composite as C, functional as F
from shardwise.mindspore.ops import clip_by_global_norm, depend, GradOperation, ReduceOp
from shardwise.mindspore.ops import AllReduce, AllGather, ReduceScatter, Broadcast, AlltoAll
from shardwise.mindspore.ops.operations import MatMul, AllReduce
from shardwise.mindspore.ops.composite import GradOperation, clip_by_global_norm
from shardwise.mindspore.common.initializer import initializer
from shardwise.mindspore.common import dtype as mstype, set_seed
from shardwise.mindspore.communication import init, get_rank, get_group_size
from shardwise.mindspore.communication.management import init, get_rank, get_group_size
from shardwise.mindspore.parallel._utils import _get_device_num, _get_gradients_mean
from shardwise.mindspore.context import ParallelMode
from shardwise.mindspore.train import Model, LossMonitor, TimeMonitor, ModelCheckpoint, CheckpointConfig
from shardwise.mindspore.train import DynamicLossScaleManager, FixedLossScaleManager
from shardwise.mindspore.train.callback import LossMonitor, TimeMonitor, ModelCheckpoint, CheckpointConfig, Callback
from shardwise.mindspore.train.model import Model
from shardwise.mindspore.train.serialization import load_checkpoint, load_param_into_net, save_checkpoint
from shardwise.mindspore.amp import all_finite, init_register, init_status, DynamicLossScaler, StaticLossScaler
from shardwise.mindspore import Parameter, ParameterTuple, context, train, set_seed, Tensor, ops, nn, amp, dtype
from shardwise.mindspore import Model, LossMonitor, ModelCheckpoint, TimeMonitor, Callback, CheckpointConfig
from shardwise.mindspore import ParallelMode, set_context, set_auto_parallel_context, value_and_grad, grad, shard
from shardwise.mindspore import FixedLossScaleManager, DynamicLossScaleManager, GRAPH_MODE, initializer, float32
"""


@pytest.mark.parametrize("line", PATHS.strip().splitlines())
def test_names_are_where_the_documents_import_them(line: str) -> None:
    exec(line, {})


def test_everything_that_is_exported_exists() -> None:
    for module in (ms, ms.nn, ms.ops, ms.train, ms.communication, ms.dataset, ms.common, ms.ops.composite):
        assert [name for name in module.__all__ if not hasattr(module, name)] == []
        assert len(set(module.__all__)) == len(module.__all__)


# ------------------------------------------------------------------------------------------- gradients, loss scales


def test_gradients_of_several_outputs() -> None:
    """B24: the sum of all outputs is differentiated; with has_aux the first, and the others come along."""
    x, w = torch.rand(3, 4), ms.Parameter(torch.rand(4, 2), "w")

    def three(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = ops.matmul(x, w)
        return y.sum(), (y * y).sum(), y.sin()

    y = x @ w.detach()
    values, (of_w,) = ms.value_and_grad(three, None, [w])(x)
    torch.testing.assert_close(torch.Tensor(of_w), x.T @ (1 + 2 * y + y.cos()))
    assert [tuple(value.shape) for value in values] == [(), (), (3, 2)]
    values, (of_x, (of_w,)) = ms.value_and_grad(three, 0, [w], has_aux=True)(x)
    torch.testing.assert_close(torch.Tensor(of_x), w.detach().sum(1).expand(3, 4).as_subclass(Tensor))
    torch.testing.assert_close(torch.Tensor(of_w), x.sum(0)[:, None].expand(4, 2))
    assert len(values) == 3
    assert w.grad is None


def train_network(manager: Any, loss_scale: float, data: Tensor) -> tuple[Tensor, Any]:
    """One step of Model.train of sum(w * x); rate 1, no momentum."""

    class Net(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.w = ms.Parameter(torch.zeros(2), "w")

        def construct(self, x: Tensor) -> Tensor:
            return (self.w * x).sum()

    net = Net()
    optimizer = nn.Momentum(net.trainable_params(), 1.0, 0.0, loss_scale=loss_scale)
    ms.Model(net, optimizer=optimizer, loss_scale_manager=manager).train(1, [(data,)])
    return net.w.detach().as_subclass(Tensor), manager


def test_loss_scale_managers_scale_check_and_adjust() -> None:
    """A fixed scale is divided out by the optimizer, or by the step where that checks for overflows; a dynamic one
    leaves out the step that overflows, and shrinks."""
    good, bad = torch.tensor([1.0, 2.0]), torch.tensor([1.0, torch.inf])
    fixed = ms.FixedLossScaleManager(1024.0, drop_overflow_update=False)
    assert torch.equal(train_network(fixed, 1024.0, good)[0], -good)
    dropping = ms.FixedLossScaleManager(1024.0)
    assert torch.equal(train_network(dropping, 1.0, good)[0], -good)
    dynamic = ms.DynamicLossScaleManager(2.0**10, 2, 1)
    assert torch.equal(train_network(dynamic, 1.0, good)[0], -good)
    assert dynamic.get_loss_scale() == 2.0**11
    assert torch.equal(train_network(dynamic, 1.0, bad)[0], torch.zeros(2))
    assert dynamic.get_loss_scale() == 2.0**10


def test_what_can_not_be_differentiated_is_named() -> None:
    with raises(TypeError, "sum of all outputs, and one is 3", "has_aux=True"):
        ms.value_and_grad(lambda x: (x.sum(), 3))(torch.ones(2))


def test_arguments_of_a_model_are_told_apart() -> None:
    net, loss = nn.Dense(2, 2), nn.MSELoss()
    optimizer = nn.Momentum(net.trainable_params(), 0.1, 0.9)
    for model in (ms.Model(net, optimizer, loss), ms.Model(net, loss, optimizer), ms.Model(net, optimizer)):
        assert model._optimizer is optimizer
        assert model._loss_fn in (loss, None)
    for given, words in (
        ((optimizer, loss, net), "Momentum is not a network"),
        ((net, loss, loss), "MSELoss is not an optimizer"),
        ((net, optimizer, optimizer), "two optimizers"),
    ):
        with raises(TypeError, words):
            ms.Model(*given)


def test_an_all_gather_joins_the_rows_of_two_products() -> None:
    """A24: document 002's Z = (X W) V on four devices needs one all-gather between the products, and no other step."""

    class Two(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.v = (ms.Parameter(torch.rand(8, 8).double(), name) for name in "wv")
            self.first = ops.MatMul().shard(((4, 1), (1, 1)))
            self.second = ops.MatMul().shard(((1, 1), (1, 4)))

        def construct(self, x: Tensor) -> Any:
            return self.second(self.first(x, self.w), self.v)

    plan = equal_to_one_device(Two(), (X,), 4)
    before_the_end = [own for own in plan.conversions if own.forward][:-1]
    assert [[move.kind for move in own.forward] for own in before_the_end] == [["all_gather"]]


# ---------------------------------------------------------------------------------------------- numbers of document 004


def test_the_memory_of_200_billion_parameters_is_the_documents() -> None:
    """A31: 745 GiB of float32 parameters; 16 bytes each, 2,980 GiB, with gradients and the two states of Adam. Split
    over 128 devices each has the 128th part."""

    class Large(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(781_250, 256_000, bias=False, device="meta")

        def forward(self, x: Tensor) -> Tensor:
            return torch.as_tensor(self.layer(x).sum())

    inputs = (torch.empty(1, 781_250, device="meta"),)
    for devices, strategies in ((1, None), (128, {"layer": "n@x"})):
        plan = sw.plan(
            Large(), inputs, devices, mesh=sw.Mesh(x=devices), mode="semi_auto", strategies=strategies, optimizer="adam"
        )
        parts = step_memory(Large(), inputs, plan).peak_of["update"].parts
        assert parts["parameters"] * devices / 2**30 == pytest.approx(745.06, abs=0.005)
        states = parts["parameters"] + parts["gradients"] + parts["optimizer states"]
        assert states * devices == 200_000_000_000 * 16
        assert states * devices / 2**30 == pytest.approx(2980.2, abs=0.05)


class Layer(torch.nn.Module):
    """A layer of a transformer as PanGu-alpha has it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.before, self.between = heads, torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.before(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(y)
        return torch.as_tensor(x + self.down(F.gelu(self.up(self.between(x)))))


class LanguageModel(torch.nn.Module):
    """The published form of PanGu-alpha's largest model: 128 heads, 1,024 tokens, 40,000 words; 201 billion numbers."""

    def __init__(self, layers: int = 62, width: int = 16_384, words: int = 40_000, length: int = 1024) -> None:
        super().__init__()
        self.words, self.places = torch.nn.Embedding(words, width), torch.nn.Parameter(torch.empty(length, width))
        self.layers = torch.nn.ModuleList(Layer(width, 128) for _ in range(layers))
        self.norm, self.head = torch.nn.LayerNorm(width), torch.nn.Linear(width, words, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.words(ids) + self.places
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


@pytest.mark.long
def test_a_language_model_of_200_billion_parameters_needs_3500_gib_and_128_cards() -> None:
    """A31, planned: parameters, gradients, the states of Adam and the inputs of all layers (whose inside is computed
    again) of 16 texts. Cards of 32 GiB hold it when there are 128, and not when there are 64."""
    with torch.device("meta"):
        model = LanguageModel()
    texts = torch.empty(16, 1024, dtype=torch.long, device="meta")
    tensor_parallel = {"layers.*.qkv": "n@tp", "layers.*.out": "k@tp", "layers.*.up": "n@tp", "layers.*.down": "k@tp"}
    peaks = {}
    for cards in (64, 128):
        plan = sw.plan(
            model, (texts, texts), cards, mesh=sw.Mesh(dp=cards // 8, tp=8), search="sharding_propagation", zero=3,
            strategies=tensor_parallel | {"head": "n@tp"}, optimizer="adam", recompute="full",
        )  # fmt: skip
        memory = step_memory(model, (texts, texts), plan)
        parts, peaks[cards] = memory.peak_of["update"].parts, memory.peak.num_bytes / 2**30
        kept = parts["parameters"] + parts["gradients"] + parts["optimizer states"] + memory.kept_bytes
        assert kept * cards / 2**30 == pytest.approx(3500, rel=0.04)
    assert peaks[128] < 32 < peaks[64]


def test_a_product_split_by_columns_of_its_weight_on_two_devices() -> None:
    """A38: X (m, k) times W' and W'' (k, n / 2) gives outputs (m, n / 2), which are joined."""
    x, w = torch.rand(6, 4).double(), torch.rand(4, 8).double()
    plan = equal_to_one_device(Columns(w), (x,), 2)
    product = next(entry for entry in plan.operators if entry.name == "/matmul")
    assert product.strategy == "n@data"
    assert next(entry for entry in plan.parameters if entry.name == "w").layout == "f64[4, 8@data]"


class Columns(nn.Cell):
    def __init__(self, w: Tensor) -> None:
        super().__init__()
        self.w, self.matmul = ms.Parameter(w, "w"), ops.MatMul().shard(((1, 1), (1, 2)))

    def construct(self, x: Tensor) -> Tensor:
        return self.matmul(x, self.w)


class Weighted(nn.Cell):
    """sum(w * x), with the rows of both split over two devices."""

    def __init__(self) -> None:
        super().__init__()
        self.w = ms.Parameter(torch.zeros(4, 2), "w")
        self.mul = ops.Mul().shard(((2, 1), (2, 1)))

    def construct(self, x: Tensor) -> Tensor:
        return ops.ReduceSum()(self.mul(self.w, x))


def step_with_one_bad_row() -> tuple[list[float], list[float]]:
    """On a rank: a good step and one whose gradient is infinite in a row of rank 1 alone; the weights' sum on this rank
    and the scale after each."""
    ms.communication.init("gloo")
    ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel", device_num=2, full_batch=True)
    net, manager = Weighted(), ms.DynamicLossScaleManager(1024.0, 2, 100)
    optimizer = nn.Momentum(net.trainable_params(), 1.0, 0.0)
    model = ms.Model(net, optimizer=optimizer, loss_scale_manager=manager)
    sums, scales = [], []
    good = torch.ones(4, 2)
    bad = good.clone()
    bad[3, 1] = torch.inf
    for data in (good, bad):
        model.train(1, [(data,)])
        sums.append(float(net.w.detach().sum()))
        scales.append(manager.get_loss_scale())
    return sums, scales


def test_all_ranks_leave_out_a_step_in_which_one_overflows(run_ranks: Any) -> None:
    assert run_ranks(step_with_one_bad_row, 2) == [([-4.0, -4.0], [1024.0, 512.0])] * 2
