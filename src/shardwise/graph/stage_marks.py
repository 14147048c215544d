"""Assignment of operators to pipeline stages by the user's marks on submodules (``stage``).

The operators of a marked submodule run in its stage. Unmarked operators run in the stage of the operator before, so a
mark at the first layer of every stage is enough. Marks are kept on the modules and read by their paths, which are in
the names of operators; capture does not read them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TypeVar

from torch import nn

from shardwise.errors import PlanError, ShardwiseError, listed
from shardwise.graph.cut import free_values
from shardwise.graph.ir import Graph, Op

_ATTRIBUTE = "_shardwise_stage"
_Module = TypeVar("_Module", bound=nn.Module)


def stage(module: _Module, number: int) -> _Module:
    """Assign ``module`` and everything after it, up to the next mark, to a stage of a pipeline.

    Stages are numbered from 0 in the order of execution: ``sw.stage(model.layers[8], 1)`` begins the second one. Plans
    use the marks by ``sw.plan(..., stages="marked")``.

    Args:
        module: the module to mark.
        number: the stage.

    Returns:
        The module; its results do not change.

    Raises:
        ShardwiseError: ``module`` is not a module, or ``number`` is not an integer of at least 0.
    """
    if not isinstance(module, nn.Module):
        raise ShardwiseError(f"stage takes a module, not {type(module).__name__}", fix="stage(model.layers[8], 1)")
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise ShardwiseError(f"stage {number!r} of a module", fix="use an integer from 0")
    setattr(module, _ATTRIBUTE, number)
    return module


def marks_of(module: nn.Module) -> dict[str, int]:
    """Return submodule path -> the stage that it is marked with."""
    return {path: vars(part)[_ATTRIBUTE] for path, part in module.named_modules() if _ATTRIBUTE in vars(part)}


def check_marks(marks: dict[str, int], num_stages: int | None) -> int:
    """Return the number of marked stages. ``num_stages``: the requested number, if any. Raises PlanError naming the
    modules for a number that is out of range, and for a missing stage."""
    if not marks:
        raise PlanError(
            'stages="marked", but no module is marked', fix="mark the first layer of every stage: sw.stage(m, 1)"
        )
    count = num_stages or max(marks.values()) + 1
    beyond = [f"{path or 'the module itself'} in stage {number}" for path, number in marks.items() if number >= count]
    if beyond:
        raise PlanError(
            f"out of range: {listed(beyond)}; there are {count} stages", fix=f"number stages from 0 to {count - 1}"
        )
    missing = sorted(set(range(1, count)) - set(marks.values()))
    if missing:
        have = listed([f"{path or 'the module itself'} in stage {number}" for path, number in marks.items()])
        raise PlanError(
            f"no module is marked with stage {listed(list(map(str, missing)))}; there are {have}",
            fix="number stages consecutively",
        )
    if count < 2:
        raise PlanError("all marks are of stage 0, which makes no pipeline", fix="mark where stage 1 begins")
    return count


def marked_parts(graph: Graph, marks: dict[str, int], num_stages: int) -> list[list[str]]:
    """Return the operators of every stage, as modules are marked. Raises PlanError, naming the modules, for marks that
    are not in the order of execution, and for stages without operators."""
    free = free_values(graph)
    parts: list[list[str]] = [[] for _ in range(num_stages)]
    current, where = 0, ""
    for op in graph.ops:
        path = _innermost(op, marks)
        if path is not None and not free.issuperset(op.results):
            number = marks[path]
            if number < current:
                raise PlanError(
                    f"{path or 'the module itself'} is marked with stage {number}, and runs after {where}, which "
                    f"is in stage {current}",
                    op=op.name,
                    source=op.source,
                    fix="number stages in execution order; a module called several times belongs to one stage",
                )
            if number > current:
                current, where = number, path or "the module itself"
        parts[current].append(op.name)
    empty = [number for number, part in enumerate(parts) if not part]
    if empty:
        modules = listed([path for path, number in marks.items() if number in empty])
        raise PlanError(
            f"stage {empty[0]} has no operators: {modules or 'what is marked'} does not run before the next mark",
            fix="mark modules that compute",
        )
    return parts


def _innermost(op: Op, marks: dict[str, int]) -> str | None:
    path = op.name.partition("/")[0]
    while True:
        if path in marks:
            return path
        if not path:
            return None
        path = path.rpartition(".")[0]


def with_stages(
    graph: Graph, stages: Sequence[Iterable[str]], sources: Sequence[Collection[str]] = ()
) -> list[list[str]]:
    """Return the operators of every stage for a graph that may differ from the divided one (another size, evaluation,
    other inputs). An operator belongs to the first stage that names it; an unnamed one to the stage of the operator
    before it, or to the next that holds what it reads. The names of operators outside submodules depend on how many
    there are: such an operator is in no stage after that of a submodule's later one. ``sources``: the names of
    parameters and buffers that every stage holds."""
    stage_of: dict[str, int] = {}
    for number, names in enumerate(stages):
        for name in names:
            stage_of.setdefault(name, number)
    free = free_values(graph)
    latest, latest_of = len(stages) - 1, dict[str, int]()
    for op in reversed(graph.ops):
        if op.module and op.name in stage_of and not free.issuperset(op.results):
            latest = min(latest, stage_of[op.name])
        latest_of[op.name] = latest
    parts: list[list[str]] = [[] for _ in stages]
    current = 0
    for op in graph.ops:
        read = [graph.source_of[name].names[0] for name in op.operands if name in graph.source_of]
        holding = [n for n, group in enumerate(sources) if n >= current and all(name in group for name in read)]
        found = stage_of.get(op.name, holding[0] if read and holding else current)
        current = found if op.module else min(max(found, current), max(latest_of[op.name], current))
        parts[current].append(op.name)
    return parts
