"""Weights go out to files that transformers and peft read, and come in from theirs."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers as tf
from safetensors.torch import load_file, save_file
from torch import nn

import shardwise as sw
from launch.gloo_ranks import RunRanks
from models.zoo import ZOO
from raising import message
from shardwise.runtime.initial.weights import WeightFiles

MODELS = ("gpt2",)
MORE = ("llama", "mixtral", "t5", "vit")

pytestmark = pytest.mark.filterwarnings("ignore")  # what transformers prints on the way


def trained(name: str) -> tuple[nn.Module, sw.Parallel, dict[str, Any]]:
    """On a rank: a model with values that no initialiser gives, split; and its inputs."""
    torch.manual_seed(0)
    tiny = ZOO[name]
    model = tiny.build().eval()
    inputs = tiny.inputs(4)
    with warnings.catch_warnings(action="ignore"):
        plan = sw.plan(model, inputs, 2, mesh=sw.Mesh(tp=2), strategies=tiny.strategies, search="sharding_propagation")
        par = sw.parallelize(model, plan)
    optimizer = torch.optim.SGD(par.parameters(), lr=0.1)
    par.step(**inputs)
    optimizer.step()
    return model, par, inputs


def out_and_in(folder: str, name: str) -> dict[str, Any]:
    """On a rank: save what was trained, load it into a module without values, compare the parts."""
    torch.manual_seed(0)
    model, par, inputs = trained(name)
    where = Path(folder) / name
    sw.save_pretrained(par, where)
    sw.save_pretrained(par, Path(folder) / f"{name}-small", max_file_bytes=20_000, dtype=torch.bfloat16)
    held = {key: tensor.detach().clone() for key, tensor in par.state_dict().items()}
    with torch.no_grad():
        output = par(**inputs)
    with torch.device("meta"):
        empty = ZOO[name].build().eval()
    given: dict[str, torch.Tensor] = dict(model.named_buffers())

    def buffers(key: str, tensor: torch.Tensor) -> Any:
        return given[key].clone() if key in given else NotImplemented

    read: list[str] = []
    real = WeightFiles.read
    with mock.patch.object(WeightFiles, "read", lambda self, key, *rest: read.append(key) or real(self, key, *rest)):
        again = sw.parallelize(empty, par.plan, weights=where, init=buffers if given else None)
    assert set(read) >= {key for key, _ in model.named_parameters()}
    same = all(torch.equal(tensor, held[key]) for key, tensor in again.state_dict().items() if key in held)
    with torch.no_grad():
        repeated = again(**inputs)
    refusal = message(lambda: sw.save_pretrained(par, where))
    tied = sum(1 for _ in par.named_parameters(remove_duplicate=False)) - sum(1 for _ in par.named_parameters())
    return {
        "same": same,
        "loss": output["loss"].item() if "loss" in output else output[0].item(),
        "repeated": torch.equal(output["logits"], repeated["logits"]),
        "logits": output["logits"],
        "inputs": inputs,
        "split": any(held[key].shape != tensor.shape for key, tensor in model.state_dict().items()),
        "refusal": refusal,
        "tied": tied,
    }


def all_out_and_in(folder: str, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: out_and_in(folder, name) for name in names}


def check(folder: Path, name: str, found: list[dict[str, Any]]) -> None:
    kind = type(ZOO[name].build())
    for one in found:
        assert one["same"]
        assert one["repeated"]
        assert one["split"]
        assert "has weights already" in one["refusal"]
    files = load_file(folder / name / "model.safetensors")
    loaded, said = kind.from_pretrained(folder / name, output_loading_info=True)
    assert not said["missing_keys"]
    assert not said["unexpected_keys"]
    assert not said["mismatched_keys"]
    state = loaded.eval().state_dict()
    for key, tensor in files.items():
        assert torch.equal(tensor, state[key]), key
    assert len(files) == len(state) - found[0]["tied"]
    with torch.no_grad():
        output = loaded(**found[0]["inputs"])
    torch.testing.assert_close(output.logits, found[0]["logits"], rtol=1e-4, atol=1e-5)  # float32, in another order
    small = folder / f"{name}-small"
    index = json.loads((small / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    assert set(index["weight_map"]) == set(files)
    low = kind.from_pretrained(small, dtype=torch.bfloat16).state_dict()
    for key, tensor in files.items():
        assert torch.equal(tensor.bfloat16() if tensor.is_floating_point() else tensor, low[key])
    assert sorted(path.name for path in small.iterdir() if path.suffix != ".safetensors") in (
        ["config.json", "generation_config.json", "model.safetensors.index.json"],
        ["config.json", "model.safetensors.index.json"],
    )


def test_transformers_reads_what_ranks_save_and_ranks_what_it_saves(run_ranks: RunRanks, tmp_path: Path) -> None:
    ranks = run_ranks(all_out_and_in, 2, str(tmp_path), MODELS)
    for name in MODELS:
        check(tmp_path, name, [found[name] for found in ranks])


@pytest.mark.long
def test_transformers_reads_more_models(run_ranks: RunRanks, tmp_path: Path) -> None:
    ranks = run_ranks(all_out_and_in, 2, str(tmp_path), MORE)
    for name in MORE:
        check(tmp_path, name, [found[name] for found in ranks])


def in_from_transformers(folder: str) -> dict[str, Any]:
    """On a rank: folders that transformers wrote, and what does not fit."""
    where = Path(folder)
    config = tf.GPT2Config(n_layer=1, n_embd=32, n_head=4, vocab_size=50, n_positions=8, bos_token_id=0, eos_token_id=0)
    strategies = {"*.attn.c_attn": "n@tp", "*.mlp.c_fc": "n@tp"}
    ids = torch.randint(0, 50, (4, 6), generator=torch.Generator().manual_seed(0))
    if dist.get_rank() == 0:
        torch.manual_seed(1)
        model = tf.GPT2LMHeadModel(config)
        model.save_pretrained(where / "whole")
        model.save_pretrained(where / "several", max_shard_size="20KB")
        model.transformer.save_pretrained(where / "base")
        state = load_file(where / "whole/model.safetensors")
        save_file({**state, "transformer.ln_f.bias": torch.zeros(3)}, where / "shape.safetensors")
        save_file({**state, "surplus": torch.zeros(3)}, where / "more.safetensors")
        del state["transformer.h.0.ln_1.bias"]
        save_file(state, where / "fewer.safetensors")
        save_file({"other": torch.zeros(2)}, where / "other.safetensors")
        (where / "torn.safetensors").write_bytes((where / "more.safetensors").read_bytes()[:5000])
        torch.save(model.state_dict(), where / "pickled.bin")
        (where / "deep").mkdir()
        (where / "deep/model.safetensors.index.json").write_text('{"weight_map":' * 50_000)
    dist.barrier()
    with torch.device("meta"):
        empty = tf.GPT2LMHeadModel(config).eval()
    plan = sw.plan(
        empty, {"input_ids": ids}, 2, mesh=sw.Mesh(tp=2), strategies=strategies, search="sharding_propagation"
    )
    want = tf.GPT2LMHeadModel.from_pretrained(where / "whole").eval()
    found: dict[str, Any] = {}
    for name in ("whole", "several", "base", "more.safetensors", "fewer.safetensors", "shape.safetensors",
                 "other.safetensors", "torn.safetensors", "pickled.bin", "deep", "nowhere"):  # fmt: skip
        with warnings.catch_warnings(record=True, action="always") as said:
            try:
                par = sw.parallelize(empty, plan, weights=where / name)
            except sw.ShardwiseError as error:
                found[name] = str(error)
                continue
        with torch.no_grad():
            torch.testing.assert_close(par(input_ids=ids)["logits"], want(ids).logits, rtol=1e-4, atol=1e-5)
        found[name] = [str(one.message) for one in said if "weights" in str(one.message)]
    with warnings.catch_warnings(record=True, action="always") as said:
        par = sw.parallelize(empty, plan, weights=where / "fewer.safetensors", init=lambda name, tensor: NotImplemented)
    found["init"] = [str(one.message) for one in said if "weights" in str(one.message)]
    assert par.transformer.h.get_submodule("0").ln_1.bias.eq(0).all()
    half = sw.parallelize(copy.deepcopy(empty).double(), plan_for(empty, ids, strategies), weights=where / "whole")
    assert half.transformer.wte.weight.dtype == torch.float64
    assert torch.equal(half.transformer.wte.weight.float(), want.transformer.wte.weight)
    return found


def plan_for(empty: nn.Module, ids: torch.Tensor, strategies: dict[str, str]) -> sw.Plan:
    wide = copy.deepcopy(empty).double()
    return sw.plan(
        wide, {"input_ids": ids}, 2, mesh=sw.Mesh(tp=2), strategies=strategies, search="sharding_propagation"
    )


def test_weights_that_fit_come_in_and_others_are_named(run_ranks: RunRanks, tmp_path: Path) -> None:
    for rank, found in enumerate(run_ranks(in_from_transformers, 2, str(tmp_path))):
        assert found["whole"] == found["several"] == found["base"] == []
        assert ["the module lacks surplus (1)" in text for text in found["more.safetensors"]] == [True] * (rank == 0)
        assert "does not have 1 of the module's" in found["fewer.safetensors"]
        assert "transformer.h.0.ln_1.bias" in found["fewer.safetensors"]
        assert ["they lack transformer.h.0.ln_1.bias (1)" in text for text in found["init"]] == [True] * (rank == 0)
        assert "ln_f.bias is f32[32] in the module and F32[3] in the files" in found["shape.safetensors"]
        assert "1 names that the module lacks: other" in found["other.safetensors"]
        assert "cannot be read" in found["torn.safetensors"]
        assert "cannot be read" in found["pickled.bin"]
        assert "is not an index of safetensors files" in found["deep"]
        assert "there are no safetensors files in" in found["nowhere"]


def adapters(folder: str) -> None:
    """On a rank: a model with LoRA adapters, of which only these are saved."""
    peft = pytest.importorskip("peft")
    config = tf.GPT2Config(n_layer=1, n_embd=32, n_head=4, vocab_size=50, n_positions=8, bos_token_id=0, eos_token_id=0)
    torch.manual_seed(0)
    base = tf.GPT2LMHeadModel(config)
    base_state = copy.deepcopy(base.state_dict())
    lora = peft.LoraConfig(r=4, target_modules=["c_fc"], fan_in_fan_out=True, init_lora_weights=False)
    model = peft.get_peft_model(base, lora).eval()
    ids = torch.randint(0, 50, (4, 6), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, "labels": ids}
    strategies = {"*.c_fc.base_layer": "n@tp", "*.lora_B.default": "n@tp"}
    plan = sw.plan(model, inputs, 2, mesh=sw.Mesh(tp=2), strategies=strategies, search="sharding_propagation")
    par = sw.parallelize(model, plan)
    optimizer = torch.optim.SGD([p for p in par.parameters() if p.requires_grad], lr=0.1)
    par.step(**inputs)
    optimizer.step()
    sw.save_pretrained(par, folder)
    with torch.no_grad():
        want = par(**inputs)["logits"]
    plain = tf.GPT2LMHeadModel(config)
    plain.load_state_dict(base_state)
    again = peft.PeftModel.from_pretrained(plain, folder).eval()
    with torch.no_grad():
        torch.testing.assert_close(again(**inputs).logits, want, rtol=1e-4, atol=1e-5)
    assert {path.name for path in Path(folder).iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    assert set(load_file(f"{folder}/adapter_model.safetensors")) == {
        f"base_model.model.transformer.h.0.mlp.c_fc.lora_{part}.weight" for part in "AB"
    }


def test_of_a_peft_model_the_adapters_alone_are_saved(run_ranks: RunRanks, tmp_path: Path) -> None:
    run_ranks(adapters, 2, str(tmp_path / "lora"))
