"""``make sweep-trainer``: ShardwiseTrainer on architectures of transformers, against the Trainer of one process.

Every architecture of ``models.breadth`` (small) trains three steps of two batches each, in float64: labels, padding
where there are texts, accumulation, clipping, warm-up and a cosine schedule, AdamW with weight decay, dropout off.
Losses, gradients' norms and learning rates of two ranks must be those of one process.

``python -m hf.sweep opt roberta`` in tests/ runs some; ``--minutes`` ends early and says what is missing.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils.data import Dataset

from hf.runs import history
from launch.gloo_ranks import TRACES, run_on_ranks
from models.breadth import ARCHITECTURES, KNOWN, tiny_of
from shardwise.transformers import ShardwiseTrainer

SEQUENCES = ("input_ids", "labels", "attention_mask", "decoder_input_ids")
SAMPLES, BATCH = 24, 4
BOUND = 1e-5  # transformers takes losses of texts, and the Trainer sums of them, in float32
PAD = 1
# Architecture -> why its losses are not those of one process.
OWN_DRAWS = "draws random numbers itself: the same on any number of ranks, and others than an unsplit model's"
OTHER = {
    "phimoe": OWN_DRAWS,
    "vit_mae": OWN_DRAWS,
    "xglm": "overflows in float64, in one process too",
    "funnel": "its configuration has no bos_token_id, which the Trainer asks for",
    "blip": "returns no loss",
    "siglip_pairs": "returns no loss",
}


class Samples(Dataset[dict[str, torch.Tensor]]):
    """The rows of one batch of an architecture, as a data set."""

    def __init__(self, rows: dict[str, torch.Tensor]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(next(iter(self.rows.values())))

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: rows[index] for name, rows in self.rows.items()}


@dataclass
class Result:
    """What became of an architecture. ``worst``: the largest relative difference; ``split``: the share of the
    parameters that a rank holds."""

    name: str
    worst: float = 0.0
    split: float = 1.0
    seconds: float = 0.0
    failure: str = ""


def data_of(name: str) -> Samples:
    """Samples of an architecture; every third text is two tokens shorter, with padding that no loss counts."""
    torch.manual_seed(1)
    inputs = tiny_of(name).inputs(SAMPLES)
    rows = {k: v for k, v in inputs.items() if isinstance(v, torch.Tensor) and v.dim() and len(v) == SAMPLES}
    ids = rows.get("input_ids")
    if ids is not None and ids.dim() == 2:
        ids = rows["input_ids"] = ids.clone()
        ids[::3, -2:] = PAD
        labels = rows.get("labels")
        if labels is not None and labels.dim() == 2:
            labels = rows["labels"] = labels.clone()
            labels[::3, -2:] = -100
    return Samples({k: v.double() if v.is_floating_point() else v for k, v in rows.items()})


def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = tiny_of(name).build().double()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for key, value in vars(module).items():
            if "drop" in key and isinstance(value, float):
                setattr(module, key, 0.0)
        if hasattr(module, "config"):
            module.config._experts_implementation = "batched_mm"  # grouped products are not in float64
    return model


def trained(kind: type[tf.Trainer], name: str, folder: str, **more: Any) -> tf.Trainer:
    arguments = tf.TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=2,
        max_steps=3,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        warmup_steps=1,
        weight_decay=0.1,
        max_grad_norm=0.5,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        seed=3,
    )
    trainer = kind(model=model_of(name), args=arguments, train_dataset=data_of(name), **more)
    trainer.remove_callback(tf.PrinterCallback)
    trainer.train()
    return trainer


def on_rank(names: list[str], folder: str, until: float) -> list[tuple[str, Any, float, str]]:
    """On a rank: (architecture, what was logged, share of the parameters, failure) of each, until the time is over."""
    warnings.simplefilter("ignore")
    found: list[tuple[str, Any, float, str]] = []
    for name in names:
        over = torch.tensor(float(time.time() > until))
        torch.distributed.all_reduce(over)
        if over:
            break
        logged: Any = []
        share, failure = 1.0, ""
        try:
            trainer = trained(ShardwiseTrainer, name, folder, plan_settings={"mode": "data_parallel", "zero": 3})
            par: Any = trainer.model_wrapped
            counts = [sum(p.numel() for p in own.parameters()) for own in (par, trainer.model)]
            logged, share = history(trainer), counts[0] / counts[1]
        except Exception as error:
            failure = f"{type(error).__name__}: {str(error)[:300]}"
        found.append((name, logged, share, failure))
    return found


def compared(name: str, logged: Any, share: float, failure: str, folder: str) -> Result:
    result = Result(name, split=share, failure=failure)
    try:
        theirs = history(trained(tf.Trainer, name, folder))
    except Exception as error:
        result.failure = f"in one process: {type(error).__name__}: {str(error)[:200]}"
        return result
    if failure:
        return result
    if len(theirs) != len(logged) or len(theirs) < 3:
        result.failure = f"{len(logged)} lines instead of {len(theirs)}"
    for own, other in zip(logged, theirs, strict=False):
        for key, value in other.items():
            result.worst = max(result.worst, abs(own[key] - value) / max(abs(value), 1e-12))
    if result.worst > BOUND:
        result.failure = f"differs by {result.worst:.1e}"
    return result


def swept(names: list[str], until: float, *, chunk: int = 8) -> list[Result]:
    """The results of those that there was time for. A chunk of architectures shares two ranks."""
    found = []
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as traces:
        os.environ[TRACES] = traces  # as conftest.py does, which is not here
        for start in range(0, len(names), chunk):
            if time.time() > until:
                break
            some = names[start : start + chunk]
            begun = time.perf_counter()
            ranks = run_on_ranks(on_rank, 2, (some, folder, until), Path(folder), 3600.0)
            for (name, logged, share, failure), (_, again, _, other) in zip(*ranks, strict=True):
                if repr(logged) != repr(again):
                    failure = failure or other or "ranks log different figures"
                result = compared(name, logged, share, failure or other, folder)
                result.seconds = (time.perf_counter() - begun) / len(some)
                found.append(result)
                print(f"{name}: {result.failure or f'equal to {result.worst:.0e}'}", flush=True)
    return found


def sweep_table(results: list[Result]) -> Table:
    table = Table(title="ShardwiseTrainer on 2 ranks against Trainer in one process, 3 steps")
    for header in ("architecture", "worst difference", "a rank's parameters", "notes"):
        table.add_column(header)
    for own in results:
        why = KNOWN.get(own.name) or OTHER.get(own.name)
        known = f"known: {why}" if why else ""
        table.add_row(own.name, f"{own.worst:.0e}", f"{own.split:.0%}", "\n".join(filter(None, (own.failure, known))))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("architectures", nargs="*", help="default: all")
    parser.add_argument("--minutes", type=float, default=600.0)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    warnings.simplefilter("ignore")
    names = options.architectures or list(ARCHITECTURES)
    results = swept(names, time.time() + 60 * options.minutes)
    Console(width=160).print(sweep_table(results))
    equal = sum(not own.failure for own in results)
    print(f"{equal} of {len(results)} architectures train as in one process; {len(names) - len(results)} had no time")
    unexpected = [own.name for own in results if own.failure and own.name not in KNOWN | OTHER]
    if unexpected:
        print("failed:", ", ".join(unexpected))
        raise SystemExit(1)


if __name__ == "__main__":
    main()
