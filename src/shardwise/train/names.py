"""Names of files and folders of checkpoints."""

from __future__ import annotations

import re
from collections.abc import Iterable

FILE = "checkpoint.json"  # the manifest
OWNER = "owner"  # the file with the token of the folder's save
INCOMPLETE, DELETED, DAMAGED = ".incomplete", ".deleted", ".damaged"
_OF_SAVES = re.compile(r"shard-\d+-[\w-]+\.safetensors|(written|failed)-\d+(-\w+(\.json)?)?")


def is_of_saves(names: Iterable[str]) -> bool:
    """Return whether a folder holds only files that saves write."""
    plain = (name.removesuffix(".part") for name in names)
    return all(name in (FILE, OWNER) or _OF_SAVES.fullmatch(name) for name in plain)


def with_token(file: str, token: str) -> str:
    """Return the name of a data file of one save; the plain name without a token."""
    return f"{file.removesuffix('.safetensors')}-{token}.safetensors" if token else file
