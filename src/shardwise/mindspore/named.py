"""Shared parts of operator tables: settings of functions, argument aliases, import paths, and errors for missing names.

An entry of a table is a function whose positional arguments are tensors and whose keyword-only arguments are settings.
``lambda x, *, alpha=1.0: F.elu(x, alpha)`` becomes a cell or a primitive whose constructor takes ``alpha``.
"""

from __future__ import annotations

import inspect
import sys
import tomllib
from ast import literal_eval
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import partial, wraps
from importlib import import_module
from importlib.resources import files
from importlib.util import find_spec
from types import FunctionType, MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

from shardwise.errors import page, problem
from shardwise.mindspore.checks import note
from shardwise.mindspore.tensor_methods import DTYPES

Function = Callable[..., Any]
TABLES: dict[str, Any] = tomllib.loads(files(__package__).joinpath("names.toml").read_text(encoding="utf-8"))
WORDS = tuple({*row.split()} for row in TABLES["words"]["arguments"].split(";"))


def settings_of(function: Function) -> dict[str, Any]:
    """Return the keyword-only arguments of a function: name -> default, or ``...`` where there is none."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # a C++ function
        return {}
    return {p.name: ... if p.default is p.empty else p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def signature_of(table: dict[str, Any]) -> inspect.Signature:
    """Return the signature of a table: name -> default, or ``...`` where there is none."""
    kind, empty = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty
    return inspect.Signature([
        inspect.Parameter(name, kind, default=empty if default is ... else default) for name, default in table.items()
    ])  # fmt: skip


def parameters_of(words: Sequence[str]) -> list[inspect.Parameter]:
    """Parse a signature in words: ``x axis=-1``. Words behind ``*`` are keyword-only."""
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    parameters = []
    for place, word in enumerate(words):
        name, is_given, default = word.partition("=")
        if word != "*":
            value = DTYPES.get(default) or literal_eval(default) if is_given else inspect.Parameter.empty
            parameters.append(inspect.Parameter(name, kinds["*" in words[:place]], default=value))
    return parameters


# Arguments of constructors: "nn.Adam" -> name -> default, or ``...`` where there is none.
SETTINGS: dict[str, dict[str, Any]] = {
    place: {p.name: ... if p.default is p.empty else p.default for p in parameters_of(words.split())}
    for place, words in TABLES["settings"].items()
}


def bound_to(title: str, signature: inspect.Signature, args: Any, kwargs: Any) -> dict[str, Any]:
    """Bind arguments to a signature, with defaults. Raises TypeError, which prints the signature, for others."""
    try:
        bound_arguments = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(problem(f"{title}: {error}", fix=f"{title}{signature}")) from error
    bound_arguments.apply_defaults()
    return bound_arguments.arguments


OF_TABLE = "_shardwise_of_table"  # marks constructors that ``constructor`` made


def constructor(init: Function, signature: inspect.Signature) -> Function:
    """Return a constructor that calls ``init``, with a signature of its own for ``inspect``."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)

    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    vars(__init__).update({OF_TABLE: True, "__signature__": signature.replace(
        parameters=[own, *signature.parameters.values()])})  # fmt: skip
    return __init__


class WithSettings:
    """A class whose constructor takes the settings of the class statement, in order, with their defaults (``...``:
    required): ``class Normal(Initializer, sigma=0.01, mean=0.0)``. Each becomes an attribute, except the parameters of
    ``_settle``, which are passed to it.

    ``_settle`` derives other attributes from the settings, and raises ValueError for invalid ones. ``checks``: for some
    settings a function of name and value, which returns the value to keep or raises an error.
    """

    settings: ClassVar[dict[str, Any]] = {}
    checks: ClassVar[Mapping[str, Callable[[str, Any], Any]]] = {}
    _signature: ClassVar[inspect.Signature] = signature_of({})
    _handed: ClassVar[tuple[str, ...]] = ()  # settings passed to _settle
    __signature__: ClassVar[inspect.Signature | None] = None  # for inspect and help; None: that of __init__

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__()
        cls.settings = settings or cls.settings
        cls._signature = signature_of(cls.settings)
        cls._handed = tuple(name for name in inspect.signature(cls._settle).parameters if name in cls.settings)
        own = cls.__init__ is not WithSettings.__init__ and not hasattr(cls.__init__, OF_TABLE)
        cls.__signature__ = None if own else cls._signature
        if not own:
            type.__setattr__(cls, "__init__", constructor(WithSettings.__init__, cls._signature))

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        values = bound_to(type(self).__name__, self._signature, args, kwargs)
        values.update({name: check(name, values[name]) for name, check in self.checks.items() if name in values})
        handed = {name: values.pop(name) for name in self._handed}
        self._take(values)
        self._settle(**handed)

    def _take(self, values: dict[str, Any]) -> None:
        """Initialise the base class and set the settings as attributes."""
        super().__init__()
        for name, value in values.items():
            setattr(self, name, value)

    if TYPE_CHECKING:
        _settle: Callable[..., None]

        def __getattr__(self, name: str) -> Any: ...

    else:

        def _settle(self) -> None: ...

    def _chosen(self) -> dict[str, Any]:
        """Return the settings as they are now."""
        return {name: getattr(self, name) for name in type(self).settings}


def classes_of(table: Mapping[str, Any], base: type[Any], module: str, **body: Any) -> dict[str, type[Any]]:
    """Return a class per function of a table, derived from ``base``, with the function as ``function`` and its
    settings. An entry is a function, or the class's documentation, a function and attributes. (A function may have its
    own documentation, and the table of ``docs`` may.)"""
    rows = TABLES["docs"].get(module.removeprefix(f"{__package__}."), "").strip().splitlines()
    docs = dict(row.split(": ", 1) for row in rows)

    def make_class(name: str, entry: Any) -> type[Any]:
        doc, function, *own = entry if isinstance(entry, tuple) else (docs.get(name), entry)
        doc = doc or docs.get(name) or (function.__doc__ if isinstance(function, FunctionType) else None)
        doc = doc or f"The reference's {name}."
        about = {"__module__": module, "__doc__": doc, "function": staticmethod(function)}
        return type(name, (base,), {**about, **body, **(own[0] if own else {})}, **settings_of(function))

    return {name: make_class(name, entry) for name, entry in table.items()}


def functions_of(table: dict[str, Function], module: str) -> dict[str, Function]:
    """Name the functions of a table by their keys, as functions of ``module``, and return the table."""
    for name, function in table.items():
        function.__name__ = function.__qualname__ = name
        function.__module__ = module
    return table


def translated(name: str, function: Function) -> Function:
    """Wrap a function so that it also takes its arguments under the names of other versions (``WORDS``)."""
    parameters = inspect.signature(function).parameters
    others: dict[str, list[str]] = {}  # other word -> parameters
    for group in WORDS:
        for word in group - parameters.keys():
            others.setdefault(word, []).extend(p for p in parameters if p in group)
    if getattr(function, "__name__", "") == "<lambda>":
        function.__name__ = function.__qualname__ = name  # which Python's errors say

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for word in [word for word in kwargs if word in others]:
            same = [p for p in others[word] if p not in kwargs]
            if same:
                kwargs[same[0]] = kwargs.pop(word)
        return function(*args, **kwargs)

    call.__name__ = call.__qualname__ = name
    return call


_OF_TORCH_ALONE = {"size_average", "reduce", "_stacklevel", "device"}


def in_order(function: Function) -> Function:
    """Drop the positions of arguments that the reference does not have from a torch function or module: ``BCELoss(None,
    "sum")`` sets no ``size_average``."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:  # a C++ function
        return function
    names = [p.name for p in parameters if p.name not in _OF_TORCH_ALONE and p.kind is p.POSITIONAL_OR_KEYWORD]
    if not _OF_TORCH_ALONE & {p.name for p in parameters}:
        return function

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if len(args) > len(names):
            raise TypeError(f"{function.__name__} takes {len(names)} arguments: {', '.join(names)}")
        return function(**dict(zip(names, args, strict=False)), **kwargs)

    call.__signature__ = inspect.Signature([p for p in parameters if p.name not in _OF_TORCH_ALONE])  # type: ignore[attr-defined]
    return call


def _in_place_of(module: str, name: str) -> str:
    """Return what stands for a name that is not here, in a module or those around it; empty where nothing is known."""
    rows = [*TABLES["absent"].get(module or "mindspore", {}).items()]
    instead = next((advice.format(name) for advice, listed in rows if name in listed.split()), "")
    return instead or (_in_place_of(module.rpartition(".")[0], name) if module else "")


def absent(
    module: str, names: Callable[[], Iterable[str]], members: Mapping[str, Any] = MappingProxyType({})
) -> Any:  # fmt: skip
    """Return a ``__getattr__`` of a module whose error says what stands for a missing name (``names.toml``), or the
    nearest one. It also prints a note, since ``from module import name`` drops the error's text. ``members``: names
    that would hide Python's own as globals of the module."""

    def missing(name: str) -> Any:
        if name in members:
            return members[name]
        if name.startswith("__"):
            raise AttributeError(name)
        is_package = hasattr(sys.modules[module], "__path__")
        if is_package and find_spec(f"{module}.{name}") is not None:  # a module that is not imported yet
            return import_module(f"{module}.{name}")
        short = module.removeprefix("shardwise.mindspore").lstrip(".")
        existing_names = {existing.lower(): existing for existing in names() if not existing.startswith("_")}
        near = get_close_matches(name.lower(), existing_names, n=1, cutoff=0.6)
        instead = _in_place_of(short, name) or (f"the nearest is {existing_names[near[0]]}" if near else "")
        fix = "; ".join(filter(None, (instead, f"all names are listed in {page('from-mindspore')}")))
        text = problem(f"{'.'.join(filter(None, ('ms', short)))} has no {name}", fix=fix)
        note(text)
        raise AttributeError(text)

    return missing


PATHS = {path: target for target, paths in TABLES["paths"].items() for path in paths.split()}  # path there -> here


def install_paths(home: str) -> None:
    """Make the long import paths of the reference importable. Their modules say what stands for a missing name."""
    for path, target in PATHS.items():
        module = import_module(f"{home}.{target}")
        sys.modules.setdefault(f"{home}.{path}", module)
        vars(module).setdefault("__getattr__", absent(module.__name__, partial(_names, module)))
        parent, _, leaf = path.rpartition(".")
        vars(sys.modules[f"{home}.{parent}".rstrip(".")]).setdefault(leaf, module)  # import parent.leaf as name


def _names(module: ModuleType) -> Iterable[str]:
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
    return getattr(module, "__all__", own)


def module_of(path: str, members: Mapping[str, Any]) -> ModuleType:
    """Make a module of these members, so that programs can import it."""
    sys.modules[path] = module = ModuleType(path, f"The reference's {path.removeprefix('shardwise.')}.")
    vars(module).update(members, __all__=[*members], __getattr__=absent(path, lambda: members))
    return module
