"""A step over a batch as a sequence of micro-batches on this rank.

Gradients of the micro-batches are accumulated separately and reach the parameters together at the end. Hooks of
parameters therefore run once and see the same gradient as after one pass over the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

import torch
from torch import Tensor

from shardwise.errors import ShardwiseError, problem
from shardwise.plans.plan import Plan
from shardwise.programs.micro_batches import Passes, values_of_step
from shardwise.runtime.memory_of_outputs import write_buffers
from shardwise.runtime.program_cache import Executable
from shardwise.runtime.replicas import ReplicaCheck

# (program, first sample or None for the whole batch, samples) -> this rank's part of the inputs
Parts = Callable[[Executable, int | None, int], Sequence[Tensor]]


@dataclass(frozen=True)
class MicroBatchedStep:
    """The programs of a step and their order. ``programs``: by micro-batch size in samples; ``prelude``: runs first,
    over the whole batch. Micro-batches of one size are consecutive and share the work that is done once."""

    passes: Passes
    programs: Mapping[int, Executable]
    prelude: Executable | None

    def with_state(self, state: Mapping[str, Tensor]) -> MicroBatchedStep:
        """Return the same programs with the parameters and buffers of ``state``, by name."""
        programs = {size: compiled.with_state(state) for size, compiled in self.programs.items()}
        return MicroBatchedStep(self.passes, programs, None if self.prelude is None else self.prelude.with_state(state))

    @property
    def draws(self) -> bool:
        """Return whether any program draws random numbers."""
        programs = (*self.programs.values(), *(() if self.prelude is None else (self.prelude,)))
        return any(compiled.seed is not None for compiled in programs)

    def run(
        self, parts: Parts, seed: Tensor, device: torch.device, check: ReplicaCheck | None, scale: Tensor | None
    ) -> Tensor:
        """Run forward and backward of all micro-batches, add to ``.grad`` and return the loss of the whole batch.
        ``check``: compares what the ranks compute; ``scale``: factor on the loss for backward."""
        if not torch.is_grad_enabled():
            what = "par.step computes gradients, but they are disabled here"
            raise ShardwiseError(problem(what, fix="call par.step outside torch.no_grad() and torch.inference_mode()"))
        whole = self._whole(parts, seed)
        gradients: dict[int, tuple[Tensor, Tensor]] = {}  # by the identity of the parameter
        total: Tensor | None = None
        samples = list(zip(self.passes.starts, self.passes.sizes, strict=True))
        for size, group in groupby(samples, key=itemgetter(1)):
            compiled = self.programs[size]
            running = None
            for start, _ in group:
                values = values_of_step(compiled.captured.graph, whole, start, device)
                tensors = _filled(compiled, parts(compiled, start, size), values, seed)
                running = running or compiled.in_passes.begin(tensors, observed=check is not None)
                observed = None if check is None else check.observed(compiled.in_passes.emitted, ())
                delivered, written = running.run(tensors, scale, observed)
                loss, _ = compiled.results(delivered)
                assert loss is not None, "a step in micro-batches has a loss"
                self._write(compiled, tensors, written, is_last=start + size == sum(self.passes.sizes))
                total = loss if total is None else total + loss
            assert running is not None, "there is a micro-batch of every size"
            _add_up(compiled, running.end(), gradients)
        if check is not None:
            check.watch(compiled.spmd, tensors)
        pairs = list(gradients.values())
        torch.autograd.backward([parameter for parameter, _ in pairs], [gradient for _, gradient in pairs])
        assert total is not None, "a batch has a sample"
        return total

    def _whole(self, parts: Parts, seed: Tensor) -> dict[str, Tensor]:
        """Return the values that depend on the inputs of all micro-batches."""
        if self.prelude is None:
            return {}
        with torch.no_grad():
            delivered, _ = self.prelude.step(
                _filled(self.prelude, parts(self.prelude, None, sum(self.passes.sizes)), {}, seed)
            )
        _, outputs = self.prelude.results(delivered)
        return dict(zip(self.passes.whole, outputs, strict=True))

    def _write(
        self, compiled: Executable, tensors: Sequence[Tensor], written: Sequence[Tensor], *, is_last: bool
    ) -> None:
        """Write a micro-batch's new buffer values. Running statistics are written after every micro-batch; all others
        are the same for all micro-batches and are written after the last one."""
        sources = compiled.captured.graph.sources
        for position, value in zip(compiled.written, written, strict=True):
            if is_last or sources[position].names[0] in self.passes.statistics:
                write_buffers([tensors[position]], [value])


def _filled(compiled: Executable, inputs: Sequence[Tensor], values: Mapping[str, Tensor], seed: Tensor) -> list[Tensor]:
    """Return the tensors of all sources of a program."""
    rest = iter(inputs)
    tensors: list[Tensor] = []
    for position, (name, tensor) in enumerate(zip(compiled.names, compiled.tensors, strict=True)):
        if position == compiled.seed:
            tensor = seed
        elif name in values:
            tensor = values[name]
        tensors.append(next(rest) if tensor is None else tensor)
    return tensors


def _add_up(compiled: Executable, sums: dict[str, Tensor], gradients: dict[int, tuple[Tensor, Tensor]]) -> None:
    """Add the gradients of some micro-batches to ``gradients`` (by identity of the parameter). Empties ``sums``."""
    for name, parameter in zip(compiled.names, compiled.tensors, strict=True):
        gradient = sums.pop(name, None)
        if gradient is None or parameter is None or not parameter.requires_grad:
            continue
        if id(parameter) in gradients:
            gradient = gradients[id(parameter)][1].add_(gradient)
        gradients[id(parameter)] = parameter, gradient


def samples_of(plan: Plan, rows: Mapping[str, tuple[int, ...]]) -> int:
    """Return the number of samples in a whole batch. ``rows``: full shapes of the inputs. Raises ShardwiseError if
    inputs that have samples in the plan disagree on their number of rows."""
    counts = {name: rows[name][0] for name in with_samples_in(plan) if name in rows}
    if len(set(counts.values())) != 1:
        listed = ", ".join(f"{name} {count}" for name, count in counts.items()) or "there is none"
        raise ShardwiseError(
            problem(
                f"par.step takes a whole batch, but its inputs have different numbers of samples: {listed}",
                fix="pass the same number of rows of every input that has samples in the plan",
            )
        )
    return next(iter(counts.values()))


def with_samples_in(plan: Plan) -> frozenset[str]:
    """Return the names of the inputs whose first dim is the samples of a micro-batch."""
    return frozenset(entry.name for entry in plan.inputs if entry.shape and entry.shape[0] == plan.micro_batch)


def rows_of_pass(tensor: Tensor, start: int, size: int, batch: int) -> Tensor:
    """Return the rows of an input (whole, or a rank's part of it) that belong to samples ``[start, start + size)``."""
    first, last = (tensor.shape[0] * number // batch for number in (start, start + size))
    return tensor.narrow(0, first, last - first)


__all__ = ["MicroBatchedStep", "rows_of_pass", "samples_of", "with_samples_in"]
