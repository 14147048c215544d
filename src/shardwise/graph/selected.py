"""Rows that a boolean mask selects, in masked form: all rows are computed, and the others contribute nothing.

The number of rows of ``x[mask]`` depends on data, and a graph has fixed shapes. If rows are processed one by one until
they are reduced or put back, the shape does not matter. Here the selection becomes all ``mask.numel()`` rows, with
zeros in place of the others, and the mask stays known until then:

    x[mask], masked_select, index_select,    all rows, zeros where the mask is False
    nonzero, torch.where(mask)               the coordinates of all rows
    row by row                               stays, on all rows
    sum, any, all, mean and losses           of the masked rows; means over the count
    masked_scatter, x[mask] = rows           torch.where
    index_add, x[rows of mask] += rows       the sum over what the mask selects of each row
    the number of rows                       the sum of the mask

Rows are also filled with constants ahead of operators with other operands, and after them if these are differentiated.
So results of unselected rows, infinities and NaN included, reach no value and no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import torch

from shardwise.errors import CaptureError
from shardwise.graph.ir import Arg, Op, Ref, map_operands
from shardwise.graph.normalize_layers import LOSS_NORMALIZATIONS, MEAN, NONE, SUM
from shardwise.graph.rejected import REJECTED
from shardwise.graph.schema import arguments, has_symbols, is_random, operator_name, tensor_results
from shardwise.graph.selected_rows import Rows, SelectedRows

aten = torch.ops.aten

_POSITIONS = (aten.nonzero_numpy.default, aten.where.default)
_SELECTING = (*_POSITIONS, aten.nonzero.default, aten.argwhere.default, aten.index.Tensor, aten.masked_select.default)
_CASTS = (aten.to.dtype, aten.type_as.default)
_COPIES = (aten.alias.default, aten.clone.default, aten.contiguous.default, aten.detach.default)
_VIEWS = (
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.flatten.using_ints, aten.unflatten.int,
    aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default, aten.view_as.default,
    aten.reshape_as.default,
)  # fmt: skip
_FILLS = (
    aten.zeros.default, aten.ones.default, aten.full.default, aten.empty.memory_format, aten.new_zeros.default,
    aten.new_ones.default, aten.new_full.default, aten.new_empty.default,
)  # fmt: skip
_LIKE = frozenset(("zeros_like", "ones_like", "full_like", "empty_like"))
_EXPANSIONS = (aten.expand.default, aten.expand_as.default, aten.broadcast_tensors.default)
# Row by row, along dims that their argument names.
_BY_DIM = frozenset((
    "softmax", "log_softmax", "glu", "cat", "stack", "chunk", "split", "split_with_sizes", "slice", "select", "unbind",
    "sum", "mean", "amax", "amin", "argmax", "argmin", "max", "min", "topk", "sort", "argsort", "logsumexp", "any",
    "all", "prod", "cumsum", "var", "std", "linalg_vector_norm", "norm", "cosine_similarity", "gather",
))  # fmt: skip
_SUMS = (aten.sum.default, aten.sum.dim_IntList, aten.any.default, aten.any.dim, aten.count_nonzero.default)
_PRODUCTS = (aten.linear.default, aten.matmul.default, aten.mm.default)
_TRANSPOSES = (
    aten.permute.default, aten.transpose.int, aten.movedim.int, aten.movedim.intlist, aten.t.default,
    aten.numpy_T.default, aten.mT.default,
)  # fmt: skip
_OF_SAMPLES = (
    aten.group_norm.default, aten.prelu.default, aten.conv1d.default, aten.conv2d.default, aten.conv3d.default,
)  # fmt: skip
_NORMS = (aten.layer_norm.default, aten.rms_norm.default)


class Selections(SelectedRows):
    """Emits operators that select rows, compute with them, or reduce them."""

    def concern(self, op: Op) -> bool:
        """Return whether an operator selects rows, computes with them, or with their number."""
        if op.target in _SELECTING or (self.rows and not self.rows.keys().isdisjoint(op.operands)):
            return True
        return bool(self.counts) and has_symbols((op.args, op.kwargs))

    def takes(self, target: Any, val: Any) -> bool:
        """Return whether an operator that returned ``val``, of no fixed shape, selects rows or may process them."""
        return has_symbols(val) and (
            target in _SELECTING
            or (bool(self.counts) and target.namespace == "aten" and operator_name(target) not in REJECTED)
        )

    def copied(self, name: str, copy: Ref) -> Ref:
        """Give a copy of a value the same rows."""
        if name in self.rows:
            self.rows[copy.name] = self.rows[name]
        return copy

    def check_unchanged(self, ref: Ref, origin: Op) -> None:
        """Raise CaptureError for a view of selected rows if the view or its base was written to."""
        if ref.name in self.rows:
            fix = "make a new tensor of the rows, for example with torch.where"
            raise self._refusal(replace(origin, target=aten.copy_.default), "writes into views of selected rows", fix)

    def check_fixed(self, ref: Ref, origin: Op) -> Ref:
        """Return the value. Raises CaptureError for selected rows that the model returns."""
        if ref.name in self.rows:
            what = "the model returns rows selected by a mask, and their number depends on data"
            fix = "return all rows and the mask, or a reduction of the rows"
            raise CaptureError(what, op=origin.module, source=origin.source, fix=fix)
        return ref

    def apply(self, op: Op, val: Any) -> tuple[Arg, ...]:
        """Emit an operator with its ``sized`` arguments. ``val``: its traced result. Raises CaptureError if it needs
        the rows themselves."""
        selected = [name for name in op.operands if name in self.rows]
        if not selected and op.target in _SELECTING:
            return self._select(op, val) if has_symbols(val) else self.emitter.apply(op)
        if is_random(op.target) and arguments(op).get("train") is False:
            return (Ref(selected[0]),)
        if is_random(op.target):
            fix = "draw for all rows before applying the mask"
            raise self._refusal(op, "draws random numbers for rows selected by a mask", fix)
        if not selected:
            return self._noted(self.emitter.apply(op), op, val)
        self._check_masks(op, selected)
        if not has_symbols(val) and op.target not in _CASTS:
            return (self._reduced(op, val),)
        return self._by_row(op, selected, val)

    # -- selections ----------------------------------------------------------------------------------------------------

    def _select(self, op: Op, val: Any) -> tuple[Arg, ...]:
        args = arguments(op)
        if op.target in _SELECTING[:4]:
            mask = args["condition"] if op.target is aten.where.default else args["self"]
            return self._coordinates(op, mask, val)
        if op.target is aten.masked_select.default:
            x, mask = self.emitter.emit_several(aten.broadcast_tensors.default, (args["self"], args["mask"]))
            return (self._rows_of(op, x, mask, 0, val),)
        indices = args.get("indices", ())
        places = [place for place, index in enumerate(indices) if index is not None]
        if len(places) == 1 and self.emitter.value(indices[places[0]]).dtype == torch.bool:
            return (self._rows_of(op, args["self"], indices[places[0]], places[0], val),)
        raise self._refusal(op)

    def _rows_of(self, op: Op, x: Ref, mask: Ref, place: int, val: torch.Tensor) -> Ref:
        """Select rows of ``x`` by a mask whose dims begin at ``place``."""
        shape, dims = self.emitter.value(x).shape, self.emitter.value(mask).shape
        if shape[place : place + len(dims)] != dims or not dims:
            raise self._refusal(op)
        flat = self.emitter.reshaped(mask, (prod(dims),))
        all_rows = self.emitter.reshaped(x, (*shape[:place], prod(dims), *shape[place + len(dims) :]))
        self._count(op, val.shape[place], flat)
        rows = Rows(flat, place)
        hidden = self._hidden(rows, len(self.emitter.value(all_rows).shape))
        result = self.emitter.emit(aten.masked_fill.Scalar, all_rows, hidden, 0)
        self.rows[result.name], self.masked[result.name, 0] = rows, result
        return result

    def _coordinates(self, op: Op, mask: Ref, val: Any) -> tuple[Arg, ...]:
        """Return the coordinates of all elements along every dim of a mask."""
        emit, shape = self.emitter.emit, self.emitter.value(mask).shape
        if self.emitter.value(mask).dtype != torch.bool:
            mask = emit(aten.ne.Scalar, mask, 0)
        flat = self.emitter.reshaped(mask, (prod(shape),))
        if not shape:
            raise self._refusal(op)
        self._count(op, tensor_results(val)[0].shape[0], flat)
        results = []
        for dim, size in enumerate(shape):
            number = emit(aten.arange.default, size)
            along = self.emitter.reshaped(number, tuple(size if d == dim else 1 for d in range(len(shape))))
            coordinate = self.emitter.reshaped(emit(aten.expand.default, along, shape), (prod(shape),))
            coordinate = emit(aten.alias.default, coordinate)
            self.rows[coordinate.name] = Rows(flat, 0)
            self.positions[coordinate.name] = mask, dim
            results.append(coordinate)
        if op.target in _POSITIONS:
            return tuple(results)
        columns = emit(aten.stack.default, tuple(results), 1)
        self.rows[columns.name] = Rows(flat, 0)
        self.positions[columns.name] = mask, None
        return (columns,)

    def _noted(self, results: tuple[Arg, ...], op: Op, val: Any) -> tuple[Arg, ...]:
        """Record which results of an operator without selected operands are rows, by their shape."""
        for ref, tensor in zip(results, tensor_results(val), strict=True):
            if not has_symbols(tensor) or not isinstance(ref, Ref):
                continue
            if op.target is aten.arange.default:
                self.ranges.add(ref.name)
            elif op.target not in (*_FILLS, *_EXPANSIONS[:1]):
                raise self._refusal(op)
            self.rows[ref.name] = self._of_shape(op, tensor)
        return results

    # -- row by row ----------------------------------------------------------------------------------------------------

    def _by_row(self, op: Op, selected: Sequence[str], val: Any) -> tuple[Arg, ...]:
        """Emit an operator that computes each row independently and returns rows."""
        first, name = self.rows[selected[0]], operator_name(op.target)
        if op.target is aten.index_select.default and (mask := self._mask_at([arguments(op)["index"]])) is not None:
            dim = arguments(op)["dim"] % len(self.emitter.values[op.operands[0]].shape)
            return (self._rows_of(op, Ref(op.operands[0]), mask, dim, val),)
        if op.target is aten.index.Tensor and op.operands[0] not in self.rows:
            indices = arguments(op)["indices"]
            places = [place for place, index in enumerate(indices) if index is not None]
            at = self._dims_at([indices[place] for place in places])
            if at is not None and places == list(range(places[0], places[0] + len(places))):
                x = self._at_all_elements(Ref(op.operands[0]), *at, places[0])
                if x is not None:
                    rows = self._rows_of(op, x, at[0], places[0], val)
                    self.read_at[rows.name] = op.operands[0], at
                    return (rows,)
        ranges = self.ranges.intersection(selected)
        is_pointwise = self._is_pointwise(op)
        if ranges and not (op.target is aten.index.Tensor and self._picks_by_row(op)):
            raise self._refusal(op, "numbers selected rows")
        if not (is_pointwise or self._is_alike(op, selected)):
            raise self._refusal(op)
        others = [other for other in op.operands if other not in self.rows]
        trained = any(self.emitter.values[other].requires_grad for other in others)
        if (others and trained) or not is_pointwise:
            kept = ranges | {n for n in selected if op.target in (*_VIEWS, *_EXPANSIONS)}
            fill = int(is_pointwise)  # a number at which quotients and powers have derivatives
            op = map_operands(op, lambda n: self._masked(Ref(n), fill) if n in selected and n not in kept else Ref(n))
        results: tuple[Any, ...] = self.emitter.apply(op)
        if is_pointwise:
            behind = len(self.emitter.values[selected[0]].shape) - first.dim
            for ref in results:
                self.rows[ref.name] = replace(first, dim=len(self.emitter.value(ref).shape) - behind)
        else:
            for ref, tensor in zip(results, tensor_results(val), strict=True):
                self.rows[ref.name] = of_shape = replace(self._of_shape(op, tensor), mask=first.mask)
                shapes = self.emitter.values[selected[0]].shape, self.emitter.value(ref).shape
                is_moved = op.target in _VIEWS and prod(shapes[0][: first.dim]) != prod(shapes[1][: of_shape.dim])
                if is_moved or len(shapes[1]) != tensor.dim():
                    raise self._refusal(op)
        if trained:
            results = tuple(map(self._masked, results))
        self._move_positions(op, selected, results, name)
        return results

    def _is_pointwise(self, op: Op) -> bool:
        """Return whether an operator is pointwise, with the rows of all operands in one dim of the result."""
        name = operator_name(op.target)
        tagged = torch.Tag.pointwise in op.target.tags and not is_random(op.target)
        is_loss = op.target in LOSS_NORMALIZATIONS and arguments(op)["reduction"] == NONE and "target" in arguments(op)
        is_loss = is_loss and not self._is_class_loss(op)
        if not (tagged or is_loss or op.target in (*_CASTS, *_COPIES, *_EXPANSIONS) or name in _LIKE):
            return False
        from_end = {len(self.emitter.values[n].shape) - self.rows[n].dim for n in op.operands if n in self.rows}
        copies = {self.rows[n].copies for n in op.operands if n in self.rows}
        if len(from_end) != 1 or len(copies) != 1:
            return False
        (behind,) = from_end
        others = [self.emitter.values[n].shape for n in op.operands if n not in self.rows]
        return all(len(shape) < behind or shape[-behind] == 1 for shape in others)

    def _is_alike(self, op: Op, selected: Sequence[str]) -> bool:
        """Return whether any other operator computes each row independently."""
        args, name = arguments(op), operator_name(op.target)
        rows = [self.rows[n] for n in selected]
        rank = len(self.emitter.values[selected[0]].shape)
        others = [n for n in op.operands if n not in self.rows]
        one_dim = len({(r.dim, r.copies) for r in rows}) == 1
        dim = rows[0].dim
        if op.target in _VIEWS:
            return op.operands[0] == selected[0]
        if op.target in _TRANSPOSES:
            return True
        if self._is_class_loss(op):
            return one_dim and dim == 0 and not self._weights_differ(op, others)
        if op.target in _PRODUCTS:
            first = op.operands[0]
            if selected == [first]:
                return rank > 1 and dim < rank - 1 and len(self.emitter.values[op.operands[1]].shape) <= 2
            return op.target is not aten.linear.default and selected == [op.operands[1]] and rank == 2 and dim == 1
        if op.target in _NORMS:
            return selected == [op.operands[0]] and dim < rank - len(args["normalized_shape"])
        if op.target in _OF_SAMPLES:
            return selected == [op.operands[0]] and dim == 0
        if op.target is aten.embedding.default:  # frequencies are of the selected ids alone
            return op.operands[0] not in self.rows and not args["scale_grad_by_freq"]
        if op.target is aten.index.Tensor:
            dtypes = {self.emitter.values[n].dtype for n in op.operands[1:]}
            at_numbers = op.operands[0] not in self.rows and dtypes <= {torch.int32, torch.int64}
            return at_numbers or self._picks_by_row(op)
        if op.target is aten.one_hot.default:
            return bool(args["num_classes"] > 0)
        if name in _BY_DIM and "dim" in args and args["dim"] is not None and args["dim"] != ():
            new_rank = rank + (name == "stack")
            dims = {d % new_rank for d in (args["dim"] if isinstance(args["dim"], tuple) else (args["dim"],))}
            if name == "stack":
                return one_dim and not others and min(dims) > dim
            return one_dim and not others and dim not in dims
        return False

    def _picks_by_row(self, op: Op) -> bool:
        """Return whether it is ``x[arange(len(x)), i, ...]``, of rows in dim 0."""
        x, *_ = op.operands
        indices = arguments(op)["indices"]
        if x not in self.rows or self.rows[x].dim != 0 or any(index is None for index in indices):
            return False
        return indices[0].name in self.ranges and all(
            index.name in self.rows and index.name not in self.ranges and len(self.emitter.value(index).shape) == 1
            for index in indices[1:]
        )

    def _mask_at(self, indices: Sequence[Ref]) -> Ref | None:
        """Return the mask whose rows' coordinates, in all of its dims and in order, are the indices; else None."""
        positions = [self.positions.get(index.name, (index, -1)) for index in indices]
        mask = positions[0][0]
        dims = [0 if dim is None else dim for _, dim in positions]
        is_whole = dims == list(range(len(self.emitter.value(mask).shape)))
        return mask if is_whole and all(position[0] == mask for position in positions) else None

    def _move_positions(self, op: Op, selected: Sequence[str], results: Sequence[Arg], name: str) -> None:
        """Propagate coordinates: views of a vector's coordinates keep them; a selected column has those of its dim."""
        mask, dim = self.positions.get(selected[0], (None, None))
        (ref, *more) = results
        if mask is None or not isinstance(ref, Ref) or more or len(self.emitter.value(ref).shape) != 1:
            return
        if op.target in _VIEWS or op.target in _COPIES:
            self.positions[ref.name] = mask, dim
        elif name == "select" and dim is None:
            self.positions[ref.name] = mask, arguments(op)["index"] % len(self.emitter.value(mask).shape)

    # -- reductions ----------------------------------------------------------------------------------------------------

    def _reduced(self, op: Op, val: Any) -> Arg:
        args, emit, name = arguments(op), self.emitter.emit, operator_name(op.target)
        if self.ranges.intersection(op.operands):
            raise self._refusal(op)
        if op.target in LOSS_NORMALIZATIONS and "target" in args:
            return self._loss(op, args)
        if (found := self._adds_in_place(op, args)) is not None:
            source, at, place = found
            rows, add = self._masked(source), partial(emit, aten.add.Tensor, args["self"], alpha=args.get("alpha", 1))
            return self._accumulated(at[0], args["self"], lambda: add(self._summed_to(rows, *at, place)))
        if name in ("masked_scatter", "index_put"):
            return self._put_back(op, args)
        if op.target in _SUMS or self._sums(op, args):
            (result,) = self.emitter.apply(map_operands(op, lambda n: self._masked(Ref(n))))
            return result
        if op.target in (aten.all.default, aten.all.dim):
            x = emit(aten.logical_not.default, args["self"])
            self.rows[x.name] = self.rows[args["self"].name]
            rest = [value for key, value in args.items() if key != "self"]
            target = aten.any.default if op.target is aten.all.default else aten.any.dim
            return emit(aten.logical_not.default, emit(target, self._masked(x), *rest))
        if op.target in (aten.mean.default, aten.mean.dim):
            return self._mean(op, args["self"], args.get("dim"), args.get("keepdim", False), args["dtype"])
        raise self._refusal(op)

    def _sums(self, op: Op, args: dict[str, Any]) -> bool:
        """Return whether rows of zeros add nothing to an operator's result."""
        names = op.operands
        at = [None if n not in self.rows else self.rows[n].dim for n in names]
        ranks = [len(self.emitter.values[n].shape) for n in names]
        if op.target in _PRODUCTS[1:]:
            return min(ranks) > 1 and ranks[1] == 2 and at[1] == 0 and at[0] == ranks[0] - 1
        if op.target is aten.dot.default:
            return None not in at
        if op.target is aten.linalg_vector_norm.default:
            return 0 < float(args["ord"]) < float("inf")
        if op.target is aten.index_add.default:
            return at == [None, 0, args["dim"] % ranks[0]]
        return op.target is aten.scatter_add.default and at[0] is None and at[1] == at[2] == args["dim"] % ranks[0]

    def _adds_in_place(self, op: Op, args: dict[str, Any]) -> tuple[Ref, tuple[Ref, tuple[int, ...]], int] | None:
        """Return rows that are added where they came from, the mask and its dims there, and their dim."""
        x = args["self"]
        if op.target is aten.index_add.default:
            index, source, place = [args["index"]], args["source"], args["dim"] % len(self.emitter.value(x).shape)
        elif op.target is aten.index_put.default:
            places = [place for place, index in enumerate(args["indices"]) if index is not None]
            if places != list(range(places[0], places[0] + len(places))):
                return None
            index, source, place = [args["indices"][i] for i in places], args["values"], places[0]
        else:
            return None
        at = self._dims_at(index)
        if at is None or x.name in self.rows:
            return None
        mask, dims = at
        shape, sizes = self.emitter.value(x).shape, self.emitter.value(mask).shape
        if op.target is aten.index_put.default:
            if len(dims) == len(sizes):  # ``_put_back``
                return None
            if not args["accumulate"]:
                source = self._increment(x, at, source)
        if source is None or source.name not in self.rows:
            return None
        rows = self.rows[source.name]
        whole = shape[place : place + len(dims)] == tuple(sizes[dim] for dim in dims)
        of_rank = len(self.emitter.value(source).shape) == len(shape) - len(dims) + 1
        return (source, at, place) if whole and of_rank and (rows.dim, rows.copies) == (place, 1) else None

    def _mean(self, op: Op, x: Ref, dims: Any = None, keepdim: bool = False, dtype: Any = None) -> Ref:
        emit, value, rows = self.emitter.emit, self.emitter.value(x), self.rows[x.name]
        rank = len(value.shape)
        every = tuple(d % rank for d in ((dims,) if isinstance(dims, int) else dims or range(rank)))
        dtype = dtype or value.dtype
        wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
        total = emit(aten.sum.dim_IntList, self._masked(x), every, keepdim, dtype=wide)
        per_row = prod(value.shape[d] for d in every if d != rows.dim) * rows.copies
        count = emit(aten.mul.Tensor, emit(aten.sum.default, rows.mask), per_row)
        mean = emit(aten.div.Tensor, total, count)
        return mean if wide == dtype else emit(aten.to.dtype, mean, dtype)

    def _is_class_loss(self, op: Op) -> bool:
        return operator_name(op.target) in ("cross_entropy_loss", "nll_loss", "nll_loss_nd")

    def _weights_differ(self, op: Op, others: Sequence[str]) -> bool:
        weight = arguments(op)["weight"]
        return any(weight is None or n != weight.name for n in others)

    def _loss(self, op: Op, args: dict[str, Any]) -> Arg:
        """Emit a loss of rows: labels of unselected rows are ignored, elements are averaged over the count."""
        emit, target, reduction = self.emitter.emit, args["target"], args["reduction"]
        operands = [n for n in op.operands if n in self.rows]
        if self._is_class_loss(op):
            others = [n for n in op.operands if n not in self.rows]
            if any(self.rows[n].dim for n in operands) or len(operands) != 2 or self._weights_differ(op, others):
                raise self._refusal(op)
            if not self.emitter.value(target).dtype.is_floating_point:
                labels = self._masked(target, args["ignore_index"])
                scores = self._masked(args["self"])
                swap = {target.name: labels, args["self"].name: scores}
                (result,) = self.emitter.apply(map_operands(op, lambda n: swap.get(n, Ref(n))))
                return result
        single = replace(op, kwargs=tuple((k, NONE if k == "reduction" else v) for k, v in op.kwargs))
        names = [argument.name for argument in op.target._schema.arguments]
        at = names.index("reduction")
        if not any(k == "reduction" for k, _ in op.kwargs):
            single = replace(op, args=(*(args[name] for name in names[:at]), NONE, *op.args[at + 1 :]))
        if not (self._is_class_loss(op) or self._is_pointwise(single)) or reduction not in (MEAN, SUM):
            raise self._refusal(op)
        first = operands[0]
        (losses,) = self.emitter.apply(map_operands(single, lambda n: self._masked(Ref(n))))
        assert isinstance(losses, Ref)
        behind = len(self.emitter.values[first].shape) - self.rows[first].dim
        dim = 0 if self._is_class_loss(op) else len(self.emitter.value(losses).shape) - behind
        self.rows[losses.name] = replace(self.rows[first], dim=dim)
        if reduction == SUM:
            return emit(aten.sum.default, self._masked(losses))
        return self._mean(op, losses)

    def _put_back(self, op: Op, args: dict[str, Any]) -> Arg:
        """Emit ``masked_scatter`` and ``x[mask] = rows``, of rows of the same mask."""
        emit = self.emitter.emit
        x, values = args["self"], args["values" if "indices" in args else "source"]
        if "indices" in args:
            places = [place for place, index in enumerate(args["indices"]) if index is not None]
            indices, place = [args["indices"][place] for place in places], places[0]
            mask = indices[0] if indices[0].name not in self.rows else self._mask_at(indices)
            in_order = places == list(range(place, place + len(places)))
            if mask is None and self._dims_at(indices) is not None:
                raise self._refusal(
                    op, fix="add the rows, of which some may be at one place: x.index_add_(0, index, rows)"
                )
            if mask is None or not in_order or (indices[0].name not in self.rows and len(indices) > 1):
                raise self._refusal(op)
        else:
            mask, place = self._unexpanded(args["mask"]), 0
        rows, shape = self.rows.get(values.name), self.emitter.value(x).shape
        dims = self.emitter.value(mask).shape
        flat = None if rows is None else self.emitter.reshaped(mask, (prod(dims),))
        behind = shape[place + len(dims) :]
        fits = shape[place : place + len(dims)] == dims and (not place or "indices" in args)
        if flat is None or rows is None or not fits or self._key(flat.name) != self._key(rows.mask.name):
            raise self._refusal(op)
        whole = (*shape[:place], prod(dims), *behind)
        if "indices" in args and rows.dim != len(self.emitter.value(values).shape) - 1 - len(behind):
            raise self._refusal(op)
        if "indices" not in args and rows.dim != 0:
            raise self._refusal(op)
        hidden = self._masked(values)

        def put() -> Ref:
            is_whole = self.emitter.value(hidden).numel == prod(whole)
            expanded = emit(aten.expand.default, self.emitter.reshaped(hidden, whole) if is_whole else hidden, whole)
            result = self.emitter.reshaped(expanded, shape)
            if args.get("accumulate"):
                return emit(aten.add.Tensor, x, result)
            return emit(aten.where.self, self.emitter.reshaped(mask, (*dims, *(1,) * len(behind))), result, x)

        return self._accumulated(mask, x, put)

    def _unexpanded(self, mask: Ref) -> Ref:
        """Return a mask without trailing dims of size 1 and without those to which they were expanded."""
        while (producer := self.emitter.producer.get(mask.name)) is not None and producer.target in (
            *_EXPANSIONS[:2],
            aten.unsqueeze.default,
        ):
            last = len(self.emitter.value(mask).shape) - 1
            if producer.target is aten.unsqueeze.default and arguments(producer)["dim"] % (last + 1) != last:
                break
            mask = Ref(producer.operands[0])
        return mask
