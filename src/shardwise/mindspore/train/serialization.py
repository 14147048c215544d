"""Checkpoints of ranks: a rank's part of every parameter, with its layout."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import nn

from shardwise import Mesh, Plan, rank
from shardwise.errors import listed, problem
from shardwise.mindspore import calls, context, holding, protobuf
from shardwise.mindspore.checks import note, unknown_words
from shardwise.mindspore.library import Box, format_layout, load_exported, parse_layout, save_exported, shard
from shardwise.mindspore.nn.optimizer import Optimizer
from shardwise.mindspore.tensor import Parameter, as_torch

FORMAT = "shardwise-rank-checkpoint"


class Slice(Parameter):
    """A parameter of a checkpoint. ``held``: its distribution; None if it is whole. ``is_state``: it is a state of an
    optimizer; ``is_info``: it was appended. ``path``: path of it, or of its parameter, in the saved network."""

    held: holding.Held | None = None
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
        tensors = _tensors(save_obj)
    elif isinstance(save_obj, dict):
        tensors = {name: as_torch(value) for name, value in save_obj.items()}
    else:
        tensors = {entry["name"]: as_torch(entry["data"]) for entry in save_obj}
    owned = {name: (x, x) for name, x in tensors.items() if choice_func is None or choice_func(name)}
    module = save_obj if isinstance(save_obj, nn.Module) else nn.Module()
    paths = {id(x): holding.unwrapped(path) for path, x in (*module.named_parameters(), *module.named_buffers())}
    entries: dict[str, dict[str, Any]] = {}
    for name, (tensor, owner) in {**owned, **({} if optimizer is None else optimizer.states())}.items():
        distribution = None if owner is None or tensor.shape != owner.shape else holding.holding_of(owner)
        if integrated_save and (distribution is not None or owner is tensor):
            entries[name] = _entry(holding.gathered(tensor, distribution), None)
        elif integrated_save or owner is None or not holding.is_elsewhere(owner):
            entries[name] = _entry(tensor, distribution)
        else:
            continue
        entries[name] |= ({} if owner is tensor else {"state": True}) | {"path": paths.get(id(owner), name)}
    path = _with_suffix(ckpt_file_name, ".ckpt")
    if format == "mindspore":
        whole = {name: entry["data"] for name, entry in entries.items() if not name.startswith("step.")}
        protobuf.write_checkpoint(path, whole, append_dict or {})
    else:
        write(path, entries, append_dict or {}, rank())


def _tensors(cell: nn.Module) -> dict[str, torch.Tensor]:
    return {**holding.checkpoint_names(cell), **holding.checkpoint_buffers(cell)}


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


def _with_suffix(file: str, suffix: str) -> Path:
    return Path(file if file.endswith(suffix) else file + suffix)


def _entry(tensor: torch.Tensor, distribution: holding.Held | None) -> dict[str, Any]:
    entry: dict[str, Any] = {"data": tensor.detach().as_subclass(torch.Tensor).cpu().clone()}
    if distribution is not None:
        mesh, text = list(distribution.layout.mesh.axes), format_layout(distribution.layout)
        entry |= {"shape": list(distribution.shape), "mesh": mesh, "layout": text, "ranks": list(distribution.ranks)}
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
    return _loaded(net, kept, {} if only else info, strict_load)


def _loaded(net: Any, parameters: dict[str, Slice], info: dict[str, Any], strict_load: bool) -> dict[str, Any]:
    """Load parameters into a network, if there is one, and return them with the appended values."""
    if net is not None:
        load_param_into_net(net, parameters, strict_load)
    return {**parameters, **{name: _as_value(name, value) for name, value in info.items()}}


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
    content: Any
    if not protobuf.is_zip(path):
        tensors, texts = protobuf.read_checkpoint(path)
        entries = {name: {"data": tensor} for name, tensor in tensors.items()}
        content = {"format": FORMAT, "parameters": entries, "info": texts, "rank": 0}
    else:
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
            piece.held = holding.Held(parse_layout(entry["layout"], mesh), ranks)
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
    return _loaded(network, *joined_files(checkpoint_filenames), strict_load)


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
    whole, missing = holding.joined(first.held, parts)
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
    targets = _tensors(net)
    if not strict_load:
        entries = _without_prefix(entries, [name for name in targets if name not in entries])
    loads = []
    for name, target in targets.items():
        entry = entries.get(name)
        if entry is None:
            continue
        of, now = getattr(entry, "held", None), holding.holding_of(target)
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
        if of is None or holding.holding_of(target) is not None:
            with torch.no_grad():
                target.copy_(holding.own_shard(data, target))
        else:
            holding.hold(target, data.clone(), of)
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


def _check_part(name: str, of: holding.Held | None, now: holding.Held | None) -> None:
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
    if split := [name for name, p in net.named_parameters() if (of := holding.holding_of(p)) and of.is_split]:
        what = f"{split[0]} is split over the ranks"
        raise RuntimeError(problem(what, fix="save a checkpoint, and load_distributed_checkpoint in one process"))
    tensors = tuple(as_torch(x) for x in inputs)
    training = net.training
    net.eval()
    with calls.inside(), torch.no_grad():
        save_exported(net, tensors, _with_suffix(file_name, ".mindir"))
    net.train(training)


def load(file_name: str, **settings: Any) -> nn.Module:
    """Load a file of ``export``, for ``nn.GraphCell``. The file is a program: load only files you trust.
    ``torch.export.load`` unpickles, and the file decides which operators the program calls."""
    path = Path(file_name)
    if not path.exists():
        raise ValueError(problem(f"there is no file {path}", fix="one that export wrote: net.mindir"))
    return load_exported(path)


# -- conversion of ranks' checkpoints to other layouts; the strategy files of both sides are plans ---------------------


def build_searched_strategy(strategy_filename: str) -> Plan:
    """Return the plan of a strategy file that ``strategy_ckpt_save_file`` wrote."""
    return Plan.load(strategy_filename)


def merge_pipeline_strategys(src_strategy_dirs: str, dst_strategy_file: str) -> None:
    """Merge the strategy files of a pipeline's ranks into one. Each has all stages here, so they must be equal."""
    files = sorted(path for path in Path(src_strategy_dirs).glob("*") if path.is_file())
    plans = {path: Plan.load(path) for path in files}
    digests = {plan.digest for plan in plans.values()}
    if len(digests) != 1:
        what = f"{src_strategy_dirs} has {len(digests)} strategies in {len(files)} files"
        raise ValueError(problem(what, fix="a folder with the files of one job"))
    Path(dst_strategy_file).parent.mkdir(parents=True, exist_ok=True)
    plans[files[0]].save(dst_strategy_file)


def rank_list_for_transform(
    rank_id: int, src_strategy_file: str | None = None, dst_strategy_file: str | None = None
) -> list[int]:
    """Return the ranks whose files together have what rank ``rank_id`` of the other side needs. Without a strategy file
    a side has whole tensors in one file."""
    if src_strategy_file is None:
        return [0]
    source, target = _holdings(src_strategy_file), _holdings(dst_strategy_file)
    needed: set[int] = set()
    for path, distribution in source.items():
        target_boxes = holding.boxes_of(_matching(path, target), rank_id, distribution)
        covered: set[tuple[Box, ...]] = set()
        for number in distribution.ranks:
            parts = holding.boxes_of(distribution, number, distribution)
            if parts not in covered and any(a.common(b.offsets, b.sizes) for a in parts for b in target_boxes):
                covered.add(parts)
                needed.add(number)
    return sorted(needed)


def transform_checkpoint_by_rank(
    rank_id: int, checkpoint_files_map: Mapping[int, str], save_checkpoint_file_name: str,
    src_strategy_file: str | None = None, dst_strategy_file: str | None = None,
) -> None:  # fmt: skip
    """Write the file of one rank of the target side from the files of the source side, given by their ranks. Raises
    RuntimeError if a part is missing."""
    if not save_checkpoint_file_name.endswith(".ckpt"):
        raise ValueError(problem(f"the file is {save_checkpoint_file_name!r}", fix="a name that ends with .ckpt"))
    whole, info = joined_files([checkpoint_files_map[rank] for rank in sorted(checkpoint_files_map)])
    _write_part(whole, info, rank_id, Path(save_checkpoint_file_name), _holdings(dst_strategy_file))


def transform_checkpoints(
    src_checkpoints_dir: str, dst_checkpoints_dir: str, ckpt_prefix: str, src_strategy_file: str | None = None,
    dst_strategy_file: str | None = None, process_num: int = 1, output_format: str = "ckpt",
) -> None:  # fmt: skip
    """Convert the newest files in ``rank_0``, ``rank_1``, ... for the ranks of ``dst_strategy_file``:
    ``<dst>/rank_<i>/<ckpt_prefix><i>.ckpt``; without it to one whole file in ``rank_0``. ``process_num`` has no effect.
    Raises RuntimeError if a part is missing."""
    if output_format != "ckpt":
        raise NotImplementedError(problem(f"output_format={output_format!r}", fix="ckpt; sw.save_pretrained writes "
                                          "safetensors"))  # fmt: skip
    folders = [path for path in Path(src_checkpoints_dir).glob("rank_*") if path.name[5:].isdigit()]
    newest = {int(folder.name[5:]): max(folder.glob("*.ckpt"), key=lambda file: (file.stat().st_mtime_ns, file.name))
              for folder in folders if any(folder.glob("*.ckpt"))}  # fmt: skip
    missing = sorted(set(range(_ranks(src_strategy_file))) - newest.keys())
    if not newest or missing:
        what = f"{src_checkpoints_dir} has files of the ranks {sorted(newest)}" + (
            f", not of {listed(list(map(str, missing)))}" if missing else ""
        )
        raise ValueError(problem(what, fix="a folder rank_<i> with a file for every rank"))
    whole, info = joined_files([str(newest[rank]) for rank in sorted(newest)])
    holdings = _holdings(dst_strategy_file)
    for number in range(_ranks(dst_strategy_file) or 1):
        path = Path(dst_checkpoints_dir) / f"rank_{number}" / f"{ckpt_prefix}{number}.ckpt"
        _write_part(whole, info, number, path, holdings)


def _write_part(
    whole: dict[str, Slice], info: dict[str, Any], number: int, path: Path, holdings: dict[str, holding.Held]
) -> None:
    entries: dict[str, dict[str, Any]] = {}
    for name, tensor in whole.items():
        part = tensor.detach().as_subclass(torch.Tensor)
        distribution = _matching(tensor.path, holdings if tensor.dim() else {})
        if distribution is not None and distribution.shape != tuple(tensor.shape):
            distribution = None  # a state whose shape differs from its parameter's
        if distribution is not None:
            if number not in distribution.ranks:
                continue
            part = shard(part, distribution.layout, distribution.coordinates(number))
        state = {"state": True} if tensor.is_state else {}
        entries[name] = _entry(part, distribution) | state | {"path": tensor.path}
    write(path, entries, info, number)


def _ranks(strategy: str | None) -> int:
    return 0 if strategy is None else Plan.load(strategy).num_ranks


def restore_group_info_list(ckpt_file_name: str) -> list[int]:
    """Return the ranks in the file of ``group_ckpt_save_file`` (or of the environment's GROUP_INFO_FILE)."""
    return [int(rank) for rank in json.loads(Path(ckpt_file_name).read_text())]


def _holdings(strategy: str | None) -> dict[str, holding.Held]:
    return {} if strategy is None else holding.held_by(Plan.load(strategy))


def _matching(path: str, holdings: dict[str, holding.Held]) -> holding.Held | None:
    """Return the distribution of a parameter in a plan; None without a plan. Raises ValueError if it has none."""
    if holdings and path not in holdings:
        near = listed(sorted(holdings)[:4])
        what = f"the strategy file has no parameter {path}, but {near} and so on"
        raise ValueError(problem(what, fix="the strategy file of the network that was saved"))
    return holdings.get(path)


def merge_sliced_parameter(sliced_parameters: Sequence[Slice], strategy: Any = None) -> torch.Tensor:
    """Join a parameter from its slices, which ``load_checkpoint`` read, in the order of their ranks. ``strategy`` is
    not needed, as each slice contains its layout."""
    ranks = distribution.ranks if (distribution := sliced_parameters[0].held) else range(len(sliced_parameters))
    name = sliced_parameters[0].name
    return of_parts(name, [({name: part}, {}, at) for part, at in zip(sliced_parameters, ranks, strict=False)])


__all__ = [
    "async_ckpt_thread_status", "build_searched_strategy", "export", "load", "load_checkpoint",
    "load_distributed_checkpoint", "load_param_into_net", "merge_pipeline_strategys", "merge_sliced_parameter",
    "rank_list_for_transform", "restore_group_info_list", "save_checkpoint", "transform_checkpoint_by_rank",
    "transform_checkpoints",
]  # fmt: skip
