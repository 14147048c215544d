"""Queries of operator schemas: short names, arguments by name, written arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

import torch
from torch._ops import OpOverload

from shardwise.graph.ir import Arg, Ref

Entry = TypeVar("Entry")


class AnyCall(Protocol):
    """A call of an operator: an ``Op`` of a graph, or a kernel call."""

    @property
    def target(self) -> Any: ...

    @property
    def args(self) -> tuple[Arg, ...]: ...

    @property
    def kwargs(self) -> tuple[tuple[str, Arg], ...]: ...


def operator_name(target: OpOverload) -> str:
    """Return the operator without namespace and overload: ``aten.add.Tensor`` -> ``add``."""
    return str(target._schema.name).rpartition("::")[2]


def aten_operators(names: str) -> Iterator[OpOverload]:
    """Yield the ATen operators of a text such as ``"sum sum.dim_IntList"``; without an overload, the default one."""
    for name in names.split():
        packet, _, overload = name.partition(".")
        yield getattr(getattr(torch.ops.aten, packet), overload or "default")


def by_operator(rows: Mapping[str, Entry], *tables: Mapping[OpOverload, Entry]) -> dict[OpOverload, Entry]:
    """Return a table by operator. ``rows``: ATen operators that have the same entry, by names -> the entry;
    ``tables``: further entries."""
    table = {target: entry for names, entry in rows.items() for target in aten_operators(names)}
    assert len(table) == sum(len(names.split()) for names in rows), "an operator is named twice"
    for further in tables:
        twice = sorted(str(target) for target in table.keys() & further.keys())
        assert not twice, f"operators in two tables: {', '.join(twice)}"
        table |= further
    return table


def arguments(op: AnyCall) -> dict[str, Arg]:
    """Return every argument of the call by its schema name, defaults filled in (list defaults as tuples)."""
    named = dict(op.kwargs)
    bound: dict[str, Arg] = {}
    for position, argument in enumerate(op.target._schema.arguments):
        if position < len(op.args) and not argument.kwarg_only:
            bound[argument.name] = op.args[position]
        elif argument.name in named:
            bound[argument.name] = named[argument.name]
        elif argument.has_default_value():
            default = argument.default_value
            bound[argument.name] = tuple(default) if isinstance(default, list) else default
    return bound


def filled(arg: Arg, of: Callable[[str], Any]) -> Any:
    """Return the argument with ``of(name)`` in place of every Ref, and lists in place of tuples."""
    if isinstance(arg, Ref):
        return of(arg.name)
    return [filled(item, of) for item in arg] if isinstance(arg, tuple) else arg


def run_call(call: AnyCall, of: Callable[[str], Any]) -> Any:
    """Run a call with ``of(name)`` in place of every Ref."""
    return call.target(*filled(call.args, of), **{key: filled(arg, of) for key, arg in call.kwargs})


def written_arguments(target: OpOverload) -> tuple[str, ...]:
    """Return the names of the arguments that the operator changes in place."""
    return tuple(a.name for a in target._schema.arguments if a.alias_info is not None and a.alias_info.is_write)


def is_random(target: OpOverload) -> bool:
    """Return whether the operator draws from a random number generator."""
    return torch.Tag.nondeterministic_seeded in target.tags


def draws_nothing(op: AnyCall) -> bool:
    """Return whether a call of a random operator draws no number."""
    args = arguments(op)
    return args.get("dropout_p", 1) == 0 or args.get("dropout", 1) == 0 or args.get("train") is False


def is_view(target: OpOverload) -> bool:
    """Return whether the schema declares that results share memory with an operand."""
    returns = target._schema.returns
    return any(result.alias_info is not None and not result.alias_info.is_write for result in returns)


def may_be_view(target: OpOverload) -> bool:
    """Return whether results may share memory with an operand. Includes composite operators whose schema does not
    declare it (atleast_1d, einsum and cartesian_prod may return their operand)."""
    return is_view(target) or target.has_kernel_for_dispatch_key(torch.DispatchKey.CompositeImplicitAutograd)


def returns_one_tensor(target: OpOverload) -> bool:
    """Return whether a call's result is a tensor, not a tuple or a list of tensors."""
    returns = target._schema.returns
    return len(returns) == 1 and str(returns[0].type) == "Tensor"


def is_symbolic(value: Any) -> bool:
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


def has_symbols(value: Any) -> bool:
    """Return whether a value, or a size of a tensor, is symbolic."""
    if isinstance(value, (tuple, list)):
        return any(map(has_symbols, value))
    if isinstance(value, torch.Tensor):
        return any(isinstance(size, torch.SymInt) for size in value.shape)
    return is_symbolic(value)


def tensor_results(result: Any) -> list[torch.Tensor]:
    """Return the tensors that a call returned, in order."""
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, (tuple, list)):
        return [tensor for item in result for tensor in tensor_results(item)]
    return []
