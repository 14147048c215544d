"""Torch's modules as layers with the reference's arguments. Initial values come from the dialect's generator.

Parameters have the reference's names, which are mostly torch's: ``lstm.weight_ih_l0``,
``attention.in_proj_weight``.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import Signature, signature
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from shardwise.mindspore.common.initializer import initializer
from shardwise.mindspore.common.seed import generator
from shardwise.mindspore.named import TABLES, bound_to, constructor, parameters_of
from shardwise.mindspore.nn.cell import Cell
from shardwise.mindspore.tensor import Parameter


def seeded(make: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> nn.Module:
    """Make a torch module with random numbers from the dialect's generator, so that they are equal on all ranks."""
    seed = int(torch.randint(2**31, (), generator=generator()))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = make(*args, **kwargs)
    for part in module.modules():
        names = {"weight": "gamma", "bias": "beta"} if part is not module and isinstance(part, nn.LayerNorm) else {}
        for name, parameter in part.named_parameters(recurse=False):
            if not isinstance(parameter, Parameter):
                setattr(part, name, Parameter(parameter, names.get(name, name), parameter.requires_grad))
    return module


class Wrapped(Cell):
    """A torch module, made by ``make`` from the reference's arguments."""

    is_wrapper = True
    make: Callable[..., nn.Module]
    __signature__: ClassVar[Signature | None] = None  # for inspect and help; None: that of __init__

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "make" in vars(cls):
            cls.__signature__ = signature(cls.make).replace(return_annotation=Signature.empty)
            type.__setattr__(cls, "__init__", constructor(cls.__init__, cls.__signature__))

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.module = seeded(type(self).make, *args, **kwargs)

    def construct(self, *inputs: Any, **named: Any) -> Any:
        return self.module(*inputs, **named)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the torch module, such as a parameter."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "module" not in vars(self).get("_modules", {}):
                raise
            return getattr(self._modules["module"], name)


_KINDS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")


class _Recurrent(Wrapped):
    """A recurrent layer: ``construct(x, hx=None, seq_length=None)`` returns the outputs and the last state.
    ``seq_length``: length of each row."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        parameters = self.module._parameters  # the reference has all weights of inputs first
        for name in sorted(parameters, key=lambda name: _KINDS.index(name.partition("_l")[0])):
            parameters[name] = parameters.pop(name)

    @property
    def batch_first(self) -> Any:
        return self.module.batch_first

    def construct(self, x: Any, hx: Any = None, seq_length: Any = None) -> Any:
        if seq_length is None:
            return self.module(x, hx)
        if torch.compiler.is_exporting():  # packing needs values
            return _by_steps(self.module, x, hx, seq_length)
        packed = pack_padded_sequence(x, torch.as_tensor(seq_length).long(), self.batch_first, enforce_sorted=False)
        output, state = self.module(packed, hx)
        padded, _ = pad_packed_sequence(output, self.batch_first, total_length=x.shape[1 if self.batch_first else 0])
        return padded, state


def _by_steps(module: Any, x: Any, hx: Any, lengths: Any) -> tuple[Any, Any]:
    """Run a recurrent module step by step over rows of different lengths. After the end of a row its state stays and
    its output is 0."""
    is_lstm, both = module.mode == "LSTM", 2 if module.bidirectional else 1
    step = getattr(torch, f"{module.mode.lower()}_cell")
    rows = x.transpose(0, 1) if module.batch_first else x
    lives = (torch.arange(len(rows)).unsqueeze(1) < lengths).unsqueeze(-1)
    zeros = rows.new_zeros(module.num_layers * both, rows.shape[1], module.hidden_size)
    before = (zeros, zeros) if hx is None and is_lstm else (zeros,) if hx is None else hx if is_lstm else (hx,)
    ends = []
    for layer in range(module.num_layers):
        sides = []
        for side, suffix in enumerate(("", "_reverse")[:both]):
            names = _KINDS[: 4 if module.bias else 2]
            weights = [getattr(module, f"{name}_l{layer}{suffix}") for name in names]
            state = tuple(part[layer * both + side] for part in before)
            outputs = {}
            for t in range(len(rows))[:: -1 if side else 1]:
                new = step(rows[t], state if is_lstm else state[0], *weights)
                new = new if is_lstm else (new,)
                state = tuple(torch.where(lives[t], updated, old) for updated, old in zip(new, state, strict=True))
                outputs[t] = torch.where(lives[t], new[0], 0.0)
            sides.append(torch.stack([outputs[t] for t in range(len(rows))]))
            ends.append(state)
        rows = torch.cat(sides, -1)
        if module.dropout and layer + 1 < module.num_layers:
            rows = F.dropout(rows, module.dropout, module.training)
    last = tuple(torch.stack(parts) for parts in zip(*ends, strict=True))
    return rows.transpose(0, 1) if module.batch_first else rows, last if is_lstm else last[0]


def _filled(module: nn.Module, **inits: Any) -> nn.Module:
    """Initialise parameters of a module again, where ``inits`` are not None."""
    for name, init in inits.items():
        if init is not None:
            parameter = module.get_parameter(name)
            parameter.data.copy_(initializer(init, tuple(parameter.shape), parameter.dtype))
    return module


def _maker(name: str, **fixed: Any) -> Callable[..., nn.Module]:
    """Return a function that makes a torch module of the reference's arguments, which are torch's but for has_bias."""
    kind, order = getattr(nn, name), Signature(parameters_of(TABLES["settings"][f"nn.{name}"].split()))

    def make(*args: Any, **kwargs: Any) -> Any:
        chosen = bound_to(name, order, args, kwargs)
        inner = {name: getattr(value, "module", value) for name, value in chosen.items()}  # of layers of this file
        return kind(**{"bias" if n == "has_bias" else n: value for n, value in inner.items()}, **fixed)

    vars(make)["__signature__"] = order
    return make


_FIXED = {"TransformerEncoder": {"enable_nested_tensor": False}}
WRAPPED: dict[str, Callable[..., nn.Module]] = {
    "BiDense": lambda in1_channels, in2_channels, out_channels, weight_init=None, bias_init=None, has_bias=True,
    dtype=None: _filled(nn.Bilinear(in1_channels, in2_channels, out_channels, has_bias, dtype=dtype),
                        weight=weight_init, bias=bias_init),
    **{name: _maker(name, **_FIXED.get(name, {})) for name in (
        "GRUCell", "LSTMCell", "RNNCell", "MultiheadAttention", "TransformerEncoderLayer", "TransformerDecoderLayer",
        "TransformerEncoder", "TransformerDecoder", "Transformer")},
}  # fmt: skip
RECURRENT = {name: _maker(name) for name in ("GRU", "LSTM", "RNN")}
_DOC = "Torch's module, with the reference's arguments."
CLASSES: dict[str, type[Cell]] = {
    name: type(name, (base,), {"make": staticmethod(make), "__module__": __name__, "__doc__": _DOC})
    for base, table in ((Wrapped, WRAPPED), (_Recurrent, RECURRENT)) for name, make in table.items()
}  # fmt: skip
globals().update(CLASSES)

__all__ = list(CLASSES)
