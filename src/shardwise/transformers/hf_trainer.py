"""``ShardwiseTrainer``: transformers' Trainer, with the model split over all ranks under a plan.

The training loop is that of transformers. It sees a single process (``one_process``) and a parallel model.
"""

from __future__ import annotations

import copy
import functools
import os
import shutil
import warnings
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.utils import convert_to_fp32
from torch.utils.data import DataLoader, IterableDataset
from transformers.trainer import OPTIMIZER_NAME, TRAINING_ARGS_NAME
from transformers.training_args import OptimizerNames

from shardwise.api import plan as make_plan
from shardwise.costs.cluster import Cluster
from shardwise.errors import PlanWarning, ShardwiseError
from shardwise.graph.step_precision import Precision
from shardwise.plans.plan import Plan
from shardwise.plans.result import PlanningResult
from shardwise.runtime.agree import from_rank_zero, rank_and_world_size
from shardwise.runtime.parallel import Parallel
from shardwise.runtime.parallelize import parallelize
from shardwise.train.checkpoints import save_checkpoint
from shardwise.train.data import same_random_numbers
from shardwise.train.pretrained import locked, on_rank_zero, save_pretrained
from shardwise.train.resuming import load_checkpoint
from shardwise.transformers.one_process import become_one_process, check_same

CHECKPOINT = "shardwise"  # the folder of the ranks' parts, in a checkpoint of the Trainer's
MANY_SHAPES = 8
COMPARED = 3  # batches
_OPTIMIZERS = {
    OptimizerNames.ADAMW_TORCH_FUSED: "adamw fused",
    OptimizerNames.SGD: "sgd",
    OptimizerNames.RMSPROP: "rmsprop",
    OptimizerNames.ADAGRAD: "adagrad",
}


class ShardwiseTrainer(transformers.Trainer):
    """Trains a transformers model that is split over all ranks of the job; start it with ``shardwise run`` or torchrun.

    A script that uses ``Trainer`` needs one more line, ``from shardwise.transformers import ShardwiseTrainer as
    Trainer``. It gives the losses of a single process with any number of ranks: the Trainer sees all ranks as *one
    device*. So ``per_device_train_batch_size`` is the batch of all ranks together.

    From the first batch on ``trainer.model`` has no weights, but calls run on the parallel model. The weights are in
    ``trainer.model_wrapped``, a ``sw.Parallel``, and in saved files.

    Args:
        args: positional arguments of ``transformers.Trainer``.
        plan: a Plan, or the path of one; by default rank 0 plans for the first batch.
        plan_settings: arguments of ``sw.plan`` for that, including ``cluster`` (by default one device per rank).
        parallel_settings: arguments of ``sw.parallelize``.
        kwargs: keyword arguments of ``transformers.Trainer``.

    Raises:
        ShardwiseError: a setting of the Trainer that shardwise does not support.
    """

    def __init__(
        self,
        *args: Any,
        plan: Plan | PlanningResult | str | Path | None = None,
        plan_settings: Mapping[str, Any] | None = None,
        parallel_settings: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self._plan, self._plan_settings = plan, dict(plan_settings or {})
        self._parallel_settings = dict(parallel_settings or {})
        self._parallel: Parallel | None = None
        self._front: torch.nn.Module | None = None
        self._weights: str | None = None  # a folder of a saved model to start from
        self._loss_only = False
        self._has_said_shapes = False
        self._num_compared: Counter[str] = Counter()
        super().__init__(*args, **kwargs)

    # -- overridden setup ----------------------------------------------------------------------------------------------

    def _validate_args(self) -> None:
        super()._validate_args()
        args = self.args
        if args.n_gpu > 1:  # GPUs that a process sees without the environment of ranks: one of them is this rank's
            args._n_gpu = 1
        refused = {
            "fsdp": (args.fsdp, "leave it out: plan_settings={'zero': 3} shards parameters"),
            "deepspeed": (args.deepspeed, "leave it out: plan_settings={'zero': 3} shards parameters"),
            "parallelism_config": (args.parallelism_config, "leave it out: the plan decides what is split"),
            "auto_find_batch_size": (args.auto_find_batch_size, "use sw.fits to find a batch size that fits"),
            "bf16_full_eval": (args.bf16_full_eval, "leave it out, or use bf16"),
            "fp16_full_eval": (args.fp16_full_eval, "leave it out"),
            "predict_with_generate": (
                getattr(args, "predict_with_generate", False) and not isinstance(self, transformers.Seq2SeqTrainer),
                "from shardwise.transformers import ShardwiseSeq2SeqTrainer",
            ),
            "neftune_noise_alpha": (args.neftune_noise_alpha, "leave it out, or add the noise in the model"),
        }
        for name, (given, fix) in refused.items():
            if given:
                raise ShardwiseError(f"shardwise does not support {name}", fix=fix)

    def create_accelerator_and_postprocess(self) -> None:
        become_one_process()
        super().create_accelerator_and_postprocess()
        self.accelerator.dataloader_config.dispatch_batches = False  # every rank reads an iterable data set by itself

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return the Trainer's loader, with the same random numbers in the workers of all ranks."""
        loader = super().get_train_dataloader()
        torch_loader: Any = _without_accelerate(loader)
        if isinstance(torch_loader.worker_init_fn, functools.partial):
            torch_loader.worker_init_fn = functools.partial(torch_loader.worker_init_fn, rank=0)
        return loader

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Raise ShardwiseError: every rank would try other parameters."""
        what, fix = "ranks cannot search for hyperparameters", "start a job per trial, from a search in one process"
        raise ShardwiseError(what, fix=fix)

    def _move_model_to_device(self, model: torch.nn.Module, device: torch.device) -> None:
        """Do nothing: only a rank's shards are moved to the device, later."""

    # -- the model -----------------------------------------------------------------------------------------------------

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        self._split(train_dataloader)
        return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)

    def evaluation_loop(self, dataloader: DataLoader[Any], *args: Any, **kwargs: Any) -> Any:
        if self._parallel is None and self.train_dataset is not None and self._plan is None:
            with same_random_numbers():
                self._split(self.get_train_dataloader())  # the plan is for training
        else:
            self._split(dataloader)
        self._num_compared["eval"] = 0  # the data set may have changed
        return super().evaluation_loop(dataloader, *args, **kwargs)

    def _wrap_model(self, model: torch.nn.Module, training: bool = True, dataloader: Any = None) -> torch.nn.Module:
        return model if self._parallel is None else self._parallel

    def _split(self, loader: DataLoader[Any]) -> None:
        model = self.model
        if model is self._front:
            return
        assert isinstance(model, torch.nn.Module), "the Trainer has a model by now"
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        with same_random_numbers():
            plan = self._plan or from_rank_zero(lambda: self._make_plan(model, loader))
            settings = {
                "seed": self.args.seed,
                "weights": self._weights,
                "device": self.args.device,
                "compile": self.args.torch_compile or None,
            }
            par = parallelize(model, plan, **{**settings, **self._parallel_settings})
        if par.plan.is_pipeline or par.plan.micro_batches > 1:
            what = "the plan has pipeline stages or micro-batches, which the Trainer's loop does not support"
            fix = "plan without stages= and micro_batch=; use gradient_accumulation_steps= instead"
            raise ShardwiseError(what, fix=fix)
        if self._autocast is not None:
            par.register_forward_hook(lambda module, args, output: convert_to_fp32(output))
        self._parallel, self._front = par, _front_of(par)
        self.model, self.model_wrapped = self._front, par
        if self.optimizer is not None:
            parts = dict(par.named_parameters())
            for group in self.optimizer.param_groups:
                group["params"] = [parts[names[id(parameter)]] for parameter in group["params"]]

    def _make_plan(self, model: torch.nn.Module, loader: DataLoader[Any]) -> Plan:
        settings = {"optimizer": _OPTIMIZERS.get(OptimizerNames(self.args.optim), "adamw"), **self._plan_settings}
        cluster: Cluster | int = settings.pop("cluster", rank_and_world_size()[1])
        if self._autocast is not None and self.args.device.type != "cpu":
            settings.setdefault("precision", Precision(compute=self._autocast))
            warnings.warn(
                f"all operators compute in {self._autocast}: shardwise does not follow the operator lists of "
                f"torch.autocast({self.args.device.type!r})",
                PlanWarning,
                stacklevel=2,
            )
        model.train()
        with torch.autocast("cpu", self._autocast, enabled="precision" not in settings and self._autocast is not None):
            return make_plan(model, self._example(loader), cluster, **settings).plan

    @property
    def _autocast(self) -> torch.dtype | None:
        return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.args.mixed_precision)

    def _example(self, loader: DataLoader[Any]) -> dict[str, Any]:
        """Return the model's arguments for the first batch, which the loader will yield again."""
        data: Any = loader.dataset
        if isinstance(data, IterableDataset) and iter(data) is data:
            what = "the data set can be read only once, and planning reads its first batch"
            raise ShardwiseError(what, fix="give a data set whose iter() restarts, or plan=")
        inputs = dict(next(iter(_without_accelerate(loader))))
        items = self._get_num_items_in_batch([inputs], torch.device("cpu"))
        if "labels" in inputs and (self.label_smoother is not None or self.compute_loss_func is not None):
            del inputs["labels"]
        if self.model_accepts_loss_kwargs and items is not None:
            inputs["num_items_in_batch"] = items
        return inputs

    # -- steps ---------------------------------------------------------------------------------------------------------

    def training_step(
        self, model: torch.nn.Module, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Run the Trainer's step. The first batches are compared between ranks: they would differ if random numbers in
        the data set depended on the rank."""
        self._compare("train", inputs)
        return super().training_step(self._recognized(model), inputs, num_items_in_batch)

    def _compare(self, kind: str, inputs: dict[str, Any]) -> None:
        if self._num_compared[kind] < COMPARED:
            self._num_compared[kind] += 1
            fix = "let data sets and collators use the same random seed on every rank"
            check_same(dict(inputs), "another batch", fix)

    def _recognized(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the stand-in of a parallel model: the Trainer's losses look at its class and configuration."""
        return self._front if model is self._parallel and self._front is not None else model

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """Return the Trainer's loss. Outputs that are not read stay sharded."""
        is_plain = self.label_smoother is None and self.compute_loss_func is None
        assert self._parallel is not None, "the model is split by now"
        if is_plain and (self._loss_only or not return_outputs):
            if self.model_accepts_loss_kwargs and num_items_in_batch is not None:
                inputs = {**inputs, "num_items_in_batch": num_items_in_batch}
            loss = self._parallel.loss_of(**inputs)
            outputs: dict[str, Any] = {}
            result: Any = (loss, outputs) if return_outputs else loss
        else:
            result = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        self._announce_shapes(self._parallel)
        return result

    def prediction_step(
        self, model: torch.nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, *args: Any, **kwargs: Any
    ) -> Any:
        self._compare("eval", inputs)
        self._loss_only = prediction_loss_only
        try:
            return super().prediction_step(self._recognized(model), inputs, prediction_loss_only, *args, **kwargs)
        finally:
            self._loss_only = False

    def _announce_shapes(self, par: Parallel) -> None:
        """Warn once if batches have many shapes: each shape needs another program."""
        if self._has_said_shapes or len(par.compiled) <= MANY_SHAPES or rank_and_world_size()[0] != 0:
            return
        self._has_said_shapes = True
        warnings.warn(
            f"batches had {len(par.compiled)} different shapes so far, and the model is captured again for each: let "
            "the collator pad to few lengths (pad_to_multiple_of=, or padding='max_length')",
            PlanWarning,
            stacklevel=2,
        )

    # -- the optimizer -------------------------------------------------------------------------------------------------

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        return super().create_optimizer(self._parallel if model is None else model)

    def get_decay_parameter_names(self, model: Any) -> list[str]:
        assert self._front is not None, "the model is split by now"
        return super().get_decay_parameter_names(self._front)  # the parallel module's submodules have no types

    @property
    def _own_optimizer(self) -> torch.optim.Optimizer:
        wrapped: Any = self.optimizer
        optimizer: torch.optim.Optimizer = getattr(wrapped, "optimizer", wrapped)
        return optimizer

    @property
    def _schedulers(self) -> list[Any]:
        return [] if self.lr_scheduler is None else [self.lr_scheduler]

    # -- files ---------------------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the whole model to a folder, as ``from_pretrained`` reads it. Call it on every rank. Files of an older
        model are replaced one by one when the new model is complete; surplus files are deleted last."""
        folder = Path(output_dir or str(self.args.output_dir))
        if self._parallel is None:
            super().save_model(str(folder), _internal_call=True)
        else:
            self._save_parallel(folder, folder / ".new")
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_parallel(self, folder: Path, new: Path) -> None:
        """Write the whole model to ``new``, then move it to its folder. Raises CheckpointError, on all ranks."""
        assert self._parallel is not None, "the model is split by now"
        with locked(folder, folder / "model"):
            on_rank_zero(folder, lambda: shutil.rmtree(new, ignore_errors=True))  # of a killed attempt
            save_pretrained(self._parallel, new)
            on_rank_zero(folder, lambda: self._replace_model(folder, new))

    def _replace_model(self, folder: Path, new: Path) -> None:
        names = sorted((file.name for file in new.iterdir()), key=lambda name: name.endswith(".index.json"))
        for name in names:  # the index last, after the files that it lists
            os.replace(new / name, folder / name)
        for old in (*folder.glob("*.safetensors"), *folder.glob("*.safetensors.index.json")):
            if old.name not in names:
                old.unlink()
        new.rmdir()
        processing = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if processing is not None:
            processing.save_pretrained(str(folder))
        torch.save(self.args, folder / TRAINING_ARGS_NAME)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        where = Path(output_dir) / CHECKPOINT
        # Of an earlier run: the Trainer replaces checkpoints.
        on_rank_zero(where, lambda: shutil.rmtree(where, ignore_errors=True))
        assert self._parallel is not None, "a run that saves has a parallel model"
        step = self.state.global_step
        save_checkpoint(where, self._parallel, self._own_optimizer, step=step, schedulers=self._schedulers)

    def _save_rng_state(self, output_dir: str) -> None:
        if rank_and_world_size()[0] == 0:  # random states are equal on all ranks
            super()._save_rng_state(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: torch.nn.Module | None = None) -> None:
        if (Path(resume_from_checkpoint) / CHECKPOINT).is_dir():
            return  # _load_optimizer_and_scheduler loads the weights too
        if self._parallel is not None and self.model is self._front:
            what = f"{resume_from_checkpoint} has only a model, and this Trainer's model is already split"
            fix = "create a new Trainer, and call train(resume_from_checkpoint=) first"
            raise ShardwiseError(what, fix=fix)
        if hasattr(self.model, "peft_config"):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            self._weights = resume_from_checkpoint

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        where = Path(checkpoint) / CHECKPOINT
        assert self._parallel is not None, "the model is split by now"
        if where.is_dir():  # the Trainer restores the random generators itself
            load_checkpoint(where, self._parallel, self._own_optimizer, schedulers=self._schedulers, random=False)
        elif (Path(checkpoint) / OPTIMIZER_NAME).is_file():
            what = f"{checkpoint} was saved by a Trainer in one process, with unsharded optimizer states"
            fix = "resume in one process, or start from its model: from_pretrained(...), then train()"
            raise ShardwiseError(what, fix=fix)

    def _load_best_model(self) -> None:
        best = Path(str(self.state.best_model_checkpoint)) / CHECKPOINT
        if not best.is_dir():
            what = f"the best model is in {best.parent}, without the sharded checkpoint"
            raise ShardwiseError(what, fix="load_best_model_at_end needs save_only_model=False")
        assert self._parallel is not None, "the model is split by now"
        load_checkpoint(best, self._parallel, random=False)


def _front_of(par: Parallel) -> torch.nn.Module:
    """Return a stand-in for the split module: a copy on the meta device, whose ``forward`` calls the parallel module.
    Reading parameter values fails: they are in the ranks' shards."""
    front = copy.deepcopy(par.original)
    set_mode = front.train

    @functools.wraps(front.forward)  # keeps the signature of the module
    def forward(*args: Any, **kwargs: Any) -> Any:
        return par(*args, **kwargs)

    def train(mode: bool = True) -> torch.nn.Module:
        par.train(mode)
        return set_mode(mode)

    front.__dict__.update(forward=forward, train=train)
    return front


def _without_accelerate(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return a loader without accelerate's wrapper, which records when batches end."""
    torch_loader: DataLoader[Any] = getattr(loader, "base_dataloader", loader)
    return torch_loader
