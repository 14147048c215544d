"""Execution of cells: eagerly, or as this rank's part of a plan.

In stand_alone, data_parallel and hybrid_parallel mode a cell is ordinary eager code on every rank. In
semi_auto_parallel and auto_parallel mode the outermost call of a cell is planned (``sw.plan``) and split
(``sw.parallelize``) once. Later calls with other shapes are captured by the same ``sw.Parallel``. The cell's parameters
then hold this rank's shards.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

import shardwise as sw
from shardwise.errors import problem
from shardwise.mindspore import context, holding, ir, planning, staged
from shardwise.mindspore.calls import inside, is_split
from shardwise.mindspore.checks import note
from shardwise.mindspore.common.seed import data_seed
from shardwise.mindspore.holding import checkpoint_names
from shardwise.mindspore.library import Atom, Layout, from_rank_zero, leaf_name, ranks, shard
from shardwise.mindspore.tensor import as_ours, plain


@dataclass
class Split:
    """A split cell on this rank. ``local``: ranks feed their own parts of a batch."""

    par: sw.Parallel
    local: bool
    written: int = 0  # number of programs whose IR has been written


_SPLITS: weakref.WeakKeyDictionary[nn.Module, Split] = weakref.WeakKeyDictionary()


def call(cell: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the outermost call of a cell and return whole tensors. Where ranks feed their own parts of a batch, return
    this rank's rows of every result with a batch dim."""
    leaves = pytree.tree_leaves((args, kwargs)) if is_split() else []
    if any(isinstance(x, torch.Tensor) and holding.parameter_of(x) is not None for x in leaves):
        _check_whole(cell)
        return nn.Module.__call__(cell, *args, **kwargs)  # on gradients, which are sharded like their parameters
    args, kwargs = pytree.tree_map(plain, (args, kwargs))
    if not is_split() or _runs_by_itself(cell, (args, kwargs)):
        _check_whole(cell)
        with inside():
            result = nn.Module.__call__(cell, *args, **kwargs)
    elif staged.is_on() and not hasattr(cell, "micro_size"):
        result = _outside_of_stages(cell, args, kwargs)
    elif torch.is_grad_enabled() and any(x.requires_grad for x in leaves if isinstance(x, torch.Tensor)):
        result = _of_computed(cell, args, kwargs)
    else:
        split, result = run(cell, args, kwargs)
        if split.local and not split.par.plan.is_pipeline:
            result = pytree.tree_map(partial(_own_rows, rows=_rows_of(split.par)), result)
    return pytree.tree_map(as_ours, result)


def _of_computed(cell: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a cell for inputs that require gradients, such as results of another cell. Every rank computes it whole.
    Raises RuntimeError where ranks have rows of their own."""
    if staged.is_on() or planning.fed_counts(context.options(), args, kwargs):
        what = "its input requires a gradient, and ranks feed it in parts"
        fix = "full_batch=True, or one cell that contains this one and computes its input"
        raise RuntimeError(problem(what, op=type(cell).__name__, fix=fix))
    note(f"{type(cell).__name__} gets inputs that require gradients: every rank computes it whole")
    # split now, so that parameters are kept the same way in any order of calls
    split_of(cell, *pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs)))
    with inside():
        return torch.func.functional_call(cell, holding.with_whole_parameters(cell), args, kwargs)


def _outside_of_stages(cell: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a cell that is no PipelineCell while parameters are in stages: all ranks gather all parameters to evaluate
    it. Raises RuntimeError in training."""
    if cell.training and torch.is_grad_enabled() and any(p.requires_grad for p in cell.parameters()):
        what = f"{type(cell).__name__} is trained with pipeline_stages={context.options().pipeline_stages}"
        fix = "train nn.PipelineCell(net_with_loss, micro_size); for evaluation call set_train(False)"
        raise RuntimeError(problem(what, fix=fix))
    with inside(), torch.no_grad():
        return torch.func.functional_call(cell, holding.with_whole_parameters(cell), args, kwargs)


def _check_whole(cell: nn.Module) -> None:
    """Raise RuntimeError if the cell's parameters are shards, which only a plan can compute with."""
    for name, parameter in cell.named_parameters():
        entry = holding.holding_of(parameter)
        if entry is not None and entry.is_split:
            what = f"{name} is split as {entry.layout}, and the mode is {context.options().parallel_mode} now"
            fix = "keep the context with which the cell was split, or build the cell again"
            raise RuntimeError(problem(what, op=type(cell).__name__, fix=fix))


def _runs_by_itself(cell: nn.Module, inputs: Any) -> bool:
    """Return whether a cell needs no plan: a loss of another cell's results in a user-written loop."""
    if getattr(cell, "is_loss", False):
        return True
    computed = any(isinstance(x, torch.Tensor) and x.requires_grad for x in pytree.tree_leaves(inputs))
    return computed and not any(parameter.requires_grad for parameter in cell.parameters())


def run(cell: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], scale: float = 1.0) -> tuple[Split, Any]:
    """Run a split cell. Return its part on this rank and its results, whole and differentiable. ``scale``: factor of
    the loss before its gradient is computed, for cells in stages, which compute it at once."""
    args, micro_size = _fed(cell, args, kwargs), getattr(cell, "micro_size", 0)
    split = split_of(cell, args, kwargs)
    if split.par.training != cell.training:
        split.par.train(cell.training)
    with inside():
        if split.par.plan.is_pipeline:
            return split, staged.loss_of(split.par, args, micro_size, scale)
        result = split.par(*args, **kwargs)
    if context.settings().save_graphs and split.written < len(split.par.compiled):
        split.written = len(split.par.compiled)
        ir.save(cell, split.par)
    return split, result


def _fed(cell: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return the inputs of a cell; for a cell in stages, those of all micro-batches. Raises RuntimeError for a cell in
    stages that is no PipelineCell."""
    if not staged.is_on():
        return args
    options, micro_size = context.options(), getattr(cell, "micro_size", 0)
    if not micro_size or kwargs:
        what = f"{type(cell).__name__} is trained with pipeline_stages={options.pipeline_stages}"
        fix = "nn.PipelineCell(net_with_loss, micro_size), called with its inputs by position"
        raise RuntimeError(problem(what, fix=fix))
    return staged.fed(args, micro_size, options)


def split_of(cell: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Split:
    """Return the split cell. It is split once, for its first inputs."""
    if cell not in _SPLITS:
        _SPLITS[cell] = _split(cell, args, kwargs)
    return _SPLITS[cell]


def layouts_of(cell: Any, inputs: tuple[Any, ...]) -> dict[str, Layout]:
    """Return the layouts of a cell's parameters by their checkpoint names. The cell is split as its first call would do
    it. Raises RuntimeError in modes that split nothing."""
    if not is_split():
        what = f"parallel_mode {context.options().parallel_mode!r} splits no parameters"
        raise RuntimeError(problem(what, op=type(cell).__name__, fix="semi_auto_parallel or auto_parallel mode"))
    split_of(cell, _fed(cell, tuple(plain(x) for x in inputs), {}), {})
    holdings = ((name, holding.holding_of(parameter)) for name, parameter in checkpoint_names(cell).items())
    return {name: entry.layout for name, entry in holdings if entry is not None}


def own_part(split: Split, index: int, whole: torch.Tensor) -> torch.Tensor:
    """Return the part of the ``index``-th output that this rank had computed before it was gathered."""
    layout = split.par.output_layout(index)
    part: torch.Tensor = shard(whole, layout, split.par.plan.mesh.coordinates(dist.get_rank()))
    return part


def _split(cell: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Split:
    options = context.options()
    if not dist.is_initialized():
        n = options.devices
        what = f"parallel_mode {options.parallel_mode!r} on {n} devices needs connected ranks"
        fix = ("call communication.init() first, and start the program with: shardwise run -n "
               f"{n} net.py (or mpirun -n {n} python net.py)")  # fmt: skip
        raise RuntimeError(problem(what, fix=fix))
    counts = {} if staged.is_on() else planning.fed_counts(options, args, kwargs)
    model, args = planning.whole_copy(cell, args)

    def on_meta(path: Any, x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or leaf_name(path) not in counts:
            return x.to("meta") if isinstance(x, torch.Tensor) else x
        sizes = [size * parts for size, parts in zip(x.shape, counts[leaf_name(path)], strict=True)]
        return torch.empty(sizes, dtype=x.dtype, device="meta")

    meta_args, meta_kwargs = pytree.tree_map_with_path(on_meta, (args, kwargs))
    planning.be_buffers(model, from_rank_zero(lambda: planning.changed_parameters(model, meta_args, meta_kwargs)))
    plan = from_rank_zero(lambda: planning.decided(cell, model, meta_args, meta_kwargs, counts, options))
    if save := options.strategy_ckpt_save_file if cell.training else "":
        _save(plan, Path(save))
    if groups := options.group_ckpt_save_file or ranks.group_file():
        holding.save_group(plan, dist.get_rank(), groups)
    host = planning.host_parameters(model, meta_args, meta_kwargs)
    inputs: Literal["local", "global"] = "local" if counts else "global"
    par = sw.parallelize(model, plan, inputs=inputs, seed=data_seed(), init=_values(cell), host=host)
    _install(par, cell)
    return Split(par, bool(counts))


def _save(plan: sw.Plan, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rank_file = path.with_name(f"{path.name}.{dist.get_rank()}")
    plan.save(rank_file)
    rank_file.replace(path)


def _named(cell: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(cell.named_parameters(remove_duplicate=False)), **dict(cell.named_buffers(remove_duplicate=False))}


def _values(cell: nn.Module) -> Any:
    """Return a function that fills in whole initial values, one tensor at a time. Tensors that were split before, or
    read from ranks' checkpoints, are gathered; the others are rank 0's. Every rank must ask for the same tensors."""
    named, holding_by_name = _named(cell), dict[str, holding.Held]()
    by_rank: list[dict[str, holding.Held]] = [{}] * dist.get_world_size()
    own_holdings = {name: entry for name, tensor in named.items() if (entry := holding.holding_of(tensor))}
    dist.all_gather_object(by_rank, own_holdings)
    for holdings in by_rank:
        holding_by_name |= holdings

    def value(name: str, tensor: torch.Tensor) -> None:
        tensor.copy_(holding.gathered(named[name], holding_by_name.get(name)))

    return value


def _install(par: sw.Parallel, cell: nn.Module) -> None:
    """Make the cell's own parameters and buffers those of the program, with its shards."""
    plan, program_tensors, own_names = par.plan, _named(par), _named(cell)
    tied: dict[int, list[str]] = {}
    for name, tensor in own_names.items():
        tied.setdefault(id(tensor), []).append(name)
    for names in tied.values():
        tensor = own_names[names[0]]
        name = next((n for n in names for stage in plan.stages if n in stage.layouts), names[0])  # a plan has one
        home = next((stage for stage in plan.stages if name in stage.layouts), plan.stages[0])
        here = [alias for alias in names if alias in program_tensors]
        if here:
            stages = (stage for stage in plan.stages if dist.get_rank() in stage.placement.ranks)
            home = next((stage for stage in stages if name in stage.layouts), home)
        layout = home.layouts.get(name) or Layout.whole(home.mesh, holding.whole_shape(tensor))
        part = program_tensors[here[0]].data if here else tensor.data.new_empty(0)
        if holding.holding_of(tensor) is not None and part.shape == tensor.shape:
            part = tensor.data  # shared with another program
        axes = holding.copied_axes(plan.alone(plan.stages.index(home))).get(name, ())
        holding.hold(tensor, part, holding.Held(layout, home.placement.ranks), home.mesh.size_of(axes))
        for alias in here:
            owner, _, leaf = alias.rpartition(".")
            table = "_parameters" if isinstance(tensor, nn.Parameter) else "_buffers"
            own_table = getattr(par.get_submodule(owner), table)
            if leaf in own_table:
                own_table[leaf] = tensor
            else:  # a buffer in the program: share the memory
                program_tensors[alias].data = part


# -- rows of a batch that each rank is given --------------------------------------------------------------------------


def _rows_of(par: sw.Parallel) -> list[tuple[int, int]]:
    """Return each rank's rows (start, stop) of the whole batch. Empty: all ranks are given all of them."""
    plan = par.plan
    fed = [plan.layouts[entry.name] for entry in plan.inputs if entry.shape]
    if not fed:
        return []
    batch = max(input_entry.shape[0] for input_entry in par.latest.inputs if input_entry.shape)
    axes = [axis for atom in fed[0].dims[0] for axis in atom.axes]
    return _parts(Layout(plan.mesh, ((Atom(batch, tuple(axes)),),))) if axes else []


@lru_cache(maxsize=64)
def _parts(layout: Layout) -> list[tuple[int, int]]:
    numbers = torch.arange(layout.shape[0])
    parts = [shard(numbers, layout, layout.mesh.coordinates(rank)) for rank in range(layout.mesh.num_devices)]
    return [(int(part[0]), int(part[-1]) + 1) for part in parts]


def _own_rows(x: Any, rows: list[tuple[int, int]]) -> Any:
    if not rows or not isinstance(x, torch.Tensor) or not x.dim() or x.shape[0] != max(stop for _, stop in rows):
        return x
    apply: Any = _Rows.apply
    return apply(x, rows)


class _Rows(torch.autograd.Function):
    """Slice of this rank's rows. Its gradient is all-gathered, since all ranks hold the whole tensor.

    Every rank differentiates a loss of its rows, so the gradient is that of the sum of these losses, or of their mean
    with ``gradients_mean``.
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
        if not context.options().gradients_mean:
            text = "gradients of this loop are summed over the ranks; gradients_mean=True averages, as Model.train has"
            note(f"{text} the loss of all rows", "loop")
        return whole / len(set(ctx.rows)) if context.options().gradients_mean else whole, None
