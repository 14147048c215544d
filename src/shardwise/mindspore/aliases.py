"""Long import paths of the reference: path there -> path here."""

from __future__ import annotations

import sys
from importlib import import_module

HERE = "shardwise.mindspore"
PATHS = {
    "common.api": "compiling",
    "common.jit_config": "compiling",
    "common.parameter": "tensor",
    "common.tensor": "tensor",
    "dataset.engine": "dataset",
    "dataset.transforms.c_transforms": "dataset.transforms",
    "dataset.transforms.py_transforms": "dataset.transforms",
    "dataset.transforms.transforms": "dataset.transforms",
    "dataset.vision.c_transforms": "dataset.vision",
    "dataset.vision.py_transforms": "dataset.vision",
    "dataset.vision.transforms": "dataset.vision",
    "dataset.vision.utils": "dataset.vision",
    "experimental": "mint",
    "experimental.optim": "mint.optim",
    "experimental.optim.lr_scheduler": "mint.lr_scheduler",
    "nn.cell": "nn.cell",
    "nn.dynamic_lr": "nn.learning_rates",
    "nn.layer": "nn",
    "nn.layer.activation": "nn.activations",
    "nn.layer.basic": "nn",
    "nn.layer.conv": "nn",
    "nn.layer.normalization": "nn.norms",
    "nn.layer.pooling": "nn",
    "nn.learning_rate_schedule": "nn.learning_rates",
    "nn.loss.loss": "nn.loss",
    "nn.metrics": "train.metrics",
    "nn.optim": "nn",
    "nn.optim.adam": "nn.adaptive",
    "nn.optim.momentum": "nn.optimizer",
    "nn.optim.optimizer": "nn.optimizer",
    "nn.utils": "compiling",
    "nn.wrap.cell_wrapper": "nn.wrap",
    "nn.wrap.grad_reducer": "nn.grad_reducer",
    "nn.wrap.loss_scale": "nn.wrap",
    "ops.auto_generate": "ops",
    "ops.function": "ops.functions",
    "ops.operations.comm_ops": "ops.communication",
    "parallel.shard": "layout",
    "train.amp": "amp",
    "train.callback._callback": "train.callback",
    "train.dataset_helper": "train.model",
    "train.summary": "train.recording",
    "train.loss_scale_manager": "amp",
}


def install() -> None:
    """Make these paths importable."""
    for path, target in PATHS.items():
        module = import_module(f"{HERE}.{target}")
        sys.modules.setdefault(f"{HERE}.{path}", module)
        parent, _, leaf = path.rpartition(".")
        vars(sys.modules[f"{HERE}.{parent}".rstrip(".")]).setdefault(leaf, module)  # import parent.leaf as name
