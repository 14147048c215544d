"""Texts that ranks generate are those of one device, by two programs whatever the lengths."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaForCausalLM

import shardwise as sw
from hf.runs import VOCABULARY, WIDE, Sentences, llama, padded
from launch.gloo_ranks import RunRanks
from raising import raises

TP: dict[str, Any] = {
    "mesh": sw.Mesh(tp=2),
    "search": "sharding_propagation",
    "strategies": {f"*.{name}": "n@tp" for name in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")},
}

pytestmark = pytest.mark.filterwarnings("ignore")  # what transformers says on the way


def prompts(length: int, count: int = 2) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, VOCABULARY, (count, length), generator=torch.Generator().manual_seed(length))
    mask = torch.ones_like(ids)
    ids[0, : length // 3], mask[0, : length // 3] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


class Biased(LlamaForCausalLM):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.register_buffer("bias", torch.zeros(VOCABULARY))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits + self.bias
        return output


def biased() -> Any:
    torch.manual_seed(0)
    return Biased(llama().config).double()


def windowed() -> Any:
    kinds = {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}
    torch.manual_seed(0)
    return Gemma3ForCausalLM(Gemma3TextConfig(**WIDE, num_key_value_heads=2, head_dim=8, **kinds)).double()


def scores(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Of prompts that are longer than a window, and of what comes behind."""
    said = model.generate(**prompts(13), **GREEDY, output_scores=True, return_dict_in_generate=True)
    return said.sequences, torch.stack(said.scores)


class Odd:
    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.index_fill(1, torch.arange(0, VOCABULARY, 2), float("-inf"))


CALLS: tuple[tuple[int, dict[str, Any]], ...] = (
    (5, {"max_new_tokens": 6, "do_sample": False}),
    (13, {"max_new_tokens": 4, "do_sample": False, "repetition_penalty": 1.3}),
    (9, {"max_new_tokens": 2, "do_sample": False, "logits_processor": [Odd()]}),
    (8, {"max_new_tokens": 6, "do_sample": True, "temperature": 0.8, "top_k": 12}),
)


REFUSED: dict[str, Any] = {
    "prefill_chunk_size": 3,
    "prompt_lookup_num_tokens": 2,
    "penalty_alpha": 0.6,
    "output_attentions": True,
    "cache_implementation": "static",
    "past_key_values": (),
    "cache": (),  # as it is called from transformers 5.24 on
}
GREEDY: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}


def texts(model: Any) -> list[list[list[int]]]:
    found = []
    for length, settings in CALLS:
        torch.manual_seed(7)
        found.append(model.generate(**prompts(length), **settings, pad_token_id=0).tolist())
    return found


def beams(model: Any) -> list[Any]:
    """Two beams of one prompt: what comes behind follows from which rows go on."""
    long = model.generate(**prompts(9, 1), max_new_tokens=8, num_beams=2, do_sample=False, pad_token_id=0)
    torch.manual_seed(7)
    more = {"num_return_sequences": 2, "length_penalty": 0.3, "early_stopping": True, "do_sample": True}
    return [
        long.tolist(),
        model.generate(**prompts(5, 1), max_new_tokens=8, num_beams=2, pad_token_id=0, **more).tolist(),
    ]


def on_ranks() -> dict[str, Any]:
    """On a rank: texts before and after a step of training, how many programs were made for them, and this rank's part
    of a cache."""
    from shardwise.transformers import generate

    torch.manual_seed(0)
    model = llama().double()
    batch = padded([Sentences(4)[index] for index in range(4)])
    par = sw.parallelize(model, sw.plan(model, batch, 2, **TP))
    with mock.patch.object(generate, "parallelize", wraps=sw.parallelize) as made:
        made.side_effect = lambda *args, **kwargs: steps.append(sw.parallelize(*args, **kwargs)) or steps[-1]
        steps: list[sw.Parallel] = []
        writer = generate.generator(par, batch_size=2, max_length=24, chunk=8)
    with raises(sw.ShardwiseError, "3 sequences", "5 tokens"):
        writer.generate(**prompts(5, 3), max_new_tokens=2)
    for name, value in REFUSED.items():
        with raises(sw.ShardwiseError, f"support {name}"):
            writer.generate(**prompts(6), max_new_tokens=4, do_sample=False, **{name: value})
    with raises(sw.ShardwiseError, "guidance_scale"):
        writer.generate(**prompts(6), guidance_scale=1.5, **GREEDY)
    with raises(sw.ShardwiseError, "LlamaForCausalLM", "encoder"):
        generate.generator(par, batch_size=2, max_length=24, source_length=8)
    before = texts(writer)
    optimizer = torch.optim.SGD(par.parameters(), lr=0.5)
    par.step(**batch)
    optimizer.step()
    after = texts(writer)
    torch.manual_seed(0)
    model = llama().double()
    samples = sw.parallelize(model, sw.plan(model, batch, 2, mode="data_parallel", zero=3))
    single = generate.generator(samples, batch_size=1, max_length=24, chunk=8)  # nothing to split by samples
    parts = sw.parallelize(biased(), sw.plan(biased(), batch, 2, **TP, layouts={"bias": f"[{VOCABULARY}@tp]"}))
    with raises(sw.ShardwiseError, "bias", "layouts="):
        generate.generator(parts, batch_size=2, max_length=24, chunk=8)
    by_tokens = {**TP, "strategies": {**TP["strategies"], "lm_head": "m@tp"}}  # of which one cannot be split
    changed = sw.parallelize(biased(), sw.plan(biased(), batch, 2, **by_tokens))
    changing = generate.generator(changed, batch_size=2, max_length=24, chunk=8)
    changed.get_buffer("bias")[5::7] = 3.0
    window = sw.parallelize(windowed(), sw.plan(windowed(), batch, 2, **TP))
    return {
        "windowed": scores(generate.generator(window, batch_size=2, max_length=24, chunk=8)),
        "changed": changing.generate(**prompts(5), **GREEDY).tolist(),
        "single": single.generate(**prompts(13, 1), **GREEDY).tolist(),
        "before": before,
        "after": after,
        "beams": beams(writer),
        "programs": len(steps[0].compiled),
        "keys": tuple(steps[0].get_buffer("keys_1").shape),
    }


def test_ranks_generate_what_one_device_does(run_ranks: RunRanks) -> None:
    found = run_ranks(on_ranks, 2)
    (tokens, logits), (wanted_tokens, wanted_logits) = found[0].pop("windowed"), scores(windowed().eval())
    assert torch.equal(tokens, wanted_tokens)
    assert torch.allclose(logits, wanted_logits, rtol=1e-12, atol=1e-12)
    wide = windowed().eval()
    wide.config.sliding_window = 24
    assert not torch.allclose(logits, scores(wide)[1]), "the window matters"
    assert torch.equal(found[1].pop("windowed")[1], logits)
    assert found[0] == found[1]
    assert found[0]["programs"] == 2  # of a chunk of a prompt, and of a token
    assert found[0]["keys"] == (2, 1, 24, 8)  # one of the two heads
    torch.manual_seed(0)
    model = llama().double().eval()
    assert found[0]["before"] == texts(model)
    other = biased().eval()
    other.bias[5::7] = 3.0
    assert found[0]["changed"] == other.generate(**prompts(5), **GREEDY).tolist()
    assert found[0]["changed"] != biased().eval().generate(**prompts(5), **GREEDY).tolist()
    assert found[0]["single"] == model.generate(**prompts(13, 1), **GREEDY).tolist()
    batch = padded([Sentences(4)[index] for index in range(4)])
    model(**batch).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    assert found[0]["after"] == texts(model)
    assert found[0]["after"] != found[0]["before"]
    assert found[0]["beams"] == beams(model)
