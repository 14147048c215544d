"""The ranks of a plan on virtual clusters: runs a step as a list of (stage, action) per pipeline rank.

A plan without stages is a plan of one stage, whose actions are forward and backward of each micro-batch. Every stage
has its own cluster. Activations and cotangents go from a device to the device of the same index in the adjacent stage,
as on real ranks. Gradients of parameters that several stages have are summed at the end, and every rank runs its own
optimizer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwise.costs.pipeline_simulation import Action
from shardwise.errors import ShardwiseError
from shardwise.graph.ir import Graph, Ref, Source
from shardwise.graph.written_out import SEED
from shardwise.layouts.conversions import Collective
from shardwise.layouts.layout import Layout
from shardwise.plans.bind_stages import BoundStages
from shardwise.plans.plan import Plan
from shardwise.plans.schedule import order_of, schedule_of
from shardwise.programs.differentiate import differentiate
from shardwise.programs.grad_accum_program import GradAccumProgram, repeated
from shardwise.programs.instructions import sent_by
from shardwise.programs.invariants import check_program
from shardwise.programs.lifetimes import backward_collectives
from shardwise.programs.program import localize
from shardwise.programs.rank_program import RankProgram, delivered_values, part_of
from shardwise.programs.split_backward import split_backward
from shardwise.programs.spmd import SpmdProgram
from shardwise.programs.vjp import VjpCache
from shardwise.proof.errors_by_tensor import Key, TensorError, Values, compare
from shardwise.proof.runs import OneDevice, RunStart, optimizer_of, state_of_part
from shardwise.proof.virtual import Values as VirtualValues
from shardwise.proof.virtual import VirtualCluster, run_backward, run_forward
from shardwise.runtime.lazy_gather import alias_buffers, separate_memory, whole_buffers, write_buffers
from shardwise.runtime.local_shards import shard

CPU = torch.device("cpu")
Held = list[dict[str, Tensor]]  # per device of a stage, by name


@dataclass(frozen=True, slots=True)
class DirectionCollectives:
    """The collectives of one direction of a step: those that the program lists, and those performed."""

    name: str
    planned: tuple[Collective, ...]
    performed: tuple[Collective, ...]


class _Rank:
    """A rank: its shards by name, and its optimizer. ``device``: its number in each of its stages; ``gradients``: of
    the last step, in the dtypes in which programs compute them; ``results``: loss and outputs of the last step."""

    def __init__(self, device: int, is_last: bool) -> None:
        self.device, self.is_last = device, is_last
        self.layouts: dict[str, Layout] = {}
        self.kinds: dict[str, str] = {}
        self.tensors: dict[str, Tensor] = {}
        self.gradients: dict[str, Tensor] = {}
        self.results: Values = {}
        self.optimizer: torch.optim.Optimizer | None = None

    def part(self, name: str, whole: Tensor) -> Tensor:
        layout = self.layouts[name]
        return shard(whole, layout, layout.mesh.coordinates(self.device))

    def hold(self, source: Source, layout: Layout, full: Mapping[str, Tensor]) -> None:
        name = source.names[0]
        self.layouts[name] = layout
        if source.kind in ("parameter", "buffer") and name != SEED and name not in self.tensors:
            local = self.part(name, full[name]).clone()
            self.tensors[name] = local.requires_grad_(source.kind == "parameter" and source.trainable)
            self.kinds[name] = source.kind

    def add(self, name: str, gradient: Tensor) -> None:
        self.gradients[name] = self.gradients[name] + gradient if name in self.gradients else gradient.clone()

    def finish(self) -> Values:
        for name, gradient in self.gradients.items():
            if name in self.tensors:
                self.tensors[name].grad = gradient.clone().to(self.tensors[name].dtype)
        if self.optimizer is not None:
            self.optimizer.step()
        values: Values = {("gradient", name): gradient for name, gradient in self.gradients.items()}
        values |= {(self.kinds[name], name): tensor.detach().clone() for name, tensor in self.tensors.items()}
        return values | self.results


class VirtualRanks:
    """All ranks of a plan. ``bounds``: the programs of a micro-batch by its size; ``prelude``: the program that runs
    before the micro-batches of a plan without stages. ``forward_records``, ``backward_records``: per stage the
    collectives of the first micro-batch of the last step, and of what is done once per step."""

    def __init__(
        self, start: RunStart, plan: Plan, bounds: Mapping[int, BoundStages], prelude: SpmdProgram | None = None
    ) -> None:
        self.start, self.plan, self.bounds, self.passes = start, plan, bounds, start.passes
        self.places = tuple(dict.fromkeys(stage.placement.ranks for stage in plan.stages))
        self.schedule = schedule_of(plan.schedule, plan.order) if plan.is_pipeline else None
        self.order = order_of(self.schedule, len(self.places), len(self.passes.sizes))
        self.clusters = [VirtualCluster(stage.mesh) for stage in plan.stages]
        self._vjp_cache = VjpCache()
        self.programs = {size: list(map(self._programs, bound.spmds)) for size, bound in bounds.items()}
        self.parts = {
            size: [list(map(self._divided, programs)) for programs in stages] for size, stages in self.programs.items()
        }
        self.prelude = None if prelude is None else self._programs(prelude)
        self._halves: dict[tuple[int, int], list[tuple[RankProgram, RankProgram]]] = {}
        named = {**dict(start.module.named_parameters()), **dict(start.module.named_buffers())}
        self.full = {name: tensor.detach() for name, tensor in named.items()}
        rank_of = {
            rank: _Rank(device, ranks == plan.stages[-1].placement.ranks)
            for ranks in self.places
            for device, rank in enumerate(ranks)
        }
        self.ranks = [rank_of[number] for number in sorted(rank_of)]
        self.of_stage = [[rank_of[number] for number in stage.placement.ranks] for stage in plan.stages]
        for ranks, part, spmd in zip(self.of_stage, self.first.cut.parts, self.first.spmds, strict=True):
            for rank in ranks:
                for source in part.sources:
                    rank.hold(source, spmd.layouts[source.value], self.full)
        for rank in self.ranks:
            rank.optimizer = optimizer_of(start.optimizer, [t for t in rank.tensors.values() if t.requires_grad])
        self.forward_records: list[tuple[Collective, ...]] = [()] * len(plan.stages)
        self.backward_records: list[tuple[Collective, ...]] = [()] * len(plan.stages)

    @property
    def first(self) -> BoundStages:
        return self.bounds[self.passes.sizes[0]]

    def _programs(self, spmd: SpmdProgram) -> list[RankProgram]:
        loss_only = not self.start.returns_outputs
        reached = None if loss_only else [name == spmd.loss for name in delivered_values(spmd, loss_only=False)]
        programs = [
            differentiate(localize(spmd, device), self._vjp_cache, loss_only=loss_only, reached=reached)
            for device in range(spmd.mesh.num_devices)
        ]
        for program in programs:
            check_program(program)
        return programs

    def _divided(self, program: RankProgram) -> GradAccumProgram:
        """Return the part of every micro-batch and the parts done once per step."""
        if self.start.returns_outputs:
            nothing = part_of(program)
            return GradAccumProgram(nothing, program, nothing)
        parts = repeated(program)
        for part in (parts.ahead, parts.each, parts.behind):
            check_program(part)
        return parts

    def halves(self, size: int, stage: int) -> list[tuple[RankProgram, RankProgram]]:
        """Return per device of a stage its backward in two parts."""
        if (size, stage) not in self._halves:
            self._halves[size, stage] = [split_backward(parts.each) for parts in self.parts[size][stage]]
        return self._halves[size, stage]

    @property
    def sides(self) -> tuple[DirectionCollectives, ...]:
        """Return per stage the planned collectives, and those of the first micro-batch in the last step."""
        stages = range(len(self.plan.stages))
        names = [f" of stage {i}" if self.plan.is_pipeline else "" for i in stages]
        forward = [spmd.forward_collectives(in_passes=not self.start.returns_outputs) for spmd in self.first.spmds]
        return (
            *(DirectionCollectives(f"forward{names[i]}", forward[i], self.forward_records[i]) for i in stages),
            *(
                DirectionCollectives(f"backward{names[i]}", self._planned_backward(i), self.backward_records[i])
                for i in stages
            ),
        )

    def _planned_backward(self, stage: int) -> tuple[Collective, ...]:
        """Return the collectives that a stage's program lists for backward, of the first micro-batch and after the
        last, in the order of the schedule."""
        size = self.passes.sizes[0]
        if self.schedule is None or not self.schedule.splits_backward:
            program = self.programs[size][stage][0]
            return backward_collectives(program, in_passes=not self.start.returns_outputs)
        programs = (*self.halves(size, stage)[0], self.parts[size][stage][0].behind)
        return tuple(c for program in programs for i in program.backward for c in sent_by(i))

    def step(self, step: int) -> list[Values]:
        """Run a step and return the values of every rank."""
        for rank in self.ranks:
            rank.gradients, rank.results = {}, {}
            for tensor in rank.tensors.values():
                tensor.grad = None
        self.backward_records = [()] * len(self.clusters)
        VirtualStep(self, step).execute()
        self._add_shared()
        return [rank.finish() for rank in self.ranks]

    def _add_shared(self) -> None:
        """Sum the gradients of parameters that several pipeline ranks have."""
        holders: dict[tuple[str, int], list[_Rank]] = defaultdict(list)
        for rank in self.ranks:
            for name in rank.tensors:
                holders[name, rank.device].append(rank)
        for (name, _), ranks in holders.items():
            gradients = [rank.gradients[name] for rank in ranks if name in rank.gradients]
            for rank in ranks if len(ranks) > 1 and gradients else ():
                rank.gradients[name] = torch.stack(gradients).sum(0)

    def adopt(self, device: OneDevice) -> None:
        """Copy the state of one device: its parameters, buffers and optimizer state, cut into shards."""
        tensors = device.tensors
        for rank in self.ranks:
            for name, tensor in rank.tensors.items():
                part, whole = partial(rank.part, name), tensors[name]
                with torch.no_grad():
                    tensor.copy_(part(whole.detach()))
                if rank.optimizer is None or device.optimizer is None:
                    continue
                rank.optimizer.state.pop(tensor, None)
                if state := device.optimizer.state.get(whole):
                    rank.optimizer.state[tensor] = state_of_part(state, whole, part)

    def compare(self, expected: Values, actual: Sequence[Values], worst: dict[Key, TensorError]) -> None:
        """Update ``worst`` with the differences between every rank and one device; outputs are whole."""
        for number, (rank, have) in enumerate(zip(self.ranks, actual, strict=True)):

            def local(key: Key, whole: Tensor, rank: _Rank = rank) -> Tensor | None:
                kind, name = key
                if kind in ("loss", "output"):
                    return whole if rank.is_last else None
                layout = rank.layouts.get(name)
                if layout is not None:
                    return shard(whole, layout, layout.mesh.coordinates(rank.device))
                return whole if len(self.places) == 1 else None

            compare(expected, have, number, worst, local)

    def current(self) -> dict[str, Tensor]:
        """Return the whole parameters and buffers, put together from the shards."""
        whole: dict[str, Tensor] = {}
        for rank in self.ranks:
            for name, tensor in rank.tensors.items():
                full = self.full[name]
                place = rank.part(name, torch.arange(full.numel()).view(full.shape)).flatten()
                joined = whole.setdefault(name, torch.empty_like(full))
                joined.view(-1)[place] = tensor.detach().flatten()
        return whole


class VirtualStep:
    """One step of all ranks. ``sent``, ``returned``: what a stage has sent to the next and to the previous one, by
    (stage, micro-batch) and device."""

    def __init__(self, ranks: VirtualRanks, step: int) -> None:
        self.ranks, self.start, self.number = ranks, ranks.start, step
        self.sizes = ranks.passes.sizes
        self.last = len(ranks.plan.stages) - 1
        self.whole: list[VirtualValues] = [{} for _ in ranks.of_stage[0]]  # values of the prelude, per device
        if ranks.passes.prelude is not None:
            self._run_prelude(ranks.passes.prelude)
        self.values: dict[tuple[int, int], list[VirtualValues]] = {}  # (stage, micro-batch) -> per device
        self.sent: dict[tuple[int, int], Held] = {}
        self.returned: dict[tuple[int, int], Held] = {}
        self.ahead_values: dict[tuple[int, int], list[VirtualValues]] = {}  # (stage, size) -> values made once
        self.sums: dict[tuple[int, int], Held] = {}  # gradients of micro-batches, by source

    def _run_prelude(self, prelude: Graph) -> None:
        ranks = self.ranks
        if ranks.prelude is None:  # under stages every rank computes it from whole values
            values_of_batch = self.start.of_prelude(ranks.current(), self.number)
            self.whole = [dict(values_of_batch) for _ in self.whole]
            return
        spmd = ranks.prelude[0].spmd
        values = run_forward(ranks.clusters[0], ranks.prelude, self.bindings(0, spmd, None, self.whole))
        names = [out.name for out in spmd.outputs if isinstance(out, Ref)]
        self.whole = [
            dict(zip(ranks.passes.whole, (rank_values[program.resolve(name)] for name in names), strict=True))
            for program, rank_values in zip(ranks.prelude, values, strict=True)
        ]

    def execute(self) -> None:
        """Run all actions of all pipeline ranks, each as soon as its operands are available."""
        left = [list(actions) for actions in self.ranks.order]
        while any(left):
            before = sum(map(len, left))
            for actions in left:
                while actions and self._is_ready(actions[0]):
                    self._act(actions.pop(0))
            if sum(map(len, left)) == before:
                raise ShardwiseError("the stages of the schedule deadlock")
        self._reduce()

    def _is_ready(self, action: Action) -> bool:
        stage, micro_batch = action.stage, action.micro_batch
        if action.kind == "forward":
            return stage == 0 or (stage - 1, micro_batch) in self.sent
        if (stage, micro_batch) not in self.values:
            return False
        return action.kind == "weight" or stage == self.last or (stage + 1, micro_batch) in self.returned

    def _act(self, action: Action) -> None:
        stage, micro_batch = action.stage, action.micro_batch
        if action.kind == "forward":
            self._forward(stage, micro_batch)
        elif action.kind == "backward":
            self._backward(stage, micro_batch, [parts.each for parts in self._parts(stage, micro_batch)])
        else:
            halves = self.ranks.halves(self.sizes[micro_batch], stage)
            is_weight = action.kind == "weight"
            self._backward(stage, micro_batch, [half[is_weight] for half in halves], is_weight=is_weight)
        if action.kind in ("backward", "weight"):
            self.values[stage, micro_batch] = []  # nothing reads them again: only the micro-batches in flight are held

    def _parts(self, stage: int, micro_batch: int) -> list[GradAccumProgram]:
        return self.ranks.parts[self.sizes[micro_batch]][stage]

    def _bound(self, stage: int, micro_batch: int) -> tuple[Graph, SpmdProgram]:
        bound = self.ranks.bounds[self.sizes[micro_batch]]
        return bound.cut.parts[stage], bound.spmds[stage]

    # -- forward -------------------------------------------------------------------------------------------------------

    def bindings(
        self, stage: int, spmd: SpmdProgram, micro_batch: int | None, received: Sequence[VirtualValues]
    ) -> list[VirtualValues]:
        """Return per device of a stage the values of the sources of its program. ``received``: from the stage before,
        by value."""
        bindings: list[VirtualValues] = []
        for rank, arrived, whole in zip(self.ranks.of_stage[stage], received, self.whole, strict=True):
            given = self.start.given(spmd.graph, micro_batch, whole)
            binding = dict(arrived)
            for source in spmd.graph.sources:
                name, value = source.names[0], source.value
                if source.kind == "input":
                    coordinates = spmd.mesh.coordinates(rank.device)
                    binding[value] = shard(given[value], spmd.layouts[value], coordinates).clone()
                elif name == SEED:
                    binding[value] = torch.tensor(self.number)
                elif source.kind == "constant":
                    binding[value] = given[value] if value in given else self.start.constant(value).clone()
                elif name in rank.tensors:
                    tensor = rank.tensors[name].detach()
                    # A later micro-batch may write the buffer before this one's backward reads it.
                    is_overwritten = source.kind == "buffer" and not self.start.returns_outputs
                    binding[value] = tensor.clone() if is_overwritten else tensor
            bindings.append(binding)
        return bindings

    def _forward(self, stage: int, micro_batch: int) -> None:
        ranks, cluster, size = self.ranks, self.ranks.clusters[stage], self.sizes[micro_batch]
        part, spmd = self._bound(stage, micro_batch)
        parts = self._parts(stage, micro_batch)
        programs = [parts_of_rank.each for parts_of_rank in parts]
        received = self.sent[stage - 1, micro_batch] if stage else [{} for _ in programs]
        bindings = self.bindings(stage, spmd, micro_batch, received)
        cluster.record.clear()
        if (stage, size) not in self.ahead_values:
            made_ahead = run_forward(cluster, [parts_of_rank.ahead for parts_of_rank in parts], bindings)
            self.ahead_values[stage, size] = [
                {name: results[name] for name in program.given}
                for program, results in zip(programs, made_ahead, strict=True)
            ]
        ahead = self.ahead_values[stage, size]
        values = run_forward(cluster, programs, [{**b, **made} for b, made in zip(bindings, ahead, strict=True)])
        if micro_batch == 0:
            ranks.forward_records[stage] = tuple(cluster.record)
        self.values[stage, micro_batch] = values
        outputs = {
            out.name: program_out.name
            for out, program_out in zip(part.outputs, spmd.outputs, strict=True)
            if isinstance(out, Ref) and isinstance(program_out, Ref)
        }
        sends = ranks.bounds[size].cut.sends(stage)
        self.sent[stage, micro_batch] = [
            {name: rank_values[program.resolve(outputs[name])].clone() for name in sends}
            for program, rank_values in zip(programs, values, strict=True)
        ]
        for rank, program, rank_values in zip(ranks.of_stage[stage], programs, values, strict=True):
            (self._return_outputs if self.start.returns_outputs else self._write)(
                rank, program, rank_values, stage, micro_batch
            )

    def _write(self, rank: _Rank, program: RankProgram, values: VirtualValues, stage: int, micro_batch: int) -> None:
        """Add the loss of a micro-batch, and write its buffers: running statistics always, others after the last."""
        sources = self._bound(stage, micro_batch)[0].source_of
        if stage == self.last:
            loss = values[program.delivered[0]].detach()
            captured = self.start.captured.graph
            for i, out in enumerate(captured.outputs):
                if isinstance(out, Ref) and out.name == captured.loss:
                    before = rank.results.get(("loss", f"[{i}]"))
                    rank.results["loss", f"[{i}]"] = loss if before is None else before + loss
        for buffer, value in program.mutations:
            name = sources[buffer].names[0]
            if micro_batch == len(self.sizes) - 1 or name in self.ranks.passes.statistics:
                write_buffers([rank.tensors[name]], [values[value]])

    def _return_outputs(self, rank: _Rank, program: RankProgram, values: VirtualValues, *_: int) -> None:
        """Write the buffers of a call, and return its outputs with the memory that they share on one device."""
        memories, spmd = self.start.captured.memories, program.spmd
        sources = spmd.graph.sources
        held = {source.value: values[source.value] for source in sources if source.value in values}
        own = {source.value: rank.tensors[source.names[0]] for source in sources if source.names[0] in rank.tensors}
        leaves: list[Any] = [values[program.resolve(o.name)] if isinstance(o, Ref) else None for o in spmd.outputs]
        leaves = separate_memory(leaves, memories, held)
        write_buffers([own[buffer] for buffer, _ in program.mutations], [values[v] for _, v in program.mutations])
        leaves = alias_buffers(leaves, memories, {name: own[name] for name in whole_buffers(spmd) if name in own})
        for i, out in enumerate(spmd.outputs):
            if isinstance(out, Ref):
                kind = "loss" if out.name == spmd.loss else "output"
                rank.results[kind, f"[{i}]"] = leaves[i].detach()  # it may be a parameter, which is updated

    # -- backward ------------------------------------------------------------------------------------------------------

    def _backward(
        self, stage: int, micro_batch: int, programs: Sequence[RankProgram], *, is_weight: bool = False
    ) -> None:
        cluster = self.ranks.clusters[stage]
        sources = self._bound(stage, micro_batch)[0].source_of
        values = self.values[stage, micro_batch]
        if not is_weight:
            self._seed_cotangents(stage, micro_batch, programs)
        cotangents = [
            {name: values_of[name] for name in p.cotangents if name}
            for p, values_of in zip(programs, values, strict=True)
        ]
        cluster.record.clear()
        rank_gradients = run_backward(cluster, programs, values, cotangents)
        if micro_batch == 0:
            self.ranks.backward_records[stage] += tuple(cluster.record)
        returned: Held = []
        sums = self.sums.setdefault((stage, self.sizes[micro_batch]), [{} for _ in values])
        for total, values_of_device, gradients in zip(sums, values, rank_gradients, strict=True):
            returned.append({})
            for name, gradient in gradients.items():
                source = sources.get(name)
                if source is None:
                    values_of_device[name] = gradient  # read by the second part of backward
                elif source.kind == "activation":
                    returned[-1][name] = gradient.clone()
                else:
                    total[name] = total[name] + gradient if name in total else gradient.clone()
        if stage and not is_weight:
            self._fill_zeros(stage, micro_batch, returned)
        if not is_weight:
            self.returned[stage, micro_batch] = returned

    def _seed_cotangents(self, stage: int, micro_batch: int, programs: Sequence[RankProgram]) -> None:
        """Set the cotangents of what a stage delivers: those that came back, and one for the loss."""
        part, spmd = self._bound(stage, micro_batch)
        of_output = dict(zip(spmd.cotangents, part.cotangents or (), strict=True))
        delivered = delivered_values(spmd, loss_only=not self.start.returns_outputs)
        for device, (program, values) in enumerate(zip(programs, self.values[stage, micro_batch], strict=True)):
            for name, cotangent in zip(delivered, program.cotangents, strict=True):
                if cotangent is not None and name in of_output:
                    values[cotangent] = self.returned[stage + 1, micro_batch][device][of_output[name]]
                elif cotangent is not None:
                    values[cotangent] = torch.ones_like(values[program.resolve(name)])

    def _fill_zeros(self, stage: int, micro_batch: int, returned: Held) -> None:
        """Add zeros for the received values whose cotangents the previous stage waits for."""
        part, spmd = self._bound(stage, micro_batch)
        waits_for = set(self._bound(stage - 1, micro_batch)[0].cotangents or ())
        for source in part.sources:
            if source.kind == "activation" and source.value in waits_for:
                for device, cotangents in enumerate(returned):
                    shape = spmd.layouts[source.value].local_shape(spmd.mesh.coordinates(device))
                    dtype = part.by_name[source.value].dtype
                    cotangents.setdefault(source.value, torch.zeros(shape, dtype=dtype))

    def _reduce(self) -> None:
        ranks = self.ranks
        for (stage, size), sums in self.sums.items():
            cluster, parts = ranks.clusters[stage], ranks.parts[size][stage]
            sources = ranks.bounds[size].cut.parts[stage].source_of
            summed = [
                {name: total[source] for source, name in rank_parts.sums.items()}
                for rank_parts, total in zip(parts, sums, strict=True)
            ]
            cluster.record.clear()
            reduced = run_backward(cluster, [rank_parts.behind for rank_parts in parts], summed, [{} for _ in summed])
            if size == self.sizes[0]:
                ranks.backward_records[stage] += tuple(cluster.record)
            for rank, total, rank_reduced in zip(ranks.of_stage[stage], sums, reduced, strict=True):
                for name, gradient in {**total, **rank_reduced}.items():
                    rank.add(sources[name].names[0], gradient)
