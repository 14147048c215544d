"""What ordinary programs of the reference's tutorials needed, and had not: derivatives of functions that differentiate,
two split cells one after the other, accumulated gradients, recurrent layers in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from shardwise.mindspore.nn.probability import distribution

import shardwise as sw
import shardwise.mindspore as ms
from mindspore.applied import equal_to_one_device
from raising import raises
from shardwise.mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from shardwise.mindspore import dataset as ds
from shardwise.mindspore.nn.wrapped import _by_steps

RunRanks = Callable[..., list[Any]]


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

    def cubes(own: Any) -> Any:
        inner = ms.grad(lambda own, power: (own**power).sum(), return_ids=True)(own, power=3)
        return inner[1]

    assert torch.equal(ms.jacrev(cubes)(x), second)


def test_gradients_are_found_by_positions_and_parameters() -> None:
    critic, x, y = Critic(), Tensor([[0.3]]), Tensor([[2.0]])
    weights = critic.trainable_params()
    want = ms.grad(lambda x, y: (critic(x) * y).sum(), (0, 1), weights)(x, y)
    found = ms.grad(lambda x, y: (critic(x) * y).sum(), (0, 1), weights, return_ids=True)(x, y)
    names = [weight.name for weight in weights]
    for (own, gradient), name, other in zip((*found[0], *found[1]), (0, 1, *names), (*want[0], *want[1]), strict=True):
        assert own == name
        assert torch.equal(gradient, other)
    alone = ms.grad(lambda x: critic(x).sum(), return_ids=True)(x)
    assert alone[0] == 0


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


class Clear(nn.Cell):
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


class Deep(nn.Cell):
    """Two losses; the table, which is looked up by columns, has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.lookup = nn.EmbeddingLookup(12, 8, "normal", "DEVICE", nn.EmbeddingLookup.TABLE_COLUMN_SLICE)
        self.table, self.dense = self.lookup.embedding_table, nn.Dense(8, 1)

    def construct(self, ids: Any) -> Any:
        loss = self.dense(self.lookup(ids)).square().mean()
        return loss, loss + 0.1 * self.table.square().sum()


class One(nn.Cell):
    def __init__(self, network: nn.Cell, place: int) -> None:
        super().__init__()
        self.network, self.place = network, place

    def construct(self, ids: Any) -> Any:
        return self.network(ids)[self.place]


class Remembers(nn.Cell):
    """What it has seen, a count and a moving average are parameters that are not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.normal = nn.Dense(4, 4), distribution.Normal()
        self.memory = ParameterTuple([Parameter(Tensor(np.zeros((8, 4), np.float32)), "seen", requires_grad=False)])
        self.count = Parameter(Tensor(0, ms.int32), "count", requires_grad=False)
        self.centre = Parameter(Tensor(np.zeros(4, np.float32)), "centre", requires_grad=False)
        self.still = Parameter(Tensor(np.ones(4, np.float32)), "still", requires_grad=False)

    def construct(self, x: Any) -> Any:
        y = self.dense(x)
        loss = -self.normal.log_prob(y - self.memory[0] - self.centre, 0.0, self.still).mean() + 0.1 * self.count
        if self.training:
            ops.assign(self.memory[0], ops.stop_gradient(y))
            self.count += 1
            self.centre = 0.9 * self.centre + 0.1 * ops.stop_gradient(y).mean(axis=0)
        return loss


def _trained(mode: str | None) -> tuple[list[float], list[int]]:
    """Losses of sentences with added gradients, of two cells of which one judges what the other makes, and of two
    losses of one network, each with its optimizer, and of a cell that remembers; and the numbers of elements that a
    rank holds."""
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
    deep = Deep()
    parts = ParameterTuple(deep.dense.trainable_params()), ParameterTuple([deep.table])
    steps = [
        (ops.GradOperation(get_by_list=True, sens_param=True)(One(deep, place), own), nn.SGD(own, 0.1))
        for place, own in enumerate(parts)
    ]
    ids = Tensor(numbers.randint(0, 12, (8, 5)).astype(np.int32))
    for _ in range(2):
        losses += [float(own.asnumpy()) for own in deep(ids)]
        for gradient, update in steps:
            update(gradient(ids, Tensor(1.0)))
    remembers = Remembers()
    step = nn.TrainOneStepCell(remembers, nn.SGD(remembers.trainable_params(), 0.1))
    for place in range(4):
        x = Tensor(numbers.randn(8, 4).astype(np.float32))
        losses.append(float(step.set_train()(x)))
        if place == 1:
            losses.append(float(remembers.set_train(False)(x)))  # another program, of the same parameters
            remembers.centre.set_data(Tensor(np.full(4, 3.0, np.float32)))
    losses.append(float(remembers.centre.asnumpy().sum()))
    assert int(remembers.count.asnumpy()) == 4
    return losses, [p.numel() for p in (*net.get_parameters(), *maker.get_parameters())]


@pytest.mark.parametrize("mode", ["semi_auto_parallel", "auto_parallel"])
@pytest.mark.sampled(1)
def test_programs_on_two_ranks_are_those_of_one_process(mode: str, run_ranks: RunRanks) -> None:
    want, _ = _trained(None)
    assert len(set(want)) == len(want) == 18
    for losses, _ in run_ranks(_trained, 2, mode, time_limit_seconds=120):
        np.testing.assert_allclose(losses, want, rtol=2e-5)  # float32: sums in another order


class Stay(nn.Cell):
    def __init__(self, kind: Any, **settings: Any) -> None:
        super().__init__()
        self.rnn = kind(3, 5, 2, batch_first=True, **settings)

    def construct(self, x: Any, lengths: Any) -> Any:
        output, state = self.rnn(x, seq_length=lengths)
        parts = state if isinstance(state, tuple) else (state,)
        return output.square().sum() + sum((part * (place + 1)).sin().sum() for place, part in enumerate(parts))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_cells_know_which_dim_is_the_batch(kind: Any) -> None:
    assert kind(3, 5, batch_first=True).batch_first is True
    assert kind(3, 5).batch_first is False


@pytest.mark.parametrize(
    ("kind", "settings"),
    [(nn.LSTM, {"bidirectional": True}), (nn.GRU, {"has_bias": False}), (nn.RNN, {"bidirectional": True})],
)
@pytest.mark.sampled(1)
def test_recurrent_cells_over_rows_of_several_lengths_are_split(kind: Any, settings: dict[str, Any]) -> None:
    cell, x, lengths = Stay(kind, **settings), torch.randn(4, 4, 3), torch.tensor([4, 2, 1, 3])
    packed = cell(Tensor(x), Tensor(lengths))  # by torch's own packing
    plan = sw.plan(cell, (x, lengths), 2, mesh=sw.Mesh(data=2), mode="semi_auto")
    report = sw.verify(cell, (x, lengths), plan)
    assert report.ok, str(report)
    held: list[Any] = []
    with torch.no_grad():
        held.append(_by_steps(cell.rnn.module, x, None, lengths))
    (output, state), parts = held[0], []
    for place, part in enumerate(state if isinstance(state, tuple) else (state,)):
        parts.append((part * (place + 1)).sin().sum())
    assert float(output.square().sum() + sum(parts)) == pytest.approx(float(packed.detach()), rel=1e-5)


def test_values_that_are_set_are_copied() -> None:
    first, second = nn.Dense(2, 2), nn.Dense(2, 2)
    for own, other in zip(first.get_parameters(), second.get_parameters(), strict=True):
        own.set_data(other)
    before = first.weight.asnumpy().copy()
    assert (before == second.weight.asnumpy()).all()
    second.weight.set_data(Tensor(np.zeros((2, 2), np.float32)))
    with torch.no_grad():
        second.weight.add_(1.0)
    assert (first.weight.asnumpy() == before).all()


def test_parameters_and_what_construct_is_given_are_tensors() -> None:
    class Told(nn.Cell):
        def construct(self, x: Any) -> Any:
            assert isinstance(x, Tensor)
            return (x * 2).sum()

    assert isinstance(nn.Dense(2, 2).weight, Tensor)
    assert not isinstance(np.zeros(2), Tensor)
    assert type(Tensor(np.ones((2, 3))).T) is Tensor
    assert sw.verify(Told(), torch.ones(4), sw.plan(Told(), torch.ones(4), 2, mesh=sw.Mesh(data=2))).ok
    weight = nn.Dense(2, 2).weight
    assert (np.asarray(weight) == weight.asnumpy()).all()


def test_a_network_to_evaluate_with_gives_metrics_all_that_it_returns() -> None:
    class Judge(nn.Cell):
        def __init__(self, net: Any) -> None:
            super().__init__()
            self.net = net

        def construct(self, x: Any, y: Any) -> Any:
            return self.net(x), y

    net = nn.Dense(2, 1)
    data = ds.NumpySlicesDataset((np.eye(2, dtype=np.float32), np.ones((2, 1), np.float32)), ["x", "y"]).batch(2)
    model = ms.Model(net, nn.MSELoss(), eval_network=Judge(net), metrics={"mae": ms.train.MAE()})
    want = np.abs(net(Tensor(np.eye(2, dtype=np.float32))).asnumpy() - 1).mean()
    assert model.eval(data)["mae"] == pytest.approx(want, rel=1e-5)


def test_optimizers_scalers_and_histories_say_what_programs_ask() -> None:
    net = nn.Dense(2, 1)
    fixed, falls = (nn.SGD(net.trainable_params(), rate) for rate in (0.1, [0.1, 0.01]))
    assert (fixed.dynamic_lr, falls.dynamic_lr) == (False, True)
    assert ms.amp.DynamicLossScaler(8, 2, 2).scale_value.asnumpy() == 8
    history = ms.History()
    data = ds.NumpySlicesDataset((np.ones((4, 2), np.float32), np.ones((4, 1), np.float32)), ["x", "y"]).batch(2)
    ms.Model(net, nn.MSELoss(), fixed).train(2, data, callbacks=history)
    assert [type(loss) for loss in history.history["net_output"]] == [float, float]


def test_parameters_take_values_of_their_shapes_by_their_names() -> None:
    cell = Remembers()
    cell.centre = Tensor(np.full(4, 2.0, np.float32))
    assert isinstance(cell.centre, Parameter)
    assert cell.centre.asnumpy().tolist() == [2.0] * 4
    with raises(ValueError, "[4] gets a value [2]"):
        cell.centre = Tensor([1.0, 2.0])
    assert cell.infer_param_pipeline_stage() == cell.trainable_params()


def test_ctc_losses_come_with_their_table_and_rolls_and_triplets_take_the_references_words() -> None:
    logits, targets = np.random.RandomState(0).randn(3, 1, 4).astype(np.float32), Tensor([[1, 2]], ms.int32)
    x = ops.log_softmax(Tensor(logits), -1)
    loss, table = ops.ctc_loss(x, targets, Tensor([3], ms.int32), Tensor([2], ms.int32), reduction="sum")
    paths = [(1, 2, 2), (1, 1, 2), (0, 1, 2), (1, 0, 2), (1, 2, 0)]
    whole = np.log(sum(np.exp(sum(x.asnumpy()[t, 0, c] for t, c in enumerate(path))) for path in paths))
    assert float(loss) == pytest.approx(-whole, rel=1e-5)
    assert table.shape == (1, 3, 5)
    assert np.logaddexp(*table.asnumpy()[0, -1, -2:]) == pytest.approx(whole, rel=1e-5)
    scores = Tensor(np.roll(logits, -1, -1))  # the older operator's blank is the last class, its labels are sparse
    scores.requires_grad = True
    older, slope = ops.CTCLoss()(scores, Tensor([[0, 0], [0, 1]]), Tensor([0, 1], ms.int32), Tensor([3], ms.int32))
    assert older.asnumpy() == pytest.approx([-whole], rel=1e-5)
    older.sum().backward()
    np.testing.assert_allclose(scores.grad, slope.asnumpy(), atol=1e-6)
    with raises(NotImplementedError, "ctc_merge_repeated=False"):
        ops.CTCLoss(ctc_merge_repeated=False)(scores, Tensor([[0, 0]]), Tensor([0]), Tensor([3]))
    shifted = nn.Roll(shift_size=1, shift_axis=0)(Tensor([1, 2, 3]))
    assert shifted.asnumpy().tolist() == [3, 1, 2]
    near, far = Tensor([[1.0, 0.0]]), Tensor([[3.0, 0.0]])
    assert float(nn.TripletMarginLoss()(near, near, far, Tensor(5.0))) == pytest.approx(3, rel=1e-5)


def test_boxes_and_further_names_are_their_formulas() -> None:
    anchors = Tensor([[0.0, 0, 9, 9], [5, 5, 14, 24]])
    true = Tensor([[1.0, 2, 12, 9], [4, 4, 13, 28]])
    np.testing.assert_allclose(ops.IOU()(anchors, true).asnumpy()[0, 0], 9 * 8 / (100 + 96 - 72), rtol=1e-5)
    deltas = ops.BoundingBoxEncode()(anchors, true)
    np.testing.assert_allclose(deltas.asnumpy()[0], [0.2, 0.1, np.log(1.2), np.log(0.8)], atol=1e-6)
    np.testing.assert_allclose(ops.BoundingBoxDecode(max_shape=(40, 40))(anchors, deltas).asnumpy(), true.asnumpy(),
                               atol=1e-4)  # fmt: skip
    assert ops.Partial()(lambda a, b: a - b, 5)(3) == 2
    assert ops.bitwise_left_shift(Tensor([1, 2]), Tensor([1, 1])).asnumpy().tolist() == [2, 4]
    x = np.random.RandomState(0).randn(3, 4).astype(np.float32)
    for name, args in (("pad", (((1, 1), (0, 2)),)), ("dot", (x.T,)), ("sort", ()), ("append", (x,)),
                       ("take", ([0, 2], 1)), ("array_split", (2,)), ("tensordot", (x.T, 1))):  # fmt: skip
        own = getattr(ms.numpy, name)(Tensor(x), *(Tensor(y) if isinstance(y, np.ndarray) else y for y in args))
        want = getattr(np, name)(x, *args)
        for one, other in zip(own, want, strict=True) if isinstance(want, list) else [(own, want)]:
            np.testing.assert_allclose(one.asnumpy(), other, rtol=1e-5, err_msg=name)


_A, _V = np.array([[3.0, 1, 2], [4, 6, 5]]), np.array([1.0, 4, 2, 8])
NUMPYS: list[tuple[str, tuple[Any, ...]]] = [
    *((name, (_V,)) for name in ("diff", "arccosh", "diagflat", "radians")),
    *((name, (_V - 3,)) for name in ("fix", "rint", "signbit", "isneginf", "fabs", "positive")),
    ("around", (_A / 7, 2)), ("isin", (_V, np.array([2.0, 8, 9]))), ("size", (_A,)),
    ("take_along_axis", (_A, np.array([[0], [1]]), 1)), ("column_stack", ([_V, _V],)),
    ("hsplit", (_A, 3)), ("vsplit", (_A, 2)),
]  # fmt: skip


def test_numpys_functions_are_numpys() -> None:
    for name, args in NUMPYS:
        given = (
            Tensor(x) if isinstance(x, np.ndarray) else [*map(Tensor, x)] if isinstance(x, list) else x for x in args
        )
        own, want = getattr(ms.numpy, name)(*given), getattr(np, name)(*args)
        several = isinstance(want, (tuple, list))
        for one, other in zip(own, want, strict=True) if several else [(own, want)]:
            np.testing.assert_allclose(np.asarray(one), other, rtol=1e-6, atol=1e-7, err_msg=name)  # windows: float32
            assert np.shape(one) == np.shape(other), name


_NUMBERS = np.random.RandomState(5)
_X, _Y = _NUMBERS.rand(4, 6) + 0.5, _NUMBERS.rand(4, 6) + 0.5
_I, _J = _NUMBERS.randint(1, 9, (4, 6)), _NUMBERS.randint(1, 4, (4, 6))
_SYMMETRIC = _X @ _X.T
BY_NUMPY: dict[str, tuple[tuple[Any, ...], Any]] = {
    **{name: ((_X,), getattr(np.fft, name)(_X)) for name in ("fft", "fft2", "fftn", "ifft", "ifft2", "ifftn", "rfft")},
    **{name: ((_X,), getattr(np.fft, name)(_X)) for name in ("fftshift", "ifftshift")},
    "irfft": ((np.fft.rfft(_X),), _X),
    "bitwise_left_shift": ((_I, _J), np.left_shift(_I, _J)),
    "bitwise_right_shift": ((_I, _J), np.right_shift(_I, _J)),
    "complex": ((_X, _Y), _X + 1j * _Y),
    "row_stack": (([_X, _Y],), np.vstack([_X, _Y])),
    "histc": ((_X, 5, 0.5, 1.5), np.histogram(_X, 5, (0.5, 1.5))[0]),
    "igamma": ((np.ones_like(_X), _X), 1 - np.exp(-_X)),  # of the exponential distribution
    "igammac": ((np.ones_like(_X), _X), np.exp(-_X)),
    "zeta": ((np.full(3, 2.0), np.array([1.0, 2.0, 3.0])), np.pi**2 / 6 - np.array([0.0, 1.0, 1.25])),
}


@pytest.mark.parametrize("name", BY_NUMPY)
def test_functions_taken_over_from_torch_are_numpys(name: str) -> None:
    given, wanted = BY_NUMPY[name]
    found = getattr(ops, name)(
        *([Tensor(x) for x in own] if isinstance(own, list) else Tensor(own) if isinstance(own, np.ndarray) else own
          for own in given)
    )  # fmt: skip
    np.testing.assert_allclose(found.asnumpy(), wanted, rtol=1e-6, atol=1e-9)


def test_functions_taken_over_from_torch_with_several_results_or_without_a_name_in_numpy() -> None:
    x = Tensor(_X)
    spread, mean = ops.std_mean(x, 1)
    np.testing.assert_allclose(spread.asnumpy(), _X.std(1))
    np.testing.assert_allclose(mean.asnumpy(), _X.mean(1))
    values, vectors = ops.eigh(Tensor(_SYMMETRIC))
    np.testing.assert_allclose((vectors * values @ vectors.T).asnumpy(), _SYMMETRIC, atol=1e-9)
    spectrum = ops.stft(Tensor(_X[0]), 4, hop_length=2, window=Tensor(np.ones(4)), center=False, return_complex=True)
    np.testing.assert_allclose(spectrum.asnumpy()[:, 1], np.fft.rfft(_X[0, 2:6]))
    counts = ops.poisson(Tensor(np.full(20_000, 3.0)))
    assert abs(float(counts.mean()) - 3) < 5 * (3 / 20_000) ** 0.5, "five standard deviations of the mean"
    for dims in (1, 2, 3):
        whole = torch.rand(1, 1, *(4,) * dims, dtype=torch.float64)
        pooled, places = getattr(torch.nn.functional, f"max_pool{dims}d")(whole, 2, return_indices=True)
        back = getattr(ops, f"max_unpool{dims}d")(Tensor(pooled), Tensor(places), 2)
        kept = torch.zeros(whole.numel(), dtype=whole.dtype)
        kept[places.flatten()] = pooled.flatten()
        np.testing.assert_array_equal(back.asnumpy().ravel(), kept.numpy())


class Penalized(ms.nn.Cell):
    """A penalty on the slope of a critic, which construct takes itself."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = Critic()

    def construct(self, x: Any) -> Any:
        slope = ms.grad(lambda own: self.critic(own).sum())(x)
        return ((slope**2).sum(1) - 1).abs().mean()


def test_a_gradient_in_construct_is_planned_in_semi_auto_mode() -> None:
    plan = equal_to_one_device(Penalized(), (torch.randn(6, 1),), 2, full_batch=True)
    assert "@" in plan.inputs[0].layout
