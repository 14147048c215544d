"""Mutated plan files and cluster files: whatever is in them, they are read or refused by a ``ShardwiseError``, within a
second. ``make sweep``, or ``python -m plans.fuzzing --plans 10000 --clusters 5000`` in tests/.

Plans are changed as text and as data; what was changed as data is signed anew, as whoever means harm would. A plan that
is accepted is printed, compared, written again and bound to its model; a cluster that is accepted is written again, and
its prices must be finite.
"""

# ruff: noqa: RUF001  (digits of other scripts are what is tested)
from __future__ import annotations

import argparse
import copy
import json
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import resources
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shardwise as sw
from shardwise.costs.cluster_file import format_cluster, parse
from shardwise.costs.collectives import Links
from shardwise.errors import ShardwiseError
from shardwise.graph.capture import capture
from shardwise.graph.ir import Graph
from shardwise.plans.bind import program_of
from shardwise.plans.file import plan_digest

SECONDS = 1.0  # of the processor, for one file
LONGEST_MESSAGE = 20_000
TEXTS = (
    "", " ", " " * 100_000, "\n", "\ud800", "１６", "[１６@tp, 8]", "n@ｔｐ", "٣", "²", "[" * 100_000, "(" * 5_000,
    "{" * 5_000, "9" * 5_000, str(10**18 + 9), "-1", "1e999", "nan", "a" * 100_000, "n@tp" * 20_000,
    "n@tp " * 20_000, "1@tp," * 20_000, "[16@tp, 8]\n", "[16@tp{0:8|8:16}, 8]", "[16@tp{0:16|0:16}, 8]",
    "[16@tp{9:2|0:99}, 8]", "[(2 8@tp), 8]", "[0@tp]", "P@tp", "P99999@tp", "n@tp{1,2}", "n@tp{1,15}",
    "n@tp{" + "1," * 50_000 + "1}", "R@dp", "I@tp", "m@(dp,tp)", "m@(tp,dp)", "0-99999999999", "0-3,2", "3-0",
    "0,1,2,3", "0-3," * 20_000, "tp: [16@tp, 8] -> [16, 8]", ": -> ", "f32[16] partial(sum@tp)", "\x00", "\x1b[2J",
    "\u202e", "all_reduce", "__class__", "../../etc/passwd",
)  # fmt: skip
NUMBERS = (
    -1, 0, 1, 2, 3, 2**20, 2**20 + 1, 10**9, 10**18 + 9, 2**63, 2**64, 10**400, -(2**70), 1.5, -0.0, 1e308, 5e-324,
)  # fmt: skip
ODD: tuple[Any, ...] = (
    *NUMBERS, *TEXTS, None, True, False, [], {}, [[]], [{}], float("nan"), float("inf"), {"a": {"b": []}},
)  # fmt: skip
LINES = (
    "a = " + "[" * 4_000, "a = " + "{a=" * 2_000, ".".join("a" * 2_000) + " = 1", "a = [\n" + "[\n" * 9_000,
    "[" + ".".join("a" * 4_000) + "]", "size = 1_000_000_000", "size = 0x7fffffffffffffff",
    "size = 1000000000000000009", "size = true", "size = 2.0", "size = nan", "size = '４'", "bandwidth = 1e-300",
    'bandwidth = "1e300 GB/s"', 'bandwidth = "０.5 GB/s"', 'latency = "1e-320 s"', "latency = inf", 'name = "\\n"',
    'name = "\\u0007"', 'name = "' + "x" * 5_000 + '"', "[[levels]]", "[device]", "[[devices]]", "[sources]",
    'like = "h100"', 'group_bandwidths = {2 = "1 B/s", 02 = "2 B/s"}', 'group_bandwidths = {"２" = 1e9}',
    "shared_by = 1000000", 'lines = {"all_reduce over 2" = [1e-9, 1e9]}', 'lines = {"all_reduce over ２" = [0, 1]}',
    "x = 1979-05-27T07:32:00Z", "memory = " + "9" * 5_000, "overlap = 1e-9", "matmul_half_flops = 1e300",
    "hierarchical = true", "in_switch = 0.5", "\ud800", "\x00",
)  # fmt: skip


class Hang(BaseException):
    """A file took longer than it may. Not an ``Exception``: nothing may swallow it."""


@contextmanager
def limit(seconds: float = SECONDS) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise Hang(f"more than {seconds} s")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


class Model(nn.Module):
    """A fused projection and a table, so that layouts have parts and windows."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.fused, self.out = nn.Embedding(24, 8), nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        parts = self.fused(self.table(ids)).chunk(3, -1)
        return self.out(torch.relu(parts[0]) * parts[1] + parts[2]).square().mean()


@cache
def seeds() -> tuple[str, ...]:
    model, ids = Model(), torch.zeros(8, 4, dtype=torch.int64)
    mesh = sw.Mesh(dp=2, tp=2)
    plans = (
        sw.plan(model, ids, 4, mesh=mesh, strategies={"fused": "n@tp", "table": "v@tp{10,14}"}),
        sw.plan(model, ids, 4, mesh=mesh, strategies={"out": "k@tp"}, bucket_bytes=0),
        sw.plan(model, ids, sw.Cluster.load("h100-1x4"), mesh=mesh, search="dynamic_programming"),
    )
    older = sorted((Path(__file__).parent / "files").glob("*.json"))
    return (*(plan.to_json() for plan in plans), *(path.read_text() for path in older))


@cache
def graph() -> Graph:
    return capture(Model(), (torch.zeros(8, 4, dtype=torch.int64),)).graph


@cache
def clusters() -> tuple[str, ...]:
    """The bundled ones, and one of two kinds of devices."""
    folder = resources.files("shardwise.costs").joinpath("clusters")
    bundled = [entry.read_text(encoding="utf-8") for entry in folder.iterdir() if entry.name.endswith(".toml")]
    kinds = '[[devices]]\nlike = "a100-40"\ncount = 8\n[[devices]]\nlike = "h100"\ncount = 4\n'
    levels = '[[levels]]\nname = "node"\nsize = 4\nbandwidth = "100 GB/s"\nlatency = "2 us"\nshared_by = 2\n'
    more = '[[levels]]\nname = "net"\nsize = 3\nbandwidth = 1e9\nlatency = 0\n'
    more += 'lines = {"all_reduce over 3" = ["1 us", "1 GB/s"]}\n'
    return (*sorted(bundled), f'name = "mixed"\n{kinds}{levels}{more}group_bandwidths = {{2 = 1e9}}\n')


# ---------------------------------------------------------------------------------------------------------- mutations


def mutated_plan(number: int) -> tuple[str, bool]:
    """A mutated plan file, and whether it is to be read as one that was edited on purpose."""
    rng = random.Random(number)
    text, edited = rng.choice(seeds()), rng.random() < 0.5
    if rng.random() < 0.3:
        for _ in range(rng.choice((1, 1, 2, 5))):
            text = mutated_text(rng, text, TEXTS)
        return text, edited
    data = json.loads(text)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        mutate_data(rng, data)
    body = {key: data[key] for key in data if key not in ("format", "version", "digest")}
    data["digest"] = plan_digest(body)
    text = json.dumps(data, ensure_ascii=rng.random() < 0.5)
    if rng.random() < 0.1:
        key = rng.choice(('"mode"', '"mesh"', '"strategy"', '"stages"'))
        text = text.replace(key, f"{key}: 1, {key}", 1)
    return text, edited


def mutate_data(rng: random.Random, data: Any) -> None:
    places = list(walk(data))
    holder, key = rng.choice(places)
    value = holder[key]
    how = rng.randrange(8)
    if how == 0:
        del holder[key]
    elif how == 1 and isinstance(holder, dict):
        holder[rng.choice(TEXTS)[:2_000] or "x"] = holder.pop(key)
    elif how == 2:
        other, place = rng.choice(places)
        if place in other if isinstance(other, dict) else place < len(other):
            holder[key] = copy.deepcopy(other[place])
    elif how == 3 and isinstance(value, list):
        holder[key] = copy.deepcopy(value) * rng.choice((2, 3, 50))
    elif how == 4 and isinstance(holder, dict) and isinstance(value, dict):
        holder.update({f"{key}{i}": copy.deepcopy(value) for i in range(rng.choice((1, 20)))})
    elif isinstance(value, str) and how < 7:
        holder[key] = mutated_text(rng, value, TEXTS)
    elif isinstance(value, (int, float)) and how < 7:
        holder[key] = rng.choice(NUMBERS)
    else:
        holder[key] = copy.deepcopy(rng.choice(ODD))


def walk(data: Any) -> Iterator[tuple[Any, Any]]:
    """(holder, key) of everything in a nested value."""
    for key in list(data) if isinstance(data, dict) else range(len(data)):
        yield data, key
        if isinstance(data[key], (dict, list)):
            yield from walk(data[key])


def mutated_text(rng: random.Random, text: str, odd: tuple[str, ...]) -> str:
    start = rng.randrange(len(text) + 1)
    stop = min(len(text), start + rng.choice((0, 1, 1, 2, 8, 40)))
    how = rng.randrange(6)
    if how == 0:
        return text[:start] + text[stop:]
    if how == 1:
        return text[:stop] + text[start:stop] * rng.choice((1, 2, 1_000)) + text[stop:]
    if how == 2:
        return text[:start] + rng.choice("0129-+.,:;@(){}[]|> \"'\\\n\tPRIxn_é０") + text[stop:]
    if how == 3:
        return text[:start]
    if how == 4:
        return rng.choice(odd)
    return text[:start] + rng.choice(odd) + text[stop:]


def mutated_cluster(number: int) -> str:
    rng = random.Random(number)
    lines = rng.choice(clusters()).splitlines()
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(lines))
        key, equals, _ = lines[at].partition("=")
        how = rng.randrange(7)
        if how == 0:
            lines.insert(at, rng.choice(LINES))
        elif how == 1:
            lines[at] = mutated_text(rng, lines[at], LINES)
        elif how == 2 and equals:
            lines[at] = f"{key}={rng.choice(LINES).partition('=')[2] or '1'}"
        elif how == 3 and equals:
            lines[at] = f"{key}= {rng.choice(NUMBERS[:11] + NUMBERS[13:])}"
        elif how == 4:
            lines[at] = lines[rng.randrange(len(lines))]
        elif how == 5:
            lines[at:at] = lines[at : at + rng.choice((1, 3, 8))] * rng.choice((1, 40))
        else:
            del lines[at]
        lines = lines or ["x = 1"]
    return "\n".join(lines)


# -------------------------------------------------------------------------------------------------------------- trials


def try_plan(number: int) -> str:
    """What becomes of a mutated plan: "refused", "read" or "bound". Anything else than a ShardwiseError is raised."""
    text, edited = mutated_plan(number)
    with limit():
        try:
            plan = sw.Plan.from_json(text, edited=edited)
        except ShardwiseError as error:
            return refusal(error)
    try:
        with limit():
            assert sw.Plan.from_json(plan.to_json()) == plan
            str(plan)
            str(plan.diff(plan))
            list(plan.collectives()), list(plan.collectives(backward=True))
        with limit():
            program_of(plan, graph())
    except ShardwiseError as error:
        refusal(error)
        return "read"
    return "bound"


def try_cluster(number: int) -> str:
    text = mutated_cluster(number)
    with limit():
        try:
            cluster = parse(text)
        except ShardwiseError as error:
            return refusal(error)
    with limit():
        str(cluster)
        if not cluster.mixed:
            assert parse(format_cluster(cluster)).levels == cluster.levels
        links = Links(cluster, sw.Mesh(a=cluster.num_devices))
        for kind in ("all_reduce", "all_gather", "all_to_all", "reduce_scatter") * (cluster.num_devices > 1):
            seconds = links.seconds(kind, sw.Mesh(a=cluster.num_devices).sub_axes, 1e9)
            assert isfinite(seconds), f"{kind} takes {seconds} s"
            assert seconds >= 0, f"{kind} takes {seconds} s"
        assert all(isfinite(cluster.device.matmul_flops(dtype)) for dtype in cluster.device.flops)
    return "read"


def refusal(error: ShardwiseError) -> str:
    """A message that can be printed, and is not the file."""
    message = str(error)
    message.encode()
    assert len(message) < LONGEST_MESSAGE, f"a message of {len(message)} characters"
    return "refused"


def sweep(what: str, trial: Callable[[int], str], numbers: range) -> int:
    """Run trials, print what became of them, and return how many failed."""
    outcomes: Counter[str] = Counter()
    for number in numbers:
        try:
            outcomes[trial(number)] += 1
        except (Exception, Hang) as error:
            outcomes["FAILED"] += 1
            print(f"{what} {number}: {type(error).__name__}: {str(error)[:200]}", flush=True)
    print(f"{what}:", ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items())), flush=True)
    return outcomes["FAILED"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plans", type=int, default=10_000)
    parser.add_argument("--clusters", type=int, default=5_000)
    parser.add_argument("--first", type=int, default=0, help="the number of the first mutation")
    args = parser.parse_args()
    failed = sweep("mutated cluster", try_cluster, range(args.first, args.first + args.clusters))
    failed += sweep("mutated plan", try_plan, range(args.first, args.first + args.plans))
    raise SystemExit(failed > 0)


if __name__ == "__main__":
    main()
