"""Reads printed programs back."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

SIZES = {"Float64": 8, "Float32": 4, "Float16": 2, "BFloat16": 2, "Int64": 8, "Int32": 4, "Bool": 1}
KINDS = {
    "AllReduce": "all_reduce", "AllGather": "all_gather", "ReduceScatter": "reduce_scatter", "AlltoAll": "all_to_all",
    "NeighborExchange": "collective_permute", "NeighborExchangeV2": "halo_exchange",
}  # fmt: skip
Tensors = tuple[tuple[str, tuple[int, ...]], ...]  # dtype and shape of each


@dataclass(frozen=True)
class Read:
    variable: str
    operator: str
    operands: str
    instance: str
    attrs: dict[str, str]
    in_strategy: Any
    given: Tensors
    made: Tensors
    scope: str
    code: tuple[str, ...]

    @property
    def shapes(self) -> list[list[int]]:
        return [list(shape) for _, shape in self.given]

    @property
    def shape(self) -> list[int]:
        return list(self.made[0][1])

    @property
    def message(self) -> tuple[str, tuple[int, ...], int]:
        if "send_bytes" in self.attrs:
            return KINDS[self.operator], ast.literal_eval(self.attrs["rank_list"]), int(self.attrs["send_bytes"])
        tensors = self.made if self.operator == "AllGather" else self.given
        num_bytes = sum(SIZES[dtype] * prod(shape) for dtype, shape in tensors)
        return KINDS[self.operator], ast.literal_eval(self.attrs["rank_list"]), num_bytes


HEAD = re.compile(
    r"  %\d+\((?P<variable>.*?)\) = (?P<operator>\w+)\((?P<operands>.*?)\)"
    r"(?: \{instance name: (?P<instance>[^}]*)\})?(?: primitive_attrs: \{(?P<attrs>.*?)\})?"
    r"(?: \{in_strategy: (?P<strategy>.*)\})?"
)
TENSOR = re.compile(r"<Tensor\[(\w+)\], \(([\d, ]*)\)>")
BACKWARD = re.compile(r"#   (\w+) \{(.*)\} (\d+) bytes")


def read(path: Path) -> list[Read]:
    found: list[Read] = []
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines):
        if not line.startswith("  %"):
            continue
        head = HEAD.fullmatch(line)
        assert head, line
        given, _, made = lines[number + 1].partition("->")
        (scope,) = re.findall(r"# scope: \((.*)\)$", lines[number + 2])
        code = []
        for own in lines[number + 3 :]:
            if not own.startswith("      # In file "):
                break
            code.append(own.strip())
        strategy = ast.literal_eval(head["strategy"]) if head["strategy"] else None
        found.append(
            Read(*head.group("variable", "operator", "operands"), head["instance"] or "",
                 attributes(head["attrs"] or ""), strategy, tensors(given), tensors(made), scope, tuple(code))
        )  # fmt: skip
    return found


def attributes(text: str) -> dict[str, str]:
    return dict(re.findall(r"(\w+): ((?:\([^:]*\))|\[[^]]*\]|[^,]+)(?:, |$)", text))


def tensors(text: str) -> Tensors:
    return tuple((dtype, tuple(map(int, filter(None, dims.split(","))))) for dtype, dims in TENSOR.findall(text))


def backward(path: Path) -> list[tuple[str, tuple[int, ...], int]]:
    return [
        (KINDS[operator], ast.literal_eval(attributes(attrs)["rank_list"]), int(num_bytes))
        for operator, attrs, num_bytes in BACKWARD.findall(path.read_text())
    ]
