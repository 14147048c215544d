"""A printed program as lines: the common part of both files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from shardwise.mindspore.ir import names
from shardwise.mindspore.ir.lines import Line, Numbers, Strategy, written
from shardwise.mindspore.ir.origins import Origins, is_marker
from shardwise.mindspore.library import Graph, Op, Ref, map_refs

Shape = tuple[int, ...]


class Monad:
    """The operand that orders reads and writes of parameters in the reference."""

    def __str__(self) -> str:
        return "U"


class Page:
    """The lines of a program.

    ``shapes``: those of its sources, whole or local. ``strategies``: operator -> split counts of its tensors.
    Parameters are loaded where they are first used.
    """

    def __init__(
        self, graph: Graph, shapes: Mapping[str, Shape], strategies: Mapping[str, Strategy], origins: Origins
    ) -> None:
        self.graph, self.strategies, self.origins = graph, strategies, origins
        self.lines: list[Line] = []
        self.keys = {source.value: origins.key(source) for source in graph.sources}
        self._kinds = {source.value: source.kind for source in graph.sources}
        self._types = {name: (graph.by_name[name].dtype, shape) for name, shape in shapes.items()}
        self._printed_as: dict[str, str] = {}

    def use(self, name: str) -> str:
        """Return the name under which a value is printed. A parameter is loaded first."""
        while name in self._printed_as:
            name = self._printed_as[name]
        if self._kinds.get(name) in ("parameter", "buffer"):
            key, (dtype, shape) = self.keys[name], self._types[name]
            self._printed_as[name] = result = f"{key}, loaded"
            self._types[result] = dtype, shape
            types = names.reference(dtype, shape, key), "<UMonad>"
            self.lines.append(
                Line("Load", (Ref(name), Monad()), types, (result,), (names.tensor(dtype, shape),), self.origins.root,
                     variable=key)
            )  # fmt: skip
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
        shapes: tuple[Shape, ...], scope: str, **rest: Any,
    ) -> None:  # fmt: skip
        """Print a line."""
        used = tuple(map_refs(arg, lambda name: Ref(self.use(name))) for arg in args)
        self._types.update(zip(results, zip(dtypes, shapes, strict=True), strict=True))
        result_types = tuple(names.tensor(*self._types[name]) for name in results)
        self.lines.append(Line(operator, used, tuple(map(self._type, used)), results, result_types, scope, **rest))

    def _type(self, arg: Any) -> str:
        if isinstance(arg, Ref):
            return names.tensor(*self._types[arg.name])
        if isinstance(arg, tuple) and any(isinstance(item, Ref) for item in arg):
            return f"<Tuple[{', '.join(map(self._type, arg))}]>"
        return names.constant(arg)

    def text(self, outputs: tuple[Any, ...]) -> Iterator[str]:
        """Yield the parameters, the operators and the return statement."""
        numbers = Numbers(self.keys)
        for name, key in self.keys.items():
            dtype, shape = self._types[name]
            is_reference = self._kinds[name] in ("parameter", "buffer")
            shown = names.reference(dtype, shape, key) if is_reference else names.tensor(dtype, shape)
            yield f"{numbers.text(Ref(name))} : {shown}"
        returned = tuple(map_refs(output, lambda name: Ref(self.use(name))) for output in outputs)
        yield "subgraph @construct() {"
        yield from written(self.lines, numbers)
        yield f"  Return({', '.join(map(numbers.text, returned))})"
        yield "}"
