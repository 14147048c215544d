"""``sw.check``: runs a plan of another tool with that tool's own code on virtual ranks, and compares with one device.

Both sides run in float64: loss, outputs, every gradient, buffers, and parameters after optimizer steps must agree. If
they do not, both run again and record every call of the model's own code. The plan is wrong at the first call whose
result on ranks is in no layout of the result on one device (``infer_layout``).
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shardwise.api import compare as compare_searches
from shardwise.api import plan as find_plan
from shardwise.costs.cluster import Cluster
from shardwise.costs.collectives import Links
from shardwise.costs.timeline import SimulatedStep
from shardwise.errors import LayoutError, ShardwiseError
from shardwise.foreign.call_recorder import CallRecorder, local
from shardwise.foreign.first_error import ErrorSearch, FirstError, RankError, describe_rank_error
from shardwise.foreign.inferred_layout import infer_layout
from shardwise.foreign.outcome import Checked, StepComparison
from shardwise.foreign.rank_threads import RankThread, on_ranks
from shardwise.foreign.strategy_file import is_strategy_file, read_strategies
from shardwise.foreign.tools import ForeignPlan, divided_once, recognise_plan
from shardwise.foreign.work_counter import SentMessages, WorkCounter, message_totals
from shardwise.graph.batch import num_samples
from shardwise.graph.call_arguments import call_arguments, call_module, find_loss
from shardwise.graph.capture import capture
from shardwise.graph.code_reachability import empty_tensor_caches, reachable_code
from shardwise.graph.switches import default_dtype
from shardwise.graph.to_float64 import functions_opened
from shardwise.graph.trees import flatten_output
from shardwise.layouts.mesh import Mesh
from shardwise.plans.plan import Plan
from shardwise.progress import show_progress
from shardwise.proof.errors_by_tensor import Key, TensorError, Values, compare, magnitude, relative_difference
from shardwise.proof.runs import widened, widened_module
from shardwise.proof.verify import TOLERANCE, need_values, verify, with_values

STEPS = 2


@dataclass(frozen=True)
class _CheckRequest:
    """The arguments of ``sw.check``."""

    module: nn.Module
    example_inputs: Any
    kwargs: Mapping[str, Any] | None
    loss: Callable[..., Any] | None
    cluster: Cluster
    beside: bool
    tolerance: float
    seed: int | None


@dataclass(frozen=True)
class _CheckedCall:
    """The call to run: the module with its values in float64, its inputs and loss."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Callable[..., Any] | None


@dataclass
class _TrainingRun:
    """A training run of the model, on one device or on one rank. ``full``: maps a rank's tensor to the whole one."""

    call: _CheckedCall
    module: nn.Module
    calls: CallRecorder
    full: Callable[[Tensor], Tensor]

    def __post_init__(self) -> None:
        trained = [p for p in self.module.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(trained, lr=1e-2, momentum=0.9, foreach=False) if trained else None

    def step(self) -> Values:
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)
        self.calls.know(self.module)
        with self.calls:
            output = call_module(self.module, self.call.args, self.call.kwargs, self.call.loss)
        loss = find_loss(output)
        if loss is not None and loss.requires_grad:
            loss.backward()
        values: Values = {}
        for i, leaf in enumerate(flatten_output(output)[0]):
            if isinstance(leaf, Tensor):
                values["loss" if leaf is loss else "output", f"[{i}]"] = self.full(leaf)
        for name, parameter in self.module.named_parameters():
            if parameter.grad is not None:
                values["gradient", name] = self.full(parameter.grad)
        for name, buffer in self.module.named_buffers():
            values["buffer", name] = self.full(buffer)
        if self.optimizer is not None:
            self.optimizer.step()
        for name, parameter in self.module.named_parameters():
            values["parameter", name] = self.full(parameter)
        return values


@dataclass(frozen=True)
class _RankRecord:
    """A rank's values of every step, the calls of its model, the number of messages in the first step, and the number
    of parameter elements that it holds."""

    values: list[Values]
    calls: CallRecorder
    num_messages: int
    num_held: int


def check(
    module: nn.Module,
    example_inputs: Any,
    plan: Any,
    devices: int = 8,
    *,
    mesh: Mesh | None = None,
    kwargs: Mapping[str, Any] | None = None,
    loss: Callable[..., Any] | None = None,
    cluster: Cluster | None = None,
    beside: bool = True,
    tolerance: float = TOLERANCE,
    seed: int | None = None,
) -> Checked:
    """Check whether ``module`` under a plan of another tool computes what one device computes.

    It needs no GPU, launcher or plan of this package. The tool's own code applies the plan on virtual ranks (threads of
    this process) and runs its own collectives. Both sides are in float64 and without dropout.

    Args:
        module: The model that the plan is for.
        example_inputs: Whole inputs with values, as for ``sw.verify``.
        plan: ``"auto"`` (the tp plan that ships with a transformers model), a transformers ``tp_plan`` dict, a
            ``DistributedConfig``, accelerate's ``ParallelismConfig``, a plan of ``parallelize_module`` (paths to
            ``ParallelStyle``), ``{"fully_shard": [paths], ...}``, or a function ``(module, device_mesh)`` that applies
            a plan. Or the parsed JSON of a MindSpore strategy file: MindSpore itself is not run; ``sw.plan`` plans the
            file's strategies, and that program is verified (``strategy_file``).
        devices: Number of virtual ranks.
        mesh: The mesh, by default one axis ``tp`` (``dp`` for FSDP2). Ranks along axes called dp, fsdp, data, batch,
            ddp or replica have different samples: every tensor whose dim 0 has the size of the first one's is divided
            among them, and the loss is the mean of theirs.
        kwargs: Named inputs, in addition to positional ones.
        loss: ``loss(output, *targets)``, as for ``sw.plan``.
        cluster: The cluster for prices, by default nodes of up to eight H100.
        beside: Whether to also report the price of a step under this plan and under the plan that ``sw.plan`` finds.
        tolerance: The largest relative error that counts as equal.
        seed: Seed of the initial values of parameters on the meta device.

    Returns:
        The verdict, the differences and the first wrong call.

    Raises:
        ShardwiseError: The plan is of no known kind or names nothing in the module, or an argument does not fit.
    """
    args, named = call_arguments(example_inputs, kwargs)
    need_values((args, named), "check")
    of_node = max(size for size in range(1, 9) if devices % size == 0)
    cluster = cluster or Cluster.load(f"h100-{devices // of_node}x{of_node}")
    request = _CheckRequest(module, example_inputs, kwargs, loss, cluster, beside, tolerance, seed)
    if is_strategy_file(plan):
        return _check_strategies(request, plan, devices, mesh)
    foreign = recognise_plan(module, plan, devices, mesh)
    initial = with_values(module, seed)
    plain = _CheckedCall(initial, tuple(args), dict(named), loss)
    args, named = pytree.tree_map_only(Tensor, widened, (args, named))
    call = _CheckedCall(widened_module(initial), tuple(args), dict(named), loss)
    parts = _divided(call, foreign)
    with (
        show_progress(f"running {devices} ranks and one device"),
        warnings.catch_warnings(),
        functions_opened(),
        default_dtype(torch.float64) as models_default,
        divided_once() if _dtype(module) in (torch.float32, torch.bfloat16) else nullcontext(),
        empty_tensor_caches(reachable_code(module, loss), keeps=False),
    ):
        warnings.simplefilter("ignore")  # tools warn about settings that were requested
        expected, one = _one_device(call)
        work = WorkCounter(request.cluster.device, _dtype(module)) if beside else None
        ranks = _ranks(parts, foreign, work=work)
        failed = next((rank for rank in ranks if rank.error is not None), None)
        if failed is not None:
            where = _error_search(call, parts, foreign, tolerance).wrong_call()
            failure = describe_rank_error(failed)
            with default_dtype(models_default):
                unwidened = _ranks(_divided(plain, foreign), foreign, widens=False) if failure.refutes else []
            if failure.refutes and all(rank.error is None for rank in unwidened):
                failure = replace(failure, refutes=False, error=f"in float64, not in its own dtypes: {failure.error}")
            return Checked(foreign, failure=failure, first_wrong=where, notes=_notes(foreign, [one]))
        differences, layouts = _differences(expected, ranks, foreign, tolerance)
        wrong = [difference for difference in differences if not difference.error <= tolerance]
        first: FirstError | None = None
        if wrong:
            search = _error_search(call, parts, foreign, tolerance)
            in_first, _ = _differences(expected[:1], ranks, foreign, tolerance)
            computes_right = all(d.error <= tolerance for d in in_first if d.kind in ("output", "loss"))
            first = None if computes_right else search.wrong_call()
            first = first or search.wrong_gradient(wrong, _gradients(expected, ranks))
    return Checked(
        foreign,
        differences=tuple(differences),
        tolerance=tolerance,
        first_wrong=first,
        layouts=tuple(layouts),
        notes=_notes(foreign, [one, *(rank.result.calls for rank in ranks)])
        + (() if any(kind == "loss" for kind, _ in expected[0]) else ("there is no loss: gradients are not compared",)),
        beside=None if work is None else _beside(request, foreign, ranks[0], work),
    )


def _dtype(module: nn.Module) -> torch.dtype:
    return next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)


def _one_device(call: _CheckedCall, *, records: bool = False) -> tuple[list[Values], CallRecorder]:
    calls = CallRecorder(records)
    module = copy.deepcopy(call.module)
    calls.follow(module)
    run = _TrainingRun(call, module, calls, lambda tensor: tensor.detach().clone())
    return [run.step() for _ in range(1 if records else STEPS)], calls


def _ranks(
    parts: Sequence[_CheckedCall],
    foreign: ForeignPlan,
    *,
    records: bool = False,
    work: WorkCounter | None = None,
    widens: bool = True,
) -> list[RankThread]:
    """Run every rank. Its result is a ``_RankRecord``, also if it failed after the plan was applied."""
    copies = [copy.deepcopy(part.module) for part in parts]

    def body(rank: RankThread) -> _RankRecord:
        assert rank.mesh is not None, "ranks have a device mesh"
        calls = CallRecorder(records, widens)
        module = copies[rank.rank]
        calls.follow(module)
        assert foreign.apply is not None, "the tool is run"
        module = foreign.apply(module, rank.mesh) or module
        rank.result = _RankRecord([], calls, 0, 0)
        own_work = work if rank.rank == 0 else None
        run = _TrainingRun(parts[rank.rank], module, calls, partial(_full, rank, own_work))
        num_held = sum(local(parameter).numel() for parameter in module.parameters())
        rank.messages.clear()
        with ExitStack() as stack:
            if own_work is not None:
                stack.enter_context(own_work)
            values = [run.step()]
        count = len(rank.messages)
        values += [] if records else [run.step() for _ in range(STEPS - 1)]
        return _RankRecord(values, calls, count, num_held)

    return on_ranks(foreign.mesh, body)


def _error_search(
    call: _CheckedCall, parts: Sequence[_CheckedCall], foreign: ForeignPlan, tolerance: float
) -> ErrorSearch:
    """Run both sides again and record every call."""
    _, recorded = _one_device(call, records=True)
    traced = _ranks(parts, foreign, records=True)
    return ErrorSearch(recorded, traced, foreign.mesh, foreign.data_axes, tolerance)


def _full(rank: RankThread, work: WorkCounter | None, tensor: Tensor) -> Tensor:
    """Return a whole DTensor, gathered outside of the step's record, or a plain tensor as this rank has it."""
    gather = getattr(tensor, "full_tensor", None)
    before = len(rank.messages)
    with ExitStack() as stack:
        if work is not None:
            stack.enter_context(work.paused())
        gathered = gather() if callable(gather) else tensor
        gathered = local(gathered).clone()
    del rank.messages[before:]
    return gathered


def _divided(call: _CheckedCall, foreign: ForeignPlan) -> list[_CheckedCall]:
    """Return the call of every rank, with its own samples if the mesh has data axes."""
    axes = tuple(axis for name in foreign.data_axes for axis in foreign.mesh.expand(name))
    count = foreign.mesh.size_of(axes)
    if count == 1:
        return [call] * foreign.mesh.num_devices
    samples = num_samples((call.args, call.kwargs))
    if samples is None or samples % count:
        raise ShardwiseError(
            f"{samples} samples do not divide into {count} groups of ranks", fix=f"pass a multiple of {count}"
        )

    def part(index: int) -> _CheckedCall:
        def own_part(tensor: Tensor) -> Tensor:
            return tensor.chunk(count)[index] if tensor.dim() and tensor.shape[0] == samples else tensor

        args, kwargs = pytree.tree_map_only(Tensor, own_part, (call.args, call.kwargs))
        return _CheckedCall(call.module, args, kwargs, call.loss)

    return [part(foreign.mesh.index_along(axes, rank)) for rank in range(foreign.mesh.num_devices)]


def _differences(
    expected: Sequence[Values], ranks: Sequence[RankThread], foreign: ForeignPlan, tolerance: float
) -> tuple[list[TensorError], list[str]]:
    """Return the differences, worst first, and the layouts of outputs and gradients that ranks hold in parts."""
    worst: dict[Key, TensorError] = {}
    layouts: dict[str, str] = {}
    for step, want in enumerate(expected):
        have = [dict(rank.result.values[step]) for rank in ranks]
        for key, whole in want.items():
            shards = [values[key] for values in have if key in values]
            scale = magnitude(whole)
            if len(shards) < len(have) or all(relative_difference(whole, one, scale) <= tolerance for one in shards):
                continue
            layout = infer_layout(whole, shards, foreign.mesh, tolerance)
            if layout is not None and not layout.is_summand:
                for values in have:
                    values[key] = whole
                if layout.splits:
                    layouts[f"{key[0]} {key[1]}"] = str(layout)
        for rank, values in enumerate(have):
            compare(want, values, rank, worst)
    return sorted(worst.values(), key=lambda d: -d.error), [f"{name}: {text}" for name, text in layouts.items()]


def _gradients(expected: Sequence[Values], ranks: Sequence[RankThread]) -> dict[str, tuple[Tensor, list[Tensor]]]:
    """Return the gradients of the first step: name -> (expected, per rank)."""
    return {
        name: (whole, [rank.result.values[0][kind, name] for rank in ranks if (kind, name) in rank.result.values[0]])
        for (kind, name), whole in expected[0].items()
        if kind == "gradient"
    }


def _notes(foreign: ForeignPlan, calls: Sequence[CallRecorder]) -> tuple[str, ...]:
    notes = list(foreign.notes)
    if any(one.drops for one in calls):
        notes.append("dropout is off on both sides: a tool draws other masks than one device")
    if any(one.draws for one in calls):
        notes.append("the model draws random numbers: every rank draws the same for equal shapes")
    return tuple(notes)


def _beside(request: _CheckRequest, foreign: ForeignPlan, rank: RankThread, work: WorkCounter) -> StepComparison:
    dtype = _dtype(request.module)
    links = Links(request.cluster, foreign.mesh)
    messages = message_totals(rank.messages[: rank.result.num_messages], links, dtype)
    held_bytes = rank.result.num_held * dtype.itemsize
    return StepComparison(request.cluster.name, work.seconds, messages, held_bytes, *_best_plan(request))


def _check_strategies(call: _CheckRequest, plan: Mapping[str, Any], devices: int, mesh: Mesh | None) -> Checked:
    """Check whether a module computes under a MindSpore strategy file what one device computes: ``sw.plan`` plans its
    strategies, and that program is verified. Impossible layouts and strategies are *wrong*, each with the reason.
    Operators that the file does not name are decided by propagation."""
    if mesh is not None:
        raise ShardwiseError("a strategy file of MindSpore defines its mesh", fix="omit mesh=")
    if call.beside and call.cluster.num_devices != devices:
        what = f"{call.cluster.name} has {call.cluster.num_devices} devices, but the file is for {devices}"
        raise ShardwiseError(what, fix="pass a cluster= of this size, or beside=False (--no-price)")
    captured = capture(call.module, *call_arguments(call.example_inputs, call.kwargs), loss=call.loss)
    file = read_strategies(call.module, plan, captured.graph, devices)
    counts = f"{len(file.layouts)} parameters and {len(file.strategies)} operators as in the file, the rest is derived"
    notes = ("MindSpore is not run: its file is checked", counts)
    foreign = ForeignPlan("MindSpore strategy file", file.mesh, None, file.unused, notes)
    if file.faults:
        return Checked(foreign, failure=RankError(None, "; ".join(file.faults), "", refutes=True))
    settings: dict[str, Any] = {
        "mesh": file.mesh,
        "strategies": file.strategies or None,
        "layouts": file.layouts,
        "kwargs": call.kwargs,
        "loss": call.loss,
    }
    try:
        derived = find_plan(call.module, call.example_inputs, devices, search="sharding_propagation", **settings).plan
    except LayoutError as error:
        first, *facts = str(error).splitlines()
        where = next((fact.partition(":")[2].strip() for fact in facts if fact.strip().startswith("op:")), "")
        text = f"{where}: {first}" if where else first
        return Checked(foreign, failure=RankError(None, text, "", refutes=True))
    report = verify(
        call.module,
        call.example_inputs,
        derived,
        kwargs=call.kwargs,
        loss=call.loss,
        tolerance=call.tolerance,
        seed=call.seed,
    )
    parts = tuple(f"parameter {entry.name}: {entry.layout}" for entry in derived.parameters if "@" in entry.layout)
    return Checked(
        foreign,
        differences=report.differences,
        tolerance=report.tolerance,
        layouts=parts,
        notes=foreign.notes,
        beside=_beside_strategies(call, settings) if call.beside else None,
    )


def _beside_strategies(call: _CheckRequest, settings: Mapping[str, Any]) -> StepComparison:
    rows = compare_searches(
        call.module, call.example_inputs, call.cluster, searches=("sharding_propagation",), **settings
    ).rows
    step = rows[0].step
    assert isinstance(step, SimulatedStep), "it has just been planned"
    messages = [event for event in step.events if event.stream]
    sent = SentMessages(len(messages), sum(int(event.num_bytes) for event in messages), step.exposed, ())
    held = step.peak.parts["parameters"]
    return StepComparison(call.cluster.name, step.seconds - step.exposed, sent, held, *_best_plan(call))


def _best_plan(call: _CheckRequest) -> tuple[Plan | None, str]:
    """Return (the plan that ``sw.plan`` finds, or None; why it finds none)."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            planned = find_plan(call.module, call.example_inputs, call.cluster, kwargs=call.kwargs, loss=call.loss)
    except ShardwiseError as error:
        return None, str(error).partition("\n")[0]
    return planned.plan, ""
