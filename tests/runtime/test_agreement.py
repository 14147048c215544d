"""What ranks agree on: parts of a batch, calls, initial values, replaced tensors, the seed; on real gloo ranks."""

from __future__ import annotations

import copy
import re
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import shardwise as sw
from launch.gloo_ranks import RunRanks, wait_for_all_ranks
from raising import refusal
from shardwise.graph.custom_operators import splitmix64
from shardwise.graph.written_out import SEED
from shardwise.planning import execute
from shardwise.runtime.local_shards import shard

# Sums of at most 16 rows and 12 columns of float64, in another order: some units in the last place of numbers below 10.
ROUNDING = 1e-13


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.norm(self.up(x).tanh()))


def make(**settings: Any) -> tuple[Net, Net, sw.Plan | None]:
    """(on one device, to be split, its plan, which rank 0 makes for all)"""
    torch.manual_seed(0)
    net = Net().double()
    batch = (torch.randn(8, 6, dtype=torch.float64), torch.randint(0, 3, (8,)))
    is_first = dist.get_rank() == 0
    plan = sw.plan(net, batch, 4, loss=nn.functional.cross_entropy, **settings) if is_first else None
    return copy.deepcopy(net), net, plan


DATA_PARALLEL = {"mode": "data_parallel"}
TWO_AXES = {"mesh": sw.Mesh(dp=2, tp=2), "strategies": {"up": "m@dp n@tp", "down": "m@dp k@tp"}}


def batch_of(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(size)
    return torch.randn(size, 6, dtype=torch.float64, generator=generator), torch.randint(
        0, 3, (size,), generator=generator
    )


def with_timeout(seconds: float, store: str) -> None:
    """Connect the ranks anew, with collectives that may take so long."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    init_method, timeout = f"file://{store}", timedelta(seconds=seconds)
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=size, timeout=timeout)


def trained(settings: dict[str, Any], calls: list[tuple[int, ...]]) -> tuple[float, list[str]]:
    """Steps over batches whose parts have these sizes: the largest error of losses, parameters and buffers."""
    alone, net, plan = make(**settings)
    worst = 0.0
    with warnings.catch_warnings(record=True, action="always") as caught:
        par = sw.parallelize(net, plan, loss=nn.functional.cross_entropy, inputs="local")
        optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (alone, par)]
        for parts in calls:
            x, y = batch_of(sum(parts))
            position = dist.get_rank() // (4 // len(parts))
            rows = slice(sum(parts[:position]), sum(parts[: position + 1]))
            for optimizer in optimizers:
                optimizer.zero_grad()
            want = nn.functional.cross_entropy(alone(x), y)
            want.backward()
            have = par.step(x[rows], y[rows])
            worst = max(worst, float((want - have).abs()))
            for optimizer in optimizers:
                optimizer.step()
    values = dict(alone.named_parameters()) | dict(alone.named_buffers())
    coordinates = par.plan.mesh.coordinates(dist.get_rank())
    for name, own in [*par.named_parameters(), *par.named_buffers()]:
        part = shard(values[name].detach(), par.plan.layouts[name], coordinates)
        worst = max(worst, float((own.detach() - part).abs().max()) if own.numel() else 0.0)
    return worst, [str(w.message) for w in caught if "gathered" in str(w.message)]


def parts_of_different_sizes() -> list[tuple[float, list[str]]]:
    return [
        trained(DATA_PARALLEL, [(2, 2, 2, 2), (2, 2, 2, 1), (1, 2, 2, 2), (2, 2, 2, 2), (5, 1, 1, 3), (1, 2, 2, 2)]),
        trained(DATA_PARALLEL, [(2, 2, 2, 1), (2, 2, 2, 2), (4, 4, 4, 4), (0, 3, 3, 3)]),
        trained(TWO_AXES, [(4, 4), (4, 3), (3, 4), (1, 6)]),
    ]


def test_parts_of_a_batch_may_have_any_sizes(run_ranks: RunRanks) -> None:
    everywhere = run_ranks(parts_of_different_sizes, 4)
    for outcomes in everywhere:
        for worst, _ in outcomes:
            assert worst < ROUNDING
    even = everywhere[0][0][1]
    assert any("[1, 6], [2, 6], [2, 6], [2, 6]" in text for text in even)
    assert len(even) == 2 * 2  # both inputs, for every new combination of sizes that is not the program's own


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(12, 8), nn.Linear(8, 5)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        return self.out(nn.functional.scaled_dot_product_attention(x, x, x, mask)).square().mean()


def parts_that_make_no_batch() -> list[str]:
    rank = dist.get_rank()
    _, net, _ = make(**DATA_PARALLEL)
    whole = sw.plan(net, batch_of(8), 4, loss=nn.functional.cross_entropy, mode="stand_alone")
    split = {"loss": nn.functional.cross_entropy, "inputs": "local"}
    messages = [refusal(lambda: sw.parallelize(net, whole, **split))]
    _, other, two_axes = make(**TWO_AXES)
    par = sw.parallelize(other, two_axes, **split)
    x, y = batch_of(8)
    rows = slice(2 * rank, 2 * rank + 2)
    messages.append(refusal(lambda: par.step(x[rows], y[rows])))  # tp ranks must pass the same rows
    messages.append(refusal(lambda: par.step(x[: 2 + rank % 2], y[: 2 + rank % 2])))
    torch.manual_seed(0)
    model, ids, mask = Attention().double(), torch.randint(0, 12, (8, 6)), torch.ones(6, 6).tril().double()
    by_rows = {"mesh": sw.Mesh(dp=2, cp=2), "layouts": {"args[0]": "[8@dp, 6@cp]"}}
    par = sw.parallelize(model, sw.plan(model, (ids, mask), 4, **by_rows), inputs="local")
    messages.append(refusal(lambda: par.step(ids[:4], mask)))  # all columns, of which the plan gives it the half
    par = sw.parallelize(model, sw.plan(model, (ids, mask), 4, mode="data_parallel"), inputs="local")
    messages.append(refusal(lambda: par.step(ids[rows], mask * (1 + rank))))  # the mask is whole: it must be the same
    messages.append(refusal(lambda: par.step(ids[rows], mask) and None))
    messages.append(refusal(lambda: par.step(ids[rows].int() if rank == 2 else ids[rows], mask)))
    return messages


def test_parts_that_make_no_batch_are_named_on_all_ranks(run_ranks: RunRanks) -> None:
    outcomes = run_ranks(parts_that_make_no_batch, 4)
    for messages in outcomes:
        assert messages == outcomes[0]
    whole, same_rows, sizes, columns, mask, good, dtype = outcomes[0]
    assert "the plan splits no input: args[0] [8, 6], args[1] [8]" in whole
    assert "ranks 0 and 1 pass different args[0], but the plan assigns both the same part of it: it is" in same_rows
    assert re.search(r"args\[0\] .*2 and 3 elements|ranks 0 and 1 pass different args\[0\]", sizes)
    assert "every rank passes 6 elements of dim 1 of args[0], the size of the whole dim" in columns
    assert "different args[1]" in mask
    assert good == "accepted"
    assert "args[0] is i64[2, 6] on rank 0 and i32[2, 6] on rank 2" in dtype


def calls_that_differ() -> list[tuple[str, float]]:
    rank = dist.get_rank()
    _, net, plan = make(**DATA_PARALLEL)
    par = sw.parallelize(net, plan, loss=nn.functional.cross_entropy)
    x, y = batch_of(8)

    def timed(action: Callable[[], Any]) -> tuple[str, float]:
        start = time.monotonic()
        return refusal(action), time.monotonic() - start

    cut = slice(0, 6) if rank == 2 else slice(0, 8)
    outcomes = [timed(lambda: par.step(x[cut], y[cut]))]
    outcomes.append(timed(lambda: par(x, y) if rank == 1 else par.step(x, y)))
    par.train(rank != 3)
    outcomes.append(timed(lambda: par(x, y)))
    par.train()
    outcomes.append(timed(lambda: par.step(x.float() if rank == 1 else x, y)))
    par.step(x, y)
    return outcomes


def test_ranks_that_make_different_calls_are_named_on_all(run_ranks: RunRanks) -> None:
    outcomes = run_ranks(calls_that_differ, 4)
    for own in outcomes:
        shape, kind, mode, dtype = (message for message, _ in own)
        assert "args[0] is f64[8, 6] on rank 0 and f64[6, 6] on rank 2" in shape
        assert "rank 0 in train(), step(), rank 1 in train(), a call" in kind
        assert "rank 0 in train(), a call, rank 3 in eval(), a call" in mode
        assert "args[0] is f64[8, 6] on rank 0 and f32[8, 6] on rank 1" in dtype


def wrong_dtypes() -> list[str]:
    alone, net, plan = make(**TWO_AXES)
    par = sw.parallelize(net, plan, loss=nn.functional.cross_entropy)
    x, y = batch_of(8)
    messages = [refusal(lambda: par.step(x.float(), y)), refusal(lambda: par.step(x, y.to(torch.int32)))]
    messages.append(refusal(lambda: par.step(x.to("meta"), y.to("meta"))))
    messages.append(refusal(lambda: par.step(x.to_sparse(), y)))
    for module in (alone, par):  # as optimizers of other libraries do
        module.down.bias.data = module.down.bias.data.float()
        messages.append(refusal(lambda module=module: module(*((x, y) if module is par else (x,)))))
        module.down.bias.data = module.down.bias.data.double()
    loss = par.step(x, y)
    messages.append(f"{float((loss - nn.functional.cross_entropy(alone(x), y)).abs()) < ROUNDING}")
    return messages


def test_tensors_of_a_wrong_dtype_are_errors_on_every_rank_and_no_time_out(run_ranks: RunRanks) -> None:
    for x, y, meta, sparse, eager, own, afterwards in run_ranks(wrong_dtypes, 4):
        assert "input args[0] has dtype f32; the plan was made for f64" in x
        assert "input args[1] has dtype i32; the plan was made for i64" in y
        assert "args[0], args[1] are on meta, without data" in meta
        assert "args[0] is a sparse_coo tensor" in sparse
        assert "dtype" in eager
        assert "dtype" in own
        assert "timed out" not in own
        assert afterwards == "True"


def a_call_that_fails_on_one_rank(store: str) -> list[str]:
    with_timeout(4.0, store)
    alone, net, plan = make(**DATA_PARALLEL)
    par = sw.parallelize(net, plan, loss=nn.functional.cross_entropy)
    x, y = batch_of(8)
    wrong = x.to("meta")
    messages = [refusal(lambda: par.step(wrong, y)), refusal(lambda: par.step(wrong, y))]  # alike on all: they go on
    messages.append(str(float((par.step(x, y) - nn.functional.cross_entropy(alone(x), y)).abs()) < ROUNDING))
    messages.append(refusal(lambda: par.step(wrong if dist.get_rank() == 2 else x, y)))
    messages.append(refusal(lambda: par.step(2 * x, y)))  # of rank 2 alone: the others are in the last call
    wait_for_all_ranks()
    return messages


def test_after_a_call_that_failed_on_one_rank_no_other_call_is_taken_for_it(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    outcomes = run_ranks(a_call_that_fails_on_one_rank, 4, str(tmp_path / "again"))
    for rank, (first, second, equal, failed, after) in enumerate(outcomes):
        assert "args[0] is on meta" in first
        assert "args[0] is on meta" in second
        assert equal == "True"
        assert ("args[0] is on meta" if rank == 2 else "CollectiveError") in failed
        assert "Error" in after


def calls_of_one_rank_alone(case: str) -> str:
    """What this rank says, where rank 2 does something else in the third call than the others."""
    _, net, plan = make(**DATA_PARALLEL)
    par = sw.parallelize(net, plan, loss=nn.functional.cross_entropy)
    x, y = batch_of(8)
    is_odd, cut = dist.get_rank() == 2, slice(0, 6)
    par.eval()
    par.step(x, y)
    par.train()
    if case == "known shape":
        par.step(x[cut], y[cut])
    par.step(x, y)  # all are known to all
    if case == "mode" and is_odd:
        par.eval()
    if case == "replaced" and is_odd:
        par.up.weight = nn.Parameter(2 * par.up.weight.detach())
    if case == "frozen" and is_odd:
        par.up.weight.requires_grad_(False)
    x = x.to("meta") if case == "device" and is_odd else x
    whole = case not in ("shape", "known shape") or not is_odd
    with torch.set_grad_enabled(not (case == "no_grad" and is_odd)):
        message = refusal(lambda: par.step(x, y) if whole else par.step(x[cut], y[cut]), Exception)
    wait_for_all_ranks()
    return message


SAID_BY_OTHERS = {
    "shape": "f64[6, 6]",
    "known shape": "f64[6, 6]",
    "mode": "eval(), step()",
    "no_grad": "train(), step(), gradients off",
    "replaced": "train(), step(), replaced up.weight",
    "frozen": "train(), step(), frozen up.weight",
}


@pytest.mark.parametrize("case", [*SAID_BY_OTHERS, "device"])
@pytest.mark.sampled(2)
def test_a_rank_that_makes_another_call_is_named_on_all_before_time_is_up(case: str, run_ranks: RunRanks) -> None:
    outcomes = run_ranks(calls_of_one_rank_alone, 4, case)
    for rank, message in enumerate(outcomes):
        assert "timed out" not in message
        if case == "device":
            assert "args[0] is on meta, without data" in message
            assert rank == 2 or "rank 2 has left this call" in message
        elif rank == 2:
            assert "has left this call: ShardwiseError: ranks make different calls" in message
        else:
            assert "rank 2" in message
            assert SAID_BY_OTHERS[case] in message


def different_values() -> list[str]:
    rank = dist.get_rank()
    messages = []
    for change in ("weight", "buffer", "shape", "seed"):
        _, net, plan = make(**DATA_PARALLEL)
        with torch.no_grad():
            if rank == 1 and change == "weight":
                net.up.weight[3, 2] += 1e-12
            if rank == 1 and change == "buffer":
                net.norm.running_var[0] = 2.0
        if rank == 1 and change == "shape":
            net.down = nn.Linear(12, 4).double()
        if change == "seed":
            with sw.deferred(seed=rank // 2):
                net = Net().double()
        messages.append(refusal(lambda net=net, plan=plan: sw.parallelize(net, plan, loss=nn.functional.cross_entropy)))
    return messages


def test_ranks_that_start_from_different_values_are_named(run_ranks: RunRanks) -> None:
    outcomes = run_ranks(different_values, 4)
    for rank, (weight, buffer, shape, seed) in enumerate(outcomes):
        assert "up.weight of rank 1 differs from rank 0 (1 of 9 tensors)" in weight
        assert "norm.running_var of rank 1 differs from rank 0" in buffer
        assert ("" if rank == 1 else "rank 1: ") + "the plan is for another model" in shape
        assert "of rank 2 differ from rank 0 (4 of 9 tensors)" in seed


def replaced() -> tuple[float, list[str]]:
    alone, net, plan = make(**TWO_AXES)
    par = sw.parallelize(net, plan, loss=nn.functional.cross_entropy)
    x, y = batch_of(8)
    par.step(x, y)
    par.zero_grad()
    nn.functional.cross_entropy(alone(x), y)
    with torch.no_grad():
        for module in (alone, par):
            module.up.weight = nn.Parameter(module.up.weight * 2)
            module.norm.running_mean = module.norm.running_mean + 1
        par.load_state_dict({name: value.clone() for name, value in par.state_dict().items()}, assign=True)
        kept = par.down.weight
    nn.functional.cross_entropy(alone(x), y).backward()
    par.step(x, y)
    coordinates = par.plan.mesh.coordinates(dist.get_rank())
    parameters, buffers = dict(alone.named_parameters()), dict(alone.named_buffers())
    errors = [
        float((own.grad - shard(parameters[name].grad, par.plan.layouts[name], coordinates)).abs().max())
        for name, own in par.named_parameters()
    ]
    errors += [float((own - buffers[name]).abs().max()) for name, own in par.named_buffers()]
    assert par.down.weight is kept
    messages = []
    for wrong in (nn.Parameter(torch.ones(12, 6).double()), nn.Parameter(par.up.weight.detach().float()), None):
        par.up.weight = wrong
        messages.append(refusal(lambda: par.step(x, y)))
    par.up.weight = nn.Parameter(torch.ones(6, 6).double())
    par.step(x, y)
    messages.append(refusal(lambda: nn.parallel.DistributedDataParallel(nn.Sequential(par))))
    messages.append(refusal(lambda: fully_shard(par)))
    par.down = nn.Linear(12, 3).double()
    messages.append(refusal(lambda: par.step(x, y)))
    return max(errors), messages


def test_replaced_tensors_are_taken_or_refused(run_ranks: RunRanks) -> None:
    for worst, (shape, dtype, gone, *wrapped, module) in run_ranks(replaced, 4):
        assert worst < ROUNDING
        assert "up.weight was replaced by a parameter f64[12, 6] on cpu; this rank's part of it is" in shape
        assert "up.weight was replaced by a parameter f32[6, 6]" in dtype
        assert "up.weight was replaced by nothing" in gone
        assert all("around a parallel module" in message for message in wrapped), wrapped
        assert "the submodule down was replaced by a Linear" in module


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(self.up(x), 0.5, self.training).square().mean()


def resumed() -> tuple[list[float], list[float], list[list[float]]]:
    torch.manual_seed(0)
    net, x = Dropped().double(), torch.randn(8, 6, dtype=torch.float64)
    plan = sw.plan(net, (x,), 2, mode="data_parallel")

    def job(seed: int) -> sw.Parallel:
        return sw.parallelize(copy.deepcopy(net), plan, seed=seed)

    first = job(3)
    assert SEED not in first.state_dict()
    losses = [float(first.step(x)) for _ in range(2)]
    saved = {name: value.clone() for name, value in first.state_dict().items()}
    losses = [float(first.step(x)) for _ in range(3)]
    second = job(4)
    second.load_state_dict(saved)
    assert torch.equal(second.state_dict()[SEED], saved[SEED])  # before any call, and in a copy
    assert torch.equal(copy.deepcopy(second).state_dict()[SEED], saved[SEED])
    again = [float(second.step(x)) for _ in range(3)]
    assert second.load_state_dict({n: v for n, v in saved.items() if n != SEED}) is not None
    rows = []
    for seed in range(3):
        par = job(seed)
        rows.append([float(par.step(x)) for _ in range(3)])
    return losses, again, rows


def test_a_resumed_job_draws_the_numbers_that_it_would_have_drawn(run_ranks: RunRanks) -> None:
    for losses, again, rows in run_ranks(resumed, 2):
        assert losses == again
        assert len(set(losses)) == 3
        assert len({loss for row in rows for loss in row}) == 9  # seed 1 does not begin with seed 0's second call
    starts = splitmix64(torch.arange(1000)).sort().values
    assert int((starts[1:].double() - starts[:-1].double()).min()) > 10**9  # calls until two jobs could meet


def predictions() -> list[float]:
    alone, net, plan = make(**TWO_AXES)
    par = sw.parallelize(net, plan, loss=nn.functional.cross_entropy)
    errors = []
    for training in (True, False, True):
        alone.train(training)
        par.train(training)
        for size in (8, 4):
            x, _ = batch_of(size)
            want, have = alone(x), par.predict(x)
            errors.append(float((want - have).detach().abs().max()))
            errors += [float((a - b).abs().max()) for a, b in zip(alone.buffers(), par.buffers(), strict=True)]
            for loss in (want.square().mean(), have.square().mean()):
                loss.backward()
    coordinates = par.plan.mesh.coordinates(dist.get_rank())
    for (name, own), parameter in zip(par.named_parameters(), alone.parameters(), strict=True):
        errors.append(float((own.grad - shard(parameter.grad, par.plan.layouts[name], coordinates)).abs().max()))
    return errors


def test_predict_gives_the_output_without_the_loss(run_ranks: RunRanks) -> None:
    for errors in run_ranks(predictions, 4):
        assert len(errors) == 3 * 2 * 4 + 6
        assert max(errors) < 100 * ROUNDING  # gradients of six passes, sums of up to 48 rows divided by deviations


def slow_planning(seconds: float, store: str) -> float:
    """Rank 0 plans, and captures, for longer than a collective may take."""
    with_timeout(seconds / 2, store)
    if dist.get_rank() == 0:
        inner = execute.capture

        def slowly(*args: Any, **kwargs: Any) -> Any:
            time.sleep(seconds)
            return inner(*args, **kwargs)

        execute.capture = slowly  # this process ends with the test
    torch.manual_seed(0)
    net = Net().double()
    plan = None
    if dist.get_rank() == 0:
        plan = sw.plan(net, batch_of(8), 2, loss=nn.functional.cross_entropy, mode="data_parallel")
    from shardwise.runtime import program_cache

    if dist.get_rank() == 0:
        program_cache.capture = execute.capture
    par = sw.parallelize(net, plan, loss=nn.functional.cross_entropy)
    return float(par.step(*batch_of(8)))


def test_planning_may_take_longer_than_a_collective(run_ranks: RunRanks, tmp_path: Path) -> None:
    first, second = run_ranks(slow_planning, 2, 5.0, str(tmp_path / "again"))
    assert first == second


def absent(store: str) -> str:
    with_timeout(2.0, store)
    if dist.get_rank() == 0:
        time.sleep(6.0)
        return ""
    torch.manual_seed(0)
    return refusal(lambda: sw.parallelize(Net().double(), None))


def test_a_rank_0_that_does_not_come_is_named(run_ranks: RunRanks, tmp_path: Path) -> None:
    outcome = run_ranks(absent, 2, str(tmp_path / "again"))[1]
    assert "rank 1 waits for rank 0 and its plan; rank 0 sent nothing for" in outcome
