"""The losses of ranks that a plan survives, from the training state that other ranks hold as well.

This is exact: the layouts determine which ranks hold which elements of every parameter and buffer. An element is lost
with the last rank that holds it. Optimizer states are laid out as their parameters are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import prod

from shardwise.costs.optimizers import looks_at_matrices, looks_together, owners_of, state_bytes
from shardwise.errors import PlanError, listed
from shardwise.layouts.boxes import boxes
from shardwise.layouts.layout import Layout
from shardwise.layouts.placement import Placement
from shardwise.layouts.text import parse_dtype
from shardwise.plans.plan_data import PlanData
from shardwise.plans.price_scope import priced_cluster
from shardwise.plans.quantities import format_bytes, format_ranges, format_seconds

Ranks = frozenset[int]


@dataclass(frozen=True, slots=True)
class Loss:
    """The state that is lost with some ranks: bytes of parameters, buffers and optimizer states, and the names of the
    tensors. If nothing is lost, training goes on from the copies of other ranks; else from the last checkpoint."""

    ranks: tuple[int, ...]
    num_bytes: int
    names: tuple[str, ...]

    @property
    def costs_nothing(self) -> bool:
        return not self.names


@dataclass(frozen=True, slots=True)
class ExtraCopy:
    """A copy that ``keeper`` would hold of what only ``holders`` hold."""

    holders: tuple[int, ...]
    keeper: int
    num_bytes: int


@dataclass(frozen=True)
class Survival:
    """Losses that a plan survives. ``held``: per set of ranks, the bytes of every tensor that exactly these hold;
    ``machines``: the ranks that are lost together; ``made``: extra copies that are made; ``send_rate``: B/s from a
    machine to the next (0: the plan was not priced)."""

    held: Mapping[Ranks, Mapping[str, int]]
    machines: tuple[tuple[int, ...], ...]
    optimizer: str
    made: tuple[ExtraCopy, ...] = ()
    send_rate: float = 0.0

    def loss_of(self, ranks: Iterable[int]) -> Loss:
        """Return what is lost with some ranks. Raises PlanError for ranks that the plan does not have."""
        lost = frozenset(ranks)
        every = {rank for machine in self.machines for rank in machine}
        if lost - every:
            what = f"rank {min(lost - every)} is not one of the plan's {len(every)}"
            raise PlanError(what, fix=f"ask for ranks from 0 to {len(every) - 1}")
        gone = [tensors for holders, tensors in self.held.items() if holders <= lost]
        names = sorted({name for tensors in gone for name in tensors})
        return Loss(tuple(sorted(lost)), sum(sum(tensors.values()) for tensors in gone), tuple(names))

    @cached_property
    def losses(self) -> tuple[Loss, ...]:
        """Return the loss of every machine (of every rank, if ranks are lost alone)."""
        return tuple(self.loss_of(machine) for machine in self.machines)

    @property
    def tolerated(self) -> int:
        """Return how many machines (ranks), whichever they are, may be lost at once without losing any state."""
        return min((len(self._machines_of(holders)) for holders in self.held), default=len(self.machines)) - 1

    @cached_property
    def extra_copies(self) -> tuple[ExtraCopy, ...]:
        """Return the fewest bytes to hold twice so that any one machine (rank) may be lost without cost. Each copy goes
        to the rank of another machine that keeps least so far, of equal ones to the next. Empty if nothing is missing,
        or if there is only one machine."""
        if len(self.machines) == 1:
            return ()
        ranks = [rank for machine in self.machines for rank in machine]
        keeps = dict.fromkeys(ranks, 0)
        copies: list[ExtraCopy] = []
        for holders, tensors in sorted(self.held.items(), key=lambda item: (-sum(item[1].values()), min(item[0]))):
            machines = self._machines_of(holders)
            if len(machines) > 1:
                continue
            machine = self.machines[machines.pop()]
            first, num_bytes = min(holders), sum(tensors.values())
            others = [rank for rank in ranks if rank not in machine]
            keeper = min(others, key=lambda rank: (keeps[rank], (rank - first - len(machine)) % len(ranks)))
            keeps[keeper] += num_bytes
            copies.append(ExtraCopy(tuple(sorted(holders)), keeper, num_bytes))
        return tuple(copies)

    def with_copies(self) -> Survival:
        """Return the survival with these copies made (``sw.Recovery(peer_copy=...)``)."""
        holdings = {where: dict(tensors) for where, tensors in self.held.items()}
        for copy in self.extra_copies:
            where = frozenset(copy.holders)
            both, tensors = where | {copy.keeper}, holdings.pop(where)
            sizes = holdings.setdefault(both, {})
            sizes.update({name: sizes.get(name, 0) + size for name, size in tensors.items()})
        return replace(self, held=holdings, made=self.extra_copies)

    def _machines_of(self, holders: Ranks) -> set[int]:
        return {at for at, machine in enumerate(self.machines) if not holders.isdisjoint(machine)}

    def __str__(self) -> str:
        alone = all(len(machine) == 1 for machine in self.machines)
        unit = "rank" if alone else "machine"
        outcomes: dict[str, list[tuple[int, ...]]] = {}
        for machine, loss in zip(self.machines, self.losses, strict=True):
            outcomes.setdefault(_outcome(loss), []).append(machine)
        lines = [f"loss of one {unit} of {len(self.machines)}, with the states of {self.optimizer}:"]
        for outcome, machines in outcomes.items():
            lines.append(f"  {_spans(machines)}: {outcome}")
        if self.tolerated > 0:
            several = f"any {self.tolerated} {unit}s" if self.tolerated > 1 else f"any one {unit}"
            lines.append(f"nothing is lost with {several}; with {self.tolerated + 1} something may be")
        if copies := self.made or self.extra_copies:
            most: dict[int, int] = defaultdict(int)
            for copy in copies:
                most[copy.keeper] += copy.num_bytes
            total, largest = format_bytes(sum(most.values())), format_bytes(max(most.values()))
            shown = "; ".join(f"rank {c.keeper} of {_spans([c.holders])}" for c in copies[:4])
            more = f"; and {len(copies) - 4} more" if len(copies) > 4 else ""
            took = f", sent in {format_seconds(max(most.values()) / self.send_rate)}" if self.send_rate else ""
            what = "copies are made" if self.made else "cheapest extra copies"
            lines.append(f"{what} for any one {unit}: {total} in all, {largest} on a rank{took}")
            lines.append(f"  kept by {shown}{more}")
        elif self.tolerated == 0:
            lines.append("there is no other machine to keep a copy")
        return "\n".join(lines)


def survival(plan: PlanData, ranks_per_machine: int = 1, *, peer_copies: bool = False) -> Survival:
    """Return the losses that a plan survives. ``peer_copies``: with the extra copies made. Raises PlanError if machines
    do not divide the ranks."""
    ranks = sorted({rank for stage in plan.stages for rank in stage.placement.ranks})
    if not 1 <= ranks_per_machine <= len(ranks) or len(ranks) % ranks_per_machine:
        what = f"{len(ranks)} ranks are not machines of {ranks_per_machine}"
        raise PlanError(what, fix="give how many ranks run on each machine")
    is_whole, together = looks_at_matrices(plan.optimizer), looks_together(plan.optimizer)
    holders: dict[tuple[str, object], tuple[set[int], int]] = {}
    owned: list[tuple[Ranks, str, int]] = []  # states of split matrices, which one rank has, or each
    for stage in plan.stages:
        split = [p for p in stage.parameters if is_whole and stage.layouts[p.name].positions]
        sizes = [prod(stage.layouts[p.name].shape) * parse_dtype(p.dtype).itemsize for p in split]
        owners = owners_of(((size, None) for size in sizes), len(stage.placement.ranks))
        for p, size, owner in zip(split, sizes, owners, strict=True):
            having = frozenset(stage.placement.ranks if together else {stage.placement.ranks[owner]})
            owned.append((having, p.name, state_bytes(plan.optimizer, size, stage.layouts[p.name].shape)))
        for entry in (*stage.parameters, *stage.buffers):
            has_states = entry in stage.parameters and entry not in split
            itemsize = parse_dtype(entry.dtype).itemsize
            for key, where in _holders(stage.layouts[entry.name], stage.placement).items():
                size = prod(key[1]) * itemsize
                size += state_bytes(plan.optimizer, size, key[1]) if has_states else 0
                holders.setdefault((entry.name, key), (set(), size))[0].update(where)
    holdings: dict[Ranks, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for (name, _), (where, num_bytes) in holders.items():
        if num_bytes:
            holdings[frozenset(where)][name] += num_bytes
    for owner_alone, name, num_bytes in owned:
        if num_bytes:
            holdings[owner_alone][name] += num_bytes
    cuts = range(0, len(ranks) + 1, ranks_per_machine)
    machines = tuple(tuple(ranks[start:stop]) for start, stop in pairwise(cuts))
    outcome = Survival(
        {where: dict(sizes) for where, sizes in holdings.items()}, machines, plan.optimizer, send_rate=_send_rate(plan)
    )
    return outcome.with_copies() if peer_copies else outcome


def _send_rate(plan: PlanData) -> float:
    """Return the B/s at which a device sends to another machine while all do; 0 without a cluster that can be read."""
    cluster = priced_cluster(plan)
    return 0.0 if cluster is None else cluster.levels[-1].bandwidth / cluster.levels[-1].shared_by


def _holders(layout: Layout, place: Placement) -> dict[tuple[tuple[int, ...], tuple[int, ...]], set[int]]:
    """Return the ranks that hold each box (offsets, sizes) of a tensor."""
    holders: dict[tuple[tuple[int, ...], tuple[int, ...]], set[int]] = defaultdict(set)
    for device, rank in enumerate(place.ranks):
        for box in boxes(layout, place.mesh.coordinates(device)):
            holders[box.offsets, box.sizes].add(rank)
    return holders


def _outcome(loss: Loss) -> str:
    if loss.costs_nothing:
        return "nothing, others hold all of it"
    tensors = f"{len(loss.names)} tensor{'s' * (len(loss.names) > 1)} ({listed(loss.names)})"
    return f"{format_bytes(loss.num_bytes)} of {tensors} each, held nowhere else: back to the last checkpoint"


def _spans(groups: Sequence[Sequence[int]]) -> str:
    """Format ranks as ``ranks 0-3, 6``."""
    numbers = sorted(number for group in groups for number in group)
    return f"rank{'s' * (len(numbers) > 1)} {format_ranges(numbers).replace(',', ', ')}"
