"""``Model``: a network with its loss, optimizer and metrics, trained and evaluated over datasets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count, islice
from typing import Any

import torch
from torch import nn

from shardwise.errors import problem
from shardwise.mindspore import context
from shardwise.mindspore.amp import DynamicLossScaleManager, at_level
from shardwise.mindspore.checks import from_on
from shardwise.mindspore.context import ParallelMode as ParallelMode  # programs import this name from here
from shardwise.mindspore.engine import layouts_of
from shardwise.mindspore.nn.optimizer import Optimizer
from shardwise.mindspore.nn.wrap import WithEvalCell, WithLossCell, training_cell
from shardwise.mindspore.train.callback import Callback, CallbackParams, RunContext, WhileTraining, callbacks_of, notify
from shardwise.mindspore.train.metrics import metrics_of


def size_of(dataset: Any, sink_size: int) -> int:
    """Return the number of rows of an epoch."""
    if sink_size > 0:
        return sink_size
    return int(dataset.get_dataset_size() if hasattr(dataset, "get_dataset_size") else len(dataset))


def steps_of(dataset: Any, sink_size: int) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of an epoch as tuples."""
    rows = dataset.create_tuple_iterator(num_epochs=1) if hasattr(dataset, "create_tuple_iterator") else dataset
    for row in islice(rows, sink_size if sink_size > 0 else None):
        yield tuple(row) if isinstance(row, (tuple, list)) else (row,)


@contextmanager
def _running(kind: str, callbacks: Sequence[Callback], params: CallbackParams) -> Iterator[RunContext]:
    """Enter all callbacks, and tell them of the begin and the end."""
    run = RunContext(params)
    with ExitStack() as opened:
        for callback in callbacks:
            opened.enter_context(callback)
        notify(callbacks, f"on_{kind}_begin", run)
        yield run
        notify(callbacks, f"on_{kind}_end", run)


class DatasetHelper:
    """An iterator over the rows of a dataset, as tuples. ``sink_size``: rows per epoch."""

    def __init__(self, dataset: Any, dataset_sink_mode: bool = True, sink_size: int = -1, epoch_num: int = 1) -> None:
        self.dataset, self._size = dataset, sink_size

    def __iter__(self) -> Any:
        return steps_of(self.dataset, self._size)

    def sink_size(self) -> int:
        """Return the rows per epoch."""
        return size_of(self.dataset, self._size)


class Model:
    """A network with loss, optimizer and metrics: ``Model(net, loss_fn=loss, optimizer=opt)``.

    Loss and optimizer may be given in either order.

    Args:
        network: the network; without ``loss_fn`` it returns its loss; without an optimizer too, it may be a training
            cell.
        metrics: names or Metric objects, for ``eval``.
        eval_network: the network for ``eval``.
        eval_indexes: positions of loss, output and label in the results of ``eval_network``.
        amp_level: level of ``amp.auto_mixed_precision``; O2 scales losses dynamically by default.
        loss_scale_manager: scales the loss before backward. With ``drop_overflow_update`` gradients are divided by the
            scale, and checked, here; else only the optimizer's ``loss_scale`` divides, as in the reference.
        settings: further settings of ``amp.at_level``.
    """

    def __init__(
        self, network: nn.Module, loss_fn: Any = None, optimizer: Any = None, metrics: Any = None,
        eval_network: nn.Module | None = None, eval_indexes: Any = None, amp_level: str = "O0",
        loss_scale_manager: Any = None, **settings: Any,
    ) -> None:  # fmt: skip
        if isinstance(loss_fn, Optimizer) or (optimizer is not None and not isinstance(optimizer, Optimizer)):
            loss_fn, optimizer = optimizer, loss_fn
        order = "Model(net, loss_fn=loss, optimizer=opt)"
        if not isinstance(network, nn.Module):
            raise TypeError(problem(f"{_description(network)} is not a network", fix=order))
        if optimizer is not None and not isinstance(optimizer, Optimizer):
            raise TypeError(problem(f"{_description(optimizer)} is not an optimizer", fix=order))
        if isinstance(loss_fn, Optimizer):
            raise TypeError(problem("Model was given two optimizers", fix=order))
        if amp_level == "O2" and loss_scale_manager is None:
            loss_scale_manager = DynamicLossScaleManager()
        network = at_level("Model", network, amp_level, settings)
        self._network, self._loss_fn, self._optimizer = network, loss_fn, optimizer
        self._metrics, self._eval_indexes = metrics_of(metrics), eval_indexes
        self._loss_network = network if loss_fn is None else WithLossCell(network, loss_fn)
        inner_optimizer = next((x for x in vars(network).values() if isinstance(x, Optimizer)), None)
        self._train_network: nn.Module | None = None
        if optimizer is not None:
            self._train_network = training_cell(self._loss_network, optimizer, loss_scale_manager)
        elif loss_fn is None and inner_optimizer is not None:  # the network is already a training cell
            self._train_network, self._optimizer = network, inner_optimizer
        self._is_own, self._eval_network = eval_network is not None, eval_network
        if eval_network is None and self._metrics and loss_fn is not None:
            self._eval_network = WithEvalCell(network, loss_fn)

    train_network = property(lambda self: self._train_network)
    predict_network = property(lambda self: self._network)
    eval_network = property(lambda self: self._eval_network)

    def train(
        self, epoch: int, train_dataset: Any, callbacks: Any = None, dataset_sink_mode: bool = False,
        sink_size: int = -1, initial_epoch: int = 0,
    ) -> None:  # fmt: skip
        """Train the network.

        Args:
            epoch: number of epochs.
            dataset_sink_mode: accepted without effect; data is fed step by step.
            sink_size: steps of an epoch; -1: those of the dataset.
        """
        self._run(epoch, train_dataset, callbacks, dataset_sink_mode, sink_size, initial_epoch, None)

    def fit(
        self, epoch: int, train_dataset: Any, valid_dataset: Any = None, valid_frequency: int | Sequence[int] = 1,
        callbacks: Any = None, dataset_sink_mode: bool = False, valid_dataset_sink_mode: bool = False,
        sink_size: int = -1, initial_epoch: int = 0,
    ) -> None:  # fmt: skip
        """Train, and evaluate on ``valid_dataset`` after every ``valid_frequency`` epochs, or after those listed.
        Callbacks read the metrics as ``eval_results`` of their parameters."""
        if valid_dataset is not None and self._eval_network is None:
            raise ValueError(problem("Model.fit has nothing to measure", fix="Model(..., metrics={'loss'})"))
        due = valid_frequency
        if isinstance(due, int):
            due = range(0, epoch + 1, from_on("valid_frequency", due, 1))
        evaluated = None if valid_dataset is None else (valid_dataset, due)
        self._run(epoch, train_dataset, callbacks, dataset_sink_mode, sink_size, initial_epoch, evaluated)

    def _run(
        self, epoch: int, train_dataset: Any, callbacks: Any, dataset_sink_mode: bool, sink_size: int,
        initial_epoch: int, evaluated: tuple[Any, Sequence[int]] | None,
    ) -> None:  # fmt: skip
        if self._train_network is None:
            raise ValueError(problem("Model.train needs an optimizer", fix="Model(net, loss_fn=loss, optimizer=opt)"))
        from_on("epoch", epoch, 1)
        network = self._train_network
        network.train()
        self._broadcast()
        params = CallbackParams(
            network=self._network, train_network=network, optimizer=self._optimizer, loss_fn=self._loss_fn,
            train_dataset=train_dataset, epoch_num=epoch, batch_num=size_of(train_dataset, sink_size),
            dataset_sink_mode=dataset_sink_mode, eval_network=self._eval_network,
            parallel_mode=context.options().parallel_mode, device_number=context.options().devices,
        )  # fmt: skip
        params.list_callback = listed = callbacks_of(callbacks)
        with _running("train", listed, params) as run:
            first = max(initial_epoch, params.begin_epoch) + 1
            done = max(params.cur_step_num - params.begin_epoch * params.batch_num, 0)  # steps of the first epoch
            for number in range(first, epoch + 1):
                params.cur_epoch_num = number
                notify(listed, "on_train_epoch_begin", run)
                for inputs in islice(steps_of(train_dataset, sink_size), done if number == first else 0, None):
                    params.cur_step_num += 1
                    params.train_dataset_element = inputs
                    notify(listed, "on_train_step_begin", run)
                    params.net_outputs = network(*inputs)
                    notify(listed, "on_train_step_end", run)
                    if run.get_stop_requested():
                        break
                params.eval_results = {}
                if evaluated is not None and number in evaluated[1]:
                    wrapped_callbacks = [WhileTraining(callback) for callback in listed]
                    params.eval_results = params.metrics = self._evaluated(evaluated[0], wrapped_callbacks, number)
                    network.train()
                notify(listed, "on_train_epoch_end", run)
                if run.get_stop_requested():
                    break

    def eval(self, valid_dataset: Any, callbacks: Any = None, dataset_sink_mode: bool = False) -> dict[str, Any]:
        """Evaluate over a dataset and return the metrics: name -> value."""
        return self._evaluated(valid_dataset, callbacks_of(callbacks), 0)

    def _evaluated(self, valid_dataset: Any, listed: Sequence[Callback], epoch: int) -> dict[str, Any]:
        """Evaluate the network. ``epoch``: number of the current epoch of training."""
        if self._eval_network is None:
            raise ValueError(problem("Model.eval has nothing to measure", fix="Model(..., metrics={'loss'})"))
        network = self._eval_network
        network.eval()
        params = CallbackParams(network=self._network, valid_dataset=valid_dataset, mode="eval", cur_epoch_num=epoch,
                                batch_num=size_of(valid_dataset, -1), eval_network=network)  # fmt: skip
        for metric in self._metrics.values():
            metric.clear()
        with _running("eval", listed, params) as run:
            for inputs in steps_of(valid_dataset, -1):
                params.cur_step_num += 1
                notify(listed, "on_eval_step_begin", run)
                with torch.no_grad():
                    params.net_outputs = network(*inputs)
                outputs = params.net_outputs if isinstance(params.net_outputs, tuple) else (params.net_outputs,)
                if self._eval_indexes:
                    outputs = tuple(outputs[place] for place in self._eval_indexes if place >= 0)
                for metric in self._metrics.values():
                    metric.update_from(outputs, self._is_own and self._eval_indexes is None)
                notify(listed, "on_eval_step_end", run)
            params.metrics = measured = {name: metric.eval() for name, metric in self._metrics.items()}
        return measured

    def build(self, train_dataset: Any = None, valid_dataset: Any = None, sink_size: int = -1, epoch: int = 1) -> None:
        """Do nothing; kept for programs that call it. Networks are captured in their first step."""

    def infer_predict_layout(self, *predict_data: Any, skip_backend_compile: bool = False) -> dict[str, Any]:
        """Split the network for predictions and return its layouts by parameter, before a checkpoint is loaded
        (``load_distributed_checkpoint(model.predict_network, files, layout)``)."""
        self._network.eval()
        return layouts_of(self._network, predict_data)

    def infer_train_layout(
        self, train_dataset: Any, dataset_sink_mode: bool = True, sink_size: int = -1
    ) -> dict[str, Any]:
        """Split the network for training, by the first row of a dataset, and return its layouts by parameter."""
        network = getattr(self._train_network, "network", None)
        if network is None:
            what = f"{type(self._train_network).__name__} holds no network to train"
            fix = "Model(network, loss, optimizer), or a subclass of TrainOneStepCell"
            raise RuntimeError(problem(what, fix=fix))
        network.train()
        return layouts_of(network, next(iter(steps_of(train_dataset, -1))))

    def predict(self, *predict_data: Any, backend: Any = None, config: Any = None) -> Any:
        """Return the network's results in evaluation mode."""
        self._network.eval()
        with torch.no_grad():
            return self._network(*predict_data)

    def _broadcast(self) -> None:
        """Broadcast rank 0's parameters before data-parallel training, with ``parameter_broadcast``. (Split cells take
        rank 0's values anyway.)"""
        options = context.options()
        if options.parameter_broadcast and not options.distributed and torch.distributed.is_initialized():
            for tensor in [*self._network.parameters(), *self._network.buffers()]:
                torch.distributed.broadcast(tensor.data, src=0)


def data_sink(fn: Callable[..., Any], dataset: Any, sink_size: int = 1, **settings: Any) -> Callable[[], Any]:
    """Return a function without arguments that calls ``fn`` with the next ``sink_size`` rows of a dataset, epoch after
    epoch, and returns the last result."""

    rows = (row for _ in count() for row in steps_of(dataset, -1))
    return lambda: [fn(*next(rows)) for _ in range(sink_size)][-1]


def _description(argument: Any) -> str:
    return type(argument).__name__ if isinstance(argument, (Optimizer, nn.Module)) else repr(argument)


__all__ = ["DatasetHelper", "Model", "data_sink"]
