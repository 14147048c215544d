"""The zoo's models from ``transformers``: two layers, widths that a laptop verifies in seconds, default dropout."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy
from typing import Any

import torch
import transformers as tf
from torch import nn

from models.tiny_models import CLASSES, VOCABULARY, TinyModel, bert, gpt2, image_inputs, llama, token_inputs, vit

DECODER = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
GATED = [
    ("model.embed_tokens", "v@tp"),
    ("model.layers.*.self_attn.[qkv]_proj", "n@tp"),
    ("model.layers.*.mlp.gate_proj", "n@tp"),
    ("model.layers.*.mlp.up_proj", "n@tp"),
    ("lm_head", "n@tp"),
]


def columns(*patterns: str) -> list[tuple[str, str]]:
    return [(pattern, "n@tp") for pattern in patterns]


def of(
    config: Any,
    build: Callable[[Any], nn.Module],
    inputs: Callable[[int], dict[str, Any]],
    strategies: Iterable[tuple[str, str]] = (),
) -> TinyModel:
    """A model of a configuration. Images and sounds of a class have the number of labels set here."""
    return TinyModel(lambda: build(deepcopy(config)), inputs, dict(strategies))  # a test may change its model's


def qwen2() -> TinyModel:
    return of(tf.Qwen2Config(**DECODER), tf.Qwen2ForCausalLM, token_inputs, GATED)


def mistral() -> TinyModel:
    return of(tf.MistralConfig(**DECODER, sliding_window=4), tf.MistralForCausalLM, token_inputs, GATED)


def gemma() -> TinyModel:
    return of(tf.GemmaConfig(**DECODER), tf.GemmaForCausalLM, token_inputs, GATED)


def mixtral() -> TinyModel:
    config = tf.MixtralConfig(
        **DECODER, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True, router_aux_loss_coef=0.1
    )
    strategies = [
        ("model.embed_tokens", "v@tp"),
        ("model.layers.*.mlp.experts", "e@tp"),
        *columns("model.layers.*.self_attn.[qkv]_proj", "lm_head"),
    ]
    return of(config, tf.MixtralForCausalLM, token_inputs, strategies)


def deberta() -> TinyModel:
    config = tf.DebertaV2Config(
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        vocab_size=VOCABULARY,
        max_position_embeddings=16,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        position_buckets=4,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
        type_vocab_size=0,
    )
    strategies = [
        ("deberta.embeddings.*_embeddings", "v@tp"),
        *columns("*.attention.self.*_proj", "*.intermediate.dense", "cls.predictions.transform.dense"),
        *columns("cls.predictions.decoder"),
    ]
    return of(config, tf.DebertaV2ForMaskedLM, token_inputs, strategies)


def t5() -> TinyModel:
    config = tf.T5Config(
        num_layers=2,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_heads=4,
        vocab_size=VOCABULARY,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=16,
        decoder_start_token_id=0,
    )
    strategies = [
        ("*.embed_tokens", "v@tp"),
        *columns("*.SelfAttention.[qkv]", "*.EncDecAttention.[qkv]", "*.DenseReluDense.wi", "lm_head"),
    ]
    return of(config, tf.T5ForConditionalGeneration, pair_inputs, strategies)


def bart() -> TinyModel:
    config = tf.BartConfig(
        encoder_layers=2,
        decoder_layers=2,
        d_model=32,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        vocab_size=VOCABULARY,
        max_position_embeddings=16,
        bos_token_id=0,
        pad_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=2,
        forced_eos_token_id=2,
    )
    strategies = [
        ("model.*.embed_*", "v@tp"),
        *columns("*.self_attn.[qkv]_proj", "*.encoder_attn.[qkv]_proj", "*.fc1", "lm_head"),
    ]
    return of(config, tf.BartForConditionalGeneration, pair_inputs, strategies)


def pair_inputs(batch: int, target: int = 5) -> dict[str, Any]:
    source = torch.randint(3, VOCABULARY, (batch, 6))
    return {"input_ids": source, "labels": torch.randint(3, VOCABULARY, (batch, target))}


def classified(config: Any) -> Any:
    config.num_labels = CLASSES
    return config


def swin() -> TinyModel:
    """Windows of 2 x 2 in 4 x 4 patches: every second layer rolls them."""
    config = tf.SwinConfig(image_size=8, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[4, 4], window_size=2)
    strategies = [
        ("swin.embeddings.patch_embeddings.projection", "co@tp"),
        *columns("*.attention.[qkv]_proj", "*.mlp.fc1", "*.downsample.reduction", "classifier"),
    ]
    return of(classified(config), tf.SwinForImageClassification, image_inputs, strategies)


def convnext() -> TinyModel:
    config = tf.ConvNextConfig(image_size=16, patch_size=2, num_stages=2, hidden_sizes=[8, 16], depths=[2, 2])
    strategies = [
        ("convnext.embeddings.patch_embeddings", "co@tp"),
        ("*.dwconv", "g@tp"),
        ("*.downsampling_layer.1", "co@tp"),
        *columns("*.pwconv1", "classifier"),
    ]
    return of(classified(config), tf.ConvNextForImageClassification, larger_images, strategies)


def resnet() -> TinyModel:
    config = tf.ResNetConfig(embedding_size=8, hidden_sizes=[16, 32], depths=[2, 2], layer_type="bottleneck")
    strategies = [("*.convolution", "co@tp"), ("classifier.1", "n@tp")]
    return of(classified(config), tf.ResNetForImageClassification, image_inputs, strategies)


def larger_images(batch: int) -> dict[str, Any]:
    return {"pixel_values": torch.randn(batch, 3, 16, 16), "labels": torch.randint(0, CLASSES, (batch,))}


def clip() -> TinyModel:
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    text = {"vocab_size": VOCABULARY, "max_position_embeddings": 8, "bos_token_id": 0, "eos_token_id": 49}
    config = tf.CLIPConfig(
        text_config={**sizes, **text, "pad_token_id": 1},
        vision_config={**sizes, "image_size": 8, "patch_size": 4},
        projection_dim=16,
    )
    strategies = [
        ("text_model.embeddings.token_embedding", "v@tp"),
        ("vision_model.embeddings.patch_embedding", "co@tp"),
        *columns("*.self_attn.[qkv]_proj", "*.mlp.fc1", "visual_projection", "text_projection"),
    ]
    return of(config, tf.CLIPModel, captioned_images, strategies)


def captioned_images(batch: int) -> dict[str, Any]:
    return {
        "input_ids": torch.randint(2, VOCABULARY, (batch, 6)),
        "pixel_values": torch.randn(batch, 3, 8, 8),
        "return_loss": True,
    }


def whisper() -> TinyModel:
    config = tf.WhisperConfig(
        encoder_layers=2,
        decoder_layers=2,
        d_model=32,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        vocab_size=VOCABULARY,
        num_mel_bins=8,
        max_source_positions=6,
        max_target_positions=8,
        bos_token_id=0,
        pad_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=2,
    )
    strategies = [
        ("model.decoder.embed_tokens", "v@tp"),
        ("model.encoder.conv[12]", "co@tp"),
        *columns("*.self_attn.[qkv]_proj", "*.encoder_attn.[qkv]_proj", "*.fc1", "proj_out"),
    ]
    return of(config, tf.WhisperForConditionalGeneration, spoken_text, strategies)


def spoken_text(batch: int) -> dict[str, Any]:
    return {"input_features": torch.randn(batch, 8, 12), "labels": torch.randint(3, VOCABULARY, (batch, 5))}


def wav2vec2() -> TinyModel:
    """Sounds of a class; the convolution of positions has a weight norm. SpecAugment draws in numpy and is off."""
    config = tf.Wav2Vec2Config(
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        vocab_size=VOCABULARY,
        conv_dim=(8, 8),
        conv_stride=(4, 2),
        conv_kernel=(8, 3),
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        num_feat_extract_layers=2,
        apply_spec_augment=False,
        layerdrop=0.0,
        classifier_proj_size=16,
    )
    strategies = [
        ("wav2vec2.feature_extractor.conv_layers.*.conv", "co@tp"),
        ("*.pos_conv_embed.conv", "co@tp"),
        *columns("*.feature_projection.projection", "*.attention.[qkv]_proj", "*.intermediate_dense", "projector"),
    ]
    return of(classified(config), tf.Wav2Vec2ForSequenceClassification, sounds, strategies)


def sounds(batch: int) -> dict[str, Any]:
    return {"input_values": torch.randn(batch, 64), "labels": torch.randint(0, CLASSES, (batch,))}


def segformer() -> TinyModel:
    config = tf.SegformerConfig(
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[8, 16],
        patch_sizes=[3, 3],
        strides=[2, 2],
        num_attention_heads=[4, 4],
        mlp_ratios=[2, 2],
        decoder_hidden_size=16,
    )
    strategies = [
        ("*.patch_embeddings.proj", "co@tp"),
        ("*.sequence_reduction.sequence_reduction", "co@tp"),
        *columns("*.attention.[qkv]_proj", "*.mlp.fc1", "decode_head.linear_projections.*.proj"),
        ("decode_head.linear_fuse", "co@tp"),
        ("decode_head.classifier", "co@tp"),
    ]
    return of(classified(config), tf.SegformerForSemanticSegmentation, segmented_images, strategies)


def segmented_images(batch: int) -> dict[str, Any]:
    labels = torch.randint(0, CLASSES, (batch, 16, 16))
    labels[:, :2] = 255  # ignored
    return {"pixel_values": torch.randn(batch, 3, 16, 16), "labels": labels}


TRANSFORMERS = {
    "gpt2": gpt2(),
    "llama": llama(),
    "qwen2": qwen2(),
    "mistral": mistral(),
    "gemma": gemma(),
    "mixtral": mixtral(),
    "bert": bert(),
    "deberta": deberta(),
    "t5": t5(),
    "bart": bart(),
    "vit": vit(),
    "swin": swin(),
    "convnext": convnext(),
    "resnet": resnet(),
    "clip": clip(),
    "whisper": whisper(),
    "wav2vec2": wav2vec2(),
    "segformer": segformer(),
}
