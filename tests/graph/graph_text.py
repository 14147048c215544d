"""Graphs as text, one operator per line, and back.

::

    %up.weight: f32[64, 16] grad = parameter(up.weight) trainable
    %args[0]: f32[8, 16] = input(args[0])
    %linear: f32[8, 64] grad = aten.linear.default(%args[0], %up.weight)  # up/linear model.py:41
    return %linear

``parse_graph(format_graph(graph)) == graph`` for every graph whose values are in order of definition.
"""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn, get_args

import torch
from torch._ops import OpOverload

from shardwise.errors import NotationError, caret
from shardwise.graph.ir import Arg, Graph, Op, Ref, Source, SourceKind, Value
from shardwise.graph.trees import NotCarried

_DTYPES = {
    "f64": torch.float64, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16,
    "i64": torch.int64, "i32": torch.int32, "i16": torch.int16, "i8": torch.int8, "u8": torch.uint8, "bool": torch.bool,
    "c64": torch.complex64, "c128": torch.complex128,
}  # fmt: skip
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
# Words that stand for torch constants in arguments: torch.float32, torch.strided, torch.contiguous_format.
_CONSTANT_TYPES = (torch.dtype, torch.layout, torch.memory_format)
_NAME = r"[\w.@/\-<>]+(?:\[(?:'[\w.\-]*'|\d+)\][\w.@/\-]*)*"
_NUMBER = r"[-+]?(?:\d+(?:\.\d*)?(?:e[-+]?\d+)?|inf|nan)(?![\w.])"


def format_graph(graph: Graph) -> str:
    """Return the graph as text that ends in a line break."""
    lines = [_format_source(source, graph) for source in graph.sources]
    lines += [_format_op(op, graph) for op in graph.ops]
    lines.append(("return " + ", ".join(map(_format_arg, graph.outputs))).rstrip())
    if graph.loss is not None:
        lines.append(f"loss {_value(graph.loss)}")
    if graph.cotangents is not None:
        lines.append(("cotangents " + ", ".join(map(_value, graph.cotangents))).rstrip())
    lines += [f"mutate {_value(buffer)} = {_value(name)}" for buffer, name in graph.mutations]
    lines += [f"constrain {_value(name)} {json.dumps(text)}" for name, text in graph.constraints]
    return "\n".join(lines) + "\n"


def format_type(value: Value) -> str:
    """Return a type such as ``f32[64, 2304]``, with ``grad`` if a gradient flows through the value, and the dtypes in
    which a source is ``stored`` or ``reduced`` if these differ."""
    dtype = _DTYPE_NAMES.get(value.dtype, str(value.dtype).removeprefix("torch."))
    others = (("stored", value.stored), ("reduced", value.reduced))
    dtypes = "".join(f" {word} {_DTYPE_NAMES[dtype]}" for word, dtype in others if dtype is not None)
    return f"{dtype}{list(value.shape)}" + (" grad" if value.requires_grad else "") + dtypes


def _format_source(source: Source, graph: Graph) -> str:
    names = ", ".join(map(_quoted, source.names))
    trainable = " trainable" if source.trainable else ""
    return f"{_value(source.value)}: {format_type(graph.by_name[source.value])} = {source.kind}({names}){trainable}"


def _format_op(op: Op, graph: Graph) -> str:
    results = ", ".join(f"{_value(name)}: {format_type(graph.by_name[name])}" for name in op.results)
    args = [_format_arg(arg) for arg in op.args] + [f"{key}={_format_arg(arg)}" for key, arg in op.kwargs]
    words = [op.name, op.source, op.scope]
    while words and not words[-1]:
        words.pop()
    return f"{results} = {op.target}({', '.join(args)})" + ("  # " + " ".join(map(_quoted, words)) if words else "")


def _format_arg(arg: Arg) -> str:
    if isinstance(arg, Ref):
        return _value(arg.name)
    if isinstance(arg, tuple):
        return "[" + ", ".join(map(_format_arg, arg)) + "]"
    if isinstance(arg, str):
        return json.dumps(arg)
    if isinstance(arg, torch.device):
        return f"device({json.dumps(str(arg))})"
    if isinstance(arg, complex):
        return f"complex({arg.real!r}, {arg.imag!r})"
    if isinstance(arg, NotCarried):
        return "not_carried(" + ", ".join(map(json.dumps, arg.__reduce__()[1])) + ")"
    return str(arg) if arg is None or isinstance(arg, (bool, *_CONSTANT_TYPES)) else repr(arg)


def _quoted(name: str) -> str:
    return name if re.fullmatch(rf"{_NAME}(?::\d+)?", name) else json.dumps(name)


def _value(name: str) -> str:
    return "%" + (name if re.fullmatch(_NAME, name) else json.dumps(name))


def parse_graph(text: str) -> Graph:
    """Parse a graph. Raises NotationError with the line and a caret."""
    values: list[Value] = []
    sources: list[Source] = []
    ops: list[Op] = []
    outputs: tuple[Arg, ...] = ()
    loss: str | None = None
    mutations: list[tuple[str, str]] = []
    constraints: list[tuple[str, str]] = []
    cotangents: tuple[str, ...] | None = None
    for line in text.splitlines():
        cursor = _Cursor(line)
        if cursor.done():
            continue
        if cursor.skip("return"):
            outputs = () if cursor.done() else cursor.list_of(cursor.arg, "")
        elif cursor.skip("loss"):
            loss = cursor.value()
        elif cursor.skip("cotangents"):
            cotangents = () if cursor.done() else cursor.list_of(cursor.value, "")
        elif cursor.skip("mutate"):
            buffer = cursor.value()
            cursor.expect("=")
            mutations.append((buffer, cursor.value()))
        elif cursor.skip("constrain"):
            constraints.append((cursor.value(), cursor.string()))
        else:
            results = cursor.list_of(cursor.typed_value, "=")
            values.extend(results)
            parsed = cursor.source_or_op(results)
            if isinstance(parsed, Source):
                sources.append(parsed)
            else:
                ops.append(parsed)
        if not cursor.done():
            cursor.fail("expected the end of the line")
    return Graph(
        tuple(values), tuple(sources), tuple(ops), outputs, loss, tuple(mutations), tuple(constraints), cotangents
    )


class _Cursor:
    """A position in one line."""

    def __init__(self, line: str) -> None:
        self._line = line
        self._at = 0

    def done(self) -> bool:
        self._space()
        return self._at == len(self._line)

    def fail(self, message: str) -> NoReturn:
        raise NotationError(caret(self._line, self._at, message))

    def _space(self) -> None:
        while self._at < len(self._line) and self._line[self._at] == " ":
            self._at += 1

    def match(self, pattern: str) -> re.Match[str] | None:
        self._space()
        matched = re.compile(pattern).match(self._line, self._at)
        if matched is not None:
            self._at = matched.end()
        return matched

    def skip(self, word: str) -> bool:
        return self.match(re.escape(word) + (r"(?![\w.])" if word[-1].isalpha() else "")) is not None

    def expect(self, word: str) -> None:
        if not self.skip(word):
            self.fail(f"expected {word!r}")

    def list_of(self, item: Any, end: str) -> tuple[Any, ...]:
        """Parse comma-separated items up to ``end``, which is consumed; without ``end``, while commas follow."""
        items = []
        if end and self.skip(end):
            return ()
        while True:
            items.append(item())
            if not self.skip(","):
                break
        if end:
            self.expect(end)
        return tuple(items)

    def string(self) -> str:
        matched = self.match(r'"(?:[^"\\]|\\.)*"')
        if matched is None:
            self.fail("expected a quoted text")
        return str(json.loads(matched.group()))

    def name(self, what: str = "a name") -> str:
        if self._line[self._at : self._at + 1] == '"':
            return self.string()
        matched = self.match(rf"{_NAME}(?::\d+)?")
        if matched is None:
            self.fail(f"expected {what}")
        return matched.group()

    def value(self) -> str:
        self.expect("%")
        if self._line[self._at : self._at + 1] == '"':
            return self.string()
        matched = self.match(_NAME)
        if matched is None:
            self.fail("expected the name of a value")
        return matched.group()

    def typed_value(self) -> Value:
        name = self.value()
        self.expect(":")
        dtype = self._dtype()
        self.expect("[")
        shape, grad = self.list_of(self._size, "]"), self.skip("grad")
        stored, reduced = (self._dtype() if self.skip(word) else None for word in ("stored", "reduced"))
        return Value(name, shape, dtype, grad, stored, reduced)

    def _dtype(self) -> torch.dtype:
        dtype = self.match(r"\w+")
        parsed = None if dtype is None else _DTYPES.get(dtype.group()) or getattr(torch, dtype.group(), None)
        if not isinstance(parsed, torch.dtype):
            self.fail("expected a dtype such as f32")
        return parsed

    def _size(self) -> int:
        matched = self.match(r"\d+")
        if matched is None:
            self.fail("expected a size")
        return int(matched.group())

    def source_or_op(self, results: tuple[Value, ...]) -> Source | Op:
        matched = self.match(r"[\w:]+(?:\.\w+)*")
        if matched is None:
            self.fail("expected an operator such as aten.mm.default, or a kind of source")
        word = matched.group()
        self.expect("(")
        if word in get_args(SourceKind):
            kind: Any = word
            names = self.list_of(self._spaced_name, ")")
            return Source(results[0].name, kind, names, self.skip("trainable"))
        target = self._operator(word)
        args: list[Arg] = []
        kwargs: list[tuple[str, Arg]] = []

        def argument() -> None:
            keyword = self.match(r"([A-Za-z_]\w*)=")
            if keyword is None:
                args.append(self.arg())
            else:
                kwargs.append((keyword.group(1), self.arg()))

        self.list_of(argument, ")")
        words = ["", "", ""]
        if self.skip("#"):
            for i in range(3):
                if not self.done():
                    words[i] = self.name("the operator's name, source and scope")
        name, source, scope = words
        return Op(name, target, tuple(args), tuple(kwargs), tuple(value.name for value in results), source, scope)

    def _spaced_string(self) -> str:
        self._space()
        return self.string()

    def _spaced_name(self) -> str:
        self._space()
        return self.name()

    def _operator(self, path: str) -> OpOverload:
        target: Any = torch.ops
        for part in path.split("."):
            target = getattr(target, part, None)
        if not isinstance(target, OpOverload):
            self.fail(f"{path} is not an operator")
        return target

    def arg(self) -> Arg:
        self._space()
        if self._line[self._at : self._at + 1] == "%":
            return Ref(self.value())
        if self.skip("["):
            return self.list_of(self.arg, "]")
        if self._line[self._at : self._at + 1] == '"':
            return self.string()
        for word, constant in (("None", None), ("True", True), ("False", False)):
            if self.skip(word):
                return constant
        if self.skip("device"):
            self.expect("(")
            device = torch.device(self.string())
            self.expect(")")
            return device
        if self.skip("complex"):
            self.expect("(")
            parts = self.list_of(self._number, ")")
            return complex(*parts)
        if self.skip("not_carried"):
            self.expect("(")
            return NotCarried(*self.list_of(self._spaced_string, ")"))
        named = self.match(r"torch\.(\w+)")
        if named is not None:
            constant = getattr(torch, named.group(1), None)
            if not isinstance(constant, _CONSTANT_TYPES):
                self.fail(f"{named.group()} is not a dtype, layout or memory format")
            return constant
        return self._number()

    def _number(self) -> int | float:
        matched = self.match(_NUMBER)
        if matched is None:
            self.fail("expected an argument")
        text = matched.group()
        return int(text) if re.fullmatch(r"[-+]?\d+", text) else float(text)
