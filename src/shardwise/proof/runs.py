"""The run with which a verification compares the ranks: the module on one device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from shardwise.errors import ShardwiseError
from shardwise.graph.batch import inputs_with_samples
from shardwise.graph.call_arguments import call_module, divide_targets
from shardwise.graph.capture import Capture
from shardwise.graph.fakes import deep_copy
from shardwise.graph.float8 import rounded_weights
from shardwise.graph.interpret import interpret
from shardwise.graph.ir import Graph, Ref, needed_for
from shardwise.graph.loss_terms import cut_terms
from shardwise.graph.step_precision import Precision
from shardwise.graph.to_float64 import WIDE, Dtypes, Reference, reference_mode
from shardwise.graph.trees import flatten_output, flatten_with_path, leaf_name, storage_of
from shardwise.graph.written_out import SEED
from shardwise.plans.bind_stages import only_read
from shardwise.programs.micro_batches import Passes, values_of_step
from shardwise.programs.separate_batches import TermGraphs
from shardwise.proof.errors_by_tensor import Values
from shardwise.runtime.stage import rows_of_pass

OPTIMIZERS: dict[str, Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-2),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
}


@dataclass(frozen=True)
class RunStart:
    """The common start of both runs.

    ``module``: in float64 or in its stored dtypes, only copied, never run; ``passes``: the micro-batches of a step;
    ``returns_outputs``: the step is one call that returns outputs beside the loss; ``sharded``: the parameters and
    buffers, by value, that ranks hold in shards; ``precision``: of the step, None if everything is float64;
    ``models_default``: torch's default dtype when the module was captured.
    """

    captured: Capture
    module: torch.nn.Module
    loss: Callable[..., Any] | None
    optimizer: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    passes: Passes
    returns_outputs: bool
    sharded: frozenset[str]
    precision: Precision | None = None
    models_default: torch.dtype = torch.float32

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        """Return the inputs by the names of the graph's sources."""
        leaves = flatten_with_path((self.args, dict(self.kwargs)))[0]
        return {leaf_name(path): x for path, x in leaves if isinstance(x, torch.Tensor)}

    def constant(self, value: str) -> torch.Tensor:
        """Return the data of a constant."""
        data = self.captured.constants[value]
        return widened(data) if self.precision is None else data.cpu()

    @cached_property
    def with_samples(self) -> frozenset[str]:
        return inputs_with_samples(self.captured.graph)

    @cached_property
    def norms(self) -> frozenset[str]:
        """Return the batch norms: these compute per micro-batch where one device runs a whole batch (``Reference``)."""
        return frozenset(name for name, norm in self.module.named_modules() if isinstance(norm, _BatchNorm))

    @cached_property
    def statistics(self) -> frozenset[str]:
        """Return the buffers that every micro-batch updates, except those of batch norms."""
        return frozenset(name for name in self.passes.statistics if name.rpartition(".")[0] not in self.norms)

    @cached_property
    def hidden_terms(self) -> tuple[str, ...]:
        """Return the terms taken per micro-batch that the module does not return."""
        terms = () if self.passes.terms is None else self.passes.terms.whole.terms
        returned = {out.name for out in self.captured.graph.outputs if isinstance(out, Ref)}
        return tuple(name for value, name in terms if value not in returned)

    @cached_property
    def runs_in_turn(self) -> bool:
        """Return whether one device has to run the micro-batches one after another, because the loss depends on what
        each of them computes from its samples alone for a buffer."""
        graph = self.passes.graphs[self.passes.sizes[0]]
        if graph.loss is None or not self.statistics:
            return bool(self.hidden_terms and self.passes.statistics)
        ops, values = needed_for([graph.loss], graph.ops)
        read = {source.names[0] for source in graph.sources if source.value in values}
        is_alone = any(op.name in self.passes.local and op.name.rpartition("/")[0] not in self.norms for op in ops)
        return is_alone or bool(self.statistics & read) or bool(self.hidden_terms)

    def given(
        self, graph: Graph, micro_batch: int | None, whole: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return the whole inputs of a micro-batch or of the whole batch (None), and what the step supplies, by value.
        ``whole``: the values of the prelude."""
        sizes, number = self.passes.sizes, micro_batch or 0
        first, size = sum(sizes[:number]), sizes[number]
        values = values_of_step(graph, whole, lambda: torch.tensor(first))
        for source in graph.sources:
            if source.kind == "input":
                rows = self.inputs[source.names[0]]
                is_part = micro_batch is not None and len(sizes) > 1 and source.names[0] in self.with_samples
                values[source.value] = rows_of_pass(rows, first, size, sum(sizes)) if is_part else rows
        return values

    def of_prelude(self, tensors: Mapping[str, torch.Tensor], step: int) -> dict[str, torch.Tensor]:
        """Return the values that are computed over the whole batch, before all micro-batches."""
        if self.passes.prelude is None:
            return {}
        prelude = only_read(self.passes.prelude)
        given = {name: x.to(prelude.by_name[name].dtype) for name, x in self.given(prelude, None, {}).items()}
        results = interpret(prelude, self.bindings(prelude, tensors, step, given))
        return {name: results[name].detach() for name in self.passes.whole}

    def bindings(
        self, graph: Graph, tensors: Mapping[str, torch.Tensor], step: int, given: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return the whole value of every source of a graph. ``tensors``: parameters and buffers by name; ``given``:
        sources that the caller has, by value."""
        whole: dict[str, torch.Tensor] = {}
        for source in graph.sources:
            name = source.names[0]
            if source.value in given:
                whole[source.value] = given[source.value]
            elif source.kind == "input":
                whole[source.value] = self.inputs[name]
            elif name == SEED:
                whole[source.value] = torch.tensor(step)
            else:
                whole[source.value] = self.constant(source.value) if source.kind == "constant" else tensors[name]
        return whole


class OneDevice:
    """The module on one device, over the whole batch. If a step has micro-batches, only running statistics and the
    terms of the loss that the plan names are computed per micro-batch. If the loss depends on such statistics, other
    than those of a batch norm, the device runs the graphs of the micro-batches one after another instead."""

    def __init__(self, start: RunStart) -> None:
        self.start, self.captured, self.precision = start, start.captured, start.precision
        self.module = deep_copy(start.module)
        self.optimizer = optimizer_of(start.optimizer, [p for p in self.module.parameters() if p.requires_grad])

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
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
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)
        inputs = self.start.inputs
        asked = [leaf.requires_grad for leaf in inputs.values()]
        for leaf in inputs.values():
            leaf.grad = None
        start = self.start
        buffers = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        with torch.set_grad_enabled(start.runs_in_turn):  # else only the buffers are computed so
            loss = self._run_in_turn(step, buffers) if start.runs_in_turn or start.statistics else None
        values = loss if loss and start.runs_in_turn else self._run(step)
        for name, buffer in self.module.named_buffers():
            if start.runs_in_turn or name in start.statistics:
                buffer.copy_(buffers[name])
        for name, parameter in self.module.named_parameters():
            if parameter.grad is not None:
                if parameter.grad.is_sparse:  # ranks have dense gradients, and not all optimizers accept sparse ones
                    parameter.grad = parameter.grad.to_dense()
                values["gradient", name] = parameter.grad.clone()
        for (name, leaf), was_asked in zip(inputs.items(), asked, strict=True):
            leaf.requires_grad_(was_asked)  # forward may have set it, to differentiate by an input itself
            if leaf.grad is not None and was_asked:
                values["gradient", name] = leaf.grad.clone()
        for name, buffer in self.module.named_buffers():
            is_count = name.rpartition(".")[2] == "num_batches_tracked" and not start.runs_in_turn
            if is_count and name in start.passes.statistics - start.statistics:
                buffer += len(start.passes.sizes) - 1  # ranks call the layer once per micro-batch
            values["buffer", name] = buffer.clone()
        if self.optimizer is not None:
            self.optimizer.step()
        for name, parameter in self.module.named_parameters():
            values["parameter", name] = parameter.detach().clone()
        return values

    def _run_in_turn(self, step: int, buffers: dict[str, torch.Tensor]) -> Values:
        """Run the graphs of the micro-batches one after another, with backward if gradients are enabled. ``buffers``
        are updated: those that every micro-batch writes by each, others by the last. Returns the loss."""
        start, losses = self.start, []
        tensors = {**dict(self.module.named_parameters()), **buffers}
        whole = start.of_prelude(tensors, step)
        for number, size in enumerate(start.passes.sizes):
            graph = start.passes.graphs[size]
            values = interpret(graph, self._of_sources(graph, tensors, step, start.given(graph, number, whole)))
            assert graph.loss is not None, "a step of several micro-batches has a loss"
            if values[graph.loss].requires_grad:
                _run_backward(values[graph.loss])
            losses.append(values[graph.loss].detach())
            for buffer, value in graph.mutations:
                name = graph.source_of[buffer].names[0]
                if number == len(start.passes.sizes) - 1 or name in start.passes.statistics:
                    buffers[name].copy_(values[value].detach())
        outputs = enumerate(self.captured.graph.outputs)
        places = [i for i, out in outputs if isinstance(out, Ref) and out.name == self.captured.graph.loss]
        return {("loss", f"[{i}]"): torch.stack(losses).sum(0) for i in places}

    def _of_sources(
        self, graph: Graph, tensors: Mapping[str, torch.Tensor], step: int, given: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return the sources of a graph in its dtypes. What forward may overwrite is copied."""
        bound = self.start.bindings(graph, tensors, step, given)
        kept = {name: x if x.requires_grad else x.clone() for name, x in bound.items()}
        return {name: tensor.to(graph.by_name[name].dtype) for name, tensor in kept.items()}

    def _run(self, step: int) -> Values:
        start = self.start
        values: Values = {}
        graph, tensors = self.captured.graph, {**self.tensors, **start.inputs}
        captured = ((tensors.get(source.names[0]), graph.by_name[source.value].dtype) for source in graph.sources)
        norms = (self.module.get_submodule(name) for name in start.norms)
        reference = Reference(
            step,
            start.passes.sizes,
            widens=self.precision is None,
            dtypes=Dtypes((tensor, dtype) for tensor, dtype in captured if tensor is not None),
            averaged={id(n.running_mean) for n in norms if n.momentum is None and n.running_mean is not None},
            models_default=start.models_default,
        )
        terms = None if start.passes.terms is None else self._per_micro_batch(start.passes.terms, step)
        with reference_mode(reference), nullcontext() if self.precision is None else self.precision.around_call():
            output = self._output(reference)
        leaves, _ = flatten_output(output)
        self._check_outputs(leaves)
        taken = {} if start.passes.terms is None else dict(start.passes.terms.whole.terms)
        named = zip(graph.outputs, leaves, strict=True)
        returned = {out.name: leaf for out, leaf in named if isinstance(out, Ref) and out.name in taken}
        for i, (leaf, out, memory) in enumerate(zip(leaves, graph.outputs, self.captured.memories, strict=True)):
            if not isinstance(leaf, torch.Tensor):
                continue
            is_loss = isinstance(out, Ref) and out.name == graph.loss
            if is_loss and terms is not None:
                leaf = leaf + terms(returned)
            if is_loss or start.returns_outputs:
                # Of a sharded parameter or buffer ranks return a copy, gathered when the module is called.
                is_copied = memory is not None and memory.name in start.sharded
                detached = leaf.detach()
                values["loss" if is_loss else "output", f"[{i}]"] = detached.clone() if is_copied else detached
            if is_loss and leaf.requires_grad:
                _run_backward(leaf)
        return values

    def _per_micro_batch(self, terms: TermGraphs, step: int) -> Callable[[Mapping[str, torch.Tensor]], torch.Tensor]:
        """Return what computes, from the terms that the module returns, what the loss gains if terms are averages over
        micro-batches. It is called after the module, whose buffers are read here."""
        averages: dict[str, torch.Tensor] = {}
        sizes = self.start.passes.sizes
        for number, size in enumerate(sizes):
            alone = terms.alone[size]
            given = self.start.given(alone, number, {})
            values = interpret(alone, self._of_sources(alone, self.tensors, step, given))
            for term, _ in terms.whole.terms:
                part = values[term] * (size / sum(sizes))
                averages[term] = averages[term] + part if term in averages else part
        bound = self._of_sources(terms.whole, self.tensors, step, self.start.given(terms.whole, None, {}))
        rest, loss = cut_terms(terms.whole)[0], terms.whole.loss
        assert loss is not None, "a step has a loss"

        def gained(returned: Mapping[str, torch.Tensor]) -> torch.Tensor:
            is_hidden = bool(self.start.hidden_terms)
            of_batch = {**interpret(terms.whole, bound), **returned} if is_hidden else returned
            of_batch = {value: of_batch[value] for value, _ in terms.whole.terms}
            return interpret(rest, {**bound, **averages})[loss] - interpret(rest, {**bound, **of_batch})[loss]

        return gained

    def _check_outputs(self, leaves: Sequence[Any]) -> None:
        """Raise ShardwiseError if the model's code took another branch than when it was captured."""
        outputs = self.captured.graph.outputs
        pairs = zip(leaves, outputs, strict=False)
        if len(leaves) == len(outputs) and all(isinstance(x, torch.Tensor) for x, o in pairs if isinstance(o, Ref)):
            return
        what = f"on one device the model returns {_described(leaves)}, but when captured {_described(outputs)}"
        raise ShardwiseError(
            what,
            op=type(self.module).__name__,
            fix="forward must return the same structure in every call: remove the branch on requires_grad, dtype, "
            "a counter or other state that differs between calls",
        )

    def _output(self, reference: Reference) -> Any:
        """Call the module, with a precision on parameters and inputs cast to the compute dtype."""
        start, rounded = self.start, rounded_weights(self.captured.graph)
        if self.precision is None:
            reference.rounded = {storage_of(self.tensors[name]): by_rows for name, by_rows in rounded.items()}
            return call_module(self.module, start.args, start.kwargs, start.loss)
        args, kwargs, targets, named = divide_targets(self.module, start.args, dict(start.kwargs), start.loss)
        values = self.captured.graph.by_name
        cast = {name: p.to(values[name].dtype) for name, p in self.module.named_parameters() if name in values}
        reference.rounded = {storage_of(cast[name]): by_rows for name, by_rows in rounded.items()}
        computed = self.precision.computed
        args, kwargs = pytree.tree_map_only(torch.Tensor, lambda x: x.to(computed(x.dtype)), (args, kwargs))
        output = torch.func.functional_call(self.module, cast, args, kwargs)
        return output if start.loss is None else start.loss(output, *targets, **named)


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
        raise ShardwiseError(f"the backward of the model fails on one device: {error}", fix=fix) from error


def _described(outputs: Sequence[Any]) -> str:
    tensors = sum(isinstance(output, Ref | torch.Tensor) for output in outputs)
    return f"{len(outputs)} values ({tensors} tensors)"


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
