"""Tokens per second of ``shardwise.transformers.generator`` on gloo ranks of this machine, beside transformers' own
``generate`` in one process: greedily and with beams. The texts must be equal.

    python benchmarks/generation.py [--ranks 2] [--width 512] [--layers 4] [--rounds 5]

One thread a rank, and one for the process beside them, in turns, since other work on the machine comes and goes. What
is printed first is what ranks, whose products are split by heads and features, take of the time of one.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
import transformers

import shardwise as sw
from shardwise.transformers import generator

_BEAMS = 4
_COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head")


def model_of(options: argparse.Namespace) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=options.vocab,
        hidden_size=options.width,
        intermediate_size=4 * options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
    )
    return transformers.LlamaForCausalLM(config).eval()


def on_a_rank(options: argparse.Namespace) -> None:
    """Every rank: the ranks together, then rank 0 alone, round after round."""
    sw.init_ranks()
    torch.set_num_threads(1)
    model = model_of(options)
    ids = torch.randint(3, options.vocab, (options.batch, options.prompt))
    settings = {"mesh": sw.Mesh(tp=sw.world_size()), "search": "sharding_propagation"}
    strategies = {f"*{name}": "n@tp" for name in _COLUMNS}
    par = sw.parallelize(model, sw.plan(model, {"input_ids": ids}, sw.world_size(), strategies=strategies, **settings))
    writer = generator(par, batch_size=options.batch, max_length=options.prompt + options.tokens)
    wanted = {"max_new_tokens": options.tokens, "min_new_tokens": options.tokens, "pad_token_id": 0}
    for name, prompts, more in (("greedy", ids, {}), (f"{_BEAMS} beams", ids[::_BEAMS], {"num_beams": _BEAMS})):
        taken: dict[str, list[float]] = {"ranks": [], "one": []}
        for number in range(options.rounds + 1):  # the first makes the programs
            texts = {}
            for who, own in (("ranks", writer), ("one", model)):
                dist.barrier()
                if who == "ranks" or sw.rank() == 0:
                    start = time.perf_counter()
                    texts[who] = own.generate(prompts, do_sample=False, **wanted, **more)
                    if number:
                        taken[who].append(time.perf_counter() - start)
            dist.barrier()
            if sw.rank() == 0 and not torch.equal(texts["ranks"], texts["one"]):
                raise SystemExit(f"{name}: ranks write another text than one process")
        if sw.rank() == 0:
            _print(name, taken, options.batch * options.tokens)


def _print(name: str, taken: dict[str, list[float]], tokens: int) -> None:
    ratios = [ours / one for ours, one in zip(taken["ranks"], taken["one"], strict=True)]
    rates = {who: tokens / statistics.median(seconds) for who, seconds in taken.items()}
    print(
        f"{name}: {statistics.median(ratios):.2f} of the time of one process ({min(ratios):.2f} to {max(ratios):.2f}); "
        f"{rates['ranks']:.0f} tokens/s on {sw.world_size()} ranks, {rates['one']:.0f} in one process"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("ranks", 2), ("width", 512), ("layers", 4), ("vocab", 8192), ("batch", 4), ("prompt", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if "RANK" in os.environ:
        on_a_rank(options)
        return 0
    command = (sys.executable, "-m", "shardwise.cli", "run", "-n", str(options.ranks), *sys.argv)
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
