"""Scaled dot-product attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from shardwise.graph.attention_sinks import ATTENTION_WITH_SINKS
from shardwise.graph.attention_within import ATTENTION_WITHIN, blocks_at
from shardwise.graph.custom_operators import global_indices
from shardwise.graph.ir import Graph, Op
from shardwise.graph.schema import arguments
from shardwise.rules.arguments import broadcast_shape, flat_pieces, operand_positions, replace_arguments, same_call
from shardwise.rules.attention_bands import EVERYTHING, Band, band_between, band_of
from shardwise.rules.attention_kernels import ATTENTION_ROWS, RING_GRADIENTS, RING_STEP
from shardwise.rules.binding import RuleTable, build, leading_names
from shardwise.rules.empty import zeros_if_empty
from shardwise.rules.lowerings import attention as lowerings
from shardwise.rules.ring import Ring, RingWithin, zigzag
from shardwise.rules.rule import Dims, FactorKind, LocalContext, LocalOpCall, Lowering, OpRule

aten = torch.ops.aten


def attention_rule(op: Op, graph: Graph) -> OpRule | None:
    """Return the rule, and its variants for rings."""
    rule = _BY_PARTS(op, graph)
    query, key = (graph.by_name[name].shape for name in op.operands[:2])
    if rule is None or query[-2] != key[-2] or op.target is ATTENTION_WITH_SINKS:
        return rule
    variants = ((name, variant(op, graph)) for name, variant in _BY_RINGS.items())
    return replace(rule, variants=tuple((name, variant) for name, variant in variants if variant is not None))


def _attention(op: Op, graph: Graph, *, ring: str = "") -> OpRule | None:
    """``b h t d, b h s d, b h s e -> b h t e``; grouped: the query heads are ``(g r)``, the key heads ``g``. A mask is
    ``t s``, behind dims that may be broadcast; the ends of intervals of keys are ``t``, which keys are seen ``1 s``;
    sinks are of the heads of the queries.

    Where queries and keys are equally many, there is the variant ``ring``: both are split equally, and the keys and
    values are passed around (``rules/ring.py``); and, of causal attention, the variant ``zigzag``, which does so with
    equal work for all.

    Batch, heads, value width and queries are parallel: a part of the queries of causal attention knows where it starts
    (``shardwise::attention_rows``). Keys and the width that is contracted are lowered. With dropout there is no rule:
    normalisation separates it.
    """
    args = arguments(op)
    if args.get("dropout_p", 0.0) != 0.0:
        return None
    query, key, value = (graph.by_name[name].shape for name in op.operands[:3])
    positions = operand_positions(op)
    rank = max(len(query), len(key), len(value))
    grouped = bool(args["enable_gqa"]) and len(query) >= 3 and query[-3] != key[-3]
    leading = leading_names(rank - 3) + (("h",) if rank >= 3 else ())
    heads = ("g", "r") if grouped else ("h",)
    batch = tuple(heads if name == "h" else (name,) for name in leading)
    of = partial(_leading, batch, graph.by_name[op.results[0]].shape[:-2])
    if grouped and value[-3] != key[-3]:
        return None
    if ring == "zigzag" and not (args.get("is_causal") and "attn_mask" not in positions):
        return None
    t, s = (ring, ring) if ring else ("t", "s")
    band = EVERYTHING
    operands = [
        (*of(query[:-2]), (t,), ("d",)),
        (*of(key[:-2], shared=True), (s,), ("d",)),
        (*of(value[:-2], shared=True), (s,), ("e",)),
    ]
    if op.target is ATTENTION_WITHIN:
        band = band_between(args["first"], args["end"], graph)
        operands += [((t,),) for bound in ("first", "end") if bound in positions]
    elif op.target is ATTENTION_WITH_SINKS:
        operands.append((batch[-1],))
    elif "attn_mask" in positions:
        band = band_of(op.operands[positions["attn_mask"][0]], graph)
    if (masked := positions.get("attn_mask") or positions.get("seen")) is not None:
        mask = graph.by_name[op.operands[masked[0]]].shape
        if len(mask) < 2:
            return None
        rows: tuple[str, ...] = (t,) if mask[-2] == query[-2] else ()
        columns: tuple[str, ...] = ("s",) if mask[-1] == key[-2] else ()
        operands.append((*of(mask[:-2]), rows, columns))
    result: Dims = (*batch, (t,), ("e",))
    kinds: dict[str, FactorKind] = (
        {ring: "lowered", "s": "whole", "d": "whole"} if ring else {"s": "lowered", "d": "lowered"}
    )
    sizes = {"g": key[-3], "r": query[-3] // key[-3]} if grouped else {}
    rule = build(
        op,
        graph,
        operands,
        [result],
        kinds=kinds,
        sizes=sizes,
        linear=((2,),),
        localize=_localize,
        lowering=_lowering(op, ring, band),
    )
    return replace(rule, kernel=_kernel)


def _leading(
    batch: Sequence[tuple[str, ...]], sizes: Sequence[int], shape: Sequence[int], *, shared: bool = False
) -> Dims:
    """Return the factors of the dims of a tensor before rows and columns: () where it is broadcast. ``batch``,
    ``sizes``: of the result; ``shared``: whether groups of heads have one of its heads."""
    named = zip(reversed(batch), reversed(sizes), reversed(shape), strict=False)
    dims = [("g",) if shared and f == ("g", "r") else f if size == own else () for f, size, own in named]
    return tuple(reversed(dims))


def _lowering(op: Op, ring: str, band: Band) -> Lowering:
    if op.target is ATTENTION_WITH_SINKS:
        return lowerings.attention_with_sinks
    is_within = op.target is ATTENTION_WITHIN
    if not ring:
        return lowerings.attention_within if is_within else lowerings.scaled_dot_product_attention
    return zigzag if ring == "zigzag" else RingWithin(band) if is_within else Ring(band)


def _localize(op: Op, context: LocalContext) -> LocalOpCall:
    """Kernels of attention count rows from the first, and blocks are of all rows."""
    args = arguments(op)
    if not context.is_split("t"):
        return same_call(op)
    pieces = flat_pieces(context.pieces["t"])
    if op.target is ATTENTION_WITH_SINKS:
        sizes, offsets, lengths = pieces
        return replace_arguments(op, sizes=sizes, offsets=offsets, lengths=lengths)
    if op.target is ATTENTION_WITHIN:
        index = global_indices(*pieces, device=torch.device("cpu")).flatten()
        rows, firsts, ends = blocks_at(index, args["rows"], args["firsts"], args["ends"])
        return replace_arguments(op, rows=rows, firsts=firsts, ends=ends)
    return _rows(same_call(op), *pieces) if args["is_causal"] else same_call(op)


def _kernel(call: LocalOpCall) -> LocalOpCall:
    """Not all kernels of attention know groups of heads."""
    is_plain = call.target is aten.scaled_dot_product_attention.default
    return _rows(call, (), (), ()) if is_plain and arguments(call)["enable_gqa"] else call


def _rows(call: LocalOpCall, *rows: tuple[int, ...]) -> LocalOpCall:
    """Attention of the rows of pieces; of all rows without any."""
    args = arguments(call)
    names = ("query", "key", "value", "attn_mask", "is_causal", "enable_gqa", "scale")
    return LocalOpCall(ATTENTION_ROWS, (*(args[name] for name in names), *rows))


def _ring_step(op: Op, graph: Graph) -> OpRule:
    """``b h n t d, b h n s d, b h n s e -> b h n t e, b h n t``, of n blocks; grouped as attention is. A mask is
    ``h n t o s``, of which a block of queries sees the columns of one origin o; the first and last keys are ``n t``."""
    args = arguments(op)
    shapes = {name: graph.by_name[op.operands[i]].shape for name, (i, *_) in operand_positions(op).items()}
    lead = list(broadcast_shape(*(shapes[name][:-3] for name in "qkv")))
    grouped = len(shapes["q"]) > 3 < len(shapes["k"]) and shapes["q"][-4] > shapes["k"][-4] > 1
    names: list[tuple[str, ...]] = [(name,) for name in leading_names(len(lead))]
    if grouped:
        names[-1] = ("g", "r")
    leading = partial(_leading, names, lead)
    out: Dims = (*names, ("n",), ("t",), ("e",))
    log_sum: Dims = (*names, ("n",), ("t",))
    of_operand: dict[str, Dims] = {
        "out": out,
        "log_sum": log_sum,
        "q": (*leading(shapes["q"][:-3]), ("n",), ("t",), ("d",)),
        "k": (*leading(shapes["k"][:-3], shared=True), ("n",), ("s",), ("d",)),
        "v": (*leading(shapes["v"][:-3], shared=True), ("n",), ("s",), ("e",)),
        **dict.fromkeys(("first", "end"), (("n",), ("t",))),
    }
    if "mask" in shapes:
        mask, sizes = shapes["mask"], (*shapes["q"][-3:-1], args["number"], shapes["k"][-2])
        inner = [(name,) if own == size > 1 else () for name, own, size in zip("ntos", mask[-4:], sizes, strict=True)]
        of_operand["mask"] = (*leading(mask[:-4]), *inner)
    kinds: dict[str, FactorKind] = dict.fromkeys("tsdeo", "whole")
    return build(
        op,
        graph,
        [of_operand[name] for name in shapes],
        [out, log_sum] if op.target is RING_STEP else [out],
        kinds=kinds,
        sizes={"g": shapes["k"][-4], "r": shapes["q"][-4] // shapes["k"][-4]} if grouped else {},
        localize=_of_blocks,
    )


def _of_blocks(op: Op, context: LocalContext) -> LocalOpCall:
    """Which keys a block of queries sees depends on which block it is."""
    index = global_indices(*flat_pieces(context.pieces["n"]), device=torch.device("cpu")).flatten()
    return replace_arguments(op, blocks=tuple(index.tolist()))


_BY_PARTS = zeros_if_empty(_attention)
_BY_RINGS = {name: zeros_if_empty(partial(_attention, ring=name)) for name in ("ring", "zigzag")}
ATTENTION: RuleTable = {
    **dict.fromkeys(
        (aten.scaled_dot_product_attention.default, ATTENTION_WITHIN, ATTENTION_WITH_SINKS), attention_rule
    ),
    **dict.fromkeys((RING_STEP, RING_GRADIENTS), zeros_if_empty(_ring_step)),
}
