"""Builds the cost graphs of a model on one mesh: the choices that are variables, and the tables of their prices.

Variables and the scopes of tables do not depend on the memory policy. Recomputation decides what some of the tables
hold, so the cost graph of another policy takes only a few look-ups (``Tables.priced``).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from hashlib import blake2b
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwise.costs.kernels import is_view
from shardwise.graph.ir import Op
from shardwise.layouts.choice import Choices
from shardwise.layouts.layout import Layout
from shardwise.layouts.routes import SHARDED, STATES, Floats, Ints, Routes
from shardwise.progress import check_deadline
from shardwise.search.constants import REGATHER_TRAFFIC, RESEND_TRAFFIC
from shardwise.search.cost_graph import (
    Components,
    CostGraph,
    FoldedView,
    OperatorVariable,
    ReceivedVariable,
    SharedVariable,
    StorageVariable,
    Variable,
)
from shardwise.search.domains import Domain, Domains
from shardwise.search.elimination import Scope
from shardwise.search.memory_policy import PricedPolicy

# The part of the memory policy that decides a table; equal parts mean equal tables.
How = tuple[bool, ...]


class CostTable(NamedTuple):
    """A table of the cost graphs. ``number``: of its content, the same for equal ones; ``how``: the part of the memory
    policy that decides it; ``table``: computes it from that and the policy, of which it may read what is the same for
    all tables (when parameters are gathered only if ``traffic``); ``transient``: as in ``CostGraph``; ``operators``:
    those whose recomputation ``how`` looks at."""

    scope: Scope
    number: int
    how: Callable[[PricedPolicy], How]
    table: Callable[[PricedPolicy, How], Components]
    transient: Callable[[], Floats] | None
    traffic: bool
    operators: tuple[str, ...]


class _ConversionCount(NamedTuple):
    """How often a micro-batch makes a conversion, by layouts. ``in_flight``: micro-batches that hold its result;
    ``share``: a micro-batch's share of what a step does once, which nothing hides; ``times``: how often it sends,
    beyond one in backward; ``sums``: ``larger_gradients`` of a parameter, in its stored dtype: its gradient adds up
    over the micro-batches in a larger layout than the stored one, which takes a step more seconds."""

    in_flight: int
    share: Floats | float
    times: Floats | float
    sums: tuple[Floats, Floats] | None


class Tables:
    """The cost graphs over some domains. ``fixed``: the choices of the user; ``taken``: the known layouts in which the
    next stage takes values."""

    def __init__(self, domains: Domains, fixed: Choices, taken: Mapping[str, Layout] | None = None) -> None:
        self.domains, self.graph = domains, domains.graph
        self.fixed, self.taken = fixed, taken or {}
        self.cost = CostGraph(domains)
        self.consumers = domains.consumers
        self.parameter = {s.value: s for s in self.graph.sources if s.kind == "parameter"}
        self._held: set[str] = set()  # results that their operators keep for their own backward, and views of these
        self.factors: list[CostTable] = []
        self._numbers: dict[Hashable, int] = {}
        self._longest: dict[Hashable, float] = {}
        self._made: dict[Hashable, Components] = {}
        self._components: dict[Hashable, Components] = {}
        self._transients: dict[int, Callable[[], Floats]] = {}
        for name in domains.received:
            self._receive(name)
        for op in domains.operators:
            check_deadline()
            for name in dict.fromkeys(op.operands):
                if name in self.parameter and name not in self.cost.home:
                    self._store(name)
            self._operator(op)
        for name in self.parameter:  # unused ones are stored, too
            if name not in self.cost.home:
                self._store(name)
        self._deliver()

    def priced(self, policy: PricedPolicy) -> CostGraph:
        """Return the cost graph under a policy."""
        cost = replace(self.cost, factors=[], kinds=[], transients={})
        kinds: dict[tuple[int, How], int] = {}
        for factor in self.factors:
            key = factor.number, factor.how(policy)
            kind = kinds.get(key)
            if kind is None:
                kind = kinds[key] = len(cost.kinds)
                cost.kinds.append(self.components_of(factor, policy, key[1]))
                if factor.transient is not None:
                    cost.transients[kind] = self._transients.setdefault(factor.number, cache(factor.transient))
            cost.factors.append((factor.scope, kind))
        return cost

    def components_of(self, factor: CostTable, policy: PricedPolicy, how: How) -> Components:
        """Return the components of a table under a policy, of which ``how`` is the part that decides it."""
        key = (factor.number, how), policy.reshard_mode if factor.traffic else "", policy.in_flight
        if key not in self._made:
            self._made[key] = self._interned(factor.table(policy, how))
        return self._made[key]

    def _interned(self, components: Components) -> Components:
        """Return the components that were made first of all that are equal: cost graphs tell tables by identity."""
        key = tuple([None if x is None else (x.shape, blake2b(x.tobytes()).digest()) for x in components])
        return self._components.setdefault(key, components)

    # -- variables -----------------------------------------------------------------------------------------------------

    def _add(self, variable: Variable) -> int:
        number = len(self.cost.variables)
        self.cost.variables.append(variable)
        self.cost.number[variable.kind, variable.name] = number
        return number

    def _store(self, name: str) -> None:
        domains, routes = self.domains, self.domains.routes(name)
        value, updated = self.graph.by_name[name], name in self.graph.updated
        nodes = sendable(routes)
        variable = self._add(StorageVariable(name, routes, nodes))

        def table(policy: PricedPolicy, how: How) -> Components:
            numel = routes.numel[nodes].astype(np.float64)
            seconds = numel * domains.prices.casts(value, 1.0, updated)
            if updated:
                seconds += [domains.prices.update(value, count) for count in numel.tolist()]
            return seconds, None, None, numel * domains.prices.resident_bytes_per_element(value, updated)

        dtypes = value.dtype, value.stored, value.reduced
        self._factor((variable,), ("store", id(routes), dtypes, updated, nodes.tobytes()), table)
        self._arrive(name, variable, nodes, traffic=True)

    def _receive(self, name: str) -> None:
        """Add a value of another stage, which arrives in any layout that is sharded or whole. Every device is sent what
        it has, and sends as much back; splitting the value pays as less is sent."""
        routes = self.domains.routes(name)
        nodes = sendable(routes)
        variable = self._add(ReceivedVariable(name, routes, nodes))

        def table(policy: PricedPolicy, how: How) -> Components:
            level = self.domains.prices.links.cluster.levels[-1]
            num_bytes = routes.numel[nodes].astype(np.float64) * routes.tensor.itemsize
            return 2 * num_bytes * level.shared_by / level.link_bandwidth(level.size), None, None, None

        self._factor((variable,), ("receive", id(routes), nodes.tobytes()), table)
        self._arrive(name, variable, nodes, traffic=False)

    def _arrive(self, name: str, variable: int, nodes: Ints, *, traffic: bool) -> None:
        self.cost.maker[name] = self.cost.home[name] = variable, nodes
        if len(self.consumers.get(name, ())) > 1:
            self._share(name, variable, nodes, traffic=traffic)

    def _fold(self, op: Op) -> bool:
        """Return whether the operator only renames the dims of its operand, so that a layout of one is a layout of the
        other and conversions cost the same before and after it. It then needs no variable."""
        domains, (name, *others) = self.domains, op.operands
        if others or op.name in self.fixed or len(op.results) != 1 or not is_view(op.target):
            return False
        if name in self.parameter:  # converted before the view it is traffic, which overlaps
            return False
        renamed = domains.renamed_codes(op)
        if renamed is None:
            return False
        home, nodes = self.cost.home[name]
        self.cost.folded.append(FoldedView(op.name, home, nodes))
        self._held.update(op.results if name in self._held else ())
        codes = renamed[domains.routes(name).codes[nodes]]
        self._arrive(op.results[0], home, domains.routes(op.results[0]).node(codes), traffic=False)
        return True

    def _operator(self, op: Op) -> None:
        if self._fold(op):
            return
        domain = self.domains.domain(op, self.fixed.get(op.name))
        variable = self._add(OperatorVariable(op.name, domain))

        def how_of(policy: PricedPolicy) -> How:
            return op.name in policy.operators, op.name in policy.offloaded

        def table(policy: PricedPolicy, how: How) -> Components:
            again, waits = how
            compute = domain.compute + domain.forward if again else domain.compute
            return domain.exposed, compute, None, None if again or waits else domain.kept * policy.in_flight

        transient = partial(self._worked_on, op, domain)
        self._factor((variable,), ("operator", id(domain)), table, how_of, transient, operators=(op.name,))
        for name in dict.fromkeys(name for name in op.operands if name in self.cost.home):
            self._edge(name, op, variable, domain)
        self._held.update(op.results[i] for i in domain.holds)
        for i, name in enumerate(op.results):
            nodes = domain.results[i]
            assert nodes is not None, f"{op.name}: {name} has no layouts"
            self._arrive(name, variable, nodes, traffic=False)

    def _share(self, name: str, maker: int, starts: Ints, *, traffic: bool) -> None:
        """Add the layout that the consumers of a value convert from: any that its producer or a consumer uses."""
        used = [starts]
        for op in self.consumers[name]:
            domain = self.domains.domain(op, self.fixed.get(op.name))
            used += [
                nodes
                for nodes, operand in zip(domain.operands, op.operands, strict=True)
                if operand == name and nodes is not None
            ]
        nodes = np.unique(np.concatenate(used))
        routes = self.domains.routes(name)
        variable = self._add(SharedVariable(name, routes, nodes))
        consumers = self._kept_by(name)
        value = self.graph.by_name[name]

        def how_of(policy: PricedPolicy) -> How:
            is_local = name in policy.local
            dropped = not is_local and self._is_dropped(name, policy)
            only_copies = is_local or name in self._held or (traffic and value.stored is None)
            resent = bool(consumers) and not traffic and policy.resent.issuperset(consumers)
            kept = (bool(consumers) or name in policy.inputs) and not dropped
            return kept, dropped, only_copies, resent, policy.operators.isdisjoint(consumers)

        static = "share", id(routes), starts.tobytes(), nodes.tobytes(), traffic, value.kept_dtype if traffic else None
        window = self._window(name, static, lambda: routes.prices(nodes)[starts]) if traffic else inf

        def table(policy: PricedPolicy, how: How) -> Components:
            kept, dropped, only_copies, resent, beside = how
            seconds = routes.prices(nodes)[starts]
            # A parameter is counted where it is stored; any other value, and a parameter's cast, here. Of recomputed
            # values only copies count.
            numel, again = kept_elements(routes, starts, nodes, is_held=only_copies or dropped, resent=resent)
            kept_bytes = numel * (routes.tensor.itemsize if kept else 0)
            often = self._often(name, starts, nodes, policy, traffic=traffic, is_once=traffic)
            return self._resent(self._placed(seconds, kept_bytes, traffic, window, often), seconds, again, beside)

        transient = partial(bytes_sent, routes, starts, nodes)
        decides = (*self._maker(name), *(op.name for op in self.consumers[name]))
        self._factor((maker, variable), (*static, window), table, how_of, transient, traffic=traffic, operators=decides)
        self.cost.home[name] = variable, nodes

    def _maker(self, name: str) -> tuple[str, ...]:
        maker = self.graph.producer.get(name)
        return () if maker is None else (maker.name,)

    def _is_dropped(self, name: str, policy: PricedPolicy) -> bool:
        return name in policy.dropped or (policy.reshard_mode == "again" and name in self.parameter)

    def _kept_by(self, name: str) -> set[str]:
        return {
            op.name
            for op in self.consumers[name]
            for i, operand in enumerate(op.operands)
            if operand == name and i in self.domains.domain(op, self.fixed.get(op.name)).keeps
        }

    # -- tables --------------------------------------------------------------------------------------------------------

    def _edge(self, name: str, op: Op, variable: int, domain: Domain) -> None:
        home, starts = self.cost.home[name]
        routes = self.domains.routes(name)
        positions = tuple(i for i, operand in enumerate(op.operands) if operand == name)
        traffic = name in self.parameter
        maker, value = self.cost.variables[home], self.graph.by_name[name]
        is_made = isinstance(maker, (OperatorVariable, ReceivedVariable)) or (
            isinstance(maker, StorageVariable) and value.stored is not None
        )
        is_once = isinstance(maker, StorageVariable) and len(positions) == 1
        dtype = value.kept_dtype if is_once else None

        def how_of(policy: PricedPolicy) -> How:
            is_local = name in policy.local
            dropped = not is_local and self._is_dropped(name, policy)
            resent = not traffic and op.name in policy.resent
            beside = op.name not in policy.operators
            counts = is_made and not is_local and name not in self._held
            return counts, dropped, resent, beside, name in policy.inputs and not beside

        static = "edge", id(routes), starts.tobytes(), id(domain), positions, traffic, is_made, dtype

        @cache  # for all memory policies
        def taken() -> Floats:
            seconds = np.zeros((len(starts), len(domain)))
            for _, nodes, fresh in _fresh_nodes(positions, domain):
                seconds += seconds_between(routes, starts, nodes) * fresh[None, :]
            return seconds

        window = self._window(name, static, taken) if traffic else inf

        def table(policy: PricedPolicy, how: How) -> Components:
            computed, dropped, resent, beside, is_read = how
            kept_bytes, repeated = np.zeros((2, len(starts), len(domain)))
            often = _ConversionCount(policy.in_flight, 1.0, 1.0, None)
            for position, nodes, fresh in _fresh_nodes(positions, domain):
                more = self._often(name, starts, nodes, policy, traffic=traffic, is_once=is_once)
                often = more._replace(times=np.maximum(often.times, more.times))
                if position in domain.keeps or is_read:
                    # Where it is computed the value itself, or the parameter's cast, is kept, once.
                    numel, again = kept_elements(routes, starts, nodes, is_held=dropped or not computed, resent=resent)
                    kept_bytes += numel * (0 if dropped else routes.tensor.itemsize) * fresh[None, :]
                    repeated += again * fresh[None, :]
            seconds = taken()
            return self._resent(self._placed(seconds, kept_bytes, traffic, window, often), seconds, repeated, beside)

        def transient() -> Floats:
            tables = [bytes_sent(routes, starts, nodes) for i in positions if (nodes := domain.operands[i]) is not None]
            most: Floats = np.max(tables, axis=0)
            return most

        decides = (*self._maker(name), op.name)
        self._factor((home, variable), (*static, window), table, how_of, transient, traffic=traffic, operators=decides)

    def _worked_on(self, op: Op, domain: Domain) -> Floats:
        """Return [strategies] bytes of an operator's backward: the cotangents of its results and of its operands."""
        total = np.zeros(len(domain))
        for name, nodes in (
            *zip(op.operands, domain.operands, strict=True),
            *zip(op.results, domain.results, strict=True),
        ):
            if nodes is not None and self.graph.by_name[name].requires_grad:
                routes = self.domains.routes(name)
                total += routes.numel[nodes] * routes.tensor.grad_itemsize
        return total

    def _often(
        self, name: str, starts: Ints, nodes: Ints, policy: PricedPolicy, *, traffic: bool, is_once: bool
    ) -> _ConversionCount:
        """Return how often a micro-batch makes conversions. ``is_once``: they are from where a parameter is stored.

        A step makes these once where the stored part is no smaller than what operators use, or if the user asks for
        that, unless the parameter is gathered again (``programs.grad_accum_program``): then those that bring what a
        device does not have are repeated in backward.
        """
        routes, passes, mode = self.domains.routes(name), self.domains.prices.passes, policy.reshard_mode
        times: Floats | float = 1.0
        share: Floats | float = 1.0
        sums: tuple[Floats, Floats] | None = None
        if traffic and mode == "again":
            times = np.where(is_brought(routes, starts, nodes), REGATHER_TRAFFIC, 1.0)
        if is_once and passes > 1:
            is_once_a_step = keeps_size(routes, starts, nodes)
            if mode == "again":
                is_once_a_step &= ~is_brought(routes, starts, nodes)
            share = np.where(is_once_a_step | (mode == "once"), 1 / passes, 1.0)
            if mode == "once" and routes.tensor.differentiable:
                sums = larger_gradients(routes, starts, nodes, self.graph.by_name[name].kept_dtype.itemsize)
        return _ConversionCount(policy.in_flight, share, times, sums)

    def _deliver(self) -> None:
        """Price the delivery of the whole loss, and of buffers that are written back."""
        delivered = [self.graph.loss] if self.graph.loss is not None else []
        delivered += [value for _, value in self.graph.mutations]
        for name in dict.fromkeys(delivered):
            if name not in self.cost.home:
                continue
            (home, starts), routes = self.cost.home[name], self.domains.routes(name)

            def table(policy: PricedPolicy, how: How, routes: Routes = routes, starts: Ints = starts) -> Components:
                return routes.prices(np.array([routes.whole]))[starts, 0], None, None, None

            self._factor((home,), ("deliver", id(routes), starts.tobytes()), table)
        for name in self.graph.cotangents or ():
            if name in self.cost.home:
                self._send(name)

    def _send(self, name: str) -> None:
        """Price sending a value in the layout that the other stage takes. If that is unknown, sums and replicated
        values go in the cheapest layout, others as they are."""
        (home, starts), routes = self.cost.home[name], self.domains.routes(name)
        node = routes.node_of(self.taken[name]) if name in self.taken else None
        nodes = sendable(routes) if node is None else np.array([node])
        seconds = routes.prices(nodes)[starts]
        least = np.lexsort((np.broadcast_to(routes.numel[nodes], seconds.shape), seconds), axis=1)[:, 0]
        self.cost.sent[name] = home, nodes[least]

        def table(policy: PricedPolicy, how: How) -> Components:
            return np.take_along_axis(seconds, least[:, None], axis=1)[:, 0], None, None, None

        self._factor((home,), ("send", id(routes), starts.tobytes(), nodes.tobytes()), table)

    def _window(self, name: str, static: Hashable, seconds: Callable[[], Floats]) -> float:
        """Return the seconds that messages of a parameter can hide behind; inf if no conversion takes longer."""
        if static not in self._longest:
            self._longest[static] = float(seconds().max(initial=0.0))
        window = self.domains.windows[name]
        return window if window < self._longest[static] else inf

    def _placed(
        self, seconds: Floats, kept_bytes: Floats, traffic: bool, window: float, often: _ConversionCount
    ) -> Components:
        """Return the components of a conversion. Traffic of parameters overlaps with compute as far as the device can
        do both at once and its window has any; that of values does not."""
        whole, more = often.sums or (0.0, 0.0)
        some = kept_bytes + whole if kept_bytes.any() or np.any(whole) else None
        overlap = self.domains.prices.device.overlap if traffic else 0.0
        hidden = overlap * (np.minimum(seconds, window) + (often.times - 1) * seconds)
        exposed = often.times * seconds - hidden
        is_once = np.less(often.share, 1)  # and kept once
        some = None if some is None else some * np.where(is_once, 1, often.in_flight)
        hidden, exposed = np.where(is_once, 0.0, hidden), np.where(is_once, seconds * often.share, exposed)
        exposed = exposed + self.domains.prices.added(1.0) * more
        return exposed if exposed.any() or not overlap else None, None, hidden if overlap else None, some

    def _resent(self, once: Components, seconds: Floats, again: Floats, is_beside: bool) -> Components:
        """Return the components of conversions with the messages of some (``again``: 1) sent a second time.
        ``is_beside``: beside the backward ahead of their operators, which are not recomputed themselves."""
        if not again.any():
            return once
        exposed, compute, traffic, kept_bytes = once
        more, overlap = RESEND_TRAFFIC * seconds * again, self.domains.prices.device.overlap if is_beside else 0.0
        beside = overlap * more if traffic is None else traffic + overlap * more
        waits = (1 - overlap) * more if exposed is None else exposed + (1 - overlap) * more
        return waits, compute, beside, kept_bytes

    def _factor(
        self,
        scope: Scope,
        static: Hashable,
        table: Callable[[PricedPolicy, How], Components],
        how: Callable[[PricedPolicy], How] = lambda policy: (),
        transient: Callable[[], Floats] | None = None,
        *,
        traffic: bool = False,
        operators: tuple[str, ...] = (),
    ) -> None:
        assert list(scope) == sorted(scope), "scopes ascend: makers come before consumers"
        number = self._numbers.setdefault(static, len(self._numbers))
        self.factors.append(CostTable(scope, number, how, table, transient, traffic, operators))


def _fresh_nodes(positions: Iterable[int], domain: Domain) -> Iterator[tuple[int, Ints, Floats]]:
    """Yield, for operands that are one value, their nodes, and 1 where no earlier one has the same: two operands in the
    same layout share the conversion."""
    done: list[Ints] = []
    for position in positions:
        nodes = domain.operands[position]
        assert nodes is not None, f"operand {position} has no layouts"
        fresh = np.ones(len(domain))
        for other in done:
            fresh *= nodes != other
        yield position, nodes, fresh
        done.append(nodes)


# -- tables over pairs of layouts of a value ---------------------------------------------------------------------------


def seconds_between(routes: Routes, starts: Ints, nodes: Ints) -> Floats:
    """Return [starts, nodes] seconds; each pair of layouts is computed once, however many strategies have it."""
    rows, back = np.unique(starts, return_inverse=True)
    columns, forth = np.unique(nodes, return_inverse=True)
    small = routes.prices(columns)[rows]
    return small[back][:, forth]


def is_copied(routes: Routes, starts: Ints, nodes: Ints) -> NDArray[np.bool_]:
    """Return [starts, nodes] whether a conversion makes another tensor. Invariant and replicated are the same one."""
    codes = np.where(routes.codes == STATES.index("R"), STATES.index("I"), routes.codes)
    return np.asarray((codes[starts][:, None, :] != codes[nodes][None, :, :]).any(axis=2))


def kept_elements(routes: Routes, starts: Ints, nodes: Ints, *, is_held: bool, resent: bool) -> tuple[Floats, Floats]:
    """Return [starts, nodes] elements that an operand which is kept in ``nodes`` holds, and 1 where its message is sent
    again. ``is_held``: the source of the conversion is kept anyway; ``resent``: messages may be sent again, which they
    are where that holds fewer elements."""
    copied = is_copied(routes, starts, nodes)
    before, after = np.broadcast_arrays(routes.numel[starts][:, None], routes.numel[nodes][None, :])
    is_resent = copied & ((before <= after) if is_held else (before < after)) & resent
    elements = np.where(is_resent, 0 if is_held else before, after * copied if is_held else after)
    return elements.astype(np.float64), is_resent.astype(np.float64)


def is_brought(routes: Routes, starts: Ints, nodes: Ints) -> NDArray[np.bool_]:
    """Return [starts, nodes] whether forward brings what a device does not have: another tensor, and no smaller one."""
    return is_copied(routes, starts, nodes) & np.less_equal.outer(routes.numel[starts], routes.numel[nodes])


def keeps_size(routes: Routes, starts: Ints, nodes: Ints) -> NDArray[np.bool_]:
    return np.equal.outer(routes.numel[starts], routes.numel[nodes])


def larger_gradients(routes: Routes, starts: Ints, nodes: Ints, itemsize: int) -> tuple[Floats, Floats]:
    """Return [starts, nodes] bytes of gradients in ``nodes`` where larger than in ``starts``, and the difference."""
    itemsizes = np.where(keeps_size(routes, starts, nodes), 0.0, float(itemsize))
    whole: Floats = itemsizes * routes.numel[nodes][None, :]
    return whole, whole - itemsizes * routes.numel[starts][:, None]


def bytes_sent(routes: Routes, starts: Ints, nodes: Ints) -> Floats:
    """Return [starts, nodes] bytes of a conversion while it runs: its source, its message and its result. This is an
    estimate: intermediate layouts of a longer route are ignored."""
    before, after = routes.numel[starts][:, None], routes.numel[nodes][None, :]
    num_bytes = (before + 2.0 * np.maximum(before, after)) * max(routes.tensor.itemsize, routes.tensor.grad_itemsize)
    return np.where(is_copied(routes, starts, nodes), num_bytes, 0.0)


def sendable(routes: Routes) -> Ints:
    """Return the layouts, sharded or whole on every axis, in which a value is stored or crosses to another stage."""
    is_sharded = (routes.codes >= SHARDED) & (routes.codes != routes.by_key)
    return np.flatnonzero(((routes.codes == STATES.index("I")) | is_sharded).all(axis=1))
