"""What autograd keeps of an operator of a graph for its backward (``costs.footprints`` asks autograd)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count

from shardwise.costs.footprints import Call, Footprints, Form
from shardwise.graph.ir import Arg, Op, Ref, Value, map_refs


@dataclass(frozen=True, slots=True)
class Saved:
    """``operands``, ``results``: positions of those kept; ``other_bytes``: what is kept besides (the statistics of a
    norm, the probabilities of a cross entropy)."""

    operands: tuple[int, ...] = ()
    results: tuple[int, ...] = ()
    other_bytes: int = 0


def saved_by(op: Op, operands: Sequence[Value]) -> Saved:
    """What is kept of a call with operands of these shapes."""
    if not any(value.requires_grad for value in operands):
        return Saved()
    position = count()

    def numbered(arg: Arg) -> Arg:  # each occurrence by itself: it may be in a layout of its own
        return map_refs(arg, lambda _: Ref(str(next(position))))

    call = op.target, tuple(map(numbered, op.args)), tuple((key, numbered(arg)) for key, arg in op.kwargs)
    return _saved(call, tuple(Form.of(value) for value in operands))


@lru_cache(maxsize=4096)
def _saved(call: Call, operands: tuple[Form, ...]) -> Saved:
    found = Footprints().forward(call, operands)
    kept = {kind: tuple(i for own, i in found.saved if own == kind) for kind in ("operand", "result")}
    return Saved(kept["operand"], kept["result"], found.saved_bytes)
