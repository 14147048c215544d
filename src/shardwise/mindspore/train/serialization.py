"""Checkpoints of what a rank holds: its part of every parameter, with the layout that says which part it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.errors import problem
from shardwise.layouts.mesh import Mesh
from shardwise.layouts.text import format_layout, parse_layout
from shardwise.mindspore import engine
from shardwise.mindspore.nn.cell import checkpoint_names
from shardwise.mindspore.tensor import Parameter, as_torch

FORMAT = "shardwise-rank-checkpoint"


class Slice(Parameter):
    """A parameter of a checkpoint. ``held``: of which whole it is which part; None for a whole one."""

    held: engine.Held | None = None


def save_checkpoint(
    save_obj: nn.Module | dict[str, Any] | list[dict[str, Any]],
    ckpt_file_name: str,
    integrated_save: bool = False,
    append_dict: dict[str, Any] | None = None,
) -> None:
    """Write the parameters of a cell (or a dict, or ``[{"name": ..., "data": ...}]``) as this rank holds them.

    Buffers (running statistics) are saved, too.
    """
    if isinstance(save_obj, nn.Module):
        tensors: dict[str, torch.Tensor] = {**checkpoint_names(save_obj), **dict(save_obj.named_buffers())}
    elif isinstance(save_obj, dict):
        tensors = {name: as_torch(value) for name, value in save_obj.items()}
    else:
        tensors = {entry["name"]: as_torch(entry["data"]) for entry in save_obj}
    entries: dict[str, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        holding = engine.held(tensor)
        entries[name] = {"data": tensor.detach().as_subclass(torch.Tensor).cpu().clone()}
        if holding is not None:
            entries[name] |= {
                "shape": list(holding.shape),
                "mesh": list(holding.layout.mesh.axes),
                "layout": format_layout(holding.layout),
            }
    path = Path(ckpt_file_name)
    path = path if path.suffix == ".ckpt" else path.with_name(path.name + ".ckpt")
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"format": FORMAT, "parameters": entries, "info": append_dict or {}}, path)


def load_checkpoint(ckpt_file_name: str, net: nn.Module | None = None, strict_load: bool = False) -> dict[str, Any]:
    """Name -> parameter, and what ``append_info`` added. ``net``: gets them at once. Raises ValueError for another kind
    of file."""
    path = Path(ckpt_file_name)
    if not path.exists():
        raise ValueError(problem(f"there is no checkpoint {path}", fix="each rank has its own: .../<rank>/<name>.ckpt"))
    content = torch.load(path, weights_only=True)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(problem(f"{path} is no checkpoint of this library", fix="one that save_checkpoint wrote"))
    parameters: dict[str, Any] = {}
    for name, entry in content["parameters"].items():
        piece = Slice(entry["data"], name, requires_grad=entry["data"].is_floating_point())
        if "layout" in entry:
            mesh = Mesh([(axis, size) for axis, size in entry["mesh"]])
            piece.held = engine.Held(tuple(entry["shape"]), parse_layout(entry["layout"], mesh))
        parameters[name] = piece
    if net is not None:
        load_param_into_net(net, parameters, strict_load)
    return {**parameters, **content["info"]}


def load_param_into_net(
    net: nn.Module, parameter_dict: dict[str, Any], strict_load: bool = False
) -> tuple[list[str], list[str]]:
    """Give a network the parameters of a checkpoint. Returns the names that the checkpoint lacks and those that the
    network lacks.

    A part of a parameter fits a network that is split in the same way, or not yet split: it is split so then. Raises
    RuntimeError for other shapes; nothing is changed then.
    """
    targets: dict[str, torch.Tensor] = {**checkpoint_names(net), **dict(net.named_buffers())}
    loads = []
    for name, target in targets.items():
        entry = parameter_dict.get(name)
        if not isinstance(entry, torch.Tensor):
            continue
        of, now = getattr(entry, "held", None), engine.held(target)
        whole = tuple(entry.shape) if of is None else of.shape
        expected = tuple(target.shape) if now is None else now.shape
        if whole != expected:
            raise RuntimeError(
                problem(
                    f"{name} has shape {list(whole)} in the checkpoint and {list(expected)} in the network",
                    fix="load into the network that was saved",
                )
            )
        if now is not None and of != now:
            kept = "whole" if of is None else str(of.layout)
            raise RuntimeError(
                problem(
                    f"{name} is split as {now.layout} and was saved as {kept}: converting checkpoints follows in a "
                    "later version",
                    fix="load before the network is first called: it is then split as it was saved",
                )
            )
        loads.append((target, entry, of))
    for target, entry, of in loads:
        data = entry.detach().as_subclass(torch.Tensor).to(dtype=target.dtype, device=target.device)
        if of is None or engine.held(target) is not None:
            with torch.no_grad():
                target.copy_(data)
        else:
            engine.hold(target, data.clone(), of.shape, of.layout)
    missing = [name for name in targets if name not in parameter_dict]
    extra = [
        name for name, tensor in parameter_dict.items() if isinstance(tensor, torch.Tensor) and name not in targets
    ]
    if strict_load and missing:
        raise RuntimeError(problem(f"the checkpoint lacks {', '.join(missing)}", fix="strict_load=False skips them"))
    return missing, extra
