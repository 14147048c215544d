"""On-disk cache of measured step times: a JSON file per key in the user's cache folder.

A file that is unreadable, or of another version or key, is ignored with a warning; the next measurement replaces it.
Files are written atomically, so ranks and jobs may share a folder.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.errors import PlanWarning
from shardwise.runtime.private import open_own

VERSION = 1


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of a step, eager and compiled."""

    eager: float
    compiled: float


@dataclass(frozen=True, slots=True)
class TimesOnDisk:
    """The cache in a ``folder``, which is created on the first write."""

    folder: Path

    @staticmethod
    def here() -> TimesOnDisk:
        """Return the cache of this process's environment."""
        return TimesOnDisk.of(os.environ)

    @staticmethod
    def of(environment: Mapping[str, str]) -> TimesOnDisk:
        """Return the cache in ``SHARDWISE_CACHE``, else in ``shardwise`` in ``XDG_CACHE_HOME`` or ``~/.cache``."""
        folder = environment.get("SHARDWISE_CACHE")
        caches = environment.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        return TimesOnDisk((Path(folder) if folder else Path(caches) / "shardwise") / "compile")

    def path(self, key: Mapping[str, str]) -> Path:
        return self.folder / f"{hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]}.json"

    def read(self, key: Mapping[str, str]) -> Times | None:
        path = self.path(key)
        try:
            with open(open_own(path), encoding="utf-8") as file:
                content: Any = json.load(file)
            if content["version"] != VERSION or content["key"] != dict(key):
                raise ValueError("it is of another version, or about another program")
            times = Times(float(content["eager_seconds"]), float(content["compiled_seconds"]))
            if not all(math.isfinite(seconds) and seconds > 0 for seconds in (times.eager, times.compiled)):
                raise ValueError(f"invalid step times: {times.eager} and {times.compiled}")
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, LookupError) as error:
            warnings.warn(
                f"ignoring {path}, which has no step times: {type(error).__name__}: {error}",
                PlanWarning,
                stacklevel=2,
            )
            return None
        return times

    def write(self, key: Mapping[str, str], times: Times) -> str:
        """Store times and return the outcome as a phrase to append to a message."""
        path = self.path(key)
        content = {
            "version": VERSION,
            "key": dict(key),
            "eager_seconds": times.eager,
            "compiled_seconds": times.compiled,
        }
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self.folder, suffix=".part", delete=False) as file:
                json.dump(content, file, indent=1)
            os.replace(file.name, path)
        except OSError as error:
            return f"; not remembered: {error}"
        return f"; remembered in {path}"


__all__ = ["Times", "TimesOnDisk"]
