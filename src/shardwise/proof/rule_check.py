"""``shardwise.check_rule``: tests a rule against its operator.

*Wrong* splits are found by running them on the virtual cluster. Each sample call is split in every factor that the rule
opens, over 2, 3 and 2 x 2 devices (so that sizes do not divide), in several factors at once, and with partial sums in
every group of operands that the rule declares linear. Results and gradients are compared with the whole operator.

*Missing* splits are found by trying. Dims of the operands with the same size are sliced together, and the operator is
called on the slices with its other arguments unchanged. If the combined results (concatenated, added, maximum or
minimum) and gradients are those of the whole call, the rule should have a factor for it. This does not find splits that
need other arguments on each rank (``localize``) or another program (a lowering).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from shardwise.errors import ShardwiseError
from shardwise.graph.ir import Graph, Op, Ref, Source, Value
from shardwise.graph.schema import run_call, tensor_results
from shardwise.layouts.choice import PassSum, Split
from shardwise.layouts.layout import Layout
from shardwise.layouts.mesh import Mesh
from shardwise.layouts.strategy import Strategy, apply_strategy
from shardwise.programs.builder import Choice
from shardwise.programs.differentiate import differentiate
from shardwise.programs.program import localize
from shardwise.programs.rank_program import delivered_values
from shardwise.programs.spmd import build_spmd
from shardwise.programs.vjp import VjpCache
from shardwise.proof.errors_by_tensor import magnitude, relative_difference
from shardwise.proof.virtual import VirtualCluster, run_backward, run_forward
from shardwise.rules.atoms import factor_graph
from shardwise.rules.custom import overload_of
from shardwise.rules.rule import Dims, OpRule
from shardwise.rules.tables import rule_of, whole_rule
from shardwise.runtime.local_shards import shard

MESHES = (Mesh(a=2), Mesh(a=3), Mesh(a=2, b=2))
TOLERANCE = 1e-9  # float64, one operator
MOST_TRIALS = 512  # combinations of dims per size that are tried as missing splits


@dataclass(frozen=True, slots=True)
class WrongSplit:
    """A split that the rule allows but that changes the results or fails.

    Args:
        sample: Index of the sample call.
        strategy: The strategy as text, with the mesh sizes.
        error: Largest difference relative to the largest element of the tensor; infinite for a failure.
        where: The wrong result or gradient and its rank, or the error message of a failure.
    """

    sample: int
    strategy: str
    error: float
    where: str

    def __str__(self) -> str:
        return f"WRONG    sample {self.sample}  {self.strategy:<14} error {self.error:.2g} at {self.where}"


@dataclass(frozen=True, slots=True)
class MissingSplit:
    """A split that the operator allows but the rule does not have.

    Args:
        sample: Index of the sample call.
        operands: (argument, dim) of every sliced operand.
        becomes: How the results of the slices combine to the whole results.
    """

    sample: int
    operands: tuple[tuple[str, int], ...]
    becomes: str

    def __str__(self) -> str:
        sliced = ", ".join(f"dim {dim} of {name}" for name, dim in self.operands)
        return f"MISSING  sample {self.sample}  {sliced}: slices give {self.becomes}"


@dataclass(frozen=True)
class RuleReport:
    """The result of ``check_rule``; print it for a summary.

    Args:
        operator: Name of the operator overload.
        rules: The rule of every sample call (None: the operator has none for it).
        wrong: Splits that the rule allows but that change the results or fail.
        missing: Splits that the operator allows but the rule does not have.
        num_splits: Number of splits that were run.
        max_error: Worst relative error of the right splits.
    """

    operator: str
    rules: tuple[OpRule | None, ...]
    wrong: tuple[WrongSplit, ...]
    missing: tuple[MissingSplit, ...]
    num_splits: int
    max_error: float

    @property
    def ok(self) -> bool:
        """Return whether every split is right. (A missing split costs time, not correctness.)"""
        return not self.wrong

    def __str__(self) -> str:
        verdict = f"{len(self.wrong)} wrong, {len(self.missing)} missing"
        lines = [
            f"{self.operator}: {self.num_splits} splits, {verdict}, worst error of the right ones {self.max_error:.2g}"
        ]
        lines += [f"  sample {i}  {'no rule' if rule is None else rule}" for i, rule in enumerate(self.rules)]
        return "\n".join([*lines, *(f"  {fault}" for fault in (*self.wrong, *self.missing))])


def check_rule(
    operator: Any,
    sample_inputs: Sequence[Any],
    *,
    dtype: torch.dtype | None = torch.float64,
    tolerance: float = TOLERANCE,
    find_missing: bool = True,
) -> RuleReport:
    """Test the rule of an operator against the operator itself.

    Use small distinct sizes of at least 3, some odd: equal sizes are ambiguous, and slices of size 1 broadcast.

    Args:
        operator: The operator, as for ``sw.rule``.
        sample_inputs: One call, as a tuple of arguments or a dict of named ones, or a list of calls. Floating-point
            tensors that require grad are differentiated.
        dtype: Floating-point tensors are cast to it. None: they are not cast, and errors are relative to the resolution
            of their dtypes.
        tolerance: Largest relative error of a right split, in the resolution of float64.
        find_missing: Whether to search for missing splits. The search calls the operator on operands that may not fit
            together: kernels without checks (PyTorch's LSTM) then end the process.

    Returns:
        The rules, and the wrong and missing splits.

    Raises:
        ShardwiseError: The operator cannot be called or differentiated on a sample.
    """
    target = overload_of(operator)
    samples = list(sample_inputs) if isinstance(sample_inputs, list) else [sample_inputs]
    rules: list[OpRule | None] = []
    wrong: list[WrongSplit] = []
    missing: list[MissingSplit] = []
    errors: list[float] = []
    for number, sample in enumerate(samples):
        call = _SampleCall.of(target, sample, dtype)
        registered = rule_of(call.op, call.graph)
        rules.append(registered)
        rule = registered or whole_rule(call.op, call.graph)
        for strategy, mesh in _strategies(rule, call):
            error, where = _run(call, rule, strategy, mesh)
            if error <= tolerance:
                errors.append(error)
            else:
                sizes = " x ".join(str(size) for _, size in mesh.axes)
                wrong.append(WrongSplit(number, f"{strategy.format(mesh)} ({sizes})", error, where))
        missing += [MissingSplit(number, *split) for split in (_missing(call, rule, tolerance) if find_missing else ())]
    count = len(errors) + len(wrong)
    return RuleReport(str(target), tuple(rules), tuple(wrong), tuple(missing), count, max(errors, default=0.0))


@dataclass(frozen=True)
class _SampleCall:
    """A sample as an operator of a graph, with its operands and the results and gradients of the whole operator."""

    op: Op
    graph: Graph
    operands: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    seeds: tuple[Tensor, ...]  # random cotangents of the results
    gradients: tuple[Tensor | None, ...]  # of the operands; None where nothing is differentiated
    labels: tuple[str, ...]  # of the operands: "weight", "tensors[1]"

    @staticmethod
    def of(target: OpOverload, sample: Any, dtype: torch.dtype | None) -> _SampleCall:
        tensors: list[Tensor] = []
        labels: list[str] = []

        def argument(value: Any, label: str) -> Any:
            if isinstance(value, Tensor):
                tensor = value.detach()
                if dtype is not None and tensor.is_floating_point():
                    tensor = tensor.to(dtype)
                tensors.append(tensor.clone().requires_grad_(value.requires_grad))
                labels.append(label)
                return Ref(f"x{len(tensors) - 1}")
            if isinstance(value, (list, tuple)):
                return tuple(argument(item, f"{label}[{i}]") for i, item in enumerate(value))
            return value

        names = [item.name for item in target._schema.arguments]
        args, kwargs = _positional(target, sample) if isinstance(sample, Mapping) else (tuple(sample), {})
        if len(args) > len(names):
            raise ShardwiseError(f"{len(args)} arguments for {target._schema}", fix="a list holds several calls")
        own_args = tuple(argument(value, name) for name, value in zip(names, args, strict=False))
        own_kwargs = tuple((name, argument(value, name)) for name, value in kwargs.items())
        op = Op(f"/{target._schema.name.rpartition('::')[2]}", target, own_args, own_kwargs, ())
        try:
            results = tuple(tensor_results(_call(op, tensors)))
        except Exception as error:  # operators may raise anything
            text = f"{target} fails on the sample {[list(t.shape) for t in tensors]}: {type(error).__name__}: {error}"
            raise ShardwiseError(text, fix="pass arguments in the order of its schema") from error
        op = Op(op.name, target, own_args, own_kwargs, tuple(f"y{i}" for i in range(len(results))))
        values = [Value(f"x{i}", tuple(t.shape), t.dtype, t.requires_grad) for i, t in enumerate(tensors)]
        sources = tuple(Source(value.name, "input", (value.name,)) for value in values)
        values += [Value(f"y{i}", tuple(t.shape), t.dtype, t.requires_grad) for i, t in enumerate(results)]
        outputs = tuple(Ref(name) for name in op.results)
        generator = torch.Generator().manual_seed(5)
        seeds = tuple(torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t.dtype) for t in results)
        try:
            gradients = _gradients(results, seeds, tensors)
        except RuntimeError as error:  # also NotImplementedError
            fix = "register one (torch.library.register_autograd), or pass samples that require no gradient"
            raise ShardwiseError(f"{target} has no derivative for the sample: {error}", fix=fix) from error
        graph = Graph(tuple(values), sources, (op,), outputs)
        return _SampleCall(op, graph, tuple(tensors), results, seeds, gradients, tuple(labels))


def _positional(target: OpOverload, named: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    left, args = dict(named), []
    for item in target._schema.arguments:
        if item.kwarg_only or item.name not in left:
            break
        args.append(left.pop(item.name))
    return tuple(args), left


def _call(op: Op, tensors: Sequence[Tensor]) -> Any:
    return run_call(op, lambda name: tensors[int(name[1:])])


def _gradients(
    results: Sequence[Tensor], seeds: Sequence[Tensor], operands: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    flowing = [(result, seed) for result, seed in zip(results, seeds, strict=True) if result.requires_grad]
    differentiable = [t for t in operands if t.requires_grad]
    if not flowing or not differentiable:
        return tuple(torch.zeros_like(t) if t.requires_grad else None for t in operands)
    ends, starts = zip(*flowing, strict=True)
    gradients = iter(torch.autograd.grad(ends, differentiable, starts, allow_unused=True, materialize_grads=True))
    return tuple(next(gradients) if t.requires_grad else None for t in operands)


# ---------------------------------------------------------------------------------------------------- wrong splits


def _strategies(rule: OpRule, call: _SampleCall) -> Iterator[tuple[Strategy, Mesh]]:
    """Yield every factor over every mesh, up to three factors at once, and a partial sum in every linear group."""
    opened = [factor.name for factor in rule.factors if factor.kind != "whole" and factor.size > 1]
    for name in opened:
        for mesh in MESHES:
            yield Strategy.of(dict.fromkeys(mesh.sub_axes, Split(name))), mesh
    if len(opened) > 1:
        mesh = Mesh([(axis, 2) for axis in "abc"[: len(opened)]])
        yield Strategy.of(dict(zip(mesh.sub_axes, map(Split, opened), strict=False))), mesh
    floating = [tensor.is_floating_point() or tensor.is_complex() for tensor in call.operands]
    for group, positions in enumerate(rule.linear):
        if all(floating[i] for i in positions):
            yield Strategy.of({"a": PassSum(group)}), MESHES[0]


def _run(call: _SampleCall, rule: OpRule, strategy: Strategy, mesh: Mesh) -> tuple[float, str]:
    try:
        return _compare(call, rule, strategy, mesh)
    except Exception as error:  # any error of a local call is a fault of the rule
        return float("inf"), f"{type(error).__name__}: {error}".partition("\n")[0]


def _compare(call: _SampleCall, rule: OpRule, strategy: Strategy, mesh: Mesh) -> tuple[float, str]:
    rules = factor_graph(call.graph, {call.op.name: rule}).rules
    rule = rules[call.op.name]
    stored: dict[str, Layout] = {}
    for name, layout in zip(call.op.operands, apply_strategy(rule, strategy, mesh).operands, strict=True):
        whole = {axis: "I" for axis, state in layout.states if state != "P"}
        stored.setdefault(name, layout.without_windows.moved(whole))
    spmd = build_spmd(call.graph, rules, Choice({call.op.name: strategy}, stored), mesh)
    cluster = VirtualCluster(mesh)
    operand_shards = [_scatter(tensor, stored[f"x{i}"], cluster) for i, tensor in enumerate(call.operands)]
    vjp_cache = VjpCache()
    programs = [differentiate(localize(spmd, rank), vjp_cache, loss_only=False) for rank in range(mesh.num_devices)]
    bindings = [
        {f"x{i}": pieces[rank].clone() for i, pieces in enumerate(operand_shards)} for rank in range(mesh.num_devices)
    ]
    values = run_forward(cluster, programs, bindings)
    outputs = [out.name for out in spmd.outputs]
    errors = [
        (_error(rank_values[program.resolve(name)], call.results[i]), f"result {i} on rank {rank}")
        for rank, (program, rank_values) in enumerate(zip(programs, values, strict=True))
        for i, name in enumerate(outputs)
    ]
    delivered = delivered_values(spmd, loss_only=False)
    seeds = [
        torch.stack([s for s, out in zip(call.seeds, outputs, strict=True) if out == name]).sum(0) for name in delivered
    ]
    cotangents = [
        {name: seed.clone() for name, seed in zip(program.cotangents, seeds, strict=True) if name is not None}
        for program in programs
    ]
    gradients = run_backward(cluster, programs, values, cotangents)
    largest = max((float(g.abs().max()) for g in call.gradients if g is not None and g.numel()), default=0.0)
    for i, gradient in enumerate(call.gradients):
        if gradient is None:
            continue
        bare = stored[f"x{i}"].dual
        for rank in range(mesh.num_devices):
            want = shard(gradient, bare, cluster.coordinates[rank])
            have = gradients[rank].get(f"x{i}", torch.zeros_like(want))
            error = _error(have, want, max(magnitude(gradient), 1e-6 * largest))
            errors.append((error, f"gradient of {call.labels[i]} on rank {rank}"))
    return max(errors, key=lambda item: item[0] if item[0] == item[0] else float("inf"))


def _scatter(full: Tensor, layout: Layout, cluster: VirtualCluster) -> list[Tensor]:
    """Return the shard of every rank of an operand; a partial value is split into random summands."""
    whole = full.detach()
    parts = [whole] * len(cluster.coordinates)
    if layout.partial_axes:
        generator = torch.Generator().manual_seed(7)
        first = torch.randn(whole.shape, generator=generator, dtype=torch.float64).to(whole.dtype)
        parts = [first, whole - first]
    bare = layout.moved(dict.fromkeys(layout.partial_axes, "I"))
    pieces = [shard(part, bare, at).clone() for part, at in zip(parts, cluster.coordinates, strict=True)]
    return pieces


def _error(have: Tensor, want: Tensor, scale: float | None = None) -> float:
    """Return the largest difference relative to the largest element; infinite for another shape or dtype. In dtypes
    below float64 it is scaled to their resolution: a partial sum that is cast is rounded per summand."""
    if have.dtype != want.dtype:
        return float("inf")
    inexact = want.is_floating_point() or want.is_complex()
    resolution = torch.finfo(want.dtype).eps / torch.finfo(torch.float64).eps if inexact else 1.0
    return relative_difference(want, have, magnitude(want) if scale is None else scale) / resolution


# -------------------------------------------------------------------------------------------------- missing splits

# Reductions that may combine the results of slices; the alternative is concatenation along a dim.
_COMBINED: dict[str, Callable[[Sequence[Tensor]], Tensor]] = {
    "sum": lambda parts: torch.stack(list(parts)).sum(0).to(parts[0].dtype),
    "max": lambda parts: torch.stack(list(parts)).amax(0),
    "min": lambda parts: torch.stack(list(parts)).amin(0),
}


def _missing(call: _SampleCall, rule: OpRule, tolerance: float) -> Iterator[tuple[tuple[tuple[str, int], ...], str]]:
    # Not size 2: its slices have size 1, which may broadcast by accident.
    sizes = sorted({size for tensor in call.operands for size in tensor.shape if size > 2})
    for size in sizes:
        places = [[None, *(d for d, length in enumerate(t.shape) if length == size)] for t in call.operands]
        count = 1
        for dims_of_operand in places:
            count *= len(dims_of_operand)
        if count > MOST_TRIALS:
            continue
        for dims in product(*places):
            if all(dim is None for dim in dims) or _has(rule, dims):
                continue
            becomes = _becomes(call, dims, size, tolerance)
            if becomes:
                sliced = tuple((call.labels[i], dim) for i, dim in enumerate(dims) if dim is not None)
                yield sliced, becomes


def _slices(operands: Sequence[Tensor], dims: Sequence[int | None], start: int, stop: int) -> list[Tensor]:
    return [
        tensor if dim is None else tensor.narrow(dim, start, stop - start).clone()
        for tensor, dim in zip(operands, dims, strict=True)
    ]


def _has(rule: OpRule, dims: Sequence[int | None]) -> bool:
    """Return whether the rule opens a factor that slices exactly these dims of the operands."""

    sizes = {factor.name: factor.size for factor in rule.factors}
    through = {name: window.factor for name, window in rule.windows}

    def slices(factor: str, dims_of_operand: Dims, dim: int | None) -> bool:
        leading = [
            next((through.get(name, name) for name in names if sizes[name] > 1), "") for names in dims_of_operand
        ]
        return [d for d, name in enumerate(leading) if name == factor] == ([] if dim is None else [dim])

    return any(
        all(slices(factor.name, dims_of_operand, dim) for dims_of_operand, dim in zip(rule.operands, dims, strict=True))
        for factor in rule.factors
        if factor.kind != "whole"
    )


def _becomes(call: _SampleCall, dims: Sequence[int | None], size: int, tolerance: float) -> str:
    """Return how the results of slices combine, if it is the same for two and three slices; else ""."""
    answers = {_put_together(call, dims, size, parts, tolerance) for parts in (2, 3) if parts <= size}
    return answers.pop() if len(answers) == 1 else ""


def _put_together(call: _SampleCall, dims: Sequence[int | None], size: int, parts: int, tolerance: float) -> str:
    bounds = [-(-i * size // parts) for i in range(parts + 1)]
    leaves = [t.detach().requires_grad_(t.requires_grad) for t in call.operands]
    slices = []
    try:
        for start, stop in pairwise(bounds):
            slices.append(tensor_results(_call(call.op, _slices(leaves, dims, start, stop))))
    except Exception:  # the operator does not accept the slices: no split
        return ""
    if any(len(slice_results) != len(call.results) for slice_results in slices):
        return ""
    whole: list[Tensor] = []
    words: list[str] = []
    for i, result in enumerate(call.results):
        together, word = _combined([slice_results[i] for slice_results in slices], result, tolerance)
        if together is None:
            return ""
        whole.append(together)
        words.append(word)
    if len({word.partition(" ")[0] for word in words}) > 1:
        return ""  # some results are slices and others summands: no factor has such a kind
    try:
        gradients = _gradients(whole, call.seeds, leaves)
    except Exception:  # its backward does not accept them
        return ""
    pairs = [(a, b) for a, b in zip(gradients, call.gradients, strict=True) if a is not None and b is not None]
    largest = max((magnitude(want) for _, want in pairs), default=0.0)
    right = all(_error(have, want, max(magnitude(want), 1e-6 * largest)) <= tolerance for have, want in pairs)
    return ", ".join(words) if right else ""


def _combined(parts: Sequence[Tensor], want: Tensor, tolerance: float) -> tuple[Tensor | None, str]:
    """Return the parts combined so that they equal ``want``, and how they were combined; (None, "") if impossible."""
    shapes = [part.shape for part in parts]
    if any(len(shape) != want.dim() for shape in shapes):
        return None, ""
    for d in range(want.dim()):
        rest = {(*shape[:d], *shape[d + 1 :]) for shape in shapes}
        if rest == {(*want.shape[:d], *want.shape[d + 1 :])} and sum(shape[d] for shape in shapes) == want.shape[d]:
            together = torch.cat(list(parts), d)
            if _error(together, want) <= tolerance:
                return together, f"slices of dim {d}"
    if any(shape != want.shape for shape in shapes) or not magnitude(want) or want.dtype == torch.bool:
        return None, ""
    differ = any(not torch.equal(part, parts[0]) for part in parts[1:])
    for word, combine in _COMBINED.items():
        if word != "sum" and (want.requires_grad or not differ or want.is_complex()):
            continue
        together = combine(parts)
        if _error(together, want) <= tolerance:
            return together, f"{word} of the parts"
    return None, ""
