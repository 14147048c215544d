"""Predicted against published seconds of training, family by family: ``make bench-published-runs``.

``--data`` is a file of published runs (``published_runs.json``: a list of objects with ``family``). A row is priced
with its own settings (``published_prices.py``). Of a family, per hardware and software, one factor (the median of
measured / predicted) is taken from a quarter of the groups (equal model, hardware and length); errors, order and
coverage are those of the other groups.

The interval is the factor's: nine of ten runs lie in it if logarithms of measured / predicted spread as in that
quarter, which counts by its groups beside ``PRIOR`` groups with the spread ``SPREAD``, that of all families together.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import exp, log, sqrt
from pathlib import Path
from statistics import mean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from published_prices import Row, approximated, seconds_of, unpriced

SPREAD = 0.08  # standard deviation of a logarithm
PRIOR = 4  # groups
NINE_OF_TEN = 1.645  # standard deviations


def group_of(row: Row) -> tuple[Any, ...]:
    """Model, hardware and length of a row."""
    return row["arch"]["layers"], row["arch"]["hidden"], row["gpus"], row["gpu"], row["seq"]


@dataclass(frozen=True, slots=True)
class Found:
    """A published row and its predicted seconds."""

    row: Row
    seconds: float

    @property
    def ratio(self) -> float:
        """Measured / predicted."""
        return float(self.row["step_time_s"]) / self.seconds

    @property
    def group(self) -> tuple[Any, ...]:
        return group_of(self.row)

    @property
    def software(self) -> tuple[Any, ...]:
        return self.row["gpu"], self.row["framework"], self.row["interconnect"]


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
        return self.low <= self.found.ratio <= self.high


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


def order(judged: Iterable[Judged]) -> tuple[int, int, list[float]]:
    """Pairs of plans of one group and batch, how many of them are predicted in their order, and per set the regret of
    the plan that would be picked."""
    sets: dict[Any, list[Found]] = defaultdict(list)
    for one in judged:
        sets[one.found.group, one.found.row["global_batch"]].append(one.found)
    pairs = right = 0
    regrets = []
    for rows in sets.values():
        if len(rows) < 2:
            continue
        for a, b in combinations(rows, 2):
            pairs += 1
            right += (a.seconds < b.seconds) == (a.row["step_time_s"] < b.row["step_time_s"])
        picked = min(rows, key=lambda one: one.seconds)
        regrets.append(picked.row["step_time_s"] / min(one.row["step_time_s"] for one in rows) - 1)
    return pairs, right, regrets


def report(family: str, rows: Sequence[Row], show: bool) -> None:
    found, missing, approximately = [], Counter[str](), Counter[str]()
    for row in rows:
        if reason := unpriced(row):
            missing[reason] += 1
        else:
            found.append(Found(row, seconds_of(row)))
            if said := approximated(row):
                approximately[said] += 1
            if show:
                one = found[-1]
                print(f"|   {row['id']} | {one.seconds:.3f} s | {row['step_time_s']:.3f} s | {1 / one.ratio:.3f} |")
    raw = [1 / one.ratio for one in found]
    cells = [f"{len(found)} of {len(rows)}"]
    cells.append(f"{median(raw):.2f} ({min(raw):.2f}-{max(raw):.2f})" if raw else "")
    judged, used = calibrated(found)
    errors, inside = [one.error for one in judged], [one.inside for one in judged]
    pairs, right, regrets = order(judged)
    cells.append(f"{median(errors):.1%}, {mean(errors):.1%} (factors from {used} rows)" if errors else "")
    cells.append(f"{right / pairs:.3f} of {pairs}" if pairs else "")
    cells.append(f"{mean(regrets):.1%}, most {max(regrets):.1%}" if regrets else "")
    cells.append(f"{mean(inside):.0%}" if inside else "")
    print(f"| {family} | {' | '.join(cells)} |", flush=True)
    for said, count in approximately.most_common():
        print(f"| {family} | approximated: {count}: {said} | | | | | |")
    for reason, count in missing.most_common():
        print(f"| {family} | not: {count}: {reason} | | | | | |")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="published_runs.json")
    parser.add_argument("--families", nargs="*", help="only these")
    parser.add_argument("--all", action="store_true", help="a line per row")
    options = parser.parse_args(arguments)
    families: dict[str, list[Row]] = defaultdict(list)
    skipped: Counter[str] = Counter()
    for row in json.loads(options.data.read_text(encoding="utf-8")):
        if "step_time_s" not in row:  # another schema, whose seconds are not those of the hardware
            skipped[row["family"]] += 1
        elif not options.families or row["family"] in options.families:
            families[row["family"]].append(row)
    print(
        "| family | rows priced | predicted / measured: median (range) | error with one factor: median, mean | pairs "
        "in order | regret: mean | in the 90 % interval |\n|---|---|---|---|---|---|---|"
    )
    for family, rows in families.items():
        report(family, rows, options.all)
    for family, count in skipped.items():
        print(f"| {family} | not: {count}: times that differ by environment; memory: published_memory.py | | | | | |")


if __name__ == "__main__":
    main()
