"""``shardwise::attention_with_sinks``: attention whose softmax counts one more score per head, without all scores.

    weights = softmax([scores, sink])[:-1],  result = weights values

A *sink* is a learned score that takes weight from the keys and has no value (GPT-OSS; Xiao et al., Efficient streaming
language models with attention sinks, 2023). Models write it as above, with scores of all pairs of positions. But it is
one more tile of keys, whose values are zero and whose log-sum-exp is the sink (``graph/flash.py``): fused kernels
compute the rest. A known mask that shows keys at some distances from a query is a *band* here, so that keys outside of
a window are not computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from shardwise.graph.attention_masks import grouped, mask_intervals
from shardwise.graph.custom_operators import global_indices
from shardwise.graph.emitter import Emitter, rewrite_graph
from shardwise.graph.flash import (
    Columns,
    RowTiles,
    Tiles,
    Visibility,
    attend_by_tiles,
    blocks_of,
    causal_rows,
    row_ranges,
    runs_of,
)
from shardwise.graph.ir import Arg, Graph, Op
from shardwise.graph.operator_library import composite
from shardwise.graph.positions import evaluate_known_values
from shardwise.graph.predicates import Intervals
from shardwise.graph.schema import arguments

aten = torch.ops.aten

# ------------------------------------------------------------------------------------------------------- the operator


def _attention_with_sinks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor,
    attn_mask: Tensor | None,
    band: Sequence[int],
    enable_gqa: bool,
    scale: float,
    *atoms: Sequence[int],
) -> Tensor:
    """Return attended values [batch, heads, rows, width]. ``sinks``: [heads]; ``band``: the least and the largest
    distance key - query that is seen, or nothing; ``atoms``: which rows of how many these are."""
    mask = None if attn_mask is None else attn_mask.reshape(1, *(1,) * (4 - attn_mask.dim()), *attn_mask.shape)
    rows, bounds = _rows(query, key.shape[-2], band, atoms)
    tiles, seen = Tiles(blocks_of([rows], [0]), scale), Visibility(mask, *bounds)
    return attend_by_tiles(tiles, query, key, value, seen, sinks)


def _rows(
    query: Tensor, num_keys: int, band: Sequence[int], atoms: Sequence[Sequence[int]]
) -> tuple[tuple[RowTiles, ...], tuple[Tensor | None, Tensor | None]]:
    """Return the tiles of the rows, and the bounds of the keys that they see where tiles show more."""
    count = query.shape[-2]
    runs = runs_of(*atoms) if band else None
    if not band:
        return (RowTiles(0, count, (Columns(0, num_keys),)),), (None, None)
    if runs is not None and is_causal(band, num_keys):
        return tuple(causal_rows(runs, num_keys)), (None, None)
    sizes, offsets, lengths = atoms
    index, tiles, begin = global_indices(sizes, offsets, lengths, device=query.device).flatten(), [], 0
    for first, length in [(0, 0)] if runs is None else runs:
        for start, end in row_ranges(length, band[1] - band[0] + 1):
            least, behind = max(first + start + band[0], 0), min(first + end + band[1], num_keys)
            columns = (Columns(least, behind),) if least < behind else ()
            tiles.append(RowTiles(begin + start, begin + end, columns))
        begin += length
    if runs is None:  # very many: all keys, under a mask
        tiles = [RowTiles(0, count, (Columns(0, num_keys),))]
    return tuple(tiles), (index[None] + band[0], index[None] + band[1] + 1)


def is_causal(band: Sequence[int], num_keys: int) -> bool:
    """Return whether queries see all keys up to their own place."""
    return len(band) == 2 and band[1] == 0 and band[0] <= 1 - num_keys


def num_seen(band: Sequence[int], rows: int, num_keys: int) -> int:
    """Return the pairs of a query and a key that are computed; of a part of the rows, the most that one can have."""
    if not band or (is_causal(band, num_keys) and rows > num_keys):
        return rows * num_keys
    if is_causal(band, num_keys):
        return rows * num_keys - rows * rows // 2
    return rows * min(band[1] - band[0] + 1, num_keys)


ATTENTION_WITH_SINKS: Final = composite(_attention_with_sinks)

# --------------------------------------------------------------------------------------------- where models compute it


class _Sunk(NamedTuple):
    """Attention with sinks as a model writes it: names of values; ``sinks``: one score per head, broadcast."""

    query: str
    key: str
    value: str
    sinks: str
    mask: str | None
    scale: float


def fuse_sinks(graph: Graph, constants: Mapping[str, Tensor]) -> Graph:
    """Return the graph with attention over scores and sinks as one operator."""
    matcher = _Matcher(graph)
    found = {op.name: sunk for op in graph.ops if (sunk := matcher.match(op)) is not None}
    if not found:
        return graph
    known = evaluate_known_values(graph, {sunk.mask for sunk in found.values() if sunk.mask}, constants)

    def rewrite(op: Op, emitter: Emitter) -> tuple[Arg, ...] | None:
        sunk = found.get(emitter.origin.name)
        if sunk is None:
            return None
        args: dict[str, Any] = {name: emitter.known[getattr(sunk, name)] for name in ("query", "key", "value")}
        args = args | {"enable_gqa": False}
        args |= grouped(args, emitter)
        query, key = (emitter.value(args[name]).shape for name in ("query", "key"))
        mask, band = None if sunk.mask is None else emitter.known[sunk.mask], None
        if sunk.mask in known:
            with torch.device("cpu"):
                dtype = graph.by_name[sunk.mask].dtype
                band = _band_of(mask_intervals(known[sunk.mask], dtype, query[-2], key[-2]))
        sinks = emitter.emit(aten.reshape.default, emitter.known[sunk.sinks], (query[1],))
        whole = ((query[-2],), (0,), (query[-2],))
        result = emitter.emit(
            ATTENTION_WITH_SINKS, args["query"], args["key"], args["value"], sinks,
            mask if band is None else None, band or (), args["enable_gqa"], sunk.scale, *whole,
        )  # fmt: skip
        return (result,)

    return rewrite_graph(graph, {aten.matmul.default: rewrite})


def _band_of(seen: Intervals | None) -> tuple[int, ...] | None:
    """Return the distances at which queries see keys, () for all; None where intervals are not of that kind."""
    if seen is None or seen.is_full:
        return None if seen is None else ()
    rows = torch.arange(len(seen.lo))
    least, most = int((seen.lo - rows).min()), int((seen.hi - 1 - rows).max())
    every = Intervals.of(rows + least, rows + most + 1, seen.num_keys)
    return (least, most) if every.equals(seen) else None


@dataclass(frozen=True, slots=True)
class _Matcher:
    graph: Graph

    def match(self, op: Op) -> _Sunk | None:
        """Return what ``op``, a product of weights and values, computes together with what is before it."""
        if op.target is not aten.matmul.default:
            return None
        weights, value = op.operands
        cut = self._maker(self._undropped(weights), aten.slice.Tensor)
        softmax = None if cut is None else self._maker(cut.operands[0], aten.softmax.int)
        joined = self._maker(self._unshifted(softmax), aten.cat.default)
        if cut is None or softmax is None or joined is None or len(joined.operands) != 2:
            return None
        rank = len(self._shape(weights))
        dims = (arguments(cut)["dim"], arguments(softmax)["dim"], arguments(joined)["dim"])
        if rank != 4 or any(not isinstance(dim, int) or dim % rank != rank - 1 for dim in dims):
            return None
        start, end, keys = arguments(cut)["start"] or 0, arguments(cut)["end"], self._shape(weights)[-1]
        is_last = start == 0 and end in (-1, keys)
        scores, sink = joined.operands if is_last else reversed(joined.operands)
        sinks = self._one_per_head(sink)
        if self._shape(scores)[-1] != keys or arguments(cut)["step"] != 1 or sinks is None:
            return None
        return self._of_scores(scores, value, sinks) if is_last or start == 1 else None

    def _of_scores(self, scores: str, value: str, sinks: str) -> _Sunk | None:
        """Return attention by scores, which may be scaled and masked."""
        mask, shape = None, self._shape(scores)
        if (added := self._maker(scores, aten.add.Tensor)) is not None and len(added.operands) == 2:
            if added.kwargs:
                return None
            scores, mask = added.operands
            if self._product(scores)[0] is None:
                scores, mask = mask, scores
        product, scale = self._product(scores)
        if product is None:
            return None
        query, turned = product.operands
        turn = self._maker(turned, aten.transpose.int)
        if turn is None or {arguments(turn)["dim0"] % 4, arguments(turn)["dim1"] % 4} != {2, 3}:
            return None
        tensors = (query, turn.operands[0], value)
        shapes = [self._shape(name) for name in tensors]
        alike = {(len(shape), *shape[:2]) for shape in shapes}
        dtypes = {self._dtype(name) for name in tensors}
        fits = (
            len(alike) == len(dtypes) == 1
            and len(shapes[0]) == 4
            and shape == (*shapes[0][:3], shapes[1][2])  # which a mask may widen
            and (mask is None or (len(self._shape(mask)) in (2, 3, 4) and self._dtype(mask).is_floating_point))
        )
        return _Sunk(*tensors, sinks, mask, scale) if fits else None

    def _product(self, scores: str) -> tuple[Op | None, float]:
        """Return the product that makes scores, and by what it is scaled."""
        scale, op = 1.0, self._maker(scores, aten.mul.Tensor, aten.div.Tensor)
        if op is not None:
            factor = op.args[1]
            if len(op.operands) != 1 or not isinstance(factor, int | float) or op.kwargs:
                return None, 1.0
            scale, scores = float(factor if op.target is aten.mul.Tensor else 1 / factor), op.operands[0]
        return self._maker(scores, aten.matmul.default), scale

    def _undropped(self, weights: str) -> str:
        """Return weights ahead of a cast, and of dropout that drops none."""
        for target in (aten.to.dtype, aten.dropout.default):
            op = self._maker(weights, target)
            if op is not None and (target is aten.to.dtype or not arguments(op)["train"] or arguments(op)["p"] == 0):
                weights = op.operands[0]
        return weights

    def _unshifted(self, softmax: Op | None) -> str | None:
        """Return the operand of a softmax without the largest score of each row, if that is taken off."""
        if softmax is None:
            return None
        name, dtype = softmax.operands[0], self._dtype(softmax.results[0])
        if torch.promote_types(self._dtype(name), dtype) != dtype:  # rounded to fewer bits than kernels keep
            return None
        less = self._maker(name, aten.sub.Tensor)
        if less is None or len(less.operands) != 2 or less.kwargs:
            return name
        largest = self.graph.producer.get(less.operands[1])
        if largest is None or largest.target not in (aten.max.dim, aten.amax.default):
            return name
        shape = self._shape(name)
        of_keys = largest.operands[0] == less.operands[0] and self._shape(less.operands[1]) == (*shape[:-1], 1)
        return less.operands[0] if of_keys else name

    def _one_per_head(self, sink: str) -> str | None:
        """Return a value with one score for each head that is broadcast to ``sink`` [batch, heads, rows, 1]."""
        expand = self._maker(sink, aten.expand.default)
        shape = self._shape(sink)
        if expand is None or len(shape) != 4 or shape[-1] != 1:
            return None
        before = self._shape(expand.operands[0])
        aligned = (1,) * (4 - len(before)) + before
        return expand.operands[0] if aligned == (1, shape[1], 1, 1) else None

    def _maker(self, name: str | None, *targets: Any) -> Op | None:
        op = None if name is None else self.graph.producer.get(name)
        return op if op is not None and op.target in targets else None

    def _dtype(self, name: str) -> torch.dtype:
        return self.graph.by_name[name].dtype

    def _shape(self, name: str) -> tuple[int, ...]:
        return self.graph.by_name[name].shape
