"""The content of a plan, as data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Self

from shardwise.costs.pipeline_simulation import PipelinePrediction
from shardwise.costs.prediction import Prediction
from shardwise.errors import PlanError
from shardwise.graph.head_loss import fused_heads
from shardwise.graph.step_precision import MODELS_OWN, Precision
from shardwise.layouts.layout import Layout
from shardwise.layouts.mesh import Mesh
from shardwise.plans.entries import (
    CollectiveEntry,
    ConversionEntry,
    OperatorEntry,
    ParameterEntry,
    PricingEntry,
    SharedEntry,
    Stage,
    TensorEntry,
)
from shardwise.plans.file import digest_of, plan_digest, precision_body, pricing_body, stage_body
from shardwise.plans.quantities import format_ranges
from shardwise.programs.builder import RowChunks
from shardwise.rules.keyed_rows import IMBALANCE


@dataclass(frozen=True, eq=False)
class PlanData:
    """The content of a plan, without what prints it, compares it or saves it (``plans.plan``)."""

    stages: tuple[Stage, ...]
    mode: str
    search: str
    optimizer: str
    training: bool
    bucket_bytes: int
    pricing: PricingEntry | None = None
    predicted: Prediction | None = None
    precision: Precision = MODELS_OWN
    micro_batches: int = 1
    schedule: str = ""
    order: tuple[str, ...] = ()
    pipeline: PipelinePrediction | None = None
    constants: tuple[str, ...] = ()
    imbalance: float = IMBALANCE
    per_micro_batch: tuple[str, ...] = ()
    prefetch: int = 1
    row_chunks: RowChunks = 1

    def __eq__(self, other: object) -> bool:
        return self.digest == other.digest if isinstance(other, PlanData) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.digest)

    # -- contents ------------------------------------------------------------------------------------------------------

    @property
    def only_stage(self) -> Stage:
        """Return the stage of a plan that has one. Raises PlanError for several."""
        if len(self.stages) != 1:
            places = "; ".join(
                f"stage {i} on ranks {format_ranges(s.placement.ranks)}" for i, s in enumerate(self.stages)
            )
            raise PlanError(
                f"the plan has {len(self.stages)} stages ({places}), and this needs one", fix="use plan.stages"
            )
        return self.stages[0]

    @property
    def is_pipeline(self) -> bool:
        """Return whether its stages run on different ranks, one after another."""
        return bool(self.schedule)

    def alone(self, number: int) -> Self:
        """Return one of the stages as a plan of its own."""
        return replace(self, stages=(self.stages[number],), schedule="", order=(), pipeline=None)

    @property
    def mesh(self) -> Mesh:
        return self.only_stage.mesh

    @property
    def fused_heads(self) -> frozenset[str]:
        """Return which heads are one operator with their cross entropy (``graph.head_loss``)."""
        return fused_heads((entry.name, entry.target) for stage in self.stages for entry in stage.operators)

    @property
    def terms(self) -> tuple[str, ...]:
        """Return the names of the terms of the loss that are taken per micro-batch: none if a step has one."""
        return self.per_micro_batch if self.micro_batches > 1 else ()

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks of all stages."""
        return len({rank for stage in self.stages for rank in stage.placement.ranks})

    @property
    def splits_nothing(self) -> bool:
        """Return whether each of several devices computes the whole step."""
        splits = (s for stage in self.stages for s in stage.strategies.values() if "@" in s)
        held = (at for stage in self.stages for at in stage.layouts.values() if at.positions)
        return self.num_ranks > 1 and not self.is_pipeline and next(splits, None) is None and next(held, None) is None

    def holds(self, rank: int, name: str) -> bool:
        """Return whether a rank has a part of the parameter or buffer ``name``."""
        return not self.is_pipeline or any(
            rank in stage.placement.ranks and name in stage.layouts for stage in self.stages
        )

    @property
    def inputs(self) -> tuple[TensorEntry, ...]:
        return tuple(entry for stage in self.stages for entry in stage.inputs)

    @property
    def input_layouts(self) -> dict[str, Layout]:
        """Return the layout of each input in the first stage that reads it, over the mesh of that stage. With
        ``inputs="local"`` a rank passes the part of its device number in its stage."""
        layouts: dict[str, Layout] = {}
        for stage in reversed(self.stages):
            layouts |= {entry.name: stage.layouts[entry.name] for entry in stage.inputs}
        return layouts

    @property
    def micro_batch(self) -> int | None:
        """Return the samples of a micro-batch: dim 0 of the first input that has dims; None if no input has."""
        return next((entry.shape[0] for entry in self.inputs if entry.shape), None)

    @property
    def parameters(self) -> tuple[ParameterEntry, ...]:
        return tuple(entry for stage in self.stages for entry in stage.parameters)

    @property
    def buffers(self) -> tuple[TensorEntry, ...]:
        return tuple(entry for stage in self.stages for entry in stage.buffers)

    @property
    def operators(self) -> tuple[OperatorEntry, ...]:
        """Return all operators in execution order."""
        return tuple(entry for stage in self.stages for entry in stage.operators)

    @property
    def conversions(self) -> tuple[ConversionEntry, ...]:
        """Return all conversions in execution order; a stage that was edited by hand has none."""
        return tuple(entry for stage in self.stages for entry in stage.conversions or ())

    @property
    def shared(self) -> tuple[SharedEntry, ...]:
        return tuple(entry for stage in self.stages for entry in stage.shared)

    @cached_property
    def strategies(self) -> dict[str, str]:
        """Return the strategy of each operator."""
        return {entry.name: entry.strategy for entry in self.operators}

    @property
    def layouts(self) -> dict[str, Layout]:
        """Return the layout of each parameter, buffer or input."""
        return self.only_stage.layouts

    def collectives(self, *, backward: bool = False) -> Iterator[CollectiveEntry]:
        """Yield all collectives of a forward pass in order. The conversions of a bucket share one collective.

        Args:
            backward: Yield those of a backward pass instead, newest conversion first.
        """
        for stage in reversed(self.stages) if backward else self.stages:
            yield from stage.collectives(backward=backward)

    @property
    def prediction(self) -> Prediction:
        """Return the predicted seconds and bytes of a step (``predicted``, for a plan that has it). Raises PlanError
        for a plan of stages, and for one of a file without prices."""
        if self.predicted is None:
            raise PlanError(
                "the plan has no prediction: it is of stages, or its file has no prices",
                fix='plan again with sw.plan(..., search="dynamic_programming"), or ask sw.fits for its step',
            )
        return self.predicted

    @property
    def is_searched(self) -> bool:
        """Return whether it was chosen by price: a search minimised its additive price."""
        return self.predicted is not None and self.predicted.additive_price > 0

    @property
    def optimality_gap(self) -> float | None:
        """Return the share by which the additive price of this plan exceeds the bound: no plan of the searched space is
        below that. 0: proven to be the cheapest; None: nothing was searched. The gap is not about simulated steps:
        ``prediction.given_away`` is what was given away for those."""
        return None if self.predicted is None else self.predicted.optimality_gap

    @cached_property
    def digest(self) -> str:
        """Return the SHA-256 of everything in the plan, except for the prediction of one that was not searched."""
        return plan_digest(self._body())

    @cached_property
    def model(self) -> str:
        """Return a fingerprint of the model that the plan is for: its parameters, buffers and operators, however they
        are split."""
        tensors = [(e.name, e.dtype, e.shape) for e in (*self.parameters, *self.buffers)]
        return digest_of({"tensors": tensors, "operators": [(e.name, e.target) for e in self.operators]})[:12]

    def _body(self) -> dict[str, Any]:
        return {
            "mode": self.mode,
            "search": self.search,
            "optimizer": self.optimizer,
            "training": self.training,
            "bucket_bytes": self.bucket_bytes,
            **({"prefetch": self.prefetch} if self.prefetch > 1 else {}),
            **({"row_chunks": self.row_chunks} if self.row_chunks != 1 else {}),
            **({"micro_batches": self.micro_batches} if self.micro_batches > 1 else {}),
            **({"schedule": self.schedule} if self.schedule else {}),
            **({"order": [*self.order]} if self.order else {}),
            **({"pipeline": asdict(self.pipeline)} if self.pipeline is not None else {}),
            **({"constants": [*self.constants]} if self.constants else {}),
            **({"per_micro_batch": [*self.per_micro_batch]} if self.terms else {}),
            **({"imbalance": self.imbalance} if self.imbalance != IMBALANCE else {}),
            "stages": [stage_body(stage) for stage in self.stages],
            "pricing": None if self.pricing is None else pricing_body(self.pricing),
            "prediction": None if self.predicted is None else asdict(self.predicted),
            **precision_body(self.precision),
        }
