"""Buckets: conversions that share their messages.

Gradients that are reduced over the same axes share a message, and so do parameters that are gathered over the same
axes, in buckets of a limited size. Other conversions of values that are available at the same time (for example keys
and values) share a message too. Each message has a fixed cost, so a few large ones are faster than many small ones.

Parameters are available from the start, so a bucket of them stands where the first of its members is needed. Backward
runs the program from its end: a bucket's gradients are complete when its first member has its gradient. Its messages
are in flight while the layers before it are computed (``programs.comm_schedule``). Buckets are therefore filled from
the end of the program. Forward waits for a gathered bucket as a whole: such a bucket ends with a block of the model, as
soon as it is large enough for a message.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from shardwise.graph.ir import Value, needed_for
from shardwise.graph.segments import block_of
from shardwise.layouts.conversions import Collective
from shardwise.programs.spmd_steps import Conversion, OpStep, chunk_of, collectives_of

# PyTorch's DistributedDataParallel fills buckets of 25 MiB, but the first one to be sent only up to 1 MiB, so that
# sending starts early (Li et al., PyTorch Distributed, VLDB 2020, section 3.2.3 and the default of bucket_cap_mb).
BUCKET_BYTES = 25 * 2**20
FIRST_BUCKET_BYTES = 2**20
AHEAD = 32  # a conversion may run up to this many steps earlier than needed, to share a message


@dataclass(frozen=True, slots=True)
class Bucket:
    """Conversions whose moves are of the same kinds over the same axes: each of their collectives is one message.

    ``of_parameters``: whether they convert parameters, so that messages may leave early and arrive late. A parameter
    larger than ``bucket_bytes`` gets its own bucket.
    """

    conversions: tuple[Conversion, ...]
    of_parameters: bool

    @property
    def operands(self) -> tuple[str, ...]:
        return (*(conversion.value for conversion in self.conversions), *self.conversions[0].ways)

    @property
    def results(self) -> tuple[str, ...]:
        return tuple(conversion.result for conversion in self.conversions)

    def collectives(self, *, backward: bool = False) -> tuple[Collective, ...]:
        """Return the collectives of the bucket in the order of execution."""
        return collectives_of(self.conversions, backward=backward)


def fill_buckets(
    steps: Sequence[OpStep | Conversion],
    sources: frozenset[str],
    value_of: Callable[[str], Value],
    receives_gradient: Callable[[Conversion], bool],
    bucket_bytes: int = BUCKET_BYTES,
    *,
    ends: Collection[str],
    by_block: bool = False,
) -> tuple[OpStep | Conversion | Bucket, ...]:
    """Return the steps with conversions put into buckets.

    ``sources``: the parameters; ``value_of``: looks up a value by its name: its dtypes decide which conversions may
    share a message and how many bytes they send; ``bucket_bytes``: the largest message (0: every conversion by itself);
    ``ends``: the results of a training step: conversions that only other outputs need get buckets of their own;
    ``by_block``: parameters share messages only with others of their block, so that both are freed together; parameters
    outside of blocks share with others that follow the same block.
    """
    if bucket_bytes == 0:
        return tuple(steps)
    trained, parts = needed_for(ends, steps)[1], _parts(steps)

    def message_kind(conversion: Conversion) -> object:
        """Return a key that is equal for conversions that may share their messages."""
        moves = tuple((move.cell, move.axes) for move in conversion.moves)
        forward, backward = (tuple(c.kind for c in side) for side in _both(conversion))
        gradient = (conversion.differentiable, receives_gradient(conversion)) if backward else ()
        value = value_of(conversion.origin)
        part = parts.get(conversion.result) if by_block and conversion.value in sources else None
        use = conversion.value in sources, conversion.result in trained
        chunk = chunk_of(conversion.origin)  # one chunk's message travels beside another's products
        scaled = bool(conversion.scale)
        return moves, forward, backward, value.dtype, scaled, value.reduced, gradient, use, part, chunk

    members: dict[int, list[int]] = {}  # position of a bucket's first conversion -> positions of all
    open_buckets: dict[object, tuple[list[int], int, bool]] = {}  # by kind; the flag: not the first bucket
    for position in reversed(range(len(steps))):
        step = steps[position]
        if not isinstance(step, Conversion) or step.value not in sources or cuts_windows([step]):
            continue
        if not step.collectives() and not (step.collectives(backward=True) and receives_gradient(step)):
            continue
        value = value_of(step.value)
        itemsize = step.itemsize if step.scale else value.dtype.itemsize
        sent = replace(step, itemsize=itemsize, grad_itemsize=value.grad_itemsize)
        size = max(c.num_bytes for side in _both(sent) for c in side)
        positions, filled, is_later = open_buckets.get(message_kind(step), ([], 0, by_block))
        before = steps[positions[-1]] if positions else None
        ends_block = (
            isinstance(before, Conversion) and step.collectives() and parts[step.result] != parts[before.result]
        )
        is_worth_it = filled >= FIRST_BUCKET_BYTES and (ends_block or not is_later)
        if positions and (is_worth_it or filled + size > bucket_bytes):
            members[positions[-1]] = positions[::-1]
            positions, filled, is_later = [], 0, True
        positions.append(position)
        open_buckets[message_kind(step)] = positions, filled + size, is_later
    for positions, _, _ in open_buckets.values():
        members[positions[-1]] = positions[::-1]
    of_parameters = frozenset(members)
    taken = {position for positions in members.values() for position in positions}
    made_at: defaultdict[str, int] = defaultdict(lambda: -1)  # sources are there from the start
    for position, step in enumerate(steps):
        made_at.update(dict.fromkeys(step.results, position))
    for position, step in enumerate(steps):
        if position in taken or not isinstance(step, Conversion) or not any(_both(step)) or cuts_windows([step]):
            continue
        if step.ways:  # rows that follow keys: the host reads how many of each there are
            continue
        positions = [position]
        for later, other in enumerate(steps[position + 1 : position + 1 + AHEAD], position + 1):
            if later in taken or not isinstance(other, Conversion) or other.value == step.value:
                continue
            if message_kind(other) == message_kind(step) and made_at[other.value] < position:
                positions.append(later)
        members[position] = positions
        taken.update(positions)
    return _in_buckets(steps, members, of_parameters)


def _in_buckets(
    steps: Sequence[OpStep | Conversion], members: Mapping[int, Sequence[int]], of_parameters: Collection[int]
) -> tuple[OpStep | Conversion | Bucket, ...]:
    """Return the steps with buckets. ``members``: position of a bucket's first conversion -> positions of all."""
    taken = {position for positions in members.values() for position in positions}
    result: list[OpStep | Conversion | Bucket] = []
    for position, step in enumerate(steps):
        if position in of_parameters or len(members.get(position, ())) > 1:
            together = [steps[i] for i in members[position]]
            conversions = tuple(conversion for conversion in together if isinstance(conversion, Conversion))
            result.append(Bucket(conversions, position in of_parameters))
        elif position not in taken or position in members:
            result.append(step)
    return tuple(result)


def _parts(steps: Sequence[OpStep | Conversion]) -> dict[str, tuple[str, str]]:
    """Map the result of a conversion to the part of the model that needs it first: (its block, "") or ("", the last
    block before it). An embedding before all blocks and a head after them are two parts."""
    parts: dict[str, tuple[str, str]] = {}
    ahead = ""
    for step in steps:
        if isinstance(step, OpStep):
            ahead = block_of(step.placed.op.name) or ahead
        else:
            block = block_of(step.op)
            parts[step.result] = (block, "" if block else ahead)
    return parts


def _both(conversion: Conversion) -> tuple[tuple[Collective, ...], tuple[Collective, ...]]:
    return conversion.collectives(), conversion.collectives(backward=True)


def cuts_windows(conversions: Iterable[Conversion]) -> bool:
    """Return whether any conversion moves windows (halos, rows split by hand). These are small, and need the rank's own
    tensor on arrival: they share no messages, and block."""
    return any(move.cut is not None or move.reverse is not None for c in conversions for move in c.moves)
