"""Every tensor-parallel and expert-parallel plan that ships with the installed transformers, checked on small
configurations.

``make checked-plans`` writes ``docs/checked-plans.md``: each causal model whose configuration ships a tp plan, on 2
ranks and, where its heads divide, on 4. ``python -m foreign.shipped --experts`` in tests/ checks those that ship an ep
plan, beside their tp plan and beside FSDP2.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers as tf

import shardwise as sw
from models.breadth import ARCHITECTURES, FIELDS, OMITTED, _small_fields
from models.tiny_models import VOCABULARY

DOCS = Path(__file__).parents[2] / "docs"
CPU_SECONDS, SECONDS = 90, 900  # of a check: what it takes, and where ranks wait for each other for ever
LIMIT = 7_000_000  # parameters of a small configuration

# What SMALL makes inconsistent, for architectures that the breadth sweep does not have.
INKLING = {
    "unpadded_vocab_size": VOCABULARY,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_head_dim": 8,
}
EXTRA: dict[str, dict[str, Any]] = {
    "dots1": {"n_shared_experts": 1},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_chunk_size": 4},
    "inkling2_loop_text": INKLING,
    "inkling2_text": INKLING,
    "kimi_linear": {"linear_head_dim": 8, "linear_num_heads": 4, "num_experts": 4, "num_experts_per_token": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
}


@dataclass(frozen=True)
class Shipped:
    """Plans of a kind. ``field``: of the configurations that have one; ``plans``: what is passed to ``sw.check`` with
    the number of ranks, by what the page calls it."""

    field: str
    page: str
    head: str
    plans: Mapping[str, tuple[int, Callable[[], Any]]]


def _config(**sizes: int) -> Any:
    from transformers.distributed import DistributedConfig

    return DistributedConfig(**sizes)


@dataclass(frozen=True)
class Outcome:
    """``plan``: what the page calls it; ``verdict``: of ``sw.check``, or "not built" where no small configuration was
    found; ``said``: what it prints."""

    name: str
    plan: str
    verdict: str
    said: str


def architectures(field: str) -> list[str]:
    """Types of models with a causal head whose configuration has a plan."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    found = []
    for name in sorted(CAUSAL):
        try:
            config = tf.AutoConfig.for_model(name)
        except Exception:  # it needs what is not installed
            continue
        if getattr(config, field, None):
            found.append(name)
    return found


def built(name: str) -> Any:
    default = tf.AutoConfig.for_model(name)
    fields = _small_fields(default) | {"num_attention_heads": 4, "num_key_value_heads": 4}
    given = {
        **FIELDS.get(name, {}),
        **EXTRA.get(name, {}),
        **(ARCHITECTURES[name].fields if name in ARCHITECTURES else {}),
    }
    for key, value in given.items():
        if "." not in key:
            fields[key] = value
    config = type(default)(**{key: value for key, value in fields.items() if value is not OMITTED})
    torch.manual_seed(0)
    with torch.device("meta"):
        size = sum(p.numel() for p in tf.AutoModelForCausalLM.from_config(config).parameters())
    if size > LIMIT:
        raise ValueError(f"{size:,} parameters are not small")
    return tf.AutoModelForCausalLM.from_config(config)


def checked(name: str, called: str, ranks: int, plan: Callable[[], Any]) -> Outcome:
    for timer, own, seconds in (
        (signal.ITIMER_PROF, signal.SIGPROF, CPU_SECONDS),
        (signal.ITIMER_REAL, signal.SIGALRM, SECONDS),
    ):
        signal.signal(own, _too_long)
        signal.setitimer(timer, seconds)
    try:
        with warnings.catch_warnings(action="ignore"), contextlib.redirect_stderr(io.StringIO()):
            try:
                model = built(name)
                ids = torch.randint(3, VOCABULARY, (4, 8))
                batch = {"input_ids": ids, "labels": ids}
                copy.deepcopy(model)(**batch)  # on one device, without a plan
            except Exception as error:
                return Outcome(name, called, "not built", f"{type(error).__name__}: {str(error)[:120]}")
            try:
                found = sw.check(model, batch, plan(), ranks, beside=False)
            except Exception as error:
                return Outcome(name, called, "not run", f"{type(error).__name__}: {str(error)[:200]}")
            return Outcome(name, called, found.verdict, str(found))
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)


def _too_long(*_: Any) -> None:
    raise TimeoutError(f"more than {CPU_SECONDS} s of CPU time, or {SECONDS} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--experts", action="store_true", help="plans of experts instead of tp plans")
    parser.add_argument("--write", action="store_true", help="write the page")
    options = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)
    outcomes = []
    shipped = EXPERTS if options.experts else TENSORS
    for name in options.names or architectures(shipped.field):
        for called, (ranks, plan) in shipped.plans.items():
            outcome = checked(name, called, ranks, plan)
            outcomes.append(outcome)
            print(f"{name}, {called}: {outcome.said}", flush=True)
    if options.write:
        (DOCS / shipped.page).write_text(page(shipped, outcomes), encoding="utf-8")
    counts = {v: sum(o.verdict == v for o in outcomes) for v in ("equal", "wrong", "not run", "not built")}
    print(counts, file=sys.stderr)


WHAT = """transformers' own code applies its plan on virtual ranks, in float64; loss, outputs, every gradient, buffers
and parameters after two steps are compared ([how](decisions/0025-plans-of-other-tools-run-their-own-code.md)).
Configurations are small (two layers, width 32, four heads of keys as of queries); dropout is off. A verdict is about
training: inference takes other paths in these layers.
Where a plan stops at a size that does not divide, other sizes may do.

{counts}
"""
TENSORS = Shipped(
    "base_model_tp_plan",
    "checked-plans.md",
    """# Checked plans

Which tensor-parallel plans that ship with transformers {version} compute what one device computes. Written by
`make checked-plans`; every line can be had again:

```text
model = transformers.AutoModelForCausalLM.from_config(small_config)
print(sw.check(model, {{"input_ids": ids, "labels": ids}}, "auto", 2))
```

"""
    + WHAT,
    {"2 ranks": (2, lambda: "auto"), "4 ranks": (4, lambda: "auto")},
)
EXPERTS = Shipped(
    "base_model_ep_plan",
    "checked-expert-plans.md",
    """# Checked plans of experts

Which expert-parallel plans that ship with transformers {version} compute what one device computes: beside the
tensor-parallel plan of the model, whose ranks have the same samples, and beside FSDP2, whose ranks have their own.
Written by `python -m foreign.shipped --experts --write`; every line can be had again:

```text
model = transformers.AutoModelForCausalLM.from_config(small_config)
config = transformers.distributed.DistributedConfig(fsdp_size=2, ep_size=2)
print(sw.check(model, {{"input_ids": ids, "labels": ids}}, config, 2))
```

"""
    + WHAT,
    {
        "ep 2 beside tp 2": (2, lambda: _config(tp_size=2, ep_size=2)),
        "ep 2 beside fsdp 2": (2, lambda: _config(fsdp_size=2, ep_size=2)),
    },
)


def page(shipped: Shipped, outcomes: list[Outcome]) -> str:
    """The whole page: counts, what is wrong with its first wrong operator, and the names of the rest."""
    names = {v: sorted({o.name for o in outcomes if o.verdict == v}) for v in ("wrong", "not run", "not built")}
    bad = {name for group in names.values() for name in group}
    equal = sorted({o.name for o in outcomes} - bad)
    rows = [f"| {v} | {sum(o.verdict == v for o in outcomes)} |" for v in ("equal", "wrong", "not run", "not built")]
    lines = [
        shipped.head.format(
            version=tf.__version__,
            counts="\n".join([f"| verdict | checks ({' and '.join(shipped.plans)}) |", "|---|---|", *rows]),
        )
    ]
    titles = {
        "wrong": "## Wrong",
        "not run": "## Not run: nothing is claimed",
        "not built": "## No small configuration was found",
    }
    for verdict, title in titles.items():
        lines.append(title + "\n")
        for name in names[verdict]:
            said = {o.plan: o.said for o in outcomes if o.name == name and o.verdict == verdict}
            first, text = next(iter(said.items()))
            on = " and ".join(said)
            shown = text if verdict == "wrong" else text.split("\n")[0]
            shown = "\n".join(line for line in shown.split("\n") if "rules that name nothing" not in line)
            lines.append(f"`{name}`, {on} (shown: {first}):\n\n```text\n{shown}\n```\n")
    lines.append("## Equal\n\n" + ", ".join(f"`{name}`" for name in equal) + "\n")
    unused = {o.name: rules.group(1) for o in outcomes if (rules := re.search("rules that name nothing: (.*)", o.said))}
    lines.append(
        "## Rules that name nothing\n\nIn the configuration that was checked; another one may have these modules.\n"
    )
    lines += [f"* `{name}`: {', '.join(f'`{rule}`' for rule in rules.split(', '))}" for name, rules in unused.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
