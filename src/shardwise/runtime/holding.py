"""Compute a rank's part of every parameter and buffer, one tensor at a time, and install it under its name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from shardwise.errors import PlanError, PlanWarning, ShardwiseError, listed, one_per_line, warn_user
from shardwise.graph.module_checks import check_memory
from shardwise.graph.step_precision import Precision
from shardwise.layouts.boxes import boxes
from shardwise.layouts.layout import Layout
from shardwise.layouts.text import format_dtype, format_layout
from shardwise.plans.plan import Plan
from shardwise.runtime.communicator import Communicator
from shardwise.runtime.cpu_embedding import HOST
from shardwise.runtime.guards.registry import is_persistent, tensors_of
from shardwise.runtime.hooks import Shards, carry_hooks
from shardwise.runtime.initial.materialize import Init, PartialTensor, initial_values
from shardwise.runtime.initial.partial_values import NotByParts
from shardwise.runtime.initial.weights import WeightFiles
from shardwise.runtime.local_shards import shard
from shardwise.runtime.replicas import fingerprint_on
from shardwise.runtime.tensor_table import check_initial_values

# Size in each dim of the box by which ranks compare a tensor that none of them has whole.
_PRINTED = 64
# Elements from which a tensor that each rank computes whole causes a warning.
_LARGE = 2**22


@dataclass(frozen=True)
class ShardMaterializer:
    """The shards that this rank holds. ``layouts``: by name, over the mesh of ``ranks``; ``everyone``: all ranks of the
    job. ``host``: names of the tables that stay on the CPU, whose collectives ``host_ranks`` runs. ``only``: names of
    the parameters and buffers of this rank's stages; None: it has a part of all."""

    layouts: Mapping[str, Layout]
    ranks: Communicator
    everyone: Communicator
    host: frozenset[str]
    host_ranks: Communicator
    only: frozenset[str] | None = None

    def has(self, name: str) -> bool:
        return self.only is None or name in self.only

    def layout(self, name: str, tensor: torch.Tensor) -> Layout:
        """Return the layout of a parameter or buffer; whole if the plan does not name it."""
        return self.layouts.get(name) or Layout.whole(self.ranks.mesh, tuple(tensor.shape))


class InitialShards:
    """The initial ``parts`` of this rank, by canonical names. ``prints``: numbers that must be equal on all ranks:
    fingerprints of values (of the first elements, if ranks compute only their parts) or sizes of the files' tensors."""

    def __init__(self, holder: ShardMaterializer, precision: Precision, device: torch.device) -> None:
        self.parts: dict[str, torch.Tensor] = {}
        self.prints: dict[str, int] = {}
        self._holder, self._stored, self._device = holder, precision.stored, device

    def fill(self, module: torch.nn.Module, seed: int | None, init: Init | None, weights: str | Path | None) -> None:
        """Compute or read all parts. Raises ShardwiseError for values that are missing or do not fit."""
        tensors = dict(tensors_of(module))
        dtypes = {
            name: self._stored(x.dtype) if isinstance(x, torch.nn.Parameter) else x.dtype for name, x in tensors.items()
        }
        coordinates = self._holder.ranks.coordinates
        known: tuple[str, ...] = ()
        if weights is not None:
            with WeightFiles(weights, module, complete=init is None) as files:
                known = tuple(files.stored_names)
                for name in filter(self._holder.has, known):
                    layout = self._holder.layout(name, tensors[name])
                    shape = layout.local_shape(coordinates)
                    local = torch.empty(shape, dtype=dtypes[name], device=self._device_of(name))
                    self.parts[name] = files.read(name, local, boxes(layout, coordinates))
                self.prints |= files.prints
            if self._holder.everyone.rank == 0:
                files.announce()
        whole: list[str] = []
        for name, value in initial_values(module, seed, init, known=known):
            layout = self._holder.layout(name, tensors[name])
            by_parts = self._parts(name, value, layout) if isinstance(value, PartialTensor) else None
            if by_parts is None:
                full = value.whole() if isinstance(value, PartialTensor) else value
                part, printed = shard(full, layout, coordinates).detach(), full
                if isinstance(value, PartialTensor):  # another rank may compute its part alone
                    printed = full[tuple(slice(_PRINTED) for _ in full.shape)]
                    whole += [name] if full.numel() >= _LARGE else []
            else:
                part, printed = by_parts
            self.prints[name] = int(fingerprint_on(printed.device)(printed))
            if self._holder.has(name):
                self.parts[name] = part.to(self._device_of(name), dtypes[name]).clone()

        if whole and self._holder.everyone.rank == 0:
            what = f"every rank computes these whole initial values to get its shard: {listed(whole)}"
            fix = "their initialiser is not element-wise; init= can provide the values instead"
            warn_user(f"{what} ({fix})", PlanWarning)

    def _parts(self, name: str, value: PartialTensor, layout: Layout) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return (this rank's part of a tensor, its first elements, which are equal on all ranks); None if it cannot be
        computed by parts."""
        coordinates, shape = self._holder.ranks.coordinates, value.ref.shape
        try:
            first = value.box((0,) * len(shape), tuple(min(size, _PRINTED) for size in shape))
            part = torch.empty(layout.local_shape(coordinates), dtype=value.dtype)
            for box in boxes(layout, coordinates) if self._holder.has(name) else ():
                part[box.local_rows].copy_(value.box(box.offsets, box.sizes))
        except NotByParts:
            return None
        return part, first

    def _device_of(self, name: str) -> torch.device:
        return HOST if name in self._holder.host else self._device


def install_shards(
    root: torch.nn.Module,
    module: torch.nn.Module,
    plan: Plan,
    holder: ShardMaterializer,
    device: torch.device,
    seed: int | None,
    init: Init | None,
    weights: str | Path | None = None,
) -> None:
    """Register this rank's shard of every parameter and buffer of ``module`` with ``root``, one full tensor at a
    time."""
    initial = InitialShards(holder, plan.precision, device)
    fault: ShardwiseError | None = None
    try:
        _check_module(module, plan)
        check_memory(module)
        initial.fill(module, seed, init, weights)
    except ShardwiseError as error:
        fault = error
    check_initial_values(initial.prints, seed, fault, holder.everyone, device)
    parts = initial.parts
    taken = [name for name in (*module._parameters, *module._buffers) if name in dir(root)]
    if taken:
        what = f"parameters or buffers of the module are called {listed(taken)}, which parallel modules use"
        raise PlanError(f"{what} themselves", fix="rename them")
    stand_ins = _stand_ins(root, module)
    shards: dict[int, torch.Tensor] = {}  # by the id of the original: tied tensors stay tied
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) not in shards and name in parts:
            local = torch.nn.Parameter(parts[name], requires_grad=parameter.requires_grad)
            shards[id(parameter)] = local
            for mark, value in vars(parameter).items():  # p.no_decay = True, say
                if not isinstance(value, torch.Tensor):
                    setattr(local, mark, value)
            ranks = holder.host_ranks if name in holder.host else holder.ranks
            carry_hooks(parameter, local, holder.layout(name, parameter), name, ranks)
        mine = shards.get(id(parameter))
        if isinstance(mine, torch.nn.Parameter):
            path, _, leaf = name.rpartition(".")
            root.get_submodule(path).register_parameter(leaf, mine)
    for name, buffer in module.named_buffers(remove_duplicate=False):
        path, _, leaf = name.rpartition(".")
        if name in parts:
            shards.setdefault(id(buffer), parts[name])
        if id(buffer) in shards:
            here = shards[id(buffer)]
            root.get_submodule(path).register_buffer(leaf, here, persistent=is_persistent(module, name))
    for own_part, original in stand_ins:
        own_part.stand_for(original)
    if holder.everyone.rank == 0:
        _announce_plain(module)
        _announce_twins({name: (p, holder.layout(name, p)) for name, p in module.named_parameters() if name in parts})


def _announce_plain(module: torch.nn.Module) -> None:
    named = dict(module.named_parameters())
    classes = [f"{name} ({type(p).__name__})" for name, p in named.items() if type(p) is not torch.nn.Parameter]
    if classes:
        what = f"shards are plain parameters, so isinstance no longer finds the classes {listed(classes)}"
        warn_user(f"{what}; mark parameters by an attribute (p.no_decay = True), which shards keep", PlanWarning)
    tensors = [f"{n}.{key}" for n, p in named.items() for key, x in vars(p).items() if isinstance(x, torch.Tensor)]
    if tensors:
        warn_user(f"tensors set as attributes of parameters are not sharded: {listed(tensors)}", PlanWarning)


def _announce_twins(parameters: Mapping[str, tuple[torch.nn.Parameter, Layout]]) -> None:
    """Warn about a frozen parameter whose layout differs from a trained one of the same name in another part (teacher
    and student). Computing one from the other would mix different elements or shapes."""
    trained: dict[tuple[object, ...], list[str]] = {}
    for name, (parameter, _) in parameters.items():
        if parameter.requires_grad:
            for place, rest in _without_each_part(name):
                trained.setdefault((place, rest, parameter.shape), []).append(name)
    pairs = [
        f"{name} {format_layout(layout)} and {other} {format_layout(parameters[other][1])}"
        for name, (parameter, layout) in parameters.items()
        if not parameter.requires_grad
        for place, rest in _without_each_part(name)
        for other in trained.get((place, rest, parameter.shape), [])
        if parameters[other][1].canonical() != layout.canonical()
    ]
    if pairs:
        what = f"ranks hold different elements of frozen and trained parameters with the same names: {listed(pairs)}"
        fix = 'if one is a moving average of the other, shard both equally: sw.plan(..., layouts={"name": "[...]"})'
        warn_user(f"{what}; {fix}", PlanWarning)


def _without_each_part(name: str) -> list[tuple[int, tuple[str, ...]]]:
    """Return (index of a dropped part of a dotted name, the other parts) for every non-numeric part."""
    parts = name.split(".")
    return [(i, (*parts[:i], *parts[i + 1 :])) for i, part in enumerate(parts[:-1]) if not part.isdigit()]


def _stand_ins(root: torch.nn.Module, module: torch.nn.Module) -> list[tuple[Shards, torch.nn.Module]]:
    """Create an empty submodule for each of the module's, shared ones once under all their names."""
    stand_ins: list[tuple[Shards, torch.nn.Module]] = []
    of: dict[int, torch.nn.Module] = {id(module): root}
    for path, original in module.named_modules(remove_duplicate=False):
        above, _, name = path.rpartition(".")
        parent = of.get(id(module.get_submodule(above)))
        if not path or parent is None:
            continue
        if parent is root and name in dir(root):
            if any(True for _ in (*original.parameters(), *original.buffers())):
                what = f"the module has a submodule {name}, a name that parallel modules use"
                raise PlanError(what, fix="rename it")
            continue  # it has no tensors
        if id(original) not in of:
            of[id(original)] = stand_in = Shards()
            stand_ins.append((stand_in, original))
        parent.add_module(name, of[id(original)])
    return stand_ins


def _check_module(module: torch.nn.Module, plan: Plan) -> None:
    have = dict(module.named_parameters())
    want = {entry.name: entry for entry in plan.parameters}
    faults = [f"{name} is in the plan but not in the module" for name in sorted(want.keys() - have.keys())]
    faults += [f"{name} is in the module but not in the plan" for name in sorted(have.keys() - want.keys())]
    for name in sorted(have.keys() & want.keys()):
        present = f"{format_dtype(plan.precision.stored(have[name].dtype))}{list(have[name].shape)}"
        planned = f"{want[name].dtype}{list(want[name].shape)}"
        if present != planned:
            faults.append(f"{name} is {present} in the module and {planned} in the plan")
    if faults:
        raise PlanError(one_per_line("the plan is for another model", faults))
