"""Long import paths of the reference: path there -> path here."""

from __future__ import annotations

import sys
from importlib import import_module

HERE = "shardwise.mindspore"
WAYS = ("c_transforms", "py_transforms", "transforms")
_OF = {  # path here -> paths there
    "compiling": "common.api common.jit_config nn.utils", "tensor": "common.parameter common.tensor",
    "dataset": "dataset.engine",
    "dataset.transforms": " ".join(f"dataset.transforms.{kind}" for kind in WAYS),
    "dataset.vision": " ".join(f"dataset.vision.{kind}" for kind in (*WAYS, "utils")),
    "mint": "experimental", "mint.optim": "experimental.optim", "mint.lr_scheduler": "experimental.optim.lr_scheduler",
    "nn.cell": "nn.cell", "nn.learning_rates": "nn.dynamic_lr nn.learning_rate_schedule",
    "nn": "nn.layer nn.layer.basic nn.layer.conv nn.layer.pooling nn.optim", "nn.activations": "nn.layer.activation",
    "nn.norms": "nn.layer.normalization", "nn.loss": "nn.loss.loss", "train.metrics": "nn.metrics",
    "nn.adaptive": "nn.optim.adam", "nn.optimizer": "nn.optim.momentum nn.optim.optimizer",
    "nn.wrap": "nn.wrap.cell_wrapper nn.wrap.loss_scale", "nn.grad_reducer": "nn.wrap.grad_reducer",
    "ops": "ops.auto_generate", "ops.functions": "ops.function", "ops.communication": "ops.operations.comm_ops",
    "layout": "parallel.shard", "parallel._utils": "parallel._auto_parallel_context parallel._cost_model_context",
    "dataset.records": "mindrecord", "amp": "train.amp train.loss_scale_manager",
    "train.callback": "train.callback._callback", "train.model": "train.dataset_helper",
    "profiling": "profiler profiler.profiling", "train.recording": "train.summary",
}  # fmt: skip
PATHS = {path: target for target, paths in _OF.items() for path in paths.split()}


def install() -> None:
    """Make these paths importable."""
    for path, target in PATHS.items():
        module = import_module(f"{HERE}.{target}")
        sys.modules.setdefault(f"{HERE}.{path}", module)
        parent, _, leaf = path.rpartition(".")
        vars(sys.modules[f"{HERE}.{parent}".rstrip(".")]).setdefault(leaf, module)  # import parent.leaf as name
