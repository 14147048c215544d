"""The tables of docs/operator-database.md."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from oracle.outcomes import FAULTS, Outcome, kind_of_refusal

PAGE = Path(__file__).parents[2] / "docs/operator-database.md"
BEGIN, END = "<!-- tables: written by make operator-database -->\n", "<!-- end of tables -->\n"
COLUMNS = ("captured", "planned", "split", "equal", "unproven", "refused", *FAULTS)


def counts(outcomes: Sequence[Outcome]) -> Counter[str]:
    counted = Counter(outcome.ended for outcome in outcomes)
    counted["captured"] = sum(outcome.captured for outcome in outcomes)
    counted["planned"] = sum(outcome.planned for outcome in outcomes)
    counted["split"] = sum(outcome.split for outcome in outcomes)
    return counted


def without_rule(results: Mapping[str, Sequence[Outcome]]) -> dict[str, list[str]]:
    """Operators that run unsplit in some call -> the entries whose calls they are."""
    entries: dict[str, set[str]] = defaultdict(set)
    for outcome in (outcome for outcomes in results.values() for outcome in outcomes):
        for operator in outcome.without_rule:
            entries[operator].add(outcome.entry)
    return {operator: sorted(entries[operator]) for operator in sorted(entries)}


def tables(results: Mapping[str, Sequence[Outcome]]) -> str:
    """What became of the samples of every database, as Markdown."""
    lines = ["| database | entries | samples | " + " | ".join(COLUMNS) + " |", "|---|" + "---:|" * (len(COLUMNS) + 2)]
    for name, outcomes in results.items():
        run = [outcome for outcome in outcomes if outcome.ended != "eager"]
        counted = counts(run)
        cells = [len({outcome.entry for outcome in run}), len(run), *(counted[column] for column in COLUMNS)]
        lines.append(f"| {name} | " + " | ".join(map(str, cells)) + " |")
    every = [outcome for outcomes in results.values() for outcome in outcomes]
    lines += ["", "### Refused", "", "| samples | what is said | entries |", "|---:|---|---|"]
    refusals: dict[str, list[str]] = defaultdict(list)
    for outcome in every:
        if outcome.ended == "refused":
            refusals[kind_of_refusal(outcome.detail)].append(outcome.entry)
    for kind, entries in sorted(refusals.items(), key=lambda item: (-len(item[1]), item[0])):
        lines.append(f"| {len(entries)} | {_cell(kind)} | {_names(entries)} |")
    faults = [outcome for outcome in every if outcome.ended in FAULTS]
    if faults:
        lines += ["", "### Faults", "", "| entry | fault | what is said |", "|---|---|---|"]
        lines += sorted({f"| `{o.entry}` | {o.ended} | {_cell(o.detail)} |" for o in faults})
    operators = without_rule(results)
    lines += [
        "",
        "### Without a rule",
        "",
        f"{len(operators)} operators run unsplit in some call of these databases:",
        "",
    ]
    lines.append(", ".join(f"`{operator}`" for operator in operators) + ("." if operators else ""))
    return "\n".join(lines) + "\n"


def _names(entries: Sequence[str]) -> str:
    names = sorted(set(entries))
    return ", ".join(f"`{name}`" for name in names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")[:240]


def with_tables(page: str, text: str) -> str:
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin, f"{PAGE} has lost the mark before its tables"
    assert end, f"{PAGE} has lost the mark behind its tables"
    return before + BEGIN + text + END + after
