"""Predicted against published seconds of training, family by family: ``make bench-published-runs``.

``--data`` is a file of published runs (``published_runs.json``: a list of objects with ``family``). A row is priced
with its own settings (``published_prices.py``). Of a family, per hardware and software, one factor (the median of
measured / predicted) is taken from a quarter of the groups (equal model, hardware and length); errors, order and
coverage are those of the other groups.

The interval is the factor's: nine of ten runs lie in it if logarithms of measured / predicted spread as in that
quarter, which counts by its groups beside ``PRIOR`` groups with the spread ``SPREAD``, that of all families together.

What a row leaves open is assumed (``published_defaults.py``): of the settings that fit, the row has the middle of
those with its software's defaults (where none of these fits: with what it recomputes next), and its interval reaches
from the fastest of all to the slowest.

Pairs in the wrong order are counted by the term that decides them, beside what the noise of measurements lets anyone
order (``published_noise.py``). A last line per family is the interval that the
other families alone give for it, without any factor of its own, and how many of its rows lie in it.

Peaks of memory are compared without a factor (``published_bytes.py``); the last column counts the runs that are said
not to fit, of those that ran out of memory and of those that ran. A row that cannot be priced is counted by its reason
(``published_rows.py``).
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import exp, log, sqrt
from pathlib import Path
from statistics import mean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from published_bytes import figure_of, measured_bytes, peak_bytes, room
from published_defaults import Setting, settings_of
from published_noise import Noise
from published_prices import approximated, seconds_of, terms_of, unplanned, unpriced
from published_rows import Row, by_setting, family_of, is_positive, once, read, setting_of

import shardwise as sw

SPREAD = 0.08  # standard deviation of a logarithm
PRIOR = 4  # groups
NINE_OF_TEN = 1.645  # standard deviations
UNDER = 0.02  # of a peak, that a prediction may be too low
AGREE = 0.05  # by which seconds of one setting may differ


def group_of(row: Row) -> tuple[Any, ...]:
    """Model, hardware and length of a row."""
    return row["arch"]["layers"], row["arch"]["hidden"], row["gpus"], row["gpu"], row["seq"]


@dataclass(frozen=True, slots=True)
class Found:
    """A published row and its predicted seconds. ``low``, ``high``: predicted seconds of all settings that it may have
    been run with, as parts of ``seconds``; ``assumed``: what of ``row``, one of them, was not stated."""

    row: Row
    seconds: float
    low: float = 1.0
    high: float = 1.0
    assumed: tuple[str, ...] = ()

    @property
    def ratio(self) -> float:
        """Measured / predicted."""
        return float(self.row["step_time_s"]) / self.seconds

    @property
    def group(self) -> tuple[Any, ...]:
        return group_of(self.row)

    @property
    def software(self) -> tuple[Any, ...]:
        """Hardware, and the software by its name; what follows the name are its settings."""
        named = re.match(r"[\w-]*", self.row["framework"])
        assert named is not None
        return self.row["gpu"], named[0], self.row.get("interconnect")


@dataclass(frozen=True, slots=True)
class Judged:
    """A row that no factor was taken from, with the factor of its hardware and software, and the interval."""

    found: Found
    factor: float
    low: float
    high: float

    @property
    def error(self) -> float:
        return abs(self.factor / self.found.ratio - 1)

    @property
    def inside(self) -> bool:
        return self.low / self.found.high <= self.found.ratio <= self.high / self.found.low


@dataclass(frozen=True, slots=True)
class Factor:
    """Measured / predicted of a hardware and software: ``center`` and ``spread`` of its logarithm, of so many
    ``rows`` in these ``groups`` (none: 1 and the spread of all families)."""

    center: float
    spread: float
    rows: int
    groups: frozenset[Any]

    @staticmethod
    def of(found: Sequence[Found], groups: Collection[Any]) -> Factor:
        """From the rows of these groups."""
        taken = [log(one.ratio) for one in found if one.group in groups]
        center = median(taken) if taken else 0.0
        own = mean((value - center) ** 2 for value in taken) if taken else 0.0
        spread = sqrt((PRIOR * SPREAD**2 + len(groups) * own) / (PRIOR + len(groups)))
        return Factor(center, spread, len(taken), frozenset(groups))

    @property
    def width(self) -> float:
        """Of the interval of nine of ten. The center is not known better than by so many groups (without any, as one
        would)."""
        return NINE_OF_TEN * self.spread * sqrt(1 + 1 / max(len(self.groups), 1))


def quarter(groups: Collection[Any], judged: Collection[Any] = ()) -> frozenset[Any]:
    """Every fourth group, where there are four of them, of those that are not ``judged``."""
    left = sorted((own for own in groups if own not in judged), key=str)
    return frozenset(left[::4]) if len(groups) >= 4 else frozenset()


def calibrated(found: Sequence[Found]) -> tuple[list[Judged], int]:
    """The rows of groups that no factor was taken from, and how many rows the factors come from."""
    judged, used = [], 0
    by_software: dict[Any, list[Found]] = defaultdict(list)
    for one in found:
        by_software[one.software].append(one)
    for rows in by_software.values():
        own = Factor.of(rows, quarter({one.group for one in rows}))
        used += own.rows
        low, high = exp(own.center - own.width), exp(own.center + own.width)
        judged += [Judged(one, exp(own.center), low, high) for one in rows if one.group not in own.groups]
    return judged, used


@dataclass(slots=True)
class Order:
    """Of plans of one group and batch: ``pairs``, how many of them are predicted in their order, the ``regrets`` of
    the plans that would be picked, and ``wrong``: terms (``terms_of``) -> pairs in the wrong order that it decides,
    because it differs most in the predicted direction. Of the wrong ones so many are ``close``: measured seconds differ
    by less than a standard deviation of ``noise``, which lets no prices order more than ``told`` pairs in the mean."""

    pairs: int = 0
    right: int = 0
    close: int = 0
    told: float = 0.0
    regrets: list[float] = field(default_factory=list)
    wrong: Counter[str] = field(default_factory=Counter)

    @staticmethod
    def of(judged: Iterable[Judged], noise: Noise) -> Order:
        """Compare all pairs. Runs of one setting are one plan, with the median of their seconds."""
        sets: dict[Any, list[Found]] = defaultdict(list)
        for one in judged:
            sets[one.found.group, one.found.row["global_batch"]].append(one.found)
        result = Order()
        for found in sets.values():
            predicted = {setting_of(one.row): one for one in found}
            plans = [
                (predicted[setting_of(runs[0])], median(float(row["step_time_s"]) for row in runs))
                for runs in by_setting(one.row for one in found)
            ]
            for (a, took_a), (b, took_b) in combinations(plans, 2):
                result.pairs += 1
                result.told += noise.told(a.row, b.row)
                if (a.seconds < b.seconds) == (took_a < took_b):
                    result.right += 1
                else:
                    slow, fast = (terms_of(one.row) for one in sorted((a, b), key=lambda one: -one.seconds))
                    result.wrong[max(slow, key=lambda term: slow[term] - fast[term])] += 1
                    result.close += abs(log(took_a / took_b)) < noise.of_pair(a.row, b.row)
            if len(plans) >= 2:
                picked = min(plans, key=lambda plan: plan[0].seconds)[1]
                result.regrets.append(picked / min(seconds for _, seconds in plans) - 1)
        return result


def by_others(found: Mapping[str, Sequence[Found]], family: str) -> tuple[float, float] | None:
    """Return the interval of nine of ten for measured / predicted of a family, from the others alone: around the median
    of their hardware and software, with the spread between these and within one. None without three of them."""
    units: dict[Any, list[float]] = defaultdict(list)
    for name, rows in found.items():
        for one in rows if name != family else ():
            units[name, one.software].append(log(one.ratio))
    if len(units) < 3:
        return None
    centers = [median(values) for values in units.values()]
    center = median(centers)
    between = mean((own - center) ** 2 for own in centers) * (1 + 1 / len(centers))
    within = mean(mean((value - median(values)) ** 2 for value in values) for values in units.values())
    width = NINE_OF_TEN * sqrt(between + within)
    return exp(center - width), exp(center + width)


def contradictions(rows: Iterable[Row]) -> list[str]:
    """Runs of one setting whose seconds differ by more than ``AGREE``, named."""
    said = []
    for runs in by_setting(rows):
        seconds = [float(row["step_time_s"]) for row in runs]
        if max(seconds) > (1 + AGREE) * min(seconds):
            names = ", ".join(str(row.get("id")) for row in runs)
            said.append(f"one setting, {min(seconds):.4g} to {max(seconds):.4g} s: {names}")
    return said


@dataclass(slots=True)
class Held:
    """Of runs whose memory is known: ``ratios`` of predicted and published peaks, and which ``figures`` these are; of
    those that ran and those that ran out of memory, how many there are and how many are said not to fit."""

    ratios: list[float] = field(default_factory=list)
    figures: set[str] = field(default_factory=set)
    ran: Counter[bool] = field(default_factory=Counter)
    out: Counter[bool] = field(default_factory=Counter)

    def add(self, row: Row, predicted: float) -> None:
        counted = self.out if row["status"] == "oom" else self.ran
        counted[predicted > room(row)] += 1
        if row["status"] == "ok" and is_positive(row.get("peak_mem_gib")):
            self.ratios.append(measured_bytes(row, predicted) / (row["peak_mem_gib"] * 2**30))
            self.figures.add(figure_of(row))

    def cells(self) -> list[str]:
        errors = [abs(ratio - 1) for ratio in self.ratios]
        error = (
            f"{'/'.join(sorted(self.figures))}: {median(errors):.1%}, {mean(errors):.1%} of {len(errors)}"
            if errors
            else ""
        )
        if low := sum(ratio < 1 - UNDER for ratio in self.ratios):
            error += f"; {low} more than {UNDER:.0%} under"
        out = f"{self.out[True]} of {self.out.total()}; " if self.out else ""
        ran = f"{self.ran[True]} of {self.ran.total()} that ran" if self.ran else ""
        return [error, out + ran]


@dataclass(slots=True)
class Priced:
    """What is known of a row: ``found`` (None: its seconds cannot be predicted or compared, for a ``reason``), and its
    ``row`` as it was priced, with its ``peak`` (None: not known)."""

    row: Row | None = None
    peak: float | None = None
    found: Found | None = None
    reason: str = ""


def priced(row: Any) -> Priced:
    """Price a row with what it states, and with what its software does where it states nothing."""
    settings = settings_of(row)
    possible = [setting for setting in settings if not unplanned(setting.row)]
    reason = unpriced(possible[0].row if possible else settings[0].row)
    if not possible:
        return Priced(reason=reason)
    try:
        fitting = fitting_of(possible)
        seconds = [] if reason else [seconds_of(setting.row) for setting, _ in fitting]
    except (sw.ShardwiseError, RuntimeError) as error:  # torch's, of tensors that are too large to be described
        return Priced(reason=reason or f"cannot be planned: {str(error).splitlines()[0]}")
    defaults = [i for i, (setting, _) in enumerate(fitting) if setting.is_default]
    if not defaults:  # what the software does next, where that does not fit
        first = fitting[0][0].row["recompute"]
        defaults = [i for i, (setting, _) in enumerate(fitting) if setting.row["recompute"] == first]
    if reason:
        setting, peak = fitting[min(defaults, key=lambda i: fitting[i][1])]
        return Priced(setting.row, peak, reason=reason)
    parts = [taken / setting.row["step_time_s"] for (setting, _), taken in zip(fitting, seconds, strict=True)]
    own = [parts[i] for i in defaults]
    middle = sqrt(min(own) * max(own))
    setting, peak = fitting[min(defaults, key=lambda i: abs(log(parts[i] / middle)))]
    found = Found(
        setting.row, middle * setting.row["step_time_s"], min(parts) / middle, max(parts) / middle, setting.assumed
    )
    return Priced(setting.row, peak, found)


def fitting_of(settings: Sequence[Setting]) -> list[tuple[Setting, float]]:
    """Return the settings whose peaks fit, with these; without any, the smallest. A row that states all of it ran."""
    peaks = [(setting, peak_bytes(setting.row)) for setting in settings]
    fitting = [(setting, peak) for setting, peak in peaks if peak <= room(setting.row)]
    return fitting or [min(peaks, key=lambda one: one[1])]


def report(family: str, rows: Sequence[Any], show: bool) -> list[Found]:
    """A line of what a family comes to, and lines of what it is not. Returns its rows with predicted seconds."""
    rows, repeated = once(rows)
    found, held, missing, notes = [], Held(), Counter[str](), Counter[str]()
    if repeated:
        missing["the same row again"] = repeated
    for row in rows:
        known = priced(row)
        if known.row is not None and known.peak is not None and known.row.get("status") in ("ok", "oom"):
            held.add(known.row, known.peak)
        if known.found is None:
            missing[known.reason] += 1
            continue
        one = known.found
        found.append(one)
        if text := approximated(one.row):
            notes[f"approximated: {text}"] += 1
        if fields := sorted({assumption.split()[0] for assumption in one.assumed}):
            notes[f"assumed: {', '.join(fields)}"] += 1
        if show:
            assumed = f" | {', '.join(one.assumed)}" if one.assumed else ""
            cells = [row.get("id"), f"{one.seconds:.3f} s", f"{one.row['step_time_s']:.3f} s", f"{1 / one.ratio:.3f}"]
            if one.low < one.high:
                cells[-1] += f" ({one.low / one.ratio:.3f}-{one.high / one.ratio:.3f})"
            print(f"|   {' | '.join(map(str, cells))}{assumed} |")
    raw = [1 / one.ratio for one in found]
    cells = [f"{len(found)} of {len(rows) + repeated}"]
    cells.append(f"{median(raw):.2f} ({min(raw):.2f}-{max(raw):.2f})" if raw else "")
    judged, used = calibrated(found)
    errors, inside = [one.error for one in judged], [one.inside for one in judged]
    noise = Noise.of([one.row for one in found])
    order = Order.of(judged, noise)
    cells.append(f"{median(errors):.1%}, {mean(errors):.1%} (factors from {used} rows)" if errors else "")
    cells.append(f"{order.right / order.pairs:.3f} of {order.pairs}" if order.pairs else "")
    cells.append(f"{mean(order.regrets):.1%}, most {max(order.regrets):.1%}" if order.regrets else "")
    cells.append(f"{mean(inside):.0%}" if inside else "")
    cells += held.cells()
    print(f"| {family} | {' | '.join(cells)} |", flush=True)
    empty = " |" * (len(cells) - 1)
    lines = [f"{count}: {text}" for text, count in notes.most_common()]
    lines += [f"not: {count}: {reason}" for reason, count in missing.most_common()]
    lines += [f"seconds: {shares}" for shares in (shares_of(found),) if shares]
    lines += [f"wrong order: {count}: decided by {term}" for term, count in order.wrong.most_common()]
    if order.pairs:
        lines.append(
            f"noise: {noise}; {order.close} of {order.wrong.total()} wrong pairs differ by less than it; with it no "
            f"prices order more than {order.told / order.pairs:.3f}"
        )
    lines += [f"contradict each other: {said}" for said in contradictions(one.row for one in found)]
    for note in lines:
        print(f"| {family} | {note} |{empty}")
    return found


def shares_of(found: Sequence[Found]) -> str:
    """Return what predicted steps go to: the mean share of every term of a hundredth and more."""
    shares: Counter[str] = Counter()
    for one in found:
        terms = terms_of(one.row)
        total = sum(terms.values()) * len(found)
        shares.update({name: seconds / total for name, seconds in terms.items()})
    return ", ".join(f"{name} {share:.0%}" for name, share in shares.most_common() if share >= 0.01)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="published_runs.json")
    parser.add_argument("--families", nargs="*", help="only these")
    parser.add_argument("--all", action="store_true", help="a line per row")
    options = parser.parse_args(arguments)
    families: dict[str, list[Any]] = defaultdict(list)
    skipped: Counter[str] = Counter()
    for row in read(options.data):
        family = family_of(row)
        if options.families and family not in options.families:
            continue
        if isinstance(row, Mapping) and "args" in row:  # another schema, whose seconds are not those of the hardware
            skipped[family] += 1
        else:
            families[family].append(row)
    print(
        "| family | rows priced | predicted / measured: median (range) | error with one factor: median, mean | pairs "
        "in order | regret: mean | in the 90 % interval | error of memory: median, mean | said not to fit: of those "
        "that ran out of memory |\n|---|---|---|---|---|---|---|---|---|"
    )
    found = {family: report(family, rows, options.all) for family, rows in families.items()}
    for family, rows in found.items():
        if rows and (interval := by_others(found, family)):
            low, high = interval
            inside = mean(low / one.high <= one.ratio <= high / one.low for one in rows)
            said = f"from other families alone: measured / predicted in {low:.2f}-{high:.2f}: {inside:.0%}"
            print(f"| {family} | {said} |{' |' * 7}")
    for family, count in skipped.items():
        reason = "times that differ by environment; memory: published_memory.py"
        print(f"| {family} | not: {count}: {reason} |{' |' * 7}")
    if not families and not skipped:
        print(f"no rows in {options.data}" + (f" of {', '.join(options.families)}" if options.families else ""))


if __name__ == "__main__":
    main()
