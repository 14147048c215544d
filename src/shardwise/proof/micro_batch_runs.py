"""Runs a step of several micro-batches on the virtual cluster, and the whole batch on one device for comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain, groupby
from operator import itemgetter

import torch

from shardwise.graph.ir import Ref
from shardwise.graph.normalize_random import SEED
from shardwise.layouts.conversions import Collective
from shardwise.plans.plan import Plan
from shardwise.programs.differentiate import differentiate
from shardwise.programs.grad_accum_program import repeated
from shardwise.programs.invariants import check_program
from shardwise.programs.lifetimes import backward_collectives
from shardwise.programs.micro_batches import Passes, values_of_step
from shardwise.programs.program import localize
from shardwise.programs.rank_program import RankProgram
from shardwise.programs.spmd import SpmdProgram
from shardwise.programs.vjp import VjpCache
from shardwise.proof.errors_by_tensor import Values
from shardwise.proof.runs import DirectionCollectives, OneDevice, Ranks, RunStart, stored_values
from shardwise.proof.virtual import Values as VirtualValues
from shardwise.proof.virtual import run_backward, run_forward
from shardwise.runtime.local_shards import shard
from shardwise.runtime.micro_batched_step import rows_of_pass, with_samples_in

CPU = torch.device("cpu")


class OneDeviceMicroBatches(OneDevice):
    """The module on one device, over the whole batch; only running statistics are computed per micro-batch."""

    def __init__(self, start: RunStart, passes: Passes) -> None:
        super().__init__(start, passes.sizes)
        self.passes = passes

    def step(self, step: int) -> Values:
        counted = [name for name in self.passes.statistics if name.rpartition(".")[2] == "num_batches_tracked"]
        values = super().step(step)
        buffers = dict(self.module.named_buffers())
        for name in counted:  # ranks call the layer once per micro-batch
            buffers[name] += len(self.passes.sizes) - 1
            values["buffer", name] = buffers[name].clone()
        return {key: value for key, value in values.items() if key[0] != "output"}


class RanksMicroBatches(Ranks):
    """The ranks of the virtual cluster, which run the micro-batches of a step in sequence. ``gradients``: per rank
    those of the last step, in the dtypes in which programs compute them."""

    def __init__(
        self, start: RunStart, plan: Plan, passes: Passes, spmds: Mapping[int, SpmdProgram], prelude: SpmdProgram | None
    ) -> None:
        super().__init__(replace(start, spmd=spmds[passes.sizes[0]]))
        self.passes, self.split = passes, with_samples_in(plan)
        self.gradients: list[dict[str, torch.Tensor]] = []
        vjp_cache = VjpCache()
        self.by_size = {size: list(map(repeated, self._programs(spmd, vjp_cache))) for size, spmd in spmds.items()}
        for parts in chain.from_iterable(self.by_size.values()):
            for program in (parts.ahead, parts.each, parts.behind):
                check_program(program)
        self.prelude = None if prelude is None else self._programs(prelude, vjp_cache)
        loss = start.captured.graph.loss
        outputs = [out.name if isinstance(out, Ref) else None for out in start.captured.graph.outputs]
        self.losses = [f"[{i}]" for i, name in enumerate(outputs) if name == loss]

    def _programs(self, spmd: SpmdProgram, vjp_cache: VjpCache) -> list[RankProgram]:
        ranks = range(spmd.mesh.num_devices)
        programs = [differentiate(localize(spmd, rank), vjp_cache, loss_only=True) for rank in ranks]
        for program in programs:
            check_program(program)
        return programs

    def step(self, step: int) -> list[Values]:
        for optimizer in self.optimizers:
            if optimizer is not None:
                optimizer.zero_grad(set_to_none=True)
        self.gradients = [{} for _ in self.tensors]
        whole = self._whole(step)
        totals: dict[int, torch.Tensor] = {}  # by rank, in the dtype of the model's loss
        records: list[tuple[tuple[Collective, ...], tuple[Collective, ...]]] = []
        samples = zip(self.passes.starts, self.passes.sizes, strict=True)
        for size, group in groupby(samples, key=itemgetter(1)):
            records.append(self._passes(step, size, [start for start, _ in group], whole, totals))
        self.forward_record, self.backward_record = records[0]
        return [self._finish(rank, totals[rank]) for rank in range(len(self.tensors))]

    def _passes(
        self,
        step: int,
        size: int,
        starts: Sequence[int],
        whole: Sequence[Mapping[str, torch.Tensor]],
        totals: dict[int, torch.Tensor],
    ) -> tuple[tuple[Collective, ...], tuple[Collective, ...]]:
        """Run the micro-batches of one size: add losses to ``totals``, and gradients to those of the parameters. Return
        the collectives of the first one and of the parts done once, forward and backward."""
        parts = self.by_size[size]
        ahead, per_pass, behind = ([getattr(part, which) for part in parts] for which in ("ahead", "each", "behind"))
        sums: list[dict[str, torch.Tensor]] = [{} for _ in self.tensors]
        forward: list[Collective] = []
        backward: list[Collective] = []
        ahead_values: list[VirtualValues] = []
        for start in starts:
            self.cluster.record.clear()
            bindings = self._bindings(per_pass[0].spmd, step, start, size, whole)
            if start == starts[0]:
                ahead_results = run_forward(self.cluster, ahead, bindings)
                ahead_values = [
                    {name: results[name] for name in p.given}
                    for p, results in zip(per_pass, ahead_results, strict=True)
                ]
            bindings = [{**binding, **delivered} for binding, delivered in zip(bindings, ahead_values, strict=True)]
            values = run_forward(self.cluster, per_pass, bindings)
            forward += self._recorded() if start == starts[0] else ()
            ones = [
                {
                    name: torch.ones_like(rank_values[v])
                    for name, v in zip(p.cotangents, p.delivered, strict=True)
                    if name
                }
                for p, rank_values in zip(per_pass, values, strict=True)
            ]
            self.cluster.record.clear()
            gradients = run_backward(self.cluster, per_pass, values, ones)
            backward += self._recorded() if start == starts[0] else ()
            is_last = start + size == sum(self.passes.sizes)
            for rank, (program, rank_values, rank_gradients) in enumerate(
                zip(per_pass, values, gradients, strict=True)
            ):
                loss = rank_values[program.delivered[0]].detach()
                totals[rank] = totals[rank] + loss if rank in totals else loss
                for source, gradient in rank_gradients.items():
                    sums[rank][source] = sums[rank][source] + gradient if source in sums[rank] else gradient.clone()
                self._write(rank, program, rank_values, is_last=is_last)
        self.cluster.record.clear()
        summed = [
            {name: rank_sums[source] for source, name in part.sums.items()}
            for part, rank_sums in zip(parts, sums, strict=True)
        ]
        reduced = run_backward(self.cluster, behind, summed, [{} for _ in summed])
        backward += self._recorded()
        for rank, (before, after) in enumerate(zip(sums, reduced, strict=True)):
            self._add(rank, {**before, **after})
        return tuple(forward), tuple(backward)

    def _whole(self, step: int) -> list[dict[str, torch.Tensor]]:
        """Return per rank the values of the prelude."""
        if self.prelude is None:
            return [{} for _ in self.tensors]
        bindings = self._bindings(self.prelude[0].spmd, step, None, 0, [{} for _ in self.tensors])
        values = run_forward(self.cluster, self.prelude, bindings)
        outputs = self.prelude[0].spmd.outputs
        names = [out.name for out in outputs if isinstance(out, Ref)]
        return [
            dict(zip(self.passes.whole, (rank_values[program.resolve(name)] for name in names), strict=True))
            for program, rank_values in zip(self.prelude, values, strict=True)
        ]

    def _bindings(
        self, spmd: SpmdProgram, step: int, start: int | None, size: int, whole: Sequence[Mapping[str, torch.Tensor]]
    ) -> list[VirtualValues]:
        """Return the source values of every rank's program. ``start``: first sample, or None for the whole batch."""
        bindings: list[VirtualValues] = []
        batch = sum(self.passes.sizes)
        for shards, coordinates, values in zip(self.tensors, self.cluster.coordinates, whole, strict=True):
            binding: VirtualValues = dict(shards) | values_of_step(spmd.graph, values, start or 0, CPU)
            inputs = iter(self.inputs)
            for source in spmd.graph.sources:
                if source.kind == "input":
                    rows = next(inputs)
                    if start is not None and source.names[0] in self.split:
                        rows = rows_of_pass(rows, start, size, batch)
                    binding[source.value] = shard(rows, spmd.layouts[source.value], coordinates).clone()
                elif source.names[0] == SEED:
                    binding[source.value] = torch.tensor(step)
            bindings.append({name: value for name, value in binding.items() if name in spmd.graph.source_of})
        return bindings

    @property
    def sides(self) -> tuple[DirectionCollectives, ...]:
        program = self.programs[0]
        return (
            DirectionCollectives("forward", self.spmd.forward_collectives(in_passes=True), self.forward_record),
            DirectionCollectives("backward", backward_collectives(program, in_passes=True), self.backward_record),
        )

    def _add(self, rank: int, gradients: Mapping[str, torch.Tensor]) -> None:
        """Add gradients to those of the parameters."""
        for source in stored_values(self.spmd):
            if source.value in gradients:
                before, gradient = self.gradients[rank].get(source.value), gradients[source.value]
                self.gradients[rank][source.value] = gradient.clone() if before is None else before + gradient

    def _write(self, rank: int, program: RankProgram, values: VirtualValues, *, is_last: bool) -> None:
        """Write the buffers of a micro-batch: running statistics always, others only if ``is_last``."""
        for buffer, value in program.mutations:
            if is_last or self.spmd.graph.source_of[buffer].names[0] in self.passes.statistics:
                with torch.no_grad():
                    self.tensors[rank][buffer].copy_(values[value])

    def _finish(self, rank: int, loss: torch.Tensor) -> Values:
        """Run the optimizer of a rank and return its values at the end of the step."""
        collected: Values = dict.fromkeys((("loss", name) for name in self.losses), loss)
        shards = self.tensors[rank]
        for source in stored_values(self.spmd):
            if source.value in self.gradients[rank]:
                gradient = self.gradients[rank][source.value]
                shards[source.value].grad = gradient.clone().to(shards[source.value].dtype)
                collected["gradient", source.names[0]] = gradient
        return collected | self._updated(rank)


__all__ = ["OneDeviceMicroBatches", "RanksMicroBatches"]
