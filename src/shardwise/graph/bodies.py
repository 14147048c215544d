"""Bodies of repeated layers: nodes traced between ``enter`` and ``leave`` (``graph.repeats``), re-emitted per repeat.

A body must be *closed*: it uses only the operands of its call and values it makes, and only the call's results are used
outside. A body that is not closed, or whose witness has other operators, raises NotRepeated; the model is then captured
without repeats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from shardwise.graph.annotate import REGION
from shardwise.graph.origins import LINE, is_initial, module_path
from shardwise.graph.repeats import ENTER, TracedRepeats, tensor_form
from shardwise.graph.schema import operator_name, tensor_results
from shardwise.graph.segments import SEGMENT
from shardwise.graph.trees import constant_key, is_constant, storage_of

_ASSERTIONS = {
    "_assert_tensor_metadata",
    "_assert_scalar",
    "_assert_async",
    "_functional_assert_scalar",
    "_functional_assert_async",
    "sym_constrain_range",
    "sym_constrain_range_for_size",
}


class NotRepeated(Exception):
    """Raised when layers that look like repeats are not."""


@dataclass(frozen=True)
class Body:
    """The nodes of a call, in order. ``path``: of its module; ``prefix``: path of the wrapper around the model."""

    path: str
    prefix: str
    operands: tuple[Node, ...]
    nodes: tuple[Node, ...]
    results: tuple[Node, ...]

    @staticmethod
    def between(enter: Node, leave: Node, path: str, prefix: str) -> Body:
        """Return the body between two nodes. Raises NotRepeated if it is not closed."""
        nodes = []
        node = enter.next
        while node is not leave:
            if node.op in ("output", "root"):
                raise NotRepeated("it ends in another part of the program than it begins in")
            if not is_assertion(node.target):
                nodes.append(node)
            node = node.next
        operands: Any = enter.args[0]
        results: Any = leave.args[0]
        body = Body(path, prefix, tuple(operands), tuple(nodes), tuple(results))
        body._check_closed(marks_of(enter), leave)
        return body

    def _check_closed(self, marks: tuple[Any, Any], leave: Node) -> None:
        nodes, operands, returned = set(self.nodes), set(self.operands), set(self.results)
        inside = nodes | {leave}
        for node in self.nodes:
            for operand in node.all_input_nodes:
                if operand not in nodes and operand not in operands and not _is_subgraph(operand):
                    raise NotRepeated(f"it uses {operand}, which it is not given")
            if node not in returned and any(
                user not in inside and not is_assertion(user.target) for user in node.users
            ):
                raise NotRepeated(f"{node} is used outside of it")
        if not returned <= nodes:
            raise NotRepeated("it returns what it did not make")
        for node in _with_subgraphs(self.nodes):
            if node.op == "call_function" and marks_of(node) != marks:
                raise NotRepeated(f"{node} has a mark of its own")

    def check_equal(self, witness: Body) -> None:
        """Raise NotRepeated unless the witness has the operators of this body."""
        pairs = dict(zip(self.operands, witness.operands, strict=True))
        self._check_nodes(self.nodes, witness.nodes, pairs, witness)
        if [pairs.get(node) for node in self.results] != list(witness.results):
            raise NotRepeated("its witness returns others")

    def _check_nodes(
        self, nodes: Iterable[Node], others: Iterable[Node], pairs: dict[Node, Node], witness: Body
    ) -> None:
        nodes, others = list(nodes), list(others)
        if len(nodes) != len(others):
            raise NotRepeated("its witness has another number of operators")
        for node, other in zip(nodes, others, strict=True):
            if _is_subgraph(node) and _is_subgraph(other):
                inner, theirs = _attribute(node), _attribute(other)
                self._check_nodes(inner.graph.nodes, theirs.graph.nodes, pairs, witness)
            elif self._key(node, pairs) != witness._key(other, {}):
                raise NotRepeated(f"its witness differs in {node}")
            pairs[node] = other

    def _key(self, node: Node, pairs: Mapping[Node, Node]) -> object:
        """Return a key by which nodes are compared. ``pairs``: node -> its counterpart in the witness."""
        target = node.op if node.op in ("placeholder", "output") else node.target
        line = (node.meta.get("custom") or {}).get(LINE)
        arguments = _key_of((node.args, node.kwargs), pairs)
        values = tuple(map(tensor_form, tensor_results(node.meta.get("val"))))
        return target, arguments, values, line, is_initial(node), self.relative(module_path(node, self.prefix))

    def relative(self, path: str) -> tuple[bool, str]:
        """Return whether a module is inside of the body, and its path, relative to the body if so."""
        if path == self.path or path.startswith(f"{self.path}."):
            return True, path[len(self.path) :]
        return False, path


def marks_of(node: Node) -> tuple[Any, Any]:
    """Return the region and the segment of a node."""
    custom = node.meta.get("custom") or {}
    return custom.get(REGION), custom.get(SEGMENT, "")


def is_assertion(target: Any) -> bool:
    """Return whether an operator only checks something and computes nothing."""
    return isinstance(target, OpOverload) and operator_name(target) in _ASSERTIONS


@dataclass(frozen=True)
class Inlining:
    """A re-emitted body. ``path``: the module of this call; ``marks``: region and segment of the call; ``memory``:
    storage of a body's operand -> storage of the call's; ``offset``: added to the body's other storages."""

    body: Body
    path: str
    marks: tuple[Any, Any]
    memory: Mapping[int, int]
    offset: int

    def path_of(self, path: str) -> str:
        """Translate the path of a module of the body to the call."""
        inside, rest = self.body.relative(path)
        return f"{self.path}{rest}" if inside else rest

    def storage(self, body_storage: int) -> int:
        """Translate a storage of the body to the call."""
        return self.memory.get(body_storage, body_storage + self.offset)


@dataclass
class Bodies:
    """The bodies of a program. ``entered``, ``left``: their first and last nodes, by number; ``repeated``: bodies that
    have repeats."""

    repeats: TracedRepeats
    prefix: str
    entered: dict[int, Node] = field(default_factory=dict)
    left: dict[int, Node] = field(default_factory=dict)
    repeated: dict[int, Body] = field(default_factory=dict)
    count: int = 0

    def note(self, end: Node) -> None:
        """Record the first or last node of a body."""
        number: Any = end.args[1]
        (self.entered if end.target is ENTER else self.left)[number] = end

    def body(self, number: int) -> Body:
        """Return a body by number. Raises NotRepeated if it is not closed."""
        if number not in self.left:
            raise NotRepeated("a body that does not end")
        return Body.between(self.entered[number], self.left[number], self.repeats.paths[number], self.prefix)

    def inlined(self, node: Node, storages: Callable[[Node], int]) -> Inlining:
        """Return the body to emit for a ``repeat`` node. ``storages``: of the call's operands. Raises NotRepeated."""
        arguments: Any = node.args
        operands, number, path = arguments
        if number not in self.repeated:
            self.repeated[number] = self.body(number)
        body = self.repeated[number]
        body_storages = (storage_of(operand.meta["val"]) for operand in body.operands)
        self.count += 1
        return Inlining(
            body, path, marks_of(node), dict(zip(body_storages, map(storages, operands), strict=True)), self.count << 64
        )

    def check(self) -> None:
        """Raise NotRepeated if a witness differs from a body that is repeated."""
        for number, of in self.repeats.witnesses.items():
            if of in self.repeated:
                self.repeated[of].check_equal(self.body(number))


def _is_subgraph(node: Node) -> bool:
    return node.op == "get_attr" and isinstance(_attribute(node), GraphModule)


def _attribute(node: Node) -> Any:
    owner: Any = node.graph.owning_module
    for name in str(node.target).split("."):
        owner = getattr(owner, name)
    return owner


def _with_subgraphs(nodes: Iterable[Node]) -> Iterator[Node]:
    for node in nodes:
        yield node
        if _is_subgraph(node):
            yield from _with_subgraphs(_attribute(node).graph.nodes)


def _key_of(arg: Any, pairs: Mapping[Node, Node]) -> object:
    if isinstance(arg, Node):
        return pairs.get(arg, arg)
    if isinstance(arg, (tuple, list)):
        return tuple(_key_of(item, pairs) for item in arg)
    if isinstance(arg, dict):
        return tuple((key, _key_of(value, pairs)) for key, value in arg.items())
    return constant_key(arg) if is_constant(arg) else arg
