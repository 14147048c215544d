"""Allocator settings of a process that trains on CPUs."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # parameters of mallopt(3)
_KEPT_BYTES = 1 << 30
_CHOSEN = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")


def keep_freed_memory(environ: Mapping[str, str]) -> bool:
    """Make the C library keep freed memory for later allocations; return whether that succeeded.

    A communication buffer lives for part of a step. glibc returns a block of its size to the system at once, so the
    next one page-faults: concatenating 20 MiB of gradients took 6.5 ms instead of 1.0 (torch 2.13, glibc 2.36, a 2-core
    AMD EPYC). From now on the process keeps its peak size, except for blocks of 1 GiB and more. Nothing changes if
    ``environ`` has a choice of the user (``MALLOC_MMAP_THRESHOLD_``, ``MALLOC_TRIM_THRESHOLD_``, ``GLIBC_TUNABLES``, an
    allocator in ``LD_PRELOAD``) or with another C library.
    """
    if any(name in environ for name in _CHOSEN):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return all(mallopt(which, _KEPT_BYTES) == 1 for which in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD))


__all__ = ["keep_freed_memory"]
