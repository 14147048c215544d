"""Real gloo ranks that hold rows of images: convolutions, pooling and interpolation exchange halos, eager and compiled,
and train as one process does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise as sw
from launch.gloo_ranks import RunRanks
from proving import prove
from raising import raises
from runtime.interpreted import interpret_section
from runtime.training import Differentiate, Trained, call_and_differentiate, check_ranks, train
from shardwise.runtime import compiled


class SmallUNet(nn.Module):
    """Down by a strided convolution and by pooling, up by a transposed convolution and by interpolation; a residual
    block, wrapped rows, and a loss per pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 5, padding=2)
        self.norm = nn.BatchNorm2d(4)
        self.down = nn.Conv2d(4, 6, 3, stride=2, padding=1)
        self.dilated = nn.Conv2d(6, 6, 3, padding=2, dilation=2, groups=2)
        self.up = nn.ConvTranspose2d(6, 4, 4, stride=2, padding=1)
        self.head = nn.Conv2d(8, 3, 3, padding=1, padding_mode="circular")

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        first = F.relu(self.norm(self.stem(x)))
        deep = F.relu(self.down(first))
        deep = deep + torch.tanh(self.dilated(deep))
        pooled = F.max_pool2d(deep, 3, stride=2, padding=1)
        deep = deep + F.interpolate(pooled, size=deep.shape[2:], mode="bilinear", align_corners=False)
        up = self.up(deep) + torch.roll(first, 1, 2)
        smooth = F.avg_pool2d(up, 3, stride=1, padding=1)
        slope = F.pad(up[:, :, 1:] - up[:, :, :-1], (0, 0, 0, 1))
        return F.cross_entropy(self.head(torch.cat([smooth, slope], 1)), labels)


def make_net() -> SmallUNet:
    torch.manual_seed(3)
    return SmallUNet().double()


def images(rows: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return (
        torch.randn(2, 2, rows, 8, generator=generator, dtype=torch.float64),
        torch.randint(0, 3, (2, rows, 8), generator=generator),
    )


def make_plan(rows: int, **axes: int) -> sw.Plan:
    """The rows of the first convolution over sp; everything else follows."""
    mesh = sw.Mesh(**axes)
    return sw.plan(make_net(), images(rows, 0), mesh.num_devices, mesh=mesh, strategies={"stem": "y0@sp"})


@pytest.mark.parametrize(
    ("rows", "axes"),
    [
        (16, {"sp": 4}),
        (20, {"sp": 4}),
        (12, {"dp": 2, "sp": 2}),
        (20, {"dp": 2, "sp": 2}),
        (12, {"sp": 3}),
        (16, {"sp": 3}),
    ],
    ids=str,
)
@pytest.mark.sampled(1)
def test_rows_stay_split_through_the_net_and_all_numbers_are_those_of_one_device(
    rows: int, axes: dict[str, int]
) -> None:
    plan = make_plan(rows, **axes)
    report = prove(make_net(), images(rows, 0), plan)
    assert report.max_error < 1e-9
    kinds = {entry.kind for c in plan.conversions for entry in (*c.forward, *c.backward) if "sp" in entry.axes}
    assert "halo_exchange" in kinds
    assert "all_to_all" not in kinds
    assert "all_gather" not in {c.kind for c in plan.collectives() if c.num_bytes > 2 * 4 * 8 * 8}, str(plan)


def train_on_rank(rows: int, compile: bool) -> tuple[Trained, list[tuple[str, int]]]:
    """Three steps, and the collectives of the last forward."""
    if compile:
        compiled.compile_with_inductor = interpret_section  # no code is generated, which takes long
    par = sw.parallelize(make_net(), make_plan(rows, sp=dist.get_world_size()), compile=compile)
    forward: list[tuple[str, int]] = []

    def differentiate(par: Any, inputs: Any) -> Tensor:
        par._ranks.record = []
        loss = par(*inputs)
        forward[:] = [(c.kind, c.num_bytes) for c in par._ranks.record]
        loss.backward()
        return loss.detach()

    return train_net(par, rows, differentiate), forward


def train_net(net: nn.Module, rows: int, differentiate: Differentiate = call_and_differentiate) -> Trained:
    batches = [images(rows, step) for step in range(3)]
    return train(net, batches, torch.optim.SGD(net.parameters(), lr=0.1), differentiate=differentiate)


@pytest.mark.parametrize(("rows", "num_ranks", "compile"), [(16, 4, False), (20, 4, False), (12, 2, True)])
@pytest.mark.sampled(1)
def test_ranks_that_exchange_halos_train_as_one_process(
    rows: int, num_ranks: int, compile: bool, run_ranks: RunRanks
) -> None:
    ranks = run_ranks(train_on_rank, num_ranks, rows, compile)
    check_ranks([found for found, _ in ranks], train_net(make_net(), rows), rtol=1e-8, atol=1e-10)
    if not compile:
        planned = tuple(make_plan(rows, sp=num_ranks).collectives())
        noted = [forward for _, forward in ranks]
        for own in noted:
            assert [kind for kind, _ in own] == [c.kind for c in planned]
        halos = [i for i, c in enumerate(planned) if c.kind == "halo_exchange"]
        assert len(halos) > 5
        for i in halos:
            assert planned[i].num_bytes == max(own[i][1] for own in noted)


class Folded(nn.Module):
    def __init__(self, strategy: str, stride: tuple[int, int]) -> None:
        super().__init__()
        self.scale, self.strategy, self.stride = nn.Parameter(torch.ones(1)), strategy, stride

    def forward(self, x: Tensor) -> Tensor:
        split = sw.shard(lambda x: F.fold(x, (4, 3), (3, 2), 2 - (x.shape[-1] > 1), (1, 0), self.stride), self.strategy)
        return split(x * self.scale).sin().sum()


@pytest.mark.parametrize(
    ("windows", "stride", "strategy", "is_refused"),
    [
        (1, (3, 1), "y0@a y1@b", True),  # a part of the rows lies in no window
        (1, (3, 1), "y1@b", True),
        (1, (3, 1), "n@a c@b", False),
        (2, (3, 2), "y0@a y1@b", False),
        (4, (2, 1), "y0@a y1@b", False),
    ],
)
@pytest.mark.sampled(3)
def test_columns_of_few_windows_are_folded_as_on_one_device_or_refused(
    windows: int, stride: tuple[int, int], strategy: str, is_refused: bool
) -> None:
    model, x = Folded(strategy, stride), torch.randn(2, 18, windows)
    settings: dict[str, Any] = {"mesh": sw.Mesh(a=2, b=2), "search": "sharding_propagation"}
    if is_refused:
        with raises(sw.errors.LayoutError, "n, c", op="/col2im", section="strategy-names"):
            sw.plan(model, x, 4, **settings)
    else:
        assert sw.verify(model, x, sw.plan(model, x, 4, **settings), steps=1).ok
