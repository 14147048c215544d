"""Where nothing fits, a plan makes again what lets it fit: under lower and lower limits, each plan verified."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shardwise as sw
from raising import raises
from search.small_models import PreNorm, Stack
from shardwise.costs.collectives import Links
from shardwise.costs.prediction import Prediction
from shardwise.costs.prices import Prices
from shardwise.graph.capture import capture
from shardwise.graph.segments import How, Segment
from shardwise.layouts.routes import Axes
from shardwise.rules.atoms import factor_graph
from shardwise.search import fit_memory
from shardwise.search.cost_graph import BYTES, EXPOSED, TRAFFIC, Components
from shardwise.search.cost_tables import Tables
from shardwise.search.domains import Domains, SearchSpace
from shardwise.search.memory_policy import MemoryPolicy, PricedPolicy, ReshardMode
from shardwise.search.planner import Planner, least_that_fits
from shardwise.search.planning_cache import PlanningCache
from shardwise.search.user_choices import rules_of

if TYPE_CHECKING:
    from shardwise.search.candidates import CandidateRanking

MESH = sw.Mesh(dp=2)


def plan(limit: float | None) -> tuple[sw.Plan, Prediction]:
    module, x = Stack(*(PreNorm(32, 64) for _ in range(4))).double(), torch.randn(1024, 32, dtype=torch.float64)
    found = sw.plan(module, (x,), 2, mesh=MESH, search="dynamic_programming", memory_bytes=limit)
    assert sw.verify(module, (x,), found).ok
    return found, found.prediction


def test_plans_for_less_and_less_memory_make_more_again_and_state_a_gap_that_holds_for_all_that_fit() -> None:
    free, unlimited = plan(None)
    assert not any(op.again for stage in free.stages for op in stage.operators)
    simulated, again, bound = unlimited.simulated_seconds, 0, unlimited.bound
    for share in (0.9, 0.7, 0.5):
        limit = share * unlimited.peak_bytes
        tight, own = plan(limit)
        assert own.peak_bytes <= limit
        repeated = sum(bool(op.again) for stage in tight.stages for op in stage.operators)
        assert repeated > again, share  # more than under a higher limit
        again = repeated
        assert own.simulated_seconds >= simulated
        simulated = own.simulated_seconds
        # What fits under a lower limit is among what the bound of a higher one is for.
        assert bound * (1 - 1e-9) <= own.bound <= own.additive_price
        assert own.optimality_gap is not None
        assert own.optimality_gap <= 0.06
        bound = own.bound
        assert own.additive_price >= own.pass_seconds * (1 - 1e-9)
        assert own.num_bytes <= own.peak_bytes


def test_what_no_setting_makes_fit_is_refused_with_the_least() -> None:
    with raises(sw.errors.NothingFits, section="nothing-fits", facts=["needed", "largest", "least"]):
        plan(1e5)


def tables_of_storage(passes: int, *ways: ReshardMode, trains: bool = True) -> list[list[Components]]:
    """Of a weight, the components between how it is stored and how operators use it, under every way of gathering."""
    module = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32, bias=False))
    module[1].requires_grad_(trains)
    graph = capture(module, (torch.randn(8, 32),), {}, loss=lambda y: y.square().mean()).graph
    prices = Prices(Links(sw.Cluster.local(2), MESH), "adamw", passes)
    factored = factor_graph(graph, rules_of(graph))
    weight = next(source.value for source in graph.sources if source.names == ("1.weight",))
    found = []
    for way in ways:
        domains = Domains(SearchSpace(graph, factored), Axes.of(MESH), prices, PlanningCache())
        cost = Tables(domains, {}).priced(PricedPolicy(reshard_mode=way))
        storage = cost.number["storage", weight]
        found.append([cost.kinds[kind] for scope, kind in cost.factors if scope[0] == storage and len(scope) == 2])
    return found


def sums_of(*, trains: bool) -> float:
    """The most bytes that gathering a weight once a step takes beside those of gathering it in every pass."""
    most = 0.0
    for held, once in zip(*tables_of_storage(4, "held", "once", trains=trains), strict=True):
        tables = [np.zeros(1) if table is None else table for table in (once[BYTES], held[BYTES])]
        most = max(most, float((tables[0] - tables[1]).max()))
    return most


@pytest.mark.parametrize("passes", [1, 4])
def test_only_what_is_gathered_has_the_price_of_a_second_gather(passes: int) -> None:
    """What operators use as it is stored has no message in forward that backward could repeat. Its gradient is reduced,
    once a step. What is exchanged for as much is held for all passes, or brought twice in each."""
    ratios = set()
    for held, again in zip(*tables_of_storage(passes, "held", "again"), strict=True):
        seconds = [
            np.sum([own[component] for component in (EXPOSED, TRAFFIC) if own[component] is not None], axis=0)
            for own in (held, again)
        ]
        assert np.shape(seconds[0]) == np.shape(seconds[1])
        some = np.asarray(seconds[0]) > 0
        ratios |= {round(float(ratio), 6) for ratio in np.asarray(seconds[1])[some] / np.asarray(seconds[0])[some]}
    assert ratios == {1.0, 1.5, 1.5 * passes}


def test_frozen_weights_have_no_sums_of_gradients() -> None:
    assert sums_of(trains=True) == 32 * 32 * 4
    assert sums_of(trains=False) == 0


class Layer(nn.Module):
    """Products as Megatron splits them: the sequence is gathered ahead of the first of each pair."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(2, (16, -1)).transpose(1, 2) for part in self.qkv(self.before(x)).chunk(3, 2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.between(x))))


class Sequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(2048) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().mean()


def of_sequences(limit: float | None) -> sw.Plan:
    with torch.device("meta"):
        module, x = Sequences().to(torch.bfloat16), torch.empty(4, 4096, 2048, dtype=torch.bfloat16)
    splits = {"layers.*.qkv": "n@tp", "layers.*.out": "k@tp", "layers.*.up": "n@tp", "layers.*.down": "k@tp"}
    settings = {"mesh": sw.Mesh(tp=8), "strategies": splits, "layouts": {"args[0]": "[4, 4096@tp, 2048]"}}
    return sw.plan(
        module, (x,), "h100-1x8", memory_bytes=limit, offload="none", search="dynamic_programming", **settings
    )


def test_what_messages_brought_is_brought_again_where_that_is_the_cheapest_that_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free = of_sequences(None).prediction
    limit = 0.9 * free.peak_bytes
    tight = of_sequences(limit)
    own = tight.prediction
    again = [entry for stage in tight.stages for entry in stage.conversions or () if entry.again and entry.forward]
    assert again, "messages are sent again"
    assert own.peak_bytes <= limit < free.peak_bytes
    assert own.simulated_seconds >= free.simulated_seconds * (1 - 1e-9)
    without = tuple(policy for policy in fit_memory.MEMORY_POLICIES if "gathers" not in (policy.recompute or ""))
    assert len(without) < len(fit_memory.MEMORY_POLICIES)
    monkeypatch.setattr(fit_memory, "MEMORY_POLICIES", without)
    easier = {"full": ("cheap",)}
    repeats = {how: own._replace(easier=easier.get(how, ("none",))) for how, own in fit_memory.REPEATS.items()}
    monkeypatch.setattr(fit_memory, "REPEATS", repeats)
    assert own.simulated_seconds < of_sequences(limit).prediction.simulated_seconds


class Fused(nn.Module):
    """A gated layer whose weights are used through views, and whose first product is used in two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(512, 4096), nn.Linear(2048, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, through = torch.chunk(x @ self.up.weight.transpose(0, 1), 2, -1)
        return x + (F.silu(gate) * through) @ self.down.weight.transpose(0, 1)


@pytest.mark.parametrize(("recompute", "rows"), [("cheap", 512), ("cheap", 16_384), ("full", 512)])
def test_prices_count_the_views_that_a_program_keeps(recompute: How, rows: int) -> None:
    """Views of a product are not recomputed with the cheap operators, and views of a gathered parameter are kept as
    long as this: so the bytes of prices are nearly those of the program, with few rows (weights) and many (values)."""
    with torch.device("meta"):
        module = Stack(*(Fused() for _ in range(4))).to(torch.bfloat16)
        x = torch.empty(rows, 512, dtype=torch.bfloat16)
    settings = {"zero": 2, "recompute": recompute, "mesh": sw.Mesh(dp=8), "search": "dynamic_programming"}
    found = sw.plan(module, (x,), "h100-1x8", **settings).prediction
    assert 0.7 * found.peak_bytes < found.num_bytes <= found.peak_bytes


@pytest.mark.parametrize("recompute", ["none", "cheap", "full"])
def test_prices_count_what_recomputation_begins_from_and_no_memory_twice(recompute: How) -> None:
    """Backward reads no sum of a residual stream, but norms are recomputed from it. Attention keeps its result, which
    the next product keeps too. Without parameters to speak of, bytes of prices are those of the program."""
    with torch.device("meta"):
        module = Stack(*(Layer(256) for _ in range(12))).to(torch.bfloat16)
        x = torch.empty(8, 4096, 256, dtype=torch.bfloat16)
    settings = {"recompute": recompute, "mesh": sw.Mesh(dp=8), "search": "dynamic_programming"}
    found = sw.plan(module, (x,), "h100-1x8", **settings)
    peak = found.prediction.peak_bytes
    assert 0.7 * peak < found.prediction.num_bytes <= peak


class Recomputed(nn.Module):
    """A norm of single operators, none of which keeps its operand, and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(256, 768), nn.Linear(256, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True))).to(x.dtype)
        q, k, v = (part.unflatten(2, (4, -1)).transpose(1, 2) for part in self.qkv(normed).chunk(3, 2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


def test_prices_count_what_full_recomputation_keeps() -> None:
    """What enters a block is kept, though no operator of the block keeps it, and so is what attention makes, which no
    program computes again. So the bytes of prices grow with the blocks as those of programs do."""

    def recomputed(blocks: int) -> Prediction:
        with torch.device("meta"):
            module = Stack(*(Recomputed() for _ in range(blocks))).to(torch.bfloat16)
            x = torch.empty(64, 512, 256, dtype=torch.bfloat16)
        settings = {"recompute": "full", "mesh": sw.Mesh(dp=8), "search": "dynamic_programming"}
        return sw.plan(module, (x,), "h100-1x8", **settings).prediction

    few, many = recomputed(4), recomputed(8)
    grown = many.peak_bytes - few.peak_bytes
    assert 0.9 * grown < many.num_bytes - few.num_bytes < 1.1 * grown


def policy_result(how: How, fits_at: float, cheapest_fits: bool = False) -> fit_memory.PolicyResult:
    """A policy whose plan that fits has this price, twice that of its cheapest."""
    found = fit_memory.PolicyResult(
        cast("Planner", SimpleNamespace(settings=SimpleNamespace(memory_policy=MemoryPolicy(how))))
    )
    best = SimpleNamespace(candidate=SimpleNamespace(additive_price=fits_at))
    cheapest = SimpleNamespace(
        num_bytes=0.5 if cheapest_fits else 2.0, candidate=SimpleNamespace(additive_price=fits_at / 2)
    )
    vars(found)["ranking"] = SimpleNamespace(best=best, cheapest=cheapest, limit=1.0)
    return found


def test_what_fits_only_at_a_higher_price_does_not_rule_out_what_makes_more_again() -> None:
    cheap, full = policy_result("cheap", 4.0), policy_result("full", 6.0)
    assert full.is_ruled_out(5.0, [cheap])
    assert not full.is_ruled_out(3.0, [cheap])
    assert not cheap.is_ruled_out(9.0, [full]), "it makes less again"
    assert not full.is_ruled_out(9.0, [])
    cheapest_fits = policy_result("cheap", 4.0, cheapest_fits=True)
    assert full.is_ruled_out(3.0, [cheapest_fits]), "its cheapest plan fits, and costs 2"
    assert not full.is_ruled_out(1.5, [cheapest_fits])


def test_recomputing_less_changes_nothing_where_it_takes_longer() -> None:
    """What is not computed again may be copied to the host and waited for."""
    strong, weak = (
        MemoryPolicy(how, offload="all", segments=(Segment("block", how, frozenset(("block/op",))),))
        for how in ("full", "cheap")
    )
    ranking = SimpleNamespace(best=SimpleNamespace(step=SimpleNamespace(seconds=1.0), num_bytes=1.0, candidate=None))
    slower = SimpleNamespace(step=SimpleNamespace(seconds=1.2), num_bytes=1.0)
    planner = SimpleNamespace(settings=SimpleNamespace(memory_policy=strong), limit=2.0)
    planner.under = lambda policy: SimpleNamespace(_built=lambda candidate: slower)
    found = Planner.eased(cast("Planner", planner), cast("CandidateRanking", ranking), weak)
    assert found == (planner, ranking)


@pytest.mark.parametrize("shape", ["a line", "nearly", "bent", "steps", "flat, then a cliff"])
def test_the_least_number_of_segments_that_fits_is_found_and_on_a_line_in_few_looks(shape: str) -> None:
    for most in (1, 2, 3, 32, 126):

        def bytes_of(count: int, most: int = most) -> float:
            left = (most - count) / most
            return {
                "a line": 50 + 50 * left,
                "nearly": 50 + 50 * left**1.02,
                "bent": 50 + 50 * left**4,
                "steps": 50 + 10 * (5 * left // 1),
                "flat, then a cliff": 50.0 if count == most else 100.0 - 1e-3 * count,
            }[shape]

        for exact in range(most + 1):
            looks: list[int] = []

            def looked(count: int, looks: list[int] = looks, bytes_of: Callable[[int], float] = bytes_of) -> float:
                looks.append(count)
                return bytes_of(count)

            limit = bytes_of(exact) + 1e-9
            found = least_that_fits(looked, most, limit)
            assert found == min(count for count in range(most + 1) if bytes_of(count) <= limit)
            few = {"a line": 4, "nearly": 6}.get(shape) or 2 * most.bit_length() + 2
            assert len(set(looks)) <= few, (most, exact, looks)
