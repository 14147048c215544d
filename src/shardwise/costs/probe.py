"""Asks this machine what it has: torch, ``nvidia-smi`` and Linux.

Nothing is concluded here (``costs.machine`` does), so that a test can put other answers in the place of these few
functions.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_SMI_SECONDS = 20.0  # nvidia-smi takes some on machines whose driver has to be loaded first
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU that this process sees. ``memory_bytes``: all there is; ``capability``: CUDA's; ``uuid``: as nvidia-smi
    writes it, "" if unknown; ``held_bytes``: by torch in this process; ``fraction``: of the memory that torch may take
    here (``torch.cuda.set_per_process_memory_fraction``)."""

    name: str
    memory_bytes: int
    capability: tuple[int, int] = (0, 0)
    uuid: str = ""
    held_bytes: int = 0
    fraction: float = 1.0


@dataclass(frozen=True, slots=True)
class SmiGpu:
    """What nvidia-smi says of a GPU, of all processes: its number there, and bytes."""

    index: int
    memory_bytes: int
    used_bytes: int


def gpus() -> tuple[Gpu, ...]:
    """Return the GPUs that torch sees, in its order. No context is created on any of them."""
    import torch  # here: a cluster of another machine needs none of it

    if not torch.cuda.is_available():
        return ()
    seen = []
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        uuid = str(getattr(facts, "uuid", ""))
        seen.append(
            Gpu(
                facts.name,
                facts.total_memory,
                (facts.major, facts.minor),
                uuid if not uuid or uuid.startswith("GPU-") else f"GPU-{uuid}",
                torch.cuda.memory_reserved(index),
                torch.cuda.get_per_process_memory_fraction(index),
            )
        )
    return tuple(seen)


def room(index: int) -> tuple[int, int]:
    """Bytes of a GPU that tensors of this process have or can get, and all there are."""
    import torch

    free, whole = torch.cuda.mem_get_info(index)
    return free + torch.cuda.memory_reserved(index), whole


def smi_gpus() -> dict[str, SmiGpu]:
    """Return the GPUs that nvidia-smi lists, by uuid; empty if there are none."""
    by_uuid = {}
    for line in _smi("--query-gpu=uuid,index,memory.total,memory.used", "--format=csv,noheader,nounits").splitlines():
        uuid, *numbers = (part.strip() for part in line.split(","))
        if len(numbers) == 3 and all(number.isdigit() for number in numbers):
            index, total, used = map(int, numbers)
            by_uuid[uuid] = SmiGpu(index, total * _MIB, used * _MIB)
    return by_uuid


def topology() -> str:
    """Return the table of ``nvidia-smi topo -m``; empty where there is none."""
    return _smi("topo", "-m")


def memory_bytes(root: Path = Path("/")) -> int:
    """Bytes that the processes of this job can have on the CPU: the machine's, or the least limit of the control groups
    (version 1 or 2) that this process is in."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, kinds, path = line.split(":", 2)
        if kinds == "":
            folder, file = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in kinds.split(","):
            folder, file = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        inside = PurePosixPath(path.lstrip("/"))
        limits += [limit for part in (inside, *inside.parents) if (limit := _limit(folder / part / file)) is not None]
    return min(limits)


def _limit(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max": none


def _smi(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=_SMI_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout
