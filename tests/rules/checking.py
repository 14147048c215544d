"""``sw.check_rule`` over our own tables: ``python -m rules.checking`` in tests/ checks every sample (part of ``make
sweep``)."""

from __future__ import annotations

import warnings
from collections import Counter

from rules.samples import SAMPLES, Sample
from shardwise.graph.schema import operator_name
from shardwise.proof.rule_check import RuleReport, check_rule

# Splits that slicing shows and our rules do not have, by operator or by sample, with the reason.
REMAINING = {
    "aten.embedding.default['[5, 3]', '[4]', -1, True]": "its gradient is divided by how often an index occurs",
    "aten.scatter_reduce.two": "by amax and amin the updates combine by maximum and minimum: gradient-free calls only",
}


# On operands that do not fit together PyTorch 2.13 ends the process (SIGSEGV), so their missing splits are not sought.
CRASHING = ("lstm", "gru", "rnn_tanh", "rnn_relu")


def check(sample: Sample) -> RuleReport:
    """The report of one sample. Its positional arguments get the names of the schema."""
    names = [argument.name for argument in sample.target._schema.arguments]
    arguments = dict(zip(names, sample.args, strict=False)) | sample.kwargs
    return check_rule(sample.target, arguments, find_missing=operator_name(sample.target) not in CRASHING)


def faults(sample: Sample, report: RuleReport) -> list[str]:
    """What is wrong, and what is missing without a reason."""
    found = [str(wrong) for wrong in report.wrong]
    if not {str(sample.target), str(sample)} & REMAINING.keys():
        found += [str(missing) for missing in report.missing]
    return found


def main() -> None:
    warnings.simplefilter("ignore")
    counts: Counter[str] = Counter()
    for i, sample in enumerate(SAMPLES):
        if sample.unspecified:
            continue
        report = check(sample)
        counts += Counter(samples=1, splits=report.num_splits, wrong=len(report.wrong), missing=len(report.missing))
        for fault in faults(sample, report):
            counts["faults"] += 1
            print(f"{i} {sample}\n  {report.rules[0]}\n  {fault}")
    print(", ".join(f"{count} {what}" for what, count in counts.items()), f"({len(REMAINING)} operators with a reason)")
    if counts["faults"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
