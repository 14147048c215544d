"""Parsing of ``einsum`` equations: terms, implicit outputs, and repeated indices within a term."""

from __future__ import annotations

import torch

from shardwise.graph.emitter import Emitter
from shardwise.graph.ir import Arg, Op
from shardwise.graph.schema import arguments

aten = torch.ops.aten
DOTS = "..."


def terms_of(equation: str) -> tuple[list[str], str]:
    """Return the terms of the operands and the term of the output. An implicit output has the dims of the ellipsis,
    then the letters that occur once, capitals first."""
    left, arrow, output = equation.replace(" ", "").partition("->")
    if not arrow:
        letters = left.replace(DOTS, "").replace(",", "")
        output = (DOTS if DOTS in left else "") + "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    return left.split(","), output


def diagonals(op: Op, emitter: Emitter) -> tuple[Arg, ...] | None:
    """Take the diagonal of every operand whose term repeats an index: ``ii->i`` becomes ``i->i`` of the diagonal."""
    args = arguments(op)
    terms, output = terms_of(str(args["equation"]))
    if not any(_repeats(term) for term in terms):
        return None
    operands = list(args["tensors"])
    for i, term in enumerate(terms):
        letters = list(term.replace(DOTS, "."))  # one entry for all dims of the ellipsis
        for letter in _repeats(term):
            while letters.count(letter) > 1:
                rank = len(emitter.value(operands[i]).shape)
                first = letters.index(letter)
                second = letters.index(letter, first + 1)
                dims = [at - len(letters) + rank if "." in letters[:at] else at for at in (first, second)]
                operands[i] = emitter.emit(aten.diagonal.default, operands[i], 0, *dims)
                del letters[second], letters[first]
                letters.append(letter)
        terms[i] = "".join(letters).replace(".", DOTS)
    equation = f"{','.join(terms)}->{output}"
    return (emitter.emit(aten.einsum.default, equation, tuple(operands), path=args["path"]),)


def _repeats(term: str) -> list[str]:
    letters = term.replace(DOTS, "")
    return [letter for letter in dict.fromkeys(letters) if letters.count(letter) > 1]
