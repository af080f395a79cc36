"""fit, validate, test: stock LightningCLI, with the goal and the pruning of a trial as
callbacks."""

from __future__ import annotations

import logging
import os
import pickle
import sys
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import MLFlowLogger

from lit_dps.cli.parser import OneLineErrors, refuse_nulls
from lit_dps.core.config import StorageConfig, StudyConfig
from lit_dps.core.errors import ConfigError, DataError
from lit_dps.core.parse_errors import one_line
from lit_dps.core.trial_config import TRIAL_SECTIONS
from lit_dps.parallel import launch, ranks, settings
from lit_dps.parallel.process import defer_interrupt, keep_freed_memory
from lit_dps.readings import SmoothnessCallback
from lit_dps.report.pruning_notes import unmasked_note
from lit_dps.storage.urls import is_http, without_password
from lit_dps.training import DelayCallback, GoalErrorCallback, LocalSGDCallback, PruningCallback
from lit_dps.training.trainer_rules import as_list

CALLBACKS = {  # in the order in which they are asked
    "local": LocalSGDCallback,
    "goal": GoalErrorCallback,
    "pruning": PruningCallback,
    "optim": DelayCallback,
    "smoothness": SmoothnessCallback,
}
SETTINGS = {"study": StudyConfig, "storage": StorageConfig}
KEYWORDS = ("best", "last", "hpc")  # checkpoints that Lightning finds itself


class Parser(OneLineErrors, LightningArgumentParser):
    """LightningCLI's parser with errors of one line."""


class FitLogger(MLFlowLogger):
    """MLFlowLogger that finishes a write before Ctrl-C ends the run.

    A KeyboardInterrupt during a write would leave the transaction open. SQLite would then refuse
    all further writes of the run ("database is locked").
    """

    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        with defer_interrupt():
            super().log_metrics(*args, **kwargs)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        with defer_interrupt():
            super().log_hyperparams(*args, **kwargs)


class LogConfig(SaveConfigCallback):
    """Keeps the configuration with the MLflow run; the stock callback asserts a log folder that
    MLFlowLogger lacks."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **{**kwargs, "save_to_log_dir": False})

    def save_config(self, trainer, pl_module, stage: str) -> None:
        if stage == "fit" and isinstance(trainer.logger, MLFlowLogger):
            config = self.config.clone()
            config.pop(
                "storage"
            )  # where it is kept is no part of the experiment, and may hold a password
            text = self.parser.dump(config, skip_none=False, skip_validation=True)
            text = text.replace(
                trainer.logger._tracking_uri, without_password(trainer.logger._tracking_uri)
            )
            trainer.logger.experiment.log_text(trainer.logger.run_id, text, "config.yaml")


class DPSCLI(LightningCLI):
    """One configuration for all verbs: LightningCLI's trainer, model and data; goal, pruning, study
    and storage.

    Args:
        gather: Is given the trainer's configuration before anything is made of it, and joins the
            ranks it asks for.
    """

    def __init__(
        self, gather: Callable[[dict[str, Any]], None] = lambda trainer: None, **kwargs: Any
    ):
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
        return {
            verb: skip for verb, skip in LightningCLI.subcommands().items() if verb != "predict"
        }

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        for key, cls in TRIAL_SECTIONS.items():
            parser.add_class_arguments(cls, key, sub_configs=True)
        for key, cls in SETTINGS.items():
            parser.add_class_arguments(cls, key)

    def _parse_ckpt_path(self) -> None:
        config = self.config.get(self.config.get("subcommand") or "", {})
        path = config.get("ckpt_path")
        try:
            super()._parse_ckpt_path()
        except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
            said = next(iter(str(error).splitlines()), type(error).__name__)
            raise DataError(f"cannot read the checkpoint {path}: {said}") from error
        if path is not None and not (path in KEYWORDS or is_http(path) or os.path.exists(path)):
            raise ConfigError("ckpt_path", path, f"a file, or one of {', '.join(KEYWORDS)}")

    def before_instantiate_classes(self) -> None:
        config = self.config if self.subcommand is None else self.config[self.subcommand]
        if not isinstance(config.trainer, Namespace):
            raise ConfigError(
                "trainer", config.trainer, "arguments of Lightning's Trainer by name, or left out"
            )
        refuse_nulls(config, TRIAL_SECTIONS | SETTINGS)
        if self.subcommand is None:
            return
        # Sections and callbacks refuse values that are not allowed before anything is created.
        for key, callback in CALLBACKS.items():
            callback.of(TRIAL_SECTIONS[key](**config[key].as_dict()))
        if (
            config.weights_only is None
        ):  # Lightning would execute what stands in a checkpoint from the web
            config.weights_only = True
        self._gather(config.trainer.as_dict())
        storage = StorageConfig(**config.storage.as_dict())
        if (
            config.trainer.default_root_dir is None
        ):  # checkpoints go here where the logger has no folder
            config.trainer.default_root_dir = storage.folder
        if config.trainer.logger in (None, True) and self.subcommand == "fit":
            from lit_dps.tracking.client import open_experiment

            name = config.study.workload or "fit"

            def make() -> None:
                open_experiment(storage.mlflow_uri, storage.folder, name)

            ranks.on_rank_zero(make)
            args = Namespace(experiment_name=name, tracking_uri=storage.mlflow_uri, run_name="fit")
            logger = Namespace(class_path="lit_dps.cli.fit.FitLogger", init_args=args)
            nothing = Namespace(class_path="lightning.pytorch.loggers.logger.DummyLogger")
            config.trainer.logger = nothing if ranks.rank() else logger
        elif config.trainer.logger in (None, True):
            config.trainer.logger = False

    def _run_subcommand(self, subcommand: str) -> None:
        error = None
        if subcommand == "fit":
            goal_callback_of(self.trainer).before_fit(self.trainer, self.datamodule)
        try:
            super()._run_subcommand(subcommand)
        except BaseException as raised:
            error = raised
            raise
        finally:
            if subcommand == "fit" and ranks.rank() == 0:
                _tell_end(self.trainer, error)

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        config = self.config_init[self.subcommand]
        arguments = {**settings.arguments(dict(config.trainer.items())), **kwargs}
        callbacks = as_list(arguments.get("callbacks"))
        callbacks += [callback.of(config[key]) for key, callback in CALLBACKS.items()]
        return super().instantiate_trainer(**{**arguments, "callbacks": callbacks})


def main(argv: list[str]) -> int:
    """Runs fit, validate or test; argv[0] is the verb."""
    keep_freed_memory()
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")  # Lightning 2.6 under torch 2.15
    warnings.filterwarnings(
        "ignore", message=".*sync_dist=True.*"
    )  # what is logged is of all ranks already
    sys.argv = ["lit-dps", *argv]  # LightningCLI warns of arguments given otherwise
    with ExitStack() as group:

        def gather(trainer: dict[str, Any]) -> None:  # the other ranks run the same command
            asked, gpu = settings.ranks_asked(trainer), settings.on_gpu(trainer)
            group.enter_context(launch.group_of(asked, gpu, main, argv))

        DPSCLI(gather, seed_everything_default=0)
    return 0


def goal_callback_of(trainer: Trainer) -> GoalErrorCallback:
    """Return the callback that stops a trainer at its goal."""
    return next(
        callback for callback in trainer.callbacks if isinstance(callback, GoalErrorCallback)
    )


def _tell_end(trainer: Trainer, error: BaseException | None) -> None:
    """Prints where the checkpoint of a run of `fit` is and, in a last line, how it ended, whatever
    ended it.

    Nothing where it was refused before its first batch: the error says so.
    """
    goal = goal_callback_of(trainer)
    steps = "1 step" if trainer.global_step == 1 else f"{trainer.global_step} steps"
    if isinstance(error, Exception) and not trainer.global_step:
        return
    saved = [
        callback.best_model_path or callback.last_model_path
        for callback in trainer.checkpoint_callbacks
    ]
    for path in filter(None, saved):
        print(f"checkpoint: {path if '://' in path else os.path.relpath(path)}")
    if saved and not any(saved):
        print("checkpoint: none was written")
    for callback in trainer.callbacks:
        if isinstance(callback, PruningCallback) and (note := unmasked_note(callback.flags)):
            print(f"note: {note}")
    if goal.status is not None:
        print(goal.run.outcome)
    elif isinstance(error, (SystemExit, KeyboardInterrupt)):  # Lightning exits at a signal
        print(f"interrupted after {steps}: {goal.run.last_check or 'before its first check'}")
    elif error is not None:
        print(f"failed after {steps}: {type(error).__name__}: {one_line(error)}")
    else:
        known = f"goal ({goal.run.last_check})" if goal.run.last_check else "first check"
        print(f"no result: the trainer stopped after {steps}, before its {known}")
