"""A printed program: the common part of both files; and the origins of its operators: scopes, lines of the user's
files, and the primitives called there."""

from __future__ import annotations

import ast
import inspect
import linecache
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload

from shardwise.mindspore.holding import checkpoint_buffers, checkpoint_names
from shardwise.mindspore.library import Graph, Op, Ref, Source
from shardwise.mindspore.named import TABLES
from shardwise.mindspore.ops.primitive import Primitive

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


# -- origins -----------------------------------------------------------------------------------------------------------

# PyTorch operators whose name in the reference is not their CamelCase name.
OPERATORS = dict(row.split("=") for row in TABLES["ir"]["operators"].split())


def operator(target: OpOverload) -> str:
    """Return the reference's name of an operator; operators that it lacks get their torch name in CamelCase."""
    name = target._schema.name.partition("::")[2]
    return OPERATORS.get(name) or "".join(part[:1].upper() + part[1:] for part in name.split("_"))


class Origins:
    """The scopes, source lines and primitives of the operators of a cell's graph."""

    def __init__(self, cell: nn.Module, graph: Graph) -> None:
        self.cell, self.graph = cell, graph
        # in training it is the network of a TrainOneStepCell
        self.root = f"Default/network-{type(cell).__name__}" if cell.training else "Default"

    def scope(self, op: str) -> str:
        """Return the cells around an operator: ``Default/network-WithLossCell/_backbone-Net``."""
        parts, at = [self.root], self.cell
        for leaf in filter(None, op.rpartition("/")[0].split(".")):
            at = getattr(at, leaf)
            parts.append(f"{leaf}-{type(at).__name__}")
        return "/".join(parts)

    def key(self, source: Source) -> str:
        """Return the name of a parameter in checkpoints, or of another source in the call."""
        name = source.names[0] if source.names else source.value
        if source.kind not in ("parameter", "buffer"):
            return name
        owner, _, leaf = name.rpartition(".")
        return self._checkpoint_names.get(id(getattr(self.cell.get_submodule(owner), leaf, None)), name)

    def code(self, source: str) -> tuple[str, ...]:
        """Return ``/home/me/net.py(45)/ out = self.matmul(x, self.weight)`` for ``net.py:45``."""
        name, _, line = source.rpartition(":")
        if not name:
            return ()
        path = self._files.get(name, name)
        return (f"{path}({line})/ {linecache.getline(path, int(line)).strip()}",)

    def variable(self, source: str) -> str:
        """Return the variable to which a line of code assigns, or ''."""
        matches = [re.match(r"\s*(\w+)\s*=[^=]", code.partition(")/")[2]) for code in self.code(source)]
        return matches[0][1] if matches and matches[0] else ""

    @cached_property
    def _checkpoint_names(self) -> dict[int, str]:
        named = {**checkpoint_names(self.cell), **checkpoint_buffers(self.cell)}
        return {id(tensor): name for name, tensor in named.items()}

    @cached_property
    def primitives(self) -> dict[str, tuple[str, Primitive | None]]:
        """Return for each operator the name of the primitive that called it, and the primitive.

        A primitive with a strategy leaves its name in the graph. Others are found by the source line: the calls of
        primitives in it, in Python's evaluation order, are matched with the line's operators of these names. The
        primitive is None if it makes several operators and this one has another name.
        """
        primitive_of: dict[str, tuple[str, Primitive | None]] = {}
        lines: dict[tuple[str, str], list[Op]] = {}
        shown = [op for op in self.graph.ops if not is_marker(op)]
        for op in self.graph.ops:
            if op.scope.startswith(f"{op.module}/"):
                name, attributes = op.scope.removeprefix(f"{op.module}/"), self._primitives_of(op.module)
                name = name if name in attributes else re.sub(r"_\d+$", "", name)
                primitive = attributes.get(name)
                is_alone = sum(other.scope == op.scope for other in shown) == 1
                is_own = is_alone or (primitive is not None and operator(op.target) == primitive.name)
                primitive_of[op.name] = name, primitive if is_own else None
            elif op.source:
                lines.setdefault((op.module, op.source), []).append(op)
        for (module, source), ops in lines.items():
            attributes = self._primitives_of(module)
            called = [(name, attributes[name]) for name in self._called(source) if name in attributes]
            called = [item for item in called if item[1].in_strategy is None]
            shown = [op for op in ops if not is_marker(op)]
            for op in ops:
                same = [item for item in called if item[1].name == operator(op.target)]
                if not same and len(called) == 1 and shown == [op]:
                    same = called
                if same:
                    primitive_of[op.name] = same[0]
                    called.remove(same[0])
        return primitive_of

    def _primitives_of(self, module: str) -> dict[str, Primitive]:
        return {k: v for k, v in vars(self.cell.get_submodule(module)).items() if isinstance(v, Primitive)}

    def _called(self, source: str) -> list[str]:
        """Return the attributes of ``self`` that a line calls, in order."""
        name, _, line = source.rpartition(":")
        return _calls(self._files[name]).get(int(line), []) if name in self._files else []

    @cached_property
    def _files(self) -> dict[str, str]:
        files: dict[str, str] = {}
        for kind in dict.fromkeys(base for module in self.cell.modules() for base in type(module).__mro__[:-1]):
            with suppress(TypeError):  # a class without a source file
                path = Path(inspect.getsourcefile(kind) or "")
                files.setdefault(path.name, str(path.absolute()))
        return files


@lru_cache(maxsize=64)
def _calls(path: str) -> dict[int, list[str]]:
    """Return for each line the attributes of ``self`` called there, in evaluation order: arguments before the call that
    takes them."""
    calls: dict[int, list[str]] = {}

    def visit(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            visit(child)
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="self"), attr=name)):
                calls.setdefault(node.lineno, []).append(name)

    visit(ast.parse("".join(linecache.getlines(path))))
    return calls


def is_marker(op: Op) -> bool:
    """Return whether an operator only carries the user's annotation of a value."""
    return str(op.target) == "aten.alias.default"
