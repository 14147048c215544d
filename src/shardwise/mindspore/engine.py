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
from functools import partial
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
from shardwise.graph.capture import capture
from shardwise.graph.trees import leaf_name
from shardwise.graph.widen import in_reference_mode
from shardwise.launch.ranks import group_file
from shardwise.layouts.layout import Layout
from shardwise.layouts.mesh import Mesh
from shardwise.layouts.text import format_layout
from shardwise.mindspore import context, staged, strict
from shardwise.mindspore.common.seed import data_seed
from shardwise.mindspore.holding import Held, gathered, hold, holding_of, parameter_of, whole, with_whole_parameters
from shardwise.mindspore.layout import AXIS
from shardwise.mindspore.notes import note
from shardwise.mindspore.options import Options
from shardwise.mindspore.own_rows import own_rows, rows_of
from shardwise.mindspore.storage import copied_axes, parameter_plans, shard_axes
from shardwise.mindspore.tensor import Tensor, plain
from shardwise.runtime.agree import from_rank_zero
from shardwise.runtime.pipeline import Pipeline
from shardwise.runtime.shards import shard

STRATEGIES = "_shardwise_strategies"  # the attribute of what ms.shard was given
PRICED = ("dynamic_programming", "recursive_programming")
_INSIDE: ContextVar[bool] = ContextVar("shardwise_inside_cell", default=False)


@dataclass
class Split:
    """A cell on this rank. ``local``: ranks feed their parts of a batch, which the plan knows."""

    par: sw.Parallel | Pipeline
    local: bool
    written: int = 0  # programs whose IR has been written


_SPLITS: weakref.WeakKeyDictionary[nn.Module, Split] = weakref.WeakKeyDictionary()
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

    is_inside = _INSIDE.get()

    @contextmanager
    def second() -> Iterator[None]:  # backward of a Tensor disables what its class makes of operators
        with _noted(_AGAIN, True), _noted(_INSIDE, is_inside), torch._C._EnableTorchFunction():
            yield

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return _noted(_AGAIN, False), second()

    return checkpoint(function, *args, use_reentrant=False, context_fn=contexts, **(kwargs or {}))


def is_again() -> bool:
    """Whether a function runs a second time, for backward."""
    return _AGAIN.get()


def is_split() -> bool:
    """Whether cells run as parts of a plan: the mode is semi_auto or auto, on several devices."""
    options = context.options()
    return options.distributed and options.devices > 1


def call(cell: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The outermost call of a cell: every tensor it returns, whole; where ranks feed their parts of a batch, this
    rank's rows of whatever has a batch."""
    leaves = pytree.tree_leaves((args, kwargs)) if is_split() else []
    if any(isinstance(x, torch.Tensor) and parameter_of(x) is not None for x in leaves):
        _check_whole(cell)
        return nn.Module.__call__(cell, *args, **kwargs)  # of gradients: parts, as their parameters are
    args, kwargs = pytree.tree_map(plain, (args, kwargs))
    if not is_split() or _runs_by_itself(cell, (args, kwargs)):
        _check_whole(cell)
        with inside():
            return pytree.tree_map(as_ours, nn.Module.__call__(cell, *args, **kwargs))
    if staged.is_on() and not hasattr(cell, "micro_size"):
        return pytree.tree_map(as_ours, _outside_of_stages(cell, args, kwargs))
    if torch.is_grad_enabled() and any(x.requires_grad for x in leaves if isinstance(x, torch.Tensor)):
        return pytree.tree_map(as_ours, _of_computed(cell, args, kwargs))
    split, result = run(cell, args, kwargs)
    if split.local and isinstance(split.par, sw.Parallel):
        result = pytree.tree_map(partial(own_rows, rows=rows_of(split.par)), result)
    return pytree.tree_map(as_ours, result)


def _of_computed(cell: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a cell returns for inputs whose gradients are wanted, such as what another cell returned: every rank
    computes it whole. Raises RuntimeError where ranks have rows of their own."""
    if staged.is_on() or _fed(context.options(), args, kwargs):
        what = "the gradient of its input is wanted, which it is given in parts"
        fix = "full_batch=True, or one cell that holds this one and what computes its input"
        raise RuntimeError(problem(what, op=type(cell).__name__, fix=fix))
    note(f"{type(cell).__name__} is given what was computed with gradients: every rank computes it whole")
    if cell not in _SPLITS:  # parameters are kept in the same way whatever comes first
        inputs = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs))
        _SPLITS[cell] = _split(cell, *inputs)
    with inside():
        return torch.func.functional_call(cell, with_whole_parameters(cell), args, kwargs)


def _outside_of_stages(cell: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a cell returns that is no PipelineCell, where parameters are in stages: for evaluation all ranks have all
    of them meanwhile. Raises RuntimeError in training."""
    if cell.training and torch.is_grad_enabled() and any(p.requires_grad for p in cell.parameters()):
        raise RuntimeError(
            problem(
                f"{type(cell).__name__} is trained with pipeline_stages={context.options().pipeline_stages}",
                fix="train nn.PipelineCell(net_with_loss, micro_size); for evaluation call set_train(False)",
            )
        )
    with inside(), torch.no_grad(), whole(cell):
        return nn.Module.__call__(cell, *args, **kwargs)


def _check_whole(cell: nn.Module) -> None:
    """Raises RuntimeError where the cell's parameters are shards, which only a plan can compute with."""
    for name, parameter in cell.named_parameters():
        holding = holding_of(parameter)
        if holding is not None and holding.is_split:
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


def run(cell: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], scale: float = 1.0) -> tuple[Split, Any]:
    """The part of a split cell on this rank, and what it returned: whole tensors, differentiable. ``scale``: what the
    loss is multiplied by before its gradient is computed, where a cell in stages computes it at once."""
    options, micro_size = context.options(), getattr(cell, "micro_size", 0)
    if staged.is_on():
        if not micro_size or kwargs:
            what = f"{type(cell).__name__} is trained with pipeline_stages={options.pipeline_stages}"
            fix = "nn.PipelineCell(net_with_loss, micro_size), called with its inputs by position"
            raise RuntimeError(problem(what, fix=fix))
        args = staged.fed(args, micro_size, options)
    split = _SPLITS.get(cell)
    if split is None:
        split = _SPLITS[cell] = _split(cell, args, kwargs)
    if split.par.training != cell.training:
        split.par.train(cell.training)
    with inside():
        if isinstance(split.par, Pipeline):
            return split, staged.loss_of(split.par, args, micro_size, scale)
        result = split.par(*args, **kwargs)
    if context.settings().save_graphs and split.written < len(split.par.compiled):
        from shardwise.mindspore import ir

        split.written = len(split.par.compiled)
        ir.save(cell, split.par)
    return split, result


def plan_of(cell: nn.Module) -> sw.Plan:
    """The plan of a cell that has run split. Raises RuntimeError for another."""
    split = next((_SPLITS[module] for module in cell.modules() if module in _SPLITS), None)
    if split is None:
        raise RuntimeError(problem(f"{type(cell).__name__} has not run split yet", fix="call it, or train it, first"))
    return split.par.plan


def own_part(split: Split, index: int, whole: torch.Tensor) -> torch.Tensor:
    """Of the ``index``-th tensor that a split cell returned, what this rank had computed of it before it was
    gathered."""
    assert isinstance(split.par, sw.Parallel), "a loss of stages is one number"
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
    counts: dict[str, tuple[int, ...]] = {}
    if staged.is_on():
        model, args = staged.MicroBatch(model.get_submodule("network")), (torch.tensor(1.0), *args)
    else:
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
    _be_buffers(model, from_rank_zero(lambda: _state(model, meta_args, meta_kwargs)))
    plan = from_rank_zero(lambda: _decided(cell, model, meta_args, meta_kwargs, counts, options))
    if save := options.strategy_ckpt_save_file if cell.training else "":
        _save(plan, Path(save))
    if groups := options.group_ckpt_save_file or group_file():
        from shardwise.mindspore.train.transforms import save_group

        save_group(plan, dist.get_rank(), groups)
    local = bool(counts)
    par = sw.parallelize(
        model,
        plan,
        inputs="local" if local else "global",
        seed=data_seed(),
        init=_values(cell),
        host=_on_host(model, meta_args, meta_kwargs),
    )
    _install(par, cell)
    return Split(par, local)


def _named(cell: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by all of their names."""
    return {**dict(cell.named_parameters(remove_duplicate=False)), **dict(cell.named_buffers(remove_duplicate=False))}


def _values(cell: nn.Module) -> Any:
    """The whole initial values, one at a time: what a cell holds that was split before, or read from a checkpoint of
    ranks, and rank 0's of all else. Every rank asks for the same."""
    named, known = _named(cell), dict[str, Held]()
    told: list[dict[str, Held]] = [{}] * dist.get_world_size()
    dist.all_gather_object(told, {name: holding for name, tensor in named.items() if (holding := holding_of(tensor))})
    for holdings in told:
        known |= holdings

    def value(name: str, tensor: torch.Tensor) -> None:
        tensor.copy_(gathered(named[name], known.get(name)))

    return value


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
    """The plan of a cell: for training the one of ``strategy_ckpt_load_file``, if there is one."""
    load = options.strategy_ckpt_load_file if cell.training else ""
    if options.fusion_cuts:
        raise ValueError(
            problem(
                f"gradients are to be fused up to the positions {options.fusion_cuts}: in {options.parallel_mode} mode "
                "they travel in the order in which backward computes them",
                fix="comm_fusion={'allreduce': {'mode': 'size', 'config': 32}}: messages of up to 32 MB",
            )
        )
    return sw.Plan.load(load) if load else _plan(cell, model, args, kwargs, counts, options)


def _save(plan: sw.Plan, path: Path) -> None:
    """Write the plan of all ranks to the file of each, which may be one for all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rank_file = path.with_name(f"{path.name}.{dist.get_rank()}")
    plan.save(rank_file)
    rank_file.replace(path)


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
    kept = {name: entry for name, p in cell.named_parameters() if (entry := holding_of(p)) is not None}
    mesh = next((entry.layout.mesh for entry in kept.values()), None)
    if mesh is None and (strategies or not priced or options.weight_shards > 0):
        mesh = Mesh({AXIS: options.stage_devices})
    settings: dict[str, Any] = {"mode": "auto", "search": options.search_mode} if auto else {"mode": "semi_auto"}
    memory = context.settings().device_bytes
    if priced and memory is not None:
        settings["memory_bytes"] = memory
    layouts: dict[str, Any] = {name: format_layout(entry.layout) for name, entry in kept.items()}
    layouts |= {name: split_counts for name, split_counts in parameter_plans(cell).items() if name not in layouts}
    settings |= {"mesh": mesh, "layouts": layouts | counts, "bucket_bytes": options.bucket_bytes}
    if staged.is_on():
        settings |= staged.settings(model, args, getattr(cell, "micro_size", 1), options)
    make_plan = partial(sw.plan, model, args, options.devices, kwargs=kwargs or None, **settings)
    if not options.enable_parallel_optimizer or kept:
        return make_plan()
    zero = options.zero(max((p.element_size() for p in model.parameters()), default=1))
    if options.weight_shards > 0:
        zero = replace(zero, over=shard_axes(make_plan().alone(0), options.weight_shards))
    return make_plan(zero=zero)


def planned(cell: nn.Module, args: tuple[Any, ...], **kwargs: Any) -> sw.Plan:
    """The plan of a cell for whole batches, by the context; no ranks are needed."""
    model = _whole_copy(cell)
    if staged.is_on():
        model, args = staged.MicroBatch(model.get_submodule("network")), (torch.tensor(1.0), *args)
    _be_buffers(model, _state(model, args, kwargs))
    return _plan(cell, model, args, kwargs, {}, context.options())


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


def _state(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[str]:
    """The parameters that are not trained and that a call changes: a queue, a memory, a count."""
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    if not frozen:
        return frozen
    as_buffers = copy.deepcopy(model)
    _be_buffers(as_buffers, frozen)
    graph = capture(as_buffers, args, kwargs).graph
    return frozen & {name for buffer, _ in graph.mutations for name in graph.source_of[buffer].names}


def _be_buffers(model: nn.Module, names: set[str]) -> None:
    """Let parameters be buffers, which a graph may change."""
    ids = {id(model.get_parameter(name)) for name in names}
    for module in model.modules():
        for leaf in [leaf for leaf, parameter in module._parameters.items() if id(parameter) in ids]:
            module._buffers[leaf] = module._parameters.pop(leaf)


def _whole_copy(cell: nn.Module) -> nn.Module:
    """The cell on the meta device, with parameters of their whole shapes."""
    memo: dict[int, Any] = {}
    for tensor in [*cell.parameters(), *cell.buffers()]:
        empty = torch.empty(_shape(tensor), dtype=tensor.dtype, device="meta")
        if isinstance(tensor, nn.Parameter):
            empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = empty
    return copy.deepcopy(cell, memo)


def _install(par: sw.Parallel | Pipeline, cell: nn.Module) -> None:
    """Let the cell's own parameters and buffers be those of the program, with the shards that it has made."""
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
        layout = home.layouts.get(name) or Layout.whole(home.mesh, _shape(tensor))
        part = program_tensors[here[0]].data if here else tensor.data.new_empty(0)
        if holding_of(tensor) is not None and part.shape == tensor.shape:
            part = tensor.data  # which another program has, too
        axes = copied_axes(plan.alone(plan.stages.index(home))).get(name, ())
        hold(tensor, part, Held(layout, home.placement.ranks), home.mesh.size_of(axes))
        for alias in here:
            owner, _, leaf = alias.rpartition(".")
            table = "_parameters" if isinstance(tensor, nn.Parameter) else "_buffers"
            own_table = getattr(par.get_submodule(owner), table)
            if leaf in own_table:
                own_table[leaf] = tensor
            else:  # a buffer there, of the same memory
                program_tensors[alias].data = part


def _shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """The whole one."""
    holding = holding_of(tensor)
    return tuple(tensor.shape) if holding is None else holding.shape


def detached(result: Any) -> Any:
    return pytree.tree_map(lambda x: as_ours(x.detach()) if isinstance(x, torch.Tensor) else x, result)


def as_ours(x: Any) -> Any:
    """A tensor with the reference's methods; anything else as it is."""
    return x.as_subclass(Tensor) if isinstance(x, torch.Tensor) and not isinstance(x, nn.Parameter) else x
