"""``Model``, callbacks, checkpoints and custom loops; what a user does around a split cell."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardwise as sw
import shardwise.mindspore as ms
from mindspore.test_modes import BATCH, Net, batches, trained
from raising import raises
from shardwise.mindspore import checks, engine
from shardwise.mindspore.holding import holding_of

RunRanks = Callable[..., list[Any]]
SEMI = {"parallel_mode": "semi_auto_parallel"}


def custom_loop(net: Net, data: list[Any]) -> list[float]:
    optimizer = ms.nn.Momentum(net.trainable_params(), 0.05, 0.9)
    loss_fn = ms.nn.MSELoss()

    def forward(x: Tensor, label: Tensor) -> tuple[Any, Any]:
        output = net(x)
        return loss_fn(output, label), output

    step = ms.value_and_grad(forward, None, optimizer.parameters, has_aux=True)
    losses = []
    for x, label in [*data, *data]:
        (loss, _), grads = step(x, label)
        optimizer(grads)
        losses.append(loss.item())
    return losses


def loops_on_rank(folder: str) -> dict[str, Any]:
    rank, size, found = dist.get_rank(), dist.get_world_size(), {}
    strategies = (((1, 2), (2, 1)), None)
    own = [tuple(x.chunk(size)[rank] for x in pair) for pair in batches()]

    ms.set_auto_parallel_context(**SEMI, full_batch=True)
    found["whole"] = custom_loop(Net(strategies), batches())
    ms.reset_auto_parallel_context()
    ms.set_auto_parallel_context(**SEMI, gradients_mean=True)  # every rank has the mean of its own rows
    found["parts"] = custom_loop(Net(strategies), own)
    found["told"] = ["loop" in checks._told]
    ms.reset_auto_parallel_context()
    ms.set_auto_parallel_context(**SEMI)
    custom_loop(Net(strategies), own[:1])
    found["told"].append("loop" in checks._told)
    ms.reset_auto_parallel_context()
    found["gradient"] = dist.get_world_size()

    ms.reset_auto_parallel_context()
    ms.set_auto_parallel_context(**SEMI, strategy_ckpt_save_file=f"{folder}/plan.json")
    found["saved"] = trained(Net(strategies), "mean", own)
    dist.barrier()
    ms.reset_auto_parallel_context()
    ms.set_auto_parallel_context(**SEMI, strategy_ckpt_load_file=f"{folder}/plan.json")
    net = Net()  # says nothing: the file does
    found["loaded"] = trained(net, "mean", own)
    found["layout"] = str(holding_of(net.weight).layout)

    ms.reset_auto_parallel_context()
    ms.set_auto_parallel_context(parallel_mode="auto_parallel", search_mode="dynamic_programming")
    net = Net()
    net.set_data_parallel()
    found["data parallel"] = trained(net, "mean", own)
    net.set_train(False)
    x = own[0][0]
    found["other shapes"] = [net(batch) for batch in (torch.cat([x, x]), x, torch.cat([x, x]), x)]
    ms.reset_auto_parallel_context()
    ms.set_auto_parallel_context(**SEMI)
    unequal = [pair for whole, half in zip(own, own, strict=True) for pair in (whole, tuple(t[:2] for t in half))]
    found["last batches are smaller"] = trained(Net(strategies), "rows", unequal)
    found["programs"] = len(engine._SPLITS[net].par.compiled)
    found["strategies"] = {op.name: op.strategy for op in engine._SPLITS[net].par.plan.operators}
    return found


def test_custom_loops_strategy_files_and_cells_that_split_their_batch(run_ranks: RunRanks, tmp_path: Path) -> None:
    ranks = run_ranks(loops_on_rank, 2, str(tmp_path), time_limit_seconds=200)
    want = custom_loop(Net(), batches())
    net = Net()
    want_model = [float(loss) for loss in trained(net, "mean", batches())]
    assert want == pytest.approx(want_model, rel=1e-12)
    parts = [[tuple(x.chunk(2)[rank] for x in pair) for pair in batches()] for rank in range(2)]
    smaller = [
        tuple(torch.cat([parts[rank][i][side][:size] for rank in range(2)]) for side in range(2))
        for i in range(len(parts[0]))
        for size in (4, 2)
    ]
    want_rows = trained(Net(), "rows", smaller)
    for found in ranks:
        assert found["told"] == [False, True], "gradients are summed over the ranks: said once"
        assert found["whole"] == pytest.approx(want, rel=1e-10)
        for kind in ("saved", "loaded", "data parallel"):
            assert [float(loss) for loss in found[kind]] == pytest.approx(want, rel=1e-10), kind
        assert "12@" in found["layout"]
        assert found["programs"] == 2  # one for each shape
        for mine, whole in zip(found["last batches are smaller"][:4], want_rows[:4], strict=True):  # then it diverges
            np.testing.assert_allclose(mine, whole.reshape(2, -1)[ranks.index(found)], rtol=1e-10)
        assert found["strategies"]["/matmul"].startswith("m@")
    assert np.mean([found["parts"] for found in ranks], 0) == pytest.approx(want, rel=1e-10)
    assert json.loads((tmp_path / "plan.json").read_text())
    x = batches()[0][0]
    for rank, found in enumerate(ranks):
        own = x.chunk(2)[rank]
        for given, output in zip((torch.cat([own, own]), own) * 2, found["other shapes"], strict=True):
            torch.testing.assert_close(output, net.set_train(False)(given), rtol=1e-9, atol=1e-12)


def test_the_lines_of_the_monitors_and_the_files_of_checkpoints(capsys: Any, tmp_path: Path) -> None:
    config = ms.train.CheckpointConfig(
        save_checkpoint_steps=3, keep_checkpoint_max=2, append_info=["epoch_num", "step_num", {"note": 1}]
    )
    saver = ms.train.ModelCheckpoint("CKP", str(tmp_path), config)
    net = Net()
    optimizer = ms.nn.Momentum(net.trainable_params(), 0.05, 0.9)
    model = ms.Model(net, loss_fn=ms.nn.MSELoss(), optimizer=optimizer)
    model.train(2, batches(), callbacks=[ms.train.LossMonitor(), ms.train.TimeMonitor(), saver])
    lines = capsys.readouterr().out.splitlines()
    where = [line.split(",")[0] for line in lines if line.startswith("epoch")]
    assert where == [f"epoch: {epoch} step: {step}" for epoch in (1, 2) for step in (1, 2, 3, 4)]
    assert all(re.fullmatch(r"epoch: \d step: \d, loss is 0\.\d+|epoch: \d step: \d, loss is \d+\.\d+", own)
               for own in lines if own.startswith("epoch"))  # fmt: skip
    assert len([own for own in lines if re.fullmatch(r"Train epoch time: +\d+\.\d{3} ms, per step .*", own)]) == 2
    assert sorted(own.name for own in tmp_path.iterdir()) == ["CKP-2_2.ckpt", "CKP-2_4.ckpt"]  # the two newest
    found = ms.load_checkpoint(str(tmp_path / "CKP-2_4.ckpt"))
    assert (found["epoch_num"], found["step_num"], found["note"]) == (2, 8, 1)
    assert torch.equal(found["w"], net.weight)
    again = ms.train.ModelCheckpoint("CKP", str(tmp_path))
    model.train(1, batches()[:1], callbacks=again)
    assert Path(again.latest_ckpt_file_name).name == "CKP_1-1_1.ckpt"
    fresh = Net()
    missing, extra = ms.load_param_into_net(fresh, {"w": found["w"], "other": found["w2"]})
    assert set(missing) == {"w2", "norm.weight", "norm.bias"}
    assert extra == ["other"]
    with raises(RuntimeError, "[12, 16] in the checkpoint and [16, 8]"):
        ms.load_param_into_net(fresh, {"w2": found["w"]})


def test_a_plan_of_a_cell_is_verified_without_ranks() -> None:
    ms.set_auto_parallel_context(**SEMI, device_num=4)
    cell = ms.nn.WithLossCell(Net((((2, 2), (2, 1)), None)), ms.nn.MSELoss())
    plan = sw.plan(cell, batches()[0], 4, mesh=sw.Mesh(data=4), mode="semi_auto")
    report = sw.verify(cell, batches()[0], plan)
    assert report.ok, report
    assert plan.strategies["_backbone/matmul"].startswith("m@data.0 k@data.1")


class Reduces(ms.nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.reduce = ms.ops.AllReduce()

    def construct(self, x: Tensor) -> Tensor:
        return self.reduce(x)


def test_a_plan_takes_no_communication_by_hand() -> None:
    with raises(sw.errors.CaptureError, "AllReduce is called", op="reduce"):
        sw.plan(Reduces(), torch.zeros(4, 4), 2)
    x = torch.arange(3.0)
    assert torch.equal(Reduces()(x), x)


def test_a_loss_that_is_no_number_ends_the_training() -> None:
    net = Net()
    model = ms.Model(net, ms.nn.MSELoss(), ms.nn.Momentum(net.trainable_params(), 0.05, 0.9))
    bad = [(torch.full((BATCH, 12), np.nan, dtype=torch.float64), batches()[0][1])]
    with raises(ValueError, "epoch: 1 step: 1. Invalid loss, terminating training"):
        model.train(1, bad, callbacks=ms.train.LossMonitor())


def test_metrics_are_those_of_the_formulas() -> None:
    net = Net().set_train(False)
    data = batches()
    model = ms.Model(net, ms.nn.MSELoss(), metrics={"loss", "mae", "mse"})
    found = model.eval(data)
    outputs = [(net(x).detach(), label) for x, label in data]
    assert found["loss"] == pytest.approx(np.mean([float((o - t).square().mean()) for o, t in outputs]))
    # As the reference does: the elements of a sample are added up, and samples are averaged.
    assert found["mse"] == pytest.approx(np.mean([float((o - t).square().sum() / len(t)) for o, t in outputs]))
    assert found["mae"] == pytest.approx(np.mean([float((o - t).abs().sum() / len(t)) for o, t in outputs]))


class Stops(ms.train.Callback):
    def step_end(self, run_context: ms.train.RunContext) -> None:
        told = run_context.original_args()
        self.steps = told.cur_step_num
        assert told.step_in_epoch == told["step_in_epoch"] == told.get("step_in_epoch") == (self.steps - 1) % 4 + 1
        assert told.get("nothing", 3) == 3
        if self.steps == 3:
            run_context.request_stop()


def test_a_callback_stops_the_training() -> None:
    net, stops = Net(), Stops()
    model = ms.Model(net, ms.nn.MSELoss(), ms.nn.Momentum(net.trainable_params(), 0.05, 0.9))
    model.train(5, batches(), callbacks=stops)
    assert stops.steps == 3


class Follows(Stops):
    def __init__(self) -> None:
        self.found: list[Any] = []

    def on_eval_end(self, run_context: ms.train.RunContext) -> None:
        told = run_context.original_args()
        self.found.append((told.mode, told.cur_epoch_num, told.metrics["mse"]))


def test_fit_tells_callbacks_of_its_evaluations_and_the_old_names_of_training_alone() -> None:
    net, follows = Net(), Follows()
    ends: list[str] = []
    model = ms.Model(net, ms.nn.MSELoss(), ms.nn.Momentum(net.trainable_params(), 0.05, 0.9), metrics={"mse"})
    also = ms.train.LambdaCallback(on_eval_step_end=lambda run_context: ends.append(run_context.original_args().mode))
    data, kept = batches(), ms.train.History()
    model.fit(3, data, data, callbacks=[follows, also, kept])
    assert follows.steps == 3  # and then it stopped
    assert [entry[:2] for entry in follows.found] == [("eval", n + 1) for n in range(len(follows.found))]
    assert [entry[2] for entry in follows.found] == kept.history["eval_mse"]
    assert ends == ["eval"] * len(follows.found) * len(data) != []


def planned_alone(settings: dict[str, Any]) -> None:
    ms.set_auto_parallel_context(**settings, device_num=4)
    Net()(torch.zeros(2, 12, dtype=torch.float64))


@pytest.mark.parametrize(
    ("act", "error", "words"),
    [
        (lambda: planned_alone(SEMI), RuntimeError, ("communication.init()", "shardwise run -n 4")),
        (lambda: ms.Tensor(12288, 128), TypeError, "np.zeros((12288, 128)"),
        (lambda: ms.ops.MatMul.shard(((4, 1), (1, 1))), TypeError, "MatMul().shard"),
        (lambda: ms.ops.MatMul().shard((4, 1), (1, 1)), ValueError, "shard(((4, 1), (1, 1)))"),
        (lambda: ms.ops.MatMul().set_strategy({(4, 1), (1, 1)}), TypeError, "set, which has no order"),
        (lambda: ms.Model(Net()).train(1, batches()), ValueError, ("Model.train", "needs an optimizer")),
        (lambda: ms.Model(Net(), ms.nn.MSELoss()).eval(batches()), ValueError, ("Model.eval", "nothing to measure")),
        (lambda: ms.Model(Net(), metrics="f2"), ValueError, ("no metric 'f2'", "f1", "{name: Metric}")),
        (lambda: ms.Model(Net(), ms.nn.MSELoss()).fit(1, [], valid_frequency=0), ValueError, "valid_frequency is 0"),
        (lambda: ms.ops.clip_by_norm([], 1.0), ValueError, ("norm of no tensors", "at least one")),
        (lambda: ms.load_checkpoint("nowhere.ckpt"), ValueError, "no checkpoint nowhere.ckpt"),
    ],
)
def test_bad_input_is_told_with_the_mend(act: Callable[[], Any], error: type[Exception], words: object) -> None:
    with raises(error, words):
        act()


def test_primitives_cells_and_modules_nest_and_eager_results_have_asnumpy() -> None:
    net = Net()
    outer = ms.nn.SequentialCell([net, torch.nn.Linear(8, 2, dtype=torch.float64)])
    assert isinstance(outer(torch.zeros(2, 12, dtype=torch.float64)).asnumpy(), np.ndarray)
    assert list(net.parameters_dict()) == ["w", "w2", "norm.weight", "norm.bias"]
    assert torch.nn.Sequential(net)(torch.zeros(2, 12, dtype=torch.float64)).shape == (2, 8)
    gradient = ms.grad(lambda x: (x * x).sum())(ms.Tensor(np.array([1.0, 2.0])))
    assert gradient.asnumpy().tolist() == [2.0, 4.0]
