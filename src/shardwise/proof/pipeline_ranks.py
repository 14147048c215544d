"""Runs a pipeline step on the virtual cluster: all stages and micro-batches in the order of the schedule.

Every stage has its own cluster. Activations and cotangents go from a device to the device of the same index in the
adjacent stage, as on real ranks. Gradients of parameters that several stages have are summed at the end, and every
stage runs its own optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from shardwise.costs.pipeline_simulation import Action
from shardwise.errors import ShardwiseError
from shardwise.graph.interpret import interpret
from shardwise.graph.ir import Graph, Ref
from shardwise.graph.normalize_random import SEED
from shardwise.graph.trees import flatten_with_path, leaf_name
from shardwise.layouts.conversions import Collective
from shardwise.layouts.layout import Layout
from shardwise.plans.bind_stages import BoundStages, only_read
from shardwise.plans.plan import Plan
from shardwise.plans.schedule import schedule_of
from shardwise.programs.differentiate import differentiate
from shardwise.programs.grad_accum_program import repeated
from shardwise.programs.instructions import sent_by
from shardwise.programs.invariants import check_program
from shardwise.programs.lifetimes import backward_collectives
from shardwise.programs.micro_batches import Passes, values_of_step
from shardwise.programs.program import localize
from shardwise.programs.rank_program import RankProgram, delivered_values
from shardwise.programs.split_backward import split_backward
from shardwise.programs.spmd import SpmdProgram
from shardwise.programs.vjp import VjpCache
from shardwise.proof.errors_by_tensor import Key, TensorError, Values, compare
from shardwise.proof.runs import DirectionCollectives, OneDevice, RunStart, optimizer_of, state_of_part
from shardwise.proof.virtual import Values as VirtualValues
from shardwise.proof.virtual import VirtualCluster, run_backward, run_forward
from shardwise.runtime.local_shards import shard
from shardwise.runtime.micro_batched_step import rows_of_pass, with_samples_in
from shardwise.runtime.torch_schedules import order_of

CPU = torch.device("cpu")
Held = list[dict[str, Tensor]]  # per device of a stage, by name


class PipelineRanks:
    """The ranks of all stages, each with its shards and its optimizer. ``forward_records``, ``backward_records``: per
    stage the collectives of the first micro-batch of the last step; ``made_in``: the dtypes in which programs compute
    the gradients of parameters."""

    def __init__(self, start: RunStart, plan: Plan, passes: Passes, bounds: Mapping[int, BoundStages]) -> None:
        self.start, self.plan, self.passes, self.bounds = start, plan, passes, bounds
        self.schedule = schedule_of(plan.schedule, plan.order)
        self.places = tuple(dict.fromkeys(stage.placement.ranks for stage in plan.stages))
        self.order = order_of(self.schedule, len(self.places), len(passes.sizes))
        vjp_cache = VjpCache()
        self.clusters = [VirtualCluster(stage.mesh) for stage in plan.stages]
        plain = {size: [self._programs(spmd, vjp_cache) for spmd in bound.spmds] for size, bound in bounds.items()}
        self.parts = {size: [list(map(repeated, programs)) for programs in stages] for size, stages in plain.items()}
        for parts in (part for stages in self.parts.values() for programs in stages for part in programs):
            for program in (parts.ahead, parts.each, parts.behind):
                check_program(program)
        self.first = [programs[0] for programs in plain[passes.sizes[0]]]  # per stage, for one micro-batch
        self._halves: dict[tuple[int, int], list[tuple[RankProgram, RankProgram]]] = {}
        named = {**dict(start.module.named_parameters()), **dict(start.module.named_buffers())}
        self.full = {name: tensor.detach() for name, tensor in named.items()}
        leaves = flatten_with_path((start.args, dict(start.kwargs)))[0]
        self.inputs = {leaf_name(path): x for path, x in leaves if isinstance(x, Tensor)}
        self.split = with_samples_in(plan)
        self.parameters = dict(start.module.named_parameters()).keys()
        graph = start.captured.graph
        self.loss = next(
            f"[{i}]" for i, out in enumerate(graph.outputs) if isinstance(out, Ref) and out.name == graph.loss
        )
        self.layouts: dict[tuple[int, ...], dict[str, Layout]] = {ranks: {} for ranks in self.places}
        self.tensors: dict[tuple[int, ...], Held] = {ranks: [{} for _ in ranks] for ranks in self.places}
        for number in range(len(plan.stages)):
            self._hold(number)
        self.optimizers = {
            ranks: [
                optimizer_of(start.optimizer, [t for t in shards.values() if t.requires_grad])
                for shards in place_shards
            ]
            for ranks, place_shards in self.tensors.items()
        }
        self.forward_records: list[tuple[Collective, ...]] = [()] * len(plan.stages)
        self.backward_records: list[tuple[Collective, ...]] = [()] * len(plan.stages)
        self.made_in: dict[str, torch.dtype] = {}

    def _programs(self, spmd: SpmdProgram, vjp_cache: VjpCache) -> list[RankProgram]:
        programs = [differentiate(localize(spmd, device), vjp_cache) for device in range(spmd.mesh.num_devices)]
        for program in programs:
            check_program(program)
        return programs

    def halves(self, size: int, stage: int) -> list[tuple[RankProgram, RankProgram]]:
        """Return per device of a stage its backward in two parts."""
        if (size, stage) not in self._halves:
            self._halves[size, stage] = [split_backward(parts.each) for parts in self.parts[size][stage]]
        return self._halves[size, stage]

    def planned_backward(self, stage: int) -> tuple[Collective, ...]:
        """Return the collectives that a stage's program lists for backward, of the first micro-batch and after the
        last, in the order of the schedule."""
        size = self.passes.sizes[0]
        if not self.schedule.splits_backward:
            return backward_collectives(self.first[stage], in_passes=True)
        programs = (*self.halves(size, stage)[0], self.parts[size][stage][0].behind)
        return tuple(c for program in programs for i in program.backward for c in sent_by(i))

    def whole(self) -> dict[str, Tensor]:
        """Return the values of the prelude."""
        if self.passes.prelude is None:
            return {}
        prelude = only_read(self.passes.prelude)
        bindings = {}
        for source in prelude.sources:
            if source.kind == "input":
                bindings[source.value] = self.inputs[source.names[0]].to(prelude.by_name[source.value].dtype)
            else:
                is_constant = source.kind == "constant"
                bindings[source.value] = (
                    self.start.constant(source.value) if is_constant else self.full[source.names[0]]
                )
        values = interpret(prelude, bindings)
        return {name: values[name].detach() for name in self.passes.whole}

    def _hold(self, number: int) -> None:
        """Create the shards of a stage."""
        bound = self.bounds[self.passes.sizes[0]]
        part, spmd, ranks = bound.cut.parts[number], bound.spmds[number], self.plan.stages[number].placement.ranks
        self.layouts[ranks].update({s.names[0]: spmd.layouts[s.value] for s in part.sources})
        for shards, coordinates in zip(self.tensors[ranks], self.clusters[number].coordinates, strict=True):
            for source in part.sources:
                if source.kind not in ("parameter", "buffer") or source.names[0] in shards or source.names[0] == SEED:
                    continue
                local = shard(self.full[source.names[0]], spmd.layouts[source.value], coordinates).clone()
                shards[source.names[0]] = local.requires_grad_(source.kind == "parameter" and source.trainable)

    def step(self, step: int) -> list[Values]:
        """Run a step and return the values of every rank."""
        for optimizer in self._optimizers():
            optimizer.zero_grad(set_to_none=True)
        self.backward_records = [()] * len(self.clusters)
        run = _PipelineStep(self, step)
        run.execute()
        run.end()
        self._add_shared()
        gradients = {
            ranks: [
                {
                    ("gradient", name): t.grad.clone().to(self.made_in[name])
                    for name, t in shards.items()
                    if t.grad is not None
                }
                for shards in place_shards
            ]
            for ranks, place_shards in self.tensors.items()
        }
        for optimizer in self._optimizers():
            optimizer.step()
        values_of_rank: dict[int, Values] = {}
        for ranks in self.places:
            for device, rank in enumerate(ranks):
                have: Values = gradients[ranks][device]
                for name, tensor in self.tensors[ranks][device].items():
                    kind = "parameter" if name in self.parameters else "buffer"
                    have[kind, name] = tensor.detach().clone()
                if ranks == self.plan.stages[-1].placement.ranks:
                    have["loss", self.loss] = run.losses[device]
                values_of_rank[rank] = have
        return [values_of_rank[rank] for rank in sorted(values_of_rank)]

    def adopt(self, device: OneDevice) -> None:
        """Copy the state of one device: its parameters, buffers and optimizer state, cut into shards."""
        tensors = device.tensors
        for ranks, place_shards in self.tensors.items():
            for number, (shards, optimizer) in enumerate(zip(place_shards, self.optimizers[ranks], strict=True)):
                for name, tensor in shards.items():
                    part = partial(self._local, ranks, name, device=number)
                    with torch.no_grad():
                        tensor.copy_(part(tensors[name].detach()))
                    if optimizer is None or device.optimizer is None:
                        continue
                    optimizer.state.pop(tensor, None)
                    if state := device.optimizer.state.get(tensors[name]):
                        optimizer.state[tensor] = state_of_part(state, tensors[name], part)

    @property
    def sides(self) -> tuple[DirectionCollectives, ...]:
        """Return per stage the planned collectives, and those of the first micro-batch in the last step."""
        forward = self.bounds[self.passes.sizes[0]].spmds
        return (
            *(
                DirectionCollectives(
                    f"forward of stage {i}", spmd.forward_collectives(in_passes=True), self.forward_records[i]
                )
                for i, spmd in enumerate(forward)
            ),
            *(
                DirectionCollectives(f"backward of stage {i}", self.planned_backward(i), self.backward_records[i])
                for i in range(len(forward))
            ),
        )

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        return [
            optimizer for optimizers in self.optimizers.values() for optimizer in optimizers if optimizer is not None
        ]

    def compare(self, expected: Values, actual: Sequence[Values], worst: dict[Key, TensorError]) -> None:
        """Update ``worst`` with the differences between every rank and one device (``proof.errors_by_tensor``)."""
        for ranks, place_shards in self.tensors.items():
            for device, (rank, shards) in enumerate(zip(ranks, place_shards, strict=True)):
                self._compare(ranks, device, rank, shards, expected, actual[rank], worst)

    def _compare(
        self,
        ranks: tuple[int, ...],
        device: int,
        rank: int,
        shards: Mapping[str, Tensor],
        expected: Values,
        have: Values,
        worst: dict[Key, TensorError],
    ) -> None:
        compared = {key: x for key, x in expected.items() if key in have or (key[0] == "gradient" and key[1] in shards)}

        def local(key: Key, whole: Tensor, _: int) -> Tensor:
            return whole if key[0] == "loss" else self._local(ranks, key[1], whole, device)

        differences: dict[Key, TensorError] = {}
        compare(compared, [have], local, differences)
        for key, difference in differences.items():
            if key not in worst or not difference.error <= worst[key].error:
                worst[key] = replace(difference, rank=rank)

    def _local(self, ranks: tuple[int, ...], name: str, whole: Tensor, device: int) -> Tensor:
        """Return the shard of a parameter or buffer on a device of a pipeline rank."""
        layout = self.layouts[ranks][name]
        return shard(whole, layout, layout.mesh.coordinates(device))

    def _add_shared(self) -> None:
        """Sum the gradients of parameters that several pipeline ranks have."""
        places: dict[str, list[tuple[int, ...]]] = {}
        for ranks, place_shards in self.tensors.items():
            for name in place_shards[0]:
                places.setdefault(name, []).append(ranks)
        for name, where in places.items():
            for device in range(len(where[0])) if len(where) > 1 else ():
                tensors = [self.tensors[ranks][device][name] for ranks in where]
                gradients = [tensor.grad for tensor in tensors if tensor.grad is not None]
                for tensor in tensors if gradients else ():
                    tensor.grad = torch.stack(gradients).sum(0)


class _PipelineStep:
    """One pipeline step. ``losses``: per device of the last stage."""

    def __init__(self, ranks: PipelineRanks, step: int) -> None:
        self.ranks, self.seed = ranks, torch.tensor(step)
        self.sizes = ranks.passes.sizes
        self.whole = ranks.whole()
        self.last = len(ranks.plan.stages) - 1
        self.values: dict[tuple[int, int], list[VirtualValues]] = {}  # (stage, micro-batch) -> per device
        self.sent: dict[tuple[int, int], Held] = {}
        self.returned: dict[tuple[int, int], Held] = {}
        self.ahead_values: dict[tuple[int, int], list[VirtualValues]] = {}  # (stage, size) -> values made once
        self.sums: dict[tuple[int, int], Held] = {}  # gradients of micro-batches, by source
        self.losses: dict[int, Tensor] = {}  # in the dtype of the model's loss

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

    def _is_ready(self, action: Action) -> bool:
        stage, micro_batch = action.stage, action.micro_batch
        if action.kind == "forward":
            return stage == 0 or (stage - 1, micro_batch) in self.sent
        if (stage, micro_batch) not in self.values:
            return False
        return action.kind == "weight" or stage == self.last or (stage + 1, micro_batch) in self.returned

    def _act(self, action: Action) -> None:
        stage, micro_batch = action.stage, action.micro_batch
        size = self.sizes[micro_batch]
        if action.kind == "forward":
            self._forward(stage, micro_batch, size)
        elif action.kind == "backward":
            programs = [parts.each for parts in self.ranks.parts[size][stage]]
            self._backward(stage, micro_batch, size, programs)
        else:
            position = 0 if action.kind == "input" else 1
            programs = [halves[position] for halves in self.ranks.halves(size, stage)]
            self._backward(stage, micro_batch, size, programs, is_weight=bool(position))

    def _forward(self, stage: int, micro_batch: int, size: int) -> None:
        ranks = self.ranks
        bound, cluster = ranks.bounds[size], ranks.clusters[stage]
        part, spmd, parts = bound.cut.parts[stage], bound.spmds[stage], ranks.parts[size][stage]
        programs = [repeated_parts.each for repeated_parts in parts]
        shards = ranks.tensors[ranks.plan.stages[stage].placement.ranks]
        bindings = []
        for device, device_shards in enumerate(shards):
            binding = self._bound(part, spmd, device_shards, device, micro_batch, size)
            received = self.sent[stage - 1, micro_batch][device] if stage else {}
            bindings.append({**binding, **{s.value: received[s.value] for s in part.sources if s.kind == "activation"}})
        cluster.record.clear()
        if (stage, size) not in self.ahead_values:
            made_ahead = run_forward(cluster, [rank_parts.ahead for rank_parts in parts], bindings)
            self.ahead_values[stage, size] = [
                {name: results[name] for name in program.given}
                for program, results in zip(programs, made_ahead, strict=True)
            ]
        bindings = [
            {**binding, **delivered}
            for binding, delivered in zip(bindings, self.ahead_values[stage, size], strict=True)
        ]
        values = run_forward(cluster, programs, bindings)
        if micro_batch == 0:
            ranks.forward_records[stage] = tuple(cluster.record)
        self.values[stage, micro_batch] = values
        outputs = {
            out.name: program_out.name
            for out, program_out in zip(part.outputs, spmd.outputs, strict=True)
            if isinstance(out, Ref) and isinstance(program_out, Ref)
        }
        self.sent[stage, micro_batch] = [
            {name: rank_values[program.resolve(outputs[name])].clone() for name in bound.cut.sends(stage)}
            for program, rank_values in zip(programs, values, strict=True)
        ]
        is_last = micro_batch == len(self.sizes) - 1
        for device, (program, rank_values) in enumerate(zip(programs, values, strict=True)):
            if stage == self.last:
                loss = rank_values[program.delivered[0]].detach()
                self.losses[device] = self.losses[device] + loss if device in self.losses else loss
            for buffer, value in program.mutations:
                name = part.source_of[buffer].names[0]
                if is_last or name in ranks.passes.statistics:
                    with torch.no_grad():
                        shards[device][name].copy_(rank_values[value])

    def _bound(
        self, part: Graph, spmd: SpmdProgram, shards: Mapping[str, Tensor], device: int, micro_batch: int, size: int
    ) -> VirtualValues:
        """Return the source values of a device's program, except those that it receives."""
        ranks, coordinates = self.ranks, spmd.mesh.coordinates(device)
        start, batch = sum(self.sizes[:micro_batch]), sum(self.sizes)
        binding: VirtualValues = dict(values_of_step(part, self.whole, start, CPU))
        for source in part.sources:
            name = source.names[0]
            if name == SEED:
                binding[source.value] = self.seed
            elif source.kind == "input":
                rows = ranks.inputs[name]
                if name in ranks.split and len(self.sizes) > 1:
                    rows = rows_of_pass(rows, start, size, batch)
                binding[source.value] = shard(rows, spmd.layouts[source.value], coordinates).clone()
            elif source.kind == "constant" and source.value not in binding:
                binding[source.value] = ranks.start.constant(source.value).clone()
            elif source.kind in ("parameter", "buffer"):
                # A copy: a later micro-batch may write the buffer before this one's backward reads it.
                binding[source.value] = shards[name].detach() if source.kind == "parameter" else shards[name].clone()
        return binding

    def _backward(
        self, stage: int, micro_batch: int, size: int, programs: Sequence[RankProgram], *, is_weight: bool = False
    ) -> None:
        ranks = self.ranks
        bound, cluster = ranks.bounds[size], ranks.clusters[stage]
        part, spmd = bound.cut.parts[stage], bound.spmds[stage]
        values = self.values[stage, micro_batch]
        if not is_weight:
            of_output = dict(zip(spmd.cotangents, part.cotangents or (), strict=True))
            delivered = delivered_values(spmd, loss_only=True)
            for device, (program, values_of) in enumerate(zip(programs, values, strict=True)):
                for name, seed in zip(delivered, program.cotangents, strict=True):
                    if seed is not None:
                        back = self.returned[stage + 1, micro_batch][device] if name in of_output else {}
                        values_of[seed] = (
                            back[of_output[name]] if back else torch.ones_like(values_of[program.resolve(name)])
                        )
        cotangents = [
            {name: values_of[name] for name in p.cotangents if name}
            for p, values_of in zip(programs, values, strict=True)
        ]
        cluster.record.clear()
        rank_gradients = run_backward(cluster, programs, values, cotangents)
        if micro_batch == 0:
            ranks.backward_records[stage] += tuple(cluster.record)
        returned: Held = []
        sums = self.sums.setdefault((stage, size), [{} for _ in values])
        for total, values_of_device, gradients in zip(sums, values, rank_gradients, strict=True):
            returned.append({})
            for name, gradient in gradients.items():
                source = part.source_of.get(name)
                if source is None:
                    values_of_device[name] = gradient  # read by the second part of backward
                elif source.kind == "activation":
                    returned[-1][name] = gradient.clone()
                else:
                    total[name] = total[name] + gradient if name in total else gradient.clone()
        if not is_weight:
            layouts = spmd.layouts
            for device, device_cotangents in enumerate(returned):
                for name in self._wanted_back(bound, stage):
                    if name not in device_cotangents:
                        shape = layouts[name].local_shape(spmd.mesh.coordinates(device))
                        device_cotangents[name] = torch.zeros(shape, dtype=part.by_name[name].dtype)
            self.returned[stage, micro_batch] = returned

    def end(self) -> None:
        """Reduce the accumulated gradients, and add them to those of the parameters."""
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
            shards = ranks.tensors[ranks.plan.stages[stage].placement.ranks]
            for rank_shards, total, rank_reduced in zip(shards, sums, reduced, strict=True):
                for name, gradient in {**total, **rank_reduced}.items():
                    stored = sources[name].names[0]
                    tensor, ranks.made_in[stored] = rank_shards[stored], gradient.dtype
                    added = gradient.to(tensor.dtype)
                    tensor.grad = added.clone() if tensor.grad is None else tensor.grad + added

    @staticmethod
    def _wanted_back(bound: BoundStages, stage: int) -> tuple[str, ...]:
        """Return the received values whose cotangents the previous stage waits for."""
        if not stage:
            return ()
        sent = set(bound.cut.parts[stage - 1].cotangents or ())
        return tuple(s.value for s in bound.cut.parts[stage].sources if s.kind == "activation" and s.value in sent)


__all__ = ["PipelineRanks"]
