"""Text generation by a model that is split over ranks: two programs, whatever the lengths.

Keys and values of the tokens so far are buffers of a module of our own (``_Step``), of a fixed length, split as the
plan says: a rank holds those of its heads, or samples. One program takes a chunk of a prompt, one takes a token. The
last chunk of a prompt is filled up on the right: what that writes lies behind all tokens, where the causal mask hides
it, until tokens that come later take its place.

transformers' own ``generate`` does the rest: it sees a model with a cache of a kind it does not know (``_Held``).
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from transformers.cache_utils import Cache, StaticCache, StaticLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

from shardwise.api import plan as make_plan
from shardwise.errors import ShardwiseError, problem
from shardwise.plans.plan import Plan
from shardwise.runtime.parallel import Parallel
from shardwise.runtime.parallelize import parallelize
from shardwise.runtime.shards import shard
from shardwise.train.agreement import here
from shardwise.transformers.one_process import check_same

# Factors of products and tables, as their rules name them: of which the program that takes one token has 1, and of
# which it has as many as there are samples.
_TOKENS, _SAMPLES = {"b1"}, {"b", "b0", "m"}


def generator(par: Parallel, *, batch_size: int, max_length: int, chunk: int = 64) -> Any:
    """A model whose ``generate`` is that of transformers, computed by the ranks of ``par``; called on every rank.

    ``par``: of a decoder-only transformers model, perhaps with adapters of peft. Its parameters are shared, so that
    what training changes is generated with. ``batch_size``: the sequences of a call, no more and no fewer.
    ``max_length``: the most tokens of a sequence, prompt and padding included. ``chunk``: the tokens of a prompt that
    one pass takes.

    Every rank calls ``generate`` with the same prompts and settings, and gets the same tokens: those of one device,
    for greedy decoding and for sampling (seed torch alike on all ranks). Search with beams is refused.

    Raises ShardwiseError for models whose caches are of another kind: encoders and decoders, sliding windows, states.
    """
    original: Any = par.original
    model: Any = original.get_base_model() if hasattr(original, "get_base_model") else original
    length = -(-max_length // chunk) * chunk
    _check_kind(model, length)
    step = _Step(copy.deepcopy(original), model.config.get_text_config(), batch_size, length).eval()
    step.requires_grad_(False)
    chosen = _planned(step, par, batch_size, length) if here()[0] == 0 else None
    own = dict(par.named_buffers())
    _check_whole(original, own)
    empty = {*dict(step.named_parameters()), *dict(step.named_buffers(recurse=False))}

    def value(name: str, tensor: torch.Tensor) -> Any:
        found = own.get(name.removeprefix("model."))
        if found is not None:
            return found.detach().to("cpu", copy=True)
        if name in empty:
            return torch.zeros(tensor.shape, dtype=tensor.dtype)  # parameters become those of par; caches begin empty
        return NotImplemented  # what the model computes for itself: frequencies, say

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        steps = parallelize(step, chosen, init=value, device=par.device)
    assert isinstance(steps, Parallel), "a plan without stages"
    return _front(model, _Generation(par, steps, batch_size, max_length, length, chunk))


def _check_kind(model: Any, length: int) -> None:
    """Raise ShardwiseError for models whose caches are not keys and values of all tokens."""
    if not hasattr(model, "generate") or model.config.is_encoder_decoder:
        what = f"{type(model).__name__} is no decoder of text"
        raise ShardwiseError(problem(what, fix="generate on one device, from what sw.save_pretrained writes"))
    layers = StaticCache(config=model.config.get_text_config(), max_cache_len=length).layers
    others = sorted({type(layer).__name__ for layer in layers if type(layer) is not StaticLayer})
    if others:
        what = f"{type(model).__name__} has caches of another kind ({', '.join(others)}) than keys and values"
        raise ShardwiseError(problem(what, fix="generate on one device, from what sw.save_pretrained writes"))


def _check_whole(model: Any, own: dict[str, torch.Tensor]) -> None:
    """Raise ShardwiseError for a buffer of which ``own``, this rank's, has a part only."""
    split = sorted(name for name, buffer in model.named_buffers() if name in own and own[name].shape != buffer.shape)
    if split:
        what = f"the plan splits the buffer {split[0]}, which a generator takes whole"
        raise ShardwiseError(problem(what, fix=f"plan with it whole: layouts={{{split[0]!r}: ...}}"))


class _Step(torch.nn.Module):
    """A model and what it knows of the tokens so far: the logits behind some more of them."""

    def __init__(self, model: torch.nn.Module, config: Any, batch_size: int, length: int) -> None:
        super().__init__()
        self.model, self.config, self.length = model, config, length
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
        for layer in range(config.num_hidden_layers):
            for kind in ("keys", "values"):
                empty = torch.empty(batch_size, heads, length, width, dtype=dtype, device="meta")
                self.register_buffer(f"{kind}_{layer}", empty, persistent=False)

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
        cache = StaticCache(config=self.config, max_cache_len=self.length)
        for number, layer in enumerate(cache.layers):
            assert isinstance(layer, StaticLayer), "another kind was refused"
            layer.keys, layer.values = getattr(self, f"keys_{number}"), getattr(self, f"values_{number}")
            layer.dtype, layer.device = layer.keys.dtype, layer.keys.device
            layer.cumulative_length = start.clone()
            layer.is_initialized = True
        output = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=True,
        )
        logits: torch.Tensor = output.logits.index_select(1, last)[:, 0]
        return logits


def _inputs(batch_size: int, tokens: int, length: int, device: Any = None) -> dict[str, torch.Tensor]:
    """Arguments of a step, all zeros."""
    shapes = {
        "input_ids": (batch_size, tokens),
        "attention_mask": (batch_size, length),
        "position_ids": (batch_size, tokens),
        "start": (),
        "last": (1,),
    }
    return {name: torch.zeros(shape, dtype=torch.int64, device=device) for name, shape in shapes.items()}


def _planned(step: _Step, par: Parallel, batch_size: int, length: int) -> Plan:
    """Parameters stay where they are, the products over them are split as in training, and the rest follows: in a first
    plan the caches are whole, and it says how they are used; in the second they are kept so."""
    mesh = par.plan.mesh
    modules = {name for name, _ in step.model.named_modules()}
    single = _TOKENS | (_SAMPLES if batch_size == 1 else set())
    strategies = {}
    for entry in par.plan.operators:
        path = entry.name.rpartition("/")[0]
        if path in modules and entry.target.split(".")[1] in ("linear", "embedding", "addmm") and entry.strategy:
            kept = [split for split in entry.strategy.split() if split.partition("@")[0] not in single]
            if kept:
                strategies[f"model.{path}"] = " ".join(kept)
    layouts: dict[str, Any] = {f"model.{p.name}": p.layout for p in par.plan.parameters}
    inputs = _inputs(batch_size, 1, length)
    settings: dict[str, Any] = {
        "mesh": mesh,
        "strategies": strategies,
        "search": "sharding_propagation",
        "precision": par.plan.precision,
        "bucket_bytes": par.plan.bucket_bytes,
    }
    first = make_plan(step, inputs, mesh.num_devices, layouts=layouts, **settings)
    caches = {name for name, _ in step.named_buffers(recurse=False)}
    used = {c.value: c.target for c in first.conversions if c.value in caches}
    return make_plan(step, inputs, mesh.num_devices, layouts={**layouts, **used}, **settings)


class _Held(Cache):
    """To transformers, a cache: it knows how many tokens there are. The rest is in the ranks' parts."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.num_tokens = 0

    @property
    def is_compileable(self) -> bool:
        return False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.num_tokens

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        raise ShardwiseError(problem("beams are not searched on ranks", fix="num_beams=1"))


class _Generation:
    """One model's generation: the cache of transformers' that is under way, and passes over tokens."""

    def __init__(self, par: Parallel, steps: Parallel, batch_size: int, max_length: int, length: int, chunk: int):
        self.par, self.steps = par, steps
        self.batch_size, self.max_length, self.length, self.chunk = batch_size, max_length, length, chunk
        self._known: dict[int, torch.nn.Parameter] = {}  # by the ids of par's parameters

    def begin(self, prompt: Any, settings: dict[str, Any]) -> None:
        """Check what the ranks are asked, and take the parameters and buffers that there are now."""
        fix = "give every rank the same prompts and settings, after torch.manual_seed(...) of one seed"
        asked = prompt, sorted(settings.items()), torch.random.get_rng_state()
        check_same(asked, "other prompts, settings or random numbers", fix)
        for name, parameter in self.par.named_parameters(remove_duplicate=False):
            path, _, leaf = f"model.{name}".rpartition(".")
            table = self.steps.get_submodule(path)._parameters
            held = table[leaf]
            if held is None or held.data_ptr() != parameter.data_ptr():
                table[leaf] = self._shared(parameter)
        buffers, layouts = dict(self.steps.named_buffers()), self.steps.plan.layouts
        with torch.no_grad():
            for name, buffer in self.par.named_buffers():
                if (own := buffers.get(f"model.{name}")) is not None:
                    layout = layouts.get(f"model.{name}")
                    own.copy_(buffer if layout is None else shard(buffer, layout, self.steps.coordinates))

    def _shared(self, parameter: torch.nn.Parameter) -> torch.nn.Parameter:
        """The same memory; one for all names of a tied parameter."""
        found = self._known.get(id(parameter))
        if found is None or found.data_ptr() != parameter.data_ptr():
            found = self._known[id(parameter)] = torch.nn.Parameter(parameter.detach(), requires_grad=False)
        return found

    def logits(self, cache: _Held, ids: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor | None) -> Any:
        """Behind the last of some more tokens, [samples, 1, vocabulary]. ``mask``: of all tokens so far."""
        past, count = cache.num_tokens, ids.shape[1]
        if ids.shape[0] != self.batch_size or past + count > self.max_length:
            what = f"{ids.shape[0]} sequences of {past + count} tokens; the generator is for {self.batch_size} of up to"
            raise ShardwiseError(problem(f"{what} {self.max_length}", fix="another batch_size= or max_length="))
        if past and count > 1:
            what = f"{count} tokens at once behind {past} others"
            fix = "leave out what guesses tokens (prompt_lookup_num_tokens, assistant_model) or prefill_chunk_size"
            raise ShardwiseError(problem(what + ": the generator takes a prompt, then token by token", fix=fix))
        if positions is None:
            positions = torch.arange(past, past + count).expand(self.batch_size, -1)
        known = torch.ones(self.batch_size, past + count, dtype=torch.int64) if mask is None else mask.to(torch.int64)
        size = 1 if count == 1 else self.chunk
        found: Any = None
        for at in range(0, count, size):
            tokens = min(size, count - at)
            given = _inputs(self.batch_size, size, self.length)
            given["input_ids"][:, :tokens] = ids[:, at : at + tokens]
            given["position_ids"][:, :tokens] = positions[:, at : at + tokens]
            given["attention_mask"][:, : past + count] = known
            given["start"].fill_(past + at)
            given["last"].fill_(tokens - 1)
            with torch.no_grad():
                found = self.steps(**given)
        cache.num_tokens += count
        return found[:, None]


def _front(model: Any, generation: _Generation) -> Any:
    """A copy of ``model`` without values, whose passes are those of ``generation``."""
    kind: Any = type(model)

    def forward(
        self: Any,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        **others: Any,
    ) -> CausalLMOutputWithPast:
        wanted = sorted(k for k, v in others.items() if v is not None and k not in _UNDERSTOOD)
        wanted += ["logits_to_keep"] if others.get("logits_to_keep") not in (None, 0, 1) else []
        if input_ids is None or not isinstance(past_key_values, _Held) or wanted:
            what = f"the generator does not know {wanted}" if wanted else "the generator takes tokens and keeps a cache"
            raise ShardwiseError(problem(what, fix="leave it out, or generate on one device"))
        logits = generation.logits(past_key_values, input_ids, attention_mask, position_ids)
        return CausalLMOutputWithPast(logits=logits, past_key_values=past_key_values)

    def generate(self: Any, inputs: Any = None, **settings: Any) -> Any:
        generation.begin(settings.get("input_ids", inputs), settings)
        return kind.generate(self, inputs, **settings)

    def prepare_cache(self: Any, config: Any, model_kwargs: dict[str, Any], *others: Any, **more: Any) -> None:
        if config.use_cache is False or model_kwargs.get("past_key_values") is not None:
            raise ShardwiseError(problem("the generator keeps a cache of its own", fix="leave the cache out"))
        model_kwargs["past_key_values"] = _Held()

    front = copy.deepcopy(model)
    front.config.use_cache = front.generation_config.use_cache = True  # the Trainer turns it off
    members = {
        "forward": forward,
        "generate": generate,
        "_prepare_cache_for_generation": prepare_cache,
        "device": property(lambda self: generation.par.device),
    }
    front.__class__ = type(kind.__name__, (kind,), members)
    return front.eval()


_UNDERSTOOD = ("return_dict", "use_cache", "cache_position", "logits_to_keep")

__all__ = ["generator"]
