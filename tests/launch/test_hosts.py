"""The machines of a job: hostfiles, rank tables, and which of them this one is."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from raising import raises
from shardwise.errors import LaunchError
from shardwise.hosts import (
    Host,
    expand_counts,
    expand_nodelist,
    find_host,
    own_address,
    read_hostfile,
    read_rank_table,
    route_address,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "hosts"


# -------------------------------------------------------------------------------------------------------- hostfiles


def test_ranks_are_numbered_in_the_order_of_the_lines(path: Path) -> None:
    path.write_text(
        """
        # two kinds of machines
        node1 slots=2
        node2:3            # as mpirun --host writes it
        node3 slots = 1 max_slots=4
        node4
        node1              # listed again: one more
        fe80::1 slots=1
        [fe80::2]:1
        """
    )
    assert read_hostfile(str(path)) == (
        Host("node1", (0, 1, 2)),
        Host("node2", (3, 4, 5)),
        Host("node3", (6,)),
        Host("node4", (7,)),
        Host("fe80::1", (8,)),
        Host("fe80::2", (9,)),
    )


def test_hosts_without_a_number_have_as_many_ranks_as_the_command_says(path: Path) -> None:
    path.write_text("node1\nnode2 slots=1\n")
    assert read_hostfile(str(path), default_slots=8) == (Host("node1", tuple(range(8))), Host("node2", (8,)))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("node1 slots=0", "host node1 has '0' slots"),
        ("node1:eight", "host node1 has 'eight' slots"),
        ("node1:2 slots=2", "host node1 has two numbers of slots"),
        ("node1 slot=2", "unknown option 'slot' of host node1"),
        ("node1 node2", "'node1 node2' is not a line of a hostfile"),
        ("=8", "'=8' is not a line of a hostfile"),
    ],
)
def test_a_line_that_is_not_understood_is_named(path: Path, line: str, message: object) -> None:
    path.write_text(f"# first\n{line}\n")
    with raises(LaunchError, message, source=f"{path}:2", fix="node1 slots=8"):
        read_hostfile(str(path))


def test_a_hostfile_without_hosts_and_one_that_is_not_there_are_errors(path: Path) -> None:
    with raises(LaunchError, "the hostfile", "[Errno 2]", path):
        read_hostfile(str(path))
    path.write_text("# nobody\n")
    with raises(LaunchError, "no host", path, fix="node1 slots=8"):
        read_hostfile(str(path))


# ------------------------------------------------------------------------------------------------------ rank tables


def server(name: str, devices: dict[int, int], as_text: bool = True) -> dict[str, Any]:
    kind = str if as_text else int
    entries = [
        {"device_id": kind(i), "device_ip": f"192.1.27.{i}", "rank_id": kind(rank)} for i, rank in devices.items()
    ]
    return {"server_id": name, "device": entries, "host_nic_ip": "reserve"}


def test_a_rank_table_says_ranks_and_devices(path: Path) -> None:
    servers = [server("10.0.0.1", {0: 0, 1: 1}), server("10.0.0.2", {4: 3, 5: 2}, as_text=False)]
    table = {"version": "1.0", "server_count": "2", "server_list": servers, "status": "completed"}
    path.write_text(json.dumps(table))
    assert read_rank_table(str(path)) == (Host("10.0.0.1", (0, 1)), Host("10.0.0.2", (2, 3), (5, 4)))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([], "no list server_list in the file"),
        ({"server_list": []}, "no list server_list in the file"),
        ({"server_list": [{"device": []}]}, "no server_id in server_list[0]"),
        ({"server_list": [{"server_id": "a"}]}, "no list device in server_list[0]"),
        (
            {"server_list": [{"server_id": "a", "device": [{"device_id": "0"}]}]},
            "no number rank_id in server_list[0].device[0]",
        ),
        (
            {"server_list": [{"server_id": "a", "device": [{"device_id": -1, "rank_id": True}]}]},
            "no number rank_id in server_list[0].device[0]",
        ),
        ({"server_list": [server("a", {0: 0}), server("b", {0: 0})]}, "rank 0 twice"),
        ({"server_list": [server("a", {0: 0}), server("a", {0: 1})]}, "server a twice"),
        ({"server_list": [server("a", {0: 0, 1: 2})]}, "2 devices but not rank 1: ranks are 0 to 1"),
        ({"server_count": 2, "server_list": [server("a", {0: 0})]}, "server_count 2 but 1 servers"),
        (
            {"status": "initializing", "server_list": [server("a", {0: 0})]},
            "not finished: its status is 'initializing'",
        ),
    ],
)
def test_a_rank_table_that_is_wrong_says_where(path: Path, table: Any, message: object) -> None:
    path.write_text(json.dumps(table))
    with raises(LaunchError, message, "rank table", "fix:", source=str(path)):
        read_rank_table(str(path))


def test_a_device_with_two_ranks_is_an_error(path: Path) -> None:
    entry = server("a", {3: 0})
    entry["device"] += server("a", {3: 1})["device"]
    path.write_text(json.dumps({"server_list": [entry]}))
    with raises(LaunchError, "device 3", "two ranks", source=str(path)):
        read_rank_table(str(path))


def test_a_rank_table_that_is_not_json_names_the_line(path: Path) -> None:
    path.write_text('{"server_list":\n  [}')
    with raises(LaunchError, "not JSON", source=f"{path}:2"):
        read_rank_table(str(path))


# ------------------------------------------------------------------------------------------------------ this machine


def hosts(*names: str) -> tuple[Host, ...]:
    return tuple(Host(name, (rank,)) for rank, name in enumerate(names))


@pytest.mark.parametrize(
    ("ours", "names", "found"),
    [
        ("node2", ["node1", "node2"], 1),
        ("node2.cluster", ["node1", "node2"], 1),
        ("node2", ["node1.cluster", "node2.cluster"], 1),
        ("vm", ["192.0.2.1", "127.0.0.1"], 1),
        ("node1", ["node1", "127.0.0.1"], 0),  # the name counts first
    ],
)
def test_this_machine_is_found_by_name_or_address(
    monkeypatch: pytest.MonkeyPatch, ours: str, names: list[str], found: int
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: ours)
    monkeypatch.setattr(socket, "getfqdn", lambda: ours)
    assert find_host(hosts(*names), "hosts.txt") == found


def test_a_machine_that_is_not_found_or_found_twice_asks_for_the_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "login")
    with raises(LaunchError, "not one", "192.0.2.1, 192.0.2.9", fix="--node"):
        find_host(hosts("192.0.2.1", "192.0.2.9"), "hosts.txt")
    with raises(LaunchError, "2 hosts", "hosts.txt", "127.0.0.1, localhost", fix="--node"):
        find_host(hosts("127.0.0.1", "localhost"), "hosts.txt")


# ------------------------------------------------------------------------------------------------------------ Slurm


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", ()),
        ("node1", ("node1",)),
        ("node[01-03,07],gpu5", ("node01", "node02", "node03", "node07", "gpu5")),
        ("a[8-11]", ("a8", "a9", "a10", "a11")),
        ("r[1-2]n[0-1].x,b", ("r1n0.x", "r1n1.x", "r2n0.x", "r2n1.x", "b")),
    ],
)
def test_slurms_lists_of_machines_are_written_out(text: str, names: tuple[str, ...]) -> None:
    assert expand_nodelist(text) == names


def test_slurms_tasks_per_node_are_written_out() -> None:
    assert expand_counts("4(x2),3") == (4, 4, 3)
    assert expand_counts("8") == (8,)
    with raises(ValueError, "invalid literal", "''"):
        expand_counts("")


def test_a_server_listens_where_others_reach_it_by_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    leads = {"node1": ["127.0.1.1"], "node2": ["203.0.113.7"], "node3": ["127.0.1.1", "127.0.0.1"], "own": ["0.0.0.0"]}

    def getaddrinfo(name: str, *_: object, **__: object) -> list[Any]:
        if name not in leads:
            raise socket.gaierror(name)
        return [(socket.AF_INET, socket.SOCK_DGRAM, 0, "", (address, 0)) for address in leads[name]]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    assert [own_address(name) for name in ("localhost", "127.0.0.1", "127.3.4.5", "::1")] == [
        "127.0.0.1", "127.0.0.1", "127.3.4.5", "::1",
    ]  # fmt: skip
    assert [own_address(name) for name in ("node1", "node2", "node3", "nowhere")] == [""] * 4
    assert own_address("own") == "0.0.0.0"
    monkeypatch.undo()
    assert route_address("127.0.0.1", 9) == "127.0.0.1"
    assert route_address("no such machine.invalid", 9) == ""
