"""Names of files and folders of checkpoints."""

from __future__ import annotations

import re
from collections.abc import Iterable

FILE = "checkpoint.json"  # the manifest
OWNER = "owner"  # the file with the token of the folder's save
RANDOM = "random."  # begins the names of the states of generators, one for each rank
INCOMPLETE, DELETED, DAMAGED = ".incomplete", ".deleted", ".damaged"
_OF_SAVES = re.compile(r"shard-\d+-[\w-]+\.safetensors|(written|failed|part)-\d+(-\w+(\.json)?)?")


def is_of_saves(names: Iterable[str]) -> bool:
    """Return whether a folder holds only files that saves write."""
    plain = (name.removesuffix(".part") for name in names)
    return all(name in (FILE, OWNER) or _OF_SAVES.fullmatch(name) for name in plain)


def with_token(file: str, token: str) -> str:
    """Return the name of a data file of one save; the plain name without a token."""
    return f"{file.removesuffix('.safetensors')}-{token}.safetensors" if token else file


def is_kept(name: str, token: str) -> bool:
    """Return whether a file of the save with a token is one of the checkpoint when that is complete."""
    return name.endswith(f"{token}.safetensors") or (name.startswith("part-") and token in name)
