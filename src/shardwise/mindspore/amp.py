"""Mixed precision, and loss scaling (``loss_scale``)."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.errors import problem
from shardwise.mindspore import loss_scale, nn
from shardwise.mindspore.checks import note, one_of
from shardwise.mindspore.loss_scale import *
from shardwise.mindspore.loss_scale import DynamicLossScaleManager
from shardwise.mindspore.named import bound_to, signature_of
from shardwise.mindspore.nn.wrap import WithLossCell, training_cell

LEVELS = ("O0", "O1", "O2", "O3", "auto")
WHITE = ("Conv1d", "Conv2d", "Conv3d", "Conv2dTranspose", "Dense")  # cells that O1 computes in half precision
BLACK = ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm", "LayerNorm")  # and O2 in float32


def get_white_list() -> list[Any]:
    """Return the cells that O1 computes in half precision."""
    return [getattr(nn, name) for name in WHITE]


def get_black_list() -> list[Any]:
    """Return the cells that O2 computes in float32."""
    return [getattr(nn, name) for name in BLACK]


def auto_mixed_precision(network: Any, amp_level: str = "O0", dtype: torch.dtype = torch.float16) -> Any:
    """Let a network compute in half precision and return it.

    Parameters and their updates keep their precision. Under O2 and O3 the network returns float32.

    Args:
        amp_level: O0: nothing. O1 and auto: convolutions and dense layers, whose results are cast back to float32. O2:
            everything but batch and layer norms. O3: everything.
    """
    one_of(*LEVELS)("amp_level", amp_level)
    if amp_level in ("O1", "auto"):
        return custom_mixed_precision(network, white_list=get_white_list(), dtype=dtype)
    if amp_level == "O2":
        return custom_mixed_precision(network, black_list=get_black_list(), dtype=dtype)
    if amp_level == "O3":
        network.to_float(dtype)._returns = torch.float32
    return network


def custom_mixed_precision(
    network: Any, *, white_list: Any = None, black_list: Any = None, dtype: torch.dtype = torch.float16
) -> Any:
    """Let the cells of ``white_list``'s classes, or all but those of ``black_list``, compute in half precision."""
    if (white_list is None) == (black_list is None):
        what = "custom_mixed_precision takes a white_list or a black_list"
        raise ValueError(problem(what, fix="one of them: white_list=amp.get_white_list()"))
    listed: tuple[Any, ...] = tuple(kind for kind in white_list or black_list or () if isinstance(kind, type))
    if black_list is not None:
        network.to_float(dtype)
    for cell in network.modules():
        if isinstance(cell, listed):
            cell.to_float(torch.float32 if black_list is not None else dtype)
            cell._returns = dtype if black_list is not None else torch.float32
    if black_list is not None:
        network._returns = torch.float32
    return network


def at_level(title: str, network: Any, level: str, settings: dict[str, Any]) -> Any:
    """Apply ``auto_mixed_precision`` with the settings of ``Model`` and ``build_train_network`` beside a level. Under
    O0, O2 and O3 ``cast_model_type`` is the compute dtype, and ``keep_batchnorm_fp32`` keeps batch and layer norms in
    float32. ``boost_level`` is accepted, with a note. Raises TypeError for other settings."""
    defaults = {"keep_batchnorm_fp32": None, "cast_model_type": None, "boost_level": "O0"}
    options = bound_to(title, signature_of(defaults), (), settings)
    if options["boost_level"] != "O0":
        note(f"{title}(boost_level={options['boost_level']!r}) has no effect here: every step is computed in full")
    dtype, keeps = options["cast_model_type"], options["keep_batchnorm_fp32"]
    if level in ("O0", "O2", "O3"):
        dtype = dtype or (torch.float32 if level == "O0" else torch.float16)
        keeps = level == "O2" if keeps is None else keeps
        level = "O0" if dtype == torch.float32 else "O2" if keeps else "O3"
    elif dtype is not None or keeps is not None:
        what = f"{title}(level {level!r}) with cast_model_type or keep_batchnorm_fp32"
        raise ValueError(problem(what, fix=f"neither: {level} lists the cells that compute in half precision"))
    return auto_mixed_precision(network, level, dtype or torch.float16)


def build_train_network(
    network: Any, optimizer: Any, loss_fn: Any = None, level: str = "O0", boost_level: str = "O0", **settings: Any
) -> Any:
    """Return the training cell of a network in mixed precision. ``loss_scale_manager`` defaults to that of the level;
    the other settings are those of ``at_level``."""
    manager = settings.pop("loss_scale_manager", DynamicLossScaleManager() if level == "O2" else None)
    network = at_level("build_train_network", network, level, {"boost_level": boost_level, **settings})
    network = network if loss_fn is None else WithLossCell(network, loss_fn)
    return training_cell(network, optimizer, manager).set_train()


__all__ = ["auto_mixed_precision", "build_train_network", "custom_mixed_precision", "get_black_list", "get_white_list"]
__all__ += loss_scale.__all__
