"""A short run of a module as it is: which metrics validation logs, and how they progress."""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer

from lit_dps.core.errors import UserError, first_line, place_in_user_code
from lit_dps.core.progress_line import StageLine
from lit_dps.parallel.process import prepare_process
from lit_dps.training.hidden_state import preserve_rng_state
from lit_dps.training.step_count import StepCount
from lit_dps.training.training_pass import loss_of_output

# Steps by which the time of a step is known roughly.
ROUGH_STEPS = 8
# Validations that a run has, unless they would take more than half of its time.
CHECKS = 40


@dataclass
class ProgressRun:
    """What a short run showed.

    Attributes:
        initial: The metrics of the untrained network.
        steps: The step of each validation.
        curves: The value of each metric at each validation.
        step_seconds: Seconds of a step.
        check_seconds: Seconds of a validation.
        total_steps: Steps of the run.
    """

    initial: dict[str, float]
    steps: list[int] = field(default_factory=list)
    curves: dict[str, list[float]] = field(default_factory=dict)
    step_seconds: float = math.nan
    check_seconds: float = math.nan
    total_steps: int = 0


def run_progress(
    make_module: Callable[[], LightningModule],
    make_data: Callable[[], LightningDataModule],
    seconds: float,
) -> ProgressRun:
    """Train a module for some seconds, and return how its validation metrics progress.

    Args:
        make_module, make_data: Return new objects.
        seconds: The time that training takes.

    Raises:
        UserError: if the module or its data fail, or if validation logs nothing.
    """
    prepare_process()
    try:
        with preserve_rng_state(seed=0), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _run(make_module, make_data, seconds)
    except UserError:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {first_line(error)}{place_in_user_code(error)}"
        raise UserError(
            f"the short run failed ({why}). Correct the error, then run the command again."
        ) from error


def _run(
    make_module: Callable[[], LightningModule],
    make_data: Callable[[], LightningDataModule],
    seconds: float,
) -> ProgressRun:
    data = make_data()
    module = make_module()
    timer = _CheckTimer()
    logged = _trainer(callbacks=[timer]).validate(module, data, verbose=False)
    result = ProgressRun({})
    for metrics in logged:  # one for each validation dataloader
        result.initial.update({name: float(value) for name, value in metrics.items()})
    if not result.initial:
        raise UserError(
            'validation logs no metric. Write self.log("val_loss", loss) in validation_step.',
            key="--metric",
        )
    rough = _Watch(result, math.inf, StageLine("timing steps"))
    trainer = _trainer(max_steps=ROUGH_STEPS, limit_val_batches=0, callbacks=[rough])
    trainer.fit(make_module(), data)
    step_seconds = rough.seconds / max(rough.counted, 1)
    affordable = max(int(seconds / step_seconds), ROUGH_STEPS)
    interval = max(1, affordable // CHECKS, math.ceil(timer.median / step_seconds))
    timer = _CheckTimer()
    line = StageLine("training", seconds)
    watch = _Watch(result, seconds, line)
    trainer = _trainer(
        max_steps=affordable,
        val_check_interval=interval,
        check_val_every_n_epoch=None,
        callbacks=[timer, watch],
    )
    with line:
        trainer.fit(make_module(), data)
    result.total_steps = trainer.global_step
    result.check_seconds = timer.median
    result.step_seconds = watch.seconds / max(watch.counted, 1)
    return result


def _trainer(**arguments: Any) -> Trainer:
    return Trainer(
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **arguments,
    )


class _CheckTimer(Callback):
    """Times validations."""

    def __init__(self) -> None:
        self._began = 0.0
        self._seconds: list[float] = []

    @property
    def median(self) -> float:
        """Seconds of a validation."""
        return statistics.median(self._seconds) if self._seconds else 0.0

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._began = time.monotonic()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._seconds.append(time.monotonic() - self._began)


class _Watch(Callback):
    """Collects the metrics of validations, and ends a run after some seconds.

    Attributes:
        seconds: Seconds of the steps after the first one.
        counted: The number of these steps.
    """

    def __init__(self, result: ProgressRun, limit: float, line: StageLine):
        self.result = result
        self.limit = limit
        self.line = line
        self.seconds = 0.0
        self.counted = 0
        self._began = time.monotonic()
        self._last = math.nan  # the end of the last step; nan after a validation
        self._shown = ""  # the metrics of the last validation
        # A study counts batches of modules that step several optimizers. Lightning counts each.
        self._count = StepCount()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._began = time.monotonic()
        self._count.begin(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self._count.before_batch(trainer)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, *_: Any
    ) -> None:
        self._count.begin_step()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        now = time.monotonic()
        loss = loss_of_output(outputs)
        if loss is not None:
            self._count.add_loss(trainer, loss)
        if batch is not None:  # Lightning does not train on it
            self._count.after_batch(trainer)
        if not math.isnan(self._last):
            self.seconds += now - self._last
            self.counted += 1
        self._last = now
        self.line.update(f"step {trainer.global_step}{self._shown}")
        if now - self._began > self.limit:
            trainer.should_stop = True

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last = math.nan
        step = trainer.global_step
        if self.result.steps and self.result.steps[-1] == step:
            return
        self.result.steps.append(step)
        shown = []
        for name in self.result.initial:
            value = float(trainer.callback_metrics.get(name, math.nan))
            self.result.curves.setdefault(name, []).append(value)
            shown.append(f"{name} {value:.4g}")
        self._shown = f", {', '.join(shown)}"
