"""``mindspore.runtime`` and ``mindspore.profiler``: memory and streams of the device, and profiles by torch's profiler.
On a CPU, which has neither memory nor streams of its own, counts are 0."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from shardwise import rank
from shardwise.errors import problem
from shardwise.mindspore.named import absent
from shardwise.mindspore.notes import note


def _counted(name: str) -> Callable[[], int]:
    return lambda: int(getattr(torch.cuda, name)()) if torch.cuda.is_available() else 0


memory_allocated, max_memory_allocated, memory_reserved, max_memory_reserved = map(
    _counted, ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
)


def _called(name: str) -> Callable[[], None]:
    return lambda: getattr(torch.cuda, name)() if torch.cuda.is_available() else None


synchronize, empty_cache, reset_peak_memory_stats = map(
    _called, ("synchronize", "empty_cache", "reset_peak_memory_stats")
)
reset_max_memory_allocated = reset_max_memory_reserved = reset_peak_memory_stats


def launch_blocking() -> None:
    """Print a note: CUDA decides when the program starts whether kernels wait for their end."""
    note("runtime.launch_blocking() has no effect here: start the program with CUDA_LAUNCH_BLOCKING=1")


def set_memory(*args: Any, **settings: Any) -> None:
    """Print a note: torch allocates memory (``PYTORCH_CUDA_ALLOC_CONF``)."""
    note("runtime.set_memory has no effect here: torch allocates memory; set_context(max_device_memory=) limits plans")


def current_stream() -> Any:
    """Return the current stream of the GPU; None on a CPU."""
    return torch.cuda.current_stream() if torch.cuda.is_available() else None


def Stream(priority: int = 0, **kwargs: Any) -> Any:  # the reference's name
    """Return a new stream of the GPU; None on a CPU."""
    return torch.cuda.Stream(priority=-priority, **kwargs) if torch.cuda.is_available() else None


def StreamCtx(ctx_stream: Any) -> Any:  # the reference's name
    """Return a context in which a stream is the current one."""
    return contextlib.nullcontext() if ctx_stream is None else torch.cuda.stream(ctx_stream)


class Profiler:
    """Operator profiler that records from its construction (with ``start_profile=False``: from ``start``) to ``stop``
    or ``analyse``. ``analyse`` writes ``output_path/rank_N_trace.json``, a trace for Perfetto. Other settings are
    accepted, with a note. ``shardwise.Parallel.profile`` shows the time per operator of a split cell."""

    def __init__(self, output_path: str = "./data", start_profile: bool = True, **settings: Any) -> None:
        self._path, self._profile, self._runs = Path(output_path), torch.profiler.profile(), False
        self._started = False
        _no_effect("Profiler", settings)
        if start_profile:
            self.start()

    def start(self) -> None:
        self._profile.start()
        self._runs = self._started = True

    def stop(self) -> None:
        if self._runs:
            self._profile.stop()
            self._runs = False

    def analyse(self, **settings: Any) -> None:
        """Stop and write the trace. Settings are accepted, with a note. Raises RuntimeError if nothing was recorded."""
        _no_effect("Profiler.analyse", settings)
        if not self._started:
            raise RuntimeError(problem("the profiler has recorded nothing", fix="profiler.start()"))
        self.stop()
        self._path.mkdir(parents=True, exist_ok=True)
        self._profile.export_chrome_trace(str(self._path / f"rank_{rank()}_trace.json"))


def _no_effect(title: str, settings: dict[str, Any]) -> None:
    if settings:
        note(f"{title}({', '.join(settings)}) has no effect here: torch's profiler records operators")


class ProfilerLevel(enum.Enum):
    """How much is recorded: accepted without effect."""

    LevelNone, Level0, Level1, Level2 = -1, 0, 1, 2


class ProfilerActivity(enum.Enum):
    """What is recorded: the program, and the kernels of the device."""

    CPU, GPU, NPU = torch.profiler.ProfilerActivity.CPU, "GPU", "NPU"


def schedule(
    *, wait: int = 0, active: int, warmup: int = 0, repeat: int = 0, skip_first: int = 0, **settings: Any
) -> Any:
    """Return which steps are recorded, as torch has it."""
    return torch.profiler.schedule(wait=wait, warmup=warmup, active=active, repeat=repeat, skip_first=skip_first)


def tensorboard_trace_handler(dir_name: str = "./data", **settings: Any) -> Any:
    """Return a function that writes the trace of every recorded part."""
    return torch.profiler.tensorboard_trace_handler(dir_name, f"rank_{rank()}")


def profile(activities: Any = None, schedule: Any = None, on_trace_ready: Any = None, **settings: Any) -> Any:
    """Return torch's profiler, a context with ``step()``. Other settings are accepted, with a note."""
    kept = {name: settings.pop(name) for name in ("profile_memory", "with_stack") if name in settings}
    _no_effect("profile", settings)
    return torch.profiler.profile(schedule=schedule, on_trace_ready=on_trace_ready, **kept)


__all__ = [
    "Profiler", "ProfilerActivity", "ProfilerLevel", "Stream", "StreamCtx", "current_stream", "empty_cache",
    "launch_blocking", "max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved", "profile",
    "reset_max_memory_allocated", "reset_max_memory_reserved", "reset_peak_memory_stats", "schedule", "set_memory",
    "synchronize", "tensorboard_trace_handler",
]  # fmt: skip
__getattr__ = absent(__name__, lambda: __all__)
