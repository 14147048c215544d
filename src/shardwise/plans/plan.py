"""The plan: what every rank will do, as data that a person can read, compare, edit and commit.

A plan is complete. It lists the ranks of every stage, the layout of every parameter, buffer and input, and the strategy
of every operator, keyed by module path. It also lists every conversion with its path of layouts and its bucket. The
same file always builds the same program, without prices or a search. To edit a plan, change strategies or layouts in
its file and load it with ``Plan.load(path, edited=True)``: its conversions are then derived again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from shardwise.costs.pipeline_simulation import PipelinePrediction
from shardwise.costs.prediction import Prediction
from shardwise.errors import LayoutError, PlanError, ShardwiseError, problem
from shardwise.graph.step_precision import MODELS_OWN, Precision
from shardwise.layouts.layout import Layout
from shardwise.layouts.mesh import Mesh
from shardwise.layouts.placement import check_placements
from shardwise.plans.difference import PlanDifference, compare_plans
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
from shardwise.plans.file import (
    VERSION,
    check_names,
    checked_body,
    digest_of,
    plan_digest,
    precision_body,
    pricing_body,
    settings_of,
    stage_body,
)
from shardwise.plans.printing import format_plan
from shardwise.plans.quantities import format_ranges
from shardwise.plans.survival import Survival, survival
from shardwise.untrusted_text import MAX_FILE, check_texts, read_text

_NUM_SHOWN = 20  # faults of a plan in one message


@dataclass(frozen=True, eq=False)
class Plan:
    """A complete plan. Plans are equal if all their entries are, and then their digests are equal too.

    ``mesh``, ``layouts`` and ``only_stage`` exist only for a plan of one stage.

    Attributes:
        stages: The parts of the plan, each on its own ranks. Without a pipeline there is one.
        mode, search, optimizer: As in ``sw.plan``.
        training: Whether the module was in training mode.
        bucket_bytes: Bytes of the largest message that several parameters share.
        pricing, predicted: Prices and prediction of a plan that was chosen by price.
        precision: The dtypes of the step, if they are not the model's.
        micro_batches: Micro-batches of a step. Stages, inputs and the prediction are those of one micro-batch.
        schedule: Of a pipeline, the order in which its stages work on micro-batches (``plans.schedule``).
        order: That order, if it was solved for the stages: a line per pipeline rank (``plans.schedule.format_order``).
        pipeline: The prediction of a pipeline.
        constants: What the plan's call passes beside tensors (``graph.trees.constants_of``). A call with others may
            have other operators.
    """

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

    def __eq__(self, other: object) -> bool:
        return self.digest == other.digest if isinstance(other, Plan) else NotImplemented

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

    def alone(self, number: int) -> Plan:
        """Return one of the stages as a plan of its own."""
        return replace(self, stages=(self.stages[number],), schedule="", order=(), pipeline=None)

    @property
    def mesh(self) -> Mesh:
        return self.only_stage.mesh

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks of all stages."""
        return len({rank for stage in self.stages for rank in stage.placement.ranks})

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

    def revised(self, **changes: Any) -> Plan:
        """Return the plan with other entries of its only stage.

        Args:
            changes: Fields of ``Stage`` by name. If strategies or layouts change, also pass ``conversions=None``: they
                are then derived again.
        """
        entries = {entry.name: getattr(self, entry.name) for entry in fields(Plan)}
        return Plan(**{**entries, "stages": (replace(self.only_stage, **changes),)})

    def diff(self, other: Plan) -> PlanDifference:
        """Return what another plan does differently; printable."""
        return compare_plans(self, other)

    def survives(self, ranks_per_machine: int = 1, *, peer_copies: bool = False) -> Survival:
        """Return which losses of ranks cost nothing, because other ranks hold the same state, what the others cost, and
        the cheapest extra copies; printable.

        Args:
            ranks_per_machine: Ranks that are lost together. It must divide the ranks.
            peer_copies: Assume the extra copies (``sw.Recovery(peer_copy=...)``): training goes on from these.

        Raises:
            PlanError: ``ranks_per_machine`` does not divide the ranks.
        """
        return survival(self, ranks_per_machine, peer_copies=peer_copies)

    def __str__(self) -> str:
        return format_plan(self)

    # -- its file ------------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        Path(path).write_text(json.dumps(self._file(), indent=1) + "\n", encoding="utf-8")

    def to_json(self) -> str:
        """Return the content of the file that ``save`` writes, on one line."""
        return json.dumps(self._file())

    @staticmethod
    def load(path: str | Path, *, edited: bool = False) -> Plan:
        """Read a plan from a file.

        Args:
            path: A file that ``save``, or ``shardwise plan -o``, has written.
            edited: Accept that the file was changed by hand. Its strategies and layouts are checked when the plan meets
                its model; the listed conversions are dropped and derived again.

        Raises:
            PlanError: The file is no plan of a version that can be read, is damaged, or does not fit together.
        """
        try:
            text = read_text(path, MAX_FILE)
        except (OSError, UnicodeDecodeError, ShardwiseError) as error:
            fix = "name the file that plan.save(path), or shardwise plan -o, has written"
            raise PlanError(f"cannot read the plan {path}: {error}", fix=fix) from error
        return Plan.from_json(text, name=str(path), edited=edited)

    @staticmethod
    def from_json(text: str, *, name: str = "plan", edited: bool = False) -> Plan:
        """Return the plan that ``to_json`` wrote; see ``load``.

        Args:
            text: The content of a plan file.
            name: The name of the plan in messages.
            edited: As in ``load``.
        """
        body = checked_body(text, name, edited)
        try:
            plan = Plan(**settings_of(body))
        except ShardwiseError as error:
            what, where = f"{name}: {error.what}", error.source
            text = problem(what, op=error.op, source=where, fix=error.fix, facts=error.facts, section=error.section)
            raise PlanError(text) from error
        plan.check(name)
        return replace(plan, stages=tuple(replace(s, conversions=None) for s in plan.stages)) if edited else plan

    def check(self, name: str = "plan") -> None:
        """Raise PlanError listing every layout and strategy that does not fit the mesh or the tensor, and for stages
        that leave out ranks or share some."""
        faults = [fault for stage in self.stages for fault in stage.faults()]
        try:
            ranks = [rank for stage in self.stages for rank in stage.placement.ranks]
            check_placements([stage.placement for stage in self.stages], max(ranks, default=0) + 1)
        except LayoutError as error:
            faults.append(str(error))
        if faults:
            more = [f"and {len(faults) - _NUM_SHOWN} more"] if len(faults) > _NUM_SHOWN else []
            raise PlanError("\n".join([f"{name} does not fit together:", *faults[:_NUM_SHOWN], *more]))

    def _file(self) -> dict[str, Any]:
        body = self._body()
        check_texts(body)  # refuse to write what could not be read
        for stage in body["stages"]:
            for key in ("inputs", "parameters", "buffers", "operators", "shared", "receives", "sends"):
                check_names(stage.get(key, ()), key)
        return {"format": "shardwise-plan", "version": VERSION, "digest": self.digest, **body}

    def _body(self) -> dict[str, Any]:
        return {
            "mode": self.mode,
            "search": self.search,
            "optimizer": self.optimizer,
            "training": self.training,
            "bucket_bytes": self.bucket_bytes,
            **({"micro_batches": self.micro_batches} if self.micro_batches > 1 else {}),
            **({"schedule": self.schedule} if self.schedule else {}),
            **({"order": [*self.order]} if self.order else {}),
            **({"pipeline": asdict(self.pipeline)} if self.pipeline is not None else {}),
            **({"constants": [*self.constants]} if self.constants else {}),
            "stages": [stage_body(stage) for stage in self.stages],
            "pricing": None if self.pricing is None else pricing_body(self.pricing),
            "prediction": None if self.predicted is None else asdict(self.predicted),
            **precision_body(self.precision),
        }
