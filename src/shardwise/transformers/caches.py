"""Models with key-value caches as buffers of fixed length.

``CachedDecoder`` is a decoder-only model, whose program takes a chunk of a prompt or one token. An encoder-decoder
model is two modules over the same buffers: ``FirstToken`` runs the encoder and stores the cross-attention keys and
values, which ``NextToken`` reads. ``CacheRows`` reorders the rows of the buffers for beam search. All are ordinary
modules: they are planned, split and run like any other.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from transformers.cache_utils import Cache, EncoderDecoderCache, StaticLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

from shardwise.api import plan as make_plan
from shardwise.plans.plan import Plan
from shardwise.runtime.parallel import Parallel

_FACTOR = re.compile(r"[a-z]+[0-9.]*")

# The name of the cache in models and their outputs. transformers 5.24 renamed it; models warn about the older name.
CACHE = "cache" if "cache" in {field.name for field in fields(CausalLMOutputWithPast)} else "past_key_values"


@dataclass(frozen=True)
class CacheSizes:
    """Sizes of caches. ``rows``: sequences per pass; ``length``: maximum tokens of each; ``source``: maximum tokens of
    an encoder's input (0 without an encoder)."""

    rows: int
    length: int
    source: int = 0


class Caches(torch.nn.Module):
    """The buffers ``keys_0``, ``values_0``, ..., and for an encoder ``source_keys_0``, ... (on the meta device)."""

    def __init__(self, config: Any, sizes: CacheSizes, dtype: torch.dtype) -> None:
        super().__init__()
        self.config, self.sizes = decoder_config(config), sizes
        heads = getattr(self.config, "num_key_value_heads", None) or self.config.num_attention_heads
        width = getattr(self.config, "head_dim", None) or self.config.hidden_size // self.config.num_attention_heads
        for kind, length in (("", sizes.length), ("source_", sizes.source)):
            for layer in range(self.config.num_hidden_layers if length else 0):
                for name in ("keys", "values"):
                    empty = torch.empty(sizes.rows, heads, length, width, dtype=dtype, device="meta")
                    self.register_buffer(f"{kind}{name}_{layer}", empty, persistent=False)

    def cache(self, start: torch.Tensor) -> Cache:
        """Return transformers' cache over the buffers, which hold ``start`` tokens."""
        cache = self.empty(self.sizes.length)
        self.fill(cache, start)
        return cache

    def empty(self, length: int) -> Cache:
        """Return a cache whose layers keep all tokens, even for sliding-window attention: masks hide the others."""
        return Cache(layers=[StaticLayer(max_cache_len=length) for _ in range(self.config.num_hidden_layers)])

    def fill(self, cache: Cache, start: torch.Tensor, kind: str = "") -> None:
        for number, layer in enumerate(cache.layers):
            assert isinstance(layer, StaticLayer), "as empty() makes them"
            layer.keys = getattr(self, f"{kind}keys_{number}")
            layer.values = getattr(self, f"{kind}values_{number}")
            layer.device = layer.keys.device
            vars(layer)["dtype"] = layer.keys.dtype  # only transformers 5.23 has this attribute
            layer.cumulative_length = start.clone()
            layer.is_initialized = True


class CachedDecoder(Caches):
    """A decoder-only model with its caches. Computes the logits after some more tokens."""

    def __init__(self, model: torch.nn.Module, config: Any, sizes: CacheSizes) -> None:
        super().__init__(config, sizes, dtype_of(model))
        self.model = model

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        start: torch.Tensor,
        last: torch.Tensor,
    ) -> torch.Tensor:
        """Return the logits after token ``last``. ``attention_mask``: over all cache positions, [samples, length];
        ``start``: cache position of the first of these tokens; ``last``: index of the token for the logits, [1]."""
        output = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            use_cache=True,
            **{CACHE: self.cache(start)},
        )
        logits: torch.Tensor = output.logits.index_select(1, last)[:, 0]
        return logits


class _Translation(Caches):
    """An encoder-decoder model with its caches."""

    def __init__(self, model: torch.nn.Module, config: Any, sizes: CacheSizes) -> None:
        super().__init__(config, sizes, dtype_of(model))
        self.model, self.width = model, config.hidden_size

    def decoded(
        self,
        source: Mapping[str, Any],
        tokens: torch.Tensor,
        mask: torch.Tensor,
        start: torch.Tensor,
        *,
        knows_source: bool,
    ) -> torch.Tensor:
        of_source = self.empty(self.sizes.source)
        cache = EncoderDecoderCache(self.cache(start), of_source)
        self.fill(of_source, torch.zeros_like(start), "source_")  # now: the constructor would read a tensor's value
        cache.is_updated = dict.fromkeys(range(self.config.num_hidden_layers), knows_source)
        output = self.model(
            **source, decoder_input_ids=tokens, decoder_attention_mask=mask, use_cache=True, **{CACHE: cache}
        )
        logits: torch.Tensor = output.logits[:, -1]
        return logits


class NextToken(_Translation):
    """Computes the logits after one more token, after the first."""

    def forward(
        self,
        decoder_input_ids: torch.Tensor,
        decoder_attention_mask: torch.Tensor,
        attention_mask: torch.Tensor,
        start: torch.Tensor,
    ) -> torch.Tensor:
        """Return the logits. ``decoder_attention_mask``: over all cache positions, [rows, length]; ``attention_mask``:
        of the source; ``start``: cache position of this token."""
        # The caches have the keys and values of the source, so only the shape of the encoder's output is used.
        encoded = torch.zeros(self.sizes.rows, self.sizes.source, self.width, dtype=dtype_of(self.model))
        source = {"encoder_outputs": (encoded,), "attention_mask": attention_mask}
        return self.decoded(source, decoder_input_ids, decoder_attention_mask, start, knows_source=True)


class FirstToken(_Translation):
    """Encodes the source into the caches, and computes the logits after the first token."""

    def forward(
        self,
        decoder_input_ids: torch.Tensor,
        decoder_attention_mask: torch.Tensor,
        attention_mask: torch.Tensor,
        start: torch.Tensor,
        input_ids: torch.Tensor,
    ) -> torch.Tensor:
        source = {"input_ids": input_ids, "attention_mask": attention_mask}
        return self.decoded(source, decoder_input_ids, decoder_attention_mask, start, knows_source=False)


class CacheRows(Caches):
    """Reorders the rows of the decoder's caches. Those of the source stay: all beams of a sample share them."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for layer in range(self.config.num_hidden_layers):
            for name in ("keys", "values"):
                buffer = self.get_buffer(f"{name}_{layer}")
                buffer.copy_(buffer.index_select(0, rows))
        return rows + 0


def decoder_config(config: Any) -> Any:
    """Return a copy of the decoder's part of a model's configuration."""
    decoder = copy.deepcopy(config.get_text_config(decoder=True))
    if (num_layers := getattr(decoder, "num_decoder_layers", None)) is not None:
        decoder.num_hidden_layers = num_layers  # T5's num_hidden_layers is that of its encoder
    return decoder


def dtype_of(model: torch.nn.Module) -> torch.dtype:
    return next(p.dtype for p in model.parameters() if p.is_floating_point())


def decoder_inputs(sizes: CacheSizes, tokens: int) -> dict[str, torch.Tensor]:
    """Return arguments of a ``CachedDecoder``, all zeros."""
    shapes = {
        "input_ids": (sizes.rows, tokens),
        "attention_mask": (sizes.rows, sizes.length),
        "position_ids": (sizes.rows, tokens),
        "start": (),
        "last": (1,),
    }
    return _zeros(shapes)


def token_inputs(sizes: CacheSizes, *, first: bool) -> dict[str, torch.Tensor]:
    """Return arguments of ``NextToken``, or of ``FirstToken``, all zeros."""
    shapes = {
        "decoder_input_ids": (sizes.rows, 1),
        "decoder_attention_mask": (sizes.rows, sizes.length),
        "attention_mask": (sizes.rows, sizes.source),
        "start": (),
    }
    return _zeros({**shapes, "input_ids": (sizes.rows, sizes.source)} if first else shapes)


def _zeros(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(shape, dtype=torch.int64) for name, shape in shapes.items()}


def _rows_of(rule: str) -> tuple[list[str], list[str]]:
    """Return the factors of the rows of a matmul or embedding, ``b m k, n k -> b m n``: (those of samples, those of
    tokens). The token factors have size 1 in a program that takes one token."""
    dims = re.findall(r"\([^)]*\)|\S+", rule.partition("->")[2].strip().partition("  ")[0])
    rows = _FACTOR.findall(" ".join(dims[:-1]))
    return rows[:1], rows[1:]


def plan_with_caches(
    module: Caches, inputs: Mapping[str, torch.Tensor], par: Parallel, caches: Mapping[str, str] | None = None
) -> Plan:
    """Plan a module with caches. Parameters keep the layouts of ``par``, matmuls and embeddings the strategies of
    training, and the rest is propagated. ``caches``: layouts of the caches; None: take the layouts in which a first
    plan, with whole caches, uses them."""
    mesh = par.plan.mesh
    model = getattr(module, "model", None)
    modules = set() if model is None else {name for name, _ in model.named_modules()}
    if isinstance(module, NextToken):  # leave out the encoder and cross-attention projections, which do not run
        run = make_plan(module, dict(inputs), mesh.num_devices, mesh=mesh, search="sharding_propagation").plan
        modules &= {entry.name.rpartition("/")[0].removeprefix("model.") for entry in run.operators}
    strategies = {}
    for entry in par.plan.operators:
        path = entry.name.rpartition("/")[0]
        if path in modules and entry.target.split(".")[1] in ("linear", "embedding", "addmm") and entry.strategy:
            samples, tokens = _rows_of(entry.rule)
            single = {*tokens, *(samples if module.sizes.rows == 1 else ())}
            kept = [split for split in entry.strategy.split() if split.partition("@")[0] not in single]
            if kept:
                strategies[f"model.{path}"] = " ".join(kept)
    layouts: dict[str, Any] = {} if model is None else {f"model.{p.name}": p.layout for p in par.plan.parameters}
    settings: dict[str, Any] = {
        "mesh": mesh,
        "strategies": strategies,
        "search": "sharding_propagation",
        "precision": par.plan.precision,
        "bucket_bytes": par.plan.bucket_bytes,
    }
    if caches is None:
        whole = make_plan(module, dict(inputs), mesh.num_devices, layouts=layouts, **settings).plan
        names = {name for name, _ in module.named_buffers(recurse=False)}
        caches = {c.value: c.target for c in whole.conversions if c.value in names}
    return make_plan(module, dict(inputs), mesh.num_devices, layouts={**layouts, **caches}, **settings).plan
