"""Run calls that either package understands, the reference and this dialect of it, and describe their results.

It runs in both environments, so it needs only numpy. A call is an expression in the words of ``Run.names``:
``ops.abs(r(2, 3))``. It is differentiated by its floating tensors (``r``, ``pos``, ``unit``) and by the parameters of
its cells (``net``).
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

FILE = Path(__file__).with_name("reference_values.tsv")
MANY = 6  # arrays of up to so many values are written out; of larger ones two weighted means


def recorded() -> dict[str, dict[str, Any]]:
    """Return the file's calls with what the reference returned: results, gradients, parameters."""
    rows = (line.split("\t") for line in FILE.read_text().splitlines())
    return {
        call: dict(zip(("out", "grad", "parameters"), map(json.loads, found), strict=False)) for call, *found in rows
    }


def write(records: dict[str, dict[str, Any]]) -> None:
    """Write a line per call, fields without value at its end left out."""
    with FILE.open("w") as file:
        for call, found in records.items():
            fields = [found.get(name) for name in ("out", "grad", "parameters")]
            fields[1] = None if isinstance(fields[1], str) else fields[1]  # an error: no gradient to compare with
            while fields and fields[-1] is None:
                fields.pop()
            print(call, *(json.dumps(field, separators=(",", ":")) for field in fields), sep="\t", file=file)


def _wave(shape: tuple[int, ...], phase: float) -> Any:
    numbers = np.arange(int(np.prod(shape)), dtype=np.float64)
    return np.round(np.sin(phase + 2.3 * numbers + 0.7 * len(shape)), 3).reshape(shape)


class Run:
    """An expression's evaluation. A second evaluation, inside ``grad``, takes the traced tensors for those of the first
    and the same cells."""

    def __init__(self, package: str) -> None:
        self.ms = importlib.import_module(package)
        self.package = package
        self.tensors: list[Any] = []
        self.nets: list[Any] = []
        self.traced: Iterator[Any] | None = None
        self.again: Iterator[Any] | None = None

    def _tensor(self, values: Any) -> Any:
        if self.traced is not None:
            return next(self.traced)
        self.tensors.append(self.ms.Tensor(values.astype(np.float32)))
        return self.tensors[-1]

    def names(self) -> dict[str, Any]:
        """Return what expressions may name."""
        ms, module = self.ms, lambda name: importlib.import_module(f"{self.package}.{name}")
        count = iter(range(1000))

        def net(make: Callable[[], Any], training: bool = False) -> Any:
            if self.again is not None:
                return next(self.again)
            cell = make()
            for parameter in cell.get_parameters():
                values = _wave(tuple(parameter.shape), 0.3 + 0.9 * len(self.nets) + 0.2 * len(parameter.shape))
                if "variance" in parameter.name:
                    values = np.abs(values) + 0.5
                parameter.set_data(ms.Tensor(values.astype(np.float32)))
            self.nets.append(cell.set_train(training))
            return cell

        def steps(make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            parameters = [ms.Parameter(ms.Tensor(_wave(shape, 0.4).astype(np.float32)), name=name)
                          for name, shape in (("w", (2, 3)), ("beta", (3,)))]  # fmt: skip
            optimizer = make(parameters, *args, **kwargs)
            for step in range(5):
                optimizer(tuple(ms.Tensor(_wave(tuple(p.shape), 1.7 * step).astype(np.float32)) for p in parameters))
            states = optimizer.parameters_dict().items()
            return [ms.Tensor(p.asnumpy()) for p in parameters], sorted(
                f"{name} {' '.join(numbers(state.asnumpy(), most=1))}"
                for name, state in states
                if "." in name and not name.startswith(("step.", "stat."))
            )

        def printed(function: Callable[[], Any]) -> str:
            with contextlib.redirect_stdout(io.StringIO()) as text:
                function()
            return text.getvalue()

        return {
            "ms": ms, "np": np, "nn": ms.nn, "ops": ms.ops, "mint": ms.mint, "F": ms.mint.nn.functional,
            "ds": module("dataset"), "train": module("train"), "mnp": module("numpy"),
            "initializer": module("common.initializer"),
            "lr_scheduler": module("experimental.optim.lr_scheduler"), "optim": module("mint.optim"),
            "net": net, "steps": steps, "printed": printed, "Drawn": Drawn,
            "r": lambda *shape: self._tensor(_wave(shape, 1.0 + next(count)) * 2),
            "pos": lambda *shape: self._tensor(np.abs(_wave(shape, 1.0 + next(count))) + 0.5),
            "unit": lambda *shape: self._tensor(_wave(shape, 1.0 + next(count)) * 0.45 + 0.5),
            "i": lambda high, *shape, dtype=np.int32: ms.Tensor(
                (np.arange(int(np.prod(shape))) * 7 % 11 % high).reshape(shape).astype(dtype)),
            "b": lambda *shape: ms.Tensor(_wave(shape, 1.0 + next(count)) > 0),
            "t": lambda values, dtype=None: ms.Tensor(values, dtype),
        }  # fmt: skip

    def evaluate(self, expression: str) -> dict[str, Any]:
        """Return what the call returns, its gradients, and the parameters of its cells."""
        code = compile(expression, expression, "eval")
        found: dict[str, Any] = {"out": plain(eval(code, self.names()))}
        weights = [p for cell in self.nets for p in cell.trainable_params()]
        if self.nets:
            found["parameters"] = [
                f"{p.name} {described(p)}{'' if p.requires_grad else ' fixed'}"
                for cell in self.nets for p in cell.get_parameters()
            ]  # fmt: skip
        if not (self.tensors or weights) or "float" not in str(found["out"]) or "drawn" in str(found["out"]):
            return found
        try:
            found["grad"] = self._gradients(code, weights)
        except Exception as error:  # an operator without one
            found["grad"] = type(error).__name__
        return found

    def _gradients(self, code: Any, weights: list[Any]) -> Any:
        ms = self.ms

        def loss(*tensors: Any) -> Any:
            self.traced, self.again = iter(tensors), iter(self.nets)
            total: Any = 0
            for leaf in leaves(eval(code, self.names())):
                if isinstance(leaf, ms.Tensor) and kind(leaf).startswith("float"):
                    weight = ms.Tensor((_wave(tuple(leaf.shape), 0.2) + 0.3).astype(np.float32))
                    total = total + (leaf.astype(ms.float32) * weight).sum()
            return total

        positions = tuple(range(len(self.tensors))) or None
        if weights:
            gradients = ms.grad(loss, positions, weights=ms.ParameterTuple(weights))(*self.tensors)
        else:
            gradients = ms.grad(loss, positions)(*self.tensors)
        return [numbers(gradient.asnumpy(), most=0) for gradient in leaves(gradients)]


class Drawn:
    """A result of random numbers: only its type and shape are compared."""

    def __init__(self, value: Any) -> None:
        self.value = value


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from leaves(item)
    else:
        yield value


def kind(tensor: Any) -> str:
    return str(tensor.dtype).lower().rpartition(".")[2]


def plain(value: Any) -> Any:
    """Return a result as JSON. A tensor is the text of its dtype, its shape and its values."""
    if isinstance(value, Drawn):
        return [f"{described(leaf)} drawn" for leaf in leaves(value.value)]
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, (float, np.generic)):
        return number(value)
    if not hasattr(value, "shape"):
        return f"({type(value).__name__})"
    return f"{described(value)} {' '.join(numbers(value.asnumpy() if hasattr(value, 'asnumpy') else value, MANY))}"


def described(tensor: Any) -> str:
    return f"{kind(tensor)}[{','.join(map(str, tensor.shape))}]"


def numbers(array: Any, most: int) -> list[str]:
    """Return an array's values, or of one with more than ``most`` two means under fixed weights."""
    flat = array.reshape(-1)
    if array.dtype.kind not in "fiubc":
        return [str(item) for item in flat]
    if flat.size <= most:
        return [number(item) for item in flat]
    wide = np.nan_to_num(flat.astype(np.complex128 if flat.dtype.kind == "c" else np.float64), posinf=99, neginf=-99)
    index = np.arange(flat.size)
    return [number((wide * (0.5 + np.sin(phase * index + phase))).mean()) for phase in (1.3, 2.1)]


def number(value: Any) -> str:
    if isinstance(value, (complex, np.complexfloating)):
        return f"{number(value.real)}+{number(value.imag)}j"
    return f"{value:.6g}" if isinstance(value, (float, np.floating)) else str(int(value))


def record(package: str, expression: str) -> dict[str, Any]:
    """Return what a call gives in a package, or its error."""
    try:
        return Run(package).evaluate(expression)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"}
