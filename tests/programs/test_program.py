"""A rank's step as one list: what the checker refuses, what passes may claim, and what the lists of ranks have in
common."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shardwise as sw
from proving import prove
from raising import raises
from shardwise.costs.cluster import Cluster
from shardwise.costs.collectives import Links
from shardwise.costs.memory import busiest_program, memory_of
from shardwise.costs.prices import Prices
from shardwise.costs.timeline import simulate
from shardwise.graph.capture import capture
from shardwise.plans.bind import program_of
from shardwise.programs.comm_schedule import GradientReduceQueue, legs_ahead
from shardwise.programs.differentiate import RankProgram, differentiate
from shardwise.programs.instructions import Arrive, Compute, Convert, Depart, sent_by
from shardwise.programs.invariants import BrokenProgram, check_program
from shardwise.programs.lifetimes import backward_collectives
from shardwise.programs.program import localize
from shardwise.programs.rank_program import mark_overwrites_of_backward, memories
from shardwise.programs.spmd import SpmdProgram
from shardwise.programs.vjp import VjpCache

VJP_CACHE = VjpCache()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(x + self.down(F.gelu(self.up(self.norm(x)))), torch.zeros_like(x))


X = torch.randn(8, 16)


def spmd_of(mesh: sw.Mesh, strategies: dict[str, str] | None = None, **settings: Any) -> SpmdProgram:
    plan = sw.plan(
        Block(), X, mesh.num_devices, mesh=mesh, strategies=strategies, search="sharding_propagation", **settings
    )
    return program_of(plan, capture(Block(), (X,), {}).graph, training=True)


MEGATRON = {"up": "n@tp", "down": "k@tp"}


def program(rank: int = 0, **settings: Any) -> RankProgram:
    return differentiate(localize(spmd_of(sw.Mesh(dp=2, tp=2), MEGATRON), rank), VJP_CACHE, **settings)


def test_backward_names_no_autograd_and_keeps_fused_kernels() -> None:
    step = program()
    targets = {str(i.target) for i in step.backward if isinstance(i, Compute)}
    assert "aten.native_layer_norm_backward.default" in targets
    assert "aten.gelu_backward.default" in targets
    assert set(step.gradients) == {s.value for s in step.spmd.graph.sources if s.kind == "parameter"}
    assert not step.untraceable


def test_all_ranks_make_the_same_exchanges_in_the_same_order() -> None:
    for loss_only in (True, False):
        steps = [program(rank, loss_only=loss_only) for rank in range(4)]
        for half in ("forward", "backward"):
            orders = {tuple((c.kind, c.axes) for i in getattr(step, half) for c in sent_by(i)) for step in steps}
            assert len(orders) == 1
    spmd = steps[0].spmd
    assert tuple(c for i in steps[0].forward for c in sent_by(i)) == spmd.forward_collectives()
    assert tuple(c for i in steps[0].backward for c in sent_by(i)) == spmd.backward_collectives()


HYBRID: dict[str, Any] = {"zero": sw.Zero(3, over=("gpu",)), "bucket_bytes": 2048}


class Tower(nn.Module):
    """Blocks with a norm each, whose weights need not travel with those of products."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block.down(F.gelu(block.up(block.norm(x))))
        return x.square().mean()


def hybrid_step(rank: int, recompute: str) -> RankProgram:
    """States in parts on the GPUs of a node, the same on every node: a gather in forward; in backward a message inside
    of the node, then one between nodes."""
    mesh = sw.Mesh(node=2, gpu=2)
    plan = sw.plan(Tower(), X, 4, mesh=mesh, mode="data_parallel", recompute=recompute, **HYBRID)  # type: ignore[arg-type]
    spmd = program_of(plan, capture(Tower(), (X,), {}).graph, training=True)
    return differentiate(localize(spmd, rank), VJP_CACHE)


def products_of(step: RankProgram) -> list[int]:
    kinds = torch.ops.aten.mm.default, torch.ops.aten.linear.default
    return [k for k, i in enumerate(step.backward) if isinstance(i, Compute) and i.target in kinds]


def test_later_messages_of_parameters_leave_where_the_first_has_arrived_and_before_the_end() -> None:
    steps = [hybrid_step(rank, "none") for rank in range(4)]
    for step in steps:
        check_program(step)
        assert tuple(c for i in step.forward for c in sent_by(i)) == step.spmd.forward_collectives()
        assert tuple(c for i in step.backward for c in sent_by(i)) == backward_collectives(step)
    assert len({tuple((c.kind, c.axes) for i in step.backward for c in sent_by(i)) for step in steps}) == 1
    backward = steps[0].backward
    between = [k for k, i in enumerate(backward) if isinstance(i, Depart) and i.of_parameters]
    nodes = [k for k in between if sent_by(backward[k])[0].axes == ("node",)]
    inside = [k for k in between if sent_by(backward[k])[0].kind == "reduce_scatter"]
    assert len(nodes) == len(inside) > 4
    products = products_of(steps[0])
    assert sum(k < products[-1] for k in nodes) >= len(nodes) * 3 / 4, "all but those of the last block leave early"
    for own in inside:  # what arrived goes on at once, and something is computed first
        (arrival,) = [k for k, i in enumerate(backward) if isinstance(i, Arrive) and i.flight == backward[own].flight]  # type: ignore[union-attr]
        assert set(backward[arrival + 1].operands) == set(backward[arrival].results)
        if own < products[-1] and arrival < products[-1]:
            assert any(own < k < arrival for k in products), "a product hides it"


def test_what_is_gathered_again_leaves_as_early_as_in_forward() -> None:
    step = hybrid_step(0, "full")
    leaves = {i.flight: k for k, i in enumerate(step.backward) if isinstance(i, Depart) and i.origin.again}
    arrivals = {i.flight: k for k, i in enumerate(step.backward) if isinstance(i, Arrive) and i.flight in leaves}
    products = products_of(step)
    hidden = [any(leaves[flight] < k < arrivals[flight] for k in products) for flight in leaves]
    assert len(leaves) > 6
    assert sum(hidden) >= len(hidden) * 3 / 4, "all but those of the first block that is done"


def test_legs_have_the_time_from_place_to_place() -> None:
    """Three exchanges of two messages, the last two in one place, and one of one message behind them."""
    ahead = legs_ahead([2, 2, 2, 1], [0, 4, 4, 9])
    assert ahead == [[(0, 0), (1, 0), (2, 0)], [(0, 1), (1, 1), (2, 1)], [(3, 0)], [], []]
    deeper = legs_ahead([2, 2, 2, 1], [0, 4, 4, 9], depth=2)
    assert deeper == [[(0, 0), (1, 0), (2, 0)], [(3, 0), (0, 1), (1, 1), (2, 1)], [], [], []]
    assert legs_ahead([1] * 5, [*range(5)], depth=3) == [[(0, 0), (1, 0), (2, 0)], [(3, 0)], [(4, 0)], [], [], []]
    returning: GradientReduceQueue[str] = GradientReduceQueue()
    assert [*returning.leave(9, True, ["a", "arrive a"])] == ["a"]
    assert [*returning.leave(4, True, ["b", "b2", "arrive b"])] == ["b", "arrive a"]
    assert [*returning.leave(4, True, ["c", "c2", "arrive c"])] == ["c"], "nothing to hide behind was computed"
    assert [*returning.leave(0, False, ["d", "arrive d"])] == ["d", "b2", "c2"]
    assert [*returning.end()] == ["arrive b", "arrive c", "arrive d"]


def test_the_cotangent_of_an_input_travels_while_gradients_of_parameters_are_computed() -> None:
    step = program()
    leaves = [k for k, i in enumerate(step.backward) if isinstance(i, Depart) and not i.of_parameters]
    assert leaves
    for position in leaves:
        flight = step.backward[position].flight  # type: ignore[union-attr]
        arrival = next(k for k, i in enumerate(step.backward) if isinstance(i, Arrive) and i.flight == flight)
        between = step.backward[position + 1 : arrival]
        assert between
        assert {i.origin.part for i in between} == {"weight"}
    without = program(overlap=False)
    assert not any(isinstance(i, (Depart, Arrive)) for i in (*without.forward, *without.backward))


def test_gradients_of_buckets_arrive_at_the_end() -> None:
    step = program()
    last = step.backward[-1]
    assert isinstance(last, Arrive)
    assert last.of_parameters


class SumsTwice(nn.Module):
    """Both terms of a sum that is written twice have the same two cotangents: parameters, and values of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.p, self.q = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.a(x), self.b(x)
        parameters = torch.sin(self.p + self.q) + (self.p + self.q).square()
        return (torch.tanh(a + b) * self.c(a + b) * parameters).sum()


@pytest.mark.parametrize("mesh", [sw.Mesh(dp=2), sw.Mesh(tp=2)], ids=str)
@pytest.mark.parametrize(
    "settings", [{}, {"zero": 3}, {"zero": 1, "global_batch": 8, "micro_batch": 2}], ids=["plain", "zero 3", "passes"]
)
@pytest.mark.sampled(3)
def test_two_values_may_have_the_same_two_cotangents(mesh: sw.Mesh, settings: dict[str, Any]) -> None:
    model, x = SumsTwice().double(), torch.randn(8, 4, dtype=torch.float64)
    plan = sw.plan(model, (x,), 2, mesh=mesh, search="dynamic_programming", **settings)
    prove(model, (x,), plan)


def test_backward_reads_only_what_is_saved_and_its_cotangents() -> None:
    step = program()
    made = {name for i in step.backward for name in i.results}
    given = {name for name in step.cotangents if name}
    assert {name for i in step.backward for name in i.operands} - made - given <= set(step.saved)


def broken(how: str) -> RankProgram:
    step = program()
    backward = list(step.backward)
    if how == "use before it is made":
        backward.reverse()
    elif how == "lost arrival":
        backward = [i for i in backward if not isinstance(i, Arrive)]
    elif how == "lost departure":
        backward = [i for i in backward if not isinstance(i, Depart)]
    elif how == "made twice":
        backward.append(next(i for i in backward if isinstance(i, Compute)))
    elif how == "lost kernel":
        backward.remove(next(i for i in backward if isinstance(i, Compute)))
    elif how == "overwritten too early":
        exchange = next(k for k, i in enumerate(backward) if isinstance(i, (Convert, Depart)) and len(i.operands) == 1)
        operand = backward[exchange].operands[0]
        reader = Compute(
            torch.ops.aten.neg.default, (operand,), (), ("late",), ((),), (step.forms[operand],), (None,),
            backward[exchange].origin,
        )  # fmt: skip
        from shardwise.graph.ir import Ref

        backward[exchange] = replace(backward[exchange], overwrites=True)  # type: ignore[call-arg]
        backward.append(replace(reader, args=(Ref(operand),)))
    elif how == "a saved value overwritten":
        kernel = next(k for k, i in enumerate(backward) if isinstance(i, Compute) and set(i.operands) & set(step.saved))
        saved = next(name for name in backward[kernel].operands if name in step.saved)
        backward[kernel] = replace(backward[kernel], writes=(saved,))  # type: ignore[call-arg]
    return replace(step, backward=tuple(backward))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("use before it is made", ("backward 0 (norm/layer_norm)", "has not left")),
        ("lost arrival", ("backward 16 (norm/layer_norm)", "before it is made")),
        ("lost departure", ("backward 14 (up/linear)", "has not left")),
        ("made twice", ("/div", "a second time")),
        ("lost kernel", (0, "/mse_loss", "before it is made")),
        ("overwritten too early", (21, "/mse_loss", "has used")),
        ("a saved value overwritten", (1, "/mse_loss", "does not own")),
    ],
)
def test_a_broken_program_is_refused(how: str, message: object) -> None:
    check_program(program())
    with raises(BrokenProgram, message):
        check_program(broken(how))


def test_an_exchange_uses_memory_only_if_nothing_else_has_it() -> None:
    for step in (program(), program(loss_only=False)):
        for half in (step.forward, step.backward):
            root = memories(half, [*step.spmd.graph.source_of, *step.saved])
            for position, exchange in enumerate(half):
                if isinstance(exchange, (Convert, Depart)) and exchange.overwrites:
                    memory = root[exchange.operands[0]]
                    assert memory not in step.spmd.graph.source_of
                    later = {root.get(n, n) for i in half[position + 1 :] for n in i.operands}
                    assert memory not in later


def test_an_exchange_does_not_use_memory_from_which_a_message_is_still_sent() -> None:
    step = program()
    at, exchange = next(
        (k, i) for k, i in enumerate(step.backward) if isinstance(i, (Convert, Depart)) and i.overwrites
    )
    departure = next(i for i in step.backward if isinstance(i, Depart))
    arrival = next(i for i in step.backward if isinstance(i, Arrive) and i.flight == departure.flight)
    sent = replace(departure, flight="other", operands=exchange.operands, overwrites=False)
    landed = replace(arrival, flight="other", results=tuple(f"other {name}" for name in arrival.results))
    ahead, rest = step.backward[:at], step.backward[at:]

    def overwrites(backward: tuple[Any, ...]) -> bool:
        marked = mark_overwrites_of_backward(replace(step, backward=backward)).backward
        return exchange in marked

    assert overwrites((*ahead, sent, landed, *rest))
    assert not overwrites((*ahead, sent, *rest, landed))
    check_program(replace(step, backward=(*ahead, sent, landed, *rest)))
    with raises(BrokenProgram, "down/add", "add_1'b6", "from which a message is still sent"):
        check_program(replace(step, backward=(*ahead, sent, *rest, landed)))
    assert not overwrites((*ahead, exchange, sent, landed, *rest[1:])), (
        "which reads it while the exchange is on its way"
    )


# ------------------------------------------------------------------------------------------------ one busiest rank


def test_time_and_memory_are_those_of_the_same_busiest_rank() -> None:
    """Rows split by hand: the first rank holds most, not the last."""
    table = nn.Sequential(nn.Embedding(6400, 64))
    ids = torch.randint(6400, (8, 4))
    mesh = sw.Mesh(tp=4)

    class Looked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = table

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.table(ids).square().mean()

    plan = sw.plan(Looked(), ids, 4, mesh=mesh, strategies={"table.0": "v@tp{3000,3000,390,10}"})
    spmd = program_of(plan, capture(Looked(), (ids,), {}).graph, training=True)
    prices = Prices(Links(Cluster.local(4), mesh))
    rank = busiest_program(spmd, VJP_CACHE).rank
    assert spmd.layouts[spmd.graph.sources[0].value].local_shape(mesh.coordinates(rank))[0] == 3000
    peak = simulate(spmd, prices, VJP_CACHE).peak_bytes
    assert peak == memory_of(spmd, prices, vjp_cache=VJP_CACHE).peak.num_bytes
    assert peak >= 4 * 3000 * 64 * 4  # weight, gradient and two states
    row = sw.compare(
        Looked(),
        ids,
        Cluster.local(4),
        mesh=mesh,
        searches=("sharding_propagation",),
        strategies={"table.0": "v@tp{3000,3000,390,10}"},
    ).rows[0]
    from shardwise.api import step_memory

    assert row.step is not None
    assert row.step.peak_bytes == step_memory(Looked(), ids, plan).peak.num_bytes
