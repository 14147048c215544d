"""``Cell``: a torch module whose body is ``construct``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, Self

import torch
from torch import nn
from torch.utils import _pytree as pytree

import shardwise as sw
from shardwise.errors import problem
from shardwise.mindspore import calls, engine, planning
from shardwise.mindspore.checks import from_on
from shardwise.mindspore.holding import reference_parameters
from shardwise.mindspore.nn import own_backward
from shardwise.mindspore.nn.optimizer import Optimizer
from shardwise.mindspore.ops.functional import shard
from shardwise.mindspore.ops.primitive import Primitive
from shardwise.mindspore.tensor import Parameter, ParameterTuple
from shardwise.mindspore.tensor_methods import assigned_value, in_words

FLOATS = (torch.float16, torch.bfloat16, torch.float32)  # dtypes of to_float


def _number(name: str, attribute: str) -> Any:
    """Return a property: a number from 0, or None."""

    def assign(self: Any, value: int) -> None:
        vars(self)[attribute] = from_on(name, value, 0)

    return property(lambda self: vars(self).get(attribute), assign)


class Cell(nn.Module):
    """The base of networks: override ``construct`` (or ``forward``). Cells and torch modules may contain each other.

    A cell may define its own backward: ``bprop(self, *inputs, out, dout)`` returns a tuple with a gradient per input of
    ``construct`` (``own_backward``). As in the reference a cell starts in evaluation mode; ``Model.train`` and
    ``set_train`` change it.

    Args:
        auto_prefix: if False, the cell does not lengthen the names of the parameters inside.
        flags: accepted without effect.
    """

    is_wrapper = False  # a wrapper does not lengthen the names of parameters
    casts_parameters = True  # by to_float; False if the operator takes uncast parameters
    _own_backward: type[torch.autograd.Function] | None = None  # set for classes with bprop

    def __init__(self, auto_prefix: bool = True, flags: Any = None) -> None:
        super().__init__()
        self.training = False
        self.is_wrapper = self.is_wrapper or not auto_prefix
        self._stage: int | None = None
        self._float: torch.dtype | None = None
        self._again = False  # recomputed
        self._returns: torch.dtype | None = None  # dtype of floating results in mixed precision

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not hasattr(cls, "bprop"):
            return
        if cls.forward is not Cell.forward:
            fix = "call it construct: bprop cannot replace the gradient of forward"
            raise TypeError(problem(f"{cls.__name__} has a bprop and a forward", fix=fix))
        cls._own_backward = own_backward.function_of(cls)

    def construct(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} defines neither construct nor forward")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return calls.again(self._computed, args, kwargs) if self._again else self._computed(*args, **kwargs)

    def _computed(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = _cast((args, kwargs), self._float)
        with self._parameters_cast():
            if self._own_backward is not None:
                result = own_backward.applied(self, self._own_backward, args, kwargs)
            else:
                with in_words():
                    result = self.construct(*args, **kwargs)
        return _cast(result, self._returns)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if calls.is_outermost():
            if self._is_step(args, kwargs):  # its parts are the outermost calls
                return calls.outside(self.construct(*args, **kwargs))
            return engine.call(self, args, kwargs)
        return super().__call__(*args, **kwargs)

    def _is_step(self, args: Any, kwargs: Any) -> bool:
        """Return whether the cell is a training step: it updates, differentiates, or has nothing to split."""
        if any(isinstance(value, Optimizer) or hasattr(value, "get_by_list") for value in vars(self).values()):
            return True
        return not (args or kwargs or self._parameters or self._modules)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "bprop":
            what = f"bprop is assigned to a {type(self).__name__}"
            raise TypeError(problem(what, fix="define it in the class: def bprop(self, ...)"))
        if isinstance(value, Primitive) and not value.instance_name:
            value.instance_name = name
        if isinstance(value, nn.Module) and not isinstance(value, Cell):
            value.train(self.training)
        if isinstance(value, ParameterTuple) and self._takes(value):
            vars(self).setdefault("_tuples", {})[name] = tuple(parameter.name for parameter in value)
            return
        if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
            tables = (vars(self).get(table, {}) for table in ("_parameters", "_buffers"))
            existing = next((table[name] for table in tables if table.get(name) is not None), None)
            if existing is not None:  # assign to the existing parameter or buffer
                assigned_value(existing, value)
                return
        super().__setattr__(name, value)
        if isinstance(value, Parameter) and value.param_name is None:
            value.param_name = name

    def __getattr__(self, name: str) -> Any:
        tuples = vars(self).get("_tuples", {})
        if name in tuples:  # look them up again: capture replaces the parameters
            return ParameterTuple(getattr(self, parameter_name) for parameter_name in tuples[name])
        return super().__getattr__(name)

    def _takes(self, parameters: ParameterTuple) -> bool:
        """Return whether these are the cell's own parameters. Parameters that belong to no inner cell become its
        own."""
        ids = {id(parameter) for parameter in self.parameters()}
        for p in parameters:
            if id(p) not in ids and p.name and "." not in p.name and not hasattr(self, p.name):
                setattr(self, p.name, p)
        return bool(parameters) and all(self._parameters.get(p.name) is p for p in parameters)

    # Parameters under the reference's names.

    def get_parameters(self, expand: bool = True) -> Iterator[nn.Parameter]:
        """Yield all parameters. From then on they know their names in this cell."""
        for name, parameter in reference_parameters(self, expand).items():
            if isinstance(parameter, Parameter) and len(name) > len(parameter.name):
                parameter.path = name
            yield parameter

    def trainable_params(self, recurse: bool = True) -> list[nn.Parameter]:
        return [parameter for parameter in self.get_parameters(recurse) if parameter.requires_grad]

    def untrainable_params(self, recurse: bool = True) -> list[nn.Parameter]:
        return [parameter for parameter in self.get_parameters(recurse) if not parameter.requires_grad]

    def infer_param_pipeline_stage(self) -> list[nn.Parameter]:
        """Return the parameters that this rank trains: all. Those of other stages are empty once a cell is split."""
        return self.trainable_params()

    def parameters_dict(self, recurse: bool = True) -> dict[str, nn.Parameter]:
        """Return the parameters by their names in checkpoints."""
        return reference_parameters(self, recurse)

    def parameters_and_names(self) -> Iterable[tuple[str, nn.Parameter]]:
        return self.parameters_dict().items()

    def update_parameters_name(self, prefix: str = "", recurse: bool = True) -> None:
        """Add a prefix to the names of all parameters."""
        for parameter in reference_parameters(self, recurse).values():
            vars(parameter)["prefix"] = prefix + vars(parameter).get("prefix", "")

    def set_inputs(self, *inputs: Any, **named: Any) -> None:
        """Store the inputs. Shapes need not be declared: calls of other shapes are captured as they come."""
        self._inputs = named or inputs

    def get_inputs(self) -> Any:
        return getattr(self, "_inputs", None)

    def add_flags(self, *values: Any, **flags: Any) -> Cell:
        """Do nothing; kept for programs that call it."""
        return self

    add_flags_recursive = set_jit_config = set_boost = set_broadcast_flag = set_acc = flatten_weights = add_flags
    update_cell_type = set_param_ps = offload = set_grad = set_comm_fusion = add_flags
    compile = add_flags  # type: ignore[assignment]
    phase, param_prefix = "train", ""  # kept for programs that read them
    cls_name = property(lambda self: type(self).__name__)

    def get_flags(self) -> dict[str, Any]:
        return {}

    extend_repr = nn.Module.extra_repr  # text that is printed after the cell's name

    def extra_repr(self) -> str:
        return self.extend_repr()

    def insert_param_to_cell(self, param_name: str, param: Any, check_name_contain_dot: bool = True) -> None:
        setattr(self, param_name, param)

    insert_child_to_cell = nn.Module.add_module

    def init_parameters_data(self, auto_parallel_mode: bool = False) -> dict[Any, Any]:
        """Return each parameter mapped to itself: parameters have their values already."""
        return {parameter: parameter for parameter in self.parameters()}

    def register_backward_hook(self, hook_fn: Any) -> Any:
        """Register ``hook_fn(cell, input gradients, output gradients)``, which may return other input gradients."""
        return self.register_full_backward_hook(hook_fn)

    # Children.

    cells, cells_and_names = nn.Module.children, nn.Module.named_modules

    def name_cells(self) -> dict[str, nn.Module]:
        return dict(self.named_children())

    # Modes.

    def set_train(self, mode: bool = True) -> Cell:
        self.train(mode)
        return self

    def to_float(self, dtype: torch.dtype) -> Cell:
        """Compute in ``float16``, ``bfloat16`` or ``float32`` in this cell and all cells inside. Inputs and parameters
        are cast where they are used. The parameters, their gradients and their updates keep their dtype."""
        if dtype not in FLOATS:
            fix = f"one of {', '.join(map(str, FLOATS))}; net.to(dtype) converts the parameters"
            raise ValueError(problem(f"to_float({dtype})", op=type(self).__name__, fix=fix))
        for module in self.modules():
            if isinstance(module, Cell):
                module._float = dtype
        return self

    @contextmanager
    def _parameters_cast(self) -> Iterator[None]:
        """Replace the parameters of this cell, and of torch modules in it, by casts. Inner cells cast their own."""
        masters: list[tuple[nn.Module, dict[str, Any]]] = []
        is_cast = self._float is not None and self.casts_parameters
        try:
            for owner in (self, *_torch_modules(self)) if is_cast else ():
                masters.append((owner, dict(owner._parameters)))
                owner._parameters.update(_cast(masters[-1][1], self._float))
            yield
        finally:
            for owner, parameters in masters:
                owner._parameters.update(parameters)

    def shard(
        self, in_strategy: Any, out_strategy: Any = None, parameter_plan: Any = None, device: str = "", level: int = 0
    ) -> Any:
        """Set a strategy of the cell's inputs, outputs and parameters: see ``ms.shard``."""
        return shard(self, in_strategy, out_strategy, parameter_plan)

    def set_data_parallel(self) -> Cell:
        """Let every operator of this cell without a strategy split its batch, whatever a search would choose."""
        for primitive in planning.primitives(self):
            primitive.data_parallel = True
        return self

    def recompute(
        self, mp_comm_recompute: bool = True, parallel_optimizer_comm_recompute: bool = False,
        recompute_slice_activation: bool = False, mode: bool = True,
    ) -> None:  # fmt: skip
        """Recompute the activations of this cell in backward. Its outputs are saved.

        The switches apply to split cells.

        Args:
            mp_comm_recompute: repeat the collectives inside; if False their results are saved.
            parallel_optimizer_comm_recompute: all-gather again the parameters that the parallel optimizer shards.
            recompute_slice_activation: accepted; saved values are saved in their layouts.
            mode: False switches recomputation off.
        """
        if parallel_optimizer_comm_recompute and not mp_comm_recompute:
            what = "recompute(mp_comm_recompute=False, parallel_optimizer_comm_recompute=True)"
            raise NotImplementedError(problem(what, op=type(self).__name__, fix="leave mp_comm_recompute True"))
        values: Literal["values", "none"] = "values" if mp_comm_recompute else "none"
        messages = "parameters" if parallel_optimizer_comm_recompute else values
        sw.recompute(self, "full" if mode else "none", messages=messages)
        self._again = mode

    # The pipeline stage that runs the cell, from 0, with the option ``pipeline_stages`` (None: that of the cell around
    # it); and the segment: with ``pipeline_interleave`` every stage has two parts of the network, 0 and 1.
    pipeline_stage, pipeline_segment = _number("pipeline_stage", "_stage"), _number("pipeline_segment", "_segment")


def _cast(values: Any, dtype: torch.dtype | None) -> Any:
    """Convert the floating tensors in a tree to a dtype; None: leave them."""
    if dtype is None:
        return values
    return pytree.tree_map_only(torch.Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, values)


def _torch_modules(cell: nn.Module) -> Iterator[nn.Module]:
    """Yield the torch modules of a cell, but not those of its inner cells."""
    for child in cell.children():
        if not isinstance(child, Cell):
            yield child
            yield from _torch_modules(child)


class SequentialCell(Cell, nn.Sequential):
    """A sequence of cells: ``SequentialCell(a, b)``, ``SequentialCell([a, b])``, or with names
    ``SequentialCell(OrderedDict([("first", a), ("second", b)]))``."""

    def __init__(self, *cells: Any) -> None:
        super().__init__()
        members: Any = cells[0] if len(cells) == 1 and isinstance(cells[0], (list, tuple, dict)) else cells
        named = members.items() if isinstance(members, dict) else enumerate(members)
        for name, cell in named:
            self.add_module(str(name), cell)

    cell_list = property(lambda self: list(self.children()))

    def append(self, cell: nn.Module) -> Self:
        return super().append(cell)

    def insert(self, index: int, cell: nn.Module) -> Self:
        """Insert a cell before the one at ``index`` and renumber all cells."""
        listed = self.cell_list
        listed.insert(index, cell)
        self._modules.clear()
        return self.extend(listed)

    def __getitem__(self, index: int | slice) -> Any:
        chosen = self.cell_list[index]
        return type(self)(*chosen) if isinstance(chosen, list) else chosen

    def __delitem__(self, index: int | slice) -> None:
        """Remove cells. The others keep their names, by which checkpoints know them."""
        chosen = [*self._modules][index]
        for name in [chosen] if isinstance(chosen, str) else chosen:
            del self._modules[name]

    def construct(self, x: Any) -> Any:
        for cell in self:
            x = cell(x)
        return x


class CellList(nn.ModuleList):
    """A list of cells."""

    cells = nn.Module.children

    def __init__(self, *cells: Any) -> None:
        super().__init__(cells[0] if len(cells) == 1 and isinstance(cells[0], (list, tuple)) else cells)


class CellDict(nn.ModuleDict):
    """A dictionary of cells."""


class GraphCell(Cell):
    """A network read by ``ms.load``: ``GraphCell(ms.load("net.mindir"))(x)``. ``params_init``: new values of its
    parameters by name."""

    def __init__(self, graph: Any, params_init: dict[str, torch.Tensor] | None = None) -> None:
        super().__init__()
        self._graph = (graph,)  # in a tuple, so that train() does not reach it
        with torch.no_grad():
            for name, value in (params_init or {}).items():
                graph.get_parameter(name).copy_(value)

    def construct(self, *inputs: Any) -> Any:
        return self._graph[0](*inputs)
