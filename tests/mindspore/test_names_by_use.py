"""Names that public programs import and that are small: each against its documented formula or torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from shardwise.mindspore.profiler import (
    ProfilerActivity,
    ProfilerLevel,
    profile,
    schedule,
    tensorboard_trace_handler,
)
from torch.nn import functional as F

import shardwise.mindspore as ms
import shardwise.mindspore.dataset as ds
from mindspore.applied import planned_by_context
from raising import raises
from shardwise.errors import CaptureError
from shardwise.mindspore import nn, ops


def made(*shape: int) -> ms.Tensor:
    return ms.Tensor(np.random.default_rng(sum(shape)).standard_normal(shape))


@pytest.mark.parametrize("padding", ["valid", "same"])
def test_unfold_lists_the_windows_with_channels_last(padding: str) -> None:
    x = made(2, 3, 7, 6)
    windows = nn.Unfold([1, 3, 2, 1], [1, 2, 1, 1], [1, 1, 2, 1], padding)(x)
    padded = F.pad(x, (1, 1, 1, 1)) if padding == "same" else x  # 7 rows by 2 need 1 + 1; spans of 3 need 1 + 1 columns
    rows, columns = (padded.shape[2] - 3) // 2 + 1, padded.shape[3] - 2
    assert windows.shape == (2, 18, rows, columns)
    for i in range(rows):
        for j in range(columns):
            window = padded[:, :, 2 * i : 2 * i + 3, j : j + 3 : 2]
            assert torch.equal(windows[:, :, i, j], window.permute(0, 2, 3, 1).reshape(2, -1))


def test_one_step_of_the_adam_operators_is_that_of_the_optimizers() -> None:
    gradient, start = made(4, 3), made(3, 4).T
    for steps in (1, 3):
        var, m, v = start.clone(), torch.zeros(4, 3).double(), torch.zeros(4, 3).double()
        reference = torch.nn.Parameter(start.clone())
        optimizer = torch.optim.Adam([reference], 1e-2)
        for step in range(1, steps + 1):
            ops.Adam()(var, m, v, 0.9**step, 0.999**step, 1e-2, 0.9, 0.999, 1e-8 * (1 - 0.999**step) ** 0.5, gradient)
            reference.grad = torch.as_tensor(gradient)
            optimizer.step()
        assert (var - reference).abs().max() < 1e-12  # the epsilons are equal after torch's bias correction
    parameter = ms.Parameter(start.clone(), "w")
    decayed = nn.AdamWeightDecay([parameter], 1e-2, weight_decay=0.1)
    decayed((gradient,))
    var, m, v = start.clone(), torch.zeros(4, 3).double(), torch.zeros(4, 3).double()
    ops.AdamWeightDecay()(var, m, v, 1e-2, 0.9, 0.999, 1e-6, 0.1, gradient)
    assert (var - parameter).abs().max() < 1e-12


def test_dynamic_rnn_is_an_lstm_with_gates_in_another_order() -> None:
    x, w, b, h, c = made(5, 2, 3), made(7, 16), made(16), made(1, 2, 4), made(1, 4, 2).transpose(1, 2)
    y, hidden, cells, *_ = ops.DynamicRNN(forget_bias=0.5)(x, w, b, None, h, c)
    reference = torch.nn.LSTM(3, 4).double()
    i, j, f, o = w.chunk(4, 1)
    ordered = torch.cat((i, f, j, o), 1).T
    bias = b + F.pad(torch.full((4,), 0.5).double(), (8, 4))
    bi, bj, bf, bo = bias.chunk(4)
    with torch.no_grad():
        reference.weight_ih_l0.copy_(ordered[:, :3])
        reference.weight_hh_l0.copy_(ordered[:, 3:])
        reference.bias_ih_l0.copy_(torch.cat((bi, bf, bj, bo)))
        reference.bias_hh_l0.zero_()
        expected, (last, cell) = reference(torch.as_tensor(x), (torch.as_tensor(h), torch.as_tensor(c)))
    assert (y - expected).abs().max() < 1e-12
    assert (hidden[-1] - last[0]).abs().max() < 1e-12
    assert (cells[-1] - cell[0]).abs().max() < 1e-12
    shorter = ops.DynamicRNN(forget_bias=0.5)(x, w, b, ms.Tensor([5, 2]), h, c)[1]
    assert torch.equal(shorter[:, 0], hidden[:, 0])
    assert torch.equal(shorter[-1, 1], hidden[1, 1])
    with raises(NotImplementedError, "DynamicRNN(direction='BIDIRECTIONAL')", fix="nn.LSTM"):
        ops.DynamicRNN(direction="BIDIRECTIONAL")


class Doubled(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.op = ops.Custom(lambda a: 2 * a, lambda s: s, lambda t: t, func_type="pyfunc",
                             bprop=lambda a, out, dout: 3 * dout)  # fmt: skip

    def construct(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.op(x)
        return result


def test_custom_runs_a_function_of_numpy_with_its_own_gradient() -> None:
    x = torch.ones(3, requires_grad=True)
    y = ops.Custom(lambda a: 2 * a, func_type="pyfunc", bprop=lambda a, out, dout: 3 * dout)(x)
    y.sum().backward()
    assert y.tolist() == [2, 2, 2]
    assert x.grad is not None
    assert x.grad.tolist() == [3, 3, 3]
    assert not ops.Custom(np.sin, func_type="pyfunc")(x).requires_grad
    with raises(NotImplementedError, "func_type='aot'", fix="custom_op"):
        ops.Custom("add.so:add", func_type="aot")
    ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel", device_num=2)
    with raises(CaptureError, "numpy", op="Custom op", fix="torch operators"):
        planned_by_context(Doubled(), (torch.rand(4, 2),))


def test_padded_rows_fill_up_a_dataset() -> None:
    data = ds.NumpySlicesDataset({"a": np.arange(3), "b": np.arange(3)}, shuffle=False)
    padding = ds.PaddedDataset([{"b": np.int64(8), "a": np.int64(7)}] * 2)
    assert padding.get_col_names() == ["a", "b"]
    rows = list(data.concat(padding).create_dict_iterator(output_numpy=True))
    assert [(int(row["a"]), int(row["b"])) for row in rows] == [(0, 0), (1, 1), (2, 2), (7, 8), (7, 8)]
    with raises(ValueError, "padded_samples is []", fix="image"):
        ds.PaddedDataset([])


def test_gradients_accumulate_over_steps() -> None:
    weight = ms.Parameter(ms.Tensor(np.ones(2)), "w")
    accumulate = ms.boost.GradientAccumulation(2, nn.SGD([weight], 1.0))
    assert accumulate(1.5, (ms.Tensor(np.array([1.0, 2.0])),)) == 1.5
    assert weight.tolist() == [1, 1]
    accumulate(2.5, (ms.Tensor(np.array([3.0, 2.0])),))
    assert weight.tolist() == [-1, -1]  # 1 - (1 + 3) / 2, 1 - (2 + 2) / 2
    with raises(ValueError, "max_accumulation_step is 0", fix="from 1"):
        ms.boost.GradientAccumulation(0, None)


def test_runtime_counts_nothing_on_a_cpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert ms.runtime.memory_allocated() == ms.runtime.max_memory_allocated() == 0
    ms.runtime.synchronize()
    with ms.runtime.StreamCtx(ms.runtime.Stream()):
        assert ms.runtime.current_stream() is None


def test_profile_writes_a_trace_of_the_scheduled_steps(tmp_path: Path) -> None:
    assert ProfilerActivity.CPU is not ProfilerActivity.NPU
    assert ProfilerLevel.Level0.value == 0
    plan = schedule(wait=1, warmup=1, active=1, repeat=1)
    with profile(schedule=plan, on_trace_ready=tensorboard_trace_handler(str(tmp_path))) as profiler:
        for _ in range(4):
            torch.ones(2, 2) @ torch.ones(2, 2)
            profiler.step()
    assert [path.name.partition(".")[0] for path in tmp_path.iterdir()] == ["rank_0"]


def test_names_of_one_line() -> None:
    assert nn.Sequential is nn.SequentialCell
    ms.manual_seed(3)
    first = torch.rand(2)
    ms.manual_seed(3)
    assert torch.equal(first, torch.rand(2))
    ds.DatasetCache(1, size=0)
