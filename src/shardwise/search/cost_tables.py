"""Builds the cost graph of a model on one mesh: which choices are variables, and the tables of their prices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from math import inf

import numpy as np

from shardwise.costs.kernels import is_view
from shardwise.graph.ir import Op
from shardwise.layouts.choice import Choices
from shardwise.layouts.layout import Layout
from shardwise.layouts.routes import Floats, Ints, Routes
from shardwise.search.again import GATHERED_AGAIN, SENT_AGAIN, Again
from shardwise.search.conversion_tables import (
    bytes_sent,
    is_brought,
    keeps_size,
    kept_of,
    larger,
    seconds_between,
    sendable,
)
from shardwise.search.cost_graph import Components, CostGraph, Folded
from shardwise.search.domains import Domain, Domains
from shardwise.search.elimination import Scope
from shardwise.search.variables import OperatorVariable, ReceivedVariable, SharedVariable, StorageVariable, Variable


def build(
    domains: Domains,
    fixed: Choices,
    storage: Mapping[str, Layout] | None = None,
    again: Again | None = None,
    in_flight: int = 1,
    taken: Mapping[str, Layout] | None = None,
) -> CostGraph:
    """The cost graph. ``fixed``: what the user decided; ``storage``: parameters whose layout is decided;
    ``in_flight``: passes whose values are kept for backward at once; ``taken``: the layouts in which the next stage
    takes values, those that are known."""
    return _Builder(domains, fixed, storage or {}, again or Again(), in_flight, taken or {}).run()


class _Builder:
    def __init__(
        self,
        domains: Domains,
        fixed: Choices,
        storage: Mapping[str, Layout],
        again: Again,
        in_flight: int,
        taken: Mapping[str, Layout],
    ) -> None:
        self.domains, self.graph = domains, domains.graph
        self.fixed, self.storage, self.again, self.in_flight, self.taken = fixed, storage, again, in_flight, taken
        away = again.operators | again.offloaded
        self.dropped = {name for op in self.graph.ops if op.name in away for name in op.results}
        self.local = {name for op in self.graph.ops if op.name in again.local for name in op.results}
        self.cost = CostGraph(domains)
        self._kinds: dict[object, int] = {}
        self.consumers = domains.consumers
        self.parameter = {s.value: s for s in self.graph.sources if s.kind == "parameter"}

    def run(self) -> CostGraph:
        for name in self.domains.received:
            self._receive(name)
        for op in self.domains.operators:
            for name in dict.fromkeys(op.operands):
                if name in self.parameter and name not in self.cost.home:
                    self._store(name)
            self._operator(op)
        for name in self.parameter:  # those that nothing uses are kept all the same
            if name not in self.cost.home:
                self._store(name)
        self._deliver()
        return self.cost

    # -- variables -----------------------------------------------------------------------------------------------------

    def _add(self, variable: Variable) -> int:
        number = len(self.cost.variables)
        self.cost.variables.append(variable)
        self.cost.number[variable.kind, variable.name] = number
        return number

    def _store(self, name: str) -> None:
        """The storage of a parameter: every layout that is sharded or whole."""
        domains, routes = self.domains, self.domains.routes(name)
        value, updated = self.graph.by_name[name], name in self.graph.updated
        nodes = sendable(routes)
        if name in self.storage:
            node = routes.node_of(self.storage[name])
            assert node is not None, f"{name} is stored as {self.storage[name]}, which is none of its layouts"
            nodes = np.array([node])
        variable = self._add(StorageVariable(name, routes, nodes))

        def table() -> Components:
            numel = routes.numel[nodes].astype(np.float64)
            seconds = numel * domains.prices.casts(value, 1.0, updated)
            if updated:
                seconds += [domains.prices.update(value, count) for count in numel.tolist()]
            return seconds, None, None, numel * domains.prices.state_bytes(value, updated)

        dtypes = value.dtype, value.stored, value.reduced
        self._factor((variable,), ("store", id(routes), dtypes, updated, nodes.tobytes()), table)
        self._arrive(name, variable, nodes, traffic=True)

    def _receive(self, name: str) -> None:
        """A value of another stage: it arrives in any layout that is sharded or whole. Every device is sent what it
        has, and sends as much back; that there is less to send is what splits the value."""
        routes = self.domains.routes(name)
        nodes = sendable(routes)
        variable = self._add(ReceivedVariable(name, routes, nodes))

        def table() -> Components:
            level = self.domains.prices.links.cluster.levels[-1]
            num_bytes = routes.numel[nodes].astype(np.float64) * routes.tensor.itemsize
            return 2 * num_bytes * level.shared_by / level.link_bandwidth(level.size), None, None, None

        self._factor((variable,), ("receive", id(routes), nodes.tobytes()), table)
        self._arrive(name, variable, nodes, traffic=False)

    def _arrive(self, name: str, variable: int, nodes: Ints, *, traffic: bool) -> None:
        """A value is made, in a layout that ``variable`` decides."""
        self.cost.maker[name] = self.cost.home[name] = variable, nodes
        if len(self.consumers.get(name, ())) > 1:
            self._share(name, variable, nodes, traffic=traffic)

    def _fold(self, op: Op) -> bool:
        """Whether the operator only renames the dims of its operand, so that a layout of one is a layout of the other
        and conversions cost the same before and after it. It then needs no variable."""
        domains, (name, *others) = self.domains, op.operands
        if others or op.name in self.fixed or len(op.results) != 1 or not is_view(op.target):
            return False
        if name in self.parameter:  # converted before the view it is traffic, which overlaps
            return False
        renamed = domains.renamed_codes(op)
        if renamed is None:
            return False
        home, nodes = self.cost.home[name]
        self.cost.folded.append(Folded(op.name, home, nodes))
        codes = renamed[domains.routes(name).codes[nodes]]
        self._arrive(op.results[0], home, domains.routes(op.results[0]).node(codes), traffic=False)
        return True

    def _operator(self, op: Op) -> None:
        if self._fold(op):
            return
        domain = self.domains.domain(op, self.fixed.get(op.name))
        variable = self._add(OperatorVariable(op.name, domain))
        again, waits = op.name in self.again.operators, op.name in self.again.offloaded

        def table() -> Components:
            compute = domain.compute + domain.forward if again else domain.compute
            return domain.exposed, compute, None, None if again or waits else domain.kept * self.in_flight

        key = ("operator", id(domain), again, waits)
        self._factor((variable,), key, table, partial(self._worked_on, op, domain))
        for name in dict.fromkeys(name for name in op.operands if name in self.cost.home):
            self._edge(name, op, variable, domain)
        for i, name in enumerate(op.results):
            nodes = domain.results[i]
            assert nodes is not None, f"{op.name}: {name} has no layouts"
            self._arrive(name, variable, nodes, traffic=False)

    def _share(self, name: str, maker: int, starts: Ints, *, traffic: bool) -> None:
        """The layout that the consumers of a value convert from: any that its maker or a consumer uses."""
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
        dropped = self._is_dropped(name) and name not in self.local
        kept = bool(consumers) and not dropped
        only_copies = name in self.local or (traffic and self.graph.by_name[name].stored is None)
        dtype = self.graph.by_name[name].kept_dtype if traffic else None
        resent = bool(consumers) and not traffic and self.again.resent.issuperset(consumers)
        beside = self.again.operators.isdisjoint(consumers)
        how = kept, traffic, only_copies, dtype, resent, beside
        key: object = "share", id(routes), starts.tobytes(), nodes.tobytes(), *how
        window = self._window(name, key, lambda: routes.prices(nodes)[starts]) if traffic else inf

        def table() -> Components:
            seconds = routes.prices(nodes)[starts]
            # A parameter is counted where it is stored, any other value, and a parameter's cast, here; of what is made
            # again only copies.
            numel, again = kept_of(routes, starts, nodes, is_held=only_copies or dropped, resent=resent)
            kept_bytes = numel * (routes.tensor.itemsize if kept else 0)
            share = self._share_of_pass(routes, starts, nodes, traffic)
            sums = self._whole_sums(name, starts, nodes, traffic)
            times = self._times(routes, starts, nodes, traffic)
            once = self._placed(seconds, kept_bytes, traffic, window, share, sums, times)
            return self._resent(once, seconds, again, beside)

        self._factor((maker, variable), (key, window), table, partial(bytes_sent, routes, starts, nodes))
        self.cost.home[name] = variable, nodes

    def _is_dropped(self, name: str) -> bool:
        """Whether what is converted of a value is not held for backward."""
        return name in self.dropped or (self.again.gathered == "again" and name in self.parameter)

    def _kept_by(self, name: str) -> set[str]:
        """The operators that keep a value for their backward."""
        return {
            op.name
            for op in self.consumers[name]
            for i, operand in enumerate(op.operands)
            if operand == name and i in self.domains.domain(op, self.fixed.get(op.name)).keeps
        }

    # -- tables --------------------------------------------------------------------------------------------------------

    def _edge(self, name: str, op: Op, variable: int, domain: Domain) -> None:
        """What a consumer's layouts of a value cost, from where the value is."""
        home, starts = self.cost.home[name]
        routes = self.domains.routes(name)
        positions = tuple(i for i, operand in enumerate(op.operands) if operand == name)
        traffic = name in self.parameter
        maker = self.cost.variables[home]
        computed = name not in self.local and (
            isinstance(maker, (OperatorVariable, ReceivedVariable))
            or (isinstance(maker, StorageVariable) and self.graph.by_name[name].stored is not None)
        )
        dropped = self._is_dropped(name) and name not in self.local
        is_once = isinstance(maker, StorageVariable) and len(positions) == 1
        kept = self.graph.by_name[name].kept_dtype if is_once else None
        resent = not traffic and op.name in self.again.resent
        beside = op.name not in self.again.operators
        how = traffic, computed, dropped, kept, resent, beside
        key: object = "edge", id(routes), starts.tobytes(), id(domain), positions, *how

        def fresh_nodes() -> Iterator[tuple[int, Ints, Floats]]:
            done: list[Ints] = []
            for position in positions:
                nodes = domain.operands[position]
                assert nodes is not None, f"{op.name}: {name} has no layouts"
                fresh = np.ones(len(domain))
                for other in done:  # two operands in the same layout share the conversion
                    fresh *= nodes != other
                yield position, nodes, fresh
                done.append(nodes)

        def taken() -> Floats:
            seconds = np.zeros((len(starts), len(domain)))
            for _, nodes, fresh in fresh_nodes():
                seconds += seconds_between(routes, starts, nodes) * fresh[None, :]
            return seconds

        window = self._window(name, key, taken) if traffic else inf

        def table() -> Components:
            kept_bytes, repeated = np.zeros((2, len(starts), len(domain)))
            times: Floats | float = 1.0
            for position, nodes, fresh in fresh_nodes():
                times = np.maximum(times, self._times(routes, starts, nodes, traffic))
                if position in domain.keeps:
                    # Where it is computed the value itself, or the parameter's cast, is kept, once.
                    numel, again = kept_of(routes, starts, nodes, is_held=dropped or not computed, resent=resent)
                    kept_bytes += numel * (0 if dropped else routes.tensor.itemsize) * fresh[None, :]
                    repeated += again * fresh[None, :]
            share: Floats | float = 1.0
            sums: tuple[Floats, Floats] | None = None
            if is_once:
                ((_, nodes, _),) = fresh_nodes()
                share = self._share_of_pass(routes, starts, nodes, is_once)
                sums = self._whole_sums(name, starts, nodes, is_once)
            once = self._placed(taken(), kept_bytes, traffic, window, share, sums, times)
            return self._resent(once, taken(), repeated, beside)

        def transient() -> Floats:
            tables = [bytes_sent(routes, starts, nodes) for i in positions if (nodes := domain.operands[i]) is not None]
            most: Floats = np.max(tables, axis=0)
            return most

        self._factor((home, variable), (key, window), table, transient)

    def _worked_on(self, op: Op, domain: Domain) -> Floats:
        """[strategies] bytes of an operator's backward: the cotangents of its results and of its operands."""
        total = np.zeros(len(domain))
        for name, nodes in (
            *zip(op.operands, domain.operands, strict=True),
            *zip(op.results, domain.results, strict=True),
        ):
            if nodes is not None and self.graph.by_name[name].requires_grad:
                routes = self.domains.routes(name)
                total += routes.numel[nodes] * routes.tensor.grad_itemsize
        return total

    def _share_of_pass(self, routes: Routes, starts: Ints, nodes: Ints, is_once: bool) -> Floats | float:
        """[starts, nodes] A pass's share of a conversion from where a parameter is stored: a step makes it once where
        that is no smaller than what operators use, or wherever that is asked for, but not what is gathered again
        (``programs.once``)."""
        passes = self.domains.prices.passes
        if not is_once or passes == 1:
            return 1.0
        if self.again.gathered == "once":
            return np.full((len(starts), len(nodes)), 1 / passes)
        is_once_a_step = keeps_size(routes, starts, nodes)
        if self.again.gathered == "again":
            is_once_a_step &= ~is_brought(routes, starts, nodes)
        return np.where(is_once_a_step, 1 / passes, 1.0)

    def _times(self, routes: Routes, starts: Ints, nodes: Ints, traffic: bool) -> Floats | float:
        """[starts, nodes] How often a parameter's conversions send what they send once: those that bring what a device
        does not have do so again in backward, where that is asked for."""
        if not traffic or self.again.gathered != "again":
            return 1.0
        return np.where(is_brought(routes, starts, nodes), GATHERED_AGAIN, 1.0)

    def _whole_sums(self, name: str, starts: Ints, nodes: Ints, is_once: bool) -> tuple[Floats, Floats] | None:
        """Of a parameter's gradient that adds up over the passes in a larger layout than that in which it is stored, in
        the dtype of what is stored: ``larger``, of which a step has some more seconds to add."""
        routes, is_one_pass = self.domains.routes(name), self.domains.prices.passes == 1
        if not is_once or is_one_pass or not routes.tensor.differentiable or self.again.gathered != "once":
            return None
        return larger(routes, starts, nodes, self.graph.by_name[name].kept_dtype.itemsize)

    def _deliver(self) -> None:
        """The loss is needed whole, and buffers that are written back."""
        wanted = [self.graph.loss] if self.graph.loss is not None else []
        wanted += [value for _, value in self.graph.mutations]
        for name in dict.fromkeys(wanted):
            if name not in self.cost.home:
                continue
            (home, starts), routes = self.cost.home[name], self.domains.routes(name)

            def table(routes: Routes = routes, starts: Ints = starts) -> Components:
                return routes.prices(np.array([routes.whole]))[starts, 0], None, None, None

            self._factor((home,), ("deliver", id(routes), starts.tobytes()), table)
        for name in self.graph.cotangents or ():
            if name in self.cost.home:
                self._send(name)

    def _send(self, name: str) -> None:
        """What another stage reads leaves as that takes it. Where this is not known: as it is; sums and what is
        replicated in the layout that takes least."""
        (home, starts), routes = self.cost.home[name], self.domains.routes(name)
        node = routes.node_of(self.taken[name]) if name in self.taken else None
        nodes = sendable(routes) if node is None else np.array([node])
        seconds = routes.prices(nodes)[starts]
        least = np.lexsort((np.broadcast_to(routes.numel[nodes], seconds.shape), seconds), axis=1)[:, 0]
        self.cost.sent[name] = home, nodes[least]

        def table() -> Components:
            return np.take_along_axis(seconds, least[:, None], axis=1)[:, 0], None, None, None

        self._factor((home,), ("send", id(routes), starts.tobytes(), nodes.tobytes()), table)

    def _window(self, name: str, key: object, seconds: Callable[[], Floats]) -> float:
        """What messages of a parameter can hide behind; inf where no conversion of ``key`` is longer."""
        longest = self.domains.longest
        if key not in longest:
            longest[key] = float(seconds().max(initial=0.0))
        window = self.domains.windows[name]
        return window if window < longest[key] else inf

    def _placed(
        self, seconds: Floats, kept_bytes: Floats, traffic: bool, window: float, share: Floats | float,
        sums: tuple[Floats, Floats] | None, times: Floats | float,
    ) -> Components:  # fmt: skip
        """Components of a conversion: traffic of parameters overlaps with compute as far as the device can do both at
        once and as there is any in its window, that of values does not. ``share``: a pass's share of what a step does
        once, which nothing hides; ``sums``: ``_whole_sums``; ``times``: ``_times``, of which what is more than once is
        in backward."""
        whole, more = sums or (0.0, 0.0)
        some = kept_bytes + whole if kept_bytes.any() or np.any(whole) else None
        overlap = self.domains.prices.device.overlap if traffic else 0.0
        hidden = overlap * (np.minimum(seconds, window) + (times - 1) * seconds)
        exposed = times * seconds - hidden
        is_once = np.less(share, 1)  # and kept once
        some = None if some is None else some * np.where(is_once, 1, self.in_flight)
        hidden, exposed = np.where(is_once, 0.0, hidden), np.where(is_once, seconds * share, exposed)
        exposed = exposed + self.domains.prices.added(1.0) * more
        return exposed if exposed.any() or not overlap else None, None, hidden if overlap else None, some

    def _resent(self, once: Components, seconds: Floats, again: Floats, is_beside: bool) -> Components:
        """The components of conversions with the messages of some (``again``: 1) sent a second time. ``is_beside``:
        beside the backward ahead of their operators, which are not made again themselves."""
        if not again.any():
            return once
        exposed, compute, traffic, kept_bytes = once
        more, overlap = SENT_AGAIN * seconds * again, self.domains.prices.device.overlap if is_beside else 0.0
        beside = overlap * more if traffic is None else traffic + overlap * more
        waits = (1 - overlap) * more if exposed is None else exposed + (1 - overlap) * more
        return waits, compute, beside, kept_bytes

    def _factor(
        self,
        scope: Scope,
        key: object,
        table: Callable[[], Components],
        transient: Callable[[], Floats] | None = None,
    ) -> None:
        """A table over ``scope``; equal keys mean equal tables, which are made once for all cost graphs over the same
        domains."""
        assert list(scope) == sorted(scope), "scopes ascend: makers come before consumers"
        number = self._kinds.get(key)
        if number is None:
            number = self._kinds[key] = len(self.cost.kinds)
            tables, for_all = self.domains.tables, (key, self.again.gathered, self.in_flight)
            if for_all not in tables:
                tables[for_all] = table()
            self.cost.kinds.append(tables[for_all])
            if transient is not None:
                self.cost.transients[number] = transient
        self.cost.factors.append((scope, number))


__all__ = ["build"]
