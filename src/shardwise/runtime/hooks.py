"""Carry hooks of the original module's parameters over to shards, and warn about hooks of modules.

A parameter's hook sees the same as on one device: the whole gradient (or parameter), gathered if it is sharded. Its
result is sharded again. Every rank runs it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn
from torch.optim import optimizer as optimizers

from shardwise.errors import CaptureWarning, ModelAttributeError, PlanWarning, ShardwiseError, listed, warn_user
from shardwise.layouts.layout import Layout
from shardwise.runtime.communicator import Communicator
from shardwise.runtime.local_shards import shard

MARKS = "marks_values"  # marks hooks that only annotate layouts
_FORWARD = ("_forward_hooks", "_forward_pre_hooks")
_BACKWARD = ("_backward_hooks", "_backward_pre_hooks")


def watch_optimizers(hook: Callable[..., None]) -> None:
    """Call a hook before the steps of all optimizers, unless it is called already. A kept process forgets hooks."""
    if hook not in optimizers._global_optimizer_pre_hooks.values():
        optimizers.register_optimizer_step_pre_hook(hook)


def foreign_wrapper_error(wrapper: str) -> ShardwiseError:
    """Return the error for another tool's parallel wrapper around a parallel module."""
    return ShardwiseError(
        f"{wrapper} around a parallel module would reduce shards as if they were whole tensors",
        fix='plan with mode="data_parallel" or a mesh with a data axis; backward returns reduced gradients',
    )


class ShardedModule(nn.Module):
    """A module that stands for an original one on ranks and holds shards under its names. Its other attributes are
    captured in programs and cannot be changed here."""

    _attributes: frozenset[str] = frozenset()  # the names that the module has

    def __getattr__(self, name: str) -> Any:
        """Return a number or text of the original module, as programs have it. Raises ModelAttributeError for its
        methods, and for the ``module`` of other tools' wrappers."""
        own = vars(self)
        if self._holds(name):
            return super().__getattr__(name)
        if name in own.get("_constants", ()):
            return own["_constants"][name]
        if name in own.get("_attributes", ()) and name not in _OF_MODULES:
            raise ModelAttributeError(
                f"{name} is an attribute of the {own['_kind']} that was parallelized, and only its forward is planned",
                fix=f"let forward do it, chosen by a flag: par(x, {name}=True); or call it on the original module",
            )
        if name == "module" and "_kind" in own:
            raise ModelAttributeError(
                f"there is no module inside: this is the parallel {own['_kind']} itself",
                fix="leave .module out: parameters and submodules have the names of the original",
            )
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "__class__":  # as torch's fully_shard does
            raise foreign_wrapper_error(value.__name__)
        if name in self._attributes and not self._holds(name):
            raise ShardwiseError(
                f"{name} is an attribute of the {self._kind} that was parallelized; programs keep its old value",
                fix="pass values that change between steps as inputs, or write them to a buffer (fill_, copy_); "
                "change the model before sw.plan and sw.parallelize",
            )
        if isinstance(value, nn.Module):  # torch calls register_parameter for parameters, but no hook for modules
            self._announce_new(name)
        super().__setattr__(name, value)

    def stand_for(self, module: nn.Module) -> None:
        """Take the module's mode, and from now on refuse changes of its attributes that ranks would not see."""
        self.training, self._kind = module.training, type(module).__name__
        self._attributes = (frozenset(dir(module)) - _OF_MODULES) | {"forward"}
        self._constants = {
            name: value
            for name, value in vars(module).items()
            if name in self._attributes and isinstance(value, bool | int | float | str | torch.dtype)
        }
        self._class, train = type(module), getattr(module.train, "__func__", None)
        self._trains_itself = train is not nn.Module.train

    def add_module(self, name: str, module: nn.Module | None) -> None:
        self._announce_new(name)
        super().add_module(name, module)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        self._announce_new(name)
        super().register_parameter(name, param)

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        self._announce_new(name)
        super().register_buffer(name, tensor, persistent)

    def _announce_new(self, name: str) -> None:
        """Warn about a tensor or module added after construction, which no program uses."""
        if vars(self).get("_kind") and not self._holds(name):
            warn_user(
                f"{name} was added to the stand-in of a {self._kind}: it is never called and gets no gradient; "
                "change the model before sw.plan and sw.parallelize",
                PlanWarning,
            )

    def _holds(self, name: str) -> bool:
        attributes = vars(self)
        tables = [attributes.get(table, ()) for table in ("_parameters", "_buffers", "_modules")]
        return name in attributes or any(name in table for table in tables)


_OF_MODULES = frozenset(dir(nn.Module()))


class _ClassProxy:
    """A mixin whose instances also pass ``isinstance`` checks for another class."""

    @property
    def __class__(self) -> type[Any]:
        kind: type[Any] = vars(self).get("_class", type(self))
        return kind

    @__class__.setter
    def __class__(self, kind: type[Any]) -> None:  # as torch's fully_shard does
        raise foreign_wrapper_error(kind.__name__)


class Shards(_ClassProxy, ShardedModule):
    """A submodule of a parallel module: it holds shards under their names and is never called. For ``isinstance`` it
    has the class of the model's submodule."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _empty_shards, (), vars(self)

    def train(self, mode: bool = True) -> Self:
        """Set the mode. Raises ShardwiseError if a submodule of the model overrides ``train``."""
        for part in self.modules():
            if isinstance(part, ShardedModule) and part._trains_itself:
                what = f"{part._kind} overrides train(), which its stand-in does not run"
                raise ShardwiseError(what, fix="call train() or eval() of the parallel module")
        return super().train(mode)

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        what = "a submodule of a parallel module only holds shards: it cannot be called, and its hooks would not fire"
        fix = "call the parallel module; register hooks on the model before sw.plan and sw.parallelize"
        raise ShardwiseError(what, fix=fix)

    forward = _refuse
    register_forward_hook = _refuse
    register_forward_pre_hook = _refuse
    register_full_backward_hook = _refuse
    register_full_backward_pre_hook = _refuse
    register_backward_hook = _refuse


def _empty_shards() -> Shards:
    return Shards.__new__(Shards)


def announce_hooks(module: nn.Module) -> None:
    """Warn about module hooks, which act differently than on one device. Those with ``MARKS`` are for capture."""
    for kinds, what in (
        (
            _FORWARD,
            "forward hooks of {} never fire on ranks: they ran during capture, and only their tensor computations "
            "are part of the program",
        ),
        (_BACKWARD, "backward hooks of {} never fire under a plan: their changes of gradients are lost"),
    ):
        names = [
            path or type(owner).__name__
            for path, owner in module.named_modules()
            if any(not hasattr(hook, MARKS) for kind in kinds for hook in (vars(owner).get(kind) or {}).values())
        ]
        if names:
            warn_user(what.format(listed(names)), CaptureWarning)


def carry_hooks(original: Tensor, part: Tensor, layout: Layout, name: str, ranks: Communicator) -> None:
    """Register the hooks of a parameter on this rank's shard of it."""
    if not part.requires_grad:
        return
    on_gradient: Any = original._backward_hooks or {}
    on_accumulated: Any = getattr(original, "_post_accumulate_grad_hooks", None) or {}
    whole = not layout.positions
    # A step is one autograd node, with None as gradient of a parameter that the outputs do not depend on. On one device
    # no hook is called then.
    reached = [False]

    def note(gradient: Tensor | None) -> None:
        reached[0] = gradient is not None

    if on_gradient or on_accumulated:
        part.register_hook(note)
    for hook in on_gradient.values():
        run = hook if whole else partial(_with_whole_gradient, hook, layout, name, ranks)
        part.register_hook(lambda gradient, run=run: run(gradient) if reached[0] else None)
    for hook in on_accumulated.values():
        run = hook if whole else partial(_with_whole_parameter, hook, layout, name, ranks)
        part.register_post_accumulate_grad_hook(lambda part, run=run: run(part) if reached[0] else None)


def gather_whole(local: Tensor, layout: Layout, what: str, ranks: Communicator) -> Tensor:
    """Gather the whole tensor from its shards in ``layout``; all ranks call this."""
    coordinates = [ranks.mesh.coordinates(rank) for rank in range(ranks.mesh.num_devices)]
    index = torch.arange(torch.Size(layout.shape).numel(), device=local.device).reshape(layout.shape)
    places = [shard(index, layout, at).reshape(-1) for at in coordinates]
    full = local.new_empty(index.numel())
    rows = ranks.gather_flat(local.detach().reshape(-1), [place.numel() for place in places], what)
    for place, row in zip(places, rows, strict=True):
        full[place] = row
    return full.reshape(layout.shape)


def _with_whole_gradient(
    hook: Callable[[Tensor], Tensor | None], layout: Layout, name: str, ranks: Communicator, gradient: Tensor
) -> Tensor | None:
    new = hook(gather_whole(gradient, layout, f"the hook of {name}", ranks))
    return None if new is None else shard(new, layout, ranks.coordinates).contiguous()


def _with_whole_parameter(
    hook: Callable[[Tensor], None], layout: Layout, name: str, ranks: Communicator, part: Tensor
) -> None:
    what = f"the hook of {name}"
    full = nn.Parameter(gather_whole(part, layout, what, ranks))
    full.grad = None if part.grad is None else gather_whole(part.grad, layout, what, ranks)
    hook(full)
    with torch.no_grad():
        part.copy_(shard(full, layout, ranks.coordinates))
    part.grad = None if full.grad is None else shard(full.grad, layout, ranks.coordinates).clone()
