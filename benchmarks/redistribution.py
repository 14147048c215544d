"""What ``redistribute`` sends beside DTensor's, on every pair of placements that DTensor can express.

DTensor really runs, on a fake process group and meta tensors: its collectives are seen by a dispatch mode and priced by
the same formulas as ours (what the busiest rank sends: ring and pairwise algorithms). Sizes divide evenly, so that one
rank speaks for all. DTensor is given its best case: an all-to-all where GPUs have one (on CPUs it gathers instead), and
the flattened mesh that lets it join two all-gathers into one. Both of its planners are listed, the greedy one, which is
its default, and the one that searches for the least cost.

How placements map to states:

=====================================  =====  ========================================================================
DTensor                                ours
=====================================  =====  ========================================================================
Shard(d)                               S(d)   the gradient is Shard(d)
Partial                                P      the gradient is Replicate: "we keep the grad as replicate"
Replicate, source                      I      the gradient that DTensor's backward hands back is Replicate
Replicate, target, gradient Replicate  I      the consumer did the same work everywhere
Replicate, target, gradient Partial    R      the consumer did different work, as a matmul with sharded operands does
=====================================  =====  ========================================================================

DTensor's users may not redistribute to Partial from anything else, and its orders of shards are the mesh's. Left out
is Partial to Replicate with a Partial gradient: DTensor then hands the gradient on unreduced, to be reduced elsewhere,
and we have no such state (ours is P to R, an all-reduce in either direction).

Ours is listed twice. *paired*: what ``redistribute`` returns and programs execute, moves whose backward is the mirror
of their forward. *apart*: the cheapest list of value conversions for each direction on its own, the backward one from
the dual of the target to the dual of the source. DTensor plans both directions apart. That saves it a message where two
axes leave a dim together, one to I and one to R (one all-gather in forward, though only one axis is reduced in
backward); and with its second planner bytes, where an axis holds the same gradient everywhere while another one reduces
it (slice along the first, reduce, gather). Such pairs are listed below the table.

Run ``make bench-redistribution``, or ``python benchmarks/redistribution.py [--json rows.json]``.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import product
from math import inf
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import DeviceMesh, _mesh_resources, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._redistribute import _gen_transform_infos, use_min_cost_redistribution_plan
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.layouts.conversions import Move, collective_of
from shardwise.layouts.layout import Layout
from shardwise.layouts.mesh import Mesh
from shardwise.layouts.redistribute import redistribute

MESHES = (Mesh(x=8), Mesh(a=2, b=4), Mesh(a=2, b=2))
SHAPES = ((4096, 4096), (512, 512, 512))  # large: DTensor's second planner weighs latencies as well
PLANNERS = ("greedy", "least cost")
OURS = ("paired", "apart")


@dataclass(frozen=True)
class Sent:
    """What the busiest rank sends in forward and backward."""

    elements: float = 0
    messages: int = 0

    def __add__(self, other: Sent) -> Sent:
        return Sent(self.elements + other.elements, self.messages + other.messages)


@dataclass(frozen=True)
class Pair:
    """Per mesh axis: the placement before, that after, and whether the gradient of a Replicate is Partial."""

    source: tuple[Placement, ...]
    target: tuple[Placement, ...]
    partial_gradient: tuple[bool, ...]

    def __str__(self) -> str:
        def name(placement: Placement, partial: bool = False) -> str:
            if isinstance(placement, Shard):
                return f"Shard({placement.dim})"
            return type(placement).__name__ + (" with Partial gradient" if partial else "")

        after = [name(*both) for both in zip(self.target, self.partial_gradient, strict=True)]
        return f"({', '.join(map(name, self.source))}) -> ({', '.join(after)})"


@dataclass
class Row:
    """One mesh and one number of dims against one of DTensor's planners. Factors: theirs over ours."""

    mesh: str
    shape: tuple[int, ...]
    lists: str
    planner: str
    pairs: int = 0
    equal: int = 0
    fewer_bytes: list[float] = field(default_factory=list)
    fewer_messages: list[float] = field(default_factory=list)  # at equal bytes
    more_bytes: list[str] = field(default_factory=list)
    more_messages: list[str] = field(default_factory=list)  # at equal bytes
    ours: Sent = Sent()
    theirs: Sent = Sent()

    def add(self, pair: Pair, ours: Sent, theirs: Sent) -> None:
        self.pairs += 1
        self.ours, self.theirs = self.ours + ours, self.theirs + theirs
        if ours == theirs:
            self.equal += 1
        elif ours.elements > theirs.elements:
            factor = ours.elements / theirs.elements if theirs.elements else inf
            self.more_bytes.append(f"{pair}: {factor:.3f} x, {ours.messages} messages, DTensor {theirs.messages}")
        elif ours.elements == theirs.elements and ours.messages > theirs.messages:
            self.more_messages.append(f"{pair}: {ours.messages} messages, DTensor {theirs.messages}")
        elif ours.elements < theirs.elements:
            self.fewer_bytes.append(theirs.elements / ours.elements if ours.elements else inf)
        else:
            self.fewer_messages.append(theirs.messages / ours.messages if ours.messages else inf)


def pairs_of(mesh: Mesh, num_dims: int) -> Iterator[Pair]:
    """All that DTensor can express."""
    single: list[tuple[Placement, Placement, bool]] = []
    before: list[Placement] = [*(Shard(d) for d in range(num_dims)), Replicate(), Partial()]
    for source, target in product(before, before):
        if isinstance(target, Partial) and source != target:
            continue
        may_be_partial = target == Replicate() and not isinstance(source, Partial)
        single += [(source, target, partial) for partial in ((False, True) if may_be_partial else (False,))]
    for along in product(single, repeat=len(mesh.axes)):
        source, target, partial = zip(*along, strict=True)
        yield Pair(source, target, partial)


def layout_of(
    mesh: Mesh, shape: tuple[int, ...], placements: tuple[Placement, ...], partial: tuple[bool, ...]
) -> Layout:
    """Our layout of DTensor's placements; ``partial``: where the gradient of a Replicate is Partial."""
    layout = Layout.whole(mesh, shape)
    for (name, _), placement, reduced in zip(mesh.axes, placements, partial, strict=True):
        where: str | tuple[int, int] = "P" if isinstance(placement, Partial) else "R" if reduced else "I"
        if isinstance(placement, Shard):
            where = (placement.dim, 0)
        layout = layout.moved(dict.fromkeys(mesh.expand(name), where))
    return layout


def sent_by_ours(source: Layout, target: Layout, lists: str) -> Sent:
    if lists == "paired":
        return _sent(redistribute(source, target), (False, True))
    there = redistribute(source, target, differentiable=False)
    back = redistribute(target.dual, source.dual, differentiable=False)
    return _sent(there, (False,)) + _sent(back, (False,))


def _sent(moves: tuple[Move, ...], directions: tuple[bool, ...]) -> Sent:
    total = Sent()
    for move, backward in product(moves, directions):
        total += Sent(move.num_sent(backward), collective_of(move, 1, backward=backward) is not None)
    return total


NO_COLLECTIVE = ("wait_tensor", "_wrap_tensor_autograd")


class Collectives(TorchDispatchMode):
    """Prices the functional collectives that run under it."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = Sent()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if func.namespace in ("_c10d_functional", "c10d_functional", "_dtensor", "c10d") and name not in NO_COLLECTIVE:
            self.sent += Sent(self._elements(name, args), 1)
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _elements(name: str, args: Any) -> float:
        size, group = args[0].numel(), args[-1]
        n = dist.get_world_size(
            dist.distributed_c10d._resolve_process_group(group) if isinstance(group, str) else group
        )
        if name == "all_gather_into_tensor":
            return float((n - 1) * size)
        if name == "all_reduce":
            return 2 * (n - 1) * size / n
        if name in ("reduce_scatter_tensor", "all_to_all_single", "shard_dim_alltoall"):
            return (n - 1) * size / n
        raise NotImplementedError(f"no price for {name}")


def sent_by_dtensor(device_mesh: DeviceMesh, shape: tuple[int, ...], pair: Pair) -> Sent:
    """Run DTensor's redistribution and its backward."""

    def on_rank(placements: tuple[Placement, ...], requires_grad: bool) -> DTensor:
        local = list(shape)
        for axis, placement in enumerate(placements):
            if isinstance(placement, Shard):
                local[placement.dim] //= device_mesh.size(axis)
        tensor = torch.empty(local, device="meta", requires_grad=requires_grad)
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            tensor, device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
        )

    source = on_rank(pair.source, True)
    gradient = tuple(
        Partial() if partial else Replicate() if isinstance(placement, Partial) else placement
        for placement, partial in zip(pair.target, pair.partial_gradient, strict=True)
    )
    with Collectives() as seen:
        result = source.redistribute(device_mesh, pair.target)
        assert result.placements == pair.target, f"{pair}: {result.placements}"
        (found,) = torch.autograd.grad(result, source, on_rank(gradient, False))
    want = tuple(Replicate() if isinstance(placement, Partial) else placement for placement in pair.source)
    assert found.placements == want, f"{pair}: the gradient is {found.placements}, not {want}"
    return seen.sent


@contextmanager
def device_mesh_of(mesh: Mesh) -> Iterator[DeviceMesh]:
    """DTensor's mesh on a fake process group, with the flattened one that it may use."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=mesh.num_devices)
    try:
        names, sizes = zip(*mesh.axes, strict=True)
        device_mesh = init_device_mesh("meta", sizes, mesh_dim_names=names)
        if len(sizes) > 1:
            device_mesh._flatten("all")
        # The planner that compares costs asks how many devices a host has: all on one.
        with patch.object(_mesh_resources, "num_devices_per_host", lambda device_type: mesh.num_devices):
            yield device_mesh
    finally:
        dist.destroy_process_group()


def compare(mesh: Mesh, shape: tuple[int, ...], planner: str, every: int = 1) -> list[Row]:
    """All pairs of a mesh, or one in every so many, against ours paired and apart."""
    rows = [Row(str(mesh), shape, lists, planner) for lists in OURS]
    with device_mesh_of(mesh) as device_mesh, use_min_cost_redistribution_plan(planner == "least cost"):
        _gen_transform_infos.cache_clear()
        nothing = (False,) * len(mesh.axes)
        for pair in list(pairs_of(mesh, len(shape)))[::every]:
            source = layout_of(mesh, shape, pair.source, nothing)
            target = layout_of(mesh, shape, pair.target, pair.partial_gradient)
            theirs = sent_by_dtensor(device_mesh, shape, pair)
            for row in rows:
                row.add(pair, sent_by_ours(source, target, row.lists), theirs)
    return rows


def table_of(rows: list[Row]) -> Table:
    table = Table(title="What the busiest rank sends, forward and backward: ours against DTensor's redistribute")
    for column in ("mesh", "dims", "ours", "planner", "pairs", "equal", "fewer bytes", "median, max", "all bytes"):
        table.add_column(column, justify="left" if column in ("mesh", "ours", "planner") else "right")
    for column in ("fewer messages", "median, max", "all messages", "more bytes", "more messages"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row.mesh,
            str(len(row.shape)),
            row.lists,
            row.planner,
            str(row.pairs),
            str(row.equal),
            str(len(row.fewer_bytes)),
            _factors(row.fewer_bytes),
            f"{row.theirs.elements / row.ours.elements:.2f} x",
            str(len(row.fewer_messages)),
            _factors(row.fewer_messages),
            f"{row.theirs.messages / row.ours.messages:.2f} x",
            str(len(row.more_bytes)),
            str(len(row.more_messages)),
        )
    return table


def _factors(factors: list[float]) -> str:
    return f"{median(factors):.2f}, {max(factors):.2f}" if factors else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="keep the rows here")
    parser.add_argument("--every", type=int, default=1, help="only one pair in so many")
    options = parser.parse_args()
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    rows = [
        row
        for mesh in MESHES
        for shape in SHAPES
        for planner in PLANNERS
        for row in compare(mesh, shape, planner, options.every)
    ]
    console = Console(width=185)
    console.print(table_of(rows))
    console.print(
        "Factors are DTensor's over ours, per pair; 'all' sums over pairs. Fewer and more messages: at equal bytes. "
        "Tensors of " + ", ".join("x".join(map(str, shape)) for shape in SHAPES) + "."
    )
    for row in rows:
        for what, pairs in (("more messages", row.more_messages), ("more bytes", row.more_bytes)):
            for told in pairs:
                console.print(f"{what}, {row.lists} against {row.planner}, {row.mesh}: {told}", soft_wrap=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    if any(row.more_bytes for row in rows if row.lists == "apart" or row.planner == "greedy"):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
