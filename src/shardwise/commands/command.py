"""The type of the subcommands of ``shardwise``, and helpers for their output files."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shardwise.errors import ShardwiseError


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand with its arguments. ``execute`` runs it and returns the exit code; ``has_json``: whether it has the
    option ``--json``."""

    name: str
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    execute: Callable[[argparse.Namespace], int]
    has_json: bool = True


def add_output(parser: argparse.ArgumentParser, what: str, *, required: bool = True) -> None:
    parser.add_argument("-o", "--output", required=required, type=_to_write, metavar="FILE", help=what)


def _to_write(text: str) -> str:
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder, not a file")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"no permission to write {text}")
    return text


@contextmanager
def writing(path: str) -> Iterator[None]:
    """Raise a ShardwiseError for an OSError of writing to ``path`` inside this context."""
    try:
        yield
    except OSError as error:
        raise ShardwiseError(
            f"cannot write {path}: {error.strerror or error}", fix="give another file with -o"
        ) from error
