"""Trains the byte-level GPT with Lightning's Trainer, on one device or on all ranks; its checkpoints fit both.

python examples/lightning_gpt.py                          one device, Lightning alone
shardwise run -n 2 examples/lightning_gpt.py --ranks      two ranks under a plan that shardwise chooses
"""

from __future__ import annotations

import argparse
from typing import Any

import lightning.pytorch as pl
import torch
from gpt import GPT, GPTConfig
from text import load_bytes
from torch.utils.data import DataLoader, TensorDataset

import shardwise as sw
from shardwise.lightning import ShardwiseStrategy

CONTEXT, BATCH = 32, 8


class Module(pl.LightningModule):
    def __init__(self, on_ranks: bool, layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)  # the same initial weights on every rank
        self.net = GPT(GPTConfig(layers=layers, width=64, context=CONTEXT))
        self.on_ranks = on_ranks

    def configure_model(self) -> None:
        if self.on_ranks and not isinstance(self.net, sw.Parallel):
            plan = None
            if sw.rank() == 0:  # planned once; the other ranks receive it
                example = torch.zeros(BATCH, CONTEXT, dtype=torch.int64)
                plan = sw.plan(self.net, (example, example), sw.Cluster.local(sw.world_size()))
            self.net = sw.parallelize(self.net, plan)

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        loss = self.net(*batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", action="store_true")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--save", help="a file to save at the end")
    parser.add_argument("--resume", help="a file to go on from")
    options = parser.parse_args()

    text = load_bytes()[: 64 * BATCH * (CONTEXT + 1)].long().view(-1, CONTEXT + 1)
    loader = DataLoader(TensorDataset(text[:, :-1], text[:, 1:]), batch_size=BATCH)
    strategy = ShardwiseStrategy() if options.ranks else "auto"
    trainer = pl.Trainer(
        max_steps=options.steps,
        strategy=strategy,
        devices=1,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    module = Module(options.ranks, options.layers)
    trainer.fit(module, loader, ckpt_path=options.resume, weights_only=False if options.resume else None)
    if options.save:
        trainer.save_checkpoint(options.save)
    if trainer.is_global_zero:
        print(f"{trainer.global_step} steps, loss {float(trainer.callback_metrics['loss']):.6f}")


if __name__ == "__main__":
    main()
