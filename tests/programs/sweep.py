"""More random programs than the test suite runs, with windows, splits by hand and priced routes too: ``make sweep``, or
``python -m programs.sweep --programs 5000`` in tests/."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product

from programs.building import STEPS, WINDOWED, Program, program_of_sample, random_program
from programs.running import TOLERANCE, Outcome, run
from rules import test_odd_inputs
from rules.samples import SAMPLES


@dataclass(frozen=True)
class Trial:
    """A program, and a run of it under random choices of its strategies and storage."""

    name: str
    build: Callable[[], Program]
    seed: int
    by_hand: bool = False
    priced: bool = False

    def run(self) -> Outcome:
        kept = 0.5 if self.seed % 2 else 1.0  # of what backward reads
        return run(self.build(), self.seed, by_hand=self.by_hand, priced=self.priced, kept=kept)


def trials(num_programs: int, num_windowed: int, rounds: int, first_seed: int) -> Iterator[Trial]:
    """Random programs; those with windows, also split by hand and with routes that are chosen by price; inputs that are
    not friendly; every sample of an operator."""
    for seed in range(first_seed, first_seed + num_programs):
        yield Trial(f"program {seed}", partial(random_program, seed), seed)
    for by_hand, priced in product((False, True), repeat=2):
        for seed in range(first_seed, first_seed + num_windowed):
            name = f"program with windows {seed}, {by_hand=}, {priced=}"
            yield Trial(name, partial(random_program, seed, WINDOWED * 2 + STEPS), seed, by_hand, priced)
    for name, case in test_odd_inputs.CASES.items():
        for seed in range(first_seed, first_seed + 5 * rounds):
            yield Trial(f"odd inputs, {name}", partial(test_odd_inputs.program_of, *case), seed)
    for round_number, (i, sample) in product(range(rounds), enumerate(SAMPLES)):
        if not sample.unspecified:
            seed = first_seed + 1000 * round_number + i
            yield Trial(f"sample {i} round {round_number}", partial(program_of_sample, sample), seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=1000, help="random programs of several operators")
    parser.add_argument("--windowed", type=int, default=60, help="random programs with windows, each in four ways")
    parser.add_argument(
        "--rounds", type=int, default=2, help="runs of every operator sample; 5 x as many of odd inputs"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    cells: Counter[tuple[str, str]] = Counter()
    features: Counter[str] = Counter()
    count = comparisons = failed = 0
    worst = 0.0
    for trial in trials(options.programs, options.windowed, options.rounds, options.seed):
        outcome = trial.run()
        count, comparisons = count + 1, comparisons + outcome.comparisons
        cells, features, worst = cells + outcome.cells, features + outcome.features, max(worst, outcome.error)
        if not outcome.ok:
            failed += 1
            print(
                f"{trial.name}, choices {trial.seed}: error {outcome.error:.3g} at {outcome.where}, "
                f"{outcome.collectives_match=}"
            )
    print(f"{count} programs, {comparisons} comparisons, worst relative error {worst:.3g} (tolerance {TOLERANCE:g})")
    print("conversions by cell:", ", ".join(f"{a}-{b} {n}" for (a, b), n in sorted(cells.items())))
    print("values and operators:", ", ".join(f"{name} {n}" for name, n in sorted(features.items())))
    print(f"{failed} failed")
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
