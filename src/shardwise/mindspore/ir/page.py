"""A printed program: the common part of both files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from shardwise.mindspore.ir import names
from shardwise.mindspore.ir.origins import Origins, is_marker
from shardwise.mindspore.library import Graph, Op, Ref, map_refs

Shape = tuple[int, ...]
Strategy = tuple[tuple[int, ...], ...]


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
            types = (names.reference(dtype, shape, key), "<UMonad>")  # "U" orders reads and writes in the reference
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
        attrs |= {"input_names": list(names.inputs(op.target, len(args))), "output_names": ["output"]}
        operator = names.operator(op.target) if primitive is None else primitive.name
        self.add(
            operator, args, op.results, tuple(self.graph.by_name[name].dtype for name in op.results),
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
        result_types = ", ".join(names.tensor(*self._types[name]) for name in results)
        self._lines += [
            "  " + " ".join(parts), f"      : ({', '.join(types)}) -> ({result_types})", f"      # scope: ({scope})",
            *(f"      # In file {line}/" for line in code),
        ]  # fmt: skip

    def _type(self, arg: Any) -> str:
        if isinstance(arg, Ref):
            return names.tensor(*self._types[arg.name])
        if isinstance(arg, tuple) and any(isinstance(item, Ref) for item in arg):
            return f"<Tuple[{', '.join(map(self._type, arg))}]>"
        return names.constant(arg)

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
            shown = names.reference(dtype, shape, key) if is_reference else names.tensor(dtype, shape)
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
