"""Torch optimizers, called with gradients, and schedules of learning rates. Optimizers update the local tensors of
parameters: whole tensors or shards."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from shardwise import rank
from shardwise.errors import problem
from shardwise.mindspore import calls, context, rank_groups
from shardwise.mindspore.checks import from_on, not_negative, note
from shardwise.mindspore.communication.management import find_group
from shardwise.mindspore.holding import Held, holding_of, own_shard
from shardwise.mindspore.named import SETTINGS, Function, WithSettings, bound_to, classes_of, signature_of
from shardwise.mindspore.ops.composite import HyperMap
from shardwise.mindspore.options import ParallelMode
from shardwise.mindspore.tensor import Parameter, ParameterTuple, Tensor, as_ours

ALONE = (ParallelMode.STAND_ALONE, ParallelMode.HYBRID_PARALLEL)
Rate = Any  # a number, one number per step, or a callable from the step to a number


class Optimizer:
    """Base of optimizers: ``optimizer(gradients)`` updates ``optimizer.parameters``.

    Without groups, parameters whose name contains "beta" or "gamma" do not decay, as in the reference.

    Args:
        learning_rate: a number, a list or tensor with one number per step, or a callable of the step.
        parameters: parameters, or groups as dicts ``{"params": [...], "lr": ..., "weight_decay": ...}``; a further
            ``{"order_params": [...]}`` gives the order of gradients.
        loss_scale: the divisor of gradients.
    """

    state_names: ClassVar[dict[str, str]] = {}  # name of a state -> the reference's name in checkpoints
    decays_all = False  # also parameters named beta or gamma, without groups

    def __init__(
        self, learning_rate: Rate, parameters: Iterable[Any], weight_decay: float = 0.0, loss_scale: float = 1.0
    ) -> None:
        options = context.options()
        if options.enable_parallel_optimizer and options.parallel_mode in ALONE:
            what = f"the parallel optimizer is not supported in {options.parallel_mode} mode"
            raise RuntimeError(problem(what, fix="data_parallel, semi_auto_parallel or auto_parallel"))
        groups = list(parameters)
        if not groups:
            raise ValueError(problem("the optimizer has no parameters", fix="pass net.trainable_params()"))
        order = [p for group in groups if isinstance(group, dict) for p in group.get("order_params", ())]
        self.is_group = isinstance(groups[0], dict)
        if self.is_group:
            groups = [group for group in groups if "order_params" not in group]
        else:
            order = groups
            groups = [{"params": groups}] if self.decays_all else _by_decay(groups, weight_decay)
        self.rates = [_rate(group.get("lr", learning_rate)) for group in groups]
        self.is_group_lr = self.is_group and any("lr" in group for group in groups)
        self.loss_scale, self._steps, self._decay = float(loss_scale), 0, float(weight_decay)
        grouped = [parameter for group in groups for parameter in group["params"]]
        for parameter in grouped:
            if not isinstance(parameter, nn.Parameter):
                what = f"the optimizer got {parameter!r}"
                raise TypeError(problem(what, fix="pass parameters: net.trainable_params()"))
        if order and {*map(id, order)} != {*map(id, grouped)}:
            what = f"order_params has {len(order)} parameters, the groups {len(grouped)}"
            raise ValueError(problem(what, fix="the same ones"))
        self.parameters: Any = ParameterTuple(order or grouped)
        self.param_length = len(self.parameters)
        self.groups: list[dict[str, Any]] = [
            {"params": list(group["params"]), "weight_decay": float(group.get("weight_decay", weight_decay))}
            for group in groups
        ]
        self._torch: torch.optim.Optimizer | None = None
        self._loaded: list[tuple[str, nn.Parameter, str, Held | None]] = []  # loaded states, until the first step

    def build(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        raise NotImplementedError

    def rate_now(self) -> float:
        """Return the learning rate of the first group in the next step."""
        return self.rates[0](self._steps)

    def get_lr(self) -> Any:
        """Return the learning rate of the next step; if groups have their own, a tuple with one per parameter."""
        rates = [Tensor(rate(self._steps), torch.float64) for rate in self.rates]
        return self._of_groups(rates) if self.is_group_lr else rates[0]

    def get_lr_parameter(self, param: Any) -> Any:
        """Return the learning rate of a parameter in the next step; for several parameters, a list."""
        if isinstance(param, (tuple, list)):
            return [self.get_lr_parameter(parameter) for parameter in param]
        if all(parameter is not param for parameter in self.parameters):
            raise ValueError(problem(f"{type(self).__name__} has no {param!r}", fix="one of its parameters"))
        rates = dict(zip(map(id, self.parameters), self._of_groups(self.rates), strict=True))
        return Tensor(rates[id(param)](self._steps), torch.float64)

    @property
    def learning_rate(self) -> Any:
        """Return the learning rate of the next step: a parameter, which may be assigned to; for a schedule, a tensor. A
        rate that is set remains."""
        rate = self.rates[0]
        return rate.parameter if isinstance(rate, _Constant) else Tensor(self.rate_now(), torch.float64)

    @learning_rate.setter
    def learning_rate(self, rate: Rate) -> None:
        self.rates = [_rate(rate)] * len(self.rates)

    global_step = property(lambda self: Tensor([self._steps], torch.int32), doc="The number of steps made, as (1,).")

    # For user-defined optimizers whose ``construct(gradients)`` updates ``self.parameters``.

    def scale_grad(self, gradients: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Divide gradients by ``loss_scale``."""
        return tuple(gradient / self.loss_scale for gradient in gradients)

    def decay_weight(self, gradients: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Add ``weight_decay`` times the parameter to each gradient."""
        decays = self._of_groups([group["weight_decay"] for group in self.groups])
        return tuple(g + decay * p for g, decay, p in zip(gradients, decays, self.parameters, strict=True))

    @property
    def target(self) -> str:
        """Return the device of the states, which is that of their parameters. Setting another one prints a note."""
        return "CPU" if context.settings().device_type == "cpu" else "GPU"

    @target.setter
    def target(self, value: str) -> None:
        if value != self.target:
            note(f'optimizer.target = "{value}" has no effect here: states are on the device of their parameters')

    use_parallel = False  # every rank updates its own shards: there is nothing to send
    map_ = map_reverse = hyper_map = HyperMap()

    def broadcast_params(self, optim_result: Any) -> Any:
        """Return the argument: nothing is sent, and no gradients are fused."""
        return optim_result

    flatten_gradients = broadcast_params

    def _of_groups(self, values: Sequence[Any]) -> tuple[Any, ...]:
        value_by_id = {id(p): value for value, group in zip(values, self.groups, strict=True) for p in group["params"]}
        return tuple(value_by_id[id(parameter)] for parameter in self.parameters)

    def get_weight_decay(self) -> Any:
        """Return the weight decay; for groups, a tuple with one per parameter."""
        return self._of_groups([group["weight_decay"] for group in self.groups]) if self.is_group else self._decay

    weight_decay = property(get_weight_decay)
    # whether each parameter decays, and this rank updates it; and whether the learning rate follows a schedule
    decay_flags = property(lambda self: self._of_groups([group["weight_decay"] > 0 for group in self.groups]))
    optim_filter = property(lambda self: (True,) * len(self.parameters))
    dynamic_lr = property(lambda self: not all(isinstance(rate, _Constant) for rate in self.rates))

    def update_parameters_name(self, prefix: str = "", recurse: bool = True) -> None:
        """Do nothing; kept for programs that call it. States have the names of their parameters."""

    def trainable_params(self) -> list[nn.Parameter]:
        return list(self.parameters)

    def parameters_dict(self) -> dict[str, torch.Tensor]:
        """Return the states by their names in checkpoints."""
        return {name: as_ours(state) for name, (state, _) in self.states().items()}

    def __call__(self, gradients: Sequence[torch.Tensor]) -> bool:
        if len(gradients) != len(self.parameters):
            what = f"{len(gradients)} gradients for {len(self.parameters)} parameters"
            raise ValueError(problem(what, fix="one each, in order"))
        if type(self).construct is not Optimizer.construct:
            with calls.inside(), torch.no_grad():
                self.construct(gradients)
            self._steps += 1
            return True
        optimizer = self._built()
        self._place_loaded()
        for group, rate in zip(optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate(self._steps)
        owners = self._owners()
        for parameter, gradient, owner in zip(self.parameters, gradients, owners, strict=True):
            plain = gradient.as_subclass(torch.Tensor) if owner in (None, rank()) else None
            parameter.grad = plain if plain is None or self.loss_scale == 1.0 else plain / self.loss_scale
        with calls.inside(), torch.no_grad():
            optimizer.step()
        for parameter, owner in zip(self.parameters, owners, strict=True):
            parameter.grad = None
            if owner is not None:
                parameter.data.copy_(rank_groups.broadcast(parameter.detach(), owner, find_group()))
        self._steps += 1
        return True

    def construct(self, gradients: Sequence[torch.Tensor]) -> Any:
        """Run a step, like a call."""
        return self(gradients)

    def _owners(self) -> list[int | None]:
        """Return the rank that updates each parameter and alone keeps its states, for the parallel optimizer in
        data_parallel mode: the rank with the fewest elements so far. None: every rank."""
        options = context.options()
        if not options.enable_parallel_optimizer or options.parallel_mode != ParallelMode.DATA_PARALLEL:
            return [None] * len(self.parameters)
        loads = [0] * options.devices
        owners: list[int | None] = []
        for parameter in self.parameters:
            is_own = getattr(parameter, "layerwise_parallel", False)
            owners.append(None if is_own else (owner := loads.index(min(loads))))
            if not is_own:
                loads[owner] += parameter.numel()
        return owners

    def _built(self) -> torch.optim.Optimizer:
        if self._torch is None:
            self._torch = self.build([{**group, "lr": 0.0} for group in self.groups])
        return self._torch

    def _named_parameters(self) -> dict[str, nn.Parameter]:
        names = [getattr(parameter, "name", None) or "parameter" for parameter in self.parameters]
        return {
            name if names.count(name) == 1 else f"{name}.{place}": parameter
            for place, (name, parameter) in enumerate(zip(names, self.parameters, strict=True))
        }

    def states(self) -> dict[str, tuple[torch.Tensor, nn.Parameter | None]]:
        """Return the states for a checkpoint with their parameters: ``moments.w`` or ``moment1.w``, and so on, and
        ``global_step``."""
        kept: dict[str, tuple[torch.Tensor, nn.Parameter | None]] = {"global_step": (torch.tensor(self._steps), None)}
        for name, parameter in self._named_parameters().items():
            for key, state in self._built().state.get(parameter, {}).items():
                if state is not None:
                    kept[f"{self.state_names.get(key, key)}.{name}"] = torch.as_tensor(state), parameter
        return kept

    def load_states(self, entries: dict[str, torch.Tensor]) -> list[str]:
        """Load the states of a checkpoint by their names. Return the names that were used."""
        taken = ["global_step"] if "global_step" in entries else []
        self._steps = int(entries.get("global_step", self._steps))
        keys, parameters = {name: key for key, name in self.state_names.items()}, self._named_parameters()
        for path, entry in entries.items():
            key, _, name = path.partition(".")
            if name in parameters:
                parameter, key = parameters[name], keys.get(key, key)
                value = entry.detach().as_subclass(torch.Tensor).clone()
                state = int(value) if value.dim() == 0 and not value.is_floating_point() else value.to(parameter.device)
                self._built().state[parameter][key] = state
                self._loaded.append((path, parameter, key, getattr(entry, "held", None)))
                taken.append(path)
        return taken

    def _place_loaded(self) -> None:
        """Shard the loaded states like their parameters, which are split by now."""
        for name, parameter, key, of in self._loaded:
            now = holding_of(parameter)
            if of is not None and of.is_split and of != now:
                here = "whole" if now is None else f"split as {now.layout}"
                what = f"{name} was loaded as a part, split as {of.layout}, and its parameter is {here}"
                fix = "load_distributed_checkpoint(net, files), and give what it returns to the optimizer"
                raise RuntimeError(problem(what, fix=fix))
            state = self._built().state[parameter]
            state[key] = own_shard(state[key], parameter)
        self._loaded = []


def _by_decay(parameters: list[Any], weight_decay: float) -> list[dict[str, Any]]:
    """Return a group of the parameters that decay, and one of the others, if any decays."""
    groups: tuple[list[Any], list[Any]] = [], []
    for parameter in parameters:
        name = getattr(parameter, "name", None) or ""
        groups[weight_decay != 0 and ("beta" in name or "gamma" in name)].append(parameter)
    rated = zip(groups, (weight_decay, 0.0), strict=True)
    return [{"params": group, "weight_decay": decay} for group, decay in rated if group]


class _Constant:
    """A learning rate that is constant until its parameter is assigned to."""

    def __init__(self, value: float) -> None:
        self.parameter = Parameter(torch.tensor(value, dtype=torch.float64), "learning_rate", requires_grad=False)

    def __call__(self, step: int) -> float:
        return float(self.parameter)


def _rate(rate: Rate) -> Callable[[int], float]:
    if isinstance(rate, Iterator):
        rate = list(rate)
    if callable(rate):
        return lambda step: float(rate(step))
    values = np.asarray(rate.detach().cpu() if isinstance(rate, torch.Tensor) else rate, dtype=np.float64)
    if values.ndim == 0:
        return _Constant(not_negative("learning_rate", float(values)))
    listed = values.tolist()
    return lambda step: float(listed[min(step, len(listed) - 1)])


class OfSettings(WithSettings, Optimizer):
    """Base of optimizers whose arguments after ``params`` are those of the class statement. Each is an attribute,
    except the base's: ``learning_rate``, ``weight_decay``, ``loss_scale``."""

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**{"params": ..., **settings} if settings else {})

    def _take(self, values: dict[str, Any]) -> None:
        of_base = {name: values.pop(name) for name in ("learning_rate", "weight_decay", "loss_scale") if name in values}
        Optimizer.__init__(self, parameters=values.pop("params"), **of_base)
        vars(self).update(values)


class _OfMomentum(OfSettings):
    """Base of torch's SGD under two names."""

    dampening: Any = 0.0
    checks: ClassVar = {"momentum": not_negative, "dampening": not_negative}

    def build(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        momentum, dampening = float(self.momentum), float(self.dampening)
        return torch.optim.SGD(groups, momentum=momentum, dampening=dampening, nesterov=self.nesterov)


class Momentum(_OfMomentum, learning_rate=..., momentum=..., weight_decay=0.0, loss_scale=1.0, use_nesterov=False):
    """v = momentum * v + gradient; parameter -= learning_rate * v (with ``use_nesterov``: Nesterov's)."""

    state_names: ClassVar = {"momentum_buffer": "moments"}
    nesterov = property(lambda self: self.use_nesterov)


class SGD(_OfMomentum, **SETTINGS["nn.SGD"]):
    """v = momentum * v + (1 - dampening) * gradient (at first the gradient); parameter -= learning_rate * v, or with
    ``nesterov`` learning_rate * (gradient + momentum * v)."""

    state_names: ClassVar = {"momentum_buffer": "accum"}

    def _settle(self) -> None:
        if self.nesterov and (not self.momentum or self.dampening):
            what = f"nesterov with momentum {self.momentum} and dampening {self.dampening}"
            raise ValueError(problem(what, fix="momentum, no dampening"))


opt_init_args_register = context.jit  # returns a constructor unchanged; the reference records its arguments

# -- learning rates: lists with one number per step (lower-case names), and functions of the step ----------------------


def piecewise_constant_lr(milestone: Sequence[int], learning_rates: Sequence[float]) -> list[float]:
    """Return a list with ``learning_rates[i]`` up to step ``milestone[i]``."""
    if len(milestone) != len(learning_rates):
        what = f"{len(milestone)} milestones for {len(learning_rates)} learning rates"
        raise ValueError(problem(what, fix="one for each"))
    per_step: list[float] = []
    for end, rate in zip(milestone, learning_rates, strict=True):
        if end < len(per_step) or end < 1:
            raise ValueError(problem(f"milestone {end} is not above {len(per_step)}", fix="ascending numbers of steps"))
        per_step += [float(rate)] * (end - len(per_step))
    return per_step


class LearningRateSchedule:
    """Base of learning rates as functions of the step, from 0. Subclasses override ``construct``, which takes a tensor
    (those of this module take a number). A call returns a tensor."""

    def construct(self, global_step: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} does not define construct")

    def __call__(self, global_step: Any) -> Any:
        if type(self).__module__ == __name__:
            return Tensor(self.construct(int(global_step)), torch.float32)
        return self.construct(Tensor(int(global_step), torch.int32))


class _Formula(WithSettings, LearningRateSchedule):
    """The schedule ``function(step, **settings)``."""

    function: Function

    def construct(self, global_step: Any) -> float:
        return float(type(self).function(global_step, **self._chosen()))


def _check_range(schedule: Any) -> None:
    if not 0 <= schedule.min_lr < schedule.max_lr:
        what = f"min_lr is {schedule.min_lr}, max_lr {schedule.max_lr}"
        raise ValueError(problem(what, fix="0 <= min_lr < max_lr"))


CLASSES = classes_of({
    "ExponentialDecayLR": lambda step, *, learning_rate, decay_rate, decay_steps, is_stair=False: (
        learning_rate * decay_rate ** float(step // decay_steps if is_stair else step / decay_steps)),
    "NaturalExpDecayLR": lambda step, *, learning_rate, decay_rate, decay_steps, is_stair=False: (
        learning_rate * math.exp(-decay_rate * (step - (step % decay_steps if is_stair else 0)))),
    "PolynomialDecayLR": lambda step, *, learning_rate, end_learning_rate, decay_steps, power,
    update_decay_steps=False: (learning_rate - end_learning_rate) * (1 - min(step / (
        decay_steps * (max(math.ceil(step / decay_steps), 1) if update_decay_steps else 1)), 1.0)) ** power + (
        end_learning_rate),
    "WarmUpLR": lambda step, *, learning_rate, warmup_steps: learning_rate * min(step, warmup_steps) / warmup_steps,
    "CosineDecayLR": (None, lambda step, *, min_lr, max_lr, decay_steps: min_lr + 0.5 * (max_lr - min_lr) * (
        1 + math.cos(math.pi * (min(step, decay_steps) / decay_steps))), {"_settle": _check_range}),
}, _Formula, __name__)  # fmt: skip


def _by_epoch(name: str, kind: type[Any]) -> Callable[..., list[float]]:
    """Return a schedule over epochs in place of steps, as a function that returns the rates of all steps."""
    names = [setting.replace("_steps", "_epoch") for setting in kind.settings]
    place = next(place for place, setting in enumerate(names) if setting in ("decay_epoch", "warmup_epoch"))
    settings = dict(zip(names, kind.settings.values(), strict=True))
    order = signature_of({**dict.fromkeys((*names[:place], "total_step", "step_per_epoch"), ...), **settings})

    def rates(*args: Any, **kwargs: Any) -> list[float]:
        chosen = bound_to(name, order, args, kwargs)
        for word, value in (("total_step", chosen["total_step"]), ("step_per_epoch", chosen["step_per_epoch"]),
                            ("epochs", chosen[names[place]])):  # fmt: skip
            from_on(word, value, 1)
        rate = kind(*(chosen[setting] for setting in names)).construct
        return [rate(step // chosen["step_per_epoch"]) for step in range(chosen["total_step"])]

    rates.__name__ = rates.__qualname__ = name
    vars(rates)["__signature__"] = order
    return rates


_NAMES = (re.sub("(?<=[a-z])(?=[A-Z])", "_", name).lower().replace("warm_up", "warmup") for name in CLASSES)
LISTS = {name: _by_epoch(name, kind) for name, kind in zip(_NAMES, CLASSES.values(), strict=True)}
globals().update(CLASSES | LISTS)

__all__ = ["SGD", "LearningRateSchedule", "Momentum", "Optimizer", "piecewise_constant_lr", *CLASSES, *LISTS]
