"""Capture of a PyTorch module with example inputs as a ``Graph``.

    trace           the call, exported on fake tensors                                    tracing.py
    functionalize   values instead of memory                                              functionalize.py
    merge_expert_loops        loops over experts as products by expert             expert_loops.py
    simplify        no-op casts, copies and views dropped                                 simplify.py
    fold_masks      attention with known masks, repeated heads grouped                    attention_masks.py
    normalize       forms whose factors can all be split                                  normalize.py
    fuse_head_losses          a head and its cross entropy without whole logits      head_loss.py
    round_products            products of linear layers in float8                  float8.py
    eliminate_expert_sorts    rows sorted by expert, computed in their original order     expert_sort_elimination.py
    align_lookups   lookups that pair a dim's rows with their positions, element-wise in it    lookups.py
    eliminate_dead_code, assign_names                                                     dead_code.py, naming.py

The module is neither changed nor copied: a module of 405B parameters on meta is captured without memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from itertools import count
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import is_fake
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node
from torch.utils import _pytree as pytree

from shardwise.errors import CaptureError, CaptureWarning, ShardwiseError, warn_user
from shardwise.graph.annotate import AnnotatedRegion, Annotation, checked_strategy, module_region
from shardwise.graph.attention_masks import fold_masks
from shardwise.graph.attention_sinks import fuse_sinks
from shardwise.graph.autocast import no_autocast
from shardwise.graph.bodies import NotRepeated
from shardwise.graph.call_arguments import call_module, divide_targets, find_loss
from shardwise.graph.code_reachability import empty_tensor_caches, reachable_code
from shardwise.graph.composites import EMITTED
from shardwise.graph.dead_code import eliminate_dead_code
from shardwise.graph.emitter import Emitter, rewrite_graph
from shardwise.graph.expert_loops import merge_expert_loops
from shardwise.graph.expert_sort_elimination import eliminate_expert_sorts
from shardwise.graph.float8 import round_products
from shardwise.graph.functionalize import BETWEEN, Functionalizer, region_mark
from shardwise.graph.graph_invariants import verify_graph
from shardwise.graph.head_loss import fuse_head_losses, fused_heads
from shardwise.graph.impure_reads import ImpureRead, ask_gradients, other_answers, reject_reads
from shardwise.graph.ir import Graph, Source, Value
from shardwise.graph.lookups import align_lookups
from shardwise.graph.loss_terms import with_terms
from shardwise.graph.module_checks import check_kinds, check_memory
from shardwise.graph.module_state import trace_difference
from shardwise.graph.naming import assign_names
from shardwise.graph.normalize import normalize
from shardwise.graph.origins import line_of
from shardwise.graph.rejected import CONSTRUCTS, TRANSFORMS
from shardwise.graph.repeats import TracedRepeats
from shardwise.graph.schema import arguments, is_random, operator_name
from shardwise.graph.segments import Segment, announce_selective, segments_of
from shardwise.graph.simplify import SIMPLIFICATIONS
from shardwise.graph.step_precision import MODELS_OWN, Precision, check_real, with_reductions
from shardwise.graph.tracing import ExportedCall, ModuleCall, TwoCalls, line_of_change, quiet_export, trace, trace_pair
from shardwise.graph.trees import check_leaves, flatten_with_path, leaf_name, unflatten

_PREFIX = "module"  # where TracedCall keeps the module
ROOT_SCOPE = "/"


@dataclass(frozen=True, slots=True)
class OutputMemory:
    """The memory of an output on one device: the value of a source, or a name shared by outputs that share memory.
    ``geometry``: size, strides and offset of the output within a contiguous source."""

    name: str
    geometry: tuple[tuple[int, ...], tuple[int, ...], int] | None = None


@dataclass(frozen=True)
class Capture:
    """A captured call.

    ``out_spec``: pytree spec of the call's result (of the loss, if a loss function
    was given). ``constants``: value name -> data, for sources of kind "constant". ``annotations``: the user's
    strategies, by scope. ``memories``: of the outputs; None for constants. ``segments``: the parts that the model or
    the user wants recomputed in backward. ``output_names``: of every output.
    """

    graph: Graph
    out_spec: pytree.TreeSpec
    constants: dict[str, torch.Tensor]
    annotations: tuple[Annotation, ...]
    memories: tuple[OutputMemory | None, ...]
    segments: tuple[Segment, ...] = ()
    output_names: tuple[str, ...] = ()

    @property
    def fused_heads(self) -> frozenset[str]:
        """Return what captures of the call with other numbers of samples are given."""
        return fused_heads((op.name, str(op.target)) for op in self.graph.ops)

    def with_terms(self, per_micro_batch: Sequence[str]) -> Capture:
        """Return the capture with terms of the loss, by name (``graph.loss_terms``), that micro-batches take alone."""
        return replace(self, graph=with_terms(self.graph, per_micro_batch, self.output_names, self.constants))


def capture(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss: Callable[..., Any] | None = None,
    strategies: Mapping[str, Any] | None = None,
    precision: Precision = MODELS_OWN,
    input_gradients: bool = False,
    heads: Collection[str] | int = 1,
) -> Capture:
    """Capture ``module(*args, **kwargs)``, or with ``loss``, ``loss(module(...), *targets)``.

    Example inputs may be real, meta or fake tensors; other leaves (numbers, strings, None) are baked into the graph.
    ``loss`` has one required positional parameter for the output and n for targets: the last n positional examples, or
    the keyword examples that are named like its parameters and not like a parameter of the module's ``forward``.
    Without ``loss``, the loss is the output if it is a floating scalar, else its ``loss`` (attribute or key), else its
    first leaf if that is a floating scalar, else None. ``strategies`` maps patterns over module paths
    ("transformer.h.*.attn.c_attn") to strategies, like ``shard`` on every matching module. ``precision``: the graph has
    the compute dtypes; its sources name the dtypes for storage, inputs and gradient reduction where these differ. Casts
    of ``torch.autocast``, around the call or in regions of the model, become casts in the graph. ``input_gradients``:
    examples that require a gradient get one; else the loss is differentiated with respect to parameters alone.
    ``heads``: the ``fused_heads`` of an earlier capture or of the plan; or for how many devices to decide which
    (``graph.head_loss``).

    Raises CaptureError with the line of the model and a fix if the model cannot be captured.
    """
    check_kinds(module)
    check_memory(module)
    precision = precision.at_hand
    args, kwargs = tuple(args), dict(kwargs or {})
    leaves, in_spec = flatten_with_path((args, kwargs))
    check_leaves((leaf_name(path), leaf) for path, leaf in leaves)
    check_real(module, precision)
    own_args, own_kwargs, *_ = divide_targets(module, args, kwargs, loss)
    inputs = tuple(
        InputTensor.of(
            path,
            leaf if input_gradients else leaf.detach(),
            precision if _is_among(path, len(own_args), own_kwargs) else MODELS_OWN,
        )
        for path, leaf in leaves
        if isinstance(leaf, torch.Tensor)
    )
    examples = tuple(entry.example for entry in inputs)

    code = reachable_code(module, loss, [leaf for _, leaf in leaves if isinstance(leaf, FunctionType)])

    def call(copy: nn.Module, tensors: tuple[torch.Tensor, ...]) -> tuple[Any, torch.Tensor | None]:
        arguments = iter(tensors)
        filled = [next(arguments) if isinstance(leaf, torch.Tensor) else leaf for _, leaf in leaves]
        all_args, all_kwargs = unflatten(filled, in_spec)
        with empty_tensor_caches(code):
            output = call_module(copy, all_args, all_kwargs, loss)
        return output, find_loss(output, required=loss is not None)

    annotated = {
        path: region for path, submodule in module.named_modules() if (region := module_region(submodule)) is not None
    }
    annotated |= _matched_strategies(module, strategies or {})
    regions = {path: replace(region, path=path) for path, region in annotated.items()}
    called = ModuleCall(module, examples, call, precision, code)
    with torch.autograd.set_detect_anomaly(False):  # fake tensors hold no values to look at
        traced = trace(called, regions)
    with no_autocast(), torch.autograd.set_detect_anomaly(False), quiet_export():
        if traced.outcome.changed or traced.reads:
            _check_state(called, inputs, traced)
        try:
            converted = _to_graph(traced, module, inputs, precision, heads)
        except NotRepeated:
            traced = trace(called, regions, repeats=False)
            converted = _to_graph(traced, module, inputs, precision, heads)
        except ZeroDivisionError as error:
            what = "the backward of a mean divides by the number of its elements, which is 0 for these inputs"
            raise CaptureError(what, fix="pass a batch with samples") from error
        graph, constants, scopes, memories, segments = converted
    announce_selective(segments)
    annotations = tuple(
        Annotation(scope, region.strategy, region.out_strategy, region.source)
        for scope, region in zip(scopes, traced.regions, strict=True)
        if scope and region.strategy is not None
    )
    names = traced.outcome.names
    return Capture(graph, traced.outcome.spec, constants, annotations, memories, segments, names)


@dataclass(frozen=True, slots=True)
class InputTensor:
    """A tensor of the call: its name, an example in the compute dtype, and the dtype in which it is passed if that
    differs."""

    name: str
    example: torch.Tensor
    stored: torch.dtype | None = None

    @staticmethod
    def of(path: tuple[Any, ...], leaf: torch.Tensor, precision: Precision) -> InputTensor:
        example, stored = leaf.detach(), None
        if (dtype := precision.computed(leaf.dtype)) != leaf.dtype:
            example, stored = torch.empty_like(example, dtype=dtype, device="meta"), leaf.dtype
        return InputTensor(leaf_name(path), example.requires_grad_() if leaf.requires_grad else example, stored)


def _is_among(path: tuple[Any, ...], num_args: int, kwargs: Collection[str]) -> bool:
    """Return whether a leaf of (args, kwargs) is one of the first ``num_args`` arguments or of the named keywords."""
    return path[1].idx < num_args if path[0].idx == 0 else path[1].key in kwargs


def capture_function(call: Callable[..., Any], examples: tuple[torch.Tensor, ...]) -> Graph:
    """Capture a function over tensors. The sources are the examples, in order, used or not, with their requires_grad.

    Raises CaptureError if the function makes tensors from data, since a graph alone cannot hold constants.
    """
    inputs = tuple(InputTensor(f"args[{i}]", example) for i, example in enumerate(examples))
    module = nn.Module()
    called = ModuleCall(module, examples, lambda _, tensors: (call(*tensors), None))
    graph, constants, *_ = _to_graph(trace(called, {}), module, inputs)
    if constants:
        raise CaptureError(
            f"{call} makes tensors from data: {', '.join(constants)}", fix="compute them with torch.full or arange"
        )
    return graph


def _matched_strategies(module: nn.Module, strategies: Mapping[str, Any]) -> dict[str, AnnotatedRegion]:
    paths = [path for path, _ in module.named_modules()]
    regions: dict[str, AnnotatedRegion] = {}
    missing = []
    for pattern, strategy in strategies.items():
        matched = [path for path in paths if fnmatchcase(path, pattern)]
        if not matched:
            near = get_close_matches(pattern, [path for path in paths if path], n=3, cutoff=0.4)
            missing.append(f"{pattern!r}" + (f" (near: {', '.join(near)})" if near else ""))
        source = f"strategies[{pattern!r}]"
        regions |= {
            path: AnnotatedRegion("", path, checked_strategy(strategy, pattern, source), None, source)
            for path in matched
        }
    if missing:
        raise ShardwiseError(
            f"no module matches {'; '.join(missing)}",
            fix="patterns are over the names of model.named_modules()",
            section="strategy-names",
        )
    return regions


# ----------------------------------------------------------------------------------------------------- graph


def _to_graph(
    traced: ExportedCall,
    module: nn.Module,
    inputs: tuple[InputTensor, ...],
    precision: Precision = MODELS_OWN,
    fused: Collection[str] | int = 1,
) -> tuple[Graph, dict[str, torch.Tensor], tuple[str, ...], tuple[OutputMemory | None, ...], tuple[Segment, ...]]:
    """Return the finished graph, its constants, the scope of every region ("" if it covers no operator), the memories
    of its outputs, and its segments."""
    raw, constants, functionalizer, memories = _functional_graph(traced, module, inputs, precision)
    raw = merge_expert_loops(raw, functionalizer.selections.rows, functionalizer.selections.accumulations)
    # Unused random calls stay until ``normalize`` has counted them.
    _announce_dense(raw)
    drawing = {op.name for op in raw.ops if is_random(op.target)} - functionalizer.initial
    graph = eliminate_dead_code(raw, keep=drawing)
    _reject_initial_draws(graph, functionalizer.initial)
    verify_graph(graph)
    graph = rewrite_graph(graph, SIMPLIFICATIONS)
    graph, folded = fold_masks(fuse_sinks(graph, constants), constants)
    constants |= folded
    graph = fuse_head_losses(normalize(graph), _strategies(traced.regions, graph), fused)
    graph = round_products(graph, precision.products)
    graph = align_lookups(eliminate_expert_sorts(graph), constants)
    graph = with_reductions(assign_names(eliminate_dead_code(graph)))
    scopes = _scope_names(traced.regions, functionalizer.region_paths)
    marks = {region_mark(number): scope for number, scope in enumerate(scopes)} | {"": ""}
    segments = segments_of((op, op.scope.partition(BETWEEN)[2]) for op in graph.ops)
    ops = (replace(op, scope=marks[op.scope.partition(BETWEEN)[0]]) for op in graph.ops)
    graph = replace(graph, ops=tuple(ops))
    verify_graph(graph)
    used = {source.value for source in graph.sources if source.kind == "constant"}
    return graph, {name: data for name, data in constants.items() if name in used}, scopes, memories, segments


def _strategies(regions: Sequence[AnnotatedRegion], graph: Graph) -> dict[str, AnnotatedRegion]:
    """Return the regions with strategies, by the provisional scopes of their operators."""
    numbered = {region_mark(i): region for i, region in enumerate(regions) if region.strategy is not None}
    scopes = {op.scope: op.scope.partition(BETWEEN)[0] for op in graph.ops}
    return {scope: numbered[mark] for scope, mark in scopes.items() if mark in numbered}


def _announce_dense(graph: Graph) -> None:
    """Warn about lookups that ask for a sparse gradient: under a plan it is dense."""
    for op in graph.ops:
        if "sparse" in (call_args := arguments(op)) and call_args["sparse"]:
            where = f" ({op.source})" if op.source else ""
            warn_user(
                f"{op.module or op.name}{where} asks for a sparse gradient (sparse=True); under a plan the gradient "
                "is dense, with the same values: use an optimizer for dense gradients",
                CaptureWarning,
            )


def _reject_initial_draws(graph: Graph, initial: Collection[str]) -> None:
    """Raise CaptureError if values drawn by ``torch.nn.init`` during the call are used. They are not random calls of
    the model: a layer built in forward is usually built once, or gets its weights copied."""
    for op in graph.ops:
        if op.name in initial and is_random(op.target):
            raise CaptureError(
                f"torch.nn.init draws values ({operator_name(op.target)}) in forward, and forward uses them: "
                "they would change in every step and are never trained",
                op=op.module,
                source=op.source,
                fix="build the layer in __init__; draw noise with torch.randn or Tensor.normal_",
            )


def _functional_graph(
    traced: ExportedCall, module: nn.Module, inputs: tuple[InputTensor, ...], precision: Precision
) -> tuple[Graph, dict[str, torch.Tensor], Functionalizer, tuple[OutputMemory | None, ...]]:
    """Return the graph as traced, the data of all constants, the functionalizer, and the memories of the outputs."""
    outcome = traced.outcome
    functionalizer, nodes, constants, canonical = _functionalized(
        traced.program, module, inputs, precision, traced, traced.repeats
    )
    results = iter(nodes)
    returned = [next(results) if leaf is None else leaf[0] for leaf in outcome.leaves]
    memories = tuple(_memory(functionalizer, leaf) if isinstance(leaf, Node) else None for leaf in returned)
    outputs = tuple(functionalizer.ref_of(leaf) if isinstance(leaf, Node) else leaf for leaf in returned)
    loss = None if outcome.loss_position is None else functionalizer.ref_of(nodes[outcome.loss_position]).name
    replaced = nodes[len(nodes) - len(outcome.replaced_buffers) :] if outcome.replaced_buffers else ()
    mutations = functionalizer.mutations()
    for name, node in zip(outcome.replaced_buffers, replaced, strict=True):
        mutations[canonical[name]] = functionalizer.gradient_free(functionalizer.ref_of(node))
    graph = functionalizer.emitter.graph(outputs, loss, tuple(mutations.items()))
    return graph, constants, functionalizer, memories


def _memory(functionalizer: Functionalizer, node: Node) -> OutputMemory:
    """Return the memory of a returned tensor. A cast source is a new tensor."""
    name, geometry = functionalizer.memory_of(node)
    value = functionalizer.emitter.values.get(name)
    return OutputMemory(name, geometry) if value is None or value.stored is None else OutputMemory(f"#{name}")


def _functionalized(
    program: ExportedProgram,
    module: nn.Module,
    inputs: tuple[InputTensor, ...],
    precision: Precision,
    traced: ExportedCall | None = None,
    repeats: TracedRepeats | None = None,
) -> tuple[Functionalizer, tuple[Node, ...], dict[str, torch.Tensor], dict[str, str]]:
    """Return the functionalizer that emitted the program's nodes, the returned nodes, the data of the constants, and a
    map from the qualified name of a parameter, buffer or constant to its value."""
    sources, values, canonical = _module_sources(module, precision)
    constants: dict[str, torch.Tensor] = {}
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    input_names = (entry.name for entry in inputs)
    names: list[str] = []
    for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True):
        name = str(spec.target).removeprefix(f"{_PREFIX}.")
        if spec.kind == InputKind.CONSTANT_TENSOR:
            constants[name] = _constant_data(program.constants[str(spec.target)], node, traced)
            sources.append(Source(name, "constant", (name,)))
            values.append(Value(name, tuple(constants[name].shape), constants[name].dtype))
            canonical[name] = name
        elif spec.kind not in (InputKind.USER_INPUT, InputKind.PARAMETER, InputKind.BUFFER):
            raise CaptureError(
                f"the model's call uses {spec.target}, a {spec.kind.name.lower()}: only tensors can be captured",
                fix="draw without generator= (sw.parallelize takes the seed); replace other objects by numbers",
            )
        names.append(next(input_names) if spec.kind == InputKind.USER_INPUT else canonical[name])
    for name, example, stored in ((entry.name, entry.example, entry.stored) for entry in inputs):
        sources.append(Source(name, "input", (name,)))
        values.append(Value(name, tuple(example.shape), example.dtype, example.requires_grad, stored))
    functionalizer = Functionalizer(Emitter(values, sources, EMITTED), _PREFIX, precision.autocast, repeats)
    source_of = {source.value: source for source in sources}
    for node, name in zip(placeholders, names, strict=True):
        functionalizer.bind(node, source_of[name])
    nodes: tuple[Node, ...] = next(node for node in program.graph.nodes if node.op == "output").args[0]
    functionalizer.run(program.graph.nodes)
    functionalizer.bodies.check()
    return functionalizer, nodes, constants, canonical


def _check_state(called: ModuleCall, inputs: tuple[InputTensor, ...], traced: ExportedCall) -> None:
    """Raise CaptureError if Python state that the call changes or reads makes the next call compute something else.
    Warn about state that keeps changing, and about impure reads: the graph is that of the first call."""
    changed = traced.outcome.changed
    if traced.outcome.registered:
        raise CaptureError(
            f"the model's forward changes its parameters, buffers or hooks: {traced.outcome.registered}",
            source=line_of_change(called, changed),
            fix="create and freeze parameters, register buffers and set hooks before sw.plan and sw.parallelize",
        )
    calls, what = _compared(called, inputs)
    silent = () if what else _without_effect(called, inputs, traced)
    reject_reads([read for read in traced.reads if read not in silent], what)
    if what:
        raise CaptureError(
            f"the model's forward changes its own Python state, and {what}: {calls.changed}",
            source=line_of_change(called, changed),
            fix="keep values that change between calls in a buffer (self.register_buffer), or pass them as inputs",
            section="python-state",
        )
    if calls.kept_changing:
        warn_user(
            f"forward changes Python state in every call: {calls.kept_changing}. The program of a plan is captured "
            "from the first call, so on ranks this state does not change. If a later call branches on it, or uses its "
            "value, ranks compute something else: then keep it in a buffer (self.register_buffer)",
            CaptureWarning,
        )


def _compared(called: ModuleCall, inputs: tuple[InputTensor, ...]) -> tuple[TwoCalls, str]:
    """Trace two consecutive calls. Return both, and what the second computes differently, or ""."""
    program, calls = trace_pair(called)
    functionalizer, nodes, constants, _ = _functionalized(program, called.module, inputs, called.precision)
    outputs = tuple(map(functionalizer.ref_of, nodes))
    graph = rewrite_graph(eliminate_dead_code(functionalizer.emitter.graph(outputs, None, ())), SIMPLIFICATIONS)
    if not calls.same_constants:
        return calls, "its next call returns other values"
    return calls, trace_difference(graph, constants, calls.num_tensors)


def _without_effect(
    called: ModuleCall, inputs: tuple[InputTensor, ...], traced: ExportedCall
) -> Collection[ImpureRead]:
    """Return the reads whose answer has no effect: queries of whether gradients are enabled, if a second call that gets
    the opposite answers computes the same."""
    reads, answered, calls = ask_gradients(traced.reads), set[ImpureRead](), count()
    if not reads:
        return ()
    second = called.inside(lambda: other_answers(answered) if next(calls) % 2 else nullcontext())
    try:
        _, what = _compared(second, inputs)
    except CaptureError:  # the model takes a path that cannot be captured: the read has an effect
        return ()
    return () if what else reads & answered


def _module_sources(module: nn.Module, precision: Precision) -> tuple[list[Source], list[Value], dict[str, str]]:
    """Return a source per distinct parameter or buffer tensor, their values, and a map from qualified name to value."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    parameters = [*module.named_parameters(remove_duplicate=False)]
    for name, tensor in (*parameters, *module.named_buffers(remove_duplicate=False)):
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    trainable = {id(tensor) for _, tensor in parameters}
    sources, values = [], []
    for key, tensor_names in names.items():
        tensor = tensors[key]
        kind: Any = "parameter" if key in trainable else "buffer"
        sources.append(Source(tensor_names[0], kind, tuple(tensor_names), kind == "parameter" and tensor.requires_grad))
        value = Value(tensor_names[0], tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
        values.append(precision.of_parameter(value) if kind == "parameter" else value)
    return sources, values, {name: tensor_names[0] for tensor_names in names.values() for name in tensor_names}


def _constant_data(data: Any, node: Node, traced: ExportedCall | None) -> torch.Tensor:
    """Return the data of a tensor that the model made from Python numbers or holds as an attribute.

    ``node``: its placeholder; ``traced``: the call, None where it was traced before.
    """
    assert isinstance(data, torch.Tensor), f"the constant {node} is a {type(data).__name__}"
    if is_fake(data) and traced is not None and traced.transformed:
        raise CaptureError(
            f"{TRANSFORMS} in forward cannot be captured", source=traced.transformed, fix=CONSTRUCTS[TRANSFORMS]
        )
    if is_fake(data):
        raise CaptureError(
            "forward uses .data of a parameter or buffer, or computes in another thread",
            source=next(iter(line_of(user) for user in node.users), ""),
            fix="read it with .detach() and change parameters in the optimizer; compute in one thread",
        )
    return data.detach()


def _scope_names(regions: tuple[AnnotatedRegion, ...], paths: Mapping[int, str]) -> tuple[str, ...]:
    """Return the scope of every region.

    A module's path ("/" for the root), or "<module path>/<function>", numbered when repeated.
    """
    counts: dict[str, int] = {}
    names = []
    for number, region in enumerate(regions):
        if not region.name:
            names.append(region.path or ROOT_SCOPE)
        elif number not in paths:
            names.append("")
        else:
            stem = f"{paths[number]}/{region.name}"
            count = counts.get(stem, 0)
            counts[stem] = count + 1
            names.append(f"{stem}_{count}" if count else stem)
    return tuple(names)
