"""Load the model of a command: ``model.py:build``, ``package.module:build``, or a transformers config.json on disk."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from shardwise.errors import ShardwiseError
from shardwise.progress import show_progress
from shardwise.untrusted_text import MAX_NUMBER

if TYPE_CHECKING:
    from torch import nn


SAMPLES, TOKENS = 8, 1024  # default input sizes for a transformers configuration


class BuildError(Exception):
    """An error of the user's ``build()``; its traceback is shown from the user's first line on."""

    def __init__(self, error: BaseException, step: TracebackType | None) -> None:
        super().__init__(str(error))
        self.error, self.step = error, step

    def show(self) -> None:
        traceback.print_exception(type(self.error), self.error, self.step, file=sys.stderr)


class Model(NamedTuple):
    """A module with its example inputs and its loss function (or None)."""

    module: nn.Module
    inputs: Any
    loss: Callable[..., Any] | None


def add_model(parser: argparse.ArgumentParser, *, values: bool = False) -> None:
    """Add the arguments that name a model. ``values``: it needs real tensors, not meta tensors."""
    meta_note = "" if values else "; meta tensors will do"
    parser.add_argument(
        "model",
        metavar="MODEL",
        help=f"model.py:build or package.module:build; build() returns module, inputs[, loss]{meta_note}. Or a "
        "transformers config.json (or its folder)",
    )
    parser.add_argument("--batch", type=int, metavar="N", help=f"samples, for a configuration ({SAMPLES})")
    parser.add_argument("--sequence", type=int, metavar="N", help=f"tokens of each ({TOKENS})")


def model_of(chosen: argparse.Namespace, *, values: bool = False) -> Model:
    """Load the model that the arguments name. Raises ShardwiseError if they name none, BuildError for its errors."""
    with show_progress("building the model"):
        sizes = {name: getattr(chosen, name) for name in ("batch", "sequence") if getattr(chosen, name) is not None}
        for name, size in sizes.items():
            if not 0 < size <= MAX_NUMBER:
                raise ShardwiseError(f"--{name} is {size}", fix="a whole number from 1")
        place = Path(chosen.model)
        if place.is_file() and place.suffix == ".json" and names_plan(place):
            what = f"{chosen.model} is a plan file, not a model"
            raise ShardwiseError(what, fix="give FILE:FUNCTION, such as model.py:build, or a config.json")
        if chosen.model and (place.suffix == ".json" or place.is_dir()):
            return _of_config(place / "config.json" if place.is_dir() else place, chosen, values)
        for name in sizes:
            what = f"--{name} is for transformers configurations, and {chosen.model} returns its own inputs"
            raise ShardwiseError(what, fix="leave it out; use --global-batch and --micro-batch")
        built = call_build_function(chosen.model)
        if not isinstance(built, tuple) or len(built) not in (2, 3):
            kind = f"{len(built)} values" if isinstance(built, tuple) else f"a {type(built).__name__}"
            fix = "return module, example_inputs or module, example_inputs, loss"
            raise ShardwiseError(f"{chosen.model} returned {kind}", fix=fix)
        return Model(built[0], built[1], built[2] if len(built) == 3 else None)


def names_plan(path: Path) -> bool:
    with path.open("rb") as file:
        return b'"shardwise-plan"' in file.read(200)


def call_build_function(text: str) -> Any:
    build = load_named_object(text)
    if not callable(build):
        place, _, name = text.rpartition(":")
        raise ShardwiseError(f"{place} has no function {name}", fix="define it, or name another one")
    with _UserCodeErrors():
        return build()


def load_named_object(text: str) -> Any:
    """Return the object ``model.py:name``, or None if the module lacks it."""
    place, _, name = text.rpartition(":")
    if not place or not name:
        fix = "write FILE:FUNCTION, such as model.py:build, or a config.json on disk (nothing is downloaded)"
        if re.fullmatch(r"[\w.-]+/[\w.-]+", text) and not text.endswith(".py"):
            what = f"there is no folder {text}; if this is a model on a hub: nothing is downloaded"
            fix = f"hf download {text} config.json --local-dir FOLDER, then name the folder; or FILE:FUNCTION"
            raise ShardwiseError(what, fix=fix)
        raise ShardwiseError(f"{text!r} names no function", fix=fix)
    return getattr(_import_module(place), name, None)


class _UserCodeErrors:
    """A context that turns errors of the user's code into BuildError; ShardwiseErrors pass unchanged."""

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, step: TracebackType | None
    ) -> None:
        if isinstance(error, Exception) and not isinstance(error, ShardwiseError):
            while step is not None and (
                step.tb_frame.f_code.co_filename == __file__ or "importlib" in step.tb_frame.f_code.co_filename
            ):
                step = step.tb_next
            raise BuildError(error, step) from None


def _import_module(place: str) -> Any:
    path = Path(place)
    is_file = path.suffix == ".py"
    sys.path.insert(0, str(path.resolve().parent if is_file else Path.cwd()))
    if not is_file:
        try:
            with _UserCodeErrors():
                return importlib.import_module(place)
        except BuildError as failed:
            error = failed.error
            if not isinstance(error, ModuleNotFoundError) or error.name is None:
                raise
            if not (place == error.name or place.startswith(f"{error.name}.")):
                raise
            fix = f"{place}.py:build, if it is a file"
            raise ShardwiseError(f"there is no module {error.name}", fix=fix) from error
    if not path.is_file():
        raise ShardwiseError(f"there is no file {place}", fix="check the path")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None, "a file that ends in .py has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    with _UserCodeErrors():  # as Python runs a script: no bytecode is left beside it
        exec(compile(path.read_bytes(), str(path.absolute()), "exec", dont_inherit=True), module.__dict__)
    return module


def _of_config(path: Path, chosen: argparse.Namespace, values: bool) -> Model:
    """Build the model of a transformers configuration, in its dtype, with token ids as inputs. Its class is the one
    that the configuration names, or the causal language model."""
    import torch

    if not path.is_file():
        raise ShardwiseError(f"there is no file {path}", fix="check the path; nothing is downloaded")
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise ShardwiseError("transformers is not installed", fix="pip install transformers") from error
    try:
        config = transformers.AutoConfig.from_pretrained(path.parent if path.name == "config.json" else path)
    except (OSError, ValueError) as error:
        raise ShardwiseError(
            f"transformers cannot read the configuration {path}: {str(error).splitlines()[0]}",
            fix="give its config.json, or FILE:BUILD",
        ) from error
    if hasattr(config, "use_cache"):
        config.use_cache = False
    names: list[str] = getattr(config, "architectures", None) or []
    head = getattr(transformers, names[0], None) if names else None
    device = torch.device("cpu" if values else "meta")
    with device:
        make = transformers.AutoModelForCausalLM.from_config if head is None else head._from_config
        module = make(config)  # head(config) would ignore the configuration's dtype
        ids = torch.zeros(chosen.batch or SAMPLES, chosen.sequence or TOKENS, dtype=torch.int64)
        if values:
            ids = torch.randint(getattr(config.get_text_config(), "vocab_size", 2), ids.shape)
    inputs: Mapping[str, Any] = {"input_ids": ids, "labels": ids}
    return Model(module, inputs, None)
