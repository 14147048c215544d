"""A printed program: the common part of both files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.mindspore.ir.origins import Origins, is_marker, operator
from shardwise.mindspore.library import Graph, Op, Ref

Shape = tuple[int, ...]
Strategy = tuple[tuple[int, ...], ...]

INPUTS = {"MatMul": ("x1", "x2"), "BatchMatMul": ("x1", "x2"), "ReLU": ("x",)}  # the reference's names of inputs
TYPES = {torch.bfloat16: "BFloat16", torch.uint8: "UInt8"}
CONSTANTS = {bool: "Bool", int: "Int64", float: "Float64", str: "String"}


@dataclass
class _Value:
    """A printed value: its text and type. ``reference``: its type as a parameter that is not loaded yet, else empty."""

    text: str
    type: str
    reference: str = ""


class Page:
    """The lines of a program. Parameters of the graph are numbered ``%para1_w``, results of operators ``%1``, ``%2``.
    Parameters are loaded where they are first used.

    ``shape_of``: shapes of its sources, whole or local. ``strategies``: operator -> split counts of its tensors.
    """

    def __init__(
        self, graph: Graph, shape_of: Callable[[str], Shape], strategies: Mapping[str, Strategy], origins: Origins
    ) -> None:
        self.graph, self.strategies, self.origins = graph, strategies, origins
        self._values: dict[str, _Value] = {}
        self._parameters: list[str] = []
        self._lines: list[str] = []
        self._count = 0
        for number, source in enumerate(graph.sources, 1):
            key, name = origins.key(source), source.value
            kind = tensor_text(graph.by_name[name].dtype, shape_of(name))
            is_loaded = source.kind in ("parameter", "buffer")
            reference = f"<Ref[{kind[1:].replace(',', '],', 1)[:-1]}, ref_key=:{key}>" if is_loaded else ""
            self._values[name] = value = _Value(f"%para{number}_{key}", kind, reference)
            self._parameters.append(f"{value.text} : {reference or kind}")

    def same(self, result: str, value: str) -> None:
        """Make ``result`` another name of a value."""
        self._values[result] = self._values[value]

    def call(self, op: Op, args: tuple[Any, ...], shapes: tuple[Shape, ...]) -> None:
        """Print an operator. ``args``: its arguments, tensors as Refs; ``shapes``: those of its results."""
        if is_marker(op):
            self.same(op.results[0], op.operands[0])
            return
        instance, primitive = self.origins.primitives.get(op.name, ("", None))
        name = operator(op.target)
        schema = ("x" if argument.name == "self" else argument.name for argument in op.target._schema.arguments)
        attrs = {"input_names": [*INPUTS.get(name, schema)][: len(args)], "output_names": ["output"]}
        dtypes = [self.graph.by_name[result].dtype for result in op.results]
        self.add(
            name if primitive is None else primitive.name, args,
            dict(zip(op.results, map(tensor_text, dtypes, shapes), strict=True)), self.origins.scope(op.name),
            instance=instance, attrs=attrs if primitive is None else {**primitive.attrs, **attrs},
            in_strategy=self.strategies.get(op.name), variable=self.origins.variable(op.source),
            code=self.origins.code(op.source),
        )  # fmt: skip

    def add(self, operator: str, args: Sequence[Any], results: Mapping[str, str], scope: str, **details: Any) -> None:
        """Print an operator by its name, with values as Refs among its arguments. ``results``: value -> type."""
        details["variable"] = details.get("variable") or next(iter(results))
        operands = [self._shown(arg) for arg in args]
        texts = self._print(operator, operands, [*results.values()], scope, **details)
        for text, (name, kind) in zip(texts, results.items(), strict=True):
            self._values[name] = _Value(text, kind)

    def _print(
        self, operator: str, operands: Sequence[tuple[str, str]], types: Sequence[str], scope: str, *, variable: str,
        instance: str = "", attrs: Mapping[str, Any] | None = None, in_strategy: Strategy | None = None,
        code: Sequence[str] = (),
    ) -> list[str]:  # fmt: skip
        """Print a line and return the texts of its results. ``operands``: texts and types; ``variable``: the user's
        variable; ``code``: lines of source code, innermost first."""
        self._count += 1
        number = f"%{self._count}"
        inner = ", ".join(f"{name}: {attribute(value)}" for name, value in (attrs or {}).items())
        parts = (
            f"  {number}({variable}) = {operator}({_listed(operands, 0)})",
            f" {{instance name: {instance}}}" if instance else "",
            f" primitive_attrs: {{{inner}}}" if inner else "",
            "" if in_strategy is None else f" {{in_strategy: {in_strategy}}}",
        )
        self._lines += [
            "".join(parts), f"      : ({_listed(operands, 1)}) -> ({', '.join(types)})",
            f"      # scope: ({scope})", *(f"      # In file {line}/" for line in code),
        ]  # fmt: skip
        return [number] if len(types) == 1 else [f"{number}[{i}]" for i in range(len(types))]

    def _shown(self, arg: Any) -> tuple[str, str]:
        """Return the text and the type of an argument. A parameter is loaded first ("U" orders reads and writes)."""
        if isinstance(arg, Ref):
            value = self._values[arg.name]
            if value.reference:
                operands, key = [(value.text, value.reference), ("U", "<UMonad>")], value.text.partition("_")[2]
                (value.text,) = self._print("Load", operands, [value.type], self.origins.root, variable=key)
                value.reference = ""
            return value.text, value.type
        if not isinstance(arg, tuple):
            return attribute(arg), f"<{CONSTANTS.get(type(arg), 'None')}>"
        items = [self._shown(item) for item in arg]
        text = f"({_listed(items, 0)}{',' * (len(items) == 1)})"
        if any(isinstance(item, Ref) for item in arg):
            return text, f"<Tuple[{_listed(items, 1)}]>"
        kinds = {kind[1:-1] for _, kind in items}
        return text, f"<Tuple[{kinds.pop()}*{len(arg)}]>" if len(kinds) == 1 else f"<Tuple*{len(arg)}>"

    def text(self, outputs: tuple[Any, ...]) -> Iterator[str]:
        """Yield the parameters, the operators and the return statement."""
        returned = _listed([self._shown(output) for output in outputs], 0)
        yield from (*self._parameters, "subgraph @construct() {", *self._lines, f"  Return({returned})", "}")


def _listed(items: Sequence[tuple[str, str]], part: int) -> str:
    return ", ".join(item[part] for item in items)


def attribute(value: Any) -> str:
    """Return the text of an attribute: names of a list without quotes, booleans in lower case."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"[{', '.join(map(str, value))}]" if isinstance(value, list) else str(value)


def tensor_text(dtype: torch.dtype, shape: Shape) -> str:
    """Return ``<Tensor[Float32], (16)>``: the reference writes one dim without a comma."""
    kind = TYPES.get(dtype) or str(dtype).removeprefix("torch.").capitalize()
    return f"<Tensor[{kind}], ({', '.join(map(str, shape))})>"
