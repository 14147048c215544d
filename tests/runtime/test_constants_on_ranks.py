"""Values that are made once and kept: every step equals one device's, whatever becomes of the buffers behind them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardwise as sw
from runtime.constant_models import HEADS, LENGTH, WIDTH, batch, turning
from shardwise.errors import ShardwiseError
from shardwise.runtime import calls
from shardwise.runtime.compiled import compiled_program, interpreted
from shardwise.runtime.shards import shard

RunRanks = Callable[..., list[Any]]
# float64, of the largest magnitude: sums of some 500 products, in another order on two ranks.
EQUAL = 1e-12


def step(module: Any, x: Tensor) -> dict[str, Tensor]:
    """The outputs and the gradients of a step."""
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
    return constants.made


def halve(module: Any) -> None:
    with torch.no_grad():
        module.inv_freq.mul_(0.5)


def replace(module: Any) -> None:
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
        calls.compiled_program = lambda *args: compiled_program(*args, generate=interpreted)
    par = sw.parallelize(model, plan, compile=compiles)
    gaps = {"first": gap(alone, par, 0)}
    before = kept(par)
    gaps["again"] = gap(alone, par, 1)
    same = all(kept(par)[name] is tensor for name, tensor in before.items())
    for change in (halve, replace, load, exchange):
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
    with pytest.raises(ShardwiseError, match="scale was changed in place"):
        loss.backward()
    return gaps, same, {name: x.untyped_storage().nbytes() for name, x in before.items()}


@pytest.mark.parametrize(("factor", "compiles"), [("n", False), ("m", True)], ids=["heads", "positions, compiled"])
def test_steps_equal_one_device_whatever_becomes_of_buffers(run_ranks: RunRanks, factor: str, compiles: bool) -> None:
    for gaps, same, sizes in run_ranks(changes, 2, {f"qkv.{i}": f"{factor}@tp" for i in range(3)}, compiles):
        assert max(gaps.values()) < EQUAL, gaps
        assert same, "values were made again though nothing had changed"
        whole = 8 * LENGTH * LENGTH * HEADS  # the bias of all heads
        tables = 8 * LENGTH * WIDTH // HEADS
        if factor == "n":  # a rank has its heads' part, once for all layers
            assert whole // 2 in sizes.values(), sizes
            assert whole not in sizes.values(), sizes
        else:  # and its positions' part of the tables
            assert [size for size in sizes.values() if size == tables // 2], sizes
