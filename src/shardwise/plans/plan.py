"""The plan: what every rank will do, as data that a person can read, compare, edit and commit.

A plan is complete. It lists the ranks of every stage, the layout of every parameter, buffer and input, and the strategy
of every operator, keyed by module path. It also lists every conversion with its path of layouts and its bucket. The
same file always builds the same program, without prices or a search. To edit a plan, change strategies or layouts in
its file and load it with ``Plan.load(path, edited=True)``: its conversions are then derived again.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from shardwise.errors import LayoutError, PlanError, ShardwiseError, problem
from shardwise.layouts.placement import check_placements
from shardwise.plans.difference import PlanDifference, compare_plans
from shardwise.plans.file import VERSION, check_names, checked_body, settings_of
from shardwise.plans.plan_data import PlanData
from shardwise.plans.printing import format_plan
from shardwise.plans.survival import Survival, survival
from shardwise.untrusted_text import MAX_FILE, check_texts, read_text

_NUM_SHOWN = 20  # faults of a plan in one message


@dataclass(frozen=True, eq=False)
class Plan(PlanData):
    """A complete plan. Plans are equal if all their entries are, and then their digests are equal too.

    ``mesh``, ``layouts`` and ``only_stage`` exist only for a plan of one stage.

    Attributes:
        stages: The parts of the plan, each on its own ranks. Without a pipeline there is one.
        mode, search, optimizer: As in ``sw.plan``.
        training: Whether the module was in training mode.
        bucket_bytes: Bytes of the largest message that several parameters share.
        prefetch: Depth of gathers of parameters: 2 starts each a group of products earlier.
        row_chunks: Chunks of rows: the message of one travels beside the products of another. ``"fused"``: messages
            run within products.
        pricing, predicted: Prices and prediction of a plan that was chosen by price.
        precision: The dtypes of the step, if they are not the model's.
        micro_batches: Micro-batches of a step. Stages, inputs and the prediction are those of one micro-batch.
        schedule: Of a pipeline, the order in which its stages work on micro-batches (``plans.schedule``).
        order: That order, if it was solved for the stages: a line per pipeline rank (``plans.schedule.format_order``).
        pipeline: The prediction of a pipeline.
        constants: What the plan's call passes beside tensors (``graph.trees.constants_of``). A call with others may
            have other operators.
        per_micro_batch: Names of the terms of the loss that every micro-batch computes alone; their average counts.
    """

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
