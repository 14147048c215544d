"""What ordinary programs of the reference's tutorials needed, and had not: derivatives of functions that differentiate,
two split cells one after the other, accumulated gradients, recurrent layers in float32."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import shardwise.mindspore as ms
from shardwise.mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from shardwise.mindspore import dataset as ds

RunRanks = Callable[..., list[Any]]


@pytest.fixture(autouse=True)
def _default_context() -> Iterator[None]:
    ms.reset_auto_parallel_context()
    yield
    ms.reset_auto_parallel_context()


class Critic(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        numbers = np.random.RandomState(0)
        self.w = Parameter(Tensor(numbers.randn(1, 8).astype(np.float32)), name="w")
        self.v = Parameter(Tensor(numbers.randn(8, 1).astype(np.float32)), name="v")

    def construct(self, x: Any) -> Any:
        return ops.matmul(ops.tanh(ops.matmul(x, self.w)), self.v)


def test_a_penalty_on_a_gradient_is_differentiated_by_the_weights() -> None:
    critic, x = Critic(), np.random.RandomState(1).randn(6, 1).astype(np.float32)

    def penalty(data: Any) -> Any:
        slope = ms.grad(lambda own: critic(own).sum())(data)
        return ((slope**2).sum(1) - 1).abs().mean()

    loss, grads = ms.value_and_grad(penalty, None, critic.trainable_params())(Tensor(x))
    weights = [torch.tensor(p.asnumpy(), requires_grad=True) for p in critic.trainable_params()]
    data = torch.tensor(x, requires_grad=True)
    (slope,) = torch.autograd.grad((torch.tanh(data @ weights[0]) @ weights[1]).sum(), data, create_graph=True)
    want = ((slope**2).sum(1) - 1).abs().mean()
    want.backward()
    assert float(loss) == pytest.approx(want.item(), rel=1e-5)
    for own, weight in zip(grads, weights, strict=True):
        np.testing.assert_allclose(own.asnumpy(), weight.grad, rtol=1e-4, atol=1e-6)


def test_a_gradient_is_transformed_once_more() -> None:
    x = Tensor([0.3, 2.0], ms.float32)
    second = ms.jacrev(ms.grad(lambda own: (own**3).sum()))(x)
    np.testing.assert_allclose(second.asnumpy(), np.diag(6 * x.asnumpy()), rtol=1e-5)


def test_parameters_of_equal_cells_have_the_paths_of_their_cells_in_their_names() -> None:
    critics = nn.CellList([Critic(), Critic()])
    holder = nn.SequentialCell(critics[0], critics[1])
    assert [p.name for p in holder.get_parameters()] == ["0.w", "0.v", "1.w", "1.v"]
    holder.update_parameters_name("net.")
    assert list(holder.parameters_dict()) == ["net.0.w", "net.0.v", "net.1.w", "net.1.v"]


def test_gradients_flow_through_the_value_of_a_parameter() -> None:
    critic = Critic()
    gradient = ms.grad(lambda x: (x * critic.w.value()).sum(), None, critic.trainable_params())
    of_w, of_v = gradient(Tensor(np.full((1, 8), 3.0, np.float32)))
    assert (of_w.asnumpy() == 3).all()
    assert (of_v.asnumpy() == 0).all()


def test_batches_have_the_sizes_that_a_function_says() -> None:
    rows = ds.NumpySlicesDataset(np.arange(8), ["x"], shuffle=False)
    batches = rows.batch(lambda info: info.get_batch_num() + 1)
    assert [len(row["x"]) for row in batches.create_dict_iterator(num_epochs=1)] == [1, 2, 3, 2]
    assert batches.get_dataset_size() == 4


def test_an_error_in_training_gives_back_the_signal() -> None:
    class Fails(ms.Callback):
        def step_end(self, run_context: Any) -> None:
            raise RuntimeError("stopped")

    before = signal.getsignal(signal.SIGUSR1)
    net = nn.Dense(2, 1)
    model = ms.Model(net, nn.MSELoss(), nn.SGD(net.trainable_params(), 0.1))
    data = ds.NumpySlicesDataset((np.ones((2, 2), np.float32), np.ones((2, 1), np.float32)), ["x", "y"]).batch(2)
    with pytest.raises(RuntimeError, match="stopped"):
        model.train(1, data, callbacks=[ms.OnRequestExit(save_ckpt=False, sig=signal.SIGUSR1), Fails()])
    assert signal.getsignal(signal.SIGUSR1) == before


class Clear(nn.Cell):
    """A part of training: no input, no cell inside."""

    def __init__(self, sums: ParameterTuple, zeros: ParameterTuple) -> None:
        super().__init__(auto_prefix=False)
        self.sums, self.zeros, self.hyper_map = sums, zeros, ops.HyperMap()

    def construct(self) -> Any:
        return self.hyper_map(ops.partial(ops.assign), self.sums, self.zeros)


class Sentences(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.rnn = nn.LSTM(8, 8, num_layers=2, bidirectional=True, batch_first=True)
        self.mask = Tensor(np.arange(16) < 8)
        self.head = nn.Dense(16, 2)

    def construct(self, ids: Any) -> Any:
        _, (hidden, _) = self.rnn(self.embedding(ids))
        both = ops.concat((hidden[-2], hidden[-1]), axis=1)
        return self.head(both * ops.Cast()(self.mask, ms.float32))


def _trained(mode: str | None) -> tuple[list[float], list[int]]:
    """Losses of sentences with added gradients, and of two cells of which one judges what the other makes; and the
    numbers of elements that a rank holds."""
    ms.reset_auto_parallel_context()
    if mode is not None:
        ms.set_auto_parallel_context(parallel_mode=mode, search_mode="dynamic_programming", full_batch=True)
    ms.set_seed(4)
    numbers, losses = np.random.RandomState(0), []
    net, loss_fn = Sentences(), nn.CrossEntropyLoss()
    optimizer = nn.SGD(net.trainable_params(), 0.5)
    sums, zeros = (optimizer.parameters.clone(name, init="zeros") for name in ("sums", "zeros"))
    clear, gradient = Clear(sums, zeros), ms.value_and_grad(lambda x, y: loss_fn(net(x), y), None, optimizer.parameters)
    for step in range(4):
        ids, labels = numbers.randint(0, 12, (8, 5)).astype(np.int32), numbers.randint(0, 2, 8).astype(np.int32)
        loss, grads = gradient(Tensor(ids), Tensor(labels))
        ops.HyperMap()(ops.partial(ops.assign_add), sums, grads)
        losses.append(float(loss))
        if step % 2:
            optimizer(sums)
            clear()
    maker, judge = nn.SequentialCell(nn.Dense(4, 16), nn.ReLU(), nn.Dense(16, 8)), nn.Dense(8, 1)
    made = ms.value_and_grad(lambda z: judge(maker(z)).square().mean(), None, maker.trainable_params())
    judged = ms.value_and_grad(lambda z, x: (judge(x) - judge(maker(z))).square().mean(), None,
                               judge.trainable_params())  # fmt: skip
    updates = [nn.SGD(own.trainable_params(), 0.05) for own in (maker, judge)]
    for _ in range(2):
        z, x = (Tensor(numbers.randn(8, size).astype(np.float32)) for size in (4, 8))
        for update, (loss, grads) in zip(updates, (made(z), judged(z, x)), strict=True):
            update(grads)
            losses.append(float(loss))
    return losses, [p.numel() for p in (*net.get_parameters(), *maker.get_parameters())]


@pytest.mark.parametrize("mode", ["semi_auto_parallel", "auto_parallel"])
def test_programs_on_two_ranks_are_those_of_one_process(mode: str, run_ranks: RunRanks) -> None:
    want, _ = _trained(None)
    assert len(set(want)) == len(want) == 8
    for losses, _ in run_ranks(_trained, 2, mode, time_limit_seconds=120):
        np.testing.assert_allclose(losses, want, rtol=2e-5)  # float32: sums in another order
