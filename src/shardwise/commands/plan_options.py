"""The settings of ``sw.plan`` as options of a command."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from shardwise.costs.cluster import Cluster
from shardwise.errors import ShardwiseError
from shardwise.untrusted_text import whole_number

# Options whose values are those of the setting of the same name.
_PLAIN = ("mode", "search", "global_batch", "micro_batch", "bucket_bytes", "recompute", "offload", "schedule", "zero")
_DTYPES = {"f64": "float64", "f32": "float32", "bf16": "bfloat16", "f16": "float16"}


def add_settings(parser: argparse.ArgumentParser, *, cluster: bool = True) -> None:
    """Add one option per setting. ``cluster``: whether ``--cluster`` is required."""
    add = parser.add_argument
    add(
        "--cluster",
        required=cluster,
        metavar="CLUSTER",
        help="a bundled name, a file, or a number of devices like those here, without a memory limit",
    )
    add("--mode", metavar="MODE", help="auto, semi_auto, data_parallel or stand_alone (auto)")
    add("--search", metavar="SEARCH", help="dynamic_programming, ilp, recursive_programming or sharding_propagation")
    add("--mesh", metavar="AXES", help="such as dp=16,tp=8 (chosen by the search)")
    add("--max-mesh-axes", type=int, default=2, metavar="N", help="largest number of axes of the tried meshes (2)")
    add("--global-batch", type=int, metavar="N", help="samples of an optimizer step (those of the example inputs)")
    add("--micro-batch", type=int, metavar="N", help="samples of a micro-batch (chosen by the search)")
    add("--precision", metavar="DTYPES", help="such as compute=bf16,parameter=f32,reduce=f32 (the model's own)")
    add("--memory", metavar="BYTES", help='memory limit of a device, such as "60 GiB" (all but its reserve)')
    add("--optimizer", default="adamw", help="whose states count as memory (adamw); 'adamw on host': in host memory")
    add("--strategy", action="append", metavar="NAME=TEXT", help="of submodules: 'blocks.*.up=n@tp'; repeatable")
    add("--layout", action="append", metavar="NAME=TEXT", help="of an input, parameter or buffer: 'x=[32@dp, 512]'")
    add("--bucket-bytes", type=int, metavar="N", help="size of gradient buckets (25 MiB)")
    add("--recompute", metavar="HOW", help="auto, none, gathers, cheap, cheap+gathers or full (auto)")
    add("--offload", choices=("auto", "none", "all"), help="saved tensors that wait in host memory (auto)")
    add("--stages", metavar="N", help="pipeline stages: a number, marked (sw.stage), or auto")
    add("--schedule", metavar="NAME", help="pipeline schedule: 1F1B, GPipe, ZBVZeroBubble, Solved, ... (1F1B)")
    add("--zero", type=int, choices=(1, 2, 3), help="ZeRO stage: shard parameters, gradients and states")


def settings_of(chosen: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of ``sw.plan`` that the options give. Raises ShardwiseError for text that does not parse."""
    from shardwise.costs.units import parse_quantity
    from shardwise.layouts.mesh import Mesh

    settings: dict[str, Any] = {"max_mesh_axes": chosen.max_mesh_axes, "optimizer": chosen.optimizer}
    settings |= {name: getattr(chosen, name) for name in _PLAIN if getattr(chosen, name) is not None}
    if chosen.stages is not None:
        number = whole_number(chosen.stages)
        settings["stages"] = chosen.stages if number is None else number
    if chosen.mesh is not None:
        settings["mesh"] = Mesh.parse(chosen.mesh)
    if chosen.memory is not None:
        try:
            settings["memory_bytes"] = parse_quantity(chosen.memory, "B")
        except ValueError as error:
            raise ShardwiseError(f"--memory: {error}", fix='such as --memory "60 GiB"') from error
    if chosen.precision is not None:
        settings["precision"] = _precision(chosen.precision)
    for option, name in (("strategy", "strategies"), ("layout", "layouts")):
        if getattr(chosen, option):
            settings[name] = _pairs(getattr(chosen, option), f"--{option}")
    return settings


def cluster_of(text: str) -> Cluster | int:
    """Return the cluster of a name or a file, or a number of devices as an int."""
    number = whole_number(text)
    return Cluster.load(text) if number is None else number


def _pairs(texts: Sequence[str], option: str) -> dict[str, str]:
    pairs = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not sign:
            raise ShardwiseError(f"{option} {text!r} has no =", fix=f"{option} NAME=TEXT")
        pairs[name] = value
    return pairs


def _precision(text: str) -> Any:
    import torch

    from shardwise.graph.step_precision import Precision

    pairs = _pairs(text.split(","), "--precision")
    wrong = [f"{key}={value}" for key, value in pairs.items() if value not in _DTYPES and value not in _DTYPES.values()]
    if wrong or pairs.keys() - {"compute", "parameter", "reduce"}:
        raise ShardwiseError(
            f"cannot parse --precision {text!r}",
            fix=f"compute=, parameter=, reduce=, each {', '.join(_DTYPES)}: compute=bf16,parameter=f32",
        )
    return Precision(**{key: getattr(torch, _DTYPES.get(value, value)) for key, value in pairs.items()})
