"""How a cell runs: by itself, or as this rank's part of a plan of the library.

In stand_alone, data_parallel and hybrid_parallel mode a cell is ordinary eager code on every rank. In
semi_auto_parallel and auto_parallel mode the outermost call of a cell is planned (``sw.plan``) and split
(``sw.parallelize``), once; later calls with other shapes are captured by what that gave. The cell's parameters then
hold this rank's shards.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.errors import problem
from shardwise.graph.trees import leaf_name
from shardwise.graph.widen import in_reference_mode
from shardwise.layouts.layout import Atom, Layout
from shardwise.layouts.mesh import Mesh
from shardwise.layouts.text import format_layout
from shardwise.mindspore import context, strict
from shardwise.mindspore.common.seed import data_seed
from shardwise.mindspore.layout import AXIS
from shardwise.mindspore.options import Options
from shardwise.mindspore.storage import copied_axes, parameter_plans, shard_axes
from shardwise.mindspore.tensor import Tensor, plain
from shardwise.runtime.agree import from_rank_zero
from shardwise.runtime.shards import shard

STRATEGIES = "_shardwise_strategies"  # the attribute of what ms.shard was given
PRICED = ("dynamic_programming", "recursive_programming")
_INSIDE: ContextVar[bool] = ContextVar("shardwise_inside_cell", default=False)


@dataclass(frozen=True)
class Held:
    """How a parameter is kept on the ranks once a plan has split it. ``shape`` is the whole one."""

    shape: tuple[int, ...]
    layout: Layout


@dataclass
class Split:
    """A cell on this rank. ``local``: ranks feed their parts of a batch."""

    par: sw.Parallel
    local: bool
    written: int = 0  # programs whose IR has been written


_SPLITS: weakref.WeakKeyDictionary[nn.Module, Split] = weakref.WeakKeyDictionary()
_HELD = "_shardwise_held"  # the attribute of a split parameter
_AVERAGED = "_shardwise_averaged"  # of the number of ranks whose gradients it sums
_AGAIN: ContextVar[bool] = ContextVar("shardwise_again", default=False)


def is_outermost() -> bool:
    """Whether a call of a cell is neither inside another one's nor inside capture, nor what a plan is compared with."""
    return not _INSIDE.get() and not torch.compiler.is_exporting() and not in_reference_mode()


@contextmanager
def _noted(variable: ContextVar[bool], value: bool) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def inside() -> AbstractContextManager[None]:
    """Calls of cells meanwhile are parts of another one's."""
    return _noted(_INSIDE, True)


def again(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
    """What a function returns; where it runs by itself, backward calls it again instead of keeping what it made."""
    if torch.compiler.is_exporting() or not torch.is_grad_enabled():
        return function(*args, **(kwargs or {}))

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return _noted(_AGAIN, False), _noted(_AGAIN, True)

    return checkpoint(function, *args, use_reentrant=False, context_fn=contexts, **(kwargs or {}))


def is_again() -> bool:
    """Whether a function runs a second time, for backward."""
    return _AGAIN.get()


def held(parameter: torch.Tensor) -> Held | None:
    """How a parameter is split; None while this rank holds all of it."""
    holding: Held | None = getattr(parameter, _HELD, None)
    return holding


def hold(parameter: torch.Tensor, shard: torch.Tensor, shape: tuple[int, ...], layout: Layout) -> None:
    """Let a parameter be this rank's ``shard`` of a whole of ``shape``."""
    parameter.data = shard
    setattr(parameter, _HELD, Held(shape, layout))


def own_shard(value: Any, parameter: torch.Tensor) -> Any:
    """Of a tensor in the whole shape of a split parameter, this rank's part; anything else as it is."""
    holding = held(parameter)
    if holding is None or not isinstance(value, torch.Tensor) or not value.dim() or value.shape == parameter.shape:
        return value
    assert tuple(value.shape) == holding.shape, "a state has the shape of its parameter"
    return shard(value, holding.layout, holding.layout.mesh.coordinates(dist.get_rank())).clone()


def is_split() -> bool:
    """Whether cells run as parts of a plan: the mode is semi_auto or auto, on several devices."""
    options = context.options()
    return options.distributed and options.devices > 1


def call(cell: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The outermost call of a cell: every tensor it returns, whole; where ranks feed their parts of a batch, this
    rank's rows of whatever has a batch."""
    args, kwargs = pytree.tree_map(plain, (args, kwargs))
    if not is_split() or _runs_by_itself(cell, (args, kwargs)):
        _check_whole(cell)
        with inside():
            return pytree.tree_map(as_ours, nn.Module.__call__(cell, *args, **kwargs))
    split, result = run(cell, args, kwargs)
    if split.local:
        result = pytree.tree_map(partial(_own_rows, rows=_rows(split.par)), result)
    return pytree.tree_map(as_ours, result)


def _check_whole(cell: nn.Module) -> None:
    """Raises RuntimeError where the cell's parameters are shards, which only a plan can compute with."""
    for name, parameter in cell.named_parameters():
        holding = held(parameter)
        if holding is not None and holding.layout.positions:
            raise RuntimeError(
                problem(
                    f"{name} is split as {holding.layout}, and the mode is {context.options().parallel_mode} now",
                    op=type(cell).__name__,
                    fix="keep the context with which the cell was split, or build the cell anew",
                )
            )


def _runs_by_itself(cell: nn.Module, inputs: Any) -> bool:
    """Whether a cell needs no plan: a loss of what another cell returned, in a loop that the user wrote."""
    if getattr(cell, "is_loss", False):
        return True
    computed = any(isinstance(x, torch.Tensor) and x.requires_grad for x in pytree.tree_leaves(inputs))
    return computed and not any(parameter.requires_grad for parameter in cell.parameters())


def run(cell: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Split, Any]:
    """The part of a split cell on this rank, and what it returned: whole tensors, differentiable."""
    split = _SPLITS.get(cell)
    if split is None:
        split = _SPLITS[cell] = _split(cell, args, kwargs)
    if split.par.training != cell.training:
        split.par.train(cell.training)
    with inside():
        result = split.par(*args, **kwargs)
    if context.settings().save_graphs and split.written < len(split.par.compiled):
        from shardwise.mindspore import ir

        split.written = len(split.par.compiled)
        ir.save(cell, split.par)
    return split, result


def plan_of(cell: nn.Module) -> sw.Plan:
    """The plan of a cell that has run split. Raises RuntimeError for another."""
    found = next((_SPLITS[own] for own in cell.modules() if own in _SPLITS), None)
    if found is None:
        raise RuntimeError(problem(f"{type(cell).__name__} has not run split yet", fix="call it, or train it, first"))
    return found.par.plan


def own_part(split: Split, index: int, whole: torch.Tensor) -> torch.Tensor:
    """Of the ``index``-th tensor that a split cell returned, what this rank had computed of it before it was
    gathered."""
    layout = split.par.output_layout(index)
    part: torch.Tensor = shard(whole, layout, split.par.plan.mesh.coordinates(dist.get_rank()))
    return part


def _split(cell: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Split:
    options = context.options()
    if not dist.is_initialized():
        raise RuntimeError(
            problem(
                f"parallel_mode {options.parallel_mode!r} on {options.devices} devices needs ranks that can talk",
                fix="call communication.init() first, and start the program with: shardwise run -n "
                f"{options.devices} net.py (or mpirun -n {options.devices} python net.py)",
            )
        )
    model = _whole_copy(cell)
    counts = _fed(options, args, kwargs)
    leaves, spec = pytree.tree_flatten_with_path((args, kwargs))
    whole = [
        torch.empty(
            [s * c for s, c in zip(x.shape, counts[leaf_name(path)], strict=True)], dtype=x.dtype, device="meta"
        )
        if isinstance(x, torch.Tensor) and leaf_name(path) in counts
        else x.to("meta")
        if isinstance(x, torch.Tensor)
        else x
        for path, x in leaves
    ]
    meta_args, meta_kwargs = pytree.tree_unflatten(whole, spec)
    plan = from_rank_zero(lambda: _decided(cell, model, meta_args, meta_kwargs, counts, options))
    local = bool(counts)
    par = sw.parallelize(
        model,
        plan,
        inputs="local" if local else "global",
        seed=data_seed(),
        init=_no_values,
        host=_on_host(model, meta_args, meta_kwargs),
    )
    assert isinstance(par, sw.Parallel), "a cell has one stage"
    _install(par, cell)
    return Split(par, local)


def _no_values(name: str, tensor: torch.Tensor) -> None:
    """Parameters get their values from the cell, not from the library."""


def _fed(options: Options, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Into how many parts each input is split over the ranks, per dim: name -> counts. Empty: every rank is given whole
    batches."""
    tensors = [
        (leaf_name(path), x)
        for path, x in pytree.tree_flatten_with_path((args, kwargs))[0]
        if isinstance(x, torch.Tensor)
    ]
    strategy = "full_batch" if options.full_batch else options.dataset_strategy
    if strategy == "full_batch":
        return {}
    if strategy == "data_parallel":
        return {name: (options.devices, *(1,) * (x.dim() - 1)) for name, x in tensors if x.dim()}
    assert not isinstance(strategy, str), "the context knows the words"
    if len(strategy) < len(tensors):  # of fewer inputs, in evaluation, the labels are missing: the last ones
        raise strict.failure(
            "dataset_strategy",
            f"the strategy {strategy} size: {len(strategy)} is not equal to inputs size: {len(tensors)}",
            f"one tuple for each of the inputs {[list(x.shape) for _, x in tensors]}",
        )
    counts: dict[str, tuple[int, ...]] = {}
    for (name, x), input_counts in zip(tensors, strategy, strict=False):
        if len(input_counts) != x.dim():
            raise strict.failure(
                "dataset_strategy",
                f"{input_counts} is for {len(input_counts)} dims, and {name} has shape {list(x.shape)}",
                "one per dim",
            )
        counts[name] = tuple(input_counts)
    return counts if any(prod(input_counts) > 1 for input_counts in counts.values()) else {}


def _decided(
    cell: nn.Module,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    counts: dict[str, tuple[int, ...]],
    options: Options,
) -> sw.Plan:
    """The plan of a cell: for training the one of ``strategy_ckpt_load_file``, if there is one; and
    ``strategy_ckpt_save_file`` keeps it."""
    load, save = (options.strategy_ckpt_load_file, options.strategy_ckpt_save_file) if cell.training else ("", "")
    if options.fusion_cuts:
        raise ValueError(
            problem(
                f"gradients are to be fused up to the positions {options.fusion_cuts}: in {options.parallel_mode} mode "
                "they travel in the order in which backward computes them",
                fix="comm_fusion={'allreduce': {'mode': 'size', 'config': 32}}: messages of up to 32 MB",
            )
        )
    plan = sw.Plan.load(load) if load else _plan(cell, model, args, kwargs, counts, options)
    if save:
        Path(save).parent.mkdir(parents=True, exist_ok=True)
        plan.save(save)
    return plan


def _plan(
    cell: nn.Module,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    counts: dict[str, tuple[int, ...]],
    options: Options,
) -> sw.Plan:
    """The library's plan of a cell in the mode of the context."""
    strategies = _has_strategies(model)
    auto = options.parallel_mode == context.ParallelMode.AUTO_PARALLEL
    priced = auto and options.search_mode in PRICED
    if auto and not priced and options.strict and not strategies:
        raise strict.failure(
            type(cell).__name__,
            "There is no operator that is configured sharding strategy.",
            "call .shard(...) on an operator, or choose search_mode='dynamic_programming'; with strict=False nothing "
            "configured means data parallelism",
        )
    kept = {name: entry for name, p in cell.named_parameters() if (entry := held(p)) is not None}
    mesh = next((entry.layout.mesh for entry in kept.values()), None)
    if mesh is None and (strategies or not priced or options.weight_shards > 0):
        mesh = Mesh({AXIS: options.devices})
    settings: dict[str, Any] = {"mode": "auto", "search": options.search_mode} if auto else {"mode": "semi_auto"}
    memory = context.settings().device_bytes
    if priced and memory is not None:
        settings["memory_bytes"] = memory
    layouts: dict[str, Any] = {name: format_layout(entry.layout) for name, entry in kept.items()}
    layouts |= {name: own for name, own in parameter_plans(cell).items() if name not in layouts}
    settings |= {"mesh": mesh, "layouts": layouts | counts, "bucket_bytes": options.bucket_bytes}
    made = partial(sw.plan, model, args, options.devices, kwargs=kwargs or None, **settings)
    if not options.enable_parallel_optimizer or kept:
        return made()
    zero = options.zero(max((p.element_size() for p in model.parameters()), default=1))
    if options.weight_shards > 0:
        zero = replace(zero, over=shard_axes(made(), options.weight_shards))
    return made(zero=zero)


def planned(cell: nn.Module, args: tuple[Any, ...], **kwargs: Any) -> sw.Plan:
    """The plan of a cell for whole batches, by the context; no ranks are needed."""
    return _plan(cell, _whole_copy(cell), args, kwargs, {}, context.options())


def _has_strategies(model: nn.Module) -> bool:
    """Whether a primitive, or a function or cell that ``ms.shard`` was given, has a strategy."""
    objects = (candidate for module in model.modules() for candidate in (module, *vars(module).values()))
    return any(getattr(candidate, "in_strategy", None) for candidate in primitives(model)) or any(
        hasattr(candidate, STRATEGIES) for candidate in objects
    )


def primitives(module: nn.Module) -> Iterator[Any]:
    """All primitives that the cells of a module hold."""
    from shardwise.mindspore.ops.primitive import Primitive

    for submodule in module.modules():
        yield from (value for value in vars(submodule).values() if isinstance(value, Primitive))


def _on_host(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, ...]:
    """The parameters that operators with ``primitive_target`` "CPU" read, found in a call without data."""
    from shardwise.mindspore.ops.primitive import host_operands

    if not any(operator.attrs.get("primitive_target") == "CPU" for operator in primitives(model)):
        return ()
    with inside(), torch.no_grad(), host_operands() as tensors:
        nn.Module.__call__(model, *args, **kwargs)
    return tuple(name for name, parameter in model.named_parameters() if any(parameter is tensor for tensor in tensors))


def _whole_copy(cell: nn.Module) -> nn.Module:
    """The cell on the meta device, with parameters of their whole shapes."""
    memo: dict[int, Any] = {}
    for tensor in [*cell.parameters(), *cell.buffers()]:
        holding = held(tensor)
        empty = torch.empty(tensor.shape if holding is None else holding.shape, dtype=tensor.dtype, device="meta")
        if isinstance(tensor, nn.Parameter):
            empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = empty
    return copy.deepcopy(cell, memo)


def _install(par: sw.Parallel, cell: nn.Module) -> None:
    """Let the cell's own parameters and buffers be those of the program, holding this rank's shards of rank 0's
    values."""
    coordinates, copied = par.plan.mesh.coordinates(dist.get_rank()), copied_axes(par.plan)
    for tensors, at in ((cell.named_parameters(remove_duplicate=False), "_parameters"),
                        (cell.named_buffers(remove_duplicate=False), "_buffers")):  # fmt: skip
        for name, tensor in tensors:
            if held(tensor) is None:
                layout = par.plan.layouts.get(name) or Layout.whole(par.plan.mesh, tuple(tensor.shape))
                whole = tensor.detach().to(par.device).contiguous()
                dist.broadcast(whole, src=0)
                hold(tensor, shard(whole, layout, coordinates).clone(), tuple(tensor.shape), layout)
            setattr(tensor, _AVERAGED, par.plan.mesh.size_of(copied.get(name, ())))
            owner, _, leaf = name.rpartition(".")
            getattr(par.get_submodule(owner), at)[leaf] = tensor


def copies(parameter: torch.Tensor) -> int:
    """How many ranks hold the same shard of a parameter."""
    holding = held(parameter)
    if holding is None:
        return context.options().devices
    return prod(
        holding.layout.mesh.sizes[axis] for axis in holding.layout.mesh.sub_axes if axis not in holding.layout.positions
    )


def averaged_over(parameter: torch.Tensor) -> int:
    """How many ranks' gradients the gradient of a parameter sums, whether or not its storage is one part of it."""
    return max(copies(parameter), getattr(parameter, _AVERAGED, 1))


def detached(result: Any) -> Any:
    return pytree.tree_map(lambda x: as_ours(x.detach()) if isinstance(x, torch.Tensor) else x, result)


def as_ours(x: Any) -> Any:
    """A tensor with the reference's methods; anything else as it is."""
    return x.as_subclass(Tensor) if isinstance(x, torch.Tensor) and not isinstance(x, nn.Parameter) else x


def _rows(par: sw.Parallel) -> list[tuple[int, int]]:
    """Which rows of the whole batch each rank is given: from, to. Empty: all ranks are given all of them."""
    plan = par.plan
    fed = [plan.layouts[entry.name] for entry in plan.inputs if entry.shape]
    if not fed:
        return []
    batch = max(input_entry.shape[0] for input_entry in par.latest.inputs if input_entry.shape)
    axes = [axis for atom in fed[0].dims[0] for axis in atom.axes]
    return _parts(Layout(plan.mesh, ((Atom(batch, tuple(axes)),),))) if axes else []


@lru_cache(maxsize=64)
def _parts(layout: Layout) -> list[tuple[int, int]]:
    """From, to: which elements of a dim each rank holds."""
    numbers = torch.arange(layout.shape[0])
    parts = [shard(numbers, layout, layout.mesh.coordinates(rank)) for rank in range(layout.mesh.num_devices)]
    return [(int(part[0]), int(part[-1]) + 1) for part in parts]


def _own_rows(x: Any, rows: list[tuple[int, int]]) -> Any:
    if not rows or not isinstance(x, torch.Tensor) or not x.dim() or x.shape[0] != max(stop for _, stop in rows):
        return x
    rows_here: torch.Tensor = _Rows.apply(x, rows)  # type: ignore[no-untyped-call]
    return rows_here


class _Rows(torch.autograd.Function):
    """This rank's rows of a tensor that all ranks hold; its gradient is gathered, since all ranks hold that, too.

    Every rank differentiates a loss of its rows: what is differentiated is the sum of these losses, with
    ``gradients_mean`` their mean.
    """

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, rows: list[tuple[int, int]]) -> torch.Tensor:
        ctx.rows, ctx.shape = rows, whole.shape
        start, stop = rows[dist.get_rank()]
        return whole[start:stop].clone()

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> tuple[torch.Tensor, None]:
        parts = [torch.empty_like(cotangent) for _ in ctx.rows]
        dist.all_gather(parts, cotangent.contiguous())
        whole = cotangent.new_zeros(ctx.shape)
        for (start, stop), part in zip(ctx.rows, parts, strict=True):
            whole[start:stop] = part
        return whole / len(set(ctx.rows)) if context.options().gradients_mean else whole, None
