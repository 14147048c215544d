"""Write what the reference says: its arguments and their defaults into reference_signatures.json, and the results of
the calls of reference_values.tsv into that file. A new call is a line with the call alone.

It runs where the reference is installed, never with the tests: ``make dialect-reference``.
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import reference_run

MODULES = (
    "nn", "ops", "mint", "mint.nn", "mint.nn.functional", "mint.optim", "common.initializer", "amp",
    "nn.probability.distribution", "train",
)  # fmt: skip
FILE = Path(__file__).with_name("reference_signatures.json")
REQUIRED = "(required)"


def plain(value: Any) -> Any:
    """A default as JSON: numbers, texts, lists; of anything else its name."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if abs(value) < float("inf") else str(value)
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return f"({str(value).partition(' at 0x')[0].rpartition('.')[2].lower()})"


def defaults(function: Any, *, is_method: bool) -> dict[str, Any] | None:
    """Argument -> default, behind ``"*"`` those that are given by name; None where nothing says them."""
    try:
        parameters = list(inspect.signature(function).parameters.values())[is_method:]
    except (TypeError, ValueError):  # of C++
        return None
    if [p.kind for p in parameters] == [inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD]:
        parameters = behind_decorator(function)[is_method:]
    if not parameters or parameters[0].kind is inspect.Parameter.VAR_POSITIONAL:
        return None if parameters else {}
    found: dict[str, Any] = {}
    for p in parameters:
        if p.kind is p.KEYWORD_ONLY and "*" not in found:
            found["*"] = None
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            found[p.name] = REQUIRED if p.default is p.empty else plain(p.default)
    return found


def behind_decorator(function: Any) -> list[inspect.Parameter]:
    """The parameters of a function behind a decorator that hides its arguments."""
    inner = inspect.unwrap(function)
    cells = [cell.cell_contents for cell in getattr(inner, "__closure__", None) or ()]
    hidden = next((value for value in cells if inspect.isfunction(value)), inner)
    return list(inspect.signature(hidden).parameters.values())


def of_class(kind: type[Any]) -> dict[str, Any] | None:
    """Of the nearest constructor that says its arguments; ``mode`` is what recurrent layers give their base."""
    for base in kind.__mro__:
        if "__init__" in vars(base) and base is not object:
            known = defaults(vars(base)["__init__"], is_method=True)
            if known is not None:
                return {name: value for name, value in known.items() if name != "mode" or base is kind}
    return {}


def signatures(module: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    for name in sorted(dir(module)):
        value = getattr(module, name)
        if name.startswith("_") or not callable(value):
            continue
        known = of_class(value) if inspect.isclass(value) else defaults(value, is_method=False)
        if known is not None:
            yield name, known


def write_values() -> None:
    """Evaluate every recorded call. Raises RuntimeError for one that the reference refuses."""
    import mindspore

    mindspore.set_device("CPU")
    mindspore.set_context(pynative_synchronize=True)
    found = {call: reference_run.record("mindspore", call) for call in reference_run.recorded()}
    refused = [f"{call}: {record['error']}" for call, record in found.items() if "error" in record]
    if refused:
        raise RuntimeError("\n".join(refused))
    reference_run.write(found)


def write_signatures() -> None:
    import mindspore

    content: dict[str, Any] = {"reference": "mindspore", "version": mindspore.__version__, "modules": {}}
    for name in MODULES:
        content["modules"][name] = dict(signatures(importlib.import_module(f"mindspore.{name}")))
    lines = [f' "{name}": {{\n' + ",\n".join(
        f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in module.items()) + "\n }"
        for name, module in content["modules"].items()]  # fmt: skip
    head = f'{{"reference": "mindspore", "version": "{content["version"]}", "modules": {{\n'
    FILE.write_text(head + ",\n".join(lines) + "\n}}\n")


if __name__ == "__main__":
    write_signatures()
    write_values()
