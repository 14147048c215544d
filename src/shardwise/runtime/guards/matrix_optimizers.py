"""Step optimizers that look at whole matrices (Muon, Adafactor, Shampoo, quantised states) on shards.

Every matrix has an owner among the ranks that hold shards of it. A step sends the shards of parameter and gradient to
the owner, which steps the optimizer on whole tensors, and sends the updated shards back::

    shards on all ranks --all-to-all--> whole matrices, each on one rank --step--> --all-to-all--> shards on all ranks

States stay with the owner, whole, as one device has them: together the ranks hold them once. What the ranks hold whole
anyway is updated by each of them. An optimizer that looks at all parameters ``together`` (LBFGS) steps on every rank,
on all of them.

The owners follow from the order of the optimizer's parameters, so that every rank knows them. An optimizer's
parameter keeps its owner, also when others are added or taken out: no state moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from shardwise.costs.optimizers import owners_of
from shardwise.errors import ShardwiseError, listed
from shardwise.layouts.boxes import boxes
from shardwise.runtime.communicator import Communicator, rank_device
from shardwise.runtime.guards.elementwise_optimizers import (
    MATRIX_KINDS,
    check_class,
    declared_matrixwise,
    is_matrixwise,
    looks_at_all,
    parameters_of,
    replace_step,
)
from shardwise.runtime.guards.registry import ShardRecord, records_of
from shardwise.runtime.local_shards import shard

MatrixOptimizer = TypeVar("MatrixOptimizer", bound=type[Optimizer])


def matrix_optimizer(kind: MatrixOptimizer | None = None, *, together: bool = False) -> Any:
    """Declare that an optimizer class needs whole parameters, so that its steps on shards gather them.

    Use it as a decorator or as a call: ``sw.matrix_optimizer(SOAP)``. ``torch.optim.Muon``, ``Adafactor`` and
    ``LBFGS`` need no declaration. Declare a class whose update of a parameter depends on the history of that parameter
    alone, but on all of its elements: norms, factors, products, states quantised by blocks. Each parameter is then
    updated by one rank, which holds its states.

    A declaration states no price. ``sw.plan`` knows ``optimizer="shampoo"``, ``"soap"``, ``"adam8bit"``, ``"lbfgs"``,
    ``"muon"`` and ``"adafactor"``, and refuses other names: give the one whose states are the most alike.
    ``sw.prepare`` looks for the class's name, in lower case, among these, and else counts AdamW, with a warning.

    Args:
        kind: The optimizer class, a subclass of ``torch.optim.Optimizer``.
        together: Whether the update also depends on other parameters (inner products over all of them). Every rank
            then holds all parameters, gradients and states whole during a step, and a closure may be called any
            number of times.

    Returns:
        The class itself, or the decorator if ``kind`` is not given.

    Raises:
        ShardwiseError: If ``kind`` is not such a class.
    """
    if kind is None:
        return partial(matrix_optimizer, together=together)
    check_class("matrix_optimizer", kind)
    replace_step(kind, _step_on_whole)
    declared_matrixwise[kind] = together
    return kind


def wrap_torch_optimizers() -> None:
    """Let torch's own optimizers of whole matrices step on shards; called once per process."""
    for kind, together in MATRIX_KINDS.items():
        matrix_optimizer(kind, together=together)


@dataclass(frozen=True, slots=True)
class OwnedMatrix:
    """A shard in an optimizer, and the number of the device that updates the whole of it (None: all do)."""

    parameter: Tensor
    record: ShardRecord
    owner: int | None

    @property
    def is_here(self) -> bool:
        ranks = self.record.ranks
        return self.owner is None or self.owner == ranks.place.device_of(ranks.rank)


def owned_matrices(optimizer: Optimizer) -> list[OwnedMatrix]:
    """Return the shards in an optimizer with their owners: each new matrix goes to the device that has the fewest
    elements so far."""
    together = looks_at_all(type(optimizer))
    split: dict[Communicator, list[tuple[Tensor, ShardRecord]]] = {}
    parameters = parameters_of(optimizer)
    for parameter, record in zip(parameters, records_of(parameters), strict=True):
        if record is None or not record.is_shard:
            continue
        if together and record.in_stage:
            raise ShardwiseError(
                f"{type(optimizer).__name__} looks at all parameters together, but under stages this rank has none of "
                "those of other stages",
                fix="plan without stages, or use an optimizer that updates every parameter by itself",
            )
        if record.layout.positions:
            split.setdefault(record.ranks, []).append((parameter, record))
    kept = _owners.setdefault(optimizer, WeakTensorKeyDictionary())
    matrices = []
    for ranks, pairs in split.items():
        sizes = [(prod(record.layout.shape), kept.get(parameter)) for parameter, record in pairs]
        for (parameter, record), owner in zip(pairs, owners_of(sizes, ranks.mesh.num_devices), strict=True):
            kept[parameter] = owner
            matrices.append(OwnedMatrix(parameter, record, None if together else owner))
    return matrices


_owners: WeakKeyDictionary[Optimizer, Any] = WeakKeyDictionary()  # parameter -> device
_owned: WeakKeyDictionary[Optimizer, tuple[tuple[int, ...], frozenset[int]]] = WeakKeyDictionary()


def has_states_here(optimizer: Optimizer, parameter: Tensor) -> bool:
    """Return whether this rank keeps the optimizer's states of a parameter: all it holds, except those of shards that
    another rank updates whole."""
    if not is_matrixwise(type(optimizer)):
        return True
    key = tuple(map(id, parameters_of(optimizer)))
    if _owned.get(optimizer, ((), None))[0] != key:
        _owned[optimizer] = key, frozenset(id(m.parameter) for m in owned_matrices(optimizer) if not m.is_here)
    return id(parameter) not in _owned[optimizer][1]


def _step_on_whole(step: Callable[..., Any], optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
    """Replace the ``step`` of an optimizer of whole matrices, which may be the step of a base with other subclasses."""
    declared = any(base in declared_matrixwise for base in type(optimizer).__mro__)
    matrices = owned_matrices(optimizer) if declared else []
    if not matrices:
        return step(optimizer, *args, **kwargs)
    if torch.compiler.is_compiling():
        what = f"torch.compile wraps the step of {type(optimizer).__name__}, which gathers shards"
        raise ShardwiseError(what, fix="compile the module alone")
    _keep_own_states(optimizer, matrices)
    closure = args[0] if args else kwargs.pop("closure", None)
    rest = args[1:]
    if closure is None:
        with _whole(optimizer, matrices):
            return step(optimizer, *([None] if rest else []), *rest, **kwargs)
    if not looks_at_all(type(optimizer)):
        with torch.enable_grad():
            loss = closure()
        with _whole(optimizer, matrices):
            return step(optimizer, lambda: loss, *rest, **kwargs)
    with _whole(optimizer, matrices) as whole:
        return step(optimizer, lambda: whole.evaluate(closure), *rest, **kwargs)


_with_whole_states: WeakSet[Optimizer] = WeakSet()  # those that have stepped, or loaded their states


def have_whole_states(optimizer: Optimizer) -> None:
    """Note that the states of an optimizer have been loaded: they are not those that its constructor made."""
    _with_whole_states.add(optimizer)


def _keep_own_states(optimizer: Optimizer, matrices: Sequence[OwnedMatrix]) -> None:
    """Drop the states of matrices that other ranks update, which would become stale. Raises ShardwiseError for states
    that a constructor made of shards."""
    states = [(m, optimizer.state[m.parameter]) for m in matrices if optimizer.state.get(m.parameter)]
    made = [m.record.name for m, state in states if any(isinstance(v, Tensor) and v.ndim for v in state.values())]
    if made and optimizer not in _with_whole_states:
        what = f"{type(optimizer).__name__} made states of shards in its constructor: of {listed(made)}"
        fix = "let its step make the states of a parameter that has none, or load them: sw.load_checkpoint"
        raise ShardwiseError(f"{what}; it updates whole matrices", fix=fix)
    _with_whole_states.add(optimizer)
    for matrix, _ in states:
        if not matrix.is_here:
            del optimizer.state[matrix.parameter]


@contextmanager
def _whole(optimizer: Optimizer, matrices: Sequence[OwnedMatrix]) -> Iterator[_WholeTensors]:
    """Give an optimizer whole tensors in place of its shards, and write the shards when it has updated them."""
    whole = _WholeTensors(optimizer, matrices)
    whole.gather()
    whole.show()
    try:
        yield whole
    finally:
        whole.hide()
    whole.write()


class _WholeTensors:
    """The whole tensors that this rank updates in a step, in place of shards."""

    def __init__(self, optimizer: Optimizer, matrices: Sequence[OwnedMatrix]) -> None:
        self.optimizer = optimizer
        self.matrices = [m for m in matrices if m.parameter.grad is not None or m.owner is None]
        self.lists = [list(group["params"]) for group in optimizer.param_groups]
        self.whole: dict[int, torch.nn.Parameter | None] = {id(m.parameter): None for m in matrices}
        if odd := [m.record.name for m in self.matrices if m.parameter.grad is not None and m.parameter.grad.is_sparse]:
            raise ShardwiseError(f"{type(optimizer).__name__} got sparse gradients of {listed(odd)}")

    @torch.no_grad()
    def gather(self) -> None:
        values = _to_owners([(m.parameter, m) for m in self.matrices], "parameters")
        for matrix, value in zip(self.matrices, values, strict=True):
            if value is not None:
                stand_in = torch.nn.Parameter(value, requires_grad=matrix.parameter.requires_grad)
                stand_in.__dict__.update(matrix.parameter.__dict__)  # marks that optimizers look for
                self.whole[id(matrix.parameter)] = stand_in
        self._gather_gradients()

    def _gather_gradients(self) -> None:
        with_gradient = [(m.parameter.grad, m) for m in self.matrices if m.parameter.grad is not None]
        gradients = _to_owners(with_gradient, "gradients")
        for _, stand_in in self._pairs():
            stand_in.grad = None
        for (_, matrix), gradient in zip(with_gradient, gradients, strict=True):
            whole = self.whole[id(matrix.parameter)]
            if whole is not None:
                whole.grad = gradient

    def show(self) -> None:
        """Put the whole tensors into the optimizer's lists, with the states of their shards."""
        for group, parameters in zip(self.optimizer.param_groups, self.lists, strict=True):
            stand_ins = [self.whole.get(id(p), p) for p in parameters]
            group["params"][:] = [p for p in stand_ins if p is not None]  # the same list: LBFGS keeps it
        for parameter, stand_in in self._pairs():
            if parameter in self.optimizer.state:
                self.optimizer.state[stand_in] = self.optimizer.state.pop(parameter)

    def hide(self) -> None:
        for group, parameters in zip(self.optimizer.param_groups, self.lists, strict=True):
            group["params"][:] = parameters
        for parameter, stand_in in self._pairs():
            if stand_in in self.optimizer.state:
                self.optimizer.state[parameter] = self.optimizer.state.pop(stand_in)

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        for matrix in self.matrices:
            stand_in = self.whole[id(matrix.parameter)]
            if stand_in is not None:
                yield matrix.parameter, stand_in

    @torch.no_grad()
    def write(self) -> None:
        """Write every rank's shards from the whole tensors of their owners."""
        _from_owners([(self.whole[id(m.parameter)], m) for m in self.matrices])

    def evaluate(self, closure: Callable[[], Any]) -> Any:
        """Call a closure of the parallel module for the values that the optimizer has set."""
        self.write()
        self.hide()
        try:
            with torch.enable_grad():
                loss = closure()
        finally:
            self.show()
        with torch.no_grad():
            self._gather_gradients()
        if isinstance(loss, Tensor):  # what the optimizer decides by it has to be the same on every rank, bit for bit
            ranks = self.matrices[0].record.ranks
            loss = ranks.bring(loss.detach().clone(), ranks.place.ranks[0], None, "the loss of a closure")
        return loss


# ------------------------------------------------------------------------------------------------------------ exchanges


def _by_ranks(matrices: Sequence[OwnedMatrix]) -> dict[Communicator, list[int]]:
    indices: dict[Communicator, list[int]] = {}
    for index, matrix in enumerate(matrices):
        indices.setdefault(matrix.record.ranks, []).append(index)
    return indices


def _sends(matrix: OwnedMatrix, device: int) -> bool:
    """Return whether a device sends its shard to the owner: one of those with the same elements does."""
    layout, coordinates = matrix.record.layout, matrix.record.ranks.mesh.coordinates(device)
    return not any(coordinates[axis] for axis in layout.mesh.sub_axes if axis not in layout.positions)


def _local_bytes(matrix: OwnedMatrix, device: int, like: Tensor) -> int:
    shape = matrix.record.layout.local_shape(matrix.record.ranks.mesh.coordinates(device))
    return prod(shape) * like.element_size()


def _to_owners(tensors: Sequence[tuple[Tensor, OwnedMatrix]], what: str) -> list[Tensor | None]:
    """Send shards to the owners of their matrices; return the whole tensors of those that this rank owns."""
    whole: list[Tensor | None] = [None] * len(tensors)
    for ranks, indices in _by_ranks([matrix for _, matrix in tensors]).items():
        devices, here = range(ranks.mesh.num_devices), ranks.place.device_of(ranks.rank)
        mine = [tensors[i] for i in indices if _sends(tensors[i][1], here)]
        sent = [_as_bytes(tensor for tensor, matrix in mine if matrix.owner in (None, device)) for device in devices]
        expected = [i for i in indices if tensors[i][1].is_here]
        sources = [[i for i in expected if _sends(tensors[i][1], device)] for device in devices]
        counts = [
            sum(_local_bytes(tensors[i][1], device, tensors[i][0]) for i in sources[device]) for device in devices
        ]
        received = ranks.swap(sent, counts, f"the {what} of whole matrices")
        for i in expected:
            tensor, matrix = tensors[i]
            whole[i] = tensor.new_empty(matrix.record.layout.shape)
        for device, data in zip(devices, received, strict=True):
            coordinates = ranks.mesh.coordinates(device)
            parts = _from_bytes(data, [tensors[i] for i in sources[device]], device)
            for i, part in zip(sources[device], parts, strict=True):
                target = whole[i]
                assert target is not None, "this rank owns what it expects"
                for box in boxes(tensors[i][1].record.layout, coordinates):
                    target[box.rows] = part[box.local_rows]
    return whole


def _from_owners(tensors: Sequence[tuple[Tensor | None, OwnedMatrix]]) -> None:
    """Send the shards of whole tensors from their owners to all ranks, and write them into the parameters."""
    alone = [(tensor, matrix) for tensor, matrix in tensors if matrix.owner is None]
    for tensor, matrix in alone:
        assert tensor is not None, "all ranks have the whole"
        matrix.parameter.copy_(shard(tensor, matrix.record.layout, matrix.record.ranks.coordinates))
    owned = [(tensor, matrix) for tensor, matrix in tensors if matrix.owner is not None]
    for ranks, indices in _by_ranks([matrix for _, matrix in owned]).items():
        devices, here = range(ranks.mesh.num_devices), ranks.place.device_of(ranks.rank)
        sent = []
        for device in devices:
            at = ranks.mesh.coordinates(device)
            pairs = [owned[i] for i in indices]
            sent.append(_as_bytes(shard(t, matrix.record.layout, at) for t, matrix in pairs if t is not None))
        from_each = [[owned[i][1] for i in indices if owned[i][1].owner == device] for device in devices]
        counts = [sum(_local_bytes(m, here, m.parameter) for m in matrices) for matrices in from_each]
        received = ranks.swap(sent, counts, "updated shards")
        for matrices, data in zip(from_each, received, strict=True):
            parts = _from_bytes(data, [(m.parameter, m) for m in matrices], here)
            for matrix, part in zip(matrices, parts, strict=True):
                matrix.parameter.copy_(part)


def _as_bytes(tensors: Iterator[Tensor]) -> Tensor:
    """Concatenate tensors of any dtypes as bytes: no backend sends every dtype."""
    flat = [tensor.detach().to(rank_device()).reshape(-1).contiguous().view(torch.uint8) for tensor in tensors]
    return torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8, device=rank_device())


def _from_bytes(data: Tensor, like: Sequence[tuple[Tensor, OwnedMatrix]], device: int) -> list[Tensor]:
    """Cut bytes into the shards that a device holds of some matrices. ``like``: a tensor of each one's dtype."""
    counts = [_local_bytes(matrix, device, tensor) for tensor, matrix in like]
    parts = []
    for part, (tensor, matrix) in zip(data.split(counts), like, strict=True):
        shape = matrix.record.layout.local_shape(matrix.record.ranks.mesh.coordinates(device))
        parts.append(part.clone().view(tensor.dtype).reshape(shape).to(tensor.device))  # a copy begins aligned
    return parts
