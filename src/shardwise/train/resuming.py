"""``sw.load_checkpoint``: resume a run under another plan, on other ranks, or on one device.

Everything is checked before anything is changed: names, shapes, dtypes, the optimizer's groups, and the checksums of
the blocks that contain this rank's parts. Tensors are copied only if no rank found a fault.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from shardwise.errors import CheckpointError, PlanWarning, ShardwiseError, listed, one_per_line
from shardwise.layouts.text import format_dtype
from shardwise.runtime.agree import from_rank_zero, gather_values, raise_first, rank_and_world_size, show_progress_once
from shardwise.runtime.cpu_optimizer import with_states_on_host
from shardwise.runtime.guards.elementwise_optimizers import is_matrixwise
from shardwise.runtime.guards.matrix_optimizers import has_states_here
from shardwise.train.checkpoints import Optimizers, Resumable, Resumables, Schedulers, finish_saving
from shardwise.train.data import DataLoader
from shardwise.train.files import CheckpointReader
from shardwise.train.manifest import Manifest, StoredTensor, read_manifest
from shardwise.train.names import FILE, RANDOM
from shardwise.train.parts import (
    MODEL,
    STATE,
    TensorPart,
    is_seed,
    kind_of,
    module_parts,
    names_in_groups,
    restore_random,
    seeds_in,
    state_name,
)
from shardwise.train.retention import checkpoints_in
from shardwise.train.stores import Folder, Place, answered, folder_of
from shardwise.train.values import decode
from shardwise.untrusted_text import shorten_repr


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint. ``path``: its folder, or its URL as text; ``step``, ``extra``: the saved values; ``plan``:
    digest of the plan that was in use ("" for none); ``num_bytes_read``: bytes of tensors that this rank read."""

    path: Path | str
    step: int
    extra: Any
    plan: str
    num_bytes_read: int


def load_checkpoint(
    path_or_folder: Place,
    par: torch.nn.Module,
    optimizer: Optimizers = None,
    schedulers: Schedulers = (),
    *,
    scaler: Resumable | None = None,
    data: Resumable | None = None,
    random: bool = True,
    not_after: int | None = None,
) -> Checkpoint:
    """Load a checkpoint that was saved under any plan and number of ranks. Call it on every rank.

    Each rank reads only the blocks that contain its own parts. Floating-point tensors are converted to the dtype of
    ``par``. Optimizer states that had their parameter's dtype follow it; others keep theirs.

    Args:
        path_or_folder: a checkpoint, or a folder of several: a path, or a URL that fsspec knows (``"s3://..."``). Of
            several the newest complete one is loaded, and a warning names incomplete and damaged ones.
        par: a parallel module, or any module that every rank holds whole.
        optimizer: one or several optimizers; objects that are not given are not loaded.
        schedulers: one or several schedulers, in the order in which they were saved.
        scaler: the gradient scaler.
        data: the data loader.
        random: whether to restore the random generators of Python, NumPy and torch. With as many ranks as saved every
            rank gets its own state, else all get that of rank 0.
        not_after: ignore checkpoints of later steps in a folder.

    Returns:
        The loaded checkpoint's step, extra values and location.

    Raises:
        CheckpointError: on all ranks, if the checkpoint is missing or damaged.
        ShardwiseError: on all ranks, if it is of another model, optimizer or kind of dtype, or cannot be read at this
            moment. Nothing is changed then.
    """
    resumables = Resumables.of(optimizer, schedulers, scaler, data, random=random)
    return load_newest(folder_of(path_or_folder), par, resumables, not_after=not_after)


def load_newest(folder: Folder, par: torch.nn.Module, resumables: Resumables, *, not_after: int | None) -> Checkpoint:
    """Do the work of ``load_checkpoint``."""
    finish_saving(par)
    names, is_folder = from_rank_zero(partial(_candidates, folder, not_after))
    for path in (folder / name if is_folder else folder for name in names):
        with show_progress_once("loading a checkpoint"):
            checkpoint = load_one(
                path, partial(read_manifest, path), partial(CheckpointReader, path), par, resumables, skips=is_folder
            )
        if checkpoint is not None:
            return checkpoint
    what = f"no checkpoint in {folder} is complete"
    raise CheckpointError(what, fix="give a folder in which save_checkpoint has finished at least once")


def load_one(
    path: Folder,
    read: Callable[[], Manifest],
    reader: Callable[[Manifest], CheckpointReader],
    par: torch.nn.Module,
    resumables: Resumables,
    *,
    skips: bool,
) -> Checkpoint | None:
    """Load one checkpoint. Collective. With ``skips``, a damaged one gives None and a warning on rank 0. ``read``:
    returns its manifest; ``reader``: returns a reader of its files."""
    rank, num_ranks = rank_and_world_size()
    load: _Load | None = None
    damage = fault = None
    try:
        manifest = read()
        source = rank if manifest.num_ranks == num_ranks else 0
        load = _Load(path, manifest, reader(manifest), par, resumables, source)
        load.check_values()
        load.reader.verify((name, part.boxes) for name, part in load.parts_to_read())
    except CheckpointError as error:
        damage = error
    except ShardwiseError as error:
        fault = error
    except (TypeError, LookupError, AttributeError) as error:
        what = f"{path} has values that save_checkpoint does not write: {shorten_repr(str(error))}"
        damage = CheckpointError(what, fix="load another checkpoint")
    damaged = [text for text in gather_values(None if damage is None else str(damage)) if text]
    if damaged and skips:
        if rank == 0:
            what = damaged[0].split("\n", 1)[0]
            warnings.warn(f"{path} is skipped: {what}", PlanWarning, stacklevel=3)
        return None
    raise_first(CheckpointError, damage)
    left, forgotten = _unowned(load)  # a collective, also for ranks with a fault
    if load is not None and left:
        fault = fault or _another(path, [f"{name} is in the checkpoint but not in the module" for name in left])
    raise_first(ShardwiseError, fault)
    assert load is not None
    load.reader.prepare()
    if rank == 0 and forgotten:
        what = f"{path}: the states of {listed(forgotten)} are not loaded: no given optimizer has these parameters"
        warnings.warn(what, PlanWarning, stacklevel=3)
    if rank == 0 and load.converted:
        warnings.warn(f"{path}: {load.converted}", PlanWarning, stacklevel=3)
    try:
        return load.apply()
    except (TypeError, LookupError, AttributeError, RuntimeError, AssertionError, ValueError) as error:
        what = f"{path} has states that the given objects do not accept: {type(error).__name__}: {error}"
        fix = "the checkpoint is partly loaded: load another one, or create the objects as they were saved"
        raise CheckpointError(what, fix=fix) from error


def _unowned(load: _Load | None) -> tuple[list[str], list[str]]:
    """Return (tensors of the model that no rank has, parameters whose states no rank's optimizer has). Collective."""
    everywhere = [lists for lists in gather_values(load and (load.left, load.forgotten)) if lists]
    left, forgotten = (
        sorted(set.intersection(*(set(lists[which]) for lists in everywhere)) if everywhere else ()) for which in (0, 1)
    )
    return left, forgotten


def _another(path: Folder, faults: Sequence[str]) -> ShardwiseError:
    return ShardwiseError(one_per_line(f"{path} is of another model", faults))


def _candidates(path: Folder, not_after: int | None) -> tuple[list[str], bool]:
    """Return (names of the checkpoints to try, newest first; whether they are in a folder of several), on rank 0.
    Raises CheckpointError if there is none, and ShardwiseError if nobody answers."""
    why = ""
    try:
        with answered(path):
            names = path.names()
            if FILE in names:
                return [path.name], False
            if names or path.exists():
                complete, torn = checkpoints_in(path)
                for name, reason in torn:
                    warnings.warn(f"{name} is skipped: {reason}", PlanWarning, stacklevel=5)
                fits = (
                    place for place, manifest in complete.items() if not_after is None or manifest.step <= not_after
                )
                return [place.name for place in fits][::-1], True
    except ShardwiseError:
        raise
    except (OSError, ValueError) as error:  # an invalid name
        why = f": {error}"
    what = f"there is no checkpoint {str(path)!r}{why}"
    raise CheckpointError(what, fix="give the folder of a checkpoint, or a folder of several")


class _Load:
    """The loading of one checkpoint into a module and its optimizers. ``source``: the saved rank whose random states
    are used."""

    def __init__(
        self,
        path: Folder,
        manifest: Manifest,
        reader: CheckpointReader,
        par: torch.nn.Module,
        resumables: Resumables,
        source: int,
    ) -> None:
        self.path, self.manifest, self.par, self.resumables = path, manifest, par, resumables
        self.optimizers = resumables.optimizers
        self.parts, _ = module_parts(par)
        self.reader, self.on_host = reader, with_states_on_host()
        self.values: Mapping[str, Any] = {name: decode(value) for name, value in manifest.values.items()}
        states = self.values.get("schedulers")
        self._schedulers: list[Any] = states if isinstance(states, list) else []
        self.left: list[str] = []  # tensors of the model that this rank does not have
        self.converted = ""
        self._source = source
        self.parameters = self._parameters()
        self.names = names_in_groups(self.optimizers, self.parts)
        self.settings = self._settings() if self.optimizers else []
        self.states = self._states() if self.optimizers else {}
        self.forgotten = self._forgotten() if self.optimizers else []  # parameters whose states no optimizer here has

    # -- what is to be read --------------------------------------------------------------------------------------------

    def _parameters(self) -> dict[str, TensorPart]:
        """Return stored name -> this rank's part, of parameters and buffers. Raises ShardwiseError on a mismatch."""
        parameters: dict[str, TensorPart] = {}
        faults: list[str] = []
        changed: dict[str, list[str]] = {}
        for name, part in self.parts.items():
            stored = self.manifest.find(MODEL + name)
            if stored is None:
                if not is_seed(name):  # a checkpoint of a module that is not parallel has none
                    faults.append(f"{name} is in the module but not in the checkpoint")
                continue
            fault = _misfit(name, self.manifest.tensors[stored], part)
            faults += [fault] if fault else []
            parameters[stored] = part
            before, after = self.manifest.tensors[stored].dtype, part.tensor.dtype
            if before != after:
                changed.setdefault(f"{format_dtype(before)} to {format_dtype(after)}", []).append(name)
        if faults:
            raise _another(self.path, faults)
        self.left = [
            name.removeprefix(MODEL)
            for name in self.manifest.tensors
            if name.startswith(MODEL) and name not in parameters and not is_seed(name)
        ]
        self.converted = "; ".join(f"{listed(names)} is converted from {what}" for what, names in changed.items())
        return parameters

    def _canonical(self, name: str) -> str:
        return (self.manifest.find(MODEL + name) or MODEL + name).removeprefix(MODEL)

    def _settings(self) -> list[list[Mapping[str, Any]]]:
        """Return the stored options of every group of every optimizer. Raises ShardwiseError for other optimizers."""
        stored_kinds, names, settings = (self.values.get(key) for key in ("kinds", "names", "settings"))
        kinds = [kind_of(optimizer) for optimizer in self.optimizers]
        if stored_kinds != kinds or not isinstance(names, list) or not isinstance(settings, list):
            has = f"states of {', '.join(map(str, stored_kinds))}" if stored_kinds else "no optimizer"
            what = f"{self.path} has {has}, but optimizer= is {', '.join(kinds)}"
            raise ShardwiseError(
                what, fix="pass the optimizer that was saved, or load without optimizer= and start a new one"
            )
        stored_settings: list[list[Mapping[str, Any]]] = []
        for position, groups in enumerate(self.names):
            stored_names, stored = names[position], settings[position]
            group_of = {name: at for at, group in enumerate(stored_names) for name in group}
            group_settings: list[Mapping[str, Any]] = []
            for at, group in enumerate(groups):
                matches = {group_of.get(self._canonical(name)) for name in group} or {at}
                (match,) = matches if len(matches) == 1 else (None,)
                if match is None or match >= len(stored):
                    what = f"group {at} of {kinds[position]} ({listed(group)}) is not a group in {self.path}"
                    raise ShardwiseError(what, fix="create the same parameter groups as when it was saved")
                group_settings.append({key: value for key, value in _section(stored[match]).items() if key != "params"})
            stored_settings.append(group_settings)
        return stored_settings

    def _states(self) -> dict[int, dict[str, tuple[str, TensorPart]]]:
        """Return id of a parameter -> key -> (stored name, the part to fill)."""
        by_name: dict[str, list[str]] = {}
        for full in self.manifest.tensors:
            if full.startswith(STATE):
                name, _, key = full.removeprefix(STATE).rpartition(".")
                by_name.setdefault(name, []).append(key)
        states: dict[int, dict[str, tuple[str, TensorPart]]] = {}
        for optimizer, groups in zip(self.optimizers, self.names, strict=True):
            for group, names in zip(optimizer.param_groups, groups, strict=True):
                for parameter, name in zip(group["params"], names, strict=True):
                    canonical = self._canonical(name)
                    states[id(parameter)] = {
                        key: (full, self._state(optimizer, group, parameter, name, full))
                        for key in by_name.get(canonical, ())
                        if has_states_here(optimizer, parameter)
                        for full in (state_name(canonical, key),)
                    }
        return states

    def _forgotten(self) -> list[str]:
        """Return the parameters that have states in the checkpoint, but are in no optimizer here."""
        names_here = {self._canonical(name) for groups in self.names for group in groups for name in group}
        kept = (full.removeprefix(STATE).rpartition(".")[0] for full in self.manifest.tensors if full.startswith(STATE))
        return sorted(set(kept) - names_here)

    def _state(
        self, optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameter: torch.Tensor, name: str, full: str
    ) -> TensorPart:
        stored, whole = self.manifest.tensors[full], self.parts[name]
        of_parameter = stored.shape == whole.shape and bool(stored.shape or not full.endswith(".step"))
        before = optimizer.state.get(parameter, {}).get(full.rpartition(".")[2])
        if isinstance(before, torch.Tensor):
            dtype, device = before.dtype, before.device
        else:
            follows = stored.dtype == self.manifest.tensors[MODEL + self._canonical(name)].dtype and of_parameter
            dtype = parameter.dtype if follows else stored.dtype
            on_device = stored.shape or of_parameter or group.get("capturable") or group.get("fused")
            on_device = on_device and not (of_parameter and id(parameter) in self.on_host)
            device = parameter.device if on_device else torch.device("cpu")
        if of_parameter and not is_matrixwise(type(optimizer)):
            return whole.like(torch.empty(parameter.shape, dtype=dtype, device=device))
        return TensorPart.whole(torch.empty(stored.shape, dtype=dtype, device=device))

    # -- checks --------------------------------------------------------------------------------------------------------

    def check_values(self) -> None:
        count, schedulers = len(self._schedulers), self.resumables.schedulers
        if schedulers and count != len(schedulers):
            what = f"{self.path} has the states of {count} schedulers, and {len(schedulers)} are given"
            raise ShardwiseError(what, fix="give as many as were saved, in the same order")
        for name in self._given():
            if self.values.get(name) is None:
                what = f"{self.path} has no state for {name}="
                raise ShardwiseError(what, fix=f"load without {name}=, or give it to save_checkpoint as well")
        if isinstance(self.resumables.data, DataLoader):
            self.resumables.data.check_state_dict(self.values["data"])

    def _given(self) -> dict[str, Resumable]:
        given = {"scaler": self.resumables.scaler, "data": self.resumables.data}
        return {name: resumable for name, resumable in given.items() if resumable is not None}

    def parts_to_read(self) -> list[tuple[str, TensorPart]]:
        parts = [*self.parameters.items(), *(state for kept in self.states.values() for state in kept.values())]
        generators = self.reader.random_of(self._source) if self.resumables.random else None
        if generators is not None:
            part = TensorPart.whole(torch.empty(generators.shape, dtype=generators.dtype))
            parts.append((f"{RANDOM}{self._source}", part))
        return parts

    # -- changes -------------------------------------------------------------------------------------------------------

    def apply(self) -> Checkpoint:
        """Load everything. Schedulers, scaler and data come first: if one rejects its state, no tensor has changed."""
        for scheduler, state in zip(self.resumables.schedulers, self._schedulers, strict=False):
            scheduler.load_state_dict(state)
        for name, resumable in self._given().items():
            resumable.load_state_dict(self.values[name])
        parts = self.parts_to_read()
        for name, part in parts:
            self.reader.read(name, part)
        for name, split in seeds_in(self.par).items():
            split._draws = split._draws or MODEL + name in self.parameters
        for optimizer, settings in zip(self.optimizers, self.settings, strict=True):
            self._resume(optimizer, settings)
        if self.resumables.random and parts[-1][0].startswith(RANDOM):
            restore_random(parts[-1][1].tensor)
        extra, read = self.values.get("extra"), self.reader.num_bytes_read
        return Checkpoint(self.path.path, self.manifest.step, extra, self.manifest.plan, read)

    def _resume(self, optimizer: torch.optim.Optimizer, settings: Sequence[Mapping[str, Any]]) -> None:
        groups = optimizer.state_dict()["param_groups"]
        for group, stored in zip(groups, settings, strict=True):
            group.update(stored)
        optimizer.load_state_dict({"state": {}, "param_groups": groups})
        names = {id(part.tensor): name for name, part in self.parts.items()}
        plain = _section(self.values.get("plain"))
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if not has_states_here(optimizer, parameter):
                    continue
                state = dict(_section(plain.get(self._canonical(names[id(parameter)]))))
                state |= {key: part.tensor for key, (_, part) in self.states[id(parameter)].items()}
                if state:
                    optimizer.state[parameter] = state


def _misfit(name: str, stored: StoredTensor, part: TensorPart) -> str:
    """Return why a stored tensor does not fit into a part; "" if it fits."""
    before, after = stored.dtype, part.tensor.dtype
    same_kind = before.is_floating_point and after.is_floating_point
    if stored.shape == part.shape and (before == after or same_kind):
        return ""
    here = f"{format_dtype(after)}{list(part.shape)}"
    return f"{name} is {here} in the module and {format_dtype(before)}{list(stored.shape)} in the checkpoint"


def _section(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
