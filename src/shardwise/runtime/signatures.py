"""Check that all ranks make the same call, and find the batch of which they pass parts.

A rank knows only its own arguments. Before a call of a new kind, ranks exchange their call signatures; the first
difference is reported on all of them. If every rank passes its own part of a batch (``inputs="local"``), parts may
change from call to call on some ranks only. Therefore ranks exchange a 64-bit digest of their call in every such call,
host to host, and full signatures only for a new combination of digests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import ShardwiseError, listed, name_ranks, warn_user
from shardwise.graph.trees import (
    check_leaves,
    constant_key,
    constant_text,
    flatten_call,
    flatten_with_path,
    is_constant,
    is_plain_input,
    leaf_name,
    unflatten,
)
from shardwise.layouts.layout import Layout
from shardwise.layouts.text import format_dtype, format_layout
from shardwise.plans.plan import Plan
from shardwise.programs.micro_batches import Passes, numbers_samples
from shardwise.runtime.agree import gather_objects, wire_device
from shardwise.runtime.communicator import Communicator, GatheredRows
from shardwise.runtime.faults import failure_store
from shardwise.runtime.host_copies import CopyInFlight, host_memory, start_copy
from shardwise.runtime.lazy_gather import LazyTensor, plain_tensor
from shardwise.runtime.local_shards import shard
from shardwise.runtime.replicas import fingerprint_on

Shape = tuple[int, ...]
ParamFlags = tuple[tuple[str, str], ...]  # (state of a tensor, its name): ("frozen", "up.weight")
Holds = Callable[[int, str], bool]  # whether a rank has a tensor, by name
_TRAINING = attrgetter("training")
_NUM_NAMED = 8  # ranks or inputs that a message lists


@dataclass(frozen=True)
class Signature:
    """A call as its rank sees it. ``leaves``: per argument its name, and its value or dtype; ``shapes``: of the tensors
    among them, by name; ``circumstances``: tensors of the module that are frozen or were replaced."""

    mode: str
    leaves: tuple[tuple[str, str], ...]
    shapes: Mapping[str, Shape]
    circumstances: ParamFlags = ()

    @classmethod
    def of(cls, named: Sequence[tuple[str, Any]], mode: str, circumstances: ParamFlags) -> Signature:
        """Build the signature of a call in a ``mode`` ("training, the loss only")."""
        return cls(
            mode,
            tuple((name, _text(x)) for name, x in named),
            {n: tuple(x.shape) for n, x in named if isinstance(x, torch.Tensor)},
            circumstances,
        )

    @cached_property
    def digest(self) -> int:
        """Return a 64-bit hash of the call, the same in every process."""
        content = hashlib.blake2b(repr(self).encode("utf-8", "surrogatepass"), digest_size=8).digest()
        return int.from_bytes(content, "little", signed=True)

    def described(self, name: str) -> str:
        """Describe an argument: ``f32[8, 16]``, or its value."""
        leaf = dict(self.leaves).get(name, "missing")
        if name not in self.shapes:
            return leaf[:60]
        dtype, *rest = leaf.split(" ", 1)
        return " ".join([f"{dtype}{list(self.shapes[name])}", *rest])

    def __str__(self) -> str:
        leaves = [f"{name} {self.described(name)}" for name, _ in self.leaves]
        kinds = dict.fromkeys(what for what, _ in self.circumstances)
        grouped = [f"{kind} {listed([name for what, name in self.circumstances if what == kind])}" for kind in kinds]
        return ", ".join([*leaves[:_NUM_NAMED], *["..."] * (len(leaves) > _NUM_NAMED), self.mode, *grouped])


def _text(leaf: Any) -> str:
    """Describe an argument in a form that is the same in every process."""
    if isinstance(leaf, torch.Tensor):
        return format_dtype(leaf.dtype) + " with a gradient" * takes_gradient(leaf)
    return constant_text(leaf)


def leaves_of(args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> tuple[list[Any], Any]:
    """Return the leaves of a call of a module on ``device``, and their tree. Raises ShardwiseError for leaves other
    than plain tensors and constants, and for tensors without data."""
    flat, spec = flatten_call(args, kwargs)
    flat = [plain_tensor(x) if isinstance(x, LazyTensor) else x for x in flat]
    if all(is_constant(x) or (is_plain_input(x) and (not x.is_meta or device.type == "meta")) for x in flat):
        return flat, spec
    named = [(leaf_name(path), x) for path, x in flatten_with_path((args, kwargs))[0]]
    check_leaves(named)
    empty = [name for name, x in named if isinstance(x, torch.Tensor) and x.is_meta]
    what = f"{listed(empty)} {'is' if len(empty) == 1 else 'are'} on meta, without data"
    raise ShardwiseError(what, fix="pass tensors with data, on any device: they are moved to that of the module")


def call_key(flat: Sequence[Any], spec: Any, mode: tuple[object, ...], shapes: Sequence[Shape]) -> tuple[Any, ...]:
    """Return a key that distinguishes calls with different programs. ``shapes``: of the tensors."""
    whole = iter(shapes)
    tensor = torch.Tensor
    return (
        *mode,
        spec,
        *((next(whole), x.dtype, takes_gradient(x)) if isinstance(x, tensor) else constant_key(x) for x in flat),
    )


def takes_gradient(tensor: torch.Tensor) -> bool:
    """Return whether a call now computes a gradient for an input."""
    return tensor.requires_grad and torch.is_grad_enabled()


def mode_text(training: bool, loss_only: bool, predicts: bool, in_other_mode: Sequence[str]) -> str:
    """Describe how a module is called: ``train(), step(), bn in eval()``."""
    what = "step()" if loss_only else "predict()" if predicts else "a call"
    modes = ("train()", "eval()") if training else ("eval()", "train()")
    return ", ".join([modes[0], what, *(f"{listed(in_other_mode)} in {modes[1]}" for _ in in_other_mode[:1])])


def in_other_mode(modules: Mapping[str, torch.nn.Module]) -> tuple[str, ...]:
    """Return the paths of submodules that are in eval() while the module is in train(), or vice versa."""
    modes = list(map(_TRAINING, modules.values()))
    if len(set(modes)) == 1:  # the usual case
        return ()
    return tuple(path for path, mode in zip(modules, modes, strict=True) if mode != modes[0])


def check_equal(
    signature: Signature,
    tensors: Sequence[torch.Tensor],
    ranks: Communicator,
    device: torch.device,
    holds: Holds = lambda _, __: True,
) -> None:
    """Raise ShardwiseError on all ranks if their calls, their ``tensors``, or the flags of a tensor that they share
    differ. ``holds``: returns whether a rank has a tensor."""
    failure_store.ask(str(signature))
    what = f"a call unlike the last of this rank ({signature})"
    everywhere = gather_objects((signature, _prints(signature, tensors, wire_device(device))), ranks, device, what)
    _check_same([signature for signature, _ in everywhere], holds, with_shapes=True)
    for name, first in everywhere[0][1].items():
        other = next((rank for rank, (_, prints) in enumerate(everywhere) if prints[name] != first), None)
        if other is not None:
            what = f"ranks 0 and {other} pass different {name} instead of the whole batch, {signature.described(name)}"
            raise ShardwiseError(what, fix=SAME_INPUTS_FIX, section="different-calls")


def _prints(signature: Signature, tensors: Sequence[torch.Tensor], device: torch.device) -> dict[str, int]:
    fingerprint = fingerprint_on(device)
    return {name: int(fingerprint(x)) for name, x in zip(signature.shapes, tensors, strict=True)}


def _check_same(everywhere: Sequence[Signature], holds: Holds, *, with_shapes: bool) -> None:
    first = everywhere[0]
    for what, name in dict.fromkeys(case for other in everywhere for case in other.circumstances):
        has = {rank: (what, name) in other.circumstances for rank, other in enumerate(everywhere) if holds(rank, name)}
        if len(set(has.values())) > 1:
            yes, no = (next(rank for rank in has if has[rank] == answer) for answer in (True, False))
            what = f"ranks make different calls: rank {yes} has {what} {name}, but rank {no} has not"
            raise ShardwiseError(what, fix="freeze and replace the same tensors on every rank that holds them")
    for rank, other in enumerate(everywhere):
        if other.mode != first.mode:
            raise ShardwiseError(
                f"ranks make different calls: rank 0 in {first.mode}, rank {rank} in {other.mode}",
                fix="make the same train(), eval(), step() and predict() calls and set one grad mode on all ranks",
                section="different-calls",
            )
        names = dict.fromkeys(name for name, _ in (*first.leaves, *other.leaves))
        for name in names:
            key, other_leaf = (dict(s.leaves).get(name) for s in (first, other))
            shapes = [s.shapes.get(name, ()) for s in (first, other)]
            if key == other_leaf and (shapes[0] == shapes[1] or (not with_shapes and len(shapes[0]) == len(shapes[1]))):
                continue
            fix = 'pass the same arguments on every rank, or one part of the batch on each: inputs="local"'
            what = f"{name} is {first.described(name)} on rank 0 and {other.described(name)} on rank {rank}"
            what = f"ranks make different calls: {what}"
            raise ShardwiseError(what, fix=fix, section="different-calls")


# -------------------------------------------------------------------------------------------------- parts of a batch


@dataclass(frozen=True)
class Batch:
    """The whole inputs of which the ranks passed parts. ``shapes``: whole shapes by name; ``parts``: per device of a
    stage, the shapes of its parts by name."""

    shapes: Mapping[str, Shape]
    parts: tuple[Mapping[str, Shape], ...]


# (layouts in which a program takes inputs, by name; start; stop) of the samples [start, stop) that it takes.
Wanted = tuple[Mapping[str, Layout], int, int]


class LocalInputs:
    """The parts of a batch that the ranks pass: each the part of its device, in the layout of the first stage that
    reads the input; ranks of all stages with the same device number pass the same. Raises ShardwiseError if the plan
    splits no input. ``ranks``: this pipeline rank, over which parts are gathered; ``everyone``: all ranks; ``numbers``:
    a separate communicator on the host for the digests."""

    def __init__(
        self, plan: Plan, ranks: Communicator, everyone: Communicator, numbers: Communicator, device: torch.device
    ) -> None:
        self.layouts = plan.input_layouts
        self.planned = {entry.name: entry.shape for entry in plan.inputs}
        self.ranks, self.everyone, self.numbers, self.device = ranks, everyone, numbers, wire_device(device)
        places = dict.fromkeys(stage.placement.ranks for stage in plan.stages)
        device_of = {rank: number for place in places for number, rank in enumerate(place)}
        self._devices = [device_of[rank] for rank in sorted(device_of)]  # by rank
        self._holds = plan.holds
        self._batches: dict[tuple[int, ...], Batch] = {}  # by the digests of the ranks' calls
        self._has_said_gathered = False
        self._is_own: dict[object, bool] = {}  # by input, layout and parts
        self._faults: dict[tuple[int, int], tuple[Batch, Passes, str]] = {}
        if max(self._devices) and not any(layout.positions for layout in self.layouts.values()):
            shown = ", ".join(f"{name} {layout}" for name, layout in list(self.layouts.items())[:4])
            raise ShardwiseError(
                f'inputs="local", but the plan splits no input: {shown}; every rank would take its own data for '
                "the whole batch",
                fix='pass the whole batch on every rank (inputs="global"), or plan with a split batch: '
                'sw.plan(..., layouts={"x": "[8@dp, ...]"}) or mode="data_parallel"',
            )

    def batch(self, signature: Signature, tensors: Sequence[torch.Tensor]) -> Batch:
        """Return the batch of which this rank passes ``tensors``; every rank calls it in every call.

        Raises ShardwiseError on all ranks if the parts do not form a batch.
        """
        self.numbers.create_groups([self.numbers.mesh.sub_axes])  # once, and again after unpickling
        rows = self.numbers.gather_from_all(torch.tensor([signature.digest]), "the sizes of the ranks' inputs")
        digests = tuple(rows.flatten().tolist())
        if digests not in self._batches:
            self._batches[digests] = self._agreed(signature, tensors)
        return self._batches[digests]

    def own_part(self, name: str, tensor: torch.Tensor, layout: Layout, batch: Batch) -> torch.Tensor:
        """Return this rank's share of an input: the part itself if all parts match the layout, else a slice of the
        whole, which is gathered."""
        parts = [shapes[name] for shapes in batch.parts]
        case = (name, layout, *parts)
        if case not in self._is_own:
            planned = [layout.local_shape(layout.mesh.coordinates(device)) for device in range(len(parts))]
            self._is_own[case] = planned == parts and self._is_passed(name, layout, batch)
            has_rows = all(0 not in part for part in parts)  # fewer samples than devices: a last batch
            if not self._is_own[case] and has_rows and self.everyone.rank == 0:
                warn_user(
                    f"the parts of {name} have {_listed(parts)}, but the plan splits the whole, "
                    f"{list(batch.shapes[name])}, into {_listed(planned)}: it is gathered and split in every call",
                    UserWarning,
                )
        if self._is_own[case]:
            return tensor
        return shard(self.whole(name, tensor, batch), layout, self.ranks.coordinates)

    def is_part(self, name: str, layout: Layout, batch: Batch, start: int, stop: int, samples: int) -> bool:
        """Return whether ``layout`` gives every device exactly the rows of its part that are samples [start, stop).
        Samples are counted within the device's part, scaled to ``samples`` in all."""
        for device, shapes in enumerate(batch.parts):
            first, *rest = shapes[name]
            bounds = [divmod(first * number, samples) for number in (start, stop)]
            part = (bounds[1][0] - bounds[0][0], *rest)
            if any(left for _, left in bounds) or layout.local_shape(layout.mesh.coordinates(device)) != part:
                return False
        return self._is_passed(name, layout, batch)

    def _is_passed(self, name: str, layout: Layout, batch: Batch) -> bool:
        """Return whether a layout gives every device the part of an input that its rank passes, whatever its size."""
        return all(_block(layout, device) == self._places(name, device) for device in range(len(batch.parts)))

    def divides(
        self, batch: Batch, passes: Passes, wanted: Callable[[Batch], Sequence[Wanted]], with_samples: Collection[str]
    ) -> bool:
        """Return whether every micro-batch of a step can take the same share of every rank's part. If not, rank 0 warns
        once that parts are gathered. ``wanted``: layouts that the step's programs take; ``with_samples``: inputs that
        micro-batches split."""
        case = id(batch), id(passes)
        if case not in self._faults:
            self._faults[case] = batch, passes, self._fault(batch, passes, wanted(batch), with_samples)
        *_, fault = self._faults[case]
        has_rows = all(0 not in shape for part in batch.parts for shape in part.values())  # as in ``own_part``
        if fault and has_rows and not self._has_said_gathered and self.everyone.rank == 0:
            warn_user(f"{fault}: they are gathered and split again in every such step", UserWarning)
        self._has_said_gathered |= bool(fault) and has_rows
        return not fault

    def _fault(self, batch: Batch, passes: Passes, wanted: Sequence[Wanted], with_samples: Collection[str]) -> str:
        """Return why micro-batches cannot take shares of the ranks' parts, or "" if they can. They must take the same
        samples of every input, need them on these devices, and not compute with sample indices."""
        samples = sum(passes.sizes)
        if any(map(numbers_samples, passes.graphs.values())):
            return f"the model uses the positions of {samples} samples in the batch"
        rows = {name: self._sizes(name, batch.parts)[0] for name in batch.shapes if name in with_samples}
        if len(passes.sizes) > 1 and len(set(map(tuple, rows.values()))) > 1:
            shown = ", ".join(f"{name} {sizes}" for name, sizes in rows.items())
            return f"micro-batches cannot split {samples} samples that inputs divide differently over ranks ({shown})"
        if not all(
            self.is_part(name, layout, batch, *((start, stop) if name in with_samples else (0, samples)), samples)
            for layouts, start, stop in wanted
            for name, layout in layouts.items()
        ):
            size = f"micro-batches of {passes.sizes[0]}" if len(passes.sizes) > 1 else "those that the programs take"
            return f"the ranks' parts of {samples} samples do not divide into {size}"
        return ""

    def _agreed(self, signature: Signature, tensors: Sequence[torch.Tensor]) -> Batch:
        prints = _prints(signature, tensors, self.device)
        what = f"the parts of a batch ({signature})"
        everywhere = gather_objects((signature, prints), self.everyone, self.device, what)
        _check_same([signature for signature, _ in everywhere], self._holds, with_shapes=False)
        of_ranks = [signature.shapes for signature, _ in everywhere]
        for name in signature.shapes:
            self._check_copies(name, of_ranks, [prints[name] for _, prints in everywhere])
        of_devices = dict(zip(self._devices, of_ranks, strict=True))
        parts = tuple(of_devices[device] for device in range(len(of_devices)))
        return Batch({name: self._whole_shape(name, parts) for name in signature.shapes}, parts)

    def _check_copies(self, name: str, parts: Sequence[Mapping[str, Shape]], prints: Sequence[int]) -> None:
        """Raise ShardwiseError if ranks that the plan gives the same part of an input passed different ones."""
        first: dict[tuple[int, ...], int] = {}
        for rank, fingerprint in enumerate(prints):
            leader = first.setdefault(tuple(p for _, p, _ in self._places(name, self._devices[rank])), rank)
            if (prints[leader], parts[leader][name]) == (fingerprint, parts[rank][name]):
                continue
            layout = self.layouts.get(name)
            if layout is None and self.layouts:
                what = f'inputs="local": ranks {leader} and {rank} pass different {name}, which the plan does not have'
                fix = f"pass the inputs as they were planned, {listed([*self.layouts])}, or plan with this one"
                raise ShardwiseError(what, fix=fix)
            text = "whole" if layout is None else format_layout(layout)
            raise ShardwiseError(
                f"ranks {leader} and {rank} pass different {name}, but the plan assigns both the same part of "
                f"it: it is {text}{'' if layout is None else f' on {layout.mesh}'}",
                fix="choose samples by the coordinates on the axes that split the input (par.plan.input_layouts"
                f'["{name}"]), pass the whole batch on every rank (inputs="global"), or plan with layouts= that '
                "split it over all axes",
            )

    def _places(self, name: str, device: int) -> list[tuple[int, int, int]]:
        """Return (dim, the device's position along it, number of positions) for every split dim of an input."""
        layout = self.layouts.get(name)
        places = [] if layout is None else _block(layout, device)
        if places is None:
            what = f'inputs="local", but the part of {name} of a rank is not a contiguous block: {layout}'
            raise ShardwiseError(what, fix='pass the whole batch on every rank: inputs="global"')
        return places

    def _sizes(self, name: str, parts: Sequence[Mapping[str, Shape]]) -> list[list[int]]:
        """Return, per dim of an input, the sizes of its parts in order. Raises ShardwiseError if parts of ranks that
        hold the same rows differ in size."""
        sizes: list[dict[int, int]] = [{} for _ in parts[0][name]]
        for device, shapes in enumerate(parts):
            position_of = {dim: position for dim, position, _ in self._places(name, device)}
            for dim, size in enumerate(shapes[name]):
                other = sizes[dim].setdefault(position_of.get(dim, 0), size)
                if other != size:
                    raise ShardwiseError(
                        f"dim {dim} of {name} has {other} and {size} elements on ranks that hold the same part of "
                        f"it: {_listed([shapes[name] for shapes in parts])}",
                        fix="pass parts of one batch: only dims that the plan splits may differ",
                    )
        return [[by_position[position] for position in sorted(by_position)] for by_position in sizes]

    def _whole_shape(self, name: str, parts: Sequence[Mapping[str, Shape]]) -> Shape:
        """Return the shape of the whole input. Raises ShardwiseError if the parts do not form one."""
        sizes = self._sizes(name, parts)
        for dim, _, count in self._places(name, 0):
            planned = self.planned[name][dim]
            if dim > 0 and planned > 1 and sizes[dim] == [planned] * count:
                raise ShardwiseError(
                    f"every rank passes {planned} elements of dim {dim} of {name}, the size of the whole dim in "
                    f"the plan, which splits it {count} ways: {self.layouts[name]}",
                    fix=f"pass this rank's {planned}/{count} of them, or the whole batch on every rank "
                    '(inputs="global")',
                )
        return tuple(map(sum, sizes))

    def whole(self, name: str, tensor: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Gather the whole input from parts of any size over this pipeline rank. Raises ShardwiseError for parts that
        require a gradient."""
        if takes_gradient(tensor):
            raise ShardwiseError(
                f"the ranks' parts of {name} have {_listed([shapes[name] for shapes in batch.parts])}, which "
                "differ from the plan: they are gathered, and gradients do not flow back into gathered parts",
                fix="pass parts as the plan splits them (equal ones of a batch that divides), or the whole batch "
                'on every rank: inputs="global"',
            )
        numel = [torch.Size(shapes[name]).numel() for shapes in batch.parts]
        sent = tensor.detach().reshape(-1)
        sent = sent.view(torch.uint8) if sent.dtype == torch.bool else sent
        rows = self.ranks.gather_flat(sent, numel, f"the parts of {name}")
        whole = tensor.new_empty(batch.shapes[name])
        starts = [list(accumulate(sizes, initial=0)) for sizes in self._sizes(name, batch.parts)]
        for device, row in enumerate(rows):
            shape = batch.parts[device][name]
            place = whole
            for dim, position, _ in self._places(name, device):
                place = place.narrow(dim, starts[dim][position], shape[dim])
            place.copy_(row.view(tensor.dtype).view(shape))
        return whole


def _block(layout: Layout, device: int) -> list[tuple[int, int, int]] | None:
    """Return (dim, the device's position along it, number of positions) for every split dim; None if the device's part
    is not a block."""
    mesh, places = layout.mesh, []
    for dim, atoms in enumerate(layout.dims):
        axes = [axis for atom in atoms for axis in atom.axes]
        if axes and (layout.windows or any(atom.axes for atom in atoms[1:])):
            return None
        if mesh.size_of(axes) > 1:
            places.append((dim, mesh.index_along(axes, device), mesh.size_of(axes)))
    return places


def _listed(shapes: Sequence[Shape]) -> str:
    listed = ", ".join(str(list(shape)) for shape in shapes[:_NUM_NAMED])
    return listed + ", ..." * (len(shapes) > _NUM_NAMED)


# ----------------------------------------------------------------------------------------------------------------------
# Check in every training call that ranks which each pass the whole batch pass the same one. A program takes its part of
# the inputs from its own rank. Ranks with different batches would train on a mixture of them without any collective
# differing. Every rank therefore sends the others a digest of all elements of its inputs. The message overlaps with the
# call and is read at the start of the next one. For inputs on a GPU the digest is computed and copied to the host
# behind the kernels of the call. It is sent at the start of the next call. A difference is then found one call later,
# and the host never waits for the kernels of the current call.

SAME_INPUTS_FIX = (
    "pass the same samples on every rank (no DistributedSampler, the same seed; sw.DataLoader does this), or "
    'one part of the batch on each: sw.parallelize(..., inputs="local")'
)


@dataclass
class _Passed:
    """The inputs of a call. ``leaves``: which arguments are tensors, and their tree; ``prints``: a fingerprint of each
    tensor, on its way to the host."""

    call: int
    leaves: tuple[list[bool], Any]
    prints: Tensor
    copy: CopyInFlight
    flight: GatheredRows | None = None


class SameInputs:
    """The comparison for one module. ``everyone``: all ranks; ``numbers``: a separate communicator on the host for the
    digests."""

    def __init__(self, everyone: Communicator, numbers: Communicator, device: torch.device) -> None:
        self.everyone, self.numbers, self.device = everyone, numbers, device
        self._passed: list[_Passed] = []  # not compared yet, oldest first

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_passed": []}

    def begin(self, flat: Sequence[Any], spec: Any) -> None:
        """Begin a training call on these leaves. Raises ShardwiseError on all ranks if the inputs of an earlier call
        differed."""
        if self._passed and self._passed[0].flight is not None:
            self._compare(self._passed.pop(0))
        for passed in self._passed:
            self._send(passed)
        tensors = [x for x in flat if isinstance(x, Tensor)]
        on = next((x.device for x in tensors if x.device.type != "cpu"), torch.device("cpu"))
        prints = [fingerprint_on(x.device)(x).to(on) for x in tensors]
        stacked = torch.stack(prints) if prints else torch.zeros(0, dtype=torch.int64)
        target = host_memory(stacked)
        copy = start_copy(stacked, target)
        passed = _Passed(self.everyone.calls, ([isinstance(x, Tensor) for x in flat], spec), target, copy)
        self._passed.append(passed)
        if copy.landed is None:
            self._send(passed)

    def _send(self, passed: _Passed) -> None:
        passed.copy.finish()
        digest = hashlib.blake2b(passed.prints.numpy().tobytes(), digest_size=8).digest()
        row = torch.tensor([int.from_bytes(digest, "little", signed=True)])
        self.numbers.create_groups([self.numbers.mesh.sub_axes])  # once, and again after unpickling
        passed.flight = self.numbers.start_gather(row, "the digests of the ranks' inputs")

    def _compare(self, passed: _Passed) -> None:
        assert passed.flight is not None
        if len({*passed.flight.wait().flatten().tolist()}) == 1:
            return
        paths = flatten_with_path(unflatten(*passed.leaves))[0]
        names = [leaf_name(path) for path, is_tensor in paths if is_tensor]
        mine = dict(zip(names, passed.prints.tolist(), strict=True))
        everywhere = gather_objects(mine, self.everyone, self.device, f"which inputs of call {passed.call} differ")
        for name in mine:
            ranks_of: dict[object, list[int]] = {}
            for rank, prints in enumerate(everywhere):
                ranks_of.setdefault(prints.get(name), []).append(rank)
            if len(ranks_of) > 1:
                first, *others = (name_ranks(ranks) for ranks in ranks_of.values())
                what = (
                    f"in call {passed.call} {first} passed another {name} than {' and '.join(others)}; every rank "
                    "must pass the whole batch, so that call trained on a mixture"
                )
                fix = f"{SAME_INPUTS_FIX}; resume from before that call"
                raise ShardwiseError(what, fix=fix, section="different-calls")
