"""Weights in safetensors files: a rank reads only the boxes of each tensor that it holds.

Files are those of Hugging Face: ``model.safetensors``, or several files with ``model.safetensors.index.json``, which
maps names to files. Names are those of the module, possibly without (or with) the prefix of a transformers model's base
(``base_model_prefix``).
"""

from __future__ import annotations

from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from shardwise.errors import PlanWarning, ShardwiseError, listed, one_per_line, warn_user
from shardwise.layouts.boxes import Box
from shardwise.layouts.text import format_dtype
from shardwise.runtime.guards.registry import is_persistent, tensors_of
from shardwise.untrusted_text import MAX_FILE, read_json, read_text

INDEX = "model.safetensors.index.json"


class WeightFiles:
    """The tensors of a file, or of a folder of files, matched with a module's; a context manager. Raises ShardwiseError
    for files that are missing or not safetensors, and for tensors whose shape or kind of dtype differs from the
    module's. If ``complete``, it also raises for tensors without values that are not in the files.

    ``stored_names``: first name of a parameter or buffer -> its name in the files; ``missing``: names that are not in
    them, except those of non-persistent buffers; ``unexpected``: names in the files that the module does not have.
    """

    def __init__(self, path: str | Path, module: torch.nn.Module, complete: bool = True) -> None:
        self.path = Path(path)
        self.stored_names: dict[str, str] = {}
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self._open = ExitStack()
        self._files: dict[str, Any] = {}  # tensor name -> its file
        try:
            for file in _files_of(self.path):
                opened = self._open.enter_context(safe_open(str(file), framework="pt"))
                self._files |= dict.fromkeys(opened.keys(), opened)
            self._match(module, complete)
        except (OSError, SafetensorError) as error:
            self._open.close()
            what = f"the weights in {self.path} cannot be read: {error}"
            raise ShardwiseError(what, fix="pass a safetensors file or the folder of a saved model") from error
        except ShardwiseError:
            self._open.close()
            raise

    def __enter__(self) -> WeightFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def read(self, name: str, local: torch.Tensor, boxes: tuple[Box, ...]) -> torch.Tensor:
        """Fill a rank's part of a tensor of the module, in the part's dtype."""
        stored = self.stored_names[name]
        with torch.no_grad():
            for box in boxes:
                file = self._files[stored]
                value = file.get_slice(stored)[box.rows] if box.rows else file.get_tensor(stored)
                local[box.local_rows].copy_(value)
        return local

    @property
    def prints(self) -> dict[str, int]:
        """Return numbers that must be the same on all ranks: names in the files -> numbers of elements."""
        shapes = ((name, file.get_slice(name).get_shape()) for name, file in self._files.items())
        return {f"{name} in {self.path}": prod(shape) for name, shape in shapes}

    def _match(self, module: torch.nn.Module, complete: bool) -> None:
        prefix = f"{getattr(module, 'base_model_prefix', '') or ''}."
        names: dict[int, list[str]] = {}
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in tensors_of(module):
            names.setdefault(id(tensor), []).append(name)
            tensors.setdefault(names[id(tensor)][0], tensor)
        used: set[str] = set()
        faults: list[str] = []
        for first, tensor in tensors.items():
            spelled = [form for name in names[id(tensor)] for form in _spelled(name, prefix)]
            stored = next((name for name in spelled if name in self._files), None)
            used |= self._files.keys() & set(spelled)
            if stored is not None:
                self.stored_names[first] = stored
                faults += self._misfit(first, tensor, stored)
            elif is_persistent(module, first):
                self.missing.append(first)
        if faults:
            raise ShardwiseError(one_per_line(f"{self.path} has the weights of another model", faults))
        self.unexpected = sorted(self._files.keys() - used)
        empty = [name for name in self.missing if tensors[name].is_meta]
        if not self.stored_names or (empty and complete):
            raise ShardwiseError(
                f"{self.path} does not have {len(self.missing)} of the module's {len(tensors)} tensors: "
                f"{listed(self.missing)}",
                facts=[("there", f"{len(self.unexpected)} names that the module lacks: {listed(self.unexpected)}")],
                fix="pass the weights of this model, or init=, a callable (name, tensor), for new tensors",
            )

    def _misfit(self, name: str, tensor: torch.Tensor, stored: str) -> list[str]:
        """Return the reason why a tensor of the files does not match the module's, as a list of at most one message."""
        piece = self._files[stored].get_slice(stored)
        shape, kind = tuple(piece.get_shape()), piece.get_dtype()
        is_floating_point = kind.startswith(("F", "BF"))
        if shape == tuple(tensor.shape) and is_floating_point == tensor.is_floating_point():
            return []
        present = f"{format_dtype(tensor.dtype)}{list(tensor.shape)}"
        return [f"{name} is {present} in the module and {kind}{list(shape)} in the files"]

    def announce(self) -> None:
        """Warn about names on one side only."""
        notes = []
        if self.missing:
            notes.append(f"they lack {listed(self.missing)} ({len(self.missing)}), which keep the values of the module")
        if self.unexpected:
            notes.append(f"the module lacks {listed(self.unexpected)} ({len(self.unexpected)})")
        if notes:
            warn_user(f"the weights in {self.path}: {'; '.join(notes)}", PlanWarning)


def _files_of(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    index = path / INDEX
    if index.is_file():
        try:
            places = read_json(read_text(index, MAX_FILE))["weight_map"].values()
            files = sorted({Path(str(place)).name for place in places})
        except (ShardwiseError, ValueError, TypeError, KeyError, AttributeError) as error:
            what = f"{index} is not an index of safetensors files"
            raise ShardwiseError(what, fix="copy the model's folder again") from error
        return [path / name for name in files]
    files_here = sorted(path.glob("*.safetensors"))
    if not files_here:
        what = f"there are no safetensors files in {path}"
        fix = "pass a safetensors file or a folder with them; model.save_pretrained(folder) writes one"
        raise ShardwiseError(what, fix=fix)
    return files_here


def _spelled(name: str, prefix: str) -> tuple[str, ...]:
    if len(prefix) == 1:
        return (name,)
    return (name, name.removeprefix(prefix)) if name.startswith(prefix) else (name, prefix + name)
