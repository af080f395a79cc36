"""The lean loop: all optimizer steps between two checks as one batch of Lightning's loop.

Lightning spends 0.4 ms on a batch, near what a step of Simple-CNN takes at a batch size of 2, to ask hooks, loggers
and counters. Between two checks nobody needs an answer. What is trained stays the same to the last bit: the module's
own `training_step`, optimizer and schedule, and the callbacks' `on_before_optimizer_step`, at every step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization
from lightning.pytorch.plugins import Precision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import SingleDeviceStrategy

from lit_dps.data.images import ImageData
from lit_dps.module import ImageClassifier, logs
from lit_dps.training import GoalErrorCallback, PruningCallback

# What Lightning would call once a step: where one of these is somebody's own, its loop is left alone
_TRANSFER = ("transfer_batch_to_device", "on_before_batch_transfer", "on_after_batch_transfer")
_OF_MODULE = (
    *("training_step", "backward", "optimizer_step", "optimizer_zero_grad"),
    *("lr_scheduler_step", "configure_gradient_clipping", "on_train_batch_start", "on_train_batch_end"),
    *("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step", *_TRANSFER),
)
_OF_DATA = ("train_dataloader", "epochs", *_TRANSFER)
_OF_CALLBACKS = (
    *("on_train_batch_start", "on_train_batch_end", "on_before_zero_grad", "on_before_backward", "on_after_backward"),
)


class LeanLoop(Callback):
    """Runs that many optimizer steps a batch of Lightning's loop, where module, data and trainer allow that.

    They do if module and data are `ImageClassifier` and `ImageData`, or subclasses that change nothing Lightning calls
    once a step, on one device in full precision, without gradient accumulation or clipping, logger or profiler.

    Args:
        steps: Optimizer steps a batch: the check interval, since callbacks are asked at its end alone.
    """

    def __init__(self, steps: int):
        self.steps = steps

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and self.supports(trainer, pl_module):
            trainer.datamodule.steps_per_batch = self.steps
            trainer.fit_loop.epoch_loop.automatic_optimization = _ManySteps(trainer)

    @staticmethod
    def supports(trainer: Trainer, module: LightningModule) -> bool:
        """Whether the lean loop does what Lightning's would."""
        ours = inherits(module, ImageClassifier, ("loss", "configure_optimizers"))
        return ours and standard_trainer(trainer) and standard_step(module) and standard_data(trainer.datamodule)


def standard_step(module: LightningModule) -> bool:
    """Whether a module takes its optimizer steps as `ImageClassifier` does, by whatever optimizer."""
    return inherits(module, ImageClassifier, _OF_MODULE)


def standard_data(data: LightningDataModule | None) -> bool:
    """Whether a data module makes its training batches as `ImageData` does."""
    return inherits(data, ImageData, _OF_DATA)


def inherits(instance: Any, base: type, names: Iterable[str]) -> bool:
    """Whether an instance of a class has all these methods from it, and none of its own."""
    return isinstance(instance, base) and all(getattr(type(instance), name) is getattr(base, name) for name in names)


def standard_trainer(trainer: Trainer) -> bool:
    """Whether a trainer asks for nothing once a step but the updates, on one device in full precision."""
    others = [c for c in trainer.callbacks if not isinstance(c, (GoalErrorCallback, PruningCallback))]
    return (
        type(trainer.strategy) is SingleDeviceStrategy
        and type(trainer.precision_plugin) is Precision
        and isinstance(trainer.profiler, PassThroughProfiler)
        and trainer.accumulate_grad_batches == 1
        and type(trainer.limit_train_batches) is float
        and trainer.limit_train_batches == 1.0
        and trainer.gradient_clip_val is None
        and not (logs(trainer) or trainer.fast_dev_run or trainer._detect_anomaly)
        and not any(getattr(type(c), hook) is not getattr(Callback, hook) for c in others for hook in _OF_CALLBACKS)
    )


class _ManySteps(_AutomaticOptimization):
    """Takes an optimizer step for each of the batches in a batch; counts them as Lightning's own does."""

    def run(self, optimizer, batch_idx: int, kwargs: dict[str, Any]) -> dict[str, Any]:
        trainer, module = self.trainer, self.trainer.lightning_module
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        before_step = [callback.on_before_optimizer_step for callback in trainer.callbacks]
        progress = self.optim_progress.optimizer.step
        for i, batch in enumerate(kwargs["batch"]):
            for scheduler in schedulers if i else ():  # Lightning itself steps them after the last
                scheduler.step()
            optimizer.zero_grad()
            loss = module.training_step(batch, batch_idx)
            loss.backward()
            for hook in before_step:
                hook(trainer, module, optimizer)
            progress.increment_ready()
            optimizer.step()
            progress.increment_completed()
        return {"loss": loss.detach()}
