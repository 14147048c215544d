"""Habits of the repository that no linter checks: who may use what, and that the examples in docstrings are true."""

from __future__ import annotations

import ast
import doctest
import importlib
import os
import re
import sys
import tomllib
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from shardwise import errors

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "shardwise"
SOURCES = sorted(PACKAGE.rglob("*.py"))

# What only some folders or files of the package may use (docs/architecture.md).
# ``graph/impure_reads.py`` names what a model may read, to see it read.
ALLOWED = {
    "torch.distributed": (
        *("runtime/", "launch/", "train/", "mindspore/", "foreign/", "graph/impure_reads.py"),
        "plans/schedule.py",  # the tables of actions of torch's schedules
    ),
    "torch.export": ("graph/",),
    "os.environ": (
        *("cli.py", "launch/launcher.py", "launch/ranks.py", "launch/bootstrap.py", "graph/impure_reads.py"),
        "planning/plan_cache.py",  # where the user's cache is
    ),
    "os.getenv": ("graph/impure_reads.py",),
}


def dotted_names(source: str) -> Iterator[tuple[int, str]]:
    """(line, name) of everything imported or looked up as an attribute, by its full dotted name, aliases resolved."""
    tree = ast.parse(source)
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
                aliases[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"
                aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            parts = [node.attr]
            inner: ast.expr = node.value
            while isinstance(inner, ast.Attribute):
                parts.append(inner.attr)
                inner = inner.value
            if isinstance(inner, ast.Name):
                yield node.lineno, ".".join([aliases.get(inner.id, inner.id), *reversed(parts)])


def uses(source: str, banned: str) -> list[int]:
    """The lines on which a module uses ``banned`` or something inside it."""
    if banned.rpartition(".")[2] not in source:
        return []
    return sorted({line for line, name in dotted_names(source) if f"{name}.".startswith(f"{banned}.")})


@pytest.mark.parametrize("banned", ALLOWED)
def test_only_the_folders_that_may_use_it_do(banned: str) -> None:
    offenders = [
        f"{path.relative_to(ROOT)}:{line} uses {banned}"
        for path in SOURCES
        if not path.relative_to(PACKAGE).as_posix().startswith(ALLOWED[banned] or ("nobody",))
        for line in uses(path.read_text(), banned)
    ]
    assert offenders == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed",
        "import torch.distributed as dist",
        "from torch import distributed",
        "from torch.distributed import barrier",
        "from torch.distributed.nn import functional",
        "import torch\ntorch.distributed.barrier()",
        "import torch as t\nt.distributed.barrier()",
        "def late():\n    from torch import distributed as d",
    ],
)
def test_every_way_to_use_something_is_found(source: str) -> None:
    assert uses(source, "torch.distributed") == [source.count("\n") + 1]
    assert uses(source.replace("distributed", "distributions"), "torch.distributed") == []


WITH_EXAMPLES = [path for path in SOURCES if ">>>" in path.read_text()]


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_the_examples_in_docstrings_are_true(path: Path) -> None:
    name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
    results = doctest.testmod(importlib.import_module(name))
    assert (results.attempted > 0, results.failed) == (True, 0)


MOST_PARAMETERS = 8  # what else a function takes belongs into a dataclass
# Those that others' signatures decide, and what users call with names.
OF_THE_DIALECT = "mindspore/"  # MindSpore's own
AS_OPERATORS_ARE = {
    "graph/attention_sinks.py": {"_attention_with_sinks"},
    "graph/attention_within.py": {"_attention_within"},
    "rules/lowerings/attention.py": {"attention_with_sinks", "attention_within"},
    "rules/local_kernels.py": {"_scatter_rows"},
    "rules/ring.py": {"__call__"},
}
CALLED_BY_USERS = {
    "api.py": {"plan"},
    "foreign/check.py": {"check"},
    "planning/fits.py": {"fits"},
    "runtime/parallelize.py": {"parallelize"},
    "train/checkpoints.py": {"save_checkpoint"},
    "train/data.py": {"__init__"},
    "train/trainer.py": {"__init__"},
}
BUILDERS = {"rules/binding.py": {"build"}}  # of rules, one line each, whose options have names


def test_no_other_function_has_more_than_eight_parameters() -> None:
    found: dict[str, set[str]] = {}
    for path in SOURCES:
        where = path.relative_to(PACKAGE).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                own = node.args
                names = [*own.posonlyargs, *own.args, *own.kwonlyargs, *filter(None, (own.vararg, own.kwarg))]
                count = sum(one.arg not in ("self", "cls") for one in names)
                if count > MOST_PARAMETERS and not where.startswith(OF_THE_DIALECT):
                    found.setdefault(where, set()).add(node.name)
    assert found == AS_OPERATORS_ARE | CALLED_BY_USERS | BUILDERS


def test_no_module_that_a_rank_starts_beside_has_the_name_of_a_standard_one() -> None:
    clashes = [path.name for path in (PACKAGE / "runtime").glob("*.py") if path.stem in sys.stdlib_module_names]
    assert clashes == []


def test_no_module_is_a_drawer_for_whatever_fits_nowhere() -> None:
    drawers = {"util", "utils", "common", "helpers", "manager", "misc"}
    assert [path.name for path in SOURCES if path.stem in drawers] == []


def test_the_version_is_stated_once_and_the_same() -> None:
    shardwise = importlib.import_module("shardwise")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert shardwise.__version__ == project["version"]


def test_ci_can_be_executed() -> None:
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_class_names_are_unique_outside_the_dialect() -> None:
    """The dialect has the reference's names, which repeat from module to module."""
    modules: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if "mindspore" not in path.parts:
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef):
                    modules.setdefault(node.name.lstrip("_"), []).append(str(path.relative_to(PACKAGE)))
    assert {name: paths for name, paths in modules.items() if len(paths) > 1} == {}


def test_tests_know_errors_of_the_package_by_their_data_and_tell_them_apart() -> None:
    """Their class, fields, numbers and names (tests/raising.py): words may change. A word or a small number is in many
    messages: a field or longer data says which of them is meant."""
    own = tuple(name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, ValueError))
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for call in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)):
            name = ast.unparse(call.func)
            if name not in ("raises", "pytest.raises") or not ast.unparse(call.args[0]).endswith(own):
                continue
            match = [keyword.value for keyword in call.keywords if keyword.arg == "match"]
            for node in (node for value in (*call.args[1:], *match) for node in ast.walk(value)):
                text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
                prose = re.findall(r"(?<![\w./(='-])[a-z]{2,}(?![\w./()='])", text)
                assert len(prose) <= 2, f"{path}:{call.lineno}: {text}"
            values = [str(getattr(node, "value", node)) for node in call.args[1:]]
            vague = [value for value in values if re.fullmatch(r"[a-z]+|-?\d{1,2}", value)]
            assert name == "pytest.raises" or call.keywords or vague != values, f"{path}:{call.lineno}"


def test_the_dialect_uses_the_public_api_and_names_the_rest_in_one_file() -> None:
    public = re.compile(r"shardwise|shardwise\.(errors|results|mindspore)(\..*)?")
    private = {
        path.relative_to(PACKAGE).as_posix()
        for path in (PACKAGE / "mindspore").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("shardwise")
        if not public.fullmatch(node.module)
    }
    assert private == {"mindspore/library.py"}


# ``Cluster.load`` is part of the public class that the reader of cluster files makes.
WITH_CIRCLES = {"costs"}


@pytest.mark.parametrize("folder", sorted({path.parent.name for path in PACKAGE.glob("*/__init__.py")} - WITH_CIRCLES))
def test_files_of_a_folder_do_not_import_each_other_in_circles(folder: str) -> None:
    files = {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
        for path in (PACKAGE / folder).rglob("*.py")
    }
    imports: dict[str, set[str]] = {}
    for name, path in files.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (module := node.module) in files:
                given = (f"{module}.{entry.name}" for entry in node.names)
                imports.setdefault(name, set()).update(own if own in files else str(module) for own in given)
    TopologicalSorter({name: own - {name} for name, own in imports.items()}).prepare()  # raises CycleError
