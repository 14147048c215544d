"""Outputs beside the loss stay split until they are read: values, gradients and errors on real ranks, against one
device."""

from __future__ import annotations

import copy
import io
import pickle
import time
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shardwise as sw
from launch.gloo_ranks import RunRanks
from raising import raises
from shardwise.runtime.lazy_gather import LazyTensor
from shardwise.runtime.local_shards import shard

SIZE, CLASSES, BATCH = 16, 24, 8


class Reader(nn.Module):
    """Returns its loss, and beside it what it was made of."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(SIZE, 32), nn.Linear(32, CLASSES)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        hidden = torch.tanh(self.hidden(x))
        logits = self.head(hidden)
        loss = F.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits, "more": (hidden, logits.argmax(-1), hidden.sum()), "scale": 2.0}


def made() -> tuple[Reader, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = Reader().double()
    return model, {"x": torch.randn(BATCH, SIZE).double(), "labels": torch.randint(CLASSES, (BATCH,))}


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> torch.Tensor:
        return cotangents[0] * 2


def read_before(out: dict[str, Any]) -> list[Any]:
    (out["loss"] + out["logits"].square().mean() + out["more"][0].sin().sum()).backward()
    return []


def read_after(out: dict[str, Any]) -> list[Any]:
    out["loss"].backward()
    return [out["logits"].argmax(-1), out["more"][1] == 3, (out["more"][0] * 2).detach()]


def read_by_own_function(out: dict[str, Any]) -> list[Any]:
    Doubled.apply(out["logits"]).sum().backward()
    return []


def read_in_place(out: dict[str, Any]) -> list[Any]:
    logits = out["logits"]
    same = logits.mul_(2)
    assert same is logits
    logits[0].zero_()
    logits.square().sum().backward()
    return [logits.detach().clone()]


def read_twice(out: dict[str, Any]) -> list[Any]:
    with torch.no_grad():
        guess = out["logits"].argmax(-1)
    out["loss"].backward(retain_graph=True)
    torch.stack([out["logits"], out["logits"]]).sum().backward()
    return [guess, out["logits"].detach().numpy().copy(), out["more"][1].tolist()]


def read_as_leaf(out: dict[str, Any]) -> list[Any]:
    cut = out["more"][0].detach().requires_grad_()
    cut.square().sum().backward()
    kept = out["logits"]
    kept.retain_grad()
    (kept**3).sum().backward()
    return [cut.grad, kept.grad]


def read_by_functions(out: dict[str, Any]) -> list[Any]:
    (found,) = torch.autograd.grad(out["logits"].sum(), [out["logits"]])
    views = out["logits"].view(2, -1), out["logits"].T, out["logits"][1:3, ::2]
    sum(view.sin().sum() for view in views).backward()
    return [found, *(view.detach() for view in views)]


def read_by_pickle(out: dict[str, Any]) -> list[Any]:
    guess, file = out["more"][1], io.BytesIO()
    torch.save(out["logits"].detach(), file)
    file.seek(0)
    return [pickle.loads(pickle.dumps(guess)), copy.deepcopy(guess), torch.load(file)]


def read_compiled(out: dict[str, Any]) -> list[Any]:
    torch.compile(lambda x: (x * 3).sin().sum(), backend="aot_eager")(out["logits"]).backward()
    return []


READS = [
    *(read_before, read_after, read_by_own_function, read_in_place, read_twice, read_as_leaf, read_by_functions),
    *(read_by_pickle, read_compiled),
]


def check(found: list[Any], expected: list[Any], name: str) -> None:
    for own, other in zip(found, expected, strict=True):
        assert not isinstance(own, LazyTensor) or own.unread.part is None
        torch.testing.assert_close(torch.as_tensor(own), torch.as_tensor(other), rtol=1e-9, atol=1e-11, msg=name)


def compared(plans: list[str]) -> list[str]:
    """On a rank: every way of reading, under every plan."""
    kinds = []
    for text in plans:
        plan = sw.Plan.from_json(text, name="plan")
        model, batch = made()
        par = sw.parallelize(model, plan, outputs="when read")
        assert isinstance(par, sw.Parallel)
        for read in READS:
            one, _ = made()
            expected = read(one(**batch))
            par.zero_grad()
            out = par(**batch)
            kinds.append(" ".join(type(x).__name__ for x in (out["loss"], out["logits"], *out["more"])))
            check(read(out), expected, read.__name__)
            whole = dict(one.named_parameters())
            for name, parameter in par.named_parameters():
                own, other = parameter.grad, whole[name].grad
                if other is None:
                    assert own is None or not own.any(), (read.__name__, name)
                    continue
                part = shard(other, plan.layouts[name], par.coordinates)
                torch.testing.assert_close(own, part, rtol=1e-9, atol=1e-11, msg=f"{read.__name__}: {name}")
    return kinds


def unread(text: str) -> tuple[int, str, str, str]:
    """On a rank: nothing that is not read is sent, and nothing that only asks for what is known reads."""
    model, batch = made()
    par = sw.parallelize(model, sw.Plan.from_json(text, name="plan"), outputs="when read")
    par.eval()
    par(**batch)
    ranks = par._ranks
    ranks.record = []
    out = par(**batch)
    logits = out["logits"]
    assert isinstance(logits, torch.Tensor)
    assert (logits.shape, logits.dtype, logits.requires_grad) == ((BATCH, CLASSES), torch.float64, True)
    assert isinstance(logits.detach(), LazyTensor)
    out["loss"].backward()
    text = repr(logits)
    before = sum(move.num_bytes for move in ranks.record)
    assert par(x=out["more"][0][:, :SIZE].detach(), labels=batch["labels"])["loss"].isfinite()  # is an argument again
    with raises(sw.ShardwiseError, "aten.t_.default"):
        par(**batch)["logits"].t_()
    rank = ranks.rank
    first, second = par(**batch), par(**batch)
    with raises(sw.ShardwiseError, "f64[8, 24]", "head/add") as caught:
        (first if rank else second)["logits"].sum()
    whole = sw.parallelize(made()[0], par.plan, outputs="whole")(**batch)
    assert type(whole["logits"]) is torch.Tensor
    small = sw.parallelize(made()[0], par.plan)(**batch)
    assert type(small["logits"]) is torch.Tensor, "by default what is small comes at once"
    with mock.patch("shardwise.runtime.program_cache.LEAST_BYTES", BATCH * CLASSES * 8):
        large = sw.parallelize(made()[0], par.plan)(**batch)
    assert type(large["logits"]) is LazyTensor
    assert type(large["more"][1]) is torch.Tensor, "of as many elements, with fewer bytes"
    if rank == 0:
        whole["logits"].sum().item()  # alone
    with raises(sw.ShardwiseError, "outputs", '"when read"', '"whole"'):
        sw.parallelize(made()[0], par.plan, outputs="never")
    with mock.patch("shardwise.runtime.communicator.group_timeout", return_value=timedelta(seconds=2)):
        out = sw.parallelize(made()[0], par.plan, outputs="when read")(**batch)
    alone = ""
    if rank == 0:
        with pytest.raises(sw.errors.CollectiveError) as late:
            out["logits"].sum()
        alone = str(late.value)
    else:
        time.sleep(4)
    return before, str(caught.value), text, alone


def test_what_is_read_is_what_one_device_has(run_ranks: RunRanks) -> None:
    model, batch = made()
    plans = [
        sw.plan(model, batch, 2, mode="data_parallel"),
        sw.plan(model, batch, 2, mesh=sw.Mesh(tp=2), strategies={"hidden": "n@tp", "head": "n@tp"}),
        sw.plan(model, batch, 2, mesh=sw.Mesh(tp=2), strategies={"hidden": "n@tp", "head": "k@tp"}),
    ]
    for kinds in run_ranks(compared, 2, [plan.to_json() for plan in plans]):
        assert set(kinds) == {"Tensor LazyTensor LazyTensor LazyTensor Tensor"}  # the loss and sums are scalars
    assert "3.56 KiB deliver outputs to the caller (/tanh 2 KiB, head/add 1.5 KiB, /argmax 64 B)" in str(plans[0])
    for sent, said, text, alone in run_ranks(unread, 2, plans[1].to_json()):
        # The head's input there and its cotangent back; four numbers a row in the loss and argmax, and a sum.
        assert sent == 2 * BATCH * 32 * 8 + 4 * BATCH * 8 + 8
        assert "of head/add (1.5 KiB), of call" in said
        assert text == "<f64[8, 24] of head/add (1.5 KiB), [8, 24@tp], whole when every rank reads it>"
        assert "which every rank must read" in alone or not alone


class OnlyLoss(Reader):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = super().forward(x, labels)["loss"]
        return loss


def test_a_price_has_no_outputs() -> None:
    model, batch = made()
    columns = {"hidden": "n@tp", "head": "n@tp"}
    settings: dict[str, Any] = {"mesh": sw.Mesh(tp=2), "strategies": columns, "search": "dynamic_programming"}
    plans = [sw.plan(own.double(), batch, 2, **settings) for own in (model, OnlyLoss())]
    told = ["deliver outputs to the caller" in str(plan) for plan in plans]
    assert told == [True, False]
    assert plans[0].prediction.peak_bytes == plans[1].prediction.peak_bytes
    assert plans[0].prediction.exposed == plans[1].prediction.exposed
