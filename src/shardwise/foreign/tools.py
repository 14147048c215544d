"""Recognises plans of other tools: the mesh on which they run, and the tool's code that applies them to a module.

Plans are not translated. transformers applies its own layers, PyTorch its own ``parallelize_module`` and
``fully_shard``; ``sw.check`` checks their execution on ranks.
"""

from __future__ import annotations

import copy
import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any
from unittest.mock import patch

from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from shardwise.errors import ShardwiseError, listed
from shardwise.layouts.mesh import Mesh
from shardwise.plans.file import FORMAT
from shardwise.plans.plan import Plan
from shardwise.plans.result import PlanningResult
from shardwise.search.modes import DATA_AXES
from shardwise.untrusted_text import shorten_repr

Apply = Callable[[nn.Module, DeviceMesh], nn.Module]

KNOWN = (
    'pass "auto" (the plan that ships with a transformers model), a transformers tp_plan ({path: style}), a '
    "DistributedConfig, a plan of torch's parallelize_module ({path: ParallelStyle}), {'fully_shard': [paths]}, an "
    "accelerate ParallelismConfig, a strategy file of MindSpore as JSON, or a function (module, device_mesh) that "
    "applies a plan"
)


@dataclass(frozen=True)
class ForeignPlan:
    """A recognised plan. ``kind``: description of the plan; ``apply``: the tool's own code (None: the tool is not run);
    ``unused``: rules that name nothing in the module; ``notes``: deviations from the tool."""

    kind: str
    mesh: Mesh
    apply: Apply | None
    unused: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def data_axes(self) -> tuple[str, ...]:
        """Return the axes along which ranks have different samples."""
        return tuple(name for name, _ in self.mesh.axes if name in DATA_AXES or name.startswith("dp"))


def recognise_plan(module: nn.Module, plan: Any, devices: int, mesh: Mesh | None) -> ForeignPlan:
    """Recognise a plan of another tool. Raises ShardwiseError if no known tool accepts it, or if none of its rules
    names anything in the module."""
    if mesh is not None and mesh.num_devices != devices:
        raise ShardwiseError(
            f"{mesh} has {mesh.num_devices} devices, but devices= is {devices}", fix="omit one of the two"
        )
    if isinstance(plan, Plan | PlanningResult) or (isinstance(plan, Mapping) and plan.get("format") == FORMAT):
        what = "this is a plan of shardwise, not of another tool"
        raise ShardwiseError(what, fix="use sw.verify (shardwise verify)")
    kind = type(plan).__name__
    if isinstance(plan, Mapping) and "fully_shard" in plan:
        return _of_fsdp(module, plan, mesh or Mesh(dp=devices))
    rules = (*plan, *plan.values()) if isinstance(plan, Mapping) else ()
    if (isinstance(plan, str) and plan == "auto") or (rules and all(isinstance(rule, str) for rule in rules)):
        return _of_transformers(module, plan, mesh or Mesh(tp=devices))
    if kind == "DistributedConfig":
        return _of_config(plan, devices)
    if kind == "ParallelismConfig":
        return _of_accelerate(module, plan, devices)
    if isinstance(plan, Mapping) and plan and all(isinstance(style, ParallelStyle) for style in plan.values()):
        return _of_styles(module, plan, mesh or Mesh(tp=devices))
    if callable(plan):
        return ForeignPlan(f"the function {getattr(plan, '__name__', kind)}", mesh or Mesh(tp=devices), plan)
    if isinstance(plan, Mapping) and plan and all(isinstance(path, str) for path in plan):
        raise _no_rule(plan)
    raise ShardwiseError(f"{shorten_repr(plan)} is not a plan of a known tool", fix=KNOWN)


def _no_rule(plan: Mapping[str, Any]) -> ShardwiseError:
    neither = [path for path, rule in plan.items() if not isinstance(rule, (str, ParallelStyle))]
    if not neither:
        texts = [path for path, rule in plan.items() if isinstance(rule, str)]
        styles = [path for path in plan if path not in texts]
        what = f"rules of two tools: {listed(texts)} as texts (transformers), {listed(styles)} as styles (PyTorch)"
        return ShardwiseError(what, fix="use one kind: 'colwise' is ColwiseParallel()")
    path, rule = neither[0], plan[neither[0]]
    is_class = isinstance(rule, type)
    what = f"the class {rule.__name__}" if is_class else shorten_repr(rule)
    fix = f"instantiate it: {rule.__name__}()" if is_class else KNOWN
    return ShardwiseError(f"the rule of {path!r} is {what}, which is not a style of a known tool", fix=fix)


def _names(mesh: Mesh, *, data: bool) -> tuple[str, ...]:
    """Return the axes over which samples are split (``data``), or the others. Raises ShardwiseError for none."""
    names = tuple(name for name, _ in mesh.axes if (name in DATA_AXES or name.startswith("dp")) == data)
    if not names:
        what = f"{mesh} has no axis for {'data' if data else 'tensor'} parallelism"
        raise ShardwiseError(what, fix="call axes that split samples dp and the others tp: mesh=sw.Mesh(dp=2, tp=4)")
    return names


def _mesh_of_config(sizes: Mapping[str, int], devices: int) -> Mesh:
    mesh = Mesh(sizes)
    if mesh.num_devices != devices:
        raise ShardwiseError(f"the config is for {mesh.num_devices} devices, not {devices}", fix="devices=...")
    return mesh


def _axis(device_mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    return device_mesh[names if len(names) > 1 else names[0]]


def _nothing(unused: list[str], what: str, module: nn.Module) -> ShardwiseError:
    there = [name for name, _ in module.named_modules() if name]
    return ShardwiseError(
        f"the {what} names nothing in {type(module).__name__}: {listed(unused)}",
        facts=[("there is", listed(there))],
        fix="write paths from the checked module, with a star for one part: model.layers.*.mlp.up_proj",
    )


# -- transformers ------------------------------------------------------------------------------------------------------


def _transformers(name: str) -> Any:
    try:
        return importlib.import_module(f"transformers.{name}")
    except ImportError as error:
        what = f"the plan is one of transformers, which cannot be imported: {error}"
        raise ShardwiseError(what, fix="pip install 'transformers>=5.20'") from error


def _of_transformers(module: nn.Module, plan: Any, mesh: Mesh) -> ForeignPlan:
    parallel = _transformers("distributed.tensor_parallel")
    wildcard = _transformers("distributed.parallel_utils").replace_layer_number_by_wildcard
    if plan == "auto":
        shipped = dict(getattr(module, "_tp_plan", None) or {})
        if not shipped:
            raise ShardwiseError(f"{type(module).__name__} ships no tp plan", fix="pass one: {path of a module: style}")
        plan = shipped
    styles = parallel.ALL_PARALLEL_STYLES
    unknown = sorted({style for style in plan.values() if style not in styles})
    if unknown:
        raise ShardwiseError(
            f"transformers has no style {listed(unknown)}", fix=f"use one of {', '.join(sorted(styles))}"
        )
    names = {wildcard(n) for n, _ in (*module.named_modules(), *module.named_parameters())}
    prefix = getattr(module, "base_model_prefix", "")
    if prefix and not plan.keys() & names and {f"{prefix}.{key}" for key in plan} & names:
        plan = {f"{prefix}.{key}": style for key, style in plan.items()}  # base_model_tp_plan of a model with a head
    unused = sorted(plan.keys() - names)
    if len(unused) == len(plan):
        raise _nothing(unused, "tp plan", module)
    expand = _transformers("modeling_utils").PreTrainedModel._expand_parallel_plan
    names_of_tp = _names(mesh, data=False)

    def apply(part: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        tp = _axis(device_mesh, names_of_tp)
        _untie(part)
        parallel.apply_tensor_parallelism(part, tp, expand(part, plan))
        return _tied(part)

    return ForeignPlan("transformers tp plan", mesh, apply, tuple(unused))


def _untie(module: nn.Module) -> None:
    """Give each name its own parameter: transformers distributes a model before it ties parameters."""
    seen: set[int] = set()
    for name, parameter in list(module.named_parameters(remove_duplicate=False)):
        if id(parameter) in seen:
            path, _, last = name.rpartition(".")
            setattr(module.get_submodule(path), last, nn.Parameter(parameter.detach().clone(), parameter.requires_grad))
        seen.add(id(parameter))


def _tied(module: nn.Module) -> nn.Module:
    """Tie parameters again, as transformers does after loading a model."""
    tie = getattr(module, "tie_weights", None)
    if callable(tie) and getattr(module, "all_tied_weights_keys", None):
        tie(recompute_mapping=False)
    return module


def _of_config(config: Any, devices: int) -> ForeignPlan:
    managed = _transformers("distributed.utils").TransformersDeviceMesh
    if config.pp_size > 1:
        raise ShardwiseError(
            "pipelines of transformers are not supported", fix="check the plan of one stage: pp_size=1"
        )
    sizes = {"dp_replicate": config.dp_replicate_size, "fsdp": config.fsdp_size, "tp": config.tp_size}
    mesh = _mesh_of_config(sizes, devices)

    def apply(part: Any, device_mesh: DeviceMesh) -> nn.Module:
        names = ("pp", "dp_replicate", "fsdp", "tp")
        dense = init_device_mesh("cpu", (1, *device_mesh.mesh.shape), mesh_dim_names=names)
        sizes = (1, config.dp_replicate_size, config.efsdp_size, config.ep_size)
        expert = init_device_mesh("cpu", sizes, mesh_dim_names=("pp", "dp_replicate", "efsdp", "ep"))
        _untie(part)
        return _tied(part.maybe_distribute_model(part, config, managed(dense, expert)))

    return ForeignPlan("transformers DistributedConfig", mesh, apply)


# -- accelerate --------------------------------------------------------------------------------------------------------


def _of_accelerate(module: nn.Module, config: Any, devices: int) -> ForeignPlan:
    sizes = {axis: getattr(config, f"{axis}_size") or 1 for axis in ("dp_replicate", "dp_shard", "cp", "sp", "tp")}
    for axis in ("cp", "sp"):
        if sizes.pop(axis) > 1:
            raise ShardwiseError(
                f"{axis}_size > 1 needs attention kernels of GPUs", fix=f"check the rest with {axis}_size=1"
            )
    mesh = _mesh_of_config(sizes, devices)
    tensor = _of_transformers(module, "auto", mesh) if sizes["tp"] > 1 else None
    blocks = _repeated(module)
    sharded = _of_fsdp(module, {"fully_shard": blocks}, mesh) if sizes["dp_shard"] > 1 else None
    if sharded is None and sizes["dp_replicate"] > 1:
        raise ShardwiseError(
            "dp_replicate_size without dp_shard_size is DDP, outside of this config", fix="dp_shard_size=2, say"
        )

    def apply(model: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for part in (tensor, sharded):
            if part is not None and part.apply is not None:
                model = part.apply(model, device_mesh)
        return model

    notes = (f"fully_shard wraps {listed(blocks)} and the root",) if sharded else ()
    return ForeignPlan("accelerate ParallelismConfig", mesh, apply, tensor.unused if tensor else (), notes)


def _repeated(module: nn.Module) -> list[str]:
    """Return the blocks that accelerate's transformer policy wraps: classes not to be split, or lists of modules."""
    classes = set(getattr(module, "_no_split_modules", None) or ())
    paths = {re.sub(r"\.\d+(?=\.|$)", ".*", n) for n, part in module.named_modules() if type(part).__name__ in classes}
    lists = (n for n, part in module.named_modules() if isinstance(part, nn.ModuleList))
    return sorted(paths) or [f"{name}.*" for name in lists]


@contextmanager
def divided_once() -> Iterator[None]:
    """Let FSDP2 divide the gradients of a group of one rank by their factor once, as it does in float32 and bfloat16:
    of models in these dtypes, which are checked in float64. In other dtypes, or under
    ``set_force_sum_reduction_for_comms``, it divides them twice, in training too (torch 2.11, ``foreach_reduce``)."""
    original = _fsdp_collectives._get_gradient_divide_factors

    def factors(
        reduce_scatter_group: Any,
        all_reduce_group: Any,
        reduce_dtype: Any,
        device_type: str = "",
        factor: float | None = None,
        force_sum: bool = False,
    ) -> Any:
        found = original(reduce_scatter_group, all_reduce_group, reduce_dtype, device_type, factor, force_sum)
        is_alone = all_reduce_group is None and reduce_scatter_group is not None and reduce_scatter_group.size() == 1
        return (None, None, *found[2:]) if is_alone and not force_sum else found

    with patch.object(_fsdp_collectives, "_get_gradient_divide_factors", factors):
        yield


# -- torch -------------------------------------------------------------------------------------------------------------


def _matching(module: nn.Module, pattern: str) -> list[str]:
    """Return the modules that a pattern names, as in ``parallelize_module``: a star is one part of a path."""
    parts = pattern.split(".")
    paths = ((name, name.split(".")) for name, _ in module.named_modules())
    return [name for name, path in paths if len(path) == len(parts) and all(map(fnmatchcase, path, parts))]


def _of_styles(module: nn.Module, plan: Mapping[str, Any], mesh: Mesh) -> ForeignPlan:
    unused = [path for path in plan if not _matching(module, path)]
    if len(unused) == len(plan):
        raise _nothing(unused, "plan", module)

    own_axes = _names(mesh, data=False)

    def apply(part: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for path, style in plan.items():
            if path not in unused:
                try:
                    part = parallelize_module(part, _axis(device_mesh, own_axes), {path: copy.copy(style)})
                except NotImplementedError as error:
                    if not type(style).__module__.startswith("torch."):
                        raise
                    # torch raises this for a style on an unsupported kind of module, on any machine.
                    raise TypeError(f"{type(style).__name__} at {path!r}: {error}") from error
        return part

    return ForeignPlan("parallelize_module plan", mesh, apply, tuple(unused))


def _of_fsdp(module: nn.Module, settings: Mapping[str, Any], mesh: Mesh) -> ForeignPlan:
    options = {key: value for key, value in settings.items() if key != "fully_shard"}
    notes = []
    if options.pop("mp_policy", None) is not None:
        notes.append("compared in float64: mp_policy is left out")
    unknown = options.keys() - {"reshard_after_forward", "offload_policy", "shard_placement_fn", "ignored_params"}
    if unknown:
        raise ShardwiseError(f"fully_shard has no setting {listed(sorted(unknown))}", fix="check its signature")
    patterns = settings["fully_shard"]
    if not isinstance(patterns, (str, list, tuple)) or not all(isinstance(path, str) for path in patterns):
        what = f"fully_shard is {shorten_repr(patterns)}"
        raise ShardwiseError(what, fix='pass paths of modules: {"fully_shard": ["layers.*"]}; [] wraps the root alone')
    paths = [patterns] if isinstance(patterns, str) else list(patterns)
    unused = [path for path in paths if path and not _matching(module, path)]
    if paths and len(unused) == len(paths):
        raise _nothing(unused, "list of fully_shard", module)
    names = {name for path in paths if path for name in _matching(module, path)}
    own_axes = _names(mesh, data=True)

    def apply(part: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        data = _axis(device_mesh, own_axes)
        parts = dict(part.named_modules())
        for name in sorted(names, key=lambda name: -name.count(".")):
            fully_shard(parts[name], mesh=data, **options)
        fully_shard(part, mesh=data, **options)
        return part

    return ForeignPlan("FSDP2 settings", mesh, apply, tuple(unused), tuple(notes))
