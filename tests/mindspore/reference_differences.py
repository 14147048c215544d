"""Where the dialect differs from the reference, with reasons: tests refuse every other difference, and every entry
without one. ``make dialect-reference`` writes them into docs/differences.md."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/differences.md"
BEGIN, END = "<!-- differences: make dialect-reference -->", "<!-- end of differences -->"

# -- signatures

# Patterns of "module.name argument" -> why the default is another one.
DEFAULTS = {
    "None is float32 here, the default of torch": ("nn.* dtype", "ops.* dtype"),
    "None is the dtype of the distribution's parameters": ("nn.probability.* dtype",),
    "no seed is given: 0 there, None here": ("*.* seed",),
    "no name is given: objects are named by their class there": ("nn.probability.* name",),
    "None is the group of all ranks": ("*.* group", "*.* group_back"),
    "the same word in capital letters": ("ops.AvgPool pad_mode", "ops.MaxPool3D pad_mode", "ops.stft pad_mode"),
    "what None stands for there": (
        "nn.Moments keep_dims", "nn.TrainOneStepCell sens", "ops.grid_sample align_corners", "ops.nan_to_num nan",
        "ops.topk dim", "mint.* correction", "train.CheckpointConfig append_info",
    ),
    "a number that stands for None there": ("ops.Cross dim", "ops.Logit eps", "ops.avg_pool3d divisor_override"),
    "None is False, as torch has it": ("ops.affine_grid align_corners",),
    "keep_prob and p in one: neither is p = 0.5": ("nn.Dropout keep_prob",),
    "two equal functions": ("nn.LARS lars_filter",),
    "of torch's overloads, one that lacks the argument does the same": (
        "ops.trapz x", "mint.arange *", "mint.argsort stable", "mint.divide rounding_mode",
        "mint.eye m", "mint.mean dim", "mint.median dim", "mint.normal size", "mint.prod dim",
        "mint.randperm generator", "mint.round decimals", "mint.sort stable", "mint.sum dim",
    ),
    "torch's schemas have dtypes as numbers": ("ops.tri?_indices dtype", "mint.randperm dtype"),
    "a call without it is refused, not taken otherwise": (
        "mint.nn.MaxPool2d kernel_size", "train.load_distributed_checkpoint checkpoint_filenames",
    ),
    "each rank keeps its part, and the file says which; whole tensors are gathered where they are asked for": (
        "train.CheckpointConfig integrated_save", "train.save_checkpoint integrated_save",
    ),
}  # fmt: skip
# "module.name" -> why the order, or a name, of positional arguments is another one.
ORDERS: dict[str, tuple[str, ...]] = {
    "arguments that the dialect does not have are skipped, and refused by name": (
        "nn.AvgPool2d", "nn.MaxPool2d", "train.Model", "train.load_checkpoint",
        "train.save_checkpoint",
    ),
    "the arguments of torch's function": ("ops.lstsq", "ops.lu_solve", "ops.poisson"),
    "an argument that older versions had is kept at its place": ("nn.BatchNorm3d", "nn.EmbeddingLookup"),
    "the words of older versions, in the same order": (
        "nn.Roll", "ops.GridSampler2D", "ops.GridSampler3D", "ops.Im2Col", "ops.Roll", "ops.UniqueConsecutive",
        "ops.float_power", "ops.ger", "ops.heaviside", "ops.outer",
        "ops.swapdims", "ops.tile",
        "ops.transpose", "ops.true_divide", "ops.unique_consecutive", "train.RunContext",
        "train.restore_group_info_list", "train.rearrange_inputs",
    ),
    "settings of every cell there, which do not change what it computes": ("mint.nn.Mish", "mint.nn.SELU"),
}  # fmt: skip

# -- results

# How a recorded call begins (in ``reference_values.tsv``) -> why its result or its gradient is another one.
VALUES: dict[str, tuple[str, ...]] = {
    "the reference's kernel for CPUs ignores `use_nesterov`": (
        "steps(nn.Momentum, 0.1, 0.9, weight_decay=0.1, use_nesterov=True)",
    ),
    "the reference's kernel for CPUs departs from the documented formula where `l1` is not 0": (
        "steps(nn.FTRL, learning_rate=0.1, l1=0.1",
    ),
    "the reference's kernel for CPUs has another gradient, or none; here it is the derivative": (
        "ops.Mod()(r(2, 3), pos", "ops.iou(", "ops.IOU(", "net(lambda: nn.SeLU", "ops.selu(", "ops.SeLU(",
        "ops.ReduceProd()",
        "ops.StridedSlice(begin_mask", "mnp.fliplr(r(2, 3))",
        "net(lambda: nn.EmbeddingLookup(6, 3))(", "ops.EmbeddingLookup()(",
    ),
    "labels have no gradient there, and that of logits holds for labels of sum 1; here both are the derivatives": (
        "net(lambda: nn.SoftmaxCrossEntropyWithLogits())(", "net(lambda: nn.KLDivLoss",
        "ops.SigmoidCrossEntropyWithLogits(",
    ),
    "the gradient by a weight is 0 there; here it is refused": (
        "F.binary_cross_entropy(unit(2, 3), unit(2, 3), pos", "ops.binary_cross_entropy(unit(2, 3), unit(2, 3), pos",
        "ops.NLLLoss", "ops.cross_entropy(r(2, 3), i(3, 2), pos(3), label", "ops.nll_loss(r(4, 3)",
    ),
    "the reference's kernel for CPUs does not broadcast the weight": (
        "ops.binary_cross_entropy(unit(2, 3), unit(2, 3), weight=pos(3))",
    ),
    "the reference leaves out what flows through mean and variance": (
        "ops.LayerNorm()(",
    ),
    "an assignment is not differentiated": (
        "ops.AssignAdd(", "ops.AssignSub(", "ops.assign_add(", "ops.assign_sub(", "ops.scatter_update(",
        "ops.scatter_max(",
    ),
    "numpy computes with a constant there; here the tensor keeps its gradient": (
        "np.arange(4)",
    ),
    "the statistics and scales lie in an inner cell `bn2d` there": (
        "net(lambda: nn.SequentialCell(nn.BatchNorm3d",
    ),
    "acosh below 1, which has no value: its gradient is NaN there": (
        "ops.acosh(r",
    ),
    "dtypes are torch's": (
        "ops.DType(", "ops.dtype(",
    ),
    "the second result of torch counts otherwise; both are intermediate values": (
        "ops.ctc_loss(",
    ),
    "vectors of a decomposition are given but for their signs": (
        "ops.svd(",
    ),
    "a number becomes int64 there": (
        "ops.full((2, 3), 1.5)",
    ),
    "torch's dtype of windows, counts and powers": (
        "ops.hann_window(2)", "ops.kaiser_window(2)", "ops.bincount(i", "mnp.float_power(", "mnp.ceil(i",
    ),
    "torch's dtype or shape of the second result": (
        "ops.adaptive_max_pool3d(", "ops.MaxPoolWithArgmax(2)",
    ),
    "results that are not asked for are left out": (
        "ops.UniqueConsecutive()",
    ),
    "torch's result for a matrix: its diagonal": (
        "ops.diag(r(2, 3))", "ops.Diag()(",
    ),
    "the dims of torch's function": (
        "ops.Im2Col(2)", "ops.batch_dot(r(2, 3), r(2, 3))",
    ),
}  # fmt: skip


def names_of(reason_entries: tuple[str, ...]) -> str:
    return ", ".join(f"`{entry}`" for entry in reason_entries)


def table() -> str:
    """Return the differences as a table: what differs, where, and why."""
    rows = ["| differs | where | why |", "|---|---|---|"]
    for what, entries in (
        ("default", DEFAULTS),
        ("order or name of arguments", ORDERS),
        ("result or gradient", VALUES),
    ):
        for reason, names in entries.items():
            rows.append(f"| {what} | {names_of(tuple(dict.fromkeys(map(short, names))))} | {reason} |")
    return "\n".join(rows)


def short(entry: str) -> str:
    """Return the name in a call: ``nn.SeLU`` of ``net(lambda: nn.SeLU())(r(2, 3))``."""
    found = re.match(r"(?:net\(lambda: |steps\(|nn\.SequentialCell\()*([\w.]+)(?=[(,)])", entry)
    return found.group(1) if found else entry.replace("|", "\\|")


def page(written: str) -> str:
    before, _, rest = written.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
