"""Sections of compiled programs that run kernel by kernel: no code is generated, which takes long."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, fx


def interpret_section(
    module: fx.GraphModule, operands: Sequence[Tensor], fixed: Sequence[int]
) -> tuple[Callable[[list[Tensor]], Sequence[Tensor]], Sequence[tuple[int, ...] | None]]:
    return fx.Interpreter(module).boxed_run, [None] * len(module.graph.output_node().args[0])  # type: ignore[arg-type]
