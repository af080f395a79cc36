"""PredictionCallback stores what was predicted for a run, and its real steps and hours.

`calibrate` compares the predictions of all recommended runs with what they really took.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from lightning.pytorch import Callback, LightningModule, Trainer

from lit_dps.analysis.intervals import Interval, estimate
from lit_dps.analysis.tables import aligned, significant
from lit_dps.core.atomic_write import not_written
from lit_dps.core.errors import StorageError
from lit_dps.core.goal import Goal
from lit_dps.core.text import number_text
from lit_dps.core.trial import Status
from lit_dps.parallel import ranks
from lit_dps.parallel.ddp import SharedBatchDDP
from lit_dps.storage.advice_store import AdviceStore
from lit_dps.study.identity import FREE_DATA
from lit_dps.training import GoalErrorCallback
from lit_dps.training.example_count import declared_batch_size, full_batch_size, record_batches
from lit_dps.training.lightning_private import callbacks_of
from lit_dps.training.stopwatch import stopwatch_of
from lit_dps.training.workload import place_of

# Sections of the configuration that decide the steps to a goal, beside the section goal.
SECTIONS = ("model", "data", "optim", "local", "pruning", "batch")
# Keys of the section trainer that decide the steps or their seconds.
TRAINER_KEYS = (
    "trainer.accelerator",
    "trainer.precision",
    "trainer.gradient_clip_val",
    "trainer.gradient_clip_algorithm",
)
CLASS_PATH = ".class_path"
EQUALS = " = "  # between the key and the value of a setting as text


class PredictionCallback(Callback):
    """Logs predicted and real steps and hours of a run to the goal, and stores them.

    `lit-dps calibration` reads the stored pairs. Like the predictions, hours are of steps with
    their data and of validations; the time to start, to log and to save is stored separately.
    A run with another batch size, goal or workload gets a note and is not stored. A run on another
    number of devices is stored with that number, and its hours are not compared. A run from a
    checkpoint is stored without hours, because its steps before the checkpoint were not timed.

    Args:
        storage: Optuna storage URL of the study that the advice is for.
        study: The name of the study.
        batch_size: Examples of an optimizer step.
        devices: The number of devices.
        steps, hours: Lower 95 % limit, value and upper limit of the prediction.
        goal: The goal by `describe_goal`; None if it is unknown, as before 2026-11-29.
        workload: The settings by `settings_texts`; None if they are unknown.

    Attributes:
        settings: The keys that files and options of `fit` set, with their values, in their order;
            None outside of the command.
    """

    def __init__(
        self,
        storage: str,
        study: str,
        batch_size: int,
        devices: int,
        steps: list[float],
        hours: list[float],
        goal: str | None = None,
        workload: list[str] | None = None,
    ):
        self.storage = storage
        self.study = study
        self.batch_size = batch_size
        self.devices = devices
        self.steps = steps
        self.hours = hours
        self.goal = goal
        self.workload = workload
        self.settings: Sequence[tuple[str, Any]] | None = None
        self._began = time.monotonic()
        self._real_batch_size = 0  # 0 until it is known

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._began = time.monotonic()
        self._real_batch_size = 0
        if stage == "fit":
            record_batches(trainer)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if not self._real_batch_size:
            self._real_batch_size = _batch_size_of(trainer, batch)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Loggers run next, and their time is not predicted.
        stopwatch_of(trainer).switch_to(None, pl_module.device)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if ranks.rank():
            return
        difference = self._difference(trainer)
        if difference is not None:
            print(f"note: {difference}. It is not stored.", file=sys.stderr)
            return
        real = self._real_values(trainer)
        for logger in trainer.loggers:
            known = {key: value for key, value in real.items() if value is not None}
            metrics = {f"real/{key}": float(value) for key, value in known.items()}
            metrics["predicted/steps"] = self.steps[1]
            metrics["predicted/hours"] = self.hours[1]
            logger.log_metrics(metrics, step=trainer.global_step)
        outcome = {
            "batch_size": self.batch_size,
            "devices": self.devices,
            "predicted_steps": self.steps,
            "predicted_hours": self.hours,
            **real,
            "ended": time.time(),
        }
        try:
            AdviceStore(self.storage, self.study).append("outcomes", outcome)
        except StorageError as error:
            # The run has ended, and its weights and results matter more.
            message = not_written("the outcome, for lit-dps calibration", error)
            print(f"note: {message}", file=sys.stderr)

    def _difference(self, trainer: Trainer) -> str | None:
        """Return how a run differs from the predicted one, as a clause; None if it does not."""
        if self._real_batch_size not in (0, self.batch_size):
            return (
                f"The prediction is for B = {self.batch_size}, but this run has B = "
                f"{self._real_batch_size}"
            )
        goal = _goal_callback(trainer)
        text = "no goal" if goal is None else describe_goal(goal.goal)
        if self.goal not in (None, text):
            return f"The prediction is for {self.goal}, but this run has {text}"
        if self.workload is None or self.settings is None:
            return None
        different = {*settings_texts(self.settings)} ^ {*self.workload}
        if different:
            keys = sorted({text.partition(EQUALS)[0] for text in different})
            return f"The prediction is for other values of {', '.join(keys)} than this run has"
        return None

    def _real_values(self, trainer: Trainer) -> dict[str, Any]:
        """Return the real values of a run, by the names that are stored and logged.

        Hours are None if not every step was timed.
        """
        seconds = time.monotonic() - self._began
        timed = stopwatch_of(trainer).timed
        hours = other_hours = None
        if timed.get("steps", 0) >= trainer.global_step:
            hours = (timed["training"] + timed["checking"]) / 3600
            other_hours = seconds / 3600 - hours
        goal = _goal_callback(trainer)
        steps_to_goal = None if goal is None else goal.steps_to_result
        return {
            "reached": steps_to_goal is not None,
            "diverged": goal is not None and goal.status is Status.INFEASIBLE,
            # A run that resumes after its goal trains on.
            "steps": steps_to_goal or trainer.global_step,
            "hours": hours,
            "other_hours": other_hours,
            "real_devices": trainer.world_size,
        }


def describe_goal(goal: Goal) -> str:
    """Return the goal and its check interval as text; `goal.max_steps` changes no K."""
    return f"{goal}, check interval {goal.check_interval}"


def settings_texts(settings: Iterable[tuple[str, Any]]) -> list[str]:
    """Return the settings that decide the steps to a goal or their seconds, as KEY = VALUE.

    Args:
        settings: Keys of the configuration, such as "model.init_args" or "data.n", and their
            values; later ones win. Keys outside of `SECTIONS` and `TRAINER_KEYS` are left out, and
            so are the data's arguments of `FREE_DATA`, which change no result.
    """
    values: dict[str, str] = {}
    for key, value in settings:
        if key.partition(".")[0] in SECTIONS or key in TRAINER_KEYS:
            _set_texts(values, ".".join(place_of(key)), value)
    for name in FREE_DATA:
        values.pop(f"data.{name}", None)
    return [f"{key}{EQUALS}{value}" for key, value in sorted(values.items())]


def _set_texts(values: dict[str, str], key: str, value: Any) -> None:
    """Set the values below a key as texts by their keys, without "init_args".

    The key of a class has the name of the class, because a class of a script moves to a module
    before `fit`.
    """
    if isinstance(value, Mapping):
        for name, each in value.items():
            _set_texts(values, ".".join((key, *place_of(str(name)))), each)
        return
    # `--data PATH` is short for data.class_path.
    if key in ("model", "data") or key.endswith(CLASS_PATH):
        values[key.removesuffix(CLASS_PATH)] = str(value).rpartition(".")[2]
        return
    if isinstance(value, list | tuple):
        # A list replaces an earlier one, also a longer one.
        for each in [each for each in values if each.startswith(f"{key}.")]:
            del values[each]
        values[key] = f"list of {len(value)}"
        for i, item in enumerate(value):
            _set_texts(values, f"{key}.{i}", item)
        return
    values[key] = _text_of(value)


def _text_of(value: Any) -> str:
    """Return a plain value as a text, equal for all spellings of a number."""
    if value is None or isinstance(value, bool | int):
        return str(value)
    try:
        return f"{float(value):.12g}"
    except (TypeError, ValueError, OverflowError):
        return str(value)


def _goal_callback(trainer: Trainer) -> GoalErrorCallback | None:
    return next(iter(callbacks_of(trainer, GoalErrorCallback)), None)


def _batch_size_of(trainer: Trainer, batch: Any) -> int:
    """Return the examples of an optimizer step of a run; 0 if they are unknown."""
    size = 0
    if trainer.world_size == 1:
        size = full_batch_size(trainer, batch)
    elif isinstance(trainer.strategy, SharedBatchDDP):
        # Each rank has a part of the batch that the loader declares.
        size = declared_batch_size(trainer)
    return size * trainer.accumulate_grad_batches


def calibrate(outcomes: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Return a table of all runs, then the bias and the coverage of the predictions, as text.

    The bias is the geometric mean of real over predicted values. The coverage is the share of runs
    within the 95 % limits. A run that diverged counts as outside. Another run that missed its goal
    counts as outside if it ran beyond the upper limit; otherwise it does not count.

    Args:
        outcomes: By study: batch_size, devices, reached, diverged (outcomes before 2026-11-30 lack
            it), steps, hours (of steps and validations; None if not every step was timed),
            other_hours (to start, log and save), real_devices, and predicted_steps and
            predicted_hours, each as lower limit, value and upper limit.
    """
    runs = []
    rows = []
    for study, of_study in outcomes.items():
        for run in of_study:
            runs.append(run)
            rows.append(_row(study, run))
    if not runs:
        return "no run of fit with a recommended configuration is stored yet\n"
    on_predicted_devices = [run for run in runs if run["real_devices"] == run["devices"]]
    timed = [run for run in on_predicted_devices if run["hours"] is not None]
    lines = aligned(rows, words=True)
    lines += ["", f"steps: {_summary('steps', runs)}"]
    lines += ["", f"hours: {_summary('hours', timed)}"]
    untimed = sum(run["hours"] is None for run in runs)
    if untimed:
        lines.append(
            f"{untimed} resumed from a checkpoint or ended between two validations; their hours "
            "are unknown"
        )
    others = len(runs) - len(on_predicted_devices)
    if others:
        lines.append(
            f"{others} ran on another number of devices than predicted; their hours do not count"
        )
    # Outcomes that `migrate` converted may lack other_hours: their hours include them.
    older = sum("other_hours" not in run for run in runs)
    if older:
        lines.append(
            f"{older} of the runs are of an earlier version; their hours include the time to "
            "start, log and save"
        )
    return "\n".join(lines) + "\n"


def _row(study: str, run: Mapping[str, Any]) -> dict[str, str]:
    """Return the row of a run as text, by column."""
    devices = str(run["devices"])
    if run["real_devices"] != run["devices"]:
        devices += f", run on {run['real_devices']}"
    row = {"study": study, "B": str(run["batch_size"]), "devices": devices}
    for name in ("steps", "hours"):
        low, value, high = run[f"predicted_{name}"]
        row[f"predicted {name}"] = estimate(value, Interval(low, high))
        row[f"real {name}"] = significant(run[name])
        if run.get("diverged"):
            row[f"real {name}"] = "diverged"
        elif not run["reached"] and run[name] is not None:
            row[f"real {name}"] = f"> {row[f'real {name}']}"
    row["other hours"] = significant(run.get("other_hours"))
    return row


def _summary(name: str, runs: Sequence[Mapping[str, Any]]) -> str:
    """Return bias and coverage of the steps or hours of some runs."""
    parts = []
    log_ratios = []
    inside = outside = unknown = 0
    for run in runs:
        low, value, high = run[f"predicted_{name}"]
        real = run[name]
        if run["reached"]:
            log_ratios.append(math.log(real / value))
        if run["reached"] and low <= real <= high:
            inside += 1
        elif run["reached"] or run.get("diverged") or real > high:
            outside += 1
        else:
            unknown += 1
    if log_ratios:
        bias = number_text(math.exp(float(np.mean(log_ratios))), 3)
        scatter = ""
        if len(log_ratios) > 1:
            scatter = f", scatter {np.std(log_ratios, ddof=1):.0%}"
        count = len(log_ratios)
        parts.append(f"real / predicted {bias}{scatter} (of {count} that met the goal)")
    coverage = "no run counts"
    if inside + outside:
        coverage = f"{inside} of {inside + outside} within the 95 % limits"
    parts.append(coverage)
    if unknown:
        parts.append(f"{unknown} ended before their goal and their upper limit")
    return "; ".join(parts)
