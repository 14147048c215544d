"""Planning of a cell by the context: the arguments of ``sw.plan``, or a strategy file."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import shardwise as sw
from shardwise import Mesh
from shardwise.errors import problem
from shardwise.mindspore import context, staged, strict
from shardwise.mindspore.calls import inside
from shardwise.mindspore.holding import holding_of, parameter_plans, shard_axes, whole_shape
from shardwise.mindspore.layout import AXIS
from shardwise.mindspore.library import capture, format_layout, leaf_name
from shardwise.mindspore.ops.primitive import Primitive, host_operands
from shardwise.mindspore.options import Options

STRATEGIES = "_shardwise_strategies"  # the attribute of ms.shard's strategies
PRICED = ("dynamic_programming", "recursive_programming")


def decided(
    cell: nn.Module, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any],
    counts: dict[str, tuple[int, ...]], options: Options,
) -> sw.Plan:  # fmt: skip
    """Plan a cell in the mode of the context. For training ``strategy_ckpt_load_file`` takes precedence."""
    load = options.strategy_ckpt_load_file if cell.training else ""
    if options.fusion_cuts:
        what = (
            f"gradients should be fused up to {options.fusion_cuts}, but in {options.parallel_mode} mode "
            "they are sent in the order in which backward computes them"
        )
        fix = "comm_fusion={'allreduce': {'mode': 'size', 'config': 32}}: messages of up to 32 MB"
        raise ValueError(problem(what, fix=fix))
    if load:
        return sw.Plan.load(load)
    strategies = _has_strategies(model)
    auto = options.parallel_mode == context.ParallelMode.AUTO_PARALLEL
    priced = auto and options.search_mode in PRICED
    if auto and not priced and options.strict and not strategies:
        fix = (
            "call .shard(...) on an operator, or choose search_mode='dynamic_programming'; with strict=False nothing "
            "configured means data parallelism"
        )
        raise strict.failure(type(cell).__name__, "There is no operator that is configured sharding strategy.", fix)
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
    gradient_bytes = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    settings |= {"mesh": mesh, "layouts": layouts | counts, "bucket_bytes": context.message_bytes(gradient_bytes)}
    if staged.is_on():
        settings |= staged.settings(model, args, getattr(cell, "micro_size", 1), options)
    make_plan = partial(sw.plan, model, args, options.devices, kwargs=kwargs or None, **settings)
    if not options.enable_parallel_optimizer or kept:
        return make_plan().plan
    zero = options.zero(max((p.element_size() for p in model.parameters()), default=1))
    if options.weight_shards > 0:
        zero = replace(zero, over=shard_axes(make_plan().plan.alone(0), options.weight_shards))
    return make_plan(zero=zero).plan


def fed_counts(options: Options, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the number of parts per dim into which the ranks split each input: name -> counts. Empty: every rank is
    given whole batches."""
    leaves = pytree.tree_flatten_with_path((args, kwargs))[0]
    tensors = [(leaf_name(path), x) for path, x in leaves if isinstance(x, torch.Tensor)]
    strategy = "full_batch" if options.full_batch else options.dataset_strategy
    if strategy == "full_batch":
        return {}
    if strategy == "data_parallel":
        return {name: (options.devices, *(1,) * (x.dim() - 1)) for name, x in tensors if x.dim()}
    assert not isinstance(strategy, str), "the context has checked the name"
    if len(strategy) < len(tensors):  # in evaluation the last inputs, the labels, may be missing
        what = f"the strategy {strategy} size: {len(strategy)} is not equal to inputs size: {len(tensors)}"
        fix = f"one tuple for each of the inputs {[list(x.shape) for _, x in tensors]}"
        raise strict.failure("dataset_strategy", what, fix)
    counts: dict[str, tuple[int, ...]] = {}
    for (name, x), input_counts in zip(tensors, strategy, strict=False):
        if len(input_counts) != x.dim():
            what = f"{input_counts} is for {len(input_counts)} dims, and {name} has shape {list(x.shape)}"
            raise strict.failure("dataset_strategy", what, "one per dim")
        counts[name] = tuple(input_counts)
    return counts if any(prod(input_counts) > 1 for input_counts in counts.values()) else {}


def _has_strategies(model: nn.Module) -> bool:
    objects = (candidate for module in model.modules() for candidate in (module, *vars(module).values()))
    return any(getattr(x, "in_strategy", None) or hasattr(x, STRATEGIES) for x in objects)


def primitives(module: nn.Module) -> Iterator[Any]:
    """Yield all primitives that the cells of a module hold."""
    for submodule in module.modules():
        yield from (value for value in vars(submodule).values() if isinstance(value, Primitive))


def host_parameters(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, ...]:
    """Return the parameters that operators with ``primitive_target`` "CPU" read, found by a call on the meta device."""
    if not any(operator.attrs.get("primitive_target") == "CPU" for operator in primitives(model)):
        return ()
    with inside(), torch.no_grad(), host_operands() as tensors:
        nn.Module.__call__(model, *args, **kwargs)
    return tuple(name for name, parameter in model.named_parameters() if any(parameter is tensor for tensor in tensors))


def changed_parameters(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[str]:
    """Return the untrained parameters that a call changes: a queue, a memory, a count."""
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    if not frozen:
        return frozen
    as_buffers = copy.deepcopy(model)
    be_buffers(as_buffers, frozen)
    graph = capture(as_buffers, args, kwargs).graph
    return frozen & {name for buffer, _ in graph.mutations for name in graph.source_of[buffer].names}


def be_buffers(model: nn.Module, names: set[str]) -> None:
    """Turn parameters into buffers, which a graph may change."""
    ids = {id(model.get_parameter(name)) for name in names}
    for module in model.modules():
        for leaf in [leaf for leaf, parameter in module._parameters.items() if id(parameter) in ids]:
            module._buffers[leaf] = module._parameters.pop(leaf)


def whole_copy(cell: nn.Module, args: tuple[Any, ...]) -> tuple[nn.Module, tuple[Any, ...]]:
    """Copy the cell to the meta device, with parameters of their whole shapes. Return the copy and its inputs; of a
    cell in stages those of a micro-batch's loss."""
    memo: dict[int, Any] = {}
    for tensor in [*cell.parameters(), *cell.buffers()]:
        empty = torch.empty(whole_shape(tensor), dtype=tensor.dtype, device="meta")
        if isinstance(tensor, nn.Parameter):
            empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = empty
    model = copy.deepcopy(cell, memo)
    if staged.is_on():
        return staged.MicroBatch(model.get_submodule("network")), (torch.tensor(1.0), *args)
    return model, args
