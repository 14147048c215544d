"""Conversion of an exported program to a graph without mutation, sub-graphs and symbols.

* A write (``x.add_(y)``, ``x[0] = y``) makes a new value; later uses of ``x``, of what it is a view of and of its other
  views get it. Which results are views is read off the fake tensors: they share storage.
* A write to a buffer becomes a mutation of the graph; a write to a parameter or an input is an error.
* Sub-graphs of ``torch.no_grad`` are inlined; a value that would carry a gradient into them is detached first.
* Assertions and symbolic constraints are dropped, sizes of -1 resolved, and devices removed (a rank has one).
* Marks of ``constrain`` stay until ``normalize``.
* Rows that a boolean mask selects become all rows in masked form (``graph.selected``).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch._higher_order_ops.wrap import wrap_with_autocast, wrap_with_set_grad_enabled
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from shardwise.errors import CaptureError
from shardwise.graph.autocast import Autocast, Casting
from shardwise.graph.bodies import Bodies, Inlining, NotRepeated, is_assertion, marks_of
from shardwise.graph.emitter import Emitter
from shardwise.graph.gradient_graph import check_differentiable, emit_gradient
from shardwise.graph.inner_gradients import GRADIENT, LEAF
from shardwise.graph.ir import Arg, Op, Ref, Source, Value, map_operands, only_ref
from shardwise.graph.normalize_layers import batch_norm_with_statistics
from shardwise.graph.origins import is_initial, line_of, module_path
from shardwise.graph.rejected import reject_unsupported
from shardwise.graph.repeats import ENTER, LEAVE, REPEAT, TracedRepeats
from shardwise.graph.schema import (
    arguments,
    has_symbols,
    is_symbolic,
    operator_name,
    returns_one_tensor,
    tensor_results,
    written_arguments,
)
from shardwise.graph.selected import Selections
from shardwise.graph.selected_rows import is_size
from shardwise.graph.trees import storage_of
from shardwise.graph.views import AliasedOperand, aliased_operands, write_through

aten = torch.ops.aten

# Operators whose second argument is the size of the result; it may hold -1.
_SIZES = (aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default)
# Views that add dims of size 1.
_WITH_DIMS = (aten.atleast_1d.default, aten.atleast_2d.default, aten.atleast_3d.default)


@dataclass(eq=False)
class ProgramTensor:
    """A tensor of the program: its current value, and the origin of its memory.

    A root owns its memory and counts the writes to it. A view knows the tensor it views (the ``operand`` of ``view``)
    and which result it is (``index``); it is recomputed if the root was written since. ``grad``: it was made with
    gradients enabled; ``is_placed``: its fake tensor gives its location in the memory of the viewed tensor.
    """

    ref: Ref
    storage: int
    base: ProgramTensor | None = None
    view: Op | None = None
    operand: Ref | None = None
    index: int = 0
    version: int = 0
    grad: bool = True
    source: Source | None = None
    is_placed: bool = True

    @property
    def root(self) -> ProgramTensor:
        return self if self.base is None else self.base.root

    @property
    def is_in_place(self) -> bool:
        """Return whether fake tensors give its location in the memory of its root."""
        return self.is_placed and (self.base is None or self.base.is_in_place)


class Functionalizer:
    """Walks the nodes of a program and its sub-graphs, emitting functional operators.

    ``region_paths``: number of an annotated region -> path of the module that made its first operator. ``initial``: the
    operators that make initial values of parameters, for layers that the model builds while it runs. ``autocast``: the
    one active around the call. ``repeats``: the layers that were traced only once.
    """

    def __init__(
        self, emitter: Emitter, prefix: str, autocast: Autocast | None = None, repeats: TracedRepeats | None = None
    ) -> None:
        self.emitter = emitter
        self.region_paths: dict[int, str] = {}
        self.initial: set[str] = set()
        self._prefix = prefix
        self._values: dict[Node, Any] = {}
        self._bound: dict[str, ProgramTensor] = {}  # by source
        self._contiguous: set[str] = set()
        self._grad = True
        self._detached: dict[str, Ref] = {}
        self._casting = Casting(emitter, autocast)
        self.bodies = Bodies(repeats or TracedRepeats(), prefix)
        self._handed_on: dict[Node, dict[int, AliasedOperand]] = {}  # so that a repeated layer's are called once
        self._inlining: Inlining | None = None
        self._storages: dict[int, int] = {}  # of the results of repeats
        self.selections = Selections(emitter)
        self._val: Any = None  # the traced result of the present call

    def bind(self, node: Node, source: Source) -> None:
        """Bind a placeholder to the value of a source; several may have the same (tied weights)."""
        name = source.value
        if name not in self._bound:
            self._bound[name] = ProgramTensor(Ref(name), storage_of(node.meta.get("val")), source=source)
            if node.meta["val"].is_contiguous():
                self._contiguous.add(name)
        self._values[node] = self._bound[name]

    def ref_of(self, node: Node) -> Ref:
        """Return the current value of a tensor node that the call returns."""
        return self.selections.check_fixed(self.read(self._tensor(node)), self._origin(node))

    def memory_of(self, node: Node) -> tuple[str, tuple[tuple[int, ...], tuple[int, ...], int] | None]:
        """Return a name for the memory of a tensor node, its source or a name shared by its views, and its location in
        the source: size, strides, offset."""
        root = self._tensor(node).root
        if root.source is None:
            return f"#{root.storage}", None
        val = node.meta["val"]
        where = tuple(val.shape), tuple(val.stride()), int(val.storage_offset())
        is_in_source = root.source.value in self._contiguous and self._tensor(node).is_in_place
        return root.source.value, where if is_in_source else None

    def mutations(self) -> dict[str, str]:
        """Return buffer value -> the last value written to it, without gradient."""
        written = {name: tensor for name, tensor in self._bound.items() if tensor.version}
        return {name: self.gradient_free(self.read(tensor)) for name, tensor in written.items()}

    def gradient_free(self, ref: Ref) -> str:
        """Return the name of a value, detached if it carries a gradient."""
        if not self.emitter.value(ref).requires_grad:
            return ref.name
        return self.emitter.emit(aten.detach.default, ref).name

    def run(self, nodes: Iterable[Node]) -> Any:
        """Emit the nodes. Return the output node's argument with nodes replaced by what is known of them."""
        for node in nodes:
            if node.op == "output":
                return self._lookup(node.args[0])
            if node.op == "get_attr":
                assert isinstance(node.target, str)
                assert node.graph.owning_module is not None
                self._values[node] = node.graph.owning_module.get_submodule(node.target)
            elif _has_failed(node):
                continue
            elif node.op == "call_function":
                before = len(self.emitter.ops)
                self._values[node] = self._call(node)
                if is_initial(node):
                    self.initial |= {op.name for op in self.emitter.ops[before:]}
            else:
                assert node in self._values, f"unexpected node {node.format_node()}"
        return None

    # ------------------------------------------------------------------------------------------------ calls

    def _call(self, node: Node) -> Any:
        target: Any = node.target
        if target is operator.getitem:
            return self._lookup(node.args[0])[node.args[1]]
        if target is wrap_with_set_grad_enabled:
            enabled, body, *operands = self._lookup(node.args)
            return self._inline(body, operands, bool(enabled))
        if target is ENTER or target is LEAVE:
            self.bodies.note(node)
            return None
        if target is REPEAT:
            return self._repeat(node)
        origin = self._origin(node)
        self.emitter.origin = origin
        if target is GRADIENT:
            return self._gradient(node)
        if target is LEAF:
            return self._variable(node)
        if target is wrap_with_autocast:
            device, dtype, enabled, _cache, body, *operands = self._lookup(node.args)
            with self._casting.region(Autocast.region(device, dtype) if enabled else None):
                return self._inline(body, operands, self._grad)
        if is_assertion(target):
            return None
        self._val = node.meta.get("val")
        if is_size(target, self._val):
            return self._val
        if not (self.selections.takes(target, self._val) and isinstance(target, OpOverload)):
            reject_unsupported(target, self._val, origin)
        kwargs = tuple((key, self._argument(value)) for key, value in node.kwargs.items() if key != "pin_memory")
        op = replace(origin, target=target, args=self._argument(node.args), kwargs=kwargs)
        written = written_arguments(target)
        if written:
            return self._write(node, op, written)
        if target is aten.batch_norm.default and arguments(op)["training"] and not self.selections.concern(op):
            return self._batch_norm(node, op)
        if target is aten.instance_norm.default:
            args = arguments(op)
            if args["use_input_stats"] and args["running_mean"] is not None:
                fix = "use track_running_stats=False; training ignores them in either case"
                raise _write_error("instance norm updates running statistics", op, fix)
        return self._read_call(node, op)

    def _inline(self, body: GraphModule, operands: Sequence[Any], grad: bool) -> Any:
        placeholders = [node for node in body.graph.nodes if node.op == "placeholder"]
        self._values.update(zip(placeholders, operands, strict=True))
        before = self._grad, self._detached
        self._grad = grad
        if before[0] != grad:
            self._detached = {}
        result = self.run(body.graph.nodes)
        self._grad, self._detached = before
        return result

    def _repeat(self, node: Node) -> tuple[ProgramTensor, ...]:
        inlining = self.bodies.inlined(node, lambda operand: self._tensor(operand).storage)
        body, operands = inlining.body, self._lookup(node.args[0])
        if any(has_symbols(inner.meta.get("val")) for inner in (*body.operands, *body.nodes)):
            raise NotRepeated("it computes with rows selected by a mask")
        before = {body_node: self._values[body_node] for body_node in (*body.operands, *body.nodes)}
        self._values.update(zip(body.operands, operands, strict=True))
        self._inlining = inlining
        self.run(body.nodes)
        results = tuple(map(self._tensor, body.results))
        self._inlining = None
        self._values.update(before)
        for val, result in zip(tensor_results(node.meta["val"]), results, strict=True):
            self._storages[storage_of(val)] = result.storage
        return results

    def _gradient(self, node: Node) -> tuple[ProgramTensor, ...]:
        """Emit the gradient that the model takes of some values by others."""
        given: tuple[Any, ...] = node.args
        outputs, inputs, cotangents = (tuple(map(self.ref_of, nodes)) for nodes in given[:3])
        batched, create_graph = given[3:]
        before, first, self._grad = self._grad, len(self.emitter.ops), True
        call, options = (outputs, inputs, cotangents), (bool(batched), bool(create_graph))
        results = emit_gradient(self.emitter, self._apply, call, *options)
        self._grad = before
        if create_graph:
            check_differentiable(self.emitter, self.emitter.ops[first:])
        else:
            results = [Ref(self.gradient_free(ref)) for ref in results]
        vals = tensor_results(node.meta["val"])
        return tuple(ProgramTensor(ref, self._storage(val)) for ref, val in zip(results, vals, strict=True))

    def _variable(self, node: Node) -> ProgramTensor:
        """Emit what ``requires_grad_`` sets. The tensor keeps its memory, which may be written later."""
        tensor, ref = self._tensor(node.args[0]), self.ref_of(node.args[0])  # type: ignore[arg-type]
        if node.args[1]:
            tensor.ref = self.emitter.emit(LEAF, ref, True)
        elif self.emitter.value(ref).requires_grad:
            tensor.ref = self.emitter.emit(aten.detach.default, ref)
        return tensor

    def _read_call(self, node: Node, op: Op) -> Any:
        val = node.meta["val"]
        if node not in self._handed_on:
            self._handed_on[node] = {} if self.selections.concern(op) else aliased_operands(node)
        handed_on = self._handed_on[node]
        single = returns_one_tensor(op.target)
        if single and handed_on and handed_on[0].is_whole:
            op = replace(op, target=aten.alias.default, args=(self.ref_of(handed_on[0].operand),), kwargs=())
        op = self._cast(_explicit(op, val))
        refs = self._apply(op)
        self._casting.check(refs, val, op)
        viewed = self._values[node.args[0]] if node.args and isinstance(node.args[0], Node) else None
        copies = op.target is aten.lift_fresh_copy.default
        results = []
        for index, (ref, fake) in enumerate(zip(refs, tensor_results(val), strict=True)):
            storage, base, is_placed = self._storage(fake), None, True
            if index in handed_on:
                base, is_placed = self._tensor(handed_on[index].operand), handed_on[index].is_whole
            elif isinstance(viewed, ProgramTensor) and viewed.storage == storage and not copies:
                base = viewed
            if base is None:
                results.append(ProgramTensor(ref, storage))
            else:
                seen = base, op, self.read(base), index, base.root.version, self._grad
                results.append(ProgramTensor(ref, storage, *seen, is_placed=is_placed))
        if single:
            return results[0]
        if any(isinstance(item, (list, tuple)) for item in val or ()):  # a list beside others (histogramdd)
            rest = iter(results)
            return tuple(
                next(rest) if isinstance(item, torch.Tensor) else tuple(islice(rest, len(item))) for item in val
            )
        return tuple(results)

    def _batch_norm(self, node: Node, op: Op) -> ProgramTensor:
        """Emit training-mode batch norm; updates of the running statistics are writes."""
        op = self._cast(op)
        if not self._grad:
            op = map_operands(op, self._detach)
        result, mean, variance = map(only_ref, batch_norm_with_statistics(op, self.emitter) or ())
        momentum = arguments(op)["momentum"]
        for position, new in ((3, mean), (4, variance)):
            running_node = node.args[position]
            if isinstance(running_node, Node):
                running = self._tensor(running_node)
                before = self.read(running)
                dtype = self.emitter.value(before).dtype
                if self.emitter.value(new).dtype != dtype:
                    new = self.emitter.emit(aten.to.dtype, new, dtype)
                kept = self.emitter.emit(aten.mul.Tensor, before, 1.0 - momentum)
                fresh = self.emitter.emit(aten.mul.Tensor, new, momentum)
                self._store(running, self.emitter.emit(aten.add.Tensor, kept, fresh))
        return ProgramTensor(result, self._storage(node.meta["val"]))

    # ---------------------------------------------------------------------------------------------- reading

    def read(self, tensor: ProgramTensor) -> Ref:
        """Return the current value, recomputed if the memory was written since."""
        if tensor.base is not None and tensor.version != tensor.root.version:
            self.selections.check_unchanged(tensor.ref, self.emitter.origin)
            before, self._grad = self._grad, tensor.grad
            tensor.ref = self._apply(_on_base(tensor, self.read(tensor.base)))[tensor.index]
            self._grad = before
            tensor.version = tensor.root.version
        return tensor.ref

    def _apply(self, op: Op) -> tuple[Ref, ...]:
        """Emit an operator. In a gradient-free region all operands are detached; else only those that get no gradient
        from autograd, so that every form of the operator gives them none."""
        computes_rows = self.selections.concern(op)
        op = self.selections.sized(op) if computes_rows else op
        without = self.emitter.without_gradient(op) if self._grad else self.emitter.values
        op = map_operands(op, lambda name: self._detach(name) if name in without else Ref(name))
        if computes_rows:
            return tuple(self.selections.apply(op, self._val))
        return tuple(self.emitter.apply(op))

    def _cast(self, op: Op) -> Op:
        def cast(name: str, dtype: torch.dtype) -> Ref:
            call = replace(self.emitter.origin, target=aten.to.dtype, args=(Ref(name), dtype), kwargs=())
            return self._apply(call)[0]

        return self._casting.ahead_of(op, cast, remembers=self._grad)

    def _detach(self, name: str) -> Ref:
        if not self.emitter.values[name].requires_grad:
            return Ref(name)
        if name not in self._detached:
            self._detached[name] = self.selections.copied(name, self.emitter.emit(aten.detach.default, Ref(name)))
        return self._detached[name]

    def _tensor(self, node: Node) -> ProgramTensor:
        ref = self._values[node]
        assert isinstance(ref, ProgramTensor), f"{node} is not a tensor"
        return ref

    def _lookup(self, arg: Any) -> Any:
        if isinstance(arg, Node):
            return self._values[arg]
        if isinstance(arg, (tuple, list)):
            return tuple(map(self._lookup, arg))
        return arg

    def _argument(self, arg: Any) -> Arg:
        """Replace nodes by Refs to their current values, lists by tuples, and devices by None."""
        if isinstance(arg, Node):
            value = self._values[arg]
            if is_symbolic(value):
                return value
            return tuple(map(self.read, value)) if isinstance(value, tuple) else self.read(value)
        if isinstance(arg, (tuple, list)):
            return tuple(map(self._argument, arg))
        return None if isinstance(arg, torch.device) else arg

    # ---------------------------------------------------------------------------------------------- writing

    def _store(self, tensor: ProgramTensor, new: Ref) -> None:
        """Give a tensor, and what it is a view of, a new value. Raises CaptureError if that cannot be expressed."""
        origin = self.emitter.origin
        root = tensor.root
        if root.source is not None and root.source.kind in ("parameter", "input"):
            kind = root.source.kind
            fix = "work on x.clone()" if kind == "input" else "update parameters in the optimizer, not in forward"
            raise _write_error(f"the {kind} {root.source.names[0]} is changed in place", origin, fix)
        if root.source is not None and root.source.kind == "constant":
            name = root.source.names[0]
            fix = f'register it: self.register_buffer("{name}", ..., persistent=False)'
            raise _write_error(f"the tensor {name} is changed in place and is not a buffer", origin, fix)
        if not self._grad and self.emitter.value(self.read(root)).requires_grad:
            what = "a value that carries a gradient is changed in place under no_grad"
            raise _write_error(what, origin, "make a new tensor")
        before = self.read(root)
        self._store_at(tensor, self.selections.copied(tensor.ref.name, new), root.version + 1)
        if self._grad and self.emitter.value(before).requires_grad and not self.emitter.is_reached(before, root.ref):
            zero = self.emitter.with_zero_gradient((before.name,), root.ref)
            root.ref = self.selections.copied(root.ref.name, zero)
            if root is not tensor:
                root.version += 1  # so that ``tensor`` and other views are recomputed from it

    def _store_at(self, tensor: ProgramTensor, new: Ref, version: int) -> None:
        if tensor.base is not None:
            assert tensor.view is not None
            self.selections.check_unchanged(tensor.ref, self.emitter.origin)
            base = self.read(tensor.base)
            if tensor.view.target is aten.detach.default and self.emitter.value(base).requires_grad:
                what = "a value that carries a gradient is changed through .detach()"
                raise _write_error(what, self.emitter.origin, "make a new tensor")
            through = write_through(_on_base(tensor, base), tensor.index, base, new, self.emitter)
            if through is None:
                what = f"a write through {operator_name(tensor.view.target)} cannot be expressed without mutation"
                fix = "make a new tensor, for example with torch.where or torch.cat"
                raise _write_error(what, self.emitter.origin, fix)
            self._store_at(tensor.base, through, version)
        tensor.ref = new
        tensor.version = version

    def _write(self, node: Node, op: Op, written: tuple[str, ...]) -> ProgramTensor:
        """Emit the functional form of an operator that writes (in place or ``out=``), and store its result."""
        name = operator_name(op.target)
        outside = written == ("out",) and returns_one_tensor(op.target)
        written_node = node.kwargs.get("out") if outside else node.args[0]
        if not isinstance(written_node, Node) or not (outside or (name.endswith("_") and len(written) == 1)):
            raise _write_error(f"{name} writes into {', '.join(written)}", op, "use the form that returns its result")
        if name == "embedding_renorm_":
            fix = "omit max_norm: normalize the rows after the lookup, or the table in the optimizer"
            raise _write_error("an embedding with max_norm scales rows of its table in place", op, fix)
        tensor = self._tensor(written_node)
        before = self.emitter.value(self.read(tensor))
        if name == "detach_":
            if before.requires_grad:
                raise _write_error("detach_() cuts a gradient in place", op, "x = x.detach()")
            return tensor
        if torch.Tag.inplace_view in op.target.tags or name in ("resize_", "set_"):
            raise _write_error(f"{name}() changes the shape of a tensor in place", op, f"x = x.{name[:-1]}(...)")
        if name.startswith("logical_") and before.requires_grad:
            what = f"{name}() changes a value that carries a gradient in place, which autograd would not record"
            raise _write_error(what, op, f"x = x.{name[:-1]}(...).to(x.dtype), which carries no gradient")
        self._store(tensor, self._written_value(op, before))
        return tensor

    def _written_value(self, op: Op, before: Value) -> Ref:
        """Return what an in-place operator writes, with the shape and dtype of the tensor that it writes to."""
        name = operator_name(op.target)
        call_args = arguments(op)
        if name in ("fill_", "zero_") and not isinstance(call_args.get("value"), Ref):
            dtype = (("dtype", before.dtype),)
            full = replace(op, target=aten.full.default, args=(before.shape, call_args.get("value", 0)), kwargs=dtype)
            return self._apply(full)[0]
        if name in ("copy_", "fill_"):
            new: Ref = call_args["src"] if name == "copy_" else call_args["value"]
            if not self._grad:
                new = self._detach(new.name)
        else:
            kwargs = tuple((key, value) for key, value in op.kwargs if key != "out")
            functional = _functional_form(op)
            new = self._apply(replace(op, target=functional, args=_complete(op, functional), kwargs=kwargs))[0]
        if self.emitter.value(new).dtype != before.dtype:
            new = self.emitter.emit(aten.to.dtype, new, before.dtype)
        if self.emitter.value(new).shape != before.shape:
            new = self.emitter.emit(aten.expand.default, new, before.shape)
        return new

    # ---------------------------------------------------------------------------------------------- origins

    def _storage(self, val: Any) -> int:
        """Return a number that results have in common if they share memory."""
        storage = storage_of(val)
        return self._storages.get(storage, storage) if self._inlining is None else self._inlining.storage(storage)

    def _origin(self, node: Node) -> Op:
        """Return an empty op with the module path, source line and provisional scope of a node."""
        path, (number, segment), source = module_path(node, self._prefix), marks_of(node), line_of(node)
        if self._inlining is not None:
            path, (number, segment) = self._inlining.path_of(path), self._inlining.marks
        if number is not None:
            self.region_paths.setdefault(number, path)
        mark = ("" if number is None else region_mark(number)) + (BETWEEN + segment if segment else "")
        return Op(f"{path}/", aten.alias.default, (), (), (), source, mark)


BETWEEN = "|"  # the mark of a region and that of a segment in a provisional scope


def region_mark(number: int) -> str:
    """Return the provisional scope of an operator of a region."""
    return f"#{number}"


def _on_base(tensor: ProgramTensor, base: Ref) -> Op:
    """Return the view operator of a tensor, applied to the current value of the viewed tensor."""
    assert tensor.view is not None
    return map_operands(tensor.view, lambda name: base if Ref(name) == tensor.operand else Ref(name))


def _has_failed(node: Node) -> bool:
    """Return whether the call raised an error that the model caught. It has no effect, as on one device."""
    returns = isinstance(node.target, OpOverload) and bool(node.target._schema.returns)
    return returns and node.meta.get("val") is None and not node.users


def _explicit(op: Op, val: Any) -> Op:
    """Replace sizes of -1 by actual sizes, and casts by ``to.dtype``, which names no device."""
    if operator_name(op.target) in ("to", "_to_copy"):
        return replace(op, target=aten.to.dtype, args=(op.args[0], val.dtype), kwargs=())
    if op.target in _WITH_DIMS:
        return replace(op, target=aten.reshape.default, args=(op.args[0], tuple(val.shape)))
    if op.target in _SIZES:
        return replace(op, args=(op.args[0], tuple(val.shape), *op.args[2:]))
    if op.target is aten.unflatten.int:
        tensor, dim, sizes = op.args
        start = dim % (val.dim() - len(sizes) + 1)
        return replace(op, args=(tensor, start, tuple(val.shape[start : start + len(sizes)])))
    return op


def _functional_form(op: Op) -> OpOverload:
    """Return the functional overload with the same other arguments as an in-place or ``out=`` operator."""
    schema = op.target._schema
    name = operator_name(op.target).removesuffix("_")
    signature = [(_argument_name(a.name), str(a.type)) for a in schema.arguments if a.name != "out"]
    packets = [packet for packet in (getattr(aten, name, None), getattr(aten, f"{name}_functional", None)) if packet]
    for functional in (getattr(packet, overload) for packet in packets for overload in packet.overloads()):
        parameters = [(_argument_name(a.name), str(a.type)) for a in functional._schema.arguments]
        if parameters == signature and returns_one_tensor(functional):
            form_without_writes: OpOverload = functional
            return form_without_writes
    raise _write_error(f"{operator_name(op.target)} has no form without mutation", op, "make a new tensor")


def _complete(op: Op, functional: OpOverload) -> tuple[Arg, ...]:
    """Return the positional arguments of an in-place operator, including defaults that its functional form lacks:
    ``bernoulli_()`` draws with p = 0.5, while ``bernoulli`` requires p."""
    required = [a.name for a in functional._schema.arguments if not a.kwarg_only and not a.has_default_value()]
    values, named = arguments(op), dict(op.kwargs)
    return op.args + tuple(values[name] for name in required[len(op.args) :] if name not in named)


def _argument_name(name: str) -> str:
    """Unify argument names: ``dropout_(self, p, train)`` corresponds to ``dropout(input, p, train)``."""
    return "self" if name == "input" else name


def _write_error(what: str, op: Op, fix: str) -> CaptureError:
    return CaptureError(what, op=op.module, source=op.source, fix=fix)
