"""What a call overwrites and backward reads, and what ranks pass to a call, on real gloo ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import shardwise as sw
from launch.gloo_ranks import RunRanks
from raising import raises
from shardwise.runtime.local_shards import shard

RANKS = 2


def rows(number: int, count: int = 8) -> torch.Tensor:
    return torch.randn(count, 8, generator=torch.Generator().manual_seed(number), dtype=torch.float64)


class Queue(nn.Module):
    """A queue of earlier keys (as momentum contrast has it): logits with a copy of it, then it is written."""

    def __init__(self, *, whole: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.whole = whole
        self.encoder = nn.Linear(8, 8)
        self.register_buffer("keys", torch.randn(16, 8))
        self.register_buffer("place", torch.zeros(1, dtype=torch.int64))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.normalize(self.encoder(x), dim=1)
        keys = self.keys.clone()
        loss = F.cross_entropy(h @ keys.T / 0.2, torch.zeros(len(x), dtype=torch.int64))
        loss = loss + (h[:, 2:6] @ keys[:4, 2:6].T).square().mean()  # a view of it
        with torch.no_grad():
            if self.whole:
                self.keys.mul_(0.5).add_(h.mean(0))
            else:
                self.keys.index_copy_(0, (self.place + torch.arange(len(x))) % 16, h.detach())
                self.place.copy_((self.place + len(x)) % 16)
        return loss


def trained(model: nn.Module) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for numbers in ((0,), (1, 2), (3,)):
        loss = torch.stack([model(rows(number)) for number in numbers]).prod()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    state = {n: t.detach().clone() for n, t in (*model.named_parameters(), *model.named_buffers())}
    return {"losses": torch.stack(losses), **state}


HOW: dict[str, dict[str, Any]] = {
    "ZeRO 3": {"mode": "data_parallel", "zero": 3},
    "tp": {"mesh": sw.Mesh(tp=2), "strategies": {"encoder": "n@tp"}},
    "a split buffer": {"mode": "data_parallel", "layouts": {"keys": (1, 2)}},
}


def writing(whole: bool) -> None:
    want = trained(Queue(whole=whole))
    for name, how in HOW.items():
        model = Queue(whole=whole)
        par = sw.parallelize(model, sw.plan(model, rows(0), RANKS, **how))
        for key, found in trained(par).items():
            layout = par.plan.layouts.get(key)
            own = want[key] if layout is None else shard(want[key], layout, par.coordinates)
            torch.testing.assert_close(
                found, own, rtol=1e-9, atol=1e-12, msg=lambda text, n=name, k=key: f"{n} {k} {text}"
            )


def test_backward_reads_buffers_as_they_were_before_the_call_wrote_them(run_ranks: RunRanks) -> None:
    run_ranks(both, RANKS)


def both() -> None:
    writing(whole=False)
    writing(whole=True)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.double()

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
        return (self.layers(x) * scale).square().mean()


DATA: dict[str, dict[str, Any]] = {
    "data_parallel": {},
    "passes": {"global_batch": 8, "micro_batch": 4},
    "stages": {"stages": 2, "global_batch": 8, "micro_batch": 4},
}


def passing_other_data(name: str) -> None:
    model, rank = Net(), dist.get_rank()
    one = torch.ones((), dtype=torch.float64)
    plan = sw.plan(model, rows(0), RANKS, mode="data_parallel", kwargs={"scale": one}, **DATA[name])
    par = sw.parallelize(model, plan)
    with raises(sw.ShardwiseError, 0, 1, "[8, 8]", "DistributedSampler", section="different-calls"):
        par.step(rows(rank), scale=one)
    with raises(sw.ShardwiseError, "scale", 0, 1, section="different-calls"):
        par.step(rows(0), scale=one + rank)
    with raises(sw.ShardwiseError, 0, 1, section="different-calls"):  # what a DistributedSampler leaves
        par.step(rows(rank, 4), scale=one)
    loss = par.step(rows(0), scale=one)  # the same on all: it goes on
    torch.testing.assert_close(loss, Net()(rows(0), scale=one).detach())


def all_ways() -> None:
    for name in DATA:
        passing_other_data(name)


def test_ranks_that_pass_different_batches_where_each_passes_all_of_it_are_named(run_ranks: RunRanks) -> None:
    run_ranks(all_ways, RANKS)


class Beside(nn.Module):
    """Outputs of both stages beside the loss, of many types."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 6)
        self.table = nn.Embedding(5, 8)
        self.double()

    def forward(self, x: torch.Tensor, kinds: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = torch.tanh(self.first(x)) * self.table(kinds)
        logits = self.last(hidden)
        return {
            "loss": logits.square().mean(),
            "hidden": hidden,
            "best": hidden.argmax(1),
            "positive": hidden > 0,
            "pairs": torch.view_as_complex(hidden.view(-1, 4, 2)),
            "logits": logits,
        }


def outputs_under_stages() -> None:
    model, inputs = Beside(), (rows(0), torch.arange(8) % 5)
    plan = sw.plan(model, inputs, 4, stages=2, mode="data_parallel") if dist.get_rank() == 0 else None
    par = sw.parallelize(model, plan, outputs="when read")  # so are those of a MiB or more, if nothing is said
    par.eval()
    found, wanted = par(*inputs), Beside()(*inputs)
    assert found.keys() == wanted.keys()
    for key, want in wanted.items():
        torch.testing.assert_close(found[key], want.detach(), rtol=1e-10, atol=1e-12)


def test_outputs_beside_the_loss_are_whole_under_stages_wherever_they_are_made(run_ranks: RunRanks) -> None:
    run_ranks(outputs_under_stages, 4)
