"""Search for an order of a pipeline's actions for given stages, with the shortest step that can be found.

The orders of ``torch.distributed.pipelining`` are made for stages that take equally long. Here the order is searched,
from the seconds of every stage's forward, input and weight part, of its messages, and from the bytes that a micro-batch
keeps until its weight part is done.

*Construction.* Pipeline ranks are simulated together (list scheduling). A free rank takes, of the forwards and input
parts that have their inputs, the one of the highest priority. If there is none, it fills the time with weight parts,
for which no action waits. A forward waits until its rank has room for it and for the later stages of the rank. So the
micro-batch that is the furthest can always end, which makes room.

*Improvement.* Priorities come from a few numbers (``_Policy``), of which many are tried, and from the positions in
known orders. Then single priorities and the numbers are changed at random, and what is not worse is kept. The number of
tries is fixed, not the time: the same stages get the same order on every machine.

*Bound.* Of each rank: Jackson's preemptive schedule (J. R. Jackson 1955; J. Carlier, "The one-machine sequencing
problem", 1982) of its actions, each with the least time before it can begin and the least time that follows it. No
order takes less, however much memory there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heappop, heappush
from itertools import pairwise, product
from math import inf
from random import Random

from shardwise.costs.pipeline_simulation import Action, Kind, Order, StageSeconds, simulate_pipeline
from shardwise.search.constants import MAX_ORDER_ACTIONS, MAX_ORDER_TRIES, ORDER_ROUNDING, ORDER_WORTH_MEMORY

_KINDS: tuple[Kind, ...] = ("forward", "input", "weight")
_FORWARD, _INPUT, _WEIGHT = range(3)


@dataclass(frozen=True)
class OrderProblem:
    """The stages to be ordered. ``place_of``: stage -> pipeline rank; ``kept``: of every stage, the bytes of a
    micro-batch from its forward until its weight part is done; ``room``: of every rank, the bytes for these."""

    stages: tuple[StageSeconds, ...]
    place_of: tuple[int, ...]
    num_micro_batches: int
    kept: tuple[float, ...]
    room: tuple[float, ...]

    @property
    def num_places(self) -> int:
        return len(self.room)

    @cached_property
    def sends(self) -> list[float]:
        """The seconds of a message from every stage to the next, or back."""
        ends = [*self.place_of[1:], self.place_of[-1]]
        places = zip(self.stages, self.place_of, ends, strict=True)
        return [0.0 if here == there else stage.send for stage, here, there in places]

    @cached_property
    def stages_at(self) -> list[tuple[int, ...]]:
        """The stages of every pipeline rank."""
        places = range(self.num_places)
        return [tuple(stage for stage, at in enumerate(self.place_of) if at == place) for place in places]

    @cached_property
    def updates(self) -> list[float]:
        return [sum(self.stages[stage].update for stage in stages) for stages in self.stages_at]

    @cached_property
    def needs(self) -> list[float]:
        """Bytes that a forward needs: for itself and for all later stages of its pipeline rank."""
        places = enumerate(self.place_of)
        return [sum(self.kept[later] for later in self.stages_at[place] if later >= stage) for stage, place in places]

    @cached_property
    def seconds(self) -> list[tuple[float, float, float]]:
        return [(stage.forward, stage.input, stage.weight) for stage in self.stages]

    @cached_property
    def tails(self) -> tuple[list[float], list[float]]:
        """Per stage, the seconds from the start of a forward, and of an input part, to the micro-batch's end."""
        count = len(self.stages)
        back = [0.0] * count
        passed = self.stages[0].weight
        for stage in range(count):
            passed += self.stages[stage].input
            back[stage] = passed
            passed += self.sends[stage]
        ahead = [0.0] * count
        passed = back[-1]
        for stage in reversed(range(count)):
            passed += self.stages[stage].forward
            ahead[stage] = passed
            passed += self.sends[stage - 1] if stage else 0.0
        return ahead, back

    def peaks(self, order: Order) -> tuple[float, ...]:
        """Return the most bytes that every pipeline rank keeps at once."""
        peaks = []
        for actions in order:
            kept = most = 0.0
            for action in actions:
                kept += self.kept[action.stage] * {"forward": 1, "weight": -1, "backward": -1}.get(action.kind, 0)
                most = max(most, kept)
            peaks.append(most)
        return tuple(peaks)


@dataclass(frozen=True)
class SolvedOrder:
    """An order. ``seconds``: of the simulated step; ``bound``: no order of these stages takes less."""

    order: Order
    seconds: float
    bound: float


def solve_order(work: OrderProblem, known: Sequence[Order] = ()) -> SolvedOrder:
    """Return the fastest order that is found within the room. ``known``: orders to begin from, of the same stages and
    pipeline ranks. The result is not slower than those of them that fit the room. Raises ValueError if none fits."""
    bound = least_seconds(work)
    places = range(work.num_places)
    fitting = [order for order in known if all(p <= room for p, room in zip(work.peaks(order), work.room, strict=True))]
    best: tuple[float, Order] | None = None
    if fitting:
        known_peaks = [work.peaks(order) for order in fitting]
        usual = replace(work, room=tuple(max(peaks[place] for peaks in known_peaks) for place in places))
        best = min(
            ((simulate_pipeline(order, work.stages).seconds, order) for order in fitting), key=lambda timed: timed[0]
        )
        best = _searched(usual, fitting, best, bound)
    if best is None or best[0] > bound * (1 + ORDER_ROUNDING):
        roomy = _searched(work, [] if best is None else [best[1]], None, bound)
        if roomy is not None and (best is None or roomy[0] < ORDER_WORTH_MEMORY * best[0]):
            best = roomy
    if best is None:
        raise ValueError("no order of these stages fits the memory")
    return SolvedOrder(best[1], best[0], min(bound, best[0]))  # their sums round differently


@dataclass(frozen=True)
class _Policy:
    """Preferences of a free pipeline rank. ``depth``: weight of the seconds that follow at least; ``age``: of the
    number of micro-batches that come later; ``forward``, ``late``: advantage of forwards, and of those of later stages
    on a rank, in seconds; ``patience``: a wait of less than this share of a weight part is not filled with it;
    ``filled``: the share of the room that is used."""

    depth: float
    age: float
    forward: float
    late: float
    patience: float
    filled: float = 1.0

    def near(self, random: Random, unit: float) -> _Policy:
        """Return another policy, in which some numbers differ. ``unit``: the seconds of an action."""

        def moved(value: float, by: float) -> float:
            return value + random.gauss(0.0, by) if random.random() < 0.6 else value

        return _Policy(
            moved(self.depth, 0.3),
            moved(self.age, 0.3 * unit),
            moved(self.forward, 2 * unit),
            moved(self.late, 2 * unit),
            max(0.0, moved(self.patience, 0.3)),
            min(1.0, max(0.2, moved(self.filled, 0.1))),
        )


# Per stage and micro-batch: what is added to the priorities of its forward and of its input part.
_Bumps = list[list[tuple[float, float]]]


def _searched(
    work: OrderProblem, known: Sequence[Order], best: tuple[float, Order] | None, bound: float
) -> tuple[float, Order] | None:
    """Return the fastest order of many within the room, or ``best`` if none is faster."""
    random = Random(0)
    unit = max(stage.of(kind) for stage in work.stages for kind in _KINDS) or 1.0
    none: _Bumps = [[(0.0, 0.0)] * work.num_micro_batches for _ in work.stages]
    much = 4.0 * len(work.stages) * unit
    starts = [
        (_Policy(depth, age * unit, forward, late, patience), none)
        for depth, age, forward, late, patience in product(
            (0.0, 1.0), (0.0, 1.0), (-much, 0.0, much), (0.0, unit, much), (1e-9, 0.5, 1.0)
        )
    ]
    starts += [
        (_Policy(0.0, 0.0, 0.0, 0.0, patience), _positions(work, order, unit))
        for order in known
        for patience in (0.0, 1.0)
    ]
    least = inf if best is None else best[0]
    current, seconds = starts[0], inf
    enough = bound * (1 + ORDER_ROUNDING)
    tries = min(MAX_ORDER_TRIES, MAX_ORDER_ACTIONS // (3 * len(work.stages) * work.num_micro_batches) + 1)
    for number in range(len(starts) + tries):
        if least <= enough:
            break
        if number < len(starts):
            candidate = starts[number]
        else:
            policy, bumps = current
            if random.random() < 0.5:
                candidate = policy.near(random, unit), bumps
            else:
                candidate = policy, _bumped(bumps, random, 4 * unit)
        attempt = _Construction(work, *candidate)
        taken = attempt.run()
        if taken <= seconds:
            current, seconds = candidate, taken
        if taken < least * (1 - ORDER_ROUNDING):
            least, best = taken, (taken, attempt.order())
    return best


def _positions(work: OrderProblem, order: Order, unit: float) -> _Bumps:
    """Return priorities that reproduce an order: what comes earlier is preferred."""
    bumps = [[[0.0, 0.0] for _ in range(work.num_micro_batches)] for _ in work.stages]
    for actions in order:
        for position, action in enumerate(actions):
            if action.kind != "weight":
                kind = _FORWARD if action.kind == "forward" else _INPUT
                bumps[action.stage][action.micro_batch][kind] = -position * unit
    return [[(forward, back) for forward, back in of_stage] for of_stage in bumps]


def _bumped(bumps: _Bumps, random: Random, by: float) -> _Bumps:
    changed = [list(of_stage) for of_stage in bumps]
    for _ in range(random.choice((1, 4, 20))):
        of_stage = changed[random.randrange(len(changed))]
        micro_batch = random.randrange(len(of_stage))
        forward, back = of_stage[micro_batch]
        step = random.gauss(0.0, by)
        of_stage[micro_batch] = (forward + step, back) if random.random() < 0.5 else (forward, back + step)
    return changed


class _Construction:
    """An order under construction. Every stage and kind takes micro-batches in order; ``done``: how many per stage and
    kind; ``arrivals``: per stage and kind (forward, input) the known times at which the inputs of each are there."""

    def __init__(self, work: OrderProblem, policy: _Policy, bumps: _Bumps) -> None:
        self.work, self.policy, self.bumps = work, policy, bumps
        self.room = [room * policy.filled * (1 + ORDER_ROUNDING) for room in work.room]
        self.done = [[0, 0, 0] for _ in work.stages]
        self.arrivals: list[tuple[list[float], list[float]]] = [([], []) for _ in work.stages]
        self.arrivals[0][_FORWARD].extend([0.0] * work.num_micro_batches)
        self.free, self.kept = [0.0] * work.num_places, [0.0] * work.num_places
        self.actions: list[list[tuple[int, int, int]]] = [[] for _ in range(work.num_places)]
        self.events = [(0.0, place) for place in range(work.num_places)]

    def run(self) -> float:
        work, events = self.work, self.events
        while events:
            now, place = heappop(events)
            if now < self.free[place]:
                continue
            chosen, wakes = self._choose(place, now)
            if chosen is not None:
                self._take(place, now, *chosen)
            elif wakes < inf:
                heappush(events, (wakes, place))
        if sum(map(len, self.actions)) < 3 * len(work.stages) * work.num_micro_batches:
            return inf
        return max(map(sum, zip(self.free, self.work.updates, strict=True)))

    def order(self) -> Order:
        return tuple(
            tuple(Action(stage, _KINDS[kind], number) for stage, kind, number in actions) for actions in self.actions
        )

    def _choose(self, place: int, now: float) -> tuple[tuple[int, int] | None, float]:
        """Return the stage and kind that a free pipeline rank takes, or when there may be one."""
        policy, tails = self.policy, self.work.tails
        best, highest, wakes = None, -inf, inf
        first = self.work.stages_at[place][0]
        for stage in self.work.stages_at[place]:
            done, arrivals = self.done[stage], self.arrivals[stage]
            has_room = self.kept[place] + self.work.needs[stage] <= self.room[place]
            for kind in (_INPUT, _FORWARD) if has_room else (_INPUT,):
                number = done[kind]
                if number >= len(arrivals[kind]):
                    continue
                if arrivals[kind][number] > now:
                    wakes = min(wakes, arrivals[kind][number])
                    continue
                priority = policy.depth * tails[kind][stage] - policy.age * number + self.bumps[stage][number][kind]
                if kind == _FORWARD:
                    priority += policy.forward + (policy.late if stage > first else 0.0)
                if priority > highest:
                    best, highest = (stage, kind), priority
        if best is None:
            best = self._filler(place, wakes - now)
        return best, wakes

    def _filler(self, place: int, wait: float) -> tuple[int, int] | None:
        """Return the oldest weight part of a pipeline rank, if the wait is long enough for it."""
        ready = [stage for stage in self.work.stages_at[place] if self.done[stage][_WEIGHT] < self.done[stage][_INPUT]]
        if not ready:
            return None
        stage = min(ready, key=lambda candidate: (self.done[candidate][_WEIGHT], -candidate))
        return (stage, _WEIGHT) if wait >= self.policy.patience * self.work.seconds[stage][_WEIGHT] else None

    def _take(self, place: int, now: float, stage: int, kind: int) -> None:
        self.actions[place].append((stage, kind, self.done[stage][kind]))
        self.done[stage][kind] += 1
        end = now + self.work.seconds[stage][kind]
        self.free[place] = end
        heappush(self.events, (end, place))
        if kind == _WEIGHT:
            self.kept[place] -= self.work.kept[stage]
            return
        if kind == _FORWARD:
            self.kept[place] += self.work.kept[stage]
        is_turn = kind == _FORWARD and stage == len(self.work.stages) - 1
        target = stage if is_turn else stage + 1 if kind == _FORWARD else stage - 1
        if target < 0:
            return
        arrival = end + (0.0 if is_turn else self.work.sends[min(stage, target)])
        self.arrivals[target][_INPUT if is_turn else kind].append(arrival)
        there = self.work.place_of[target]
        heappush(self.events, (max(arrival, self.free[there]), there))


def least_seconds(work: OrderProblem) -> float:
    """Return a lower bound on the seconds of any order, whatever the memory."""
    # A micro-batch goes through a chain of actions: forward of all stages, then their input parts back.
    last = len(work.stages) - 1
    chain = [(stage, _FORWARD) for stage in range(last + 1)] + [(stage, _INPUT) for stage in range(last, -1, -1)]
    lasts = [work.stages[stage].of(_KINDS[kind]) for stage, kind in chain]
    gaps = [0.0 if a[0] == b[0] else work.sends[min(a[0], b[0])] for a, b in pairwise(chain)]
    end = work.stages[0].weight + work.updates[work.place_of[0]]
    heads = _heads(lasts, gaps, 0.0, work.num_micro_batches)
    mirrored = _heads(lasts[::-1], gaps[::-1], end, work.num_micro_batches)
    tails = [of_action[::-1] for of_action in mirrored[::-1]]
    least = 0.0
    for place in range(work.num_places):
        jobs: list[tuple[float, float, float]] = []
        for position, (stage, kind) in enumerate(chain):
            if work.place_of[stage] != place:
                continue
            seconds, update = work.stages[stage], work.updates[place]
            for head, tail in zip(heads[position], tails[position], strict=True):
                jobs.append((head, lasts[position], max(tail, update)))
                if kind == _INPUT:
                    jobs.append((head + lasts[position], seconds.weight, update))
        least = max(least, _preemptive(jobs))
    return least


def _heads(lasts: Sequence[float], gaps: Sequence[float], begin: float, count: int) -> list[list[float]]:
    """Return, for every action of the chain and each of ``count`` equal micro-batches in order, the least time before
    it begins: as many micro-batches have gone through each earlier action by then, one after another."""
    ready = [begin] * count
    heads = []
    for position, seconds in enumerate(lasts):
        heads.append(ready)
        before = gaps[position] if position < len(gaps) else 0.0
        ends, end = [], -inf
        for earliest in ready:
            end = max(end, earliest) + seconds
            ends.append(end + before)
        ready = ends
    return heads


def _preemptive(jobs: Sequence[tuple[float, float, float]]) -> float:
    """Return the seconds of Jackson's preemptive schedule on one machine: of the jobs (time before, seconds, time
    after) that may run at a time, the one with the longest time after it runs."""
    waiting: list[list[float]] = []
    upcoming = sorted(jobs)
    now = longest = 0.0
    at = 0
    while at < len(upcoming) or waiting:
        if not waiting:
            now = max(now, upcoming[at][0])
        while at < len(upcoming) and upcoming[at][0] <= now:
            heappush(waiting, [-upcoming[at][2], upcoming[at][1]])
            at += 1
        tail, left = waiting[0]
        until = upcoming[at][0] if at < len(upcoming) else inf
        if now + left <= until:
            heappop(waiting)
            now += left
            longest = max(longest, now - tail)
        else:
            waiting[0][1] -= until - now
            now = until
    return longest
