"""Predicted against measured seconds of kernels and of whole steps on one device: ``make bench-kernel-prices``.

``--data`` is a file of measurements (JSON): ``kernels_us`` and ``fused_us`` (name -> microseconds; the last letter: f
forward, b backward through autograd), ``optimizer_us``, and ``steps``, whole training steps of transformers models.
The figures of ``costs/clusters/h100.toml`` were fitted to such kernels; steps were held out. What a measured backward
shorter than ``FLOOR_US`` takes is autograd's own time on the host; it is printed, and counted apart.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from measured_steps import predicted
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise as sw
from shardwise.costs.cluster import Cluster
from shardwise.costs.collectives import Links
from shardwise.costs.prices import Prices
from shardwise.graph.capture import capture

FLOOR_US = 250.0  # of a backward
FORWARD_FLOOR_US = 35.0
BF16, F32 = torch.bfloat16, torch.float32


class Called(nn.Module):
    """A function as a module. Tensors that need gradients are its parameters."""

    def __init__(self, function: Callable[..., Tensor], parameters: Sequence[Tensor]) -> None:
        super().__init__()
        self.function = function
        self.own = nn.ParameterList(parameters)

    def forward(self, *others: Tensor) -> Tensor:
        return self.function(*self.own, *others)


def tensors(*shapes: Sequence[int], dtype: torch.dtype = BF16) -> list[Tensor]:
    return [torch.empty(tuple(shape), dtype=dtype, device="meta") for shape in shapes]


@dataclass(frozen=True, slots=True)
class Case:
    """A function of parameters and of other tensors."""

    function: Callable[..., Tensor]
    parameters: Sequence[Tensor]
    others: Sequence[Tensor] = ()


def integers(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int64, device="meta")


def attention(b: int, h: int, kv: int, s: int, d: int, how: str) -> Case:
    if "mask" in how:
        mask = torch.empty(1, 1, s, s, dtype=torch.bool, device="meta")
        return Case(
            lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m),
            tensors(*[(b, h, s, d)] * 3),
            (mask,),
        )
    causal = how == "causal"
    # Grouped heads are repeated: which kernel repeats them is not priced.
    return Case(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal), tensors(*[(b, h, s, d)] * 3))


ELEMENTWISE: Mapping[str, Callable[[int, int], Case]] = {
    "add": lambda n, m: Case(torch.add, tensors((n, m), (n, m))),
    "mul": lambda n, m: Case(torch.mul, tensors((n, m), (n, m))),
    "silu": lambda n, m: Case(F.silu, tensors((n, m))),
    "gelu": lambda n, m: Case(F.gelu, tensors((n, m))),
    "relu": lambda n, m: Case(F.relu, tensors((n, m))),
    "layer_norm": lambda n, m: Case(lambda x, w, b: F.layer_norm(x, (m,), w, b), tensors((n, m), (m,), (m,))),
    "rms_norm": lambda n, m: Case(lambda x, w: F.rms_norm(x, (m,), w), tensors((n, m), (m,))),
    "softmax": lambda n, m: Case(lambda x: F.softmax(x, -1), tensors((n, m))),
    "dropout": lambda n, m: Case(lambda x: F.dropout(x, 0.1), tensors((n, m))),
    "to_f32": lambda n, m: Case(lambda x: x.float(), tensors((n, m))),
    "transpose_copy": lambda n, m: Case(lambda x: x.t().contiguous(), tensors((n, m))),
    "cat2": lambda n, m: Case(lambda x, y: torch.cat((x, y)), tensors((n, m), (n, m))),
    "sum_last": lambda n, m: Case(lambda x: x.sum(-1), tensors((n, m))),
    "sum_first": lambda n, m: Case(lambda x: x.sum(0), tensors((n, m))),
    "bias_add": lambda n, m: Case(torch.add, tensors((n, m), (m,))),
}


def cross_entropy(n: int, v: int, widened: bool) -> Case:
    return Case(lambda x, y: F.cross_entropy(x.float() if widened else x, y), tensors((n, v)), (integers(n),))


def convolution(n: int, c: int, hw: int, o: int, k: int, s: int) -> Case:
    return Case(lambda x, w: F.conv2d(x, w, stride=s, padding=k // 2), tensors((n, c, hw, hw), (o, c, k, k)))


def batch_norm(n: int, c: int, hw: int) -> Case:
    return Case(lambda x, w, b: F.batch_norm(x, None, None, w, b, True), tensors((n, c, hw, hw), (c,), (c,)))


def hf_norm(x: Tensor, w: Tensor) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return w * wide.to(x.dtype)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


FUSED: Mapping[str, Callable[..., Case]] = {
    "hf rms_norm": lambda n, m: Case(hf_norm, tensors((n, m), (m,))),
    "swiglu": lambda n, m: Case(lambda x, y: F.silu(x) * y, tensors((n, m), (n, m))),
    "rope": lambda h, s, d: Case(rope, tensors((1, h, s, d)), tensors((s, d), (s, d))),
    "residual add + rms_norm": lambda n, m: Case(lambda x, y, w: hf_norm(x + y, w), tensors((n, m), (n, m), (m,))),
}


def rows(weight: Tensor, indices: Tensor) -> Tensor:
    return F.embedding(indices, weight)


def chain(name: str, sizes: str) -> Case:
    return FUSED[name](*map(int, sizes.split("x")))


PATTERNS: Sequence[tuple[str, Callable[..., Case]]] = (
    (r"sdpa b=(\d+) h=(\d+) kv=(\d+) s=(\d+) d=(\d+) (causal|full|causal given as bool mask, kv repeated)", attention),
    (r"linear t=(\d+) k=(\d+) n=(\d+) bf16", lambda t, k, n: Case(F.linear, tensors((t, k), (n, k)))),
    (r"linear t=(\d+) k=(\d+) n=(\d+) f32", lambda t, k, n: Case(F.linear, tensors((t, k), (n, k), dtype=F32))),
    (r"bmm b=(\d+) m=(\d+) k=(\d+) n=(\d+)", lambda b, m, k, n: Case(torch.bmm, tensors((b, m, k), (b, k, n)))),
    (r"cross_entropy (\d+)x(\d+) bf16", lambda n, v: cross_entropy(n, v, False)),
    (r"cross_entropy (\d+)x(\d+) after \.float\(\)", lambda n, v: cross_entropy(n, v, True)),
    (r"embedding (\d+) of (\d+)x(\d+)", lambda n, v, m: Case(rows, tensors((v, m)), (integers(n),))),
    (r"conv2d n=(\d+) c=(\d+) hw=(\d+) o=(\d+) k=(\d+) s=(\d+) bf16", convolution),
    (r"batch_norm n=(\d+) c=(\d+) hw=(\d+) bf16", batch_norm),
    (r"max_pool (\d+)x(\d+)x(\d+)", lambda n, c, hw: Case(lambda x: F.max_pool2d(x, 3, 2, 1), tensors((n, c, hw, hw)))),
    (r"(hf rms_norm|swiglu|rope|residual add \+ rms_norm) ([\dx]+) eager", lambda name, sizes: chain(name, sizes)),
    (r"(\w+) (\d+)x(\d+) bf16", lambda name, n, m: ELEMENTWISE[name](n, m)),
)  # fmt: skip


def case_of(name: str) -> tuple[str, Case] | None:
    """The kind of a measured kernel, and how it is made; None where no pattern is that of the name."""
    for pattern, build in PATTERNS:
        if match := re.fullmatch(pattern, name):
            values = [int(text) if text.isdigit() else text for text in match.groups()]
            named = [text for text in values if isinstance(text, str) and not re.fullmatch(r"[\dx]+", text)]
            kind = pattern.split(" ")[0] if not pattern.startswith("(") else ""
            return " ".join([kind, *named]).strip(), build(*values)
    return None


def microseconds(case: Case, prices: Prices) -> tuple[float, float]:
    """Predicted, forward and backward, of the kernels alone, no faster than the host starts those of forward."""
    model = Called(case.function, case.parameters)
    graph = capture(model, tuple(case.others), {}).graph
    forward = backward = 0.0
    for op in graph.ops:
        operands, results = [graph.by_name[n] for n in op.operands], [graph.by_name[n] for n in op.results]
        shapes = [v.shape for v in operands], [v.shape for v in results]
        own = prices.forward(op, operands, results, shapes)
        forward += max(own, prices.device.launch) if own else 0.0
        backward += prices.backward(op, operands, results, shapes)
    return forward * 1e6, backward * 1e6


def kernels(data: Mapping[str, Any], prices: Prices, show: bool) -> None:
    """A line per kind: how many were measured, and predicted / measured."""
    found: dict[str, list[tuple[str, float, float]]] = {}
    hosts = skipped = 0
    for full, measured in {**data["kernels_us"], **data["fused_us"]}.items():
        name, part = full[:-2], full[-1]
        known = case_of(name)
        if known is None:
            skipped += 1
            continue
        kind, case = known
        if measured < (FORWARD_FLOOR_US if part == "f" else FLOOR_US):
            hosts += 1
            continue
        predicted = microseconds(case, prices)[part == "b"]
        found.setdefault(f"{kind} {'forward' if part == 'f' else 'backward'}", []).append((full, predicted, measured))
    print("| kernel | measured | predicted / measured: least | median | most |\n|---|---|---|---|---|")
    for kind, rows in sorted(found.items()):
        ratios = [predicted / measured for _, predicted, measured in rows]
        print(f"| {kind} | {len(rows)} | {min(ratios):.2f} | {median(ratios):.2f} | {max(ratios):.2f} |")
        for full, predicted, measured in rows if show else ():
            print(f"|   {full} | {measured:.1f} us | {predicted:.1f} us | {predicted / measured:.2f} | |")
    every = [abs(p / m - 1) for rows in found.values() for _, p, m in rows]
    print(f"| all | {len(every)} | median error {median(every):.1%} | mean {mean(every):.1%} | |")
    print(f"| not compared: {hosts} as short as the host takes, {skipped} compiled or of no known name | | | | |")


def steps(data: Mapping[str, Any], cluster: str) -> None:
    """A line per measured step."""
    print("\n| step | mode | measured ms | predicted / measured: seconds | bytes |\n|---|---|---|---|---|")
    seconds, num_bytes = [], []
    for row in data["steps"]:
        sizes = f"{row['model']} {row['layers']} x {row['hidden']}, {row['batch']} x {row['seq']}"
        mode = row["mode"] if row["recompute"] == "none" else f"recompute {row['recompute']}"
        found = predicted(row, cluster)
        if found is None:
            print(f"| {sizes} | {mode} | {row['step_ms']} | not built here | |")
            continue
        seconds.append(found.seconds / row["step_ms"] * 1e3)
        num_bytes.append(found.num_bytes / row["peak_allocated_GiB"] / 2**30)
        print(f"| {sizes} | {mode} | {row['step_ms']} | {seconds[-1]:.3f} | {num_bytes[-1]:.3f} |", flush=True)
    for what, ratios in (("seconds", seconds), ("bytes", num_bytes)):
        errors = sorted(abs(ratio - 1) for ratio in ratios)
        print(f"{what}: median error {median(errors):.1%}, largest {', '.join(f'{e:.1%}' for e in errors[-6:])}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="h100_measured.json")
    parser.add_argument("--cluster", default="h100")
    parser.add_argument("--all", action="store_true", help="a line per kernel")
    options = parser.parse_args(arguments)
    data = json.loads(options.data.read_text(encoding="utf-8"))
    prices = Prices(Links(Cluster.load(options.cluster).with_devices(1), sw.Mesh(dp=1)), "adamw fused")
    kernels(data, prices, options.all)
    steps(data, options.cluster)


if __name__ == "__main__":
    main()
