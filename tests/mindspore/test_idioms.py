"""What programs rely on that no other page of tests names: small things, each beside its formula."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shardwise.mindspore as ms
import shardwise.mindspore.dataset as ds
from raising import raises
from shardwise.mindspore import Parameter, ParameterTuple, Tensor, nn, ops


def test_cells_with_names_tuples_of_parameters_and_parameters_as_tensors() -> None:
    net = nn.SequentialCell(OrderedDict([("first", nn.Dense(3, 4)), ("act", nn.ReLU()), ("last", nn.Dense(4, 2))]))
    assert list(net.parameters_dict()) == ["first.weight", "first.bias", "last.weight", "last.bias"]
    assert [type(own).__name__ for own in (net.first, net[1], *net[1:])] == ["Dense", "ReLU", "ReLU", "Dense"]
    net.insert(1, nn.Tanh())
    assert [type(own).__name__ for own in net] == ["Dense", "Tanh", "ReLU", "Dense"]
    net = nn.SequentialCell(OrderedDict([("first", nn.Dense(3, 4)), ("act", nn.ReLU()), ("last", nn.Dense(4, 2))]))
    del net[0]
    assert list(net.parameters_dict()) == ["last.weight", "last.bias"], "the names in checkpoints"
    del net[1:]
    assert [name for name, _ in net.append(cell=nn.Tanh()).named_children()] == ["act", "1"]

    class Towers(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.towers = ParameterTuple(Parameter(Tensor(np.full((2, 2), i + 1.0)), f"w{i}") for i in range(2))

        def construct(self, x: Any) -> Any:
            return x @ self.towers[0] + self.towers[1]

    cell = Towers()
    assert [p.name for p in cell.trainable_params()] == ["w0", "w1"]
    assert cell.towers[0] is cell.w0
    weight = cell.w0
    assert (weight * 2).asnumpy().tolist() == (2 * weight).asnumpy().tolist() == [[2, 2], [2, 2]]
    copied = weight.clone()
    weight += 1
    weight[0] = 5.0
    assert weight.data.asnumpy().tolist() == [[5, 5], [2, 2]]
    assert copied.asnumpy().tolist() == [[1, 1], [1, 1]]
    assert weight.std().item() == 1.5  # of a population
    assert isinstance(weight.clone("zeros"), Parameter)


def test_methods_of_tensors() -> None:
    x = Tensor(np.arange(24.0).reshape(2, 3, 4))
    assert x.transpose(2, 0, 1).view(4, -1).shape == (4, 6)  # not in order in memory
    value, place = x.max(axis=2, return_indices=True)
    assert (value.shape, place[0].asnumpy().tolist()) == ((2, 3), [3, 3, 3])
    assert x.sum(axis=0, dtype=ms.float32).dtype == ms.float32
    assert x.take(Tensor([2, 0]), 1).asnumpy().tolist() == x.asnumpy().take([2, 0], 1).tolist()
    assert (x.item(5), x.item((1, 0, 1)), float(x.ptp())) == (5.0, 13.0, 23.0)
    assert x.strides == (96, 32, 8)
    assert x.select(x > 5, 0.0).asnumpy().tolist() == np.where(x.asnumpy() > 5, x.asnumpy(), 0).tolist()
    assert x.diagonal(1, axis1=0, axis2=2).asnumpy().tolist() == x.asnumpy().diagonal(1, 0, 2).tolist()


@pytest.mark.parametrize("kind", ["add", "sub", "mul", "div", "max", "min"])
def test_scatters_combine_with_what_is_there(kind: str) -> None:
    combine: Any = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "max": np.maximum,
                    "min": np.minimum}[kind]  # fmt: skip
    numbers = np.random.RandomState(0)
    start, updates = numbers.rand(4, 3) + 0.5, numbers.rand(3, 3) + 0.5
    rows, places = np.array([2, 0, 2]), np.array([[0, 1], [3, 2], [0, 1]])
    by_rows, by_places = start.copy(), start.copy()
    combine.at(by_rows, rows, updates)
    combine.at(by_places, tuple(places.T), updates[0])
    parameter = Parameter(start)  # of a copy
    getattr(ops, f"scatter_{kind}")(parameter, Tensor(rows), Tensor(updates))
    np.testing.assert_allclose(parameter.asnumpy(), by_rows, rtol=1e-12)
    found = getattr(ops, f"tensor_scatter_{kind}")(Tensor(start), Tensor(places), Tensor(updates[0]))
    np.testing.assert_allclose(found.asnumpy(), by_places, rtol=1e-12)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own, of its forward derivatives
def test_derivatives_of_functions() -> None:
    def function(x: Any, y: Any) -> Any:
        return x * y, x**2

    x, y = Tensor(3.0), Tensor(2.0)
    value, product = ms.jvp(function, (x, y), (Tensor(1.0), Tensor(10.0)))
    assert [float(own) for own in (*value, *product)] == [6, 9, 32, 6]
    value, back = ms.vjp(function, x, y)
    assert [float(own) for own in back(Tensor(1.0), Tensor(1.0))] == [8, 3]
    for jacobian in (ms.jacrev, ms.jacfwd):
        assert jacobian(lambda own: own**2)(Tensor([1.0, 2.0])).asnumpy().tolist() == [[2, 0], [0, 4]]
    seen = []
    hook = ops.HookBackward(lambda grads: seen.append(float(grads[0])) or grads[0] * 2)
    assert float(ms.grad(lambda own: hook(own * 3) * 5)(x)) == 30
    assert seen == [5]


class OwnMomentum(nn.Optimizer):
    def __init__(self, params: Any, learning_rate: Any, momentum: float = 0.9) -> None:
        super().__init__(learning_rate, params)
        self.momentum, self.moments = momentum, self.parameters.clone(prefix="moments", init="zeros")

    def construct(self, gradients: Sequence[torch.Tensor]) -> Any:
        for parameter, moment, gradient in zip(self.parameters, self.moments, gradients, strict=True):
            ops.assign(moment, moment * self.momentum + gradient)
            ops.assign(parameter, parameter - moment * self.get_lr())
        return True


def test_optimizers_of_ones_own_and_rates_that_are_assigned_to() -> None:
    weights = [[Parameter(np.linspace(1, 2, 4), "w")] for _ in range(2)]
    rates = [0.1, 0.05, 0.05]
    own, known = OwnMomentum(weights[0], 0.1), nn.Momentum(weights[1], 0.1, 0.9)
    for rate in rates:
        for optimizer in (own, known):
            ops.assign(optimizer.learning_rate, Tensor(rate, ms.float64))
            optimizer([Tensor(np.full(4, 0.5))])
    np.testing.assert_allclose(weights[0][0].asnumpy(), weights[1][0].asnumpy(), rtol=1e-14)
    sums = 0.5 * np.array([1, 1.9, 1 + 0.9 * 1.9])
    np.testing.assert_allclose(weights[0][0].asnumpy(), np.linspace(1, 2, 4) - sums @ rates, rtol=1e-14)
    assert nn.NaturalExpDecayLR(0.1, 0.9, 4)(2) == pytest.approx(0.1 * np.exp(-1.8))


_decayed = ops.MultitypeFuncGraph("decayed")


@_decayed.register("Tensor", "Number", "Tensor", "Tensor", "Tensor", "Bool", "Bool")
def _update(factor: Any, decay: Any, rate: Any, parameter: Any, gradient: Any, flag: bool, updated: bool) -> Any:
    step = gradient + decay * parameter if flag else gradient
    return ops.assign(parameter, parameter - factor * rate * step) if updated else gradient


class Decays(nn.Optimizer):
    """Of one's own, in the words of the reference's base class."""

    def construct(self, gradients: Any) -> Any:
        rates = self.get_lr() if self.is_group_lr else (self.get_lr(),) * len(self.parameters)
        found = self.map_(ops.partial(_decayed, 1), self.get_weight_decay(), rates, self.parameters, gradients,
                          self.decay_flags, self.optim_filter)  # fmt: skip
        return self.broadcast_params(found) if self.use_parallel else found


def test_an_optimizer_of_ones_own_knows_its_groups() -> None:
    weights = [[Parameter(np.linspace(1, 2, 3), name) for name in ("a", "b", "c")] for _ in range(2)]
    gradients = [np.full(3, 0.5), np.full(3, 0.25), np.ones(3)]
    for own, kind in zip(weights, (Decays, nn.SGD), strict=True):
        groups = [{"params": own[1:2], "lr": 0.2}, {"params": [own[2], own[0]], "weight_decay": 0.1},
                  {"order_params": own}]  # fmt: skip
        optimizer = kind(0.1, groups) if kind is Decays else kind(groups, 0.1)
        assert (optimizer.is_group, optimizer.is_group_lr) == (True, True)
        assert optimizer.weight_decay == (0.1, 0.0, 0.1)
        assert optimizer.decay_flags == (True, False, True)
        assert [float(rate) for rate in optimizer.get_lr()] == [0.1, 0.2, 0.1]
        assert [float(rate) for rate in optimizer.get_lr_parameter(optimizer.parameters)] == [0.1, 0.2, 0.1]
        assert optimizer.param_length == 3
        with raises(ValueError, kind.__name__, "requires_grad=True", "one of its parameters"):
            optimizer.get_lr_parameter(ms.Parameter(ms.Tensor(1.0)))
        for _ in range(2):
            optimizer([Tensor(gradient) for gradient in gradients])
    for one, other in zip(*weights, strict=True):
        np.testing.assert_allclose(one.asnumpy(), other.asnumpy(), rtol=1e-14)


def test_a_name_that_is_given_to_a_parameter_of_a_cell_is_whole() -> None:
    net = nn.SequentialCell(nn.Dense(2, 2), nn.BatchNorm2d(2))
    for parameter in net.get_parameters():
        parameter.name = "G." + parameter.name
    assert list(net.parameters_dict())[:3] == ["G.0.weight", "G.0.bias", "G.1.moving_mean"]
    assert [p.name for p in net.trainable_params()] == ["G.0.weight", "G.0.bias", "G.1.gamma", "G.1.beta"]


def test_words_become_numbers_and_rows_of_like_lengths_share_batches() -> None:
    texts = ds.NumpySlicesDataset(["a bad film", "a fine film", "fine"], ["text"], shuffle=False)
    words = texts.map(ds.text.WhitespaceTokenizer(), ["text"])
    vocab = ds.text.Vocab.from_dataset(words, "text", special_tokens=["<unk>", "<pad>"])
    assert vocab.vocab() == {"<unk>": 0, "<pad>": 1, "a": 2, "film": 3, "fine": 4, "bad": 5}
    lookup = ds.text.Lookup(vocab, "<unk>")
    assert lookup(["fine", "plot"]).tolist() == [4, 0]
    with raises(RuntimeError, "'plot'"):
        ds.text.Lookup(vocab)(["plot"])
    batches = words.map(lookup, ["text"]).bucket_batch_by_length(["text"], [2], [1, 2], pad_info={"text": ([4], 1)})
    rows = [row["text"].tolist() for row in batches.create_dict_iterator(num_epochs=1, output_numpy=True)]
    assert rows == [[[2, 5, 3, 1], [2, 4, 3, 1]], [[4, 1, 1, 1]]]
    assert batches.get_dataset_size() == 2


def test_a_training_cell_is_a_model_and_metrics_are_given_tensors(tmp_path: Path) -> None:
    class Seen(nn.Metric):
        def clear(self) -> None:
            self.total = 0.0

        def update(self, *inputs: Any) -> None:
            self.total += float(inputs[0].asnumpy().sum())

        def eval(self) -> float:
            return self.total

    net = nn.Dense(2, 1, weight_init="ones")
    step = nn.TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), nn.SGD(net.trainable_params(), 0.1))
    data = ds.NumpySlicesDataset((np.ones((4, 2), np.float32), np.zeros((4, 1), np.float32)), ["x", "y"]).batch(2)
    before = net.weight.asnumpy().copy()
    ms.Model(step).train(1, data)
    assert (net.weight.asnumpy() < before).all()
    assert ms.Model(net, nn.MSELoss(), metrics={"seen": Seen()}).eval(data)["seen"] == pytest.approx(
        4 * net(Tensor(np.ones((1, 2), np.float32))).asnumpy().item()
    )
    with raises(ValueError, "Model.train", "needs an optimizer"):
        ms.Model(net, nn.MSELoss()).train(1, data)
    file = str(tmp_path / "net.ckpt")
    ms.save_checkpoint(net, file, append_dict={"epoch_num": 3})
    assert set(ms.load_checkpoint(file, filter_prefix="bias")) == {"weight", "epoch_num"}
    assert int(ms.load_checkpoint(file)["epoch_num"].asnumpy()) == 3
    assert ms.load_param_into_net(net, ms.load_checkpoint(file, choice_func=lambda name: "bias" in name)) == (
        ["weight"], [])  # fmt: skip


def test_constructors_say_their_arguments() -> None:
    assert str(inspect.signature(nn.ELU.__init__)) == "(self, alpha=1.0)"
    assert list(inspect.signature(nn.Dropout.__init__).parameters) == ["self", "keep_prob", "p", "dtype"]
    assert list(inspect.signature(nn.LSTM.__init__).parameters)[:3] == ["self", "input_size", "hidden_size"]
    assert inspect.signature(ops.cholesky).parameters["upper"].default is False
    assert inspect.signature(nn.SyncBatchNorm).parameters["process_groups"].default is None


def test_parts_of_a_batch_in_turn_are_summed() -> None:
    cell = ms.parallel.nn.MicroBatchInterleaved(nn.WithLossCell(nn.Identity(), nn.MSELoss()), 2)
    x, y = np.arange(8.0).reshape(4, 2), np.ones((4, 2))
    halves = [np.square(x[part] - y[part]).mean() for part in (slice(0, 2), slice(2, 4))]
    assert float(cell(Tensor(x), Tensor(y))) == pytest.approx(sum(halves))


def test_gradients_of_frozen_weights_are_zero_and_tensors_inside_grad_have_all_methods() -> None:
    net = nn.Dense(2, 3)
    for parameter in net.get_parameters():
        parameter.requires_grad = False
    x, y = Tensor(np.ones((2, 2), np.float32)), Tensor(np.ones((2, 3), np.float32))
    (gradient,) = ms.value_and_grad(lambda x: net(x).sum(), None, [net.weight])(x)[1]
    np.testing.assert_array_equal(gradient.asnumpy(), np.zeros((3, 2)))
    before = net.weight.asnumpy().copy()
    nn.TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), nn.SGD([net.weight]))(x, y)
    np.testing.assert_array_equal(net.weight.asnumpy(), before)
    found = ms.grad(lambda x: x.astype(ms.float32).max(axis=1).expand_dims(0).sum())(Tensor([[1.0, 3.0], [4.0, 2.0]]))
    np.testing.assert_array_equal(found.asnumpy(), [[0, 1], [1, 0]])


def test_small_names_that_people_use() -> None:
    from shardwise.mindspore.nn.optim.optimizer import opt_init_args_register
    from shardwise.mindspore.profiler.profiling import Profiler

    from shardwise.mindspore.ops.primitive import constexpr

    assert constexpr(lambda n: n + 1)(2) == 3
    assert ops.functional.make_range(1, 7, 2) == (1, 3, 5)
    assert opt_init_args_register(len)([1]) == 1
    assert Profiler is ms.Profiler
    assert nn.Range(1, 7, 2)().asnumpy().tolist() == [1, 3, 5]
    assert nn.Range(0.5, 2, 1)().dtype == ms.float32
    scale = ops.MultitypeFuncGraph("scale")
    scale.register("Tensor", "RowTensor")(lambda x, y: None)
    scale.register("Tensor", "Tensor")(lambda x, y: x * y)
    assert float(scale(Tensor(2.0), Tensor(3.0))) == 6
    ms.set_ps_context(enable_ps=False)
    with raises(NotImplementedError, "enable_ps=True", fix=r"tables by rows"):
        ms.set_ps_context(enable_ps=True)
