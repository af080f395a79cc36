"""What the protocol leaves of other people's trainer arguments, callbacks and learning rate
schedules.

A trial ends at its goal, at its budget or because it cannot win its race, and its batch size is the
cell's. What would end it otherwise, lengthen it, or change its batch size is refused; what only
shows or saves has no effect in a study. Schedules are stepped by the values that checks give;
`lit_dps.training.training_length` gives them the length of training.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch import callbacks as stock

from lit_dps.core.errors import ConfigError
from lit_dps.data.loaders import EndlessLoader
from lit_dps.parallel.ddp import whole

# What a study sets itself. Lightning's own logger would be one more place of results; modules and
# callbacks that need one get a `DummyLogger`, which takes everything and keeps nothing.
STUDY_TRAINER = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "max_epochs": -1,
}

_ALL = "1.0: trials train on the entire training split"
_GOAL = "left out of a study: a trial ends at its goal or after goal.max_steps steps"
# Argument of the trainer -> the values that are allowed, and why no other is
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "max_steps": ((-1, None), "left out of a study: set goal.max_steps"),
    "min_steps": ((None,), _GOAL),
    "min_epochs": ((None,), _GOAL),
    "max_time": ((None,), _GOAL),
    "limit_train_batches": ((None, 1.0), _ALL),
    "overfit_batches": ((0, 0.0, None), "0: trials train and validate on entire splits"),
    "limit_val_batches": ((None, 1.0), "1.0: the goal is asked of all validation examples"),
    "fast_dev_run": ((False, 0, None), "left out of a study"),
    "barebones": ((False, None), "left out of a study: it validates nothing"),
}
# Argument of the trainer -> the values that nobody misses, and why no other has an effect
_OVERRULED: dict[str, tuple[tuple[Any, ...], str]] = {
    "max_epochs": ((-1, None), "a trial ends at its goal or after goal.max_steps steps"),
    "logger": ((False, None), "a study keeps its results itself and shows them in MLflow"),
    "enable_checkpointing": ((False, None), "a study saves its trials itself"),
    "val_check_interval": ((1.0, None), "goal.check_interval says when to validate"),
    "check_val_every_n_epoch": ((1, None), "goal.check_interval says when to validate"),
}
_NO_EFFECT = (stock.Checkpoint, stock.ProgressBar, stock.ModelSummary)
_CONTRADICT = {
    stock.EarlyStopping: "a trial ends at its goal, its budget or its race alone",
    stock.Timer: "a trial ends at its goal, its budget or its race alone",
    stock.GradientAccumulationScheduler: "the batch size is the cell's at every step",
    stock.BatchSizeFinder: "the batch size is the cell's",
    stock.LearningRateFinder: "metaparameters are the trial's: search them in study.space",
    stock.ModelPruning: "pruning is the study's: pruning.method and study.sparsities",
}


def check_trainer(trainer: Mapping[str, Any]) -> None:
    """Raises ConfigError for an argument of the trainer that contradicts the protocol."""
    for key, (allowed, why) in _REFUSED.items():
        value = trainer.get(key, allowed[0])
        # with its type: to Lightning 1 is one batch and 1.0 all of them
        if not any(value == other and type(value) is type(other) for other in allowed):
            raise ConfigError(f"trainer.{key}", value, why)
    if (batches := trainer.get("accumulate_grad_batches")) is not None and batches < 1:
        raise ConfigError(
            "trainer.accumulate_grad_batches",
            batches,
            "1 or more batches that make an optimizer step",
        )


def overruled(trainer: Mapping[str, Any]) -> list[str]:
    """A line for each argument of the trainer that has no effect in a study, because the study sets
    it."""
    lines = []
    for key, (quiet, why) in _OVERRULED.items():
        value = trainer.get(key)
        if value not in quiet:
            shown = (
                value["class_path"]
                if isinstance(value, Mapping) and "class_path" in value
                else value
            )
            lines.append(f"trainer.{key} = {shown} has no effect in a study: {why}")
    return lines


def filter_callbacks(callbacks: list[Callback], source: str) -> list[Callback]:
    """The callbacks that run in a study; those that only save or show are left out.

    Raises:
        ConfigError: for a callback that contradicts the protocol; `source` is the key that they
            come from.
    """
    for callback in callbacks:
        for kind, why in _CONTRADICT.items():
            if isinstance(callback, kind):
                raise ConfigError(source, type(callback).__name__, f"left out of a study: {why}")
    return [callback for callback in callbacks if not isinstance(callback, _NO_EFFECT)]


def listed(callbacks: Any) -> list[Any]:
    """Callbacks, or what stands for them in a configuration, as they may be given: one, several, or
    None."""
    return (
        list(callbacks)
        if isinstance(callbacks, (list, tuple))
        else []
        if callbacks is None
        else [callbacks]
    )


def screen_callbacks_of(module: LightningModule) -> None:
    """Lets `configure_callbacks` of this module give the callbacks alone that run in a study, as
    `filter_callbacks` says."""
    given = module.configure_callbacks
    if type(module).configure_callbacks is not LightningModule.configure_callbacks:
        source = f"{type(module).__name__}.configure_callbacks"
        module.__dict__["configure_callbacks"] = lambda: filter_callbacks(listed(given()), source)


def prepare_schedules(trainer: Trainer, module: LightningModule) -> None:
    """Lets a schedule that follows a metric wait for it. Raises ConfigError for one by epochs on
    one endless epoch."""
    configs = trainer.lr_scheduler_configs if module.automatic_optimization else []
    by_epochs = any(config.interval == "epoch" for config in configs)
    by_epochs = by_epochs or any(
        isinstance(c, stock.StochasticWeightAveraging) for c in trainer.callbacks
    )
    if by_epochs and isinstance(whole(trainer.train_dataloader), EndlessLoader):
        what = f"the training data of {type(trainer.datamodule).__name__} are one endless epoch"
        raise ConfigError(
            "model", type(module).__name__, f"a schedule by steps: {what}, so that no epoch ends"
        )
    for config in configs:
        if config.reduce_on_plateau:
            config.strict = False  # an epoch may end before the first check


def forget_followed_metrics(trainer: Trainer, interval: str, ended: int) -> None:
    """Leaves a schedule that follows a metric, and was stepped by it, without it until there is a
    new value.

    Otherwise it would take one check for many: checks come by steps, and epochs may be shorter. To
    be called when an interval of the schedules ("epoch" or "step") begins, with the epochs, or
    batches of the last epoch, that ended.
    """
    for config in trainer.lr_scheduler_configs:
        if (
            config.reduce_on_plateau
            and config.interval == interval
            and ended % config.frequency == 0
        ):
            trainer.callback_metrics.pop(config.monitor, None)
