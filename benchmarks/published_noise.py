"""How much of the order of published runs any prices can tell (for ``published_runs.py``).

Of runs that differ in micro-batch and stages alone, the logarithm of a layer's seconds (of a step's passes and bubble)
is fitted by one effect of each micro-batch and one of each number of stages, as many constants as prices have reasons
to differ. What they leave, per degree of freedom, is the noise of a run; runs of one setting, repeated, are among it.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import erf, exp, hypot, log, sqrt

import torch
from published_rows import SETTING, Row, passes_of, setting_of

EFFECTS = ("micro_batch", "pp")
EXACT = 1e-3  # below this, noise is rounding


@dataclass(frozen=True, slots=True)
class Expected:
    """Of runs of a setting: ``center``, the logarithm of their fitted seconds, and ``spread``, its noise."""

    center: float
    spread: float


@dataclass(frozen=True, slots=True)
class Noise:
    """Of the runs of a family: what each setting is ``expected`` to take; ``free``: degrees of freedom of all fits;
    ``spread``: the noise of all, pooled; ``widest``: of one fit of three and more degrees of freedom, the most."""

    expected: Mapping[str, Expected]
    free: int
    spread: float
    widest: float

    @staticmethod
    def of(rows: Sequence[Row]) -> Noise:
        """Fit rows whose seconds are known. Rows with the same seconds of one setting are one run, quoted again."""
        sets: dict[str, dict[tuple[str, float], Row]] = defaultdict(dict)
        for row in rows:
            kept = [row.get(name) for name in SETTING if name not in (*EFFECTS, "dp")]
            sets[json.dumps(kept, sort_keys=True)][setting_of(row), row["step_time_s"]] = row
        fits = [_fitted(list(own.values())) for own in sets.values()]
        free = sum(own for _, _, own in fits)
        pooled = sqrt(sum(squares for _, squares, _ in fits) / free) if free else 0.0
        expected = {}
        for centers, squares, own in fits:
            spread = sqrt(squares / own) if own >= 3 else pooled
            expected |= {setting: Expected(center, spread) for setting, center in centers.items()}
        own_spreads = [sqrt(squares / own) for _, squares, own in fits if own >= 3]
        return Noise(expected, free, pooled, max(own_spreads, default=0.0))

    def of_pair(self, a: Row, b: Row) -> float:
        """The standard deviation of the logarithm of two runs' ratio."""
        return hypot(*(self.expected[setting_of(row)].spread for row in (a, b)))

    def told(self, a: Row, b: Row) -> float:
        """Return the chance that two runs are in the order of what their settings are expected to take."""
        apart = abs(self.expected[setting_of(a)].center - self.expected[setting_of(b)].center)
        noise = self.of_pair(a, b)
        return 0.5 * (1 + erf(apart / noise / sqrt(2))) if noise > EXACT else 1.0

    def __str__(self) -> str:
        if not self.free:
            return "no two runs tell it"
        widest = f", at most {exp(self.widest) - 1:.1%}" if self.widest else ""
        return f"{exp(self.spread) - 1:.1%} of a run{widest} ({self.free} degrees of freedom)"


def _fitted(rows: Sequence[Row]) -> tuple[dict[str, float], float, int]:
    """Return the logarithm of the fitted seconds by setting, the sum of squares that is left, and its degrees of
    freedom."""
    work = []
    for row in rows:
        passes = passes_of(row, row["micro_batch"], row["dp"]) + (row["pp"] - 1) / (row.get("vpp") or 1)
        work.append(log(passes * row["micro_batch"] / row["pp"]))
    names = sorted({(name, row[name]) for row in rows for name in EFFECTS})
    design = torch.tensor([[float(row[name] == value) for name, value in names] for row in rows], dtype=torch.float64)
    whole = [log(row["step_time_s"]) - own for row, own in zip(rows, work, strict=True)]
    given = torch.tensor(whole, dtype=torch.float64)
    fitted = design @ (torch.linalg.pinv(design) @ given)
    centers = {setting_of(row): float(fit) + own for row, fit, own in zip(rows, fitted, work, strict=True)}
    free = len(rows) - int(torch.linalg.matrix_rank(design))
    return centers, float(((given - fitted) ** 2).sum()) if free else 0.0, free
