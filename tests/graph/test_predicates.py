"""Values over (query, key) positions that are worked out before a graph runs: random expressions, known masks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.graph.capture import capture
from shardwise.graph.positions import evaluate_known_values
from shardwise.graph.predicates import Abstract, Intervals, KnownTensor, PositionSum

LEAST = torch.finfo(torch.float32).min


def dense(x: Abstract) -> Tensor:
    if isinstance(x, KnownTensor):
        return x.tensor

    def along(values: Tensor, dim: int) -> Tensor:
        return values.reshape([-1 if d - len(x.shape) == dim else 1 for d in range(len(x.shape))])

    if isinstance(x, PositionSum):
        total = along(x.of_query, x.query) + along(x.of_key, x.key)
        return (total.abs() if x.absolute else total).to(x.dtype).expand(x.shape)
    keys = along(torch.arange(x.seen.num_keys), x.key)
    inside = (keys >= along(x.seen.lo, x.query)) & (keys < along(x.seen.hi, x.query))
    return torch.where(inside, x.on, x.off).expand(x.shape)


class Draws:
    """Random choices by arithmetic: a model that reads Python's generators is captured several times."""

    def __init__(self, seed: int) -> None:
        self.state = seed

    def random(self) -> float:
        self.state = (self.state + 0x9E3779B97F4A7C15) % 2**64  # splitmix64
        mixed = (self.state ^ (self.state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % 2**64
        return (mixed ^ (mixed >> 31)) / 2**64

    def randint(self, least: int, most: int) -> int:
        return least + int(self.random() * (most - least + 1))

    def choice(self, options: Sequence[Any]) -> Any:
        return options[self.randint(0, len(options) - 1)]


class Expressions(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.number = seed
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> list[Tensor]:
        random = Draws(self.number)
        queries = random.choice([1, 2, 5, 6])
        keys = random.choice([1, 2, 5, 6]) if random.random() < 0.5 else queries
        q, k = torch.arange(queries)[:, None], torch.arange(keys)[None, :]
        if (shape := random.random()) < 0.6:
            q, k = q[None, None], k[None, None]
        if shape < 0.3:
            q, k = q.expand(2, 1, queries, 1), k.expand(2, 1, 1, keys)
        values: dict[torch.dtype, list[Tensor]] = {torch.int64: [q, k, q - k, k - q], torch.bool: [], torch.float32: []}
        for _ in range(random.randint(4, 16)):
            make = random.choice((whole, truth, truth, truth, real))
            if make is real and not values[torch.bool]:
                continue
            made = make(random, values, (queries, keys))
            made = seen_otherwise(random, made) if random.random() < 0.25 else made
            if made.numel():
                values[made.dtype].append(made)
        return [x * self.weight, *(made for kind in values.values() for made in kind)]


def fitting(random: Draws, pool: list[Tensor], shape: tuple[int, ...]) -> Any:
    def fits(other: tuple[int, ...]) -> bool:
        ends = zip(reversed(shape), reversed(other), strict=False)
        return all(a == b or 1 in (a, b) for a, b in ends)

    chosen = [t for t in pool if fits(tuple(t.shape))]
    return random.choice(chosen) if chosen else None


def whole(random: Draws, values: dict[torch.dtype, list[Tensor]], sizes: tuple[int, int]) -> Tensor:
    t, n = random.choice(values[torch.int64]), random.randint(-3, 7)
    other = fitting(random, values[torch.int64], t.shape)
    of = {
        "add": lambda: t + n,
        "subtract": lambda: n - t,
        "multiply": lambda: t * random.choice([-1, 2, 0]),
        "negate": lambda: -t,
        "absolute": lambda: t.abs(),
        "divide": lambda: t // max(1, abs(n)),
        "remainder": lambda: t % max(1, abs(n)),
        "sum": lambda: torch.add(t, other, alpha=random.choice([1, -1, 2])),
        "clamp": lambda: t.clamp(min=n),
    }
    return of[random.choice(list(of))]()


def truth(random: Draws, values: dict[torch.dtype, list[Tensor]], sizes: tuple[int, int]) -> Tensor:
    known = values[torch.bool]
    if random.random() < 0.4 or not known:
        compare = random.choice([torch.lt, torch.le, torch.gt, torch.ge, torch.eq, torch.ne])
        t = random.choice(values[torch.int64])
        other: Any = fitting(random, values[torch.int64], t.shape) if random.random() < 0.6 else random.randint(-3, 6)
        result: Tensor = compare(t, other)
        return result
    a = random.choice(known)
    b = fitting(random, known, a.shape)
    of = {
        "and": lambda: a & b,
        "or": lambda: a | b,
        "not": lambda: ~a,
        "logical_and": lambda: torch.logical_and(a, b),
        "logical_xor": lambda: torch.logical_xor(a, b),
        "equal": lambda: a == b,
        "tril": lambda: torch.tril(a, random.randint(-2, 2)),
        "full": lambda: torch.ones(sizes, dtype=torch.bool).triu(random.randint(-2, 2)),
    }
    return of[random.choice(list(of))]()


def real(random: Draws, values: dict[torch.dtype, list[Tensor]], sizes: tuple[int, int]) -> Tensor:
    chosen = random.choice(values[torch.bool])
    if random.random() < 0.4 or not values[torch.float32]:
        return torch.where(chosen, 0.0, random.choice([-torch.inf, -1e9, LEAST]))
    a = random.choice(values[torch.float32])
    b = fitting(random, values[torch.float32], a.shape)
    fill = fitting(random, values[torch.bool], a.shape)
    n = random.choice([0.0, 1.0, -torch.inf, LEAST, 2.0])
    of = {
        "add": lambda: a + b,
        "multiply": lambda: a * n,
        "invert": lambda: 1.0 - a,
        "fill": lambda: a if fill is None else a.masked_fill(fill, n),
        "cast": lambda: chosen.to(torch.float32),
        "triu": lambda: torch.full(sizes, n).triu(random.randint(-1, 2)),
        "minimum": lambda: torch.minimum(a, b),
        "where": lambda: a if fill is None else torch.where(fill, a, 1.0),
    }
    return of[random.choice(list(of))]()


def seen_otherwise(random: Draws, t: Tensor) -> Tensor:
    of = (
        lambda: t[None],
        lambda: t.unsqueeze(1),
        lambda: t.transpose(-1, -2),
        lambda: t[..., 1:, :],
        lambda: t[..., :3],
        lambda: t.expand(3, *t.shape),
        lambda: t.reshape(1, *t.shape),
        lambda: t[..., ::2, :],
    )
    return random.choice(of)()


def check_expressions(seeds: range) -> Counter[str]:
    """How many values of each kind were worked out; all equal to what the operators give."""
    kinds: Counter[str] = Counter()
    for seed in seeds:
        model, x = Expressions(seed), torch.ones(1)
        captured = capture(model, (x,))
        names = [output.name for output in captured.graph.outputs][1:]
        known = evaluate_known_values(captured.graph, set(names), captured.constants)
        for name, expected in zip(names, model(x)[1:], strict=True):
            kinds[type(known.get(name)).__name__] += 1
            if name in known:
                found = dense(known[name])
                torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True, msg=f"seed {seed}: {name}")
    return kinds


def test_random_expressions_over_positions_are_what_their_operators_give():
    kinds = check_expressions(range(50))
    assert kinds["IntervalSelect"] > 40
    assert kinds["PositionSum"] > 40
    assert kinds["KnownTensor"] > 200
    assert kinds["NoneType"] < sum(kinds.values()) / 3


@pytest.mark.long
def test_thousands_of_random_expressions_over_positions_are_what_their_operators_give():
    kinds = check_expressions(range(1000, 2500))
    assert kinds["IntervalSelect"] > 1000


def intervals(*bounds: tuple[int, int], num_keys: int = 6) -> Intervals:
    lo, hi = zip(*bounds, strict=True)
    return Intervals.of(torch.tensor(lo), torch.tensor(hi), num_keys)


def test_intervals_that_would_be_two_pieces_are_no_intervals():
    middle = intervals((2, 4))
    assert middle.complement() is None
    assert middle.every().without(middle) is None
    assert middle.union(intervals((5, 6))) is None
    assert middle.union(intervals((4, 6))).equals(intervals((2, 6)))
    assert middle.union(intervals((0, 0))).equals(middle)
    assert intervals((0, 4)).complement().equals(intervals((4, 6)))
    assert middle.without(intervals((0, 6))).equals(intervals((0, 0)))
    assert middle.without(intervals((3, 5))).equals(intervals((2, 3)))
    assert intervals((4, 2), (-3, 9)).equals(intervals((0, 0), (0, 6)))
