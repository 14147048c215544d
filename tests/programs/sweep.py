"""More random programs than the test suite runs: ``make sweep``, or ``python -m programs.sweep --programs 5000`` in
tests/."""

from __future__ import annotations

import argparse
from collections import Counter

from programs.building import program_of_sample, random_program
from programs.running import TOLERANCE, run
from rules.samples import SAMPLES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=1000, help="random programs of several operators")
    parser.add_argument("--rounds", type=int, default=1, help="runs of every operator sample")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    cells: Counter[tuple[str, str]] = Counter()
    features: Counter[str] = Counter()
    count = comparisons = failed = 0
    worst = 0.0
    trials = [(f"program {s}", random_program, s, s) for s in range(options.seed, options.seed + options.programs)]
    trials += [
        (f"sample {i} round {r}", lambda s: program_of_sample(SAMPLES[s]), i, options.seed + 1000 * r + i)
        for r in range(options.rounds)
        for i, sample in enumerate(SAMPLES)
        if not sample.unspecified
    ]
    for name, make, argument, seed in trials:
        outcome = run(make(argument), seed)
        count, comparisons = count + 1, comparisons + outcome.comparisons
        cells, features, worst = cells + outcome.cells, features + outcome.features, max(worst, outcome.error)
        if not outcome.ok:
            failed += 1
            print(f"{name}, choices {seed}: error {outcome.error:.3g} at {outcome.where}, {outcome.collectives_match=}")
    print(f"{count} programs, {comparisons} comparisons, worst relative error {worst:.3g} (tolerance {TOLERANCE:g})")
    print("conversions by cell:", ", ".join(f"{a}-{b} {n}" for (a, b), n in sorted(cells.items())))
    print("values and operators:", ", ".join(f"{name} {n}" for name, n in sorted(features.items())))
    print(f"{failed} failed")
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
