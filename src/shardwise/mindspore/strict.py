"""The specification's checks of strategies. Their form is checked when they are set, their numbers when a cell is
compiled.

Strict mode (``set_auto_parallel_context(strict=True)``, the default) enforces the rules of the reference: even splits
by powers of two, checked in its order. With ``strict=False`` only the library's own checks remain.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any

from shardwise.errors import LayoutError, problem

Strategy = tuple[tuple[int, ...], ...]
Shapes = tuple[tuple[int, ...], ...]
Faults = Iterator[tuple[str, str]]  # what a strategy cannot have, and a fix; the first is raised
Primitive = Any  # ops.primitive.Primitive, which calls these checks


class StrategyError(LayoutError, RuntimeError):
    """Error for a strategy that the operator does not support; a RuntimeError, as in the reference."""


def nested(name: str, role: str, strategy: Any, out_strategy: Any = None) -> Strategy | None:
    """Return a strategy as a tuple of tuples. Raises TypeError or ValueError for another nesting, with a fix."""
    if strategy is None:
        return None
    if isinstance(strategy, (set, frozenset, dict)):
        fix = f"a tuple or a list with one entry per input: {name}().shard(((4, 1), (1, 1)))"
        raise TypeError(problem(f"{name}: {role} is a {type(strategy).__name__}, which has no order", fix=fix))
    if not isinstance(strategy, (tuple, list)):
        what = f"{name}: {role} is {strategy!r}"
        raise TypeError(problem(what, fix="a tuple with one tuple per input: ((4, 1), (1, 1))"))
    if strategy and all(isinstance(item, int) for item in strategy):
        arguments = [tuple(strategy), *([tuple(out_strategy)] if isinstance(out_strategy, (tuple, list)) else [])]
        what = f"{name}: {role} {tuple(strategy)} is one tuple of numbers, and must hold one tuple per input" + (
            "; the second argument is the strategy of the outputs" if len(arguments) > 1 else ""
        )
        raise ValueError(problem(what, fix=f"{name}().shard({tuple(arguments)!r}): one tuple around all of them"))
    for position, counts in enumerate(strategy):
        if not isinstance(counts, (tuple, list)):
            what = f"{name}: {role} has {counts!r} for tensor {position}"
            raise TypeError(problem(what, fix="a tuple with one number per dim"))
        for count in counts:
            if isinstance(count, bool) or not isinstance(count, int):
                what = f"{name}: {role} has {count!r} for tensor {position}"
                raise TypeError(problem(what, fix="whole numbers from 1"))
    return tuple(tuple(counts) for counts in strategy)


def faults_of_form(strategy: Strategy, shapes: Shapes) -> Faults:
    """Yield anything but one tuple per input with one number per dim, or none at all."""
    inputs = list(map(list, shapes))
    if len(strategy) != len(shapes):
        what = f"the strategy {strategy} size: {len(strategy)} is not equal to inputs size: {len(shapes)}"
        yield what, f"one tuple for each of the inputs {inputs}"
    for index, (counts, shape) in enumerate(zip(strategy, shapes, strict=True)):
        if counts:
            yield from _faults_of_length(index, counts, shape)
    if any(shapes) and not any(strategy):
        what = f"the strategy {strategy} has no split counts for any of the inputs {inputs}"
        yield what, "numbers for one of them; without a strategy the operator splits its batch"


def faults(
    primitive: Primitive, strategy: Strategy, shapes: Shapes, args: tuple[Any, ...], devices: int, *, even: bool
) -> Faults:
    """Yield the faults that all operators share, in the order of the reference, and the operator's own. ``even``: also
    those of strict mode, which are most."""
    if even and not primitive.splittable:
        what = f"the strategy is {strategy}, but {primitive.name} takes none: its layout is that of its neighbours"
        yield what, "shard the operator before it or behind it, or set_auto_parallel_context(strict=False)"
    if even:
        for counts, shape in zip(strategy, shapes, strict=True):
            yield from _faults_of_counts(counts, shape)
        yield from primitive.faults(strategy, shapes, args)
    names_by_operand = primitive.dim_names(shapes, args)
    yield from _faults_of_shared_dims(primitive, strategy, shapes, args)
    counts_by_name = primitive.counts_by_name(strategy, shapes, args)
    if primitive.lead is not None:
        lost = set(counts_by_name) - primitive.followed(names_by_operand, args)
        for counts, names in zip(strategy, names_by_operand, strict=True):
            yield from whole(counts, [dim for dim, key in enumerate(names) if key in lost], "which cannot be", "")
    if even:
        yield from _faults_of_devices(strategy, prod(counts_by_name.values()), devices)


def _faults_of_shared_dims(primitive: Primitive, strategy: Strategy, shapes: Shapes, args: tuple[Any, ...]) -> Faults:
    """Yield dims that operands share with different split counts. Dims of size 1 are whole."""
    seen: dict[str, tuple[int, int, int]] = {}
    for index, (counts, names) in enumerate(zip(strategy, primitive.dim_names(shapes, args), strict=True)):
        for dim, (count, dim_name) in enumerate(zip(counts, names, strict=True)):
            if shapes[index][dim] == 1:
                continue
            other, place, other_dim = seen.setdefault(dim_name, (count, index, dim))
            if other != count:
                first = (*strategy[: place + 1], *((),) * (len(shapes) - place - 1))
                yield (
                    f"the strategy {strategy} splits dim {other_dim} of input {place} {list(shapes[place])} in {other} "
                    f"parts, and dim {dim} of input {index} {list(shapes[index])} in {count}: Strategies of relevant "
                    "dimensions are not equal",
                    f"the same number for both: {primitive.completed(first, shapes, args)}",
                )


def check_tensors(
    name: str, role: str, strategy: Strategy, shapes: Sequence[tuple[int, ...]], devices: int, *, even: bool
) -> None:
    """Check a strategy of the inputs or outputs of a function. ``even``: run also the checks of strict mode."""

    def faults() -> Faults:
        if len(strategy) != len(shapes):
            what = f"the strategy {strategy} size: {len(strategy)} is not equal to {role} size: {len(shapes)}"
            yield what, f"one tuple for each of the {role} {list(map(list, shapes))}, or None for one that follows"
        for index, (counts, shape) in enumerate(zip(strategy, shapes, strict=True)):
            if counts and even:
                yield from _faults_of_length(index, counts, shape)
                yield from _faults_of_counts(counts, shape)
                yield from _faults_of_devices(strategy, prod(counts), devices)

    refuse(name, faults())


def _faults_of_devices(strategy: Strategy, required: int, devices: int) -> Faults:
    if required > devices or devices % required:
        yield (
            f"The strategy is {strategy}, it requires {required} devices, but the device number of this stage is "
            f"{devices}, it can not be divisible by {required}",
            f"numbers whose product divides {devices}",
        )


def _faults_of_length(index: int, counts: tuple[int, ...], shape: tuple[int, ...]) -> Faults:
    if len(counts) != len(shape):
        what = f"strategy len: {len(counts)} is not equal to inputs len: {len(shape)}, index: {index}"
        yield what, f"one number for each dim of {list(shape)}"


def _faults_of_counts(counts: tuple[int, ...], shape: tuple[int, ...]) -> Faults:
    for count, size in zip(counts, shape, strict=True):
        if count <= 0:
            yield f"the value of strategy must be larger than 0, but get {count}", "1: not split"
        if count & (count - 1):
            what = f"the value of strategy must be the power of 2, but get {count}"
            yield what, "a power of two, or set_auto_parallel_context(strict=False)"
        if size % count:
            what = f"shape {size} cannot be divisible by strategy value {count}: {size} % {count} = {size % count}"
            yield what, "a divisor, or set_auto_parallel_context(strict=False), which splits unevenly"


LENIENT = ", or set_auto_parallel_context(strict=False), which can split it"


def whole(counts: tuple[int, ...], dims: Iterable[int], why: str, else_: str = LENIENT) -> Faults:
    """Yield dims that are split and must not be. ``why``: what the operator does with them; ``else_``: an alternative
    fix."""
    for dim in dims:
        if counts[dim] != 1:
            what = f"the strategy {counts} splits dim {dim}, {why}: its value must be 1, but get {counts[dim]}"
            yield what, f"1 for that dim{else_}"


def dim_of(name: str, dim: int, rank: int) -> int:
    """Return a dim counted from 0. Raises StrategyError if it is out of range."""
    if not -rank <= dim < rank:
        what = f"axis {dim} is out of range for an input of {rank} dims"
        raise failure(name, what, f"an axis from {-rank} to {rank - 1}")
    return dim % rank


def refuse(name: str, faults: Faults) -> None:
    """Raise StrategyError for the first fault."""
    for what, fix in faults:
        raise failure(name, what, fix)


def failure(name: str, what: str, fix: str) -> StrategyError:
    return StrategyError(problem(f"{name}: {what}", op=name, fix=fix))
