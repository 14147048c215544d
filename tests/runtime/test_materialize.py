"""Full initial values: equal to eager construction bit for bit, whatever the plan, with bounded memory."""

from __future__ import annotations

import copy
import math
import random
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from raising import raises
from shardwise.errors import ShardwiseError
from shardwise.runtime.initial.deferred import deferred as deferred_in_any_way
from shardwise.runtime.initial.materialize import full_tensors, stable_seed

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from gpt import GPT, GPTConfig

deferred = partial(deferred_in_any_way, values="cpu")  # what ranks draw by parts: tests/runtime/test_initial_parts.py


def eager_values(build: Callable[[], nn.Module], seed: int) -> dict[str, torch.Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = build()
    return {name: tensor.detach() for name, tensor in [*module.named_parameters(), *module.named_buffers()]}


def assert_same_as_eager(build: Callable[[], nn.Module], seed: int = 3) -> nn.Module:
    expected = eager_values(build, seed)
    before = torch.get_rng_state()
    with deferred(seed):
        module = build()
    assert all(tensor.is_meta for tensor in [*module.parameters(), *module.buffers()])
    names = []
    for name, tensor in full_tensors(module):
        names.append(name)
        assert not tensor.is_meta
        assert (tensor.dtype, tensor.stride()) == (expected[name].dtype, expected[name].stride()), name
        assert torch.equal(tensor, expected[name]), name
    assert sorted(names) == sorted(expected)
    assert torch.equal(torch.get_rng_state(), before)
    return module


# ------------------------------------------------------------------------------------------------- modules of torch

TORCH_MODULES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(5, 7),
    "embedding": lambda: nn.Embedding(9, 4, padding_idx=2),
    "layer_norm": lambda: nn.LayerNorm(5),
    "rms_norm": lambda: nn.RMSNorm(5),
    "conv2d": lambda: nn.Conv2d(3, 8, 3),
    "channels_last": lambda: nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last),
    "batch_norm": lambda: nn.BatchNorm2d(4),
    "attention": lambda: nn.MultiheadAttention(8, 2),
    "lstm": lambda: nn.LSTM(4, 6, 2, bidirectional=True),
    "bilinear": lambda: nn.Bilinear(3, 4, 5),
    "deep_copies": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3),
    "transformer": lambda: nn.Transformer(8, 2, 1, 1, 16, batch_first=True),
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 5)),
    "spectral_norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 5)),
    "orthogonal": lambda: nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)),
    "half": lambda: nn.Linear(4, 5).to(torch.float16),
    "moved_to_cpu": lambda: nn.Linear(4, 5).to("cpu").to(device="cpu", dtype=torch.float64),
}


@pytest.mark.parametrize("build", TORCH_MODULES.values(), ids=TORCH_MODULES.keys())
def test_a_module_of_torch_has_the_values_of_eager_construction(build: Callable[[], nn.Module]) -> None:
    assert_same_as_eager(build)


INITIALISERS: dict[str, Callable[[torch.Tensor], object]] = {
    "trunc_normal_that_rejects_often": lambda w: nn.init.trunc_normal_(w, std=1.0, a=-0.5, b=2.0),
    "trunc_normal_by_uniform_candidates": lambda w: nn.init.trunc_normal_(w, std=1.0, a=2.0, b=2.4),
    "trunc_normal": lambda w: nn.init.trunc_normal_(w, std=0.02),
    "orthogonal": nn.init.orthogonal_,
    "sparse": lambda w: nn.init.sparse_(w, 0.3),
    "dirac": lambda w: nn.init.dirac_(w.unsqueeze(2)),
    "eye": nn.init.eye_,
    "kaiming_normal": nn.init.kaiming_normal_,
    "data_normal": lambda w: w.data.normal_(0, 0.3),
    "transposed": lambda w: w.data.t().normal_(),
    "rows": lambda w: [row.normal_() for row in w.data],
    "data_replaced": lambda w: setattr(w, "data", torch.rand(6, 6).cumsum(0)),
    "copied": lambda w: w.data.copy_(torch.tensor([[1.0, 2, 3, 4, 5, 6]]).expand(6, 6)),
    "copied_from_outside": lambda w: w.data.copy_(torch.frombuffer(bytearray(range(36)), dtype=torch.uint8).view(6, 6)),
    "out": lambda w: torch.linspace(0, 1, 36, out=w.data.view(-1)),
    "bernoulli": lambda w: w.data.copy_(torch.bernoulli(torch.full((6, 6), 0.3))),
    "where": lambda w: w.data.copy_(torch.where(torch.rand(6, 6) < 0.5, torch.randn(6, 6), torch.zeros(6, 6))),
    "masked": lambda w: w.data.masked_fill_(torch.rand(6, 6) < 0.5, 0.5),
    "indexed": lambda w: w.data.__setitem__(torch.tensor([1, 3]), 0.25),
    "selected": lambda w: w.data[0, : int((torch.randn(6) > 0).sum())].zero_(),
    "foreach": lambda w: torch._foreach_mul_([w.data, w.data[:2]], 2.0),
    "sampled_index": lambda w: w.data[torch.randperm(6)[:3]].normal_(),
    "permuted": lambda w: w.data.copy_(w.data[torch.randperm(6)]),
    "multinomial": lambda w: w.data[0].copy_(torch.multinomial(torch.rand(6), 6, replacement=True)),
    "ragged": lambda w: w.data.masked_scatter_(w.data > 0, torch.arange(float((w.data > 0).sum()))),
    "nonzero": lambda w: w.data.view(-1)[: len((torch.randn(30) > 0).nonzero())].fill_(2.0),
    "as_numpy": lambda w: w.data.mul_(float(torch.rand(3).numpy().sum())),
    "half_way": lambda w: w.data.copy_(torch.randn(6, 6, dtype=torch.float16)),
    "complex": lambda w: w.data.copy_(torch.view_as_complex(torch.randn(6, 6, 2)).abs()),
    "resized": lambda w: w.data.copy_(torch.empty(0).resize_(6, 6).uniform_()),
}


class Dense(nn.Module):
    """A weight of [6, 6] and a draw after its initialiser, which shows what that did to the generator."""

    def __init__(self, initialise: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))
        with torch.no_grad():
            initialise(self.weight)
        self.after = nn.Parameter(torch.randn(3))


@pytest.mark.parametrize("initialise", INITIALISERS.values(), ids=INITIALISERS.keys())
def test_an_initialiser_has_the_values_of_eager_construction(initialise: Callable[[torch.Tensor], object]) -> None:
    assert_same_as_eager(lambda: Dense(initialise))


# ---------------------------------------------------------------------------------------------------- hand-written


class Oddities(nn.Module):
    """Python that looks at values, buffers of all kinds, and changes of the generator."""

    def __init__(self) -> None:
        super().__init__()
        rates = [rate.item() for rate in torch.linspace(0, 0.3, 4)]
        assert rates == pytest.approx([0, 0.1, 0.2, 0.3])
        assert torch.linspace(0, 0.3, 4).tolist() == rates
        self.scale = nn.Parameter(torch.ones(4) * rates[3])
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))
        self.register_buffer("causal", torch.tril(torch.ones(5, 5, dtype=torch.bool)).view(1, 1, 5, 5))
        self.register_buffer("positions", torch.arange(7).expand(1, -1), persistent=False)
        self.register_buffer("frequencies", 1.0 / 10000 ** (torch.arange(0, 8, 2).float() / 8))
        self.register_buffer("untouched", torch.empty(3).zero_())
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(11)
            self.fixed = nn.Parameter(torch.randn(4))
        self.first = nn.Linear(4, 4)
        state = torch.get_rng_state()
        self.second = nn.Linear(4, 4)
        torch.set_rng_state(state)
        self.again = nn.Linear(4, 4)  # equals second
        generator = torch.Generator().manual_seed(5)
        self.own = nn.Parameter(torch.randn(4, generator=generator))
        self.more = nn.Parameter(torch.randn(4, generator=generator))
        self.last = nn.Linear(4, 4) if torch.rand(()) < 2 else None
        assert self.first.weight.device.type == "cpu"
        assert not self.first.weight.is_meta
        if bool(self.first.weight.sum() > -1e9):
            self.tied = nn.Linear(4, 4, bias=False)
            self.tied.weight = self.first.weight


def test_values_asked_for_and_generator_changes_are_as_in_eager_construction() -> None:
    module = assert_same_as_eager(Oddities)
    values = dict(full_tensors(module))
    assert torch.equal(values["second.weight"], values["again.weight"])
    assert "tied.weight" not in values


@pytest.mark.parametrize("tied", [False, True])
def test_the_example_gpt_has_the_values_of_eager_construction(tied: bool) -> None:
    config = GPTConfig(layers=2, heads=2, width=16, context=8, tied=tied)
    assert_same_as_eager(lambda: GPT(config))


def test_the_default_dtype_at_construction_counts() -> None:
    def build() -> nn.Module:
        torch.set_default_dtype(torch.float64)
        try:
            return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
        finally:
            torch.set_default_dtype(torch.float32)

    assert_same_as_eager(build)
    assert torch.get_default_dtype() is torch.float32


def test_uninitialised_memory_is_zero_on_every_rank() -> None:
    with deferred():
        module = nn.ParameterList([nn.Parameter(torch.empty(3)), nn.Parameter(torch.empty_like(torch.ones(2, 2)))])
    assert all(torch.equal(tensor, torch.zeros_like(tensor)) for _, tensor in full_tensors(module))


# ---------------------------------------------------------------------------------------------------- hugging face


def hugging_face_models() -> dict[str, Callable[[], nn.Module]]:
    import transformers as hf

    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    gpt2 = hf.GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=60, n_positions=16, bos_token_id=1, eos_token_id=2)
    llama = hf.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=60)
    bert = hf.BertConfig(**sizes, vocab_size=60)
    vit = hf.ViTConfig(**sizes, image_size=32, patch_size=8)
    return {
        "gpt2": lambda: hf.GPT2LMHeadModel(copy.deepcopy(gpt2)),
        "llama": lambda: hf.LlamaForCausalLM(copy.deepcopy(llama)),
        "bert": lambda: hf.BertForMaskedLM(copy.deepcopy(bert)),
        "vit": lambda: hf.ViTForImageClassification(copy.deepcopy(vit)),
    }


HUGGING_FACE = ["gpt2", "llama", "bert", "vit"]


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_a_hugging_face_model_has_the_values_of_eager_construction(name: str) -> None:
    assert_same_as_eager(hugging_face_models()[name])


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_a_hugging_face_model_on_meta_is_initialised_as_its_own_code_would(name: str) -> None:
    build = hugging_face_models()[name]
    with torch.device("meta"):
        module = build()
    first, second, other = (dict(full_tensors(module, seed)) for seed in (0, 0, 1))
    expected = eager_values(build, 0)
    assert set(first) == set(expected)
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)
    for key, _ in module.named_buffers():
        assert torch.equal(first[key], expected[key]), key
    for key, tensor in expected.items():
        if (
            tensor.numel() > 500
        ):  # the same distribution: GPT-2's residual projections, for one, have a smaller deviation
            assert float(first[key].float().std()) == pytest.approx(float(tensor.float().std()), rel=0.2, abs=1e-6), key
    assert all(tensor.is_meta for tensor in [*module.parameters(), *module.buffers()])


# ------------------------------------------------------------------------------------- after the context has ended


def test_a_cast_or_copy_of_the_finished_module_keeps_its_values() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

    expected = eager_values(build, 0)
    with deferred():
        module = build()
    for changed in (copy.deepcopy(module), copy.deepcopy(module).to(torch.bfloat16), module.to(torch.float64)):
        for name, tensor in full_tensors(changed):
            assert tensor.dtype == changed.state_dict()[name].dtype
            assert torch.equal(tensor, expected[name].to(tensor.dtype)), name


def test_another_seed_gives_the_values_of_that_seed() -> None:
    with deferred(seed=0):
        module = nn.Linear(4, 4)
    expected = eager_values(lambda: nn.Linear(4, 4), 9)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in full_tensors(module, seed=9))


def test_another_seed_is_refused_where_the_constructor_looked_at_random_values() -> None:
    with deferred(seed=0):
        module = nn.Linear(4, 4)
        assert float(module.weight.detach().max()) > 0
    with raises(ShardwiseError, 9, 0, "sw.deferred(seed=9)"):
        next(full_tensors(module, seed=9))


def test_the_callers_generator_is_untouched_between_two_tensors() -> None:
    with deferred():
        module = GPT(GPTConfig(layers=1, heads=2, width=8, context=4))
    alone = dict(full_tensors(module))
    torch.manual_seed(1)
    expected = [torch.rand(()) for _ in alone]
    torch.manual_seed(1)
    for (name, tensor), number in zip(full_tensors(module), expected, strict=True):
        assert torch.equal(tensor, alone[name])
        assert torch.equal(torch.rand(()), number)


def test_any_shard_is_the_slice_of_the_eager_tensor() -> None:
    config = GPTConfig(layers=1, heads=2, width=24, context=8)
    expected = eager_values(lambda: GPT(config), 0)
    with deferred():
        module = GPT(config)
    chooser = random.Random(0)
    for num_ranks in (1, 2, 3, 8):
        for name, tensor in full_tensors(module):
            dim, rank = chooser.randrange(tensor.dim()), chooser.randrange(num_ranks)
            start, end = (tensor.shape[dim] * end // num_ranks for end in (rank, rank + 1))
            shard = tensor.narrow(dim, start, end - start)
            assert torch.equal(shard, expected[name].narrow(dim, start, end - start)), (name, dim, rank)


# ---------------------------------------------------------------------------------------------------------- memory


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of CPU storages that operators made and that still exist."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[torch.multiprocessing.reductions.StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves((out, args)):
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                self.alive[storage._cdata] = (
                    torch.multiprocessing.reductions.StorageWeakRef(storage),
                    storage.nbytes(),
                )
        self.alive = {key: found for key, found in self.alive.items() if not found[0].expired()}
        self.peak = max(self.peak, sum(num_bytes for _, num_bytes in self.alive.values()))
        return out


def layers_of_one_megabyte() -> nn.Module:
    class Layers(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(*(nn.Linear(512, 512, bias=False) for _ in range(40)))
            for layer in self:  # a second pass, as Hugging Face's: nothing of the first may be kept for it
                nn.init.normal_(layer.weight, std=0.02)

    return Layers()


def test_a_replay_holds_a_few_tensors_and_not_the_model() -> None:
    with LiveBytes() as building, deferred():
        module = layers_of_one_megabyte()
    assert building.peak == 0
    with LiveBytes() as replaying:
        count = sum(tensor.numel() for _, tensor in full_tensors(module))
    assert count == 40 * 512 * 512
    assert 2**20 <= replaying.peak <= 3 * 2**20


def test_a_module_on_meta_is_initialised_with_a_few_tensors_in_memory() -> None:
    with torch.device("meta"):
        module = nn.Sequential(*(nn.Linear(512, 512) for _ in range(20)))
    with LiveBytes() as replaying:
        count = sum(1 for _ in full_tensors(module))
    assert count == 40
    assert replaying.peak <= 3 * 2**20


def test_a_tape_is_dropped_with_its_module() -> None:
    import gc
    import weakref

    with deferred() as tape:
        module = nn.Linear(4, 4)
    observer = weakref.ref(tape)
    del tape, module
    gc.collect()
    assert observer() is None


# ------------------------------------------------------------------------------------ modules that are not recorded


def test_real_tensors_are_given_as_they_are() -> None:
    module = nn.Linear(3, 4)
    found = dict(full_tensors(module))
    assert found["weight"].data_ptr() == module.weight.data_ptr()
    assert not found["weight"].requires_grad


def test_a_mixed_module_takes_each_tensor_from_where_it_is() -> None:
    real = nn.Linear(3, 3)
    with deferred(seed=2):
        taped = nn.Linear(3, 3)
    with torch.device("meta"):
        plain = nn.MultiheadAttention(4, 2)  # its own reset also fills its child's bias
    plain.out_proj.weight = nn.Parameter(torch.full((4, 4), 7.0))
    values = dict(full_tensors(nn.ModuleDict({"real": real, "taped": taped, "plain": plain})))
    assert torch.equal(values["real.weight"], real.weight)
    assert torch.equal(values["taped.bias"], eager_values(lambda: nn.Linear(3, 3), 2)["bias"])
    assert torch.equal(values["plain.out_proj.weight"], torch.full((4, 4), 7.0))
    assert torch.equal(plain.out_proj.weight, torch.full((4, 4), 7.0))
    assert 0 < float(values["plain.in_proj_weight"].std()) < 1
    assert dict(full_tensors(taped)).keys() == {"weight", "bias"}  # its link survives


def test_the_values_of_a_meta_module_depend_on_its_path_and_not_on_its_neighbours() -> None:
    def values(**children: nn.Module) -> dict[str, torch.Tensor]:
        return dict(full_tensors(nn.ModuleDict(children)))

    def meta(size: int) -> nn.Module:
        return nn.Linear(size, size, device="meta")

    alone, accompanied = values(b=meta(3)), values(a=meta(5), b=meta(3), c=nn.Linear(2, 2))
    assert torch.equal(alone["b.weight"], accompanied["b.weight"])
    assert not torch.equal(values(x=meta(3))["x.weight"], alone["b.weight"])
    assert stable_seed(0, "layers.0") == 3267655600012413936


def test_tensors_that_nothing_initialises_are_named_all_at_once() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain, self.shift = nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(3))

    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(3, 3), Scale())
    with raises(ShardwiseError, 2, "1.gain, 1.shift", "sw.deferred()"):
        next(full_tensors(module))


def test_init_fills_the_meta_tensors_reproducibly() -> None:
    with torch.device("meta"):
        module = nn.Linear(3, 4)
    before = torch.get_rng_state()
    names: list[str] = []

    def init(name: str, tensor: torch.Tensor) -> None:
        names.append(name)
        tensor.normal_()

    first, second = dict(full_tensors(module, init=init)), dict(full_tensors(module, init=init))
    assert names == ["weight", "bias"] * 2
    assert torch.equal(first["weight"], second["weight"])
    assert torch.equal(torch.get_rng_state(), before)


# --------------------------------------------------------------------------------------------------- what is refused


def test_other_devices_are_refused_with_the_line() -> None:
    with raises(ShardwiseError, "empty", "cuda", source="test_materialize.py"), deferred():
        nn.Linear(3, 3, device="cuda")
    with raises(ShardwiseError, "to", "cuda:0", source="test_materialize.py"), deferred():
        nn.Linear(3, 3).to("cuda:0")
    with raises(ShardwiseError, "cuda", source="test_materialize.py"), deferred():
        nn.Linear(3, 3).cuda()


def test_random_writes_into_tensors_from_outside_are_refused() -> None:
    outside = torch.zeros(3)
    with raises(ShardwiseError, "aten.normal_.default", source="test_materialize.py"), deferred():
        outside.normal_()


def test_meta_tensors_without_values_are_refused_as_operands() -> None:
    outside = torch.empty(3, 3, device="meta")
    with raises(ShardwiseError, "[3, 3]", source="test_materialize.py"), deferred():
        nn.Linear(3, 3).weight.data.copy_(outside)


def test_a_tensor_of_another_context_is_refused() -> None:
    with deferred():
        layer = nn.Linear(3, 3)
    with raises(ShardwiseError, "sw.deferred", source="test_materialize.py"), deferred():
        nn.init.zeros_(layer.weight)


def test_a_large_tensor_changed_after_recording_is_refused() -> None:
    table = torch.zeros(600, 600)
    with deferred():
        module = nn.Embedding(600, 600)
        module.weight.data.copy_(table)
    assert torch.equal(dict(full_tensors(module))["weight"], table)
    table.add_(1)
    with raises(ShardwiseError, "[600, 600]"):
        next(full_tensors(module))


def test_lazy_modules_are_refused() -> None:
    with raises(ShardwiseError, "weight, bias"):
        next(full_tensors(nn.LazyLinear(3)))


def test_the_generator_is_restored_when_construction_fails() -> None:
    before = torch.get_rng_state()

    def build() -> nn.Module:
        nn.Linear(3, 3)
        raise KeyError("no such config")

    with pytest.raises(KeyError), deferred():
        build()
    assert torch.equal(torch.get_rng_state(), before)
    assert nn.Linear(2, 2).weight.device.type == "cpu"
