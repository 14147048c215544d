"""The plan: what every rank will do, as data that a person can read, compare, edit and commit.

A plan is complete in itself. It says where every stage runs, in which layout every parameter, buffer and input is kept,
the strategy of every operator, keyed by module path, and every conversion with its path of layouts and the bucket that
it travels in. Whoever reads the same file builds the same program; no price and no search is asked again. To edit a
plan, change strategies or layouts in its file and load it with ``Plan.load(path, edited=True)``: its conversions are
then derived anew.
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
    format_ranks,
    plan_digest,
    pricing_body,
    settings_of,
    stage_body,
)
from shardwise.plans.plan_precision import precision_body
from shardwise.plans.printing import format_plan
from shardwise.plans.survival import Survival, survival
from shardwise.untrusted_text import MAX_FILE, check_texts, read_text

_NUM_SHOWN = 20  # faults of a plan in one message


@dataclass(frozen=True, eq=False)
class Plan:
    """A complete plan. Two plans are equal when all their entries are, and then their digests are equal too.

    ``training``: whether the module was in training mode. ``bucket_bytes``: the largest message that several parameters
    share. ``precision``: the dtypes of the step, where they are not the model's. ``pricing`` and ``predicted`` are
    those of a plan that was chosen by price. ``micro_batches``: the passes of a step, over a micro-batch each; the
    stages, their inputs and the prediction are those of a pass. What concerns a single stage (``mesh``, ``layouts``)
    can be asked of a plan with one. ``schedule``: of a pipeline, the order in which its stages work on micro-batches
    (``plans.schedule``), ``order``: that order, where it was solved for the stages, a line per place
    (``plans.schedule.format_order``), and ``pipeline`` what is predicted for it. ``constants``: what the plan's
    call passes beside tensors (``graph.trees.constants_of``); a call with others may have other operators.
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

    # -- what it says --------------------------------------------------------------------------------------------------

    @property
    def only_stage(self) -> Stage:
        """The stage of a plan that has one. Raises PlanError for several."""
        if len(self.stages) != 1:
            places = "; ".join(
                f"stage {i} on ranks {format_ranks(s.placement.ranks)}" for i, s in enumerate(self.stages)
            )
            raise PlanError(
                problem(f"the plan has {len(self.stages)} stages ({places}), this asks for one", fix="ask plan.stages")
            )
        return self.stages[0]

    @property
    def is_pipeline(self) -> bool:
        """Whether its stages run on different places, one after another."""
        return bool(self.schedule)

    def alone(self, number: int) -> Plan:
        """One of the stages as a plan of its own."""
        return replace(self, stages=(self.stages[number],), schedule="", order=(), pipeline=None)

    @property
    def mesh(self) -> Mesh:
        return self.only_stage.mesh

    @property
    def num_ranks(self) -> int:
        """The ranks of all stages."""
        return len({rank for stage in self.stages for rank in stage.placement.ranks})

    def holds(self, rank: int, name: str) -> bool:
        """Whether a rank has a part of a parameter or buffer."""
        return not self.is_pipeline or any(
            rank in stage.placement.ranks and name in stage.layouts for stage in self.stages
        )

    @property
    def inputs(self) -> tuple[TensorEntry, ...]:
        return tuple(entry for stage in self.stages for entry in stage.inputs)

    @property
    def input_layouts(self) -> dict[str, Layout]:
        """Input -> its layout in the first stage that reads it, over the mesh of that stage: where ranks pass their
        parts of a batch, the part of a rank is that of its device number in its stage."""
        layouts: dict[str, Layout] = {}
        for stage in reversed(self.stages):
            layouts |= {entry.name: stage.layouts[entry.name] for entry in stage.inputs}
        return layouts

    @property
    def micro_batch(self) -> int | None:
        """The samples of a pass: dim 0 of the first input that has dims; None: no input has."""
        return next((entry.shape[0] for entry in self.inputs if entry.shape), None)

    @property
    def parameters(self) -> tuple[ParameterEntry, ...]:
        return tuple(entry for stage in self.stages for entry in stage.parameters)

    @property
    def buffers(self) -> tuple[TensorEntry, ...]:
        return tuple(entry for stage in self.stages for entry in stage.buffers)

    @property
    def operators(self) -> tuple[OperatorEntry, ...]:
        """In execution order."""
        return tuple(entry for stage in self.stages for entry in stage.operators)

    @property
    def conversions(self) -> tuple[ConversionEntry, ...]:
        """In execution order; none of a stage that was edited by hand."""
        return tuple(entry for stage in self.stages for entry in stage.conversions or ())

    @property
    def shared(self) -> tuple[SharedEntry, ...]:
        return tuple(entry for stage in self.stages for entry in stage.shared)

    @cached_property
    def strategies(self) -> dict[str, str]:
        """Operator -> its strategy."""
        return {entry.name: entry.strategy for entry in self.operators}

    @property
    def layouts(self) -> dict[str, Layout]:
        """Parameter, buffer or input name -> its layout."""
        return self.only_stage.layouts

    def collectives(self, *, backward: bool = False) -> Iterator[CollectiveEntry]:
        """All collectives of a forward pass in order (or those of a backward pass, newest conversion first); what
        travels in one bucket is one collective."""
        for stage in reversed(self.stages) if backward else self.stages:
            yield from stage.collectives(backward=backward)

    @property
    def prediction(self) -> Prediction:
        """What a step takes, in seconds and bytes (``predicted``, for a plan that has it). Raises PlanError for one of
        stages, and for one of a file without prices."""
        if self.predicted is None:
            raise PlanError(
                problem(
                    "the plan has no prediction: it is of stages, or its file has no prices",
                    fix='plan again with sw.plan(..., search="dynamic_programming"), or ask sw.fits for its step',
                )
            )
        return self.predicted

    @property
    def is_searched(self) -> bool:
        """Whether it was chosen by price: a search minimised its additive price."""
        return self.predicted is not None and self.predicted.additive_price > 0

    @property
    def optimality_gap(self) -> float | None:
        """By which share the additive price of this plan is above the bound, below which no plan of the searched space
        is; 0: proven to be the cheapest; None: nothing was searched. It says nothing about simulated steps: what was
        given away for those is ``prediction.given_away``."""
        return None if self.predicted is None else self.predicted.optimality_gap

    @cached_property
    def digest(self) -> str:
        """SHA-256 over everything in the plan, but for the prediction of one that was not searched."""
        return plan_digest(self._body())

    @cached_property
    def model(self) -> str:
        """A fingerprint of the model that the plan is for: its parameters, buffers and operators, however they are
        split."""
        tensors = [(e.name, e.dtype, e.shape) for e in (*self.parameters, *self.buffers)]
        return digest_of({"tensors": tensors, "operators": [(e.name, e.target) for e in self.operators]})[:12]

    def revised(self, **changes: Any) -> Plan:
        """The plan with other entries of its only stage (``Stage``), by name. Where strategies or layouts change, give
        ``conversions=None``: they are then derived anew."""
        entries = {entry.name: getattr(self, entry.name) for entry in fields(Plan)}
        return Plan(**{**entries, "stages": (replace(self.only_stage, **changes),)})

    def diff(self, other: Plan) -> PlanDifference:
        """What another plan does differently."""
        return compare_plans(self, other)

    def survives(self, ranks_per_machine: int = 1, *, peer_copies: bool = False) -> Survival:
        """Which losses of ranks cost nothing, because others hold the same, which cost how much, and what the cheapest
        extra copies would be; printable. ``ranks_per_machine``: ranks that are lost together; ``peer_copies``: those
        copies are made (``sw.Recovery(peer_copy=...)``), so that training goes on from the newest of them."""
        return survival(self, ranks_per_machine, peer_copies=peer_copies)

    def __str__(self) -> str:
        return format_plan(self)

    # -- its file ------------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        Path(path).write_text(json.dumps(self._file(), indent=1) + "\n", encoding="utf-8")

    def to_json(self) -> str:
        """The content of the file that ``save`` writes, on one line."""
        return json.dumps(self._file())

    @staticmethod
    def load(path: str | Path, *, edited: bool = False) -> Plan:
        """Read a plan. ``edited``: accept that the file was changed by hand since it was saved (strategies and layouts
        are then checked when the plan meets its model; the listed conversions are dropped and derived anew).

        Raises PlanError for what is not a plan of a version that can be read, is damaged, or does not fit together.
        """
        try:
            text = read_text(path, MAX_FILE)
        except (OSError, UnicodeDecodeError, ShardwiseError) as error:
            fix = "name the file that plan.save(path), or shardwise plan -o, has written"
            raise PlanError(problem(f"cannot read the plan {path}: {error}", fix=fix)) from error
        return Plan.from_json(text, name=str(path), edited=edited)

    @staticmethod
    def from_json(text: str, *, name: str = "plan", edited: bool = False) -> Plan:
        """The inverse of ``to_json``; see ``load``. ``name``: what messages call it."""
        body = checked_body(text, name, edited)
        try:
            plan = Plan(**settings_of(body))
        except ShardwiseError as error:
            raise PlanError(f"{name}: {error}") from error
        plan.check(name)
        return replace(plan, stages=tuple(replace(s, conversions=None) for s in plan.stages)) if edited else plan

    def check(self, name: str = "plan") -> None:
        """Raise PlanError listing every layout and strategy text that does not fit the mesh or the tensor, and for
        stages that leave out ranks or share some."""
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
        check_texts(body)  # what cannot be read again is not written
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


__all__ = [
    "CollectiveEntry",
    "ConversionEntry",
    "OperatorEntry",
    "Plan",
    "PricingEntry",
    "SharedEntry",
    "Stage",
    "TensorEntry",
]
