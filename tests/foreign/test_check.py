"""``sw.check``: right plans of other tools are proven, wrong ones are refuted at the operator that is wrong."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel
from torch.nn import functional as F

import shardwise as sw
from raising import raises
from shardwise.foreign import rank_threads
from shardwise.foreign.inferred_layout import infer_layout
from shardwise.foreign.rank_threads import on_ranks

transformers = pytest.importorskip("transformers.distributed.tensor_parallel")
pytestmark = pytest.mark.filterwarnings("ignore")

WIDTH, HEAD = 16, 4


class Block(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.before, self.between, self.fused = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), fused
        if fused:
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        else:
            self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out, self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.before(x)
        parts = self.qkv(y).chunk(3, -1) if self.fused else (self.q(y), self.k(y), self.v(y))
        q, k, v = (part.unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.drop(self.out(mixed))
        return x + self.down(F.gelu(self.up(self.between(x))))


class Net(nn.Module):
    def __init__(self, fused: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(fused) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def net(fused: bool = False) -> Net:
    torch.manual_seed(0)
    return Net(fused)


def batch(samples: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(samples, 8, WIDTH, generator=generator), torch.randint(8, (samples, 8), generator=generator)


def megatron() -> dict[str, Any]:
    columns = {f"layers.*.{name}": ColwiseParallel() for name in ("q", "k", "v", "up")}
    return {**columns, "layers.*.out": RowwiseParallel(), "layers.*.down": RowwiseParallel()}


def llama(**fields: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64, "use_cache": False}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    return LlamaForCausalLM(LlamaConfig(**{**small, **heads, **fields}))


def texts() -> dict[str, torch.Tensor]:
    ids = torch.randint(64, (4, 8), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def check(*args: Any, **kwargs: Any) -> Any:
    return sw.check(*args, beside=False, **kwargs)


@pytest.mark.parametrize("tied", [False, True])
def test_the_plan_that_ships_with_llama_is_proven(tied: bool) -> None:
    report = check(llama(tie_word_embeddings=tied), texts(), "auto", 2)
    assert report.ok, report
    assert {d.kind for d in report.differences} == {"loss", "output", "gradient", "buffer", "parameter"}
    assert 0 < report.max_error < 1e-12


def test_heads_that_do_not_divide_stop_at_their_view() -> None:
    report = check(llama(), texts(), "auto", 4)  # two heads of keys on four ranks
    assert report.verdict == "wrong"
    assert "k_proj" in str(report.first_wrong.operands) or "q_proj" in str(report.first_wrong.operands)
    assert "modeling_llama.py" in report.first_wrong.source


@pytest.mark.parametrize(
    ("change", "where", "found"),
    [
        ({"lm_head": "colwise"}, "view", "in no layout"),
        ({"model.norm": "replicated_with_grad_allreduce"}, "the gradient of model.norm.weight", "2 times that"),
        ({"model.norm": "all_reduce"}, "", ""),
        ({"model.layers.*.mlp.down_proj": "rowwise_split_input"}, "", ""),
    ],
)
def test_wrong_styles_of_transformers_are_refuted(change: dict[str, str], where: str, found: str) -> None:
    model = llama()
    report = check(model, texts(), {**model._tp_plan, **change}, 2)
    assert report.verdict == "wrong", report
    if where:
        assert where in report.first_wrong.what
        assert found in report.first_wrong.found


def test_a_base_model_plan_is_read_for_a_model_with_a_head_and_unused_rules_are_named() -> None:
    model = llama()
    plan = {**model.config.base_model_tp_plan, "layers.*.mlp.upp_proj": "colwise"}
    report = check(model, texts(), plan, 2)
    assert report.ok
    assert report.plan.unused == ("model.layers.*.mlp.upp_proj",)
    assert "rules that name nothing: model.layers.*.mlp.upp_proj" in str(report)


@pytest.mark.parametrize("config", ["transformers", "accelerate"])
@pytest.mark.sampled(1)
def test_data_and_tensor_parallelism_together(config: str) -> None:
    if config == "transformers":
        from transformers.distributed.configuration_utils import DistributedConfig

        plan: Any = DistributedConfig(tp_size=2, fsdp_size=2)
    else:
        plan = pytest.importorskip("accelerate").ParallelismConfig(tp_size=2, dp_shard_size=2)
    report = check(llama(), texts(), plan, 4)
    assert report.ok, report
    assert any("output [1]: f64[4@" in line for line in report.layouts)


def mixtral() -> Any:
    import transformers as tf

    torch.manual_seed(0)
    fields = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 1, "use_cache": False}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    return tf.MixtralForCausalLM(tf.MixtralConfig(**fields, **heads))


def config_of_experts(**settings: Any) -> Any:
    from transformers.distributed.configuration_utils import DistributedConfig

    return DistributedConfig(ep_size=2, **settings)


def test_tokens_that_travel_between_fsdp_ranks_are_proven() -> None:
    report = check(mixtral(), texts(), config_of_experts(fsdp_size=2), 2)
    assert report.ok, report


@pytest.mark.long
def test_fsdp_that_divides_twice_in_float64_is_refuted_where_the_model_is_in_float64() -> None:
    report = check(mixtral().double(), texts(), config_of_experts(fsdp_size=2), 2)
    assert report.verdict == "wrong", report


@pytest.mark.long
@pytest.mark.parametrize("implementation", ["all_to_all", "all_reduce", "no sum", "no gradient of the others"])
def test_experts_of_transformers_beside_its_tp_plan(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.distributed import expert_parallel as ep

    forgotten = {"no sum": "_AllReduceForward", "no gradient of the others": "_AllReduceBackward"}.get(implementation)
    if forgotten:
        monkeypatch.setattr(ep, forgotten, type("", (), {"apply": staticmethod(lambda x, group: x)}))
    named = "all_reduce" if forgotten else implementation
    report = check(mixtral(), texts(), config_of_experts(tp_size=2, ep_implementation=named), 2)
    assert report.verdict == ("wrong" if forgotten else "equal"), report
    if forgotten:
        assert "model.layers.0.mlp" in report.first_wrong.what, report


def test_plans_of_parallelize_module() -> None:
    assert check(net(), batch(), megatron(), 2).ok
    report = check(net(), batch(), megatron(), 4, mesh=sw.Mesh(dp=2, tp=2))  # nobody reduces over dp
    assert report.verdict == "wrong"
    assert report.first_wrong.found == "f64[8] partial(avg@dp)"  # of head.bias
    assert "nothing averages their gradients" in report.first_wrong.hint


def test_a_star_is_one_part_of_a_path_as_torch_reads_it() -> None:
    with raises(sw.ShardwiseError, "*.up", "*.down", facts=["there is"]):
        check(net(), batch(), {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()}, 2)
    report = check(net(), batch(), {"*.[01].up": ColwiseParallel(), "layers.?.down": RowwiseParallel()}, 2)
    assert report.ok
    assert not report.plan.unused
    wrapped: list[str] = []

    def note(model: nn.Module, **_: Any) -> None:
        wrapped.append(type(model).__name__)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardwise.foreign.tools.fully_shard", note)
        check(net(), batch(), {"fully_shard": ["layers.*"]}, 2)
    assert sorted(set(wrapped)) == ["Block", "Net"]


def test_a_style_that_torch_refuses_for_a_module_is_wrong_and_blames_no_operator() -> None:
    report = check(net(), batch(), {**megatron(), "layers.*.before": ColwiseParallel()}, 2)
    assert (report.verdict, report.first_wrong) == ("wrong", None)
    assert "ColwiseParallel at 'layers.*.before'" in str(report)


def test_operands_are_in_the_layouts_in_which_they_are_read() -> None:
    plan = {**megatron(), "layers.*.down": RowwiseParallel(output_layouts=Shard(-1))}
    report = check(net(), batch(), plan, 2)  # reduced and scattered before it is added
    assert report.first_wrong.what == "layers.0/add"
    assert report.first_wrong.operands == (
        ("layers.0/add", "f64[4, 8, 16]"),
        ("layers.0.down/linear", "f64[4, 8, 16@tp]"),
    )
    assert not report.first_wrong.hint


def test_attention_of_transformers_is_the_models_own_code() -> None:
    report = check(llama(num_key_value_heads=4), texts(), {"model.layers.*.self_attn.q_proj": "colwise"}, 2)
    assert report.first_wrong.what == "model.layers.0.self_attn/scaled_dot_product_attention"
    assert report.first_wrong.operands[0] == ("model.layers.0.self_attn/add", "f64[4, 4@tp, 8, 8]")


def test_sequence_parallel_regions_are_proven_where_they_are_whole_and_refuted_where_not() -> None:
    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            y = self.down(F.gelu(self.up(self.norm(x))))
            return F.cross_entropy(y.flatten(0, 1), labels.flatten())

    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Replicate()),
    }
    torch.manual_seed(0)
    whole = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1))
    report = check(Mlp(), batch(), {**plan, "norm": whole}, 2)
    # Now the norm's parameters are plain, and every rank has half of the sequence.
    assert report.verdict == "wrong"
    assert "norm" in str(report)
    assert check(Mlp(), batch(), {"up": ColwiseParallel(), "down": RowwiseParallel()}, 2).ok


def test_a_fused_projection_in_contiguous_columns_is_wrong_where_it_is_cut() -> None:
    plan = {name: style for name, style in megatron().items() if name[-1] not in "qkv"}
    report = check(net(fused=True), batch(), {**plan, "layers.*.qkv": ColwiseParallel()}, 2)
    assert report.first_wrong.what == "the result of layers.0/chunk"
    assert report.first_wrong.source.startswith("test_check.py:")
    assert report.first_wrong.operands == (("layers.0.qkv/linear", "f64[4, 8, 48@tp]"),)


def test_a_missing_row_split_is_named_with_what_it_reads() -> None:
    plan = megatron()
    del plan["layers.*.down"]
    report = check(net(), batch(), plan, 2)
    assert report.verdict == "wrong"
    assert report.first_wrong.what == "layers.0.down/linear"
    assert report.first_wrong.operands == (("layers.0/gelu", "f64[4, 8, 64@tp]"),)


def split_by_hand(reduces_forward: bool, reduces_backward: bool) -> Any:
    """The MLP by hand, with or without one of its two exchanges."""

    class Forward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            x = x.clone()
            if reduces_forward:
                dist.all_reduce(x)
            return x

        @staticmethod
        def backward(ctx: Any, cotangent: torch.Tensor) -> torch.Tensor:
            return cotangent

    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, cotangent: torch.Tensor) -> torch.Tensor:
            cotangent = cotangent.clone()
            if reduces_backward:
                dist.all_reduce(cotangent)
            return cotangent

    def apply(model: nn.Module, mesh: DeviceMesh) -> None:
        rank, size = mesh.get_local_rank(), mesh.size()
        for layer in model.layers:
            layer.up.weight = nn.Parameter(layer.up.weight.detach().chunk(size)[rank].clone())
            layer.up.bias = nn.Parameter(layer.up.bias.detach().chunk(size)[rank].clone())
            layer.down.weight = nn.Parameter(layer.down.weight.detach().chunk(size, 1)[rank].clone())
            layer.down.bias = None
            layer.up.register_forward_pre_hook(lambda _, args: (Backward.apply(args[0]),))
            layer.down.register_forward_hook(lambda _, args, output: Forward.apply(output))

    return apply


def without_bias() -> Net:
    model = net()
    for layer in model.layers:
        layer.down = nn.Linear(64, WIDTH, bias=False)
    return model


def test_a_plan_by_hand_is_proven_and_each_of_its_exchanges_is_missed() -> None:
    right = check(without_bias(), batch(), split_by_hand(True, True), 2)
    assert right.ok, right
    assert "gradient layers.0.up.weight: f64[64@tp, 16]" in right.layouts
    forward = check(without_bias(), batch(), split_by_hand(False, True), 2)
    assert forward.first_wrong.what == "the result of layers.0/add"
    assert dict(forward.first_wrong.operands)["layers.0.down/linear"] == "f64[4, 8, 16] partial(sum@tp)"
    assert "reduce it before" in forward.first_wrong.hint
    backward = check(without_bias(), batch(), split_by_hand(True, False), 2)
    assert backward.first_wrong.what.startswith("the gradient of layers.1.between.")
    assert backward.first_wrong.found == "f64[16] partial(sum@tp)"


def test_fsdp_settings_and_a_mean_over_padding() -> None:
    report = check(net(), batch(), {"fully_shard": ["layers.*"]}, 2)
    assert report.ok, report
    assert check(net(), batch(), {"fully_shard": []}, 4, mesh=sw.Mesh(dp_replicate=2, dp_shard=2)).ok
    x, labels = batch()
    labels[:2, 2:] = -100  # the mean of the ranks' means is not the mean over the tokens that count
    assert check(net(), (x, labels), {"fully_shard": []}, 2).verdict == "wrong"


def test_statistics_of_a_part_of_the_batch_are_found() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    inputs = torch.randn(8, 8), torch.randn(8, 8)
    report = check(model, inputs, {"fully_shard": []}, 2, loss=F.mse_loss)
    assert report.first_wrong.what == "the result of 1/batch_norm"
    assert {d.name for d in report.differences if d.kind == "buffer" and d.error > 1e-3} >= {"1.running_mean"}


def test_logits_that_nobody_gathers_are_found_at_the_loss() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 6))
    inputs = torch.randn(4, 8), torch.randint(3, (4,))
    plan = {"0": ColwiseParallel(output_layouts=Replicate()), "2": ColwiseParallel()}
    report = check(model, inputs, plan, 2, loss=F.cross_entropy)
    assert report.verdict == "wrong"
    assert report.first_wrong.source == "loss="
    assert report.first_wrong.operands == (("2/linear", "f64[4, 6@tp]"),)


def test_a_process_group_of_the_caller_is_back_afterwards(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        assert check(net(), batch(), megatron(), 2).ok
        assert (dist.get_backend(), dist.get_world_size()) == ("gloo", 1)
        dist.all_reduce(torch.ones(1))
    finally:
        dist.destroy_process_group()


def test_ranks_at_different_exchanges_are_an_answer_and_leave_nothing_behind() -> None:
    def apply(model: nn.Module, mesh: DeviceMesh) -> None:
        if mesh.get_local_rank() == 0:
            model.norm.register_forward_hook(lambda _, args, output: (dist.all_reduce(output.detach()), output)[1])
        else:
            model.norm.register_forward_hook(
                lambda _, args, output: (dist.broadcast(output.detach(), src=0), output)[1]
            )

    report = check(net(), batch(), apply, 2)
    assert "different exchanges" in str(report.failure)
    assert not dist.is_initialized()
    assert check(net(), batch(), megatron(), 2).ok


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        ({"modle.layers": "colwise"}, ("LlamaForCausalLM", "modle.layers")),
        ({"model.norm": "colwize"}, "no style colwize"),
        ({"fully_shard": ["nothing.*"]}, ("nothing", "fully_shard")),
        ({"fully_shard": [], "reshard": True}, "no setting reshard"),
        ({"fully_shard": 3}, "fully_shard is 3"),
        ({"fully_shard": [1]}, "fully_shard is"),
        ({"model.norm": "colwise", "lm_head": ColwiseParallel()}, ("model.norm", "lm_head")),
        ({"lm_head": ColwiseParallel}, ("'lm_head'", "ColwiseParallel", "ColwiseParallel()")),
        ({"lm_head": 3}, "'lm_head' is 3"),
        (17, "17 is not a plan of a known tool"),
        (torch.ones(2), ("tensor([1., 1.])", "is not a plan of a known tool")),
        ({"format": "shardwise-plan"}, "a plan of shardwise, not of another tool"),
    ],
)
def test_bad_plans_are_one_sentence_and_the_mend(plan: Any, says: object) -> None:
    with raises(sw.ShardwiseError, says, "fix:"):
        check(llama(), texts(), plan, 2)


def test_a_mesh_without_the_axis_that_a_plan_needs_is_refused_at_once() -> None:
    for plan, mesh, what in (
        (megatron(), sw.Mesh(dp=2), "tensor"),
        ({"fully_shard": "layers.*"}, sw.Mesh(tp=2), "data"),
    ):
        with raises(sw.ShardwiseError, "no axis", f"{what} parallelism"):
            check(net(), batch(), plan, 2, mesh=mesh)
    assert check(net(), batch(), {"fully_shard": "layers.*"}, 2).ok


def test_what_cannot_be_run_is_said() -> None:
    def apply(model: nn.Module, mesh: DeviceMesh) -> None:
        raise NotImplementedError("needs a GPU")

    report = check(net(), batch(), apply, 2)
    assert (report.verdict, report.ok) == ("not run", False)
    with raises(sw.ShardwiseError, "meta tensors", fix="real batch"):
        check(net(), tuple(t.to("meta") for t in batch()), megatron(), 2)
    with raises(sw.ShardwiseError, "3 samples", "into 2", fix="multiple of 2"):
        check(net(), batch(3), {"fully_shard": []}, 2)


def test_the_price_stands_beside_that_of_our_own_plan() -> None:
    report = sw.check(net(), batch(), megatron(), 2)
    # Of each of two blocks: two sums forward, and one backward of each of four column splits, over the residual stream.
    assert report.beside.messages.count == 2 * (2 + 4)
    assert report.beside.messages.num_bytes == 2 * (2 + 4) * 4 * 8 * WIDTH * 4
    assert report.beside.own.prediction.step_seconds > 0
    assert "under the plan of sw.plan" in str(report)


@pytest.mark.parametrize(("devices", "cluster"), [(2, "h100-1x2"), (12, "h100-2x6"), (16, "h100-2x8")])
def test_a_step_is_priced_for_as_many_devices_as_are_checked(devices: int, cluster: str) -> None:
    report = sw.check(nn.Linear(4, 4), torch.randn(48, 4), {"fully_shard": []}, devices, loss=lambda y: y.mean())
    assert report.ok, report
    assert report.beside.cluster == cluster


@pytest.mark.parametrize("draw", [torch.rand_like, torch.randn_like, lambda x: torch.rand(x.shape)])
def test_a_model_that_draws_is_noted(draw: Callable[[torch.Tensor], torch.Tensor]) -> None:
    class Noisy(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            return y + 0.1 * draw(y)

    report = sw.check(Noisy(4, 4), torch.randn(8, 4), {"fully_shard": []}, 2, loss=lambda y: y.mean(), beside=False)
    assert any("draws random numbers" in note for note in report.notes), report


def test_layouts_are_seen_in_numbers() -> None:
    mesh, whole = sw.Mesh(dp=2, tp=2), torch.randn(8, 12, dtype=torch.float64)
    rows, columns = whole.chunk(2, 0), whole.chunk(2, 1)
    cases = {
        "f64[8, 12]": [whole] * 4,
        "f64[8, 12@tp]": [*columns, *columns],
        "f64[8@dp, 12]": [rows[0], rows[0], rows[1], rows[1]],
        "f64[8@(dp,tp), 12]": list(whole.chunk(4, 0)),
        "f64[8, 12] partial(sum@tp)": [whole * 0.25, whole * 0.75] * 2,
    }
    for text, held in cases.items():
        assert str(infer_layout(whole, held, mesh, 1e-9)) == text
    fused = [torch.cat([part[:, i * 2 : i * 2 + 2] for part in whole.chunk(3, 1)], 1) for i in (0, 1)]
    assert str(infer_layout(whole, [*fused, *fused], mesh, 1e-9)) == "f64[8, (3 4@tp)]"
    assert infer_layout(whole, [whole, whole, whole, whole + 1], mesh, 1e-9) is None


def test_an_error_on_one_rank_ends_the_others() -> None:
    def body(rank: Any) -> None:
        if rank.rank == 1:
            raise ValueError("rank 1 stops")
        dist.all_reduce(torch.ones(1))

    found = on_ranks(sw.Mesh(tp=2), body)
    assert [type(rank.error) for rank in found] == [type(None), ValueError]


def test_ranks_that_were_interrupted_take_no_part_in_what_comes_next(monkeypatch: pytest.MonkeyPatch) -> None:
    arrived, go, left = threading.Event(), threading.Event(), list[threading.Thread]()

    def stuck(rank: Any) -> None:
        if rank.rank == 1:
            left.append(threading.current_thread())
            arrived.set()
            go.wait()
            dist.all_reduce(torch.full((1,), 100.0))

    def interrupted(threads: list[threading.Thread], _: Any) -> None:
        threads[0].join()
        arrived.wait()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(rank_threads, "_wait", interrupted)
        patch.setattr(rank_threads, "STALLED_SECONDS", 0.0)
        with pytest.raises(KeyboardInterrupt):
            on_ranks(sw.Mesh(tp=2), stuck)

    def body(rank: Any) -> float:
        x = torch.ones(1)
        if rank.rank == 0:
            go.set()
            left[0].join(60.0)
        dist.all_reduce(x)
        return x.item()

    assert [rank.result for rank in on_ranks(sw.Mesh(tp=2), body)] == [2.0, 2.0]
    assert not left[0].is_alive()
