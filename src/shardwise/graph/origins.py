"""Origin of a traced operator: the path of its module and the line of the user's model.

The user's line is the innermost one that is neither in torch nor in shardwise. It is recorded while the model is traced
(``user_lines.UserLines``).
"""

from __future__ import annotations

import re
import sys
import sysconfig
from pathlib import Path
from types import FrameType, ModuleType

import numpy as np
import torch
from torch._ops import OpOverload
from torch.fx import Node

LINE = "shardwise_line"  # the key under which a node's metadata holds its line
INITIAL = "shardwise_initial"  # the key that marks nodes that make initial values of parameters
NOT_USER_CODE = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), "<")
_NOT_OF_MODELS = (*NOT_USER_CODE, str(Path(np.__file__).parent))
# pytest rewrites a model's ``assert`` into calls of its own, whose closures lead to the whole test session.
_OF_PYTEST = re.compile(r"[\\/](_pytest|pluggy)[\\/]")
STANDARD_LIBRARY = sysconfig.get_path("stdlib")
INSTALLED = sysconfig.get_path("purelib")  # lies inside it


def calling_line() -> str:
    """Return the innermost line that is neither torch's nor this package's, as ``model.py:41``; "" if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(NOT_USER_CODE[:2]):
        frame = frame.f_back
    return "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def is_standard(filename: str) -> bool:
    """Return whether a file is of Python's standard library."""
    return filename.startswith(STANDARD_LIBRARY) and not filename.startswith(INSTALLED)


def is_of_models(filename: str) -> bool:
    """Return whether a file may hold a model's code: the user's or an installed package's, not Python, NumPy, torch,
    pytest or shardwise."""
    return not (is_standard(filename) or filename.startswith(_NOT_OF_MODELS) or _OF_PYTEST.search(filename))


def is_module_of_models(module: ModuleType | None) -> bool:
    """Return whether a Python module may be a model's; an interactive one has no file."""
    file = getattr(module, "__file__", None)
    return is_of_models(file) if file else module is sys.modules.get("__main__")


def is_class_of_models(kind: type) -> bool:
    """Return whether a class may be a model's."""
    return is_module_of_models(sys.modules.get(kind.__module__))


def module_path(node: Node, prefix: str) -> str:
    """Return the path of a node's module without the wrapper's ``prefix``: "layers.0.mlp", "" for the root."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = re.sub(r"@\d+", "", stack[-1][0]) if stack else ""
    return "" if path == prefix else path.removeprefix(f"{prefix}.")


def line_of(node: Node) -> str:
    """Return the user's line of a node; for a node that is no operator, the line of the next operator."""
    here: Node = node
    while here.op != "output":
        line = (here.meta.get("custom") or {}).get(LINE)
        if line is not None:
            return str(line)
        if isinstance(here.target, OpOverload):
            break
        here = here.next
    return ""


def is_of_package(package: str, line: str) -> bool:
    """Return whether a line, ``loop.py:41``, may be of an imported package."""
    name = line.partition(":")[0]
    files = (vars(module).get("__file__") for key, module in [*sys.modules.items()] if key.startswith(f"{package}."))
    return any(file and Path(file).name == name for file in files)


def is_initial(node: Node) -> bool:
    """Return whether a function of ``torch.nn.init`` made the node."""
    return INITIAL in (node.meta.get("custom") or {})
