"""Check that ranks which must hold the same bits do: ``parallelize(..., check_replicas=n)``.

Where a layout is invariant or replicated on a mesh axis, the ranks along that axis hold bit-identical copies: results
of one collective, or of the same arithmetic on copies. Nothing enforces that. Copies drift apart if ranks pass
different batches, if one rank changes a parameter, or if a kernel sums in another order each time. The trained model is
then no longer the intended one.

A checked call runs the program node by node, each through an observer that takes a 64-bit fingerprint of its result.
Fingerprints are all-gathered after the forward pass, and those of the gradients after the backward pass. They tell
every rank the first value in program order whose copies differ. Values are compared along invariant and replicated axes
only: shards and partial sums differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.autograd import Variable

from shardwise.errors import ReplicaError, ShardwiseError, name_ranks, problem
from shardwise.graph.ir import refs
from shardwise.graph.written_out import SEED
from shardwise.layouts.layout import Layout
from shardwise.layouts.mesh import Mesh
from shardwise.layouts.text import format_layout
from shardwise.programs.hoist_constants import constant_values
from shardwise.programs.spmd import SpmdProgram
from shardwise.runtime.agree import gather_values
from shardwise.runtime.communicator import Communicator
from shardwise.runtime.emit import Emitted
from shardwise.runtime.step import Forward, Half, Observer, halves_of

Kind = Literal[
    "batch", "input", "parameter", "buffer", "constant", "activation", "seed", "operator", "conversion", "gradient"
]

_LEVELS, _LENGTH = 3, 1 << 14  # lanes of 4 bytes: three levels are enough for 16 TiB
_BLOCK_LANES = {"cpu": 1 << 16, "cuda": 1 << 22}  # lanes multiplied at a time: half a MiB stays in a core's cache
_NUM_NAMED = 8  # groups that a message lists

_FIXES: dict[Kind, str] = {
    "batch": 'pass the same whole batch on every rank (the same order of samples), or only its part: inputs="local"',
    "input": "ranks along an axis that does not split the batch must get the same samples: choose them by the "
    "coordinates on the other axes",
    "parameter": "make the same changes of parameters on all ranks: the same optimizer and learning rate, no random "
    "numbers in it; load the same checkpoint on all",
    "buffer": "make the same changes of buffers on all ranks, and load the same checkpoint on all",
    "constant": "build the module from the same values on every rank",
    "activation": "the stage that sends it must send equal bits to all: check the network and the devices of the ranks",
    "seed": "pass the same seed= to parallelize on every rank",
    "operator": "its replicated operands were equal: look for a nondeterministic kernel "
    "(torch.use_deterministic_algorithms(True) finds it), different software or hardware, or a faulty device",
    "conversion": "a collective returned different bits to its ranks: check the network and the devices of these ranks",
    "gradient": "the forward values were equal: look for a nondeterministic backward kernel "
    "(torch.use_deterministic_algorithms(True) finds it), a change of gradients on some ranks, or a faulty device",
}


class Fingerprint(torch.nn.Module):
    """Maps a tensor to 64 bits of its content, as a scalar on ``device``.

    Equal bits have equal fingerprints. A difference of one bit is always detected; other differences with odds of at
    least 2^32 to 1. The tensor's memory is read as 4-byte integers, each multiplied by an odd random factor for its
    position; the sum wraps around. So -0.0 differs from 0.0, and a NaN equals the same NaN.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0x5EED)
        limit = torch.iinfo(torch.int64)
        factors = torch.randint(limit.min, limit.max, (_LEVELS, _LENGTH), generator=generator, dtype=torch.int64) | 1
        self.factors = factors.to(device)  # no buffer: not a part of the program's state
        self.rows = _BLOCK_LANES.get(device.type, _BLOCK_LANES["cpu"]) // _LENGTH

    def forward(self, tensor: Tensor) -> Tensor:
        with torch.no_grad():
            if tensor.numel() == 0:
                return self.factors.new_zeros(())
            flat = tensor.detach().to(self.factors.device).resolve_conj().resolve_neg().contiguous().view(-1)
            if flat.storage_offset() * flat.itemsize % 4:
                flat = flat.clone()
            memory = flat.view(torch.uint8)
            num_lanes, rest = divmod(memory.numel(), 4)
            total = self._total(memory[: 4 * num_lanes].view(torch.int32), 0)
            if rest:
                total = total + (memory[4 * num_lanes :] * self.factors[_LEVELS - 1, :rest]).sum()
            return total

    def _total(self, lanes: Tensor, level: int) -> Tensor:
        factors = self.factors[level]
        if lanes.numel() <= _LENGTH:
            return (lanes * factors[: lanes.numel()]).sum()
        num_rows = lanes.numel() // _LENGTH
        rows = lanes[: num_rows * _LENGTH].view(num_rows, _LENGTH)
        sums = [(rows[start : start + self.rows] * factors).sum(1) for start in range(0, num_rows, self.rows)]
        last = lanes[num_rows * _LENGTH :]
        sums.append((last * factors[: last.numel()]).sum().view(1))
        return self._total(torch.cat(sums), level + 1)


@cache
def fingerprint_on(device: torch.device) -> Fingerprint:
    return Fingerprint(device)


@dataclass(frozen=True, slots=True)
class Subject:
    """The value behind a fingerprint. ``layout``: None for a batch that every rank passes whole; ``op`` and ``source``:
    the operator that computed it or, for a conversion, that needs it."""

    kind: Kind
    name: str
    layout: Layout | None
    dtype: torch.dtype
    op: str = ""
    source: str = ""

    def __str__(self) -> str:
        words = {"batch": "the batch: input", "operator": "the result of", "conversion": "the converted value"}
        if self.kind == "seed":
            return "the seed of dropout"
        return f"{words.get(self.kind, self.kind)} {self.op if self.kind == 'operator' else self.name}"


class _Prints(Observer):
    """Takes the fingerprints of every used value of a program that has copies. ``leaders``: of shape [ranks, nodes]:
    per rank and node the first rank that must have the same fingerprint."""

    def __init__(self, emitted: Emitted, fingerprint: Fingerprint) -> None:
        program, spmd = emitted.program, emitted.program.spmd
        node_of = {node.meta["value"]: node for node in emitted.forward.graph.nodes if "value" in node.meta}
        constants = constant_values(spmd)  # computed once from buffers, which are compared
        # The same on all ranks, although a rank may have two names for one tensor.
        names = [name for name in _compared(spmd) if program.resolve(name) in node_of and name not in constants]
        self.nodes = [node_of[program.resolve(name)] for name in names]
        self.subjects = tuple(_subject(name, spmd) for name in names)
        self.leaders = _leaders([subject.layout for subject in self.subjects], spmd.mesh)
        self.half, self.fingerprint = halves_of(emitted)[0], fingerprint
        self.of = dict.fromkeys(self.nodes, torch.zeros(()))

    def run(self, node: fx.Node, half: Half, values: Mapping[fx.Node, Any], call: Callable[[], Any]) -> Any:
        result = call()
        if node in self.of:
            self.of[node] = self.fingerprint(result)
        return result


class ReplicaCheck:
    """The check of one module in every ``every``-th training call, starting with the first. ``part``: the part of the
    module, for messages; ``stages``: the checks of this rank's stages, by number; ``difference``: what one of several
    stages found first, as (message, differing ranks)."""

    part = ""
    difference: tuple[str, list[int]] | None = None
    stages: Mapping[int, ReplicaCheck]

    def __init__(self, every: int, ranks: Communicator, device: torch.device) -> None:
        self.every, self.ranks = every, ranks
        self.fingerprint = fingerprint_on(device)
        self.passed = 0  # calls whose inputs and forward pass were found equal
        self._count = 0
        self._prints: dict[fx.GraphModule, _Prints] = {}
        self._hooks: list[Any] = []
        self.stages = {0: self}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_prints": {}, "_hooks": []}

    def is_due(self) -> bool:
        """Return whether this training call is to be checked. Call it once in every training call."""
        self._unwatch()  # a checked call without a backward pass
        self._count += 1
        return (self._count - 1) % self.every == 0

    def begin(self, batch: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
        """Compare what several stages have before a step. ``batch``: whole, by name; ``state``: this rank's parameters.
        Raises ReplicaError on all ranks."""

    def settle(self) -> None:
        """Raise ReplicaError on all ranks if one of several stages has found a difference since ``begin``."""

    def observed(self, emitted: Emitted, batch: Sequence[Tensor]) -> Forward:
        """Return a forward half of the program that raises ReplicaError on all ranks if copies differ. ``batch``: the
        inputs, if all ranks get the same ones."""
        spmd = emitted.program.spmd
        if emitted.forward not in self._prints:
            self._prints[emitted.forward] = _Prints(emitted, self.fingerprint)
        observer = self._prints[emitted.forward]
        names = [source.names[0] for source in spmd.graph.sources if source.kind == "input"]
        inputs = tuple(Subject("batch", name, None, tensor.dtype) for name, tensor in zip(names, batch, strict=False))
        leaders = torch.cat([_leaders([s.layout for s in inputs], spmd.mesh), observer.leaders], dim=1)

        def forward(*tensors: Tensor) -> Any:
            prints = [self.fingerprint(tensor) for tensor in batch]
            results = observer.half.run(observer, *tensors)
            prints += [observer.of[node] for node in observer.nodes]
            self.compare((*inputs, *observer.subjects), prints, leaders, "forward")
            self.passed += 1
            return results

        return forward

    def watch(self, spmd: SpmdProgram, tensors: Sequence[Tensor | None]) -> None:
        """Compare gradients at the end of the backward pass that first reaches one of the parameters."""
        watched: list[Tensor] = []
        subjects: list[Subject] = []
        for source, tensor in zip(spmd.graph.sources, tensors, strict=True):
            layout = spmd.layouts[source.value].dual
            if tensor is not None and source.kind == "parameter" and tensor.requires_grad and _has_copies(layout):
                watched.append(tensor)
                subjects.append(Subject("gradient", f"of {source.names[0]}", layout, tensor.dtype))
        leaders = _leaders([subject.layout for subject in subjects], spmd.mesh)

        def compare() -> None:
            grads = [parameter.grad for parameter in watched]
            zero = torch.zeros((), dtype=torch.int64, device=self.fingerprint.factors.device)
            prints = [zero if grad is None else self.fingerprint(grad) for grad in grads]
            self.compare(subjects, prints, leaders, "backward")

        def reached(_: Tensor) -> None:
            if self._hooks:
                self._unwatch()
                Variable._execution_engine.queue_callback(compare)

        self._hooks = [p.register_post_accumulate_grad_hook(reached) for p in watched]

    def _unwatch(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def compare(self, subjects: Sequence[Subject], prints: Sequence[Tensor], leaders: Tensor, direction: str) -> None:
        """Exchange fingerprints and raise ReplicaError for the first subject whose copies differ. ``leaders``: per rank
        and subject the first rank that must have the same fingerprint."""
        if not subjects:
            return
        everywhere = self.ranks.gather_from_all(torch.stack(list(prints)), "the comparison of replicas").cpu()
        differ = (everywhere != everywhere.gather(0, leaders)).any(0)
        if not differ.any():
            return
        first = int(differ.nonzero()[0])
        message, differing = _report(
            subjects[first],
            everywhere[:, first].tolist(),
            leaders[:, first].tolist(),
            f"{direction}{self.part}, call {self.ranks.calls} of {self.ranks.name}; "
            f"{int(differ.sum())} of {len(subjects)} values that have copies differ",
            self.ranks.place.ranks,
        )
        self._differs(message, differing)

    def _differs(self, message: str, differing: list[int]) -> None:
        raise ReplicaError(message, differing)


class StageCheck(ReplicaCheck):
    """The check of one of several stages."""

    def __init__(self, ranks: Communicator, number: int, device: torch.device) -> None:
        super().__init__(1, ranks, device)
        self.part = f" of stage {number}"

    def _differs(self, message: str, differing: list[int]) -> None:
        self.difference = self.difference or (message, differing)


class PipelineCheck(ReplicaCheck):
    """The check of a rank of a pipeline. The ranks of a stage compare their copies, micro-batch by micro-batch; all
    ranks compare the batch and the parameters that several stages share. A stage keeps a difference to itself until the
    schedule has run, since other stages wait for its messages. Then all ranks exchange differences and raise the same
    error, before adding a gradient.

    ``shared``: the pipeline ranks that have a parameter of several stages; ``ranks``: communicators of this rank's
    stages, by number; ``passed``: comparisons of all stages that found no difference."""

    def __init__(
        self,
        every: int,
        device: torch.device,
        shared: Mapping[str, Sequence[Sequence[int]]],
        everyone: Communicator,
        ranks: Mapping[int, Communicator],
    ) -> None:
        super().__init__(every, everyone, device)
        self.stages = {number: StageCheck(of_stage, number, device) for number, of_stage in ranks.items()}
        # Parameter of several stages -> for each of its shards the ranks that hold it.
        self._shared = {name: tuple(zip(*places, strict=True)) for name, places in shared.items()}

    def begin(self, batch: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
        for check in self.stages.values():
            check.difference = None
        size = dist.get_world_size()
        columns = [torch.zeros(size, dtype=torch.int64) for _ in batch]
        subjects = [Subject("batch", name, None, x.dtype) for name, x in batch.items()]
        prints = [self.fingerprint(x) for x in batch.values()]
        for name, groups in self._shared.items():
            leaders = torch.arange(size)
            for ranks in groups:
                leaders[list(ranks)] = ranks[0]
            columns.append(leaders)
            parameter = state.get(name)
            subjects.append(Subject("parameter", f"{name} of several stages", None, torch.float32))
            prints.append(self.fingerprint(torch.empty(0) if parameter is None else parameter))
        if subjects:
            self.compare(subjects, prints, torch.stack(columns, 1), "forward")

    def settle(self) -> None:
        found = (check.difference for check in self.stages.values() if check.difference is not None)
        first = next((difference for difference in gather_values(next(found, None)) if difference is not None), None)
        if first is not None:
            raise ReplicaError(*first)
        self.passed += 1


def _compared(spmd: SpmdProgram) -> Iterator[str]:
    """Yield the used values that have copies, in program order."""
    used = {name for _, name in spmd.mutations} | {*refs(spmd.outputs)} | ({spmd.loss} if spmd.loss else set())
    for step in spmd.steps:
        used.update(step.operands)
    names = [s.value for s in spmd.graph.sources if s.kind != "input" or s.value in used]
    for step in spmd.steps:
        names += [name for name in step.results if name in used]
    return (name for name in names if _has_copies(spmd.layouts[name]))


def _subject(name: str, spmd: SpmdProgram) -> Subject:
    graph = spmd.graph
    source = graph.source_of.get(name)
    if source is not None:
        kind: Kind = "seed" if source.names[0] == SEED else source.kind
        return Subject(kind, source.names[0], spmd.layouts[name], graph.by_name[name].dtype)
    conversion = next((c for c in spmd.conversions if c.result == name), None)
    if conversion is not None:
        origin = graph.source_of.get(conversion.origin)
        shown = origin.names[0] if origin else conversion.origin
        consumer = graph.op_by_name.get(conversion.op) or graph.producer.get(conversion.origin)
        where = (consumer.name, consumer.source) if consumer else (conversion.op, "")
        return Subject("conversion", shown, conversion.target, graph.by_name[conversion.origin].dtype, *where)
    op = graph.producer[name]
    return Subject("operator", name, spmd.layouts[name], graph.by_name[name].dtype, op.name, op.source)


def _has_copies(layout: Layout) -> bool:
    return any(state in "IR" for state in layout.state_of.values())


def _leaders(layouts: Iterable[Layout | None], mesh: Mesh) -> Tensor:
    """Return, per rank and layout, the lowest rank that holds the same part of a tensor; rank 0 without a layout."""
    leaders: dict[tuple[str, ...], list[int]] = {}
    columns: list[list[int]] = []
    for layout in layouts:
        copied = mesh.sub_axes if layout is None else tuple(a for a, state in layout.state_of.items() if state in "IR")
        if copied not in leaders:
            same = dict.fromkeys(copied, 0)
            leaders[copied] = [mesh.rank_of({**mesh.coordinates(rank), **same}) for rank in range(mesh.num_devices)]
        columns.append(leaders[copied])
    return torch.tensor(columns, dtype=torch.int64).view(len(columns), mesh.num_devices).t()


def _report(
    subject: Subject, prints: list[int], leaders: list[int], where: str, ranks: Sequence[int]
) -> tuple[str, list[int]]:
    """Return (message, differing ranks) for one subject, from the first group of copies that are not equal. ``ranks``:
    those that compared."""
    groups: dict[int, dict[int, list[int]]] = {}  # leader -> fingerprint -> ranks
    for rank, fingerprint, leader in zip(ranks, prints, leaders, strict=True):
        groups.setdefault(leader, {}).setdefault(fingerprint, []).append(rank)
    split = [group for group in groups.values() if len(group) > 1]
    most, *others = sorted(split[0].values(), key=lambda ranks: (-len(ranks), ranks))
    differing = sorted(rank for ranks in others for rank in ranks)
    verb = "differs" if len(differing) == 1 else "differ"
    what = f"copies of {subject} are not equal: {name_ranks(differing)} {verb} from {name_ranks(most)}"
    facts = [("where", where)]
    if len(others) > 1 or len(split) > 1:
        among = "; ".join(name_ranks(ranks) for group in split[:_NUM_NAMED] for ranks in group.values())
        facts.append(("equal", f"only the copies of {among}"))
    if subject.layout is not None:
        mesh = subject.layout.mesh
        copied = tuple(axis for axis, state in subject.layout.state_of.items() if state in "IR")
        layout = format_layout(subject.layout, subject.dtype)
        facts.insert(0, ("value", f"{subject.name}: {layout}, copied along {mesh.format_axes(copied)}"))
    return problem(what, op=subject.op, source=subject.source, fix=_FIXES[subject.kind], facts=facts), differing


def checked_interval(name: str, interval: int | None) -> int:
    """Return the setting of a check as a number, 0 for never. Raises ShardwiseError for an invalid value."""
    every = 0 if interval is None else interval
    if not isinstance(every, int) or isinstance(every, bool) or every < 0:
        what = f"{name} is the number of training calls between checks, not {interval!r}"
        raise ShardwiseError(what, fix="pass an integer; 0 or None for no checks")
    return every
