"""``verify``: compares a plan on the virtual cluster with the module on one device, in float64 and, if the plan has a
precision, also in its dtypes.

It compares the loss, every output, every gradient, the buffers, and the parameters and buffers after optimizer steps
(``errors_by_tensor`` defines errors, ``rounding`` distinguishes them from rounding).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from shardwise.errors import ShardwiseError, problem
from shardwise.graph.autocast import check_ambient
from shardwise.graph.batch import batch_size
from shardwise.graph.call_arguments import call_arguments
from shardwise.graph.capture import Capture, capture
from shardwise.graph.code_reachability import empty_tensor_caches, reachable_code
from shardwise.graph.fakes import deep_copy
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
from shardwise.programs.lifetimes import backward_collectives
from shardwise.programs.micro_batches import Passes
from shardwise.programs.spmd import SpmdProgram
from shardwise.progress import each, show_progress
from shardwise.proof.dtypes import DtypeComparison, DtypeReport, in_dtypes, stored_module
from shardwise.proof.errors_by_tensor import Key, TensorError, Values
from shardwise.proof.locate import without_overwrites, wrong_gradient, wrong_result
from shardwise.proof.micro_batch_runs import OneDeviceMicroBatches, RanksMicroBatches
from shardwise.proof.pipeline_ranks import PipelineRanks
from shardwise.proof.rounding import Rounding, explain, of_sources
from shardwise.proof.runs import OneDevice, Ranks, RunStart, as_leaf, widened, widened_module
from shardwise.proof.substance import Substance
from shardwise.proof.virtual import run_forward
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
            once. Only running statistics are computed per micro-batch in both.
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
            problem(f"the plan is of type {type(plan).__name__}", fix="pass the result of sw.plan or sw.Plan.load")
        )
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ShardwiseError(problem(f"steps is {steps!r}: nothing would be compared", fix="use an integer from 1"))
    if not (is_number(tolerance) and tolerance >= 0):
        raise ShardwiseError(problem(f"tolerance is {tolerance!r}", fix="use a relative error of 0 or more"))
    if isinstance(seed, bool) or not isinstance(seed, int | None):
        raise ShardwiseError(problem(f"seed is {seed!r}", fix="use an integer; omit it for the seed of torch"))
    if steps > MOST_STEPS:
        raise ShardwiseError(problem(f"steps is {steps}", fix=f"use an integer up to {MOST_STEPS:,}"))
    args, named = call_arguments(example_inputs, kwargs)
    need_values((args, named))
    # Another autocast than planned would go unnoticed: in float64 its casts are no-ops.
    check_ambient(plan.precision.autocast, "around sw.verify")
    if plan.is_pipeline or plan.micro_batches > 1:  # their steps return no gradients of inputs
        args, named = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, (args, named))
    captured = capture(module, args, named, loss=loss, precision=plan.precision, input_gradients=True)
    graph, arguments = to_float64(captured.graph), (args, named)
    call = Example(module, arguments, loss, precision=plan.precision)
    constants = call_constants(arguments)
    args, named = pytree.tree_map_only(torch.Tensor, lambda x: as_leaf(widened(x), x), arguments)
    initial = with_values(module, seed)
    reference = widened_module(initial)
    stored = None if plan.precision.is_models else stored_module(initial, plan)
    code = reachable_code(module, loss)
    with default_dtype(torch.float64) as models_default, empty_tensor_caches(code, keeps=False):
        start_of = partial(
            RunStart,
            captured=captured,
            module=reference,
            loss=loss,
            optimizer=plan.optimizer,
            args=args,
            kwargs=named,
            models_default=models_default,
        )
        if plan.is_pipeline:
            return _pipeline_report(plan, captured, start_of, stored, call, steps, tolerance)
        is_in_passes = plan.micro_batches > 1 and (batch_size(graph) or 0) > (plan.micro_batch or 0)
        training = module.training if plan.micro_batches == 1 or is_in_passes else None
        if is_in_passes:
            narrow, passes = _passes(plan, captured.graph, call, models_default)
            spmds, prelude = _programs(plan, passes, narrow, training=training, constants=constants)
            spmd = spmds[passes.sizes[0]]
            start = start_of(spmd)
            single: OneDevice = OneDeviceMicroBatches(start, passes)
            ranks: Ranks = RanksMicroBatches(start, plan, passes, spmds, prelude)
        else:
            spmd = program_of(plan, graph, training=training, original=captured.graph, constants=constants)
            start = start_of(spmd)
            single, ranks = OneDevice(start), Ranks(start)
        substance, worst = Substance(start), dict[Key, TensorError]()
        records: list[tuple[Collective, ...]] = []
        earlier: list[tuple[Values, list[Values]]] = []
        with show_progress("proving the plan"):
            for step in each(range(steps), lambda step: f"steps on one device and on {plan.num_ranks} virtual ranks"):
                expected = single.step(step)
                actual = ranks.step(step)
                substance.note(step, expected)
                if step == 0:
                    records = [ranks.forward_record, ranks.backward_record]
                for want, have in (*earlier, (expected, actual)):  # earlier outputs may have been overwritten
                    ranks.compare(want, have, worst)
                earlier.append((of_sources(expected, captured), [of_sources(values, captured) for values in actual]))
        differences = tuple(sorted(worst.values(), key=lambda d: -d.error))
        wrong = [difference for difference in differences if not difference.error <= tolerance]
        dtypes_report = None
        if stored is not None:
            with default_dtype(models_default), empty_tensor_caches(code, keeps=False):
                if is_in_passes:
                    spmds, prelude = _programs(plan, narrow, None, training=training, constants=constants)
                    start_in_dtypes = _start_in_dtypes(start, spmds[narrow.sizes[0]], stored, call, plan)
                    compared = DtypeComparison(
                        RanksMicroBatches(start_in_dtypes, plan, narrow, spmds, prelude),
                        _alone(narrow),
                        len(narrow.sizes),
                    )
                else:
                    narrow_spmd = program_of(plan, captured.graph, training=training, constants=constants)
                    start_in_dtypes = _start_in_dtypes(start, narrow_spmd, stored, call, plan)
                    compared = DtypeComparison(Ranks(start_in_dtypes))
                dtypes_report = in_dtypes(start_in_dtypes, compared, plan, steps)
        rounding = explain(start, ranks, wrong, steps, tolerance) if wrong and not is_in_passes else None
        return Report(
            differences=differences,
            tolerance=tolerance,
            forward=records[0],
            backward=records[1],
            planned_forward=spmd.forward_collectives(in_passes=is_in_passes),
            planned_backward=backward_collectives(ranks.programs[0], in_passes=is_in_passes),
            matches_plan=constants != plan.constants or _listed(plan, spmd.graph if is_in_passes else graph, records),
            untraceable=ranks.programs[0].untraceable,
            rounding=rounding,
            first_wrong="" if rounding is None else _first_wrong(start, ranks, rounding, tolerance),
            in_dtypes=dtypes_report,
            not_proven=substance.not_proven,
            notes=(*substance.notes([(d.kind, d.name) for d in wrong]), *_nothing_split(plan, spmd)),
        )


def _pipeline_report(
    plan: Plan,
    captured: Capture,
    start_of: partial[RunStart],
    stored: torch.nn.Module | None,
    call: Example,
    steps: int,
    tolerance: float,
) -> Report:
    """Verify a pipeline plan: run all stages in the order of its schedule, each on its own virtual cluster.
    ``start_of``: builds the start of both runs from the program of the first stage; ``stored``: the module in the
    stored dtypes of a plan with a precision."""
    graph, constants = step_graph(captured.graph), call_constants(call.arguments)
    if plan.micro_batches == 1 or (batch_size(captured.graph) or 0) <= (plan.micro_batch or 0):
        narrow, passes = Passes.single(graph), Passes.single(to_float64(graph))
    else:
        narrow, passes = _passes(plan, graph, call, start_of.keywords["models_default"])
    is_planned = plan.micro_batches == 1 or len(passes.sizes) > 1  # a single micro-batch has other operators
    training = call.module.training if is_planned else None
    is_planned &= constants == plan.constants
    bounds = {
        size: bound(
            plan,
            graph,
            prelude=passes.prelude,
            training=training,
            original=narrow.graphs[size],
            constants=constants,
        )
        for size, graph in passes.graphs.items()
    }
    first = bounds[passes.sizes[0]]
    start = start_of(_of_stages(first.spmds))
    single, ranks = OneDeviceMicroBatches(start, passes), PipelineRanks(start, plan, passes, bounds)
    substance, worst = Substance(start), dict[Key, TensorError]()
    for step in range(steps):
        expected = single.step(step)
        ranks.compare(expected, ranks.step(step), worst)
        substance.note(step, expected)
    wrong = [key for key, difference in worst.items() if not difference.error <= tolerance]
    listed = not is_planned or all(
        _listed(plan.alone(number), part, [ranks.forward_records[number], ranks.backward_records[number]])
        for number, part in enumerate(first.cut.parts)
    )
    dtypes_report = None
    if stored is not None:
        with (
            default_dtype(start.models_default),
            empty_tensor_caches(reachable_code(call.module, call.loss), keeps=False),
        ):
            narrow_bounds = {
                size: bound(plan, graph, prelude=narrow.prelude, training=training, constants=constants)
                for size, graph in narrow.graphs.items()
            }
            spmd = _of_stages(narrow_bounds[narrow.sizes[0]].spmds)
            start_in_dtypes = _start_in_dtypes(start, spmd, stored, call, plan)
            ranks_in_dtypes = PipelineRanks(start_in_dtypes, plan, narrow, narrow_bounds)
            compared = DtypeComparison(ranks_in_dtypes, _alone(narrow), len(narrow.sizes))
            dtypes_report = in_dtypes(start_in_dtypes, compared, plan, steps)
    forward = tuple(c for record in ranks.forward_records for c in record)
    backward = tuple(c for record in ranks.backward_records for c in record)
    return Report(
        differences=tuple(sorted(worst.values(), key=lambda d: -d.error)),
        tolerance=tolerance,
        forward=forward,
        backward=backward,
        planned_forward=tuple(c for spmd in first.spmds for c in spmd.forward_collectives(in_passes=True)),
        planned_backward=tuple(c for number in range(len(plan.stages)) for c in ranks.planned_backward(number)),
        matches_plan=listed,
        untraceable={name: why for program in ranks.first for name, why in program.untraceable.items()},
        in_dtypes=dtypes_report,
        not_proven=substance.not_proven,
        notes=tuple(substance.notes(wrong)),
    )


def _of_stages(spmds: Sequence[SpmdProgram]) -> SpmdProgram:
    """Return the program of the first stage with the layouts of all stages."""
    return replace(spmds[0], layouts={name: layout for spmd in spmds for name, layout in spmd.layouts.items()})


def _passes(plan: Plan, graph: Graph, call: Example, models_default: torch.dtype) -> tuple[Passes, Passes]:
    """Return the micro-batches of a step, in the model's dtypes and in float64. ``graph``: of the whole batch."""
    assert plan.micro_batch is not None, "a plan of several passes has samples"

    def wide(samples: int) -> Graph:
        with default_dtype(models_default):
            return to_float64(call.graph(samples))

    with default_dtype(models_default):
        narrow = Passes.of(graph, plan.micro_batch, call.graph)
    return narrow, Passes.of(to_float64(graph), plan.micro_batch, wide)


def _alone(passes: Passes) -> Callable[[RunStart], OneDevice]:
    """Return the function that builds the one device with which a step of several micro-batches is compared."""
    return partial(OneDeviceMicroBatches, passes=passes)


def _programs(
    plan: Plan, passes: Passes, narrow: Passes | None, *, training: bool | None, constants: tuple[str, ...]
) -> tuple[dict[int, SpmdProgram], SpmdProgram | None]:
    """Return the programs of micro-batches by size, and that of the prelude. ``narrow``: the micro-batches in the
    model's dtypes, if ``passes`` are in float64."""
    spmds = {
        size: program_of(
            plan,
            graph,
            training=training,
            original=None if narrow is None else narrow.graphs[size],
            constants=constants,
        )
        for size, graph in passes.graphs.items()
    }
    prelude = None
    if passes.prelude is not None:
        prelude = program_of(plan, passes.prelude, original=None if narrow is None else narrow.prelude)
    return spmds, prelude


def _start_in_dtypes(
    start: RunStart, spmd: SpmdProgram, stored: torch.nn.Module, call: Example, plan: Plan
) -> RunStart:
    """Return the start of the comparison in the plan's own dtypes."""
    args, kwargs = pytree.tree_map_only(torch.Tensor, lambda x: as_leaf(x.detach().cpu(), x), call.arguments)
    return replace(start, spmd=spmd, module=stored, args=args, kwargs=kwargs, precision=plan.precision)


def _first_wrong(start: RunStart, ranks: Ranks, rounding: Rounding, tolerance: float) -> str:
    """Describe where a program whose results differ first goes wrong; empty if unknown."""
    wrong = [difference for difference, _ in rounding.unexplained]
    if not wrong:
        return ""
    ranks.adopt(OneDevice(start))
    programs = list(map(without_overwrites, ranks.programs))
    values = run_forward(ranks.cluster, programs, ranks.bindings(0))
    model = to_float64(start.captured.graph)
    fault = wrong_result(ranks.spmd, model, ranks.programs, values, ranks.whole(0), tolerance)
    return fault or wrong_gradient(ranks.spmd.graph, {d.name: d.rank for d in wrong if d.kind == "gradient"})


def _nothing_split(plan: Plan, spmd: SpmdProgram) -> tuple[str, ...]:
    """Return a note if nothing is split, so that every rank computes the whole model."""
    if plan.num_ranks > 1 and not any(layout.positions for layout in spmd.layouts.values()):
        return (f"nothing is split: each of {plan.num_ranks} ranks computes the whole model",)
    return ()


def _listed(plan: Plan, graph: Graph, records: list[tuple[Collective, ...]]) -> bool:
    """Return whether the plan lists the recorded collectives, by kind and axes. Bytes are ignored, because everything
    is float64 here, and so is the order: a plan lists conversions where they are needed. An edited plan has no list,
    and a plan for other inputs none that can be compared: both return True."""
    if not plan.conversions or not same_inputs(plan, graph):
        return True
    return all(
        Counter((c.kind, plan.mesh.format_axes(c.axes)) for c in record)
        == Counter((c.kind, c.axes) for c in plan.collectives(backward=backward))
        for record, backward in zip(records, (False, True), strict=True)
    )


def need_values(inputs: Any, what: str = "verify") -> None:
    """Raise ShardwiseError for inputs without values."""
    if any(isinstance(x, torch.Tensor) and x.is_meta for x in flatten(inputs)[0]):
        raise ShardwiseError(
            problem(
                f"{what} needs inputs with values, not meta tensors",
                fix="pass a real batch; planning takes meta tensors",
            )
        )


def with_values(module: torch.nn.Module, seed: int | None) -> torch.nn.Module:
    """Return a copy on the CPU with the module's (initial) values."""
    tensors_of_model = [*module.parameters(), *module.buffers()]
    if any(t.is_meta for t in tensors_of_model):
        twin = deep_copy(
            module, {id(t): _empty(t) for t in tensors_of_model}
        )  # not to_empty, which unties shared weights
        tensors = {**dict(twin.named_parameters()), **dict(twin.named_buffers())}
        with torch.no_grad():
            for name, full in full_tensors(module, seed):
                tensors[name].copy_(full)
    else:
        twin = deep_copy(module).cpu()
    return twin


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty_like(tensor, device="cpu")
    return torch.nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else empty


__all__ = ["Report", "TensorError", "need_values", "verify", "with_values"]
