"""Times training steps of transformers models on one device: plain PyTorch and ours, eager and compiled.

``make bench-gpu``. All four train the same model from the same weights, in bfloat16 with fused AdamW and without
dropout. Their losses must agree before anything is timed. Then they take turns, step by step, in an order that changes
(``step_time``): clocks and other load drift. Of the ratios within each round the median and the quartiles are shown,
eager to eager and compiled to compiled. The compiler is ``torch.compile``, as it is by default.

Run ``python benchmarks/gpu_steps.py [--models llama bert] [--rounds 30] [--json FILE]``. Without a GPU:
``--device cpu --tiny``, which shows that it runs.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median

import torch
import transformers
from rich.console import Console
from rich.table import Table
from step_time import LOSS_STEPS, commit, quartiles, ratios, take_turns
from torch import Tensor, nn

import shardwise as sw

# Of a loss that bfloat16 models agree on: its numbers have 8 bits (0.4 %), and ours and the compiler's round elsewhere.
LOSS_TOLERANCE = 0.01
WARM_UP = 3  # further steps of each, not timed
BASELINES = {"ours, eager": "plain, eager", "ours, compiled": "plain, compiled"}

Inputs = dict[str, Tensor]
Seconds = Mapping[str, list[float]]


def _tokens(vocab: int, batch: int, length: int) -> Inputs:
    ids = torch.randint(vocab, (batch, length))
    return {"input_ids": ids, "labels": ids}


def _images(batch: int, size: int, classes: int) -> Inputs:
    return {"pixel_values": torch.randn(batch, 3, size, size).bfloat16(), "labels": torch.randint(classes, (batch,))}


def gpt2(tiny: bool) -> tuple[nn.Module, Inputs]:
    """GPT-2 medium, 8 x 1,024 tokens."""
    layers, width, heads, vocab, batch, length = (2, 64, 2, 512, 2, 32) if tiny else (24, 1024, 16, 50257, 8, 1024)
    config = transformers.GPT2Config(
        n_layer=layers, n_embd=width, n_head=heads, vocab_size=vocab, n_positions=length, use_cache=False,
        embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config), _tokens(vocab, batch, length)


def llama(tiny: bool) -> tuple[nn.Module, Inputs]:
    """Llama of 16 layers of 2,048 (1.1 billion parameters), 2 x 4,096 tokens."""
    layers, width, heads, vocab, batch, length = (2, 64, 4, 512, 2, 32) if tiny else (16, 2048, 32, 32000, 2, 4096)
    config = transformers.LlamaConfig(
        num_hidden_layers=layers, hidden_size=width, intermediate_size=4 * width, num_attention_heads=heads,
        num_key_value_heads=heads // 4, vocab_size=vocab, max_position_embeddings=length, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), _tokens(vocab, batch, length)


def bert(tiny: bool) -> tuple[nn.Module, Inputs]:
    """BERT base, 32 x 512 tokens."""
    layers, width, heads, vocab, batch, length = (2, 64, 2, 512, 2, 32) if tiny else (12, 768, 12, 30522, 32, 512)
    config = transformers.BertConfig(
        num_hidden_layers=layers, hidden_size=width, intermediate_size=4 * width, num_attention_heads=heads,
        vocab_size=vocab, max_position_embeddings=length, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config), _tokens(vocab, batch, length)


def vit(tiny: bool) -> tuple[nn.Module, Inputs]:
    """ViT base, 64 images of 224 x 224 in patches of 16 x 16."""
    layers, width, heads, classes, batch, size = (2, 64, 2, 10, 16, 32) if tiny else (12, 768, 12, 1000, 64, 224)
    config = transformers.ViTConfig(
        num_hidden_layers=layers, hidden_size=width, intermediate_size=4 * width, num_attention_heads=heads,
        image_size=size, num_labels=classes,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config), _images(batch, size, classes)


def resnet(tiny: bool) -> tuple[nn.Module, Inputs]:
    """ResNet-50, 128 images of 224 x 224."""
    widths, classes, batch, size = ([16, 32], 10, 16, 64) if tiny else ([256, 512, 1024, 2048], 1000, 128, 224)
    config = transformers.ResNetConfig(
        embedding_size=widths[0] // 4, hidden_sizes=widths, depths=[1, 1] if tiny else [3, 4, 6, 3], num_labels=classes
    )
    return transformers.ResNetForImageClassification(config), _images(batch, size, classes)


def mixtral(tiny: bool) -> tuple[nn.Module, Inputs]:
    """Mixtral of 8 layers of 1,024 with 8 experts (830 million parameters), 4 x 2,048 tokens."""
    layers, width, heads, vocab, batch, length = (2, 64, 4, 512, 2, 32) if tiny else (8, 1024, 16, 32000, 4, 2048)
    config = transformers.MixtralConfig(
        num_hidden_layers=layers, hidden_size=width, intermediate_size=7 * width // 2, num_attention_heads=heads,
        num_key_value_heads=heads // 4, vocab_size=vocab, max_position_embeddings=length, use_cache=False,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config), _tokens(vocab, batch, length)


MODELS: Mapping[str, Callable[[bool], tuple[nn.Module, Inputs]]] = {
    "gpt2": gpt2,
    "llama": llama,
    "mixtral": mixtral,
    "bert": bert,
    "vit": vit,
    "resnet": resnet,
}


def training_step(
    forward_backward: Callable[[], Tensor], module: nn.Module, device: torch.device
) -> Callable[[], Tensor]:
    """Forward, backward and update; ends when the device has done it."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)

    def step() -> Tensor:
        loss = forward_backward()
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return loss

    return step


def plain(model: nn.Module, inputs: Inputs, device: torch.device, compiled: bool) -> Callable[[], Tensor]:
    called = torch.compile(model) if compiled else model

    def forward_backward() -> Tensor:
        loss: Tensor = called(**inputs).loss
        loss.backward()
        return loss.detach()

    return training_step(forward_backward, model, device)


def ours(model: nn.Module, inputs: Inputs, device: torch.device, compiled: bool) -> Callable[[], Tensor]:
    plan = sw.plan(model, inputs, 1, mesh=sw.Mesh(dp=1), mode="stand_alone")
    parallel = sw.parallelize(model, plan, compile=compiled, device=device)
    return training_step(lambda: parallel.step(**inputs), parallel, device)


def check_losses(losses: Mapping[str, list[float]]) -> None:
    """Raise if the contenders do not compute the same thing."""
    expected = next(iter(losses.values()))
    for name, found in losses.items():
        if any(not abs(a - b) <= LOSS_TOLERANCE * abs(b) for a, b in zip(found, expected, strict=True)):
            raise AssertionError(f"{name} computes something else: its losses are {found}, not {expected}")


def measure(name: str, tiny: bool, rounds: int, device: torch.device) -> Seconds:
    """Seconds of every contender's step, round by round."""
    torch.manual_seed(0)
    model, inputs = MODELS[name](tiny)
    model = model.to(device, torch.bfloat16).train()
    inputs = {key: value.to(device) for key, value in inputs.items()}
    torch.compiler.reset()
    steps = {
        f"{who.__name__}, {'compiled' if compiled else 'eager'}": who(copy.deepcopy(model), inputs, device, compiled)
        for compiled in (False, True)
        for who in (plain, ours)
    }
    check_losses({contender: [step().item() for _ in range(LOSS_STEPS)] for contender, step in steps.items()})
    gc.collect()
    take_turns(steps, (), WARM_UP)
    return take_turns(steps, (), rounds)[0]


def table_of(results: Mapping[str, Seconds], device: torch.device) -> Table:
    """One line per contender of every model."""
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    table = Table(title=f"milliseconds of a training step, bfloat16, {where}, torch {torch.__version__}")
    for heading in ("model", "contender", "median ms", "ratio", "quartiles"):
        table.add_column(heading, justify="left" if heading in ("model", "contender") else "right", no_wrap=True)
    for model, seconds in results.items():
        for index, (name, values) in enumerate(seconds.items()):
            low, middle, high = quartiles(ratios({"": seconds[BASELINES.get(name, name)], name: values}, name))
            row = [model if index == 0 else "", name, f"{1000 * median(values):.1f}"]
            table.add_row(*row, *([f"{middle:.3f}", f"{low:.3f} - {high:.3f}"] if name in BASELINES else ["", ""]))
        table.add_section()
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=list(MODELS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="small models, to see that it runs")
    parser.add_argument("--rounds", type=int, default=30, help="timed steps of every contender")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to keep everything measured")
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cpu" and not options.tiny:
        parser.error("these models take hours on a CPU: --tiny, or a machine with a GPU")
    sw.init_ranks()
    results: dict[str, Seconds] = {}
    for name in options.models:
        results[name] = measure(name, options.tiny, options.rounds, device)
        print(f"{name}: measured", file=sys.stderr, flush=True)
        gc.collect()  # its contenders are gone before those of the next model come
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if options.json:  # after every model: what was measured stays, whatever happens to the next
            kept = {"torch": torch.__version__, "commit": commit(), "device": options.device, "seconds": results}
            options.json.write_text(json.dumps(kept, indent=1))
    Console(width=None if sys.stdout.isatty() else 120).print(table_of(results, device))


if __name__ == "__main__":
    main()
