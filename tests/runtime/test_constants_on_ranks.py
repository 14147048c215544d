"""Values that are made once and kept: every step equals one device's, whatever becomes of the buffers behind them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardwise as sw
from launch.gloo_ranks import RunRanks
from raising import raises
from runtime.constant_models import HEADS, LENGTH, WIDTH, Summing, Turning, batch, turning
from runtime.interpreted import interpret_section
from shardwise.errors import ShardwiseError
from shardwise.programs.hoist_constants import HoistedProgram, with_constants_apart
from shardwise.programs.rank_program import RankProgram
from shardwise.runtime import program_cache
from shardwise.runtime.compiled import compiled_program
from shardwise.runtime.local_shards import shard

# float64, of the largest magnitude: sums of some 500 products, in another order on two ranks.
EQUAL = 1e-12


def step(module: Any, x: Tensor) -> dict[str, Tensor]:
    module.zero_grad()
    loss, ends, cos = module(x)
    loss.backward()
    found = {"loss": loss.detach(), "ends": ends.clone(), "cos": cos.detach().clone()}
    ends.zero_(), cos.zero_()  # who called may do that
    return found | {name: p.grad.clone() for name, p in module.named_parameters()}


def gap(alone: Any, par: sw.Parallel, number: int) -> float:
    """The largest difference of a step between one device and this rank, of the largest magnitude (at least 1)."""
    want, have = step(alone, batch(number)), step(par, batch(number))
    here = par.plan.mesh.coordinates(dist.get_rank())
    for name, layout in par.plan.layouts.items():
        if name in want:
            want[name] = shard(want[name], layout, here)
    return max(float((want[name] - have[name]).abs().max() / want[name].abs().max().clamp(1)) for name in want)


def kept(par: sw.Parallel) -> dict[str, Tensor]:
    constants = par.latest.step.constants
    assert constants is not None
    return constants.tensors


def halve(module: Any) -> None:
    with torch.no_grad():
        module.inv_freq.mul_(0.5)


def exchange_whole(module: Any) -> None:
    module.inv_freq = module.inv_freq * 3


def load(module: Any) -> None:
    module.load_state_dict({name: x + 0.25 for name, x in module.state_dict().items()})


def exchange(module: Any) -> None:
    module.inv_freq.set_(module.inv_freq.clone() * 0.7)


def changes(strategies: dict[str, str], compiles: bool) -> Any:
    model = turning()
    alone = copy.deepcopy(model)
    plan = sw.plan(model, (batch(),), 2, mesh=sw.Mesh(tp=2), strategies=strategies)
    assert any(conversion.forward for conversion in plan.conversions), "the plan splits nothing"
    if compiles:  # as tests of compiled programs do: without code
        program_cache.compiled_program = lambda *args: compiled_program(*args, generate=interpret_section)
    par = sw.parallelize(model, plan, compile=compiles)
    gaps = {"first": gap(alone, par, 0)}
    before = kept(par)
    gaps["again"] = gap(alone, par, 1)
    same = all(kept(par)[name] is tensor for name, tensor in before.items())
    for change in (halve, exchange_whole, load, exchange):
        change(alone), change(par)
        gaps[change.__name__] = max(gap(alone, par, 2), gap(alone, par, 3))
    twin, made = copy.deepcopy(alone), copy.deepcopy(par)
    halve(twin), halve(made)
    gaps["of a copy"] = gap(twin, made, 4)
    with torch.inference_mode():
        gaps["without backward"] = float((par(batch(5))[0] - alone(batch(5))[0]).abs())
    gaps["after that"] = gap(alone, par, 5)
    loss = par(batch(0))[0]
    par.scale.add_(1)
    with raises(ShardwiseError, "scale was", "was changed"):
        loss.backward()
    return gaps, same, {name: x.untyped_storage().nbytes() for name, x in before.items()}


@pytest.mark.parametrize(("factor", "compiles"), [("n", False), ("m", True)], ids=["heads", "positions, compiled"])
@pytest.mark.sampled(1)
def test_steps_equal_one_device_whatever_becomes_of_buffers(run_ranks: RunRanks, factor: str, compiles: bool) -> None:
    for gaps, same, sizes in run_ranks(changes, 2, {f"qkv.{i}": f"{factor}@tp" for i in range(2)}, compiles):
        assert max(gaps.values()) < EQUAL, gaps
        assert same, "values were made again though nothing had changed"
        whole = 8 * LENGTH * LENGTH * HEADS  # the bias of all heads
        tables = 8 * LENGTH * WIDTH // HEADS
        if factor == "n":  # a rank has its heads' part, once for all layers
            assert whole // 2 in sizes.values(), sizes
            assert whole not in sizes.values(), sizes
        else:  # and its positions' part of the tables
            assert [size for size in sizes.values() if size == tables // 2], sizes


BY_POSITION = {f"qkv.{i}": "m@tp" for i in range(2)}
DATA = {"mesh": sw.Mesh(dp=2), "mode": "data_parallel"}
PASSES = {"global_batch": 4, "micro_batch": 2}
# Name -> (model, its settings, the plan's, those of parallelize).
WAYS: dict[str, tuple[type[Turning], dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "a part of the buffer": (
        Turning,
        {},
        {"mesh": sw.Mesh(tp=2), "strategies": {"qkv.0": "n@tp"}, "layouts": {"inv_freq": "[4@tp]"}},
        {},
    ),
    "bfloat16": (Turning, {}, {**DATA, "precision": sw.Precision(torch.bfloat16, torch.float32, torch.float32)}, {}),
    "made again": (Turning, {}, {"mesh": sw.Mesh(tp=2), "strategies": {"qkv.0": "n@tp"}, "recompute": "all"}, {}),
    "checked": (Turning, {}, {"mesh": sw.Mesh(tp=2), "strategies": BY_POSITION}, {"check_replicas": 1}),
    "parts of the batch": (Turning, {}, DATA, {"inputs": "local"}),
    "zero 3": (Turning, {"dropout": 0.25}, {**DATA, "zero": 3}, {}),
    "on the host": (Turning, {}, {**DATA, "offload": "all"}, {}),
    "passes": (Summing, {"dropout": 0.25}, {**DATA, **PASSES}, {}),
    "stages": (Summing, {}, {"mesh": sw.Mesh(dp=1), "stages": 2, **PASSES}, {}),
}


def made_in_every_step(program: RankProgram, among: Collection[str] | None = None) -> HoistedProgram:
    nothing = replace(program, forward=(), backward=(), delivered=(), cotangents=(), gradients={}, saved=(), given=())
    return HoistedProgram(nothing, program)


def trained(name: str) -> list[Tensor]:
    """Losses and gradients of three steps, before the last of which buffers change."""
    kind, settings, planned, run = WAYS[name]
    torch.manual_seed(0)
    dtype = torch.float32 if name == "bfloat16" else torch.float64
    model, found = kind(**settings).to(dtype), []
    plan = sw.plan(model, batch().to(dtype), 2, **planned)
    par = sw.parallelize(model, plan, seed=3, **run)
    optimizer = torch.optim.SGD(par.parameters(), 0.01)
    for number in range(3):
        x = batch(number).to(dtype)
        optimizer.zero_grad()
        found.append(par.step(x.chunk(2)[dist.get_rank()] if name == "parts of the batch" else x))
        found += [p.grad.clone() for p in par.parameters()]
        optimizer.step()
        if number == 1:
            for buffer in par.buffers():
                buffer.mul_(0.9)
    return found


def every_way() -> dict[str, bool]:
    equal = {}
    with warnings.catch_warnings(action="ignore"):
        for name in WAYS:
            once = trained(name)
            program_cache.with_constants_apart = made_in_every_step
            always = trained(name)
            program_cache.with_constants_apart = with_constants_apart
            equal[name] = all(torch.equal(a, b) for a, b in zip(once, always, strict=True))
    return equal


@pytest.mark.long
def test_training_is_equal_bit_for_bit_in_whatever_way(run_ranks: RunRanks) -> None:
    for equal in run_ranks(every_way, 2):
        assert equal == dict.fromkeys(WAYS, True)
