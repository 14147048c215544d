"""Lookups by index, sums by index, and one-hot vectors."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch.nn import functional as F

from shardwise.mindspore import context, strict
from shardwise.mindspore.named import classes_of
from shardwise.mindspore.ops.primitive import Names, OfSettings, Simple, along, counted, notation
from shardwise.mindspore.strict import Faults, Shapes, Strategy


def _numbered(letters: str, shapes: Shapes) -> Names:
    """Name the dims of every shape by a letter per shape and their numbers."""
    return tuple(tuple(f"{c}{dim}" for dim in range(len(shape))) for c, shape in zip(letters, shapes, strict=False))


class Gather(OfSettings, batch_dims=0):
    """``Gather(batch_dims)(params, indices, axis)``: the slices of ``params`` along ``axis`` at ``indices``.

    ``add_prim_attr("manual_split", (10, 20, 30, 4))`` sets the rows per device along the first split dim.
    ``add_prim_attr("primitive_target", "CPU")`` keeps ``params`` on the host.
    """

    sums = True

    def _settle(self) -> None:
        self.lead = 0 if self.batch_dims else None

    def compute(self, params: Any, indices: Any, axis: int = 0) -> Any:
        axis, batch = axis % params.dim(), self._shared(indices.dim())
        if batch:
            return self._batched(params, indices, axis, batch)
        if axis == 0 and params.dim() == 2:
            return F.embedding(indices, params)
        return params[(slice(None),) * axis + (indices,)]

    def _shared(self, dims: int) -> int:
        """Return the number of dims of the indices that are paired with those of ``params``."""
        count: int = self.batch_dims
        return count + dims if count < 0 else count

    def _batched(self, params: Any, indices: Any, axis: int, batch: int) -> Any:
        """Look up with dims 0 to ``batch`` paired: ``torch.gather`` with all other dims broadcast."""
        before, after = params.shape[batch:axis], params.shape[axis + 1 :]
        index_shape = indices.shape[batch:]
        index = indices.reshape(*indices.shape[:batch], *(1 for _ in before), -1, *(1 for _ in after))
        index = index.expand(*params.shape[:axis], -1, *after)
        return params.gather(axis, index).reshape(*params.shape[:axis], *index_shape, *after)

    def host_operands(self, args: tuple[Any, ...]) -> list[torch.Tensor]:
        return [args[0]]

    def _axis(self, args: tuple[Any, ...], shapes: Shapes) -> int:
        return strict.dim_of(self.title, args[2] if len(args) > 2 else 0, len(shapes[0]))

    def _manual(self) -> tuple[int, ...] | None:
        if "manual_split_with_offset" in self.attrs:
            raise NotImplementedError(
                f"{self.title}: manual_split_with_offset: give only the lengths, as manual_split; indices of any "
                "device's rows are supported"
            )
        return self.attrs.get("manual_split")

    def dim_names(self, shapes: Shapes, args: tuple[Any, ...]) -> Names:
        params, indices = _numbered("pi", shapes)
        if self._manual() is not None and indices and self._axis(args, shapes) == 0:
            return params, (*indices[:-1], params[0])
        shared = self._shared(len(indices))
        return params, (*params[:shared], *indices[shared:])

    def led(self, strategy: Strategy, *args: Any) -> Any:
        """Split the result of a batched lookup by the counts of both operands."""
        return counted(self.compute(*args), self._of_result(strategy, args))

    def followed(self, names: Names, args: tuple[Any, ...]) -> frozenset[str]:
        return frozenset(self._of_result(names, args))

    def _of_result(self, of_operands: Any, args: tuple[Any, ...]) -> Any:
        """Return counts or names of the result's dims: the dims of the indices replace the dim that is looked up."""
        params, indices = of_operands
        axis, batch = args[2] % len(params) if len(args) > 2 else 0, self._shared(len(indices))
        return (*params[:axis], *indices[batch:], *params[axis + 1 :])

    def strategy_text(self, strategy: Strategy | None, args: tuple[Any, ...]) -> str | None:
        lengths = self._manual()
        if lengths is None:
            return None
        if strategy is None:
            what = f"manual_split is {lengths}, but the operator has no strategy"
            raise self.refused(what, f"Gather().shard((({len(lengths)}, 1), (1, {len(lengths)})))")
        rows, *columns = strategy[0]
        names = ("v", "e") if self._axis(args, self.strategy_shapes(args)) == 0 else ("d0", "v0")
        cut = {name: "{" + ",".join(map(str, lengths)) + "}" for name in names if name.startswith("v")}
        return notation(dict(zip(names, (rows, *columns), strict=True)), cut)

    def out_counts(self, strategy: Strategy, shapes: Shapes, args: tuple[Any, ...], *, strict: bool) -> Strategy | None:
        """Return the split of the result. If rows are split and there is no ``out_strategy``, strict mode scatters the
        sum over the first dim of the indices, if that divides, as the reference does."""
        params, indices = strategy
        if self.out_strategy is not None or not strict:
            return self.out_strategy
        lengths = self._manual()
        if lengths is not None:
            return ((*indices[:-1], params[0], *params[1:]),)
        axis = self._axis(args, shapes)
        if axis == 0 and params[0] > 1 and shapes[1] and prod(indices) == 1 and shapes[1][0] % params[0] == 0:
            return ((params[0], *(1,) * (len(indices) - 1), *params[1:]),)
        return None

    def faults(self, strategy: Strategy, shapes: Shapes, args: tuple[Any, ...]) -> Faults:
        params, indices = strategy
        axis, lengths, devices = self._axis(args, shapes), self._manual(), context.options().stage_devices
        if lengths is not None:
            for what, fix in self._faults_of_lengths(params, indices, shapes, axis, lengths):
                yield f"manual_split {lengths}: {what}", fix
            return
        if self.batch_dims:
            yield from strict.whole(params, (axis,), "along which the batched lookup goes")
            if params[: self.batch_dims] != indices[: self.batch_dims]:
                what = f"the strategy {strategy} splits the {self.batch_dims} batch dims differently"
                yield what, "the same numbers for the batch dims of both inputs"
        if self.batch_dims or params[axis] == 1:
            return
        both = axis == 0 and prod(indices) == indices[0] and prod(params) == params[0]
        if prod(indices) > 1 and not (both and indices[0] * params[0] == devices):
            what = f"param is split at dim (axis){axis} ,index can't be split. param: {params}, index: {indices}"
            yield what, f"({params}, {(1,) * len(indices)}); or both first dims, if their product is {devices}"
        if len(params) > 2:
            what = f"param is split at dim (axis){axis} and has {len(params)} dims, more than 2: {params}"
            yield what, "leave that dim whole, or set_auto_parallel_context(strict=False)"
        if axis == 1 and shapes[0][0] % (params[0] * params[1]):
            what = f"index_shape[0] {shapes[0][0]} can't be divided by {params[0]} * {params[1]}"
            yield f"{what}: the result is scattered", f"numbers whose product divides {shapes[0][0]}"
        if axis == 1 and prod(params) != devices:
            what = "param is split at dim (axis)1, repeated calculation is not supported: the strategy "
            yield f"{what}{params} uses {prod(params)} of {devices} devices", f"numbers whose product is {devices}"

    def _faults_of_lengths(
        self, params: tuple[int, ...], indices: tuple[int, ...], shapes: Shapes, axis: int, lengths: Any
    ) -> Faults:
        rows, devices = shapes[0][0], context.options().stage_devices
        if axis != 0:
            yield f"axis must be 0, but get {axis}", "look up rows; transpose first"
        if not isinstance(lengths, (tuple, list)) or not all(type(length) is int and length > 0 for length in lengths):
            yield "the numbers must be positive integers", "(10, 20, 30, 4)"
        if prod(indices[:-1]) != 1:
            what = f"only the last dim of indices can be split, but get {indices}"
            yield what, f"{(*[1] * (len(indices) - 1), params[0])}"
        if indices[-1] != params[0]:
            what = f"param_strategy[0] {params[0]} must be equal to indices_strategy[-1] {indices[-1]}"
            yield what, f"({params}, {(*indices[:-1], params[0])})"
        if len(lengths) != params[0]:
            what = f"it has {len(lengths)} numbers, and param_strategy[0] is {params[0]}"
            yield what, "one number per part of dim 0"
        if sum(lengths) != rows:
            what = f"Sum of split shapes {sum(lengths)} must be equal to param_shape[0] {rows}"
            yield what, f"numbers whose sum is {rows}"
        if prod(params) != devices:
            what = f"repeated calculation is not supported: the strategy {(params, indices)} uses {prod(params)} of "
            yield f"{what}{devices} devices", f"numbers whose product is {devices}"
        part = shapes[1][-1] // indices[-1]
        if min(lengths) < part:
            what = f"every number must be at least the part of the last dim of indices, {shapes[1][-1]} / {indices[-1]}"
            yield f"{what} = {part}", "more rows for each, or fewer fields"


GatherV2, SparseGatherV2 = (  # older names; gradients of tables are dense here
    type(name, (Gather,), {"__module__": __name__, "__doc__": "The old name of Gather."})
    for name in ("GatherV2", "SparseGatherV2")
)


class EmbeddingLookup(Gather):
    """``EmbeddingLookup()(params, indices, offset)``: rows at indices minus ``offset``; 0 out of range."""

    def __call__(self, params: Any, indices: Any, offset: int = 0) -> Any:
        shifted = indices - offset
        inside = (shifted >= 0) & (shifted < params.shape[0])
        rows = super().__call__(params, torch.where(inside, shifted, 0))
        return torch.where(inside.reshape(*inside.shape, *(1,) * (params.dim() - 1)), rows, 0)


class OneHot(OfSettings, axis=-1):
    """One-hot vectors: ``OneHot(axis)(indices, depth, on_value, off_value)``. Its strategy is that of the result, and
    () for each value: ``((4, 2), (), ())``. The dim of the classes may be split, or left out if it is not split:
    ``((4,), (), ())``. Left out as a whole, ``((), (), ())``, the batch is split over all devices."""

    lead = 0

    def compute(self, indices: Any, depth: int, on_value: Any = 1.0, off_value: Any = 0.0) -> Any:
        axis = self.axis % (indices.dim() + 1)
        classes = torch.arange(depth, device=indices.device).reshape(depth, *(1,) * (indices.dim() - axis))
        on, off = (
            scalar if isinstance(scalar, torch.Tensor) else torch.tensor(scalar, device=indices.device)
            for scalar in (on_value, off_value)
        )
        return torch.where(indices.unsqueeze(axis) == classes, on, off)

    def strategy_shapes(self, args: tuple[Any, ...]) -> Shapes:
        shape = list(args[0].shape)
        shape.insert(self.axis % (len(shape) + 1), int(args[1]))
        return tuple(shape), (), ()

    def completed(self, strategy: Strategy, shapes: Shapes, args: tuple[Any, ...]) -> Strategy:
        result, rank = list(strategy[0]) if strategy else [], len(shapes[0])
        if strategy and not any(strategy):
            result = [context.options().stage_devices, *(1,) * (rank - 2)]
        if len(result) == rank - 1:
            result.insert(self.axis % rank, 1)
            strategy = (tuple(result), *strategy[1:])
        return super().completed(strategy, shapes, args)

    def led(self, strategy: Strategy, *args: Any) -> Any:
        return counted(self.compute(*args), strategy[0])

    def faults(self, strategy: Strategy, shapes: Shapes, args: tuple[Any, ...]) -> Faults:
        if len(shapes[0]) != 2:
            what = f"the indices have {len(shapes[0]) - 1} dims, and only one can be split"
            yield what, "reshape them to one dim, or set_auto_parallel_context(strict=False)"


def segment_sum(input_x: Any, segment_ids: Any, num_segments: int) -> Any:
    """Sum the parts of a tensor that share an id."""
    count = segment_ids.dim()
    zeros = torch.zeros((num_segments, *input_x.shape[count:]), dtype=input_x.dtype, device=input_x.device)
    return zeros.index_add(0, segment_ids.reshape(-1), input_x.reshape(-1, *input_x.shape[count:]))


def gather_nd(input_x: Any, indices: Any) -> Any:
    """Look up elements, which the last dim of the indices addresses."""
    return input_x[tuple(indices.unbind(-1))]


def scatter(x: Any, indices: Any, updates: Any) -> Any:
    """Return x with new values at the positions in the last dim of the indices."""
    return x.index_put(tuple(indices.unbind(-1)), updates)


def scatter_add(x: Any, indices: Any, updates: Any) -> Any:
    """Return x with values added at the positions in the last dim of the indices."""
    return x.index_put(tuple(indices.unbind(-1)), updates, accumulate=True)


def _names_of_updates(self: Any, shapes: Shapes, args: tuple[Any, ...]) -> Names:
    x, indices = _numbered("xi", shapes)
    return x, indices, (*indices[:-1], *x[shapes[1][-1] :])


_UPDATES = {
    "dim_names": _names_of_updates,
    "whole": lambda self, shapes, args: {0: (range(shapes[1][-1]), "which the indices address")},
}
CLASSES = classes_of({
    "GatherD": (None, lambda x, dim, index: x.gather(dim, index.long()), {
        "lead": None, "same": "the strategies of all inputs must be equal", "whole": along("which it looks up", 1)}),
    "GatherNd": (None, gather_nd, {
        "dims": "x..., b... place", "lead": 1, "whole": lambda self, shapes, args: {
            0: (range(len(shapes[0])), "which is looked up"), 1: ((-1,), "which addresses an element")}}),
    "TensorScatterAdd": (None, scatter_add, _UPDATES), "TensorScatterUpdate": (None, scatter, _UPDATES),
    "UnsortedSegmentSum": (None, segment_sum, {
        "sums": True, "dim_names": lambda self, shapes, args: _numbered("dd", shapes)}),
}, Simple, __name__)  # fmt: skip
globals().update(CLASSES)

__all__ = ["EmbeddingLookup", "Gather", "GatherV2", "OneHot", "SparseGatherV2", *CLASSES]
