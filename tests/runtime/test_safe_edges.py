"""Norms and clipped gradients of shards are exact, or refused; on real gloo ranks."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.nn.utils import clip_grad_norm_, get_total_norm  # before shardwise changes what they do

import shardwise as sw
from launch.gloo_ranks import run_on_ranks
from raising import raises, refusal
from runtime.edges import FIELDS, Counted, Ranks, batch, gradients, make, restore, split
from shardwise.runtime.guards import protect as guards
from shardwise.runtime.guards.norms import _combine
from shardwise.runtime.local_shards import shard

ORDERS = [0.5, 2.0, 40.0, math.inf]


def on_three_ranks() -> dict[str, Any]:
    return {"tp, uneven": clip_on_ranks("tp, uneven")}


def on_four_ranks() -> dict[str, Any]:
    return {"dp x tp": clip_on_ranks("dp x tp"), "odd": odd_norms()}


def on_data_parallel_ranks() -> dict[str, Any]:
    return {"dp": clip_on_ranks("dp")}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Any]]:
    """``ranks(name)``: what each rank found; ranks are started once for all tests that ask for the same."""

    @cache
    def run(function: Callable[[], Any], num_ranks: int) -> list[Any]:
        return run_on_ranks(function, num_ranks, (), tmp_path_factory.mktemp("ranks"), 240)

    def found(name: str) -> list[Any]:
        where = {"dp": (on_data_parallel_ranks, 4), "tp, uneven": (on_three_ranks, 3)}
        return [result[name] for result in run(*where.get(name, (on_four_ranks, 4)))]

    return found


def clip_alone(dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """On one device, before anything is changed: norms and clipped gradients by torch."""
    model = make(dtype)
    model(*batch()).backward()
    saved, found = gradients(model), {}
    for order in ORDERS:
        for limit in (1e-2, 1e2):
            restore(model, saved)
            found[order, limit] = (clip_grad_norm_(model.parameters(), limit, order), gradients(model))
    return found


def clip_on_ranks(kind: str) -> dict[str, Any]:
    """On a rank: the same by shardwise, and by torch's functions as they were imported before."""
    par = split(kind)
    par.step(*batch())
    saved, found = gradients(par), {}
    ways: dict[str, Callable[..., torch.Tensor]] = {
        "shardwise": lambda limit, order: sw.clip_grad_norm(par, limit, order),
        "some parameters": lambda limit, order: sw.clip_grad_norm((p for p in par.parameters()), limit, order),
        "torch": lambda limit, order: clip_grad_norm_(par.parameters(), limit, order),
        "torch, no foreach": lambda limit, order: clip_grad_norm_(par.parameters(), limit, order, foreach=False),
    }
    for way, clip in ways.items():
        for order in ORDERS:
            for limit in (1e-2, 1e2):
                restore(par, saved)
                with Counted() as collectives:
                    total = clip(limit, order)
                found[way, order, limit] = (total, gradients(par), collectives.count)
    restore(par, saved)
    some = [par.up.weight, par.norm.weight]
    extra = {
        "subset": sw.clip_grad_norm(some, 1e9),
        "one": sw.clip_grad_norm(par.up.weight, 1e9),
        "gradients": get_total_norm(p.grad for p in par.parameters() if p.grad is not None),
        "parameters": get_total_norm(par.parameters()),
        "invariant": get_total_norm([par.norm.weight.grad]),
        "none": sw.clip_grad_norm([par.unused], 1.0),
    }
    return {"found": found, "extra": extra, "held": {n: p.shape for n, p in par.named_parameters()}, "plan": par.plan}


@pytest.mark.parametrize("kind", FIELDS)
@pytest.mark.sampled(2)
def test_norms_and_clipped_gradients_are_those_of_one_device(kind: str, ranks: Ranks) -> None:
    alone = clip_alone()
    model = make()
    model(*batch()).backward()
    results = ranks(kind)
    plan = results[0]["plan"]
    for rank, result in enumerate(results):
        coordinates = plan.mesh.coordinates(rank)
        for (way, order, limit), (total, clipped, collectives) in result["found"].items():
            want, whole = alone[order, limit]
            label = f"{way}, p={order}, {limit} on rank {rank}"
            assert total.dtype == torch.float64
            assert total.shape == ()
            assert torch.equal(total, results[0]["found"]["shardwise", order, limit][0]) or "torch" in way, label
            torch.testing.assert_close(total, want, rtol=1e-12, atol=0, msg=label)
            assert collectives == (0 if kind == "dp" else 1), label
            assert clipped.keys() == whole.keys()
            for name, gradient in clipped.items():
                own = shard(whole[name], plan.layouts[name], coordinates)
                torch.testing.assert_close(gradient, own, rtol=1e-10, atol=1e-16, msg=f"{label}: {name}")
        for name, want in {
            "subset": get_total_norm([model.up.weight.grad, model.norm.weight.grad]),
            "one": model.up.weight.grad.norm(),
            "gradients": get_total_norm(p.grad for p in model.parameters() if p.grad is not None),
            "parameters": get_total_norm(model.parameters()),
            "invariant": model.norm.weight.grad.norm(),
        }.items():
            torch.testing.assert_close(result["extra"][name], want, rtol=1e-12, atol=0, msg=name)
        assert result["extra"]["none"].item() == 0
    if kind == "tp, uneven":
        assert {result["held"]["up.weight"] for result in results} == {(3, 6), (4, 6)}
        assert {result["held"]["narrow.weight"] for result in results} == {(0, 6), (1, 6)}


def odd_norms() -> dict[str, Any]:
    """On a rank: nan, inf and narrow dtypes; strangers; what is refused."""
    par, rank = split("dp x tp"), dist.get_rank()
    par.step(*batch())
    saved, found = gradients(par), {}
    head = nn.Linear(3, 2, bias=False).double()
    head.weight.data.fill_(1.0)
    (2 * head.weight.sum()).backward()
    found["with a stranger"] = clip_grad_norm_([*par.parameters(), *head.parameters()], 1e9)
    head.weight.grad[0, 0] += rank == 3
    found["uneven stranger"] = refusal(lambda: clip_grad_norm_([*par.parameters(), *head.parameters()], 1e9))
    found["stranger alone"] = clip_grad_norm_(head.parameters(), 1e9)
    found["detached"] = refusal(
        lambda: get_total_norm([p.grad.detach() for p in par.parameters() if p.grad is not None])
    )
    found["view"] = refusal(lambda: get_total_norm([par.up.weight.grad[1:]]))
    found["detached, invariant"] = get_total_norm([par.norm.weight.grad.detach()])
    for order in (0, -1, math.nan, -math.inf):
        found["order", str(order)] = refusal(lambda order=order: sw.clip_grad_norm(par, 1.0, order))
        found["torch, order", str(order)] = refusal(lambda order=order: clip_grad_norm_(par.parameters(), 1.0, order))
    for bad in (math.inf, math.nan):
        for order in (2.0, math.inf):
            restore(par, saved)
            if rank == 1:
                par.up.weight.grad[0, 0] = bad
            found[str(bad), order] = sw.clip_grad_norm(par, 1.0, order, error_if_nonfinite=False)
            restore(par, saved)
            if rank == 1:
                par.up.weight.grad[0, 0] = bad
            raised = refusal(lambda order=order: sw.clip_grad_norm(par, 1.0, order, error_if_nonfinite=True))
            torchs = refusal(lambda order=order: clip_grad_norm_(par.parameters(), 1.0, order, error_if_nonfinite=True))
            unclipped = all(torch.equal(g, saved[n]) for n, g in gradients(par).items() if n != "up.weight")
            found["raised", str(bad), order] = (raised, torchs, unclipped)
    copied = copy.deepcopy(par)
    copied.zero_grad()
    copied.step(*batch())
    found["a copy"] = clip_grad_norm_(copied.parameters(), 1e9)
    narrow = split("dp x tp", torch.bfloat16)
    narrow.step(*batch())
    squares = torch.tensor([g.double().square().sum() for g in gradients(narrow).values()])
    counted = torch.tensor([rank < 2 if p.layout.positions else rank == 0 for p in held_of(narrow)])
    exact = (squares * counted).sum()
    dist.all_reduce(exact)
    found["bfloat16"] = (sw.clip_grad_norm(narrow, 1e-2), exact.sqrt(), sw.clip_grad_norm(narrow, 1e9))
    return found


def held_of(par: sw.Parallel) -> Iterator[Any]:
    from shardwise.runtime.guards.registry import held_parameters

    held = {id(p): own for p, own in held_parameters()}
    return (held[id(p)] for p in par.parameters() if p.grad is not None)


def test_odd_values_and_strangers_are_counted_or_refused(ranks: Ranks) -> None:
    model = make()
    model(*batch()).backward()
    norm = get_total_norm(p.grad for p in model.parameters() if p.grad is not None)
    results = ranks("odd")
    for rank, found in enumerate(results):
        torch.testing.assert_close(found["with a stranger"], (norm**2 + 6 * 4).sqrt(), rtol=1e-12, atol=0)
        assert "1 of the tensors do not belong to a parallelized module" in found["uneven stranger"]
        assert "on rank 3" in found["uneven stranger"]
        torch.testing.assert_close(found["stranger alone"].item(), (24 + 5 * (rank == 3)) ** 0.5)
        assert "is a view of a shard of tokens.weight" in found["detached"]
        assert "a shard of up.weight" in found["view"]
        torch.testing.assert_close(found["detached, invariant"], model.norm.weight.grad.norm())
        for order in ("0", "-1", "nan", "-inf"):
            assert "need a positive order" in found["order", order]
            assert "need a positive order" in found["torch, order", order]
        for order in (2.0, math.inf):
            assert found["inf", order].item() == math.inf
            assert math.isnan(found["nan", order].item())
            for bad in ("inf", "nan"):
                ours, torchs, unclipped = found["raised", bad, order]
                assert ours.startswith("RuntimeError: the total norm")
                assert torchs.startswith("RuntimeError: the total norm")
                assert unclipped
        torch.testing.assert_close(found["a copy"], norm, rtol=1e-12, atol=0)
        total, exact, clipped = found["bfloat16"]
        assert total.dtype == torch.float32
        assert torch.equal(total, results[0]["bfloat16"][0])
        torch.testing.assert_close(total.double(), exact, rtol=1e-6, atol=0)
        torch.testing.assert_close(clipped.item(), 1e-2, rtol=1e-2, atol=0)


def test_combining_norms_of_high_order_neither_overflows_nor_vanishes() -> None:
    for scale in (1e-150, 1.0, 1e150):
        norms = torch.tensor([3.0, 4.0, 0.0], dtype=torch.float64) * scale
        assert _combine(norms, 2.0).item() == pytest.approx(5 * scale)
        assert _combine(norms, 1000.0).item() == pytest.approx(4 * scale)
        assert _combine(norms, math.inf).item() == 4 * scale
    assert _combine(torch.zeros(3, dtype=torch.float64), 2.0).item() == 0


def test_a_torch_without_the_places_is_refused_and_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(GradScaler, "_check_inf_per_device")
    before = get_total_norm.__closure__[0].cell_contents
    with raises(sw.ShardwiseError, "GradScaler._check_inf_per_device"):
        guards._install.__wrapped__()
    assert get_total_norm.__closure__[0].cell_contents is before
    monkeypatch.setattr(torch.nn.utils, "get_total_norm", lambda tensors: None)
    with raises(sw.ShardwiseError, "torch.nn.utils.get_total_norm", "GradScaler"):
        guards._install.__wrapped__()
