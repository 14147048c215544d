"""``verify``: a plan on the virtual cluster against the module on one device, in float64.

Compared are the loss, every output, every gradient, the buffers, and parameters and buffers after optimizer steps. The
error of a tensor is its largest difference over the largest magnitude of the reference tensor, but not over less than
1e-6 (gradients) or 1e-3 (others) of the largest magnitude among all tensors of its kind: a gradient that is zero by
mathematics (a key's bias) has no meaningful relative error of its own, and an optimizer that divides by its size makes
a parameter of the noise.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from shardwise.errors import ShardwiseError, problem
from shardwise.graph.capture import Capture, call_arguments, call_module, capture
from shardwise.graph.ir import Graph, Ref
from shardwise.graph.normalize_random import SEED
from shardwise.graph.trees import flatten, flatten_output
from shardwise.graph.widen import reference_mode, widen
from shardwise.layouts.conversions import Collective
from shardwise.layouts.layout import Layout
from shardwise.plans.bind import program_of, same_inputs
from shardwise.plans.plan import Plan
from shardwise.programs.check import check_program
from shardwise.programs.differentiate import differentiate
from shardwise.programs.program import localize
from shardwise.programs.rank_program import Program, delivered_values
from shardwise.programs.spmd import Spmd
from shardwise.programs.vjp import Kinds
from shardwise.proof.virtual import Values as VirtualValues
from shardwise.proof.virtual import VirtualCluster, run_backward, run_forward
from shardwise.runtime.initial.materialize import full_tensors
from shardwise.runtime.memory_of_outputs import live, taken_apart, whole_buffers, written_back
from shardwise.runtime.shards import shard

# float64 has 2.2e-16; sums over a few thousand terms in another order, through tens of layers, stay below this.
TOLERANCE = 1e-9

OPTIMIZERS: dict[str, Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-2),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
}


@dataclass(frozen=True, slots=True)
class Difference:
    """The worst error of one tensor over all ranks and steps."""

    kind: str  # "loss", "output", "gradient", "buffer" or "parameter"
    name: str
    error: float
    rank: int


@dataclass(frozen=True)
class Report:
    """The outcome of a verification.

    ``differences``: worst first. ``forward``, ``backward``: the collectives that were performed in the first step;
    ``planned_forward`` and ``planned_backward`` those that the program lists; ``untraceable``: operators whose backward
    autograd performs inside of one instruction -> why.
    """

    differences: tuple[Difference, ...]
    tolerance: float
    forward: tuple[Collective, ...]
    backward: tuple[Collective, ...]
    planned_forward: tuple[Collective, ...]
    planned_backward: tuple[Collective, ...]
    matches_plan: bool  # whether the plan's own list names the same collectives
    untraceable: Mapping[str, str] = field(default_factory=dict)

    @property
    def max_error(self) -> float:
        return self.differences[0].error if self.differences else 0.0

    @property
    def collectives_match(self) -> bool:
        performed = (self.forward, self.backward)
        return self.matches_plan and performed == (self.planned_forward, self.planned_backward)

    @property
    def ok(self) -> bool:
        return self.max_error <= self.tolerance and self.collectives_match

    def __str__(self) -> str:
        lines = [
            f"{'equal' if self.ok else 'NOT EQUAL'}: worst relative error {self.max_error:.2g} "
            f"over {len(self.differences)} tensors (tolerance {self.tolerance:g})"
        ]
        lines += [f"  {d.kind} {d.name}: {d.error:.2g} on rank {d.rank}" for d in self.differences[:3]]
        counts = f"{len(self.forward)} forward, {len(self.backward)} backward collectives"
        lines.append(f"  {counts}, {'as planned' if self.collectives_match else 'NOT as planned'}")
        lines += [f"  backward of {name} is autograd's: {why}" for name, why in self.untraceable.items()]
        return "\n".join(lines)


def verify(
    module: torch.nn.Module,
    example_inputs: Any,
    plan: Plan,
    *,
    kwargs: Mapping[str, Any] | None = None,
    loss: Callable[..., Any] | None = None,
    steps: int = 3,
    tolerance: float = TOLERANCE,
    seed: int | None = None,
) -> Report:
    """Run ``steps`` optimizer steps of ``module`` under ``plan`` on the virtual cluster and on one device, both in
    float64.

    ``example_inputs``: a tuple of positional inputs (or one tensor), whole, with values. Floating-point inputs,
    parameters, buffers and casts to lower precision inside the model are widened in both programs; dropout draws the
    same hashed masks in both. ``seed``: of the initial values of parameters on the meta device. Raises PlanError when
    the plan does not fit.
    """
    args, named = call_arguments(example_inputs, kwargs)
    _need_values((args, named))
    captured = capture(module, args, named, loss=loss)  # as planned: in float64 other casts are no-ops
    graph = widen(captured.graph)
    args, named = pytree.tree_map_only(torch.Tensor, _widened, (args, named))
    reference = _float64_module(module, seed)
    spmd = program_of(plan, graph, training=module.training, original=captured.graph)
    split = {s.value for s in graph.sources if s.kind in ("parameter", "buffer") and spmd.layouts[s.value].positions}
    single = _Single(reference, captured, loss, plan.optimizer, split)
    ranks = _Ranks(spmd, captured, reference, spmd.layouts, plan.optimizer)
    worst: dict[tuple[str, str], Difference] = {}
    records: list[tuple[Collective, ...]] = []
    earlier: list[tuple[Values, list[Values]]] = []
    for step in range(steps):
        expected = single.step(args, named, step)
        actual = ranks.step(args, named, step)
        if step == 0:
            records = [ranks.forward_record, ranks.backward_record]
        for want, have in (*earlier, (expected, actual)):  # what was returned before may have been written to
            _compare(want, have, spmd.layouts, graph, plan, worst)
        earlier.append((_of_sources(expected, captured), [_of_sources(values, captured) for values in actual]))
    differences = tuple(sorted(worst.values(), key=lambda d: -d.error))
    return Report(
        differences=differences,
        tolerance=tolerance,
        forward=records[0],
        backward=records[1],
        planned_forward=spmd.forward_collectives(),
        planned_backward=spmd.backward_collectives(),
        matches_plan=_listed(plan, graph, records),
        untraceable=ranks.programs[0].untraceable,
    )


def _of_sources(values: Values, captured: Capture) -> Values:
    """The outputs that have the memory of a parameter, buffer or input on one device."""
    sources = {source.value for source in captured.graph.sources}
    names = {f"[{i}]" for i, memory in enumerate(captured.memories) if memory is not None and memory.name in sources}
    return {key: value for key, value in values.items() if key[0] == "output" and key[1] in names}


def _listed(plan: Plan, graph: Graph, records: list[tuple[Collective, ...]]) -> bool:
    """Whether the plan lists what was recorded, kind by kind and axis by axis (bytes differ: here everything is
    float64; and the order: a plan lists conversions where they are needed). A plan that was edited lists nothing, and
    one for other inputs nothing that could be compared."""
    if not plan.conversions or not same_inputs(plan, graph):
        return True
    return all(
        Counter((c.kind, plan.mesh.format_axes(c.axes)) for c in record)
        == Counter((c.kind, c.axes) for c in plan.collectives(backward=backward))
        for record, backward in zip(records, (False, True), strict=True)
    )


def _need_values(inputs: Any) -> None:
    if any(isinstance(x, torch.Tensor) and x.is_meta for x in flatten(inputs)[0]):
        raise ShardwiseError(
            problem(
                "verify needs inputs with values, not meta tensors",
                fix="pass a real batch; planning takes meta tensors",
            )
        )


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", torch.float64) if tensor.is_floating_point() else tensor.detach().cpu()


def _float64_module(module: torch.nn.Module, seed: int | None) -> torch.nn.Module:
    """A float64 copy on the CPU with the module's (initial) values."""
    held = [*module.parameters(), *module.buffers()]
    if any(t.is_meta for t in held):
        twin = copy.deepcopy(module, {id(t): _empty(t) for t in held})  # not to_empty, which unties shared weights
        tensors = {**dict(twin.named_parameters()), **dict(twin.named_buffers())}
        with torch.no_grad():
            for name, full in full_tensors(module, seed):
                tensors[name].copy_(full)
    else:
        twin = copy.deepcopy(module).cpu()
    return twin.double()


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty_like(tensor, device="cpu")
    return torch.nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else empty


Values = dict[tuple[str, str], torch.Tensor]  # (kind, name) -> tensor


class _Single:
    """The module on one device."""

    def __init__(
        self,
        module: torch.nn.Module,
        captured: Capture,
        loss: Callable[..., Any] | None,
        optimizer: str,
        split: Collection[str],
    ) -> None:
        """``split``: sources of which ranks return copies, gathered when the module is called."""
        self.split = split
        self.module, self.captured, self.loss = copy.deepcopy(module), captured, loss
        self.optimizer = _optimizer(optimizer, [p for p in self.module.parameters() if p.requires_grad])

    def step(self, args: tuple[Any, ...], kwargs: dict[str, Any], step: int) -> Values:
        values: Values = {}
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)
        with reference_mode(seed=step):
            output = call_module(self.module, args, kwargs, self.loss)
        leaves, _ = flatten_output(output)
        for i, (leaf, out) in enumerate(zip(leaves, self.captured.graph.outputs, strict=True)):
            if isinstance(leaf, torch.Tensor):
                is_loss = isinstance(out, Ref) and out.name == self.captured.graph.loss
                memory = self.captured.memories[i]
                is_copied = memory is not None and memory.name in self.split
                values["loss" if is_loss else "output", f"[{i}]"] = (
                    leaf.detach().clone() if is_copied else leaf.detach()
                )
                if is_loss and leaf.requires_grad:
                    leaf.backward()
        for name, parameter in self.module.named_parameters():
            if parameter.grad is not None:
                if parameter.grad.is_sparse:  # ranks have dense ones, which other optimizers take as well
                    parameter.grad = parameter.grad.to_dense()
                values["gradient", name] = parameter.grad.clone()
        for name, buffer in self.module.named_buffers():
            values["buffer", name] = buffer.clone()
        if self.optimizer is not None:
            self.optimizer.step()
        for name, parameter in self.module.named_parameters():
            values["parameter", name] = parameter.detach().clone()
        return values


class _Ranks:
    """The ranks of the virtual cluster, each with its shards and its optimizer."""

    def __init__(
        self, spmd: Spmd, captured: Capture, module: torch.nn.Module, layouts: Mapping[str, Layout], optimizer: str
    ) -> None:
        self.spmd, self.captured, self.layouts = spmd, captured, layouts
        self.cluster = VirtualCluster(spmd.mesh)
        kinds = Kinds()
        reached = [name == spmd.loss for name in delivered_values(spmd, loss_only=False)]
        self.programs = [
            differentiate(localize(spmd, rank), kinds, loss_only=False, reached=reached)
            for rank in range(spmd.mesh.num_devices)
        ]
        for program in self.programs:
            check_program(program)
        full = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        self.tensors: list[dict[str, torch.Tensor]] = []
        for coordinates in self.cluster.coordinates:
            own: dict[str, torch.Tensor] = {}
            for source in spmd.graph.sources:
                if source.kind in ("parameter", "buffer") and source.names[0] != SEED:
                    local = shard(full[source.names[0]].detach(), layouts[source.value], coordinates).clone()
                    own[source.value] = local.requires_grad_(source.kind == "parameter" and source.trainable)
                elif source.kind == "constant":
                    own[source.value] = _widened(captured.constants[source.value]).clone()
            self.tensors.append(own)
        self.optimizers = [_optimizer(optimizer, [t for t in own.values() if t.requires_grad]) for own in self.tensors]
        self.forward_record: tuple[Collective, ...] = ()
        self.backward_record: tuple[Collective, ...] = ()

    def step(self, args: tuple[Any, ...], kwargs: dict[str, Any], step: int) -> list[Values]:
        for optimizer in self.optimizers:
            if optimizer is not None:
                optimizer.zero_grad(set_to_none=True)
        tensors = [leaf for leaf in flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
        bindings = []
        for own, coordinates in zip(self.tensors, self.cluster.coordinates, strict=True):
            binding = dict(own)
            inputs = iter(tensors)
            for source in self.spmd.graph.sources:
                if source.kind == "input":
                    binding[source.value] = shard(next(inputs), self.layouts[source.value], coordinates).clone()
                elif source.names[0] == SEED:
                    binding[source.value] = torch.tensor(step)
            bindings.append(binding)
        self.cluster.record.clear()
        values = run_forward(self.cluster, self.programs, bindings)
        self.forward_record = self._recorded()
        gradients = run_backward(self.cluster, self.programs, values, [_ones(p, v) for p, v in self._both(values)])
        self.backward_record = self._recorded()
        return [
            self._collect(rank, own, gradient)
            for rank, (own, gradient) in enumerate(zip(values, gradients, strict=True))
        ]

    def _both(self, values: Sequence[VirtualValues]) -> Iterator[tuple[Program, VirtualValues]]:
        return zip(self.programs, values, strict=True)

    def _recorded(self) -> tuple[Collective, ...]:
        found = tuple(self.cluster.record)
        self.cluster.record.clear()
        return found

    def _collect(self, rank: int, values: VirtualValues, gradients: Mapping[str, torch.Tensor]) -> Values:
        collected: Values = {}
        own, program = self.tensors[rank], self.programs[rank]
        sources_held = {s.value: values[s.value] for s in self.spmd.graph.sources if s.value in values}
        leaves = [values[program.resolve(o.name)] if isinstance(o, Ref) else None for o in self.spmd.outputs]
        leaves = taken_apart(leaves, self.captured.memories, sources_held)
        written_back([own[buffer] for buffer, _ in program.mutations], [values[v] for _, v in program.mutations])
        leaves = live(
            leaves, self.captured.memories, {name: own[name] for name in whole_buffers(self.spmd) if name in own}
        )
        for i, out in enumerate(self.spmd.outputs):
            if isinstance(out, Ref):
                kind = "loss" if out.name == self.spmd.loss else "output"
                collected[kind, f"[{i}]"] = leaves[i].detach()  # one may be a parameter, which is updated
        sources = [s for s in self.spmd.graph.sources if s.kind in ("parameter", "buffer") and s.names[0] != SEED]
        for source in sources:
            if source.value in gradients:
                own[source.value].grad = gradients[source.value].clone()
                collected["gradient", source.names[0]] = gradients[source.value].clone()
        optimizer = self.optimizers[rank]
        if optimizer is not None:
            optimizer.step()
        for source in sources:
            collected[source.kind, source.names[0]] = own[source.value].detach().clone()
        return collected


def _ones(program: Program, values: VirtualValues) -> VirtualValues:
    """The cotangent of the loss, if it has one."""
    delivered = zip(program.cotangents, program.delivered, strict=True)
    return {name: torch.ones_like(values[value]) for name, value in delivered if name is not None}


def _optimizer(name: str, parameters: list[torch.Tensor]) -> torch.optim.Optimizer | None:
    if not parameters:
        return None
    if name not in OPTIMIZERS:
        raise ShardwiseError(f"unknown optimizer {name!r}: verify knows {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[name](parameters)


def _compare(
    expected: Values,
    actual: list[Values],
    layouts: Mapping[str, Layout],
    graph: Graph,
    plan: Plan,
    worst: dict[tuple[str, str], Difference],
) -> None:
    """Note the worst difference of every tensor. A tensor that only one side has is an infinite difference."""
    floor: dict[str, float] = {}
    for (kind, _), tensor in expected.items():
        floor[kind] = max(floor.get(kind, 0.0), _magnitude(tensor))
    by_name = {source.names[0]: layouts[source.value] for source in graph.sources}
    for rank, values in enumerate(actual):
        coordinates = plan.mesh.coordinates(rank)
        for key in expected.keys() | values.keys():
            kind, name = key
            if key not in expected or key not in values:
                if kind == "gradient" and not _matters(expected.get(key), values.get(key)):
                    continue
                error = float("inf")
            else:
                want = expected[key]
                if kind in ("gradient", "parameter", "buffer") and name in by_name:
                    want = shard(want, by_name[name], coordinates)
                scale = max(_magnitude(expected[key]), (1e-6 if kind == "gradient" else 1e-3) * floor[kind])
                error = _difference(want, values[key], scale)
            if key not in worst or error > worst[key].error or error != error:
                worst[key] = Difference(kind, name, error, rank)


def _matters(*tensors: torch.Tensor | None) -> bool:
    """A missing gradient is the same as zeros."""
    return any(tensor is not None and _magnitude(tensor) > 0 for tensor in tensors)


def _magnitude(tensor: torch.Tensor) -> float:
    finite = tensor.abs() if tensor.dtype != torch.bool else tensor.long()
    finite = finite[torch.isfinite(finite)] if finite.is_floating_point() else finite
    return float(finite.max()) if finite.numel() else 0.0


def _difference(want: torch.Tensor, have: torch.Tensor, scale: float) -> float:
    if want.shape != have.shape:
        return float("inf")
    if not want.numel():
        return 0.0
    inexact = want.is_floating_point() or want.is_complex()
    same = (want == have) | (torch.isnan(want) & torch.isnan(have)) if inexact else want == have
    wide = torch.complex128 if want.is_complex() or have.is_complex() else torch.float64
    difference = torch.where(same, torch.zeros((), dtype=torch.float64), (want.to(wide) - have.to(wide)).abs())
    worst = float(difference.max())
    return worst / scale if scale else (0.0 if worst == 0 else float("inf"))


__all__ = ["Difference", "Report", "verify"]
