"""Printed operators and their text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardwise.mindspore.library import Ref

Strategy = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Line:
    """A printed operator. ``operands``: Refs to values, and constants; ``results``: the values that it defines.
    ``variable``: the user's variable; ``code``: lines of source code, innermost first."""

    operator: str
    operands: tuple[Any, ...]
    operand_types: tuple[str, ...]
    results: tuple[str, ...]
    result_types: tuple[str, ...]
    scope: str
    instance: str = ""
    attrs: Mapping[str, Any] = field(default_factory=dict)
    in_strategy: Strategy | None = None
    variable: str = ""
    code: tuple[str, ...] = ()


class Numbers:
    """Numbering of values: parameters of the graph ``%para1_w``, results of operators ``%1``, ``%2``, ....

    ``parameters``: value -> its name in the program.
    """

    def __init__(self, parameters: Mapping[str, str]) -> None:
        self._texts = {value: f"%para{i}_{name}" for i, (value, name) in enumerate(parameters.items(), 1)}
        self._count = 0

    def define(self, results: tuple[str, ...]) -> str:
        self._count += 1
        text = f"%{self._count}"
        several = len(results) > 1
        self._texts.update({name: f"{text}[{i}]" if several else text for i, name in enumerate(results)})
        return text

    def text(self, operand: Any) -> str:
        if isinstance(operand, Ref):
            return self._texts[operand.name]
        if isinstance(operand, tuple):
            inner = ", ".join(map(self.text, operand))
            return f"({inner},)" if len(operand) == 1 else f"({inner})"
        return attribute(operand)


def written(lines: Sequence[Line], numbers: Numbers) -> Iterator[str]:
    """Yield the text of operators."""
    for line in lines:
        operands = ", ".join(map(numbers.text, line.operands))
        parts = [f"{numbers.define(line.results)}({line.variable or line.results[0]}) = {line.operator}({operands})"]
        if line.instance:
            parts.append(f"{{instance name: {line.instance}}}")
        if line.attrs:
            inner = ", ".join(f"{name}: {attribute(value)}" for name, value in line.attrs.items())
            parts.append(f"primitive_attrs: {{{inner}}}")
        if line.in_strategy is not None:
            parts.append(f"{{in_strategy: {line.in_strategy}}}")
        yield "  " + " ".join(parts)
        yield f"      : ({', '.join(line.operand_types)}) -> ({', '.join(line.result_types)})"
        yield f"      # scope: ({line.scope})"
        yield from (f"      # In file {code}/" for code in line.code)


def attribute(value: Any) -> str:
    """Return the text of an attribute: names of a list without quotes, booleans in lower case."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(str, value))}]"
    return str(value)
