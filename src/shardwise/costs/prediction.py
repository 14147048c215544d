"""What a plan is expected to take, as numbers that stand in its file."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.costs.cluster import Cluster

# Shares below this are rounding.
EXACT = 1e-9


@dataclass(frozen=True, slots=True)
class Interval:
    """A predicted figure, and between which two it is measured nine times of ten, as far as is known (``low`` and
    ``high`` are the figure itself where no spread of the cluster's figures is known)."""

    value: float
    low: float
    high: float


def between(seconds: float, compute: float, cluster: Cluster) -> Interval:
    """Return the interval of ``seconds``. The ``compute`` part has the device's uncertainty, the rest that of the least
    certain level."""
    compute = min(compute, seconds)
    exposed = seconds - compute
    link_error = 1 + max((level.spread for level in cluster.levels), default=0.0)
    device_error = 1 + cluster.device.spread
    low, high = compute / device_error + exposed / link_error, compute * device_error + exposed * link_error
    return Interval(seconds, low, high)


def between_bytes(num_bytes: float, cluster: Cluster) -> Interval:
    """Return the interval of a peak of ``num_bytes``."""
    share = 1 + cluster.device.memory_spread
    return Interval(num_bytes, num_bytes / share, num_bytes * share)


@dataclass(frozen=True, slots=True)
class PassedOver:
    """The cheapest plan, where another was chosen, because it is faster in the simulation, or because this does not fit
    (``fits``): its additive price, and what the simulation says of the seconds of a pass and of its peak."""

    additive_price: float
    simulated_seconds: float
    peak_bytes: float
    fits: bool = True


@dataclass(frozen=True, slots=True)
class FasterPlan:
    """The plan of the fastest simulation, where one was chosen that takes about as long and has fewer axes or kinds of
    splits: its mesh as text, its kinds of splits, and the simulated seconds of a pass. ``plainer_seconds``: those of
    the chosen plan when they were compared, before its messages got a size of their own."""

    mesh: str
    kinds: int
    simulated_seconds: float
    plainer_seconds: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a plan is expected to take, per pass (forward and backward of one batch). Three numbers, never mixed:

    ``bound``: no plan of the searched space, on all meshes that were tried, has a lower additive price (0: not known);
    ``additive_price``: of this plan, the sum of the prices of its choices, which the search minimised;
    ``simulated_seconds``: of this plan with overlap and buckets, operator after operator (0: it was not simulated).

    ``exposed``, ``compute``, ``traffic``: seconds of the emitted program, of collectives that nothing hides, of
    operators, and of gathers of parameters and reductions of gradients (hidden behind operators as far as these last).
    Together they come to the additive price or less: that counts a conversion which several consumers share for each of
    them, unless it leads to the layout that they all convert from. ``num_bytes``: per device of parameters, gradients,
    optimizer states and values kept for backward. ``log10_plans``: how many plans were searched, as a power of ten.
    ``passes``: to a step of the optimizer. ``peak_bytes``: the most memory that tensors of a device take
    at once, ``peak_at`` which operator's forward or backward. ``passed_over``: the cheapest plan, if this is another;
    ``faster``: a faster one that this ties with. ``host_wait``, ``message_wait``, ``copy_wait``: simulated seconds in
    which no kernel runs because the host has not started one, or because messages, or copies from and to the host, are
    under way; ``cast_seconds``: of casts of parameters and gradients, with their starts. ``compiled_seconds``:
    simulated with the kernels that a compiler makes (0: the program runs eager). The waits and casts are those of the
    compiled step then; searches compare plans by eager steps. ``graph_seconds``: of the compiled step as CUDA graphs
    (0: not simulated, since it waits little for the host).
    """

    exposed: float
    compute: float
    traffic: float
    num_bytes: float
    bound: float = 0.0
    log10_plans: float = 0.0
    simulated_seconds: float = 0.0
    peak_bytes: float = 0.0
    peak_at: str = ""
    passes: int = 1
    additive_price: float = 0.0
    passed_over: PassedOver | None = None
    faster: FasterPlan | None = None
    host_wait: float = 0.0
    message_wait: float = 0.0
    compiled_seconds: float = 0.0
    copy_wait: float = 0.0
    cast_seconds: float = 0.0
    graph_seconds: float = 0.0

    @property
    def pass_seconds(self) -> float:
        return self.exposed + max(self.compute, self.traffic)

    @property
    def step_seconds(self) -> float:
        return self.passes * self.pass_seconds

    def step_interval(self, cluster: Cluster) -> Interval:
        """Return the interval of ``default_seconds``. Operators are as uncertain as the device's figures, all else as
        those of the level that is known least. Errors of one kind are taken to be the same everywhere, so that they do
        not even out."""
        return self.interval(self.default_seconds / self.passes, cluster)

    def interval(self, seconds: float, cluster: Cluster) -> Interval:
        """Return the interval of a whole step, given the seconds of one pass."""
        interval = between(seconds, self.compute, cluster)
        return Interval(*(self.passes * end for end in (interval.value, interval.low, interval.high)))

    @property
    def planned_seconds(self) -> float:
        """Return the seconds of an eager step, simulated if available. Searches compare plans by it."""
        return self.passes * (self.simulated_seconds or self.pass_seconds)

    @property
    def default_seconds(self) -> float:
        """Return the seconds of a step as programs run by default: compiled on CUDA, eager elsewhere."""
        return self.passes * self.compiled_seconds or self.planned_seconds

    @property
    def memory_bytes(self) -> float:
        """Return the peak bytes of a device, simulated if available."""
        return self.peak_bytes or self.num_bytes

    @property
    def optimality_gap(self) -> float | None:
        """By which share the additive price is above the bound; 0: proven to be the lowest; None: no bound."""
        return _above(self.additive_price, self.bound) if self.bound else None

    @property
    def given_away(self) -> float:
        """By which share the additive price is above that of the cheapest plan, because the simulation, or the memory
        limit, chose this one; 0: it is the cheapest."""
        return 0.0 if self.passed_over is None else _above(self.additive_price, self.passed_over.additive_price)


def _above(price: float, least: float) -> float:
    share = price / least - 1
    return share if share > EXACT else 0.0
