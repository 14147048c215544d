"""What a rank on the CPU keeps of the memory that it lets go."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

# Faults of joining 20 MiB four times, after twelve more: the heap grows until parts that are let go lie side by side
# and are large enough for an aligned one. After two it had not settled in 7 of 25 processes, after twelve in all of 24.
FAULTS = """
import resource, torch
from shardwise.launch.ranks import init_ranks
init_ranks("gloo")
parts = [torch.ones(1 << 18) for _ in range(20)]
for _ in range(12):
    torch.cat(parts)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    torch.cat(parts)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
PAGES = 20 * 2**20 // os.sysconf("SC_PAGE_SIZE")  # of what is joined


def faults(**chosen: str) -> int:
    environ = {key: value for key, value in os.environ.items() if key not in ("GLIBC_TUNABLES", "LD_PRELOAD")}
    done = subprocess.run(
        [sys.executable, "-c", FAULTS], env={**environ, **chosen}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library has no mallopt")
def test_a_message_is_not_made_of_new_pages_in_every_step() -> None:
    assert faults() < PAGES // 10


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library has no mallopt")
def test_what_the_user_chose_for_the_heap_stays() -> None:
    assert faults(MALLOC_MMAP_THRESHOLD_="131072") >= 4 * PAGES
