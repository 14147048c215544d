"""Tables on the host: where every tensor of the emitted program is, what may read a table there, and unchanged numbers.

There is no GPU here: the rest of the program is put on the meta device, and devices are followed through the program.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

import shardwise as sw
from launch.gloo_ranks import RunRanks
from raising import message
from runtime.interpreted import interpret_section
from runtime.training import Trained, check_ranks, train
from shardwise.layouts.placement import Placement
from shardwise.runtime import compiled
from shardwise.runtime.communicator import Communicator
from shardwise.runtime.emit import take_all
from shardwise.runtime.transit import Converting

HOST = ("users.weight", "item*.weight")


class Clicks(nn.Module):
    """Tables of users, of items (a bag) and of days, and a small network."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.users = nn.Embedding(40, 8)
        self.items = nn.EmbeddingBag(30, 8, mode="sum")
        self.days = nn.Embedding(7, 8)
        self.hidden = nn.Linear(24, 16)
        self.out = nn.Linear(16, 1)
        self.double()

    def forward(self, users: Tensor, items: Tensor, days: Tensor, clicks: Tensor) -> Tensor:
        x = torch.cat([self.users(users), self.items(items), self.days(days)], -1)
        return nn.functional.mse_loss(self.out(torch.tanh(self.hidden(x))).squeeze(-1), clicks)


def batch(step: int = 0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(step)
    users, days = (torch.randint(0, n, (8,), generator=generator) for n in (40, 7))
    items = torch.randint(0, 30, (8, 5), generator=generator)
    return users, items, days, torch.randn(8, generator=generator, dtype=torch.float64)


PLANS: dict[str, tuple[dict[str, int], dict[str, str]]] = {
    "replicas": ({"dp": 4}, {}),
    "rows by hand": ({"dp": 2, "tp": 2}, {"users": "v@tp{30,10}", "items": "v@tp"}),
    "columns": ({"tp": 4}, {"users": "e@tp", "items": "e@tp"}),
}


def plan_for(name: str) -> sw.Plan:
    axes, strategies = PLANS[name]
    return sw.plan(Clicks(), batch(), 4, mesh=sw.Mesh(**axes), strategies=strategies, search="sharding_propagation")


# -------------------------------------------------------------------------------------------------------- the program


def devices(
    module: fx.GraphModule, placeholders: Iterable[str], saved: Sequence[str] = ()
) -> tuple[dict[fx.Node, str], list[str]]:
    """The device of every node of one half of a program, and what meets a tensor of another device than its own.
    ``placeholders``: the devices of its arguments; ``saved``: of what backward takes from the list of saved values."""
    found: dict[fx.Node, str] = {}
    mixed: list[str] = []
    arguments = iter(placeholders)
    for node in module.graph.nodes:
        if node.op == "placeholder":
            found[node] = next(arguments)
        elif node.op == "call_method":
            assert node.target == "to"
            found[node] = node.args[1].type
        elif node.op == "call_function" and node.args and found.get(node.args[0]) == "saved":
            found[node] = "saved" if node.target is take_all else saved[node.args[1]]
        elif node.op != "output":
            own = {found[other] for other in node.all_input_nodes}
            if len(own) > 1:
                mixed.append(f"{node}: {own}")
            named = [arg.type for arg in (*node.args, *node.kwargs.values()) if isinstance(arg, torch.device)]
            found[node] = min(own or named, default="meta")
    return found, mixed


def look(name: str, host: tuple[str, ...]) -> dict[str, Any]:
    """On a rank: what is where, when all but the tables is on the meta device."""
    par = sw.parallelize(Clicks(), plan_for(name), device="meta", host=host, compile=False)
    with pytest.raises(NotImplementedError, match="meta tensor"):  # the indices can not leave it
        par(*batch())
    compiled = par.latest
    forward, backward = compiled.step.emitted.forward, compiled.step.emitted.backward
    where, mixed = devices(forward, [t.device.type if t is not None else "meta" for t in compiled.tensors])
    output = next(node for node in forward.graph.nodes if node.op == "output")
    there, mixed_back = devices(backward, ["saved", "meta"], [where[node] for node in output.args[0][2]])
    transfers = [
        (where[node.args[0]], where[node], {str(user.target) for user in node.users} if where[node] == "cpu" else set())
        for node in where
        if node.op == "call_method"
    ]
    over: set[tuple[str, bool]] = set()
    for module, placed in ((forward, where), (backward, there)):
        for node, device in placed.items():
            if node.op == "call_module":
                exchange = module.get_submodule(str(node.target))
                purpose = exchange.purpose if isinstance(exchange, Converting) else exchange.message.purpose
                over.add((device, purpose.ranks is par._host_ranks))
    lookups = [where[node] for node in where if node.op == "call_function" and "embedding" in str(node.target)]
    gradients = next(node for node in backward.graph.nodes if node.op == "output").args[0]
    of = dict(zip(compiled.step.emitted.program.gradients, (there[node] for node in gradients), strict=True))
    names = {value: source.names[0] for value, source in compiled.spmd.graph.source_of.items()}
    groups = {dist.get_backend(group) for group in par._host_ranks._groups.values()}
    shared = [g for axes, g in par._host_ranks._groups.items() if g is par._ranks._groups.get(axes)]
    return {
        "parameters": {n: p.device.type for n, p in par.named_parameters()}, "mixed": mixed + mixed_back,
        "transfers": transfers, "gradients": {names[value]: device for value, device in of.items()},
        "over": over, "lookups": lookups, "groups": groups, "shared": len(shared),
    }  # fmt: skip


def look_at_all() -> dict[str, dict[str, Any]]:
    return {name: look(name, HOST) for name in PLANS}


def test_indices_go_to_the_host_and_rows_come_back_around_the_lookups_only(run_ranks: RunRanks) -> None:
    for plans in run_ranks(look_at_all, 4):
        for name, result in plans.items():
            on_host = {n for n, device in result["parameters"].items() if device == "cpu"}
            assert on_host == {"users.weight", "items.weight"}
            assert not result["mixed"]
            assert result["gradients"] == result["parameters"]
            assert sorted(result["lookups"]) == ["cpu", "cpu", "meta"]
            there = [users for before, after, users in result["transfers"] if (before, after) == ("meta", "cpu")]
            back = [before for before, after, _ in result["transfers"] if (before, after) == ("cpu", "meta")]
            assert len(there) == len(back) == 2
            assert len(result["transfers"]) == 4
            assert all(users - {"output"} for users in there), there  # which are on the host, as nothing is mixed
            # What is on the host travels over groups of its own, and nothing else does.
            assert all((device == "cpu") == over_host for device, over_host in result["over"])
            assert result["groups"] <= {"gloo"}
            assert not result["shared"]
            if name == "replicas":
                assert result["over"] == {("cpu", True), ("meta", False)}


# -------------------------------------------------------------------------------------------------------- the numbers


def train_on_rank(name: str, check: int | None = None, *, compile: bool = False) -> Trained:
    plan = plan_for(name)
    par = sw.parallelize(Clicks(), plan, host=HOST, check_replicas=check, compile=compile)
    par._host_ranks = Communicator(Placement.whole(plan.mesh), "Clicks", backend="gloo")  # as on a GPU, of their own
    return train_clicks(par)


def train_clicks(module: nn.Module) -> Trained:
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    return train(module, map(batch, range(3)), optimizer, clip=0.5)


def train_all() -> dict[str, Trained]:
    eager = {name: train_on_rank(name, check=1) for name in PLANS}
    name = "rows by hand"
    with mock.patch.object(compiled, "compile_with_inductor", interpret_section):
        return eager | {f"{name}, compiled": train_on_rank(name, compile=True)}


def test_numbers_are_those_of_one_process(run_ranks: RunRanks) -> None:
    ranks = run_ranks(train_all, 4)
    alone = train_clicks(Clicks())
    for name in ranks[0]:
        check_ranks([found[name] for found in ranks], alone, name)


# -------------------------------------------------------------------------------------------------------- what is wrong


def refusals() -> list[str]:
    """On a rank: the messages for what is refused, at once or at the first call."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(6, 4), nn.Linear(4, 6)
            self.head.weight = self.embed.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.embed(ids)).square().mean()

    class Returned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(6, 4)

        def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
            return self.embed(ids).mean(), self.embed.weight

    ids, found = torch.tensor([0, 3]), []
    for module, inputs, host in (
        (Clicks(), batch(), ("user.weight",)),
        (Clicks(), batch(), "users.weight"),
        (Clicks(), batch(), ("hidden.*",)),
        (Tied(), (ids,), ("embed.weight",)),
        (Tied(), (ids,), ("head.weight",)),
        (Returned(), (ids,), ("*",)),
    ):
        plan = sw.plan(module, inputs, 1, mesh=sw.Mesh(dp=1), search="sharding_propagation")
        found.append(message(partial(call_with_tables, module, plan, host, inputs)))
    return found


def call_with_tables(module: nn.Module, plan: sw.Plan, host: Any, inputs: tuple[Tensor, ...]) -> None:
    sw.parallelize(module, plan, host=host)(*inputs)


def test_what_a_table_on_the_host_is_no_good_for(run_ranks: RunRanks) -> None:
    (found,) = run_ranks(refusals, 1)
    words = [
        ("no parameter is called user.weight", "did you mean users.weight?"),
        ("a sequence of parameter names", "host=('users.weight',)"),
        ("hidden.", "on the host", "aten.linear", "op:     hidden/linear", "test_hosted.py"),
        ("embed.weight is kept on the host", "aten.linear", "op:     head/linear", "untie it"),
        ("embed.weight is kept on the host", "aten.linear", "op:     head/linear", "untie it"),
        ("embed.weight is kept on the host, but the module returns it",),
    ]
    assert len(found) == len(words)
    for text, own in zip(found, words, strict=True):
        assert all(word in text for word in own), text
