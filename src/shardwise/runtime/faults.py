"""Explain why a conversion of a program failed.

Nothing here runs until a collective or an allocation has failed. The rank whose collective failed then writes to the
key-value store where it waits, and reads where the others wait. Members of its group that wait nowhere, or elsewhere,
did not arrive. Chains of ranks that wait for each other are followed to the end.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from math import prod
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]  # documented, but not re-exported

from shardwise.errors import CollectiveError, OutOfDeviceMemoryError, ShardwiseError, problem
from shardwise.graph.ir import Graph
from shardwise.layouts.layout import Layout
from shardwise.layouts.text import format_layout
from shardwise.plans.printing import format_bytes
from shardwise.programs.spmd_steps import Conversion
from shardwise.runtime.recorded import last_message

if TYPE_CHECKING:
    from shardwise.runtime.communicator import CollectiveMessage, Communicator

_OTHERS_SECONDS = 2.0  # how long a failing rank waits for the positions of others
_POLL_SECONDS = 0.05
_NUM_NAMED = 8  # ranks or tensors that a message lists

_NETWORK_ERROR_TEXTS = ("third_party/gloo", "nccl", "timed out", "timeout", "closed by peer", "reset by peer")
_MEMORY_ERROR_TEXTS = ("can't allocate memory", "not enough memory", "out of memory", "bad_alloc")


@dataclass(frozen=True, eq=False)
class Purpose:
    """The purpose of a message or local step: one direction of one or more conversions of a program."""

    conversions: tuple[Conversion, ...]
    graph: Graph
    ranks: Communicator
    backward: bool

    @property
    def largest(self) -> Conversion:
        """Return the conversion of the largest tensor."""
        return max(self.conversions, key=lambda conversion: prod(conversion.target.shape) * conversion.itemsize)

    def operator(self, conversion: Conversion) -> tuple[str, str]:
        """Return (name, source line) of the operator that needs the converted value."""
        op = self.graph.op_by_name.get(conversion.op)
        if op is None:
            op = self.graph.producer.get(conversion.origin)  # an output of the model: the operator that computed it
        return (op.name, op.source) if op else (conversion.op, "")

    def layouts(self, conversion: Conversion) -> tuple[Layout, Layout]:
        """Return the layouts before and after."""
        if self.backward:
            return conversion.target.dual, conversion.source.dual
        return conversion.source, conversion.target

    def named(self, conversion: Conversion) -> str:
        """Name the converted value: ``blocks.0.mlp.up.weight``, or ``layer_norm (of norm/layer_norm, gpt.py:85)``."""
        source = self.graph.source_of.get(conversion.origin)
        producer = self.graph.producer.get(conversion.origin)
        maker = f" (of {producer.name}, {producer.source})" if producer else ""
        return "gradient of " * self.backward + (source.names[0] if source else conversion.origin) + maker

    def describe(self, conversion: Conversion) -> str:
        """Describe value and layouts: ``norm.weight: f32[24] -> f32[24] replicated(dp) and 3 more tensors``."""
        value = self.graph.by_name[conversion.origin]
        dtype = (value.reduced if self.backward else None) or value.dtype
        before, after = (format_layout(layout, dtype) for layout in self.layouts(conversion))
        more = len(self.conversions) - 1
        together = f" and {more} more tensor{'s' * (more > 1)}" if more else ""
        return f"{self.named(conversion)}: {before} -> {after}{together}"

    def num_bytes(self, kind: str, axes: tuple[str, ...]) -> int:
        """Return the bytes of the whole message of a collective."""
        collectives = (c for conversion in self.conversions for c in conversion.collectives(backward=self.backward))
        return sum(c.num_bytes for c in collectives if (c.kind, c.axes) == (kind, axes))


@dataclass(frozen=True, slots=True)
class BlockedRank:
    """The position at which a rank's program stopped. ``collective``: its number since the start of the program;
    ``members``: the ranks that take part in it."""

    program: str
    collective: int
    what: str
    members: tuple[int, ...]

    def __str__(self) -> str:
        return f"collective {self.collective} of {self.program}: {self.what}"


# ---------------------------------------------------------------------------------------------------------- collectives


def collective_failed(error: Exception, message: CollectiveMessage) -> CollectiveError | None:
    """Explain ``error``, which ended the collective of ``message``; None if it is not a network error."""
    purpose = message.purpose
    first = purpose.conversions[0]
    name, line = purpose.operator(first)
    size = format_bytes(purpose.num_bytes(message.kind, message.axes))
    direction = "backward" if purpose.backward else "forward"
    members = tuple(sorted(message.ranks.place.group(message.axes, message.ranks.rank)))
    waiting = BlockedRank(message.ranks.name, message.number, collective_of(message), members)
    what = f"{message.kind} over {message.ranks.mesh.format_axes(message.axes)}"
    facts = [("value", purpose.describe(first)), ("pass", f"{direction}, call {message.ranks.calls}")]
    return exchange_failed(error, message.ranks.rank, waiting, f"{what} ({size})", name, line, facts)


def collective_of(message: CollectiveMessage) -> str:
    """Describe a collective: ``all_reduce over tp for /add (gpt.py:82), forward``."""
    what = f"{message.kind} over {message.ranks.mesh.format_axes(message.axes)}"
    if not message.purpose.conversions:
        return what
    name, line = message.purpose.operator(message.purpose.conversions[0])
    direction = "backward" if message.purpose.backward else "forward"
    return f"{what} for {name} ({line}), {direction}"


def exchange_failed(
    error: Exception, rank: int, waiting: BlockedRank, what: str, op: str, source: str, facts: list[tuple[str, str]]
) -> CollectiveError | None:
    """Explain ``error``, which ended an exchange ``what`` for which ``rank`` waited; None if it is no network error."""
    text = str(error)
    is_network = isinstance(error, dist.DistError) or any(part in text.lower() for part in _NETWORK_ERROR_TEXTS)
    if isinstance(error, ShardwiseError) or is_out_of_memory(error) or not is_network:
        return None
    late = "timed out" in text.lower() or "timeout" in text.lower()
    missing, known_of_others = _who_is_missing(waiting, rank)
    who, fix = (
        "",
        "call the module equally often on all ranks, with the same inputs and settings; or check the network",
    )
    if missing:
        names = _name(missing)
        who, fix = f"; {names} did not arrive", f"read the first error of {names}, or find what ended it"
        if late:
            fix = f"check what {names} did instead (shardwise run prints where), or raise the timeout of init_ranks"
    details = [*facts, *(("ranks", fact) for fact in known_of_others)]
    if recorded := last_message():
        details.append(("recorded", f"{recorded} (torch's flight recorder, rank {rank})"))
    details.append(("error", text.split("\n", 1)[0]))
    what = f"{what} {'timed out' if late else 'failed, a connection was lost'}{who}"
    return CollectiveError(problem(what, op=op, source=source, fix=fix, facts=details), missing)


def _who_is_missing(here_waits: BlockedRank, rank: int) -> tuple[list[int], list[str]]:
    """Return the ranks that wait in no collective though others wait for them, and facts about the others as text."""
    others = [member for member in here_waits.members if member != rank]
    try:
        waiting = _ask(here_waits, rank)
    except Exception as error:  # the store's own rank may be gone
        return [], [
            f"rank {rank} waits here for {_name(others)}; the store cannot be reached ({error})".split("\n", 1)[0]
        ]
    missing: set[int] = set()
    elsewhere: dict[int, BlockedRank] = {}
    visited, waited_for = {rank}, others
    while waited_for:
        member = waited_for.pop()
        if member in visited:
            continue
        visited.add(member)
        if member not in waiting:
            missing.add(member)
            continue
        if (waiting[member].what, waiting[member].collective) != (here_waits.what, here_waits.collective):
            elsewhere[member] = waiting[member]
        waited_for += waiting[member].members
    here = sorted(visited - missing - elsewhere.keys())
    facts = [f"{_name(here)} wait{'s' * (len(here) == 1)} here"]
    if not missing and not elsewhere:
        facts = ["all of them arrived"]
    facts += [f"rank {member} waits in {elsewhere[member]}" for member in sorted(elsewhere)[:_NUM_NAMED]]
    return sorted(missing), facts


def _ask(waiting: BlockedRank, rank: int) -> dict[int, BlockedRank]:
    """Publish where this rank waits, and read where its group's members, and the ranks they wait for, do.

    Ends when all have answered, or after ``_OTHERS_SECONDS`` without an answer.
    """
    store = dist.distributed_c10d._get_default_store()
    before: timedelta = getattr(store, "timeout")  # noqa: B009 - torch's types do not list it
    store.set_timeout(timedelta(seconds=_OTHERS_SECONDS))
    try:
        store.set(_key(rank), json.dumps(asdict(waiting)))
        waiting_ranks = {rank: waiting}
        until = time.monotonic() + _OTHERS_SECONDS
        while True:
            silent = {member for waiting in waiting_ranks.values() for member in waiting.members} - waiting_ranks.keys()
            answers = {member: answer for member in silent if (answer := _answer(store, member)) is not None}
            waiting_ranks |= answers
            if not silent or (not answers and time.monotonic() > until):
                return waiting_ranks
            if not answers:
                time.sleep(_POLL_SECONDS)
    finally:
        with suppress(Exception):
            store.set_timeout(before)


def _answer(store: Store, rank: int) -> BlockedRank | None:
    if not store.check([_key(rank)]):
        return None
    content = json.loads(store.get(_key(rank)))
    return BlockedRank(**{**content, "members": tuple(content["members"])})


def _key(rank: int) -> str:
    return f"shardwise/waiting-{rank}"


def _name(ranks: Sequence[int]) -> str:
    """Format ranks: ``rank 3`` or ``ranks 0, 1, 4``; long lists are cut."""
    listed = ", ".join(map(str, ranks[:_NUM_NAMED])) + ", ..." * (len(ranks) > _NUM_NAMED)
    return f"rank{'s' * (len(ranks) > 1)} {listed}"


# --------------------------------------------------------------------------------------------------------------- memory


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed, on the device or on the host.

    >>> is_out_of_memory(RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"))
    True
    """
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _MEMORY_ERROR_TEXTS)


def conversion_failed(error: Exception, purpose: Purpose) -> OutOfDeviceMemoryError | None:
    """Explain ``error``, which ended a conversion; None if it is not an out-of-memory error."""
    if isinstance(error, ShardwiseError) or not is_out_of_memory(error):
        return None
    largest = purpose.largest
    itemsize = largest.grad_itemsize if purpose.backward else largest.itemsize
    before, after = (
        prod(layout.local_shape(purpose.ranks.coordinates)) * itemsize for layout in purpose.layouts(largest)
    )
    whole = prod(largest.target.shape) * itemsize
    name, line = purpose.operator(largest)
    what = f"out of memory on rank {purpose.ranks.rank}, converting {purpose.named(largest)} to another layout"
    details = [
        ("value", purpose.describe(largest)),
        (
            "bytes",
            f"{format_bytes(after)} here afterwards, {format_bytes(before)} before; the whole tensor has "
            f"{format_bytes(whole)}; plus a buffer of up to {format_bytes(max(before, after))}",
        ),
        ("error", str(error).split("\n", 1)[0]),
    ]
    fix = (
        "keep it sharded there (strategies= of sw.plan, sw.shard, sw.constrain), or use a smaller batch or more devices"
    )
    return OutOfDeviceMemoryError(problem(what, op=name, source=line, fix=fix, facts=details))


# ---------------------------------------------------------------------------------------------------- second gradients


def refuse_create_graph() -> None:
    """Raise ShardwiseError if autograd records the backward; called in the backward of every communicating node.
    Collectives in backward have no gradients, so second derivatives would be incomplete."""
    if torch.is_grad_enabled():
        raise ShardwiseError(
            problem(
                "gradients of gradients cannot flow through the collectives of a plan",
                fix="call backward or torch.autograd.grad without create_graph=True",
            )
        )
