"""Finished plans in a folder of the user's, by the hash of everything that decides them.

A file is named by its key and holds a digest and compressed JSON: no code. Files are written under another name and
renamed, so processes share a folder without locks, and a writer that is killed leaves nothing that is read. Whatever
goes wrong (a damaged file, a full disk, a folder that cannot be written), the plan is searched as without a cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._ops import OpOverload

from shardwise import errors
from shardwise.errors import NothingFits, PlanWarning, recorded_warnings, warn_user
from shardwise.graph.ir import Graph
from shardwise.graph.trees import is_plain_tensor
from shardwise.plans.micro_batch_search import Example
from shardwise.plans.plan import Plan
from shardwise.plans.result import PlanningResult, PlanReport
from shardwise.progress import Deadline
from shardwise.rules.tables import CUSTOM
from shardwise.untrusted_text import MAX_FILE, read_json

VARIABLE = "SHARDWISE_CACHE"  # a folder, or one of these
OFF = ("off", "0", "no", "false", "none", "")
MOST_BYTES = 2**28  # of all files of a folder; those read longest ago go first
_SUFFIX, _PART, _PART_PREFIX = ".plan", ".part", "shardwise-"
_OWN_FILE = re.compile(rf"[0-9a-f]{{64}}{_SUFFIX}|{_PART_PREFIX}\w+{_PART}")  # the folder may hold others
_ABANDONED_SECONDS = 3600.0  # after which an incomplete file is of no living writer
_IMPORTED = time.time()
# PyTorch's operators and our own, whose code the versions name.
_VERSIONED = frozenset({"aten", "prims", "shardwise"})
_ATOMS = (
    *(bool, int, float, complex, str, bytes, type(None), type(Ellipsis), torch.dtype, torch.device, torch.layout),
    torch.memory_format,
)


@dataclass(frozen=True)
class PlanCache:
    """A folder of answers. ``most_bytes``: of all its files."""

    folder: Path
    most_bytes: int = MOST_BYTES

    @staticmethod
    def of_user() -> PlanCache | None:
        """Return the cache that the environment names, by default in the user's cache folder; None: it is off."""
        named = os.environ.get(VARIABLE)
        if named is not None and named.strip().lower() in OFF:
            return None
        try:
            if named is not None:
                return PlanCache(Path(named).expanduser())
            base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        except RuntimeError:  # a user without a home
            return None
        return PlanCache(Path(base) / "shardwise")

    def read(self, key: str) -> dict[str, Any] | None:
        """Return what was written for a key; None: nothing, or nothing that can be read."""
        path = self._path(key)
        try:
            with path.open("rb") as file:
                content = file.read(MAX_FILE)
            digest, packed = content[:32], content[32:]
            if hashlib.sha256(key.encode() + packed).digest() != digest:
                return None
            value = read_json(zlib.decompressobj().decompress(packed, MAX_FILE).decode())
        except (OSError, ValueError, zlib.error):
            return None
        with suppress(OSError):
            os.utime(path)  # it was used now
        return value if isinstance(value, dict) else None

    def write(self, key: str, value: Mapping[str, Any]) -> None:
        """Keep a value. Does nothing where that is impossible."""
        part = ""
        try:
            packed = zlib.compress(json.dumps(value).encode(), 1)
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor, part = tempfile.mkstemp(_PART, _PART_PREFIX, self.folder)
            with os.fdopen(descriptor, "wb") as file:
                file.write(hashlib.sha256(key.encode() + packed).digest() + packed)
            os.replace(part, self._path(key))
            self._trim()
        except (OSError, TypeError, ValueError):  # the last two: what is no JSON
            with suppress(OSError):
                if part:
                    os.unlink(part)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}{_SUFFIX}"

    def _trim(self) -> None:
        """Remove the files that were used longest ago, beyond ``most_bytes``, and incomplete ones of dead writers."""
        files = []
        for entry in os.scandir(self.folder):
            if _OWN_FILE.fullmatch(entry.name):
                with suppress(FileNotFoundError):  # another process removed it
                    files.append((entry.stat().st_mtime, entry.stat().st_size, Path(entry.path)))
        total = 0
        for used, size, path in sorted(files, reverse=True):
            total += size
            is_abandoned = path.suffix == _PART and time.time() - used > _ABANDONED_SECONDS
            if is_abandoned or (total > self.most_bytes and path.suffix == _SUFFIX):
                path.unlink(missing_ok=True)


@dataclass(frozen=True)
class Answer:
    """What is kept of a request: its plan, or why nothing fits, the warnings of its search (class, message), and the
    keys of graphs of other batch sizes that the search read (samples, key)."""

    found: Plan | NothingFits
    warnings: Sequence[tuple[str, str]] = ()
    captures: Sequence[tuple[int, str]] = ()

    def as_data(self) -> dict[str, Any]:
        data: dict[str, Any] = {"warnings": self.warnings, "captures": self.captures}
        if isinstance(self.found, Plan):
            return data | {"plan": self.found.to_json()}
        found = self.found
        return data | {"refused": [found.what, found.facts, found.fix, found.computed, found.search_seconds]}

    @staticmethod
    def of_data(data: Mapping[str, Any] | None) -> Answer | None:
        """Return the answer of ``as_data``; None for any other data."""
        try:
            if data is None:
                return None
            warned = tuple((str(name), str(text)) for name, text in data["warnings"])
            captures = tuple((int(size), str(key)) for size, key in data["captures"])
            if "plan" in data:
                return Answer(Plan.from_json(data["plan"]), warned, captures)
            what, facts, fix, computed, seconds = data["refused"]
            refusal = NothingFits(str(what), [(str(name), str(text)) for name, text in facts], str(fix), computed)
            refusal.search_seconds = float(seconds)
        except (KeyError, TypeError, ValueError):  # ShardwiseErrors are ValueErrors
            return None
        return Answer(refusal, warned, captures)

    def result(self, search_again: Callable[[], PlanReport | None]) -> PlanningResult:
        """Return the result, whose report is searched when it is asked for. Warns as the search did; raises NothingFits
        if it is a refusal."""
        for name, text in self.warnings:
            kind = getattr(errors, name, None)
            warn_user(text, kind if isinstance(kind, type) and issubclass(kind, Warning) else PlanWarning)
        if isinstance(self.found, NothingFits):
            raise self.found
        return PlanningResult(self.found, search_again=search_again)


def remembered(
    cache: PlanCache,
    make_key: Callable[[], str],
    call: Example,
    search: Callable[[], PlanningResult],
    search_again: Callable[[], PlanningResult],
    deadline: Deadline,
    begun: float,
) -> PlanningResult:
    """Return the plan that the cache has for a request, or that of ``search()``, which it then keeps unless the
    deadline ended it. Refusals of what does not fit are kept as well, and so are warnings.

    Args:
        cache: The cache.
        make_key: Returns the key of the request.
        call: The call that is planned.
        search: Plans it.
        search_again: Plans it again, for the report of a remembered plan.
        deadline: The deadline of the search.
        begun: The CPU seconds of the process before the capture.
    """
    try:
        key = make_key()
    except NoKey:
        return search()
    answer = Answer.of_data(cache.read(key))
    if answer is not None and _is_current(answer, call):
        return answer.result(lambda: search_again().search_report)
    found: PlanningResult | NothingFits
    with recorded_warnings() as warned:
        try:
            found = search()
        except NothingFits as refusal:
            refusal.search_seconds = time.process_time() - begun
            found = refusal
    if not deadline.why:
        content = found if isinstance(found, NothingFits) else found.plan
        with suppress(NoKey):  # graphs of other batch sizes may have operators of the user's
            cache.write(key, Answer(content, warned, _captures_at(call, call.captured_sizes)).as_data())
    if isinstance(found, NothingFits):
        raise found
    return found


def _is_current(answer: Answer, call: Example) -> bool:
    try:
        return answer.captures == _captures_at(call, (size for size, _ in answer.captures))
    except (NoKey, errors.ShardwiseError):  # the code of that size is another now
        return False


def _captures_at(call: Example, sizes: Iterable[int]) -> tuple[tuple[int, str], ...]:
    """Return the keys of the graphs of other batch sizes: they may depend on code that the example does not run."""
    return tuple((size, key_of_graph(call.graph(size))) for size in sizes)


class NoKey(Exception):
    """Raised for what no key can name: an object whose content may change without a trace."""


def key_of(*parts: Any) -> str:
    """Return the key of everything that decides an answer: the parts, and what runs it. Raises NoKey."""
    hashed = hashlib.sha256()
    for text in _texts((_surroundings(), parts)):
        hashed.update(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
        hashed.update(b"\0")
    return hashed.hexdigest()


def key_of_graph(graph: Graph, *others: Any) -> str:
    """Return the key of a graph and what else decides its plan. Raises NoKey."""
    if any(op.target in CUSTOM.rules for op in graph.ops):
        raise NoKey("a rule of the user's")
    return key_of(graph, *others)


def _texts(value: Any) -> Iterable[str | bytes]:
    """Yield texts that are equal for equal values only: every value begins with its type, and with its length if it has
    one. Raises NoKey."""
    kind = type(value)
    if isinstance(value, Enum) or kind in _ATOMS or kind is np.dtype or isinstance(value, np.generic):
        yield f"{kind.__qualname__} {value!r}"
    elif isinstance(value, OpOverload):
        if value.namespace not in _VERSIONED:  # an operator of the user's, with code of its own
            raise NoKey(str(value))
        yield f"operator {value._schema}"
    elif kind in (tuple, list, torch.Size):
        yield f"{kind.__qualname__} {len(value)}"
        for item in value:
            yield from _texts(item)
    elif isinstance(value, Mapping):
        yield f"mapping {len(value)}"
        for key, item in value.items():
            yield from _texts(key)
            yield from _texts(item)
    elif kind in (set, frozenset):
        yield f"set {len(value)}"
        yield from sorted(key_of_item(item) for item in value)
    elif is_dataclass(value) and not isinstance(value, type):
        yield f"{kind.__module__}.{kind.__qualname__}"
        for entry in fields(value):
            yield from _texts(getattr(value, entry.name))
    elif is_plain_tensor(value):
        yield f"tensor {tuple(value.shape)} {value.dtype} {value.device.type} {value.requires_grad}"
        if not value.is_meta:
            plain = value.detach().cpu().resolve_conj().resolve_neg().reshape(-1)
            plain = plain.clone(memory_format=torch.contiguous_format)  # also where one number has another stride
            yield plain.view(torch.uint8).numpy().tobytes()
    else:
        raise NoKey(f"{kind.__module__}.{kind.__qualname__}")


def key_of_item(value: Any) -> str:
    """Return a text of an item of a set, which has no order. Raises NoKey."""
    return hashlib.sha256(repr([*_texts(value)]).encode()).hexdigest()


def _surroundings() -> tuple[Any, ...]:
    """Return what decides a search and is no part of a request: versions, our own sources, and torch's switches."""
    cuda = torch.backends.cuda
    switches = (
        torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), torch.is_grad_enabled(),
        cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled(),
        torch.backends.mkldnn.enabled, torch.backends.mkldnn.is_available(), torch.cuda.is_available(),
    )  # fmt: skip
    own = sys.modules["shardwise"].__version__  # not imported: the package is a later layer
    versions = own, torch.__version__, np.__version__, platform.python_version(), platform.machine()
    return _digest_of_sources(), tuple(map(str, versions)), switches


@cache
def _digest_of_sources() -> str:
    """Return the digest of all files of this package. Raises NoKey if one was changed since this process read it, or
    if they cannot be read, as in an archive."""
    folder, hashed = Path(__file__).parents[1], hashlib.sha256()
    try:
        paths = sorted(path for path in folder.rglob("*") if path.suffix in (".py", ".toml", ".json"))
        newest = max((path.stat().st_mtime for path in paths), default=inf)
        contents = [path.read_bytes() for path in paths]
    except OSError as error:
        raise NoKey("the sources") from error
    if newest > _IMPORTED or Path(__file__) not in paths:
        raise NoKey("the sources are not what runs")
    for path, content in zip(paths, contents, strict=True):
        hashed.update(f"{path.relative_to(folder)} {len(content)} ".encode())
        hashed.update(content)
    return hashed.hexdigest()
