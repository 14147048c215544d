"""Patch torch's functions to handle shards: gradient norms, loss scaling, optimizer steps, checkpoints.

Given shards, each of them would silently compute something else than on one device. They are patched once per process,
when the first module with shards is created (``_PATCHES`` and ``dcp``; the hook that checks every
optimizer before its step, with the first parallel module of any kind). Of ``torch.nn.utils.get_total_norm`` the body is
replaced: the function objects stay the same, so early imports are covered.

Nothing changes for tensors that are not shards. The user's own arithmetic on gradients is not covered:
``p.grad.norm()`` is the norm of this rank's part.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from types import CellType, FrameType
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import is_fake
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer

from shardwise.errors import ShardwiseError, listed
from shardwise.runtime.communicator import Communicator, rank_device
from shardwise.runtime.cpu_embedding import device_of
from shardwise.runtime.guards import dcp
from shardwise.runtime.guards.elementwise_optimizers import before_step, parameters_of
from shardwise.runtime.guards.matrix_optimizers import have_whole_states, wrap_torch_optimizers
from shardwise.runtime.guards.norms import total_norm
from shardwise.runtime.guards.registry import (
    KEY,
    Owners,
    Patch,
    ShardRecord,
    are_over_ranks,
    bind_wrapper,
    check_entries,
    held_parameters,
    held_shards,
    records_of,
    register_module,
    shard_metadata,
)
from shardwise.runtime.hooks import foreign_wrapper_error, watch_optimizers

Norm = Callable[..., torch.Tensor]
_PARTS_ARE_MEANT = ("torch.distributed.checkpoint", "shardwise.")  # they store where in the whole a part lies


def protect(parallel: nn.Module, records: Mapping[str, ShardRecord], everyone: Communicator | None = None) -> None:
    """Make torch's functions handle the parameters of this module from now on. ``records``: its shards, by name;
    ``everyone``: all ranks, if each holds some stages. Raises ShardwiseError if this version of torch lacks a function
    to patch."""
    watch_optimizers(before_step)
    if register_module(parallel, records, everyone):
        _install()


@cache
def _install() -> None:
    """Patch torch, all places or none, once."""
    body = _norm_body()
    patches = (*_PATCHES, *dcp.PATCHES)
    missing = ["the body of torch.nn.utils.get_total_norm"] * (body is None)
    missing += [f"{place.__name__}.{name}" for place, name, _ in patches if not hasattr(place, name)]
    if missing := [*missing, *_missing_in_save()]:
        raise ShardwiseError(
            f"this version of shardwise does not support torch {torch.__version__}: {', '.join(missing)} has "
            "moved; gradient clipping, loss scaling or checkpoints of shards could be silently wrong",
            fix="use torch 2.11 to 2.14, or a newer shardwise",
        )
    assert body is not None
    body.cell_contents = bind_wrapper(body.cell_contents, _total_norm)
    for place, name, wrap in patches:
        if wrap is not None:
            setattr(place, name, bind_wrapper(getattr(place, name), wrap))
    wrap_torch_optimizers()


def _refuse_shards(init: Callable[..., None], self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Replace ``DistributedDataParallel.__init__``, which would give every rank the shards of rank 0."""
    if any(record is not None and record.is_shard for record in records_of(module.parameters())):
        raise foreign_wrapper_error("DistributedDataParallel")
    init(self, module, *args, **kwargs)


def _refuse_draws(function: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Replace a function of ``torch.nn.init``, whose values would follow from the shape of the shard."""
    has_data = not (tensor.is_meta or is_fake(tensor)) and type(tensor) in (torch.Tensor, torch.nn.Parameter)
    record = Owners(held_shards()).of(tensor) if has_data else None
    if record is not None:
        what = f"torch.nn.init on a shard of {record.name}: values would be drawn for the shape of the shard"
        raise ShardwiseError(what, fix="initialise the model before sw.parallelize, or pass init= to sw.parallelize")
    return function(tensor, *args, **kwargs)


def _state_dict(state_dict: Callable[[Optimizer], dict[str, Any]], self: Optimizer) -> dict[str, Any]:
    """Record in ``Optimizer.state_dict`` whose shards the states belong to."""
    shards = _shards_of(self)
    return state_dict(self) | ({KEY: shard_metadata(shards, dist.get_rank())} if shards else {})


def _load_state_dict(load_state_dict: Callable[..., None], self: Optimizer, state_dict: dict[str, Any]) -> None:
    """Refuse the states of another rank's shards in ``Optimizer.load_state_dict``."""
    shards = _shards_of(self) if KEY in state_dict else {}
    rank = dist.get_rank() if shards else 0
    check_entries(state_dict.get(KEY, {}), shards, rank, lambda i: f"states of {shards[i].name}")
    load_state_dict(self, state_dict)
    have_whole_states(self)


def _shards_of(optimizer: Optimizer) -> dict[int, ShardRecord]:
    """Return the optimizer's parameters that are shards, by their index in its state."""
    records = enumerate(records_of(parameters_of(optimizer)))
    return {index: record for index, record in records if record is not None and record.layout.positions}


def _norm_body() -> CellType | None:
    """Return the cell that holds the body of ``get_total_norm``: the public function is a closure that calls it without
    gradients."""
    function = getattr(torch.nn.utils, "get_total_norm", None)
    clips_by_it = getattr(torch.nn.utils.clip_grad, "_get_total_norm", None) is function
    inner = getattr(torch.nn.utils.clip_grad_norm_, "__wrapped__", torch.nn.utils.clip_grad_norm_)
    names = getattr(getattr(inner, "__code__", None), "co_names", ())
    if function is None or not clips_by_it or "_get_total_norm" not in names or function.__closure__ is None:
        return None
    cells: tuple[CellType, ...] = function.__closure__
    return next((cell for cell in cells if cell.cell_contents is function.__wrapped__), None)


def _total_norm(
    local: Norm,
    tensors: torch.Tensor | Iterable[torch.Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Replace torch's ``get_total_norm``, exact for shards."""
    listed = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    placed = _placed(listed)
    if not are_over_ranks([record for _, record in placed]):
        return local(listed, norm_type, error_if_nonfinite, foreach)
    device = device_of(listed) if listed else rank_device()
    return total_norm(placed, norm_type, device=device, across_ranks=True, error_if_nonfinite=error_if_nonfinite)


def _placed(tensors: list[torch.Tensor]) -> list[tuple[torch.Tensor, ShardRecord | None]]:
    """Pair every tensor with its record: of a held parameter or its gradient; None for anything else.

    Raises ShardwiseError for other tensors in the memory of shards, and for tensor subclasses beside shards.
    """
    held_by_id: dict[int, ShardRecord] = {}
    shards: list[tuple[torch.Tensor, ShardRecord]] = []
    for parameter, record in held_parameters():
        for tensor in (parameter, parameter.grad):
            if tensor is not None:
                held_by_id[id(tensor)] = record
                if record.is_shard:
                    shards.append((tensor, record))
    placed = [(tensor, held_by_id.get(id(tensor))) for tensor in tensors]
    strangers = [tensor for tensor, record in placed if record is None]
    if strangers and shards:
        _check_strangers(strangers, shards, beside=len(strangers) < len(tensors))
    return placed


def _check_strangers(
    strangers: list[torch.Tensor], shards: list[tuple[torch.Tensor, ShardRecord]], *, beside: bool
) -> None:
    """Raise ShardwiseError for a ``detach()``, ``.data`` or view of a shard, which this rank would take for a whole
    tensor. Also raise it for tensor subclasses with their own norm ``beside`` tensors of ours."""
    owners = Owners(shards)
    for tensor in strangers:
        if type(tensor) not in (torch.Tensor, nn.Parameter):
            if beside:
                raise ShardwiseError(f"a norm over shards and {type(tensor).__name__} together is not supported")
            continue
        record = owners.of(tensor)
        if record is not None:
            what = f"this tensor is a view of a shard of {record.name}: its norm would cover only this rank"
            fix = "pass the parameters or their gradients themselves: [p.grad for p in par.parameters()]"
            raise ShardwiseError(what, fix=fix)


def _agree_on_infinities(method: Callable[..., Any], self: GradScaler, optimizer: torch.optim.Optimizer) -> Any:
    """Let an infinity found by one rank be found by all, in a method of GradScaler."""
    result = method(self, optimizer)
    if self.is_enabled():
        _agree(optimizer, list(self._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()))
    return result


@torch.no_grad()
def _agree(optimizer: torch.optim.Optimizer, flags: list[torch.Tensor]) -> None:
    """All-reduce the flags (one per device of this rank) if the optimizer updates shards. This depends on its
    parameters, not on which have gradients, so that every rank takes part."""
    parameters = parameters_of(optimizer)
    if not any(record is not None and record.is_shard for record in records_of(parameters)):
        return
    flag = torch.zeros((), dtype=torch.float32, device=device_of(parameters))
    for device_flag in flags:
        flag = torch.maximum(flag, device_flag.to(flag.device))
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    for device_flag in flags:
        device_flag.copy_(flag)


def _missing_in_save() -> list[str]:
    is_first = "_check_save_filelike" in torch.save.__code__.co_names and hasattr(
        torch.serialization, "_check_save_filelike"
    )
    return [] if is_first and {"obj", "f"} <= {*torch.save.__code__.co_varnames} else ["the first check in torch.save"]


def _refuse_file(check_file: Callable[[Any], None], file: Any) -> None:
    """Run before the first check in ``torch.save``: before the file is opened, so that an existing one is kept."""
    frame = sys._getframe(2)
    _check_file(frame.f_locals["obj"], file, frame)
    check_file(file)


def _refuse_parts(flatten: Callable[..., Any], value: Any, *args: Any, **kwargs: Any) -> Any:
    frame = sys._getframe(2)
    _check_file(value, frame.f_locals.get("filename"), frame)
    return flatten(value, *args, **kwargs)


def _check_file(value: Any, file: Any, saves: FrameType) -> None:
    """Raise ShardwiseError if a file would store one rank's part under the names of the whole: ``if rank == 0:
    torch.save(par.state_dict(), "model.pt")``, and what frameworks do instead, would silently lose the other ranks'
    parts. A file is taken as meant for one rank if its path contains ``rank`` and the rank's number. ``saves``: the
    frame of the function the user called."""
    if isinstance(value, (torch.TypedStorage, torch.UntypedStorage)):
        return  # pickle calls torch.save for each tensor, and looking for shards takes tens of milliseconds
    caller = saves.f_back
    if caller is not None and str(caller.f_globals.get("__name__")).startswith(_PARTS_ARE_MEANT):
        return
    names = list(dict.fromkeys(record.name for record in dcp.ShardIndex().shards_in(value)))
    path = str(file if isinstance(file, (str, os.PathLike)) else getattr(file, "name", ""))
    rank = dist.get_rank() if names else 0
    if names and not re.search(rf"rank[\W_]?0*{rank}(?!\d)", path, re.IGNORECASE):
        raise ShardwiseError(
            f"rank {rank} would save its shards of {listed(names)} under the names of whole tensors, without "
            "the shards of other ranks",
            fix="call get_model_state_dict(par, options=StateDictOptions(full_state_dict=True, cpu_offload=True)) "
            "of torch.distributed.checkpoint.state_dict on every rank and save the result of rank 0; or call "
            "sw.save_checkpoint or sw.save_pretrained on every rank; for one file per rank, loaded by the same "
            f"rank, put the rank into the path (part-rank{rank}.pt)",
            section="saving-shards",
        )


# Functions that draw (their inner helpers), and those that depend on positions. Constants are the same in all parts.
_DRAWING = ("_no_grad_uniform_", "_no_grad_normal_", "_no_grad_trunc_normal_", "_calculate_fan_in_and_fan_out")
_PLACING = ("dirac_", "eye_", "orthogonal_", "sparse_")

_OF_SAFETENSORS = ("_flatten_as_ptr", "_flatten")  # used by save, save_file and save_model; the second in old versions
_PATCHES = (
    Patch(torch.serialization, "_check_save_filelike", _refuse_file),
    *(Patch(safetensors.torch, n, _refuse_parts) for n in _OF_SAFETENSORS if hasattr(safetensors.torch, n)),
    Patch(GradScaler, "unscale_", _agree_on_infinities),
    Patch(GradScaler, "_check_inf_per_device", _agree_on_infinities),
    Patch(Optimizer, "state_dict", _state_dict),
    Patch(Optimizer, "load_state_dict", _load_state_dict),
    Patch(DistributedDataParallel, "__init__", _refuse_shards),
    *(Patch(torch.nn.init, name, _refuse_draws) for name in (*_DRAWING, *_PLACING)),
)
