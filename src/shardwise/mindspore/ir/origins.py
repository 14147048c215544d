"""Origins of printed operators: scopes, lines of the user's files, and the primitives called there."""

from __future__ import annotations

import ast
import inspect
import linecache
import re
from contextlib import suppress
from functools import cached_property, lru_cache
from pathlib import Path

from torch import nn
from torch._ops import OpOverload

from shardwise.mindspore.holding import checkpoint_buffers, checkpoint_names
from shardwise.mindspore.library import Graph, Op, Source
from shardwise.mindspore.named import TABLES
from shardwise.mindspore.ops.primitive import Primitive

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
