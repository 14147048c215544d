"""What becomes of a sample of torch's databases: captured, planned, split, equal; refused; or a fault of ours."""

from __future__ import annotations

import random
import re
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn

import shardwise as sw
from models.zoo import captured_once, random_plan
from oracle.databases import Weighed, samples
from shardwise.errors import ShardwiseError
from shardwise.graph.capture import Capture, capture
from shardwise.plans.plan import Plan
from shardwise.rules.atoms import factor_graph
from shardwise.rules.tables import rule_of
from shardwise.search.user_choices import rules_of

MESHES = (sw.Mesh(a=2, b=2), sw.Mesh(x=3))
FAULTS = ("traceback", "wrong", "crashed", "out of time")
FACTOR = re.compile(r"(?<!\w)(?!(?:[IR]|P\d*)@)\w+@")  # of a strategy: an axis that splits a factor
SOURCE = Path(sw.__file__).parent


@dataclass
class Outcome:
    """What became of a sample. ``ended``: "equal", "unproven", "refused", "eager" (one device cannot run it), or one of
    ``FAULTS``; ``detail``: the message; ``without_rule``: the operators of the call that run unsplit."""

    entry: str
    ended: str = ""
    detail: str = ""
    captured: bool = False
    planned: bool = False
    split: bool = False
    without_rule: list[str] = field(default_factory=list)


def outcomes(name: str, entry: object, count: int, plans: int | None) -> Iterator[Outcome]:
    with warnings.catch_warnings(action="ignore"):
        yield from (attempt(name, model, plans) for model in samples(entry, count))


def attempt(name: str, model: Weighed, plans: int | None) -> Outcome:
    """Capture a sample, plan it by the default search and by ``plans`` random choices, and verify all plans. None: only
    capture it."""
    outcome = Outcome(name)
    try:
        results = model(*(x.clone() for x in model.called.inputs))
    except Exception as error:
        outcome.ended, outcome.detail = "eager", _first_line(error)
        return outcome
    if not results:
        outcome.ended, outcome.detail = "eager", "it returns no tensor"
        return outcome
    try:
        captured = capture(model, model.called.inputs)
        outcome.captured = True
        graph = captured.graph
        of_call = [op for op in graph.ops if op.name.startswith(("called/", "called."))]  # a function, or a module
        outcome.without_rule = [str(op.target) for op in of_call if rule_of(op, graph) is None]
        with captured_once(captured):
            for plan in () if plans is None else _plans(name, model, captured, plans):
                outcome.planned = True
                strategies = {entry.name: entry.strategy for entry in plan.operators}
                outcome.split |= any(FACTOR.search(strategies[op.name]) for op in of_call)
                report = sw.verify(model, model.called.inputs, plan, steps=1)
                proves_nothing = "prove nothing" in report.not_proven and report.collectives_match
                if report.not_proven and (report.is_equal or proves_nothing):
                    outcome.ended, outcome.detail = "unproven", report.not_proven
                elif not report.ok:
                    outcome.ended, outcome.detail = "wrong", " ".join(str(report).split())
                    return outcome
        outcome.ended = outcome.ended or ("equal" if plans is not None else "captured")
    except ShardwiseError as error:
        outcome.ended, outcome.detail = "refused", f"{type(error).__name__}: {_first_line(error)}"
    except Exception as error:
        outcome.ended, outcome.detail = "traceback", f"{type(error).__name__} at {_place(error)}: {_first_line(error)}"
    return outcome


def _plans(name: str, model: nn.Module, captured: Capture, count: int) -> Iterator[Plan]:
    yield sw.plan(model, model.called.inputs, 2, optimizer="sgd")
    factored = factor_graph(captured.graph, rules_of(captured.graph))
    for number in range(count):
        rng = random.Random(f"{name} {number}")
        yield random_plan(model, {}, captured, factored, rng, args=model.called.inputs, meshes=MESHES)


def kind_of_refusal(detail: str) -> str:
    """The class of a refusal: its message without names and numbers."""
    words = re.sub(r"'[^']*'|\"[^\"]*\"|\[[^\]]*\]|\([^)]*\)", "...", detail)
    words = re.sub(r"\b(?:aten|torch|nn|shardwise)\.[\w.]+", "OP", words)
    return re.sub(r"\d+", "N", words)[:110].strip()


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).split("\n", 1)[0][:300]


def _place(error: BaseException) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).is_relative_to(SOURCE)]
    return f"{Path(frames[-1].filename).relative_to(SOURCE)}:{frames[-1].lineno}" if frames else "no line of ours"
