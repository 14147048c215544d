"""Text generation with a model that is split over ranks, with two programs for all lengths.

The key-value caches are buffers of fixed length in our own module (``caches``), split by the plan: a rank holds those
of its heads or samples. For a decoder-only model one program takes a chunk of a prompt, and the other takes one token.
The last chunk of a prompt is padded on the right. The padding's cache entries are after all tokens, where the causal
mask hides them until later tokens overwrite them. For an encoder-decoder model one program takes the source and the
first token, and the other each later token. With beam search a third program reorders the rows.

transformers' own ``generate`` does the rest: it sees a model with an opaque cache (``_CacheHandle``).
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers.cache_utils import Cache, StaticCache, StaticLayer, StaticSlidingWindowLayer
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutputWithPast, Seq2SeqLMOutput

from shardwise.errors import ShardwiseError
from shardwise.plans.plan import Plan
from shardwise.runtime.agree import from_rank_zero, rank_and_world_size
from shardwise.runtime.local_shards import shard
from shardwise.runtime.parallel import Parallel
from shardwise.runtime.parallelize import parallelize
from shardwise.transformers.caches import (
    CACHE,
    CachedDecoder,
    CacheRows,
    Caches,
    CacheSizes,
    FirstToken,
    NextToken,
    decoder_config,
    decoder_inputs,
    dtype_of,
    plan_with_caches,
    token_inputs,
)
from shardwise.transformers.one_process import check_same


def generator(
    par: Parallel, *, batch_size: int, max_length: int, source_length: int | None = None, chunk: int = 64
) -> Any:
    """Return a model with transformers' ``generate``, computed by the ranks of ``par``. Call it on every rank.

    Every rank calls ``generate`` with the same prompts and settings, and gets the same tokens as on one device. Greedy
    decoding, sampling (with the same torch seed on all ranks) and beam search work. Assisted generation, contrastive
    search, chunked prefill, the caller's own caches, and outputs of attentions and hidden states raise an error.

    Args:
        par: a parallel decoder-only or text encoder-decoder model of transformers, with or without peft adapters. Its
            parameters are shared, so the generator always uses the current weights.
        batch_size: exact number of sequences per pass: prompts (or sources), times beams or returned sequences.
        max_length: maximum tokens of a sequence, including prompt and padding.
        source_length: with an encoder, maximum tokens of its input.
        chunk: tokens of a prompt per pass.

    Returns:
        A copy of the model without weights, whose ``generate`` runs on all ranks.

    Raises:
        ShardwiseError: the model's caches are not keys and values (such as recurrent states), its source is not text,
            or the plan splits a buffer.
    """
    original: Any = par.original
    model: Any = original.get_base_model() if hasattr(original, "get_base_model") else original
    translates = bool(model.config.is_encoder_decoder)
    length = max_length if translates else -(-max_length // chunk) * chunk
    _check_kind(model, length, source_length)
    _check_whole(original, dict(par.named_buffers()))
    sizes = CacheSizes(batch_size, length, source_length or 0)
    kind = NextToken if translates else CachedDecoder
    step = kind(copy.deepcopy(original), model.config, sizes).eval()
    inputs = token_inputs(sizes, first=False) if translates else decoder_inputs(sizes, 1)
    steps = _parallelize(step, par, lambda: plan_with_caches(step, inputs, par))
    generation = _TextGeneration(par, steps, sizes, max_length, chunk)
    if translates:
        first = FirstToken(copy.deepcopy(original), model.config, sizes).eval()
        example = token_inputs(sizes, first=True)
        first_par = _parallelize(first, par, lambda: plan_with_caches(first, example, par, generation.layouts))
        generation.first = generation.share_caches(first_par)
    return _front(model, generation)


def _parallelize(module: Caches, par: Parallel, plan: Callable[[], Plan]) -> Parallel:
    """Parallelize a module with caches. ``_TextGeneration.begin`` sets its parameters to those of ``par``."""
    module.requires_grad_(False)
    buffers = dict(par.named_buffers())
    empty = {*dict(module.named_parameters()), *dict(module.named_buffers(recurse=False))}

    def value(name: str, tensor: torch.Tensor) -> Any:
        buffer = buffers.get(name.removeprefix("model."))
        if buffer is not None:
            return buffer.detach().to("cpu", copy=True)
        if name in empty:
            return torch.zeros(tensor.shape, dtype=tensor.dtype)  # caches begin empty
        return NotImplemented  # values that the model computes itself, such as rotary frequencies

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        chosen = plan() if rank_and_world_size()[1] == 1 else from_rank_zero(plan)
        parallel = parallelize(module, chosen, init=value, device=par.device)
    return parallel


def _check_kind(model: Any, length: int, source_length: int | None) -> None:
    """Raise ShardwiseError unless the model's caches are keys and values of all tokens."""
    fix = "generate on one device, from what sw.save_pretrained writes"
    name = type(model).__name__
    if not hasattr(model, "generate") or model.main_input_name != "input_ids":
        raise ShardwiseError(f"{name} does not generate text from text", fix=fix)
    if model.config.is_encoder_decoder != (source_length is not None):
        what = f"{name} {'has an encoder' if source_length is None else 'has no encoder'}"
        advice = "give source_length=" if source_length is None else "leave out source_length"
        raise ShardwiseError(what, fix=f"{advice}: the maximum tokens of an encoder's input")
    config = decoder_config(model.config)
    layers = StaticCache(config=config, max_cache_len=length).layers
    others = sorted({type(layer).__name__ for layer in layers if type(layer) not in _OF_TOKENS})
    if not others and len(layers) < config.num_hidden_layers:
        others = ["some layers share those of others"]
    if others:
        what = f"{name} has caches other than keys and values for each layer ({', '.join(others)})"
        raise ShardwiseError(what, fix=fix)


def _check_whole(model: Any, local: dict[str, torch.Tensor]) -> None:
    shapes = {name: buffer.shape for name, buffer in model.named_buffers()}
    split = sorted(name for name, shape in shapes.items() if name in local and local[name].shape != shape)
    if split:
        what = f"the plan splits the buffer {split[0]}, which a generator needs whole"
        raise ShardwiseError(what, fix=f"plan with a replicated layout: layouts={{{split[0]!r}: ...}}")


class _CacheHandle(Cache):
    """The cache that transformers sees. It only counts tokens; keys and values are in the ranks' parallel modules."""

    def __init__(self, generation: _TextGeneration) -> None:
        super().__init__(layers=[])
        self.num_tokens, self._generation = 0, generation

    @property
    def is_compileable(self) -> bool:
        return False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.num_tokens

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._generation.reorder(beam_idx)


class _TextGeneration:
    """The generation state of one model: its caches, and the passes over tokens. ``first``: the module for source and
    first token of an encoder-decoder model; ``source``: the source tokens and their mask."""

    def __init__(self, par: Parallel, steps: Parallel, sizes: CacheSizes, max_length: int, chunk: int) -> None:
        self.par, self.steps, self.sizes, self.max_length, self.chunk = par, steps, sizes, max_length, chunk
        self.first: Parallel | None = None
        self.source: tuple[torch.Tensor, torch.Tensor] | None = None
        self._rows: Parallel | None = None
        self._shared_parameters: dict[int, torch.nn.Parameter] = {}  # by the ids of par's parameters

    @property
    def layouts(self) -> dict[str, str]:
        caches = dict(self.steps.original.named_buffers(recurse=False))
        return {buffer.name: buffer.layout for buffer in self.steps.plan.buffers if buffer.name in caches}

    def share_caches(self, other: Parallel) -> Parallel:
        for name in self.layouts.keys() & dict(other.named_buffers()).keys():
            other._buffers[name] = self.steps.get_buffer(name)
        return other

    def begin(self, prompt: Any, settings: Mapping[str, Any]) -> None:
        """Check that all ranks have the same prompts and settings, and update parameters and buffers."""
        fix = "give every rank the same prompts and settings, after torch.manual_seed(...) with the same seed"
        request = prompt, sorted(settings.items()), torch.random.get_rng_state()
        check_same(request, "other prompts, settings or random numbers", fix)
        for steps in (self.steps, self.first):
            if steps is not None:
                self._take(steps)

    def _take(self, steps: Parallel) -> None:
        for name, parameter in self.par.named_parameters(remove_duplicate=False):
            path, _, leaf = f"model.{name}".rpartition(".")
            table = steps.get_submodule(path)._parameters
            current = table[leaf]
            if current is None or current.data_ptr() != parameter.data_ptr():
                table[leaf] = self._shared(parameter)
        buffers, layouts = dict(steps.named_buffers()), steps.plan.layouts
        with torch.no_grad():
            for name, buffer in self.par.named_buffers():
                if (target := buffers.get(f"model.{name}")) is not None:
                    layout = layouts.get(f"model.{name}")
                    target.copy_(buffer if layout is None else shard(buffer, layout, steps.coordinates))

    def _shared(self, parameter: torch.nn.Parameter) -> torch.nn.Parameter:
        """Return a parameter over the same memory; the same one for all names of a tied parameter."""
        shared = self._shared_parameters.get(id(parameter))
        if shared is None or shared.data_ptr() != parameter.data_ptr():
            shared = torch.nn.Parameter(parameter.detach(), requires_grad=False)
            self._shared_parameters[id(parameter)] = shared
        return shared

    def reorder(self, rows: torch.Tensor) -> None:
        """Replace the caches of each row by those of another row. The program for it is compiled on first use."""
        if self._rows is None:
            model: Any = self.par.original
            config = (model.get_base_model() if hasattr(model, "get_base_model") else model).config
            module = CacheRows(
                config, CacheSizes(self.sizes.rows, self.sizes.length), dtype_of(self.steps.original)
            ).eval()
            names = dict(module.named_buffers())
            layouts = {name: layout for name, layout in self.layouts.items() if name in names}
            example = {"rows": torch.zeros(self.sizes.rows, dtype=torch.int64)}
            rows_par = _parallelize(module, self.par, lambda: plan_with_caches(module, example, self.par, layouts))
            self._rows = self.share_caches(rows_par)
        with torch.no_grad():
            self._rows(rows=rows.to(torch.int64))

    def logits(
        self, cache: _CacheHandle, ids: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor | None
    ) -> Any:
        """Return the logits after the last of some more tokens, [samples, 1, vocabulary]. ``mask``: of all tokens."""
        past, count = cache.num_tokens, ids.shape[1]
        if ids.shape[0] != self.sizes.rows or past + count > self.max_length:
            what = f"{ids.shape[0]} sequences of {past + count} tokens; the generator is for {self.sizes.rows} of up to"
            raise ShardwiseError(f"{what} {self.max_length}", fix="another batch_size= or max_length=")
        mask = torch.ones(self.sizes.rows, past + count, dtype=torch.int64) if mask is None else mask.to(torch.int64)
        with torch.no_grad():
            if self.first is None:
                logits = self._decode(past, ids, mask, positions)
            else:
                logits = self._decode_with_source(past, ids, mask)
        cache.num_tokens += count
        return logits[:, None]

    def _decode(self, past: int, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor | None) -> Any:
        count = ids.shape[1]
        if positions is None:
            positions = torch.arange(past, past + count).expand(self.sizes.rows, -1)
        size = 1 if count == 1 else self.chunk
        logits: Any = None
        for at in range(0, count, size):
            tokens = min(size, count - at)
            inputs = decoder_inputs(self.sizes, size)
            inputs["input_ids"][:, :tokens] = ids[:, at : at + tokens]
            inputs["position_ids"][:, :tokens] = positions[:, at : at + tokens]
            inputs["attention_mask"][:, : past + count] = mask
            inputs["start"].fill_(past + at)
            inputs["last"].fill_(tokens - 1)
            logits = self.steps(**inputs)
        return logits

    def _decode_with_source(self, past: int, ids: torch.Tensor, decoder_mask: torch.Tensor) -> Any:
        assert self.first is not None, "asked by the caller"
        assert self.source is not None, "generate begins with the encoder"
        source, mask = self.source
        if source.shape[1] > self.sizes.source or self.sizes.rows % source.shape[0]:
            what = f"{source.shape[0]} sources of {source.shape[1]} tokens; the generator is for {self.sizes.rows} "
            what += f"sequences, and sources of up to {self.sizes.source}"
            raise ShardwiseError(what, fix="another batch_size= or source_length=")
        times = self.sizes.rows // source.shape[0]
        logits: Any = None
        for at in range(past, past + ids.shape[1]):
            inputs = token_inputs(self.sizes, first=at == 0)
            inputs["attention_mask"][:, : source.shape[1]] = mask.repeat_interleave(times, 0)
            inputs["decoder_input_ids"][:] = ids[:, at - past, None]
            inputs["decoder_attention_mask"][:, : decoder_mask.shape[1]] = decoder_mask
            inputs["start"].fill_(at)
            if at == 0:
                inputs["input_ids"][:, : source.shape[1]] = source.repeat_interleave(times, 0)
            logits = (self.steps if at else self.first)(**inputs)
        return logits


# Arguments of generate, or of a GenerationConfig, that would call the model in other ways.
_REFUSED = (
    "assistant_model",
    "prompt_lookup_num_tokens",
    "assistant_early_exit",
    "custom_generate",
    "penalty_alpha",
    "dola_layers",
    "constraints",
    "force_words_ids",
    "prefill_chunk_size",
    "cache",
    "past_key_values",
    "encoder_outputs",
    "inputs_embeds",
    "negative_prompt_ids",
    "cache_implementation",
    "output_attentions",
    "output_hidden_states",
)


class _TextGenerator:
    """The methods of a copy of a model without values, whose forward passes run in ``_generation``. Its class is a
    subclass of this and of the model's class."""

    _generation: _TextGeneration
    generation_config: Any

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        **others: Any,
    ) -> Any:
        cache = others.pop(CACHE, None)
        translates = self._generation.first is not None
        if translates:
            input_ids, attention_mask = (
                others.pop("decoder_input_ids", None),
                others.pop("decoder_attention_mask", None),
            )
            others.pop("encoder_outputs", None)
        unknown = sorted(k for k, v in others.items() if v is not None and k not in _UNDERSTOOD)
        unknown += ["logits_to_keep"] if others.get("logits_to_keep") not in (None, 0, 1) else []
        if input_ids is None or not isinstance(cache, _CacheHandle) or unknown:
            what = "the generator takes token ids and has one cache: guidance_scale, which needs two, does not work"
            what = f"the generator does not support the arguments {unknown}" if unknown else what
            raise ShardwiseError(what, fix="leave it out, or generate on one device")
        logits = self._generation.logits(cache, input_ids, attention_mask, position_ids)
        output: Any = Seq2SeqLMOutput if translates else CausalLMOutputWithPast
        return output(logits=logits, **{CACHE: cache})

    def generate(self, inputs: Any = None, **settings: Any) -> Any:
        config = settings.get("generation_config") or self.generation_config
        values = {name: settings.get(name, getattr(config, name, None)) for name in _REFUSED}
        refused = sorted(name for name, value in values.items() if value is not None and value is not False)
        if refused:
            what = f"the generator does not support {', '.join(refused)}: it reads a prompt, then token by token"
            raise ShardwiseError(what, fix="leave it out, or generate on one device")
        self._generation.begin(settings.get("input_ids", inputs), settings)
        above: Any = super()
        return above.generate(inputs, **settings)

    def _prepare_cache_for_generation(self, config: Any, model_kwargs: dict[str, Any], *_: Any, **__: Any) -> None:
        if config.use_cache is False or model_kwargs.get(CACHE) is not None:
            raise ShardwiseError("the generator has its own cache", fix="leave out cache= and use_cache=False")
        model_kwargs[CACHE] = _CacheHandle(self._generation)

    @property
    def device(self) -> torch.device:
        return self._generation.par.device


def _read_source(front: _TextGenerator, ids: torch.Tensor, model_kwargs: dict[str, Any], *_: Any) -> dict[str, Any]:
    """Store the source instead of running the encoder, which runs with the first token."""
    mask = model_kwargs.get("attention_mask")
    front._generation.source = ids, torch.ones_like(ids) if mask is None else mask.to(torch.int64)
    model_kwargs["encoder_outputs"] = BaseModelOutput(last_hidden_state=torch.zeros(len(ids), 1, 1))
    return model_kwargs


def _front(model: Any, generation: _TextGeneration) -> Any:
    """Return a copy of ``model`` without values, whose forward passes run in ``generation``."""
    kind: Any = type(model)

    @functools.wraps(kind.forward)  # generate inspects the signature
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _TextGenerator.forward(self, *args, **kwargs)

    front = copy.deepcopy(model)
    front.config.use_cache = front.generation_config.use_cache = True  # the Trainer turns it off
    members: dict[str, Any] = {"_generation": generation}
    if generation.first is not None:
        members["forward"] = forward
        members["_maybe_prepare_encoder_kwargs_for_generation"] = _read_source
    front.__class__ = type(kind.__name__, (_TextGenerator, kind), members)
    return front.eval()


_OF_TOKENS = (StaticLayer, StaticSlidingWindowLayer)
_UNDERSTOOD = ("return_dict", "use_cache", "cache_position", "logits_to_keep")
