"""One program in every mode on four gloo ranks: losses, parameters and outputs are those of one process."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise.mindspore as ms
from shardwise.mindspore.holding import holding_of
from shardwise.runtime.local_shards import shard

RunRanks = Callable[..., list[Any]]
RANKS, BATCH, STEPS = 4, 8, 4
AUTO = {"parallel_mode": "auto_parallel"}
SEMI = {"parallel_mode": "semi_auto_parallel"}

# name -> context, strategies of the two products, the loss, and whether every rank is given whole batches
CASES: dict[str, tuple[dict[str, Any], tuple[Any, Any], str, bool]] = {
    "data": ({"parallel_mode": "data_parallel", "gradients_mean": True}, (None, None), "mean", False),
    "hybrid": ({"parallel_mode": "hybrid_parallel", "gradients_mean": True}, (None, None), "mean", False),
    "data, vector": ({"parallel_mode": "data_parallel"}, (None, None), "rows", False),
    "semi": (SEMI, (((2, 2), (2, 1)), None), "mean", False),
    "semi, whole batches": ({**SEMI, "full_batch": True}, (((1, 2), (2, 2)), ((4, 1), (1, 1))), "mean", True),
    "semi, tuples": (
        {**SEMI, "dataset_strategy": ((2, 1), (2, 1))}, (((2, 1), (1, 2)), ((2, 2), (2, 1))), "mean", False,
    ),
    "semi, vector": (SEMI, (((2, 2), (2, 1)), None), "rows", False),
    "semi, mean of gradients": ({**SEMI, "gradients_mean": True}, (((2, 2), (2, 1)), None), "mean", False),
    "semi, lenient": ({**SEMI, "strict": False}, (((2, 2), (2, 1)), None), "mean", False),
    "propagation": ({**AUTO, "search_mode": "sharding_propagation"}, (((2, 2), (2, 1)), None), "mean", False),
    "dynamic programming": ({**AUTO, "search_mode": "dynamic_programming"}, (None, None), "mean", False),
    "dynamic programming, fixed": (
        {**AUTO, "search_mode": "dynamic_programming"}, (None, ((1, 4), (4, 1))), "mean", False,
    ),
    "recursive programming": ({**AUTO, "search_mode": "recursive_programming"}, (None, None), "mean", False),
}  # fmt: skip


EVALUATED = ("data", "semi, whole batches", "semi, tuples", "propagation")  # of each kind of mode and of batch


class Net(ms.nn.Cell):
    """Two products as primitives, with a torch module in the middle."""

    def __init__(self, strategies: tuple[Any, Any] = (None, None)) -> None:
        super().__init__()
        numbers = np.random.RandomState(0)
        self.weight = ms.Parameter(ms.Tensor(numbers.normal(0, 0.3, (12, 16))), "w")
        self.weight2 = ms.Parameter(ms.Tensor(numbers.normal(0, 0.3, (16, 8))), "w2")
        self.matmul, self.relu, self.matmul2 = ms.ops.MatMul(), ms.ops.ReLU(), ms.ops.MatMul()
        for primitive, strategy in zip((self.matmul, self.matmul2), strategies, strict=True):
            if strategy is not None:
                primitive.shard(strategy)
        self.norm = nn.LayerNorm(16, dtype=torch.float64)

    def construct(self, x: Tensor) -> Tensor:
        return self.matmul2(self.norm(self.relu(self.matmul(x, self.weight))), self.weight2)


def loss_of(kind: str) -> ms.nn.Cell:
    class Rows(ms.nn.Cell):
        def construct(self, output: Tensor, label: Tensor) -> Tensor:
            return (output - label).square().mean(1)

    return ms.nn.MSELoss() if kind == "mean" else Rows()


def batches() -> list[tuple[Tensor, Tensor]]:
    numbers = np.random.RandomState(1)
    return [tuple(torch.from_numpy(numbers.rand(BATCH, size)) for size in (12, 8)) for _ in range(STEPS)]


class Seen(ms.train.Callback):
    def __init__(self) -> None:
        self.losses: list[Any] = []

    def step_end(self, run_context: ms.train.RunContext) -> None:
        self.losses.append(run_context.original_args().net_outputs.asnumpy())


def own_batches(name: str, rank: int) -> list[tuple[Tensor, Tensor]]:
    counts = RANKS if "tuples" not in name else 2
    part = rank if "tuples" not in name else rank // 2
    return [tuple(x.chunk(counts)[part] for x in own) for own in batches()]


def trained(net: Net, kind: str, data: list[Any], groups: Any = None) -> list[Any]:
    seen = Seen()
    optimizer = ms.nn.Momentum(net.trainable_params() if groups is None else groups, 0.05, 0.9)
    ms.Model(net, optimizer, loss_of(kind)).train(2, data, callbacks=[seen])  # in any order of arguments
    return seen.losses


def evaluated(net: Net, data: list[Any]) -> dict[str, Any]:
    return ms.Model(net, loss_of("mean"), metrics={"loss", "mse"}).eval(data)


def on_rank(folder: str) -> dict[str, dict[str, Any]]:
    rank, found = dist.get_rank(), {}
    for name, (settings, strategies, kind, whole) in CASES.items():
        ms.reset_auto_parallel_context()
        ms.set_auto_parallel_context(**settings)
        net = Net(strategies)
        data = batches() if whole else own_batches(name, rank)
        losses = trained(net, kind, data)
        held = {own: holding_of(p) for own, p in net.named_parameters()}
        found[name] = {
            "losses": losses,
            "parameters": {own: p.detach().clone() for own, p in net.named_parameters()},
            "layouts": {own: None if h is None else h.layout for own, h in held.items()},
        }
        if name in EVALUATED:
            found[name] |= {"predicted": ms.Model(net).predict(data[0][0]), "metrics": evaluated(net, data)}
        if name == "semi":
            path = f"{folder}/{rank}/net.ckpt"
            ms.save_checkpoint(net, path)
            again = Net(strategies)
            ms.load_checkpoint(path, again, strict_load=True)
            found[name]["resumed"] = (trained(again, kind, data), trained(net, kind, data))
    return found


def test_all_modes_train_as_one_process_does(run_ranks: RunRanks, tmp_path: Path) -> None:
    ranks = run_ranks(on_rank, RANKS, str(tmp_path), time_limit_seconds=300)
    alone = {}
    for kind in ("mean", "rows"):
        net = Net()
        losses = trained(net, kind, batches())
        alone[kind] = (losses, dict(net.named_parameters()), net(batches()[0][0]), evaluated(net, batches()))
    for name, (settings, _, kind, whole) in CASES.items():
        losses, parameters, output, metrics = alone[kind]
        if "mean of gradients" in name:
            losses, parameters, output, metrics = alone_with_mean_gradients(ranks[0][name]["layouts"])
        if name in EVALUATED:
            whole_loss, mse = ([own[name]["metrics"][kind] for own in ranks] for kind in ("loss", "mse"))
            one_loss = settings["parallel_mode"] in ("semi_auto_parallel", "auto_parallel")
            close(
                whole_loss if one_loss else [np.mean(whole_loss)], [metrics["loss"]] * (RANKS if one_loss else 1), name
            )
            close([np.mean(mse)], [metrics["mse"]], f"{name}: of each rank's rows")
        for rank, found in enumerate(own[name] for own in ranks):
            told = f"{name}, rank {rank}"
            if kind == "rows":  # this rank's rows
                want = [own.reshape(RANKS, -1)[rank] for own in losses]
                close(found["losses"], want, told)
            elif settings["parallel_mode"] in ("data_parallel", "hybrid_parallel"):
                everybody = np.mean([own[name]["losses"] for own in ranks], axis=0)
                close(everybody, losses, told)
            else:
                close(found["losses"], losses, told)
            for own, whole_tensor in parameters.items():
                layout = found["layouts"][own]
                part = whole_tensor if layout is None else shard(whole_tensor, layout, layout.mesh.coordinates(rank))
                torch.testing.assert_close(found["parameters"][own], part.detach(), rtol=1e-9, atol=1e-12, msg=told)
            if name not in EVALUATED:
                continue
            want_output = output if whole else output.chunk(RANKS)[rank]
            if "tuples" in name:
                want_output = output.chunk(2)[rank // 2]
            torch.testing.assert_close(found["predicted"], want_output, rtol=1e-9, atol=1e-12, msg=told)
        split = any(layout is not None and layout.positions for layout in ranks[0][name]["layouts"].values())
        assert split or name in ("data", "hybrid", "data, vector") or "programming" in name, f"{name} splits nothing"
    first, second = ranks[0]["semi"]["resumed"]
    close(first, second, "after loading a checkpoint")


def alone_with_mean_gradients(layouts: dict[str, Any]) -> tuple[Any, ...]:
    """As the reference has it: a gradient is divided by the number of ranks that hold the same part."""
    net = Net()
    copies = {
        own: RANKS // prod(layout.mesh.sizes[axis] for axis in layout.positions) for own, layout in layouts.items()
    }
    assert set(copies.values()) == {2, 4}
    groups = [{"params": [p], "lr": 0.05 / copies[own]} for own, p in net.named_parameters()]
    losses = trained(net, "mean", batches(), groups)
    return losses, dict(net.named_parameters()), net(batches()[0][0]), evaluated(net, batches())


def close(found: Any, want: Any, told: str) -> None:
    np.testing.assert_allclose(np.stack(list(found)), np.stack(list(want)), rtol=1e-10, err_msg=told)
