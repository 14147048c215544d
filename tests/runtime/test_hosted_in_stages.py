"""Tables on the host under a plan of stages: the numbers of one process, where every tensor is, and what is refused."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from launch.gloo_ranks import RunRanks
from runtime.interpreted import interpret_section
from runtime.test_hosted import devices
from shardwise.runtime import compiled, signatures
from shardwise.runtime.communicator import Communicator
from shardwise.runtime.local_shards import shard
from shardwise.runtime.transit import Converting

HOST = ("users.weight", "items.weight")


class Visits(nn.Module):
    """Users are looked up in the first stage and in the last, items in the first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.users, self.items = nn.Embedding(40, 8), nn.Embedding(30, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.out = nn.Linear(8, 1)
        self.double()

    def forward(self, users: Tensor, items: Tensor, clicks: Tensor) -> Tensor:
        x = self.users(users) * self.items(items).sum(1)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return nn.functional.mse_loss(self.out(x + self.users(users)).squeeze(-1), clicks)


def batch(step: int = 0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(step)
    users, items = torch.randint(0, 40, (8,), generator=generator), torch.randint(0, 30, (8, 3), generator=generator)
    return users, items, torch.randn(8, generator=generator, dtype=torch.float64)


def plan_for(num_ranks: int, schedule: str, stages: int) -> sw.Plan:
    options: dict[str, Any] = {"mode": "data_parallel", "mesh": sw.Mesh(dp=num_ranks // 2), "zero": 1}
    return sw.plan(Visits(), batch(), num_ranks, stages=stages, schedule=schedule, micro_batch=2, **options)


def train(num_ranks: int, schedule: str, stages: int, compile: bool = False) -> float:
    """On a rank: how far three steps of AdamW with clipping are from one process. ``compile``: with regions of kernels
    between the copies, for which no code is generated."""
    plan, model = plan_for(num_ranks, schedule, stages), Visits()
    with mock.patch.object(compiled, "compile_with_inductor", interpret_section):
        return trained(plan, model, compile)


def trained(plan: sw.Plan, model: nn.Module, compile: bool) -> float:
    par = sw.parallelize(copy.deepcopy(model), plan, host=HOST, check_replicas=0 if compile else 2, compile=compile)
    for calls, stage in zip(par._calls_of, plan.stages, strict=True):  # as on a GPU: groups of their own
        calls.host_ranks = Communicator(stage.placement, "Visits", backend="gloo")
        calls.host_ranks.create_groups([stage.mesh.sub_axes])
    optimizer, alone = torch.optim.AdamW(par.parameters(), lr=0.1), torch.optim.AdamW(model.parameters(), lr=0.1)
    worst = 0.0
    for step in range(3):
        loss, wanted = par.step(*batch(step)), model(*batch(step))
        assert par._latest is not None
        runs = [own.compiled.in_passes for worker in par._latest.workers for own in worker.programs.values()]
        assert all((own.compiling is not None and own.compiling.variant is not None) == compile for own in runs)
        wanted.backward()
        assert loss is not None
        norm, wanted_norm = sw.clip_grad_norm(par, 0.05), torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        assert wanted_norm > 0.05, "nothing is clipped"
        worst = max(worst, abs(float(loss - wanted.detach())), abs(float(norm - wanted_norm)))
        for one in (optimizer, alone):
            one.step()
            one.zero_grad()
    whole = dict(model.named_parameters())
    for name, parameter in par.named_parameters():
        stage = next(s for s in plan.stages if name in s.layouts and dist.get_rank() in s.placement.ranks)
        want = shard(whole[name].detach(), stage.layouts[name], stage.placement.coordinates(dist.get_rank()))
        worst = max(worst, float((parameter.detach() - want).abs().max()))
    return worst


@pytest.mark.parametrize(("num_ranks", "schedule", "stages"), [(4, "1F1B", 2), (2, "ZBVZeroBubble", 4)])
@pytest.mark.sampled(1)
def test_numbers_are_those_of_one_process(num_ranks: int, schedule: str, stages: int, run_ranks: RunRanks) -> None:
    shared = [s for s in plan_for(num_ranks, schedule, stages).stages if "users.weight" in s.layouts]
    assert len(shared) == 2, "the table of users is in two stages"
    # Sums in another order, in float64, through three steps of AdamW.
    assert max(run_ranks(train, num_ranks, num_ranks, schedule, stages)) < 1e-11


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_compiled_they_are_those_of_one_process(num_ranks: int, run_ranks: RunRanks) -> None:
    assert max(run_ranks(train, num_ranks, num_ranks, "1F1B", 2, True)) < 1e-11


def look(schedule: str, stages: int) -> list[str]:
    """On a rank: what of a stage's programs meets a tensor of another device, when all but the tables is on meta."""
    plan = plan_for(4, schedule, stages)
    par = sw.parallelize(Visits(), plan, device="meta", host=HOST, compile=False)
    assert {n for n, p in par.named_parameters() if p.device.type == "cpu"} == par._names & set(HOST)
    flat, spec = par._begin(batch(), {})
    with mock.patch.object(signatures, "_prints", return_value={}):  # meta tensors have no contents to compare
        ready, _ = par._for_step([x.to("meta") for x in flat], spec)
    mixed: list[str] = []
    for worker in ready.workers:
        own = worker.programs[2]
        emitted, layouts = own.compiled.in_passes.emitted, own.part.source_of
        tables = {s.value for s in layouts.values() if set(HOST) & set(s.names)}
        given = ["cpu" if name in emitted.writer.on_host else "meta" for name in emitted.program.given]
        where, found = devices(emitted.forward, [*("cpu" if n in tables else "meta" for n in layouts), *given])
        mixed += found
        lookups = [where[n] for n in where if n.op == "call_function" and "embedding" in str(n.target)]
        assert set(lookups) <= {"cpu"}
        assert bool(lookups) == bool(tables), "lookups are where the tables are"
        assert emitted.writer.host_ranks is not own.ranks
        for node, device in where.items():
            if node.op == "call_module":
                exchange = emitted.forward.get_submodule(str(node.target))
                purpose = exchange.purpose if isinstance(exchange, Converting) else exchange.message.purpose
                assert (purpose.ranks is emitted.writer.host_ranks) == (device == "cpu")
        output = next(node for node in emitted.forward.graph.nodes if node.op == "output")
        kept = dict(zip(emitted.program.saved, (where[node] for node in output.args[0][2]), strict=True))
        cotangents = ["meta" for name in emitted.program.cotangents if name is not None]
        if schedule == "1F1B":
            _, found = devices(emitted.backward, ["saved", *cotangents], list(kept.values()))
            mixed += found
            continue
        kept |= {name: "meta" for name in emitted.program.cotangents if name is not None}
        for half, module in own.halves:
            given = [kept[name] for name in half.cotangents if name is not None]
            where, found = devices(module, ["saved", *given], [kept[name] for name in half.saved])
            output = next(node for node in module.graph.nodes if node.op == "output")
            kept |= dict(zip(half.gradients, (where[node] for node in output.args[0]), strict=True))
            mixed += found
    return mixed


def look_at_both() -> list[str]:
    return [*look("1F1B", 2), *look("ZBVZeroBubble", 4)]


def test_nothing_meets_a_tensor_of_another_device(run_ranks: RunRanks) -> None:
    assert run_ranks(look_at_both, 4) == [[]] * 4


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer, self.head = nn.Embedding(6, 4), nn.Linear(4, 4), nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(self.embed(ids)))).square().mean()


def refused() -> str:
    ids = torch.randint(0, 6, (8,))
    plan = sw.plan(Tied(), ids, 2, stages=2, micro_batch=2)
    par = sw.parallelize(Tied(), plan, host=("embed.weight",))
    with pytest.raises(sw.ShardwiseError) as error:
        par.step(ids)
    return str(error.value)


def test_a_table_that_another_stage_computes_with_is_refused_on_all_ranks(run_ranks: RunRanks) -> None:
    first, second = run_ranks(refused, 2)
    assert first == second
    assert "embed.weight is kept on the host, but aten.linear" in first
