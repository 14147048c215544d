"""``shardwise recipe``: a training script and its TOML for a published model on a cluster, with the plan of a step.

``recipes.toml`` holds what differs between models, ``train.py.jinja`` is the script of all of them.
"""

from __future__ import annotations

import argparse
import json
import shlex
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import chdir
from importlib import resources
from pathlib import Path
from typing import Any

from shardwise.commands.command import Suggestions, writing
from shardwise.costs.cluster import Cluster
from shardwise.costs.cluster_file import families
from shardwise.errors import ShardwiseError
from shardwise.untrusted_text import whole_number

SCRIPT, SIZES, PLAN = "train.py", "recipe.toml", "plan.json"
SECONDS = 900.0  # of planning, by default: what ends it is announced, with the gap
# Settings that are no part of a published recipe.
_TRAIN = {
    "data": "",
    "steps": 100_000,
    "warmup": 2_000,
    "weight_decay": 0.1,
    "clip_norm": 1.0,
    "seed": 0,
    "values": "parallel",
    "folder": "checkpoints",
    "save_every": 1_000,
    "log_every": 10,
}
_TINY = {"batch": 8, "steps": 3, "warmup": 1, "values": "cpu", "save_every": 100, "log_every": 1}
_COMMENTS = {
    "data": 'a file of int32 token ids, from this folder; "": random ones, to try the recipe',
    "images": "number of images",
    "batch": "samples of a step, over all devices",
    "values": 'initial values: "parallel", or "cpu" for those of torch.manual_seed on one device',
}
_IMAGES = {"data": 'a file of bytes [images, 3, height, width]; "": random ones', "labels": "a file of int64"}


def recipes() -> dict[str, dict[str, Any]]:
    """Return the recipes by name."""
    return tomllib.loads(resources.files("shardwise.commands").joinpath("recipes.toml").read_text(encoding="utf-8"))


def add_recipe(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("name", choices=sorted(recipes()), metavar="NAME", help=f"one of {', '.join(sorted(recipes()))}")
    says = "a bundled name, a file, or a number of devices like here"
    add("--cluster", required=True, choices=Suggestions(families()), metavar="CLUSTER", help=says)
    add("--tiny", action="store_true", help="a few layers of tiny width and three steps: to see it run on CPUs")
    add("-o", "--output", metavar="FOLDER", help=f"where {SCRIPT}, {SIZES} and {PLAN} are written (NAME)")
    add("--seconds", type=float, default=SECONDS, metavar="S", help=f"end with the best plan so far ({SECONDS:g})")


def write_recipe(chosen: argparse.Namespace, run: Callable[[Sequence[str]], int]) -> int:
    """Write the files of a recipe. ``run``: executes another subcommand, with which the plan is made."""
    entry, number = recipes()[chosen.name], whole_number(chosen.cluster)
    cluster = Cluster.of(number) if number is not None else Cluster.load(chosen.cluster)
    folder = Path(chosen.output or chosen.name)
    path = Path(chosen.cluster)  # of a file: the plan is made in the folder
    options = [f"{SCRIPT}:build", "--cluster", str(path.resolve()) if path.suffix == ".toml" else chosen.cluster]
    if chosen.tiny:  # left alone, so small a model is repeated on every device
        options += ["--mode", "data_parallel", "--zero", "3"]
    elif "bf16" in cluster.device.flops:
        options += ["--precision", "compute=bf16,parameter=f32,reduce=f32"]
    if "per_micro_batch" in entry:
        options += ["--per-micro-batch", entry["per_micro_batch"]]
    command = ["plan", *options, "-o", PLAN]
    for name in (SCRIPT, SIZES, PLAN):
        if (folder / name).exists():
            raise ShardwiseError(f"{folder / name} exists", fix="give another folder with -o, or remove it")
    with writing(str(folder)):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / SCRIPT).write_text(_script(entry, cluster, shlex.join(["shardwise", *command])), encoding="utf-8")
        (folder / SIZES).write_text(_sizes(entry, chosen), encoding="utf-8")
    with chdir(folder):
        code = run([*command, "--seconds", str(chosen.seconds)])
    if code:  # nothing fits, or it was interrupted: the same command can be given again
        (folder / SCRIPT).unlink()
        (folder / SIZES).unlink()
    else:
        script = shlex.quote(str(folder / SCRIPT))
        print(f"\nwritten to {folder}: {SCRIPT}, {SIZES}, {PLAN}; shardwise run -n N {script} trains")
    return code


def _script(entry: Mapping[str, Any], cluster: Cluster, command: str) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("shardwise.commands", "")
    environment = Environment(loader=loader, trim_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined)
    return environment.get_template(f"{SCRIPT}.jinja").render(
        entry, cluster=cluster, command=command, images="images" in entry["train"]
    )


def _sizes(entry: Mapping[str, Any], chosen: argparse.Namespace) -> str:
    model, train = dict(entry["model"]), {**entry["train"], **_TRAIN}
    comments = dict(_COMMENTS)
    if "images" in train:
        train = {"data": "", "labels": "", **train}
        comments |= _IMAGES
    if chosen.tiny:
        model |= entry["tiny"]
        train |= _TINY | {name: 16 for name in ("sequence",) if name in train}
        train |= {name: 64 for name in ("images",) if name in train}
    lines = [f"# {entry['title']}: {entry['source']}.", f"# Read by {SCRIPT}.", "", "[model]"]
    lines += [f"{name} = {_toml(value)}" for name, value in model.items()]
    lines += ["", "[train]"]
    width = max(len(f"{name} = {_toml(value)}") for name, value in train.items() if name in comments)
    for name, value in train.items():
        line = f"{name} = {_toml(value)}"
        lines.append(f"{line:{width}}  # {comments[name]}" if name in comments else line)
    return "\n".join([*lines, ""])


def _toml(value: Any) -> str:
    """Format a value; texts, numbers and truth values are those of JSON."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{name} = {_toml(inner)}" for name, inner in value.items()) + " }"
    return json.dumps(value)
