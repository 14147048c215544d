"""Checkpoints carry the states of optimizers, and those of several ranks make one."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardwise.mindspore as ms
from mindspore.test_modes import Net, batches
from raising import raises
from shardwise.mindspore import nn
from shardwise.mindspore.holding import holding_of
from shardwise.mindspore.nn.optimizer import Optimizer

SPLIT = {"parallel_mode": "semi_auto_parallel", "full_batch": True}
STRATEGIES = (((1, 2), (2, 1)), ((2, 1), (1, 1)))
MADE: dict[str, Callable[[Any], Optimizer]] = {
    "Momentum": lambda params: ms.nn.Momentum(params, [0.05, 0.04, 0.03, 0.02, 0.01, 0.005], 0.9),
    "Adam": lambda params: ms.nn.Adam(params, 0.01),
}


def trained(net: Net, optimizer: Optimizer, data: list[Any]) -> list[float]:
    step = ms.nn.TrainOneStepCell(ms.nn.WithLossCell(net, ms.nn.MSELoss()), optimizer)
    return [float(step(*pair)) for pair in data]


def on_rank(folder: str, kind: str) -> dict[str, Any]:
    """Two steps, a checkpoint, two more; and the two more once again from the checkpoint, in a new network."""
    ms.set_auto_parallel_context(**SPLIT)
    net = Net(STRATEGIES)
    optimizer = MADE[kind](net.trainable_params())
    trained(net, optimizer, batches()[:2])
    file = f"{folder}/{dist.get_rank()}/{kind}.ckpt"
    ms.save_checkpoint(net, file, optimizer=optimizer)
    found: dict[str, Any] = {"went on": trained(net, optimizer, batches()[2:])}
    again = Net(STRATEGIES)
    optimizer = MADE[kind](again.trainable_params())
    content = ms.load_checkpoint(file, again)
    found["left"] = ms.load_param_into_net(optimizer, content)[0]
    found["resumed"] = trained(again, optimizer, batches()[2:])
    dist.barrier()
    files = [f"{folder}/{rank}/{kind}.ckpt" for rank in range(2)]
    other = Net((((2, 1), (1, 1)), None))  # split otherwise
    optimizer = MADE[kind](other.trainable_params())
    ms.load_param_into_net(optimizer, ms.load_distributed_checkpoint(other, files))
    found["otherwise"] = trained(other, optimizer, batches()[2:])
    ms.load_distributed_checkpoint(net, files)  # a network that is split already
    fresh, x = Net(STRATEGIES), batches()[0][0]
    model = ms.Model(fresh, ms.nn.MSELoss(), MADE[kind](fresh.trainable_params()))
    layouts = model.infer_predict_layout(x)
    ms.load_distributed_checkpoint(model.predict_network, files, layouts)
    found["layouts"] = [
        str(layouts["w"]),
        str(model.infer_train_layout(batches())["w"]),
        str(holding_of(net.weight).layout),
    ]
    found["predicted"] = float((model.predict(x) - net(x)).abs().max())
    found["weight"] = holding_of(net.weight) is not None and net.weight.detach().clone()
    return found


def halfway(kind: str, file: str) -> tuple[Tensor, list[float]]:
    """One process: its weight after two steps, where it writes a checkpoint, and the losses of two more."""
    net = Net()
    optimizer = MADE[kind](net.trainable_params())
    trained(net, optimizer, batches()[:2])
    ms.save_checkpoint(net, file, optimizer=optimizer)
    weight = net.weight.detach().clone()
    return weight, trained(net, optimizer, batches()[2:])


@pytest.mark.parametrize("kind", MADE)
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(kind: str, tmp_path: Path) -> None:
    _, want = halfway(kind, str(tmp_path / "net"))
    net = Net()
    optimizer = MADE[kind](net.trainable_params())
    missing, extra = ms.load_param_into_net(optimizer, ms.load_checkpoint(str(tmp_path / "net.ckpt"), net))
    assert (missing, set(extra)) == ([], {"w", "w2", "norm.weight", "norm.bias"})
    assert trained(net, optimizer, batches()[2:]) == want


def test_checkpoints_of_two_ranks_go_on_there_and_elsewhere(
    run_ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    kind = "Momentum"
    weight, want = halfway(kind, str(tmp_path / "net"))
    for rank, found in enumerate(run_ranks(on_rank, 2, str(tmp_path), kind, time_limit_seconds=300)):
        assert found["left"] == []
        for run in ("went on", "resumed", "otherwise"):
            assert found[run] == pytest.approx(want, rel=1e-10), run
        torch.testing.assert_close(found["weight"], weight.chunk(2)[rank], rtol=1e-10, atol=1e-13)
        assert len(set(found["layouts"])) == 1
        assert found["predicted"] < 1e-12
    with raises(RuntimeError, "'stand_alone' splits no parameters", op="Net"):
        ms.Model(Net()).infer_predict_layout(batches()[0][0])
    files = [str(tmp_path / f"{rank}/{kind}.ckpt") for rank in (1, 0)]  # in any order
    net = Net()
    optimizer = MADE[kind](net.trainable_params())
    ms.load_param_into_net(optimizer, ms.load_distributed_checkpoint(net, files))
    assert trained(net, optimizer, batches()[2:]) == pytest.approx(want, rel=1e-10)
    with raises(RuntimeError, "[12@data, 16]", "w is whole here", fix="load_distributed_checkpoint"):
        ms.load_checkpoint(files[0], Net())
    with raises(RuntimeError, "96 of the 192 elements of w", "ranks 1", "all 2 ranks"):
        ms.load_distributed_checkpoint(Net(), files[:1])


def test_what_trains_is_saved_under_the_names_of_its_network(tmp_path: Path) -> None:
    net = ms.nn.SequentialCell(ms.nn.Dense(4, 4), ms.nn.BatchNorm1d(4), ms.nn.Dense(4, 2)).set_train()
    optimizer = ms.nn.Adam(net.trainable_params(), 0.1)
    step = ms.nn.TrainOneStepCell(ms.nn.WithLossCell(net, ms.nn.MSELoss()), optimizer)
    step(torch.randn(4, 4), torch.randn(4, 2))
    ms.save_checkpoint(step, str(tmp_path / "step"))
    content = ms.load_checkpoint(str(tmp_path / "step.ckpt"))
    assert {"0.weight", "2.bias", "1.gamma", "1.moving_mean", "global_step"} <= content.keys()
    other = ms.nn.SequentialCell(ms.nn.Dense(4, 4), ms.nn.BatchNorm1d(4), ms.nn.Dense(4, 2)).set_train()
    states = ms.nn.Adam(other.trainable_params(), 0.1)
    assert ms.load_param_into_net(other, content)[0] == []
    assert ms.load_param_into_net(states, content)[0] == []
    batch = torch.randn(4, 4), torch.randn(4, 2)
    again = ms.nn.TrainOneStepCell(ms.nn.WithLossCell(other, ms.nn.MSELoss()), states)
    assert float(step(*batch)) == float(again(*batch))
    for own, p in zip(net.get_parameters(), other.get_parameters(), strict=True):
        assert torch.equal(own, p)


def test_a_checkpoint_is_loaded_by_the_ends_of_its_names_unless_it_is_strict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    net, again = ms.nn.SequentialCell(ms.nn.Dense(2, 3)), ms.nn.SequentialCell(ms.nn.Dense(2, 3), ms.nn.Dense(3, 1))
    entries = [{"name": f"backbone.{name}", "data": p} for name, p in net.parameters_and_names()]
    file = str(tmp_path / "net.ckpt")
    ms.save_checkpoint([*entries, {"name": "moments.1.weight", "data": torch.ones(1, 3)}], file)
    content = ms.load_checkpoint(file)
    assert ms.load_param_into_net(again, content, strict_load=True)[0] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    kept = again[1].bias.asnumpy().copy()
    missing, extra = ms.load_param_into_net(again, {name: p for name, p in content.items() if "moments" not in name})
    assert (missing, extra) == (["1.weight", "1.bias"], [])
    assert "2 parameters keep their values: 1.weight, 1.bias" in capsys.readouterr().err
    assert torch.equal(again[0].weight, net[0].weight)
    assert (again[1].bias.asnumpy() == kept).all()
    half = {"0.weight": ms.Parameter(net[0].weight.half(), "0.weight"), "0.bias": net[0].bias}
    with raises(RuntimeError, "0.weight", "torch.float16", "torch.float32"):
        ms.load_param_into_net(net, half, strict_load=True)
    assert ms.load_param_into_net(net, half) == ([], [])


def test_a_training_that_fails_leaves_a_checkpoint_where_it_is_asked_to(tmp_path: Path) -> None:
    class Fails(ms.Callback):
        def step_end(self, run_context: Any) -> None:
            if run_context.original_args().cur_step_num == 2:
                raise RuntimeError("stopped")

    for number, saves in enumerate((True, False)):
        net = Net(STRATEGIES)
        model = ms.Model(net, ms.nn.MSELoss(), ms.nn.SGD(net.trainable_params(), 0.1))
        config = ms.CheckpointConfig(save_checkpoint_steps=5, exception_save=saves)
        saver = ms.ModelCheckpoint("net", str(tmp_path / str(number)), config)
        with raises(RuntimeError, "stopped"):
            model.train(1, batches(), callbacks=[saver, Fails()])
        assert [path.name for path in (tmp_path / str(number)).glob("*")] == ["net-1_2.ckpt"] * saves
    with raises(ValueError, "enc_key", "not encrypted"):
        ms.CheckpointConfig(enc_key=b"0" * 16)


# Written by save_checkpoint of mindspore 2.10.0: the entries of the test below.
OF_REFERENCE = (
    "ChgKAWgSEwgDEgdGbG9hdDE2GgYAPAA8ADwKGQoBYhIUCAMSCEJGbG9hdDE2GgaAP4A/gD8KFAoBcxIPEgdGbG9hdDMyGgQAACBACiAKAWwSGwgCEgVJ"
    "bnQ2NBoQAQAAAAAAAAACAAAAAAAAAAoOCgF0EgkSBEJvb2waAQEKGgoFZXBvY2gSERIFSW50NjQaCAMAAAAAAAAAChUKAmxyEg8SB0Zsb2F0MzIaBAAA"
    "AD8KDwoCb2sSCRIEQm9vbBoBAQodCgRub3RlEhUIABIDc3RyGgxhAAAAYgAAAGMAAAA="
)


def test_files_of_the_reference_are_read_and_written_byte_for_byte(tmp_path: Path) -> None:
    entries = {"h": torch.ones(3).half(), "b": torch.ones(3).bfloat16(), "s": torch.tensor(2.5),
               "l": torch.tensor([1, 2]), "t": torch.tensor(True)}  # fmt: skip
    info = {"epoch": 3, "lr": 0.5, "ok": True, "note": "abc"}
    file = tmp_path / "net.ckpt"
    file.write_bytes(base64.b64decode(OF_REFERENCE))
    found = ms.load_checkpoint(str(file))
    assert list(found) == [*entries, *info]
    assert found.pop("note") == "abc"
    want = {**entries, **{name: torch.tensor(value) for name, value in info.items() if name != "note"}}
    for name, value in want.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name].detach().as_subclass(torch.Tensor), value), name
    ms.save_checkpoint(entries, str(tmp_path / "own.ckpt"), append_dict=info, format="mindspore")
    assert (tmp_path / "own.ckpt").read_bytes() == file.read_bytes()
    file.write_bytes(file.read_bytes()[:-40])
    with raises(ValueError, "net.ckpt", "cannot be read as a checkpoint"):
        ms.load_checkpoint(str(file))


def test_a_network_goes_through_a_file_of_the_reference(tmp_path: Path) -> None:
    net, other = (nn.SequentialCell(nn.Dense(2, 3), nn.BatchNorm1d(3)) for _ in range(2))
    net[1].moving_mean.set_data(torch.ones(3))
    ms.save_checkpoint(net, str(tmp_path / "net.ckpt"), format="mindspore")
    assert ms.load_param_into_net(other, ms.load_checkpoint(str(tmp_path / "net.ckpt"))) == ([], [])
    for name, value in net.parameters_dict().items():
        np.testing.assert_array_equal(other.parameters_dict()[name].asnumpy(), value.asnumpy())
