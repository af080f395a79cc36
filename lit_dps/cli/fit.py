"""fit: train one trial; with --of STUDY, retrain a trial of a study.

Lightning's Trainer runs it. It ends at the goal or at a budget of the goal.
With --of STUDY it trains the trial of K* of a stored study again.
"""

from __future__ import annotations

import logging
import math
import os
import pickle
import re
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import MLFlowLogger

from lit_dps.advice.prediction import PredictionCallback
from lit_dps.cli.command_line import CommandLine
from lit_dps.cli.config_file import SECTION_CLASSES
from lit_dps.cli.json_output import Outcome, with_document
from lit_dps.cli.parser import CommandParser, refuse_nulls
from lit_dps.core.config import StorageConfig
from lit_dps.core.errors import ConfigError, DataError, first_line
from lit_dps.core.exit_codes import ExitCode
from lit_dps.core.parse_errors import refusal
from lit_dps.core.trial_config import TRIAL_SECTIONS
from lit_dps.core.unit import EXAMPLES, value_at
from lit_dps.data.loaders import EndlessLoader
from lit_dps.parallel import ddp, launch, ranks
from lit_dps.parallel.process import defer_signals, keep_freed_memory
from lit_dps.readings import ReadingsCallback
from lit_dps.report.document import CellEntry, run_document
from lit_dps.report.pruning_notes import unmasked_note
from lit_dps.storage.urls import is_http, without_password
from lit_dps.study.retrain import KeepWeights, check_is_new
from lit_dps.training import (
    AverageCallback,
    BatchScheduleCallback,
    DelayCallback,
    GoalErrorCallback,
    LocalSGDCallback,
    PruningCallback,
    lightning_private,
)
from lit_dps.training.example_count import declared_batch_size
from lit_dps.training.lightning_private import callbacks_of
from lit_dps.training.trainer_rules import as_list, refuse_goals

# By section, in the order in which the trainer calls them, as in a study. `optim` has an
# AverageCallback too, which follows pruning and precedes the goal.
CALLBACKS = {
    "batch": BatchScheduleCallback,
    "pruning": PruningCallback,
    "optim": DelayCallback,
    "local": LocalSGDCallback,
    "goal": GoalErrorCallback,
    "smoothness": ReadingsCallback,
}
SECONDS_BETWEEN_WRITES = 2.0  # of metrics to MLflow
MAX_METRICS_OF_MLFLOW = 1000  # in a write
NO_CHARACTERS_OF_MLFLOW = re.compile("[^a-zA-Z0-9_/. -]+")  # in the name of a metric
KEYWORDS = ("best", "last", "hpc")  # for checkpoints that Lightning looks up


class Parser(CommandParser, LightningArgumentParser):
    """LightningCLI's parser with errors of one line."""


class FitLogger(MLFlowLogger):
    """MLFlowLogger that writes metrics together, and finishes a write before a signal ends the run.

    A write takes tens of milliseconds, so that metrics of `SECONDS_BETWEEN_WRITES` share one. The
    end of the run writes the last ones. A KeyboardInterrupt during a write would leave the
    transaction open. SQLite would then refuse all further writes of the run ("database is locked").
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._waiting: list[Any] = []
        self._written_at = time.monotonic()

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        from lit_dps.tracking.client import metric_entry

        milliseconds = int(1000 * time.time())
        for name, value in metrics.items():
            key = NO_CHARACTERS_OF_MLFLOW.sub("", name)
            self._waiting.append(metric_entry(key, float(value), milliseconds, step or 0))
        if time.monotonic() - self._written_at >= SECONDS_BETWEEN_WRITES:
            self._write()

    def _write(self) -> None:
        """Write the metrics that wait."""
        metrics = self._waiting
        self._waiting = []
        with defer_signals():
            for start in range(0, len(metrics), MAX_METRICS_OF_MLFLOW):
                part = metrics[start : start + MAX_METRICS_OF_MLFLOW]
                self.experiment.log_batch(run_id=self.run_id, metrics=part)
        self._written_at = time.monotonic()

    def finalize(self, status: str = "success") -> None:
        self._write()
        super().finalize(status)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        with defer_signals():
            super().log_hyperparams(*args, **kwargs)


class LogConfig(SaveConfigCallback):
    """Stores the configuration in the MLflow run.

    Lightning's callback needs a log folder, which MLFlowLogger lacks.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **{**kwargs, "save_to_log_dir": False})

    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        logger = trainer.logger
        if stage != "fit" or not isinstance(logger, MLFlowLogger):
            return
        config = self.config.clone()
        # The place of storage is no part of the experiment, and may contain a password.
        config.pop("storage")
        text = self.parser.dump(config, skip_none=False, skip_validation=True)
        uri = str(logger._tracking_uri)
        text = text.replace(uri, without_password(uri))
        logger.experiment.log_text(logger.run_id, text, "config.yaml")


class DPSCLI(LightningCLI):
    """One configuration for all verbs: trainer, model and data, and the sections of this package.

    Args:
        command: The command line.
        gather: Called with the trainer's configuration before any object is made. It joins the
            ranks that the configuration needs. None stays a single process.
        kwargs: Arguments of LightningCLI.
    """

    config: Namespace  # pyright: ignore[reportIncompatibleVariableOverride]
    parser: CommandParser  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(
        self,
        command: CommandLine,
        gather: Callable[[dict[str, Any]], None] | None = None,
        **kwargs: Any,
    ):
        self.command = command
        self._gather = gather
        super().__init__(
            LightningModule,
            LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            parser_class=Parser,
            save_config_callback=LogConfig,
            auto_configure_optimizers=False,
            trainer_defaults={"max_epochs": -1, "num_sanity_val_steps": 0},
            **kwargs,
        )

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        subcommands = LightningCLI.subcommands()
        del subcommands["predict"]
        return subcommands

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        parser = super().init_parser(**{"prog": "lit-dps", **kwargs})
        parser.command = self.command  # pyright: ignore[reportAttributeAccessIssue]
        return parser

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        for key, cls in SECTION_CLASSES.items():
            parser.add_class_arguments(cls, key, sub_configs=key in TRIAL_SECTIONS)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        # LightningCLI itself would read `sys.argv`.
        self.config = parser.parse_args([self.command.verb, *self.command.words])

    def _set_seed(self) -> None:
        # Lightning would end with a traceback.
        seed = self._get(self.config, "seed_everything")
        if not isinstance(seed, bool) and not 0 <= seed < 2**32:
            raise ConfigError("seed_everything", seed, "0 or more, and below 2^32 = 4294967296")
        super()._set_seed()

    def _parse_ckpt_path(self) -> None:
        config = self.config.get(self.config.get("subcommand") or "", {})
        path = config.get("ckpt_path")
        try:
            super()._parse_ckpt_path()
        except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
            raise DataError(
                f"the checkpoint {path} cannot be read ({first_line(error)}). Give another "
                "ckpt_path.",
                key="ckpt_path",
                value=path,
            ) from error
        if path is None or path in KEYWORDS or is_http(path) or os.path.exists(path):
            return
        raise ConfigError("ckpt_path", path, f"a file, or one of {', '.join(KEYWORDS)}")

    def before_instantiate_classes(self) -> None:
        """Refuse values that are not allowed, before anything is created."""
        config = self.config
        if self.subcommand is not None:
            config = self.config[self.subcommand]
        if not isinstance(config.trainer, Namespace):
            allowed = "arguments of Lightning's Trainer by name, or omitted"
            raise ConfigError("trainer", config.trainer, allowed)
        refuse_nulls(config, SECTION_CLASSES)
        if self.subcommand is None:
            return
        for key, callback in CALLBACKS.items():
            callback.of(TRIAL_SECTIONS[key](**config[key].as_dict()))
        if config.weights_only is None:
            # Lightning would execute code in a checkpoint from the web.
            config.weights_only = True
        if self._gather is not None:
            self._gather(config.trainer.as_dict())
        storage = StorageConfig(**config.storage.as_dict())
        if config.trainer.default_root_dir is None:
            # Checkpoints go here if the logger has no folder.
            config.trainer.default_root_dir = storage.folder
        if config.trainer.logger in (None, True):
            config.trainer.logger = False
            if self.subcommand == "fit":
                config.trainer.logger = _mlflow_logger(storage, config.study.workload or "fit")

    def _run_subcommand(self, subcommand: str) -> None:
        if subcommand != "fit":
            super()._run_subcommand(subcommand)
            return
        error = None
        goal_callback_of(self.trainer).before_fit(self.trainer, self.datamodule)
        try:
            super()._run_subcommand(subcommand)
        except BaseException as raised:
            error = raised
            raise
        finally:
            if ranks.rank() == 0:
                _print_end(self.trainer, error)

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        config = self.config_init[str(self.subcommand)]
        arguments = {**ddp.trainer_arguments(dict(config.trainer.items())), **kwargs}
        callbacks = as_list(arguments.get("callbacks"))
        refuse_goals(callbacks, "trainer.callbacks")
        for callback in callbacks:
            if isinstance(callback, PredictionCallback):
                callback.settings = [(each.key, each.value) for each in self.command.settings]
        for key, kind in CALLBACKS.items():
            if key == "goal" and config.optim.average_half_life:
                callbacks.append(AverageCallback(config.optim.average_half_life))
            callback = kind.of(config[key])
            # The trainer calls each callback six times a step.
            if not _is_idle(callback):
                callbacks.append(callback)
        path = _checkpoint_option(self.command)
        if path is not None:
            callbacks.append(KeepWeights(path))
        return super().instantiate_trainer(**{**arguments, "callbacks": callbacks})


@with_document
def main(command: CommandLine) -> Outcome:
    """Run fit, validate or test."""
    keep_freed_memory()
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")  # Lightning 2.6 under torch 2.15
    # Logged values are means over all ranks already.
    warnings.filterwarnings("ignore", message=".*sync_dist=True.*")
    if command.verb == "fit":  # the other verbs refuse these options
        path = _checkpoint_option(command)
        if path is not None:
            check_is_new(path)
        command.words = _without_our_options(command.words)
    cli = _run(command)
    return Outcome(ExitCode.DONE, lambda: _document(cli.trainer))


def _checkpoint_option(command: CommandLine) -> Path | None:
    """Return the file of `fit --checkpoint FILE`; None without it."""
    if command.verb != "fit" or not command.has("checkpoint"):
        return None
    file = command.value("checkpoint")
    if not file:
        raise ConfigError("--checkpoint", file, "a file that does not exist yet")
    return Path(str(file))


def _without_our_options(words: list[str]) -> list[str]:
    """Return the words without `--json` and `--checkpoint FILE`, which LightningCLI lacks."""
    kept = []
    is_value = False
    for word in words:
        if is_value:
            is_value = False
        elif word == "--checkpoint":
            is_value = True
        elif word != "--json" and not word.startswith("--checkpoint="):
            kept.append(word)
    return kept


def _run(command: CommandLine) -> DPSCLI:
    """Run a verb in all ranks that it needs."""
    with ExitStack() as group:

        def gather(trainer: dict[str, Any]) -> None:
            # The other ranks run the same command.
            world, on_gpu = ddp.ranks_asked(trainer), ddp.on_gpu(trainer)
            group.enter_context(launch.group_of(world, on_gpu, main, command))

        return DPSCLI(command, gather, seed_everything_default=0)


def _document(trainer: Trainer) -> dict[str, Any] | None:
    """Return the document of a run of `fit` that ended; None on ranks but the first."""
    if ranks.rank() > 0:
        return None
    batch_size = None
    if trainer.world_size == 1:  # otherwise a loader may be of one rank or of all
        batch_size = declared_batch_size(trainer) or None
    if batch_size is not None:
        batch_size *= trainer.accumulate_grad_batches
    path = next(iter(_checkpoints_of(trainer)), None)
    entry = CellEntry(batch_size=batch_size)
    attempt = goal_callback_of(trainer).attempt
    is_constant = batch_size is not None and _all_steps_are_full(trainer)

    def examples_of(steps: int) -> float | None:
        if attempt.goal.metric != EXAMPLES.column:
            counted = value_at(attempt.curve, EXAMPLES.column, steps)
            if counted is not None:
                return counted
        if batch_size is None or not is_constant:
            return None
        return steps * batch_size

    return run_document(attempt, entry, None, path, examples_of).to_dict()


def _all_steps_are_full(trainer: Trainer) -> bool:
    """Return True if every step of a run has the same known number of examples."""
    for callback in callbacks_of(trainer, BatchScheduleCallback):
        if not callback.schedule.is_constant:
            return False
    batches = trainer.num_training_batches
    if math.isfinite(batches) and batches % trainer.accumulate_grad_batches:
        return False
    loaders, _ = lightning_private.train_loaders(trainer)
    if loaders is None:
        return False
    loader = ddp.unsharded(loaders.flattened[0])
    if isinstance(loader, EndlessLoader) or getattr(loader, "drop_last", False):
        return True
    try:
        return len(loader.sampler) % loader.batch_size == 0
    except (AttributeError, TypeError):  # of a stream, or with a sampler of batches
        return False


def _is_idle(callback: Any) -> bool:
    """Return True if a callback of this package does nothing in a fit, as it is configured."""
    if isinstance(callback, LocalSGDCallback):
        return not callback.schedule.on
    if isinstance(callback, DelayCallback):
        return callback.delay == 0
    if isinstance(callback, ReadingsCallback):
        return not callback.has_readings
    return isinstance(callback, BatchScheduleCallback) and callback.schedule.is_constant


def goal_callback_of(trainer: Trainer) -> GoalErrorCallback:
    """Return the callback that stops a trainer at its goal."""
    return callbacks_of(trainer, GoalErrorCallback)[0]


def _mlflow_logger(storage: StorageConfig, experiment: str) -> Namespace:
    """Return the configuration of the logger of `fit`: MLflow on rank 0, none on other ranks."""
    from lit_dps.tracking.client import open_experiment

    def create_experiment() -> None:
        open_experiment(storage.mlflow_uri, storage.folder, experiment)

    ranks.on_rank_zero(create_experiment)
    if ranks.rank() > 0:
        return Namespace(class_path="lightning.pytorch.loggers.logger.DummyLogger")
    arguments = Namespace(
        experiment_name=experiment, tracking_uri=storage.mlflow_uri, run_name="fit"
    )
    return Namespace(class_path="lit_dps.cli.fit.FitLogger", init_args=arguments)


def _print_end(trainer: Trainer, error: BaseException | None) -> None:
    """Print where the checkpoint of a run of `fit` is and, in a last line, how the run ended.

    It prints nothing for a run that failed before its first step: the error is reported.
    """
    if isinstance(error, Exception) and not trainer.global_step:
        return
    paths = _checkpoints_of(trainer)
    for path in paths:
        if "://" not in path:
            path = os.path.relpath(path)
        print(f"checkpoint: {path}")
    if trainer.checkpoint_callbacks and not paths:
        print("checkpoint: none was written")
    for callback in callbacks_of(trainer, PruningCallback):
        note = unmasked_note(callback.flags)
        if note:
            print(f"note: {note}")
    print(_end_of_run(trainer, error))


def _checkpoints_of(trainer: Trainer) -> list[str]:
    """Return the file of `--checkpoint`, and the best or last file of each checkpoint callback."""
    paths = []
    for callback in callbacks_of(trainer, KeepWeights):
        if callback.path.exists():
            paths.append(str(callback.path))
    for callback in trainer.checkpoint_callbacks:
        path = getattr(callback, "best_model_path", "") or getattr(callback, "last_model_path", "")
        if path:
            paths.append(path)
    return paths


def _end_of_run(trainer: Trainer, error: BaseException | None) -> str:
    """Return how a run of `fit` ended, in one line."""
    goal = goal_callback_of(trainer)
    if goal.status is not None:
        return goal.attempt.outcome
    last_validation = goal.attempt.last_validation
    steps = f"{trainer.global_step} step{'s' * (trainer.global_step != 1)}"
    if isinstance(error, (SystemExit, KeyboardInterrupt)):  # Lightning exits at a signal
        return f"interrupted after {steps}: {last_validation or 'before its first check'}"
    if error is not None:
        return f"failed after {steps}: {type(error).__name__}: {refusal(error)}"
    if not last_validation:
        return f"no result: the trainer stopped after {steps}, before its first check"
    return f"no result: the trainer stopped after {steps}, before its goal ({last_validation})"
