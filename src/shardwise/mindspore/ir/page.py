"""A printed program: the common part of both files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from shardwise.mindspore.communication.management import gnu_hash
from shardwise.mindspore.ir.origins import Origins, is_marker, operator
from shardwise.mindspore.library import Graph, Op, Ref, map_refs

Shape = tuple[int, ...]
Strategy = tuple[tuple[int, ...], ...]


# The reference's names of an operator's inputs.
INPUTS = {"MatMul": ("x1", "x2"), "BatchMatMul": ("x1", "x2"), "ReLU": ("x",)}
TYPES = {torch.bfloat16: "BFloat16", torch.uint8: "UInt8"}
COLLECTIVES = {
    "all_reduce": "AllReduce", "all_gather": "AllGather", "reduce_scatter": "ReduceScatter", "all_to_all": "AlltoAll",
    "collective_permute": "NeighborExchange", "halo_exchange": "NeighborExchangeV2",
}  # fmt: skip


class Page:
    """The lines of a program. Parameters of the graph are numbered ``%para1_w``, results of operators ``%1``, ``%2``.
    Parameters are loaded where they are first used.

    ``shapes``: those of its sources, whole or local. ``strategies``: operator -> split counts of its tensors.
    """

    def __init__(
        self, graph: Graph, shapes: Mapping[str, Shape], strategies: Mapping[str, Strategy], origins: Origins
    ) -> None:
        self.graph, self.strategies, self.origins = graph, strategies, origins
        self.keys = {source.value: origins.key(source) for source in graph.sources}
        self._kinds = {source.value: source.kind for source in graph.sources}
        self._types = {name: (graph.by_name[name].dtype, shape) for name, shape in shapes.items()}
        self._printed_as: dict[str, str] = {}
        self._numbers = {value: f"%para{i}_{name}" for i, (value, name) in enumerate(self.keys.items(), 1)}
        self._lines: list[str] = []
        self._count = 0

    def use(self, name: str) -> str:
        """Return the name under which a value is printed. A parameter is loaded first."""
        while name in self._printed_as:
            name = self._printed_as[name]
        if self._kinds.get(name) in ("parameter", "buffer"):
            key, (dtype, shape) = self.keys[name], self._types[name]
            self._printed_as[name] = result = f"{key}, loaded"
            self._types[result] = dtype, shape
            types = (reference_text(dtype, shape, key), "<UMonad>")  # "U" orders reads and writes in the reference
            self._print("Load", (Ref(name), "U"), types, (result,), self.origins.root, variable=key)
            return result
        return name

    def same(self, result: str, value: str) -> None:
        """Make ``result`` another name of a value."""
        self._printed_as[result] = value

    def call(self, op: Op, args: tuple[Any, ...], shapes: tuple[Shape, ...]) -> None:
        """Print an operator. ``args``: its arguments, tensors as Refs; ``shapes``: those of its results."""
        if is_marker(op):
            self.same(op.results[0], op.operands[0])
            return
        instance, primitive = self.origins.primitives.get(op.name, ("", None))
        attrs: dict[str, Any] = {} if primitive is None else dict(primitive.attrs)
        attrs |= {"input_names": list(inputs(op.target, len(args))), "output_names": ["output"]}
        name = operator(op.target) if primitive is None else primitive.name
        self.add(
            name, args, op.results, tuple(self.graph.by_name[name].dtype for name in op.results),
            shapes, self.origins.scope(op.name), instance=instance, attrs=attrs,
            in_strategy=self.strategies.get(op.name), variable=self.origins.variable(op.source),
            code=self.origins.code(op.source),
        )  # fmt: skip

    def add(
        self, operator: str, args: tuple[Any, ...], results: tuple[str, ...], dtypes: tuple[torch.dtype, ...],
        shapes: tuple[Shape, ...], scope: str, **details: Any,
    ) -> None:  # fmt: skip
        """Print an operator by its name, with values as Refs among its arguments."""
        used = tuple(map_refs(arg, lambda name: Ref(self.use(name))) for arg in args)
        types = tuple(map(self._type, used))
        self._types.update(zip(results, zip(dtypes, shapes, strict=True), strict=True))
        self._print(operator, used, types, results, scope, **details)

    def _print(
        self, operator: str, operands: tuple[Any, ...], types: Sequence[str], results: tuple[str, ...], scope: str,
        instance: str = "", attrs: Mapping[str, Any] | None = None, in_strategy: Strategy | None = None,
        variable: str = "", code: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """``variable``: the user's variable; ``code``: lines of source code, innermost first."""
        inputs, self._count = ", ".join(map(self._text, operands)), self._count + 1
        number = f"%{self._count}"
        self._numbers |= {name: f"{number}[{i}]" if len(results) > 1 else number for i, name in enumerate(results)}
        parts = [f"{number}({variable or results[0]}) = {operator}({inputs})"]
        if instance:
            parts.append(f"{{instance name: {instance}}}")
        if attrs:
            inner = ", ".join(f"{name}: {attribute(value)}" for name, value in attrs.items())
            parts.append(f"primitive_attrs: {{{inner}}}")
        if in_strategy is not None:
            parts.append(f"{{in_strategy: {in_strategy}}}")
        result_types = ", ".join(tensor_text(*self._types[name]) for name in results)
        self._lines += [
            "  " + " ".join(parts), f"      : ({', '.join(types)}) -> ({result_types})", f"      # scope: ({scope})",
            *(f"      # In file {line}/" for line in code),
        ]  # fmt: skip

    def _type(self, arg: Any) -> str:
        if isinstance(arg, Ref):
            return tensor_text(*self._types[arg.name])
        if isinstance(arg, tuple) and any(isinstance(item, Ref) for item in arg):
            return f"<Tuple[{', '.join(map(self._type, arg))}]>"
        return constant_text(arg)

    def _text(self, operand: Any) -> str:
        if isinstance(operand, Ref):
            return self._numbers[operand.name]
        if isinstance(operand, tuple):
            inner = ", ".join(map(self._text, operand))
            return f"({inner},)" if len(operand) == 1 else f"({inner})"
        return attribute(operand)

    def text(self, outputs: tuple[Any, ...]) -> Iterator[str]:
        """Yield the parameters, the operators and the return statement."""
        for name, key in self.keys.items():
            dtype, shape = self._types[name]
            is_reference = self._kinds[name] in ("parameter", "buffer")
            shown = reference_text(dtype, shape, key) if is_reference else tensor_text(dtype, shape)
            yield f"{self._numbers[name]} : {shown}"
        returned = tuple(map_refs(output, lambda name: Ref(self.use(name))) for output in outputs)
        yield from ("subgraph @construct() {", *self._lines)
        yield f"  Return({', '.join(map(self._text, returned))})"
        yield "}"


def attribute(value: Any) -> str:
    """Return the text of an attribute: names of a list without quotes, booleans in lower case."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"[{', '.join(map(str, value))}]" if isinstance(value, list) else str(value)


def inputs(target: OpOverload, count: int) -> tuple[str, ...]:
    """Return the names of an operator's first inputs."""
    names = tuple("x" if argument.name == "self" else argument.name for argument in target._schema.arguments)
    return INPUTS.get(operator(target), names)[:count]


def dtype_text(of: torch.dtype) -> str:
    return TYPES.get(of) or str(of).removeprefix("torch.").capitalize()


def tensor_text(of: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"<Tensor[{dtype_text(of)}], {shape_text(shape)}>"


def reference_text(of: torch.dtype, shape: tuple[int, ...], key: str) -> str:
    """Return the type of a parameter."""
    return f"<Ref[Tensor[{dtype_text(of)}]], {shape_text(shape)}, ref_key=:{key}>"


def constant_text(value: Any) -> str:
    """Return the type of an operand that is not a tensor."""
    if isinstance(value, tuple):
        kinds = {constant_text(item)[1:-1] for item in value}
        return f"<Tuple[{kinds.pop()}*{len(value)}]>" if len(kinds) == 1 else f"<Tuple*{len(value)}>"
    return {bool: "<Bool>", int: "<Int64>", float: "<Float64>", str: "<String>"}.get(type(value), "<None>")


def shape_text(shape: tuple[int, ...]) -> str:
    """Return ``(16)`` for one dim, as in the reference."""
    return f"({', '.join(map(str, shape))})"


def hashed(*parts: object) -> int:
    """Return the number in the name of an inserted operator. It is the same on every rank and in every run."""
    return gnu_hash(" ".join(map(str, parts)).encode())
