"""Reads a MindSpore strategy file (``strategy_ckpt_config={"save_file": "strategy.json"}``) for ``sw.plan``.

For every operator the file lists how many ways each dim of its inputs is split (``parallel_strategy_item``). For every
parameter it lists its slices (``parallel_layout_item``): a *device matrix* (sizes, the last one fastest over ranks),
and a *tensor map*, which gives for every dim of the tensor the index of a device dim, counted from the right (-1: the
dim is whole). ``opt_weight_shard_step`` and ``_size`` split the first dim once more, over ``_size`` ranks at distance
``_step``. MindSpore is not run: ``sw.plan`` plans the file's strategies, and the resulting program is verified.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import prod
from typing import Any, TypeVar

from torch import nn

from shardwise.costs.kernels import is_view
from shardwise.errors import ShardwiseError, listed
from shardwise.graph.ir import Graph, Op
from shardwise.layouts.mesh import Mesh
from shardwise.untrusted_text import shorten_repr

_T = TypeVar("_T")
Counts = tuple[tuple[int, ...], ...]  # per operand and dim the number of slices
ITEMS = ("parallel_strategy_item", "parallel_layout_item")
# Names of MindSpore's parameters -> those of torch's modules.
_NAMES = {
    "gamma": "weight",
    "beta": "bias",
    "embedding_table": "weight",
    "moving_mean": "running_mean",
    "moving_variance": "running_var",
}
# Cells that MindSpore's training puts around a network.
_WRAPPERS = ("network", "_backbone", "_network")
# MindSpore's name of an operator -> possible names in torch.
_OPERATORS = {
    "MatMul": ("linear", "mm", "matmul", "addmm"),
    "BatchMatMul": ("matmul", "bmm"),
    "Gather": ("embedding",),
    "LayerNorm": ("layer_norm", "native_layer_norm"),
    "Conv2D": ("conv2d", "convolution"),
}


@dataclass(frozen=True)
class StrategyFile:
    """The content of the file for one module. ``layouts``: parameter -> layout as text; ``strategies``: module -> split
    counts of its operator; ``unused``: entries that name nothing in the module, or no single operator of a module;
    ``faults``: impossible entries, a sentence each."""

    mesh: Mesh
    layouts: dict[str, str]
    strategies: dict[str, Counts]
    unused: tuple[str, ...]
    faults: tuple[str, ...]


@dataclass(frozen=True)
class _Slices:
    """The slices of a parameter: device matrix, tensor map and further split of the first dim."""

    sizes: tuple[int, ...]
    places: tuple[int, ...]
    shard: tuple[int, int]  # (distance, number) of the ranks that split the first dim once more


def is_strategy_file(plan: Any) -> bool:
    return isinstance(plan, Mapping) and any(item in plan for item in ITEMS)


def read_strategies(module: nn.Module, plan: Mapping[str, Any], graph: Graph, devices: int) -> StrategyFile:
    """Read the file for ``module``, captured as ``graph``. Raises ShardwiseError if it is no such file, has several
    stages, is for another number of devices, or names nothing in the module."""
    strategies, slices = _items(plan)
    shapes = {name: tuple(p.shape) for name, p in (*module.named_parameters(), *module.named_buffers())}
    named = {name: (_parameter_of(name, shapes), one) for name, one in slices.items()}
    unused = [name for name, (parameter, _) in named.items() if parameter is None]
    mesh = _mesh([one for _, one in named.values()], devices)
    layouts: dict[str, str] = {}
    faults: list[str] = []
    for name, (parameter, one) in named.items():
        if parameter is not None:
            _add(layouts, faults, parameter, partial(_layout, one, shapes[parameter], mesh), name)
    operators: dict[str, Counts] = {}
    for node, counts in strategies.items():
        path, op = _operator(node, graph, {name for name, _ in module.named_modules()})
        dims = None if op is None else _of_operands(op, counts, graph)
        if op is None or dims is None:
            unused.append(node)
        else:
            _add(operators, faults, path, partial(_checked, dims, op, graph, devices), node)
    if not layouts and not operators and not faults:
        there = [*shapes]
        raise ShardwiseError(
            f"the strategy file names nothing in {type(module).__name__}: {listed(unused)}",
            facts=[("there is", listed(there))],
            fix="parameters are found by name (fc1.weight), operators by their cells (.../fc1-Dense/MatMul-op3)",
        )
    return StrategyFile(mesh, layouts, operators, tuple(sorted(unused)), tuple(faults))


def _add(into: dict[str, _T], faults: list[str], key: str, make: Callable[[], _T], name: str) -> None:
    try:
        value = make()
    except ShardwiseError as error:
        faults.append(f"{name}: {error}")
        return
    if into.setdefault(key, value) != value:
        faults.append(f"{name}: the file has {value} for {key}, but {into[key]} under another name")


def _items(plan: Mapping[str, Any]) -> tuple[dict[str, Counts], dict[str, _Slices]]:
    """Return split counts by node, and slices by parameter. Optimizer states are skipped: they follow parameters."""
    try:
        strategies = {}
        for node, item in dict(plan.get(ITEMS[0]) or {}).items():
            _no_stage(item["stage"], node)
            strategies[str(node)] = tuple(tuple(map(_whole, dims)) for dims in item["parallel_strategy"])
        slices = {}
        for name, item in dict(plan.get(ITEMS[1]) or {}).items():
            shard = _whole(item.get("opt_weight_shard_step", 0)), _whole(item.get("opt_weight_shard_size", 0))
            if min(shard) < 0:
                raise ValueError(f"opt_weight_shard of {name} is {shard}")
            sizes = tuple(map(_whole, item["dev_matrix"]))
            if not str(name).startswith(("moments.", "moment1.", "moment2.", "accum.", "stat.")):
                slices[str(name)] = _Slices(sizes, tuple(map(_whole, item["tensor_map"])), shard)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, ShardwiseError):
            raise
        what = f"it is not a strategy file of MindSpore: {type(error).__name__} {shorten_repr(str(error))}"
        fix = 'write it with strategy_ckpt_config={"save_file": "strategy.json"}'
        raise ShardwiseError(what, fix=fix) from error
    return strategies, slices


def _no_stage(stage: Any, name: str) -> None:
    if stage:
        what = f"{name} is in stage {shorten_repr(stage)}: pipelines of MindSpore are not checked"
        raise ShardwiseError(what, fix="check the file of one stage, with stage 0, and the module of that stage")


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not -1 <= value < 2**31:
        raise ValueError(f"{value!r} where an integer is expected")
    return value


def _parameter_of(name: str, shapes: Mapping[str, Any]) -> str | None:
    """Return the parameter of the module with this name, ignoring the cells around the network; None if absent."""
    path, _, last = name.rpartition(".")
    for leaf in dict.fromkeys((last, _NAMES.get(last, last))):
        parts = [*(path.split(".") if path else ()), leaf]
        for first in range(len(parts)):
            if (suffix := ".".join(parts[first:])) in shapes:
                return suffix
            if parts[first] not in _WRAPPERS:
                break
    return None


def _mesh(slices: Sequence[_Slices], devices: int) -> Mesh:
    """Return the mesh of the file. Its axes are cut wherever a device matrix is, so that every dim of every device
    matrix is a run of axes."""
    cuts = {1, devices}
    for one in slices:
        if prod(one.sizes) != devices:
            what = f"the file is for {prod(one.sizes)} devices ({list(one.sizes)}), not {devices}"
            raise ShardwiseError(what, fix=f"devices={prod(one.sizes)}")
        cuts.update(prod(one.sizes[i:]) for i in range(len(one.sizes)))
        step, size = one.shard
        cuts.update((step, step * size) if size > 1 else ())
    strides = sorted(cuts)
    for inner, outer in pairwise(strides):
        if inner < 1 or outer % inner:
            what = f"the device matrices do not fit together: runs of {inner} and of {outer} ranks overlap"
            raise ShardwiseError(what, fix="use device matrices with common sizes")
    sizes = [outer // inner for inner, outer in pairwise(strides)]
    return Mesh({f"d{number}": size for number, size in enumerate(reversed(sizes))})


def _axes(mesh: Mesh, inner: int, outer: int) -> list[str]:
    """Return the axes that lie between two strides, the slowest first."""
    axes, stride = [], mesh.num_devices
    for name, size in mesh.axes:
        if inner <= stride // size and stride <= outer:
            axes.append(name)
        stride //= size
    return axes


def _layout(slices: _Slices, shape: Sequence[int], mesh: Mesh) -> str:
    if len(slices.places) != len(shape):
        raise ShardwiseError(
            f"the tensor map {list(slices.places)} has {len(slices.places)} dims, the parameter {list(shape)}"
        )
    split = [place for place in slices.places if place >= 0]
    if len(split) != len(set(split)) or any(place >= len(slices.sizes) for place in split):
        raise ShardwiseError(
            f"the tensor map {list(slices.places)} names a device dim twice, or one that {list(slices.sizes)} lacks"
        )
    texts = []
    for dim, (size, place) in enumerate(zip(shape, slices.places, strict=True)):
        at = len(slices.sizes) - 1 - place
        axes = [] if place < 0 else _axes(mesh, prod(slices.sizes[at + 1 :]), prod(slices.sizes[at:]))
        step, count = slices.shard
        if dim == 0 and count > 1:
            axes += _axes(mesh, step, step * count)
        ways = prod(dict(mesh.axes)[axis] for axis in axes)
        if size % ways:
            raise ShardwiseError(f"dim {dim} has {size} elements, which {ways} slices do not divide")
        texts.append(f"{size}@({','.join(axes)})" if axes else str(size))
    return f"[{', '.join(texts)}]"


def _operator(node: str, graph: Graph, modules: set[str]) -> tuple[str, Op | None]:
    """Return the module of a node, found by its cells, and its operator. The operator is None if the module has none of
    that kind, or further operators, to which a strategy of the module would also apply."""
    *cells, kind = node.split("/")
    path = [cell.rpartition("-")[0] for cell in cells if "-" in cell]
    kind = re.sub(r"-op\d+$", "", kind)
    while path and ".".join(path) not in modules and path[0] in _WRAPPERS:
        path = path[1:]
    module_path = ".".join(path)
    inside = [op for op in graph.ops if op.name.startswith((f"{module_path}/", f"{module_path}.")) and module_path]
    working = [op for op in inside if not is_view(op.target) and str(op.target) != "aten.add.Tensor"]
    candidates = [op for op in working if str(op.target).split(".")[1] in _OPERATORS.get(kind, ())]
    return module_path, candidates[0] if len(candidates) == len(working) == 1 else None


def _of_operands(op: Op, counts: Counts, graph: Graph) -> Counts | None:
    """Return the counts for the dims of a torch operator's operands; None if they do not match. MindSpore's products
    have two dims: further dims of a linear layer's input are inserted between them."""
    shapes = [graph.by_name[name].shape for name in op.operands]
    if str(op.target).split(".")[1] == "embedding":  # MindSpore's Gather: table, indices, as in torch
        counts = counts[:2]
    per_operand = []
    for number, dims in enumerate(counts[: len(shapes)]):
        missing = len(shapes[number]) - len(dims)
        if missing > 0 and len(dims) == 2 and number == 0:
            dims = (dims[0], *[1] * missing, dims[1])
        if len(dims) != len(shapes[number]):
            return None
        per_operand.append(dims)
    return tuple(per_operand)


def _checked(counts: Counts, op: Op, graph: Graph, devices: int) -> Counts:
    for number, (name, dims) in enumerate(zip(op.operands, counts, strict=False)):
        for dim, (size, ways) in enumerate(zip(graph.by_name[name].shape, dims, strict=True)):
            if ways < 1 or size % ways:
                raise ShardwiseError(
                    f"dim {dim} of input {number} has {size} elements, which {ways} slices do not divide"
                )
        if devices % prod(dims):
            raise ShardwiseError(
                f"{list(dims)} are {prod(dims)} slices, which do not divide over {devices} devices evenly"
            )
    return counts
