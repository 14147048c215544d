"""The two runs that a verification compares: the module on one device, and its plan on the virtual cluster."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from shardwise.errors import ShardwiseError, problem
from shardwise.graph.call_arguments import call_module, divide_targets
from shardwise.graph.capture import Capture
from shardwise.graph.fakes import deep_copy
from shardwise.graph.ir import Graph, Ref, Source
from shardwise.graph.normalize_random import SEED
from shardwise.graph.step_precision import Precision
from shardwise.graph.to_float64 import WIDE, Dtypes, reference_mode
from shardwise.graph.trees import flatten, flatten_output
from shardwise.layouts.conversions import Collective
from shardwise.programs.differentiate import differentiate
from shardwise.programs.invariants import check_program
from shardwise.programs.lifetimes import backward_collectives
from shardwise.programs.program import localize
from shardwise.programs.rank_program import RankProgram, delivered_values
from shardwise.programs.spmd import SpmdProgram
from shardwise.programs.vjp import VjpCache
from shardwise.proof.errors_by_tensor import Key, TensorError, Values, compare
from shardwise.proof.virtual import Values as VirtualValues
from shardwise.proof.virtual import VirtualCluster, run_backward, run_forward
from shardwise.runtime.local_shards import shard
from shardwise.runtime.memory_of_outputs import alias_buffers, separate_memory, whole_buffers, write_buffers

OPTIMIZERS: dict[str, Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-2),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
}


@dataclass(frozen=True)
class RunStart:
    """The common start of both runs. ``spmd``: the program of all ranks; ``module``: in float64 or in its stored
    dtypes, only copied, never run; ``precision``: of the step, None if everything is float64; ``models_default``:
    torch's default dtype when the module was captured."""

    spmd: SpmdProgram
    captured: Capture
    module: torch.nn.Module
    loss: Callable[..., Any] | None
    optimizer: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    precision: Precision | None = None
    models_default: torch.dtype = torch.float32

    def constant(self, value: str) -> torch.Tensor:
        """Return the data of a constant."""
        data = self.captured.constants[value]
        return widened(data) if self.precision is None else data.cpu()


@dataclass(frozen=True, slots=True)
class DirectionCollectives:
    """The collectives of one direction of a step: those that the program lists, and those performed."""

    name: str
    planned: tuple[Collective, ...]
    performed: tuple[Collective, ...]


class OneDevice:
    """The module on one device. ``passes``: sizes of the micro-batches for which batch norm computes statistics."""

    def __init__(self, start: RunStart, passes: tuple[int, ...] = ()) -> None:
        self.passes_of_statistics = passes
        self.captured, self.loss, self.precision = start.captured, start.loss, start.precision
        self.args, self.kwargs, self.models_default = start.args, start.kwargs, start.models_default
        self.module = deep_copy(start.module)
        self.optimizer = optimizer_of(start.optimizer, [p for p in self.module.parameters() if p.requires_grad])
        # Sharded sources, of which ranks return copies, gathered when the module is called.
        layouts = start.spmd.layouts
        self.split = {
            source.value
            for source in self.captured.graph.sources
            if source.kind in ("parameter", "buffer") and layouts[source.value].positions
        }

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the parameters and buffers by name."""
        return {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}

    def adopt(self, other: OneDevice) -> None:
        """Copy the state of another device."""
        theirs = other.tensors
        with torch.no_grad():
            for name, tensor in self.tensors.items():
                tensor.copy_(theirs[name])
        if self.optimizer is not None and other.optimizer is not None:
            self.optimizer.load_state_dict(copy.deepcopy(other.optimizer.state_dict()))

    def step(self, step: int) -> Values:
        values: Values = {}
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)
        inputs = [leaf for leaf in flatten((self.args, self.kwargs))[0] if isinstance(leaf, torch.Tensor)]
        for leaf in inputs:
            leaf.grad = None
        around = nullcontext() if self.precision is None else self.precision.around_call()
        widens = self.precision is None
        norms = (norm for norm in self.module.modules() if isinstance(norm, _BatchNorm) and norm.momentum is None)
        averaged = {id(norm.running_mean) for norm in norms if norm.running_mean is not None}
        passes = self.passes_of_statistics
        dtypes, models_default = self._dtypes(), self.models_default
        with (
            reference_mode(
                step, passes, widens=widens, dtypes=dtypes, averaged=averaged, models_default=models_default
            ),
            around,
        ):
            output = self._output()
        leaves, _ = flatten_output(output)
        self._check_outputs(leaves)
        for i, (leaf, out) in enumerate(zip(leaves, self.captured.graph.outputs, strict=True)):
            if isinstance(leaf, torch.Tensor):
                is_loss = isinstance(out, Ref) and out.name == self.captured.graph.loss
                memory = self.captured.memories[i]
                is_copied = memory is not None and memory.name in self.split
                values["loss" if is_loss else "output", f"[{i}]"] = (
                    leaf.detach().clone() if is_copied else leaf.detach()
                )
                if is_loss and leaf.requires_grad:
                    _run_backward(leaf)
        for name, parameter in self.module.named_parameters():
            if parameter.grad is not None:
                if parameter.grad.is_sparse:  # ranks have dense gradients, and not all optimizers accept sparse ones
                    parameter.grad = parameter.grad.to_dense()
                values["gradient", name] = parameter.grad.clone()
        sources = (source for source in self.captured.graph.sources if source.kind == "input")
        for leaf, source in zip(inputs, sources, strict=True):
            if leaf.grad is not None:
                values["gradient", source.names[0]] = leaf.grad.clone()
        for name, buffer in self.module.named_buffers():
            values["buffer", name] = buffer.clone()
        if self.optimizer is not None:
            self.optimizer.step()
        for name, parameter in self.module.named_parameters():
            values["parameter", name] = parameter.detach().clone()
        return values

    def _check_outputs(self, leaves: Sequence[Any]) -> None:
        """Raise ShardwiseError if the model's code took another branch than when it was captured."""
        outputs = self.captured.graph.outputs
        pairs = zip(leaves, outputs, strict=False)
        if len(leaves) == len(outputs) and all(isinstance(x, torch.Tensor) for x, o in pairs if isinstance(o, Ref)):
            return
        what = f"on one device the model returns {_described(leaves)}, but when captured {_described(outputs)}"
        raise ShardwiseError(
            problem(
                what,
                op=type(self.module).__name__,
                fix="forward must return the same structure in every call: remove the branch on requires_grad, dtype, "
                "a counter or other state that differs between calls",
            )
        )

    def _dtypes(self) -> Dtypes:
        """Return the captured dtypes of parameters, buffers and inputs."""
        graph, tensors = self.captured.graph, self.tensors
        inputs = (leaf for leaf in flatten((self.args, self.kwargs))[0] if isinstance(leaf, torch.Tensor))
        tensors_of_sources = (
            next(inputs) if source.kind == "input" else tensors.get(source.names[0]) for source in graph.sources
        )
        pairs = zip(tensors_of_sources, graph.sources, strict=True)
        return Dtypes((tensor, graph.by_name[source.value].dtype) for tensor, source in pairs if tensor is not None)

    def _output(self) -> Any:
        """Call the module, with a precision on parameters and inputs cast to the compute dtype."""
        if self.precision is None:
            return call_module(self.module, self.args, self.kwargs, self.loss)
        args, kwargs, targets, named = divide_targets(self.module, self.args, dict(self.kwargs), self.loss)
        values = self.captured.graph.by_name
        cast = {name: p.to(values[name].dtype) for name, p in self.module.named_parameters() if name in values}
        computed = self.precision.computed
        args, kwargs = pytree.tree_map_only(torch.Tensor, lambda x: x.to(computed(x.dtype)), (args, kwargs))
        output = torch.func.functional_call(self.module, cast, args, kwargs)
        return output if self.loss is None else self.loss(output, *targets, **named)


class Ranks:
    """The ranks of the virtual cluster, each with its shards and its optimizer."""

    def __init__(self, start: RunStart) -> None:
        self.spmd, self.captured, self.start = start.spmd, start.captured, start
        self.inputs = [leaf for leaf in flatten((start.args, start.kwargs))[0] if isinstance(leaf, torch.Tensor)]
        spmd = self.spmd
        self.cluster = VirtualCluster(spmd.mesh)
        vjp_cache = VjpCache()
        reached = [name == spmd.loss for name in delivered_values(spmd, loss_only=False)]
        self.programs = [
            differentiate(localize(spmd, rank), vjp_cache, loss_only=False, reached=reached)
            for rank in range(spmd.mesh.num_devices)
        ]
        for program in self.programs:
            check_program(program)
        named = {**dict(start.module.named_parameters()), **dict(start.module.named_buffers())}
        self.full = {name: tensor.detach() for name, tensor in named.items()}
        self.tensors: list[dict[str, torch.Tensor]] = []
        for rank in range(spmd.mesh.num_devices):
            shards: dict[str, torch.Tensor] = {}
            for source in stored_values(spmd):
                local = self.part(source, self.full[source.names[0]], rank).clone()
                shards[source.value] = local.requires_grad_(source.kind == "parameter" and source.trainable)
            for source in spmd.graph.sources:
                if source.kind == "constant" and source.value in self.captured.constants:
                    shards[source.value] = start.constant(source.value).clone()
            self.tensors.append(shards)
        self.optimizers = [
            optimizer_of(start.optimizer, [t for t in shards.values() if t.requires_grad]) for shards in self.tensors
        ]
        self.forward_record: tuple[Collective, ...] = ()
        self.backward_record: tuple[Collective, ...] = ()

    def step(self, step: int) -> list[Values]:
        for optimizer in self.optimizers:
            if optimizer is not None:
                optimizer.zero_grad(set_to_none=True)
        bindings = self.bindings(step)
        self.cluster.record.clear()
        values = run_forward(self.cluster, self.programs, bindings)
        self.forward_record = self._recorded()
        gradients = run_backward(self.cluster, self.programs, values, [_ones(p, v) for p, v in self._both(values)])
        self.backward_record = self._recorded()
        return [
            self._collect(rank, rank_values, gradient)
            for rank, (rank_values, gradient) in enumerate(zip(values, gradients, strict=True))
        ]

    def adopt(self, device: OneDevice) -> None:
        """Copy the state of one device: its parameters, buffers and optimizer state, cut into shards."""
        tensors = device.tensors
        for rank, (shards, optimizer) in enumerate(zip(self.tensors, self.optimizers, strict=True)):
            for source in stored_values(self.spmd):
                whole = tensors[source.names[0]]
                with torch.no_grad():
                    shards[source.value].copy_(self.part(source, whole.detach(), rank))
                if optimizer is None or device.optimizer is None:
                    continue
                optimizer.state.pop(shards[source.value], None)
                if state := device.optimizer.state.get(whole):
                    optimizer.state[shards[source.value]] = state_of_part(
                        state, whole, partial(self.part, source, rank=rank)
                    )

    def compare(self, expected: Values, actual: Sequence[Values], worst: dict[Key, TensorError]) -> None:
        """Update ``worst`` with the differences between every rank and one device; outputs are whole."""
        layouts = {source.names[0]: self.spmd.layouts[source.value] for source in self.spmd.graph.sources}

        def local(key: Key, whole: torch.Tensor, rank: int) -> torch.Tensor:
            kind, name = key
            if kind not in ("gradient", "parameter", "buffer") or name not in layouts:
                return whole
            return shard(whole, layouts[name], self.cluster.coordinates[rank])

        compare(expected, actual, local, worst)

    @property
    def sides(self) -> tuple[DirectionCollectives, ...]:
        """Return the planned collectives, and those performed in the last step."""
        return (
            DirectionCollectives("forward", self.spmd.forward_collectives(), self.forward_record),
            DirectionCollectives("backward", backward_collectives(self.programs[0]), self.backward_record),
        )

    def part(self, source: Source, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """Return the shard of a parameter or buffer on a rank."""
        return shard(whole, self.spmd.layouts[source.value], self.cluster.coordinates[rank])

    def bindings(self, step: int) -> list[VirtualValues]:
        """Return the source values of every rank's program."""
        bindings: list[VirtualValues] = []
        for shards, coordinates in zip(self.tensors, self.cluster.coordinates, strict=True):
            binding: VirtualValues = dict(shards)
            inputs = iter(self.inputs)
            for source in self.spmd.graph.sources:
                if source.kind == "input":
                    binding[source.value] = shard(next(inputs), self.spmd.layouts[source.value], coordinates).clone()
                elif source.names[0] == SEED:
                    binding[source.value] = torch.tensor(step)
            bindings.append(binding)
        return bindings

    def whole(self, step: int) -> VirtualValues:
        """Return the whole source values, by the same names."""
        return whole_bindings(self.start, self.spmd.graph, self.full, step)

    def _both(self, values: Sequence[VirtualValues]) -> Iterator[tuple[RankProgram, VirtualValues]]:
        return zip(self.programs, values, strict=True)

    def _recorded(self) -> tuple[Collective, ...]:
        collectives = tuple(self.cluster.record)
        self.cluster.record.clear()
        return collectives

    def _collect(self, rank: int, values: VirtualValues, gradients: Mapping[str, torch.Tensor]) -> Values:
        collected: Values = {}
        shards, program = self.tensors[rank], self.programs[rank]
        sources_held = {s.value: values[s.value] for s in self.spmd.graph.sources if s.value in values}
        leaves = [values[program.resolve(o.name)] if isinstance(o, Ref) else None for o in self.spmd.outputs]
        leaves = separate_memory(leaves, self.captured.memories, sources_held)
        write_buffers([shards[buffer] for buffer, _ in program.mutations], [values[v] for _, v in program.mutations])
        leaves = alias_buffers(
            leaves, self.captured.memories, {name: shards[name] for name in whole_buffers(self.spmd) if name in shards}
        )
        for i, out in enumerate(self.spmd.outputs):
            if isinstance(out, Ref):
                kind = "loss" if out.name == self.spmd.loss else "output"
                collected[kind, f"[{i}]"] = leaves[i].detach()  # it may be a parameter, which is updated
        for source in stored_values(self.spmd):
            if source.value in gradients:
                shards[source.value].grad = gradients[source.value].clone().to(shards[source.value].dtype)
                collected["gradient", source.names[0]] = gradients[source.value].clone()
        for source in self.spmd.graph.sources:
            if source.kind == "input" and source.value in gradients:
                collected["gradient", source.names[0]] = gradients[source.value].clone()
        return collected | self._updated(rank)

    def _updated(self, rank: int) -> Values:
        """Step the optimizer of a rank and return its parameters and buffers."""
        shards, optimizer = self.tensors[rank], self.optimizers[rank]
        if optimizer is not None:
            optimizer.step()
        return {(s.kind, s.names[0]): shards[s.value].detach().clone() for s in stored_values(self.spmd)}


def whole_bindings(start: RunStart, graph: Graph, tensors: Mapping[str, torch.Tensor], step: int) -> VirtualValues:
    """Return the source values of a graph on one device. ``tensors``: its parameters and buffers."""
    whole: VirtualValues = {}
    inputs = (leaf for leaf in flatten((start.args, start.kwargs))[0] if isinstance(leaf, torch.Tensor))
    for source in graph.sources:
        if source.kind == "input":
            whole[source.value] = next(inputs)
        elif source.names[0] == SEED:
            whole[source.value] = torch.tensor(step)
        elif source.kind == "constant":
            whole[source.value] = start.constant(source.value)
        else:
            whole[source.value] = tensors[source.names[0]]
    return whole


def state_of_part(
    state: Mapping[str, Any], whole: torch.Tensor, part: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return an optimizer's state for the part of a tensor, cut from the state for the whole one."""
    return {
        key: (part(entry) if entry.shape == whole.shape else entry).clone()
        for key, entry in state.items()
        if entry is not None
    }


def _run_backward(loss: torch.Tensor) -> None:
    try:
        loss.backward()
    except RuntimeError as error:
        fix = "a loss whose gradient exists; without parameters that require grad, outputs alone are compared"
        raise ShardwiseError(problem(f"the backward of the model fails on one device: {error}", fix=fix)) from error


def _described(outputs: Sequence[Any]) -> str:
    tensors = sum(isinstance(output, Ref | torch.Tensor) for output in outputs)
    return f"{len(outputs)} values ({tensors} tensors)"


def stored_values(spmd: SpmdProgram) -> list[Source]:
    """Return the sources that are parameters and buffers, without the random seed."""
    return [s for s in spmd.graph.sources if s.kind in ("parameter", "buffer") and s.names[0] != SEED]


def _ones(program: RankProgram, values: VirtualValues) -> VirtualValues:
    """Return ones as the cotangent of the loss, if it has one."""
    delivered = zip(program.cotangents, program.delivered, strict=True)
    return {name: torch.ones_like(values[value]) for name, value in delivered if name is not None}


def optimizer_of(name: str, parameters: list[torch.Tensor]) -> torch.optim.Optimizer | None:
    if not parameters:
        return None
    name, _, _ = name.partition(" ")  # kernel variant and state offload do not change results
    if name not in OPTIMIZERS:
        raise ShardwiseError(f"unknown optimizer {name!r}: verify knows {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[name](parameters)


def as_leaf(copy: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return ``copy``, and let it require a gradient if the original ``tensor`` does."""
    return copy.requires_grad_() if tensor.requires_grad else copy


def widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", WIDE.get(tensor.dtype, tensor.dtype))


def widened_module(module: torch.nn.Module) -> torch.nn.Module:
    """Return a copy with parameters and buffers in float64 and complex128."""
    twin: torch.nn.Module = deep_copy(module)._apply(widened)
    return twin
