"""Search over memory policies for the fastest plan that fits.

The *price* of a policy is the least additive seconds of a micro-batch over all plans under that policy whose additive
bytes fit. Additive bytes are those that tables sum (``search.cost_graph``), without transients. ``fit_memory`` does:

1. Search the first policy, which recomputes nothing beyond what the model asks for. If it fits, and its price is within
   BINDING_LIMIT of the bound without a limit, take it.
2. Otherwise visit all policies in the order of price (best first). A heap first has a lower bound of each price. The
   price itself is searched when the bound is the least in the heap.
3. When a price is the least in the heap, build and simulate the programs of that policy. Stop if the next price is not
   below the fastest simulated step that fits. Skip a policy that recomputes more than one that fits, at no lower price.
4. Ease every policy that fits: recompute fewer of the last blocks, as far as the limit allows. Take the fastest.

The bound of the resulting plan holds for all policies, and for plans whose blocks have different ones
(``search.mixed_policies``). That of a plan that copies values to the host is the one without a limit: additive prices
have no copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heapify, heappop, heappush
from math import inf
from operator import itemgetter

from shardwise.errors import PlanError
from shardwise.graph.segments import Segment
from shardwise.layouts.mesh import Mesh
from shardwise.progress import STOPPED, has_stopped, stop_with
from shardwise.search.auto import MeshSearch
from shardwise.search.candidates import CandidateRanking
from shardwise.search.constants import (
    BINDING_LIMIT,
    CLEARLY_OVER_LIMIT,
    FOLDED_STEP_ERROR,
    MIN_POLICIES_FOR_RATIO,
    NUM_LEAST_POLICIES,
    PRICE_CUTOFF,
)
from shardwise.search.cost_graph import BYTES, CostGraph
from shardwise.search.memory_policy import MEMORY_POLICIES, REPEATS, MemoryPolicy, ReshardMode, blocks_of
from shardwise.search.mixed_policies import least_of_mixtures
from shardwise.search.planner import Planner, StagePlan
from shardwise.search.stored_program import SearchConfig


def fit_memory(planner: Planner, reshard_mode: ReshardMode | None = None) -> StagePlan:
    """Return the fastest plan of all memory policies that fits (see the module's docstring).

    Args:
        planner: The planner. The search ends where steps are clearly slower than ``settings.known``. Its memory policy
            has the segments that the model itself asks to recompute or offload, and the user's ``offload``: "auto" also
            tries to offload, unless the device shares the host's memory.
        reshard_mode: The user's choice when sharded parameters are gathered; None: every mode is tried.

    Returns:
        The plan. If no policy fits, it is the one that needs the fewest bytes (``ranking.excess`` is positive).

    Raises:
        PlanError: Every plan is estimated to be slower than ``settings.known``.
    """
    fitting: list[PolicyResult] = []
    remaining = memory_policies(planner, reshard_mode, fitting)
    weakest = next(remaining)
    policies = [weakest]
    bound = weakest.planner.bound_without_limit()
    if weakest.price > BINDING_LIMIT * bound or weakest.ranking.excess:
        policies = [weakest, *remaining]
        once = (
            policy
            for policy in policies
            if policy.memory_policy.recompute is None and policy.memory_policy.reshard_mode == "once"
        )
        bound = min([bound, *(policy.planner.bound_without_limit() for policy in once)])
    refused: list[PolicyResult] = []
    cutoff = planner.settings.known / _times(planner.settings)
    try:
        _settle(policies, fitting, refused, cutoff)
        if not fitting:
            smallest = min(refused, key=lambda policy: policy.ranking.best.num_bytes)
            return smallest.planner.planned(smallest.ranking)
        eased = _all_eased(fitting, planner.settings.memory_policy.segments, bound, cutoff)
    except STOPPED:
        stop_with(bool(fitting))
        fastest = min(fitting, key=lambda policy: _seconds(policy.ranking))
        eased = [(fastest.planner, fastest.ranking)]
    if not eased:
        raise _slower(min(_seconds(policy.ranking) for policy in fitting), planner.settings)
    easier, ranking = min(eased, key=lambda candidate: _seconds(candidate[1]))
    if _seconds(ranking) > FOLDED_STEP_ERROR * cutoff:
        raise _slower(_seconds(ranking), planner.settings)
    best = easier.planned(ranking)
    if best.excess(planner.limit) and planner.folded is not None:  # the memory estimated from few blocks was too low
        return fit_memory(replace(planner, folded=None), reshard_mode)
    if len(policies) == 1:
        return best
    assert best.prediction is not None, "it was chosen by price"
    is_stage = planner.graph.cotangents or planner.choosing.received  # of several: their bounds are not asked for
    if not (is_stage or best.memory_policy.moves_to_host or _seconds(ranking) > cutoff or has_stopped()):
        fits = [planner.limit, *(result.best.candidate.num_bytes for _, result in eased)]
        fits += [policy.ranking.best.candidate.num_bytes for policy in fitting]
        with suppress(*STOPPED):
            bound = max(bound, _least_of_mixtures(policies, ranking.search, best.memory_policy.reshard_mode, max(fits)))
    return best.with_bound(min(best.prediction.additive_price, bound))


def _least_of_mixtures(
    policies: Sequence[PolicyResult], search: MeshSearch, reshard_mode: ReshardMode, memory_bytes: float
) -> float:
    """Return a bound of the additive price of all plans that stay on the device, within some additive bytes: whatever
    policy each of their blocks has. ``search``, ``reshard_mode``: of the best plan, where the bound is likely least."""
    groups: dict[ReshardMode, list[PolicyResult]] = {}
    for policy in policies:
        if not policy.memory_policy.moves_to_host:
            groups.setdefault(policy.memory_policy.reshard_mode, []).append(policy)
    places = [
        (own[0].bounds[mesh], (mode != reshard_mode) + (mesh != search.mesh), own, mesh)
        for mode, own in groups.items()
        for mesh in own[0].bounds
    ]
    least = inf
    for without_limit, _, own, mesh in sorted(places, key=itemgetter(1)):
        if without_limit >= least:
            continue
        planners = [policy.planner for policy in own]
        least = min(least, max(without_limit, least_of_mixtures(planners, mesh, memory_bytes, least)))
    return least if least < inf else 0.0


def _settle(
    policies: Sequence[PolicyResult],
    fitting: list[PolicyResult],
    refused: list[PolicyResult],
    cutoff: float,
) -> None:
    """Search policies, best first, and add them to those that fit or are refused. ``cutoff``: seconds of a micro-batch
    of a plan that is known. Raises PlanError if all are slower."""
    # Entries are (seconds, number, is_settled). The seconds are a lower bound of the price of a policy at first, and
    # its price once it is settled. A policy is searched under the limit only when its bound is the least entry.
    left = [
        (policy.least if len(policies) > 1 else 0.0, number, len(policies) == 1)
        for number, policy in enumerate(policies)
    ]
    heapify(left)
    near: Sequence[PolicyResult] | None = None  # those of infinite price that may fit, once only such are left
    while left:
        price, number, is_settled = heappop(left)
        policy = policies[number]
        if price == inf and not fitting:
            near = _near_limit([policy, *(policies[other] for _, other, _ in left)], refused) if near is None else near
            if policy not in near:
                continue
        if cutoff <= (least := _at_least(price, [*fitting, *refused])) < inf:
            if not fitting:
                raise _slower(least, policy.planner.settings)
            break
        if fitting and price >= min(_seconds(other.ranking) for other in fitting):
            break
        if policy.is_ruled_out(price, fitting):
            continue
        if is_settled:
            (refused if policy.ranking.excess else fitting).append(policy)
        else:
            heappush(left, (policy.price, number, True))


def _near_limit(policies: Sequence[PolicyResult], refused: Sequence[PolicyResult]) -> Sequence[PolicyResult]:
    """Return the policies whose programs may fit although their additive bytes fit on no mesh, and for a refusal
    NUM_LEAST_POLICIES of the fewest bytes with those of as few, unless what was refused needs less."""
    ordered = sorted(policies, key=lambda policy: policy.least_bytes)
    least = min((policy.ranking.best.num_bytes for policy in refused), default=inf)
    least = min(least, ordered[:NUM_LEAST_POLICIES][-1].least_bytes)
    return [p for p in ordered if p.least_bytes <= max(least, CLEARLY_OVER_LIMIT * p.planner.limit)]


def _all_eased(
    fitting: Sequence[PolicyResult], segments: Sequence[Segment], bound: float, cutoff: float
) -> list[tuple[Planner, CandidateRanking]]:
    """Return the policies that fit, eased, without those that cannot be the fastest."""
    eased: list[tuple[Planner, CandidateRanking]] = []
    for policy in sorted(fitting, key=lambda policy: _seconds(policy.ranking)):
        least = _seconds(policy.ranking) - (policy.price - bound)  # easing saves no more than price - bound
        fastest = min((_seconds(result) for _, result in eased), default=FOLDED_STEP_ERROR * cutoff)
        if least < fastest:
            eased += _eased(policy, segments, fastest)
    return eased


def least_memory(planner: Planner, reshard_mode: ReshardMode | None = None) -> StagePlan:
    """Return a plan of about the least memory of all memory policies, whatever the limit. Arguments as ``fit_memory``.

    Programs are built for the NUM_LEAST_POLICIES policies of the fewest additive bytes.
    """
    without = replace(planner, settings=replace(planner.settings, memory_bytes=0.0, known=inf))
    policies = list(memory_policies(without, reshard_mode))
    policies.sort(key=lambda policy: policy.least_bytes)
    least = min(policies[:NUM_LEAST_POLICIES], key=lambda policy: policy.ranking.best.num_bytes)
    return least.planner.planned(least.ranking)


def _at_least(price: float, answered: Sequence[PolicyResult]) -> float:
    """Return an estimate of the least step of plans with a price.

    This is the price, scaled by the least ratio of step to price among the policies simulated so far. The ratio counts
    only if it is above 1, and if enough policies were simulated. PRICE_CUTOFF allows for steps below their price.
    """
    simulated = [policy.ranking.best for policy in answered]
    pairs = [(best.step, best.candidate.additive_price) for best in simulated]
    ratios = [step.seconds / own for step, own in pairs if step is not None and own]
    return price / PRICE_CUTOFF * max(1.0, min(ratios) if len(ratios) >= MIN_POLICIES_FOR_RATIO else 1.0)


def _times(settings: SearchConfig) -> int:
    """Return the least number of micro-batch times of a stage that a step takes."""
    return settings.passes * settings.together


def _slower(seconds: float, settings: SearchConfig) -> PlanError:
    step = seconds * _times(settings)
    return PlanError(f"steps take about {step:.3g} s, and a plan with {settings.known:.3g} s is known")


@dataclass(frozen=True, eq=False)
class PolicyResult:
    """A memory policy and the results of its searches, each computed on first use. ``planner``: the planner with the
    policy in ``settings.memory_policy``; ``weaker``: the policy that gathers parameters as often and repeats nothing
    else, which takes no more seconds; ``fitting``: the policies that fit so far, which the ``ranking`` has to beat."""

    planner: Planner
    weaker: PolicyResult | None = None
    fitting: Sequence[PolicyResult] = ()

    @property
    def memory_policy(self) -> MemoryPolicy:
        return self.planner.settings.memory_policy

    @cached_property
    def searches(self) -> tuple[Sequence[MeshSearch], Sequence[tuple[float, CostGraph]]]:
        """Return the searches of the meshes on which a plan's additive bytes fit.

        The second list has, for every other mesh, its least additive bytes and its cost graph.
        """
        return self.planner.searches(self.bounds if self.planner.limit else None)

    @cached_property
    def bounds(self) -> Mapping[Mesh, float]:
        """Return, for every mesh, a lower bound of its price, without the memory limit."""
        return self.planner.least_seconds({} if self.weaker is None else self.weaker.bounds)

    @property
    def least(self) -> float:
        """Return a lower bound of ``price``, without the memory limit."""
        return min(self.bounds.values())

    @cached_property
    def price(self) -> float:
        """Return the least seconds of a micro-batch: of the additive price, or of copies to the host if longer.

        Infinite if the additive bytes fit on no mesh.
        """
        done = [search for search in self.searches[0] if not search.outcome.stopped]
        return min((max(search.outcome.seconds, self._copies(search)) for search in done), default=inf)

    @property
    def least_bytes(self) -> float:
        """Return the least additive bytes over the meshes on which nothing fits."""
        return min((num_bytes for num_bytes, _ in self.searches[1]), default=inf)

    @property
    def least_that_fits(self) -> float:
        ranking = self.ranking
        is_cheapest = ranking.cheapest.num_bytes <= ranking.limit
        return (ranking.cheapest if is_cheapest else ranking.best).candidate.additive_price

    def _copies(self, search: MeshSearch) -> float:
        """Return the seconds that a micro-batch takes to copy its offloaded bytes to the host and back.

        The offloaded bytes are the difference to the same assignment without offloading.
        """
        settings, rate = self.planner.settings, self.planner.cluster.device.host_bandwidth
        if not self.memory_policy.moves_to_host or not rate:
            return 0.0
        staying = self.planner.under(self.memory_policy.on_device)
        more = staying.cost_graph(search.mesh).components(search.outcome.assignment) - search.outcome.components
        return 2 * float(more[BYTES]) / settings.in_flight / rate

    def is_ruled_out(self, price: float, fitting: Sequence[PolicyResult]) -> bool:
        """Return whether another policy that fits recomputes no more, and has a plan that fits at no higher price."""
        return any(
            self.memory_policy.repeats_no_less(other.memory_policy) and price >= other.least_that_fits
            for other in fitting
        )

    @cached_property
    def ranking(self) -> CandidateRanking:
        known = min((_seconds(policy.ranking) for policy in self.fitting), default=inf)
        return self.planner.ranking_of(*self.searches, known)


def memory_policies(
    planner: Planner, reshard_mode: ReshardMode | None, fitting: Sequence[PolicyResult] = ()
) -> Iterator[PolicyResult]:
    has_blocks, requested = bool(blocks_of(planner.graph)), planner.settings.memory_policy
    weakest: dict[ReshardMode, PolicyResult] = {}  # when parameters are gathered -> the policy that repeats nothing
    decided = requested.offload != "auto" or not planner.cluster.device.host_bandwidth
    for policy in MEMORY_POLICIES:
        how, mode = policy.recompute, policy.reshard_mode
        if (reshard_mode is not None and mode != reshard_mode) or (how is not None and not has_blocks):
            continue
        if mode == "once" and reshard_mode is None and planner.settings.passes == 1:  # same as "held"
            continue
        if decided and (how == "offload" or policy.offloads):
            continue
        moved = policy.offload if requested.offload == "auto" else requested.offload
        own = planner.under(MemoryPolicy.of(planner.graph, requested.segments, how, mode, moved))
        result = PolicyResult(own, weakest.get(mode), fitting)
        if how is None:
            weakest[mode] = result
        yield result


def _eased(
    policy: PolicyResult, segments: Sequence[Segment], fastest: float
) -> Iterator[tuple[Planner, CandidateRanking]]:
    """Yield the planner and ranking of a policy with as many of its last blocks eased as the limit allows.

    There is one for each weaker way in ``REPEATS``. One that cannot be faster than ``fastest`` is yielded unchanged.
    """
    ranking, planner, strong = policy.ranking, policy.planner, policy.memory_policy
    if strong.recompute is None or ranking.best.step is None:
        yield planner, ranking
        return
    requested = {*segments}
    for weaker in REPEATS.get(strong.recompute, REPEATS[None]).easier:  # "none" keeps the values of the segment
        eased = tuple(
            segment if segment in requested or segment.how == "none" else replace(segment, how=weaker)
            for segment in strong.segments
        )
        yield planner.eased(ranking, replace(strong, segments=eased), fastest)


def _seconds(ranking: CandidateRanking) -> float:
    """Return the seconds of a micro-batch: simulated if the model was, otherwise predicted by its price."""
    return ranking.prediction.pass_seconds if ranking.best.step is None else ranking.best.step.seconds
