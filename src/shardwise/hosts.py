"""Read the machines of a job and their ranks from a hostfile, a rank table or Slurm's variables.

Every machine reads the same file and finds itself in it, so that the same command on all machines starts a job. This
module needs only the standard library.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import json
import re
import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.errors import LaunchError, ShardwiseError, listed
from shardwise.untrusted_text import MAX_DEVICES, read_json, read_text, shorten_repr, whole_number

# name, name:8, [address]:8, or an IPv6 address, which is all colons; then options.
_HOSTFILE_LINE = re.compile(r"(?:\[(?P<bare>\S+)\]|(?P<name>[^\s:=]+))(?::(?P<count>[^\s:]+))?(?P<options>(?:\s.*)?)")
_IPV6_LINE = re.compile(r"(?P<name>[^\s=]+:[^\s=]*:[^\s=]*)(?P<options>(?:\s.*)?)")
_OPTION = re.compile(r"(?<!\S)([\w-]+)\s*=\s*(\S+)")
_IGNORED = frozenset({"max_slots", "max-slots", "slots_max", "slots-max"})  # a limit for mpirun's oversubscription
_MOST_BYTES = 2**26  # of a hostfile or rank table: 64 for each of MAX_DEVICES
_BACKLOG = 2048  # connections that may wait to be accepted, as for torch's store


@dataclass(frozen=True, slots=True)
class Host:
    """A machine: a name or address that the others can reach, and its ranks in the order of LOCAL_RANK.

    ``devices``: the GPU number of each rank; empty if they are 0, 1, 2, ...
    """

    name: str
    ranks: tuple[int, ...]
    devices: tuple[int, ...] = ()


def read_hostfile(path: str, default_slots: int | None = None) -> tuple[Host, ...]:
    """Return the hosts of an Open MPI hostfile. Ranks are numbered in the order of its lines.

    A line is ``node1 slots=8``, ``node1:8`` or ``node1``, which has ``default_slots`` ranks (by default 1). ``#``
    starts a comment. The slots of a host that is listed several times are added. Raises LaunchError with the line.
    """
    slots: dict[str, int] = {}
    for number, line in enumerate(_read(path, "hostfile").splitlines(), start=1):
        text = line.split("#", 1)[0].strip()
        if text:
            name, count = _hostfile_line(text, f"{path}:{number}")
            slots[name] = slots.get(name, 0) + ((default_slots or 1) if count is None else count)
    if not slots:
        raise LaunchError(f"{path} names no host", fix="write one host per line: node1 slots=8")
    ends = list(itertools.accumulate(slots.values()))
    return tuple(
        Host(name, tuple(range(end - count, end))) for (name, count), end in zip(slots.items(), ends, strict=True)
    )


def _hostfile_line(text: str, where: str) -> tuple[str, int | None]:
    """Return (host, slots or None) of a line without its comment."""
    fix = "write one host per line: node1 slots=8 (or node1:8, or node1)"
    match = _HOSTFILE_LINE.fullmatch(text) or _IPV6_LINE.fullmatch(text)
    if match is None or _OPTION.sub("", match["options"]).strip():
        raise LaunchError(f"{shorten_repr(text)} is not a line of a hostfile", source=where, fix=fix)
    parts = match.groupdict()
    name = parts["name"] or parts["bare"]
    counts = [parts["count"]] if parts.get("count") else []
    for key, value in _OPTION.findall(parts["options"]):
        if key == "slots":
            counts.append(value)
        elif key not in _IGNORED:
            raise LaunchError(
                f"unknown option {shorten_repr(key)} of host {shorten_repr(name)[1:-1]}", source=where, fix=fix
            )
    if len(counts) > 1:
        raise LaunchError(f"host {name} has two numbers of slots", source=where, fix=fix)
    slots = whole_number(counts[0]) if counts else None
    if counts and not (slots and slots <= MAX_DEVICES):
        what = f"host {name} has {shorten_repr(counts[0])} slots; the number must be from 1 to {MAX_DEVICES}"
        raise LaunchError(what, source=where, fix=fix)
    return name, slots


def read_rank_table(path: str) -> tuple[Host, ...]:
    """Return the hosts of a rank table, the JSON file in which Ascend clusters describe a job::

        {"version": "1.0", "server_count": "1", "status": "completed",
         "server_list": [{"server_id": "10.0.0.1",
                          "device": [{"device_id": "0", "device_ip": "192.1.27.6", "rank_id": "0"}, ...]}]}

    ``server_id`` is a host's address, ``rank_id`` the rank and ``device_id`` its GPU there; ``device_ip`` (the address
    of an Ascend network card) is not used. Numbers may be strings. Raises LaunchError for an invalid table.
    """
    text = _read(path, "rank table")
    try:
        table = read_json(text)
    except ShardwiseError as error:
        cause = error.__cause__
        where = f"{path}:{cause.lineno}" if isinstance(cause, json.JSONDecodeError) else path
        fix = "correct the file, or generate it again"
        raise LaunchError(f"the rank table cannot be read: {error}", source=where, fix=fix) from None
    try:
        hosts = tuple(_server(number, entry) for number, entry in enumerate(_entries(table, "server_list", "the file")))
        _check_table(table, hosts)
    except _TableError as error:
        fix = 'write {"server_list": [{"server_id": "10.0.0.1", "device": [{"device_id": 0, "rank_id": 0}, ...]}, ...]}'
        raise LaunchError(f"the rank table {error}", source=path, fix=fix) from None
    return hosts


class _TableError(Exception):
    """A fault of a rank table. The message continues the words "the rank table"."""


def _server(number: int, entry: Any) -> Host:
    where = f"server_list[{number}]"
    name = entry.get("server_id") if isinstance(entry, dict) else None
    if not isinstance(name, str) or not name:
        raise _TableError(f"has no server_id in {where}")
    devices = _entries(entry, "device", where)
    pairs = sorted(
        (_whole(device, "rank_id", f"{where}.device[{i}]"), _whole(device, "device_id", f"{where}.device[{i}]"))
        for i, device in enumerate(devices)
    )
    ranks, ids = zip(*pairs, strict=True)
    twice = [device for device, count in Counter(ids).items() if count > 1]
    if twice:
        raise _TableError(f"gives device {listed(twice)} of {name} to two ranks")
    return Host(name, ranks, () if ids == tuple(range(len(ids))) else ids)


def _check_table(table: dict[str, Any], hosts: Sequence[Host]) -> None:
    """Check the conditions on all servers together. Raises _TableError."""
    ranks = Counter(rank for host in hosts for rank in host.ranks)
    names = Counter(host.name for host in hosts)
    if twice := [rank for rank, count in ranks.items() if count > 1]:
        raise _TableError(f"has rank {listed(twice)} twice")
    if missing := sorted(set(range(len(ranks))) - set(ranks)):
        raise _TableError(f"has {len(ranks)} devices but not rank {listed(missing)}: ranks are 0 to {len(ranks) - 1}")
    if twice_named := [name for name, count in names.items() if count > 1]:
        raise _TableError(f"has server {listed(twice_named)} twice")
    if "server_count" in table and (count := _whole(table, "server_count", "the file")) != len(hosts):
        raise _TableError(f"has server_count {count} but {len(hosts)} servers")
    if table.get("status", "completed") != "completed":
        raise _TableError(f"is not finished: its status is {table['status']!r}, not 'completed'")


def _entries(holder: Any, key: str, where: str) -> list[Any]:
    entries = holder.get(key) if isinstance(holder, dict) else None
    if not isinstance(entries, list) or not entries:
        raise _TableError(f"has no list {key} in {where}")
    return entries


def _whole(holder: Any, key: str, where: str) -> int:
    value = holder.get(key) if isinstance(holder, dict) else None
    number = whole_number(value if isinstance(value, str) else str(value) if type(value) is int else "")
    if number is None:
        raise _TableError(f"has no number {key} in {where}")
    return number


def find_host(hosts: Sequence[Host], path: str) -> int:
    """Return the index of this machine among the hosts of a file, by name, else by address. Raises LaunchError unless
    exactly one host matches."""
    ours = socket.gethostname()
    names = {ours, ours.split(".", 1)[0], socket.getfqdn()}
    numbers = [number for number, host in enumerate(hosts) if host.name in names or host.name.split(".", 1)[0] == ours]
    numbers = numbers or [number for number, host in enumerate(hosts) if _local_addresses(host.name)]
    if len(numbers) == 1:
        return numbers[0]
    if numbers:
        what = f"{len(numbers)} hosts of {path} are this machine ({ours}): {listed([hosts[i].name for i in numbers])}"
        raise LaunchError(what, fix=f"give the number of this one, from 0: --node-rank {numbers[0]}")
    what = f"this machine ({ours}) is not one of the hosts of {path}: {listed([host.name for host in hosts])}"
    raise LaunchError(what, fix="add it, or give the number of this host, from 0: --node-rank 0")


def _local_addresses(name: str) -> list[str]:
    """Return the addresses of a name that belong to this machine: those that a socket can bind."""
    try:
        addresses = socket.getaddrinfo(name, 0, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return []
    local = []
    for family, kind, protocol, _, address in addresses:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
            local.append(str(address[0]))
    return local


def own_address(name: str) -> str:
    """Return the address of this machine at which a server must listen so that others reach it by ``name``. Return ""
    if there is none, or if a name other than localhost resolves to loopback: Debian maps the host name to 127.0.1.1,
    and other machines resolve it differently."""
    loopback = "127.0.0.1" if name == "localhost" else name if _is_loopback(name) else ""
    return loopback or next((address for address in _local_addresses(name) if not _is_loopback(address)), "")


def route_address(name: str, port: int) -> str:
    """Return the address of this machine from which it reaches another, or "". Sends nothing."""
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(name, port, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
    except (OSError, UnicodeError):
        pass
    return ""


def listen(address: str, port: int) -> socket.socket:
    """Return a socket that listens at an address of this machine; at all of them if it is empty. Raises OSError."""
    everywhere = not address and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if everywhere or ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=_BACKLOG, dualstack_ipv6=everywhere)


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def expand_nodelist(text: str) -> tuple[str, ...]:
    """Return the hosts of a Slurm node list, in its order.

    >>> expand_nodelist("node[01-03,07],gpu5")
    ('node01', 'node02', 'node03', 'node07', 'gpu5')
    >>> expand_nodelist("rack[1-2]n[0-1].local")
    ('rack1n0.local', 'rack1n1.local', 'rack2n0.local', 'rack2n1.local')
    """
    hosts: list[str] = []
    for entry in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text):
        pieces = [list(_numbers(piece)) if i % 2 else [piece] for i, piece in enumerate(re.split(r"\[(.*?)\]", entry))]
        hosts += map("".join, itertools.product(*pieces))
    return tuple(hosts)


def _numbers(text: str) -> Iterator[str]:
    """Yield the numbers of ``"01-03,07"``: 01, 02, 03, 07. Raises ValueError for other text, or a range that is too
    long."""
    for part in text.split(","):
        first, _, last = part.partition("-")
        if int(last or first) - int(first) >= MAX_DEVICES:
            raise ValueError(f"{shorten_repr(part)} are more than {MAX_DEVICES} hosts")
        for number in range(int(first), int(last or first) + 1):
            yield str(number).zfill(len(first))


def expand_counts(text: str) -> tuple[int, ...]:
    """Return the counts of Slurm's tasks per node. Raises ValueError for other text.

    >>> expand_counts("4(x2),3")
    (4, 4, 3)
    """
    counts: list[int] = []
    for part in text.split(","):
        count, _, times = part.partition("(x")
        repeated = int(times.removesuffix(")") or 1)
        if len(counts) + repeated > MAX_DEVICES:
            raise ValueError(f"{shorten_repr(text)} are more than {MAX_DEVICES} hosts")
        counts += [int(count)] * repeated
    return tuple(counts)


def _read(path: str, kind: str) -> str:
    try:
        return read_text(path, _MOST_BYTES)
    except (OSError, UnicodeDecodeError, ShardwiseError) as error:
        raise LaunchError(f"cannot read the {kind}: {error}", fix=f"give the path of the {kind}") from error


def free_port() -> int:
    """Return a TCP port that is free at the moment."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        port: int = listener.getsockname()[1]
        return port
