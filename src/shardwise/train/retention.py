"""The checkpoints of a folder, and which of them are kept."""

from __future__ import annotations

import contextlib
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shardwise.errors import ShardwiseError
from shardwise.train.manifest import FILE, Manifest, read_manifest

INCOMPLETE, DELETED, DAMAGED = ".incomplete", ".deleted", ".damaged"


@dataclass(frozen=True, slots=True)
class Keep:
    """Which checkpoints of a folder to keep when a new one is complete. The newest is always kept.

    Args:
        last: keep this many of the highest steps.
        every: keep the checkpoints whose step is a multiple of this number.
        best: name of a metric; keep the ``num_best`` checkpoints by it.
        num_best: how many to keep by ``best``.
        order: whether the "smallest" or the "largest" values of ``best`` count as best.

    Raises:
        ShardwiseError: a number below 1, an unknown ``order``, or no criterion.
    """

    last: int | None = None
    every: int | None = None
    best: str | None = None
    num_best: int = 1
    order: Literal["smallest", "largest"] = "smallest"

    def __post_init__(self) -> None:
        numbers = {"last": self.last, "every": self.every, "num_best": self.num_best}
        for name, number in numbers.items():
            if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
                raise ShardwiseError(f"{name} must be a number of checkpoints or steps, 1 or more; got {number!r}")
        if self.order not in ("smallest", "largest"):
            raise ShardwiseError(f'order must be "smallest" or "largest" (which metric is best), got {self.order!r}')
        if self.last is None and self.every is None and self.best is None:
            raise ShardwiseError("Keep() needs a criterion", fix="to keep only the newest: Keep(last=1)")

    def kept(self, steps: Mapping[Path, tuple[int, Mapping[str, float]]]) -> set[Path]:
        """Return the checkpoints to keep. ``steps``: step and metrics of each checkpoint."""
        newest = sorted(steps, key=lambda path: steps[path][0])
        stay = set(newest[-1:])
        if self.last is not None:
            stay |= set(newest[-self.last :])
        if self.every is not None:
            stay |= {path for path in newest if steps[path][0] % self.every == 0}
        if self.best is not None:
            sign = 1 if self.order == "smallest" else -1
            rated = [path for path in newest if not math.isnan(steps[path][1].get(self.best, math.nan))]
            stay |= set(sorted(rated, key=lambda path: sign * steps[path][1][str(self.best)])[: self.num_best])
        return stay


def checkpoints_in(folder: Path) -> tuple[dict[Path, Manifest], list[tuple[Path, str]]]:
    """Return (complete checkpoints, by step and then by time of writing; incomplete or damaged ones with the reason). A
    partly deleted checkpoint is in neither."""
    complete: dict[Path, Manifest] = {}
    torn: list[tuple[Path, str]] = []
    for path in sorted(folder.iterdir()):
        if path.name.endswith(INCOMPLETE):
            torn.append((path, "its save did not finish"))
        elif path.is_dir() and (path / FILE).exists() and not path.name.endswith((DELETED, DAMAGED)):
            try:
                complete[path] = read_manifest(path)
            except ShardwiseError as error:
                torn.append((path, str(error).split("\n", 1)[0]))
    written = {path: _written(path) for path in complete}
    return dict(sorted(complete.items(), key=lambda item: (item[1].step, written[item[0]]))), torn


def _written(path: Path) -> int:
    """Return when a checkpoint was written, in nanoseconds; 0 if another job has just deleted it."""
    with contextlib.suppress(OSError):
        return (path / FILE).stat().st_mtime_ns
    return 0


def rename_later_checkpoints(folder: Path, step: int) -> None:
    """Rename the checkpoints of steps after the loaded one, so that the resumed run can save under their names."""
    for path, manifest in checkpoints_in(folder)[0].items():
        if manifest.step > step:
            aside, turn = path.with_name(path.name + DAMAGED), 0
            while aside.exists():  # renamed by an earlier resume
                turn += 1
                aside = path.with_name(f"{path.name}.{turn}{DAMAGED}")
            path.rename(aside)


def prune(new: Path, keep: Keep) -> Sequence[Path]:
    """Delete the checkpoints beside a new one that ``keep`` does not keep, if possible, and return them."""
    checkpoints, _ = checkpoints_in(new.parent)
    stay = {new, *keep.kept({path: (manifest.step, manifest.metrics) for path, manifest in checkpoints.items()})}
    gone = [path for path in checkpoints if path not in stay]
    for path in gone:
        with contextlib.suppress(OSError):
            shutil.rmtree(path.rename(path.with_name(path.name + DELETED)))
    return gone
