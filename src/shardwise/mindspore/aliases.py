"""Long import paths of the reference: path there -> path here."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import partial
from importlib import import_module
from types import ModuleType

from shardwise.mindspore.named import TABLES, absent

HERE = "shardwise.mindspore"
PATHS = {path: target for target, paths in TABLES["paths"].items() for path in paths.split()}


def install() -> None:
    """Make these paths importable. Their modules say what stands for a missing name."""
    for path, target in PATHS.items():
        module = import_module(f"{HERE}.{target}")
        sys.modules.setdefault(f"{HERE}.{path}", module)
        vars(module).setdefault("__getattr__", absent(module.__name__, partial(_names, module)))
        parent, _, leaf = path.rpartition(".")
        vars(sys.modules[f"{HERE}.{parent}".rstrip(".")]).setdefault(leaf, module)  # import parent.leaf as name


def _names(module: ModuleType) -> Iterable[str]:
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
    return getattr(module, "__all__", own)
