"""Checks a MindSpore strategy file: plans its strategies with ``sw.plan``, and verifies that program."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from shardwise.api import compare
from shardwise.api import plan as find_plan
from shardwise.costs.cluster import Cluster
from shardwise.costs.timeline import SimulatedStep
from shardwise.errors import LayoutError, ShardwiseError
from shardwise.foreign.first_error import RankError
from shardwise.foreign.outcome import Checked, StepComparison
from shardwise.foreign.strategy_file import read_strategies
from shardwise.foreign.tools import ForeignPlan
from shardwise.foreign.work_counter import SentMessages
from shardwise.graph.call_arguments import call_arguments
from shardwise.graph.capture import capture
from shardwise.layouts.mesh import Mesh
from shardwise.plans.plan import Plan
from shardwise.proof.verify import verify


@dataclass(frozen=True)
class CheckRequest:
    """The arguments of ``sw.check``."""

    module: nn.Module
    example_inputs: Any
    kwargs: Mapping[str, Any] | None
    loss: Callable[..., Any] | None
    cluster: Cluster
    beside: bool
    tolerance: float
    seed: int | None


def check_strategies(call: CheckRequest, plan: Mapping[str, Any], devices: int, mesh: Mesh | None) -> Checked:
    """Check whether ``asked.module`` computes under the file what one device computes. Impossible layouts and
    strategies are *wrong*, each with the reason. Operators that the file does not name are decided by propagation."""
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
        return Checked(foreign, failure=RankError(None, _in_one_line(error), "", refutes=True))
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
        beside=_beside(call, settings) if call.beside else None,
    )


def _in_one_line(error: ShardwiseError) -> str:
    """Return the error in one line, after the name of its operator."""
    first, *facts = str(error).splitlines()
    where = next((fact.partition(":")[2].strip() for fact in facts if fact.strip().startswith("op:")), "")
    return f"{where}: {first}" if where else first


def _beside(call: CheckRequest, settings: Mapping[str, Any]) -> StepComparison:
    rows = compare(call.module, call.example_inputs, call.cluster, searches=("sharding_propagation",), **settings).rows
    step = rows[0].step
    assert isinstance(step, SimulatedStep), "it has just been planned"
    messages = [event for event in step.events if event.stream]
    sent = SentMessages(len(messages), sum(int(event.num_bytes) for event in messages), step.exposed, ())
    held = step.peak.parts["parameters"]
    return StepComparison(call.cluster.name, step.seconds - step.exposed, sent, held, *best_plan(call))


def best_plan(call: CheckRequest) -> tuple[Plan | None, str]:
    """Return (the plan that ``sw.plan`` finds, or None; why it finds none)."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            planned = find_plan(call.module, call.example_inputs, call.cluster, kwargs=call.kwargs, loss=call.loss)
    except ShardwiseError as error:
        return None, str(error).partition("\n")[0]
    return planned.plan, ""
