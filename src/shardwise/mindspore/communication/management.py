"""Ranks and named groups of ranks. ``shardwise.runtime`` implements the communication.

Before ``init`` a process without a launcher is a group of one, so that a program also runs as a single process. Under a
launcher the functions about groups require ``init`` first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from shardwise.errors import problem
from shardwise.mindspore import context, rank_groups
from shardwise.mindspore.checks import closest, integer, note, of_type
from shardwise.mindspore.library import ranks

WORLD_GROUPS = {name: f"{name}_world_group" for name in ("hccl", "nccl", "mccl", "gloo")}
HCCL_WORLD_COMM_GROUP, NCCL_WORLD_COMM_GROUP = WORLD_GROUPS["hccl"], WORLD_GROUPS["nccl"]
MCCL_WORLD_COMM_GROUP, GLOO_WORLD_COMM_GROUP = WORLD_GROUPS["mccl"], WORLD_GROUPS["gloo"]
ON_CPU = ("mccl", "gloo")


class GlobalComm:
    """State of ``init``. Each of the world groups' names means all ranks, whatever the backend is."""

    BACKEND = "hccl"
    WORLD_COMM_GROUP = HCCL_WORLD_COMM_GROUP
    INITED = False


_groups: dict[str, rank_groups.RankGroup] = {}  # by the program's names


def init(backend_name: str | None = None) -> None:
    """Join the other ranks, with nccl if there is a GPU for every rank, else with gloo.

    Further calls change nothing. "gloo", "mccl" and the device target CPU use the CPU.

    Args:
        backend_name: "hccl", "nccl", "mccl" or "gloo". If another one is used, rank 0 prints a note, unless
            ``set_context`` has already printed what the machine lacks.

    Raises:
        LaunchError: (a ValueError) if not all ranks connect.
    """
    if backend_name is not None:
        of_type("backend_name", backend_name, str, 'give "hccl", "nccl" or "gloo", or nothing')
    if backend_name is not None and backend_name not in WORLD_GROUPS:
        raise ValueError(problem(f'there is no backend "{backend_name}"', fix=closest(backend_name, WORLD_GROUPS)))
    on_cpu = backend_name in ON_CPU or context.settings().device_target == "CPU"
    if not dist.is_initialized():
        ranks.init_ranks("gloo" if on_cpu else None)
    used = rank_groups.backend()
    if backend_name not in (None, used):
        have = "a GPU for every rank" if used == "nccl" else "the CPU"
        text = f'the ranks communicate through {used}, which fits {have} here, not through "{backend_name}"'
        note(text, context.MACHINE)
    GlobalComm.BACKEND = backend_name or used
    GlobalComm.WORLD_COMM_GROUP = WORLD_GROUPS[GlobalComm.BACKEND]
    GlobalComm.INITED = True


def release() -> None:
    """Leave the group of all ranks and remove all other groups. Raises RuntimeError before ``init``."""
    if not dist.is_initialized():
        raise RuntimeError(problem("the ranks are not connected", fix="call init() before release()"))
    _groups.clear()
    ranks.finish()
    GlobalComm.INITED = False


def find_group(group: str | None = None) -> rank_groups.RankGroup:
    """Return a group by its name, or all ranks. Raises TypeError or ValueError if there is none, RuntimeError before
    ``init``."""
    group = GlobalComm.WORLD_COMM_GROUP if group is None else group
    of_type("the group", group, str, "give the name of a group, made by create_group(name, rank_ids)")
    if group in WORLD_GROUPS.values():
        if ranks.world_size() > 1 and not dist.is_initialized():
            what = f"this is rank {ranks.rank()} of {ranks.world_size()}, which are not connected yet"
            raise RuntimeError(problem(what, fix="call shardwise.mindspore.communication.init() first"))
        return rank_groups.all_ranks_group()
    if group not in _groups:
        fix = closest(group, (*_groups, GlobalComm.WORLD_COMM_GROUP))
        raise ValueError(problem(f'there is no group "{group}"', fix=fix))
    return _groups[group]


def get_rank(group: str = HCCL_WORLD_COMM_GROUP) -> int:
    """Return this process's rank in a group. Raises RuntimeError if it is not a member."""
    return _position(find_group(group), ranks.rank(), group)


def get_group_size(group: str = HCCL_WORLD_COMM_GROUP) -> int:
    """Return the number of ranks of a group."""
    return find_group(group).size


def get_local_rank(group: str = HCCL_WORLD_COMM_GROUP) -> int:
    """Return this process's rank on its machine."""
    _only_world(group, "get_local_rank")
    return ranks.local_rank()[0]


def get_local_rank_size(group: str = HCCL_WORLD_COMM_GROUP) -> int:
    """Return the number of ranks on this machine."""
    _only_world(group, "get_local_rank_size")
    return ranks.local_rank()[1]


def get_world_rank_from_group_rank(group: str, group_rank_id: int) -> int:
    """Return the global rank of a group's member."""
    members = find_group(group).ranks
    integer("group_rank_id", group_rank_id)
    if not 0 <= group_rank_id < len(members):
        what = f'group_rank_id is {group_rank_id}, but the group "{group}" has {len(members)} ranks'
        raise ValueError(problem(what, fix=f"give a number from 0 to {len(members) - 1}"))
    return members[group_rank_id]


def get_group_rank_from_world_rank(world_rank_id: int, group: str) -> int:
    """Return the rank in a group of a global rank."""
    integer("world_rank_id", world_rank_id)
    return _position(find_group(group), world_rank_id, group)


def get_process_group_ranks(group: str = HCCL_WORLD_COMM_GROUP) -> list[int]:
    """Return the members of a group, ascending."""
    return list(find_group(group).ranks)


def create_group(group: str, rank_ids: Sequence[int]) -> None:
    """Create a named group of ranks for communication operators.

    All its members must call this, and create groups that they share in the same order. Other ranks may call it.

    Raises:
        TypeError: for arguments of the wrong type.
        ValueError: for a name that is taken, and for ranks that do not exist or occur twice.
    """
    size = get_group_size()
    if not isinstance(group, str) or not isinstance(rank_ids, list | tuple):
        what = f"create_group({group!r}, {rank_ids!r})"
        raise TypeError(problem(what, fix='give a name and a list of ranks: create_group("rows", [0, 1])'))
    for number in rank_ids:
        integer("a rank of rank_ids", number)
    if not group or not rank_ids:
        raise ValueError(problem(f"create_group({group!r}, {rank_ids!r})", fix="give a name and at least one rank"))
    if len(set(rank_ids)) != len(rank_ids) or not set(rank_ids) <= set(range(size)):
        what = f'the ranks of the group "{group}" are {list(rank_ids)}, but there are the ranks 0 to {size - 1}'
        raise ValueError(problem(what, fix="name every rank once"))
    if group in _groups or group in WORLD_GROUPS.values():
        fix = f'choose another name, or destroy_group("{group}") first'
        raise ValueError(problem(f'there is a group "{group}" already', fix=fix))
    _groups[group] = rank_groups.make_group(rank_ids)


def destroy_group(group: str) -> None:
    """Remove a group. Raises ValueError for the group of all ranks, which ``release`` ends."""
    if group in WORLD_GROUPS.values():
        raise ValueError(problem(f'"{group}" is the group of all ranks', fix="call release() at the end"))
    rank_groups.leave_group(find_group(group))
    del _groups[group]


# ------------------------------------------------------------------------------------------ names in printed programs


def group_ranks_name(rank_ids: Sequence[int]) -> str:
    """Return the ranks of a group as the reference prints them.

    >>> group_ranks_name([0, 5, 3, 7, 1])
    '0-1-3-5-7'
    """
    return "-".join(map(str, sorted(rank_ids)))


def group_name(rank_ids: Sequence[int]) -> str:
    """Return the reference's name of a group: the number of ranks, and the hash of their list.

    The hash is ``std::hash`` of GNU's C++ library, so that the name is the one in the reference's own files (document
    003 prints this one):

    >>> group_name([0, 1, 2, 3])
    '4-6301172352641561019'
    """
    return f"{len(rank_ids)}-{gnu_hash(group_ranks_name(rank_ids).encode())}"


def gnu_hash(text: bytes, seed: int = 0xC70F6907) -> int:
    """Return the hash of ``_Hash_bytes`` in libstdc++ (hash_bytes.cc, 64 bits), which is Appleby's MurmurHash64A."""
    multiplier, mask = 0xC6A4A7935BD1E995, 2**64 - 1

    def mixed(word: int) -> int:
        return word ^ word >> 47

    digest = seed ^ len(text) * multiplier & mask
    whole_words = len(text) // 8 * 8
    for start in range(0, whole_words, 8):
        word = mixed(int.from_bytes(text[start : start + 8], "little") * multiplier & mask)
        digest = (digest ^ word * multiplier & mask) * multiplier & mask
    if rest := text[whole_words:]:
        digest = (digest ^ int.from_bytes(rest, "little")) * multiplier & mask
    return mixed(mixed(digest) * multiplier & mask)


def _position(group: rank_groups.RankGroup, number: int, name: str) -> int:
    if number not in group.ranks:
        what = f'rank {number} is not in the group "{name}" of the ranks {group_ranks_name(group.ranks)}'
        raise RuntimeError(problem(what, fix="ask only for members of the group"))
    return group.ranks.index(number)


def _only_world(group: str, function: str) -> None:
    if find_group(group) != rank_groups.all_ranks_group():
        fix = f"call {function}() without a group"
        raise ValueError(problem(f'{function} got the group "{group}", which is not the group of all ranks', fix=fix))


__all__ = [
    "HCCL_WORLD_COMM_GROUP", "NCCL_WORLD_COMM_GROUP", "GlobalComm", "create_group", "destroy_group",
    "get_group_rank_from_world_rank", "get_group_size", "get_local_rank", "get_local_rank_size",
    "get_process_group_ranks", "get_rank", "get_world_rank_from_group_rank", "init", "release",
]  # fmt: skip
