"""Text generation by a model that is split over ranks: two programs, whatever the lengths.

Keys and values of the tokens so far are buffers of a module of our own (``caches``), of a fixed length, split as the
plan says: a rank holds those of its heads, or samples. Of a model of text alone, one program takes a chunk of a prompt,
one takes a token. The last chunk of a prompt is filled up on the right: what that writes lies behind all tokens, where
the causal mask hides it, until tokens that come later take its place. Of an encoder with a decoder, one program takes
the source and the first token, one each token behind it. Where beams are searched, another one exchanges the rows.

transformers' own ``generate`` does the rest: it sees a model with a cache of a kind it does not know
(``_CacheHandle``).
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

from shardwise.errors import ShardwiseError, problem
from shardwise.plans.plan import Plan
from shardwise.runtime.agree import from_rank_zero
from shardwise.runtime.local_shards import shard
from shardwise.runtime.parallel import Parallel
from shardwise.runtime.parallelize import parallelize
from shardwise.train.agreement import rank_and_world_size
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
    """A model whose ``generate`` is that of transformers, computed by the ranks of ``par``; called on every rank.

    ``par``: of a transformers model that continues text, or of one with an encoder for text and a decoder, perhaps with
    adapters of peft. Its parameters are shared, so that what training changes is generated with. ``batch_size``: the
    sequences of a pass, no more and no fewer: prompts (or sources), times beams or returned sequences. ``max_length``:
    the most tokens of a sequence, prompt and padding included. ``source_length``: with an encoder, the most tokens that
    it reads. ``chunk``: the tokens of a prompt that one pass takes.

    Every rank calls ``generate`` with the same prompts and settings, and gets the same tokens: those of one device, for
    greedy decoding, sampling (seed torch alike on all ranks) and beams. Refused by name: helpers that guess tokens,
    contrastive search, prefill in chunks of the caller's, caches of the caller's, attentions and hidden states.

    Raises ShardwiseError for models whose caches are of another kind: states, other sources than text.
    """
    original: Any = par.original
    model: Any = original.get_base_model() if hasattr(original, "get_base_model") else original
    translates = bool(model.config.is_encoder_decoder)
    length = max_length if translates else -(-max_length // chunk) * chunk
    _check_kind(model, length, source_length)
    own = dict(par.named_buffers())
    _check_whole(original, own)
    sizes = CacheSizes(batch_size, length, source_length or 0)
    kind = NextToken if translates else CachedDecoder
    step = kind(copy.deepcopy(original), model.config, sizes).eval()
    inputs = token_inputs(sizes, first=False) if translates else decoder_inputs(sizes, 1)
    steps = _made(step, par, lambda: plan_with_caches(step, inputs, par))
    found = _TextGeneration(par, steps, sizes, max_length, chunk)
    if translates:
        first = FirstToken(copy.deepcopy(original), model.config, sizes).eval()
        begins = token_inputs(sizes, first=True)
        found.first = found.sharing(_made(first, par, lambda: plan_with_caches(first, begins, par, found.layouts)))
    return _front(model, found)


def _made(module: Caches, par: Parallel, plan: Callable[[], Plan]) -> Parallel:
    """This rank's part of a module with caches. Parameters become those of ``par`` (``_TextGeneration.begin``)."""
    module.requires_grad_(False)
    own = dict(par.named_buffers())
    empty = {*dict(module.named_parameters()), *dict(module.named_buffers(recurse=False))}

    def value(name: str, tensor: torch.Tensor) -> Any:
        found = own.get(name.removeprefix("model."))
        if found is not None:
            return found.detach().to("cpu", copy=True)
        if name in empty:
            return torch.zeros(tensor.shape, dtype=tensor.dtype)  # caches begin empty
        return NotImplemented  # what the model computes for itself: frequencies, say

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        chosen = plan() if rank_and_world_size()[1] == 1 else from_rank_zero(plan)
        made = parallelize(module, chosen, init=value, device=par.device)
    assert isinstance(made, Parallel), "a plan without stages"
    return made


def _check_kind(model: Any, length: int, source_length: int | None) -> None:
    """Raise ShardwiseError for models whose caches are not keys and values of all tokens."""
    fix = "generate on one device, from what sw.save_pretrained writes"
    name = type(model).__name__
    if not hasattr(model, "generate") or model.main_input_name != "input_ids":
        raise ShardwiseError(problem(f"{name} makes no text of text", fix=fix))
    if model.config.is_encoder_decoder != (source_length is not None):
        what = f"{name} {'reads a source' if source_length is None else 'has no encoder'}"
        given = "give source_length=" if source_length is None else "leave out source_length"
        raise ShardwiseError(problem(what, fix=f"{given}: the most tokens that an encoder reads"))
    config = decoder_config(model.config)
    layers = StaticCache(config=config, max_cache_len=length).layers
    others = sorted({type(layer).__name__ for layer in layers if type(layer) not in _OF_TOKENS})
    if not others and len(layers) < config.num_hidden_layers:
        others = ["some layers read those of others"]
    if others:
        what = f"{name} has caches of another kind ({', '.join(others)}) than keys and values"
        raise ShardwiseError(problem(what, fix=fix))


def _check_whole(model: Any, own: dict[str, torch.Tensor]) -> None:
    """Raise ShardwiseError for a buffer of which ``own``, this rank's, has a part only."""
    split = sorted(name for name, buffer in model.named_buffers() if name in own and own[name].shape != buffer.shape)
    if split:
        what = f"the plan splits the buffer {split[0]}, which a generator takes whole"
        raise ShardwiseError(problem(what, fix=f"plan with it whole: layouts={{{split[0]!r}: ...}}"))


class _CacheHandle(Cache):
    """To transformers, a cache: it knows how many tokens there are. The rest is in the ranks' parts."""

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
    """One model's generation: the caches that are under way, and passes over tokens. ``first``: what takes the source
    and the first token, of an encoder with a decoder; ``source``: that source and its mask."""

    def __init__(self, par: Parallel, steps: Parallel, sizes: CacheSizes, max_length: int, chunk: int) -> None:
        self.par, self.steps, self.sizes, self.max_length, self.chunk = par, steps, sizes, max_length, chunk
        self.first: Parallel | None = None
        self.source: tuple[torch.Tensor, torch.Tensor] | None = None
        self._rows: Parallel | None = None
        self._known: dict[int, torch.nn.Parameter] = {}  # by the ids of par's parameters

    @property
    def layouts(self) -> dict[str, str]:
        """Of the caches."""
        caches = dict(self.steps.original.named_buffers(recurse=False))
        return {buffer.name: buffer.layout for buffer in self.steps.plan.buffers if buffer.name in caches}

    def sharing(self, other: Parallel) -> Parallel:
        """Another module over the same caches."""
        for name in self.layouts.keys() & dict(other.named_buffers()).keys():
            other._buffers[name] = self.steps.get_buffer(name)
        return other

    def begin(self, prompt: Any, settings: Mapping[str, Any]) -> None:
        """Check what the ranks are asked, and take the parameters and buffers that there are now."""
        fix = "give every rank the same prompts and settings, after torch.manual_seed(...) of one seed"
        asked = prompt, sorted(settings.items()), torch.random.get_rng_state()
        check_same(asked, "other prompts, settings or random numbers", fix)
        for steps in (self.steps, self.first):
            if steps is not None:
                self._take(steps)

    def _take(self, steps: Parallel) -> None:
        for name, parameter in self.par.named_parameters(remove_duplicate=False):
            path, _, leaf = f"model.{name}".rpartition(".")
            table = steps.get_submodule(path)._parameters
            held = table[leaf]
            if held is None or held.data_ptr() != parameter.data_ptr():
                table[leaf] = self._shared(parameter)
        buffers, layouts = dict(steps.named_buffers()), steps.plan.layouts
        with torch.no_grad():
            for name, buffer in self.par.named_buffers():
                if (own := buffers.get(f"model.{name}")) is not None:
                    layout = layouts.get(f"model.{name}")
                    own.copy_(buffer if layout is None else shard(buffer, layout, steps.coordinates))

    def _shared(self, parameter: torch.nn.Parameter) -> torch.nn.Parameter:
        """The same memory; one for all names of a tied parameter."""
        found = self._known.get(id(parameter))
        if found is None or found.data_ptr() != parameter.data_ptr():
            found = self._known[id(parameter)] = torch.nn.Parameter(parameter.detach(), requires_grad=False)
        return found

    def reorder(self, rows: torch.Tensor) -> None:
        """Every sequence goes on from that of another row; the program for it is made when beams are first searched."""
        if self._rows is None:
            model: Any = self.par.original
            config = (model.get_base_model() if hasattr(model, "get_base_model") else model).config
            module = CacheRows(
                config, CacheSizes(self.sizes.rows, self.sizes.length), dtype_of(self.steps.original)
            ).eval()
            names = dict(module.named_buffers())
            layouts = {name: layout for name, layout in self.layouts.items() if name in names}
            example = {"rows": torch.zeros(self.sizes.rows, dtype=torch.int64)}
            self._rows = self.sharing(
                _made(module, self.par, lambda: plan_with_caches(module, example, self.par, layouts))
            )
        with torch.no_grad():
            self._rows(rows=rows.to(torch.int64))

    def logits(
        self, cache: _CacheHandle, ids: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor | None
    ) -> Any:
        """Behind the last of some more tokens, [samples, 1, vocabulary]. ``mask``: of all tokens so far."""
        past, count = cache.num_tokens, ids.shape[1]
        if ids.shape[0] != self.sizes.rows or past + count > self.max_length:
            what = f"{ids.shape[0]} sequences of {past + count} tokens; the generator is for {self.sizes.rows} of up to"
            raise ShardwiseError(problem(f"{what} {self.max_length}", fix="another batch_size= or max_length="))
        known = torch.ones(self.sizes.rows, past + count, dtype=torch.int64) if mask is None else mask.to(torch.int64)
        with torch.no_grad():
            found = self._continued(past, ids, known, positions) if self.first is None else self._said(past, ids, known)
        cache.num_tokens += count
        return found[:, None]

    def _continued(self, past: int, ids: torch.Tensor, known: torch.Tensor, positions: torch.Tensor | None) -> Any:
        """A model of text alone: a prompt in chunks, or a token."""
        count = ids.shape[1]
        if positions is None:
            positions = torch.arange(past, past + count).expand(self.sizes.rows, -1)
        size = 1 if count == 1 else self.chunk
        found: Any = None
        for at in range(0, count, size):
            tokens = min(size, count - at)
            given = decoder_inputs(self.sizes, size)
            given["input_ids"][:, :tokens] = ids[:, at : at + tokens]
            given["position_ids"][:, :tokens] = positions[:, at : at + tokens]
            given["attention_mask"][:, : past + count] = known
            given["start"].fill_(past + at)
            given["last"].fill_(tokens - 1)
            found = self.steps(**given)
        return found

    def _said(self, past: int, ids: torch.Tensor, known: torch.Tensor) -> Any:
        """An encoder with a decoder: token by token."""
        assert self.first is not None, "asked by the caller"
        assert self.source is not None, "generate begins with the encoder"
        source, mask = self.source
        if source.shape[1] > self.sizes.source or self.sizes.rows % source.shape[0]:
            what = f"{source.shape[0]} sources of {source.shape[1]} tokens; the generator is for {self.sizes.rows} "
            what += f"sequences, and sources of up to {self.sizes.source}"
            raise ShardwiseError(problem(what, fix="another batch_size= or source_length="))
        times = self.sizes.rows // source.shape[0]
        found: Any = None
        for at in range(past, past + ids.shape[1]):
            given = token_inputs(self.sizes, first=at == 0)
            given["attention_mask"][:, : source.shape[1]] = mask.repeat_interleave(times, 0)
            given["decoder_input_ids"][:] = ids[:, at - past, None]
            given["decoder_attention_mask"][:, : known.shape[1]] = known
            given["start"].fill_(at)
            if at == 0:
                given["input_ids"][:, : source.shape[1]] = source.repeat_interleave(times, 0)
            found = (self.steps if at else self.first)(**given)
        return found


# Of generate, or of a generation's configuration: what would call the model in another way.
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


def _front(model: Any, generation: _TextGeneration) -> Any:
    """A copy of ``model`` without values, whose passes are those of ``generation``."""
    kind: Any = type(model)
    translates = generation.first is not None

    def forward(
        self: Any,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        **others: Any,
    ) -> Any:
        cache = others.pop(CACHE, None)
        if translates:
            input_ids, attention_mask = (
                others.pop("decoder_input_ids", None),
                others.pop("decoder_attention_mask", None),
            )
            others.pop("encoder_outputs", None)
        wanted = sorted(k for k, v in others.items() if v is not None and k not in _UNDERSTOOD)
        wanted += ["logits_to_keep"] if others.get("logits_to_keep") not in (None, 0, 1) else []
        if input_ids is None or not isinstance(cache, _CacheHandle) or wanted:
            own = "the generator takes tokens and has one cache: no other pass beside it, as guidance_scale makes"
            what = f"the generator does not know {wanted}" if wanted else own
            raise ShardwiseError(problem(what, fix="leave it out, or generate on one device"))
        logits = generation.logits(cache, input_ids, attention_mask, position_ids)
        made: Any = Seq2SeqLMOutput if translates else CausalLMOutputWithPast
        return made(logits=logits, **{CACHE: cache})

    def generate(self: Any, inputs: Any = None, **settings: Any) -> Any:
        config = settings.get("generation_config") or self.generation_config
        wanted = {name: settings.get(name, getattr(config, name, None)) for name in _REFUSED}
        named = sorted(name for name, value in wanted.items() if value is not None and value is not False)
        if named:
            what = f"the generator has no {', '.join(named)}: it takes a prompt, then token by token"
            raise ShardwiseError(problem(what, fix="leave it out, or generate on one device"))
        generation.begin(settings.get("input_ids", inputs), settings)
        return kind.generate(self, inputs, **settings)

    def prepare_cache(self: Any, config: Any, model_kwargs: dict[str, Any], *others: Any, **more: Any) -> None:
        if config.use_cache is False or model_kwargs.get(CACHE) is not None:
            raise ShardwiseError(problem("the generator keeps a cache of its own", fix="leave the cache out"))
        model_kwargs[CACHE] = _CacheHandle(generation)

    def read_source(self: Any, ids: torch.Tensor, model_kwargs: dict[str, Any], *others: Any) -> dict[str, Any]:
        """Where transformers would run the encoder: that is done with the first token."""
        mask = model_kwargs.get("attention_mask")
        generation.source = ids, torch.ones_like(ids) if mask is None else mask.to(torch.int64)
        model_kwargs["encoder_outputs"] = BaseModelOutput(last_hidden_state=torch.zeros(len(ids), 1, 1))
        return model_kwargs

    front = copy.deepcopy(model)
    front.config.use_cache = front.generation_config.use_cache = True  # the Trainer turns it off
    members: dict[str, Any] = {
        "forward": forward,
        "generate": generate,
        "_prepare_cache_for_generation": prepare_cache,
        "device": property(lambda self: generation.par.device),
    }
    if translates:
        members["forward"] = functools.wraps(kind.forward)(forward)  # generate asks which arguments it knows
        members["_maybe_prepare_encoder_kwargs_for_generation"] = read_source
    front.__class__ = type(kind.__name__, (kind,), members)
    return front.eval()


_OF_TOKENS = (StaticLayer, StaticSlidingWindowLayer)
_UNDERSTOOD = ("return_dict", "use_cache", "cache_position", "logits_to_keep")

__all__ = ["generator"]
