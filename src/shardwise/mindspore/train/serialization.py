"""Checkpoints of ranks: a rank's part of every parameter, with its layout."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import nn

from shardwise import Mesh, rank
from shardwise.errors import problem
from shardwise.mindspore import calls, context, protobuf
from shardwise.mindspore.checks import note, unknown_words
from shardwise.mindspore.holding import (
    Held,
    checkpoint_buffers,
    checkpoint_names,
    gathered,
    hold,
    holding_of,
    is_elsewhere,
    joined,
    own_shard,
    unwrapped,
)
from shardwise.mindspore.library import format_layout, load_exported, parse_layout, save_exported
from shardwise.mindspore.nn.optimizer import Optimizer
from shardwise.mindspore.tensor import Parameter, as_torch

FORMAT = "shardwise-rank-checkpoint"


class Slice(Parameter):
    """A parameter of a checkpoint. ``held``: its distribution; None if it is whole. ``is_state``: it is a state of an
    optimizer; ``is_info``: it was appended. ``path``: path of it, or of its parameter, in the saved network."""

    held: Held | None = None
    is_state = is_info = False
    path = ""


def save_checkpoint(
    save_obj: nn.Module | dict[str, Any] | list[dict[str, Any]], ckpt_file_name: str, integrated_save: bool = False,
    async_save: bool = False, append_dict: dict[str, Any] | None = None, optimizer: Optimizer | None = None, *,
    choice_func: Callable[[str], bool] | None = None, format: str = "ckpt", **settings: Any,
) -> None:  # fmt: skip
    """Write the parameters of a cell to the checkpoint of this rank.

    Buffers (running statistics) are saved too, and the states of an optimizer: of ``optimizer``, or of a training cell
    (``nn.TrainOneStepCell``).

    Args:
        save_obj: a cell, a dict, or ``[{"name": ..., "data": ...}]``.
        integrated_save: save whole tensors; all ranks must call it then.
        async_save: accepted; the file is written before this returns.
        choice_func: returns whether to save the parameter of a name.
        format: "ckpt", or "mindspore": whole tensors in a file that the reference reads; all ranks must call it then.

    Raises:
        NotImplementedError: for ``enc_key``, as files are not encrypted.
    """
    _check_settings(settings)
    if format not in ("ckpt", "mindspore"):
        fix = "ckpt, or mindspore for the reference's own files; safetensors.torch.save_file writes the other"
        raise ValueError(problem(f"format is {format!r}", fix=fix))
    integrated_save = integrated_save or format == "mindspore"
    if isinstance(save_obj, nn.Module):
        trains = getattr(save_obj, "optimizer", None)
        optimizer = optimizer or (trains if isinstance(trains, Optimizer) else None)
        tensors: dict[str, torch.Tensor] = {**checkpoint_names(save_obj), **checkpoint_buffers(save_obj)}
    elif isinstance(save_obj, dict):
        tensors = {name: as_torch(value) for name, value in save_obj.items()}
    else:
        tensors = {entry["name"]: as_torch(entry["data"]) for entry in save_obj}
    if choice_func is not None:
        tensors = {name: tensor for name, tensor in tensors.items() if choice_func(name)}
    kept: dict[str, tuple[torch.Tensor, Held | None, torch.Tensor | None]] = {}  # a tensor, and whose state it is
    for name, tensor in tensors.items():
        if integrated_save:
            kept[name] = gathered(tensor, holding_of(tensor)), None, None
        elif not is_elsewhere(tensor):
            kept[name] = tensor, holding_of(tensor), None
    for name, (state, parameter) in ({} if optimizer is None else optimizer.states()).items():
        holding = holding_of(parameter) if parameter is not None and state.shape == parameter.shape else None
        if integrated_save and holding is not None:
            kept[name] = gathered(state, holding), None, parameter
        elif integrated_save or parameter is None or not is_elsewhere(parameter):
            kept[name] = state, holding, parameter
    paths = _paths(save_obj) if isinstance(save_obj, nn.Module) else {}
    entries = {}
    for name, (tensor, of, owner) in kept.items():
        is_state = name not in tensors
        entries[name] = entry_of(tensor, of) | ({"state": True} if is_state else {})
        entries[name]["path"] = paths.get(id(owner if is_state else tensors[name]), name)
    path = Path(ckpt_file_name)
    path = path if path.suffix == ".ckpt" else path.with_name(path.name + ".ckpt")
    if format == "mindspore":
        whole = {name: tensor for name, (tensor, *_) in kept.items() if not name.startswith("step.")}
        protobuf.write_checkpoint(path, whole, append_dict or {})
        return
    write(path, entries, append_dict or {}, rank())


def async_ckpt_thread_status() -> bool:
    """Return whether a checkpoint is still being written: always False, as they are written at once."""
    return False


# Settings of the reference without effect here, except the keys, which are refused.
_SETTINGS = ("crc_check", "enc_mode", "dec_mode", "format", "remove_redundancy", "enc_key", "dec_key")


def _check_settings(settings: dict[str, Any]) -> None:
    unknown_words(settings, *_SETTINGS)
    for name in ("enc_key", "dec_key"):
        if settings.get(name) is not None:
            what = f"{name}: checkpoints are not encrypted here"
            raise NotImplementedError(problem(what, fix="leave it None, and encrypt the file, or its disk"))


def write(path: Path, entries: dict[str, dict[str, Any]], info: dict[str, Any], writer: int) -> None:
    """Write a rank's file atomically, even if another process writes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        torch.save({"format": FORMAT, "rank": writer, "parameters": entries, "info": info}, part)
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _paths(module: nn.Module) -> dict[int, str]:
    named = (*module.named_parameters(), *module.named_buffers())
    return {id(tensor): unwrapped(path) for path, tensor in named}


def entry_of(tensor: torch.Tensor, holding: Held | None) -> dict[str, Any]:
    entry: dict[str, Any] = {"data": tensor.detach().as_subclass(torch.Tensor).cpu().clone()}
    if holding is not None:
        mesh, text = list(holding.layout.mesh.axes), format_layout(holding.layout)
        entry |= {"shape": list(holding.shape), "mesh": mesh, "layout": text, "ranks": list(holding.ranks)}
    return entry


def load_checkpoint(
    ckpt_file_name: str, net: nn.Module | None = None, strict_load: bool = False,
    filter_prefix: str | Sequence[str] | None = None, specify_prefix: str | Sequence[str] | None = None,
    choice_func: Callable[[str], bool] | None = None, **settings: Any,
) -> dict[str, Any]:  # fmt: skip
    """Return the parameters of a checkpoint by name, with the values of ``append_info``.

    Args:
        net: network to load at once.
        filter_prefix: prefixes of names to skip.
        specify_prefix: prefixes of names to read.
        choice_func: returns whether to read a name.

    Raises:
        ValueError: for another kind of file, or if no name is left.
        NotImplementedError: for ``dec_key``.
    """
    _check_settings(settings)
    parameters, info, _ = read(ckpt_file_name)
    without, only = (() if prefix is None else (prefix,) if isinstance(prefix, str) else tuple(prefix)
                     for prefix in (filter_prefix, specify_prefix))  # fmt: skip
    names = [name for name in parameters if not name.startswith(without) and (not only or name.startswith(only))]
    kept = {name: parameters[name] for name in names if choice_func is None or choice_func(name)}
    if parameters and not kept:
        what = f"none of the {len(parameters)} parameters of {ckpt_file_name} is chosen"
        raise ValueError(problem(what, fix=f"prefixes of {', '.join(list(parameters)[:3])}, ..."))
    parameters = kept
    info = {} if only else {name: _as_value(name, value) for name, value in info.items()}
    if net is not None:
        load_param_into_net(net, parameters, strict_load)
    return {**parameters, **info}


def _as_value(name: str, value: Any) -> Any:
    """Return an appended value; a number becomes a parameter that is no part of a network."""
    if not isinstance(value, (int, float)):
        return value
    entry = Slice(torch.tensor(value), name, requires_grad=False)
    entry.is_info = True
    return entry


def read(file: str) -> tuple[dict[str, Slice], dict[str, Any], int]:
    """Return the parameters of a file, the appended values, and the rank that wrote it."""
    path = Path(file)
    if not path.exists():
        raise ValueError(problem(f"there is no checkpoint {path}", fix="each rank has its own: .../<rank>/<name>.ckpt"))
    if not protobuf.is_zip(path):
        tensors, texts = protobuf.read_checkpoint(path)
        pieces = {name: Slice(tensor, name, tensor.is_floating_point()) for name, tensor in tensors.items()}
        for name, piece in pieces.items():
            piece.path = name
        return pieces, texts, 0
    try:
        content = torch.load(path, weights_only=True)
    except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
        fix = "one that save_checkpoint wrote, whole"
        raise ValueError(problem(f"{path} cannot be read as a checkpoint: {error}", fix=fix)) from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(problem(f"{path} is not a checkpoint of this library", fix="one that save_checkpoint wrote"))
    missing = [key for key in ("parameters", "info", "rank") if key not in content]
    wrong = [name for name, entry in content.get("parameters", {}).items() if not _is_entry(entry)]
    if missing or wrong:
        what = f"it lacks {', '.join(missing)}" if missing else f"its entry {wrong[0]} lacks data, or half its layout"
        fix = "save it again with this version; torch.load(file) shows what it holds"
        raise ValueError(problem(f"{path} is a checkpoint of another version: {what}", fix=fix))
    parameters: dict[str, Slice] = {}
    for name, entry in content["parameters"].items():
        piece = Slice(entry["data"], name, requires_grad=entry["data"].is_floating_point())
        piece.is_state, piece.path = "state" in entry, entry.get("path", name)
        if "layout" in entry:
            mesh = Mesh([(axis, size) for axis, size in entry["mesh"]])
            ranks = tuple(entry.get("ranks", range(mesh.num_devices)))
            piece.held = Held(parse_layout(entry["layout"], mesh), ranks)
        parameters[name] = piece
    return parameters, content["info"], content["rank"]


def _is_entry(entry: Any) -> bool:
    layout_keys = {"layout", "mesh", "shape"} & set(entry) if isinstance(entry, dict) else set()
    return isinstance(entry, dict) and isinstance(entry.get("data"), torch.Tensor) and len(layout_keys) in (0, 3)


def load_distributed_checkpoint(
    network: Any, checkpoint_filenames: Sequence[str], predict_strategy: Any = None,
    train_strategy_filename: str | None = None, strict_load: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Join the files of all ranks, whatever their number was, and return the whole parameters.

    Args:
        network: a network or an optimizer to load; it takes its own parts. None: load nothing.
        predict_strategy: not needed, as files contain their layouts.
        train_strategy_filename: not needed either.

    Raises:
        RuntimeError: if a part is missing.
    """
    parameters, info = joined_files(checkpoint_filenames)
    if network is not None:
        load_param_into_net(network, parameters, strict_load)
    return {**parameters, **{name: _as_value(name, value) for name, value in info.items()}}


def joined_files(names: Sequence[str]) -> tuple[dict[str, Slice], dict[str, Any]]:
    """Return whole parameters and states from the files of ranks, and the appended values of the first."""
    files = [read(file) for file in names]
    if not files:
        raise ValueError(problem("there is no file", fix="one of every rank: [f'{rank}/net.ckpt' for rank in ...]"))
    parameter_names = dict.fromkeys(name for pieces, *_ in files for name in pieces)  # states may be in one file only
    return {name: of_parts(name, [file for file in files if name in file[0]]) for name in parameter_names}, files[0][1]


def of_parts(name: str, files: list[tuple[dict[str, Slice], dict[str, Any], int]]) -> Slice:
    """Join a parameter of which every file has a part."""
    first = files[0][0][name]
    if first.held is None or not first.held.layout.positions:
        first.held = None
        return first
    layout = first.held.layout
    for pieces, *_ in files:
        if (of := pieces[name].held) is None or of.layout != layout:
            what = f"{name} is split as {layout} in one file and differently in another"
            raise RuntimeError(problem(what, fix="the files of one checkpoint, one of every rank"))
    parts = [(writer, pieces[name]) for pieces, _, writer in files if pieces[name].held == first.held]
    whole, missing = joined(first.held, parts)
    if missing.any():
        writers = ", ".join(str(writer) for *_, writer in files)
        what = f"the files of ranks {writers} have {int((~missing).sum())} of the {missing.numel()} elements of {name}"
        raise RuntimeError(problem(what, fix=f"the files of all {layout.mesh.num_devices} ranks"))
    parameter = Slice(whole, name, requires_grad=first.requires_grad)
    parameter.is_state, parameter.path = first.is_state, first.path
    return parameter


def load_param_into_net(
    net: Any, parameter_dict: dict[str, Any], strict_load: bool = False, *, remove_redundancy: bool = False
) -> tuple[list[str], list[str]]:
    """Load a checkpoint into a network or an optimizer.

    Return the names that the checkpoint lacks and those that the network lacks. A part of a parameter fits a network
    that is split in the same way. A network that is not split yet takes over its split. Whole parameters fit every
    network.

    Args:
        strict_load: if False, names of the checkpoint may have a prefix that those of the network lack, and dtypes are
            converted.

    Raises:
        RuntimeError: for other shapes, and with ``strict_load`` for other dtypes; nothing is changed then.
    """
    tensors = {name: entry for name, entry in parameter_dict.items() if isinstance(entry, torch.Tensor)}
    entries = {name: entry for name, entry in tensors.items() if not getattr(entry, "is_info", False)}
    if isinstance(net, Optimizer):
        taken = net.load_states({name: entry for name, entry in entries.items() if getattr(entry, "is_state", False)})
        return [name for name in net.states() if name not in taken], [name for name in entries if name not in taken]
    targets: dict[str, torch.Tensor] = {**checkpoint_names(net), **checkpoint_buffers(net)}
    if not strict_load:
        entries = _without_prefix(entries, [name for name in targets if name not in entries])
    loads = []
    for name, target in targets.items():
        entry = entries.get(name)
        if entry is None:
            continue
        of, now = getattr(entry, "held", None), holding_of(target)
        whole = tuple(entry.shape) if of is None else of.shape
        expected = tuple(target.shape) if now is None else now.shape
        if whole != expected:
            what = f"{name} has shape {list(whole)} in the checkpoint and {list(expected)} in the network"
            raise RuntimeError(problem(what, fix="load into the network that was saved"))
        if strict_load and entry.dtype != target.dtype:
            what = f"{name} is {entry.dtype} in the checkpoint and {target.dtype} in the network"
            raise RuntimeError(problem(what, fix="strict_load=False converts it"))
        _check_part(name, of, now)
        loads.append((target, entry, of))
    for target, entry, of in loads:
        data = entry.detach().as_subclass(torch.Tensor).to(dtype=target.dtype, device=target.device)
        if of is None or holding_of(target) is not None:
            with torch.no_grad():
                target.copy_(own_shard(data, target))
        else:
            hold(target, data.clone(), of)
    if isinstance(getattr(net, "optimizer", None), Optimizer):
        load_param_into_net(net.optimizer, parameter_dict)
    missing = [name for name in targets if name not in entries]
    if missing:
        note(f"load_param_into_net: {len(missing)} parameters keep their values: {', '.join(missing)}")
    return missing, [name for name in entries if name not in targets]


def _without_prefix(entries: dict[str, Any], missing: list[str]) -> dict[str, Any]:
    own_names = [name for name, entry in entries.items() if not getattr(entry, "is_state", False)]
    ends = ((full_name, name) for name in missing for full_name in own_names if full_name.endswith(f".{name}"))
    full_name, name = next(ends, ("", ""))
    prefix = full_name.removesuffix(name)
    renamed = {f"{prefix}{name}": name for name in missing} if prefix else {}
    return {renamed.get(key, key): entry for key, entry in entries.items()}


def _check_part(name: str, of: Held | None, now: Held | None) -> None:
    """Raise RuntimeError if a part of a parameter is not the one that this rank needs."""
    if of is None or of == now:
        return
    if now is not None and of.layout == now.layout and of.is_split == now.is_split and not of.layout.positions:
        return
    ranks = of.layout.mesh.num_devices
    split = now is None and calls.is_split() and context.options().stage_devices == ranks
    if split or (now is None and not of.layout.positions):
        return
    here = "whole" if now is None else f"split as {now.layout}"
    what = f"{name} is {here} here, and the file has a part of it, split as {of.layout} over {ranks} ranks"
    fix = "load_distributed_checkpoint(net, files), with the files of all of these ranks"
    raise RuntimeError(problem(what, fix=fix))


def export(net: nn.Module, *inputs: Any, file_name: str, file_format: str = "MINDIR", **settings: Any) -> None:
    """Write a whole network with its parameters for inference.

    The file is torch's (``torch.export``).

    Args:
        inputs: example tensors; dim 0 may have other sizes later.
        file_name: path without the ending ".mindir".

    Raises:
        ValueError: for another format.
    """
    if file_format != "MINDIR":
        raise ValueError(problem(f"file_format is {file_format!r}", fix='"MINDIR"'))
    if split := [name for name, p in net.named_parameters() if (of := holding_of(p)) and of.is_split]:
        what = f"{split[0]} is split over the ranks"
        raise RuntimeError(problem(what, fix="save a checkpoint, and load_distributed_checkpoint in one process"))
    tensors = tuple(as_torch(x) for x in inputs)
    training = net.training
    net.eval()
    path = Path(file_name)
    path = path if path.suffix == ".mindir" else path.with_name(path.name + ".mindir")
    with calls.inside(), torch.no_grad():
        save_exported(net, tensors, path)
    net.train(training)


def load(file_name: str, **settings: Any) -> nn.Module:
    """Load a file of ``export``, for ``nn.GraphCell``. The file is a program: load only files you trust.
    ``torch.export.load`` unpickles, and the file decides which operators the program calls."""
    path = Path(file_name)
    if not path.exists():
        raise ValueError(problem(f"there is no file {path}", fix="one that export wrote: net.mindir"))
    return load_exported(path)


__all__ = [
    "async_ckpt_thread_status", "export", "load", "load_checkpoint", "load_distributed_checkpoint",
    "load_param_into_net", "save_checkpoint",
]  # fmt: skip
