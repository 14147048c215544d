"""``Profiler``: torch's profiler under the reference's name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from shardwise import rank
from shardwise.errors import problem
from shardwise.mindspore.notes import note


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


__all__ = ["Profiler"]
