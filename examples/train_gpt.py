"""Trains the byte-level GPT on real text: on one device, or on all ranks under a plan.

python examples/train_gpt.py                                      one device, plain PyTorch
shardwise run -n 8 examples/train_gpt.py --plan auto              eight ranks, everything chosen
shardwise run -n 8 examples/train_gpt.py --plan 2x4               two-way data by four-way tensor parallelism
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from gpt import GPT, GPTConfig
from text import batches, load_bytes
from torch import Tensor, nn

import shardwise as sw

# Megatron's split needs only these: what is between and behind them follows.
TENSOR_PARALLEL = {"blocks.*.attention.qkv": "n@tp", "blocks.*.mlp.up": "n@tp", "head": "n@tp"}


def make_plan(model: nn.Module, batch: tuple[Tensor, Tensor], name: str, ranks: int) -> sw.Plan:
    """A plan for all ranks: found without a word, or from three strategies on a mesh of 2 x 4."""
    cluster = sw.Cluster.local(ranks)
    if name == "auto":
        return sw.plan(model, batch, cluster)
    return sw.plan(model, batch, cluster, mesh=sw.Mesh(dp=2, tp=4), strategies=TENSOR_PARALLEL)


@torch.no_grad()
def write_text(model: nn.Module, prompt: str, length: int, context: int) -> str:
    """Continue the prompt byte by byte; every rank draws the same bytes."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.tensor([list(prompt.encode())])
    for _ in range(length):
        window = nn.functional.pad(ids[:, -context:], (0, context - min(context, ids.shape[1])))
        logits = model(window)[0, min(context, ids.shape[1]) - 1]
        following = torch.multinomial((logits / 0.7).softmax(-1), 1, generator=generator)
        ids = torch.cat([ids, following[None]], dim=1)
    return bytes(ids[0].tolist()).decode(errors="replace")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", choices=("none", "auto", "2x4"), default="none")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--length", type=int, default=160, help="bytes to write at the end")
    parser.add_argument("--out", type=Path, help="where to keep losses and text, as JSON; the plan goes beside it")
    options = parser.parse_args()

    config = GPTConfig(layers=options.layers, width=options.width, context=64)
    steps = batches(load_bytes(), options.batch, config.context, seed=1)
    sw.init_ranks()
    if options.plan == "none":
        torch.manual_seed(0)
        model: nn.Module = GPT(config)
    else:
        with sw.deferred(seed=0, values="cpu"):  # the same values, but no rank ever holds more than its shards
            model = GPT(config)
        plan = None
        if sw.rank() == 0:  # planned once; the other ranks receive it
            example = next(batches(load_bytes(), options.batch, config.context, seed=1))
            plan = make_plan(model, example, options.plan, sw.world_size())
            if options.out:
                plan.save(options.out.with_suffix(".plan.json"))
        model = sw.parallelize(model, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, betas=(0.9, 0.95), eps=1e-6)

    losses: list[float] = []
    for step, (ids, labels) in zip(range(options.steps), steps, strict=False):
        if isinstance(model, sw.Parallel):
            loss = model.step(ids, labels)
        else:
            loss = model(ids, labels)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if sw.rank() == 0:
            print(f"step {step + 1}/{options.steps} loss {losses[-1]:.4f}", flush=True)

    model.eval()
    text = write_text(model, "The import statement", options.length, config.context)
    if sw.rank() == 0:
        if options.out:
            options.out.write_text(json.dumps({"losses": losses, "text": text}))
        else:
            print(text)


if __name__ == "__main__":
    main()
