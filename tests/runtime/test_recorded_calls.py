"""Which calls of ``torch.distributed`` conversions make: by kind, size and group, in one order on all ranks, and with
memory that is held until they are waited for. On a fake process group, one rank after the other in this process."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise as sw
from shardwise.graph.capture import capture
from shardwise.graph.ir import Graph
from shardwise.layouts.conversions import CELLS, Move
from shardwise.layouts.layout import Layout
from shardwise.layouts.placement import Placement
from shardwise.layouts.text import parse_layout
from shardwise.plans.bind import program_of
from shardwise.programs.differentiate import differentiate
from shardwise.programs.instructions import Convert, Origin
from shardwise.programs.moves import local_move
from shardwise.programs.program import localize
from shardwise.programs.spmd_steps import Conversion
from shardwise.programs.vjp import VjpCache
from shardwise.runtime import communicator, messages
from shardwise.runtime.communicator import Communicator
from shardwise.runtime.emit import emit
from shardwise.runtime.messages import CollectiveMessage, Purpose
from shardwise.runtime.transit import Converting

MESH = sw.Mesh(dp=2, tp=4)
LAYOUTS = {"S": "[8@tp, 6]", "I": "[8, 6]", "R": "[8, 6] replicated(tp)", "P": "[8, 6] partial(sum@tp)"}
# Of the collectives of the table: the call, and the elements that it is given and that it fills, of 48 over 4 ranks.
CALLS = {
    "all_gather": ("all_gather", 12, 48),
    "reduce_scatter": ("reduce_scatter", 48, 12),
    "all_reduce": ("all_reduce", 48, 48),
    "all_to_all": ("all_to_all", 12, 12),
}
NOTHING = Graph((), (), (), ())


@dataclass(frozen=True)
class Call:
    """A call of ``torch.distributed``: elements given and filled; ``members``: of the group."""

    name: str
    given: int
    filled: int
    dtype: torch.dtype
    members: tuple[int, ...]
    is_async: bool

    @property
    def of_all(self) -> tuple[Any, ...]:
        """What is the same on all ranks, whatever the group."""
        return self.name, self.given, self.filled, self.dtype, len(self.members), self.is_async


class Recorder:
    """Stands for the calls. ``groups``: members of those that were made, in order."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.groups: list[tuple[int, ...]] = []
        self.pending: list[weakref.ref[torch.Tensor]] = []  # what calls that are not waited for were given

    def note(self, name: str, given: torch.Tensor, filled: torch.Tensor, group: Any, is_async: bool) -> Any:
        members = tuple(dist.get_process_group_ranks(group))
        self.calls.append(Call(name, given.numel(), filled.numel(), given.dtype, members, is_async))
        self.pending += [weakref.ref(given.untyped_storage()), weakref.ref(filled.untyped_storage())] * is_async
        return _Work() if is_async else None


class _Work:
    """Of a backend that holds nothing of what it sends."""

    def wait(self) -> bool:
        return True


@contextmanager
def recording(rank: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    own = Recorder()

    def all_reduce(buffer: Any, op: Any, group: Any, async_op: bool) -> Any:
        return own.note("all_reduce", buffer, buffer, group, async_op)

    def gather(received: Any, sent: Any, group: Any, async_op: bool) -> Any:
        return own.note("all_gather", sent, received, group, async_op)

    def scatter(received: Any, sent: Any, op: Any, group: Any, async_op: bool) -> Any:
        return own.note("reduce_scatter", sent, received, group, async_op)

    def exchange(received: Any, sent: Any, gets: Any, gives: Any, group: Any, async_op: bool) -> Any:
        assert (sum(gets), sum(gives)) == (received.numel(), sent.numel())
        return own.note("all_to_all", sent, received, group, async_op)

    new_group = dist.new_group

    def grouped(members: Any, **settings: Any) -> Any:
        own.groups.append(tuple(members))
        return new_group(members, **settings)

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=MESH.num_devices)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(dist, "all_reduce", all_reduce)
            patched.setattr(communicator, "gather_tensor", gather)
            patched.setattr(messages, "scatter_tensor", scatter)
            patched.setattr(dist, "all_to_all_single", exchange)
            patched.setattr(dist, "new_group", grouped)
            yield own
    finally:
        dist.destroy_process_group()


def converted(rank: int, source: Layout, target: Layout, backward: bool, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    move = Move(source, target, source.mesh.sub_axes[1:])
    conversion = Conversion("x", "x", "y", source, target, (move,), True, 4, 4, "op")
    with recording(rank, monkeypatch) as own:
        ranks = Communicator(Placement.whole(MESH))
        assert own.groups == [], "groups are made when a program wants them"
        ranks.create_groups([move.axes])
        origin = Origin("op", "", "forward")
        run = Converting(Convert((conversion,), backward, ("x",), ("y",), (), (None,), origin), NOTHING, ranks)
        start = target.dual if backward else source
        run(torch.zeros(start.local_shape(ranks.coordinates)))
    return own


@pytest.mark.parametrize(("source", "target"), [cell for cell in CELLS if cell[0] != cell[1]])
def test_every_conversion_makes_the_call_of_its_cell(source: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = (parse_layout(LAYOUTS[state], MESH) for state in (source, target))
    for backward, kind in ((False, CELLS[source, target].forward), (True, CELLS[source, target].backward)):
        own = {rank: converted(rank, before, after, backward, monkeypatch) for rank in (0, 3, 6)}
        for rank, recorder in own.items():
            (first,) = {tuple(call.of_all for call in one.calls) for one in own.values()}
            if kind not in CALLS:
                assert first == (), "local steps send nothing"
                continue
            name, given, filled = CALLS[kind]
            assert first == ((name, given, filled, torch.float32, 4, False),)
            row = rank // 4 * 4
            assert recorder.calls[0].members == (row, row + 1, row + 2, row + 3)
            assert recorder.groups == [(row, row + 1, row + 2, row + 3)]  # of this rank's groups only


def test_all_to_all_sends_what_changes_its_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = (parse_layout(text, MESH) for text in ("[8@tp, 12]", "[8, 12@tp]"))
    for backward in (False, True):
        (call,) = converted(5, before, after, backward, monkeypatch).calls
        assert call.of_all == ("all_to_all", 24, 24, torch.float32, 4, False)


def test_a_program_makes_the_same_calls_in_one_order_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 12), nn.LayerNorm(12))
    x = torch.randn(16, 12)
    strategies = {"0": "m@dp n@tp"}
    plan = sw.plan(model, x, 8, mesh=MESH, strategies=strategies, loss=_mean, zero=3, bucket_bytes=512)
    spmd = program_of(plan, capture(model, (x,), {}, loss=_mean).graph)
    seen = {}
    for rank in range(8):
        with recording(rank, monkeypatch) as own:
            ranks = Communicator(Placement.whole(plan.mesh))
            ranks.create_groups(move.axes for c in spmd.conversions for move in c.moves)
            program = differentiate(localize(spmd, rank), VjpCache())
            emitted = emit(program, ranks, device=torch.device("cpu"))
            sources = [torch.zeros(program.forms[s.value].shape) for s in spmd.graph.sources]
            _, _, saved = emitted.forward.forward(*sources)
            emitted.backward.forward(list(saved), torch.ones(()))
        seen[rank] = own
    calls = {tuple(call.of_all for call in own.calls) for own in seen.values()}
    assert len(calls) == 1, "ranks make other calls, or in another order"
    (order,) = calls
    assert {name for name, *_ in order} >= {"all_gather", "reduce_scatter", "all_reduce"}
    assert any(is_async for *_, is_async in order)
    assert len({tuple(map(len, own.groups)) for own in seen.values()}) == 1, "groups are made in another order"
    assert all(rank in members for rank, own in seen.items() for members in own.groups), "a rank makes others' groups"
    assert all(rank in call.members for rank, own in seen.items() for call in own.calls)


@pytest.mark.parametrize(("source", "target"), [("S", "R"), ("P", "S"), ("P", "I"), ("S", "S")])
def test_what_is_sent_is_held_until_it_is_waited_for(source: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = parse_layout(LAYOUTS[source], MESH)
    after = parse_layout("[8, 6@tp]" if source == target else LAYOUTS[target], MESH)
    move = Move(before, after, MESH.sub_axes[1:])
    with recording(2, monkeypatch) as own:
        ranks = Communicator(Placement.whole(MESH))
        ranks.create_groups([move.axes])
        local, purpose = local_move(move, ranks.coordinates, backward=False), Purpose((), NOTHING, ranks, False)
        message = CollectiveMessage([local], ranks, purpose, [[0]])
        tensor = torch.zeros(6, prod(before.local_shape(ranks.coordinates)) // 6).t()  # it is copied to be sent
        buffer, flight = message.launch([tensor.reshape(before.local_shape(ranks.coordinates))], wait=False)
        del tensor
        gc.collect()
        assert len(own.pending) == 2
        assert all(reference() is not None for reference in own.pending), "freed while it is on its way"
        assert flight is not None
        message.finish(flight)
        del flight, buffer
        gc.collect()
        assert not any(reference() is not None for reference in own.pending), "held for longer than it is needed"


def _mean(y: torch.Tensor) -> torch.Tensor:
    return y.square().mean()
