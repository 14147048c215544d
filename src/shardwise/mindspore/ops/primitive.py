"""Primitives: operators as objects with a strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, ClassVar, Self

import torch
from torch.utils import _pytree as pytree

import shardwise as sw
from shardwise.errors import problem
from shardwise.mindspore import calls, context, strict
from shardwise.mindspore.layout import AXIS, Layout, Layouts, as_counts
from shardwise.mindspore.library import axes_of_counts
from shardwise.mindspore.named import WithSettings
from shardwise.mindspore.strict import Faults, Shapes, Strategy

_HOST_OPERANDS: ContextVar[list[torch.Tensor] | None] = ContextVar("shardwise_host_operands", default=None)
_UNSPLIT: ContextVar[bool] = ContextVar("shardwise_unsplit_operators", default=False)


def unsplit_operators() -> AbstractContextManager[None]:
    """Let primitives only compute within the context, even during capture: they are parts of one operator."""
    return calls.set_within(_UNSPLIT, True)


@contextmanager
def host_operands() -> Iterator[list[torch.Tensor]]:
    """Collect the tensors that primitives with ``primitive_target`` "CPU" keep on the host within the context."""
    operands: list[torch.Tensor] = []
    with calls.set_within(_HOST_OPERANDS, operands):
        yield operands


Names = tuple[tuple[str, ...], ...]
Whole = dict[int, tuple[Iterable[int], str]]


def dim_names(text: str, ranks: Sequence[int]) -> Names:
    """Return a name per dim of every tensor. ``text``: a list of names per tensor, or one list for all. "b..." stands
    for all dims without a name of their own, counted from the right.

    >>> dim_names("b... m k, b... k n", (2, 4))
    (('m', 'k'), ('b2', 'b1', 'k', 'n'))
    """
    lists = [part.split() for part in text.split(",")]
    lists = lists * len(ranks) if len(lists) == 1 else lists
    names = []
    for part, rank in zip(lists, ranks, strict=True):
        rest = rank - sum(not name.endswith("...") for name in part)
        spread = ([f"{name[:-3]}{i}" for i in range(rest, 0, -1)] if name.endswith("...") else [name] for name in part)
        names.append(tuple(name for group in spread for name in group))
    return tuple(names)


def counted(x: torch.Tensor, counts: tuple[int, ...]) -> torch.Tensor:
    """Constrain a value to split counts per dim."""
    return sw.constrain(x, repr((counts,)))


def laid(x: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Constrain a value to a layout by names."""
    return sw.constrain(x, layout.text(tuple(x.shape), context.options().stage_devices))


def notation(counts: dict[str, int], lengths: dict[str, str] | None = None) -> str:
    """Return split counts of named dims in the library's notation, with the axes of each. ``lengths``: suffixes."""
    ends, axes = lengths or {}, _axes(counts)
    used = [name for name in counts if axes[name] or name in ends]
    return " ".join(f"{name}@({','.join(axes[name])}){ends.get(name, '')}" for name in used)


def _axes(counts: dict[str, int]) -> dict[str, list[str]]:
    """Return the axes that split the dims of each name."""
    choices = axes_of_counts(counts, sw.Mesh({AXIS: context.options().stage_devices}))
    return {name: [axis for axis in choices if choices[axis] == name] for name in counts}


class Primitive:
    """An operator: ``ops.MatMul()(x, y)``. Subclasses compute on plain torch tensors in ``compute``.

    A strategy (one tuple of split counts per tensor operand) has an effect only in the modes semi_auto_parallel and
    auto_parallel.

    Attributes:
        dims: names of the dims of its operands (``dim_names``); dims of the same name have the same split count.
        sums: the operator sums over a dim, so that splitting it leaves partial sums.
        splittable: whether strict mode allows a strategy.
        lead: for an operator made of several torch operators, the index of the tensor operand that is split by its
            counts; the operators inside follow.
        same: strict mode requires equal strategies of all operands, for this reason.
        instance_name: the attribute of the cell that holds the primitive.
        data_parallel: without a strategy it splits dim 0 of its first operand (``Cell.set_data_parallel``).
        attrs: the ``primitive_attrs`` of the printed IR.
    """

    dims = "b..."
    sums = False
    splittable = True
    lead: int | None = None
    same = ""

    def __init__(self) -> None:
        self.attrs: dict[str, Any] = {}
        self.in_strategy: Strategy | None = None
        self.out_strategy: Strategy | None = None
        self.in_layouts: Layouts | None = None  # set if strategies are layouts
        self.out_layouts: Layouts | None = None
        self.instance_name = ""
        self.data_parallel = False
        self.recomputed = False

    @property
    def name(self) -> str:
        return type(self).__name__

    @property
    def title(self) -> str:
        """Return the operator and the attribute that holds it, for messages: ``MatMul matmul2``."""
        return f"{self.name} {self.instance_name}".strip()

    @property
    def in_high_dims(self) -> bool:
        """Return whether operands are laid on one device matrix as they are kept, in 2 or 3 dims, and not as the
        operator needs them (the attribute "enable_nd_tp"). The plan gathers what it needs."""
        return bool(self.attrs.get("enable_nd_tp")) and self.in_layouts is not None

    def compute(self, *args: Any) -> Any:
        raise NotImplementedError(f"{self.name} computes nothing")

    def faults(self, strategy: Strategy, shapes: Shapes, args: tuple[Any, ...]) -> Faults:
        """Yield what strict mode refuses in a strategy, besides the common faults (``strict.faults``), each with a fix.
        ``args``: those of the call."""
        for counts in strategy[1:]:
            if self.same and counts != strategy[0]:
                yield f"{self.same}, but get {strategy[0]} and {counts}", f"{strategy[0]} for both"
        for index, (dims, why) in self.whole(shapes, args).items():
            dims = [strict.dim_of(self.title, dim, len(shapes[index])) for dim in dims]
            yield from strict.whole(strategy[index], dims, why)

    def whole(self, shapes: Shapes, args: tuple[Any, ...]) -> Whole:
        """Return for operands the dims that strict mode does not split, and what the operator does with them."""
        return {}

    def refused(self, what: str, fix: str) -> strict.StrategyError:
        """Return the error for a strategy that this operator does not support."""
        return strict.failure(self.title, what, fix)

    def shard(self, in_strategy: Any = None, out_strategy: Any = None) -> Self:
        """Set the strategy of the operator: ``ops.MatMul().shard(((2, 4), (4, 1)))``. Returns itself."""
        _check_instance(self, "shard", (in_strategy, out_strategy))
        in_strategy, self.in_layouts = as_counts(in_strategy)
        out_strategy, self.out_layouts = as_counts(out_strategy)
        self.in_strategy = strict.nested(self.name, "in_strategy", in_strategy, out_strategy)
        self.out_strategy = strict.nested(self.name, "out_strategy", out_strategy)
        if self.in_strategy is None and self.out_strategy is not None:
            what = f"{self.name}: out_strategy is {self.out_strategy}, and there is no in_strategy"
            raise ValueError(problem(what, fix=f"give both: {self.name}().shard(in_strategy, {self.out_strategy})"))
        self._note_strategies()
        return self

    def set_strategy(self, *strategies: Any) -> Self:
        """Set the strategies of the operands, in one argument or in several. It is the old name of ``shard``."""
        _check_instance(self, "set_strategy", strategies)
        arg = strategies[0] if len(strategies) == 1 else ()
        in_one = len(strategies) == 1 and not (isinstance(arg, (tuple, list)) and all(isinstance(n, int) for n in arg))
        self.in_strategy = strict.nested(self.name, "strategy", strategies[0] if in_one else strategies)
        self._note_strategies()
        return self

    def _note_strategies(self) -> None:
        self.attrs |= {"in_strategy": self.in_strategy, "out_strategy": self.out_strategy}

    def add_prim_attr(self, name: str, value: Any) -> Self:
        """Set an attribute, such as ``"manual_split"`` or ``"primitive_target"``. Returns the primitive."""
        self.attrs[name] = value
        return self

    def del_prim_attr(self, name: str) -> Self:
        self.attrs.pop(name, None)
        return self

    def set_device(self, device_target: str) -> Self:
        return self.add_prim_attr("primitive_target", device_target)

    def set_prim_instance_name(self, name: str) -> Self:
        self.instance_name = name
        return self

    def recompute(self, mode: bool = True) -> Self:
        """Recompute the results in backward instead of saving them."""
        if not isinstance(mode, bool):
            raise TypeError(problem(f"{self.title}.recompute({mode!r})", fix="True or False"))
        self.recomputed = mode
        return self

    def __call__(self, *args: Any) -> Any:
        hosts = _HOST_OPERANDS.get()
        if hosts is not None and self.attrs.get("primitive_target") == "CPU":
            hosts.extend(self.host_operands(args))
        options = context.options()
        if _UNSPLIT.get() or not (options.distributed and torch.compiler.is_exporting()):
            operands = self.prepared(None, args)
            result = calls.again(self.compute, operands) if self.recomputed else self.compute(*operands)
            return calls.outside(result)
        shapes = self.strategy_shapes(args)
        strategy = self.in_strategy
        if strategy is None and self.data_parallel and shapes and shapes[0]:
            strategy = ((options.stage_devices, *(1,) * (len(shapes[0]) - 1)), *((),) * (len(shapes) - 1))
        elif strategy is not None:
            strategy = self.completed(_of_tensors(strategy, len(shapes), args), shapes, args)
            if not self.in_high_dims:
                devices, even = options.stage_devices, options.strict
                strict.refuse(self.title, strict.faults(self, strategy, shapes, args, devices, even=even))
        out = self.out_counts(strategy, shapes, args, strict=options.strict) if strategy is not None else None
        text = self.strategy_text(strategy, args)
        call: Callable[..., Any] = self.compute
        if self.in_layouts is not None:
            call = sw.shard(_named(self.placed, self), None, None if self.out_layouts else out)
        elif text is not None:
            call = sw.shard(_named(call, self), text, out)
        elif strategy is not None and self.lead is not None:
            call = sw.shard(_named(partial(self.led, strategy), self), None, out)
        elif strategy is not None:
            call = sw.shard(_named(call, self), self.operand_counts(strategy, shapes, args), out)
        if self.recomputed:
            call = sw.recompute(call, "all")
        result = call(*self.prepared(strategy, args))
        if self.out_layouts is not None and self.out_layouts[0] is not None:
            result = laid(result, self.out_layouts[0])
        if self.sums and options.strict and out is None and isinstance(result, torch.Tensor):
            return sw.constrain(result, "summed")
        return result

    def placed(self, *args: Any) -> Any:
        """Run ``compute`` with operands in the layouts that were set. The operators inside follow."""
        leaves, spec = pytree.tree_flatten(args)
        tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        layouts = _of_tensors(self.in_layouts or (), len(tensors), args)
        for i, layout in zip(tensors, layouts, strict=True):
            leaves[i] = leaves[i] if layout is None else laid(leaves[i], layout)
        return self.compute(*pytree.tree_unflatten(leaves, spec))

    def led(self, strategy: Strategy, *args: Any) -> Any:
        """Run ``compute`` with the operand ``lead``, and those that have a gradient, split by their counts. The
        operators inside follow. (Operands without one may be changed in place: moving statistics.)"""
        leaves, spec = pytree.tree_flatten(args)
        tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        assert self.lead is not None
        if strategy[self.lead]:
            leaves[tensors[self.lead]] = counted(leaves[tensors[self.lead]], strategy[self.lead])
        shapes = self.strategy_shapes(args)
        axes = _axes(self.counts_by_name(strategy, shapes, args))
        for place, (i, names) in enumerate(zip(tensors, self.dim_names(shapes, args), strict=False)):
            if place != self.lead and any(count > 1 for count in strategy[place]) and leaves[i].requires_grad:
                by_dim = zip(shapes[place], names, strategy[place], strict=True)
                dims = (f"{size}@({','.join(axes[name])})" if count > 1 else f"{size}" for size, name, count in by_dim)
                leaves[i] = sw.constrain(leaves[i], f"[{', '.join(dims)}]")
        return self.compute(*pytree.tree_unflatten(leaves, spec))

    def followed(self, names: Names, args: tuple[Any, ...]) -> frozenset[str]:
        """Return the dims whose counts ``led`` can carry to the operators inside: those of the operand ``lead``."""
        assert self.lead is not None
        return frozenset(names[self.lead])

    def prepared(self, strategy: Strategy | None, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments of ``compute`` after preprocessing."""
        return args

    def strategy_shapes(self, args: tuple[Any, ...]) -> Shapes:
        """Return the shapes to which the strategy applies, one tuple of counts each: those of the tensor operands."""
        return tuple(tuple(tensor.shape) for tensor in pytree.tree_leaves(args) if isinstance(tensor, torch.Tensor))

    def operand_counts(self, strategy: Strategy, shapes: Shapes, args: tuple[Any, ...]) -> Strategy:
        """Return the counts of the torch operator's operands, if their dims differ from ours."""
        return strategy

    def dim_names(self, shapes: Shapes, args: tuple[Any, ...]) -> Names:
        """Return a name per dim of every shape. Dims of one name have equal split counts, except dims of size 1."""
        per_shape = dim_names(self.dims, [len(shape) for shape in shapes])
        if any(len(names) != len(shape) for names, shape in zip(per_shape, shapes, strict=True)):
            raise self.refused(f"inputs of shapes {list(map(list, shapes))} have too few dims", f"dims {self.dims}")
        return per_shape

    def counts_by_name(self, strategy: Strategy, shapes: Shapes, args: tuple[Any, ...]) -> dict[str, int]:
        """Return the split count of the dims of each name. Their product is the number of devices."""
        parts: dict[str, int] = {}
        for counts, names in zip(strategy, self.dim_names(shapes, args), strict=True):
            for count, name in zip(counts, names, strict=bool(counts)):
                parts[name] = max(count, parts.get(name, 1))
        return parts

    def completed(self, strategy: Strategy, shapes: Shapes, args: tuple[Any, ...]) -> Strategy:
        """Fill in the counts of operands with an empty entry: ``()`` for ((2, 4), ()).

        Raises StrategyError for another form.
        """
        strict.refuse(self.title, strict.faults_of_form(strategy, shapes))
        counts = self.counts_by_name(strategy, shapes, args)
        return tuple(
            entry or tuple(counts.get(name, 1) if size > 1 else 1 for name, size in zip(names, shape, strict=True))
            for entry, names, shape in zip(strategy, self.dim_names(shapes, args), shapes, strict=True)
        )

    def strategy_text(self, strategy: Strategy | None, args: tuple[Any, ...]) -> str | None:
        """Return a strategy in the library's notation, if split counts cannot express it."""
        return None

    def out_counts(self, strategy: Strategy, shapes: Shapes, args: tuple[Any, ...], *, strict: bool) -> Strategy | None:
        """Return the split of the results; None: as the operator leaves them (strict mode reduces partial sums)."""
        return self.out_strategy

    def host_operands(self, args: tuple[Any, ...]) -> list[torch.Tensor]:
        """Return the operands that stay on the host if the operator's target is the CPU."""
        return []

    def __repr__(self) -> str:
        return f"{self.name}<{self.in_strategy}>" if self.in_strategy else self.name


class OfSettings(WithSettings, Primitive):
    """A primitive whose constructor takes the settings of its class statement: ``class Sort(OfSettings, axis=-1)``."""

    def _take(self, values: dict[str, Any]) -> None:
        Primitive.__init__(self)
        self.attrs.update(values)
        vars(self).update(values)


class Simple(OfSettings):
    """The operator ``function(*operands, **settings)``. A strategy splits its first operand."""

    function: ClassVar[Callable[..., Any]]
    lead: int | None = 0

    def compute(self, *args: Any) -> Any:
        return type(self).function(*args, **self._chosen())


def along(why: str, place: int | None = None) -> Callable[..., Whole]:
    """Return the method ``whole`` of operators along their setting ``axis``, or along their argument ``place``."""
    return lambda self, shapes, args: {0: ((self.axis if place is None else args[place],), why)}


class Inner(Primitive):
    """The computation of a layer as an operator that may have a strategy of its own: ``norm.bn_train.shard(...)``. It
    is called with a function and its operands. ``dims``: as in ``Primitive``."""

    lead = 0

    def __init__(self, dims: str = "b...") -> None:
        super().__init__()
        self.dims = dims

    def compute(self, function: Callable[..., Any], *operands: Any) -> Any:
        return function(*operands)


def _of_tensors(entries: tuple[Any, ...], count: int, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a strategy's entries for the ``count`` tensors only. A number among the operands may have the entry
    ``()``, like a tensor without dims."""
    leaves = pytree.tree_leaves(args)
    if not len(leaves) == len(entries) > count:
        return entries
    return tuple(entry for entry, leaf in zip(entries, leaves, strict=True) if entry or isinstance(leaf, torch.Tensor))


def _check_instance(primitive: Any, method: str, strategies: tuple[Any, ...]) -> None:
    if isinstance(primitive, Primitive):
        return
    strategies = tuple(argument for argument in (primitive, *strategies) if argument is not None)
    meant = strategies[0] if len(strategies) == 1 else strategies
    fix = f"write ops.MatMul().{method}({meant!r}) instead of ops.MatMul.{method}(...): with () behind the name"
    raise TypeError(problem(f"{method} was called on the operator's class, not on an operator", fix=fix))


def _named(call: Callable[..., Any], primitive: Primitive) -> Callable[..., Any]:
    def named(*args: Any) -> Any:
        return call(*args)

    named.__name__ = primitive.instance_name or primitive.name
    return named
