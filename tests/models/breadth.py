"""Breadth: what becomes of the architectures of ``transformers`` that nobody here has looked at.

Every architecture is built from its own configuration class, made small by the names of its fields (``SMALL``), and
goes through what the zoo's models go through: capture, data parallelism on 8 devices, a propagated tensor-parallel plan
and random legal plans, each verified against one device. Splits of the tensor-parallel plan are found by the names that
projections go by. Nothing here is tuned to a model beyond what makes it small.

``make zoo-breadth``, or ``python -m models.breadth --plans 2 opt roberta`` in tests/. Architectures in ``KNOWN`` fail
for the reason given; any other failure makes the exit code 1.
"""

from __future__ import annotations

import argparse
import re
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch
import transformers as tf
from rich.console import Console
from torch import nn

from models.tiny_models import CLASSES, VOCABULARY, TinyModel, token_inputs
from models.zoo import Outcome, attempt, zoo_table
from models.zoo_transformers import pair_inputs

# Fields of configurations -> small values. A field that a configuration lacks is left out.
SMALL: dict[str, Any] = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_decoder_layers", "num_encoder_layers"), 2),
    **dict.fromkeys(
        ("hidden_size", "n_embd", "d_model", "dim", "emb_dim", "embedding_size", "word_embed_proj_dim"), 32
    ),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "n_inner"), 48),
    **dict.fromkeys(("ffn_hidden_size", "moe_intermediate_size", "shared_expert_intermediate_size", "hidden_dim"), 48),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "d_head", "attention_head_size"), 8),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "context_length", "n_ctx"), 32),
    **dict.fromkeys(("pad_token_id", "bos_token_id", "decoder_start_token_id"), 1),
    **dict.fromkeys(("eos_token_id", "sep_token_id", "forced_eos_token_id"), 2),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_top_k", "experts_per_token"), 2),
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "rotary_dim": 4,
    "hidden_size_per_layer_input": 8,
    "type_vocab_size": 2,
    "image_size": 32,
    "patch_size": 8,
    "window_size": 2,
    "state_size": 4,
    "time_step_rank": 4,
    "num_codevector_groups": 1,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 16,
    "apply_spec_augment": False,  # draws masks in numpy, which capture refuses
    "layerdrop": 0.0,  # draws in numpy which layers to leave out
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "use_cache": False,
    "num_labels": CLASSES,
}

# Names of projections whose output columns a tensor-parallel plan splits, and of those that are left to propagation.
COLUMNS = re.compile(
    r"^(q|k|v|q_proj|k_proj|v_proj|qkv|qkv_proj|query|key|value|q_lin|k_lin|v_lin|query_key_value|Wqkv|c_attn|q_b_proj"
    r"|kv_b_proj|qkv_proj|c_fc|fc1|fc_in|up_proj|gate_proj|gate_up_proj|dense_h_to_4h|wi|wi_0|wi_1|lin1|w1|v1|in_proj"
    r"|intermediate_dense|linear_fc1|lm_head|embed_out|decoder)$"
)

PER_PROCESS = 16  # architectures, whose memory is then returned
LIMIT = 3_000_000  # parameters; what is larger is not small

CAUSAL, MASKED, PAIRS = "AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForSeq2SeqLM"
IMAGES, SOUNDS = "AutoModelForImageClassification", "AutoModelForAudioClassification"


@dataclass(frozen=True)
class Architecture:
    """``head``: the automatic class, or a class of ``transformers``; ``fields``: of the configuration, beside SMALL
    (nested ones by a dot); ``inputs``: from a batch size."""

    model_type: str
    head: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    inputs: Callable[[int], dict[str, Any]] = token_inputs


def images(batch: int, size: int = 32) -> dict[str, Any]:
    return {"pixel_values": torch.randn(batch, 3, size, size), "labels": torch.randint(0, CLASSES, (batch,))}


def sounds(batch: int) -> dict[str, Any]:
    return {"input_values": torch.randn(batch, 400), "labels": torch.randint(0, CLASSES, (batch,))}


def captioned(batch: int) -> dict[str, Any]:
    return {
        "input_ids": torch.randint(3, VOCABULARY, (batch, 6)),
        "pixel_values": torch.randn(batch, 3, 32, 32),
        "return_loss": True,
    }


def long_texts(batch: int) -> dict[str, Any]:
    ids = torch.randint(3, VOCABULARY, (batch, 16))
    return {"input_ids": ids, "labels": ids}


def masked_pairs(batch: int) -> dict[str, Any]:
    inputs = pair_inputs(batch)
    return {**inputs, "attention_mask": torch.ones_like(inputs["input_ids"])}


def pixels(batch: int) -> dict[str, Any]:
    return {"pixel_values": torch.randn(batch, 3, 32, 32)}


def _all(head: str, types: str, inputs: Callable[[int], dict[str, Any]]) -> dict[str, Architecture]:
    return {name: Architecture(name, head, inputs=inputs) for name in types.split()}


SPEECH = {"conv_dim": (8, 8), "conv_stride": (4, 2), "conv_kernel": (8, 3), "num_feat_extract_layers": 2}
STAGES = {"hidden_sizes": [8, 16], "depths": [1, 1]}

ARCHITECTURES: dict[str, Architecture] = {
    **_all(
        CAUSAL,
        "gptj gpt_neox gpt_neo opt bloom falcon phi phi3 stablelm cohere cohere2 olmo olmo2 olmo3 olmoe gemma2 "
        "gemma3_text qwen3 qwen2_moe qwen3_moe deepseek_v2 deepseek_v3 granite granitemoe mpt codegen xglm starcoder2 "
        "nemotron persimmon glm glm4 helium mamba rwkv ctrl openai-gpt biogpt gpt_bigcode smollm3 phimoe gpt_oss "
        "ernie4_5 exaone4 lfm2 seed_oss arcee apertus hunyuan_v1_dense diffllama modernbert-decoder llama4_text "
        "falcon_mamba recurrent_gemma mamba2 jamba bamba xlnet",
        token_inputs,
    ),
    **_all(
        MASKED,
        "roberta electra albert distilbert mpnet xlm-roberta camembert mobilebert squeezebert convbert rembert "
        "roformer megatron-bert nystromformer ernie layoutlm ibert modernbert xlm deberta fnet funnel "
        "roberta-prelayernorm data2vec-text esm",
        token_inputs,
    ),
    **_all(
        PAIRS,
        "pegasus mbart marian led prophetnet m2m_100 blenderbot blenderbot-small bigbird_pegasus mt5 umt5 "
        "plbart pegasus_x mvp",
        pair_inputs,
    ),
    **_all(
        IMAGES,
        "beit dinov2 swinv2 mobilenet_v1 mobilenet_v2 mobilevit efficientnet regnet poolformer "
        "pvt pvt_v2 cvt convnextv2 focalnet bit hiera ijepa siglip swiftformer vit_msn data2vec-vision hgnet_v2 "
        "dinov2_with_registers",
        images,
    ),
    **_all(SOUNDS, "hubert wavlm data2vec-audio sew sew-d unispeech unispeech-sat wav2vec2-conformer", sounds),
    "dbrx": Architecture(
        "dbrx",
        CAUSAL,
        {
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
            "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "hidden_size": 32, "moe_top_k": 2},
        },
    ),
    "longformer": Architecture("longformer", MASKED, {"attention_window": 4}, long_texts),
    "big_bird": Architecture("big_bird", MASKED, {"attention_type": "original_full"}),
    **{
        # Without a mask they do something else under torch.export than else.
        name: Architecture(name, PAIRS, inputs=masked_pairs)
        for name in ("longt5", "switch_transformers")
    },
    "mobilevitv2": Architecture("mobilevitv2", IMAGES, {}, partial(images, size=64)),
    "fsmt": Architecture("fsmt", PAIRS, {}, partial(pair_inputs, target=6)),
    "deit": Architecture("deit", "DeiTForImageClassification", {}, images),
    "levit": Architecture("levit", "LevitForImageClassification", {}, partial(images, size=64)),
    "vit_mae": Architecture("vit_mae", "ViTMAEForPreTraining", {"decoder_hidden_size": 16}, pixels),
    "blip": Architecture("blip", "BlipForImageTextRetrieval", {}, captioned),
    "siglip_pairs": Architecture("siglip", "SiglipModel", {}, captioned),
    "speech_to_text": Architecture(
        "speech_to_text",
        "Speech2TextForConditionalGeneration",
        {"input_feat_per_channel": 8, "conv_channels": 16},
        lambda batch: {
            "input_features": torch.randn(batch, 16, 8),
            "labels": torch.randint(3, VOCABULARY, (batch, 5)),
        },
    ),
}

OMITTED = object()

# What SMALL does not make small, or makes inconsistent.
FIELDS: dict[str, dict[str, Any]] = {
    "albert": {"embedding_size": 16},
    "beit": {"out_indices": [1, 2]},
    "ctrl": {"dff": 48},
    "convnextv2": {**STAGES, "num_stages": 2, "patch_size": 2},
    "bit": {**STAGES, "embedding_size": 8, "num_groups": 4},
    "regnet": {**STAGES, "embedding_size": 8, "groups_width": 8},
    "funnel": {"block_sizes": [1, 1], "num_decoder_layers": 1, "d_inner": 48, "num_hidden_layers": OMITTED},
    "prophetnet": {"num_encoder_layers": 2, "num_decoder_layers": 2, "num_hidden_layers": OMITTED},
    "bamba": {
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_n_groups": 2,
        "mamba_d_state": 4,
        "attn_layer_indices": [1],
    },
    "recurrent_gemma": {"attention_window_size": 4, "lru_width": 32, "num_hidden_layers": 3},
    "marian": {"decoder_vocab_size": VOCABULARY},
    "longt5": {"decoder_start_token_id": 1},
    "switch_transformers": {
        "decoder_start_token_id": 1,
        "num_sparse_encoder_layers": 1,
        "num_sparse_decoder_layers": 1,
    },
    "fsmt": {"src_vocab_size": VOCABULARY, "tgt_vocab_size": VOCABULARY, "langs": ["en", "de"]},
    "mobilenet_v1": {"depth_multiplier": 0.25, "min_depth": 8},
    "mobilevit": {
        **{"hidden_sizes": [16, 16, 16], "neck_hidden_sizes": [8, 8, 8, 16, 16, 16, 32], "patch_size": 2},
        "num_hidden_layers": OMITTED,
    },
    "mobilevitv2": {
        "width_multiplier": 0.25,
        "n_attn_blocks": [1, 1, 1],
        "patch_size": 2,
        "base_attn_unit_dims": [32, 48, 64],
    },
    "efficientnet": {"width_coefficient": 0.1, "depth_coefficient": 0.1, "hidden_dim": 128},
    "pvt_v2": {
        **{"hidden_sizes": [8, 16], "depths": [1, 1], "sr_ratios": [2, 1], "strides": [4, 2], "mlp_ratios": [2, 2]},
        **{"num_attention_heads": [1, 2], "num_encoder_blocks": 2, "patch_sizes": [7, 3]},
    },
    "swiftformer": {"embed_dims": [8, 16, 16, 32], "depths": [1, 1, 1, 1]},
    "hgnet_v2": {
        **{"embedding_size": 8, "stem_channels": [3, 8, 8], "hidden_sizes": [16, 32], "depths": [1, 1]},
        **{"stage_in_channels": [8, 16], "stage_mid_channels": [8, 8], "stage_out_channels": [16, 32]},
        **{"stage_num_blocks": [1, 1], "stage_downsample": [False, True], "stage_light_block": [False, True]},
        **{"stage_kernel_size": [3, 5], "stage_numb_of_layers": [2, 2]},
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "mobilebert": {"true_hidden_size": 16, "intra_bottleneck_size": 16},
    "falcon": {"new_decoder_architecture": False},
    "xlnet": {"d_inner": 48},
    "xlm": {"emb_dim": 32},
    "esm": {"position_embedding_type": "rotary"},
    "swinv2": {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "patch_size": 4},
    "focalnet": {"embed_dim": 8, "depths": [1, 1], "focal_levels": [2, 2], "focal_windows": [3, 3], "patch_size": 4},
    "poolformer": {
        **{"hidden_sizes": [8, 16], "depths": [1, 1], "patch_sizes": [7, 3], "strides": [4, 2], "padding": [2, 1]},
        **{"num_encoder_blocks": 2},
    },
    "hiera": {"embed_dim": 8, "depths": [1, 1, 1], "num_heads": [1, 2, 4], "num_query_pool": 2, "image_size": [32, 32]},
    "pvt": {
        **{"hidden_sizes": [8, 16], "depths": [1, 1], "sequence_reduction_ratios": [2, 1], "strides": [4, 2]},
        **{"num_attention_heads": [1, 2], "mlp_ratios": [2, 2], "num_encoder_blocks": 2, "patch_sizes": [4, 2]},
    },
    "deepseek_v2": {"norm_topk_prob": True, "num_key_value_heads": 4},
    "deepseek_v3": {"num_key_value_heads": 4},
    "led": {"attention_window": 4, "max_encoder_position_embeddings": 32, "max_decoder_position_embeddings": 32},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 4},
    "cvt": {
        **{"embed_dim": [8, 16, 32], "num_heads": [1, 2, 4], "depth": [1, 2, 3]},
        "num_labels": CLASSES,
    },
    "levit": {
        **{"hidden_sizes": [16, 32, 32], "num_attention_heads": [2, 4, 4], "depths": [1, 1, 1], "key_dim": [8, 8, 8]},
        **{"mlp_ratio": [2, 2, 2], "attention_ratio": [2, 2, 2], "patch_size": 16, "image_size": 64},
    },
    **dict.fromkeys(("hubert", "wavlm", "unispeech", "unispeech-sat", "wav2vec2-conformer"), SPEECH),
    "data2vec-audio": {**SPEECH, "mask_time_prob": 0.0},  # it knows no apply_spec_augment
    **{key: {**SPEECH, "squeeze_factor": 2} for key in ("sew", "sew-d")},
}

# Architecture -> why it fails today.
_CONTROL_FLOW = "control flow depends on data: "
KNOWN: dict[str, str] = {
    "recurrent_gemma": "keeps its recurrent states in attributes from call to call, and the next call reads them",
    "sew-d": "XDropout, a torch.autograd.Function that draws random numbers",
    "ibert": _CONTROL_FLOW + "assert that an activation has no nan",
    "xlm": _CONTROL_FLOW + "assert on the longest text",
    "prophetnet": _CONTROL_FLOW + "assert on the labels",
    "fsmt": _CONTROL_FLOW + "is there padding?",
    "led": _CONTROL_FLOW + "is any token global?",
    "longformer": _CONTROL_FLOW + "is any token global?",
    "dbrx": _CONTROL_FLOW + "a loop over the experts that were chosen",
    "switch_transformers": "the router converts itself inside forward (Module.to), and fake weights are not swapped",
    "bigbird_pegasus": "builds linear layers inside forward, whose initialising draws shift the numbers of "
    "the dropouts behind them; equal without dropout",
    "mobilevitv2": "not well conditioned: gradients that are 1e-8 of the largest differ as much on one device when the "
    "batch is permuted",
}


def small(architecture: Architecture, name: str) -> Any:
    default = tf.AutoConfig.for_model(architecture.model_type)
    fields = _small_fields(default)
    for path, value in {**FIELDS.get(name, {}), **architecture.fields}.items():
        *parts, last = path.split(".")
        nested = fields
        for own in parts:
            nested = nested[own]
        nested[last] = value
    fields = {key: value for key, value in fields.items() if value is not OMITTED}
    return type(default)(**fields)


def _small_fields(config: Any) -> dict[str, Any]:
    """What to pass to the constructor of a configuration; parts are dictionaries."""
    found: dict[str, Any] = {}
    for key in vars(config):
        part = getattr(config, key)
        if isinstance(part, tf.PreTrainedConfig):
            found[key] = _small_fields(part)
    for key, value in SMALL.items():
        if hasattr(config, key) and not isinstance(getattr(config, key), list | tuple):
            try:
                setattr(config, key, value)
            except (AttributeError, NotImplementedError):  # derived from other fields
                continue
            found[key] = value
    return found


def tiny_of(name: str) -> TinyModel:
    """The model, with the splits of its tensor-parallel plan. Raises ValueError where it is not small."""
    architecture = ARCHITECTURES[name]
    config = small(architecture, name)
    head = getattr(tf, architecture.head)
    build = partial(head.from_config if architecture.head.startswith("Auto") else head, config)
    with torch.device("meta"):
        module = build()
    if sum(p.numel() for p in module.parameters()) > LIMIT:
        raise ValueError(f"{name} has {sum(p.numel() for p in module.parameters()):,} parameters: not small")
    return TinyModel(build, architecture.inputs, dict(splits(build(), architecture.inputs(2))))


def splits(module: nn.Module, inputs: dict[str, Any]) -> dict[str, str]:
    """Strategies by module, of those that are called (and not only asked for their weights)."""
    called: set[nn.Module] = set()
    for own in module.modules():
        own.register_forward_pre_hook(lambda own, _: called.add(own))
    with torch.no_grad():
        module(**inputs)
    found = {}
    for name, own in module.named_modules():
        if own not in called:
            continue
        last = name.rpartition(".")[2]
        if isinstance(own, nn.Embedding) and own.num_embeddings == VOCABULARY:
            found[name] = "v@tp"
        elif isinstance(own, nn.Conv2d) and own.groups == 1:
            found[name] = "co@tp"
        elif COLUMNS.match(last) and hasattr(own, "weight") and not list(own.children()):
            found[name] = "n@tp"
    return found


def attempt_one(name: str, *, num_plans: int, seed: int, debug: bool) -> Outcome:
    torch.set_num_threads(1)
    with warnings.catch_warnings(action="ignore"):
        try:
            tiny = tiny_of(name)
        except Exception as error:
            return Outcome(name, failures=[f"configuration: {type(error).__name__}: {error}"])
        return attempt(name, tiny, num_plans=num_plans, seed=seed, debug=debug)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("architectures", nargs="*", help="default: all")
    parser.add_argument("--plans", type=int, default=2, help="random plans per architecture")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--debug", action="store_true", help="print every traceback")
    options = parser.parse_args()
    run = partial(attempt_one, num_plans=options.plans, seed=options.seed, debug=options.debug)
    names, outcomes = options.architectures or list(ARCHITECTURES), []
    for start in range(0, len(names), PER_PROCESS * options.jobs):
        with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
            for found in pool.map(run, names[start : start + PER_PROCESS * options.jobs]):
                outcomes.append(found)
                told = "; ".join(failure[:300] for failure in found.failures[:2])
                print(f"{found.model}: {found.passed} of {found.plans} in {found.seconds:.0f} s {told}", flush=True)
    Console(width=200).print(zoo_table(outcomes, "Breadth", KNOWN))
    unexpected = [o.model for o in outcomes if bool(o.failures) != (o.model in KNOWN)]
    print(f"{sum(not o.failures for o in outcomes)} of {len(outcomes)} architectures pass everything")
    if unexpected:
        print("failed, or known to fail and passed:", ", ".join(unexpected))
        raise SystemExit(1)


if __name__ == "__main__":
    main()
