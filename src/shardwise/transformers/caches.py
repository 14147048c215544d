"""Models that keep what they know of the tokens so far: keys and values, as buffers of fixed lengths.

``CachedDecoder`` is a model of text alone, whose program takes a chunk of a prompt or one token. An encoder with a
decoder is two modules over the same buffers: ``FirstToken`` runs the encoder and keeps what every layer of the decoder
reads of the source, ``NextToken`` reads that. ``CacheRows`` exchanges sequences among the rows of the buffers, as beams
ask for it. All are ordinary modules: they are planned, split and run as any other.
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

# What models and their outputs call a cache. transformers 5.24 renamed it; for models, the older name warns there.
CACHE = "cache" if "cache" in {field.name for field in fields(CausalLMOutputWithPast)} else "past_key_values"


@dataclass(frozen=True)
class CacheSizes:
    """``rows``: sequences of a pass; ``length``: the most tokens of each; ``source``: those of what an encoder reads
    (0: there is none)."""

    rows: int
    length: int
    source: int = 0


class Caches(torch.nn.Module):
    """The buffers: ``keys_0``, ``values_0`` and so on, and of a source ``source_keys_0``, ... (on meta)."""

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
        """transformers' cache over the buffers, of which ``start`` tokens are known."""
        cache = self.empty(self.sizes.length)
        self.fill(cache, start)
        return cache

    def empty(self, length: int) -> Cache:
        """A cache whose layers keep all tokens, be their attention to a window of them: masks hide the others."""
        return Cache(layers=[StaticLayer(max_cache_len=length) for _ in range(self.config.num_hidden_layers)])

    def fill(self, cache: Cache, start: torch.Tensor, kind: str = "") -> None:
        for number, layer in enumerate(cache.layers):
            assert isinstance(layer, StaticLayer), "as empty() makes them"
            layer.keys = getattr(self, f"{kind}keys_{number}")
            layer.values = getattr(self, f"{kind}values_{number}")
            layer.device = layer.keys.device
            vars(layer)["dtype"] = layer.keys.dtype  # which transformers 5.23 has, and later ones have not
            layer.cumulative_length = start.clone()
            layer.is_initialized = True


class CachedDecoder(Caches):
    """A model of text and its caches: the logits behind some more tokens."""

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
        """``attention_mask``: of all tokens that there may be, [samples, length]; ``start``: the place of the first of
        these; ``last``: which of them the logits are for, [1]."""
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
    """An encoder with a decoder and its caches."""

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
        self.fill(of_source, torch.zeros_like(start), "source_")  # afterwards: it would ask a tensor for its value
        cache.is_updated = dict.fromkeys(range(self.config.num_hidden_layers), knows_source)
        output = self.model(
            **source,
            decoder_input_ids=tokens,
            decoder_attention_mask=mask,
            use_cache=True,
            **{CACHE: cache},
        )
        logits: torch.Tensor = output.logits[:, -1]
        return logits


class NextToken(_Translation):
    """Behind the first token: the logits behind one more."""

    def forward(
        self,
        decoder_input_ids: torch.Tensor,
        decoder_attention_mask: torch.Tensor,
        attention_mask: torch.Tensor,
        start: torch.Tensor,
    ) -> torch.Tensor:
        """``decoder_attention_mask``: of all tokens that there may be, [rows, length]; ``attention_mask``: of the
        source; ``start``: the place of this token."""
        # Its layers know keys and values of the source: of what the encoder made, only the shape is looked at.
        encoded = torch.zeros(self.sizes.rows, self.sizes.source, self.width, dtype=dtype_of(self.model))
        known = {"encoder_outputs": (encoded,), "attention_mask": attention_mask}
        return self.decoded(known, decoder_input_ids, decoder_attention_mask, start, knows_source=True)


class FirstToken(_Translation):
    """What the source is, and the logits behind the first token."""

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
    """The caches alone: every row becomes a copy of another one. What is known of a source stays: the beams of a
    sample have the same."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for layer in range(self.config.num_hidden_layers):
            for name in ("keys", "values"):
                buffer = self.get_buffer(f"{name}_{layer}")
                buffer.copy_(buffer.index_select(0, rows))
        return rows + 0


def decoder_config(config: Any) -> Any:
    """A copy of what a model's configuration says of its decoder."""
    own = copy.deepcopy(config.get_text_config(decoder=True))
    if (deep := getattr(own, "num_decoder_layers", None)) is not None:
        own.num_hidden_layers = deep  # T5 counts those of its encoder
    return own


def dtype_of(model: torch.nn.Module) -> torch.dtype:
    return next(p.dtype for p in model.parameters() if p.is_floating_point())


def decoder_inputs(sizes: CacheSizes, tokens: int) -> dict[str, torch.Tensor]:
    """Arguments of a Decoder, all zeros."""
    shapes = {
        "input_ids": (sizes.rows, tokens),
        "attention_mask": (sizes.rows, sizes.length),
        "position_ids": (sizes.rows, tokens),
        "start": (),
        "last": (1,),
    }
    return _zeros(shapes)


def token_inputs(sizes: CacheSizes, *, first: bool) -> dict[str, torch.Tensor]:
    """Arguments of NextToken, or of FirstToken, all zeros."""
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
    """The factors of a product's or table's rows, ``b m k, n k -> b m n``: those of samples, and those of tokens, of
    which the program that takes one token has 1."""
    dims = re.findall(r"\([^)]*\)|\S+", rule.partition("->")[2].strip().partition("  ")[0])
    rows = _FACTOR.findall(" ".join(dims[:-1]))
    return rows[:1], rows[1:]


def plan_with_caches(
    module: Caches, inputs: Mapping[str, torch.Tensor], par: Parallel, caches: Mapping[str, str] | None = None
) -> Plan:
    """A plan for a module with caches. Parameters stay where ``par`` has them, the products over them are split as in
    training, and the rest follows. ``caches``: their layouts; None: in a first plan they are whole, and it says how
    they are used; in the second they are kept so."""
    mesh = par.plan.mesh
    model = getattr(module, "model", None)
    modules = set() if model is None else {name for name, _ in model.named_modules()}
    if isinstance(module, NextToken):  # the encoder does not run, nor what reads it
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


__all__ = [
    "CACHE",
    "CacheRows",
    "CacheSizes",
    "CachedDecoder",
    "Caches",
    "FirstToken",
    "NextToken",
    "decoder_config",
    "decoder_inputs",
    "dtype_of",
    "plan_with_caches",
    "token_inputs",
]
