"""What torch does with whole gradients and parameters is exact on shards, or refused; on real gloo ranks."""

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
from torch.optim.swa_utils import AveragedModel

import shardwise as sw
from launch.gloo_ranks import run_on_ranks
from shardwise.runtime import guards
from shardwise.runtime.elementwise import ELEMENTWISE, is_elementwise
from shardwise.runtime.norms import _combine
from shardwise.runtime.shards import shard

Ranks = Callable[[str], list[Any]]
ORDERS = [0.5, 1.0, 2.0, 3.0, 40.0, math.inf]
FIELDS: dict[str, tuple[dict[str, int], dict[str, str]]] = {
    "dp": ({"dp": 4}, {}),
    "tp, uneven": ({"tp": 3}, {"up": "n@tp", "narrow": "n@tp", "tokens": "v@tp"}),
    "dp x tp": ({"dp": 2, "tp": 2}, {"up": "n@tp", "tokens": "v@tp"}),
}


class Net(nn.Module):
    """Tied, frozen and unused parameters, and one with fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(14, 6)
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)
        self.narrow, self.wide = nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 14, bias=False)
        self.head.weight = self.tokens.weight
        self.unused = nn.Parameter(torch.ones(4))
        self.norm.bias.requires_grad_(False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        x = self.down(torch.tanh(self.up(x)))
        x = self.wide(self.narrow(x))
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def make(dtype: torch.dtype = torch.float64) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 14, (2, 4, 3), generator=torch.Generator().manual_seed(seed))
    return ids[0], ids[1]


def split(kind: str, dtype: torch.dtype = torch.float64) -> sw.Parallel:
    sizes, strategies = FIELDS[kind]
    model = make(dtype)
    plan = sw.plan(
        model,
        batch(),
        math.prod(sizes.values()),
        mesh=sw.Mesh(sizes),
        strategies=strategies,
        search="sharding_propagation",
    )
    return sw.parallelize(model, plan)


class Counted:
    """Counts the all-reduces inside a ``with``."""

    def __enter__(self) -> Counted:
        self.count, self._real = 0, dist.all_reduce
        dist.all_reduce = self._call
        return self

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return self._real(*args, **kwargs)

    def __exit__(self, *_: object) -> None:
        dist.all_reduce = self._real


def gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def restore(module: nn.Module, saved: dict[str, torch.Tensor]) -> None:
    for name, p in module.named_parameters():
        if name in saved:
            p.grad = saved[name].clone()


def refusal(action: Callable[[], Any]) -> str:
    """The message with which something is refused; "accepted" if it is not."""
    try:
        action()
    except (sw.ShardwiseError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def on_three_ranks() -> dict[str, Any]:
    return {"tp, uneven": clip_on_ranks("tp, uneven"), "scaled": scaled_on_ranks(), "optimizers": steps_on_ranks()}


def on_four_ranks() -> dict[str, Any]:
    return {"dp": clip_on_ranks("dp"), "dp x tp": clip_on_ranks("dp x tp"), "odd": odd_norms()}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Any]]:
    """``ranks(name)``: what each rank found. Starting ranks takes most of the time, so they are started twice only."""

    @cache
    def run(function: Callable[[], Any], num_ranks: int) -> list[Any]:
        return run_on_ranks(function, num_ranks, (), tmp_path_factory.mktemp("ranks"), 240)

    def found(name: str) -> list[Any]:
        four = name in ("dp", "dp x tp", "odd")
        return [result[name] for result in (run(on_four_ranks, 4) if four else run(on_three_ranks, 3))]

    return found


# ---------------------------------------------------------------------------------------------------------------- norms


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
    copied = copy.deepcopy(split("dp x tp"))
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
    from shardwise.runtime.registry import held_parameters

    held = {id(p): own for p, own in held_parameters()}
    return (held[id(p)] for p in par.parameters() if p.grad is not None)


def test_odd_values_and_strangers_are_counted_or_refused(ranks: Ranks) -> None:
    model = make()
    model(*batch()).backward()
    norm = get_total_norm(p.grad for p in model.parameters() if p.grad is not None)
    results = ranks("odd")
    for rank, found in enumerate(results):
        torch.testing.assert_close(found["with a stranger"], (norm**2 + 6 * 4).sqrt(), rtol=1e-12, atol=0)
        assert "1 of the tensors are not of a parallelized module" in found["uneven stranger"]
        assert "on rank 3" in found["uneven stranger"]
        torch.testing.assert_close(found["stranger alone"].item(), (24 + 5 * (rank == 3)) ** 0.5)
        assert "is detached from, a shard of tokens.weight" in found["detached"]
        assert "a shard of up.weight" in found["view"]
        torch.testing.assert_close(found["detached, invariant"], model.norm.weight.grad.norm())
        for order in ("0", "-1", "nan", "-inf"):
            assert "positive order only" in found["order", order]
            assert "positive order only" in found["torch, order", order]
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
    with pytest.raises(sw.ShardwiseError, match=r"GradScaler\._check_inf_per_device is not where it was"):
        guards._install.__wrapped__()
    assert get_total_norm.__closure__[0].cell_contents is before
    monkeypatch.setattr(torch.nn.utils, "get_total_norm", lambda tensors: None)
    with pytest.raises(sw.ShardwiseError, match=r"the body of torch\.nn\.utils\.get_total_norm, GradScaler"):
        guards._install.__wrapped__()


# --------------------------------------------------------------------------------------------------------- loss scaling


def train_scaled(module: nn.Module, poison: Callable[[int], None], *, fused: bool, unscale: bool) -> list[Any]:
    """Six steps with loss scaling: per step the scale, and the parameters."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, fused=fused)
    scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    seen = []
    for step in range(6):
        loss = module(*batch(step))
        scaler.scale(loss).backward()
        poison(step)
        if unscale:
            scaler.unscale_(optimizer)
            clip_grad_norm_(module.parameters(), 0.3)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seen.append((scaler.get_scale(), {name: p.detach().clone() for name, p in module.named_parameters()}))
    return seen


WAYS = [{"fused": fused, "unscale": unscale} for fused in (False, True) for unscale in (False, True)]


def scaled_on_ranks() -> tuple[list[Any], sw.Plan]:
    """On a rank: an infinity, then a nan, in the shard of one rank only; every way of scaling."""
    results = []
    par = split("tp, uneven", torch.float32)
    initial = {name: p.detach().clone() for name, p in par.named_parameters()}

    def poison(step: int) -> None:
        if step in (2, 3) and dist.get_rank() == step - 1:
            par.up.weight.grad[0, 0] = math.inf if step == 2 else math.nan

    for way in WAYS:
        for name, p in par.named_parameters():
            p.data.copy_(initial[name])
        results.append(train_scaled(par, poison, **way))
    disabled = GradScaler("cpu", enabled=False)
    disabled.unscale_(torch.optim.SGD(par.parameters(), lr=0.1))
    return results, par.plan


def test_an_infinity_in_one_shard_makes_every_rank_skip_the_step(ranks: Ranks) -> None:
    for number, way in enumerate(WAYS):
        model = make(torch.float32)

        def poison(step: int, model: Net = model) -> None:
            if step in (2, 3):
                model.up.weight.grad[5, 0] = math.inf if step == 2 else math.nan

        alone = train_scaled(model, poison, **way)
        assert [scale for scale, _ in alone] == [2.0**10, 2.0**11, 2.0**10, 2.0**9, 2.0**9, 2.0**10]
        for rank, (results, plan) in enumerate(ranks("scaled")):
            coordinates = plan.mesh.coordinates(rank)
            for step, ((scale, own), (want_scale, want)) in enumerate(zip(results[number], alone, strict=True)):
                assert scale == want_scale, f"{way} on rank {rank}, step {step}"
                if step in (2, 3):
                    assert all(torch.equal(own[name], results[number][step - 1][1][name]) for name in own)
                for name, value in own.items():
                    part = shard(want[name], plan.layouts[name], coordinates)
                    torch.testing.assert_close(value, part, rtol=1e-4, atol=1e-5, msg=f"{way} {step} {name}")


# ----------------------------------------------------------------------------------------------------------- optimizers


class Renamed(torch.optim.AdamW):
    """Element-wise, as it replaces nothing."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=1e-2)


class Normalised(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad /= p.grad.norm()
        return super().step(closure)


class Mixin:
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Mixed(Mixin, torch.optim.Adam):
    pass


class Sign(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p -= 0.1 * p.grad.sign()


class Signed(Sign):
    pass


def steps_on_ranks() -> dict[str, Any]:
    """On a rank: which optimizers step on shards, and what they leave."""
    found: dict[str, Any] = {}

    par = split("tp, uneven")
    initial = {n: p.detach().clone() for n, p in par.named_parameters()}

    def attempt(name: str, make_optimizer: Callable[[sw.Parallel], torch.optim.Optimizer]) -> None:
        for n, p in par.named_parameters():
            p.data.copy_(initial[n])
        optimizer = make_optimizer(par)
        for step in range(2):
            optimizer.zero_grad()
            par.step(*batch(step))
            before = {n: p.detach().clone() for n, p in par.named_parameters()}
            message = refusal(lambda: optimizer.step(lambda: torch.zeros(())))
            if message != "accepted":
                unchanged = all(torch.equal(p, before[n]) for n, p in par.named_parameters())
                found[name] = (message, unchanged)
                return
        found[name] = ("accepted", {n: p.detach().clone() for n, p in par.named_parameters()})

    for kind in ELEMENTWISE:
        attempt(kind.__name__, lambda par, kind=kind: kind(par.parameters(), lr=1e-2))
    attempt("fused AdamW", lambda par: torch.optim.AdamW(par.parameters(), lr=1e-2, fused=True))
    attempt("no foreach", lambda par: torch.optim.AdamW(par.parameters(), lr=1e-2, foreach=False))
    for kind in (torch.optim.LBFGS, torch.optim.Adafactor, torch.optim.SparseAdam):
        attempt(kind.__name__, lambda par, kind=kind: kind(par.parameters()))
    attempt("Muon", lambda par: torch.optim.Muon([par.up.weight]))
    for kind in (Renamed, Normalised, Mixed, Sign, Signed):
        attempt(
            kind.__name__,
            lambda par, kind=kind: kind(par.parameters(), **({"lr": 0.1} if kind in (Normalised, Mixed) else {})),
        )
    sw.elementwise_optimizer(Sign)
    for kind in (Sign, Signed):
        attempt(f"declared {kind.__name__}", lambda par, kind=kind: kind(par.parameters()))
    attempt("LBFGS of invariant", lambda par: torch.optim.LBFGS([par.norm.weight, par.down.bias]))
    attempt("Muon of invariant", lambda par: torch.optim.Muon([par.wide.weight]))

    def grows(par: sw.Parallel) -> torch.optim.Optimizer:
        optimizer = torch.optim.Adafactor([par.norm.weight])
        par.step(*batch())
        optimizer.step()
        optimizer.add_param_group({"params": [par.up.weight]})
        return optimizer

    attempt("grown", grows)
    par = split("tp, uneven")  # not compiled yet: process groups cannot be copied
    averaged = AveragedModel(par)
    optimizer = torch.optim.SGD(par.parameters(), lr=0.1)
    for step in range(2):
        par.step(*batch(step))
        optimizer.step()
        averaged.update_parameters(par)
    found["averaged"] = {n: p.detach() for n, p in averaged.module.named_parameters()}
    found["plan"] = par.plan
    return found


def test_optimizers_update_shards_as_one_device_or_refuse(ranks: Ranks) -> None:
    results = ranks("optimizers")
    updates: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        **{kind.__name__: lambda ps, kind=kind: kind(ps, lr=1e-2) for kind in ELEMENTWISE},
        "fused AdamW": lambda ps: torch.optim.AdamW(ps, lr=1e-2),
        "no foreach": lambda ps: torch.optim.AdamW(ps, lr=1e-2),
        "Renamed": Renamed,
        "declared Sign": Sign,
        "declared Signed": Sign,
    }
    for name, update in updates.items():
        model = make()
        optimizer = update(model.parameters())
        for step in range(2):
            optimizer.zero_grad()
            model(*batch(step)).backward()
            optimizer.step()
        for rank, found in enumerate(results):
            accepted, own = found[name]
            assert accepted == "accepted", name
            for key, value in model.named_parameters():
                part = shard(value.detach(), found["plan"].layouts[key], found["plan"].mesh.coordinates(rank))
                torch.testing.assert_close(own[key], part, rtol=1e-6, atol=1e-8, msg=f"{name}: {key} on rank {rank}")
    for found in results:
        assert found["LBFGS of invariant"][0] == found["Muon of invariant"][0] == "accepted"
        for name in ("LBFGS", "Adafactor", "SparseAdam", "Muon", "Normalised", "Mixed", "Sign", "Signed", "grown"):
            message, unchanged = found[name]
            assert message.startswith("ShardwiseError"), name
            assert unchanged
        assert found["LBFGS"][0].splitlines()[:2] == [
            "ShardwiseError: torch.optim.LBFGS looks at whole parameters, and this rank holds a shard of tokens.weight "
            "and of 4 more of its parameters",
            "  op:     tokens.weight: f64[14@tp, 6]",
        ]
        assert "sw.elementwise_optimizer(Sign)" in found["Sign"][0]
        assert "up.weight: f64[10@tp, 6]" in found["grown"][0]


def test_averaged_copies_of_a_module_are_those_of_one_device(ranks: Ranks) -> None:
    model = make()
    averaged, optimizer = AveragedModel(model), torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        model(*batch(step)).backward()
        optimizer.step()
        averaged.update_parameters(model)
    for rank, found in enumerate(ranks("optimizers")):
        for name, value in averaged.module.named_parameters():
            part = shard(value.detach(), found["plan"].layouts[name], found["plan"].mesh.coordinates(rank))
            torch.testing.assert_close(found["averaged"][name], part, rtol=1e-10, atol=1e-12)


def test_what_counts_as_elementwise() -> None:
    assert is_elementwise(Renamed)
    Renamed([nn.Parameter(torch.ones(1))])  # torch now wraps its step
    assert is_elementwise(Renamed)
    assert not is_elementwise(Normalised)
    assert not is_elementwise(Mixed)
    assert not is_elementwise(torch.optim.LBFGS)
    with pytest.raises(sw.ShardwiseError, match="a subclass of torch"):
        sw.elementwise_optimizer(Sign([nn.Parameter(torch.ones(1))]))
