"""Choose eager or compiled: the first training steps of a program alternate between both, and the faster one stays.

The steps are the user's own, and both ways give the same losses, gradients and buffers, so no step is repeated or
undone. Only the forward and backward lists of a step are timed, not emitting or compiling them. Ranks send the same
messages in the same order either way. A rank may therefore measure, or fail to compile, on its own until the ranks of
the program's placement agree.
"""

from __future__ import annotations

import hashlib
import math
import platform
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from statistics import median
from typing import Generic, TypeVar

import torch

from shardwise.programs.instructions import Instruction
from shardwise.programs.rank_program import RankProgram
from shardwise.runtime.agree import wire_device
from shardwise.runtime.communicator import Communicator
from shardwise.runtime.timing_cache import Times, TimesOnDisk

_Variant = TypeVar("_Variant")

# Whether a step is compiled. The first of each is not timed: it compiles and allocates. The order of the others
# (Thue-Morse) cancels drift, and user steps that differ every second or fourth time.
WARM_UP = (False, True)
ROUND = (False, True, True, False, True, False, False, True)
MOST_ROUNDS = 3
LEAST_TIMED = 2  # of each way, with backward
MARGIN = 0.01  # below it eager stays: it needs no compiling for other inputs
MOST_STEPS = len(WARM_UP) + MOST_ROUNDS * len(ROUND)


class Stopwatch:
    """Sums up the seconds of a step's parts."""

    def __init__(self) -> None:
        self._seconds = self._began = 0.0

    def start(self) -> None:
        self._began = time.perf_counter()

    def stop(self) -> None:
        self._seconds += time.perf_counter() - self._began

    @property
    def seconds(self) -> float:
        return self._seconds


class StreamStopwatch(Stopwatch):
    """A stopwatch for work queued on a GPU stream. The device is idle when the first part starts, so host time counts;
    nothing synchronizes between the parts, as in other steps."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self._events: list[torch.cuda.Event] = []

    def start(self) -> None:
        if not self._events:
            torch.cuda.synchronize(self.device)
        self._mark()

    def stop(self) -> None:
        self._mark()

    def _mark(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        self._events.append(event)

    @property
    def seconds(self) -> float:
        self._events[-1].synchronize()
        pairs = zip(self._events[::2], self._events[1::2], strict=True)
        return float(sum(first.elapsed_time(last) for first, last in pairs) / 1e3)


def stopwatch_of(device: torch.device) -> Stopwatch:
    return StreamStopwatch(device) if device.type == "cuda" else Stopwatch()


@dataclass
class TimedStep:
    """A training step. ``watch``: None if it is not timed; ``is_complete``: whether backward has run."""

    compiled: bool
    watch: Stopwatch | None = None
    is_complete: bool = False

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Time a part of the step."""
        if self.watch is None or self.is_complete:
            yield
            return
        self.watch.start()
        yield
        self.watch.stop()


@dataclass
class CompileBenchmark:
    """State shared by all programs of a module. ``latest``: whether the last decided one runs compiled (evaluation
    follows it); ``name``: the module's."""

    name: str
    disk: TimesOnDisk
    latest: bool = False
    number: int = 0

    def restart(self) -> None:
        """Restart the trials under way: after a failed call ranks may have counted differently."""
        self.number += 1


@dataclass
class CompileTrial:
    """The trial of one program on this rank; every rank of its placement makes the same calls. ``choice``: whether the
    program runs compiled, None until decided."""

    trials: CompileBenchmark
    program: RankProgram
    ranks: Communicator
    device: torch.device
    choice: bool | None = None
    _failed: bool = False  # to compile
    _number: int = 0
    _count: int = 0
    _turns: list[TimedStep] = field(default_factory=list)

    def begin(self) -> TimedStep:
        """Begin a training step and return how to run it."""
        if self._number != self.trials.number:
            self._number, self._count, self._turns = self.trials.number, 0, []
        if self.choice is None:
            if self._count == 0:
                self._recall()
            elif self._turns and len(self._turns) % len(ROUND) == 0:
                self._decide()
        if self.choice is not None:
            return TimedStep(self.choice and not self._failed)
        warm = self._count < len(WARM_UP)
        compiled = WARM_UP[self._count] if warm else ROUND[len(self._turns) % len(ROUND)]
        turn = TimedStep(compiled and not self._failed, None if warm else stopwatch_of(self.device))
        if not warm:
            self._turns.append(turn)
        self._count += 1
        return turn

    def cannot_compile(self, error: Exception) -> None:
        """Run eager on this rank from now on, whatever the others do."""
        self._failed = True
        warnings.warn(
            f"the step of {self.trials.name} runs eager on rank {self.ranks.rank}, since it does not compile: "
            f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}; compile=True shows the whole "
            "error, compile=False disables compilation",
            stacklevel=2,
        )

    @property
    def is_preferred(self) -> bool:
        """Return whether untimed calls run compiled."""
        return not self._failed and (self.trials.latest if self.choice is None else self.choice)

    @property
    def _is_first(self) -> bool:
        """Return whether this is the rank that reads, writes and prints."""
        return self.ranks.place.device_of(self.ranks.rank) == 0

    def _recall(self) -> None:
        """Take the choice that the first rank has on disk, if any."""
        recorded = self.trials.disk.read(self._key()) if self._is_first else None
        eager, compiled = self._of_all(recorded or Times(math.nan, math.nan))[0].tolist()
        if not math.isnan(eager):
            self._choose(Times(eager, compiled), f"as measured before ({self.trials.disk.folder})")

    def _decide(self) -> None:
        """Choose the faster way if all ranks timed enough steps. A step is as fast as its slowest rank."""
        eager, compiled = (
            self._of_all(Times(self._seconds(compiled=False), self._seconds(compiled=True))).amax(0).tolist()
        )
        if not (math.isnan(eager) or math.isnan(compiled)):
            how = (
                f"the slowest of {self.ranks.mesh.num_devices} ranks" if self.ranks.mesh.num_devices > 1 else "measured"
            )
            if self._is_first and math.isfinite(compiled):
                how += self.trials.disk.write(self._key(), Times(eager, compiled))
            self._choose(Times(eager, compiled), how)
        elif len(self._turns) == MOST_ROUNDS * len(ROUND):
            self.choice, self._turns = False, []
            self._say(f"runs eager: too few of {MOST_STEPS} steps ran backward to compare it with a compiled one")

    def _choose(self, times: Times, how: str) -> None:
        self.choice = self.trials.latest = times.compiled < (1 - MARGIN) * times.eager
        self._turns = []
        kind, other = ("compiled", "eager") if self.choice else ("eager", "compiled")
        chosen, others = (times.compiled, times.eager) if self.choice else (times.eager, times.compiled)
        self._say(f"runs {kind}: {chosen * 1e3:.4g} ms, {other} {others * 1e3:.4g} ms, {how}")

    def _say(self, what: str) -> None:
        if self._is_first:
            print(f"shardwise: the step of {self.trials.name} {what}", file=sys.stderr)

    def _seconds(self, *, compiled: bool) -> float:
        """Return the median seconds of a step on this rank; NaN if too few were timed."""
        if compiled and self._failed:
            return math.inf
        kinds = ROUND * (len(self._turns) // len(ROUND))
        timed = [t for t, kind in zip(self._turns, kinds, strict=True) if t.is_complete and kind == compiled]
        seconds = [turn.watch.seconds for turn in timed if turn.watch is not None]
        return median(seconds) if len(seconds) >= LEAST_TIMED else math.nan

    def _of_all(self, times: Times) -> torch.Tensor:
        """Gather the times of the placement's ranks: [ranks, 2]."""
        row = torch.tensor([times.eager, times.compiled], dtype=torch.float64, device=wire_device(self.device))
        return self.ranks.gather_from_all(row, "whether to run compiled").cpu()

    def _key(self) -> Mapping[str, str]:
        from torch._inductor import config

        settings = (config.codegen_config(), torch.get_float32_matmul_precision(), torch.backends.cudnn.version())
        return {
            "program": program_digest(self.program),
            "device": _device_name(self.device),
            "torch": torch.__version__,
            "shardwise": sys.modules["shardwise"].__version__,  # not imported here: it is a later layer
            "settings": str(settings),
        }


@dataclass
class CompiledVariant(Generic[_Variant]):
    """The compiled variant of a step, made by ``make`` on first use. ``trial``: decides whether it runs (None: always);
    ``variant``: None before it is made and after it is dropped."""

    make: Callable[[], _Variant]
    trial: CompileTrial | None = None
    variant: _Variant | None = None

    def begin(self) -> tuple[_Variant | None, TimedStep]:
        """Begin a training step: return (the compiled variant or None for eager, its timer)."""
        if self.trial is None:
            self.variant = self.variant or self.make()
            return self.variant, TimedStep(compiled=True)
        turn = self.trial.begin()
        if turn.compiled and self.variant is None:
            try:
                self.variant = self.make()
            except Exception as error:
                self.trial.cannot_compile(error)
        if self.trial.choice is False:
            self.variant = None
        return (self.variant if turn.compiled else None), turn

    @property
    def is_preferred(self) -> bool:
        """Return whether an untimed step runs compiled."""
        return self.trial is None or self.trial.is_preferred

    @property
    def is_on_trial(self) -> bool:
        return self.trial is not None and self.trial.choice is None


def program_digest(program: RankProgram) -> str:
    """Hash what a program computes and sends. Equal in every process, and unaffected by source line numbers."""
    text = "\n".join(
        [str(program.spmd.mesh), *map(_text, program.forward), "backward", *map(_text, program.backward)]
        + [f"{name} {form}" for name, form in program.forms.items()]
        + [str((program.rank, program.saved, program.delivered, program.mutations))]
    )
    return hashlib.sha256(text.encode()).hexdigest()


def _text(instruction: Instruction) -> str:
    entries = (
        f"{entry.name}={getattr(instruction, entry.name)}" for entry in fields(instruction) if entry.name != "origin"
    )
    return re.sub(r" at 0x[0-9a-f]+", "", f"{type(instruction).__name__} {' '.join(entries)}")


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"


__all__ = [
    "MOST_STEPS",
    "CompileBenchmark",
    "CompileTrial",
    "CompiledVariant",
    "Stopwatch",
    "TimedStep",
    "program_digest",
]
