"""``mindspore.runtime`` and ``mindspore.profiler``: memory and streams of the device, and profiles by torch's profiler.
On a CPU, which has neither memory nor streams of its own, counts are 0."""

from __future__ import annotations

import enum
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from shardwise import rank
from shardwise.errors import problem
from shardwise.mindspore.checks import note
from shardwise.mindspore.named import absent, functions_of


def _on_gpu(name: str, otherwise: Any = None, **chosen: Any) -> Any:
    """Call a function of ``torch.cuda``; on a CPU return another value."""
    return getattr(torch.cuda, name)(**chosen) if torch.cuda.is_available() else otherwise


FUNCTIONS = functions_of({
    **{name: partial(_on_gpu, name, 0) for name in (
        "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")},
    **{name: partial(_on_gpu, name) for name in (
        "synchronize", "empty_cache", "reset_peak_memory_stats", "current_stream")},
    **{name: partial(_on_gpu, "reset_peak_memory_stats") for name in (
        "reset_max_memory_allocated", "reset_max_memory_reserved")},
    "launch_blocking": lambda: note(
        "runtime.launch_blocking() has no effect here: start the program with CUDA_LAUNCH_BLOCKING=1"),
    "set_memory": lambda *args, **settings: note(
        "runtime.set_memory has no effect here: torch allocates memory; set_context(max_device_memory=) limits plans"),
    "Stream": lambda priority=0, **kwargs: _on_gpu("Stream", priority=-priority, **kwargs),
    "StreamCtx": lambda ctx_stream: nullcontext() if ctx_stream is None else torch.cuda.stream(ctx_stream),
    # which steps are recorded, as torch has it; and a function that writes the trace of every recorded part
    "schedule": lambda *, wait=0, active, warmup=0, repeat=0, skip_first=0, **settings: torch.profiler.schedule(
        wait=wait, warmup=warmup, active=active, repeat=repeat, skip_first=skip_first),
    "tensorboard_trace_handler": lambda dir_name="./data", **settings: torch.profiler.tensorboard_trace_handler(
        dir_name, f"rank_{rank()}"),
}, __name__)  # fmt: skip
globals().update(FUNCTIONS)


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


ProfilerLevel = enum.Enum("ProfilerLevel", {"LevelNone": -1, "Level0": 0, "Level1": 1, "Level2": 2})  # has no effect
ProfilerActivity = enum.Enum("ProfilerActivity", {
    "CPU": torch.profiler.ProfilerActivity.CPU, "GPU": "GPU", "NPU": "NPU"})  # fmt: skip


def profile(activities: Any = None, schedule: Any = None, on_trace_ready: Any = None, **settings: Any) -> Any:
    """Return torch's profiler, a context with ``step()``. Other settings are accepted, with a note."""
    kept = {name: settings.pop(name) for name in ("profile_memory", "with_stack") if name in settings}
    _no_effect("profile", settings)
    return torch.profiler.profile(schedule=schedule, on_trace_ready=on_trace_ready, **kept)


__all__ = ["Profiler", "ProfilerActivity", "ProfilerLevel", "profile", *FUNCTIONS]
__getattr__ = absent(__name__, lambda: __all__)
