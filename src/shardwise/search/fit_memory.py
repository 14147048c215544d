"""Choice of the least recomputation with which a plan fits: memory policies in the order of their cost.

If a model fits as it is, and the limit costs it next to nothing, nothing is recomputed. Otherwise every policy is
searched as a problem of its own, operators, mesh and storage together. Programs are built in the order of price, until
the next price exceeds a step that was found. A policy that recomputes more than a plan that fits, at no lower price, is
skipped. The fastest in the simulation is taken, after as many of its segments were eased as the limit allows. The bound
of such a plan holds for all policies: it is that of plans without recomputation and without a limit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heapify, heappop, heappush
from math import inf

from shardwise.errors import PlanError, problem
from shardwise.graph.segments import How, Segment
from shardwise.search.auto import MeshSearch
from shardwise.search.config import SearchConfig
from shardwise.search.constants import BINDING_LIMIT, FOLDED_STEP_ERROR, MIN_POLICIES_FOR_RATIO, PRICE_CUTOFF
from shardwise.search.cost_graph import BYTES, CostGraph
from shardwise.search.memory_policy import MemoryPolicy, Offload, blocks_of
from shardwise.search.planner import Planner, PlannerResult, SearchResult
from shardwise.search.ranking import CandidateRanking
from shardwise.search.recompute_spec import ReshardMode

# How the blocks of the model are recomputed (None: as it asks itself), the reshard mode of gathered parameters, and
# whether saved values of the blocks are offloaded.
MEMORY_POLICIES: tuple[tuple[How | None, ReshardMode, Offload], ...] = (
    (None, "held", "auto"),
    (None, "once", "auto"),
    ("gathers", "held", "auto"),
    ("gathers", "once", "auto"),
    ("cheap", "held", "auto"),
    ("cheap", "once", "auto"),
    ("cheap+gathers", "held", "auto"),
    ("cheap+gathers", "once", "auto"),
    (None, "again", "auto"),
    ("gathers", "again", "auto"),
    ("offload", "held", "auto"),
    ("offload", "once", "auto"),
    ("cheap", "again", "auto"),
    ("cheap+gathers", "again", "auto"),
    ("full", "held", "auto"),
    ("full", "once", "auto"),
    ("full", "again", "auto"),
    ("full", "again", "all"),
)
# The recomputed work of each policy that can be compared.
STRENGTH: dict[How | None, frozenset[str]] = {
    None: frozenset(),
    "gathers": frozenset(("messages",)),
    "cheap": frozenset(("kernels",)),
    "cheap+gathers": frozenset(("messages", "kernels")),
    "full": frozenset(("messages", "kernels", "products")),
}
# The policies that the last blocks may have instead, as far as the limit allows.
EASIER: dict[How, tuple[How, ...]] = {
    "full": ("cheap", "cheap+gathers"), "cheap+gathers": ("cheap", "gathers")
}  # fmt: skip
# Reshard modes in the order of what they repeat.
RESHARD_STRENGTH: dict[ReshardMode, int] = {"once": 0, "held": 1, "again": 2}


def fit_memory(
    planner: Planner, segments: Sequence[Segment], reshard_mode: ReshardMode | None = None, offload: Offload = "auto"
) -> PlannerResult:
    """Return the plan of the first policies that fit. ``segments``: those that the model asks for; ``reshard_mode``,
    ``offload``: the user's choices. If no policy fits (``ranking.excess``), return the plan that needs least. Nothing
    is offloaded if the device is the host. Raises PlanError if no price comes near a known step."""
    remaining = _memory_policies(planner, segments, reshard_mode, offload)
    weakest = next(remaining)
    policies = [weakest]
    bound = planner.bound_without_limit(weakest.costs)
    if weakest.price > BINDING_LIMIT * bound or weakest.answer.ranking.excess:
        policies = [weakest, *remaining]
        once = (
            policy
            for policy in policies
            if policy.how is None and policy.planner.settings.memory_policy.reshard_mode == "once"
        )
        bound = min([bound, *(planner.bound_without_limit(policy.costs) for policy in once)])
    fitting: list[_PolicyResult] = []
    refused: list[_PolicyResult] = []
    # Policies are considered in the order of their price. One is searched under the limit when its bound is the least
    # of all that are left.
    cutoff = planner.settings.known / _times(planner.settings)
    left = [
        (policy.least if len(policies) > 1 else 0.0, number, len(policies) == 1)
        for number, policy in enumerate(policies)
    ]
    heapify(left)
    while left:
        price, number, is_settled = heappop(left)
        policy = policies[number]
        if cutoff <= (least := _at_least(price, [*fitting, *refused])) < inf:
            if not fitting:
                raise _slower(least, planner.settings)
            break
        if fitting and price >= min(_seconds(other.answer.ranking) for other in fitting):
            break
        if policy.is_ruled_out(price, fitting):
            continue
        if is_settled:
            (refused if policy.answer.ranking.excess else fitting).append(policy)
        else:
            heappush(left, (policy.price, number, True))
    if not fitting:
        smallest = min(refused, key=lambda policy: policy.answer.ranking.best.num_bytes)
        return smallest.planner.planned(smallest.answer)
    eased: list[tuple[_PolicyResult, Planner, CandidateRanking]] = []
    for policy in sorted(fitting, key=lambda policy: _seconds(policy.answer.ranking)):
        least = _seconds(policy.answer.ranking) - (policy.price - bound)  # recomputing nothing saves no more
        fastest = min((_seconds(result) for _, _, result in eased), default=FOLDED_STEP_ERROR * cutoff)
        if least < fastest:
            eased += [(policy, *pair) for pair in _eased(policy, segments, fastest)]
    if not eased:
        raise _slower(min(_seconds(policy.answer.ranking) for policy in fitting), planner.settings)
    policy, easier, ranking = min(eased, key=lambda candidate: _seconds(candidate[2]))
    if _seconds(ranking) > FOLDED_STEP_ERROR * cutoff:
        raise _slower(_seconds(ranking), planner.settings)
    best = easier.planned(SearchResult(ranking, policy.answer.searches))
    if best.ranking.excess and planner.folded is not None:  # the estimate was too low
        return fit_memory(replace(planner, folded=None), segments, reshard_mode, offload)
    if len(policies) == 1:
        return best
    return replace(best, prediction=replace(best.prediction, bound=min(best.prediction.bound, bound)))


def _at_least(price: float, answered: Sequence[_PolicyResult]) -> float:
    """Return the estimated least step of a price, given policies whose steps were simulated: as far above its price as
    the nearest of these, within what is clear."""
    simulated = [policy.answer.ranking.best for policy in answered]
    ratios = [best.step.seconds / best.candidate.additive_price for best in simulated if best.step is not None]
    return price / PRICE_CUTOFF * max(1.0, min(ratios) if len(ratios) >= MIN_POLICIES_FOR_RATIO else 1.0)


def _times(settings: SearchConfig) -> int:
    """Return the least number of such micro-batches that a step runs one after the other."""
    return settings.passes * settings.together


def _slower(seconds: float, settings: SearchConfig) -> PlanError:
    """Return the error for steps of at least ``seconds`` per micro-batch."""
    step = seconds * _times(settings)
    return PlanError(problem(f"steps take about {step:.3g} s, and a plan with {settings.known:.3g} s is known"))


@dataclass(frozen=True, eq=False)
class _PolicyResult:
    """A policy with its searches. ``how``: what it does with the blocks; ``costs``: of all meshes."""

    planner: Planner
    how: How | None
    costs: Sequence[CostGraph]

    @cached_property
    def searches(self) -> tuple[Sequence[MeshSearch], Sequence[tuple[float, CostGraph]]]:
        """Return the searches of the meshes on which what adds up fits, and for the others the least bytes."""
        return self.planner.searches(self.costs)

    @cached_property
    def least(self) -> float:
        """Return a lower bound of its price."""
        return self.planner.least_seconds(self.costs)

    @cached_property
    def price(self) -> float:
        """Return the least additive price, or the seconds of copies to the host and back if these are longer; infinite
        if what adds up is too much."""
        done = [search for search in self.searches[0] if not search.outcome.stopped]
        return min((max(search.outcome.seconds, self._copies(search)) for search in done), default=inf)

    @property
    def least_that_fits(self) -> float:
        """Return the price of its cheapest plan, or of the one that is taken if that is too large."""
        ranking = self.answer.ranking
        is_cheapest = ranking.cheapest.num_bytes <= ranking.limit
        return (ranking.cheapest if is_cheapest else ranking.best).candidate.additive_price

    def _copies(self, search: MeshSearch) -> float:
        """Return the seconds of offloading and fetching: of the bytes by which a device would hold more without it."""
        settings, rate = self.planner.settings, self.planner.cluster.device.host_bandwidth
        if not settings.memory_policy.moves_to_host or not rate:
            return 0.0
        staying = replace(self.planner, settings=replace(settings, memory_policy=settings.memory_policy.on_device))
        more = staying.cost_graph(search.mesh).components(search.outcome.assignment) - search.outcome.components
        return 2 * float(more[BYTES]) / settings.in_flight / rate

    def is_ruled_out(self, price: float, fitting: Sequence[_PolicyResult]) -> bool:
        """Return whether it recomputes more than another, at no lower price than the least of the other's plans that
        are known to fit."""
        return any(self._recomputes_more(other) and price >= other.least_that_fits for other in fitting)

    def _recomputes_more(self, other: _PolicyResult) -> bool:
        """Return whether it recomputes at least what another does."""
        memory_policy, weaker = self.planner.settings.memory_policy, other.planner.settings.memory_policy
        if self.how not in STRENGTH or other.how not in STRENGTH or memory_policy.offloads != weaker.offloads:
            return False
        gathers = RESHARD_STRENGTH[memory_policy.reshard_mode] >= RESHARD_STRENGTH[weaker.reshard_mode]
        return STRENGTH[self.how].issuperset(STRENGTH[other.how]) and gathers

    @cached_property
    def answer(self) -> SearchResult:
        """Return the search result from the programs of the searches. Bytes that add up may be a few more than the
        peak, so that some that were refused fit."""
        return self.planner.answer_of(*self.searches)


def _memory_policies(
    planner: Planner, segments: Sequence[Segment], reshard_mode: ReshardMode | None, offload: Offload
) -> Iterator[_PolicyResult]:
    has_blocks = bool(blocks_of(planner.graph))
    decided = offload != "auto" or not planner.cluster.device.host_bandwidth
    for how, mode, moved in MEMORY_POLICIES:
        if (reshard_mode is not None and mode != reshard_mode) or (how is not None and not has_blocks):
            continue
        if mode == "once" and reshard_mode is None and planner.settings.passes == 1:  # the same as held
            continue
        if decided and (how == "offload" or moved != "auto"):
            continue
        memory_policy = MemoryPolicy.of(planner.graph, segments, how, mode, moved if offload == "auto" else offload)
        with_policy = replace(planner, settings=replace(planner.settings, memory_policy=memory_policy))
        yield _PolicyResult(with_policy, how, [with_policy.cost_graph(mesh) for mesh in with_policy.meshes])


def _eased(
    policy: _PolicyResult, segments: Sequence[Segment], fastest: float
) -> Iterator[tuple[Planner, CandidateRanking]]:
    """Yield a policy with as many of its last blocks eased as the limit allows, in every way that may be faster than
    ``fastest``."""
    ranking, planner = policy.answer.ranking, policy.planner
    if policy.how is None or ranking.best.step is None:
        yield planner, ranking
        return
    strong = planner.settings.memory_policy
    requested = {*segments}
    for weaker in EASIER.get(policy.how, ("none",)):  # by default the segment is kept
        eased = tuple(
            segment if segment in requested or segment.how == "none" else replace(segment, how=weaker)
            for segment in strong.segments
        )
        yield planner.eased(ranking, replace(strong, segments=eased), fastest)


def _seconds(ranking: CandidateRanking) -> float:
    """Return the seconds of a micro-batch, simulated if possible, otherwise as predicted."""
    return ranking.prediction.pass_seconds if ranking.best.step is None else ranking.best.step.seconds
