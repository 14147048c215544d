"""Cluster files: TOML, read and written (the page on clusters describes the format).

Bundled ones lie in ``costs/clusters/``, one per family of nodes; ``h100-16x8`` is the family ``h100`` with 16 nodes of
8.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cache
from importlib import resources
from math import inf, prod
from pathlib import Path
from typing import Any

from shardwise.costs.cluster import MOVES, PRODUCTS, Cluster, Device, Level, rate_dtype, slowest_device
from shardwise.costs.collectives import KINDS
from shardwise.costs.failures import FailureStatistics
from shardwise.costs.units import RANGES, Figures, format_quantity, parse_quantity
from shardwise.errors import ShardwiseError, page
from shardwise.hosts import read_hostfile, read_rank_table
from shardwise.untrusted_text import MAX_DEVICES, check_texts, is_line, read_text, shorten_repr

DTYPES = ("f64", "f32", "tf32", "bf16", "f16", "f8")

# Key in the file -> (field, unit, whether it must be there, whether it may be 0). "" is a plain number.
_DEVICE_KEYS = {
    "memory": ("memory_bytes", "B", True, False),
    "memory_bandwidth": ("memory_bandwidth", "B/s", True, False),
    "kernel_latency": ("kernel_latency", "s", True, True),
    "matmul_half_flops": ("matmul_half_flops", "FLOP", False, True),
    "memory_efficiency": ("memory_efficiency", "", False, False),
    "overlap": ("overlap", "", False, True),
    "reserve": ("reserve_bytes", "B", False, True),
    "fresh_bandwidth": ("fresh_bandwidth", "B/s", False, True),
    "host_bandwidth": ("host_bandwidth", "B/s", False, True),
    "launch": ("launch", "s", False, True),
    "scalar_rate": ("scalar_rate", "/s", False, True),
    "attention_row": ("attention_row", "s", False, True),
    "spread": ("spread", "", False, True),
    "memory_spread": ("memory_spread", "", False, True),
}
_LEVEL_KEYS = {
    "bandwidth": ("bandwidth", "B/s", True, False),
    "latency": ("latency", "s", True, True),
    "launch": ("launch", "s", False, True),
    "in_switch": ("in_switch", "", False, True),
    "spread": ("spread", "", False, True),
}
_TABLES = "name", "price_per_hour", "device", "devices", "levels", "failures", "sources", "measured"
_LEVEL_FLAGS = "hierarchical", "symmetric_memory"
_LEVEL_TABLES = "name", "size", "shared_by", "group_bandwidths", "efficiency", "launches", "lines", *_LEVEL_FLAGS
_FAILURE_KEYS = {
    "hours_between": ("hours_between", "", True, False),
    "interruptions": ("interruptions", "", False, True),
    "machine_share": ("machine_share", "", False, True),
    "detection": ("detection", "s", False, True),
    "restart": ("restart", "s", False, True),
    "store": ("store", "B/s", False, True),
}
_LINE = re.compile(r"(?P<kind>[a-z_]+) over (?P<units>[1-9][0-9]{0,6})")
_SIZED = re.compile(r"(?P<family>.+)-(?P<nodes>[0-9]{1,7})x(?P<devices>[0-9]{1,7})")
_COUNT = re.compile(r"[1-9][0-9]{0,6}")
_MOST_BYTES = 2**18  # of a file; the bundled ones have 4 KB
_MOST_LINES = 2**13  # the reader takes longest for many short tables
_LONGEST_LINE = 2**12  # characters
_DOTTED = re.compile(
    r"""(?<![\w-])(?:(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){16}"""
)  # tomllib takes their square
_LONGEST_NAME = 2**8
_MOST_LEVELS = 16
_MOST_TABLES = 2**8  # in a list: levels, or kinds of devices
_NUM_SHOWN = 20  # faults in one message


def load(name: str | Path, hosts: str | Path | None = None) -> Cluster:
    """See ``Cluster.load``."""
    text = str(name)
    if text.endswith(".toml"):
        try:
            content = _content(read_text(text, _MOST_BYTES), text)
            cluster = _cluster(content, text)
            if lacking := assumed_figures(content):
                print_note_once(f"{text} has no {'; '.join(lacking)}; {MEASURE}")
        except (OSError, UnicodeDecodeError) as error:
            raise ShardwiseError(f"cannot read the cluster file: {error}", fix="pass its path") from error
    else:
        cluster = family(text) if hosts is not None and text in families() else _bundled(text)
    return cluster if hosts is None else on_hosts(cluster, hosts)


def families() -> tuple[str, ...]:
    """Return the names of the bundled families."""
    folder = resources.files("shardwise.costs").joinpath("clusters")
    return tuple(sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml")))


@cache
def family(name: str) -> Cluster:
    """Return a bundled family at its largest."""
    path = resources.files("shardwise.costs").joinpath("clusters", f"{name}.toml")
    return parse(path.read_text(encoding="utf-8"), f"{name}.toml")


def _bundled(name: str) -> Cluster:
    sized = None if name in families() else _SIZED.fullmatch(name)
    chosen = sized["family"] if sized else name
    if chosen not in families():
        what = f"unknown cluster {shorten_repr(name)}"
        facts = [("bundled", ", ".join(families()))]
        near = "".join(f"did you mean {found}? " for found in get_close_matches(chosen, families(), 1))
        raise ShardwiseError(what, facts=facts, fix=f"{near}pass a name (h100-16x8: 16 nodes of 8) or a .toml file")
    largest = family(chosen)
    most = prod(level.size for level in largest.levels[:-1]) if len(largest.levels) > 1 else largest.num_devices
    nodes, devices = (int(sized["nodes"]), int(sized["devices"])) if sized else (1, most)
    return largest.with_nodes(nodes, devices).renamed(name)


def on_hosts(cluster: Cluster, path: str | Path) -> Cluster:
    """Return the cluster with as many nodes, and devices per node, as a hostfile or a rank table (``.json``) names.

    Raises ShardwiseError unless every host has as many ranks, and neighbouring ones.
    """
    hosts = read_rank_table(str(path)) if str(path).endswith(".json") else read_hostfile(str(path))
    counts = {len(host.ranks) for host in hosts}
    if len(counts) > 1:
        listed = ", ".join(f"{host.name}: {len(host.ranks)}" for host in hosts[:8])
        raise ShardwiseError(f"the hosts of {path} have different numbers of ranks ({listed})", fix="use one number")
    ordered = sorted(hosts, key=lambda host: host.ranks)
    scattered = [host for host in ordered if host.ranks != tuple(range(host.ranks[0], host.ranks[-1] + 1))]
    if scattered:
        what = f"host {scattered[0].name} of {path} has the ranks {', '.join(map(str, scattered[0].ranks[:8]))}"
        raise ShardwiseError(what, fix="use consecutive ranks on each host: the mesh takes them for close")
    devices, nodes = len(ordered[0].ranks), len(ordered)
    return cluster.with_nodes(nodes, devices).renamed(f"{cluster.name} on {nodes} hosts of {devices}")


# -------------------------------------------------------------------------------------------------------- reading


@dataclass
class _FigureReader:
    """Takes figures out of the tables of a file and collects whatever is wrong with them."""

    path: str
    wrong: list[tuple[str, str]] = field(default_factory=list)

    def complain(self, where: str, what: str) -> None:
        self.wrong.append((where, what))

    def figure(self, value: object, unit: str, where: str, may_be_zero: bool = False) -> float:
        try:
            number = parse_quantity(value, unit)
        except ShardwiseError as error:
            self.complain(where, str(error))
            return float("nan")
        least, most = RANGES[unit]
        if number and not least <= number <= most:
            self.complain(where, f"{shorten_repr(value)} is not between {least:g} and {most:g} {unit}".rstrip())
        if number == 0 and not may_be_zero:
            self.complain(where, f"{shorten_repr(value)} is not positive")
        return number

    def figures(
        self, table: Mapping[str, Any], keys: Mapping[str, tuple[str, str, bool, bool]], where: str
    ) -> dict[str, float]:
        numbers: dict[str, float] = {}
        for key, (name, unit, required, may_be_zero) in keys.items():
            if key in table:
                numbers[name] = self.figure(table[key], unit, f"{where}.{key}", may_be_zero)
            elif required:
                self.complain(f"{where}.{key}", "is missing")
        return numbers

    def named(
        self, table: Mapping[str, Any], key: str, unit: str, where: str, names: tuple[str, ...], most: float = inf
    ) -> Figures:
        """Return a table of figures by name: dtypes or kinds of collectives. Only times may be 0."""
        entries = self.table(table, key, where)
        for name in sorted(entries.keys() - set(names)):
            self.complain(f"{where}.{key}.{_key(name)}", f"is not one of {', '.join(names)}")
        values = {
            name: self.figure(entries[name], unit, f"{where}.{key}.{name}", may_be_zero=unit == "s")
            for name in names
            if name in entries
        }
        for name, value in values.items():
            if value > most:
                self.complain(f"{where}.{key}.{name}", f"{value:g} is more than {most:g}")
        return Figures(values)

    def table(self, holder: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
        entry = holder.get(key, {})
        if isinstance(entry, dict):
            return entry
        self.complain(f"{where}.{key}", "is not a table")
        return {}

    def tables(self, holder: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
        entries = holder.get(key, [])
        if isinstance(entries, list) and len(entries) > _MOST_TABLES:
            self.complain(key, f"are {len(entries):,}, more than {_MOST_TABLES}")
            return []
        if isinstance(entries, list) and all(isinstance(entry, dict) for entry in entries):
            return entries
        self.complain(key, f"is not a list of tables ([[{key}]])")
        return []

    def text(self, table: Mapping[str, Any], key: str, where: str) -> str:
        entry = table.get(key)
        if not isinstance(entry, str) or not entry or not is_line(entry, _LONGEST_NAME):
            what = f"{shorten_repr(entry)} is not a name: one line of at most {_LONGEST_NAME} characters"
            self.complain(f"{where}.{key}".lstrip("."), "is missing" if entry is None else what)
            return ""
        return entry

    def source(self, entry: object, where: str) -> str:
        """Return the source of a figure as text; it may be a text, a number or a date."""
        if isinstance(entry, (dict, list)):
            self.complain(where, f"{shorten_repr(entry)} is not a string")
        return str(entry) if isinstance(entry, str) else shorten_repr(entry)

    def count(self, table: Mapping[str, Any], key: str, where: str, default: int | None = None) -> int:
        entry = table.get(key, default)
        if isinstance(entry, bool) or not isinstance(entry, int) or not 1 <= entry <= MAX_DEVICES:
            what = (
                "is missing"
                if entry is None
                else f"{shorten_repr(entry)} is not a whole number from 1 to {MAX_DEVICES}"
            )
            self.complain(f"{where}.{key}", what)
            return 1
        return entry

    def flag(self, table: Mapping[str, Any], key: str, where: str) -> bool:
        entry = table.get(key, False)
        if not isinstance(entry, bool):
            self.complain(f"{where}.{key}", f"{shorten_repr(entry)} is neither true nor false")
        return bool(entry)

    def unknown(self, table: Mapping[str, Any], keys: set[str], where: str) -> None:
        for key in sorted(table.keys() - keys):
            self.complain(f"{where}.{_key(key)}".lstrip("."), f"is not known; known are {', '.join(sorted(keys))}")

    def finish(self) -> None:
        if self.wrong:
            what = (
                f"the cluster file has {len(self.wrong)} faults"
                if len(self.wrong) > 1
                else "the cluster file has a fault"
            )
            more = [("and", f"{len(self.wrong) - _NUM_SHOWN} more")] if len(self.wrong) > _NUM_SHOWN else []
            fix = f"correct them; the format is described in {page('clusters')}"
            raise ShardwiseError(what, source=self.path, facts=[*self.wrong[:_NUM_SHOWN], *more], fix=fix)


def _key(name: str) -> str:
    return name if is_line(name, 60) else shorten_repr(name)


def _content(text: str, path: str) -> dict[str, Any]:
    lines = text.splitlines()
    longest = max(map(len, lines), default=0)
    try:
        if len(text) > _MOST_BYTES:
            raise ShardwiseError(f"it has {len(text):,} characters, more than {_MOST_BYTES:,}")
        if len(lines) > _MOST_LINES:
            raise ShardwiseError(f"it has {len(lines):,} lines, more than {_MOST_LINES:,}")
        if longest > _LONGEST_LINE:
            raise ShardwiseError(f"it has a line of {longest:,} characters, more than {_LONGEST_LINE:,}")
        if _DOTTED.search(text):
            raise ShardwiseError("it has a dotted name of more than 16 parts")
        content = tomllib.loads(text)
        check_texts(content)
    except (ValueError, RecursionError) as error:  # the reader goes down with the nesting
        why = "it is nested too deep" if isinstance(error, RecursionError) else _key(str(error))
        raise ShardwiseError(f"the cluster file is not TOML: {why}", source=path, fix="correct it") from None
    return content


def parse(text: str, path: str = "cluster.toml") -> Cluster:
    return _cluster(_content(text, path), path)


def _cluster(content: Mapping[str, Any], path: str) -> Cluster:
    reader = _FigureReader(path)
    reader.unknown(content, {*_TABLES}, "")
    name = reader.text(content, "name", "")
    price = reader.figure(content.get("price_per_hour", 0.0), "", "price_per_hour", may_be_zero=True)
    levels = tuple(_level(reader, entry, f"levels[{i}]") for i, entry in enumerate(reader.tables(content, "levels")))
    if len(levels) > _MOST_LEVELS or prod(level.size for level in levels) > MAX_DEVICES:
        reader.complain("levels", f"there are at most {_MOST_LEVELS} of them, for at most {MAX_DEVICES} devices")
    if not levels:
        reader.complain("levels", "is missing: a cluster has at least one level, the links within a node")
    counted = _devices(reader, content)
    num_devices = prod(level.size for level in levels)
    if "devices" in content and counted and sum(count for _, count in counted) != num_devices:
        sizes = " x ".join(str(level.size) for level in levels)
        total = sum(count for _, count in counted)
        reader.complain("devices", f"are {total}, but the levels hold {sizes} = {num_devices}")
    failures = _failures(reader, content) if "failures" in content else None
    sources = tuple(
        (key, reader.source(value, f"sources.{_key(key)}"))
        for key, value in reader.table(content, "sources", "").items()
    )
    reader.finish()
    kinds: dict[str, int] = {}
    for device, count in counted:
        kinds[device.name] = kinds.get(device.name, 0) + count
    mixed = tuple(kinds.items()) if len(kinds) > 1 else ()
    return Cluster(name, slowest_device([device for device, _ in counted]), levels, mixed, price, failures, sources)


def _failures(reader: _FigureReader, content: Mapping[str, Any]) -> FailureStatistics | None:
    table = reader.table(content, "failures", "")
    reader.unknown(table, {*_FAILURE_KEYS}, "failures")
    figures = reader.figures(table, _FAILURE_KEYS, "failures")
    if figures.get("machine_share", 1.0) > 1:
        reader.complain("failures.machine_share", f"{figures['machine_share']:g} is more than 1")
    return FailureStatistics(**figures) if "hours_between" in figures else None


def _devices(reader: _FigureReader, content: Mapping[str, Any]) -> list[tuple[Device, int]]:
    """The devices of ``[device]`` or ``[[devices]]`` with their counts; a count is 0 where all are of one kind."""
    if ("device" in content) == ("devices" in content):
        both = "the file has both [device] and [[devices]]" if "device" in content else "[device] is missing"
        reader.complain("device", f"{both}: use [device] for equal devices, [[devices]] for several kinds with counts")
        return []
    if "device" in content:
        return [(_device(reader, reader.table(content, "device", ""), "device"), 0)]
    kinds = reader.tables(content, "devices")
    if not kinds:
        reader.complain("devices", "are none")
    return [
        (_device(reader, entry, f"devices[{i}]", {"count"}), reader.count(entry, "count", f"devices[{i}]"))
        for i, entry in enumerate(kinds)
    ]


def _device(reader: _FigureReader, table: Mapping[str, Any], where: str, also: set[str] | None = None) -> Device:
    known_keys = {"like", "name", "flops", "matmul_efficiency", "kernels", "kernels_like", "foreach", "products"}
    known_keys |= {*_DEVICE_KEYS, *(also or ())}
    reader.unknown(table, known_keys, where)
    base, model = _like(reader, table, "like", where), _like(reader, table, "kernels_like", where)
    keys = {
        key: (name, unit, required and base is None, zero) for key, (name, unit, required, zero) in _DEVICE_KEYS.items()
    }
    changes: dict[str, Any] = dict(reader.figures(table, keys, where))
    for key in ("memory_efficiency", "overlap"):
        if changes.get(key, 1.0) > 1:
            reader.complain(f"{where}.{key}", f"{changes[key]:g} is more than 1")
    if "foreach" in table:
        changes["foreach"] = reader.flag(table, "foreach", where)
    if "products" in table:
        changes["products"] = reader.text(table, "products", where)
        if changes["products"] not in {*(() if base is None else base.flops), *table.get("flops", ())}:
            reader.complain(f"{where}.products", f"{shorten_repr(changes['products'])} is not a dtype of {where}.flops")
    flops = reader.named(table, "flops", "FLOP/s", where, DTYPES)
    efficiency = reader.named(table, "matmul_efficiency", "", where, DTYPES, most=1.0)
    table_kernels = reader.named(table, "kernels", "", where, (*PRODUCTS, *MOVES), most=1.0)
    kernels = table_kernels if model is None else Figures({**model.kernels, **table_kernels})
    if base is not None:
        changes |= {"flops": Figures({**base.flops, **flops})}
        changes |= {"matmul_efficiency": Figures({**base.matmul_efficiency, **efficiency})}
        changes |= {"kernels": Figures({**base.kernels, **kernels})}
        changes |= {"name": reader.text(table, "name", where)} if "name" in table else {}
        return _with_memory(reader, replace(base, **changes), where)
    if not flops:
        reader.complain(f"{where}.flops", "is missing: peak FLOP/s of at least one dtype, such as bf16")
    defaults: dict[str, Any] = {"memory_bytes": 0.0, "memory_bandwidth": 0.0, "kernel_latency": 0.0}
    device = Device(
        name=reader.text(table, "name", where),
        flops=flops,
        matmul_efficiency=efficiency,
        kernels=kernels,
        **(defaults | changes),
    )
    return _with_memory(reader, device, where)


def _like(reader: _FigureReader, table: Mapping[str, Any], key: str, where: str) -> Device | None:
    if key not in table:
        return None
    if isinstance(table[key], str) and table[key] in families():
        return family(table[key]).device
    reader.complain(f"{where}.{key}", f"{shorten_repr(table[key])} is not one of {', '.join(families())}")
    return None


def _with_memory(reader: _FigureReader, device: Device, where: str) -> Device:
    """Return the device, of which some memory must be left for plans."""
    if device.memory_bytes and device.usable_bytes <= 0:
        reserve, whole = format_quantity(device.reserve_bytes, "B"), format_quantity(device.memory_bytes, "B")
        reader.complain(f"{where}.reserve", f"{reserve} of a memory of {whole} leave nothing for a plan")
    return device


def _level(reader: _FigureReader, table: Mapping[str, Any], where: str) -> Level:
    reader.unknown(table, {*_LEVEL_KEYS, *_LEVEL_TABLES}, where)
    figures = reader.figures(table, _LEVEL_KEYS, where)
    by_size: list[tuple[int, float]] = []
    for key, value in reader.table(table, "group_bandwidths", where).items():
        if _COUNT.fullmatch(key) and int(key) > 1:
            by_size.append((int(key), reader.figure(value, "B/s", f"{where}.group_bandwidths.{key}")))
        else:
            reader.complain(f"{where}.group_bandwidths.{_key(key)}", "is not a number of units from 2")
    settings: dict[str, Any] = {"bandwidth": 0.0, "latency": 0.0} | figures
    return Level(
        name=reader.text(table, "name", where),
        size=reader.count(table, "size", where),
        shared_by=reader.count(table, "shared_by", where, 1),
        **{flag: reader.flag(table, flag, where) for flag in _LEVEL_FLAGS},
        group_bandwidths=tuple(sorted(by_size)),
        efficiency=reader.named(table, "efficiency", "", where, KINDS),
        launches=reader.named(table, "launches", "s", where, KINDS),
        lines=_lines(reader, table, where),
        **settings,
    )


def _lines(reader: _FigureReader, table: Mapping[str, Any], where: str) -> tuple[tuple[str, int, float, float], ...]:
    """``"all_reduce over 4" = ["30 us", "150 GB/s"]``: latency, and bytes of the message per second."""
    parsed: list[tuple[str, int, float, float]] = []
    for key, value in reader.table(table, "lines", where).items():
        match, place = _LINE.fullmatch(key), f"{where}.lines.{shorten_repr(key)}"
        if match is None or match["kind"] not in KINDS or not isinstance(value, list) or len(value) != 2:
            reader.complain(place, 'is not like "all_reduce over 4" = ["30 us", "150 GB/s"]')
            continue
        seconds, pace = reader.figure(value[0], "s", place, may_be_zero=True), reader.figure(value[1], "B/s", place)
        parsed.append((match["kind"], int(match["units"]), seconds, 1 / (pace or 1)))
    return tuple(parsed)


# -------------------------------------------------------------------------------------------------------- writing


def format_cluster(cluster: Cluster, measured: Mapping[str, Any] | None = None) -> str:
    """Return the TOML text of a cluster of equal devices; ``measured``: further facts for a table of that name (texts,
    numbers, and lists of texts), which the reader leaves alone."""
    device = cluster.device
    lines = [f"name = {_quoted(cluster.name)}"]
    lines += [f"price_per_hour = {cluster.price_per_hour!r}"] if cluster.price_per_hour else []
    lines += ["", "[device]", f"name = {_quoted(device.name)}"]
    lines += _figures(_DEVICE_KEYS, device)
    lines += [] if device.foreach else ["foreach = false"]
    lines += [f"products = {_quoted(device.products)}"] if device.products else []
    lines += _named("device.flops", device.flops, "FLOP/s")
    lines += _named("device.matmul_efficiency", device.matmul_efficiency, "")
    lines += _named("device.kernels", device.kernels, "")
    for level in cluster.levels:
        lines += ["", "[[levels]]", f"name = {_quoted(level.name)}", f"size = {level.size}"]
        lines += _figures(_LEVEL_KEYS, level)
        lines += [f"shared_by = {level.shared_by}"]
        lines += [f"{flag} = true" for flag in _LEVEL_FLAGS if getattr(level, flag)]
        by_size = {str(size): bandwidth for size, bandwidth in level.group_bandwidths}
        lines += _named("levels.group_bandwidths", by_size, "B/s")
        lines += _named("levels.efficiency", level.efficiency, "")
        lines += _named("levels.launches", level.launches, "s")
        if level.lines:
            lines += ["", "[levels.lines]"]
        for kind, units, seconds, per_byte in level.lines:
            figures = f"{_figure(seconds, 's')}, {_figure(1 / per_byte, 'B/s')}"
            lines += [f"{_quoted(f'{kind} over {units}')} = [{figures}]"]
    if cluster.failures is not None:
        lines += ["", "[failures]", *_figures(_FAILURE_KEYS, cluster.failures)]
    if cluster.sources:
        lines += ["", "[sources]", *(f"{_quoted(key)} = {_quoted(value)}" for key, value in cluster.sources)]
    if measured:
        lines += ["", "[measured]", *(f"{key} = {_toml(value)}" for key, value in measured.items())]
    return "\n".join(lines) + "\n"


def _figures(
    keys: Mapping[str, tuple[str, str, bool, bool]], described: Device | Level | FailureStatistics
) -> Iterator[str]:
    for key, (name, unit, *_) in keys.items():
        yield f"{key} = {_figure(getattr(described, name), unit)}"


def _named(title: str, figures: Mapping[str, float], unit: str) -> list[str]:
    if not figures:
        return []
    return ["", f"[{title}]", *(f"{name} = {_figure(value, unit)}" for name, value in figures.items())]


def _figure(value: float, unit: str) -> str:
    """Return a figure as text with a unit, where that is exactly the figure; else its plain number."""
    text = format_quantity(value, unit)
    read = parse_quantity(text, unit) if unit else float(text)
    if read != value:
        return repr(value)
    return _quoted(text) if unit else text


def _toml(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "[\n" + "".join(f"  {_toml(entry)},\n" for entry in value) + "]"
    return _quoted(value) if isinstance(value, str) else f"{value:g}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")  # TOML's escapes are among JSON's


MEASURE = "shardwise calibrate -o my.toml measures this machine"

# Key -> what is assumed without it.
_OF_DEVICES = {
    "matmul_efficiency": "large matmuls reach the peak",
    "matmul_half_flops": "small matmuls are as fast as large ones",
    "memory_efficiency": "element-wise operators reach the whole bandwidth",
    "kernels": "every kind of kernel reaches the same part of a peak",
    "overlap": "messages slow no kernel down",
    "launch": "the host starts kernels as fast as they run",
    "reserve": "a plan has all of the memory",
    "host_bandwidth": "the memory is the host's",
    "spread": "operators take the predicted time, without an interval",
}
_OF_LEVELS = {"launch": "collectives begin at once", "spread": "messages take the predicted time, without an interval"}


def assumed_figures(content: Mapping[str, Any]) -> list[str]:
    """List the figures that a valid cluster file leaves out, each with the assumed value. Empty for a measured file."""
    if "measured" in content:
        return []
    devices = [content["device"]] if "device" in content else content.get("devices", [])
    lacking = {
        f"device.{key}": f"device.{key} (assumed: {what})"
        for device in devices
        for key, what in _OF_DEVICES.items()
        if "like" not in device and key not in device and not (key == "kernels" and "kernels_like" in device)
    }
    for device in devices:
        flops = {} if "like" in device else device.get("flops", {})
        stands = {dtype: rate_dtype(dtype, flops) for dtype in ("bf16", "f16") if flops and dtype not in flops}
        lacking |= {
            f"flops.{dtype}": f"device.flops.{dtype} (assumed: the rate of {other})"
            for dtype, other in stands.items()
            if other
        }
    for level in content.get("levels", []):
        lacking |= {
            f"{level['name']}.{key}": f"levels.{level['name']}.{key} (assumed: {what})"
            for key, what in _OF_LEVELS.items()
            if key not in level and not (key == "launch" and ("launches" in level or "lines" in level))
        }
    return list(lacking.values())


@cache
def print_note_once(text: str) -> None:
    print(f"shardwise: {text}", file=sys.stderr)
