"""The checkpoints of a folder, and which of them are kept."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from shardwise.errors import CheckpointError, ShardwiseError
from shardwise.train.manifest import Manifest, read_manifest
from shardwise.train.names import DAMAGED, DELETED, FILE, INCOMPLETE, OWNER
from shardwise.train.stores import Folder, answered

K = TypeVar("K")
UNFINISHED = "its save did not finish"


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

    def kept(self, steps: Mapping[K, tuple[int, Mapping[str, float]]]) -> set[K]:
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


def checkpoints_in(folder: Folder) -> tuple[dict[Folder, Manifest], list[tuple[Folder, str]]]:
    """Return (complete checkpoints, by step and then by time of writing; incomplete or damaged ones with the reason). A
    partly deleted checkpoint is in neither. Raises ShardwiseError if the folder or a store does not answer."""
    with answered(folder):
        return _checkpoints_in(folder)


def _checkpoints_in(folder: Folder) -> tuple[dict[Folder, Manifest], list[tuple[Folder, str]]]:
    complete: dict[Folder, Manifest] = {}
    torn: list[tuple[Folder, str]] = []
    for path in (folder / name for name in sorted(folder.names())):
        if path.name.endswith(INCOMPLETE):
            torn.append((path, UNFINISHED))
        elif not path.name.endswith((DELETED, DAMAGED)):
            names = path.names()
            if FILE in names:
                try:
                    complete[path] = read_manifest(path)
                except CheckpointError as error:
                    torn.append((path, str(error).split("\n", 1)[0]))
            elif OWNER in names and not path.renames:
                torn.append((path, UNFINISHED))
    written = {path: path.written(FILE) for path in complete}
    return dict(sorted(complete.items(), key=lambda item: (item[1].step, written[item[0]]))), torn


def rename_later_checkpoints(folder: Folder, step: int) -> int:
    """Rename the checkpoints of steps after the loaded one, so that the resumed run can save under their names, and
    return how many. Raises ShardwiseError if that is impossible."""
    later = [path for path, manifest in checkpoints_in(folder)[0].items() if manifest.step > step]
    for path in later:
        try:
            path.set_aside()
        except OSError as error:
            what = f"{path} is of a step after the loaded one and cannot be renamed: {error}"
            raise ShardwiseError(what, fix="rename or delete it, and resume again") from error
    return len(later)


def prune(new: Folder, keep: Keep) -> Sequence[Folder]:
    """Delete the checkpoints beside a new one that ``keep`` does not keep, if possible, and return them."""
    checkpoints, _ = checkpoints_in(new.parent)
    stay = {new, *keep.kept({path: (manifest.step, manifest.metrics) for path, manifest in checkpoints.items()})}
    gone = [path for path in checkpoints if path not in stay]
    for path in gone:
        with contextlib.suppress(OSError):
            path.delete()
    return gone
