"""Where the time of a training step goes, contender beside contender.

Counts (operators, collectives, calls of Python functions) repeat exactly; milliseconds carry the machine's noise, and
what is traced is slower than what is not: operators are timed under torch.profiler, Python functions and the waiting
for collectives under cProfile, the whole step under neither. Contenders take turns here too, and of every time the
median over the steps is taken, so that a step interrupted by another program does not count.
"""

from __future__ import annotations

import cProfile
import pstats
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Group
from rich.table import Table
from torch import Tensor
from torch.utils._pytree import tree_leaves

from shardwise.dispatch_mode import DispatchMode

Times = dict[str, tuple[float, float]]  # name -> (calls per step, milliseconds of its own per step)
OPERATORS = ("aten::", "shardwise::")
COLLECTIVES = "<torch._C._distributed_c10d."  # what these built-in functions start, and wait for


@dataclass(frozen=True, slots=True)
class StepProfile:
    """A step of this rank. ``milliseconds``, ``page_faults`` (fresh memory, which the kernel clears): of the untraced
    step; ``collectives``: kind -> (count, bytes)."""

    milliseconds: float
    page_faults: float
    operators: Times
    functions: Times
    collectives: Mapping[str, tuple[int, int]]

    @property
    def operator_milliseconds(self) -> float:
        return sum(milliseconds for _, milliseconds in self.operators.values())

    @property
    def collective_milliseconds(self) -> float:
        return sum(own for name, (_, own) in self.functions.items() if name.startswith(COLLECTIVES))

    @property
    def other_milliseconds(self) -> float:
        return self.milliseconds - self.operator_milliseconds - self.collective_milliseconds

    @property
    def num_operators(self) -> float:
        return sum(calls for calls, _ in self.operators.values())

    @property
    def num_python_calls(self) -> float:
        return sum(calls for name, (calls, _) in self.functions.items() if not name.startswith("<"))


class _Collectives(DispatchMode):
    """Counts collectives, and the bytes of the whole message of each."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, tuple[int, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            sizes = [leaf.nbytes for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
            count, num_bytes = self.found.get(func._opname, (0, 0))
            self.found[func._opname] = count + 1, num_bytes + max(sizes, default=0)
        return func(*args, **(kwargs or {}))


def profile_steps(
    steps: Mapping[str, Callable[[Tensor, Tensor], Tensor]], batch: tuple[Tensor, Tensor], num_steps: int
) -> dict[str, StepProfile]:
    """Profile every contender; all ranks call this together, each gets its own."""
    collectives = {}
    for name, step in steps.items():
        with _Collectives() as mode:
            step(*batch)
        collectives[name] = mode.found
    seconds: dict[str, list[float]] = defaultdict(list)
    page_faults: dict[str, list[int]] = defaultdict(list)
    operators: dict[str, list[Times]] = defaultdict(list)
    functions: dict[str, list[Times]] = defaultdict(list)
    for index in range(num_steps):
        for name, step in list(steps.items())[:: 1 if index % 2 else -1]:
            dist.barrier()
            start, faults = time.perf_counter(), getrusage(RUSAGE_SELF).ru_minflt
            step(*batch)
            seconds[name].append(time.perf_counter() - start)
            page_faults[name].append(getrusage(RUSAGE_SELF).ru_minflt - faults)
            dist.barrier()
            with cProfile.Profile() as profile:
                step(*batch)
            functions[name].append(_functions(profile))
            dist.barrier()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as traced:
                step(*batch)
            operators[name].append(_operators(traced))
    return {
        name: StepProfile(
            1e3 * median(seconds[name]),
            median(page_faults[name]),
            _medians(operators[name]),
            _medians(functions[name]),
            collectives[name],
        )
        for name in steps
    }


def _medians(times: Sequence[Times]) -> Times:
    """Of every name, the median calls and milliseconds."""
    names = dict.fromkeys(name for own in times for name in own)
    found = {name: [own.get(name, (0.0, 0.0)) for own in times] for name in names}
    return {name: (median(calls for calls, _ in own), median(spent for _, spent in own)) for name, own in found.items()}


def _operators(profile: torch.profiler.profile) -> Times:
    return {
        event.key: (event.count, event.self_cpu_time_total / 1e3)
        for event in profile.key_averages()
        if event.key.startswith(OPERATORS)
    }


def _functions(profile: cProfile.Profile) -> Times:
    """Python functions as ``folder/file.py:name`` and collectives as ``<name>``. Other built-in functions are left out:
    their time is that of operators."""
    times: Times = {}
    stats: Any = pstats.Stats(profile)
    for (file, _, function), (_, calls, own_seconds, _, _) in stats.stats.items():
        if file == "~":
            name = f"<{function.strip('<>').split(' ')[-1]}>"
            if not name.startswith(COLLECTIVES):
                continue
        else:
            name = f"{'/'.join(Path(file).parts[-2:])}:{function}"
        before = times.get(name, (0.0, 0.0))
        times[name] = before[0] + calls, before[1] + 1e3 * own_seconds
    return times


# -- printing ----------------------------------------------------------------------------------------------------------


def profile_table(title: str, profiles: Mapping[str, StepProfile], num_rows: int = 14) -> Group:
    """Two contenders side by side: what the step consists of, and the rows in which they differ most."""
    (name, first), (other, second) = profiles.items()
    whole = _table(f"{title}: a step of rank 0", "", name, other)
    _line(whole, "step, ms", first.milliseconds, second.milliseconds)
    _line(whole, "  in operators, ms", first.operator_milliseconds, second.operator_milliseconds)
    _line(whole, "  in collectives, ms", first.collective_milliseconds, second.collective_milliseconds)
    _line(whole, "  the rest (Python, autograd), ms", first.other_milliseconds, second.other_milliseconds)
    _line(whole, "page faults", first.page_faults, second.page_faults)
    _line(whole, "operators", first.num_operators, second.num_operators)
    _line(whole, "calls of Python functions", first.num_python_calls, second.num_python_calls)
    for kind in sorted(first.collectives.keys() | second.collectives.keys()):
        one, two = (p.collectives.get(kind, (0, 0)) for p in (first, second))
        _line(whole, f"{kind}, count", one[0], two[0])
        _line(whole, f"{kind}, KiB", one[1] / 1024, two[1] / 1024)
    return Group(
        whole,
        _differences("operators", name, other, first.operators, second.operators, num_rows),
        _differences("Python functions and collectives", name, other, first.functions, second.functions, num_rows),
    )


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title)
    for index, heading in enumerate((*headings, "difference")):
        table.add_column(heading, justify="right" if index else "left", no_wrap=True)
    return table


def _line(table: Table, what: str, one: float, two: float) -> None:
    table.add_row(what, f"{one:.1f}", f"{two:.1f}", f"{two - one:+.1f}")


def _differences(what: str, name: str, other: str, first: Times, second: Times, num_rows: int) -> Table:
    """The names whose own time differs most."""
    table = Table(title=f"{what}: calls and milliseconds of a step, by difference")
    for index, heading in enumerate((what, f"{name}: calls", "ms", f"{other}: calls", "ms", "difference")):
        table.add_column(heading, justify="right" if index else "left", no_wrap=True)
    nothing = (0.0, 0.0)
    pairs = {key: (first.get(key, nothing), second.get(key, nothing)) for key in first.keys() | second.keys()}
    ordered = sorted(pairs.items(), key=lambda item: -abs(item[1][1][1] - item[1][0][1]))
    for key, (one, two) in ordered[:num_rows]:
        table.add_row(
            key, f"{one[0]:.1f}", f"{one[1]:.2f}", f"{two[0]:.1f}", f"{two[1]:.2f}", f"{two[1] - one[1]:+.2f}"
        )
    return table
