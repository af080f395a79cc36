"""What the protocol leaves of other people's trainer arguments and callbacks: refused, without effect, or as they are.

A trial ends at its goal, at its budget or because it cannot win its race, and its batch size is the cell's. What would
end it otherwise, lengthen it, or change its batch size is refused; what only shows or saves has no effect in a study.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch import callbacks as stock

from lit_dps.errors import ConfigError

# What a study sets itself. Lightning's own logger would be one more place of results; modules and callbacks that need
# one get a `DummyLogger`, which takes everything and keeps nothing.
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
_OVERRULED = {
    "max_epochs": "a trial ends at its goal or after goal.max_steps steps",
    "logger": "a study keeps its results itself and shows them in MLflow",
    "enable_checkpointing": "a study saves its trials itself",
    "val_check_interval": "goal.check_interval says when to validate",
    "check_val_every_n_epoch": "goal.check_interval says when to validate",
}
_QUIET = {
    "max_epochs": (-1, None),
    "logger": (False, None),
    "enable_checkpointing": (False, None),
    "val_check_interval": (1.0, None),
    "check_val_every_n_epoch": (1, None),
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


def overruled(trainer: Mapping[str, Any]) -> list[str]:
    """A line for each argument of the trainer that has no effect in a study, because the study sets it."""
    lines = []
    for key, why in _OVERRULED.items():
        value = trainer.get(key)
        if value not in _QUIET.get(key, (None,)):
            shown = value["class_path"] if isinstance(value, Mapping) and "class_path" in value else value
            lines.append(f"trainer.{key} = {shown} has no effect in a study: {why}")
    return lines


def welcome(callbacks: Iterable[Callback], source: str) -> list[Callback]:
    """The callbacks that run in a study; those that only save or show are left out.

    Args:
        callbacks: Other people's callbacks.
        source: The key that they come from, for the error.

    Raises:
        ConfigError: for a callback that contradicts the protocol.
    """
    kept = []
    for callback in callbacks:
        for kind, why in _CONTRADICT.items():
            if isinstance(callback, kind):
                raise ConfigError(source, type(callback).__name__, f"left out of a study: {why}")
        if not isinstance(callback, _NO_EFFECT):
            kept.append(callback)
    return kept


def screen_callbacks_of(module: LightningModule) -> None:
    """Lets `configure_callbacks` of this module give the callbacks alone that run in a study.

    Raises:
        ConfigError: when the trainer asks for them, as `welcome`.
    """
    given = module.configure_callbacks

    def configure_callbacks() -> list[Callback]:
        found = given()
        every = found if isinstance(found, (list, tuple)) else [found]
        return welcome(every, f"{type(module).__name__}.configure_callbacks")

    if type(module).configure_callbacks is not LightningModule.configure_callbacks:
        module.__dict__["configure_callbacks"] = configure_callbacks
