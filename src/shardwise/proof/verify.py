"""``verify``: compares a plan on the virtual cluster with the module on one device, in float64 and, if the plan has a
precision, also in its dtypes.

It compares the loss, every output, every gradient, the buffers, and the parameters and buffers after optimizer steps
(``errors_by_tensor`` defines errors, ``rounding`` distinguishes them from rounding).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from shardwise.errors import ShardwiseError, listed
from shardwise.graph.autocast import check_ambient
from shardwise.graph.batch import batch_size
from shardwise.graph.call_arguments import call_arguments
from shardwise.graph.capture import Capture, capture
from shardwise.graph.code_reachability import empty_tensor_caches, reachable_code
from shardwise.graph.fakes import deep_copy, empty_copy
from shardwise.graph.ir import Graph
from shardwise.graph.switches import default_dtype
from shardwise.graph.to_float64 import to_float64
from shardwise.graph.trees import call_constants, flatten
from shardwise.layouts.conversions import Collective
from shardwise.plans.bind import program_of, same_inputs
from shardwise.plans.bind_stages import bound, step_graph
from shardwise.plans.micro_batch_search import Example
from shardwise.plans.plan import Plan
from shardwise.plans.result import PlanningResult, plan_of
from shardwise.programs.micro_batches import Passes
from shardwise.progress import each, show_progress
from shardwise.proof.dtypes import DtypeReport, in_dtypes, stored_module
from shardwise.proof.errors_by_tensor import Key, TensorError, Values
from shardwise.proof.locate import first_wrong
from shardwise.proof.ranks import DirectionCollectives, VirtualRanks
from shardwise.proof.rounding import Rounding, explain, of_sources
from shardwise.proof.runs import OneDevice, RunStart, as_leaf, widened, widened_module
from shardwise.proof.substance import Substance
from shardwise.runtime.initial.materialize import full_tensors
from shardwise.untrusted_text import is_number

# The resolution of float64 is 2.2e-16; reordered sums of a few thousand terms stay below this through tens of layers.
TOLERANCE = 1e-9
MOST_STEPS = 1_000_000


@dataclass(frozen=True)
class Report:
    """The result of ``verify``; print it for a summary.

    Args:
        differences: The worst error of every compared tensor, worst first.
        tolerance: The largest relative error that counts as equal.
        forward: Collectives performed in forward of the first step.
        backward: Collectives performed in backward of the first step.
        planned_forward: Collectives that the program lists for forward.
        planned_backward: Collectives that the program lists for backward.
        matches_plan: Whether the plan's own list names the same collectives.
        untraceable: Operators whose backward autograd runs inside of one instruction, with the reason.
        rounding: The analysis of tensors that differ by more than the tolerance.
        first_wrong: Operator, line and rank at which a program that differs goes wrong, if known.
        in_dtypes: The comparison in the plan's own dtypes, if the plan has a precision.
        not_proven: Why equal numbers prove nothing: a loss of nan, or gradients of zero.
        notes: Further remarks, such as elements that are not finite on both sides.
    """

    differences: tuple[TensorError, ...]
    tolerance: float
    forward: tuple[Collective, ...]
    backward: tuple[Collective, ...]
    planned_forward: tuple[Collective, ...]
    planned_backward: tuple[Collective, ...]
    matches_plan: bool
    untraceable: Mapping[str, str] = field(default_factory=dict)
    rounding: Rounding | None = None
    first_wrong: str = ""
    in_dtypes: DtypeReport | None = None
    not_proven: str = ""
    notes: tuple[str, ...] = ()

    @property
    def max_error(self) -> float:
        return self.differences[0].error if self.differences else 0.0

    @property
    def collectives_match(self) -> bool:
        performed = (self.forward, self.backward)
        return self.matches_plan and performed == (self.planned_forward, self.planned_backward)

    @property
    def is_equal(self) -> bool:
        """Whether all values are equal, rounding aside, and all collectives are the planned ones."""
        same = self.max_error <= self.tolerance or (self.rounding is not None and not self.rounding.unexplained)
        return same and self.collectives_match and (self.in_dtypes is None or self.in_dtypes.ok)

    @property
    def ok(self) -> bool:
        """Whether the plan is proven: all is equal, and the values can prove something."""
        return self.is_equal and not self.not_proven

    def __str__(self) -> str:
        lines = [f"NOT PROVEN: {self.not_proven}"] if self.not_proven else []
        verdict = "equal" if self.is_equal else "NOT EQUAL"
        lines.append(
            f"{verdict}: worst relative error {self.max_error:.2g} over {len(self.differences)} tensors "
            f"(tolerance {self.tolerance:g})"
        )
        lines += [f"  {d.kind} {d.name}: {d.error:.2g} on rank {d.rank}" for d in self.differences[:3]]
        lines += [] if self.rounding is None else [f"  {line}" for line in self.rounding.lines()]
        lines += [f"  first wrong: {self.first_wrong}"] if self.first_wrong else []
        lines += [] if self.in_dtypes is None else [f"  {line}" for line in self.in_dtypes.lines()]
        lines += [f"  {note}" for note in self.notes]
        counts = f"{len(self.forward)} forward, {len(self.backward)} backward collectives"
        lines.append(f"  {counts}, {'as planned' if self.collectives_match else 'NOT as planned'}")
        lines += [f"  backward of {name} is autograd's: {why}" for name, why in self.untraceable.items()]
        return "\n".join(lines)


def verify(
    module: torch.nn.Module,
    example_inputs: Any,
    plan: Plan | PlanningResult,
    *,
    kwargs: Mapping[str, Any] | None = None,
    loss: Callable[..., Any] | None = None,
    steps: int = 3,
    tolerance: float = TOLERANCE,
    seed: int | None = None,
) -> Report:
    """Verify that ``module`` under ``plan`` computes what one device computes.

    It runs optimizer steps on the virtual cluster and on one device, both in float64, and compares them.

    Floating-point inputs, parameters, buffers and casts to lower precision inside the model are widened in both runs,
    and float64 is torch's default dtype; dropout draws the same hashed masks in both. A plan with a precision is also
    compared in its own dtypes (``proof.dtypes``). If the loss or a gradient is nan on one device, or gradients are zero
    everywhere, nothing is proven: the report is not ``ok``, and ``not_proven`` gives the reason (``proof.substance``).

    Args:
        module: The model that was planned.
        example_inputs: A tuple of positional inputs (or one tensor), whole and with values. For a plan of several
            micro-batches, the whole batch of a step, of any size: ranks run its micro-batches, one device runs it at
            once. Only running statistics, and the terms of the loss that the plan takes per micro-batch, are computed
            per micro-batch in both; if the loss depends on statistics that are not those of a batch norm, one device
            runs the micro-batches one after another, and the report says it.
        plan: The plan to verify.
        kwargs: Named inputs, in addition to positional ones.
        loss: ``loss(output, *targets)``, as for ``sw.plan``.
        steps: Number of optimizer steps.
        tolerance: The largest relative error that counts as equal (``proof.errors_by_tensor``). Larger ones may still
            be explained as rounding (``proof.rounding``).
        seed: Seed of the initial values of parameters on the meta device.

    Returns:
        The report. ``report.ok`` is true if the plan is proven.

    Raises:
        PlanError: The plan does not fit the module or its inputs.
        ShardwiseError: An argument is invalid, or inputs have no values.
    """
    plan = plan_of(plan)
    if not isinstance(plan, Plan):
        raise ShardwiseError(
            f"the plan is of type {type(plan).__name__}", fix="pass the result of sw.plan or sw.Plan.load"
        )
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ShardwiseError(f"steps is {steps!r}: nothing would be compared", fix="use an integer from 1")
    if not (is_number(tolerance) and tolerance >= 0):
        raise ShardwiseError(f"tolerance is {tolerance!r}", fix="use a relative error of 0 or more")
    if isinstance(seed, bool) or not isinstance(seed, int | None):
        raise ShardwiseError(f"seed is {seed!r}", fix="use an integer; omit it for the seed of torch")
    if steps > MOST_STEPS:
        raise ShardwiseError(f"steps is {steps}", fix=f"use an integer up to {MOST_STEPS:,}")
    args, named = call_arguments(example_inputs, kwargs)
    need_values((args, named))
    # Another autocast than planned would go unnoticed: in float64 its casts are no-ops.
    check_ambient(plan.precision.autocast, "around sw.verify")
    if plan.is_pipeline or plan.micro_batches > 1:  # their steps return no gradients of inputs
        args, named = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, (args, named))
    call = Example.of(plan, module, (args, named), loss)
    captured = capture(
        module, args, named, loss=loss, precision=plan.precision, input_gradients=True, heads=plan.fused_heads
    ).with_terms(plan.terms)
    verification = _Verification(plan, captured, call)
    return verification.report(steps, tolerance, seed)


@dataclass
class _Verification:
    """A plan with the call that it is verified on. ``is_planned``: the plan lists this very step: the graph of a single
    micro-batch has other operators than that of one of several."""

    plan: Plan
    captured: Capture
    call: Example

    def __post_init__(self) -> None:
        plan, count = self.plan, batch_size(self.captured.graph) or 0
        self.in_passes = plan.micro_batches > 1 and count > (plan.micro_batch or 0)
        self.is_planned = plan.micro_batches == 1 or self.in_passes
        self.constants = call_constants(self.call.arguments)
        self.training = self.call.module.training if self.is_planned else None

    def report(self, steps: int, tolerance: float, seed: int | None) -> Report:
        plan, call = self.plan, self.call
        initial = with_values(call.module, seed)
        code = reachable_code(call.module, call.loss)
        with default_dtype(torch.float64) as models_default, empty_tensor_caches(code, keeps=False):
            narrow, wide = self._passes(models_default)
            args, kwargs = pytree.tree_map_only(torch.Tensor, lambda x: as_leaf(widened(x), x), call.arguments)
            start = {
                "module": widened_module(initial),
                "args": args,
                "kwargs": kwargs,
                "models_default": models_default,
            }
            ranks = self._ranks(wide, narrow, start)
            substance, worst, records = self._compare(ranks, steps)
            differences = tuple(sorted(worst.values(), key=lambda d: -d.error))
            wrong = [difference for difference in differences if not difference.error <= tolerance]
            in_own_dtypes = None
            if not plan.precision.is_models:
                args, kwargs = pytree.tree_map_only(
                    torch.Tensor, lambda x: as_leaf(x.detach().cpu(), x), call.arguments
                )
                start |= {"module": stored_module(initial, plan), "args": args, "kwargs": kwargs}
                start["precision"] = plan.precision
                with default_dtype(models_default), empty_tensor_caches(code, keeps=False):
                    in_own_dtypes = in_dtypes(self._ranks(narrow, None, start), steps)
            rounding = explain(ranks, wrong, steps, tolerance) if wrong else None
            unexplained = [] if rounding is None else [difference for difference, _ in rounding.unexplained]
            forward, backward = records[: len(plan.stages)], records[len(plan.stages) :]
            programs = [of_stage[0] for of_stage in ranks.programs[ranks.passes.sizes[0]]]
            notes = substance.notes([(d.kind, d.name) for d in wrong])
            if ranks.passes.terms is not None:
                notes.append(f"averaged over {plan.micro_batches} micro-batches on both sides: {', '.join(plan.terms)}")
            if ranks.start.runs_in_turn:
                written = listed(sorted(ranks.start.statistics or ranks.passes.statistics))
                notes.append(
                    f"one device runs the graphs of the {plan.micro_batches} micro-batches one after another: each "
                    f"updates {written}, on which the loss depends"
                )
            if plan.splits_nothing:
                notes.append(f"nothing is split: each of {plan.num_ranks} ranks computes the whole model")
            return Report(
                differences=differences,
                tolerance=tolerance,
                forward=_joined(side.performed for side in forward),
                backward=_joined(side.performed for side in backward),
                planned_forward=_joined(side.planned for side in forward),
                planned_backward=_joined(side.planned for side in backward),
                matches_plan=self._lists(ranks, records),
                untraceable={name: why for program in programs for name, why in program.untraceable.items()},
                rounding=rounding,
                first_wrong=first_wrong(ranks, unexplained, tolerance),
                in_dtypes=in_own_dtypes,
                not_proven=substance.not_proven,
                notes=tuple(notes),
            )

    def _passes(self, models_default: torch.dtype) -> tuple[Passes, Passes]:
        """Return the micro-batches of a step, in the model's dtypes and in float64."""
        graph = self.captured.graph
        if self.plan.is_pipeline:
            graph = step_graph(graph)
        if not self.in_passes:
            return Passes.single(graph), Passes.single(to_float64(graph))
        assert self.plan.micro_batch is not None, "a plan of several passes has samples"

        def wide(samples: int) -> Graph:
            with default_dtype(models_default):
                return to_float64(self.call.graph(samples))

        with default_dtype(models_default):
            narrow = Passes.of(graph, self.plan.micro_batch, self.call.graph)
        return narrow, Passes.of(to_float64(graph), self.plan.micro_batch, wide)

    def _ranks(self, passes: Passes, narrow: Passes | None, start: Mapping[str, Any]) -> VirtualRanks:
        """Return the ranks with the programs of the micro-batches. ``narrow``: the micro-batches in the model's dtypes,
        if ``passes`` are in float64; ``start``: further fields of the start."""
        plan = self.plan
        bounds = {
            size: bound(
                plan,
                graph,
                prelude=passes.prelude,
                training=self.training,
                original=None if narrow is None else narrow.graphs[size],
                constants=self.constants,
            )
            for size, graph in passes.graphs.items()
        }
        prelude = None
        if passes.prelude is not None and not plan.is_pipeline:
            prelude = program_of(plan, passes.prelude, original=None if narrow is None else narrow.prelude)
        spmds = bounds[passes.sizes[0]].spmds
        held = ((source, spmd.layouts[source.value]) for spmd in spmds for source in spmd.graph.sources)
        run_start = RunStart(
            captured=self.captured,
            loss=self.call.loss,
            optimizer=plan.optimizer,
            passes=passes,
            returns_outputs=not (plan.is_pipeline or self.in_passes),
            sharded=frozenset(s.value for s, at in held if s.kind in ("parameter", "buffer") and at.positions),
            **start,
        )
        return VirtualRanks(run_start, plan, bounds, prelude)

    def _compare(
        self, ranks: VirtualRanks, steps: int
    ) -> tuple[Substance, dict[Key, TensorError], tuple[DirectionCollectives, ...]]:
        """Run the steps and return what one device's values prove, the differences, and the collectives of the first
        step."""
        single, substance = OneDevice(ranks.start), Substance(ranks.start)
        worst: dict[Key, TensorError] = {}
        records: tuple[DirectionCollectives, ...] = ()
        earlier: list[tuple[Values, list[Values]]] = []
        with show_progress("proving the plan"):
            for step in each(range(steps), lambda _: f"steps on one device and on {len(ranks.ranks)} virtual ranks"):
                expected, actual = single.step(step), ranks.step(step)
                substance.note(step, expected)
                records = records or ranks.sides
                for want, have in (*earlier, (expected, actual)):  # earlier outputs may have been overwritten
                    ranks.compare(want, have, worst)
                captured = self.captured
                earlier.append((of_sources(expected, captured), [of_sources(values, captured) for values in actual]))
        return substance, worst, records

    def _lists(self, ranks: VirtualRanks, records: Sequence[DirectionCollectives]) -> bool:
        """Return whether the plan lists the recorded collectives, by kind and axes. Bytes are ignored, because
        everything is float64 here, and so is the order: a plan lists conversions where they are needed. An edited plan
        has no list, and a plan for another call none that can be compared: both return True."""
        if not self.is_planned or self.constants != self.plan.constants:
            return True
        parts = ranks.first.cut.parts
        for number, part in enumerate(parts):
            plan = self.plan.alone(number)
            for side in (records[number], records[len(parts) + number]) if same_inputs(plan, part) else ():
                listed = plan.collectives(backward=side.name.startswith("backward"))
                performed = Counter((c.kind, plan.mesh.format_axes(c.axes)) for c in side.performed)
                if side.name.startswith("backward"):
                    extra = (c for largest in ranks.first.spmds[number].largest.values() for c in largest.collectives())
                    performed -= Counter((c.kind, plan.mesh.format_axes(c.axes)) for c in extra)
                if plan.conversions and performed != Counter((c.kind, c.axes) for c in listed):
                    return False
        return True


def _joined(collectives: Iterable[tuple[Collective, ...]]) -> tuple[Collective, ...]:
    return tuple(collective for of_stage in collectives for collective in of_stage)


def need_values(inputs: Any, what: str = "verify") -> None:
    """Raise ShardwiseError for inputs without values."""
    if any(isinstance(x, torch.Tensor) and x.is_meta for x in flatten(inputs)[0]):
        raise ShardwiseError(
            f"{what} needs inputs with values, not meta tensors", fix="pass a real batch; planning takes meta tensors"
        )


def with_values(module: torch.nn.Module, seed: int | None) -> torch.nn.Module:
    """Return a copy on the CPU with the module's (initial) values."""
    if not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        return deep_copy(module).cpu()
    twin = empty_copy(module, "cpu")
    tensors = {**dict(twin.named_parameters()), **dict(twin.named_buffers())}
    with torch.no_grad():
        for name, full in full_tensors(module, seed):
            tensors[name].copy_(full)
    return twin


__all__ = ["Report", "TensorError", "need_values", "verify", "with_values"]
