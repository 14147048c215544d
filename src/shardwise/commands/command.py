"""The type of the subcommands of ``shardwise``, and helpers for their output files."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from shardwise.errors import ShardwiseError

EXIT_USAGE = 2


class Suggestions(tuple[str, ...]):
    """Values that shells complete, of an option that takes others as well."""

    def __contains__(self, value: object) -> bool:
        return True


class Parser(argparse.ArgumentParser):
    """A parser whose errors are two lines: what is wrong, and the nearest word that is known or where to look."""

    given: tuple[str, ...] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self.given = tuple(sys.argv[1:] if args is None else args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        if "arguments are required" in message:  # one of them may be misspelt
            names = [text.partition("=")[0] for text in self.given if text.startswith("--")]
            message = next((f"unrecognized arguments: {n}" for n in names if not self._knows(n)), message)
        unknown = re.search(r"invalid choice: '([^']*)'|unrecognized arguments: (\S+)", message)
        word = next(filter(None, unknown.groups()), "").partition("=")[0] if unknown else ""
        near = get_close_matches(word, self._words(), 1)
        fix = f"did you mean {near[0]}?" if near else f"{self.prog} --help"
        what = f"{message.partition(' (choose from')[0]}" if near else message
        self.exit(EXIT_USAGE, f"{self.prog}: {what}\n  fix:    {fix}\n")

    @property
    def options(self) -> frozenset[str]:
        """Return the names of its options, as Python has them, that say what a command does."""
        return frozenset(a.dest for a in self._actions if a.option_strings) - {"help", "json"}

    def _knows(self, option: str) -> bool:
        return any(word.startswith(option) for word in self._words())

    def _words(self) -> list[str]:
        """Return options and choices, those of subcommands too."""
        words = []
        for action in self._actions:
            words += [*action.option_strings, *map(str, action.choices or ())]
            if isinstance(action, argparse._SubParsersAction):
                words += [word for parser in action.choices.values() for word in parser._words()]
        return words


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand with its arguments. ``execute`` runs it and returns the exit code; ``has_json``: whether it has the
    option ``--json``."""

    name: str
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    execute: Callable[[argparse.Namespace], int]
    has_json: bool = True


# Settings of ``sw.plan`` under the names of their options; others have the same name.
_OPTION_OF = {"strategies": "strategy", "layouts": "layout", "memory_bytes": "memory"}
_VALUE = r"""sw\.\w+\([^()]*\)|\[[^\[\]]*\]|"[^"]*"|'[^']*'|[\w.+]*[\w+]|\.\.\.|"""
_FUNCTION = r"\bsw\.(?P<function>plan|fits|verify|check)"
_CALL = r"\b[\w.]*\w\((?P<inside>(?:[^()\n]|\((?:[^()\n]|\([^()\n]*\))*\))*)\)"


def as_options(text: str, chosen: argparse.Namespace) -> str:
    """Rewrite the calls and settings of Python in advice as commands and their options: ``zero=3`` as ``--zero 3``.

    Left as they are: paths, calls with arguments that are no settings, and values that no option takes.

    Args:
        text: An error, a warning or a suggestion of a function that Python code calls, too.
        chosen: The parsed options of the command, with ``Parser.options``; settings that it has no option for are left
            as they are.
    """
    names = "|".join(sorted({*chosen.options, *(n for n, to in _OPTION_OF.items() if to in chosen.options)}))
    setting = rf"(?<![\w.\"'/-])(?P<name>{names})=(?P<value>{_VALUE})(?![\w(\[{{*])"
    plain = re.sub(r"\?P<\w+>", "", setting)

    def rewritten(match: re.Match[str]) -> str:
        if (inside := match["inside"]) is None:
            other = f"shardwise {match['function']}" if match["function"] else match[0]
            return _option(match) if match["name"] else other
        function = re.match(_FUNCTION + r"\(", match[0])
        is_last = not re.match(r"\.?\w", match.string[match.end() : match.end() + 2])
        if function is None or not is_last or not re.fullmatch(rf"(?:\.\.\.)?(?:(?:^|, ){plain})*", inside):
            return match[0]
        options = re.sub(setting, _option, inside.removeprefix("...").removeprefix(", "))
        return f"shardwise {function['function']} {options}".rstrip()

    paths = r"(?m:^.*\bwritten to .*$)|(?<!\S)\S*/\S*"
    text = re.sub(rf"{_CALL}|{paths}|{setting}|{_FUNCTION}(?![\w(])", rewritten, text)
    return re.sub(r"(--[a-z-]+ [^\s,()]+), (?=--)", r"\1 ", text)


def _option(match: re.Match[str]) -> str:
    """Return a setting as an option."""
    name, value = "--" + _OPTION_OF.get(match["name"], match["name"]).replace("_", "-"), match["value"]
    if value == "None":
        return f"no {name}"
    if value.startswith("["):
        items = re.findall(r"[\"']([^\"']*)[\"']", value)
        return " ".join(f"{name} {shlex.quote(item)}" for item in items) or match[0]
    inner = (
        re.sub(r"^sw\.\w+\(|\)$|torch\.|[\"']|(?<=,) ", "", value) if value.startswith("sw.") else value.strip("\"'")
    )
    return f"{name} {shlex.quote(inner)}" if inner else name


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
