"""The context of a program: how it runs (``set_context``) and how it is split (``set_auto_parallel_context``).

There is one context per process, as in the reference. The rest of the dialect reads it through ``options()``,
``settings()`` and ``algo_parameters()``, which are frozen.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar, cast

import torch

from shardwise.errors import problem
from shardwise.mindspore.checks import checks_of, flag, known_name, note, one_of, option, text, whole
from shardwise.mindspore.named import TABLES
from shardwise.mindspore.options import ALIASES, AlgoParameters, CostModel, Options, ParallelMode

Kind = TypeVar("Kind")
GRAPH_MODE, PYNATIVE_MODE = 0, 1
GIGABYTE = 2**30
MACHINE = "machine"  # topic of the note that this machine differs from the program's target


def _mode(name: str, value: Any) -> int:
    if isinstance(value, bool) or value not in (GRAPH_MODE, PYNATIVE_MODE):
        raise ValueError(problem(f"{name} is {value!r}", fix="choose GRAPH_MODE (0) or PYNATIVE_MODE (1)"))
    return int(value)


def _save_graphs(name: str, value: Any) -> int:
    return int(value) if isinstance(value, bool) else int(whole(0, 3)(name, value))


def _memory(name: str, value: Any) -> str:
    if not re.fullmatch(r"\d+(\.\d+)?GB", text(name, value)) or not float(value.removesuffix("GB")):
        raise ValueError(problem(f"{name} is {value!r}", fix='give a number of gigabytes, as in "30GB"'))
    return str(value)


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of ``set_context``. Both modes behave the same: split cells are captured, other cells run eagerly.

    ``save_graphs``: 0 (False) to 3; from 1 (True) on the printed programs are written to ``save_graphs_path``.
    """

    mode: int = option(GRAPH_MODE, _mode)
    device_target: str = option("", one_of("Ascend", "GPU", "CPU"))
    device_id: int = option(0, whole(0, 4095))
    save_graphs: int = option(0, _save_graphs)
    save_graphs_path: str = option(".", text)
    max_device_memory: str = option("1024GB", _memory)

    @property
    def device_type(self) -> str:
        """Return the type of the device that the program uses, "cuda" or "cpu" (any accelerator is a GPU here)."""
        return "cuda" if self.device_target != "CPU" and torch.cuda.is_available() else "cpu"

    @property
    def device_bytes(self) -> int | None:
        """Return the memory that a plan may use on each device, in bytes. None unless the program has limited it."""
        if self.max_device_memory == Settings().max_device_memory:
            return None
        return round(float(self.max_device_memory.removesuffix("GB")) * GIGABYTE)


class _Part(Generic[Kind]):
    """A part of the context: a frozen dataclass of options, of which all that are given are set, or none."""

    def __init__(self, kind: type[Kind], title: str) -> None:
        self.kind, self.title, self.checks, self.value = kind, title, checks_of(kind), kind()

    def now(self) -> Kind:
        """Return all options, which are frozen."""
        return self.value

    def assign(self, **values: Any) -> None:
        """Set options. Raises TypeError or ValueError for wrong ones."""
        for name in values:
            known_name(name, self.checks, f"set_{self.title}")
        stored = {name: self.checks[name](name, value) for name, value in values.items()}
        self.value = replace(cast(Any, self.value), **stored)

    def get(self, name: str) -> Any:
        """Return an option."""
        known_name(name, self.checks, f"get_{self.title}")
        return copy.deepcopy(getattr(self.value, name))

    def reset(self) -> None:
        """Reset every option to its default."""
        self.value = self.kind()


_settings, _options = _Part(Settings, "context"), _Part(Options, "auto_parallel_context")
_algo, _cost = _Part(AlgoParameters, "algo_parameters"), _Part(CostModel, "cost_model_context")
set_algo_parameters, get_algo_parameters, reset_algo_parameters = _algo.assign, _algo.get, _algo.reset
set_cost_model_context, get_cost_model_context, reset_cost_model_context = _cost.assign, _cost.get, _cost.reset
reset_auto_parallel_context = _options.reset
settings, options, algo_parameters = _settings.now, _options.now, _algo.now
# Settings of the reference without effect here, and the reasons. In the reference they change no result either.
_IDLE = {name: reason for reason, names in TABLES["context"]["idle"].items() for name in names.split()}
_kept: dict[str, Any] = {}  # values of settings without effect


def message_bytes(gradient_bytes: int) -> int:
    """Return the size limit of messages of gradients, of so many bytes in all; 0: every gradient has its own."""
    return _cost.value.message_bytes(gradient_bytes, options().bucket_bytes)


def set_context(**values: Any) -> None:
    """Set how the program runs.

    Settings of the reference that change no result are accepted with a note.

    Args:
        values: ``mode``, ``device_target``, ``device_id``, ``save_graphs``, ``save_graphs_path``, ``max_device_memory``
            ("30GB").

    Raises:
        ValueError: for an unknown name or value.
    """
    for name in values:
        known_name(name, (*_settings.checks, *_IDLE), "set_context")
    _settings.assign(**{name: value for name, value in values.items() if name not in _IDLE})
    for name in values:
        if name in _IDLE:
            _kept[name] = values[name]
            note(f"set_context({name}=...) has no effect here: {_IDLE[name]}")
    target = values.get("device_target", "CPU")  # every machine has a CPU
    has = {"cuda": "GPU", "cpu": "CPU"}[settings().device_type]
    if target not in ("CPU", has):
        note(f'device_target="{target}": the program runs on what this machine has, the {has}', MACHINE)


def set_device(device_target: str, device_id: int = 0) -> None:
    """Choose the kind of device and its index: ``set_context(device_target=, device_id=)``."""
    set_context(device_target=device_target, device_id=device_id)


def set_deterministic(deterministic: bool) -> None:
    """Make kernels give the same bits in every run (``torch.use_deterministic_algorithms``)."""
    torch.use_deterministic_algorithms(flag("deterministic", deterministic))


def run_check() -> None:
    """Multiply two matrices on this machine and print that it works."""
    ones = torch.ones(2, 2, device=settings().device_type)
    assert torch.equal(ones @ ones, ones + ones)
    print(f"shardwise.mindspore: multiplication has been calculated correctly on the {get_context('device_target')}.")


def get_context(name: str) -> Any:
    """Return a setting. ``device_target`` defaults to "GPU" or "CPU", whichever the machine has. A setting without
    effect returns the value that was given, or None."""
    if name in _IDLE:
        return _kept.get(name)
    known_name(name, (*_settings.checks, *_IDLE), "get_context")
    value = _settings.get(name)
    return value or ("GPU" if torch.cuda.is_available() else "CPU") if name == "device_target" else value


def reset_context() -> None:
    """Reset the settings of ``set_context``."""
    _settings.reset()
    _kept.clear()


def set_auto_parallel_context(**values: Any) -> None:
    """Set how the program is split. Either all options are set, or none.

    Args:
        values: the fields of ``Options``.

    Raises:
        TypeError: for a wrong type.
        ValueError: for an unknown name, a wrong value or an option that has no meaning here.
        NotImplementedError: for features of a later version.
    """
    _options.value = options().with_options(**values)


def get_auto_parallel_context(attr_key: str) -> Any:
    """Return an option."""
    return _options.get(ALIASES.get(attr_key, attr_key))


def set_ps_context(enable_ps: bool = False, **settings: Any) -> None:
    """Refuse a parameter server. Raises NotImplementedError if it is switched on."""
    if enable_ps:
        fix = "tables by rows: ops.EmbeddingLookup().shard(((devices, 1), (1, 1))), or on the host: primitive_target"
        raise NotImplementedError(problem("set_ps_context(enable_ps=True): there is no parameter server", fix=fix))


# -- compilation settings of programs, without effect: split cells are captured, and other cells run as Python ---------


class JitConfig:
    """Compilation settings, accepted without effect."""

    def __init__(self, **settings: Any) -> None:
        self.jit_config_dict = settings


def jit(fn: Any = None, *args: Any, **settings: Any) -> Any:
    """Return the function unchanged: ``@jit``, ``@jit(jit_config=...)`` or ``jit(fn)``."""
    return (lambda decorated: decorated) if fn is None else fn


ms_function = ms_class = jit_class = lazy_inline = no_inline = constexpr = _primexpr = jit


def mutable(input_data: Any, dynamic_len: bool = False) -> Any:
    """Return the argument unchanged: numbers may change between calls anyway."""
    return input_data


@contextmanager
def no_init_parameters() -> Iterator[None]:
    """Do nothing. Parameters made in this context get their values at once, as always here."""
    yield


__all__ = [
    "GRAPH_MODE", "PYNATIVE_MODE", "JitConfig", "ParallelMode", "constexpr", "get_algo_parameters",
    "get_auto_parallel_context", "get_context", "jit", "jit_class", "lazy_inline", "ms_class", "ms_function", "mutable",
    "no_inline", "reset_algo_parameters", "reset_auto_parallel_context", "reset_context", "run_check",
    "set_algo_parameters", "set_auto_parallel_context", "set_context", "set_deterministic", "set_device",
    "set_ps_context",
]  # fmt: skip
