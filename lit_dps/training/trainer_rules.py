"""Rules for the user's trainer arguments, callbacks and learning rate schedules in a study.

A trial ends at its goal, after its maximum number of steps, or when it cannot win its race. Its
cell determines its batch size. Whatever would end or lengthen a trial otherwise, or change its
batch size, is refused. Whatever only displays or saves has no effect. Schedules that follow a
metric are stepped by validations. `TrainingLength` sets the length of training that modules,
callbacks and schedules see.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, NamedTuple

from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch import callbacks as stock

import lit_dps.training.lightning_private as lightning_private
from lit_dps.core.errors import ConfigError
from lit_dps.data.loaders import EndlessLoader
from lit_dps.parallel.ddp import unsharded

# Arguments that a study sets itself. Lightning's logger would be a second place of results. Modules
# and callbacks that need a logger get a `DummyLogger`, which discards everything.
STUDY_TRAINER = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "max_epochs": -1,
}

ACCUMULATION_KEY = "trainer.accumulate_grad_batches"
_ENTIRE_SPLIT = "1.0: trials train on the entire training split"
_GOAL_ENDS = "left out: a trial ends at its goal or its budget, such as goal.max_steps"
_CALLBACKS_WITHOUT_EFFECT = (stock.Checkpoint, stock.ProgressBar, stock.ModelSummary)
_REFUSED_CALLBACKS = {
    stock.EarlyStopping: "a trial ends only at its goal, its budget or by its race",
    stock.Timer: "a trial ends only at its goal, its budget or by its race",
    stock.GradientAccumulationScheduler: "batch.schedule sets the batch size of each step",
    stock.BatchSizeFinder: "the batch size is the cell's",
    stock.LearningRateFinder: "metaparameters are the trial's: search them in study.space",
    stock.ModelPruning: "pruning is the study's: pruning.method and study.sparsities",
}


class ArgumentRule(NamedTuple):
    """Which values of a trainer argument are allowed without a message, and why no others."""

    allowed: tuple[Any, ...]
    reason: str


_REFUSED = {
    "max_steps": ArgumentRule((-1, None), "remove it, and set goal.max_steps"),
    "min_steps": ArgumentRule((None,), _GOAL_ENDS),
    "min_epochs": ArgumentRule((None,), _GOAL_ENDS),
    "max_time": ArgumentRule((None,), _GOAL_ENDS),
    "limit_train_batches": ArgumentRule((None, 1.0), _ENTIRE_SPLIT),
    "overfit_batches": ArgumentRule(
        (0, 0.0, None), "0: trials train and validate on entire splits"
    ),
    "limit_val_batches": ArgumentRule(
        (None, 1.0), "1.0: the goal needs the entire validation split"
    ),
    "fast_dev_run": ArgumentRule(
        (False, 0, None), "left out: a study makes its own short run first"
    ),
    "barebones": ArgumentRule((False, None), "left out: it turns off validation"),
}
_OVERRIDDEN = {
    "max_epochs": ArgumentRule(
        (-1, None), "a trial ends at its goal or its budget, such as goal.max_steps"
    ),
    "logger": ArgumentRule(
        (False, None), "a study keeps its results itself and shows them in MLflow"
    ),
    "enable_checkpointing": ArgumentRule((False, None), "a study saves its trials itself"),
    "val_check_interval": ArgumentRule((1.0, None), "goal.check_interval decides when to validate"),
    "check_val_every_n_epoch": ArgumentRule(
        (1, None), "goal.check_interval decides when to validate"
    ),
}


def check_trainer(trainer: Mapping[str, Any]) -> None:
    """Raise ConfigError for an argument of the trainer that a study cannot accept."""
    for key, rule in _REFUSED.items():
        value = trainer.get(key, rule.allowed[0])
        # Types matter: to Lightning, 1 is one batch and 1.0 is all batches.
        if not any(value == other and type(value) is type(other) for other in rule.allowed):
            raise ConfigError(f"trainer.{key}", value, rule.reason)
    batches = trainer.get("accumulate_grad_batches")
    if batches is not None:
        check_accumulation(ACCUMULATION_KEY, batches)


def check_accumulation(key: str, batches: Any) -> None:
    """Raise ConfigError about `key` unless a number of batches can make an optimizer step."""
    if isinstance(batches, bool) or not isinstance(batches, int) or batches < 1:
        raise ConfigError(key, batches, "1 or more batches that make an optimizer step")


def overridden_arguments(trainer: Mapping[str, Any]) -> list[str]:
    """Return a line for each argument that has no effect, because a study sets it."""
    lines = []
    for key, rule in _OVERRIDDEN.items():
        value = trainer.get(key)
        if value in rule.allowed:
            continue
        if isinstance(value, Mapping) and "class_path" in value:
            value = value["class_path"]
        lines.append(f"trainer.{key} = {value} has no effect in a study: {rule.reason}")
    return lines


def filter_callbacks(callbacks: list[Callback], source: str) -> list[Callback]:
    """Return the callbacks that run in a study, without those that only save or display.

    Args:
        callbacks: The user's callbacks.
        source: Where the callbacks come from, such as a configuration key, for errors.

    Raises:
        ConfigError: if a callback contradicts the rules of a study.
    """
    refuse_goals(callbacks, source)
    for callback in callbacks:
        for kind, reason in _REFUSED_CALLBACKS.items():
            if isinstance(callback, kind):
                name = type(callback).__name__
                raise ConfigError(source, name, f"omitted: {reason}")
    return [each for each in callbacks if not isinstance(each, _CALLBACKS_WITHOUT_EFFECT)]


def refuse_goals(callbacks: list[Callback], source: str) -> None:
    """Raise ConfigError for a goal among the user's callbacks, because the section goal has one.

    Args:
        callbacks: The user's callbacks.
        source: As for `filter_callbacks`.
    """
    for callback in callbacks:
        # The module of `GoalErrorCallback` imports this one.
        if getattr(callback, "ends_at_goal", False):
            name = type(callback).__name__
            raise ConfigError(source, name, "omitted: the section goal ends the run")


def filter_module_callbacks(module: LightningModule) -> None:
    """Apply `filter_callbacks` to the results of the module's `configure_callbacks`."""
    configure = module.configure_callbacks
    if type(module).configure_callbacks is LightningModule.configure_callbacks:
        return
    source = f"{type(module).__name__}.configure_callbacks"

    def configure_callbacks() -> list[Callback]:
        return filter_callbacks(as_list(configure()), source)

    vars(module)["configure_callbacks"] = configure_callbacks


def as_list(callbacks: Any) -> list[Any]:
    """Return callbacks, or their configurations, as a list: of one, of several, or of None."""
    if callbacks is None:
        return []
    if isinstance(callbacks, (list, tuple)):
        return list(callbacks)
    return [callbacks]


def prepare_schedules(trainer: Trainer, module: LightningModule) -> None:
    """Let schedules that follow a metric wait for its first value.

    Raises:
        ConfigError: if a schedule or weight average acts at the ends of epochs, but the training
            data are one endless epoch.
    """
    configs = []
    if module.automatic_optimization:
        configs = trainer.lr_scheduler_configs
    acts_by_epochs = any(config.interval == "epoch" for config in configs)
    if lightning_private.callbacks_of(trainer, stock.StochasticWeightAveraging):
        acts_by_epochs = True
    if acts_by_epochs and isinstance(unsharded(trainer.train_dataloader), EndlessLoader):
        data = type(lightning_private.data_module_of(trainer)).__name__
        raise ConfigError(
            "model",
            type(module).__name__,
            f"a module whose schedule counts steps. The training data of {data} are one "
            "endless epoch, so no epoch ends",
        )
    for config in configs:
        if config.reduce_on_plateau:
            config.strict = False  # an epoch may end before the first validation


def follows_metric(trainer: Trainer) -> bool:
    """Return True if a schedule of the trainer follows a metric, as `ReduceLROnPlateau` does."""
    return any(config.reduce_on_plateau for config in trainer.lr_scheduler_configs)


def forget_followed_metrics(trainer: Trainer, interval: str, ended: int) -> None:
    """Delete metrics that schedules were just stepped by, until there are new values.

    Otherwise a schedule would use one validation several times, because an epoch may be shorter
    than the interval between validations. Call this when an interval begins.

    Args:
        trainer: The trainer of the fit.
        interval: The interval of the schedules that may have stepped, "epoch" or "step".
        ended: Ended epochs, or ended batches of the last epoch.
    """
    for config in trainer.lr_scheduler_configs:
        if not config.reduce_on_plateau or config.interval != interval:
            continue
        if ended % config.frequency == 0 and config.monitor is not None:
            trainer.callback_metrics.pop(config.monitor, None)


class TrainingLength:
    """Sets `trainer.max_epochs` to the epochs that `max_steps` need, unless epochs are limited.

    Module and callbacks see this value from the module's `setup` on. It depends on the length of
    the train dataloader. So the dataloader is made when the value is first read, and no later than
    the optimizers. Training still ends by steps: see `extend_max_epochs`.

    Args:
        trainer: The trainer of the fit.

    Attributes:
        sets_epochs: Whether `set_max_epochs` has set `trainer.max_epochs`.

    Raises:
        ConfigError: if the data module's `setup` or `train_dataloader` reads `trainer.max_epochs`.
    """

    def __init__(self, trainer: Trainer):
        self.trainer = trainer
        self.sets_epochs = False
        self._is_making_data = False

    def before_data(self, data: LightningDataModule, begin: Callable[[], Any]) -> None:
        """Call `begin` before the data module's `setup` in the next fit.

        During this `setup`, reading the epochs raises ConfigError.
        """
        setup = data.setup

        @wraps(setup)
        def watched_setup(stage: str) -> None:
            vars(data).pop("setup", None)
            if stage != "fit":
                setup(stage)
                return
            begin()
            self._is_making_data = True
            try:
                setup(stage)
            finally:
                self._is_making_data = False

        vars(data)["setup"] = watched_setup

    def set_max_epochs(self) -> None:
        """Make `trainer.max_epochs` computed when it is read, unless epochs are limited."""
        if lightning_private.has_epoch_limit(self.trainer):
            return
        self.sets_epochs = True
        lightning_private.compute_max_epochs(self.trainer, self._epochs)

    def fix_at_optimizers(self, module: LightningModule, epochs_begun: Callable[[], int]) -> None:
        """Fix `trainer.max_epochs` when the module configures its optimizers.

        Args:
            module: The module.
            epochs_begun: Returns the number of epochs that a resumed run had begun.
        """
        if not self.sets_epochs:
            return
        configure = module.configure_optimizers

        @wraps(configure)
        def configure_optimizers() -> Any:
            vars(module).pop("configure_optimizers", None)
            epochs = self._epochs()
            lightning_private.set_max_epochs(self.trainer, epochs)
            configured = configure()
            if epochs != -1:
                # A schedule sees the same length after a resume. The run itself may need more
                # epochs.
                lightning_private.set_max_epochs(self.trainer, max(epochs, epochs_begun() + 1))
            return configured

        vars(module)["configure_optimizers"] = configure_optimizers

    def _epochs(self) -> int:
        """Return the epochs that the trainer's steps need; -1 if an epoch has no length."""
        trainer = self.trainer
        self._make_data()
        if isinstance(unsharded(trainer.train_dataloader), EndlessLoader):
            # To Lightning this is one endless epoch. The examples give the number of passes.
            data = lightning_private.data_module_of(trainer)
            size = getattr(data, "training_size", None)
            if size is None:
                return -1
            batches = trainer.max_steps * trainer.accumulate_grad_batches
            return math.ceil(data.examples_of(batches) / size)
        steps = self.steps_of_epoch()
        if steps is None:
            return -1
        return max(1, math.ceil(trainer.max_steps / steps))

    def _make_data(self) -> None:
        """Make the train dataloader.

        Raises:
            ConfigError: if the data module reads the number of epochs for this.
        """
        if self._is_making_data:
            raise ConfigError(
                "data",
                type(lightning_private.data_module_of(self.trainer)).__name__,
                "a class whose setup() and train_dataloader() do not read trainer.max_epochs "
                "or trainer.estimated_stepping_batches. Both follow from the length of the "
                "train dataloader: read trainer.max_steps instead",
            )
        self._is_making_data = True
        try:
            lightning_private.set_up_data(self.trainer)
        finally:
            self._is_making_data = False

    def steps_of_epoch(self) -> int | None:
        """Return the optimizer steps of an epoch; None if an epoch has no length.

        The data have to be set up.
        """
        batches = lightning_private.batches_of_epoch(self.trainer)
        if not 0 < batches < math.inf:
            return None
        return math.ceil(batches / self.trainer.accumulate_grad_batches)


def extend_max_epochs(trainer: Trainer) -> None:
    """Allow one more epoch, for a run whose epochs are shorter than expected.

    Call this at the end of an epoch, if `TrainingLength` set the limit.
    """
    limit = lightning_private.max_epochs(trainer)
    if limit is not None and limit != -1:
        epochs = max(limit, lightning_private.epochs_with_next(trainer))
        lightning_private.set_max_epochs(trainer, epochs)
