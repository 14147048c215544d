"""The names of the dialect in docs/from-mindspore.md: ``make names`` writes them."""

from __future__ import annotations

from pathlib import Path

import shardwise.mindspore as ms
from shardwise.mindspore.communication import comm_func
from shardwise.mindspore.named import TABLES
from shardwise.mindspore.ops.primitive import Primitive

PAGE = Path(__file__).parents[2] / "docs/from-mindspore.md"
BEGIN, END = "<!-- names: make names -->", "<!-- end of names -->"


def table() -> str:
    primitives = [
        name for name in ms.ops.operations.__all__
        if isinstance(own := getattr(ms.ops, name), type) and issubclass(own, Primitive)
    ]  # fmt: skip
    rows = {
        "mindspore": ms.__all__,
        "mindspore.nn": ms.nn.__all__,
        "mindspore.ops, primitives": primitives,
        "mindspore.ops, functions": [name for name in ms.ops.__all__ if name not in ms.ops.operations.__all__],
        "mindspore.numpy": ms.numpy.__all__,
        "mindspore.train": ms.train.__all__,
        "mindspore.amp": [name for name in vars(ms.amp) if "mix" in name or "Scale" in name or name.startswith("get_")]
        + ["all_finite", "build_train_network"],
        "mindspore.communication": ms.communication.__all__,
        "mindspore.communication.comm_func": comm_func.__all__,
        "mindspore.parallel": ms.parallel.__all__,
        "mindspore.parallel.nn": ["GradAccumulation", "MicroBatchInterleaved", "Pipeline", "PipelineGradReducer"],
        "mindspore.parallel.auto_parallel": ["AutoParallel"],
        "mindspore.mint": ms.mint.__all__,
        "mindspore.mint.nn": ms.mint.nn.__all__,
        "mindspore.mint.nn.functional": ms.mint.nn.functional.__all__,
        "mindspore.mint.linalg, special": [*ms.mint.linalg.__all__, *ms.mint.special.__all__],
        "mindspore.mint.optim, experimental.optim": ms.mint.optim.__all__,
        "mindspore.experimental.optim.lr_scheduler": ms.mint.optim.lr_scheduler.__all__,
        "mindspore.mint.distributed": ms.mint.distributed.__all__,
        "mindspore.dataset": ms.dataset.__all__,
        "mindspore.dataset.text": ms.dataset.text.__all__,
        "mindspore.dataset.transforms": ms.dataset.transforms.__all__,
        "mindspore.dataset.vision": ms.dataset.vision.__all__,
        "Tensor, beside torch's methods": [name for name in ms.tensor_methods.METHODS if not name.startswith("__")],
    }
    lines = ["| where | names |", "|---|---|"]
    for where, names in rows.items():
        lines.append(f"| {where} | {' '.join(f'`{name}`' for name in sorted({*names}))} |")
    lines += ["", "These are not here: no public program was found that uses them, or others stand for them.", ""]
    lines += ["| where | not here | in its place |", "|---|---|---|"]
    for where, gone in TABLES["absent"].items():
        path = "mindspore" if where == "mindspore" else f"mindspore.{where}"
        for advice, names in gone.items():
            lines.append(
                f"| {path} | {' '.join(f'`{name}`' for name in names.split())} | {advice.replace('{}', '...')} |"
            )
    return "\n".join(lines)


def page(written: str) -> str:
    before, _, rest = written.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {PAGE}")
