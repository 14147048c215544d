"""The request that a plan answers: a call of a module, a cluster, and settings in three groups.

``sw.plan``, ``sw.fits``, ``sw.compare`` and the command line all make a ``PlanRequest``. A suggestion is a variant of
one (``PlanRequest.varied``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from math import inf
from typing import Any, Literal

import torch

from shardwise.costs.cluster import Cluster
from shardwise.costs.optimizers import looks_together, parse_optimizer
from shardwise.errors import PlanError, ShardwiseError
from shardwise.graph.batch import num_samples, with_samples
from shardwise.graph.call_arguments import call_arguments
from shardwise.graph.ir import Graph
from shardwise.graph.segments import Recompute, Segment, check_how
from shardwise.graph.step_precision import Precision
from shardwise.layouts.mesh import Mesh
from shardwise.programs.builder import RowChunks
from shardwise.rules.keyed_rows import IMBALANCE, imbalance_fault
from shardwise.search.auto import PRICED_SEARCHES, PricedSearch
from shardwise.search.decide import Kept
from shardwise.search.memory_policy import OFFLOADS, MemoryPolicy, Offload, ReshardMode
from shardwise.search.mesh_shapes import candidate_meshes
from shardwise.search.modes import MODES, Mode
from shardwise.search.zero import Zero
from shardwise.untrusted_text import is_number, shorten_repr

SearchName = PricedSearch | Literal["sharding_propagation"]
SEARCHES: tuple[SearchName, ...] = (*PRICED_SEARCHES, "sharding_propagation")


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the model may be split: arguments of ``sw.plan``."""

    mesh: Mesh | None = None
    strategies: Mapping[str, Any] | None = None
    layouts: Mapping[str, Kept] | None = None
    stages: int | Literal["marked", "auto"] | None = None
    schedule: str | None = None
    zero: int | Zero | None = None
    recompute: Recompute | Literal["auto"] | None = "auto"
    offload: Offload = "auto"
    bucket_bytes: int | None = None
    row_chunks: RowChunks | None = None
    imbalance: float = IMBALANCE

    def __post_init__(self) -> None:
        if fault := imbalance_fault(self.imbalance):
            fix = f"rows on the busiest owner of experts over the mean, from 1 (all alike); default {IMBALANCE:g}"
            raise ShardwiseError(fault, fix=fix)
        if self.offload not in OFFLOADS:
            fix = f"one of {', '.join(map(repr, OFFLOADS))}, or sw.offload(module.layers[3]) for parts"
            raise ShardwiseError(f"unknown offload={self.offload!r}", fix=fix)
        if self.recompute not in ("auto", None):
            check_how(self.recompute, "recompute=", "auto")
        size = self.bucket_bytes
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 0):
            raise ShardwiseError(
                f"bucket_bytes is {size!r}", fix="a whole number of bytes; 0: no buckets; None: chosen by price"
            )
        chunks = self.row_chunks
        is_count = isinstance(chunks, int) and not isinstance(chunks, bool) and 0 < chunks <= 1024
        if chunks not in (None, "fused") and not is_count:
            fix = "1 (whole rows) to 1024, or 'fused' (messages within products); None: chosen by price"
            raise ShardwiseError(f"row_chunks is {chunks!r}", fix=fix)
        if not isinstance(self.mesh, Mesh | None):
            fix = "sw.Mesh(dp=2, tp=4), or sw.Mesh({'dp': 2, 'tp': 4})"
            raise ShardwiseError(f"mesh is {self.mesh!r}", fix=fix)
        strategies = "{'blocks.*.up': 'n@tp'}: module path patterns to strategies"
        layouts = "{'args[0]': '[32@dp, 512]'}: inputs, parameters or buffers to layouts"
        for name, entries, example in (("strategies", self.strategies, strategies), ("layouts", self.layouts, layouts)):
            is_named = isinstance(entries, Mapping) and all(isinstance(key, str) for key in entries)
            if entries is not None and not is_named:
                raise ShardwiseError(f"{name} is {shorten_repr(entries)}", fix=f"a dict such as {example}")

    @cached_property
    def zero_config(self) -> Zero | None:
        return Zero.of(self.zero)

    @property
    def reshard_mode(self) -> ReshardMode | None:
        """When sharded parameters are gathered; None: free."""
        return None if self.zero_config is None else self.zero_config.reshard_mode

    def memory_policy(self, graph: Graph, segments: Sequence[Segment]) -> MemoryPolicy:
        """Return the policy that was asked for; what is free is as in the policy that repeats least."""
        recompute = None if self.recompute == "auto" else self.recompute
        return MemoryPolicy.of(graph, segments, recompute, self.reshard_mode or "held", self.offload)


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """What a training step is, apart from how it is split: arguments of ``sw.plan``."""

    optimizer: str = "adamw"
    precision: Precision | None = None
    global_batch: int | None = None
    micro_batch: int | None = None
    per_micro_batch: Sequence[str] = ()

    def __post_init__(self) -> None:
        terms = self.per_micro_batch
        if isinstance(terms, str) or not (isinstance(terms, list | tuple) and all(isinstance(t, str) for t in terms)):
            fix = '["aux_loss"]: names of outputs, operators or modules of the model'
            raise ShardwiseError(f"per_micro_batch is {shorten_repr(terms)}", fix=fix)
        parse_optimizer(self.optimizer)
        if not isinstance(self.precision, Precision | None):
            fix = "sw.Precision(compute=torch.bfloat16); parameter= and reduce= set the other dtypes"
            raise ShardwiseError(f"precision is {self.precision!r}", fix=fix)


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """How a plan is chosen, and within which memory: arguments of ``sw.plan``."""

    mode: Mode = "auto"
    search: SearchName | None = None
    max_mesh_axes: int = 2
    memory_bytes: float | None = None

    def __post_init__(self) -> None:
        if self.search is not None and self.search not in SEARCHES:
            raise ShardwiseError(f"unknown search {self.search!r}", fix=f"one of {', '.join(SEARCHES)}")
        if self.mode not in MODES:
            raise ShardwiseError(f"unknown mode {self.mode!r}", fix=f"one of {', '.join(MODES)}")
        limit = self.memory_bytes
        if limit is not None and not (is_number(limit) and limit > 0):
            fix = "bytes for the tensors of a device, above 0"
            raise ShardwiseError(f"memory_bytes is {limit!r}", fix=fix)


_GROUPS = {"parallel": ParallelConfig, "training": TrainingConfig, "search": SearchOptions}
_GROUP_OF = {entry.name: name for name, group in _GROUPS.items() for entry in fields(group)}


@dataclass(frozen=True, kw_only=True, eq=False)
class PlanRequest:
    """Everything that a plan is made for. ``args``, ``kwargs``: of the example call, the targets of ``loss`` last;
    ``candidates``: the meshes that a search by price tries, whose axes it names by role (none: those of the cluster).
    """

    module: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    loss: Callable[..., Any] | None
    cluster: Cluster
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    search: SearchOptions = field(default_factory=SearchOptions)
    candidates: tuple[Mesh, ...] = ()

    def __post_init__(self) -> None:
        mesh, num_devices = self.parallel.mesh, self.cluster.num_devices
        if mesh is not None and self.parallel.stages is None and mesh.num_devices != num_devices:
            product = mesh.format_sizes()
            needed = f"{product} = {mesh.num_devices}" if len(mesh.axes) > 1 else product
            what = f"{mesh} needs {needed} devices, the cluster has {num_devices}"
            fix = f"choose axes whose sizes multiply to {num_devices}"
            raise PlanError(what, fix=fix, section="mesh-size")
        if self.parallel.stages is not None and looks_together(self.training.optimizer):
            what = (
                f"optimizer {self.training.optimizer!r} looks at all parameters together, and a stage has only its own"
            )
            raise PlanError(
                what, fix="plan without stages=, or with an optimizer that updates each parameter by itself"
            )

    @staticmethod
    def of(
        module: torch.nn.Module,
        example_inputs: Any,
        cluster: Cluster | str | int,
        *,
        kwargs: Mapping[str, Any] | None = None,
        loss: Callable[..., Any] | None = None,
        **settings: Any,
    ) -> PlanRequest:
        """Make a request of the arguments of ``sw.plan``.

        Raises:
            ShardwiseError: A setting is invalid. PlanError: the mesh has not the cluster's number of devices.
            TypeError: A keyword is no setting.
        """
        groups = _grouped(settings)
        configs = {name: make(**groups.get(name, {})) for name, make in _GROUPS.items()}
        if isinstance(cluster, int) and configs["search"].memory_bytes is None:  # no description: no memory limit
            configs["search"] = replace(configs["search"], memory_bytes=inf)
        args, named = call_arguments(example_inputs, kwargs)
        priced = _priced(Cluster.of(cluster), configs["training"])
        return PlanRequest(module=module, args=args, kwargs=named, loss=loss, cluster=priced, **configs)

    def varied(self, cluster: Cluster | None = None, samples: int | None = None, **settings: Any) -> PlanRequest:
        """Return the request with another cluster, number of samples in its inputs, or settings, by name."""
        groups = {name: replace(getattr(self, name), **changes) for name, changes in _grouped(settings).items()}
        training = groups.get("training", self.training)
        request = replace(self, cluster=_priced(cluster or self.cluster, training), **groups)
        if samples is None:
            return request
        args, kwargs = with_samples((self.args, dict(self.kwargs)), samples)
        return replace(request, args=args, kwargs=kwargs)

    @property
    def example_samples(self) -> int | None:
        return num_samples((self.args, dict(self.kwargs)))

    @property
    def step_samples(self) -> int | None:
        return self.training.global_batch or self.example_samples

    def meshes(self, cluster: Cluster, *, by_price: bool) -> tuple[Mesh, ...]:
        """Return the meshes to try on some devices."""
        if self.parallel.mesh is not None:
            return (self.parallel.mesh,)
        if not by_price:
            return (Mesh(dp=cluster.num_devices),)
        return self.candidates or candidate_meshes(cluster, self.search.max_mesh_axes)

    @property
    def limit(self) -> float:
        """The bytes that the tensors of a device may take."""
        limit = self.search.memory_bytes
        return self.cluster.device.usable_bytes if limit is None else limit


def _priced(cluster: Cluster, training: TrainingConfig) -> Cluster:
    """Return the cluster if its devices compute what the request's precision asks for."""
    products = training.precision.products if training.precision is not None else None
    if products is not None and cluster.device.is_cuda:
        cluster.with_products("f8")
    return cluster


def _grouped(settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return settings of ``sw.plan`` by the config that holds them. Raises TypeError for a name that none has."""
    groups: dict[str, dict[str, Any]] = {}
    for name, value in settings.items():
        if name not in _GROUP_OF:
            raise TypeError(f"sw.plan has no setting {name!r}; it has {', '.join(_GROUP_OF)}")
        groups.setdefault(_GROUP_OF[name], {})[name] = value
    return groups
